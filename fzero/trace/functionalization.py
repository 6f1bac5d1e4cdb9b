"""Rewrites recorded functions without in-place operations: readers of an overwritten tensor read its new value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.guards.rejections import CHANGES, NEW_VALUE
from fzero.trace.guards.torch_switches import without_autocast
from fzero.trace.recorder import Recorded, Recorder

aten = torch.ops.aten

torch.library.define("fzero::recorded_call", "(Tensor[] xs, int index) -> Tensor[]")
_CALL = torch.ops.fzero.recorded_call.default


def finish(recorder: Recorder, outputs: Sequence[torch.Tensor]) -> Recorded:
    """The recorded function with these results, without in-place operations. Those on the arguments are an error that
    names them."""
    if written := recorder.memory.written:
        changed = [f"{label}: {where}" if where else label for label, where in written.items()]
        raise TraceError(recorder.owner, CHANGES, changed, NEW_VALUE)
    graph = recorder.finish(outputs)
    return functional(graph, recorder.owner) if recorder.mutates else graph


def functional(graph: Recorded, owner: str) -> Recorded:
    """The same function without in-place operations, recorded under the mode of its fake tensors: readers of an
    overwritten tensor read the new value. A call of a block stays one node; it reads its arguments' values at the time
    of the call, and so does its vjp."""
    inputs, names = graph.inputs, list(graph.constants)
    again = _Again(owner, graph)
    for node in inputs:
        again.input(node.meta["val"], str(node.target)).meta.update(node.meta)
    literals = [
        compat.new_fake(inputs[0].meta["val"].fake_mode, x.shape, x.dtype, x.device, x.stride())
        for x in graph.constants.values()
    ]
    for name, literal in zip(names, literals, strict=True):
        again.constant(name, graph.constants[name], literal)

    def run(*xs: torch.Tensor) -> Any:
        return _Calls(graph, again.calls, dict(zip(names, xs[len(inputs) :], strict=True))).run(*xs[: len(inputs)])

    # Function modes are for the code of a user, which has run already.
    with torch.no_grad(), without_autocast(), compat.no_function_modes(), again:
        outputs = compat.functionalized(run, [*(n.meta["val"] for n in inputs), *literals])
    return again.finish(outputs)


AGAIN: Mapping[Any, Callable[..., Any]] = {aten.view.default: torch.reshape, aten._unsafe_view.default: torch.reshape}
"""The operations that a graph calls instead when it is run again: results may then have other strides than in the
trace, which rule out a view."""


class _Calls(fx.Interpreter):
    """Runs a recorded graph with its calls of blocks as calls of one operator, which writes nothing and returns no
    view."""

    def __init__(self, graph: Recorded, calls: list[fx.Node], literals: dict[str, torch.Tensor]):
        super().__init__(torch.nn.Module(), graph=graph.graph)
        self._of, self._literals = calls, literals

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._literals[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(AGAIN.get(target, target), args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or compat.is_operator(n.target) or n.target is operator.getitem:
            return super().run_node(n)
        (_, _, *xs), _ = self.fetch_args_kwargs_from_env(n)
        return _CALL(xs, self._of.index(n))


class _Again(Recorder):
    def __init__(self, owner: str, graph: Recorded):
        super().__init__(owner)
        self.calls = [
            n
            for n in graph.graph.nodes
            if n.op == "call_function" and not (compat.is_operator(n.target) or n.target is operator.getitem)
        ]
        self._inputs: dict[int, tuple[fx.Node, ...]] = {}  # of each call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _CALL:
            return super().__torch_dispatch__(func, types, args, kwargs)
        xs, index = args
        node = self.calls[index]
        joint, call, *_ = node.args
        given = tuple(map(self.node, xs))
        before = self._inputs.setdefault(call, given)
        values = [n.meta["val"] for n in sorted(node.users, key=lambda n: n.args[1])]
        outputs = [compat.new_fake(v.fake_mode, v.shape, v.dtype, v.device, v.stride()) for v in values]
        self.call(node.target, (joint, call, *before, *given[len(before) :]), outputs)
        return outputs
