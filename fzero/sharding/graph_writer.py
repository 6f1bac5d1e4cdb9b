"""Writes ops on shards, conversions between placements and the markers of collectives into a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from fzero._compat import compat
from fzero.sharding.operations import positional, shape_of
from fzero.sharding.placements import (
    ExpertShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    Varying,
    local_shape,
)
from fzero.trace.meta_cache import FakeResults

aten = torch.ops.aten
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def all_reduce(x: torch.Tensor, op: str, axes: tuple[str, ...] = ()) -> torch.Tensor:
    """Marker: the reduction ("sum", "max" or "min") of the `x` of all ranks along these axes, by default along the axis
    of the propagation."""
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


def all_to_all_v(x: torch.Tensor, counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Marker: an all-to-all in which rank i sends `counts[i, j]` rows to rank j, in the order of the ranks: [sent,
    *row] to [rows, *row], with zeros after the rows that were received."""
    raise AssertionError("a marker is not executable")


MARKERS = frozenset({all_reduce, all_gather, reduce_scatter, all_to_all, all_to_all_v})


class GraphWriter:
    """Writes ops and the markers of collectives into a graph, together with their fake values."""

    def __init__(self, graph: fx.Graph, mode: Any, results: FakeResults, n: int):
        self.graph, self.n, self.mode, self._results = graph, n, mode, results
        self.number: fx.Node | None = None  # the placeholder of the rank's index along the axis
        self.last_input: fx.Node | None = None
        self.device = torch.device("cpu")
        self.place: Any = None  # the user's line of the ops being written

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in RESHAPES:
            return self.view(args[0], args[1])
        node = self._placed(self.graph.call_function(target, args, kwargs))
        if target is operator.getitem:
            node.meta["val"] = args[0].meta["val"][args[1]]
            return node
        values = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
        with self.mode:
            node.meta["val"] = self._results(target, *values)
        return node

    def _placed(self, node: fx.Node) -> fx.Node:
        if self.place is not None:
            node.meta["place"] = self.place
        return node

    def named(self, target: Any, arguments: Mapping[str, Any]) -> fx.Node:
        args, kwargs = positional(target, arguments)
        return self(target, *args, **kwargs)

    def trace(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Writes the ops that a PyTorch function calls with the values of these nodes, and returns the nodes of its
        results."""
        tracer = _BodyTracer(self)
        args, kwargs = fx.map_arg((args, kwargs), tracer.value)
        with self.mode, tracer:
            out = body(*args, **kwargs)
        return tracer.nodes(out)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A view with another shape; of a contiguous copy, if the strides do not allow a view."""
        value, shape = x.meta["val"], list(shape)
        if list(value.shape) == shape:
            return x
        node = self.graph.call_function(aten.view.default, (x, shape))
        try:
            with self.mode:
                node.meta["val"] = aten.view.default(value, shape)
        except (RuntimeError, ValueError):
            node.args = (self.packed(x), shape)
            with self.mode:
                node.meta["val"] = aten.view.default(node.args[0].meta["val"], shape)  # type: ignore[union-attr]
            node.prepend(node.args[0])  # type: ignore[arg-type]
        return node

    def packed(self, x: fx.Node) -> fx.Node:
        if x.meta["val"].is_contiguous():
            return x
        return self(aten.clone.default, x, memory_format=torch.contiguous_format)

    def mark(self, marker: Any, x: fx.Node, shape: Sequence[int], *extra: Any) -> fx.Node:
        """Writes the marker of a collective, whose result has this shape. `extra`: its further arguments."""
        value = x.meta["val"]
        if marker is not all_reduce:
            x = self.packed(x)
        node = self._placed(self.graph.call_function(marker, (x, *extra)))
        node.meta["val"] = compat.new_fake(self.mode, shape, value.dtype, value.device)
        return node

    def index(self) -> fx.Node:
        """The rank's index along the axis, int64[1]: a view of an input that is added to the graph on first use."""
        if self.number is None:
            first = self.last_input
            with (
                self.graph.inserting_after(first)
                if first
                else self.graph.inserting_before(next(iter(self.graph.nodes)))
            ):
                self.number = self.graph.placeholder("rank_index")
            self.number.meta["val"] = compat.new_fake(self.mode, [], torch.int64, self.device)
        return self.view(self.number, [1])

    def finish(self, outputs: Sequence[fx.Node], places: Sequence[Placement]) -> tuple[bool, frozenset[fx.Node]]:
        """Ends the graph. Its first inputs have these placements; its further inputs differ between ranks.

        Returns: whether the graph reads the rank's index, and the nodes that differ between ranks.
        """
        self.graph.output(tuple(outputs))
        self.graph.eliminate_dead_code()
        numbered = self.number is not None and bool(self.number.users)
        if self.number is not None and not numbered:
            self.graph.erase_node(self.number)
        inputs = [x for x in self.graph.nodes if x.op == "placeholder"]
        own = {x for x, place in zip(inputs, places, strict=False) if not isinstance(place, Replicate)} | set(
            inputs[len(places) :]
        )
        for x in self.graph.nodes:
            same = x.target is all_reduce or x.target is all_gather
            if x.op == "call_function" and not same and not own.isdisjoint(x.all_input_nodes):
                own.add(x)
        return numbered, frozenset(own)

    # --- conversions between placements ---

    def converted(self, x: fx.Node, have: Placement, want: Placement) -> fx.Node:
        """Converts a value from one placement to another."""
        match have, want:
            case Replicate(), Shard():
                return self._take_shard(x, want)
            case Replicate(), Partial("sum"):  # the first rank has all of it, the others have zeros
                first = self(aten.eq.Scalar, self.view(self.index(), [1] * len(shape_of(x))), 0)
                return self(aten.where.ScalarOther, first, x, 0)
            case Partial(op), Replicate():
                return self.mark(all_reduce, x, shape_of(x), op)
            case Partial("sum"), Shard():
                rows = self._shards(x, want)
                return self.view(self.mark(reduce_scatter, rows, [1, *shape_of(rows)[1:]]), shape_of(rows)[1:])
            case Shard(), Replicate():
                shape = shape_of(x)
                rows = self.mark(all_gather, self.view(self.packed(x), [1, *shape]), [self.n, *shape])
                return self._joined(rows, have)
            case Shard(), Shard() if have.dim != want.dim:
                return self._exchanged(x, want, have)
            case Varying(), ExpertShard():
                return self._exchanged(x, Shard(want.dim), Shard(want.rows))
            case ExpertShard(), Varying():
                return self._exchanged(x, Shard(have.rows), Shard(have.dim))
        raise AssertionError(f"{x}: there is no conversion from {have} to {want}")

    def _take_shard(self, x: fx.Node, place: Shard) -> fx.Node:
        """This rank's shard of a replicated value."""
        shape = shape_of(x)
        dim, groups = place
        size = shape[dim] // groups // self.n
        # [..., groups, n, size, ...]: each group has a run of `size` for every rank
        y = self.view(x, [*shape[:dim], groups, self.n, size, *shape[dim + 1 :]])
        y = self(aten.index_select.default, y, dim + 1, self.index())
        return self.view(y, local_shape(shape, place, self.n))

    def _shards(self, x: fx.Node, place: Shard) -> fx.Node:
        """All shards of a value, [n, *shard], contiguous."""
        shape, (dim, groups) = shape_of(x), place
        y = self.view(x, [*shape[:dim], groups, self.n, shape[dim] // groups // self.n, *shape[dim + 1 :]])
        order = [dim + 1, *(i for i in range(len(shape) + 2) if i != dim + 1)]
        # If all dims before that of the ranks are 1, the shards are consecutive already.
        if math.prod(shape_of(y)[: dim + 1]) != 1:
            y = self(aten.permute.default, y, order)
        return self.view(y, [self.n, *local_shape(shape, place, self.n)])

    def _joined(self, shards: fx.Node, place: Shard) -> fx.Node:
        """The value whose shards are given as [n, *shard]."""
        _, *shape = shape_of(shards)
        dim, groups = place
        y = self.view(shards, [self.n, *shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :]])
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(shape) + 2)]
        if math.prod(shape_of(y)[1 : dim + 2]) != 1:
            y = self(aten.permute.default, y, order)
        shape[dim] *= self.n
        return self.packed(self.view(y, shape))

    def _exchanged(self, x: fx.Node, sent: Shard, joined: Shard) -> fx.Node:
        """An all_to_all: sends the shards of a value along `sent` to the ranks, and concatenates the received ones
        along `joined`."""
        rows = self._shards(x, sent)
        return self._joined(self.mark(all_to_all, rows, shape_of(rows)), joined)


class _BodyTracer(compat.TorchDispatchMode):
    """Writes every op that runs inside it to a graph, and returns the fake values of the new nodes."""

    def __init__(self, write: GraphWriter):
        super().__init__()
        self._write, self._nodes, self._alive = write, dict[int, fx.Node](), list[Any]()

    def value(self, node: fx.Node) -> Any:
        """The value of a node, which is known by its identity from now on."""
        self._nodes[id(node.meta["val"])] = node
        return node.meta["val"]

    def node(self, value: torch.Tensor) -> fx.Node:
        return self._nodes[id(value)]

    def nodes(self, values: Any) -> Any:
        """Arguments or results, with the nodes of their tensors."""
        return map_aggregate(values, lambda x: self.node(x) if isinstance(x, torch.Tensor) else x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME_VALUE:
            return args[0]
        if func is torch.ops.prim.device.default:  # `x.device` is an op below a dispatch mode
            return self.node(args[0]).meta["val"].device
        args, kwargs = self.nodes((args, kwargs or {}))
        made = self._write(func, *args, **kwargs)
        if args and made is args[0]:  # a view with the same shape: PyTorch requires a new tensor for it
            with self._write.mode:
                same = func(made.meta["val"], *args[1:])
            self._alive.append(same)  # a tensor that is freed would free its id for another one
            self._nodes[id(same)] = made
            return same
        values = made.meta["val"]
        if not isinstance(values, (tuple, list)):
            return self.value(made)
        items = (
            self._write(operator.getitem, made, i) if isinstance(v, torch.Tensor) else v for i, v in enumerate(values)
        )
        return type(values)([self.value(x) if isinstance(x, fx.Node) else x for x in items])
