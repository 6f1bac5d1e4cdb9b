"""Classifies the nodes of a recorded graph for the cost model."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
import torch.fx as fx

from fzero.trace.flops import PRODUCTS, packet
from fzero.trace.storages import writes


def by_locality(nodes: list[fx.Node]) -> list[fx.Node]:
    """Returns the nodes with each operation moved directly before the first node that reads it, as Inductor moves
    them (its reorder_for_locality).
    """
    after: dict[fx.Node | None, fx.Node | None] = {}
    before: dict[fx.Node | None, fx.Node | None] = {}
    for a, b in zip((None, *nodes), (*nodes, None), strict=True):
        after[a], before[b] = b, a
    seen, node = set[fx.Node](), before[None]
    first_write = next((n for n in nodes if writes(n)), None)
    moves = first_write is None
    while node is not None:
        seen.add(node)
        if moves and node is not first_write:
            for arg in node.all_input_nodes:
                stays = arg.op != "call_function" or (maker_of(arg) is not arg and packet(maker_of(arg)) in PRODUCTS)
                if not stays and all(u in seen for u in arg.users):
                    after[before[arg]], before[after[arg]] = after[arg], before[arg]
                    after[arg], before[arg] = node, before[node]
                    after[before[node]], before[node] = arg, arg
        moves = moves or node is first_write
        node = before[node]
    out, node = [], after[None]
    while node is not None:
        out.append(node)
        node = after[node]
    return out


def in_order(before: Sequence[frozenset[int]]) -> list[int]:
    """Returns the indices in order, each after those that must come before it. In a cycle, the first stays first."""
    done: dict[int, None] = {}
    entered: set[int] = set()
    for start in range(len(before)):
        todo = [start]
        while todo:
            missing = [j for j in before[todo[-1]] if j not in entered]
            entered.add(todo[-1])
            if missing:
                todo += sorted(missing, reverse=True)
            else:
                done.setdefault(todo.pop())
    return list(done)


def maker_of(node: fx.Node) -> fx.Node:
    """Returns the operation that makes a value: its own node, or the operation with several results that it is one
    of.
    """
    source = node.args[0] if node.op == "call_function" and node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return source


def nbytes(value: object) -> int:
    """Returns the bytes of the memory that a tensor spans, or the sum for several tensors."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.dtype.itemsize
    return sum(map(nbytes, value)) if isinstance(value, (tuple, list)) else 0


def numel(node: fx.Node) -> int:
    """Returns the number of elements of a node's tensor; 0 if its value is not a tensor."""
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, torch.Tensor) else 0


def contiguous(node: fx.Node) -> bool:
    """Returns whether a node's value is a contiguous tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()
