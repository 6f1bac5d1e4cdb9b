"""Writes ops on shards, conversions between placements and the markers of collectives into a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.sharding.op_strategies import PARTIAL, ExpertShard, Place, part, positional, shape_of
from fzero.sharding.placements import Shard
from fzero.trace.meta_cache import FakeResults

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def all_reduce(x: torch.Tensor, op: str) -> torch.Tensor:
    """Marker: the reduction ("sum", "max" or "min") of the `x` of all ranks."""
    raise AssertionError("a marker is not executable")


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """Marker: gathers [1, *shard] from every rank to [n, *shard]."""
    raise AssertionError("a marker is not executable")


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Marker: this rank's row of the sum of the `x` of all ranks: [n, *shard] to [1, *shard]."""
    raise AssertionError("a marker is not executable")


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """Marker: sends row i of `x` to rank i: [n (to), *shard] to [n (from), *shard]."""
    raise AssertionError("a marker is not executable")


MARKERS = frozenset({all_reduce, all_gather, reduce_scatter, all_to_all})


class GraphWriter:
    """Writes ops and the markers of collectives into a graph, together with their fake values."""

    def __init__(self, graph: fx.Graph, mode: Any, results: FakeResults, n: int):
        self.graph, self.n, self._mode, self._results = graph, n, mode, results
        self.number: fx.Node | None = None  # the placeholder of the rank's index along the axis
        self.last_input: fx.Node | None = None
        self.device = torch.device("cpu")
        self.place: Any = None  # the user's line of the ops being written

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in RESHAPES:
            return self.view(args[0], args[1])
        if target is operator.getitem:
            node = self.graph.call_function(target, args)
            node.meta["val"] = args[0].meta["val"][args[1]]
            return node
        node = self._placed(self.graph.call_function(target, args, kwargs))
        values = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
        with self._mode:
            node.meta["val"] = self._results(target, *values)
        return node

    def _placed(self, node: fx.Node) -> fx.Node:
        if self.place is not None:
            node.meta["place"] = self.place
        return node

    def named(self, target: Any, arguments: Mapping[str, Any]) -> fx.Node:
        args, kwargs = positional(target, arguments)
        return self(target, *args, **kwargs)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A view with another shape; of a contiguous copy, if the strides do not allow a view."""
        value, shape = x.meta["val"], list(shape)
        if list(value.shape) == shape:
            return x
        node = self.graph.call_function(aten.view.default, (x, shape))
        try:
            with self._mode:
                node.meta["val"] = aten.view.default(value, shape)
        except (RuntimeError, ValueError):
            node.args = (self.packed(x), shape)
            with self._mode:
                node.meta["val"] = aten.view.default(node.args[0].meta["val"], shape)  # type: ignore[union-attr]
            node.prepend(node.args[0])  # type: ignore[arg-type]
        return node

    def packed(self, x: fx.Node) -> fx.Node:
        if x.meta["val"].is_contiguous():
            return x
        return self(aten.clone.default, x, memory_format=torch.contiguous_format)

    def all_reduce(self, x: fx.Node, op: str) -> fx.Node:
        return self.mark(all_reduce, x, shape_of(x), op)

    def mark(self, marker: Any, x: fx.Node, shape: Sequence[int], *extra: Any) -> fx.Node:
        """Writes the marker of a collective, whose result has this shape."""
        value = x.meta["val"]
        if marker is not all_reduce:
            x = self.packed(x)
        node = self._placed(self.graph.call_function(marker, (x, *extra)))
        node.meta["val"] = compat.new_fake(self._mode, shape, value.dtype, value.device)
        return node

    def index(self) -> fx.Node:
        """The rank's index along the axis, int64[1]: an input that is added to the graph on first use."""
        if self.number is None:
            first = self.last_input
            with (
                self.graph.inserting_after(first)
                if first
                else self.graph.inserting_before(next(iter(self.graph.nodes)))
            ):
                self.number = self.graph.placeholder("axis_index")
            self.number.meta["val"] = compat.new_fake(self._mode, [1], torch.int64, self.device)
        return self.number

    def finish(self, outputs: Sequence[fx.Node], places: Sequence[Any]) -> tuple[bool, frozenset[fx.Node]]:
        """Ends the graph. Its first inputs have these placements; its further inputs differ between ranks.

        Returns: whether the graph reads the rank's index, and the nodes that differ between ranks.
        """
        self.graph.output(tuple(outputs))
        self.graph.eliminate_dead_code()
        numbered = self.number is not None and bool(self.number.users)
        if self.number is not None and not numbered:
            self.graph.erase_node(self.number)
        inputs = [x for x in self.graph.nodes if x.op == "placeholder"]
        own = {x for x, place in zip(inputs, places, strict=False) if place is not None} | set(inputs[len(places) :])
        for x in self.graph.nodes:
            same = x.target is all_reduce or x.target is all_gather
            if x.op == "call_function" and not same and not own.isdisjoint(x.all_input_nodes):
                own.add(x)
        return numbered, frozenset(own)

    # --- conversions between placements ---

    def take_shard(self, x: fx.Node, place: Shard) -> fx.Node:
        """This rank's shard of a replicated value."""
        shape = shape_of(x)
        dim, groups = place
        size = shape[dim] // groups // self.n
        # [..., groups, n, size, ...]: each group has a run of `size` for every rank
        y = self.view(x, [*shape[:dim], groups, self.n, size, *shape[dim + 1 :]])
        y = self(aten.index_select.default, y, dim + 1, self.index())
        return self.view(y, part(shape, place, self.n))

    def first_ranks(self, x: fx.Node) -> fx.Node:
        """A replicated value as a partial one: the first rank has all of it, the others have zeros."""
        first = self(aten.eq.Scalar, self.view(self.index(), [1] * len(shape_of(x))), 0)
        return self(aten.where.ScalarOther, first, x, 0)

    def parts(self, x: fx.Node, place: Shard) -> fx.Node:
        """All shards of a value, [n, *shard], contiguous."""
        shape, (dim, groups) = shape_of(x), place
        y = self.view(x, [*shape[:dim], groups, self.n, shape[dim] // groups // self.n, *shape[dim + 1 :]])
        order = [dim + 1, *(i for i in range(len(shape) + 2) if i != dim + 1)]
        # If all dims before that of the ranks are 1, the shards are consecutive already.
        if math.prod(shape_of(y)[: dim + 1]) != 1:
            y = self(aten.permute.default, y, order)
        return self.view(y, [self.n, *part(shape, place, self.n)])

    def joined(self, parts: fx.Node, place: Shard) -> fx.Node:
        """The value whose shards are given as [n, *shard]."""
        _, *shape = shape_of(parts)
        dim, groups = place
        y = self.view(parts, [self.n, *shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :]])
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(shape) + 2)]
        if math.prod(shape_of(y)[1 : dim + 2]) != 1:
            y = self(aten.permute.default, y, order)
        shape[dim] *= self.n
        return self.packed(self.view(y, shape))

    def converted(self, x: fx.Node, have: Place | ExpertShard, want: Place | ExpertShard) -> fx.Node:
        """Converts a value from one placement to another."""
        if have is None and isinstance(want, Shard):
            return self.take_shard(x, want)
        if have == PARTIAL and want is None:
            return self.all_reduce(x, "sum")
        if have == PARTIAL and isinstance(want, Shard):
            rows = self.parts(x, want)
            row = self.mark(reduce_scatter, rows, [1, *shape_of(rows)[1:]])
            return self.view(row, shape_of(rows)[1:])
        if isinstance(want, ExpertShard):
            assert have is None, (x, have, want)
            return self._exchanged(x, Shard(want.dim), Shard(want.rows))
        if isinstance(have, ExpertShard):
            assert want is None, (x, have, want)
            return self._exchanged(x, Shard(have.rows), Shard(have.dim))
        assert isinstance(have, Shard), (x, have, want)
        if want is None:
            shape = shape_of(x)
            rows = self.mark(all_gather, self.view(self.packed(x), [1, *shape]), [self.n, *shape])
            return self.joined(rows, have)
        assert isinstance(want, Shard) and want.dim != have.dim, (x, have, want)
        return self._exchanged(x, want, have)

    def _exchanged(self, x: fx.Node, sent: Shard, joined: Shard) -> fx.Node:
        """An all_to_all: sends the shards of a value along `sent` to the ranks, and concatenates the received ones
        along `joined`."""
        rows = self.parts(x, sent)
        return self.joined(self.mark(all_to_all, rows, shape_of(rows)), joined)
