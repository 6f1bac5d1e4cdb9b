"""Tracks storages of a recorded graph: a view lies in what it views, an overwritten value where it lay before, anything
else is made anew.

A storage is known by the node that makes it. All questions for the memory of a value are answered here. They come from
transforms/joint_split.py (saved values of a block), trace/subgraph.py (views to remake), compiler/hoist_updates.py
(memory still read), plan/memory.py (memory kept alive) and plan/inductor/fusion.py (kernels). In
sharding/flat_propagation.py a view is another
thing: an operation under which a flat shard stays a shard. This file also tells strides that the trace alone guesses.
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
    """The storage of a result of a function: in argument number `argument`, or in a new storage, known by `root`, of
    `nbytes`."""

    argument: int | None
    root: int
    nbytes: int


def output_storages(graph: Recorded) -> list[Output]:
    """The storage of each result. Results that are views of one tensor share it."""
    places = {n: i for i, n in enumerate(graph.inputs)}
    roots = [storage_of(n) for n in graph.outputs]
    numbers = {n: i for i, n in enumerate(dict.fromkeys(roots))}
    found = []
    for node in roots:
        # a literal belongs to the function
        nbytes = node.meta["val"].untyped_storage().nbytes() if node.op == "call_function" else 0
        found.append(Output(places.get(node), numbers[node], nbytes))
    return found


def storage_of(node: fx.Node) -> fx.Node:
    """The node that makes the memory a node's value lies in: itself, unless it is a view, or overwrites its first
    argument."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if not (is_view(node) or writes(node) or (node.target is operator.getitem and is_view(source))):
            # a result of `unbind` or `split`
            return node
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node returns its first argument's memory under another shape, or several parts of it. `_unsafe_view`
    does, though its schema denies it."""
    return node.op == "call_function" and (compat.is_view(node.target) or node.target is aten._unsafe_view.default)


def writes(node: fx.Node) -> bool:
    """Whether an operation overwrites its first argument. Only functions that write into their arguments have such: a
    recorded graph is functional."""
    return node.op == "call_function" and compat.is_operator(node.target) and node.target._schema.is_mutable  # type: ignore[union-attr]


def strides_guessed(node: fx.Node, packed: Collection[Any] = ()) -> bool:
    """Whether a traced value may have other strides when it runs. They are those that its fake tensor says if it is
    made of contiguous tensors, by an elementwise operation of one tensor or a matrix product, or in a layout that is
    asked for. `packed`: operations whose results are contiguous too."""
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
