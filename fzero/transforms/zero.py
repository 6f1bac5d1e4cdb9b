"""Shards state over mesh axes: data_parallel, shard_opt_state, shard_grads, shard_params (ZeRO).

All four act on the program through one pass, fzero/transforms/zero_pass.py, according to the sharding that they request
together (fzero/transforms/zero_placement.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fzero._utils.arguments import Predicate, accepts, keywords, predicate
from fzero.errors import FzeroTypeError
from fzero.sharding.layout import Leaf
from fzero.transforms.transform import Transform, applied

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
