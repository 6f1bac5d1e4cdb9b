"""Defines the attributes of ops: everything that an op says besides its arguments and results, as one frozen
dataclass per op.

Each row of the op table names the attribute class of its op (`Op.attrs`, fzero/ir/ops/op.py). `misformed` reports any
other class, and any field that is not of its declared type. Attributes that many ops have are declared in base
classes here, and `Instruction` reads them through properties (`op.micro`, `op.axes`), so code that needs one does not
have to know which op it is. This file knows nothing about the ops themselves.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch

from fzero.sharding.placements import Shard
from fzero.trace.joint_graph import Joint
from fzero.trace.recorder import Recorded

# --- attributes of several ops ---


class Record:
    """Base class of records whose fields are checked against their declared types."""

    @functools.cached_property
    def ill_typed(self) -> list[str]:
        """The fields whose values do not have the declared type, described for an error message."""
        return [
            f"{name} = {x!r} is not a {getattr(hint, '__name__', hint) if not typing.get_args(hint) else hint}"
            for name, (hint, fits) in _hints(type(self)).items()
            if not fits(x := getattr(self, name))
        ]


@dataclass(frozen=True, kw_only=True)
class Attrs(Record):
    """Base class of the attributes of an op, and the attributes of an op that has no others.

    `micro`: if the op is repeated for each micro-batch without a loop, the index of its micro-batch and the number of
    micro-batches. `speculative`: whether the op is speculative (fzero/transforms/speculate_pass.py).
    """

    micro: tuple[int, int] | None = None
    speculative: bool = False


@dataclass(frozen=True, kw_only=True)
class Over(Attrs):
    """`axes`: the mesh axes along which the op communicates, shards or counts."""

    axes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TakeShardAttrs(Over):
    """`dims`: the dimensions along which the first of the axes shard, if they do not shard flat."""

    dims: tuple[Shard, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DealAttrs(Over):
    """`count`: the number of shards that are assigned to ranks in round-robin order."""

    count: int


# --- calls ---


@dataclass(frozen=True)
class BlockCall(Record):
    """A call of a block: its joint graph, the number of the call, the part that runs ("both" if forward and vjp are
    one subgraph), the block's arguments, and the indices of the gradients that the vjp computes.

    The arguments of the op follow from `inputs` once it is decided which values the block saves for its backward.
    """

    joint: Joint
    number: int
    part: Literal["forward", "backward", "both"]
    inputs: tuple[str, ...] = ()
    grads: tuple[int, ...] = ()


class Segment(NamedTuple):
    """One partition of a subgraph that was split at collectives: partition `index` of `count`. `of` is the number of
    the subgraph that was split.
    """

    of: int
    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class CallAttrs(Attrs):
    """`on`: whether the device or the host computes the call. `of_sums`: whether the call reads sums over all ranks and
    micro-batches; other calls read this rank's own summands. `weights`: whether the call computes gradients of
    parameters, which no other block waits for.
    """

    block: BlockCall | None = None
    segment: Segment | None = None
    on: Literal["device", "host"] = "device"
    of_sums: bool = False
    weights: bool = False


# --- values ---


@dataclass(frozen=True, kw_only=True)
class CastAttrs(Attrs):
    """`dtype`: the dtype of the result."""

    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class BufferAttrs(Attrs):
    """`leaves`: the paths of the parameters, or other tensors of the state, that the buffers are for. `on`: whether
    they are in the memory of the device or of the host.
    """

    leaves: tuple[str, ...]
    on: Literal["device", "host"] = "device"


@dataclass(frozen=True, kw_only=True)
class PartAttrs(Attrs):
    """Selects a micro-batch: the one that `micro` names or, in a loop of `count` iterations, that of each iteration."""

    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankIndexAttrs(PartAttrs, Over):
    """Selects a micro-batch as `PartAttrs` does, and names the axes along which ranks are counted."""

    axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShardOfAttrs(Over):
    """`shape`: the shape of the full tensor that `axes` shard."""

    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DrawAttrs(ShardOfAttrs):
    """`base`: the offset at which the random words of the full tensor begin."""

    base: int


# --- control ---


@dataclass(frozen=True, kw_only=True)
class UpdateAttrs(Attrs):
    """`graph`: the recorded optimizer. `sums` and `maxima`: the names of the arguments that are reduced over all
    micro-batches and ranks. `leaf`: maps the name of a shard to the tensor that it is a shard of. The gradients are
    those of the program (`Program.grads`).
    """

    graph: Recorded
    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    leaf: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoopAttrs(Attrs):
    """`count`: how often the op's body runs. If that is decided only at run time, the number that plans assume."""

    count: int


@dataclass(frozen=True, kw_only=True)
class JoinAttrs(Attrs):
    """`reduction`: how values are combined into one: "sum", "max" or "min"."""

    reduction: str


@dataclass(frozen=True, kw_only=True)
class AssignAttrs(Attrs):
    """`restores`: whether the assignment rolls a speculative update back."""

    restores: bool = False


# --- transfers ---


@dataclass(frozen=True, kw_only=True)
class RowsAttrs(Over):
    """`rows`: the number of rows that the buffers of the results have."""

    rows: int


@dataclass(frozen=True, kw_only=True)
class ReduceAttrs(Over, JoinAttrs):
    """A transfer between the ranks along `axes` that reduces the values that it moves."""


@dataclass(frozen=True, kw_only=True)
class ScatterAttrs(ReduceAttrs):
    """`grid`: the axes whose sizes determine the padding of the full tensor, if those are more than the axes that
    shard it here. `rows`: whether each rank gets its shard of dimension 0 as a tensor, instead of a flat shard.
    """

    grid: tuple[str, ...] = ()
    rows: bool = False


@dataclass(frozen=True, kw_only=True)
class CopyAttrs(Attrs):
    """`source`, `target`: the memory tier that the copy reads from, and the one that it writes to."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class ReplicateAttrs(Over):
    """`shift`: the distance along the axis to the receiving rank. `every`: the values are sent in one of so many
    steps. `once`: the values are never written by a step and are sent once. `leaves`: the paths of the tensors that
    are sent. `number`: the index of this send.
    """

    shift: int
    every: int = 1
    once: bool = False
    leaves: tuple[str, ...] = ()
    number: int = 0


class SentValue(NamedTuple):
    """A value that one rank sends to another: its shape and dtype on a rank, and the axes along which it varies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SendAttrs(Over):
    """Attributes of a send and of its receive. `peer`: the index of the other rank along the axis. `number`: of both,
    among all messages between two ranks in one direction. `values`: of the message, in their order."""

    peer: int
    number: int
    values: tuple[SentValue, ...]


@dataclass(frozen=True, kw_only=True)
class WaitAttrs(Attrs):
    """`together`: whether the wait returns only after every rank has finished reading the previous transfers
    (fzero/compiler/buffer_allocation.py). `host`: whether the host waits too, rather than only the device
    (fzero/compiler/device_waits.py).
    """

    together: bool = False
    host: bool = True


# --- whether they are well formed ---


@functools.cache
def required(kind: type[Attrs]) -> tuple[str, ...]:
    """Returns the names of the fields that have no default."""
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


@functools.cache
def _hints(kind: type[Attrs]) -> dict[str, tuple[Any, Callable[[Any], bool]]]:
    hints = typing.get_type_hints(kind)
    return {f.name: (hints[f.name], _fits(hints[f.name])) for f in fields(kind)}


def _fits(hint: Any) -> Callable[[Any], bool]:
    """Returns a predicate that checks whether a value has a type. The type is analyzed once, because every op of
    every program is checked.
    """
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda x: True
    if origin is Literal:
        return lambda x: x in inside
    parts = [_fits(h) for h in inside if h is not ...]
    if origin in (typing.Union, types.UnionType):
        return lambda x: any(fits(x) for fits in parts)
    if origin is tuple:
        return _fits_tuple(parts, inside[1:] == (...,))
    if origin is not None and issubclass(origin, Mapping):
        key, value = parts
        return lambda x: isinstance(x, origin) and all(key(k) and value(v) for k, v in x.items())
    return lambda x: isinstance(x, origin or hint) and not (isinstance(x, Record) and x.ill_typed)


def _fits_tuple(parts: Sequence[Callable[[Any], bool]], alike: bool) -> Callable[[Any], bool]:
    """`alike`: the tuple has any length, and all its elements are of the first type."""
    if alike:
        return lambda x: isinstance(x, tuple) and all(map(parts[0], x))
    return lambda x: isinstance(x, tuple) and len(x) == len(parts) and all(f(y) for f, y in zip(parts, x, strict=True))
