"""Propagates placements along one mesh axis through a recorded function, so that each rank computes with its shards.

The propagation visits the ops in order. For each op there are several strategies (fzero/sharding/factors.py). The one
whose inputs take the fewest bytes to convert is chosen; the order of the strategies breaks ties. Each value is
converted to a placement at most once, and a view of a converted value is computed again from the converted value. An op
without a suitable strategy is computed on replicated inputs, and is listed. Where ranks communicate, the graph contains
a marker (fzero/sharding/graph_writer.py), which a pass turns into an op of the program.

The resulting graph is the same on every rank: the index of the rank along the axis is one of its inputs. Two subclasses
propagate other kinds of sharding by the same rules: expert_propagation.py along an axis that also shards the batch,
and flat_propagation.py for ZeRO's flat shards.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx

import fzero.sharding.expert_rules
import fzero.sharding.lookup_rules
import fzero.sharding.rules
import fzero.sharding.view_rules  # noqa: F401
from fzero._compat import compat
from fzero.random import DRAW
from fzero.sharding.bodies import body_of
from fzero.sharding.factors import Rule, rule_of, strategies
from fzero.sharding.graph_writer import RESHAPES, GraphWriter
from fzero.sharding.layer_rules import independent_results
from fzero.sharding.operations import (
    Attention,
    Operation,
    Strategy,
    Written,
    named_arguments,
    nbytes_of,
    shape_of,
    values_of,
)
from fzero.sharding.placements import (
    REPLICATE,
    SUM,
    ExpertShard,
    Partial,
    Placement,
    Routed,
    Shard,
    divides,
    local_shape,
    through_view,
)
from fzero.sharding.shape_constants import constants_for_shapes
from fzero.sharding.sharded_graph import Exchanged, MadeWhole, OutputPlacement, ShardedGraph, Wanted, Way
from fzero.trace.flops import product_flops
from fzero.trace.meta_cache import FakeResults
from fzero.trace.recorder import Recorded, source_place
from fzero.trace.storages import is_view
from fzero.trace.subgraph import ancestors, extract

aten = torch.ops.aten

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


@dataclass(frozen=True)
class EndPlacements:
    """The placements of a function's inputs along an axis of n ranks, and the requested placements of its outputs. The
    attributes are arguments of `propagate`."""

    n: int
    places: tuple[Placement, ...]
    wanted: tuple[Wanted, ...]
    leaves: frozenset[int]
    stream: Shard | None
    attention: Attention | None

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
            attention=self.attention,
        )
        shares: dict[str, RankShare] = {}
        for x in part.graph.nodes:
            place = made.values.get(x.name)
            if isinstance(place, Shard):
                shares[x.name] = RankShare(self.n, self.n)
            elif isinstance(place, Partial):  # The reduced value is saved: scattered to the stream, or replicated.
                scattered, computed = self.stream is not None and place == SUM, bool(product_flops(x))
                shares[x.name] = RankShare(self.n if scattered else 1, self.n if computed else 1)
        return shares


class RankShare(NamedTuple):
    """The number of shards in which the ranks of an axis hold a value, and the number of shards in which they compute
    it."""

    held: int
    computed: int


def propagate(
    graph: Recorded,
    n: int,
    places: Sequence[Placement],
    wanted: Sequence[Wanted],
    *,
    leaves: frozenset[int] = frozenset(),
    stream: Shard | None = None,
    attention: Attention | None = None,
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
        attention: how attention is computed if its inputs are sharded by position.
        given: for each input, the values derived from it that were exchanged earlier.
        handed_on: for each output, the exchanged values to return in addition.
    """
    return Propagation(graph, n, places, wanted, leaves, stream, attention, given).result(handed_on)


class Propagation:
    """The propagation through one function.

    Attributes:
        source: the original function.
        graph: the function of one rank.
        place: the natural placement of each value of the original function: the one at which it was computed.
        base: the placement that each value has as it was recorded: replicated or, in a subclass, varying.
        made: for each value of the original function, the nodes of the new graph by placement.
    """

    def __init__(
        self,
        source: Recorded,
        n: int,
        places: Sequence[Placement],
        wanted: Sequence[Wanted],
        leaves: frozenset[int] = frozenset(),
        stream: Shard | None = None,
        attention: Attention | None = None,
        given: Sequence[Sequence[Exchanged]] = (),
    ):
        self.source = self.prepared(extract(source, source.inputs, source.outputs, [x.name for x in source.inputs]))
        self.n, self.places, self.stream = n, places, stream
        self.attention: Attention | None = attention
        self.wanted = [OutputPlacement(w) if isinstance(w, str) else w for w in wanted]
        self.graph = compat.Graph()
        mode = next(x.meta["val"].fake_mode for x in self.source.graph.nodes if x.op != "output")
        results = FakeResults()
        self.write = GraphWriter(self.graph, mode, results, n)
        self.rewrite = GraphWriter(self.source.graph, mode, results, n)  # writes the bodies of ops, on full values
        self.place: dict[fx.Node, Placement] = {}
        self.base: dict[fx.Node, Placement] = {}
        self.made: dict[fx.Node, dict[Placement, fx.Node]] = {}
        self.several: dict[fx.Node, tuple[Written, tuple[Placement, ...]]] = {}  # ops with several results
        self.back: dict[fx.Node, Shard] = {}  # for ops, the placement to which their results are exchanged
        self.leaves: set[fx.Node] = set()
        self.whole: list[MadeWhole] = []
        self.replaced: dict[str, fx.Node] = {}  # by the name of an op, the node that replaced it
        self.known: dict[tuple[str, fx.Node], bool] = {}  # cached results of `is_on_the_way`
        passed = [*zip(self.source.inputs, places, strict=True), *zip(self.source.outputs, self.wanted, strict=True)]
        shapes = (tuple(x.meta["val"].shape) for x, place in passed if stream is not None and place == stream)
        self.streams = list(dict.fromkeys(shapes))
        for i, (x, place) in enumerate(zip(self.source.inputs, places, strict=True)):
            self._input(x, place, i in leaves)
        inputs = dict(zip(self.source.inputs, given, strict=False))
        self.given = {x: [(e, self._given(x, e)) for e in exchanged] for x, exchanged in inputs.items()}
        self.ways: dict[fx.Node, tuple[fx.Node, Way]] = {}  # for values computed from one input only
        for x in inputs:
            self._on_way(x, x, ())
        for x in self.source.inputs if attention else ():  # a replicated input of a block, which comes from the batch
            if self.place[x] == REPLICATE and x not in self.leaves and stream and tuple(shape_of(x)) in self.streams:
                self.place[x] = stream
                self.made[x][stream] = self.write.converted(self.made[x][REPLICATE], REPLICATE, stream)

    # --- inputs and outputs ---

    def prepared(self, source: Recorded) -> Recorded:
        """Changes the copied original function before it is propagated through."""
        return constants_for_shapes(source)

    def _input(self, x: fx.Node, place: Placement, leaf: bool) -> None:
        value = x.meta["val"]
        assert divides(value.shape, place, self.n), f"{x.name}{list(value.shape)} has no {self.n} shards at {place}"
        new = self.graph.placeholder(x.name)
        new.meta["val"] = value
        if isinstance(place, (Shard, ExpertShard, Routed)):  # a rank's shard is a separate, contiguous tensor
            shape = local_shape(value.shape, place, self.n)
            new.meta["val"] = compat.new_fake(value.fake_mode, shape, value.dtype, value.device)
        self.write.last_input, self.write.device = new, value.device
        self.put(x, place, new)
        if leaf:
            self.leaves.add(x)

    def _given(self, x: fx.Node, exchanged: Exchanged) -> fx.Node:
        new, value = self.graph.placeholder(f"{x.name}_exchanged"), x.meta["val"]
        shape = local_shape(exchanged.shape, exchanged.place, self.n)
        new.meta["val"] = compat.new_fake(value.fake_mode, shape, exchanged.dtype, value.device)
        self.write.last_input = new
        return new

    def _on_way(self, node: fx.Node, source: fx.Node, way: Way) -> None:
        """Uses the exchanged values that were given for a value that these ops compute from an input."""
        self.ways[node] = source, way
        for exchanged, new in self.given[source]:
            if exchanged.way == way and isinstance(node.meta["val"], torch.Tensor):
                self.made[node].setdefault(exchanged.place, new)

    def result(self, handed_on: Sequence[Sequence[Exchanged]] = ()) -> ShardedGraph:
        """Propagates through the function and returns it on shards, with the values in `handed_on` as additional
        outputs."""
        node = next(iter(self.source.graph.nodes))
        while node.op != "output":
            before = node.prev
            self.write.place = self.rewrite.place = source_place(node)
            if node.op == "call_function" and self._replaced_by_body(node):
                node = before.next
                continue
            self._node(node)
            node = node.next
        outputs = list(zip(self.source.outputs, self.wanted, strict=True))
        ends = [self.output(x, want) for x, want in outputs]
        exchanged = [self._exchanged(x, want) for x, want in outputs]
        more = [(e, made[e]) for wanted, made in zip(handed_on, exchanged, strict=False) for e in wanted]
        places = (*(place for _, place in ends), *(e.place for e, _ in more))
        has_index, varies = self.write.finish([*(x for x, _ in ends), *(x for _, x in more)], self.places)
        read = tuple(tuple(e for e, new in self.given.get(x, ()) if new.users) for x in self.source.inputs)
        values = {x.name: place for x, place in self.place.items()}
        values.update((name, self.place[x]) for name, x in self.replaced.items() if x in self.place)
        graph = Recorded(self.graph, self.source.constants)
        whole, offered = tuple(self.whole), tuple(map(tuple, exchanged))
        return ShardedGraph(graph, places, has_index, varies, whole, offered, read, values)

    def output(self, x: fx.Node, want: Wanted) -> tuple[fx.Node, Placement]:
        """The node of an output, and its placement."""
        place, made = self.place[x], self.made[x]
        if want is OutputPlacement.PARTIAL:
            want = SUM
        elif want is OutputPlacement.SUMMAND:
            want = SUM if place == SUM and REPLICATE not in made else REPLICATE
        elif want is OutputPlacement.FREE:
            if isinstance(place, Partial):
                want = next((p for p in made if not isinstance(p, Partial)), REPLICATE)
            else:
                want = REPLICATE if REPLICATE in made and self.stream is None else place
        return self.get(x, want), want

    def _exchanged(self, output: fx.Node, want: Wanted) -> dict[Exchanged, fx.Node]:
        """The exchanged values of an output whose placement is free, and of the values that ops compute from it
        alone."""
        found: dict[Exchanged, fx.Node] = {}
        left: list[tuple[fx.Node, Way]] = [(output, ())] if want is OutputPlacement.FREE and self.attention else []
        while left:
            x, way = left.pop(0)
            left += [(u, (*way, _text(u))) for u in x.users if u.op != "output" and u.all_input_nodes == [x]]
            natural = self.place[x]
            for place, new in (self.made.get(_copied(x), {}) | self.made.get(x, {})).items():
                if isinstance(place, Shard) and isinstance(natural, Shard) and place.dim != natural.dim:
                    value = x.meta["val"]
                    found[Exchanged(way, place, tuple(value.shape), value.dtype)] = new
        return found

    # --- ops ---

    def _node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            return
        if node.op == "get_attr":
            self.put(node, REPLICATE, self.graph.node_copy(node))
        elif node.target is operator.getitem:
            self._item(node)
        elif all(self.place[a] == REPLICATE for a in node.all_input_nodes):
            self.settle(node, self._as_recorded(node))
        else:
            self.choose(node)

    def put(self, node: fx.Node, place: Placement, new: fx.Node) -> None:
        """Records the natural placement of a value, and its node in the new graph."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            # A wrong shape could go unnoticed for a few ops, for example in a view with the recorded size.
            found, expected = list(new.meta["val"].shape), local_shape(value.shape, place, self.n)
            assert found == expected, f"{node.format_node()}: a rank's shape is {found}, not {expected} of {place}"
        self.place[node], self.made[node] = place, {place: new}
        self.base[node] = self.base_of(node, place)
        before = node.all_input_nodes
        if len(before) == 1 and before[0] in self.ways:
            source, way = self.ways[before[0]]
            self._on_way(node, source, (*way, _text(node)))

    def base_of(self, node: fx.Node, place: Placement) -> Placement:
        """The placement that a value has as it was recorded."""
        return REPLICATE

    def _item(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        i: Any = node.args[1]
        made, places = self.several[source]
        new = made[i] if isinstance(made, tuple) else self.write(operator.getitem, made, i)
        self.put(node, places[i], new)
        back = self.back.get(source)
        sharded = isinstance(places[i], Shard) and len(shape_of(node)) > 3
        if sharded and back is not None and divides(shape_of(node), back, self.n):
            self.place[node] = back
            self.get(node, back)
        if source in self.leaves:
            self.leaves.add(node)

    def _replaced_by_body(self, node: fx.Node) -> bool:
        """Replaces an op by its body in the original function, if the placements of its inputs require it."""
        sharded = any(isinstance(self.place[a], Shard) for a in node.all_input_nodes)
        if not sharded or node.target is operator.getitem or self.base_of(node, REPLICATE) != REPLICATE:
            return False
        op = self.operation(node)
        if (body := body_of(op)) is None:
            return False
        with self.source.graph.inserting_before(node):
            new = self.rewrite.trace(lambda *args, **kwargs: body(op, *args, **kwargs), *node.args, **node.kwargs)
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

    def operation(self, node: fx.Node, asked: Sequence[Shard] = ()) -> Operation:
        return Operation(node, self.n, self.place, asked, self.attention)

    def _as_recorded(self, node: fx.Node) -> Strategy:
        """The strategy that computes an op on values as they were recorded."""
        base = self.base_of(node, REPLICATE)
        return Strategy({a: self.base[a] for a in node.all_input_nodes}, (base,) * len(values_of(node)))

    def strategies(self, op: Operation) -> Iterator[Strategy]:
        """The ways to compute an op on shards."""
        if (rule := rule_of(op.target)) is not None:
            yield from (independent_results(op, s) for s in strategies(op, rule, factors(op, rule)))

    def choose(self, node: fx.Node) -> None:
        """Writes an op by the strategy with the lowest price. If none fits, the op is computed on values as they were
        recorded, and listed if values had to be gathered for it."""
        recorded, op = self._as_recorded(node), self.operation(node, self._asked(node))
        found = [s for s in self.strategies(op) if self.fits(node, s)]
        prices = [self.price(node, s) for s in (*found, recorded)]
        best = (*found, recorded)[prices.index(min(prices))] if min(prices) < math.inf else recorded
        if best is recorded:
            inputs = node.all_input_nodes
            gathered = [a for a in inputs if isinstance(self.place[a], Shard) and self.cost(a, REPLICATE) > 0]
            if self.attention is None:  # with `attention`, no op should need all positions
                gathered = [a for a in gathered if self.place[a] != self.stream or a in self.leaves]
            if gathered:
                self._list(node, gathered)
        self.settle(node, best)

    def _list(self, node: fx.Node, gathered: Sequence[fx.Node]) -> None:
        needed = ancestors(gathered, stop=set())
        inputs = [i for i, x in enumerate(self.source.inputs) if x in needed and self.places[i] != REPLICATE]
        nbytes = sum(nbytes_of(a) for a in gathered)
        sizes = ", ".join(f"{shape_of(a)} sharded along {self._dim(a)}" for a in gathered)
        sizes += f" -> {', '.join(str(list(v.shape)) for v in values_of(node) if isinstance(v, torch.Tensor))}"
        self.whole.append(MadeWhole(str(node.target), nbytes, sizes, source_place(node), tuple(inputs)))

    def _dim(self, node: fx.Node) -> str:
        """The dim along which a value is sharded, as text."""
        place = self.place[node]
        assert isinstance(place, Shard)
        return f"dim {place.dim}" + (f" in {place.groups} groups" if place.groups > 1 else "")

    def _asked(self, node: fx.Node) -> list[Shard]:
        """The placements that are requested of a result: as an output and, if it reads partial values, as part of the
        residual stream."""
        asked = [w for w in self.ends(node) if isinstance(w, Shard)]
        if any(self.place[a] == SUM for a in node.all_input_nodes) and (place := self._streams(node)):
            asked.append(place)
        return asked

    def ends(self, node: fx.Node) -> list[Wanted]:
        """The requested placements of a value as an output."""
        if self.source.graph.output_node() not in node.users:
            return []
        return [w for x, w in zip(self.source.outputs, self.wanted, strict=True) if x is node]

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
        return through_view(alike[0], self.stream, shape, self.n) if alike else None

    def settle(self, node: fx.Node, strategy: Strategy) -> None:
        """Writes an op by a strategy."""
        new = self.written(node, strategy)
        if isinstance(node.meta["val"], (tuple, list)):
            self.put(node, REPLICATE, node)
            self.several[node] = new, strategy.out
            if strategy.back is not None:
                self.back[node] = strategy.back
        else:
            self.put(node, strategy.out[0], new)
        if self._is_parameter(node):
            self.leaves.add(node)

    def _is_parameter(self, node: fx.Node) -> bool:
        """Whether a value is a parameter in another form: a view or a copy of it, or its elements scaled or rounded, as
        for products in 8 bits."""
        inputs = node.all_input_nodes
        if is_view(node):
            return len(inputs) == 1 and inputs[0] in self.leaves
        if not (is_pointwise(node.target) and self.leaves.intersection(inputs)):
            return False
        numel = values_of(node)[0].numel()
        return all(math.prod(shape_of(a)) < numel for a in inputs if a not in self.leaves)

    def written(self, node: fx.Node, strategy: Strategy) -> Any:
        """The node that computes an op by a strategy, or a tuple of nodes."""

        def at(a: fx.Node) -> fx.Node:
            return self.get(a, strategy.want[a])

        if strategy.write is not None:
            return strategy.write(self.write, fx.map_arg(named_arguments(node), at))
        args, kwargs = fx.map_arg((node.args, node.kwargs), at)
        if node.target is aten.as_strided.default:
            args = (self._restrided(args[0], node.args[0].meta["val"]), *args[1:])  # type: ignore[union-attr]
        return self.write(node.target, *args, **kwargs)

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

    def fits(self, node: fx.Node, s: Strategy) -> bool:
        """Whether the placements of a strategy are possible."""
        if any(isinstance(p, Partial) and self.place[a] != p for a, p in s.want.items()):
            return False
        if not all(divides(shape_of(a), p, self.n) for a, p in s.want.items()):
            return False
        return all(divides(v.shape, p, self.n) for v, p in _results(node, s))

    def price(self, node: fx.Node, s: Strategy) -> float:
        """The cost of a strategy in bytes per rank: of converting the inputs, and of reducing partial results later."""
        later = sum(v.numel() * v.dtype.itemsize for v, p in _results(node, s) if p == SUM)
        if later and self.is_on_the_way("summed_later", node):
            later = 0
        elif not is_view(node) and any(p == SUM and len(a.users) > 1 for a, p in s.want.items()):
            later *= 1.01  # another reader of the input may need it reduced
        later *= 2 if self.stream is None else 1  # a reduce_scatter to the residual stream costs half an all_reduce
        if later and self.stream is not None and self.is_on_the_way("gradient", node):
            later *= _SHARED
        # A maximum or minimum is always reduced by an all_reduce, which sends it twice.
        extremes = [v for v, p in _results(node, s) if isinstance(p, Partial) and p != SUM]
        later += 2 * sum(v.numel() * v.dtype.itemsize for v in extremes)
        return sum(self.cost(a, p) for a, p in s.want.items()) + later * (self.n - 1) / self.n

    def is_on_the_way(self, what: str, node: fx.Node) -> bool:
        """A cached property of the ops between a value and the outputs: the method `_is_` with this name."""
        if (what, node) not in self.known:
            self.known[what, node] = getattr(self, f"_is_{what}")(node)
        return self.known[what, node]

    def _is_gradient(self, node: fx.Node) -> bool:
        """Whether a value, or a view of it, is an output that is requested as a shard other than that of the residual
        stream."""
        if any(isinstance(w, Shard) and w != self.stream for w in self.ends(node)):
            return True
        return any(is_view(user) and self.is_on_the_way("gradient", user) for user in node.users)

    def _is_summed_later(self, node: fx.Node) -> bool:
        """Whether a partial value may leave the function unreduced, because only linear ops lie between it and the
        outputs."""
        summands = (OutputPlacement.SUMMAND, OutputPlacement.PARTIAL)
        if not node.users or any(w not in summands for w in self.ends(node)):
            return False
        users = (u for u in node.users if u.op != "output")
        return all((u.target in _PASSING or is_view(u)) and self.is_on_the_way("summed_later", u) for u in users)

    def _is_light(self, node: fx.Node) -> bool:
        """Whether the inputs of an op are smaller than its result, so that a shard is computed from their shards."""
        if node.op != "call_function" or isinstance(node.meta["val"], (tuple, list)) or self.place[node] != REPLICATE:
            return False
        if node.target in _ALWAYS_REMADE:
            return True
        if not (node.target in _REMADE or is_pointwise(node.target)):
            return False
        heavy = [a for a in node.all_input_nodes if not self.is_on_the_way("light", a)]
        return sum(a.meta["val"].numel() for a in heavy) < node.meta["val"].numel()

    def cost(self, node: fx.Node, want: Placement) -> float:
        """The bytes per rank that it takes to convert a value to a placement."""
        made = self.made[node]
        if want in made:
            return 0.0
        if not divides(shape_of(node), want, self.n):
            return math.inf
        root = self._root(node)
        through = self.cost(root, want) if root is not None and want == REPLICATE else math.inf
        return min(through, *(self._direct(node, have, want) for have in made))

    def _direct(self, node: fx.Node, have: Placement, want: Placement) -> float:
        nbytes = nbytes_of(node) * (self.n - 1) / self.n
        if have == REPLICATE and isinstance(want, Shard):
            return 1e-3 * nbytes  # nothing is sent; the small price breaks ties
        if isinstance(want, Partial) or node in self.leaves:
            return math.inf
        if isinstance(have, Partial):
            # An all_reduce sends twice as much as a reduce_scatter, which exists only for sums.
            return nbytes * (1 if have == SUM and isinstance(want, Shard) else 2)
        if want == REPLICATE:
            return nbytes
        assert isinstance(have, Shard) and isinstance(want, Shard)
        # Along the same dim, in other groups, the value is gathered and sliced; along another dim, an all_to_all sends
        # only the rank's shard.
        return nbytes * 1.001 if have.dim == want.dim else nbytes / self.n

    # --- values at placements ---

    def _root(self, node: fx.Node) -> fx.Node | None:
        """The source of a view, if the view is to be recomputed from the replicated source, so that only the source is
        converted. None if the view itself is converted."""
        if node.op != "call_function" or self.place[node] == REPLICATE:
            return None
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if node.target is operator.getitem:
            if not is_view(source):
                return None
            source = source.all_input_nodes[0]
        elif not is_view(node) or len(node.all_input_nodes) > 1:
            return None
        partial = isinstance(self.place[source], Partial)
        if self.place[source] == REPLICATE or partial != isinstance(self.place[node], Partial):
            return None
        if source.meta["val"].numel() <= node.meta["val"].numel() or REPLICATE in self.made[source]:
            return source
        return source if partial and len(source.users) > 1 else None

    def _viewed(self, node: fx.Node, want: Shard) -> tuple[fx.Node, Shard] | None:
        """For a partial value that is another partial value in a different shape: that other value, and the placement
        of it that corresponds to `want`."""
        root = self._root(node) if self.place[node] == SUM and node.target in RESHAPES else None
        place = through_view(shape_of(node), want, shape_of(root), self.n) if root is not None else None
        if root is None or place is None or through_view(shape_of(root), place, shape_of(node), self.n) != want:
            return None
        return (root, place) if divides(shape_of(root), place, self.n) else None

    def get(self, node: fx.Node, want: Placement) -> fx.Node:
        """The node of the new graph for a value at a placement; converts the value if it is not available there yet."""
        made = self.made[node]
        if want not in made:
            made[want] = self.converted(node, want)
        return made[want]

    def converted(self, node: fx.Node, want: Placement) -> fx.Node:
        """Converts a value to a placement: by recomputing a view of a converted value, by recomputing or slicing a
        replicated value, or by a collective from the available placement with the lowest cost."""
        made = self.made[node]
        if want == SUM:
            return self.write.converted(self.get(node, REPLICATE), REPLICATE, SUM)
        if want == REPLICATE and self._root(node) is not None:
            return self.viewed_again(node, REPLICATE)
        if REPLICATE in made and isinstance(want, Shard):
            remade = self._remade(node, want)
            return self.write.converted(made[REPLICATE], REPLICATE, want) if remade is None else remade
        if isinstance(want, Shard) and (viewed := self._viewed(node, want)):
            return self.write.view(self.get(*viewed), local_shape(shape_of(node), want, self.n))
        have = min(made, key=lambda p: self._direct(node, p, want))
        regrouped = isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim
        if regrouped or (isinstance(have, Partial) and have != SUM and want != REPLICATE):
            return self.write.converted(self.get(node, REPLICATE), REPLICATE, want)
        return self.write.converted(made[have], have, want)

    def viewed_again(self, node: fx.Node, place: Placement) -> fx.Node:
        """A view, recomputed from its source at a placement."""
        views = node.all_input_nodes[0] if node.target is operator.getitem else node
        args, kwargs = fx.map_arg((views.args, views.kwargs), lambda a: self.get(a, place))
        new = self.write(views.target, *args, **kwargs)
        return new if views is node else self.write(operator.getitem, new, node.args[1])

    def _remade(self, node: fx.Node, want: Shard) -> fx.Node | None:
        """A shard of a replicated value, computed from shards of its inputs, if these are smaller than the value."""
        inputs = node.all_input_nodes
        if node.op != "call_function" or not self.is_on_the_way("light", node):
            return None
        if any(REPLICATE not in self.made[a] for a in inputs) or (rule := rule_of(node.target)) is None:
            return None
        op = self.operation(node, (want,))
        for s in strategies(op, rule, factors(op, rule)):
            if s.out == (want,) and self.fits(node, s):
                return self.written(node, s)
        return None


def is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in getattr(target, "tags", ()) or target is aten._to_copy.default


def factors(op: Operation, rule: Rule) -> Any:
    """The factors of an op by its rule; None if the rule has none for these arguments."""
    return rule.factors(op) if rule.factors is not None else None


def _results(node: fx.Node, s: Strategy) -> Iterator[tuple[Any, Placement]]:
    """The tensors that an op returns, and their placements by a strategy."""
    placed = zip(values_of(node), s.out, strict=True)
    return ((v, p) for v, p in placed if isinstance(v, torch.Tensor))


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


def _text(node: fx.Node) -> str:
    """An op with one input as text, without the input."""
    return f"{node.target}{fx.map_arg((node.args, node.kwargs), lambda _: None)}"
