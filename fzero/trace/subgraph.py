"""Extracts subgraphs, the part of a graph between given inputs and outputs, and computes the signatures by which equal
subgraphs are recognized."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.trace.guards.user_frames import line
from fzero.trace.guards.value_keys import exact
from fzero.trace.recorder import FROM, Recorded
from fzero.trace.storages import storage_of


@dataclass(frozen=True, eq=False)
class Subgraph:
    """The part of a graph that computes `outputs` from `inputs`. Nodes that no output needs are left out."""

    source: Recorded
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]

    @functools.cached_property
    def between(self) -> list[fx.Node]:
        """The nodes between the inputs and the outputs, in the order of the graph."""
        given = set(self.inputs)
        # fx nodes are ordered by their position in the graph.
        return sorted(ancestors(self.outputs, stop=given) - given)

    @property
    def signature(self) -> tuple[Any, ...]:
        """The `signature` of the extracted subgraph, computed without extracting it."""
        return _signature(self.inputs, self.between, self.outputs, self.source.constants)

    def extract(self, names: Sequence[str] | None = None) -> Recorded:
        """Copies the subgraph to a separate graph, with the given names for its inputs."""
        graph, env = compat.Graph(), {}
        for i, node in enumerate(self.inputs):
            env[node] = graph.placeholder(names[i] if names else f"x_{i}")
            env[node].meta["val"] = node.meta["val"]
        constants: dict[str, torch.Tensor] = {}
        for node in self.between:
            if node.op == "placeholder":
                raise AssertionError(f"{node} is needed but not an input")
            if node.op == "get_attr":
                constants[str(node.target)] = self.source.constants[str(node.target)]
            env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[n] for n in self.outputs))
        return Recorded(graph, constants)


def differing_line(one: fx.Graph, other: fx.Graph) -> list[str]:
    """The user's line of the first op in which two traces of a function differ, if that line is known."""
    nodes = [[n for n in graph.nodes if n.op == "call_function"] for graph in (one, other)]
    for a, b in zip(*nodes, strict=False):
        constants = [
            repr(fx.map_arg((n.args, n.kwargs), lambda _: None)) for n in (a, b)
        ]  # arguments that are not nodes
        if a.target is not b.target or constants[0] != constants[1]:
            place = a.meta.get(FROM) or b.meta.get(FROM)
            return [line(place)] if place else []
    return []


def extract(
    source: Recorded, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], names: Sequence[str] | None = None
) -> Recorded:
    """Extracts the part of a graph that computes `outputs` from `inputs`, as a separate graph."""
    return Subgraph(source, inputs, outputs).extract(names)


def inlined(
    graph: fx.Graph, before: fx.Node, made: Recorded, inputs: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Copies the ops of a function without literals into a graph, before a given node. Returns the new nodes and the
    results."""
    env = dict(zip(made.inputs, inputs, strict=True))
    with graph.inserting_before(before):
        new = [
            env.setdefault(n, graph.node_copy(n, lambda m: env[m])) for n in made.graph.nodes if n.op == "call_function"
        ]
    return new, [env[n] for n in made.outputs]


def ancestors(outputs: Sequence[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """The nodes that `outputs` depend on, including `outputs`. The search does not go past `stop`."""
    seen: set[fx.Node] = set()
    # Not recursive, because a graph is deeper than Python's stack.
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node not in stop:
                todo.extend(node.all_input_nodes)
    return seen


def reached(graph: fx.Graph, roots: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on any of `roots`, including `roots`."""
    found = set(roots)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def into_buffers(source: Recorded, which: Sequence[int]) -> Recorded:
    """Returns the function with one additional contiguous buffer argument, after its inputs, for each of these outputs.
    The function writes these outputs to the buffers instead of returning them."""
    if not which:
        return source
    assert all(n.target is not torch.ops.aten.copy_.default for n in source.graph.nodes), (
        "a function that writes its arguments has no results to place"
    )
    made = compat.Graph()  # the whole graph, because no output depends on the node of an in-place write
    made.output(made.graph_copy(source.graph, {}))
    copy = Recorded(made, source.constants)
    graph, results, first = copy.graph, copy.outputs, copy.graph.find_nodes(op="placeholder")
    last = graph.output_node()
    with graph.inserting_after(first[-1]) if first else graph.inserting_before(next(iter(graph.nodes))):
        buffers = []
        for i in which:
            buffers.append(graph.placeholder(f"into_{i}"))
            buffers[-1].meta["val"] = torch.empty_like(results[i].meta["val"], memory_format=torch.contiguous_format)
            # Without `with`, this moves the insertion point, so that the placeholders stay in the order of `which`.
            graph.inserting_after(buffers[-1])
    with graph.inserting_before(last):
        for i, buffer in zip(which, buffers, strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (buffer, results[i])).meta["val"] = buffer.meta["val"]
    last.args = (tuple(r for i, r in enumerate(results) if i not in which),)
    return Recorded(graph, copy.constants)


def views_of(graph: fx.Graph, roots: set[fx.Node]) -> set[fx.Node]:
    """The nodes that are views of `roots`. They are cheap to recompute and expensive to save, because a saved view
    keeps its base alive."""
    return {node for node in graph.nodes if node not in roots and storage_of(node) in roots}


def signature(graph: Recorded) -> tuple[Any, ...]:
    """The signature by which two graphs are recognized as the same function: ops, constants, shapes, strides, dtypes
    and device types. The device index is not part of it, because each rank of a host has its own device."""
    return _signature(
        graph.inputs,
        [n for n in graph.graph.nodes if n.op not in ("placeholder", "output")],
        graph.outputs,
        graph.constants,
    )


def _signature(
    inputs: Sequence[fx.Node],
    between: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    constants: Mapping[str, torch.Tensor],
) -> tuple[Any, ...]:
    """The signature of a subgraph: one tuple per input, op and literal, with nodes replaced by their indices, and a
    last one for the outputs."""
    index: dict[fx.Node, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", index[value])
        if isinstance(value, (list, tuple)):
            return tuple(plain(v) for v in value)
        if isinstance(value, dict):
            return tuple(sorted((k, plain(v)) for k, v in value.items()))
        if isinstance(value, torch.device):
            return ("device", value.type)
        return (type(value).__name__, exact(value)[1])

    lines: list[Any] = []
    for node in inputs:
        index[node] = len(index)
        value = node.meta["val"]
        lines.append(("in", tuple(value.shape), value.stride(), str(value.dtype), value.device.type))
    for node in between:
        index[node] = len(index)
        if node.op == "get_attr":
            value = constants[str(node.target)]
            lines.append(("constant", str(value.dtype), _told(value)))
        else:
            lines.append((str(node.target), plain(node.args), plain(node.kwargs)))
    return (*lines, ("output", (plain(outputs),), ()))


def _told(value: torch.Tensor) -> str:
    """The value of a literal as text: its elements, or a digest if there are many."""
    if value.numel() <= _SHOWN:
        return str(value.tolist())
    plain = value.detach().cpu().contiguous()
    return f"{list(value.shape)} {hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}"


_SHOWN = 4096
