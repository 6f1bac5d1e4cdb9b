"""Shards state over mesh axes: data_parallel, shard_opt_state, shard_grads, shard_params (ZeRO).

All four act on the program through one pass, fzero/transforms/zero_pass.py. `Zero` says how the parallel transforms of
a step together shard each parameter: passes and layouts query it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fzero._utils.arguments import Predicate, accepts, keywords, predicate
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.sharding.shard_regions import part_shape
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.transform import Transform, applied, find

if TYPE_CHECKING:
    from fzero.transforms.dim_sharding import DimSharding

Where = Predicate


@dataclass(frozen=True)
class Parallel(Transform):
    """The common part of the four specs: the axes, and how much is sharded over them (`stage`)."""

    axis: str | tuple[str, ...] = "data"
    where: Where | None = None
    order: ClassVar[int] = 50
    stage: ClassVar[int] = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes, in the order in which they shard."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Parallel) and type(self) is not type(other):
            fewer, more = sorted((self.axes, other.axes), key=len)
            zero = self.stage and other.stage
            if zero and len(more) == 1 and fewer != more:
                return f"ZeRO shards over one axis, or several in one order: {_named(fewer)} and {_named(more)} are two"
            # A stage with fewer axes stores coarser shards, which are whole numbers of the finer ones only if its axes
            # are the first of the others.
            if zero and more[: len(fewer)] != fewer:
                return (
                    "ZeRO shards parameters over one axis after the other: "
                    f"{_named(fewer)} is not how {_named(more)} begins"
                )
            for one, two in ((self, other), (other, self)):
                if one.covers(two) and two.stage:  # `data_parallel` requests nothing that a ZeRO stage would not do
                    return f"{one.name} (ZeRO-{one.stage}) does all that {two.name} (ZeRO-{two.stage}) does"
        return super().conflict(other) if self.stage or self.axis == getattr(other, "axis", None) else None

    def covers(self, other: Parallel) -> bool:
        """Whether `other` is a lower stage that adds nothing to this one, neither axes nor parameters."""
        within = {*other.axes} <= {*self.axes} and self.where in (None, other.where)
        return other.stage < self.stage and within

    def shards(self, leaf: Leaf) -> bool:
        return accepts(self.name, "where", self.where, leaf.path, leaf.meta)


@dataclass(frozen=True)
class DataParallel(Parallel):
    """The configuration of `data_parallel`."""

    name: ClassVar[str] = "data_parallel"
    stage: ClassVar[int] = 0


@dataclass(frozen=True)
class ShardOptState(Parallel):
    """The configuration of `shard_opt_state` (ZeRO-1)."""

    name: ClassVar[str] = "shard_opt_state"
    stage: ClassVar[int] = 1


@dataclass(frozen=True)
class ShardGrads(Parallel):
    """The configuration of `shard_grads` (ZeRO-2)."""

    name: ClassVar[str] = "shard_grads"
    stage: ClassVar[int] = 2


@dataclass(frozen=True)
class ShardParams(Parallel):
    """The configuration of `shard_params` (ZeRO-3)."""

    name: ClassVar[str] = "shard_params"
    stage: ClassVar[int] = 3


@keywords
def data_parallel(step: Any = None, *, axis: str = "data") -> Any:
    """Gives every rank along `axis` its own shard of the batch; everything else is replicated.

    Equal to the untransformed step on the whole batch, up to the order of summation, unless the loss combines samples,
    in its forward (batch statistics) or in its backward (a hook that clips by norm): such operations see only the
    samples of one rank. A ZeRO stage over `axis` shards the batch along it too; together with one, `data_parallel`
    changes nothing.

    Args:
        step: a step; without one a transform is returned.
        axis: the mesh axis.

    Communication: one all_reduce of each block's gradients: 2 (N-1)/N x 4P bytes sent per rank and step in fp32, for P
        parameters and N ranks along `axis`.
    Memory: unsharded parameters, gradients and optimizer state on every rank.

    Raises:
        TransformError: `sequence_parallel` over `axis`.
        FzeroTypeError: `axis` is not a name.
        FzeroValueError: when the program is built, the mesh does not have the axis.

    Paper: Li et al., PyTorch distributed: experiences on accelerating data parallel training, VLDB 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(data_parallel(step), fz.AbstractMesh(data=4), params, batch)
        >>> [op.op for op in lowered.program.instructions if op.op.endswith("start") and op.by == "data_parallel"]
        ['all_reduce_start', 'all_reduce_start']
    """
    return applied(_checked(DataParallel(axis)), step)


@keywords
def shard_opt_state(step: Any = None, *, axis: str | tuple[str, ...] = "data", where: Where | None = None) -> Any:
    """ZeRO-1: optimizer state is sharded over `axis`; each rank updates its shard and the new parameters are gathered.

    Args:
        step: a step; without one a transform is returned.
        axis: the mesh axis; it shards the batch too. Or several, the fastest first: `("data", "node")` shards by
            `data`, and each of these shards by `node`. Values are communicated over one axis after the other, so that
            each byte crosses the last axis once. Another stage may have the first of these axes:
            `shard_params(axis="data")`.
        where: predicate `(path, leaf)` that selects the parameters whose state is sharded; by default all. `leaf` is a
            meta tensor.

    Communication: reduce_scatter of gradients, once per step, and all_gather of parameters: (N-1)/N x (4P + 4P) bytes
        sent per rank and step in fp32, for P parameters and N ranks: the volume of `data_parallel`. Over two
        axes of L and M ranks, (L-1)/L of it over the first and (M-1)/M/L over the second.
    Memory: between steps 4P + 8P/N bytes per rank with fp32 Adam; with `mixed_precision` 12P/N, and 2P during the step.

    Raises:
        TransformError: a different `shard_opt_state`; another stage, unless the axes of one of the two are the first
            axes of the other; a lower stage (1 to 3) to which a higher one leaves nothing, neither axes nor parameters.
        FzeroTypeError: `axis` is not a name or a tuple of different names.
        FzeroValueError: when the program is built, the mesh does not have an axis.

    Paper: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, SC 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(shard_opt_state(step), fz.AbstractMesh(data=4), params, batch)
        >>> [op.op for op in lowered.program.instructions if op.op.endswith("start") and op.by == "shard_opt_state"]
        ['reduce_scatter_start', 'all_gather_start']
    """
    return applied(_checked(ShardOptState(axis, where)), step)


@keywords
def shard_grads(step: Any = None, *, axis: str | tuple[str, ...] = "data", where: Where | None = None) -> Any:
    """ZeRO-2: like `shard_opt_state`; additionally, no unsharded gradient outlives the backward of its block.

    With `accumulate`, the gradients of every micro-batch are reduced to shards, and shards are accumulated. With the
    layerwise schedule, the sum of a block's gradients is reduced once per step.

    Args: as for `shard_opt_state`.

    Communication: as for `shard_opt_state`, but gradients are reduced once per micro-batch, except with `accumulate(n,
        schedule="layerwise")`.
    Memory: between steps as for `shard_opt_state`; during the step 4P/N bytes of gradients instead of 4P.

    Raises: as for `shard_opt_state`.

    Paper: Rajbhandari et al., ZeRO, SC 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(shard_grads(step), fz.AbstractMesh(data=4), params, batch)
        >>> [op.op for op in lowered.program.instructions if op.op.endswith("start") and op.by == "shard_grads"]
        ['reduce_scatter_start', 'all_gather_start']
    """
    return applied(_checked(ShardGrads(axis, where)), step)


@keywords
def shard_params(
    step: Any = None,
    *,
    axis: str | tuple[str, ...] = "data",
    where: Where | None = None,
) -> Any:
    """ZeRO-3: parameters, gradients and optimizer state are sharded; a block's parameters are unsharded only while it
    runs.

    Args:
        step: a training or evaluation step; without one a transform is returned.
        axis: the mesh axis, or several, as for `shard_opt_state`; they shard the batch too.
        where: predicate `(path, leaf)` that selects the parameters that are sharded; by default all. Keep small ones
            replicated with `where=lambda path, leaf: leaf.numel() > 10_000`. Parameters with fewer elements than there
            are shards are always replicated.

    Communication: all_gather of each block's parameters for its forward and again for its vjp, in the compute dtype,
        and reduce_scatter of its gradients: (N-1)/N x 3 x 4P bytes sent per rank and step in fp32, for P
        parameters and N ranks; with `accumulate` per micro-batch, except with its layerwise schedule. Over several
        axes as for `shard_opt_state`; with `hierarchical`, once per step over the last axis.
    Memory: between steps 12P/N bytes per rank with fp32 Adam (plus padding to a multiple of N per parameter); during
        the step additionally at most two blocks' gathered parameters and one block's gradients.

    Raises: as for `shard_opt_state`.

    Paper: Rajbhandari et al., ZeRO, SC 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(shard_params(step), fz.AbstractMesh(data=4), params, batch)
        >>> [op.op for op in lowered.program.instructions if op.op.endswith("start") and op.by == "shard_params"]
        ['all_gather_start', 'reduce_scatter_start']
    """
    return applied(_checked(ShardParams(axis, where)), step)


def _checked(spec: Parallel) -> Parallel:
    """Returns the spec, if its arguments have the right types. A tuple of one axis is replaced by that axis."""
    if isinstance(spec.axis, tuple) and len(spec.axis) == 1 and isinstance(spec.axis[0], str):
        spec = replace(spec, axis=spec.axis[0])
    several = isinstance(spec.axis, tuple) and bool(spec.axis) and spec.stage
    of_names = all(isinstance(a, str) and a for a in (spec.axis if several else (spec.axis,)))
    what = (
        "the name of an axis, or a tuple of names, in the order in which they shard"
        if spec.stage
        else "the name of one axis"
    )
    problems = [] if of_names else [f"axis={spec.axis!r}: {spec.name} takes {what}"]
    if of_names and several and len({*spec.axis}) < len(spec.axis):
        problems.append(f"axis={spec.axis!r}: an axis is named twice")
    problems += predicate("where", spec.where)
    if problems:
        axis = ("data", "node") if several else "data"
        if isinstance(spec.axis, list) and spec.stage and all(isinstance(a, str) for a in spec.axis):
            axis = tuple(spec.axis)
        fix = f"e.g. axis={axis!r}, where=lambda path, leaf: leaf.numel() > 10_000"
        raise FzeroTypeError(spec.name, "invalid arguments", problems, fix)
    return spec


def _named(axes: tuple[str, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


# --- how the transforms of a step together shard each parameter ---


def keeps_gathers(transforms: tuple[Transform, ...]) -> Hierarchical | None:
    """Returns the `hierarchical` among the transforms, if parameters are gathered over its axis."""
    once = find(transforms, Hierarchical)
    gathers = once and any(isinstance(t, ShardParams) and once.axis in t.axes for t in transforms)
    return once if gathers else None


@dataclass(frozen=True)
class Zero:
    """The sharding that the parallel transforms of a step request, on a given mesh. Axes with one device are
    ignored."""

    specs: tuple[Parallel, ...]
    mesh: AbstractMesh
    casts: Callable[[Leaf], bool]  # whether a parameter is computed in another dtype than it is stored in
    once: Hierarchical | None = None
    dim_shardings: tuple[DimSharding, ...] = ()  # the specs that shard along dims on this mesh, in order
    stages: str | None = None  # the axis of a pipeline
    # by path of a parameter and ZeRO stage, the axes of the specs that shard it: each predicate is called once
    _known: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that shard the batch, in mesh order."""
        wanted = {a for r in self.specs for a in r.axes}.difference(self.computed)
        wanted |= {spec.axis for spec in self.dim_shardings if spec.shards_batch}
        return tuple(a for a, size in self.mesh.axes.items() if a in wanted and size > 1)

    @property
    def computed(self) -> tuple[str, ...]:
        """The axes along which subgraphs compute on shards: of the same batch, or of experts."""
        return tuple(spec.axis for spec in self.dim_shardings)

    def _axes(self, leaf: Leaf, stage: int) -> tuple[str, ...]:
        """The mesh axes that shard a parameter at a ZeRO stage: the longest list among the specs of that stage and
        higher ones."""
        found = self._known.get(leaf.path)
        if found is None:
            sharding = {
                r.stage: tuple(a for a in r.axes if self.mesh.axes.get(a, 1) > 1) for r in self.specs if r.stage
            }
            found = self._known[leaf.path] = {
                r.stage: sharding[r.stage] for r in self.specs if r.stage and r.shards(leaf)
            }
        # the axes that shard it along dims, before it is sharded flat
        dims, left = leaf.layout.axes[: len(leaf.layout.dims)], part_shape(leaf.shape, leaf.sharding(self.mesh).along)
        flat = {at: tuple(a for a in axes if a not in dims) for at, axes in found.items()}
        finest = max(flat.values(), key=len, default=())
        # New values of mutable tensors are computed unsharded on every rank; of small tensors, some ranks would have
        # nothing.
        if leaf.role == "mutable" or math.prod(left) < self.mesh.axis_size(finest):
            return dims
        return dims + max((axes for at, axes in flat.items() if at >= stage), key=len, default=())

    def opt_state(self, param: Leaf) -> tuple[str, ...]:
        """The axes over which a parameter's optimizer state and its update are sharded: its finest sharding."""
        return self._axes(param, 1)

    def grads(self, param: Leaf) -> tuple[str, ...]:
        """The axes over which a parameter's gradients are sharded while micro-batches are accumulated."""
        axes = self._axes(param, 2)
        return self.once.before(axes) if self.once and self.once.reductions else axes

    def params(self, param: Leaf) -> tuple[str, ...]:
        """The axes along which a parameter is unsharded only around the ops that read it."""
        return self._axes(param, 3)

    def stays(self, param: Leaf) -> tuple[str, ...]:
        """The axes that shard a parameter that is gathered once per step, if its block keeps gathered parameters."""
        return self.once.before(self.params(param)) if self.once else self.params(param)

    def stored(self, param: Leaf, coded: bool = False) -> Leaf:
        """Returns the parameter with the layout in which it is stored.

        A master that is only read to be cast, or a parameter that is sent encoded (`coded`), is sharded as finely as
        its optimizer state.
        """
        finest = self.opt_state(param)
        return param.with_layout(axes=finest if coded or self.casts(param) else self.params(param), grid=finest)

    def check_once(self, leaves: Sequence[Leaf]) -> None:
        """Raises if none of these parameters is sharded over the axis of `hierarchical`, although a transform names
        it."""
        once = self.once
        sharding = [tuple(a for a in r.axes if self.mesh.axes[a] > 1) for r in self.specs if r.stage > 1]
        if once is None or not any(once.axis in axes[1:] for axes in sharding):
            return  # there is one rank along it, or along all axes that shard before it
        if any(once.axis in self._axes(leaf, 2) for leaf in leaves):
            return
        num = max(self.mesh.axis_size(axes) for axes in sharding)
        few = f"fewer elements than the {num} shards"
        shown = [f"{leaf}: {few if leaf.numel < num else 'not selected by `where`'}" for leaf in leaves]
        more = [f"and {len(leaves) - 5} more"] if len(leaves) > 5 else []
        what = f"does nothing over axis {once.axis!r}: no parameter is sharded over it"
        fix = "let `where` match large parameters, or leave hierarchical out"
        raise FzeroValueError("hierarchical", what, [*(f"{r}" for r in self.specs), *shown[:5], *more], fix)

    def check(self) -> None:
        """Raises if a transform names an axis that the mesh does not have, if no transform uses an axis of the mesh, or
        if `hierarchical` would have no effect."""
        problems = [f"{r}: the mesh has {self.mesh}" for r in self.specs if not {*r.axes} <= {*self.mesh.axes}]
        if problems:
            raise FzeroValueError(
                self.specs[0].name,
                "unknown mesh axis",
                problems,
                "name an axis of the mesh: axis='data', or make_mesh(data=...)",
            )
        if self.once:
            self._check_once(self.once)
        named = {*self.computed, self.stages, *(a for r in self.specs for a in r.axes)}
        idle = [f"{a}={n}" for a, n in self.mesh.axes.items() if n > 1 and a not in named]
        if idle:
            raise FzeroValueError(
                "compile",
                "no transform uses a mesh axis",
                idle,
                f"add fz.data_parallel(axis={idle[0].split('=')[0]!r}), or a mesh without it",
            )

    def _check_once(self, once: Hierarchical) -> None:
        """Raises if nothing in a step would cross the axis less often."""
        axis, sharding = once.axis, [r for r in self.specs if once.axis in r.axes and r.stage > 1]
        if sharding and any(r.axes[0] != axis for r in sharding):
            return
        title = f"does nothing over axis {axis!r}" if axis in self.mesh.axes else "unknown mesh axis"
        if axis not in self.mesh.axes:
            what, fix = f"the mesh has no axis {axis!r}, it has {self.mesh}", "name an axis of the mesh"
        elif sharding:
            others = [a for a in self.mesh.axes if a != axis]
            what = f"{axis!r} shards first: gathered over it, parameters would be unsharded until the step ends"
            fix = (
                f"let a faster axis shard before it: axis=({others[0] if others else 'data'!r}, {axis!r}); or keep "
                f"parameters replicated: fz.shard_grads"
            )
        else:
            what = (
                f"no parameter or gradient is sharded over {axis!r}, so values "
                "are already sent over it only once per step"
            )
            fix = f"shard over it too: fz.shard_params(axis=('data', {axis!r})); or leave hierarchical out"
        raise FzeroValueError("hierarchical", title, [what, *(f"{r}" for r in self.specs)], fix)
