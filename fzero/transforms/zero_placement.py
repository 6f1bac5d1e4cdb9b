"""Determines how the parallel transforms of a step (ZeRO) together shard each parameter on a mesh.

This file does not rewrite anything: passes and layouts query it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fzero.errors import FzeroValueError
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.sharding.shard_regions import part_shape
from fzero.transforms.dim_sharding import DimSharding
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.transform import Transform, find
from fzero.transforms.zero import Parallel, ShardParams


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
