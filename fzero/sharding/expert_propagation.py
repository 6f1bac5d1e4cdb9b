"""Propagates placements along a mesh axis that shards both the batch and the experts. Ranks exchange rows of tokens.

Each rank has its own rows, for all experts, and its shard of the experts' parameters. A product of rows with such a
parameter needs the rows of all ranks for the experts of this rank (`ExpertShard`); an all_to_all delivers them. Ops
keep this form if their rule has labels for the experts and the rows (`fzero.sharding.factors.pairs`). All other ops get
the rank's own rows back.

Rows without a capacity (fzero/ops/routed_rows.py) are exchanged where the function says so: `ROUTE` sends each row to
the rank of its expert, as many as there are (`Routed`), and `UNROUTE` returns them.

The gradient of a sharded parameter is a sum over the rows of all ranks: either one product over all these rows, or the
sum of the gradients of the ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero.errors import FzeroValueError
from fzero.ops.grouped_matmul import EXPERT_MM, GROUPED, GROUPED_MM
from fzero.ops.routed_rows import ROUTE, ROUTES, UNROUTE
from fzero.sharding.factors import Factors, pairs, rule_of, strategies, with_rows
from fzero.sharding.graph_writer import MARKERS, all_gather, all_to_all_v
from fzero.sharding.operations import Operation, Strategy, nbytes_of, shape_of
from fzero.sharding.placements import (
    REPLICATE,
    SUM,
    VARYING,
    ExpertShard,
    Placement,
    Routed,
    Shard,
    local_shape,
)
from fzero.sharding.propagation import Propagation, aten, factors
from fzero.sharding.sharded_graph import OutputPlacement, ShardedGraph, Wanted
from fzero.sharding.view_rules import ORDERS, VIEWS
from fzero.trace.guards.user_frames import line
from fzero.trace.recorder import Recorded, source_place

_REARRANGED = VIEWS | ORDERS | {aten.expand.default}
_PRODUCTS = {aten.bmm.default, aten.baddbmm.default, EXPERT_MM}
"""Ops whose last two arguments are rows and a parameter of the experts."""
_LINEAR = {
    *_REARRANGED,
    aten._to_copy.default,
    aten.clone.default,
    aten.neg.default,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.slice.Tensor,
    aten.slice_backward.default,
    aten.sum.dim_IntList,
}
"""Ops through which the gradient of a sharded parameter may pass on its way to an output."""
_ADDS = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default}


def propagate(
    graph: Recorded, n: int, places: Sequence[Placement], wanted: Sequence[Wanted], max_rows: float | None = None
) -> ShardedGraph:
    """Returns the function on a rank's own rows and its shard of the experts.

    Args:
        graph: the function, recorded with the rows of one rank and full parameters.
        n: the size of the axis.
        places: the placements of its inputs.
        wanted: the requested placements of its outputs. A `Shard` is the placement of a gradient, which is summed over
            all ranks.
        max_rows: without a capacity, the number of rows that a rank has memory for, as a multiple of those that it
            sends. None: as many as it can receive.

    Raises:
        FzeroValueError: the function computes with the gradient of a sharded parameter, other than adding to it; or
            with rows without a capacity in a way that needs the rows of one rank.
    """
    return ExpertPropagation(graph, n, places, wanted, max_rows).result()


class RoutedRows(NamedTuple):
    """The exchange of the rows of one dispatch, in the graph of a rank.

    Attributes:
        counts: int64[ranks, ranks], the number of rows that each rank sends to each rank.
        returned: the same for the way back.
        ends: int64[experts of the rank], the end of the rows of each of its experts.
        order: int64[size], for each row in the order of the experts the position at which it arrives.
        place: the inverse of `order`.
        size: the number of rows that a rank has memory for.
    """

    counts: fx.Node
    returned: fx.Node
    ends: fx.Node
    order: fx.Node
    place: fx.Node
    size: int


class ExpertPropagation(Propagation):
    """The propagation through one function along an axis that shards the batch. A value that depends on a rank's rows
    varies between ranks as it was recorded (`base`). `sums` are shards of sums over the rows of all ranks."""

    def __init__(
        self,
        source: Recorded,
        n: int,
        places: Sequence[Placement],
        wanted: Sequence[Wanted],
        max_rows: float | None = None,
    ):
        self.sums: set[fx.Node] = set()
        self.max_rows = max_rows
        self.routed: dict[fx.Node, RoutedRows] = {}  # by the ends of the experts' rows
        super().__init__(source, n, places, wanted)

    # --- inputs and outputs ---

    def put(self, node: fx.Node, place: Placement, new: fx.Node) -> None:
        if node.op == "placeholder" and place == SUM:
            place = VARYING
        inputs = node.all_input_nodes
        varies = any(self.base[a] == VARYING for a in inputs)
        if isinstance(place, Shard) and (varies or not self.sums.isdisjoint(inputs)):
            self.sums.add(node)
        super().put(node, place, new)

    def base_of(self, node: fx.Node, place: Placement) -> Placement:
        if node in self.sums:
            return REPLICATE
        if node.op == "placeholder":
            return VARYING if place == VARYING or isinstance(place, (ExpertShard, Routed)) else REPLICATE
        return VARYING if any(self.base[a] == VARYING for a in node.all_input_nodes) else REPLICATE

    def output(self, x: fx.Node, want: Wanted) -> tuple[fx.Node, Placement]:
        if isinstance(want, Shard):
            return self._sum(x, want), want
        if want in (OutputPlacement.SUMMAND, OutputPlacement.PARTIAL):
            # Every rank contributes its value to the sum over the axis, also one that is the same on all ranks. The
            # direct result of a collective is known to be replicated, so a copy of it is contributed.
            value = self.get(x, self.base[x])
            return (self.write(aten.clone.default, value) if value.target in MARKERS else value), SUM
        place = self.base[x]
        if want is OutputPlacement.FREE:  # rows that were exchanged for this function are also needed by the next one
            place = next((m for m in self.made[x] if isinstance(m, (ExpertShard, Routed))), self.place[x])
        return self.get(x, place), place

    # --- ops ---

    def _node(self, node: fx.Node) -> None:
        if (
            node.op == "call_function"
            and not self.sums.isdisjoint(node.all_input_nodes)
            and node.target is not operator.getitem
        ):
            self._of_sums(node)
        else:
            super()._node(node)

    def strategies(self, op: Operation) -> Iterator[Strategy]:
        varies = {a for a in op.inputs if self.base[a] == VARYING}
        if not varies:
            yield from super().strategies(op)
        elif op.target in ROUTES or op.target in GROUPED:
            yield self._of_routed(op)
        elif any(isinstance(m, Routed) for a in varies for m in self.made[a]):
            yield from self._on_routed(op, varies)
        elif op.target in VIEWS:  # their rule has no labels for a view with another size
            exchanged = (m for m in self.made[op["self"]] if isinstance(m, ExpertShard))
            yield from (s for m in exchanged if (s := self._view(op, m)))
        elif (rule := rule_of(op.target)) is not None and (f := factors(op, rule)) is not None:
            yield from pairs(op, f, self.made, varies, self.is_on_the_way("only_gradient", op.node))

    def _of_sums(self, node: fx.Node) -> None:
        """Writes an op that reads a sum over the rows of all ranks. Such an op may add it to other such sums, or
        rearrange it."""
        first = next(a for a in node.all_input_nodes if a in self.sums)
        place = self.place[first]
        assert isinstance(place, Shard), (first, place)
        if _is_sum(node) and all(shape_of(a) == shape_of(first) for a in node.all_input_nodes):
            dim = self.operation(node)["dim"] if node.target is aten.cat.default else None
            if dim is None or dim % len(shape_of(node)) != place.dim:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self._sum(a, place))
                self.put(node, place, self.write(node.target, *args, **kwargs))
                return
        if self._is_linear(node, first) and (rule := rule_of(node.target)) is not None:
            op = self.operation(node)
            for s in strategies(op, rule, factors(op, rule)):
                if isinstance(s.out[0], Shard) and s.want[first] == place and self.fits(node, s):
                    self.settle(node, s)
                    return
        at = source_place(node)
        where = [line(at) if at else str(node.target)]
        fix = "apply it to the rows, not to the parameter; or leave all parameters of these experts out of `where`"
        what = "the gradient of an expert parameter is used in the computation"
        raise FzeroValueError("expert_parallel", what, where, fix)

    def _is_linear(self, node: fx.Node, summed: fx.Node) -> bool:
        """Whether an op of a sum over the ranks is the sum of the op over the ranks: it is linear in that operand, and
        the others are the same on all ranks."""
        others = [a for a in node.all_input_nodes if a is not summed]
        if node.target in _LINEAR:
            return not others
        factors = node.target in (aten.mul.Tensor, aten.div.Tensor) and node.args.count(summed) == 1
        constant = all(self.base[a] == REPLICATE and a not in self.sums for a in others)
        return factors and constant and (node.target is aten.mul.Tensor or node.args[0] is summed)

    def _sum(self, node: fx.Node, place: Shard) -> fx.Node:
        """This rank's shard of the sum over all ranks of a gradient."""
        if node in self.sums:
            assert self.place[node] == place, (node, self.place[node], place)
            return self.made[node][place]
        if self.base[node] == VARYING:
            return self.write.converted(self.get(node, VARYING), SUM, place)
        # The value is the same on all ranks, so the sum over the n ranks is n times the value.
        return self.write(aten.mul.Scalar, self.get(node, place), self.n)

    # --- rows without a capacity ---

    def _of_routed(self, op: Operation) -> Strategy:
        """The strategy of an op that exchanges rows without a capacity, or multiplies them."""
        own = {a: self.base[a] for a in op.inputs}
        if op.target in GROUPED:
            return self._product(op)
        if op.target is UNROUTE:
            rows, ends = op["rows"], op["ends"]
            place = Routed(0, self._size(shape_of(rows)[0], shape_of(ends)[0], op["k"]))
            return Strategy({**own, rows: place}, (VARYING,), lambda w, a: self._returned(a, op["k"]))
        ends = op["ends"]
        if op.target is ROUTE:
            place = Routed(0, self._size(op.shape[0], shape_of(ends)[0], op["k"]))
            return Strategy(own, (place,), lambda w, a: self._sent(a, op["k"]))
        return Strategy(own, (Routed(0, shape_of(ends)[0] // self.n),), lambda w, a: self._exchange(a["ends"], 1).ends)

    def _product(self, op: Operation) -> Strategy:
        ends, *others = op.inputs
        place = Routed(0, self._size(op["filled"], shape_of(ends)[0], op["k"]))
        rows = others[:1] if op.target is GROUPED_MM else others
        if any(self.cost(x, place) for x in rows):
            what = "rows without a capacity are multiplied in another block than the one that dispatches them"
            raise self._rejected(what, "call dispatch, matmul and combine in one block")
        want: dict[fx.Node, Placement] = dict.fromkeys(others, place)
        want[ends] = Routed(0, shape_of(ends)[0] // self.n)
        if op.target is not GROUPED_MM:
            return Strategy(want, (Shard(0),))
        w = op["w"]
        if self.place[w] != Shard(0):
            what = "a product of experts reads a parameter that `where` does not match"
            raise self._rejected(what, "match all parameters [experts, ...] that matmul reads, or none of them")
        return Strategy({**want, w: Shard(0)}, (place,))

    def _on_routed(self, op: Operation, varies: set[fx.Node]) -> Iterator[Strategy]:
        """The strategies of an op on rows where they are multiplied."""
        if (rule := rule_of(op.target)) is None or (f := factors(op, rule)) is None:
            return
        for place in dict.fromkeys(m for a in op.inputs for m in self.made[a] if isinstance(m, Routed)):
            if op.target in VIEWS:  # their rule has no labels for a view with another size
                yield from self._routed_view(op, f, place)
            else:
                yield from with_rows(op, f, place, self.made, varies, lambda i: self._summed(op.node, i))

    def _routed_view(self, op: Operation, f: Factors, place: Routed) -> Iterator[Strategy]:
        (x, of), out = f.operands[0], f.results[0] or ()
        if (row := of[place.dim]) and row in out:
            made = Routed(out.index(row), place.size)
            size = local_shape(op.shape, made, self.n)
            yield Strategy({x: place}, (made,), lambda w, a: w.view(a["self"], size))

    def _is_only_summed(self, node: fx.Node) -> bool:
        """Whether a sum over rows leaves the function only as a summand, through linear ops: then it does not matter
        which rank has added up which rows."""
        summands = (OutputPlacement.SUMMAND, OutputPlacement.PARTIAL)
        if not node.users or any(w not in summands for w in self.ends(node)):
            return False
        users = [u for u in node.users if u.op != "output"]
        linear = ((u.target in _LINEAR and len(u.all_input_nodes) == 1) or _is_sum(u) for u in users)
        return all(linear) and all(self.is_on_the_way("only_summed", u) for u in users)

    def _summed(self, node: fx.Node, number: int) -> bool:
        """Whether the result of an op with this number leaves the function only as a summand."""
        if isinstance(node.meta["val"], torch.Tensor):
            return self.is_on_the_way("only_summed", node)
        return all(self.is_on_the_way("only_summed", u) for u in node.users if u.args[1] == number)

    def _size(self, rows: int, experts: int, k: int) -> int:
        """The number of rows that a rank has memory for."""
        # A token chooses each expert at most once, so a rank sends at most this many rows of a token to another one.
        most = self.n * (rows // k) * min(k, experts // self.n)
        return most if self.max_rows is None else min(most, math.ceil(self.max_rows * rows))

    def _sent(self, a: dict[str, Any], k: int) -> fx.Node:
        """Sends rows to the ranks of their experts, and brings those that arrive in the order of the experts."""
        rows = self.write(aten.index_select.default, a["x"], 0, a["index"])
        e = self._exchange(a["ends"], k, shape_of(rows)[0])
        come = self.write.mark(all_to_all_v, rows, [e.size, shape_of(rows)[1]], e.counts, e.size)
        return self.write(aten.index_select.default, come, 0, e.order)

    def _returned(self, a: dict[str, Any], k: int) -> fx.Node:
        """Returns rows to the ranks that have sent them."""
        num = shape_of(a["index"])[0]
        e = self._exchange(a["ends"], k, num)
        rows = self.write(aten.index_select.default, a["rows"], 0, e.place)
        come = self.write.mark(all_to_all_v, rows, [num, shape_of(rows)[1]], e.returned, num)
        return self.write(aten.index_select.default, come, 0, a["index"])

    def _exchange(self, ends: fx.Node, k: int, rows: int | None = None) -> RoutedRows:
        """Makes ranks tell each other how many rows each expert of theirs was chosen for."""
        n, (experts,) = self.n, shape_of(ends)
        each = experts // n

        def received(counts: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
            """int64[from, experts of the rank]."""
            return counts.view(n, n, each).index_select(1, rank).view(n, each)

        def order_of(come: torch.Tensor, size: int) -> torch.Tensor:
            # Rows arrive by rank and, of each rank, by expert.
            arrival = torch.arange(size, device=come.device)
            of = torch.searchsorted(come.flatten().cumsum(0), arrival, right=True)
            expert = torch.where(of < n * each, of.remainder(each), each)
            return torch.sort(expert, stable=True)[1]

        w = self.write
        if ends not in self.routed:
            counts = w.trace(lambda x: x.diff(prepend=x.new_zeros(1)).view(1, -1), ends)
            counts = w.mark(all_gather, counts, [n, experts])
            between = w.trace(lambda c: c.view(n, n, each).sum(2), counts)
            come = w.trace(received, counts, w.index())
            local = w.trace(lambda c: c.sum(0).cumsum(0), come)
            returned = w.trace(lambda c: c.t().contiguous(), between)
            self.routed[ends] = RoutedRows(between, returned, local, come, come, 0)
        e = self.routed[ends]
        if rows is None or e.size:
            return e
        size = self._size(rows, experts, k)
        order = w.trace(lambda c: order_of(c, size), e.order)
        place = w.trace(lambda x: torch.zeros_like(x).scatter(0, x, torch.arange(size, device=x.device)), order)
        self.routed[ends] = e._replace(order=order, place=place, size=size)
        return self.routed[ends]

    def _rejected(self, what: str, fix: str) -> FzeroValueError:
        place = self.write.place
        return FzeroValueError("expert_parallel", what, [line(place)] if place else [], fix)

    # --- prices ---

    def price(self, node: fx.Node, s: Strategy) -> float:
        gradient = self.is_on_the_way("only_gradient", node)
        free = {a for a, p in s.want.items() if gradient and isinstance(p, ExpertShard) and self._is_multiplied(a)}
        return sum(self.cost(a, p) for a, p in s.want.items() if a not in free)

    def _is_multiplied(self, node: fx.Node) -> bool:
        """Whether a value is multiplied by a parameter of the experts, so that its rows are exchanged anyway."""
        products = (user for user in node.users if user.target in _PRODUCTS)
        return any(
            self._is_of_experts(x) for u in products for x in u.args[-2:] if isinstance(x, fx.Node) and x is not node
        )

    def _is_of_experts(self, node: fx.Node) -> bool:
        while node.op == "call_function" and node.target in _REARRANGED:
            (node,) = node.all_input_nodes
        return node.op == "placeholder" and self.place[node] == Shard(0)

    def _is_only_gradient(self, node: fx.Node) -> bool:
        """Whether a value leaves the function only as the gradient of a sharded parameter, through linear ops."""
        if not node.users or not all(isinstance(w, Shard) for w in self.ends(node)):
            return False
        users = (u for u in node.users if u.op != "output")
        return all((u.target in _LINEAR or _is_sum(u)) and self.is_on_the_way("only_gradient", u) for u in users)

    def cost(self, node: fx.Node, want: Placement) -> float:
        """The bytes that a rank sends to convert a value to a placement. Only rows are exchanged."""
        if want in self.made[node] or isinstance(want, Shard) or self._is_alike(node, want):
            return 0.0
        if want == self.base[node] and self._is_viewed(node):
            return 0.0
        if isinstance(want, Routed):  # rows are exchanged only by `ROUTE`
            return 0.0 if node.target is aten.full.default else math.inf
        return math.inf if isinstance(self.place[node], (Shard, Routed)) else nbytes_of(node)

    # --- values at placements ---

    def _is_alike(self, node: fx.Node, want: Placement) -> bool:
        """Whether the rows of all ranks are wanted of a replicated value, so that every rank has them (for example of
        ones)."""
        return isinstance(want, ExpertShard) and self.place[node] == REPLICATE

    def _is_viewed(self, node: fx.Node) -> bool:
        """Whether a value is a view of a value that is available as it was recorded."""
        if node.op != "call_function" or node.target not in _REARRANGED:
            return False
        (source,) = node.all_input_nodes
        return self.base[source] in self.made[source]

    def converted(self, node: fx.Node, want: Placement) -> fx.Node:
        made, natural, base = self.made[node], self.place[node], self.base[node]
        if isinstance(want, Routed) and node.target is aten.full.default:  # of any size
            size, *args = node.args
            return self.write(node.target, local_shape(size, want, self.n), *args, **node.kwargs)  # type: ignore
        if isinstance(natural, Routed) or isinstance(want, Routed):
            what = "an operation between dispatch and combine, without a capacity, needs the rows of one rank"
            fix = "compute each row by itself there: matmul, pointwise operations, norms; or pass a capacity"
            raise self._rejected(what, fix)
        if want == base and self._is_viewed(node):
            return self.viewed_again(node, self.base[node.all_input_nodes[0]])
        if isinstance(want, ExpertShard):
            if self._is_alike(node, want):
                mine = self.write.converted(made[REPLICATE], REPLICATE, Shard(want.dim))
                return self.write(aten.cat.default, [mine] * self.n, want.rows)
            if natural == VARYING and (s := self._view_of_exchanged(node, want)) is not None:
                return self.written(node, s)
        if want != base and natural != base:
            return self.write.converted(self.get(node, base), base, want)
        return self.write.converted(made[natural], natural, want)

    def _view_of_exchanged(self, node: fx.Node, want: ExpertShard) -> Strategy | None:
        """The strategy that computes a view from its source with the rows of all ranks, so that the source is exchanged
        only once, and stays in this form."""
        if node.op != "call_function" or node.target not in _REARRANGED:
            return None
        op, (x,) = self.operation(node), node.all_input_nodes
        f = self._labels(op)
        (_, of), out = f.operands[0], f.results[0] or ()
        if not out[want.dim] or not out[want.rows] or not {out[want.dim], out[want.rows]} <= {*of}:
            return None
        source = ExpertShard(of.index(out[want.dim]), of.index(out[want.rows]))
        if node.target in VIEWS:
            found = [self._view(op, source)]
        else:
            found = [*pairs(op, f, {x: [source]}, {x}, False)]
        return next((s for s in found if s is not None and s.out == (want,)), None)

    def _view(self, op: Operation, have: ExpertShard) -> Strategy | None:
        """The strategy of a view that keeps the dims of experts and of rows."""
        f = self._labels(op)
        (x, of), out = f.operands[0], f.results[0] or ()
        e, r = of[have.dim], of[have.rows]
        if not e or not r or e not in out or r not in out:
            return None
        place = ExpertShard(out.index(e), out.index(r))
        size = local_shape(op.shape, place, self.n)
        return Strategy({x: have}, (place,), lambda w, a: w.view(a["self"], size))

    def _labels(self, op: Operation) -> Factors:
        rule = rule_of(op.target)
        f = factors(op, rule) if rule is not None else None
        assert f is not None, f"{op.target} has no labels"
        return f


def _is_sum(node: fx.Node) -> bool:
    """Whether an op only adds, or concatenates, tensors."""
    added = node.args[0] if node.target is aten.cat.default else node.args
    return node.target in _ADDS and all(isinstance(a, fx.Node) for a in added)  # type: ignore[union-attr]
