"""Finds chains in a recorded function: a matrix product with one of its inputs, together with the earlier such products
whose results reach it through other ops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fzero.trace.recorder import Recorded
from fzero.trace.storages import is_view

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """A matrix product with an input. `matrix` is the index of the input that is the matrix, `summed` the dim of the
    matrix that the product sums over, `node` the op, and `other` the second factor."""

    matrix: int
    summed: int
    node: fx.Node
    other: fx.Node

    @property
    def kept(self) -> int:
        """The dim of the matrix that the result has."""
        return 1 - self.summed


@dataclass(frozen=True)
class Chain:
    """A product, and the earlier products whose results it reads."""

    last: Product
    before: tuple[Product, ...]


def chains(graph: Recorded, matrices: Sequence[int]) -> list[Chain]:
    """The chains of a function, in the order of its ops. `matrices`: the indices of the inputs to consider."""
    inputs = {graph.inputs[i]: i for i in matrices}
    products = {x.node: x for node in graph.graph.nodes for x in _products(node, inputs)}
    return [Chain(x, tuple(_before(x, products))) for x in products.values()]


def pieces(graph: Recorded, size: int) -> list[int]:
    """The possible numbers of equal pieces in a dim of this size, derived from the ops that split it; 1 comes first. An
    example are fused queries, keys and values."""
    found = [1]
    if size == 0:  # nothing to take apart; the arithmetic below would divide by zero
        return found
    for node in graph.graph.nodes:
        for x in node.all_input_nodes if node.op == "call_function" else ():
            if size in (before := _shape(x)):
                found += _pieces_of(node, before, size)
    return [x for x in dict.fromkeys(found) if x <= _MOST_PIECES]


def _pieces_of(node: fx.Node, before: list[int], size: int) -> list[int]:
    """The numbers of pieces into which an op splits the dim of this size of an input of shape `before`."""
    value: Any = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    after = [list(v.shape) for v in values if isinstance(v, torch.Tensor)]
    if node.target in _SPLITS:
        dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        # The largest piece of which every section is a multiple.
        return [size // math.gcd(*(s[dim] for s in after))] if before[dim] == size else []
    if node.target is aten.slice.Tensor and len(after[0]) == len(before):
        return [size // math.gcd(a, b) for a, b in zip(before, after[0], strict=True) if a == size and b]
    if is_view(node) and size not in after[0] and len(after[0]) > len(before):
        at = before.index(size)
        return [after[0][at]] if after[0][:at] == before[:at] else []
    return []


_SPLITS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
_MOST_PIECES = 16
"""A larger number of pieces means heads, which need no groups."""


def _shape(node: fx.Node) -> list[int]:
    value = node.meta["val"]
    return list(value.shape) if isinstance(value, torch.Tensor) else []


def _products(node: fx.Node, inputs: dict[fx.Node, int]) -> Iterator[Product]:
    """Yields the product that a node computes, if one of its factors is an input, possibly transposed or cast."""
    if node.target not in (aten.mm.default, aten.addmm.default):
        return
    a, b = (x for x in node.args[-2:] if isinstance(x, fx.Node))
    # a @ b sums over dim 1 of a and dim 0 of b; each transposition of the factor exchanges its
    # dims.
    for factor, other, summed in ((a, b, 1), (b, a, 0)):
        turned = False
        while factor not in inputs and len(factor.all_input_nodes) == 1 and len(_shape(factor)) == 2:
            if factor.target in (aten.t.default, aten.transpose.int, aten.permute.default):
                turned = not turned
            elif factor.target not in (aten._to_copy.default, aten.detach.default, aten.alias.default):
                break
            factor = factor.all_input_nodes[0]
        if factor in inputs:
            yield Product(inputs[factor], summed ^ turned, node, other)
            return


def _before(product: Product, products: dict[fx.Node, Product]) -> Iterator[Product]:
    """Yields the nearest earlier products that the second factor of a product depends on."""
    seen, todo = set[fx.Node](), [product.other]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in products:
            yield products[node]
        else:
            todo += node.all_input_nodes
