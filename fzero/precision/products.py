"""Finds products of matrices in a recorded graph: their nodes, their operands, and which could be done in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from fzero.operators.scaled_matmul import MULTIPLE
from fzero.trace.joint import Joint, call_block, call_vjp

aten = torch.ops.aten

_VIEWS = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
"""Views of all elements of their argument."""
_COPIES = {aten._to_copy.default, aten.clone.default}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def factors(node: fx.Node) -> tuple[Any, ...]:
    """The two matrices that a node multiplies; none of any other node. A batch of one is a matrix."""
    match node.target:
        case aten.mm.default:
            return node.args[:2]
        case aten.addmm.default if node.kwargs.get("alpha", 1) == 1:
            return node.args[1:3]
        case aten.bmm.default if node.meta["val"].shape[0] == 1:
            return node.args[:2]
    return ()


def dims(matrices: Sequence[fx.Node]) -> tuple[int, int, int]:
    """The dims of a product of two matrices: the rows of the first, what is summed over, the columns of the second."""
    a, b = (f.meta["val"].shape for f in matrices)
    return a[-2], a[-1], b[-1]


def fits(node: fx.Node) -> bool:
    """Whether a node is a product that can be done in 8 bits."""
    found = factors(node)
    return bool(found) and node.meta["val"].dtype in _DTYPES and not any(n % MULTIPLE for n in dims(found))


def origin(node: fx.Node) -> fx.Node:
    """The node whose elements a node has all of, in another shape, order or dtype."""
    while node.target in _VIEWS | _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def unviewed(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node that a node is a view of all of, and the views, the last one last."""
    views: list[fx.Node] = []
    while node.target in _VIEWS:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views[::-1]


def summands(grad: fx.Node) -> list[fx.Node]:
    """The products that add up to a gradient."""
    found, todo = [], [grad]
    while todo:
        node = origin(todo.pop())
        if factors(node):
            found.append(node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            todo += [n for n in node.args if isinstance(n, fx.Node)]
    return found


def only_multiplied(node: fx.Node) -> bool:
    """Whether products that can be done in 8 bits read an input, and nothing else does, here and in blocks."""
    for user in node.users:
        if user.target in (call_block, call_vjp):
            joint: Joint = user.args[0]  # type: ignore[assignment]
            places = [joint.graph.inputs[i] for i, n in enumerate(user.args[2 : 2 + joint.num_inputs]) if n is node]
            if node.op != "placeholder" or not all(map(only_multiplied, places)):
                return False
        elif not (only_multiplied(user) if user.target in _VIEWS else fits(user)):
            return False
    return bool(node.users)
