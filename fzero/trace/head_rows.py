"""Splits a function at its widest product, so that what is as wide as that product's result is computed in rows.

The widest product of a step is that of its head: a logit for each word of the vocabulary and each position. What the
loss and its backward make of the logits is as wide, alike for each row, and ends in sums over rows, in values of a row,
and in the gradients of both operands. So a function becomes three: `ahead`, what does not depend on the product; `rows`
for some rows at once, from the product to what it ends in; and `behind`, what reads those ends. A gradient that is a
product over all rows is none of the three: rows hand out its operands, which are multiplied and added up in place.

The rows are found by propagation (fzero/trace/cuts.py), as if an axis of as many ranks as parts cut them: no operation
is known by its use. A loss's total weight, which depends on targets alone, is made ahead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero import compat
from fzero.boxes import Dim
from fzero.trace import cuts
from fzero.trace.cut_rules import PARTIAL, divides, in_view, shape_of
from fzero.trace.cut_writer import MARKERS, RESHAPES, GraphWriter, all_reduce
from fzero.trace.cuts import Wanted
from fzero.trace.meta_cache import FakeResults
from fzero.trace.propagate import constants_for_shapes
from fzero.trace.reads.user_lines import line
from fzero.trace.recorder import FROM, Recorded
from fzero.trace.storages import is_view
from fzero.trace.subgraph import ancestors, extract, reached

aten = torch.ops.aten
MOST_PARTS = 4096
"""The most parts that rows are computed in."""
TRIES = 6
"""Numbers of parts that are tried, from the least that is small enough."""
_MM = (aten.mm.default, aten.addmm.default)


class RowsInput(NamedTuple):
    """An input of one of the functions: one of the whole function, by its number, or a result of `ahead`."""

    of: str  # "input" or "ahead"
    index: int


class RowsEnd(NamedTuple):
    """An end of the rows: results of each part, by their number among those of `rows`, and how `behind` takes them:
    joined along `dim` ("cat"), as their "sum", "max" or "min"; or as operands of a product ("product")."""

    how: str
    outputs: tuple[int, ...]
    dim: Dim | None = None


class RowsTotal(NamedTuple):
    """A gradient that is a product over all rows: float[rows of a, rows of b]. `result`: the output that it is, None
    where `behind` reads it."""

    piece: int
    shape: tuple[int, int]
    dtype: torch.dtype
    result: int | None


@dataclass(frozen=True, eq=False)
class HeadRows:
    """A function in rows.

    Attributes:
        parts: how many parts the rows are computed in.
        rows: of a part.
        wide: bytes of the widest value of the whole function that is as wide as the product.
        ahead: the function of what does not depend on the product; its inputs are `ahead_inputs`, numbers of the whole
            function's. Its last result is the number of the first part, int64[1].
        part: the function of a part; its inputs are `part_inputs`, and the number of the part. Its first result is the
            number of the next.
        pieces: the ends of the rows.
        totals: those that are products over all rows.
        behind: the function of what reads the ends, None if nothing does; its inputs are `behind_inputs`, then of each
            piece that is no product a value for each part, then the totals without a result.
        results: of each output of the whole function, where it is: a result of "ahead", "behind", or a "total".
    """

    parts: int
    rows: int
    wide: int
    ahead: Recorded
    ahead_inputs: tuple[int, ...]
    part: Recorded
    part_inputs: tuple[RowsInput, ...]
    pieces: tuple[RowsEnd, ...]
    totals: tuple[RowsTotal, ...]
    behind: Recorded | None
    behind_inputs: tuple[RowsInput, ...]
    results: tuple[RowsInput, ...]


@dataclass(frozen=True)
class NoRows:
    """Why a function has no rows."""

    problems: tuple[str, ...]


def widest(graph: Recorded) -> tuple[int, int]:
    """The rows of the widest product of a function with one of its inputs, and the bytes of its result; zeros if it has
    none."""
    found = _products(graph)
    value = found[0].meta["val"] if found else None
    return (0, 0) if value is None else (value.shape[-2], value.numel() * value.dtype.itemsize)


def in_rows(source: Recorded, at_most: int) -> HeadRows | NoRows:
    """A function with the rows of its widest product in equal parts.

    Args:
        source: the function, forward and backward in one.
        at_most: rows of a part. The parts are as few as can be.
    """
    finder = _RowFinder(source)
    if not finder.products:
        return NoRows(("no function multiplies rows by a matrix that is one of its arguments",))
    if any(shape_of(x)[0] != finder.count for x in finder.products):
        return NoRows(("its widest products have different numbers of rows",))
    refused: NoRows | None = None
    tried = 0
    for parts in range(max(2, -(-finder.count // at_most)), min(finder.count, MOST_PARTS) + 1):
        for place in finder.places(parts):
            made = finder.cut(parts, place)
            if isinstance(made, HeadRows):
                return made
            refused = refused or (made if isinstance(made, NoRows) else None)
            tried += made is not None
        if tried >= TRIES:
            break
    return refused or NoRows(
        (f"its {finder.count} rows have no equal parts of at most {at_most}{finder.said_fewest()}",)
    )


# --- the function, with each operation that hides an end written out ---


def _normal(source: Recorded) -> Recorded:
    """The function with losses as one of each row, and their reduction; products of one matrix by one without the dim
    of these; no operation that asks a value for nothing but its shape."""
    graph = extract(source, source.inputs, source.outputs, [x.name for x in source.inputs])
    for x in graph.graph.nodes:
        x.meta.setdefault("place", x.meta.get(FROM))
    constants_for_shapes(graph)
    mode = next(x.meta["val"].fake_mode for x in graph.graph.nodes if x.op != "output")
    write = GraphWriter(graph.graph, mode, FakeResults(), 1)
    for node in list(graph.graph.nodes):
        rewrite = _WRITTEN_OUT.get(node.target)
        if rewrite is None:
            continue
        with graph.graph.inserting_before(node):
            made = rewrite(node, write)
        if made is None:
            continue
        for user in list(node.users) if isinstance(made, tuple) else ():
            user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]
        if isinstance(made, fx.Node):
            node.replace_all_uses_with(made)
        before = node.prev
        while before.op == "call_function" and "place" not in before.meta:
            before.meta["place"], before = node.meta["place"], before.prev
    graph.graph.eliminate_dead_code()
    return graph


def _loss(node: fx.Node, write: GraphWriter) -> tuple[fx.Node, fx.Node]:
    """The loss of each row, reduced, and the total weight of the targets, which these alone make."""
    given: Any = node.args
    x, target, weight, reduction, ignored = given
    losses = write(operator.getitem, write(node.target, x, target, weight, 0, ignored), 0)
    dtype, device = x.meta["val"].dtype, x.meta["val"].device  # type: ignore[union-attr]
    if reduction == 0:
        return losses, write(aten.full.default, [], 0, dtype=dtype, device=device)
    valid = write(aten.ne.Scalar, target, ignored)
    if weight is None:
        total = write(aten._to_copy.default, write(aten.sum.default, valid), dtype=dtype)
    else:
        zero = write(aten.full.default, [], 0, dtype=torch.int64, device=device)
        flat = write.view(write(aten.where.self, valid, target, zero), [-1])
        each = write.view(write(aten.index_select.default, weight, 0, flat), shape_of(valid))
        none = write(aten.full.default, [], 0, dtype=dtype, device=device)
        total = write(aten.sum.default, write(aten.where.self, valid, each, none))
    loss = write(aten.sum.default, losses)
    return (write(aten.div.Tensor, loss, total) if reduction == 1 else loss), total


def _loss_backward(node: fx.Node, write: GraphWriter) -> fx.Node | None:
    given: Any = node.args
    grad, x, target, weight, reduction, ignored, total = given
    if reduction == 0:
        return None
    each = write(aten.div.Tensor, grad, total) if reduction == 1 else grad
    each = write(aten.expand.default, each, shape_of(target))  # type: ignore[arg-type]
    return write(node.target, each, x, target, weight, 0, ignored, total)


def _elementwise(node: fx.Node, write: GraphWriter) -> fx.Node | None:
    *args, reduction = node.args if len(node.args) == 5 else (*node.args, *(None, None, 1)[len(node.args) - 2 :])
    if reduction == 0:
        return None
    each = write(node.target, *args, 0)
    return write((aten.mean if reduction == 1 else aten.sum).default, each)


def _largest(node: fx.Node, write: GraphWriter) -> fx.Node | None:
    given: Any = (*node.args, *(2, None, False)[len(node.args) - 1 :])[:4]
    x, order, dims, keep = given
    if order != math.inf:
        return None
    largest = write(aten.amax.default, write(aten.abs.default, x), dims or [], keep)
    return write(aten._to_copy.default, largest, dtype=node.meta["val"].dtype)


def _one_matrix(node: fx.Node, write: GraphWriter) -> fx.Node | None:
    if not _is_one_matrix(node):
        return None
    made = write(aten.mm.default, *(write.view(x, shape_of(x)[1:]) for x in node.args))  # type: ignore[arg-type]
    return write.view(made, shape_of(node))


_WRITTEN_OUT: dict[Any, Callable[[fx.Node, GraphWriter], Any]] = {
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss2d_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
    aten.nll_loss2d_backward.default: _loss_backward,
    aten.binary_cross_entropy_with_logits.default: _elementwise,
    aten.bmm.default: _one_matrix,
    aten.linalg_vector_norm.default: _largest,
}


# --- the widest product, and what is as wide ---


def _is_one_matrix(node: fx.Node) -> bool:
    return node.target is aten.bmm.default and shape_of(node)[0] == 1


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    a, b = product.args[-2:]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b


def _is_transpose(node: fx.Node) -> bool:
    """Whether a value is the transpose of another of two dims."""
    if node.target is aten.permute.default:
        return [*node.args[1]] == [1, 0]  # type: ignore[misc]
    return node.target in (aten.t.default, aten.transpose.int) and len(shape_of(node)) == 2


def _root(node: fx.Node) -> fx.Node:
    """The value that another is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _products(graph: Recorded) -> list[fx.Node]:
    """The widest products of rows with a view of an input, no operand of which depends on a product with that input:
    those of a forward."""
    given, found = {*graph.inputs}, list[fx.Node]()
    reads: dict[fx.Node, frozenset[fx.Node]] = {}  # the inputs that products multiply on the way to a value
    for x in graph.graph.nodes:
        before = frozenset[fx.Node]().union(*(reads[a] for a in x.all_input_nodes))
        if x.op == "call_function" and (x.target in _MM or _is_one_matrix(x)):
            a, b = _operands(x)
            if _root(b) in given and not {_root(b)} & reads[a]:
                found.append(x)
            before |= given & {_root(a), _root(b)}
        reads[x] = before
    most = max((x.meta["val"].numel() for x in found), default=0)
    return sorted((x for x in found if 2 * x.meta["val"].numel() >= most), key=lambda x: -x.meta["val"].numel())


class _RowFinder:
    """The rows of a function for any number of parts."""

    def __init__(self, source: Recorded):
        self.whole = _normal(source)
        graph = self.whole.graph
        self.products = _products(self.whole)
        if not self.products:
            return
        self.count, self.numel = shape_of(self.products[0])[0], self.products[0].meta["val"].numel()
        self.late = reached(graph, self.products)
        self.rows = list(
            dict.fromkeys(_operands(x)[0] for x in self.products)
        )  # operands of which a part has some rows
        self.stops = {*self.whole.inputs}
        varying = reached(graph, self.whole.inputs)
        # what is as wide as the product, and does not depend on it, is made with the rows, unless it is a matrix
        matrices = ancestors([_operands(x)[1] for x in self.products], stop=set())
        self.stops |= {
            x
            for x in graph.nodes
            if x.op == "call_function"
            and x in varying
            and x not in self.late
            and _is_tensor(x)
            and not is_view(x)
            and (2 * x.meta["val"].numel() < self.numel or x in matrices)
        }
        self.roots: dict[fx.Node, fx.Node] = {}
        for x in self.rows:
            root = x
            while root not in self.stops and root.target in RESHAPES:
                root = root.all_input_nodes[0]
            self.roots[x] = root
            self.stops.add(root)
        self.wide = {x for x in self.late if _is_tensor(x) and 2 * x.meta["val"].numel() >= self.numel}
        self.order = {x: i for i, x in enumerate(graph.nodes)}

    def places(self, parts: int) -> Iterator[Dim]:
        """The ways to cut the rows: in runs; or, where they are those of several sequences, each of these."""
        if self.count % parts == 0:
            shapes = [shape_of(x) for x in (*self.late, *self.roots.values()) if _is_tensor(x)]
            groups = {s[0] for s in shapes if len(s) > 2 and s[0] * s[1] == self.count} | {1}
            yield from (Dim(0, n) for n in sorted(groups) if self.count % (n * parts) == 0)

    def cut(self, parts: int, place: Dim) -> HeadRows | NoRows | None:
        """The function in so many parts, whose rows are those at a place; None if an operand has no such rows."""
        cut_at = self._cut_at(parts, place)
        if cut_at is None:
            return None
        made = _RowCutter(self, parts, cut_at).result()
        if isinstance(made, HeadRows) and self._is_narrow(made):
            return made
        # values with as many rows as the operands are taken as cut, so that what is made of them is
        for x in self.stops.difference(cut_at):
            at = next((at for root, at in cut_at.items() if self._has_rows(x, root, at, parts)), None)
            if at is not None:
                cut_at[x] = at
        again = _RowCutter(self, parts, cut_at).result()
        if isinstance(again, HeadRows) and not self._is_narrow(again):
            again = NoRows(("a value as wide as that of all rows is computed with each part",))
        return again if isinstance(again, HeadRows) or isinstance(made, HeadRows) else made

    def _cut_at(self, parts: int, place: Dim) -> dict[fx.Node, Dim] | None:
        """The dims of the operands that have the rows at a place; None if one has no such rows."""
        cut_at: dict[fx.Node, Dim] = {}
        for x, root in self.roots.items():
            at = in_view(shape_of(x), place, shape_of(root), parts)
            if at is None or not divides(shape_of(root), at, parts):
                return None
            cut_at[root] = at
        return cut_at

    def said_fewest(self) -> str:
        """The fewest rows of a part, where each part has as many rows of each sequence."""
        for parts in range(min(self.count, MOST_PARTS), 1, -1):
            place = next((x for x in self.places(parts) if self._cut_at(parts, x) is not None), None)
            if place is not None:
                of_each = f", as many of each of {place.groups} sequences" if place.groups > 1 else ""
                return f"; the fewest are {self.count // parts}{of_each}"
        return ""

    def _has_rows(self, node: fx.Node, root: fx.Node, place: Dim, parts: int) -> bool:
        """Whether the first dims of a value are those of an operand, up to the one that is cut."""
        first = shape_of(root)[: place.dim + 1]
        matrix = any(_root(_operands(x)[1]) is node for x in self.products)
        return not matrix and shape_of(node)[: place.dim + 1] == first and divides(shape_of(node), place, parts)

    def _is_narrow(self, made: HeadRows) -> bool:
        """Whether nothing that a part computes is as wide as the product of all rows."""
        inputs = [x.meta["val"].numel() for x in made.part.inputs]
        nodes = (x for x in made.part.graph.nodes if x.op == "call_function" and not is_view(x) and _is_tensor(x))
        return all(2 * x.meta["val"].numel() < self.numel or x.meta["val"].numel() in inputs for x in nodes) or (
            made.parts < 3
        )

    def inputs(self, ends: Iterable[fx.Node], more: Iterable[fx.Node] = ()) -> list[fx.Node]:
        """The values that a function with these results reads of others, in order."""
        stops = self.stops | {*more}
        return sorted(ancestors([*ends], stop=stops) & stops, key=lambda x: self.order[x])


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _where(node: fx.Node) -> str:
    """An operation, and the user's line that it is, or that is nearest before it."""
    node = node.all_input_nodes[0] if node.target is operator.getitem else node
    seen, todo = {node}, [node]
    for x in todo:
        if at := x.meta.get("place"):
            return f"{node.target}, {line(at)}"
        todo += [a for a in x.all_input_nodes if a not in seen]
        seen.update(x.all_input_nodes)
    return str(node.target)


class _RowCutter:
    """A function whose rows are cut in parts."""

    def __init__(self, found: _RowFinder, parts: int, cut_at: dict[fx.Node, Dim]):
        self.found, self.parts, self.cut_at = found, parts, cut_at
        self.graph = found.whole.graph
        self.problems: list[str] = []

    def result(self) -> HeadRows | NoRows:
        places = self._places()
        wide = {x for x in self.found.wide if isinstance(places.get(x.name), Dim)}
        cut = {x for x in self.found.late if isinstance(places.get(x.name), Dim)}
        inside = {x for x in cut if x in ancestors([*wide], stop=set())} | wide
        users = {u for x in wide for u in x.users}
        users |= {y for u in users if not _is_tensor(u) for y in u.users}
        inside |= users & cut
        for x in list(inside):  # what an operation makes several of
            if x.target is operator.getitem:
                inside.add(x.all_input_nodes[0])
        if refused := self._refused(places, inside):
            return refused
        ends = self._ends(places, inside)
        if self.problems:
            return NoRows(tuple(dict.fromkeys(self.problems)))
        return self._functions(places, inside, ends)

    def _places(self) -> dict[str, Any]:
        """The places of values, by their names."""
        late, wide = self.found.late, self.found.wide
        last = self.graph.output_node()
        ends = [
            x
            for x in late
            if _is_tensor(x) and (x not in wide or last in x.users) and not wide.isdisjoint(x.all_input_nodes)
        ]
        ends += [
            u
            for x in late
            if not _is_tensor(x) and x.op == "call_function" and not wide.isdisjoint(x.all_input_nodes)
            for u in x.users
            if _is_tensor(u)
        ]
        ends = sorted({*ends} | {x for x in wide if last in x.users}, key=lambda x: self.found.order[x])
        made = self._propagated(self.found.inputs(ends), ends, [Wanted.SUMMAND] * len(ends))
        self.whole = made.whole
        return dict(made.values)

    def _propagated(self, inputs: list[fx.Node], ends: list[fx.Node], wanted: list[Any]) -> cuts.CutFunction:
        part = extract(self.found.whole, inputs, ends, [x.name for x in inputs])
        return cuts.propagate(part, self.parts, [self.cut_at.get(x) for x in inputs], wanted)

    def _refused(self, places: dict[str, Any], inside: set[fx.Node]) -> NoRows | None:
        """Why the rows depend on others, if they do."""
        needed = ancestors([*inside], stop=self.found.stops) & self.found.late
        problems = [f"{x.op}{x.line and f', {x.line}'}, is not known to compute row by row" for x in self.whole]
        if over := sorted(filter(_is_tensor, needed - inside), key=lambda x: self.found.order[x]):
            to = next((x for x in reversed(over) if not is_view(x)), over[-1])
            problems.append(f"{_where(over[0])}, is of all rows, and by {_where(to)}, each row depends on it")
        if not {*self.found.products} <= inside:
            problems.append(f"{_where(self.found.products[0])} is not computed row by row")
        return NoRows(tuple(dict.fromkeys(problems))) if problems else None

    # --- the ends of the rows ---

    def _ends(self, places: dict[str, Any], inside: set[fx.Node]) -> dict[fx.Node, str]:
        """The values behind the rows, and how each is made of those of parts."""
        ends: dict[fx.Node, str] = {}
        last = self.graph.output_node()
        for x in sorted(inside, key=lambda x: self.found.order[x]):
            for u in x.users:
                if u in inside:
                    continue
                if u is not last and _is_tensor(u) and places.get(u.name) == PARTIAL:
                    ends[u] = "product" if u.target in _MM and len(u.args) == 2 else "sum"
                elif u is not last and u.target in (
                    aten.amax.default,
                    aten.amin.default,
                    aten.max.default,
                    aten.min.default,
                ):
                    ends[u] = "max" if u.target in (aten.amax.default, aten.max.default) else "min"
                elif u is not last and not _is_tensor(u) and all(places.get(y.name) == PARTIAL for y in u.users):
                    ends.update(dict.fromkeys(u.users, "sum"))
                else:
                    ends[x] = "cat"
        most = max(x.meta["val"].numel() for x in self.found.rows)
        for x, how in ends.items():
            if how == "cat" and x in self.found.wide and x.meta["val"].numel() > most:
                readers = [_where(u) for u in x.users if u not in inside and u is not last]
                self.problems += readers or [f"{_where(x)} is a result of the step"]
        return ends

    def _functions(self, places: dict[str, Any], inside: set[fx.Node], ends: dict[fx.Node, str]) -> HeadRows | NoRows:
        wanted, outputs, pieces = list[Any](), list[fx.Node](), list[RowsEnd]()
        for x, how in ends.items():
            made = self._operands(x) if how == "product" else [x]
            at = places[x.name] if how == "cat" else None
            wants = [self._row_place(places, y) for y in made] if how == "product" else [at]
            if how in ("sum", "max", "min"):
                wants = [Wanted.SUMMAND]
            if any(isinstance(w, str) and not isinstance(w, Wanted) for w in wants):
                return NoRows((f"{_where(x)} is a sum of no rows",))
            pieces.append(RowsEnd(how, tuple(len(outputs) + 1 + i for i in range(len(made))), at))
            outputs += made
            wanted += wants
        inputs = self.found.inputs(outputs)
        made = self._propagated(inputs, outputs, wanted)
        part = self._part(made, inputs, len(outputs))
        if isinstance(part, NoRows):
            return part
        return self._assembled(part, inputs, ends, pieces)

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a product over all rows, [rows, m] and [rows, k]."""
        a, b = _operands(node)
        if _is_transpose(a):
            return [a.all_input_nodes[0], b]
        with self.graph.inserting_after(a):
            turned = self.graph.call_function(aten.t.default, (a,))
        with a.meta["val"].fake_mode:
            turned.meta["val"] = a.meta["val"].t()
        self.found.order[turned] = self.found.order[a]
        self.found.late |= {turned} if a in self.found.late else set()
        return [turned, b]

    def _row_place(self, places: dict[str, Any], node: fx.Node) -> Any:
        """The place of an operand of a product over rows."""
        if isinstance(at := places.get(node.name), Dim):
            return at
        root = self.cut_at.get(node)
        if root is not None:
            return root
        for x, at in self.cut_at.items():
            if (found := in_view(shape_of(x), at, shape_of(node), self.parts)) is not None and found.dim == 0:
                return found
        return "unknown"

    def _part(self, made: cuts.CutFunction, inputs: Sequence[fx.Node], count: int) -> Recorded | NoRows:
        """The function of a part: of whole values and the number of the part."""
        source = made.graph
        last = list(source.outputs)
        stripped = [x.args[0] if x.target is all_reduce else x for x in last]
        kept = ancestors([x for x in stripped if isinstance(x, fx.Node)], stop=set())
        if left := [x for x in kept if x.target in MARKERS]:
            return NoRows(tuple(f"{_where(x.all_input_nodes[0])} depends on all rows" for x in left[:3]))
        graph, env = compat.Graph(), dict[fx.Node, fx.Node]()
        mode = next(x.meta["val"].fake_mode for x in source.graph.nodes if x.op != "output")
        write = GraphWriter(graph, mode, FakeResults(), self.parts)
        whole = []
        for i, x in enumerate(inputs):
            whole.append(graph.placeholder(f"x_{i}"))
            whole[-1].meta["val"] = x.meta["val"]
            write.last_input, write.device = whole[-1], x.meta["val"].device
        number = write.index()
        for new, x, of in zip(whole, inputs, source.inputs, strict=False):
            env[of] = write.cut(new, self.cut_at[x]) if x in self.cut_at else new
        if made.has_index:
            env[source.inputs[-1]] = number
        constants: dict[str, torch.Tensor] = {}
        for x in source.graph.nodes:
            if x.op == "get_attr":
                constants[str(x.target)] = source.constants[str(x.target)]
            if x in kept and x.op != "placeholder":
                env[x] = graph.node_copy(x, lambda n: env[n])
        results, made_of = list[fx.Node](), set[fx.Node]()
        for x in stripped:
            new = env[x]  # type: ignore[index]
            root = _root(new)
            if root.op != "call_function" or root in made_of or not new.meta["val"].is_contiguous():  # of its own
                new = write(aten.clone.default, new, memory_format=torch.contiguous_format)
            made_of.add(_root(new))
            results.append(new)
        graph.output((write(aten.add.Tensor, number, 1), *results))
        graph.eliminate_dead_code()
        return Recorded(graph, constants)

    # --- the three functions ---

    def _assembled(
        self, part: Recorded, inputs: list[fx.Node], ends: dict[fx.Node, str], pieces: list[RowsEnd]
    ) -> HeadRows:
        found, whole = self.found, self.found.whole
        totals, results = list[RowsTotal](), dict[int, RowsInput]()
        of_total: dict[fx.Node, int] = {}
        for k, (x, how) in enumerate(ends.items()):
            if how == "product":
                result, turned = self._returned(x)
                shape = shape_of(x)
                if turned:
                    pieces[k] = pieces[k]._replace(outputs=pieces[k].outputs[::-1])
                    shape = shape[::-1]
                of_total[x] = len(totals)
                if result is not None:
                    results[result] = RowsInput("total", len(totals))
                totals.append(RowsTotal(k, (shape[0], shape[1]), x.meta["val"].dtype, result))
        others = [i for i, x in enumerate(whole.outputs) if i not in results]
        late = [i for i in others if whole.outputs[i] in found.late]
        early = [i for i in others if i not in late]
        behind_ends = [whole.outputs[i] for i in late]
        needed = found.inputs(behind_ends, ends)
        read = [x for x in needed if x not in ends]
        ahead_ends = list(
            dict.fromkeys(x for x in (*inputs, *read, *(whole.outputs[i] for i in early)) if x.op != "placeholder")
        )
        ahead, ahead_inputs = self._ahead(ahead_ends)
        at = {x: RowsInput("ahead", i) for i, x in enumerate(ahead_ends)}
        at |= {x: RowsInput("input", i) for i, x in enumerate(whole.inputs)}
        results |= {i: at[whole.outputs[i]] for i in early}
        results |= {i: RowsInput("behind", k) for k, i in enumerate(late)}
        behind = None
        if late:
            behind = self._behind(read, behind_ends, ends, pieces, of_total, totals)
        wide = max(x.meta["val"].numel() * x.meta["val"].dtype.itemsize for x in found.wide)
        return HeadRows(
            self.parts,
            found.count // self.parts,
            wide,
            ahead,
            ahead_inputs,
            part,
            tuple(at[x] for x in inputs),
            tuple(pieces),
            tuple(totals),
            behind,
            tuple(at[x] for x in read),
            tuple(results[i] for i in range(len(whole.outputs))),
        )

    def _returned(self, node: fx.Node) -> tuple[int | None, bool]:
        """The output that a product over rows is, or is the transpose of, if nothing else reads it; and whether it is
        the transpose."""
        last, turned, outputs = self.graph.output_node(), False, self.found.whole.outputs
        while len(node.users) == 1:
            (user,) = node.users
            if user is last:
                return (outputs.index(node), turned) if outputs.count(node) == 1 else (None, False)
            if _is_transpose(user):
                turned = not turned
            elif not (user.target in RESHAPES and shape_of(user) == shape_of(node)):
                break
            node = user
        return None, False

    def _ahead(self, ends: list[fx.Node]) -> tuple[Recorded, tuple[int, ...]]:
        whole = self.found.whole
        needed = ancestors(ends, stop=set())
        given = [i for i, x in enumerate(whole.inputs) if x in needed]
        made = extract(whole, [whole.inputs[i] for i in given], ends)
        last, like = made.graph.output_node(), whole.inputs[0].meta["val"]
        mode = next(x.meta["val"].fake_mode for x in whole.graph.nodes if x.op != "output")
        write = GraphWriter(made.graph, mode, FakeResults(), 1)
        outputs = list(made.outputs)
        with made.graph.inserting_before(last):
            outputs = [
                write(aten.clone.default, x, memory_format=torch.contiguous_format) if is_view(x) else x
                for x in outputs
            ]
            first = write(aten.full.default, [1], 0, dtype=torch.int64, device=like.device)
        last.args = ((*outputs, first),)
        return made, tuple(given)

    def _behind(
        self,
        read: list[fx.Node],
        outputs: list[fx.Node],
        ends: dict[fx.Node, str],
        pieces: list[RowsEnd],
        of_total: dict[fx.Node, int],
        totals: list[RowsTotal],
    ) -> Recorded:
        graph, env = compat.Graph(), dict[fx.Node, fx.Node]()
        mode = next(x.meta["val"].fake_mode for x in self.graph.nodes if x.op != "output")
        write = GraphWriter(graph, mode, FakeResults(), self.parts)

        def given(name: str, like: torch.Tensor, shape: Sequence[int]) -> fx.Node:
            new = graph.placeholder(name)
            new.meta["val"] = compat.new_fake(mode, shape, like.dtype, like.device)
            return new

        for i, x in enumerate(read):
            env[x] = graph.placeholder(f"x_{i}")
            env[x].meta["val"] = x.meta["val"]
        held: dict[fx.Node, list[fx.Node]] = {}
        for k, (x, how) in enumerate(ends.items()):
            if how != "product":
                value = x.meta["val"]
                shape = cuts.part(value.shape, pieces[k].dim, self.parts)
                held[x] = [given(f"piece_{k}_{i}", value, shape) for i in range(self.parts)]
        for x, k in of_total.items():
            if totals[k].result is None:
                env[x] = given(f"total_{k}", x.meta["val"], shape_of(x))
        for k, (x, how) in enumerate(ends.items()):
            if how == "cat":
                at = pieces[k].dim
                assert at is not None
                env[x] = _joined(write, held[x], at, shape_of(x))
            elif how != "product":
                env[x] = _reduced(write, held[x], how)
        constants: dict[str, torch.Tensor] = {}
        for x in self.found.whole.graph.nodes:
            if x not in ancestors(outputs, stop={*env}) or x in env:
                continue
            if x.op == "get_attr":
                constants[str(x.target)] = self.found.whole.constants[str(x.target)]
            env[x] = graph.node_copy(x, lambda n: env[n])
        graph.output(tuple(env[x] for x in outputs))
        return Recorded(graph, constants)


def _joined(write: GraphWriter, parts: list[fx.Node], place: Dim, shape: list[int]) -> fx.Node:
    """The value of which these are the parts at a place."""
    dim, groups = place
    if groups == 1:
        return write(aten.cat.default, parts, dim)
    each = [write.view(x, [*shape[:dim], groups, shape_of(x)[dim] // groups, *shape[dim + 1 :]]) for x in parts]
    return write.view(write(aten.cat.default, each, dim + 1), shape)


def _reduced(write: GraphWriter, parts: list[fx.Node], how: str) -> fx.Node:
    """The reduction of parts' values; sums of low precision in float32."""
    dtype = parts[0].meta["val"].dtype
    if how != "sum":
        of = aten.maximum.default if how == "max" else aten.minimum.default
        value = parts[0]
        for x in parts[1:]:
            value = write(of, value, x)
        return value
    low = dtype in (torch.float16, torch.bfloat16)
    value = write(
        aten.sum.dim_IntList, write(aten.stack.default, parts), [0], **({"dtype": torch.float32} if low else {})
    )
    return write(aten._to_copy.default, value, dtype=dtype) if low else value
