"""Computes the cross entropies of a model in chunks of samples, so that a step never holds all logits.

A model computes its logits and their cross entropy in its own forward. Between the two it may scale the logits, cap
them and shift them, and each model does that in its own way. So the forward runs as it is written, while each
operation on the outputs of a linear layer is followed; the cross entropy is then computed from the layer's inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.errors import FzeroTypeError
from fzero.loss import chunked_cross_entropy
from fzero.modules.captured_tensors import version_of
from fzero.modules.layers import in_block
from fzero.modules.loss_weighting import ARGUMENTS


class _Logits(NamedTuple):
    """How a tensor was computed from the input of a linear layer.

    The tensor is `outer * f(inner * F.linear(*linear))`, possibly in another floating-point dtype, and with its rows in
    another shape but in the same order. `f` is tanh if `capped`, otherwise the identity.
    """

    linear: tuple[torch.Tensor, ...]  # hidden, weight, and the bias if there is one
    versions: tuple[int, ...]  # their versions when the layer ran
    inner: float = 1.0
    capped: bool = False
    outer: float = 1.0


class Chunked(TorchFunctionMode):
    """Replaces each cross entropy of a linear layer's outputs by `fz.chunked_cross_entropy` of the layer's inputs.

    The operations on the outputs of each linear layer are followed symbolically: products with numbers and quotients by
    numbers, tanh, casts, reshapes and slices of rows. The logits are still computed in the forward, so whatever else
    reads them is right, but a compiled step drops them if nothing does.

    Enter it before `Counting`, which turns a mean into a sum and a count.

    Raises:
        FzeroTypeError: a cross entropy whose logits went through any other operation, naming the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replaced = False
        # The followed tensors by id: the tensor itself, so that no other gets its id; its version, which increases when
        # the tensor or a view of it is written to; and how it was computed, or why that is not known.
        self._known: dict[int, tuple[torch.Tensor, int, _Logits | str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return self._chunked(dict(zip(ARGUMENTS, args, strict=False)) | kwargs)
        if in_block():
            return func(*args, **kwargs)
        given = [(x, version_of(x), found) for x in tree.tensors((args, kwargs)) if (found := self._of(x)) is not None]
        out = func(*args, **kwargs)
        if func is F.linear:
            self._note([out], _of_linear(**dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs))
        elif given:
            made = [x for x in tree.tensors(out) if x.is_floating_point()]
            lost = _name(func) + (f", which makes {', '.join(map(tree.describe, made))}" if made else "")
            lost = next((found for _, _, found in given if isinstance(found, str)), lost)
            # written to in place, for example by x[i] = y
            self._note([x for x, version, _ in given if version_of(x) != version], lost)
            before = {id(x): found for x, _, found in given}
            self._note(made, _through(_name(func), args, kwargs, out, before) or lost)
        return out

    def __exit__(self, *error: Any) -> Any:
        self._known.clear()
        return super().__exit__(*error)

    def check(self, owner: str) -> None:
        """Raises an error if no cross entropy was computed in chunks.

        Raises:
            FzeroTypeError: if the loss is computed in another way.
        """
        if not self._replaced:
            what = f"the loss of {owner} is not computed by torch.nn.functional.cross_entropy"
            raise FzeroTypeError("functionalize", f"{_WHAT}: {what}", fix=_FIX)

    def _of(self, x: Any) -> _Logits | str | None:
        """Returns how a tensor was computed; a text if that is not known, None if it does not come from a linear
        layer.
        """
        if (known := self._known.get(id(x))) is None:
            return None
        if x.is_inference():
            return "torch.inference_mode, which hides whether they are written to: use torch.no_grad"
        return known[2] if known[1] == version_of(x) else "an operation in place on a view of them"

    def _note(self, tensors: Iterable[torch.Tensor], how: _Logits | str | None) -> None:
        if how is None:
            return
        for x in tensors:
            self._known[id(x)] = x, version_of(x), how

    def _chunked(self, given: dict[str, Any]) -> torch.Tensor:
        """Returns the cross entropy with these arguments, computed in chunks.

        Raises:
            FzeroTypeError: listing why it cannot be computed in chunks.
        """
        logits, target, reduction = given["input"], given["target"], given.get("reduction", "mean")
        found = self._of(logits)
        problems = [f"{x}=" for x in ("weight", "size_average", "reduce") if given.get(x) is not None]
        if reduction not in ("mean", "sum"):
            problems.append(f"reduction={reduction!r}")
        if logits.dim() != 2 or target.dtype != torch.int64 or target.shape != logits.shape[:1]:
            shapes = f"logits {tree.describe(logits)} and targets {tree.describe(target)}"
            problems.append(f"{shapes}, not one row of logits for each target, an int64")
        if in_block() or found is None:
            problems.append("the logits are not computed from the output of a linear layer outside of blocks")
        elif isinstance(found, str):
            problems.append(f"between the linear layer and the loss, the logits go through {found}")
        elif found.capped and found.outer <= 0:
            problems.append(f"the logits are capped by tanh and then multiplied by {found.outer:g}")
        elif found.versions != tuple(map(version_of, found.linear)):
            problems.append("the input, weight or bias of the linear layer is changed in place after the layer")
        elif torch.is_grad_enabled() and logits.requires_grad != any(x.requires_grad for x in found.linear):
            problems.append("the logits are computed without a gradient")
        if problems:
            what = f"{_WHAT}: this cross entropy cannot be computed from the input of a linear layer"
            raise FzeroTypeError("functionalize", what, problems, _FIX)
        assert isinstance(found, _Logits)
        hidden, weight, *bias = found.linear
        softcap = found.outer if found.capped else None
        scale = found.inner * found.outer
        if abs(scale - 1) > 1e-12:  # (1 / softcap) * softcap may be rounded
            hidden, bias = hidden * scale, [x * scale for x in bias]
        loss = chunked_cross_entropy(
            hidden,
            weight,
            target.reshape(hidden.shape[:-1]),
            bias=bias[0] if bias else None,
            ignore_index=given.get("ignore_index", -100),
            label_smoothing=given.get("label_smoothing", 0.0),
            softcap=softcap,
            reduction=reduction,
        )
        self._replaced = True
        return loss.to(torch.promote_types(logits.dtype, torch.float32))


_WHAT = 'loss="chunked"'
_FIX = (
    f"leave out {_WHAT}, which holds all logits. Between a linear layer and the mean or sum of its cross entropy there "
    "may be products with numbers, a softcap (tanh), casts, reshapes and slices of rows"
)
_PRODUCTS = {"mul", "multiply", "rmul", "imul"}
_QUOTIENTS = {"div", "divide", "true_divide", "truediv", "itruediv"}
_CASTS = {"float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}


def _name(func: Any) -> str:
    """Returns the name of a PyTorch function: "mul" for `x * y`, `x.mul(y)` and `x.mul_(y)`; for a property, the
    property's name.
    """
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name.strip("_")


def _of_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> _Logits | None:
    if input.dim() < 2 or weight.dim() != 2:
        return None
    linear = (input, weight) if bias is None else (input, weight, bias)
    return _Logits(linear, tuple(map(version_of, linear)))


def _through(name: str, args: Any, kwargs: Any, out: Any, before: Mapping[int, _Logits | str | None]) -> _Logits | None:
    """Returns how the result of an operation was computed, given how its arguments were; None if that is not known."""
    at = next((i for i, x in enumerate(args) if isinstance(before.get(id(x)), _Logits)), None)
    if at is None or not isinstance(out, torch.Tensor) or "out" in kwargs:
        return None
    x, others, found = args[at], [*args[:at], *args[at + 1 :]], before[id(args[at])]
    assert isinstance(found, _Logits)
    if name in _PRODUCTS | _QUOTIENTS and not kwargs and len(others) == 1 and type(others[0]) in (int, float):
        if name in _PRODUCTS or (at == 0 and others[0]):
            factor = others[0] if name in _PRODUCTS else 1 / others[0]
            side = "outer" if found.capped else "inner"
            return found._replace(**{side: getattr(found, side) * factor})
    elif name == "tanh" and not found.capped:
        return found._replace(capped=True)
    elif at == 0 and (name in _CASTS or (name in _RESHAPES and out.dtype == x.dtype)):
        # All of these keep the order of the elements: if the length of the last dimension stays, so do the rows.
        return found if out.shape[-1:] == x.shape[-1:] else None
    elif at == 0 and name == "getitem" and (hidden := _rows_of(found.linear[0], x, others[0], out)) is not None:
        return found._replace(linear=(hidden, *found.linear[1:]))  # a view has the version of its base
    return None


def _rows_of(hidden: torch.Tensor, logits: torch.Tensor, index: Any, out: torch.Tensor) -> torch.Tensor | None:
    """Returns the rows of `hidden` that correspond to a slice of the logits; None if the index does more than slice
    rows.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if hidden.shape[:-1] != logits.shape[:-1] or not all(isinstance(x, slice) or x is ... for x in parts):
        return None
    rows = hidden[index]
    # A slice that keeps the length of the last dimension keeps all of it, because steps are positive.
    same = rows.shape == (*out.shape[:-1], hidden.shape[-1]) and out.shape[-1] == logits.shape[-1]
    return rows if same else None
