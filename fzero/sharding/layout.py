"""Describes how a tensor of the state is stored: the mesh axes that shard it, its memory tier and its dtype.

A sharded tensor is stored as flat 1-D shards: the full tensor is flattened, zero-padded to a multiple of the number of
shards, and divided into equal shards. Shard `i` belongs to the rank whose index along the axis is `i`. So every rank
holds the same number of elements, whatever the shape, and gathering is one contiguous all_gather, of whose result the
full tensor is a view.

[Note: several axes] A tensor may be sharded over several axes: the first axis shards the full tensor, the next one
shards each of these shards, and so on. Gathering over the last axis then yields a contiguous shard over the axes before
it. This requires that all of them shard the same padded tensor. The *grid* of a tensor is the list of axes of its
finest sharding anywhere (in its optimizer state). It begins with the tensor's own axes, and determines the padding.

[Note: dims] Each of the first axes may shard the tensor along a dim instead (`Layout.dims`,
fzero/sharding/shard_regions.py). The result is a part of the tensor in row-major order, which the remaining axes shard
flat. So the tensor is stored 1-D even if all axes shard along dims. All parts have equal size; a dim whose size is not
divisible is rejected.

[Note: only] A tensor may be stored at only one index along an axis (`Layout.only`): the pipeline stage that computes
with it. On other stages its tensor is empty. The other axes shard it among the ranks that have it.

[Note: blocks] A tensor of at least 16 x 256 elements is padded to a multiple of the number of shards times 256. So no
*block*, 256 consecutive elements of the flattened tensor, is ever divided between shards. Quantized blocks are
therefore the same on every mesh, and resharding moves entire blocks. A tensor with one number per block of another
tensor has the shape [num_blocks, 1]. A last dim of 1 means that its own elements are not grouped into blocks, so its
shards correspond to the shards of the other tensor.

Each tensor of a state carries the `Leaf` that it belongs to (`place`, `leaf_of`), so that a checkpoint can be written,
and an evaluation run, from the state alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.mesh import AbstractMesh, Mesh
from fzero.ops.block_quantization import granule
from fzero.sharding.placements import Shard, over_axes
from fzero.sharding.shard_regions import Boxes, DimShard, part_shape, uneven
from fzero.tree import form

TIERS = ("device", "host", "disk")
COMPUTE = "extras['compute']"
"""The path of the copies that a model computes with, if its parameters are masters that are stored off the device."""
GRADIENTS = "extras['gradients']"
"""The path of the tensors in which gradients are held on disk."""


class Only(NamedTuple):
    """The only index along an axis at which a tensor is stored."""

    axis: str
    index: int


@dataclass(frozen=True)
class Layout:
    """How a tensor is stored: the mesh axes that shard it, outermost first (`()`: replicated), its memory tier (one of
    `TIERS`) and its stored dtype.

    Also `grid`, the axes that it is padded for, if these are more than its own ([Note: several axes]); `dims`, the dims
    that it is sharded along ([Note: dims]); and `only`, the only place where it is stored ([Note: only]).
    """

    dtype: torch.dtype
    axes: tuple[str, ...] = ()
    tier: str = "device"
    grid: tuple[str, ...] = ()
    dims: tuple[Shard, ...] = ()
    only: Only | None = None

    def __post_init__(self) -> None:
        if self.grid:
            object.__setattr__(self, "grid", self.grid if self.axes and self.grid != self.axes else ())
        if self.dims:
            object.__setattr__(self, "dims", self.dims[: len(self.axes)])

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which ranks hold different elements."""
        return (*self.axes, *(() if self.only is None else (self.only.axis,)))


class DiskFiles(Protocol):
    """The scratch files of a rank, addressed as one range of bytes (fzero/memory/disk.py)."""

    def read(self, runs: Sequence[tuple[int, torch.Tensor]]) -> Any: ...

    def write(self, runs: Sequence[tuple[int, torch.Tensor]]) -> Any: ...


@dataclass(frozen=True, eq=False)
class Extent:
    """The location of a tensor on disk: bytes `offset` to `offset + nbytes` of a rank's scratch files. `spare` is a
    second location, to which the next value can be written before it becomes valid."""

    files: DiskFiles
    offset: int
    nbytes: int
    spare: Extent | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Extent:
        fix = "save a checkpoint and restore it twice, or bring the state to memory first: fz.move(state, 'cpu')"
        raise FzeroTypeError("offload", "a tensor on disk cannot be copied: its bytes are in one file", fix=fix)


@dataclass(frozen=True, eq=False)
class Home:
    """Where a step stores a tensor that was moved (state/move.py): its memory tier, and its location on disk, which
    stays reserved while the tensor is elsewhere."""

    tier: str
    extent: Extent | None = None


@dataclass(frozen=True)
class Leaf:
    """One tensor of a pytree: `path` is its name, `shape` the shape of the full tensor, and `layout` how it
    is stored."""

    path: str
    role: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def meta(self) -> torch.Tensor:
        """The full tensor on the meta device; this is what predicates receive."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def is_on(self, mesh: AbstractMesh) -> bool:
        """Whether this rank has a shard of the tensor; see [Note: only]. A mesh without a rank counts as one that has
        it."""
        only = self.layout.only
        return only is None or not isinstance(mesh, Mesh) or mesh.index(only.axis) == only.index

    def sharding(self, mesh: AbstractMesh) -> Sharding:
        """How the tensor is sharded on a mesh, among the ranks that have it. A replicated tensor has one shard."""
        return sharding_over(mesh, self.layout.axes, self.layout.grid, self.layout.dims)

    def shard_numel(self, mesh: AbstractMesh) -> int:
        """The number of elements stored on each rank: those of the padded flat shard, or of the full tensor."""
        return self.sharding(mesh).numel(self.shape) if self.is_on(mesh) else 0

    def shard_bytes(self, mesh: AbstractMesh) -> int:
        return self.shard_numel(mesh) * self.dtype.itemsize

    def stored_shape(self, mesh: AbstractMesh) -> tuple[int, ...]:
        return (self.shard_numel(mesh),) if self.layout.axes or not self.is_on(mesh) else self.shape

    def boxes(self, mesh: Mesh) -> Boxes:
        """The elements that this rank holds, without padding."""
        boxes = self.sharding(mesh).boxes(self.shape, mesh.index(self.layout.axes))
        return boxes if self.is_on(mesh) else boxes.within(0, 0)

    @property
    def master(self) -> str:
        """For a copy that the model computes with, the path of its master parameter; for any other tensor its
        own path."""
        return f"params{self.path.removeprefix(COMPUTE)}" if self.path.startswith(COMPUTE) else self.path

    def with_layout(self, **changes: Any) -> Leaf:
        return replace(self, layout=replace(self.layout, **changes))

    def __str__(self) -> str:
        return f"{self.path} ({form(self.shape, self.dtype)})"


class Sharding(NamedTuple):
    """How tensors are sharded: over which axes, into how many shards, for how many shards they are padded (if those are
    more), and the sharding along dims that comes first."""

    axes: tuple[str, ...]
    size: int
    grid: int = 1
    along: tuple[DimShard, ...] = ()

    @property
    def num_parts(self) -> int:
        """The number of parts that sharding along dims produces, each of which is then sharded flat."""
        return math.prod(a.size for a in self.along)

    @property
    def dims(self) -> tuple[Shard, ...]:
        return tuple(Shard(a.dim, a.groups) for a in self.along)

    def __str__(self) -> str:
        return over_axes(self.axes, self.dims)

    def numel(self, shape: Sequence[int]) -> int:
        """The number of elements, with padding, of each shard of a tensor with this shape."""
        n = self.num_parts
        return shard_numel(part_shape(shape, self.along), self.size // n, self.grid // n)

    def boxes(self, shape: Sequence[int], index: int) -> Boxes:
        """The elements, without padding, of one of the shards of a tensor with this shape."""
        # The axes along dims come first, so the index of the part is the slower one.
        place, number = divmod(index, self.size // self.num_parts)
        numel, stop = self.numel(shape), math.prod(part_shape(shape, self.along))
        return Boxes(tuple(shape), self.along, place, min(numel * number, stop), min(numel * (number + 1), stop))


def sharding_over(
    mesh: AbstractMesh, axes: tuple[str, ...], grid: tuple[str, ...] = (), dims: tuple[Shard, ...] = ()
) -> Sharding:
    """How a layout, or the placement of a value, shards tensors on a mesh."""
    along = tuple(DimShard(*dim, mesh.axes[axis]) for axis, dim in zip(axes, dims, strict=False))
    return Sharding(axes, mesh.axis_size(axes), mesh.axis_size(grid), along)


def check_dims(leaves: Sequence[Leaf], mesh: AbstractMesh) -> None:
    """Raises if the layout of a tensor shards it along a dim that does not divide evenly; the error names every such
    tensor."""
    problems = []
    for leaf in leaves:
        missing = [a for a in leaf.layout.axes if a not in mesh.axes]
        if missing:
            problems.append(f"{leaf}: the mesh has no axis {missing[0]!r}, it has {mesh}")
        elif why := uneven(leaf.shape, leaf.sharding(mesh).along):
            problems.append(f"{leaf}: {why}, over {over_axes(leaf.layout.axes, leaf.layout.dims)}")
    if problems:
        fix = (
            "shard these tensors along another dim, or keep them unsharded; or choose a size of the dim that is "
            "divisible, or another size of the axis"
        )
        raise FzeroValueError("compile", "cannot shard tensors along a dim", problems, fix)


def shard_numel(shape: Sequence[int], size: int, grid: int = 1) -> int:
    """The number of elements, with padding, of each of `size` shards of a tensor with this shape. `grid`: the number of
    shards that the tensor is padded for, if it is more than `size`.

    Example:
        >>> shard_numel((10,), 4), shard_numel((64, 70), 4), shard_numel((64, 70), 1)
        (3, 1280, 4480)
        >>> shard_numel((9,), 2), shard_numel((9,), 2, 4)
        (5, 6)
    """
    numel, unit, finest = math.prod(shape), granule(shape), max(size, grid)
    # The padded tensor has `finest` shards of complete blocks, and finest / size of them are one
    # shard of the coarser sharding.
    return numel if finest == 1 else -(-numel // (finest * unit)) * unit * (finest // size)


def shard(whole: torch.Tensor, leaf: Leaf, mesh: Mesh) -> torch.Tensor:
    """This rank's stored tensor of `leaf`: a new tensor, copied from the full one (no communication)."""
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
    """Marks a tensor of a state as this rank's shard of `leaf`. A tensor on disk is represented by a meta tensor in its
    stored shape, with its extent."""
    tensor._fzero = (leaf, mesh)  # type: ignore[attr-defined]
    if extent is not None:
        tensor._fzero_extent = extent  # type: ignore[attr-defined]
    if home is not None:
        tensor._fzero_home = home  # type: ignore[attr-defined]
    return tensor


def leave(tensor: torch.Tensor) -> None:
    """Marks a tensor whose leaf has moved to another tensor, and frees its memory and its location on disk."""
    known = leaf_of(tensor)
    assert known is not None
    tensor._fzero = _Left(known[0])  # type: ignore[attr-defined]
    tensor._fzero_extent = tensor._fzero_home = None  # type: ignore[attr-defined]
    if not tensor.is_meta:
        tensor.set_()  # type: ignore[call-overload]


class _Left(NamedTuple):
    leaf: Leaf


def set_extent(tensor: torch.Tensor, extent: Extent) -> None:
    """Gives a tensor on disk another location."""
    tensor._fzero_extent = extent  # type: ignore[attr-defined]


def extent_of(tensor: Any) -> Extent | None:
    """The location on disk of a tensor of a state; None if it is in memory."""
    return getattr(tensor, "_fzero_extent", None)


def leaf_of(tensor: Any) -> tuple[Leaf, Mesh] | None:
    """The leaf that a tensor of a state is a shard of, and the mesh that it lives on; None for any other tensor.

    Raises:
        FzeroValueError: the leaf is no longer in this tensor, because it was moved.
    """
    known = getattr(tensor, "_fzero", None)
    if isinstance(known, _Left):
        raise FzeroValueError(
            "move",
            f"{known.leaf.path} is no longer valid, because it was moved",
            fix="continue with the state that fz.move, or fz.reshard, returned",
        )
    return known


def home_of(tensor: torch.Tensor) -> Home:
    """Where the step that created a tensor of a state stores it; if the tensor was not moved, this is where
    it is now."""
    known, home = leaf_of(tensor), getattr(tensor, "_fzero_home", None)
    assert known is not None
    return home or Home(known[0].layout.tier, extent_of(tensor))


def ties(flat: list[Any]) -> list[int]:
    """For each leaf, the index of the first leaf that is the same tensor object (its own index if it is the first).

    Tied leaves stay tied: they share one shard, one gradient (the sum over all uses) and one optimizer state.
    """
    first: dict[int, int] = {}
    return [first.setdefault(id(x), i) if isinstance(x, torch.Tensor) else i for i, x in enumerate(flat)]


def torn_ties(paths: Sequence[str], tied: Sequence[int], accepted: Sequence[bool], predicate: str) -> list[str]:
    """The problems of a predicate that accepts some but not all paths of a tied leaf; one line per leaf.

    Args:
        paths: the paths of the leaves.
        tied: for each leaf the first leaf that is the same tensor, as returned by `ties`.
        accepted: the result of the predicate for each leaf.
        predicate: the name of the predicate.

    Example:
        >>> torn_ties(["a", "b", "c"], [0, 0, 2], [False, True, True], "trainable")
        ['a and b are one tensor: `trainable` matches b, not a']
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
            problems.append(f"{every} are one tensor: `{predicate}` matches {yes}, not {no}")
    return problems


ROLES_OF_NO_SLOT = frozenset({"params", "mutable", "opt_state", "step", "key", "batch", "compute", "gradients"})


def in_slot(leaf: Leaf) -> bool:
    """Whether a leaf is in a state slot. Its role is then the name of the slot."""
    return leaf.role not in ROLES_OF_NO_SLOT
