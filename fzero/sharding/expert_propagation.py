"""Propagates rows of tokens and shards of experts through a recorded function, for a mesh axis that shards both the
batch and the experts. Ranks exchange rows.

Each rank has its own rows, for all experts, and its shard of the experts' parameters. A product of rows with such a
parameter needs the rows of all ranks for the experts of this rank (`ExpertShard`); an all_to_all delivers them.
Pointwise ops and views keep this form. All other ops get the rank's own rows back. The gradient of a sharded parameter
is a sum over the rows of all ranks: either one product over all these rows, or the sum of the gradients of the ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.errors import FzeroValueError
from fzero.ops.grouped_matmul import EXPERT_MM, EXPERT_OUTER
from fzero.sharding.dim_propagation import MadeWhole, OutputPlacement, ShardedGraph
from fzero.sharding.flat_propagation import VIEWS, constants_for_shapes
from fzero.sharding.graph_writer import GraphWriter
from fzero.sharding.layer_strategies import rule_of
from fzero.sharding.op_strategies import (
    OWN,
    PARTIAL,
    Anywhere,
    ExpertShard,
    Place,
    WholeOp,
    divides,
    named_arguments,
    nbytes_of,
    part,
    pointwise,
    reduced_dims,
    shape_of,
    values_of,
)
from fzero.sharding.placements import Shard
from fzero.trace.guards.user_frames import line
from fzero.trace.meta_cache import FakeResults
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import ancestors, extract

aten = torch.ops.aten

Form = Shard | ExpertShard | None
"""The form of a value on a rank: as it was recorded (None), a shard of a value that all ranks have (`Shard`), or with
the rows of all ranks (`ExpertShard`)."""
Write = Callable[[GraphWriter, dict[str, Any]], fx.Node | tuple[fx.Node, ...]]


@dataclass(frozen=True)
class Way:
    """A way to compute an op: the forms of its inputs and of its results, and how the op is written."""

    want: Mapping[fx.Node, Form]
    out: tuple[Form, ...]
    write: Write | None = None


def propagate(
    graph: Recorded,
    n: int,
    places: Sequence[Anywhere],
    wanted: Sequence[OutputPlacement | Shard | None],
) -> ShardedGraph:
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
    return _RowPropagation(graph, n, places, wanted).result()


class _RowPropagation:
    """The propagation through one function. It visits the ops in order, chooses a way to compute each, and writes it to
    the new graph. `made` has, for each value of the original function, the nodes of the new graph by form."""

    def __init__(
        self,
        source: Recorded,
        n: int,
        places: Sequence[Anywhere],
        wanted: Sequence[OutputPlacement | Shard | None],
    ):
        names = [x.name for x in source.inputs]
        self.source = constants_for_shapes(extract(source, source.inputs, source.outputs, names))
        self.n, self.places, self.wanted = n, places, wanted
        self.graph = compat.Graph()
        mode = next(x.meta["val"].fake_mode for x in self.source.graph.nodes if x.op != "output")
        self.write = GraphWriter(self.graph, mode, FakeResults(), n)
        self.form: dict[fx.Node, Form] = {}  # the natural form of each value
        self.made: dict[fx.Node, dict[Form, fx.Node]] = {}
        self.several: dict[fx.Node, tuple[tuple[fx.Node, ...] | fx.Node, tuple[Form, ...]]] = {}
        self.own: set[fx.Node] = set()  # values that differ between ranks
        self.sums: set[fx.Node] = set()  # shards of sums over the rows of all ranks
        self.leads: dict[fx.Node, bool] = {}
        self.whole: list[MadeWhole] = []
        for x, place in zip(self.source.inputs, places, strict=True):
            self._input(x, place)

    def _input(self, x: fx.Node, place: Anywhere) -> None:
        value, form = x.meta["val"], place if isinstance(place, (Shard, ExpertShard)) else None
        new = self.graph.placeholder(x.name)
        new.meta["val"] = value
        if form is not None:
            new.meta["val"] = compat.new_fake(
                value.fake_mode, part(value.shape, form, self.n), value.dtype, value.device
            )
        self.write.last_input, self.write.device = new, value.device
        self.form[x], self.made[x] = form, {form: new}
        if place in (OWN, PARTIAL) or isinstance(place, ExpertShard):
            self.own.add(x)

    def result(self) -> ShardedGraph:
        for node in self.source.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._node(node)
        new, places = list[fx.Node](), list[Anywhere]()
        for x, want in zip(self.source.outputs, self.wanted, strict=True):
            made, place = self._output(x, want)
            new.append(made)
            places.append(place)
        numbered, varies = self.write.finish(new, self.places)
        graph = Recorded(self.graph, self.source.constants)
        none = tuple(() for _ in self.source.inputs)
        return ShardedGraph(graph, tuple(places), numbered, varies, tuple(self.whole), (), none)

    def _output(self, x: fx.Node, want: OutputPlacement | Shard | None) -> tuple[fx.Node, Anywhere]:
        if isinstance(want, Shard):
            return self._sum(x, want), want
        if want is not None and want is not OutputPlacement.FREE:
            return self._get(x, None), PARTIAL
        if want is OutputPlacement.FREE:
            # rows that were exchanged for this function stay exchanged for the next
            form = next((m for m in self.made[x] if isinstance(m, ExpertShard)), self.form[x])
            if form is not None:
                return self._get(x, form), form
        return self._get(x, None), OWN if x in self.own else None

    # --- operations ---

    def _node(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.form[node], self.made[node] = None, {None: self.graph.node_copy(node)}
        elif node.target is operator.getitem:
            source, i = node.args
            made, forms = self.several[source]  # type: ignore[index]
            new = made[i] if isinstance(made, tuple) else self.write(operator.getitem, made, i)  # type: ignore[index]
            self._put(node, forms[i], new)  # type: ignore[index]
        elif not self.sums.isdisjoint(node.all_input_nodes):
            self._of_sums(node)
        elif self.own.isdisjoint(node.all_input_nodes):
            self._settle(node, self._of_parameters(node))
        else:
            self._settle(node, self._cheapest(node))

    def _put(self, node: fx.Node, form: Form, new: fx.Node) -> None:
        self.form[node], self.made[node] = form, {form: new}
        before = self.sums.isdisjoint(node.all_input_nodes)
        if not before or (isinstance(form, Shard) and not self.own.isdisjoint(node.all_input_nodes)):
            self.sums.add(node)
        elif not self.own.isdisjoint(node.all_input_nodes):
            self.own.add(node)

    def _written(self, node: fx.Node, way: Way) -> fx.Node | tuple[fx.Node, ...]:
        if way.write is None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self._get(a, way.want[a]))
            return self.write(node.target, *args, **kwargs)
        return way.write(self.write, fx.map_arg(named_arguments(node), lambda a: self._get(a, way.want[a])))

    def _settle(self, node: fx.Node, way: Way) -> None:
        new = self._written(node, way)
        if isinstance(node.meta["val"], (tuple, list)):
            self.several[node] = new, way.out
            self._put(node, None, node)
        else:
            assert isinstance(new, fx.Node)
            self._put(node, way.out[0], new)

    def _op(self, node: fx.Node) -> WholeOp:
        places: dict[fx.Node, Place] = {
            a: f if isinstance(f := self.form[a], Shard) else None for a in node.all_input_nodes
        }
        return WholeOp(node, self.n, places)

    def _of_parameters(self, node: fx.Node) -> Way:
        """The way to compute an op whose inputs are replicated or are shards of replicated values."""
        inputs, count = node.all_input_nodes, len(values_of(node))
        plain = Way(dict.fromkeys(inputs), (None,) * count)
        if all(self.form[a] is None for a in inputs):
            return plain
        rule = rule_of(node.target)
        for s in rule(self._op(node)) if rule else ():
            out = s.places(count)
            fits = all(divides(shape_of(a), p, self.n) and self.form[a] in (None, p) for a, p in s.want.items())
            if fits and not s.sent and PARTIAL not in s.want.values() and all(isinstance(p, Shard) for p in out):
                return Way(s.want, out, s.write)  # type: ignore[arg-type]
        self._list(node)
        return plain

    def _cheapest(self, node: fx.Node) -> Way:
        """The way to compute an op on a rank's own rows whose inputs take the fewest bytes to exchange. A parameter is
        gathered only if there is no other way."""
        plain = Way(dict.fromkeys(node.all_input_nodes), (None,) * len(values_of(node)))
        ways = [w for w in self._ways(node) if all(divides(shape_of(a), f, self.n) for a, f in w.want.items())]
        meet = {a for a in node.all_input_nodes if self._leads(node) and self._meets(a)}

        def price(way: Way) -> float:
            return sum(self._cost(a, f) for a, f in way.want.items() if not (a in meet and isinstance(f, ExpertShard)))

        best = min((*ways, plain), key=price)
        if best is plain:
            self._list(node)
        return best

    def _meets(self, node: fx.Node) -> bool:
        """Whether a product with experts' parameters reads a value, so that its rows are exchanged in any case."""
        products = (u for u in node.users if u.target in _PRODUCTS)
        return any(self._of_experts(x) for u in products for x in u.args[-2:] if x is not node)

    def _of_experts(self, node: Any) -> bool:
        """Whether a value is a sharded parameter, or a view of one."""
        while node.op == "call_function" and node.target in VIEWS | set(_ORDERS):
            (node,) = node.all_input_nodes
        return node.op == "placeholder" and self.form[node] == Shard(0)

    def _cost(self, node: fx.Node, form: Form) -> float:
        if form in self.made[node] or isinstance(form, Shard) or self._is_alike(node, form):
            return 0.0
        if form is None and self._remade(node) is not None:
            return 0.0
        return math.inf if isinstance(self.form[node], Shard) else nbytes_of(node)

    def _list(self, node: fx.Node) -> None:
        """Notes an op for which parameters are gathered."""
        gathered = [a for a in node.all_input_nodes if isinstance(self.form[a], Shard) and None not in self.made[a]]
        if not gathered:
            return
        place = node.meta.get("place")
        needed = ancestors(gathered, stop=set())
        inputs = [i for i, x in enumerate(self.source.inputs) if x in needed and self.places[i] is not None]
        nbytes = sum(nbytes_of(a) for a in gathered)
        self.whole.append(MadeWhole(str(node.target), nbytes, line(place) if place else "", tuple(inputs)))

    # --- sums over the rows of all ranks ---

    def _leads(self, node: fx.Node) -> bool:
        """Whether a value leaves the function only as the gradient of a sharded parameter, through linear ops."""
        if node not in self.leads:
            self.leads[node] = bool(node.users) and all(self._leads_by(node, user) for user in node.users)
        return self.leads[node]

    def _leads_by(self, node: fx.Node, user: fx.Node) -> bool:
        if user.op == "output":
            outputs = zip(self.source.outputs, self.wanted, strict=True)
            return all(isinstance(w, Shard) for x, w in outputs if x is node)
        return (user.target in _LINEAR or _is_sum(user)) and self._leads(user)

    def _of_sums(self, node: fx.Node) -> None:
        """Writes an op that reads a sum over the rows of all ranks. Such an op may add it to other such sums, or
        rearrange it."""
        first = next(a for a in node.all_input_nodes if a in self.sums)
        dim, alike = self.form[first], all(shape_of(a) == shape_of(first) for a in node.all_input_nodes)
        assert isinstance(dim, Shard), (first, dim)
        if (
            alike
            and _is_sum(node)
            and (node.target is not aten.cat.default or self._op(node)["dim"] % len(shape_of(node)) != dim.dim)
        ):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self._sum(a, dim))
            self._put(node, dim, self.write(node.target, *args, **kwargs))
            return
        way = self._of_parameters(node) if node.target in _LINEAR and len(node.all_input_nodes) == 1 else None
        if way is None or None in way.out:
            place = node.meta.get("place")
            where = [line(place)] if place else [str(node.target)]
            fix = "leave its parameter out of `where`"
            raise FzeroValueError(
                "expert_parallel", "the gradient of an expert parameter is used in the computation", where, fix
            )
        self._settle(node, way)

    def _sum(self, node: fx.Node, dim: Shard) -> fx.Node:
        """This rank's shard of the sum over all ranks of a gradient."""
        if node in self.sums:
            assert self.form[node] == dim, (node, self.form[node], dim)
            return self.made[node][dim]
        if node in self.own:
            return self.write.converted(self._get(node, None), PARTIAL, dim)
        # The value is the same on all ranks, so the sum over the n ranks is n times the value.
        return self.write(aten.mul.Scalar, self._get(node, dim), self.n)

    # --- values in forms ---

    def _get(self, node: fx.Node, form: Form) -> fx.Node:
        """The node of the new graph for a value in a form; converts the value if it is not available in this
        form yet."""
        made = self.made[node]
        if form not in made:
            natural = self.form[node]
            way = self._in_view(node, form) if isinstance(form, ExpertShard) and natural is None else None
            if form is None and self._remade(node) is not None:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self._get(a, None))
                made[form] = self.write(node.target, *args, **kwargs)
            elif self._is_alike(node, form):
                assert isinstance(form, ExpertShard)
                mine = self.write.converted(made[None], None, Shard(form.dim))
                made[form] = self.write(aten.cat.default, [mine] * self.n, form.rows)
            elif way is not None:
                made[form] = self._written(node, way)  # type: ignore[assignment]
            elif form is not None and natural is not None:
                made[form] = self.write.converted(self._get(node, None), None, form)
            else:
                made[form] = self.write.converted(made[natural], natural, form)
        return made[form]

    def _is_alike(self, node: fx.Node, form: Form) -> bool:
        """Whether a value is replicated, so that every rank has the same rows of it (an example are ones)."""
        return isinstance(form, ExpertShard) and node not in self.own and self.form[node] is None

    def _in_view(self, node: fx.Node, met: ExpertShard) -> Way | None:
        """A way to compute a view from its source with the rows of all ranks, so that the source is exchanged only once
        and stays in this form."""
        if node.op != "call_function" or node.target not in VIEWS | set(_ORDERS):
            return None
        (x,) = node.all_input_nodes
        if node.target in _ORDERS:
            order = _ORDERS[node.target](self._op(node))
            return Way({x: ExpertShard(order[met.dim], order[met.rows])}, (met,))
        at = [_same_dim(node, list(node.meta["val"].shape), shape_of(x), d) for d in (met.dim, met.rows)]
        if at[0] is None or at[1] is None:
            return None
        return next((way for way in self._views(node, ExpertShard(at[0], at[1])) if way.out == (met,)), None)

    def _remade(self, node: fx.Node) -> fx.Node | None:
        """The source of a view, if the source is available in the form in which it was recorded."""
        if node.op != "call_function" or node.target not in VIEWS | set(_ORDERS):
            return None
        (source,) = node.all_input_nodes
        return source if None in self.made[source] else None

    # --- ways ---

    def _ways(self, node: fx.Node) -> Iterator[Way]:
        """The ways to compute an op on rows, other than on the rank's own rows."""
        target = node.target
        if target in (EXPERT_MM, EXPERT_OUTER):
            yield from self._numbered(node)
        elif target in _PRODUCTS:
            yield from self._products(node)
        elif target in VIEWS:
            yield from self._views(node)
        elif target in _ORDERS:
            yield from self._orders(node)
        elif target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
            yield from self._reduced(node)
        elif target in _ALONG:
            yield from self._along(node)
        elif rule_of(target) is pointwise:
            yield from self._pointwise(node)

    def _products(self, node: fx.Node) -> Iterator[Way]:
        """Products of rows with a parameter of the experts; and products of two values with rows, over all rows, which
        are gradients of such a parameter."""
        *added, a, b = node.args[:3]
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        for x, y, rows in ((a, b, 1), (b, a, 2)):
            met, bias = ExpertShard(0, rows), [x for x in added if isinstance(x, fx.Node)]
            want = {x: self._broadcast(x, met, list(node.meta["val"].shape)) for x in bias}
            if y not in self.own and self.form[y] == Shard(0) and x is not y and "none" not in want.values():
                yield Way(want | {x: met, y: Shard(0)}, (met,))  # type: ignore[arg-type]
        if self._leads(node) and a is not b and not added:
            # A gradient of the parameter sums over the rows: dim 2 of a, and dim 1 of b.
            yield Way({a: ExpertShard(0, 2), b: ExpertShard(0, 1)}, (Shard(0),))

    def _numbered(self, node: fx.Node) -> Iterator[Way]:
        """Products of rows that belong to several experts with a parameter; and sums of such products over all rows."""
        expert, a, b = node.args[:3]
        assert isinstance(expert, fx.Node) and isinstance(a, fx.Node) and isinstance(b, fx.Node)
        met = ExpertShard(0, 1)
        if node.target is EXPERT_OUTER:
            if self._leads(node) and a is not b:
                yield Way({expert: met, a: ExpertShard(0, 2), b: met}, (Shard(0),))
        elif b not in self.own and self.form[b] == Shard(0) and expert in self.own:
            yield Way({expert: met, a: met, b: Shard(0)}, (met,))

    def _met(self, node: fx.Node) -> list[tuple[fx.Node, ExpertShard]]:
        return [(a, m) for a in node.all_input_nodes for m in self.made[a] if isinstance(m, ExpertShard)]

    def _pointwise(self, node: fx.Node) -> Iterator[Way]:
        """Pointwise ops: every input has the rows of all ranks, or is the same for all rows."""
        shape = list(node.meta["val"].shape)
        found = [
            ExpertShard(m.dim + k, m.rows + k) for a, m in self._met(node) for k in [len(shape) - len(shape_of(a))]
        ]
        for a in node.all_input_nodes:  # before the first product: a parameter that is the same for all rows
            k, form = len(shape) - len(shape_of(a)), self.form[a]
            if isinstance(form, Shard) and form.groups == 1 and form.dim + k + 1 < len(shape):
                found.append(ExpertShard(form.dim + k, form.dim + k + 1))
        for met in dict.fromkeys(found):
            want = {a: self._broadcast(a, met, shape) for a in node.all_input_nodes}
            if all(form != "none" for form in want.values()):
                yield Way(want, (met,))  # type: ignore[arg-type]

    def _broadcast(self, a: fx.Node, met: ExpertShard, shape: Sequence[int]) -> Form | Literal["none"]:
        """The form of an operand that is broadcast to a value with the rows of all ranks; "none" if there is none."""
        have, k = shape_of(a), len(shape) - len(shape_of(a))
        at = [have[d - k] if d >= k else 1 for d in (met.dim, met.rows)]
        full = [x == shape[d] and x > 1 for x, d in zip(at, (met.dim, met.rows), strict=True)]
        if all(full) and a in self.own:
            return ExpertShard(met.dim - k, met.rows - k)
        if a in self.own or full[1]:
            return "none"
        return Shard(met.dim - k) if full[0] else None if self.form[a] is None else "none"

    def _views(self, node: fx.Node, *more: ExpertShard) -> Iterator[Way]:
        (x,) = node.all_input_nodes
        old, new = shape_of(x), list(node.meta["val"].shape)
        for m in (*(m for _, m in self._met(node)), *more):
            at = [_same_dim(node, old, new, d) for d in (m.dim, m.rows)]
            if at[0] is not None and at[1] is not None:
                met = ExpertShard(at[0], at[1])
                size = part(new, met, self.n)
                if node.target is aten.expand.default:
                    yield Way({x: m}, (met,), lambda w, a, size=size: w.named(aten.expand.default, a | {"size": size}))
                else:
                    yield Way({x: m}, (met,), lambda w, a, size=size: w.view(a["self"], size))

    def _orders(self, node: fx.Node) -> Iterator[Way]:
        (x,) = node.all_input_nodes
        order = _ORDERS[node.target](self._op(node))
        for _, m in self._met(node):
            yield Way({x: m}, (ExpertShard(order.index(m.dim), order.index(m.rows)),))

    def _reduced(self, node: fx.Node) -> Iterator[Way]:
        op = self._op(node)
        x, dims = op["self"], reduced_dims(op)
        left = [d for d in range(len(shape_of(x))) if d not in dims or op["keepdim"]]
        for _, m in self._met(node):
            if m.dim in dims:
                continue
            if m.rows not in dims:
                yield Way({x: m}, (ExpertShard(left.index(m.dim), left.index(m.rows)),))
            elif node.target is aten.sum.dim_IntList and self._leads(node):
                yield Way({x: m}, (Shard(left.index(m.dim)),))

    def _along(self, node: fx.Node) -> Iterator[Way]:
        """Ops along a dim other than those of experts and rows, whose inputs all have the dims of the result."""
        op, count = self._op(node), len(values_of(node)[0].shape)
        if any(len(shape_of(a)) != count for a in node.all_input_nodes):
            return
        for _, m in self._met(node):
            if op["dim"] is None or op["dim"] % count in (m.dim, m.rows):
                continue
            out: tuple[Form, ...] = tuple(m for _ in values_of(node))
            want = dict.fromkeys(node.all_input_nodes, m)
            if node.target is aten.slice_backward.default:
                size = part(op["input_sizes"], m, self.n)
                yield Way(want, out, lambda w, a, s=size: w.named(aten.slice_backward.default, a | {"input_sizes": s}))
            else:
                yield Way(want, out)


def _is_sum(node: fx.Node) -> bool:
    """Whether an op only adds, or concatenates, tensors."""
    added = node.args[0] if node.target is aten.cat.default else node.args
    return node.target in _ADDS and all(isinstance(a, fx.Node) for a in added)  # type: ignore[union-attr]


def _same_dim(node: fx.Node, old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """The dim of a view that corresponds to a dim of its source, or the other way round."""
    if node.target is aten.expand.default:  # broadcasting aligns the last dims
        at = dim + len(new) - len(old)
        return at if at >= 0 and new[at] == old[dim] else None
    before = math.prod(old[:dim])
    return next((d for d in range(len(new)) if new[d] == old[dim] and math.prod(new[:d]) == before), None)


def _transposed(op: WholeOp) -> list[int]:
    order = list(range(len(shape_of(op["self"]))))
    i, j = op["dim0"] % len(order), op["dim1"] % len(order)
    order[i], order[j] = order[j], order[i]
    return order


_ORDERS: dict[Any, Callable[[WholeOp], list[int]]] = {
    aten.permute.default: lambda op: [d % len(op["dims"]) for d in op["dims"]],
    aten.transpose.int: _transposed,
}
_PRODUCTS = {aten.bmm.default, aten.baddbmm.default, EXPERT_MM}
"""Ops whose last two arguments are rows and a parameter of the experts."""
_ALONG = {
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.cat.default,
    aten.cumsum.default,
    aten.glu.default,
    aten.slice.Tensor,
    aten.slice_backward.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
_LINEAR = {
    *VIEWS,
    *_ORDERS,
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
