"""Defines the attributes of lines: all that a line says beside its arguments and its results, a frozen dataclass an op.

A row of the op table names the class of its lines (`Op.attrs`, fzero/ir/ops/op.py), and `misformed` refuses any
other and any field that is not of its type. What many ops say is a base class here, which `Line` reads by a property
(`line.micro`, `line.axes`): who asks need not know which op it is. Of the ops themselves this file knows nothing.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch

from fzero.sharding.shard_regions import Dim
from fzero.trace.joint_graph import Joint
from fzero.trace.recorder import Recorded

# --- attributes of several ops ---


@dataclass(frozen=True, kw_only=True)
class Attrs:
    """Base of the attributes of a line; says nothing itself."""

    @functools.cached_property
    def ill_typed(self) -> list[str]:
        """The fields that are not of their types, in words."""
        return [
            f"{name} = {x!r} is not a {getattr(hint, '__name__', hint) if not typing.get_args(hint) else hint}"
            for name, (hint, fits) in _hints(type(self)).items()
            if not fits(x := getattr(self, name))
        ]


@dataclass(frozen=True, kw_only=True)
class Repeated(Attrs):
    """`micro`: the micro-batch that a line repeated without a loop is for, and how many there are."""

    micro: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Guessed(Attrs):
    """`guess`: carried out on a guess (fzero/transforms/speculate_pass.py)."""

    guess: bool = False


@dataclass(frozen=True, kw_only=True)
class Over(Attrs):
    """`axes`: the mesh axes that it moves, cuts or counts along."""

    axes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CutAttrs(Over):
    """`dims`: along which the first of its axes cut, other than flat."""

    dims: tuple[Dim, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Counted(Attrs):
    """`count`: how many parts or turns there are."""

    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class DealAttrs(Over, Counted):
    """The number of shards that are dealt."""

    count: int = field()


@dataclass(frozen=True, kw_only=True)
class Side(Attrs):
    """`on`: where it computes."""

    on: Literal["device", "host"] = "device"


# --- calls ---


@dataclass(frozen=True)
class BlockCall(Attrs):
    """A call of a block: its joint graph, the number of the call, the part that runs ("both" if forward and vjp are one
    function), the block's arguments, and the gradients of the vjp.

    The arguments of the line follow from `inputs` once it is settled what the block keeps.
    """

    joint: Joint
    number: int
    part: Literal["forward", "backward", "both"]
    inputs: tuple[str, ...] = ()
    grads: tuple[int, ...] = ()


class Segment(NamedTuple):
    """The part of a function that was cut: `index` of `count`; `of` is the function's own number."""

    of: int
    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class CallAttrs(Repeated, Guessed, Side):
    """`of_sums`: that it reads what the sums of ranks and
    micro-batches add up to, where other lines read this one's own; `weights`: that it makes gradients of parameters,
    which no other block waits for."""

    block: BlockCall | None = None
    segment: Segment | None = None
    of_sums: bool = False
    weights: bool = False


# --- values ---


@dataclass(frozen=True, kw_only=True)
class CastAttrs(Repeated, Guessed):
    """`dtype`: of the result."""

    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class BufferAttrs(Side):
    """`leaves`: that the buffers are for."""

    leaves: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PartAttrs(Repeated, Counted):
    """A micro-batch: by `micro`, or, of `count`, that of each turn of the loop around it."""


@dataclass(frozen=True, kw_only=True)
class PartIndexAttrs(PartAttrs, Over):
    """The same, and the axes that split the batch."""

    axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShardOfAttrs(Over):
    """`shape`: of the whole leaf that `axes` shard."""

    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DrawAttrs(ShardOfAttrs):
    """`base`: where the random words of the whole leaf begin."""

    base: int


# --- control ---


@dataclass(frozen=True, kw_only=True)
class UpdateAttrs(Attrs):
    """`graph`: the optimizer; `sums` and `maxima`: the names of what it reads of all micro-batches and ranks together;
    `leaf`: the name of a shard → the leaf that it is of. The gradients are the program's."""

    graph: Recorded
    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    leaf: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TurnsAttrs(Counted):
    """The number of times that its own lines are carried out; as plans count, where that is settled at run time."""

    count: int = field()


@dataclass(frozen=True, kw_only=True)
class JoinAttrs(Attrs):
    """`reduction`: how values become one, "sum", "max" or "min"."""

    reduction: str


@dataclass(frozen=True, kw_only=True)
class AddAttrs(JoinAttrs, Repeated):
    """A sum over micro-batches that are repeated without a loop."""

    micro: tuple[int, int] = field()


@dataclass(frozen=True, kw_only=True)
class AssignAttrs(Guessed):
    """`restores`: that it takes a guess back."""

    restores: bool = False


# --- transfers ---


@dataclass(frozen=True, kw_only=True)
class GatherAttrs(Repeated, Over):
    """A transfer between the ranks along `axes`."""


@dataclass(frozen=True, kw_only=True)
class ReduceAttrs(GatherAttrs, JoinAttrs):
    """One that reduces what it moves."""


@dataclass(frozen=True, kw_only=True)
class ScatterAttrs(ReduceAttrs):
    """`grid`: the axes that a whole is padded for, if there are more than it is cut over here. `rows`: whether each
    rank gets its part of dim 0, as a tensor of its own."""

    grid: tuple[str, ...] = ()
    rows: bool = False


@dataclass(frozen=True, kw_only=True)
class CopyAttrs(Repeated, Guessed):
    """Attributes of a copy between tiers."""


@dataclass(frozen=True, kw_only=True)
class SendAttrs(Over):
    """`shift`: the distance to the receiving rank along the axis. `every`: in one of so many steps. `once`: for values
    that no step writes. `leaves`: the paths sent. `number`: the send's own."""

    shift: int
    every: int = 1
    once: bool = False
    leaves: tuple[str, ...] = ()
    number: int = 0


class HandedValue(NamedTuple):
    """A value that one rank hands another: its shape and dtype, as a rank holds it, and the axes along which each rank
    has its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HandAttrs(Over):
    """`peer`: the place along the axis of the other rank. `number`: that of the hand and its take, among all
    between two ranks in one direction. `values`: of the message, in their order."""

    peer: int
    number: int
    values: tuple[HandedValue, ...]


@dataclass(frozen=True, kw_only=True)
class TakeAttrs(HandAttrs):
    """Attributes of a take, which are those of its hand."""


@dataclass(frozen=True, kw_only=True)
class WaitAttrs(Repeated):
    """`together`: that every rank has read what went before when it returns (fzero/compiler/buffer_allocation.py);
    `host`: whether the host waits too, not the device alone (fzero/compiler/device_waits.py)."""

    together: bool = False
    host: bool = True


# --- whether they are well formed ---


@functools.cache
def required(kind: type[Attrs]) -> tuple[str, ...]:
    """The fields that have no default."""
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


@functools.cache
def _hints(kind: type[Attrs]) -> dict[str, tuple[Any, Callable[[Any], bool]]]:
    hints = typing.get_type_hints(kind)
    return {f.name: (hints[f.name], _fits(hints[f.name])) for f in fields(kind)}


def _fits(hint: Any) -> Callable[[Any], bool]:
    """Whether a value is of a type: read once, for every line of every program is asked."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda x: True
    if origin is Literal:
        return lambda x: x in inside
    parts = [_fits(h) for h in inside if h is not ...]
    if origin in (typing.Union, types.UnionType):
        return lambda x: any(fits(x) for fits in parts)
    if origin is tuple:
        if inside[1:] == (...,):
            return lambda x: isinstance(x, tuple) and all(map(parts[0], x))
        return lambda x: (
            isinstance(x, tuple) and len(x) == len(parts) and all(f(y) for f, y in zip(parts, x, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        key, value = parts
        return lambda x: isinstance(x, origin) and all(key(k) and value(v) for k, v in x.items())
    return lambda x: isinstance(x, origin or hint) and not (isinstance(x, Attrs) and x.ill_typed)
