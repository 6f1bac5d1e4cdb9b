"""Rewrites a recorded function so that it computes the rows of experts in two halves.

A product of rows with experts' parameters is two products, each of a half of the rows, and likewise what is pointwise
or a view behind it. A sum over the rows is one of two sums. Anything else reads both halves joined. The function is the
same, up to the order of sums. Each operation on a half has its number in its meta data: ranks exchange one half while
they compute with the other (fzero/trace/segments.py).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx

from fzero import compat
from fzero.operators.expert_products import EXPERT_MM, EXPERT_OUTER
from fzero.operators.row_numbers import ROWS_AT
from fzero.trace.cut_layers import rule_of
from fzero.trace.cut_rules import HALF, WholeOp, named_arguments, pointwise, reduced_dims, shape_of
from fzero.trace.cut_writer import GraphWriter
from fzero.trace.expert_rows import ALONG, ORDERS, same_dim
from fzero.trace.meta_cache import FakeResults
from fzero.trace.propagate import VIEWS
from fzero.trace.recorder import Recorded

aten = torch.ops.aten
Pair = tuple[fx.Node, fx.Node]


def in_halves(graph: Recorded, leaves: Collection[int]) -> Recorded | None:
    """The function with rows in halves, None if it has none. Args: the function; the numbers of inputs that are
    parameters of experts."""
    writer = _Halves(graph, leaves)
    made = writer.result()
    return made if writer.halves or writer.sliced else None


class _Halves:
    def __init__(self, source: Recorded, leaves: Collection[int]):
        self.source, self.graph = source, compat.Graph()
        mode = next(x.meta["val"].fake_mode for x in source.graph.nodes if x.op != "output")
        self.write = GraphWriter(self.graph, mode, FakeResults(), 1)
        self.leaves = {source.inputs[i] for i in leaves}
        self.made: dict[fx.Node, fx.Node] = {}
        self.halves: dict[fx.Node, tuple[int, Pair]] = {}  # the dim that is halved, and the halves
        self.sliced: dict[tuple[fx.Node, int], Pair] = {}

    def result(self) -> Recorded:
        for node in self.source.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.made[node] = self.graph.node_copy(node, lambda a: self.made[a])
            elif node.op == "call_function" and not self._halved(node):
                self.made[node] = self.graph.node_copy(node, self._whole)
        self.graph.output(tuple(map(self._whole, self.source.outputs)))
        self.graph.eliminate_dead_code()
        return Recorded(self.graph, self.source.constants)

    # --- values ---

    def _whole(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            dim, pair = self.halves[node]
            self.made[node] = self.write(aten.cat.default, list(pair), dim)
        return self.made[node]

    def _half(self, node: fx.Node, dim: int) -> Pair:
        """The halves of a value along a dim."""
        if node in self.halves and self.halves[node][0] == dim:
            return self.halves[node][1]
        if (node, dim) not in self.sliced:
            if (pair := self._half_of_view(node, dim)) is not None:
                self.sliced[node, dim] = self._tagged(pair)
                return pair
            size, read = shape_of(node)[dim], node.target is ROWS_AT and dim < len(shape_of(node)) - 1
            ends = (0, size // 2), (size // 2, size)

            def part(begin: int, end: int) -> fx.Node:
                if read:  # of the numbers of rows, so that no value has all of these
                    x, index, *rest = map(self._given, node.args)
                    return self.write(ROWS_AT, x, self.write(aten.slice.Tensor, index, dim, begin, end), *rest)
                return self.write(aten.slice.Tensor, self._whole(node), dim, begin, end)

            self.sliced[node, dim] = self._tagged((part(*ends[0]), part(*ends[1])))
        return self.sliced[node, dim]

    def _half_of_view(self, node: fx.Node, dim: int) -> Pair | None:
        """The halves of a view, as views of the halves of its source: so that these are one value for all views."""
        if node.target in ORDERS:
            (x,) = node.all_input_nodes
            return self._parts(node, {x: ORDERS[node.target](self._op(node))[dim]})
        if node.target not in VIEWS:
            return None
        (x,), shape = node.all_input_nodes, shape_of(node)
        expands = node.target is aten.expand.default
        at = dim - len(shape) + len(shape_of(x)) if expands else same_dim(node, shape, shape_of(x), dim)
        if at is None or at < 0 or shape_of(x)[at] != shape[dim]:
            return None
        shapes = [[*shape[:dim], n, *shape[dim + 1 :]] for n in (shape[dim] // 2, shape[dim] - shape[dim] // 2)]
        if expands:
            return self._parts(node, {x: at}, [{"size": size} for size in shapes])
        a, b = self._half(x, at)
        return self.write.view(a, shapes[0]), self.write.view(b, shapes[1])

    def _given(self, x: Any) -> Any:
        return self._whole(x) if isinstance(x, fx.Node) else x

    def _tagged(self, pair: Pair) -> Pair:
        for i, x in enumerate(pair):
            x.meta[HALF] = i
        return pair

    # --- operations ---

    def _halved(self, node: fx.Node) -> bool:
        """Writes an operation in halves, where it can be."""
        target = node.target
        if target is operator.getitem:
            return self._item(node)
        if target in (aten.bmm.default, aten.baddbmm.default, EXPERT_MM, EXPERT_OUTER):
            return self._product(node)
        inputs = [a for a in node.all_input_nodes if a in self.halves]
        if not inputs:
            return False
        dim = self.halves[inputs[0]][0]
        if target in VIEWS:
            return self._view(node, dim)
        if target in ORDERS:
            return self._put(node, ORDERS[target](self._op(node)).index(dim), {inputs[0]: dim})
        if target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
            return self._reduced(node, dim)
        if target in ALONG:
            return self._along(node, dim)
        return rule_of(target) is pointwise and self._pointwise(node, inputs[0], dim)

    def _op(self, node: fx.Node) -> WholeOp:
        return WholeOp(node, 1, dict.fromkeys(node.all_input_nodes))

    def _parts(self, node: fx.Node, dims: dict[fx.Node, int], more: Any = None) -> Pair:
        """An operation on each half: of inputs along these dims, of the others whole. `more`: of the first half's and
        the second's arguments by name those that differ otherwise."""
        pairs = {a: self._half(a, d) for a, d in dims.items()}
        rest = {a: self._whole(a) for a in node.all_input_nodes if a not in pairs}
        named, out = named_arguments(node), list[fx.Node]()
        for i in range(2):
            given = fx.map_arg(named, lambda a, i=i: pairs[a][i] if a in pairs else rest[a])
            out.append(self.write.named(node.target, given | (more[i] if more else {})))
        return self._tagged((out[0], out[1]))

    def _put(self, node: fx.Node, dim: int, dims: dict[fx.Node, int], more: Any = None) -> bool:
        self.halves[node] = dim, self._parts(node, dims, more)
        return True

    def _add(self, node: fx.Node, dims: dict[fx.Node, int]) -> bool:
        """A sum over halved rows: that of both halves."""
        self.made[node] = self.write(aten.add.Tensor, *self._parts(node, dims))
        return True

    def _of_experts(self, node: fx.Node) -> bool:
        while node.op == "call_function" and (node.target in VIEWS or node.target in ORDERS):
            (node,) = node.all_input_nodes
        return node in self.leaves

    def _product(self, node: fx.Node) -> bool:
        outer = node.target is EXPERT_OUTER
        numbers = [node.args[0]] if outer or node.target is EXPERT_MM else []
        added = [node.args[0]] if node.target is aten.baddbmm.default else []
        a, b = node.args[1:3] if numbers or added else node.args[:2]
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        at = {x: self.halves[x][0] for x in (a, b) if x in self.halves}
        own: dict[fx.Node, int] = dict.fromkeys(numbers, 1)  # type: ignore[arg-type]
        if a is b:
            return False
        if at.get(a) == 2 or at.get(b) == 1:
            return not added and node.target is not EXPERT_MM and self._add(node, own | {a: 2, b: 1})
        if outer:
            return False
        for x, y, dim in ((a, b, 1), (b, a, 2)):
            if (at.get(x) == dim or self._of_experts(y)) and shape_of(x)[dim] > 1 and not (numbers and x is b):
                rows = [z for z in added if isinstance(z, fx.Node) and self._has(z, node, dim)]
                return self._put(node, dim, own | {x: dim} | {z: dim - 3 + len(shape_of(z)) for z in rows})
        return False

    def _has(self, x: fx.Node, node: fx.Node, dim: int) -> bool:
        """Whether an operand has the rows of a result's dim, not one for all."""
        count, k = len(node.meta["val"].shape), len(shape_of(x))
        return dim - count + k >= 0 and shape_of(x)[dim - count + k] > 1

    def _pointwise(self, node: fx.Node, first: fx.Node, dim: int) -> bool:
        count = len(node.meta["val"].shape)
        at = dim + count - len(shape_of(first))
        if node.meta["val"].shape[at] != shape_of(first)[dim]:
            return False
        rows = [a for a in node.all_input_nodes if self._has(a, node, at)]
        return self._put(node, at, {a: at - count + len(shape_of(a)) for a in rows})

    def _view(self, node: fx.Node, dim: int) -> bool:
        (x,) = node.all_input_nodes
        new = list(node.meta["val"].shape)
        at = same_dim(node, shape_of(x), new, dim)
        if at is None:
            return False
        size = shape_of(x)[dim]
        shapes = [[*new[:at], n, *new[at + 1 :]] for n in (size // 2, size - size // 2)]
        if node.target is aten.expand.default:
            return self._put(node, at, {x: dim}, [{"size": s} for s in shapes])
        pair = self._half(x, dim)
        self.halves[node] = at, self._tagged((self.write.view(pair[0], shapes[0]), self.write.view(pair[1], shapes[1])))
        return True

    def _reduced(self, node: fx.Node, dim: int) -> bool:
        op = self._op(node)
        x, dims = op["self"], reduced_dims(op)
        if dim in dims:
            return node.target is aten.sum.dim_IntList and self._add(node, {x: dim})
        left = [d for d in range(len(shape_of(x))) if d not in dims or op["keepdim"]]
        return self._put(node, left.index(dim), {x: dim})

    def _along(self, node: fx.Node, dim: int) -> bool:
        op, value = self._op(node), node.meta["val"]
        count = len((value[0] if isinstance(value, (tuple, list)) else value).shape)
        of = dict.fromkeys(node.all_input_nodes, dim)
        alike = {(len(shape_of(a)), *shape_of(a)[dim : dim + 1]) for a in of}
        if op["dim"] is None or op["dim"] % count == dim or len(alike) > 1 or next(iter(alike))[0] != count:
            return False
        if node.target is not aten.slice_backward.default:
            return self._put(node, dim, of)
        sizes, size = op["input_sizes"], shape_of(node.all_input_nodes[0])[dim]
        shapes = [[*sizes[:dim], n, *sizes[dim + 1 :]] for n in (size // 2, size - size // 2)]
        return self._put(node, dim, of, [{"input_sizes": s} for s in shapes])

    def _item(self, node: fx.Node) -> bool:
        source, i = node.args
        if source not in self.halves:
            return False
        dim, (a, b) = self.halves[source]  # type: ignore[index]
        self.halves[node] = dim, self._tagged((self.write(operator.getitem, a, i), self.write(operator.getitem, b, i)))
        return True
