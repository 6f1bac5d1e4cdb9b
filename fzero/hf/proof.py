"""Proves by numbers that padding changes nothing: what a Trainer computes of a few rows, as they are and padded.

In training that is the loss and each parameter's gradient: below a head of zeros the loss alone says nothing. It is an
evaluation of the state as it rests, which changes nothing. A state that is whole and in the module's own dtypes is
given to the function itself; any other to an eager program, with the step's transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.errors import BusyError, DivergenceError, TraceError
from fzero.hf import traced
from fzero.hf.watched import Watched
from fzero.layout import leaf_of
from fzero.mesh import Mesh
from fzero.modules.functionalize import Functional
from fzero.runtime.compile import compile
from fzero.step import EvalStep, compose, eval_step
from fzero.transforms.precision import MixedPrecision

EXACT = 2e-5
"""The largest difference of numbers, relative to themselves, where all is computed in 32 bits. Of models that padding
does not change losses and gradients were less than 1e-6 apart; of ConvBERT, fresh, three quarters less than 1.4e-4."""
ROUNDED = 5e-2
"""As `EXACT`, where something is computed in 16 bits."""

Tensors = dict[str, torch.Tensor]


def telling(part: Tensors, fills: Mapping[str, int], labels: Mapping[str, int], trim: bool) -> Tensors:
    """The two rows of a batch that show most of padding: the longest, and the shortest that is another.

    Args:
        part: of which rows without a label that counts are the last choice.
        fills: what leaves are padded with.
        labels: what labels are ignored.
        trim: whether to leave out padding that both have.
    """
    ends = {n: _ends(part[n], fill) for n, fill in {**fills, **labels}.items()}
    rows = len(next(iter(part.values())))
    counts = [any(ends[n][i] for n in labels) for i in range(rows)]
    extent = [sum(ends[n][i] for n in fills) for i in range(rows)]
    first = max(range(rows), key=lambda i: (counts[i], extent[i]))
    others = [i for i in range(rows) if any(not x[i].equal(x[first]) for x in part.values())]
    chosen = [min(others, key=lambda i: (not counts[i], extent[i])), first] if others else [first]
    found = {n: x[chosen] for n, x in part.items()}
    if trim:  # leaves of one length stay so
        longest: dict[int, int] = {}
        for n in fills:
            longest[part[n].shape[1]] = max(1, longest.get(part[n].shape[1], 1), *(ends[n][i] for i in chosen))
        found |= {n: found[n][:, : longest[found[n].shape[1]]] for n in fills}
    return found


def _ends(x: torch.Tensor, fill: int) -> list[int]:
    """For each row the place behind the last number that is another than `fill`."""
    x = x.flatten(1) if x.dim() > 1 else x[:, None]
    return (x.ne(fill) * torch.arange(1, x.shape[1] + 1, device=x.device)).amax(1).tolist()


class Training:
    """Compares loss and gradients of rows as they are with those of the rows padded.

    The module runs as in training, without dropout; one that draws otherwise runs as in evaluation.

    Args:
        held: the trainer.
        transforms: those of the step.
        reads: whether the loss depends on the number of items in a step.
    """

    def __init__(
        self,
        held: Watched,
        model: Functional,
        constants: traced.Constants,
        transforms: Sequence[Any],
        mesh: Mesh,
        reads: bool,
    ):
        self._held, self._model, self._constants = held, model, constants
        self._mesh, self._reads = mesh, reads
        self._transforms = transforms
        self._run: Callable[..., Any] | None = None
        self._modes = [True, False]  # of training, that are left to try

    def __call__(self, params: Any, rows: Tensors, padded: Tensors) -> str | None:
        """The difference, as text. None: there is none but by rounding; "": the rows do not tell, without a gradient.

        Args:
            params: those of the state. They stay as they are.

        Cost: two forwards and backwards of each.
        """
        try:
            alone = self._numbers(params, rows, rows, 0.0)  # what padding makes of NaN times 0 is NaN
            both = self._numbers(params, rows, padded, -1.0)
        except (DivergenceError, BusyError):
            raise
        except TraceError as error:
            if len(self._modes) == 1:
                return first_line(error)
            self._modes.pop(0)  # it draws in training
            self._run = None
            return self(params, rows, padded)
        except Exception as error:  # whatever it is, padding is not proven
            return first_line(error)
        return differing(both[:4], alone[4:], both[4:], self._tolerance)

    def _numbers(self, params: Any, one: Tensors, two: Tensors, by: float) -> torch.Tensor:
        device = next(iter(one.values())).device
        batch: dict[str, Any] = {
            "one": {"inputs": one},
            "two": {"inputs": two},
            "by": torch.tensor([1.0, by], device=device),
        }
        if self._reads:
            for part in (batch["one"], batch["two"]):
                part["num_items"] = torch.full(next(iter(part["inputs"].values())).shape[:1], 16, device=device)
        if self._run is None:
            step = eval_step(traced.differentiated(self._held, self._model, self._constants, train=self._modes[0]))
            self._run, self._tolerance = runner(step, params, self._model, self._transforms, self._mesh)
        return self._run(params, batch).cpu()


def runner(
    step: EvalStep, params: Any, model: Functional, transforms: Sequence[Any], mesh: Mesh
) -> tuple[Callable[..., Any], float]:
    """A function that runs an evaluation on parameters as they rest, as exactly as they allow; and how far numbers may
    be apart then."""
    leaves, own = tree.leaves(params), tree.leaves(model.params)
    layouts = [found[0].layout for x in leaves if (found := leaf_of(x)) is not None]
    as_own = [x.dtype for x in leaves] == [x.dtype for x in own] and all(x.tier == "device" for x in layouts)
    transforms = [t for t in transforms if not (as_own and isinstance(t, MixedPrecision))]
    rounds = any(x.is_floating_point() and x.itemsize < 4 for x in leaves)
    rounds = rounds or any(isinstance(t, MixedPrecision) for t in transforms)
    rounds = rounds or torch.get_float32_matmul_precision() != "highest"
    tolerance = ROUNDED if rounds else EXACT
    if as_own and not any(x.axes for x in layouts):
        return step, tolerance
    return compile(compose(*transforms)(step) if transforms else step, mesh, backend="eager"), tolerance


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def outputs_apart(one: Any, two: Any, tolerance: float) -> str | None:
    """The difference between the outputs of an evaluation and others; as of `Training`."""
    for x, y in zip(tree.leaves(one), tree.leaves(two), strict=True):
        if x.shape != y.shape:
            return f"outputs of {tree.describe(y)}, and of {tree.describe(x)} as they are"
        if x.is_floating_point() and not x.isfinite().all():
            return ""
        most = (x.double() - y.double()).abs().max().item() if x.numel() else 0.0
        if not most <= tolerance * x.double().abs().max().item():
            return f"outputs that are {most:.2g} apart"
    return None


def differing(found: torch.Tensor, norms: torch.Tensor, apart: torch.Tensor, tolerance: float) -> str | None:
    """The difference; as of `Training`.

    Args:
        found: the losses as they are and padded, and what they are means over.
        norms: of the gradient as they are, for each parameter.
        apart: likewise of the difference of both gradients.
    """
    loss, other, count, others = found.tolist()
    if not math.isfinite(loss):
        return ""
    if not abs(other - loss) <= tolerance * abs(loss):
        return f"a loss of {other:.6g}, and of {loss:.6g} as they are"
    if count != others:
        return f"a mean over {others:g} targets, and over {count:g} as they are"
    if not norms.isfinite().all() or not norms.any():
        return ""
    if not apart.isfinite().all():
        return "a gradient that is not finite, and a finite one as they are"
    each = (apart / norms)[norms > 0].quantile(0.75).item()  # of some the gradient is 0 but for rounding
    far = max(apart.norm().item() / norms.norm().item(), each)
    return None if far <= tolerance else f"a gradient that is {far:.2g} of itself apart, and the same loss"
