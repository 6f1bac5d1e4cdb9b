"""Propagates shards along a dim, for one mesh axis, through a recorded function, so that each rank computes with its
shards.

Along the axis of n ranks, a value is replicated, sharded along a dim (`fzero.sharding.placements.Shard`), or partial
(each rank has one summand). For each op there are several strategies (fzero/sharding/op_strategies.py). The one whose
inputs take the fewest bytes to convert is chosen; the order of the strategies breaks ties. Each value is converted to a
placement at most once, and a view of a partial value becomes a view of the reduced value. An op without a suitable
strategy is computed on replicated inputs, and is listed. Where ranks communicate, the graph contains a marker, which a
pass turns into an op of the program.

The resulting graph is the same on every rank: the index of the rank along the axis is one of its inputs.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.fx as fx

import fzero.sharding.token_index_strategies  # noqa: F401 - has rules
from fzero._compat import compat
from fzero.random import DRAW
from fzero.sharding.decompositions import DECOMPOSITIONS
from fzero.sharding.flat_propagation import constants_for_shapes
from fzero.sharding.graph_writer import (
    MARKERS,
    RESHAPES,
    GraphWriter,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from fzero.sharding.layer_strategies import rule_of
from fzero.sharding.op_strategies import (
    PARTIAL,
    Anywhere,
    Attention,
    Place,
    Strategy,
    WholeOp,
    divides,
    in_view,
    named_arguments,
    nbytes_of,
    part,
    shape_of,
    values_of,
)
from fzero.sharding.placements import Shard
from fzero.trace.flops import product_flops
from fzero.trace.guards.user_frames import line
from fzero.trace.meta_cache import FakeResults
from fzero.trace.recorder import Recorded
from fzero.trace.storages import is_view
from fzero.trace.subgraph import ancestors, extract

__all__ = [
    "MARKERS",
    "PARTIAL",
    "ShardedGraph",
    "EndPlacements",
    "Exchanged",
    "MadeWhole",
    "Place",
    "RankShare",
    "OutputPlacement",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "propagate",
    "reduce_scatter",
]

aten = torch.ops.aten


class OutputPlacement(enum.StrEnum):
    """The requested placement of an output, if it is neither a `Shard` nor None (replicated)."""

    FREE = "free"  # any placement except partial
    SUMMAND = "summand"  # partial if it already is, else replicated
    PARTIAL = "partial"  # always partial; of a replicated value, the first rank gets all


@dataclass(frozen=True)
class MadeWhole:
    """An op that every rank computes on replicated inputs, for which `nbytes` bytes were gathered. `line` is the user's
    line, or "" if it is not known. `inputs` are the indices of the function's sharded inputs that the op depends on."""

    op: str
    nbytes: int
    line: str
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
            in `given`, and by int64[1], the rank's index along the axis, if `has_index`. Its outputs are followed by
            the values that are passed on.
        places: the placements of the outputs.
        varies: the nodes of the graph whose values differ between ranks.
        whole: the ops that are computed on replicated inputs.
        exchanged: for each output, the exchanged values that could be passed on.
        read: for each input, the values in `given` that are read.
        values: the placements of the values of the original function, by name.
    """

    graph: Recorded
    places: tuple[Anywhere, ...]
    has_index: bool
    varies: frozenset[fx.Node]
    whole: tuple[MadeWhole, ...]
    exchanged: tuple[tuple[Exchanged, ...], ...] = ()
    read: tuple[tuple[Exchanged, ...], ...] = ()
    values: Mapping[str, Place] = field(default_factory=dict)


@dataclass(frozen=True)
class EndPlacements:
    """The placements of a function's inputs along an axis of n ranks, and the requested placements of its outputs. The
    attributes are arguments of `propagate`."""

    n: int
    places: tuple[Place, ...]
    wanted: tuple[OutputPlacement | Shard | None, ...]
    leaves: frozenset[int]
    stream: Shard | None
    by_position: Attention | None

    def of_a_rank(self, graph: Recorded, inputs: Sequence[fx.Node], ends: Sequence[fx.Node]) -> dict[str, RankShare]:
        """For the values between the inputs and some ends of a graph, the share of each that a rank has, by name. The
        ends are the outputs, followed by the values that are saved in addition."""
        part = extract(graph, inputs, ends, [x.name for x in inputs])
        made = propagate(
            part,
            self.n,
            self.places,
            [*self.wanted, *[OutputPlacement.FREE] * (len(ends) - len(self.wanted))],
            leaves=self.leaves,
            stream=self.stream,
            by_position=self.by_position,
        )
        shares: dict[str, RankShare] = {}
        for x in part.graph.nodes:
            if isinstance(place := made.values.get(x.name), Shard):
                shares[x.name] = RankShare(self.n, self.n)
            elif place == PARTIAL:  # The reduced value is saved: scattered to the residual stream, or replicated.
                kept, computed = self.stream is not None, bool(product_flops(x))
                shares[x.name] = RankShare(self.n if kept else 1, self.n if computed else 1)
        return shares


class RankShare(NamedTuple):
    """The number of shards in which the ranks of an axis hold a value, and the number of shards in which they compute
    it."""

    held: int
    computed: int


def propagate(
    graph: Recorded,
    n: int,
    places: Sequence[Place],
    wanted: Sequence[OutputPlacement | Literal["free", "summand", "partial"] | Shard | None],
    *,
    leaves: frozenset[int] = frozenset(),
    stream: Shard | None = None,
    by_position: Attention | None = None,
    given: Sequence[Sequence[Exchanged]] = (),
    handed_on: Sequence[Sequence[Exchanged]] = (),
) -> ShardedGraph:
    """Returns the function that computes with a rank's shards.

    Args:
        graph: the function on full values.
        n: the size of the axis.
        places: the placements of its inputs.
        wanted: the requested placements of its outputs.
        leaves: the indices of the inputs that are parameters. These are gathered only for ops without a strategy.
        stream: the placement of the values that pass between blocks (the residual stream). Partial values are reduced
            to it.
        by_position: how attention is computed if its inputs are sharded by position.
        given: for each input, the values derived from it that were exchanged earlier.
        handed_on: for each output, the exchanged values to return in addition.
    """
    return _Propagation(graph, n, places, wanted, leaves, stream, by_position, given).result(handed_on)


_PASSING = {
    aten.neg.default,
    aten.clone.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.add.Tensor,
    aten._to_copy.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    operator.getitem,
}
"""Ops through which a partial value may pass unreduced on its way to an output, in addition to views."""
_REMADE = {aten.expand.default, *RESHAPES, aten.unsqueeze.default, aten.full.default, aten.permute.default}
_ALWAYS_REMADE = {
    aten.index_put.default,
    aten.embedding_dense_backward.default,
    aten.mm.default,
    aten.bmm.default,
    DRAW,
}


_SHARED = 16
"""The factor on the cost of summing the gradient of a sharded weight. Gathering the values that the gradient is
computed from is cheaper overall, because they are gathered once for several weights."""


class _Propagation:
    """The propagation through one function. It visits the ops in order, chooses a strategy for each, and writes the op
    on shards to the new graph. `made` has, for each value of the original function, the nodes of the new graph by
    placement."""

    def __init__(
        self,
        source: Recorded,
        n: int,
        places: Sequence[Place],
        wanted: Sequence[OutputPlacement | str | Shard | None],
        leaves: frozenset[int],
        stream: Shard | None,
        by_position: Attention | None,
        given: Sequence[Sequence[Exchanged]],
    ):
        names = [x.name for x in source.inputs]
        self.source = constants_for_shapes(extract(source, source.inputs, source.outputs, names))
        self.n, self.places, self.stream = n, places, stream
        self.by_position: Attention | None = by_position
        self.wanted: list[OutputPlacement | Shard | None] = [
            OutputPlacement(w) if isinstance(w, str) else w for w in wanted
        ]
        self.graph = compat.Graph()
        mode = next(x.meta["val"].fake_mode for x in self.source.graph.nodes if x.op != "output")
        results = FakeResults()
        self.write = GraphWriter(self.graph, mode, results, n)
        self.rewrite = GraphWriter(self.source.graph, mode, results, n)  # rewrites ops into other ops, on full values
        self.place: dict[fx.Node, Place] = {}  # the natural placement of each value of the original function
        self.made: dict[fx.Node, dict[Place, fx.Node]] = {}
        self.several: dict[fx.Node, tuple[tuple[fx.Node, ...] | fx.Node, tuple[Place, ...]]] = {}
        self.back: dict[fx.Node, Shard] = {}  # for ops, the placement to which their results are exchanged
        self.leaves: set[fx.Node] = set()
        self.whole: list[MadeWhole] = []
        self.replaced: dict[str, fx.Node] = {}  # by the name of an op, the node that replaced it
        self.later: dict[fx.Node, bool] = {}  # cached results of `_summed_later`
        self.light: dict[fx.Node, bool] = {}
        passed = [*zip(self.source.inputs, places, strict=True), *zip(self.source.outputs, wanted, strict=True)]
        shapes = (tuple(x.meta["val"].shape) for x, place in passed if stream is not None and place == stream)
        self.streams = list(dict.fromkeys(shapes))
        for i, (x, place) in enumerate(zip(self.source.inputs, places, strict=True)):
            self._input(x, place, i in leaves)
        inputs = dict(zip(self.source.inputs, given, strict=False))
        self.given = {x: [(e, self._given(x, e)) for e in exchanged] for x, exchanged in inputs.items()}
        self.ways: dict[fx.Node, tuple[fx.Node, Way]] = {}  # for values computed from one input only
        for x in inputs:
            self._on_way(x, x, ())
        for x in self.source.inputs if by_position else ():  # a replicated input of a block, which comes from the batch
            if self.place[x] is None and x not in self.leaves and stream and tuple(shape_of(x)) in self.streams:
                self.place[x] = stream
                self.made[x][stream] = self.write.take_shard(self.made[x][None], stream)

    def _given(self, x: fx.Node, exchanged: Exchanged) -> fx.Node:
        new, value = self.graph.placeholder(f"{x.name}_exchanged"), x.meta["val"]
        shape = part(exchanged.shape, exchanged.place, self.n)
        new.meta["val"] = compat.new_fake(value.fake_mode, shape, exchanged.dtype, value.device)
        self.write.last_input = new
        return new

    def _on_way(self, node: fx.Node, source: fx.Node, way: Way) -> None:
        """Uses the exchanged values that were given for a value that these ops compute from an input."""
        self.ways[node] = source, way
        for exchanged, new in self.given[source]:
            if exchanged.way == way and isinstance(node.meta["val"], torch.Tensor):
                self.made[node].setdefault(exchanged.place, new)

    def _input(self, x: fx.Node, place: Place, leaf: bool) -> None:
        value = x.meta["val"]
        assert divides(value.shape, place, self.n), f"{x.name}{list(value.shape)} has no {self.n} parts at {place}"
        new = self.graph.placeholder(x.name)
        if isinstance(place, Shard):
            # a rank's shard is a separate, contiguous tensor
            shape = part(value.shape, place, self.n)
            new.meta["val"] = compat.new_fake(value.fake_mode, shape, value.dtype, value.device)
        else:
            new.meta["val"] = value
        self.write.last_input, self.write.device = new, value.device
        self._put(x, place, new)
        if leaf:
            self.leaves.add(x)

    def _put(self, node: fx.Node, place: Place, new: fx.Node) -> None:
        self.place[node] = place
        self.made[node] = {place: new}
        self._goes_on(node)

    def _goes_on(self, node: fx.Node) -> None:
        """Uses the exchanged values that were given for a value, if it is computed from one input only."""
        before = node.all_input_nodes
        if len(before) == 1 and before[0] in self.ways:
            source, way = self.ways[before[0]]
            self._on_way(node, source, (*way, _said(node)))

    def result(self, handed_on: Sequence[Sequence[Exchanged]]) -> ShardedGraph:
        """Propagates through the function and returns it on shards, with the values in `handed_on` as additional
        outputs."""
        node = next(iter(self.source.graph.nodes))
        while node.op != "output":
            before = node.prev
            self.write.place = self.rewrite.place = node.meta.get("place")
            if node.op == "call_function" and self._decomposed(node):
                node = before.next
                continue
            self._node(node)
            node = node.next
        outputs = self.source.outputs
        places: list[Place] = [self._out_place(x, want) for x, want in zip(outputs, self.wanted, strict=True)]
        new = [self._get(x, place) for x, place in zip(outputs, places, strict=True)]
        exchanged = [self._exchanged(x, want) for x, want in zip(outputs, self.wanted, strict=True)]
        more = [(e, made[e]) for wanted, made in zip(handed_on, exchanged, strict=False) for e in wanted]
        places += [e.place for e, _ in more]
        numbered, varies = self.write.finish([*new, *(node for _, node in more)], self.places)
        graph = Recorded(self.graph, self.source.constants)
        read = tuple(tuple(e for e, new in self.given.get(x, ()) if new.users) for x in self.source.inputs)
        values: dict[str, Place] = {x.name: place for x, place in self.place.items()}
        values.update((name, self.place[x]) for name, x in self.replaced.items() if x in self.place)
        return ShardedGraph(
            graph,
            tuple(places),
            numbered,
            varies,
            tuple(self.whole),
            tuple(tuple(made) for made in exchanged),
            read,
            values,
        )

    def _exchanged(self, output: fx.Node, want: OutputPlacement | Shard | None) -> dict[Exchanged, fx.Node]:
        """The exchanged values of an output whose placement is free, and of the values that ops compute from it
        alone."""
        found: dict[Exchanged, fx.Node] = {}
        left: list[tuple[fx.Node, Way]] = [(output, ())] if want is OutputPlacement.FREE and self.by_position else []
        while left:
            x, way = left.pop(0)
            left += [(u, (*way, _said(u))) for u in x.users if u.op != "output" and u.all_input_nodes == [x]]
            natural = self.place[x]
            for place, new in (self.made.get(_copied(x), {}) | self.made.get(x, {})).items():
                if isinstance(place, Shard) and isinstance(natural, Shard) and place.dim != natural.dim:
                    value = x.meta["val"]
                    found[Exchanged(way, place, tuple(value.shape), value.dtype)] = new
        return found

    def _out_place(self, node: fx.Node, want: OutputPlacement | Shard | None) -> Place:
        place, made = self.place[node], self.made[node]
        if want is None or isinstance(want, Shard):
            return want
        if want is OutputPlacement.SUMMAND:
            return PARTIAL if place == PARTIAL and None not in made else None
        if want is OutputPlacement.PARTIAL:
            return PARTIAL
        if place != PARTIAL:
            return None if None in made and self.stream is None else place
        return next((p for p in made if p != PARTIAL), None)

    # --- operations ---

    def _node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            return
        if node.op == "get_attr":
            self._put(node, None, self.graph.node_copy(node))
        elif node.target is operator.getitem:
            self._item(node)
        elif all(self.place[a] is None for a in node.all_input_nodes):
            self._settle(node, Strategy(dict.fromkeys(node.all_input_nodes), None))
        else:
            self._choose(node)

    def _item(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        i: Any = node.args[1]
        made, places = self.several[source]
        new = made[i] if isinstance(made, tuple) else self.write(operator.getitem, made, i)
        self._put(node, places[i], new)
        back = self.back.get(source)
        sharded = isinstance(places[i], Shard) and len(shape_of(node)) > 3
        if sharded and back is not None and divides(shape_of(node), back, self.n):
            self.place[node] = back
            self._get(node, back)
        if source in self.leaves:
            self.leaves.add(node)

    def _decomposed(self, node: fx.Node) -> bool:
        """Replaces an op of the original function by other ops that have rules, if possible. Returns whether it did."""
        of = DECOMPOSITIONS.get(node.target)
        if of is None or all(self.place[a] is None for a in node.all_input_nodes):
            return False
        with self.source.graph.inserting_before(node):
            new = of(WholeOp(node, self.n, self.place, (), self.by_position), self.rewrite)
        if new is None:
            return False
        for user in list(node.users) if isinstance(new, tuple) else ():
            self.replaced[user.name] = new[user.args[1]]  # type: ignore[index]
            user.replace_all_uses_with(self.replaced[user.name])
            self.source.graph.erase_node(user)
        if isinstance(new, fx.Node):
            self.replaced[node.name] = new
            node.replace_all_uses_with(new)
        self.source.graph.erase_node(node)
        return True

    def _choose(self, node: fx.Node) -> None:
        """Writes an op by the strategy with the lowest price. If none fits, the op is computed on replicated inputs,
        and listed if values had to be gathered for it."""
        inputs = node.all_input_nodes
        whole = Strategy(dict.fromkeys(inputs), None)
        rule = rule_of(node.target)
        op = WholeOp(node, self.n, self.place, self._asked(node), self.by_position)
        found = [s for s in rule(op) if self._fits(node, s)] if rule else []
        prices = [self._price(node, s) for s in (*found, whole)]
        best = (*found, whole)[prices.index(min(prices))]
        if best is whole or min(prices) == math.inf:
            best = whole
            gathered = [a for a in inputs if isinstance(self.place[a], Shard) and self._cost(a, None) > 0]
            if self.by_position is None:  # with `by_position`, no op should need all positions
                gathered = [a for a in gathered if self.place[a] != self.stream or a in self.leaves]
            if gathered:
                self._list(node, gathered)
        self._settle(node, best)

    def _list(self, node: fx.Node, gathered: Sequence[fx.Node]) -> None:
        place = node.meta.get("place")
        needed = ancestors(gathered, stop=set())
        inputs = [i for i, x in enumerate(self.source.inputs) if x in needed and self.places[i] is not None]
        nbytes = sum(nbytes_of(a) for a in gathered)
        self.whole.append(MadeWhole(str(node.target), nbytes, line(place) if place else "", tuple(inputs)))

    def _asked(self, node: fx.Node) -> list[Shard]:
        """The placements that are requested of a result: as an output and, if it reads partial values, as part of the
        residual stream."""
        outputs = (
            zip(self.source.outputs, self.wanted, strict=True) if self.source.graph.output_node() in node.users else ()
        )
        asked = [w for x, w in outputs if x is node and isinstance(w, Shard)]
        if any(self.place[a] == PARTIAL for a in node.all_input_nodes) and (place := self._streams(node)):
            asked.append(place)
        return asked

    def _streams(self, node: fx.Node) -> Shard | None:
        """The placement of a value as part of the residual stream, if it has the same elements as the values that pass
        between blocks."""
        value = node.meta["val"]
        if self.stream is None or not isinstance(value, torch.Tensor):
            return None
        shape = tuple(value.shape)
        if shape in self.streams:
            return self.stream
        alike = [x for x in self.streams if math.prod(x) == value.numel() and x[-1:] == shape[-1:]]
        return in_view(alike[0], self.stream, shape, self.n) if alike else None

    def _settle(self, node: fx.Node, strategy: Strategy) -> None:
        """Writes an op by a strategy."""
        new = self._written(node, strategy)
        out = strategy.places(len(values_of(node)))
        if isinstance(node.meta["val"], (tuple, list)):
            self.place[node] = None
            self.several[node] = new, out
            self._goes_on(node)
            if strategy.back is not None:
                self.back[node] = strategy.back
        else:
            assert isinstance(new, fx.Node)
            self._put(node, out[0], new)
        kept = is_view(node) or node.target in (aten._to_copy.default, aten.clone.default)
        if kept and len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in self.leaves:
            self.leaves.add(node)

    def _written(self, node: fx.Node, strategy: Strategy) -> fx.Node | tuple[fx.Node, ...]:
        def at(a: fx.Node) -> fx.Node:
            return self._get(a, strategy.want[a])

        if strategy.write is None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), at)
            if node.target is aten.as_strided.default:
                args = (self._restrided(args[0], node.args[0].meta["val"]), *args[1:])  # type: ignore[union-attr]
            return self.write(node.target, *args, **kwargs)
        return strategy.write(self.write, fx.map_arg(named_arguments(node), at))

    def _restrided(self, x: fx.Node, like: torch.Tensor) -> fx.Node:
        """A value with the strides of another one, for an op that depends on the memory layout."""
        if x.meta["val"].stride() == like.stride():
            return x
        order = sorted(range(like.dim()), key=lambda d: like.stride(d), reverse=True)
        y = self.write(aten.permute.default, x, order)
        y = self.write(aten.clone.default, y, memory_format=torch.contiguous_format)
        y = self.write(aten.permute.default, y, [order.index(d) for d in range(like.dim())])
        assert y.meta["val"].stride() == like.stride(), "a view of memory with gaps is not sharded"
        return y

    # --- prices ---

    def _fits(self, node: fx.Node, s: Strategy) -> bool:
        if any(p == PARTIAL and self.place[a] != PARTIAL for a, p in s.want.items()):
            return False
        if not all(divides(shape_of(a), p, self.n) for a, p in s.want.items()):
            return False
        return all(divides(v.shape, p, self.n) for v, p in self._results(node, s))

    def _results(self, node: fx.Node, s: Strategy) -> Iterator[tuple[Any, Place]]:
        """The tensors that an op returns, and their placements."""
        values = values_of(node)
        placed = zip(values, s.places(len(values)), strict=True)
        return ((v, p) for v, p in placed if isinstance(v, torch.Tensor))

    def _price(self, node: fx.Node, s: Strategy) -> float:
        """The cost of a strategy in bytes per rank: converting the inputs, the later reduction of partial results, and
        the reductions of the strategy itself."""
        share = (self.n - 1) / self.n
        later = sum(v.numel() * v.dtype.itemsize for v, p in self._results(node, s) if p == PARTIAL)
        if later and self._summed_later(node):
            later = 0
        elif not is_view(node) and any(p == PARTIAL and len(a.users) > 1 for a, p in s.want.items()):
            later *= 1.01  # another reader of the input may need it reduced
        later *= 2 if self.stream is None else 1  # a reduce_scatter to the residual stream costs half an all_reduce
        if later and self.stream is not None and self._is_gradient(node):
            later *= _SHARED
        # `s.sent` is reduced by an all_reduce, which sends it twice.
        return sum(self._cost(a, p) for a, p in s.want.items()) + share * (later + 2 * s.sent)

    def _is_gradient(self, node: fx.Node) -> bool:
        """Whether a value, or a view of it, is an output that is requested as a shard other than that of the residual
        stream."""
        outputs = zip(self.source.outputs, self.wanted, strict=True)
        if any(x is node and isinstance(w, Shard) and w != self.stream for x, w in outputs):
            return True
        return any(is_view(user) and self._is_gradient(user) for user in node.users)

    def _summed_later(self, node: fx.Node) -> bool:
        """Whether a partial value may leave the function unreduced, because only linear ops lie between it and the
        outputs."""
        if node not in self.later:
            self.later[node] = self._all_summed(node)
        return self.later[node]

    def _all_summed(self, node: fx.Node) -> bool:
        if not node.users:
            return False
        for user in node.users:
            if user.op == "output":
                outputs = zip(self.source.outputs, self.wanted, strict=True)
                if any(x is node and w not in (OutputPlacement.SUMMAND, OutputPlacement.PARTIAL) for x, w in outputs):
                    return False
            elif not ((user.target in _PASSING or is_view(user)) and self._summed_later(user)):
                return False
        return True

    def _cost(self, node: fx.Node, want: Place) -> float:
        """The bytes per rank that it takes to convert a value to a placement."""
        made, shape = self.made[node], shape_of(node)
        if want in made:
            return 0.0
        if not divides(shape, want, self.n):
            return math.inf
        root = self._root(node)
        through = self._cost(root, want) if root is not None and want is None else math.inf
        return min(through, *(self._direct(node, have, want) for have in made))

    def _direct(self, node: fx.Node, have: Place, want: Place) -> float:
        nbytes = nbytes_of(node) * (self.n - 1) / self.n
        if have is None and isinstance(want, Shard):
            # Nothing is sent; the small price breaks ties.
            return 1e-3 * nbytes
        if want == PARTIAL or node in self.leaves:
            return math.inf
        if have == PARTIAL:
            # An all_reduce sends twice as much as a reduce_scatter.
            return 2 * nbytes if want is None else nbytes
        if want is None:
            return nbytes
        assert isinstance(have, Shard) and isinstance(want, Shard)
        # Along the same dim, in other groups, the value is gathered and sliced; along another dim,
        # an all_to_all sends only the rank's shard.
        return nbytes * 1.001 if have.dim == want.dim else nbytes / self.n

    # --- values at placements ---

    def _root(self, node: fx.Node) -> fx.Node | None:
        """The source of a view, if the view is to be recomputed from the replicated source, so that only the source is
        converted. None if the view itself is converted."""
        if node.op != "call_function" or self.place[node] is None:
            return None
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if node.target is operator.getitem:
            if not is_view(source):
                return None
            source = source.all_input_nodes[0]
        elif not is_view(node) or len(node.all_input_nodes) > 1:
            return None
        if self.place[source] is None or (self.place[source] == PARTIAL) != (self.place[node] == PARTIAL):
            return None
        if source.meta["val"].numel() <= node.meta["val"].numel() or None in self.made[source]:
            return source
        return source if self.place[source] == PARTIAL and len(source.users) > 1 else None

    def _viewed(self, node: fx.Node, want: Shard) -> tuple[fx.Node, Shard] | None:
        """For a partial value that is another partial value in a different shape: that other value, and the placement
        of it that corresponds to `want`."""
        root = self._root(node) if self.place[node] == PARTIAL and node.target in RESHAPES else None
        place = in_view(shape_of(node), want, shape_of(root), self.n) if root is not None else None
        if root is None or place is None or in_view(shape_of(root), place, shape_of(node), self.n) != want:
            return None
        return (root, place) if divides(shape_of(root), place, self.n) else None

    def _get(self, node: fx.Node, want: Place) -> fx.Node:
        made = self.made[node]
        if want not in made:
            made[want] = self._converted(node, want)
        return made[want]

    def _converted(self, node: fx.Node, want: Place) -> fx.Node:
        """Converts a value to a placement: by recomputing a view of a converted value, by recomputing or slicing a
        replicated value, or by a collective from the available placement with the lowest cost."""
        made = self.made[node]
        if want == PARTIAL:
            return self.write.first_ranks(self._get(node, None))
        root = self._root(node)
        if want is None and root is not None:
            views = node.all_input_nodes[0] if node.target is operator.getitem else node
            args, kwargs = fx.map_arg((views.args, views.kwargs), lambda a: self._get(a, None))
            new = self.write(views.target, *args, **kwargs)
            return new if views is node else self.write(operator.getitem, new, node.args[1])
        if None in made and isinstance(want, Shard):
            if (remade := self._remade(node, want)) is not None:
                return remade
            return self.write.take_shard(made[None], want)
        if isinstance(want, Shard) and (viewed := self._viewed(node, want)):
            return self.write.view(self._get(*viewed), part(shape_of(node), want, self.n))
        have = min(made, key=lambda p: self._direct(node, p, want))
        if isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim:
            return self.write.take_shard(self._get(node, None), want)
        return self.write.converted(made[have], have, want)

    def _remade(self, node: fx.Node, want: Shard) -> fx.Node | None:
        """A shard of a replicated value, computed from shards of its inputs, if these are smaller than the value."""
        if (
            node.op != "call_function"
            or not self._light(node)
            or any(None not in self.made[a] for a in node.all_input_nodes)
        ):
            return None
        rule = rule_of(node.target)
        for s in rule(WholeOp(node, self.n, self.place, (want,))) if rule else ():
            if s.places(1) == (want,) and self._fits(node, s):
                made = self._written(node, s)
                return made if isinstance(made, fx.Node) else None
        return None

    def _light(self, node: fx.Node) -> bool:
        """Whether the inputs of an op are smaller than its result."""
        if node not in self.light:
            self.light[node] = self._smaller(node)
        return self.light[node]

    def _smaller(self, node: fx.Node) -> bool:
        if node.op != "call_function" or isinstance(node.meta["val"], (tuple, list)) or self.place[node] is not None:
            return False
        if node.target in _ALWAYS_REMADE:
            return True
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default
        if not (node.target in _REMADE or pointwise):
            return False
        heavy = [a for a in node.all_input_nodes if not self._light(a)]
        return sum(a.meta["val"].numel() for a in heavy) < node.meta["val"].numel()


def _copied(node: fx.Node) -> fx.Node:
    """The value that another one is a copy of with a different memory layout; the value itself if it is not a copy."""
    inner = node.all_input_nodes[0] if node.target is aten.permute.default else node
    if inner.target is not aten.clone.default:
        return node
    source = inner.all_input_nodes[0]
    if inner is node:
        return source
    back = source.target is aten.permute.default and [source.args[1][d] for d in node.args[1]]  # type: ignore[index]
    return source.all_input_nodes[0] if back == list(range(len(shape_of(node)))) else node


def _said(node: fx.Node) -> str:
    """An op with one input as text, without the input."""
    return f"{node.target}{fx.map_arg((node.args, node.kwargs), lambda _: None)}"
