"""Describes the layout of a leaf at rest: the mesh axes it is sharded over, its tier, its dtype.

A sharded leaf rests as a flat 1-D shard: the whole leaf, flattened and zero-padded to a multiple of the number of
shards, cut in equal parts, part `i` with the rank whose index along the axis is `i`. So every rank holds the same
number of elements whatever the shape, and gathering is one contiguous all_gather of which the leaf is a view.

[Note: several axes] A leaf may be sharded over several axes: the first cuts the whole, the next one cuts each part, and
so on. What is gathered over the last axis is then a shard over those before it, contiguous too. For that all of them
are cut from the same padded whole. The *grid* is the axes of a leaf's finest cut anywhere (in its optimizer state); it
begins with the leaf's own axes, and padding is for the grid.

[Note: dims] The first of those axes may each cut the leaf along a dim instead (`Layout.dims`,
fzero/sharding/shard_regions.py): what is left is a part of the leaf, row-major, and the other axes cut that flat. So
where all of them cut along dims it rests 1-D too. Parts are equal: a dim that does not divide is refused.

[Note: only] A leaf may rest at one place along an axis alone (`Layout.only`), the stage of a pipeline that computes
with it. Elsewhere its tensor is empty; the other axes shard it among the ranks that have it.

[Note: blocks] A leaf of at least 16 x 256 elements is padded to a multiple of the number of shards times 256. So no
*block*, 256 consecutive elements of the flattened leaf, is ever cut. Quantised blocks are the same on every mesh, and
resharding moves whole blocks. A leaf with one number for each block of another has the shape [num_blocks, 1]; a last
dim of 1 says that its elements stand alone, so its shards are those of the other's blocks.

The tensors of a state carry the `Leaf` they are part of (`place`, `leaf_of`), so that a checkpoint can be written, and
an evaluation run, from the state alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.mesh import AbstractMesh, Mesh
from fzero.ops.block_quantization import granule
from fzero.sharding.shard_regions import Along, Boxes, Dim, part_shape, uneven
from fzero.tree import form

TIERS = ("device", "host", "disk")
COMPUTE = "extras['compute']"
"""The path of what a model computes with, where its parameters are masters that rest off the device."""
GRADIENTS = "extras['gradients']"
"""The path of what gradients wait in that wait on disk."""


class Only(NamedTuple):
    """The one place along an axis where a leaf is."""

    axis: str
    index: int


@dataclass(frozen=True)
class Layout:
    """The mesh axes a leaf is sharded over, the first cuts first (`()`: whole on every rank), its tier (one of `TIERS`)
    and its dtype at rest. Also the axes it is padded for, if they are more than its own ([Note: several axes]), its
    cuts along dims ([Note: dims]), and the place where it is alone ([Note: only])."""

    dtype: torch.dtype
    axes: tuple[str, ...] = ()
    tier: str = "device"
    grid: tuple[str, ...] = ()
    dims: tuple[Dim, ...] = ()
    only: Only | None = None

    def __post_init__(self) -> None:
        if self.grid:
            object.__setattr__(self, "grid", grid_of(self.axes, self.grid))
        if self.dims:
            object.__setattr__(self, "dims", self.dims[: len(self.axes)])

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which ranks hold different elements."""
        return (*self.axes, *(() if self.only is None else (self.only.axis,)))


class DiskFiles(Protocol):
    """Scratch files of a rank, as one range of bytes (fzero/memory/disk.py)."""

    def read(self, runs: Sequence[tuple[int, torch.Tensor]]) -> Any: ...

    def write(self, runs: Sequence[tuple[int, torch.Tensor]]) -> Any: ...


@dataclass(frozen=True, eq=False)
class Extent:
    """The place of a leaf on disk: bytes `offset` to `offset + nbytes` of a rank's scratch files. `spare` is where the
    next value can be written before it counts."""

    files: DiskFiles
    offset: int
    nbytes: int
    spare: Extent | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Extent:
        fix = "save a checkpoint and restore it twice, or bring the state to memory first: fz.move(state, 'cpu')"
        raise FzeroTypeError("offload", "a leaf on disk cannot be copied: its bytes lie in one place", fix=fix)


@dataclass(frozen=True, eq=False)
class Home:
    """The place where a step keeps a leaf that was moved (state/move.py): its tier, and its place on disk, which it
    keeps while it is away."""

    tier: str
    extent: Extent | None = None


@dataclass(frozen=True)
class Leaf:
    """One tensor of a pytree: `path` names it, `shape` is that of the whole leaf, `layout` says how it rests."""

    path: str
    role: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def meta(self) -> torch.Tensor:
        """The whole leaf without values: what a predicate is shown."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def is_on(self, mesh: AbstractMesh) -> bool:
        """Whether this rank has a part of it: see [Note: only]. A mesh of no rank is that of one that has."""
        only = self.layout.only
        return only is None or not isinstance(mesh, Mesh) or mesh.index(only.axis) == only.index

    def cut(self, mesh: AbstractMesh) -> Cut:
        """Its cut on a mesh, among the ranks that have it; if it rests whole, into one."""
        return cut_over(mesh, self.layout.axes, self.layout.grid, self.layout.dims)

    def shard_numel(self, mesh: AbstractMesh) -> int:
        """Elements at rest on each rank: of the padded flat shard, or of the whole leaf."""
        return self.cut(mesh).numel(self.shape) if self.is_on(mesh) else 0

    def shard_bytes(self, mesh: AbstractMesh) -> int:
        return self.shard_numel(mesh) * self.dtype.itemsize

    def resting_shape(self, mesh: AbstractMesh) -> tuple[int, ...]:
        return (self.shard_numel(mesh),) if self.layout.axes or not self.is_on(mesh) else self.shape

    def boxes(self, mesh: Mesh) -> Boxes:
        """The elements that this rank holds, without padding."""
        boxes = self.cut(mesh).boxes(self.shape, mesh.index(self.layout.axes))
        return boxes if self.is_on(mesh) else boxes.within(0, 0)

    @property
    def master(self) -> str:
        """The path of the parameter that a copy to compute with is of; of any other leaf its own."""
        return f"params{self.path.removeprefix(COMPUTE)}" if self.path.startswith(COMPUTE) else self.path

    def with_layout(self, **changes: Any) -> Leaf:
        return replace(self, layout=replace(self.layout, **changes))

    def __str__(self) -> str:
        return f"{self.path} ({form(self.shape, self.dtype)})"


class Cut(NamedTuple):
    """The cut of leaves into shards: over which axes, into how many, for how many they are padded, if those are more,
    and the cuts along dims that come first."""

    axes: tuple[str, ...]
    size: int
    grid: int = 1
    along: tuple[Along, ...] = ()

    @property
    def num_parts(self) -> int:
        """Parts that the cuts along dims make, each of which is cut flat."""
        return math.prod(a.size for a in self.along)

    @property
    def dims(self) -> tuple[Dim, ...]:
        return tuple(Dim(a.dim, a.groups) for a in self.along)

    def __str__(self) -> str:
        return over_axes(self.axes, self.dims)

    def numel(self, shape: Sequence[int]) -> int:
        """Elements of each shard of a leaf of this shape, with padding."""
        n = self.num_parts
        return shard_numel(part_shape(shape, self.along), self.size // n, self.grid // n)

    def boxes(self, shape: Sequence[int], index: int) -> Boxes:
        """The elements of one of the shards of a leaf of this shape, without padding."""
        place, number = divmod(index, self.size // self.num_parts)
        numel, stop = self.numel(shape), math.prod(part_shape(shape, self.along))
        return Boxes(tuple(shape), self.along, place, min(numel * number, stop), min(numel * (number + 1), stop))


def cut_over(mesh: AbstractMesh, axes: tuple[str, ...], grid: tuple[str, ...] = (), dims: tuple[Dim, ...] = ()) -> Cut:
    """The cut of a layout, or of a placement, on a mesh."""
    along = tuple(Along(*dim, mesh.axes[axis]) for axis, dim in zip(axes, dims, strict=False))
    return Cut(axes, mesh.axis_size(axes), mesh.axis_size(grid), along)


def over_axes(axes: Sequence[str], dims: Sequence[Dim]) -> str:
    """Axes as text, those of the first that cut along a dim with it."""
    said = [f" along {d.dim}" + (f" in {d.groups} groups" if d.groups > 1 else "") for d in dims]
    return ", ".join(axis + how for axis, how in itertools.zip_longest(axes, said, fillvalue=""))


def check_dims(leaves: Sequence[Leaf], mesh: AbstractMesh) -> None:
    """Raises naming every leaf that cannot be cut along dims as its layout says."""
    problems = []
    for leaf in leaves:
        missing = [a for a in leaf.layout.axes if a not in mesh.axes]
        if missing:
            problems.append(f"{leaf}: the mesh has no axis {missing[0]!r}, it has {mesh}")
        elif why := uneven(leaf.shape, leaf.cut(mesh).along):
            problems.append(f"{leaf}: {why}")
    if problems:
        fix = "cut these leaves along another dim, or keep them whole; or give the dim a size that divides"
        raise FzeroValueError("compile", "cannot cut leaves along a dim", problems, fix)


def grid_of(axes: tuple[str, ...], grid: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that a shard over `axes` is padded for, if they are more than its own; else none."""
    return grid if axes and grid != axes else ()


def shard_numel(shape: Sequence[int], size: int, grid: int = 1) -> int:
    """Elements of each of `size` shards of a leaf of this shape, with padding; `grid`: for how many shards it is
    padded, if they are more.

    Example:
        >>> shard_numel((10,), 4), shard_numel((64, 70), 4), shard_numel((64, 70), 1)
        (3, 1280, 4480)
        >>> shard_numel((9,), 2), shard_numel((9,), 2, 4)
        (5, 6)
    """
    numel, unit, finest = math.prod(shape), granule(shape), max(size, grid)
    return numel if finest == 1 else -(-numel // (finest * unit)) * unit * (finest // size)


def shard(whole: torch.Tensor, leaf: Leaf, mesh: Mesh) -> torch.Tensor:
    """This rank's resting tensor of `leaf`, a new tensor cut from the whole one (no communication)."""
    whole = whole.detach().to(dtype=leaf.dtype, device=mesh.device)
    if not leaf.layout.axes and leaf.is_on(mesh):
        return whole.clone(memory_format=torch.contiguous_format)
    boxes = leaf.boxes(mesh)
    out = torch.zeros(leaf.shard_numel(mesh), dtype=leaf.dtype, device=mesh.device)
    out[: boxes.numel] = boxes.take(whole)
    return out


def place(
    tensor: torch.Tensor, leaf: Leaf, mesh: Mesh, extent: Extent | None = None, home: Home | None = None
) -> torch.Tensor:
    """Marks a tensor of a state as this rank's part of `leaf`. A leaf on disk is a meta tensor of the shape in which it
    rests, with its extent."""
    tensor._fzero = (leaf, mesh)  # type: ignore[attr-defined]
    if extent is not None:
        tensor._fzero_extent = extent  # type: ignore[attr-defined]
    if home is not None:
        tensor._fzero_home = home  # type: ignore[attr-defined]
    return tensor


def leave(tensor: torch.Tensor) -> None:
    """Marks a tensor whose leaf is another tensor now, and lets go of its memory and its place on disk."""
    known = leaf_of(tensor)
    assert known is not None
    tensor._fzero = _Left(known[0])  # type: ignore[attr-defined]
    tensor._fzero_extent = tensor._fzero_home = None  # type: ignore[attr-defined]
    if not tensor.is_meta:
        tensor.set_()  # type: ignore[call-overload]


class _Left(NamedTuple):
    leaf: Leaf


def set_extent(tensor: torch.Tensor, extent: Extent) -> None:
    """Gives a leaf on disk another extent."""
    tensor._fzero_extent = extent  # type: ignore[attr-defined]


def extent_of(tensor: Any) -> Extent | None:
    """The extent on disk of a tensor of a state; None for one that is in memory."""
    return getattr(tensor, "_fzero_extent", None)


def leaf_of(tensor: Any) -> tuple[Leaf, Mesh] | None:
    """The leaf a tensor of a state is part of and the mesh it lives on; None for any other tensor.

    Raises:
        FzeroValueError: the leaf has left this tensor: it was moved.
    """
    known = getattr(tensor, "_fzero", None)
    if isinstance(known, _Left):
        raise FzeroValueError(
            "move",
            f"{known.leaf.path} is not here any more, it was moved",
            fix="go on with the state that fz.move, or fz.reshard, returned",
        )
    return known


def home_of(tensor: torch.Tensor) -> Home:
    """The place where the step that made a placed tensor keeps it: where it is, if it was not moved."""
    known, home = leaf_of(tensor), getattr(tensor, "_fzero_home", None)
    assert known is not None
    return home or Home(known[0].layout.tier, extent_of(tensor))


def ties(flat: list[Any]) -> list[int]:
    """For each leaf, the index of the first leaf that is the same tensor object (its own index if it is the first).

    Leaves that are one tensor stay one: one shard, one gradient (the sum over its uses), one optimizer state.
    """
    first: dict[int, int] = {}
    return [first.setdefault(id(x), i) if isinstance(x, torch.Tensor) else i for i, x in enumerate(flat)]


def torn_ties(paths: Sequence[str], tied: Sequence[int], accepted: Sequence[bool], predicate: str) -> list[str]:
    """Problems where a predicate accepts some paths of a tied leaf and not all, a line a leaf.

    Args:
        paths: of the leaves.
        tied: of each the first that is the same tensor, as of `ties`.
        accepted: what the predicate says of each.
        predicate: its name.

    Example:
        >>> torn_ties(["a", "b", "c"], [0, 0, 2], [False, True, True], "trainable")
        ['a and b are one tensor: `trainable` accepts b, not a']
    """
    groups: dict[int, list[int]] = {}
    for i, first in enumerate(tied):
        groups.setdefault(first, []).append(i)
    problems = []
    for group in groups.values():
        every, yes, no = (
            " and ".join(paths[i] for i in group if accepted[i] in wanted)
            for wanted in ((True, False), (True,), (False,))
        )
        if yes and no:
            problems.append(f"{every} are one tensor: `{predicate}` accepts {yes}, not {no}")
    return problems


ROLES_OF_NO_SLOT = frozenset({"params", "mutable", "opt_state", "step", "key", "batch", "compute", "gradients"})


def in_slot(leaf: Leaf) -> bool:
    """Whether a leaf is in a state slot: then its role is the slot's name."""
    return leaf.role not in ROLES_OF_NO_SLOT
