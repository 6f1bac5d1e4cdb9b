"""Infers batch dimensions: which elements of a dimension belong to which sample, followed through a dry run.

In the dry run ("rehearsal") the batch has `ROWS` samples, and a dimension of `k * ROWS` elements holds every sample k
times. Its elements are laid out as `(outer, rows, inner)`, where the middle one is the batch: `x.flatten(0, 1)` of
(rows, time) is (1, rows, time), and `torch.cat([x, x])` is (2, rows, 1). The operations that make such a dimension
determine its layout; an operation that keeps its size keeps its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fzero import tree

aten = torch.ops.aten
ROWS = 10007
"""The number of samples of a batch in the dry run: a prime number."""

Outer = dict[int, "int | None"]
"""The outer size of the dimensions of a tensor; None if the elements of a dimension mix samples."""


def has_rows(size: int) -> bool:
    """Returns whether a dimension of this size contains the batch."""
    return size > 0 and size % ROWS == 0


def at_hand(size: int, rows: int) -> int:
    """Converts a size of the dry run to the size for a batch of `rows` samples."""
    times = 1
    while has_rows(size):
        size, times = size // ROWS, times * rows
    return size * times


def arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of an operation by name."""
    # the default of a dtype is a number in a schema, so it is left out
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value() and a.name != "dtype"}
    return given | {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


class Places:
    """The order of samples in the tensors of a dry run."""

    def __init__(self) -> None:
        self._outer = WeakTensorKeyDictionary()  # for tensors that contain samples several times, or mix them

    def outer(self, size: int, reads: Iterable[torch.Tensor]) -> int | None:
        """Returns the outer size of a dimension that is computed from these tensors; None if nothing determines it,
        or the tensors disagree.
        """
        known = self._known(size, reads) or ({1} if size == ROWS else {None})
        return known.pop() if len(known) == 1 else None

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Records the order of samples in the results of an operation."""
        made = [x for x in tree.tensors(out) if any(map(has_rows, x.shape))]
        reads = [x for x in tree.tensors((args, tuple(kwargs.values()))) if any(map(has_rows, x.shape))]
        several = any(n > ROWS and has_rows(n) for x in (*made, *reads) for n in x.shape)
        if not made or not (several or any(x in self._outer for x in reads)):
            return
        rule = _RULES.get(func.overloadpacket)
        told = rule(self, arguments(func, args, kwargs), made) if rule else [{}] * len(made)
        for x, places in zip(made, told, strict=True):
            if any(x is y for y in reads) and x in self._outer:
                continue  # it was written in place
            found = dict(places)
            for dim in (d for d, n in enumerate(x.shape) if has_rows(n) and d not in found):
                if known := self._known(x.shape[dim], reads):
                    found[dim] = known.pop() if len(known) == 1 else None
            if found:
                self._outer[x] = found

    def of(self, x: torch.Tensor, dim: int) -> int | None:
        """Returns the outer size of a dimension."""
        return self._noted(x).get(dim, 1 if x.shape[dim] == ROWS else None)

    def _known(self, size: int, reads: Iterable[torch.Tensor]) -> set[int | None]:
        """Returns the outer sizes that are recorded in these tensors for a dimension of this size."""
        return {outer for x in reads for d, outer in self._noted(x).items() if x.shape[d] == size}

    def _noted(self, x: torch.Tensor) -> Outer:
        return self._outer.get(x, None) or {}


# --- rules for operations that change the size of such a dimension: the outer sizes in each result ---


def _viewed(places: Places, given: dict[str, Any], made: Sequence[torch.Tensor]) -> list[Outer]:
    """A view has the same elements in the same order, so the distance from sample to sample, in elements, is
    unchanged.
    """
    x, out = given["self"], made[0]
    strides = [
        x.shape[d] // (ROWS * outer) * math.prod(x.shape[d + 1 :])
        for d, n in enumerate(x.shape)
        if has_rows(n) and (outer := places.of(x, d))
    ]
    found: Outer = {}
    for d, n in enumerate(out.shape):
        if has_rows(n):
            behind = math.prod(out.shape[d + 1 :])
            inner = [s // behind for s in strides if s % behind == 0 and n % (ROWS * max(s // behind, 1)) == 0]
            found[d] = n // (ROWS * inner[0]) if inner and inner[0] else None
    return [found]


def _joined(places: Places, given: dict[str, Any], made: Sequence[torch.Tensor]) -> list[Outer]:
    dim = given["dim"] % made[0].dim()
    if not has_rows(made[0].shape[dim]):
        return [{}]
    parts = [x for x in given["tensors"] if x.dim() > dim]
    outer = [places.of(x, dim) if has_rows(x.shape[dim]) else None for x in parts]
    inner = {x.shape[dim] // (ROWS * a) if a else None for x, a in zip(parts, outer, strict=True)}
    return [{dim: sum(filter(None, outer)) if len(inner) == 1 and None not in inner else None}]


def _repeated(places: Places, given: dict[str, Any], made: Sequence[torch.Tensor]) -> list[Outer]:
    x, repeats = given["self"], given["repeats"]
    first, found = len(repeats) - x.dim(), Outer()
    for d, (n, times) in enumerate(zip(made[0].shape, repeats, strict=True)):
        if d >= first and has_rows(x.shape[d - first]):
            outer = places.of(x, d - first)
            found[d] = outer and outer * times
        elif has_rows(n):
            # a value that is the same for all samples, repeated once per sample
            found[d] = 1 if times == ROWS else None
    return [found]


def _sliced(places: Places, given: dict[str, Any], made: Sequence[torch.Tensor]) -> list[Outer]:
    x, dim = given["self"], given["dim"] % made[0].dim()
    start = given["start"] or 0
    start = max(start + x.shape[dim], 0) if start < 0 else start
    return [_part(places, x, dim, start, made[0].shape[dim], given["step"])]


def _split(places: Places, given: dict[str, Any], made: Sequence[torch.Tensor]) -> list[Outer]:
    found, start, dim = [], 0, given["dim"] % made[0].dim()
    for out in made:
        found.append(_part(places, given["self"], dim, start, out.shape[dim], 1))
        start += out.shape[dim]
    return found


def _part(places: Places, x: torch.Tensor, dim: int, start: int, size: int, step: int) -> Outer:
    if size == x.shape[dim] or not (has_rows(size) and has_rows(x.shape[dim])):
        return {}
    if (outer := places.of(x, dim)) is None:
        return {dim: None}
    inner = x.shape[dim] // (ROWS * outer)
    if step == 1 and start % (ROWS * inner) == 0 and size % (ROWS * inner) == 0:
        return {dim: size // (ROWS * inner)}
    return {dim: 1 if outer == 1 and step == inner and size == ROWS else None}


_RULES: dict[Any, Any] = {
    **dict.fromkeys([aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.view_copy], _viewed),
    aten.cat: _joined,
    aten.repeat: _repeated,
    aten.slice: _sliced,
    **dict.fromkeys([aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes], _split),
}
