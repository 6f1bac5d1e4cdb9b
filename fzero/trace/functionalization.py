"""Rewrites recorded functions without in-place ops, so that every reader of an overwritten tensor reads
its new value."""

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
    """Returns the recorded function with these results and without in-place ops. In-place ops on the arguments of the
    function are an error that names these arguments."""
    if written := recorder.memory.written:
        changed = [f"{label}: {where}" if where else label for label, where in written.items()]
        raise TraceError(recorder.owner, CHANGES, changed, NEW_VALUE)
    graph = recorder.finish(outputs)
    return functional(graph, recorder.owner) if recorder.mutates else graph


def functional(graph: Recorded, owner: str) -> Recorded:
    """Returns the same function without in-place ops, recorded under the mode of its fake tensors. Readers of an
    overwritten tensor read its new value.

    A call of a block stays one node. It reads the values that its arguments have at the time of the call, and its vjp
    reads the same values.
    """
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

    # Function modes apply to the user's code, which has already run.
    with torch.no_grad(), without_autocast(), compat.no_function_modes(), again:
        outputs = compat.functionalized(run, [*(n.meta["val"] for n in inputs), *literals])
    return again.finish(outputs)


AGAIN: Mapping[Any, Callable[..., Any]] = {aten.view.default: torch.reshape, aten._unsafe_view.default: torch.reshape}
"""Ops, and what to call instead when a recorded graph is run again. Intermediate results may then have other strides
than in the trace, and for these a view may be impossible."""


class _Calls(fx.Interpreter):
    """Runs a recorded graph in which each call of a block is a call of a single operator that writes nothing and
    returns no views."""

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
    """Records a graph that is run again by `_Calls`, and turns the operator that stands for calls of blocks back into
    the nodes of these calls."""

    def __init__(self, owner: str, graph: Recorded):
        super().__init__(owner)
        self.calls = [
            n
            for n in graph.graph.nodes
            if n.op == "call_function" and not (compat.is_operator(n.target) or n.target is operator.getitem)
        ]
        self._inputs: dict[int, tuple[fx.Node, ...]] = {}  # the inputs of each call of a block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _CALL:
            return super().__torch_dispatch__(func, types, args, kwargs)
        xs, index = args
        node = self.calls[index]
        joint, call, *_ = node.args
        given = tuple(map(self.node, xs))
        # The node of a call runs before the node of its vjp, so `before` has the values at the time of the call, even
        # if an argument has been overwritten since.
        before = self._inputs.setdefault(call, given)
        values = [n.meta["val"] for n in sorted(node.users, key=lambda n: n.args[1])]
        outputs = [compat.new_fake(v.fake_mode, v.shape, v.dtype, v.device, v.stride()) for v in values]
        self.call(node.target, (joint, call, *before, *given[len(before) :]), outputs)
        return outputs
