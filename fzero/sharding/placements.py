"""Placements: what each rank along one mesh axis holds of a value.

| placement | what a rank holds |
|---|---|
| `Replicate()` | the full value |
| `Shard(dim, groups)` | one of n equal shards along a dim |
| `Partial(op)` | one of n values, whose reduction ("sum", "max" or "min") is the value |
| `Varying()` | a value of its own, computed from its samples of the batch |
| `ExpertShard(dim, rows)` | its shard of the experts, with the rows of all ranks |

`Replicate`, `Shard` and `Partial` have the meaning that they have in `torch.distributed.tensor` and in GSPMD. The last
two occur only along an axis that also shards the batch (expert parallelism). A function is then recorded with the rows
of one rank, so that the recorded shape of a varying value is that of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the full value."""


class Shard(NamedTuple):
    """Rank i of n holds shard i along a dim. With `groups`, the dim consists of that many pieces of equal length, and
    each rank holds its shard of every piece: a matrix that combines queries, keys and values has three groups."""

    dim: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds one value of the same shape; the reduction of these is the value: "sum", "max" or "min"."""

    op: str = "sum"


@dataclass(frozen=True, slots=True)
class Varying:
    """Every rank holds a value of its own, computed from its samples of the batch. It has the recorded shape."""


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """A varying value whose rows were exchanged: each rank holds its shard of the experts along `dim`, and the rows of
    all ranks along `rows`."""

    dim: int
    rows: int


Placement = Replicate | Shard | Partial | Varying | ExpertShard
REPLICATE, SUM, VARYING = Replicate(), Partial(), Varying()


def local_shape(shape: Sequence[int], place: Placement, n: int) -> list[int]:
    """The shape of what a rank holds of a value of this shape."""
    out = list(shape)
    if isinstance(place, (Shard, ExpertShard)):
        out[place.dim] //= n
    if isinstance(place, ExpertShard):
        out[place.rows] *= n
    return out


def divides(shape: Sequence[int], place: Placement, n: int) -> bool:
    """Whether a value of this shape has n equal shards at a placement."""
    if isinstance(place, ExpertShard):
        return max(place.dim, place.rows) < len(shape) and shape[place.dim] > 0 and shape[place.dim] % n == 0
    if not isinstance(place, Shard):
        return True
    return place.dim < len(shape) and shape[place.dim] > 0 and shape[place.dim] % (place.groups * n) == 0


def through_view(shape: Sequence[int], place: Shard, new: Sequence[int], n: int) -> Shard | None:
    """The placement of a shard in a view with another shape; None if the view cannot be sharded accordingly. It is
    found from the period and the length of the shards' runs in the flattened value.

    Example:
        >>> through_view((4, 6, 8), Shard(2, 2), (24, 2, 4), 2)
        Shard(dim=2, groups=1)
    """
    period = math.prod(shape[place.dim :]) // place.groups
    if not period:
        return None
    inner = 1
    for dim in reversed(range(len(new))):
        total = inner * new[dim]
        # The dim must hold complete periods, and each run must consist of complete indices of the dim.
        if new[dim] > 1 and total % period == 0 and (period // n) % inner == 0:
            return Shard(dim, total // period)
        inner = total
    return None


def lined_up(shape: Sequence[int], place: Shard, count: int) -> Placement:
    """The placement of an operand of this shape that is broadcast to a result with `count` dims, which is sharded."""
    dim = place.dim - (count - len(shape))
    return REPLICATE if dim < 0 or shape[dim] == 1 else Shard(dim, place.groups)


def nearest(size: int, n: int) -> list[int]:
    """The multiples of n just below and above a size."""
    return [x for x in (size // n * n, size // n * n + n) if x]
