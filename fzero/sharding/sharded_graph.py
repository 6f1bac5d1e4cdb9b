"""The function of one rank, and the placements at which its inputs and outputs are passed."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from fzero.sharding.placements import Placement, Shard
from fzero.trace.guards.user_frames import Place
from fzero.trace.recorder import Recorded


class OutputPlacement(enum.StrEnum):
    """A request for the placement of an output that does not name one."""

    FREE = "free"  # any placement except partial
    SUMMAND = "summand"  # partial if it already is, else replicated
    PARTIAL = "partial"  # always partial; of a replicated value, the first rank gets all


Wanted = OutputPlacement | Placement


@dataclass(frozen=True)
class MadeWhole:
    """An op that every rank computes on replicated inputs.

    Attributes:
        op: its name.
        nbytes: the bytes that were gathered for it.
        sizes: the values that were gathered, as text.
        place: the user's line, if it is known.
        inputs: the indices of the function's sharded inputs that the op depends on.
    """

    op: str
    nbytes: int
    sizes: str
    place: Place | None
    inputs: tuple[int, ...]


Way = tuple[str, ...]


@dataclass(frozen=True)
class Exchanged:
    """A value that is computed from one output (or one input) by ops that read nothing else, at a placement to which
    ranks have exchanged it. A function that saves values for another function also passes on such values, so that they
    are not exchanged again."""

    way: Way  # the ops, in order
    place: Shard
    shape: tuple[int, ...] = field(compare=False)  # of the full value
    dtype: torch.dtype = field(compare=False)


@dataclass(frozen=True, eq=False)
class ShardedGraph:
    """A function on shards.

    Attributes:
        graph: its inputs are those of the original function, with shards for the sharded ones, followed by the values
            in `given`, and by int64[], the rank's index along the axis, if `has_index`. Its outputs are followed by
            the values that are passed on.
        places: the placements of the outputs.
        varies: the nodes of the graph whose values differ between ranks.
        whole: the ops that are computed on replicated inputs.
        exchanged: for each output, the exchanged values that could be passed on.
        read: for each input, the values in `given` that are read.
        values: the placements of the values of the original function, by name.
    """

    graph: Recorded
    places: tuple[Placement, ...]
    has_index: bool
    varies: frozenset[fx.Node]
    whole: tuple[MadeWhole, ...]
    exchanged: tuple[tuple[Exchanged, ...], ...] = ()
    read: tuple[tuple[Exchanged, ...], ...] = ()
    values: Mapping[str, Placement] = field(default_factory=dict)
