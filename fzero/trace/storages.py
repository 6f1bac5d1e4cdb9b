"""Tracks the storages of a recorded graph. A view shares the storage of its base, an overwritten value keeps its
storage, and every other value has a new one.

A storage is identified by the node that creates it. This file answers all questions about the memory of a value. They
come from transforms/joint_split.py (saved values of a block), trace/subgraph.py (views to recompute),
compiler/hoist_updates.py (memory that is still read), plan/memory.py (memory that is kept alive) and
plan/inductor/fusion.py (kernels). In sharding/flat_propagation.py the word view means something else: an op under which
a flat shard stays a shard. This file also tells which strides are only guesses of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.fx as fx

from fzero._compat import compat

if TYPE_CHECKING:
    from fzero.trace.recorder import Recorded

aten = torch.ops.aten


class Output(NamedTuple):
    """The storage of a function's result. It is the storage of argument number `argument`, or, if that is None, a new
    storage of `nbytes` bytes. Results with the same `root` share a storage."""

    argument: int | None
    root: int
    nbytes: int


def output_storages(graph: Recorded) -> list[Output]:
    """The storage of each result. Results that are views of one tensor share a storage."""
    places = {n: i for i, n in enumerate(graph.inputs)}
    roots = [storage_of(n) for n in graph.outputs]
    numbers = {n: i for i, n in enumerate(dict.fromkeys(roots))}
    found = []
    for node in roots:
        # the storage of a literal belongs to the function
        nbytes = node.meta["val"].untyped_storage().nbytes() if node.op == "call_function" else 0
        found.append(Output(places.get(node), numbers[node], nbytes))
    return found


def storage_of(node: fx.Node) -> fx.Node:
    """The node that creates the storage of a node's value. This is the node itself, unless it is a view or overwrites
    its first argument."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if not (is_view(node) or writes(node) or (node.target is operator.getitem and is_view(source))):
            return node  # the last condition is for the results of `unbind` and `split`
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node returns a view of its first argument, or several views. `_unsafe_view` does, although its schema
    says otherwise."""
    return node.op == "call_function" and (compat.is_view(node.target) or node.target is aten._unsafe_view.default)


def writes(node: fx.Node) -> bool:
    """Whether an op overwrites its first argument. Recorded graphs are functional; only functions that write their
    results into their arguments contain such ops."""
    return node.op == "call_function" and compat.is_operator(node.target) and node.target._schema.is_mutable  # type: ignore[union-attr]


def strides_guessed(node: fx.Node, packed: Collection[Any] = ()) -> bool:
    """Whether a value may have other strides at run time than its fake tensor has in the trace. The strides are certain
    if the value is computed from contiguous tensors, by an elementwise op of one tensor, by a matrix product, or with
    an explicitly requested layout. `packed`: further ops whose results are contiguous."""
    seen, todo = set[fx.Node](), [node]
    while todo:
        value = todo.pop()
        if (
            value in seen
            or value.op != "call_function"
            or value.target in _PRODUCTS
            or value.target in packed
            or value.kwargs.get("memory_format") is torch.contiguous_format
        ):
            continue
        seen.add(value)
        todo += value.all_input_nodes
        if (
            is_view(value)
            or value.target is operator.getitem
            or (len(value.all_input_nodes) == 1 and torch.Tag.pointwise in getattr(value.target, "tags", ()))
        ):
            continue
        if not all(x.is_contiguous() for n in value.all_input_nodes if isinstance(x := n.meta["val"], torch.Tensor)):
            return True
    return False


_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
