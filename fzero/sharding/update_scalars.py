"""Classifies nodes of the recorded update: per-parameter tensor arithmetic, or small global values (scalars, PRNG keys,
stacked scalars)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from fzero.random import DERIVE
from fzero.sharding.flat_propagation import (
    REDUCTIONS,
    all_reduce,
    cut,
    draw_start,
    gather,
    is_reduction,
    num_elements,
    num_valid,
)

aten = torch.ops.aten

MARKERS = (all_reduce, cut, gather, num_valid, draw_start)
"""The functions that propagation leaves in a graph, which lowering turns into lines (sharding/flat_propagation.py)."""


def is_leaf_value(node: fx.Node) -> bool:
    """Whether a node is part of leaf arithmetic: a shard, or anything but a scalar, a key or a vector of scalars."""
    return node.op in ("placeholder", "call_function") and (
        "shard" in node.meta or not (num_elements(node) == 1 or _is_key(node) or "few" in node.meta)
    )


def mark_one_element(graph: fx.Graph, stage: Mapping[fx.Node, Any]) -> None:
    """Marks the arithmetic of parameters with one element as leaf arithmetic, as if they had more.

    In a pipeline a stage has parameters, gradients and state of its own, so what is computed of them is not one of the
    numbers that all stages share. A full reduction of such a value is such a number, as is a value that an operation
    of another stage reads.

    Args:
        graph: of an update, changed in place.
        stage: the stage of each input that is a parameter, a gradient or state of a parameter.
    """
    found = {node: s for node, s in stage.items() if num_elements(node) == 1}
    for node in list(graph.nodes) if found else ():
        if node.op != "call_function" or num_elements(node) != 1 or "shard" in node.meta or node.target in MARKERS:
            continue
        stages = {found[a] for a in node.all_input_nodes if a in found}
        if len(stages) == 1 and node.target in REDUCTIONS:
            node.meta["reduction"] = True
        elif len(stages) == 1 and node.target not in (aten.stack.default, aten.cat.default):
            found[node] = stages.pop()
    for node in found:
        node.meta["shard"] = True
    for node in found:
        # operations on numbers, such as a stack of the gradients of several stages
        others = [u for u in node.users if u.op == "call_function" and not is_leaf_value(u) and not reduces(u)]
        if others:
            with graph.inserting_after(node):
                number = graph.call_function(aten.clone.default, (node,))
            number.meta.update(val=node.meta["val"], reduction=True)
            node.replace_all_uses_with(number, delete_user_cb=lambda user, others=others: user in others)


def mark_few(graph: fx.Graph, known: set[fx.Node]) -> None:
    """Marks what is made of a stack of scalars, of constants or of `known` alone: like a scalar it is few numbers, made
    once, of all leaves. A value with more numbers than its arguments, such as a draw from a key, counts as a leaf: its
    readers make it."""
    for node in graph.nodes:
        args = node.all_input_nodes
        if node in known:
            node.meta["few"] = True
        if (
            node.op != "call_function"
            or node.target in MARKERS
            or "shard" in node.meta
            or not args
            or num_elements(node) == 1
        ):
            continue
        if num_elements(node) > sum(map(num_elements, args)):
            continue
        scalars = all(num_elements(a) == 1 and a.op != "get_attr" for a in args)
        if all(a.op == "get_attr" or not is_leaf_value(a) or reduces(a) for a in args) and (
            not scalars or node.target in (aten.stack.default, aten.cat.default)
        ):
            node.meta["few"] = True


def slice_packed(graph: fx.Graph) -> None:
    """Makes a stack of scalars that lie side by side in packed vectors of slices of those: a few operations a block,
    however many leaves it has."""
    for node in [n for n in graph.nodes if n.target is aten.stack.default and "few" in n.meta]:
        runs: list[list[Any]] = []
        for scalar in node.args[0]:
            last = runs[-1][-1] if runs else None
            beside = (
                last is not None
                and scalar.target is last.target is aten.select.int
                and scalar.args == (last.args[0], 0, last.args[2] + 1)
            )
            runs[-1].append(scalar) if beside else runs.append([scalar])
        if len(runs) == len(node.args[0]):
            continue
        with graph.inserting_before(node):
            whole = graph.call_function(aten.cat.default, ([_side_by_side(graph, run) for run in runs],))
        whole.meta.update(node.meta)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _side_by_side(graph: fx.Graph, run: list[Any]) -> fx.Node:
    first = run[0]
    if len(run) == 1:
        out = graph.call_function(aten.unsqueeze.default, (first, 0))
    else:
        source, _, start = first.args
        out = graph.call_function(aten.slice.Tensor, (source, 0, start, start + len(run)))
    out.meta.update(val=torch.empty(len(run), dtype=first.meta["val"].dtype, device="meta"), few=True)
    return out


def _is_key(node: fx.Node) -> bool:
    """Whether a node is a key of `fz.random`, or several: like a scalar it is made once, and read by all leaves."""
    if node.op == "placeholder":
        return node.meta["val"].dtype == torch.int64 and node.meta["val"].shape == (3,)
    return node.target is DERIVE or (node.target is aten.select.int and _is_key(node.all_input_nodes[0]))


def reduces(node: fx.Node) -> bool:
    """Whether a node makes a scalar of a leaf value; readers of that scalar come a level later."""
    return "reduction" in node.meta or (
        is_reduction(node) and "shard" not in node.meta and "few" not in node.all_input_nodes[0].meta
    )
