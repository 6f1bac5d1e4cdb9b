"""Says which elements of a leaf a rank holds, however it is cut: the boxes of it.

A leaf is cut along dims first. A cut along a dim into `size` parts gives each rank one of as many equal runs of it;
with `groups` the dim is that many pieces of equal length, and a part has a run of each. For example, of a matrix for
queries, keys and values (3 groups) each rank has some of all three. A part is a product of ranges, one list of them for
each dim, so it is boxes of the leaf; laid out row-major as a tensor of its own it has flat shards, as a whole leaf has
(fzero/sharding/layout.py).

Who draws, cuts, stores, reads or gathers leaves asks for `Boxes` and for nothing else: two layouts of a leaf have in
common what their boxes have.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class Dim(NamedTuple):
    """The cut of a leaf by a mesh axis, other than flat: along which dim, and in how many groups."""

    dim: int
    groups: int = 1


class Along(NamedTuple):
    """A cut along a dim into `size` equal parts, each with a run of every group."""

    dim: int
    groups: int
    size: int


Range = tuple[int, int]
Run = tuple[int, int, int]
"""Elements that two `Boxes` have in common: where they begin in the one, where in the other, and how many."""


def part_shape(shape: Sequence[int], along: Sequence[Along]) -> tuple[int, ...]:
    """The shape of each part that these cuts, one after the other, make of a leaf of this shape.

    Example:
        >>> part_shape((6, 8), [Along(1, 2, 2), Along(0, 1, 3)])
        (2, 4)
    """
    out = list(shape)
    for dim, _, size in along:
        out[dim] //= size
    return tuple(out)


def uneven(shape: Sequence[int], along: Sequence[Along]) -> str | None:
    """Why a leaf of this shape cannot be cut so, if it cannot."""
    left = [*shape]
    for dim, groups, size in along:
        if not 0 <= dim < len(left):
            return f"it has no dim {dim}"
        if left[dim] % (groups * size):
            of = f" of {groups} groups" if groups > 1 else ""
            return f"dim {dim} of {left[dim]} is not a multiple of {groups * size}: {size} parts{of}"
        left[dim] //= size
    return None


@dataclass(frozen=True)
class Boxes:
    """Elements `start` to `stop` of the flattened part number `place` of a leaf of this shape, cut `along` dims.

    Example:
        >>> Boxes((2, 8), (Along(1, 2, 2),), 1, 0, 8).take(torch.arange(16).view(2, 8))
        tensor([ 2,  3,  6,  7, 10, 11, 14, 15])
    """

    shape: tuple[int, ...]
    along: tuple[Along, ...]
    place: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """The ranges of each dim that the part has, in its order."""
        out: list[tuple[Range, ...]] = [((0, n),) for n in self.shape]
        place, left = self.place, math.prod(a.size for a in self.along)
        for dim, groups, size in self.along:
            left //= size
            index, place = divmod(place, left)
            run = sum(b - a for a, b in out[dim]) // (groups * size)
            wanted = [((g * size + index) * run, (g * size + index + 1) * run) for g in range(groups)]
            found = (_within(out[dim], a, b) for a, b in wanted)
            out[dim] = _merged([r for ranges in found for r in ranges])
        return tuple(out)

    def within(self, start: int, stop: int) -> Boxes:
        """Elements `start` to `stop` of these, as far as there are so many."""
        return replace(self, start=min(self.start + start, self.stop), stop=min(self.start + stop, self.stop))

    def meets(self, other: Boxes) -> bool:
        """Whether there is an element of the leaf among those of both."""
        if not self.along and not other.along:
            return max(self.start, other.start) < min(self.stop, other.stop)
        return bool(self.runs(other))

    @property
    def spans(self) -> list[Range]:
        """The ranges of the flattened whole leaf that these are, in their order."""
        return [(there, there + n) for _, there, n in self.runs(whole(self.shape))]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of the whole leaf, 1-D; where they lie, if they lie one behind the other."""
        for dim, ranges in enumerate(self.ranges):
            pieces = [whole.narrow(dim, a, b - a) for a, b in ranges]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return whole.reshape(-1)[self.start : self.stop]

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes a whole part, 1-D, where it is in the whole leaf."""
        part, at = part.view(part_shape(self.shape, self.along)), []
        for ranges in self.ranges:
            begins = itertools.accumulate((b - a for a, b in ranges), initial=0)
            at.append([(slice(a, b), slice(i, i + b - a)) for (a, b), i in zip(ranges, begins, strict=False)])
        for pairs in itertools.product(*at):
            whole[tuple(there for there, _ in pairs)] = part[tuple(here for _, here in pairs)]

    def runs(self, other: Boxes) -> list[Run]:
        """The common elements of two boxes, in the order of this one: for each run its start here, its start in the
        other, and its length.

        Example:
            >>> rows, columns = Boxes((4, 4), (), 0, 4, 12), Boxes((4, 4), (Along(1, 1, 2),), 1, 0, 8)
            >>> rows.runs(columns)
            [(2, 2, 2), (6, 4, 2)]
        """
        if not self.along and not other.along:
            low, high = max(self.start, other.start), min(self.stop, other.stop)
            return [(low - self.start, low - other.start, high - low)] if low < high else []
        common = [_common(one, two) for one, two in zip(self.ranges, other.ranges, strict=True)]
        if not all(common):
            return []
        starts = torch.zeros(1, 3, dtype=torch.int64)  # here, there, length
        starts[0, 2] = 1
        shapes = part_shape(self.shape, self.along), part_shape(self.shape, other.along)
        inner, joined = (1, 1), True  # elements of one index of the dim, and whether all of them are one run
        for dim in reversed(range(len(self.shape))):
            if joined:
                starts = torch.tensor(common[dim], dtype=torch.int64) * torch.tensor([*inner, inner[0]])
                joined = len(common[dim]) == 1 and common[dim][0][2] == shapes[0][dim] == shapes[1][dim]
            else:
                steps = [(a + i, b + i, 0) for a, b, n in common[dim] for i in range(n)]
                outer = torch.tensor(steps, dtype=torch.int64) * torch.tensor([*inner, 0])
                starts = (outer[:, None] + starts[None]).reshape(-1, 3)
            inner = inner[0] * shapes[0][dim], inner[1] * shapes[1][dim]
        here, there, length = starts.unbind(1)
        skip = torch.stack([torch.zeros_like(here), self.start - here, other.start - there]).amax(0)
        stop = torch.stack([length, self.stop - here, other.stop - there]).amin(0)
        kept = skip < stop
        runs = torch.stack([here + skip - self.start, there + skip - other.start, stop - skip], 1)[kept]
        return [(a, b, n) for a, b, n in runs.tolist()]


def claimed(left: Sequence[Range], runs: Sequence[Run]) -> tuple[list[Run], list[Range]]:
    """The runs as far as they lie in ranges that nobody has claimed yet, and the ranges that are left then. Both in
    order.

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
            if here + numel > high:  # goes on in the next range
                break
            i += 1
        if low < high:
            rest.append((low, high))
    return found, rest


def parts_of(shape: Sequence[int], along: tuple[Along, ...]) -> list[Boxes]:
    """The parts that these cuts make of a leaf of this shape, each whole."""
    stop = math.prod(part_shape(shape, along))
    return [Boxes(tuple(shape), along, place, 0, stop) for place in range(math.prod(a.size for a in along))]


def whole(shape: Sequence[int], start: int = 0, stop: int | None = None) -> Boxes:
    """A range of a flattened leaf that is not cut along any dim, by default all of it."""
    return Boxes(tuple(shape), (), 0, start, math.prod(shape) if stop is None else stop)


def _within(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Positions `start` to `stop` of ranges that lie one behind the other."""
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
    """The ranges that two lists of ranges of a dim have in common: where each begins in either, and its length. Those
    that follow in both are one."""
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
