"""An op of a recorded function, as the sharding rules see it, and the strategies by which a rank computes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.fx as fx

from fzero.sharding.placements import REPLICATE, SUM, Placement, Shard

Attention = Literal["auto", "heads", "keys"]
Written = Any  # fx.Node | tuple[fx.Node, ...]
Writes = Callable[[Any, dict[str, Any]], Written]


def shape_of(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def nbytes_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def values_of(node: fx.Node) -> Sequence[Any]:
    value = node.meta["val"]
    return value if isinstance(value, (tuple, list)) else (value,)


@functools.cache
def _schema(target: Any) -> tuple[tuple[str, Any, bool, bool], ...]:
    """For each argument of an op: its name, its default, whether it is keyword-only, and whether it is a tensor."""
    return tuple(
        (a.name, a.default_value, a.kwarg_only, str(a.type) in ("Tensor", "Optional[Tensor]"))
        for a in target._schema.arguments
    )


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name, including defaults."""
    schema = _schema(node.target)
    given = dict(zip((a[0] for a in schema), node.args, strict=False)) | node.kwargs
    return {name: given.get(name, default) for name, default, _, _ in schema}


def positional(target: Any, named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Converts arguments by name to positional and keyword-only arguments."""
    schema = _schema(target)
    return [named[a[0]] for a in schema if not a[2]], {a[0]: named[a[0]] for a in schema if a[2]}


@dataclass(frozen=True)
class Operation:
    """An op of the recorded function, with the placements of its inputs.

    Attributes:
        node: the op.
        n: the size of the axis.
        place: the placement of each value that was computed so far.
        asked: placements that are requested of its (first) result.
        attention: how attention is computed if its inputs are sharded by position; None if they are not.
    """

    node: fx.Node
    n: int
    place: Mapping[fx.Node, Placement]
    asked: Sequence[Shard] = ()
    attention: Attention | None = None
    named: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", named_arguments(self.node))

    def __getitem__(self, name: str) -> Any:
        """An argument; None if the op has no argument with this name."""
        return self.named.get(name)

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def inputs(self) -> list[fx.Node]:
        return self.node.all_input_nodes

    @property
    def results(self) -> Sequence[Any]:
        return values_of(self.node)

    @property
    def shape(self) -> list[int]:
        return list(self.results[0].shape)

    def tensors(self) -> list[tuple[str, Any]]:
        """The tensor arguments by name; None for one that is not given."""
        return [(a[0], self.named[a[0]]) for a in _schema(self.target) if a[3]]

    def sharded(self, *nodes: Any) -> list[tuple[fx.Node, Shard]]:
        """The nodes, among these or by default among all inputs, that are sharded, with their placements."""
        found = dict.fromkeys(a for a in (nodes or self.inputs) if isinstance(a, fx.Node))
        return [(a, p) for a in found if isinstance(p := self.place[a], Shard)]

    def partial(self, *nodes: Any) -> bool:
        """Whether all of these nodes are partial sums."""
        return all(isinstance(a, fx.Node) and self.place[a] == SUM for a in nodes)

    def at(self, places: Mapping[fx.Node, Placement]) -> dict[fx.Node, Placement]:
        """The inputs at these placements; inputs that are not mentioned are replicated."""
        return {a: places.get(a, REPLICATE) for a in self.inputs}

    def proposed(self, *nodes: Any) -> list[Shard]:
        """The placements of the nodes, among these or by default among all inputs, that are sharded; and the placements
        that are requested of the result."""
        return list(dict.fromkeys([*(p for _, p in self.sharded(*nodes)), *self.asked]))


@dataclass(frozen=True)
class Strategy:
    """A way to compute an op: the required placements of its inputs, the placements of its results, and how the op is
    written on shards (by default, unchanged). `back`: a placement to which the results are exchanged immediately."""

    want: Mapping[fx.Node, Placement]
    out: tuple[Placement, ...]
    write: Writes | None = None
    back: Shard | None = None
