"""Classifies the nodes of a recorded update: arithmetic on parameters, or small global values (scalars, PRNG keys,
stacked scalars)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from fzero.random import DERIVE
from fzero.sharding.flat_propagation import (
    FULL_REDUCTIONS,
    draw_start,
    gather,
    is_reduction,
    num_elements,
    num_valid,
    take_shard,
)
from fzero.sharding.graph_writer import all_reduce

aten = torch.ops.aten

MARKERS = (all_reduce, take_shard, gather, num_valid, draw_start)
"""The markers that propagation leaves in a graph, which lowering turns into ops of a program
(sharding/flat_propagation.py)."""


def is_leaf_value(node: fx.Node) -> bool:
    """Whether a node belongs to the arithmetic on parameters: it is a shard, or anything other than a scalar, a key or
    a vector of scalars."""
    return node.op in ("placeholder", "call_function") and (
        "shard" in node.meta or not (num_elements(node) == 1 or _is_key(node) or "few" in node.meta)
    )


def mark_one_element(graph: fx.Graph, stage: Mapping[fx.Node, Any]) -> None:
    """Marks arithmetic on parameters with one element as parameter arithmetic, as if they had more elements.

    In a pipeline, each stage has its own parameters, gradients and state, so values computed from them are not among
    the scalars that all stages share. A full reduction of such a value is a shared scalar, and so is a value that an op
    of another stage reads.

    Args:
        graph: the graph of an update; it is changed in place.
        stage: the stage of each input that is a parameter, a gradient or state of a parameter.
    """
    found = _of_one_stage(graph, {node: s for node, s in stage.items() if num_elements(node) == 1})
    for node in found:
        node.meta["shard"] = True
    for node in found:
        # ops on shared scalars, such as a stack of the gradients of several stages
        others = [u for u in node.users if u.op == "call_function" and not is_leaf_value(u) and not reduces(u)]
        if others:
            with graph.inserting_after(node):
                # A clone that counts as a reduction: its result is one of the scalars that all
                # stages share.
                number = graph.call_function(aten.clone.default, (node,))
            number.meta.update(val=node.meta["val"], reduction=True)
            node.replace_all_uses_with(number, delete_user_cb=lambda user, others=others: user in others)


def _of_one_stage(graph: fx.Graph, found: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Extends the nodes of each stage by the values with one element that are computed from those of one stage only,
    and marks full reductions of these."""
    for node in list(graph.nodes) if found else ():
        if node.op != "call_function" or num_elements(node) != 1 or "shard" in node.meta or node.target in MARKERS:
            continue
        stages = {found[a] for a in node.all_input_nodes if a in found}
        if len(stages) == 1 and node.target in FULL_REDUCTIONS:
            node.meta["reduction"] = True
        elif len(stages) == 1 and node.target not in (aten.stack.default, aten.cat.default):
            found[node] = stages.pop()
    return found


def mark_few(graph: fx.Graph, known: set[fx.Node]) -> None:
    """Marks values that are computed only from a stack of scalars, from constants or from `known`. Like a scalar, such
    a value has few elements, and is computed once for all parameters. A value with more elements than its arguments,
    such as a draw from a key, counts as parameter arithmetic instead, so that its readers compute it."""
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
    """Replaces a stack of scalars, of which some are adjacent elements of packed vectors, by a concatenation of slices
    of these vectors. This takes a few ops per block, independent of the number of parameters in it."""
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
    """Whether a node is one or several keys of `fz.random`. Like a scalar, a key is computed once and read by all
    parameters."""
    if node.op == "placeholder":
        return node.meta["val"].dtype == torch.int64 and node.meta["val"].shape == (3,)
    return node.target is DERIVE or (node.target is aten.select.int and _is_key(node.all_input_nodes[0]))


def reduces(node: fx.Node) -> bool:
    """Whether a node reduces a parameter value to a scalar. Readers of that scalar are one level later."""
    return "reduction" in node.meta or (
        is_reduction(node) and "shard" not in node.meta and "few" not in node.all_input_nodes[0].meta
    )
