"""Runs the forward of a module in its training or evaluation mode, on given tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero import tree
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.modules.batch_dims import ROWS
from fzero.modules.buffers import overwritten
from fzero.modules.layers import LayerCall, as_blocks, check_bound, layers_of
from fzero.modules.loss_weighting import Counting
from fzero.modules.meta_module import holding, settled, slots_of
from fzero.modules.module_preparation import kept_in_fp32
from fzero.modules.rng_mode import Dims, Draws, NeedsKey, Rehearsal, may_draw
from fzero.modules.transformers_code import adapted
from fzero.trace.guards import raise_conditions
from fzero.trace.guards.function_caches import emptied
from fzero.trace.guards.rejections import lines_through
from fzero.trace.guards.write_guard import Untouched


class Given(NamedTuple):
    """The arguments of a call: a module's tensors by name, the key, the number of samples in the batch, and the
    forward's arguments.
    """

    tensors: Mapping[str, torch.Tensor]
    key: torch.Tensor | None
    rows: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Mode:
    """A meta module in training or evaluation mode, with its layers as blocks."""

    def __init__(self, meta_module: nn.Module, blocks: Sequence[str], mutable: Sequence[str]):
        self._meta_module, self._slots = meta_module, slots_of(meta_module)
        self.overwritten = overwritten(meta_module, self._slots, mutable)
        self._layers = layers_of(meta_module, blocks, self.overwritten, kept_in_fp32(meta_module).get("fp16"))
        self._draws = may_draw(meta_module)
        # by the shapes of the arguments, and the number of samples
        self._rehearsed: dict[Any, tuple[Dims, list[Dims]]] = {}

    def __call__(self, given: Given, counting: Counting | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
        """Returns the forward's outputs, and the new values of buffers."""
        dims = self._dims(given) if self._draws and given.key is not None else ((), [])
        try:
            return self._settled(given, dims, counting)
        except NeedsKey:
            if self._draws or given.key is None:
                text = f"{type(self._meta_module).__name__} draws random numbers, but no key is given"
                fix = "model.apply(params, ..., key=fz.random.key(0)); an evaluation has none: dropout is off there"
                raise TraceError("functionalize", text, fix=fix) from None
        self._draws = True
        return self._settled(given, self._dims(given), counting)

    def outline(self, given: Given) -> Any:
        """Returns the forward's outputs for fake tensors. Random numbers have no values."""
        with raise_conditions.collected("functionalize"):
            run = lambda: self._run(given, LayerCall(Rehearsal(None), []))  # noqa: E731
            return settled(self._meta_module, "", run)[0]

    def _settled(self, given: Given, dims: tuple[Dims, list[Dims]], counting: Counting | None) -> Any:
        def run() -> Any:
            if counting is not None:
                counting.clear()
            with counting or nullcontext():
                return self._run(given, LayerCall(Draws(given.key if self._draws else None, dims[0]), list(dims[1])))

        return settled(self._meta_module, "", run)

    def _run(self, given: Given, call: LayerCall) -> tuple[Any, dict[str, torch.Tensor]]:
        changes = self.overwritten
        tensors = {name: x.clone() if name in changes else x for name, x in given.tensors.items()}
        with ExitStack() as stack:
            # otherwise the trace detects writes
            if not any(isinstance(x, compat.FakeTensor) for x in tensors.values()):
                stack.enter_context(Untouched("functionalize", params=dict(given.tensors)))
            stack.enter_context(as_blocks(self._layers, call))
            stack.enter_context(compat.without_checkpoints())
            stack.enter_context(adapted(self._meta_module))
            with holding(self._slots, tensors):
                out = self._meta_module(*given.args, **given.kwargs)
                check_bound(self._slots, tensors, changes, self._meta_module)
                new = {s.name: s.get() for s in self._slots if s.name in changes}
        return out, new

    def _dims(self, given: Given) -> tuple[Dims, list[Dims]]:
        """Returns the draws of the module, and of each of its layers.

        Raises:
            TraceError: if the module does not run with another number of samples, or if nothing determines which
                elements of a draw belong to which sample.
        """
        flat, spec = tree.flatten((given.args, given.kwargs))
        key = *kind_of((given.args, given.kwargs)), given.rows
        if key not in self._rehearsed:
            with (
                emptied(),
                compat.no_modes(),
                compat.no_function_modes(),
                compat.FakeTensorMode(),
                torch.no_grad(),
            ):
                tensors = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in given.tensors.items()}
                found, layers = Rehearsal(given.rows), list[Dims]()

                def run(leaves: Sequence[Any]) -> None:
                    args, kwargs = tree.unflatten(spec, leaves)
                    self._run(Given(tensors, None, None, args, kwargs), LayerCall(found, layers))

                def rehearsed() -> tuple[Dims, list[Dims]]:
                    nonlocal found, layers
                    found, layers = Rehearsal(given.rows), []
                    run([_rehearsing(x, given.rows) for x in flat])
                    return tuple(found.found), layers

                try:
                    with raise_conditions.collected("functionalize"):
                        self._rehearsed[key] = settled(self._meta_module, "", rehearsed)
                except TraceError:
                    raise
                except Exception as error:
                    known, asks = (tuple(found.found), layers), isinstance(error, compat.DATA_DEPENDENT)
                    try:
                        found, layers = Rehearsal(given.rows), []
                        if not asks:
                            run([_rehearsing(x, None) for x in flat])
                    # It does not run on the batch either: the trace, which draws as much before that point, reports
                    # the error.
                    except Exception:
                        return known
                    name, said = type(self._meta_module).__name__, next(iter(str(error).splitlines()), "")
                    text = f"the batch dimension of a random tensor is not known: {name} does not run on {ROWS} rows"
                    fix = "take sizes from the arguments (x.shape[0]); or turn dropout off"
                    if asks:
                        text = f"{name} reads a value while it is traced"
                        said = f"needs the value of a tensor ({said})"
                        fix = "torch.where in place of Python's if; distributions: validate_args=False"
                    raise TraceError("functionalize", text, [*lines_through(error), said], fix) from error
        return self._rehearsed[key]


def _rehearsing(x: Any, rows: int | None) -> Any:
    """Returns an argument of a dry run."""
    if not isinstance(x, torch.Tensor):
        return x
    shape = (ROWS, *x.shape[1:]) if rows is not None and x.dim() and x.shape[0] == rows else x.shape
    return torch.empty(shape, dtype=x.dtype)


def kind_of(values: Any) -> tuple[Any, ...]:
    """Returns the structure of a tree with the shapes and dtypes of its tensors."""
    flat, spec = tree.flatten(values)
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in flat)
    return spec, shapes
