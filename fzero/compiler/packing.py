"""Packs buffers with known live ranges into a small arena: buffers that are live at the same time do not overlap.

No arena can be smaller than the number of bytes that are live at any one time. Placing one buffer after the other, each
at the lowest possible offset, the largest first, usually comes close to that. If the result is not good enough, other
orders are tried; starting from each of these, a few further steps place the topmost buffers earlier.

Greedy by size: Pisarchyk and Lee, Efficient memory management for deep neural net inference, 2020. By contention: Maas
et al., TelaMalloc: efficient on-chip memory allocation for production machine learning accelerators, ASPLOS 2023.
"""

from __future__ import annotations

import functools
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fzero.ir.liveness import Interval

SLACK = 0.02  # an arena that exceeds the lower bound by at most this share is good enough
EFFORT = 5000  # placements that are made in further steps: some tenths of a second


Bytes = npt.NDArray[np.int64]
"""The bytes at each op."""


class Item(NamedTuple):
    """A buffer: its bytes, its live ranges, and the alignment of its offset."""

    nbytes: int
    times: tuple[Interval, ...]
    align: int = 1


class Packing(NamedTuple):
    """The offset of each buffer, in order, and the size of the arena in bytes."""

    offsets: tuple[int, ...]
    nbytes: int


def pack(items: Sequence[Item]) -> Packing:
    """Returns offsets for buffers such that no two overlap that are live at the same time. Equal arguments give equal
    offsets.

    Example:
        >>> pack([Item(4, ((0, 1),)), Item(2, ((1, 2),)), Item(4, ((2, 3),))])
        Packing(offsets=(0, 4, 0), nbytes=6)
    """
    return _packed(tuple(items)) if items else Packing((), 0)


@functools.lru_cache(maxsize=256)
def _packed(items: tuple[Item, ...]) -> Packing:
    """Returns the best packing found. Programs with other options often have the same buffers: two thirds of the
    packings of a search are found in this cache."""
    taken = _taken(items)
    best = Packing((), -1)
    for packing in _packings(items, taken):
        best = packing if best.nbytes < 0 or packing.nbytes < best.nbytes else best
        if best.nbytes <= (1 + SLACK) * max(taken):
            break
    return best


def _packings(items: Sequence[Item], taken: Sequence[int]) -> Iterator[Packing]:
    """Yields packings to choose from, first those of complete orders."""
    contention = functools.cache(lambda i: max(max(taken[a : b + 1]) for a, b in items[i].times))
    area = [x.nbytes * (max(b for _, b in x.times) - min(a for a, _ in x.times) + 1) for x in items]
    keys: list[Callable[[int], Any]] = [
        lambda i: (-items[i].nbytes, items[i].times),
        lambda i: (-area[i], items[i].times),
        lambda i: (-contention(i), -items[i].nbytes, items[i].times),
        lambda i: (-contention(i), -area[i], items[i].times),
        lambda i: (-contention(i), -area[i] / items[i].nbytes, items[i].times),
        lambda i: (-area[i] / items[i].nbytes, -items[i].nbytes, items[i].times),
    ]
    orders, meetings = list[list[int]](), _meetings(items)
    for key in keys:
        orders.append(sorted(range(len(items)), key=key))
        yield _placed(items, orders[-1], meetings)
    for order in orders:
        for _ in range(EFFORT // len(items) // len(orders)):
            packing = _placed(items, order, meetings)
            yield packing
            top = [i for i in order if packing.offsets[i] + items[i].nbytes == packing.nbytes]
            order = [*top, *(i for i in order if i not in top)]


def _meetings(items: Sequence[Item]) -> list[list[int]]:
    """Returns, for each buffer, those that are live at some of the same times. A buffer may occur several times if
    there are several such times."""
    rows = sorted((a, b, i) for i, x in enumerate(items) for a, b in x.times)
    starts, out = [a for a, _, _ in rows], [list[int]() for _ in items]
    for k, (_, b, i) in enumerate(rows):
        # Rows are sorted by their begin, so these are the ones that begin within this interval.
        for _, _, other in rows[k + 1 : bisect_right(starts, b)]:
            if other != i:
                out[i].append(other)
                out[other].append(i)
    return out


def _placed(items: Sequence[Item], order: Sequence[int], meetings: Sequence[Sequence[int]]) -> Packing:
    """Places the buffers in this order, each at the lowest offset that the earlier ones allow."""
    offsets = [-1] * len(items)
    # for each buffer that is not placed yet, the intervals that placed ones occupy, in order
    taken: list[list[Interval]] = [[] for _ in items]
    for i in order:
        nbytes, _, align = items[i]
        at = 0
        for begin, end in taken[i]:
            if at + nbytes <= begin:
                break
            if end > at:
                at = -(-end // align) * align
        offsets[i], mine = at, (at, at + nbytes)
        for j in meetings[i]:
            if offsets[j] < 0:
                # Kept in order, so that the loop above finds the lowest gap in one pass.
                insort(taken[j], mine)
    return Packing(tuple(offsets), max(at + x.nbytes for at, x in zip(offsets, items, strict=True)))


def taken(items: Iterable[Item], num: int) -> Bytes:
    """Returns the bytes that are live at each of the first `num` ops."""
    change = np.zeros(num + 1, dtype=np.int64)
    for x in items:
        end = -1
        for a, b in sorted(x.times):  # they may overlap
            if b > end:
                change[max(a, end + 1)] += x.nbytes
                change[min(b, num - 1) + 1] -= x.nbytes
                end = b
    return np.cumsum(change)[:num]


def _taken(items: Sequence[Item]) -> list[int]:
    return taken(items, 1 + max(b for x in items for _, b in x.times)).tolist()
