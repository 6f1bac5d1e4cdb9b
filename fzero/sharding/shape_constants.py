"""Replaces ops that read only the shape of a value, such as `zeros_like`, by constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from fzero.trace.recorder import Recorded

aten = torch.ops.aten
_FULL = {aten.full_like.default, aten.new_full.default}
_ONES = {aten.ones_like.default, aten.new_ones.default}
SHAPE_ONLY = {
    aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default, *_ONES, *_FULL,
}  # fmt: skip
"""The ops that read only the shape, dtype and device of their argument."""


def constants_for_shapes(graph: Recorded) -> Recorded:
    """Replaces ops that read only the shape of a value by constants. Inputs that no op reads any more have no users
    afterwards.

    The graph is changed in place.
    """
    for node in list(graph.graph.nodes):
        if node.target in SHAPE_ONLY:
            with graph.graph.inserting_before(node):
                new = constant(graph.graph, node, list(node.meta["val"].shape))
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new)
    graph.graph.eliminate_dead_code()
    return graph


def constant(graph: fx.Graph, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Writes a constant of any shape with the value of a node such as `zeros_like`."""
    value = node.meta["val"]
    fill = node.args[-1] if node.target in _FULL else int(node.target in _ONES)
    kwargs = {"dtype": value.dtype, "device": node.kwargs.get("device") or value.device}
    return graph.call_function(aten.full.default, (list(shape), fill), kwargs)
