"""Memoises shape inference for fake tensors.

A model has a few hundred leaves of a handful of shapes, and an optimizer does the same dozen operations with each. The
shape, strides, dtype and device of a result depend on the operator, on those of its arguments and on its other
arguments. So PyTorch is asked once in a process, and later results, in other traces too, are made after the first:
25 us instead of 300, or of 1000 where PyTorch has not met the operation. It must not know who records, or why.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fzero._compat import compat

aten = torch.ops.aten


MOST_KNOWN = 1 << 14
"""Results whose metadata a process remembers; then it begins anew."""
_known: dict[Any, Any] = {}
"""The metadata of a result, or of a tuple of results. A view's ends with where it begins in its argument."""


class FakeResults:
    """Runs operations on the fake tensors of one mode. A result is a new tensor every time, whether it was remembered
    or not."""

    def __init__(self) -> None:
        self._mode: compat.FakeTensorMode | None = None  # of the first result
        # libraries that lay out what they return, such as convolutions, otherwise than PyTorch does
        self._libraries = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _depends_on_metadata(func):
            return func(*args, **kwargs)
        default = torch.get_default_dtype(), compat.default_tensor_device()
        key = (func, default, self._libraries, _facts(args), _facts(kwargs))
        if self._mode is not None and (known := _known.get(key)) is not None:
            if func.is_view:
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
            # a fake kernel may return one tensor twice; what PyTorch remembers of it are two
            return type(out)(
                x.clone() if isinstance(x, torch.Tensor) and any(x is y for y in out[:i]) else x
                for i, x in enumerate(out)
            )
        return out


def _metadata(func: Any, args: Any, out: Any) -> Any:
    """The metadata by which a result is made again; None if something else decides what it is."""
    if isinstance(out, torch.Tensor):
        found = compat.fake_metadata(out)
        if not func.is_view or found is None:
            return found
        base = args[0]
        same = [(x.dtype, x.device, *_memory([x])) for x in (base, out)]
        if out is base or same[0] != same[1]:
            return None
        return out.shape, out.stride(), out.storage_offset() - base.storage_offset()
    if type(out) is not tuple or func.is_view or not all(x is None or isinstance(x, torch.Tensor) for x in out):
        return None
    made, memory = [None if x is None else compat.fake_metadata(x) for x in out], _memory(out)
    apart = len({*memory}) == len(memory) > 0 and not {*memory} & {*_memory(args)}
    return made if apart and len(memory) == len(made) - made.count(None) else None


def _memory(values: Any) -> list[int]:
    """The storages of the tensors among values."""
    return [compat.memory_of(x) for x in values if isinstance(x, torch.Tensor)]


class Remembering(compat.TorchDispatchMode):
    """For running a function on fake tensors without recording it."""

    def __init__(self) -> None:
        super().__init__()
        self._results = FakeResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._results(func, args, kwargs or {})


@functools.cache
def _depends_on_metadata(func: Any) -> bool:
    """Whether an operator is PyTorch's or ours and returns new tensors, or views whose place in their argument follows
    from its metadata; the rule of others may be anything."""
    return func.namespace in ("aten", "fzero") and not func._schema.is_mutable and func not in _SHARING


_SHARING = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.as_strided.default,
}
"""Operators that return their argument's memory, or its values, without saying so, or begin anywhere in it."""


def _facts(value: Any) -> Any:
    """The facts of an argument that decide the metadata of a result. A tensor that says more than its metadata is like
    no other."""
    if isinstance(value, torch.Tensor):
        return compat.fake_metadata(value) or object()
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_facts, value))
    if isinstance(value, dict):
        return tuple((k, _facts(v)) for k, v in value.items())
    return (type(value), value)  # 1, 1.0 and True are equal, and do not promote alike
