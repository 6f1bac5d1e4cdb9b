"""Placements: what each rank along one mesh axis holds of a value, and what the ranks of a mesh hold (`MeshPlacement`).

| placement | what a rank holds |
|---|---|
| `Replicate()` | the full value |
| `Shard(dim, groups)` | one of n equal shards along a dim |
| `Flat(along)` | one of n equal flat shards, as tensors of the state are stored |
| `Partial(op)` | one of n values, whose reduction ("sum", "max" or "min") is the value |
| `Varying()` | a value of its own, computed from its samples of the batch |
| `ExpertShard(dim, rows)` | its shard of the experts, with the rows of all ranks |
| `Routed(dim, size)` | the rows of all ranks that chose its experts, as many as these are, and then unused rows |

`Replicate`, `Shard` and `Partial` have the meaning that they have in `torch.distributed.tensor` and in GSPMD. `Flat`
occurs only outside subgraphs, except in a sharded optimizer, where a shard is an ordinary 1-D tensor. An axis along
which a subgraph receives varying values also shards the batch (expert parallelism). The subgraph is then recorded with
the rows of one rank, so that the recorded shape of a varying value is that of a rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Routed:
    """A varying value of rows that ranks have sent to the experts that they chose: each rank holds `size` rows along
    `dim`, first those of its experts, in their order, then unused ones. Or a value of a rank's experts: `size` of
    them along `dim`."""

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Flat:
    """Rank i of n holds flat shard i of the value, as a 1-D tensor (fzero/sharding/layout.py): an equal piece of the
    flattened and padded value or, with `along`, its shard along that dim, flattened and padded.

    `permuted`: every rank holds the flat shards of all ranks, one after the other. If they are shards along a dim,
    their elements are not in the order of the value. The result of a gather, or the operand of a reduction.
    """

    along: Shard | None = None
    permuted: bool = False


Placement = Replicate | Shard | Flat | Partial | Varying | ExpertShard | Routed
REPLICATE, SUM, VARYING = Replicate(), Partial(), Varying()
_ORDER = (Flat, Varying, Shard, Partial)


@dataclass(frozen=True)
class MeshPlacement:
    """The placement of a value along each axis of the mesh. Along an axis that `axes` does not name, it is replicated.

    Attributes:
        axes: the name of an axis and the placement along it, for each axis along which ranks do not hold the same.
            `Flat` axes come first: the first of them shards the value, and each further one shards the shards of the
            one before. Then come `Varying` axes, axes that shard a tensor of natural shape along a dim, and `Partial`
            axes.
        grid: for a flat shard, the axes that its parameter is padded for, if these are more than its own axes ([Note:
            several axes] in fzero/sharding/layout.py).
        in_flight: whether it is a transfer that has been started, whose result only `wait` returns.
    """

    axes: tuple[tuple[str, Placement], ...] = ()
    grid: tuple[str, ...] = ()
    in_flight: bool = False

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.axes, key=lambda entry: _ORDER.index(type(entry[1]))))
        flat = tuple(axis for axis, place in ordered if isinstance(place, Flat))
        object.__setattr__(self, "axes", ordered)
        object.__setattr__(self, "grid", self.grid if flat and flat != self.grid else ())

    def over(self, kind: type[Placement]) -> tuple[str, ...]:
        """The axes along which the placement is of this kind."""
        return tuple(axis for axis, place in self.axes if isinstance(place, kind))

    @functools.cached_property
    def varies_over(self) -> tuple[str, ...]:
        """The axes along which ranks hold different values: a shard, a summand, or a value of their own."""
        return tuple(axis for axis, _ in self.axes)

    @functools.cached_property
    def flat_axes(self) -> tuple[str, ...]:
        """The axes that make a value flat shards, outermost first. Empty for a tensor of natural shape."""
        return self.over(Flat)

    @functools.cached_property
    def partial(self) -> tuple[str, ...]:
        """The axes over which the value is still to be reduced."""
        return self.over(Partial)

    @property
    def dims(self) -> tuple[Shard, ...]:
        """How the first of the flat axes shard the value along dims, before it is flattened."""
        return tuple(place.along for _, place in self.axes if isinstance(place, Flat) and place.along is not None)

    @property
    def dim_shards(self) -> tuple[tuple[str, Shard], ...]:
        """The axes that shard a tensor of natural shape along dims."""
        return tuple((axis, place) for axis, place in self.axes if isinstance(place, Shard))

    @property
    def is_permuted(self) -> bool:
        """Whether the last of the flat axes is permuted."""
        last = [place for _, place in self.axes if isinstance(place, Flat)][-1:]
        return any(place.permuted for place in last)

    @property
    def is_flat_shard(self) -> bool:
        """Whether a rank holds a flat shard, and not permuted shards."""
        return bool(self.flat_axes) and not self.is_permuted

    @property
    def is_nested(self) -> bool:
        """Whether the flat axes are the first axes of the grid, so that the shard consists of finer shards."""
        return not self.grid or self.grid[: len(self.flat_axes)] == self.flat_axes

    def reduces(self, axes: Iterable[str], op: str) -> bool:
        """Whether the value is partial over all these axes, by this reduction."""
        return {*axes} <= {axis for axis, place in self.axes if place == Partial(op)}

    def along(self, axis: str, place: Placement) -> MeshPlacement:
        """Returns the placement with another axis."""
        return self if isinstance(place, Replicate) else replace(self, axes=(*self.axes, (axis, place)))

    def without(self, axes: Iterable[str], kind: type[Placement] | tuple[type[Placement], ...]) -> MeshPlacement:
        """Returns the placement without the axes among these whose placement is of this kind."""
        dropped = {*axes}
        left = tuple((axis, place) for axis, place in self.axes if axis not in dropped or not isinstance(place, kind))
        return replace(self, axes=left)

    def sharded(self, axes: Sequence[str], grid: tuple[str, ...] = (), dims: Sequence[Shard] = ()) -> MeshPlacement:
        """Returns the placement, made flat shards over these axes. A flat shard is sharded further.

        Args:
            axes: the axes, outermost first.
            grid: the axes that a full value is padded for. A shard keeps its own padding.
            dims: how the first of these axes shard a full value along dims.
        """
        flat = tuple((axis, Flat(dim)) for axis, dim in itertools.zip_longest(axes, dims[: len(axes)]))
        return replace(self, axes=(*self.axes, *flat), grid=self.grid or grid)

    def permuted(self, permuted: bool) -> MeshPlacement:
        """Returns the placement with the last of its flat axes permuted, or not."""
        last = self.flat_axes[-1:]
        changed = (
            (axis, replace(place, permuted=permuted) if isinstance(place, Flat) and (axis,) == last else place)
            for axis, place in self.axes
        )
        return replace(self, axes=tuple(changed))

    @property
    def unflattened(self) -> MeshPlacement:
        """The placement of the tensor of natural shape that flat shards along dims hold."""
        natural = ((a, p.along if isinstance(p, Flat) and p.along is not None else p) for a, p in self.axes)
        return replace(self, axes=tuple(natural))

    @property
    def gathered(self) -> MeshPlacement:
        """The placement after a gather over the last of the flat axes."""
        # A shard that was gathered from finer shards keeps their padding.
        return replace(self.without(self.flat_axes[-1:], Flat), grid=self.grid or self.flat_axes)

    def __str__(self) -> str:
        if self.in_flight:
            return "moving"
        finer = f" of {', '.join(self.grid)}" if self.grid else ""
        kind = "permuted" if self.is_permuted else "shard"
        said = [f"{kind}({over_axes(self.flat_axes, self.dims)}{finer})"] if self.flat_axes else []
        said += [f"varying({', '.join(varying)})"] if (varying := self.over(Varying)) else []
        said += [f"sharded({over_axes(*zip(*self.dim_shards, strict=True))})"] if self.dim_shards else []
        ops = dict.fromkeys(place.op for _, place in self.axes if isinstance(place, Partial))
        for op in ops:
            over = ", ".join(axis for axis, place in self.axes if place == Partial(op))
            said.append(f"partial({over}{'' if op == 'sum' else f' by {op}'})")
        return " ".join(said) or "replicated"


REPLICATED = MeshPlacement()
IN_FLIGHT = MeshPlacement(in_flight=True)


def flat_shard(axes: Sequence[str], grid: tuple[str, ...] = (), dims: Sequence[Shard] = ()) -> MeshPlacement:
    """Returns the placement of flat shards over these axes; replicated if there are none."""
    return REPLICATED.sharded(axes, grid, dims)


def varying(axes: Iterable[str]) -> MeshPlacement:
    """Returns the placement of a value that varies along these axes; replicated if there are none."""
    return MeshPlacement(tuple((axis, VARYING) for axis in axes))


def partial(axes: Iterable[str], op: str = "sum") -> MeshPlacement:
    """Returns the placement of a value that is to be reduced over these axes; replicated if there are none."""
    return MeshPlacement(tuple((axis, Partial(op)) for axis in axes))


def over_axes(axes: Sequence[str], dims: Sequence[Shard]) -> str:
    """Axes as text. An axis that shards along a dim is followed by the dim."""
    said = [f" along {d.dim}" + (f" in {d.groups} groups" if d.groups > 1 else "") for d in dims]
    return ", ".join(axis + how for axis, how in itertools.zip_longest(axes, said, fillvalue=""))


def local_shape(shape: Sequence[int], place: Placement, n: int) -> list[int]:
    """The shape of what a rank holds of a value of this shape."""
    out = list(shape)
    if isinstance(place, (Shard, ExpertShard)):
        out[place.dim] //= n
    if isinstance(place, ExpertShard):
        out[place.rows] *= n
    if isinstance(place, Routed):
        out[place.dim] = place.size
    return out


def divides(shape: Sequence[int], place: Placement, n: int) -> bool:
    """Whether a value of this shape has n equal shards at a placement."""
    if isinstance(place, ExpertShard):
        return max(place.dim, place.rows) < len(shape) and shape[place.dim] > 0 and shape[place.dim] % n == 0
    if isinstance(place, Routed):
        return place.dim < len(shape)
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
