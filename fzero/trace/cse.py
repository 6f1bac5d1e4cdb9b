"""Merges ops of a graph that compute the same value (common subexpression elimination)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch.fx as fx

from fzero._compat import compat
from fzero.trace.guards.value_keys import exact


def merge_equal(graph: fx.Graph, groups: Mapping[fx.Node, Any] | None = None) -> None:
    """Merges ops that compute the same value into one op. An example is the norm of the gradients, if it is used for
    clipping and also reported. With `groups`, only ops of the same group are merged."""
    seen: dict[Any, fx.Node] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return (type(value), *map(plain, value))
        if isinstance(value, dict):
            return tuple(sorted((k, plain(v)) for k, v in value.items()))
        return exact(value)

    # Equal ops have equal values because the graph is functional and draws from PyTorch's global generator are
    # rejected. Nodes are visited in order and users are redirected at once, so chains of equal ops merge in one pass.
    for node in list(graph.nodes):
        if node.op != "call_function" or (not compat.is_operator(node.target) and node.target is not operator.getitem):
            continue
        if groups is not None and node not in groups:
            continue
        key = (groups and groups[node], node.target, plain(node.args), plain(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
