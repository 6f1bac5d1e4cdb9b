"""Propagates placements along a mesh axis that shards both the batch and the experts. Ranks exchange rows of tokens.

Each rank has its own rows, for all experts, and its shard of the experts' parameters. A product of rows with such a
parameter needs the rows of all ranks for the experts of this rank (`ExpertShard`); an all_to_all delivers them. Ops
keep this form if their rule has labels for the experts and the rows (`fzero.sharding.factors.pairs`). All other ops get
the rank's own rows back. The gradient of a sharded parameter is a sum over the rows of all ranks: either one product
over all these rows, or the sum of the gradients of the ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

import torch.fx as fx

from fzero.errors import FzeroValueError
from fzero.ops.grouped_matmul import EXPERT_MM
from fzero.sharding.factors import Factors, pairs, rule_of, strategies
from fzero.sharding.graph_writer import MARKERS
from fzero.sharding.operations import Operation, Strategy, nbytes_of, shape_of
from fzero.sharding.placements import (
    REPLICATE,
    SUM,
    VARYING,
    ExpertShard,
    Placement,
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


def propagate(graph: Recorded, n: int, places: Sequence[Placement], wanted: Sequence[Wanted]) -> ShardedGraph:
    """Returns the function on a rank's own rows and its shard of the experts.

    Args:
        graph: the function, recorded with the rows of one rank and full parameters.
        n: the size of the axis.
        places: the placements of its inputs.
        wanted: the requested placements of its outputs. A `Shard` is the placement of a gradient, which is summed over
            all ranks.

    Raises:
        FzeroValueError: the function computes with the gradient of a sharded parameter, other than adding to it.
    """
    return ExpertPropagation(graph, n, places, wanted).result()


class ExpertPropagation(Propagation):
    """The propagation through one function along an axis that shards the batch. A value that depends on a rank's rows
    varies between ranks as it was recorded (`base`). `sums` are shards of sums over the rows of all ranks."""

    def __init__(self, source: Recorded, n: int, places: Sequence[Placement], wanted: Sequence[Wanted]):
        self.sums: set[fx.Node] = set()
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
            return VARYING if place == VARYING or isinstance(place, ExpertShard) else REPLICATE
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
            place = next((m for m in self.made[x] if isinstance(m, ExpertShard)), self.place[x])
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
        if node.target in _LINEAR and len(node.all_input_nodes) == 1 and (rule := rule_of(node.target)) is not None:
            op = self.operation(node)
            for s in strategies(op, rule, factors(op, rule)):
                if isinstance(s.out[0], Shard) and s.want[first] == place and self.fits(node, s):
                    self.settle(node, s)
                    return
        at = source_place(node)
        where, fix = [line(at) if at else str(node.target)], "leave its parameter out of `where`"
        what = "the gradient of an expert parameter is used in the computation"
        raise FzeroValueError("expert_parallel", what, where, fix)

    def _sum(self, node: fx.Node, place: Shard) -> fx.Node:
        """This rank's shard of the sum over all ranks of a gradient."""
        if node in self.sums:
            assert self.place[node] == place, (node, self.place[node], place)
            return self.made[node][place]
        if self.base[node] == VARYING:
            return self.write.converted(self.get(node, VARYING), SUM, place)
        # The value is the same on all ranks, so the sum over the n ranks is n times the value.
        return self.write(aten.mul.Scalar, self.get(node, place), self.n)

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
        return math.inf if isinstance(self.place[node], Shard) else nbytes_of(node)

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
