"""Describes which elements of a tensor a rank holds, for any combination of shardings: as boxes.

A tensor is first sharded along dims. Sharding along a dim into `size` parts gives each rank one of `size` equal runs of
the dim. With `groups`, the dim consists of that many pieces of equal length, and each part has a run of every piece.
For example, if a matrix combines queries, keys and values (3 groups), each rank has some of all three. A part is a
product of lists of ranges, one list for each dim, so it consists of boxes of the tensor. Laid out in row-major order as
a separate tensor, it has flat shards, as a full tensor does (fzero/sharding/layout.py).

Code that draws, shards, stores, reads or gathers tensors asks only for `Boxes`. The elements that two layouts of a
tensor have in common are those that their boxes have in common.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class DimShard(NamedTuple):
    """A sharding along a dim into `size` equal parts, each with a run of every group."""

    dim: int
    groups: int
    size: int


Range = tuple[int, int]
Run = tuple[int, int, int]
"""A run of elements that two `Boxes` have in common: its start in the first, its start in the second,
and its length."""


def part_shape(shape: Sequence[int], along: Sequence[DimShard]) -> tuple[int, ...]:
    """The shape of each part if a tensor of this shape is sharded along these dims, one after the other.

    Example:
        >>> part_shape((6, 8), [DimShard(1, 2, 2), DimShard(0, 1, 3)])
        (2, 4)
    """
    out = list(shape)
    for dim, _, size in along:
        out[dim] //= size
    return tuple(out)


def uneven(shape: Sequence[int], along: Sequence[DimShard]) -> str | None:
    """Why a tensor of this shape cannot be sharded along these dims; None if it can."""
    left = [*shape]
    for dim, groups, size in along:
        if not 0 <= dim < len(left):
            return f"it has no dim {dim}"
        if left[dim] % (groups * size):
            of = f" of {groups} groups" if groups > 1 else ""
            return f"dim {dim} of {left[dim]} is not a multiple of {groups * size}: {size} shards{of}"
        left[dim] //= size
    return None


@dataclass(frozen=True)
class Boxes:
    """Elements `start` to `stop` of the flattened part with index `place`, of a tensor with shape `shape` that is
    sharded `along` dims.

    Example:
        >>> Boxes((2, 8), (DimShard(1, 2, 2),), 1, 0, 8).take(torch.arange(16).view(2, 8))
        tensor([ 2,  3,  6,  7, 10, 11, 14, 15])
    """

    shape: tuple[int, ...]
    along: tuple[DimShard, ...]
    place: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """For each dim, the ranges of the full tensor that the part contains, in order."""
        out: list[tuple[Range, ...]] = [((0, n),) for n in self.shape]
        place, left = self.place, math.prod(a.size for a in self.along)
        for dim, groups, size in self.along:
            left //= size
            index, place = divmod(place, left)
            run = sum(b - a for a, b in out[dim]) // (groups * size)
            # Group g consists of `size` runs, of which this part has the run `index`. These are
            # positions within the ranges of the dim that earlier axes have left.
            wanted = [((g * size + index) * run, (g * size + index + 1) * run) for g in range(groups)]
            found = (_within(out[dim], a, b) for a, b in wanted)
            out[dim] = _merged([r for ranges in found for r in ranges])
        return tuple(out)

    def within(self, start: int, stop: int) -> Boxes:
        """Elements `start` to `stop` of these elements, clipped to the elements that exist."""
        return replace(self, start=min(self.start + start, self.stop), stop=min(self.start + stop, self.stop))

    def meets(self, other: Boxes) -> bool:
        """Whether the two have an element of the tensor in common."""
        if not self.along and not other.along:
            return max(self.start, other.start) < min(self.stop, other.stop)
        return bool(self.runs(other))

    @property
    def spans(self) -> list[Range]:
        """The ranges of the flattened full tensor that these elements occupy, in their order."""
        return [(there, there + n) for _, there, n in self.runs(whole(self.shape))]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of the full tensor, 1-D. The result is a view if they are contiguous in memory."""
        for dim, ranges in enumerate(self.ranges):
            pieces = [whole.narrow(dim, a, b - a) for a, b in ranges]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return whole.reshape(-1)[self.start : self.stop]

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes a complete part, 1-D, to its place in the full tensor."""
        part, at = part.view(part_shape(self.shape, self.along)), []
        for ranges in self.ranges:
            begins = itertools.accumulate((b - a for a, b in ranges), initial=0)
            at.append([(slice(a, b), slice(i, i + b - a)) for (a, b), i in zip(ranges, begins, strict=False)])
        for pairs in itertools.product(*at):
            whole[tuple(there for there, _ in pairs)] = part[tuple(here for _, here in pairs)]

    def runs(self, other: Boxes) -> list[Run]:
        """The elements that these boxes and other boxes have in common, in the order of these: for each run its start
        here, its start in the other, and its length.

        Example:
            >>> rows, columns = Boxes((4, 4), (), 0, 4, 12), Boxes((4, 4), (DimShard(1, 1, 2),), 1, 0, 8)
            >>> rows.runs(columns)
            [(2, 2, 2), (6, 4, 2)]
        """
        if not self.along and not other.along:
            low, high = max(self.start, other.start), min(self.stop, other.stop)
            return [(low - self.start, low - other.start, high - low)] if low < high else []
        common = [_common(one, two) for one, two in zip(self.ranges, other.ranges, strict=True)]
        if not all(common):
            return []
        starts = torch.zeros(1, 3, dtype=torch.int64)  # columns: start here, start in the other, length
        starts[0, 2] = 1
        shapes = part_shape(self.shape, self.along), part_shape(self.shape, other.along)
        inner, joined = (1, 1), True  # elements per index of the dim; whether they are all one run
        for dim in reversed(range(len(self.shape))):
            if joined:
                starts = torch.tensor(common[dim], dtype=torch.int64) * torch.tensor([*inner, inner[0]])
                joined = len(common[dim]) == 1 and common[dim][0][2] == shapes[0][dim] == shapes[1][dim]
            else:
                steps = [(a + i, b + i, 0) for a, b, n in common[dim] for i in range(n)]
                outer = torch.tensor(steps, dtype=torch.int64) * torch.tensor([*inner, 0])
                # int64[outer runs, inner runs, 3]
                starts = (outer[:, None] + starts[None]).reshape(-1, 3)
            inner = inner[0] * shapes[0][dim], inner[1] * shapes[1][dim]
        here, there, length = starts.unbind(1)
        # Clips the runs to elements `start` to `stop` of either part.
        skip = torch.stack([torch.zeros_like(here), self.start - here, other.start - there]).amax(0)
        stop = torch.stack([length, self.stop - here, other.stop - there]).amin(0)
        kept = skip < stop
        runs = torch.stack([here + skip - self.start, there + skip - other.start, stop - skip], 1)[kept]
        return [(a, b, n) for a, b, n in runs.tolist()]


def claimed(left: Sequence[Range], runs: Sequence[Run]) -> tuple[list[Run], list[Range]]:
    """The portions of the runs that lie in ranges that are not claimed yet, and the ranges that remain unclaimed
    afterwards. Both are in order.

    Example:
        >>> claimed([(0, 4), (6, 8)], [(3, 10, 4)])
        ([(3, 10, 1), (6, 13, 1)], [(0, 3), (7, 8)])
    """
    found: list[Run] = []
    rest: list[Range] = []
    i = 0
    for low, high in left:
        while i < len(runs) and runs[i][0] < high:
            here, there, numel = runs[i]
            begin, end = max(low, here), min(high, here + numel)
            if begin < end:
                found.append((begin, there + begin - here, end - begin))
                if low < begin:
                    rest.append((low, begin))
                low = end
            if here + numel > high:  # the run continues in the next range
                break
            i += 1
        if low < high:
            rest.append((low, high))
    return found, rest


def parts_of(shape: Sequence[int], along: tuple[DimShard, ...]) -> list[Boxes]:
    """The parts into which sharding along these dims divides a tensor of this shape, each of them complete."""
    stop = math.prod(part_shape(shape, along))
    return [Boxes(tuple(shape), along, place, 0, stop) for place in range(math.prod(a.size for a in along))]


def whole(shape: Sequence[int], start: int = 0, stop: int | None = None) -> Boxes:
    """A range of the flattened elements of a tensor that is not sharded along any dim; by default all elements."""
    return Boxes(tuple(shape), (), 0, start, math.prod(shape) if stop is None else stop)


def _within(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Positions `start` to `stop` in the concatenation of ranges."""
    out, at = [], 0
    for a, b in ranges:
        low, high = max(start - at, 0), min(stop - at, b - a)
        if low < high:
            out.append((a + low, a + high))
        at += b - a
    return out


def _merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    out: list[Range] = []
    for a, b in ranges:
        if out and out[-1][1] == a:
            out[-1] = out[-1][0], b
        else:
            out.append((a, b))
    return tuple(out) or ((0, 0),)


def _common(one: Sequence[Range], other: Sequence[Range]) -> list[tuple[int, int, int]]:
    """The ranges that two lists of ranges of a dim have in common: the start of each in either list, and its length.
    Ranges that are adjacent in both lists are merged."""
    out: list[tuple[int, int, int]] = []
    here = 0
    for a, b in one:
        there = 0
        for c, d in other:
            low, high = max(a, c), min(b, d)
            if low < high:
                i, j = here + low - a, there + low - c
                if out and (out[-1][0] + out[-1][2], out[-1][1] + out[-1][2]) == (i, j):
                    out[-1] = (*out[-1][:2], out[-1][2] + high - low)
                else:
                    out.append((i, j, high - low))
            there += d - c
        here += b - a
    return out
