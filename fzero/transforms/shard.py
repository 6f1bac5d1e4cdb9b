"""data_parallel, shard_opt_state, shard_grads, shard_params: ZeRO. Act on the program, all four through one pass:
fzero/passes/shard.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fzero.arguments import Predicate, accepts, predicate
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.layout import Leaf
from fzero.mesh import AbstractMesh
from fzero.transforms.base import Transform, applied

Where = Predicate


@dataclass(frozen=True)
class Parallel(Transform):
    """What the four have in common: an axis, and how much is sharded over it (`stage`)."""

    axis: str = "data"
    where: Where | None = None
    order: ClassVar[int] = 50
    stage: ClassVar[int] = 0

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Parallel) and self.stage and other.stage and other.axis != self.axis:
            return f"ZeRO shards over one axis: {self.axis!r} and {other.axis!r} are two"
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


def shard_opt_state(step: Any = None, *, axis: str = "data", where: Where | None = None) -> Any:
    """ZeRO-1: optimizer state is sharded over `axis`; each rank updates its shard and the new parameters are gathered.

    Args:
        step: a step; without one a transform is returned.
        axis: the mesh axis; the batch is cut along it too.
        where: predicate `(path, leaf)` of the parameters whose state is sharded; by default all. `leaf` is a meta
            tensor.

    Communication: reduce_scatter of gradients, once a step, and all_gather of parameters: (N-1)/N x (4P + 4P) bytes
        sent per rank and step in fp32, the volume of `data_parallel`.
    Memory: at rest 4P + 8P/N bytes per rank with fp32 Adam; with `mixed_precision` 12P/N, and 2P during the step.

    Raises:
        TransformError: another sharding of the step over another axis or with another `where`.
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


def shard_grads(step: Any = None, *, axis: str = "data", where: Where | None = None) -> Any:
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


def shard_params(step: Any = None, *, axis: str = "data", where: Where | None = None) -> Any:
    """ZeRO-3: parameters, gradients and optimizer state are sharded; a block's parameters are whole only while it runs.

    Args:
        step: a training or evaluation step; without one a transform is returned.
        axis: the mesh axis; the batch is cut along it too.
        where: predicate `(path, leaf)` of the parameters that are sharded, by default all. Keep small ones whole with
            `where=lambda path, leaf: leaf.numel() > 10_000`. Leaves with fewer elements than the axis has ranks are
            always whole.

    Communication: all_gather of each block's parameters for its forward and again for its vjp, in the compute dtype,
        and reduce_scatter of its gradients: (N-1)/N x 3 x 4P bytes sent per rank and step in fp32, per micro-batch
        under `accumulate` unless `vertical`.
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
    """The record, if its arguments are of the right kind."""
    problems = (
        []
        if isinstance(record.axis, str) and record.axis
        else [f"axis={record.axis!r}: a transform takes the name of one axis"]
    )
    problems += predicate("where", record.where)
    if problems:
        raise FzeroTypeError(
            message(
                record.name,
                "these arguments cannot work",
                problems,
                "e.g. axis='data', where=lambda path, leaf: leaf.numel() > 10_000",
            )
        )
    return record


@dataclass(frozen=True)
class Zero:
    """What the parallel transforms of a step ask for, on a given mesh. Axes of one device are no axes."""

    records: tuple[Parallel, ...]
    mesh: AbstractMesh
    casts: Callable[[Leaf], bool]  # whether a leaf is computed in another dtype than it rests in

    @property
    def axis(self) -> str | None:
        axis = next((r.axis for r in self.records if r.stage), None)
        return axis if axis and self.mesh.axes.get(axis, 1) > 1 else None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes along which the batch is cut, in mesh order."""
        wanted = {r.axis for r in self.records}
        return tuple(a for a, size in self.mesh.axes.items() if a in wanted and size > 1)

    def _shards(self, leaf: Leaf, stage: int) -> bool:
        if (
            self.axis is None or leaf.role == "mutable" or leaf.numel < self.mesh.axes[self.axis]
        ):  # new values come whole to every rank
            return False
        return any(r.shards(leaf) for r in self.records if r.stage >= stage)

    def opt_state(self, param: Leaf) -> bool:
        return self._shards(param, 1)

    def grads(self, param: Leaf) -> bool:
        return self._shards(param, 2)

    def params(self, param: Leaf) -> bool:
        """Whether a parameter is whole only around the lines that read it."""
        return self._shards(param, 3)

    def rests_sharded(self, param: Leaf) -> bool:
        """Whether a parameter rests as a shard: also if it is a master that is only read to be cast."""
        return self._shards(param, 3) or (self._shards(param, 1) and self.casts(param))

    def check(self) -> None:
        problems = [f"{r}: the mesh has {self.mesh}" for r in self.records if r.axis not in self.mesh.axes]
        if problems:
            raise FzeroValueError(
                message(
                    self.records[0].name,
                    "unknown mesh axis",
                    problems,
                    "name an axis of the mesh: axis='data', or make_mesh(data=...)",
                )
            )
        named = {r.axis for r in self.records}
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
