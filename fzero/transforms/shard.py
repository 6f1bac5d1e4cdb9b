"""Shards state over mesh axes: data_parallel, shard_opt_state, shard_grads, shard_params (ZeRO). Acts on the program,
all four through one pass: fzero/passes/shard.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fzero.arguments import Predicate, accepts, predicate
from fzero.boxes import part_shape
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.layout import Leaf
from fzero.mesh import AbstractMesh
from fzero.transforms.base import Transform, applied, find
from fzero.transforms.once_a_step import OnceAStep

Where = Predicate


@dataclass(frozen=True)
class Parallel(Transform):
    """The common part of the four specs: axes, and how much is sharded over them (`stage`)."""

    axis: str | tuple[str, ...] = "data"
    where: Where | None = None
    order: ClassVar[int] = 50
    stage: ClassVar[int] = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes, the first of which cuts first."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Parallel) and self.stage and other.stage and type(self) is not type(other):
            fewer, more = sorted((self.axes, other.axes), key=len)
            if len(more) == 1 and fewer != more:
                return f"ZeRO shards over one axis, or several in one order: {_named(fewer)} and {_named(more)} are two"
            if more[: len(fewer)] != fewer:
                return f"ZeRO cuts leaves one axis after the other: {_named(fewer)} is not how {_named(more)} begins"
        return super().conflict(other) if self.stage or self.axis == getattr(other, "axis", None) else None

    def shards(self, leaf: Leaf) -> bool:
        return self.where is None or accepts(self.name, "where", self.where, leaf.path, leaf.meta)


@dataclass(frozen=True)
class DataParallel(Parallel):
    name: ClassVar[str] = "data_parallel"
    stage: ClassVar[int] = 0


@dataclass(frozen=True)
class ShardOptState(Parallel):
    name: ClassVar[str] = "shard_opt_state"
    stage: ClassVar[int] = 1


@dataclass(frozen=True)
class ShardGrads(Parallel):
    name: ClassVar[str] = "shard_grads"
    stage: ClassVar[int] = 2


@dataclass(frozen=True)
class ShardParams(Parallel):
    name: ClassVar[str] = "shard_params"
    stage: ClassVar[int] = 3


def data_parallel(step: Any = None, *, axis: str = "data") -> Any:
    """Gives every rank along `axis` its own part of the batch; everything else is whole on each.

    Equal to the untransformed step on the whole batch, up to the order of summation.

    Communication: one all_reduce of each block's gradients: 2 (N-1)/N x 4P bytes sent per rank and step.
    Memory: parameters, gradients and optimizer state, whole, on every rank.

    Raises:
        FzeroTypeError: an `axis` that is not a name.
        FzeroValueError: when the program is built, an axis the mesh does not have.

    Paper: Li et al., PyTorch distributed: experiences on accelerating data parallel training, VLDB 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(data_parallel(step), fz.AbstractMesh(data=4), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start") and line.by == "data_parallel"]
        ['all_reduce_start', 'all_reduce_start']
    """
    return applied(_checked(DataParallel(axis)), step)


def shard_opt_state(step: Any = None, *, axis: str | tuple[str, ...] = "data", where: Where | None = None) -> Any:
    """ZeRO-1: optimizer state is sharded over `axis`; each rank updates its shard and the new parameters are gathered.

    Args:
        step: a step; without one a transform is returned.
        axis: the mesh axis; the batch is cut along it too. Or several, the fastest first: `("data", "node")` cuts by
            `data`, and each part by `node`. What moves goes over one after the other, so that each byte crosses the
            last axis once. Another stage may have the first of them: `shard_params(axis="data")`.
        where: predicate `(path, leaf)` of the parameters whose state is sharded; by default all. `leaf` is a meta
            tensor.

    Communication: reduce_scatter of gradients, once a step, and all_gather of parameters: (N-1)/N x (4P + 4P) bytes
        sent per rank and step in fp32, the volume of `data_parallel`. Over two axes of L and M ranks (L-1)/L of it over
        the first, (M-1)/M/L over the second.
    Memory: at rest 4P + 8P/N bytes per rank with fp32 Adam; with `mixed_precision` 12P/N, and 2P during the step.

    Raises:
        TransformError: another `shard_opt_state`; another stage over axes of which these are not the first, nor begin
            with them.
        FzeroTypeError: an `axis` that is not a name or tuple of different names.
        FzeroValueError: when the program is built, an axis the mesh does not have.

    Paper: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, SC 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(shard_opt_state(step), fz.AbstractMesh(data=4), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start") and line.by == "shard_opt_state"]
        ['reduce_scatter_start', 'all_gather_start']
    """
    return applied(_checked(ShardOptState(axis, where)), step)


def shard_grads(step: Any = None, *, axis: str | tuple[str, ...] = "data", where: Where | None = None) -> Any:
    """ZeRO-2: as `shard_opt_state`, and no whole gradient outlives the backward of its block.

    With `accumulate` every micro-batch's gradients leave as shards, and shards are accumulated; vertically a block's
    sum leaves, once a step.

    Args: as `shard_opt_state`.

    Communication: as `shard_opt_state`, but gradients are reduced once a micro-batch, unless it is `accumulate(n,
        vertical=True)`.
    Memory: at rest as `shard_opt_state`; during the step 4P/N bytes of gradients instead of 4P.

    Raises: as `shard_opt_state`.

    Paper: Rajbhandari et al., ZeRO, SC 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(shard_grads(step), fz.AbstractMesh(data=4), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start") and line.by == "shard_grads"]
        ['reduce_scatter_start', 'all_gather_start']
    """
    return applied(_checked(ShardGrads(axis, where)), step)


def shard_params(step: Any = None, *, axis: str | tuple[str, ...] = "data", where: Where | None = None) -> Any:
    """ZeRO-3: parameters, gradients and optimizer state are sharded; a block's parameters are whole only while it runs.

    Args:
        step: a training or evaluation step; without one a transform is returned.
        axis: the mesh axis, or several, as for `shard_opt_state`; the batch is cut along them too.
        where: predicate `(path, leaf)` of the parameters that are sharded, by default all. Keep small ones whole with
            `where=lambda path, leaf: leaf.numel() > 10_000`. Leaves with fewer elements than there are shards are
            always whole.

    Communication: all_gather of each block's parameters for its forward and again for its vjp, in the compute dtype,
        and reduce_scatter of its gradients: (N-1)/N x 3 x 4P bytes sent per rank and step in fp32, per micro-batch
        under `accumulate` unless `vertical`. Over several axes as for `shard_opt_state`; `once_a_step` has what crosses
        the last of them cross it once a step.
    Memory: at rest 12P/N bytes per rank with fp32 Adam (+ padding to a multiple of N per leaf); during the step at most
        two blocks' gathered parameters and one block's gradients besides.

    Raises: as `shard_opt_state`.

    Paper: Rajbhandari et al., ZeRO, SC 2020.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(shard_params(step), fz.AbstractMesh(data=4), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start") and line.by == "shard_params"]
        ['all_gather_start', 'reduce_scatter_start']
    """
    return applied(_checked(ShardParams(axis, where)), step)


def _checked(record: Parallel) -> Parallel:
    """The record, if its arguments are of the right kind. A tuple of one axis is that axis."""
    if isinstance(record.axis, tuple) and len(record.axis) == 1 and isinstance(record.axis[0], str):
        record = replace(record, axis=record.axis[0])
    several = isinstance(record.axis, tuple) and bool(record.axis) and record.stage
    of_names = all(isinstance(a, str) and a for a in (record.axis if several else (record.axis,)))
    what = (
        "the name of an axis, or a tuple of names, the first of which cuts first"
        if record.stage
        else "the name of one axis"
    )
    problems = [] if of_names else [f"axis={record.axis!r}: {record.name} takes {what}"]
    if of_names and several and len({*record.axis}) < len(record.axis):
        problems.append(f"axis={record.axis!r}: an axis is named twice")
    problems += predicate("where", record.where)
    if problems:
        axis = ("data", "node") if several else "data"
        if isinstance(record.axis, list) and record.stage and all(isinstance(a, str) for a in record.axis):
            axis = tuple(record.axis)
        fix = f"e.g. axis={axis!r}, where=lambda path, leaf: leaf.numel() > 10_000"
        raise FzeroTypeError(message(record.name, "invalid arguments", problems, fix))
    return record


def keeps_gathers(transforms: tuple[Transform, ...]) -> OnceAStep | None:
    """The `once_a_step` among them, if parameters are gathered over its axis."""
    once = find(transforms, OnceAStep)
    gathers = once and any(isinstance(t, ShardParams) and once.axis in t.axes for t in transforms)
    return once if gathers else None


def _named(axes: tuple[str, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


@dataclass(frozen=True)
class Zero:
    """The sharding that the parallel transforms of a step ask for, on a given mesh. Axes of one device are no axes."""

    records: tuple[Parallel, ...]
    mesh: AbstractMesh
    casts: Callable[[Leaf], bool]  # whether a leaf is computed in another dtype than it rests in
    once: OnceAStep | None = None
    # by path of a leaf and stage, the axes of the records that shard it: predicates are asked once
    _known: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes along which the batch is cut, in mesh order."""
        wanted = {a for r in self.records for a in r.axes}
        return tuple(a for a, size in self.mesh.axes.items() if a in wanted and size > 1)

    def _axes(self, leaf: Leaf, stage: int) -> tuple[str, ...]:
        """The axes that what a stage shards of a leaf is cut over: those of the record of that stage, or a higher one,
        that has most."""
        found = self._known.get(leaf.path)
        if found is None:
            cut = {r.stage: tuple(a for a in r.axes if self.mesh.axes.get(a, 1) > 1) for r in self.records if r.stage}
            found = self._known[leaf.path] = {r.stage: cut[r.stage] for r in self.records if r.stage and r.shards(leaf)}
        # what it is cut along dims over, before it is cut flat
        dims, left = leaf.layout.axes[: len(leaf.layout.dims)], part_shape(leaf.shape, leaf.cut(self.mesh).along)
        flat = {at: tuple(a for a in axes if a not in dims) for at, axes in found.items()}
        finest = max(flat.values(), key=len, default=())
        # new values of mutable leaves come whole to every rank; of small leaves some ranks would have nothing
        if leaf.role == "mutable" or math.prod(left) < self.mesh.axis_size(finest):
            return dims
        return dims + max((axes for at, axes in flat.items() if at >= stage), key=len, default=())

    def opt_state(self, param: Leaf) -> tuple[str, ...]:
        """The axes that a parameter's optimizer state is cut over, and its update: its finest cut."""
        return self._axes(param, 1)

    def grads(self, param: Leaf) -> tuple[str, ...]:
        """The axes that the gradients of its micro-batches are cut over when they add up."""
        axes = self._axes(param, 2)
        return self.once.before(axes) if self.once and self.once.reductions else axes

    def params(self, param: Leaf) -> tuple[str, ...]:
        """The axes over which it is whole only around the lines that read it."""
        return self._axes(param, 3)

    def stays(self, param: Leaf) -> tuple[str, ...]:
        """The axes over which what is gathered once a step is cut, of blocks whose parts stay gathered."""
        return self.once.before(self.params(param)) if self.once else self.params(param)

    def rests(self, param: Leaf) -> Leaf:
        """The parameter as it rests: a master that is only read to be cast as finely cut as its state."""
        finest = self.opt_state(param)
        return param.with_layout(axes=finest if self.casts(param) else self.params(param), grid=finest)

    def check_once(self, leaves: Sequence[Leaf]) -> None:
        """Raises if none of these parameters is cut over the axis of `once_a_step`, though a transform names it."""
        once = self.once
        cut = [tuple(a for a in r.axes if self.mesh.axes[a] > 1) for r in self.records if r.stage > 1]
        if once is None or not any(once.axis in axes[1:] for axes in cut):
            return  # there is one rank along it, or along all that cut before it
        if any(once.axis in self._axes(leaf, 2) for leaf in leaves):
            return
        num = max(self.mesh.axis_size(axes) for axes in cut)
        few = f"fewer elements than the {num} shards"
        shown = [f"{leaf}: {few if leaf.numel < num else 'left out'}" for leaf in leaves]
        more = [f"and {len(leaves) - 5} more"] if len(leaves) > 5 else []
        what = f"does nothing over axis {once.axis!r}: no parameter is cut over it"
        fix = "let `where` accept large parameters, or leave once_a_step out"
        raise FzeroValueError(message("once_a_step", what, [*(f"{r}" for r in self.records), *shown[:5], *more], fix))

    def check(self) -> None:
        problems = [f"{r}: the mesh has {self.mesh}" for r in self.records if not {*r.axes} <= {*self.mesh.axes}]
        if problems:
            raise FzeroValueError(
                message(
                    self.records[0].name,
                    "unknown mesh axis",
                    problems,
                    "name an axis of the mesh: axis='data', or make_mesh(data=...)",
                )
            )
        if self.once:
            self._check_once(self.once)
        named = {a for r in self.records for a in r.axes}
        idle = [f"{a}={n}" for a, n in self.mesh.axes.items() if n > 1 and a not in named]
        if idle:
            raise FzeroValueError(
                message(
                    "compile",
                    "no transform uses a mesh axis",
                    idle,
                    f"add fz.data_parallel(axis={idle[0].split('=')[0]!r}), or a mesh without it",
                )
            )

    def _check_once(self, once: OnceAStep) -> None:
        """Raises if a step has nothing that would cross the axis less often."""
        axis, cut = once.axis, [r for r in self.records if once.axis in r.axes and r.stage > 1]
        if cut and any(r.axes[0] != axis for r in cut):
            return
        title = f"does nothing over axis {axis!r}" if axis in self.mesh.axes else "unknown mesh axis"
        if axis not in self.mesh.axes:
            what, fix = f"the mesh has no axis {axis!r}, it has {self.mesh}", "name an axis of the mesh"
        elif cut:
            others = [a for a in self.mesh.axes if a != axis]
            what = f"{axis!r} cuts first: gathered over it parameters would be whole until the step ends"
            fix = (
                f"let a faster axis cut before it: axis=({others[0] if others else 'data'!r}, {axis!r}); or keep "
                f"parameters whole: fz.shard_grads"
            )
        else:
            what = (
                f"no parameter or gradient is sharded over {axis!r}, so what crosses it crosses it once a step already"
            )
            fix = f"shard over it too: fz.shard_params(axis=('data', {axis!r})); or leave once_a_step out"
        raise FzeroValueError(message("once_a_step", title, [what, *(f"{r}" for r in self.records)], fix))
