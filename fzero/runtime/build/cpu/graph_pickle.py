"""Pickles a graph as plain values, for another process.

A pickled `GraphModule` is traced again when it is loaded. Operations that create tensors without inputs (zeros, ones,
ranges) would then run during that trace, and become literals.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from fzero._compat import compat
from fzero.ops.registration import module_of


@dataclass(frozen=True)
class Ref:
    """A reference to a node, by its position."""

    index: int


class PickledOp(NamedTuple):
    """An operator of `torch.ops`, by its names. If it is one of our own operators, also by the module that defines
    it."""

    namespace: str
    name: str
    overload: str
    module: str = ""

    def found(self) -> Any:
        if self.module:
            # Our own operators exist in `torch.ops` only after the module that defines them has been imported.
            importlib.import_module(self.module)
        return getattr(getattr(getattr(torch.ops, self.namespace), self.name), self.overload)


@dataclass(frozen=True)
class Constant:
    """A memory format, by its name in torch. Pickle would store only a name, and look it up in a module that may not
    have it."""

    name: str


Sent = Sequence[tuple[str, str, Any, Any, Any]]
"""The nodes of a graph: kind, name, target, arguments and keyword arguments of each."""


def plain(graph: fx.Graph) -> Sent:
    """Converts a graph of placeholders and operators, without literals, to plain values that can be pickled.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> _ = graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)),))
        >>> plain(graph)[1][:3]
        ('call_function', 'neg_default', PickledOp(namespace='aten', name='neg', overload='default', module=''))
    """
    index = {node: i for i, node in enumerate(graph.nodes)}

    def by_name(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return Ref(index[x])
        return Constant(str(x).removeprefix("torch.")) if isinstance(x, torch.memory_format) else x

    args: list[Any] = [map_aggregate((n.args, n.kwargs), by_name) for n in graph.nodes]
    return tuple((n.op, n.name, _named(n.target), *given) for n, given in zip(graph.nodes, args, strict=True))


def restored(sent: Sent) -> fx.GraphModule:
    """Restores the graph as a callable module."""
    graph, nodes = fx.Graph(), list[fx.Node]()

    def back(x: Any) -> Any:
        if isinstance(x, Ref):
            return nodes[x.index]
        return getattr(torch, x.name) if isinstance(x, Constant) else x

    for kind, name, target, args, kwargs in sent:
        given: Any = map_aggregate((args, kwargs), back)
        nodes.append(
            graph.create_node(
                kind, target.found() if isinstance(target, PickledOp) else target, given[0], given[1], name
            )
        )
    return fx.GraphModule({}, graph)


def _named(target: Any) -> Any:
    if not compat.is_operator(target):
        return target
    namespace, name, overload = str(target).split(".")
    return PickledOp(namespace, name, overload, module_of(f"{namespace}.{name}"))
