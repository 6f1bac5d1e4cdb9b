"""Tracks values that a trace knows though its tensors have none: of operations on literals alone, such as a mask made
by `torch.ones(4, 4).triu()`.

What Python, or a shape, asks of such a tensor is answered by computing it. What depends on an argument of the function
is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fzero import compat

aten = torch.ops.aten


class Unknown(Exception):
    """A value that depends on an argument."""


class Known:
    """Computes what is known of a graph that is being recorded: from its literals, in its order, in place where it
    works in place."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]):
        self._constants = constants
        self._values: dict[fx.Node, Any] = {}
        self._last = graph._root
        self._lost: set[int] = set()  # memory that something unknown was written to

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, from arguments in which nodes stand for tensors.

        Raises:
            Unknown: it depends on more than literals.
        """
        with compat.no_modes(), torch.no_grad():
            while (node := self._last.next).op != "root":
                self._last = node
                try:
                    if node.op == "get_attr":
                        self._values[node] = self._constants[str(node.target)].clone()
                    elif node.op == "call_function":
                        self._values[node] = self._run(node.target, node.args, node.kwargs)
                except Unknown:
                    if compat.is_operator(node.target) and node.target._schema.is_mutable:  # type: ignore[union-attr]
                        self._lost.update(
                            _memory(self._values[x])
                            for x in node.all_input_nodes
                            if isinstance(self._values.get(x), torch.Tensor)
                        )
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        def value(node: fx.Node) -> Any:
            found = self._values.get(node)
            if found is None or (isinstance(found, torch.Tensor) and _memory(found) in self._lost):
                raise Unknown
            return found

        if func in _UNWRITTEN or not (
            func is operator.getitem
            or (compat.is_operator(func) and torch.Tag.nondeterministic_seeded not in func.tags)
        ):
            raise Unknown
        kwargs = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
        return func(*map_arg(args, value), **map_arg(kwargs, value))


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


_UNWRITTEN = {
    getattr(aten, name).default for name in ("empty_like", "new_empty", "empty_strided", "new_empty_strided")
} | {aten.empty.memory_format}
