"""Caches the results of shape inference on fake tensors.

A model has a few hundred parameters with only a handful of distinct shapes, and an optimizer applies the same dozen ops
to each of them. The shape, strides, dtype and device of a result depend only on the operator, on the metadata of its
tensor arguments and on its other arguments. So PyTorch infers them once per process. Later results, also those of other
traces, are created from the cached metadata, which takes 25 us instead of 300 us, or instead of 1000 us for an op that
PyTorch has not seen before. This file does not know who records a graph, or why.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fzero._compat import compat

aten = torch.ops.aten


MOST_KNOWN = 1 << 14
"""The largest number of results whose metadata a process caches. When it is reached, the cache is cleared."""
_known: dict[Any, Any] = {}
"""The metadata of a result, or of a tuple of results. The metadata of a view ends with its offset in its argument."""


class FakeResults:
    """Runs ops on the fake tensors of one mode. Each result is a new tensor, whether its metadata was cached or not."""

    def __init__(self) -> None:
        self._mode: compat.FakeTensorMode | None = None  # the mode of the first result
        # Libraries whose results, such as those of convolutions, have other strides than PyTorch's own kernels.
        self._libraries = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _depends_on_metadata(func):
            return func(*args, **kwargs)
        default = torch.get_default_dtype(), compat.default_tensor_device()
        # The default dtype and device decide the results of factory functions such as `zeros`, whose arguments may name
        # neither.
        key = (func, default, self._libraries, _facts(args), _facts(kwargs))
        if self._mode is not None and (known := _known.get(key)) is not None:
            if func.is_view:
                # A view has to share the storage of its argument, because writes and aliases are tracked by storage.
                return compat.new_view(self._mode, args[0], *known)
            if isinstance(known, list):
                return tuple([None if x is None else compat.new_fake(self._mode, *x) for x in known])
            return compat.new_fake(self._mode, *known)
        out = func(*args, **kwargs)
        metadata = _metadata(func, args, out)
        if metadata is not None:
            first = out if isinstance(out, torch.Tensor) else next(x for x in out if x is not None)
            self._mode = first.fake_mode  # type: ignore[union-attr]
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = metadata
        elif isinstance(out, (tuple, list)):
            # A fake kernel may return one tensor twice; PyTorch's own cache then returns two tensors.
            return type(out)(
                x.clone() if isinstance(x, torch.Tensor) and any(x is y for y in out[:i]) else x
                for i, x in enumerate(out)
            )
        return out


def _metadata(func: Any, args: Any, out: Any) -> Any:
    """The metadata from which a result can be created again; None if the result depends on anything else."""
    if isinstance(out, torch.Tensor):
        found = compat.fake_metadata(out)
        if not func.is_view or found is None:
            return found
        base = args[0]
        # `new_view` is given only a shape, strides and an offset, so all else has to be that of the argument.
        same = [(x.dtype, x.device, *_memory([x])) for x in (base, out)]
        if out is base or same[0] != same[1]:
            return None
        return out.shape, out.stride(), out.storage_offset() - base.storage_offset()
    if type(out) is not tuple or func.is_view or not all(x is None or isinstance(x, torch.Tensor) for x in out):
        return None
    made, memory = [None if x is None else compat.fake_metadata(x) for x in out], _memory(out)
    # Results that share memory with each other or with an argument cannot be created independently.
    apart = len({*memory}) == len(memory) > 0 and not {*memory} & {*_memory(args)}
    return made if apart and len(memory) == len(made) - made.count(None) else None


def _memory(values: Any) -> list[int]:
    """The storages of the tensors in a sequence of values."""
    return [compat.memory_of(x) for x in values if isinstance(x, torch.Tensor)]


class Remembering(compat.TorchDispatchMode):
    """A mode for running a function on fake tensors, with cached shape inference, without recording it."""

    def __init__(self) -> None:
        super().__init__()
        self._results = FakeResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._results(func, args, kwargs or {})


@functools.cache
def _depends_on_metadata(func: Any) -> bool:
    """Whether an operator belongs to PyTorch or fzero and returns either new tensors, or views whose offset in their
    argument follows from its metadata. Nothing is known about the operators of other libraries."""
    return func.namespace in ("aten", "fzero") and not func._schema.is_mutable and func not in _SHARING


_SHARING = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.as_strided.default,
}
"""Operators that return the memory or the values of their argument although their schema does not say so, or a view
that may begin at any offset."""


def _facts(value: Any) -> Any:
    """The properties of an argument that determine the metadata of a result. A tensor that carries more than metadata
    is not equal to any other."""
    if isinstance(value, torch.Tensor):
        return compat.fake_metadata(value) or object()
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_facts, value))
    if isinstance(value, dict):
        return tuple((k, _facts(v)) for k, v in value.items())
    return (type(value), value)  # 1, 1.0 and True are equal but have different type promotion
