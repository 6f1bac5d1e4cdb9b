"""Partitions a function at its collectives into subgraphs with collectives between them; or partitions a function into
two subgraphs that run one after the other.

Ops that do not depend on the result of a collective run between its start and its wait. A value that one partition
computes and another reads is made contiguous, because compiled code relies on strides; a view is instead recomputed in
the partition that reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero.sharding.graph_writer import MARKERS, all_gather, all_reduce, all_to_all_v, reduce_scatter
from fzero.sharding.placements import Partial, Placement, Replicate, Varying
from fzero.sharding.sharded_graph import ShardedGraph
from fzero.trace.flops import product_flops
from fzero.trace.recorder import Recorded
from fzero.trace.storages import is_view, strides_guessed
from fzero.trace.subgraph import ancestors, extract

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class CallStep:
    """A subgraph, with the values that it reads and the values that it computes."""

    graph: Recorded
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class ExchangeStep:
    """A collective: the marker nodes of the values that it exchanges together. All of them have the same kind and the
    same reduction."""

    markers: tuple[fx.Node, ...]

    @property
    def kind(self) -> Callable[..., Any]:
        return self.markers[0].target  # type: ignore[return-value]

    @property
    def reduction(self) -> str:
        return str(self.markers[0].args[1]) if self.kind is all_reduce else "sum"

    @property
    def sent(self) -> tuple[fx.Node, ...]:
        return tuple(m.args[0] for m in self.markers)  # type: ignore[misc]

    @property
    def counts(self) -> fx.Node | None:
        """The numbers of rows that ranks send to each other; None if all send as many."""
        return self.markers[0].args[1] if self.kind is all_to_all_v else None  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class WaitStep:
    """The wait for a collective."""

    of: ExchangeStep


class Result(NamedTuple):
    """An output of the function, and its placement."""

    node: fx.Node
    place: Placement


@dataclass(frozen=True, eq=False)
class Segments:
    """A function on shards, as a sequence of steps.

    Attributes:
        inputs: the inputs of the function, followed by the rank's index along the axis if the function reads it.
        results: the outputs of the function, each computed by a step.
        steps: the steps in order.
        own: the values that differ between ranks.
    """

    inputs: Sequence[fx.Node]
    results: Sequence[Result]
    steps: Sequence[CallStep | ExchangeStep | WaitStep]
    own: frozenset[fx.Node]


def segments(sharded: ShardedGraph, like: Sequence[torch.Tensor]) -> Segments:
    """Partitions a function on shards at its collectives.

    Args:
        sharded: the sharded graph; its graph is modified.
        like: the outputs of the function from which `sharded` was made. A replicated output gets the strides of its
            counterpart; a shard is contiguous.
    """
    graph = sharded.graph.graph
    markers = [x for x in graph.nodes if x.target in MARKERS]
    _lay_out(sharded, like)
    outputs = sharded.graph.outputs
    for m in markers:  # A partial value may also be read unreduced, so the collective reduces a copy of it.
        source = m.args[0]
        assert isinstance(source, fx.Node)
        shared = m.target in (all_reduce, reduce_scatter) and len(source.users) > 1
        if shared or source in sharded.graph.inputs or source.op == "get_attr":
            m.args = (_copied(graph, source), *m.args[1:])
    made = _numbered(sharded.graph, markers)
    _recompute_views(graph, made, {*outputs})
    _copy_strided(graph, made, {*outputs})
    steps = _steps(sharded.graph, markers, made)
    own = {*sharded.varies}
    for x in graph.nodes:  # the results of these collectives are equal on all ranks
        same = x.target in (all_reduce, all_gather) or x.op == "output"
        own |= {x} if not same and not own.isdisjoint(x.all_input_nodes) else set()
    results = [Result(*x) for x in zip(outputs, sharded.places, strict=True)]
    return Segments(sharded.graph.inputs, results, steps, frozenset(own))


def _steps(
    function: Recorded, markers: Sequence[fx.Node], made: dict[fx.Node, int]
) -> list[CallStep | ExchangeStep | WaitStep]:
    """The subgraph and the collectives of each partition, in order. `made`: the partition of each node."""
    graph, outputs, places = function.graph, {*function.outputs}, {*function.inputs, *markers}
    steps: list[CallStep | ExchangeStep | WaitStep] = []
    begun: list[ExchangeStep] = []
    for number in range(2 * (max(made.values(), default=0) // 2 + 1)):
        leaving = [x for x in graph.nodes if made.get(x) == number and _leaves(x, made, outputs)]
        if leaving:
            needed = ancestors(leaving, stop=places)
            inputs = tuple(x for x in graph.nodes if x in needed and x in places)
            steps.append(CallStep(extract(function, inputs, leaving), inputs, tuple(leaving)))
            places |= {*leaving}
        # Collectives start at the end of an even partition and are waited for at the end of the odd
        # one after it, which runs while they are in flight.
        if number % 2:
            steps += [WaitStep(x) for x in begun]
        else:
            begun = _grouped([m for m in markers if made[m] == number])
            steps += begun
    return steps


class Pieces(NamedTuple):
    """A function in two subgraphs.

    Attributes:
        inputs, outputs: those of the whole function.
        steps: the subgraphs; the second reads results of the first.
        positions: for each subgraph, the index of each of its outputs among the outputs of the whole function; None for
            a value that is computed only for the second subgraph.
    """

    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    steps: tuple[CallStep, ...]
    positions: tuple[Sequence[int | None], ...]


def in_two(source: Recorded, first: Sequence[int]) -> Pieces:
    """Splits a function into two subgraphs. The first computes the outputs with the indices in `first`, and any other
    outputs that are computed on the way; the second computes the remaining outputs."""
    whole = extract(source, source.inputs, source.outputs)  # a copy, which is modified below
    graph, outputs = whole.graph, whole.outputs
    needed = ancestors([outputs[i] for i in first], stop=set())
    made = {x: int(x not in needed) for x in graph.nodes if x.op == "call_function"}
    for x in made:  # all results of an op with several results stay in its subgraph
        if x.target is operator.getitem:
            made[x] = made[x.all_input_nodes[0]]
    _recompute_views(graph, made, {*outputs})
    _copy_strided(graph, made, {*outputs})
    steps, positions, places = list[CallStep](), list[list[int | None]](), {*whole.inputs}
    for number in range(2):
        at = [i for i, x in enumerate(outputs) if made.get(x, 0) == number]
        leaving = [
            x for x in graph.nodes if made.get(x) == number and x not in outputs and _leaves(x, made, {*outputs})
        ]
        here = [*(outputs[i] for i in at), *leaving]
        if not here:
            continue
        read = ancestors(here, stop=places)
        inputs = tuple(x for x in graph.nodes if x in read and x in places)
        steps.append(CallStep(extract(whole, inputs, here), inputs, tuple(here)))
        positions.append([*at, *[None] * len(leaving)])
        places |= {*here}
    return Pieces(whole.inputs, outputs, tuple(steps), tuple(positions))


def _lay_out(sharded: ShardedGraph, like: Sequence[torch.Tensor]) -> None:
    """Gives every output the strides that its readers were recorded with, and copies a value that is returned twice, so
    that each output is a separate node."""
    graph, seen = sharded.graph.graph, set[fx.Node]()
    last, new = graph.output_node(), []
    for node, place, before in zip(sharded.graph.outputs, sharded.places, like, strict=True):
        value = node.meta["val"]
        strides = before.stride() if isinstance(place, (Replicate, Varying)) else _packed(value).stride()
        with graph.inserting_before(last):
            if value.stride() != strides or (node.op == "call_function" and strides_guessed(node, MARKERS)):
                node = _strided(graph, node, strides)
            elif node in seen or node.op != "call_function" or (isinstance(place, Partial) and len(node.users) > 1):
                node = _clone(graph, node)
        seen.add(node)
        new.append(node)
    last.args = (tuple(new),)


def _packed(value: torch.Tensor) -> torch.Tensor:
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    kwargs = {"memory_format": torch.contiguous_format}
    return _made(graph, aten.clone.default, (node,), kwargs)


def _made(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs or {})
    values = fx.map_arg((args, kwargs or {}), lambda x: x.meta["val"])
    with args[0].meta["val"].fake_mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _strided(graph: fx.Graph, node: fx.Node, strides: Sequence[int]) -> fx.Node:
    """A copy with these strides, as far as a permutation of dims can produce them."""
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    if order == sorted(order):
        return _clone(graph, node)
    packed = _clone(graph, _made(graph, aten.permute.default, (node, order)))
    # The inverse permutation restores the order of the dims.
    return _made(graph, aten.permute.default, (packed, [order.index(d) for d in range(len(order))]))


def _copied(graph: fx.Graph, source: fx.Node) -> fx.Node:
    with graph.inserting_after(source):
        return _clone(graph, source)


def _numbered(graph: Recorded, markers: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The partition number of each op. An op that depends on k collectives in sequence has number 2k, or 2k + 1 if no
    collective that starts in partition 2k needs its result, so that it can run while these collectives are in flight.
    """
    marked, level = {*markers}, dict[fx.Node, int]()
    for x in graph.graph.nodes:
        level[x] = max((level[a] + (a in marked) for a in x.all_input_nodes), default=0)
    made: dict[fx.Node, int] = {}
    body = [x for x in graph.graph.nodes if x.op == "call_function"]
    for k in sorted({level[x] for x in body}):
        here = [x for x in body if level[x] == k and x not in marked]
        sources = [a for m in markers if level[m] == k for a in m.all_input_nodes]
        first = ancestors(sources, stop=marked) if sources else {*here}
        late = any(product_flops(x) for x in here if x not in first)  # only products take long
        made.update((x, 2 * k + (late and x not in first)) for x in here)
    for x in body:  # all results of an op with several results stay in its partition
        if x.target is operator.getitem:
            made[x] = made[x.all_input_nodes[0]]
    for m in markers:
        made[m] = 2 * level[m]
    return made


def _leaves(node: fx.Node, made: dict[fx.Node, int], outputs: set[fx.Node]) -> bool:
    """Whether a value is an output, or is read outside of its own partition."""
    if node.target in MARKERS or isinstance(node.meta["val"], (tuple, list)):
        return False
    read = (u.target in MARKERS or made.get(u) != made[node] for u in node.users if u.op != "output")
    return node in outputs or any(read)


def _recompute_views(graph: fx.Graph, made: dict[fx.Node, int], outputs: set[fx.Node]) -> None:
    """Recomputes views in the later partitions that read them."""
    again: dict[tuple[fx.Node, int], fx.Node] = {}

    def here(x: fx.Node, number: int) -> fx.Node:
        """The node that a partition reads in place of a value from another partition."""
        if x.op != "call_function" or x.target in MARKERS or made[x] == number or x in outputs:
            return x
        if not _is_part(x):
            return x
        if (x, number) not in again:
            inputs = {a: here(a, number) for a in x.all_input_nodes}
            with graph.inserting_after(x):
                copy = graph.node_copy(x, lambda a: inputs[a])
            copy.meta["val"], made[copy] = x.meta["val"], number
            again[x, number] = copy
        return again[x, number]

    for x in [n for n in graph.nodes if n.op == "call_function" and n.target not in MARKERS]:
        for a in x.all_input_nodes:
            if (new := here(a, made[x])) is not a:
                x.replace_input_with(a, new)


def _copy_strided(graph: fx.Graph, made: dict[fx.Node, int], outputs: set[fx.Node]) -> None:
    """Makes the values that later partitions read contiguous."""
    copies: set[fx.Node] = set()
    for x in [n for n in graph.nodes if n.op == "call_function" and n.target not in MARKERS]:
        value = x.meta["val"]
        others = [u for u in x.users if u.op != "output" and u.target not in MARKERS and made[u] != made[x]]
        if not others or not isinstance(value, torch.Tensor) or x in outputs:
            continue
        if not value.is_contiguous() or strides_guessed(x, MARKERS):
            copy = _copied(graph, x)
            made[copy] = made[x]
            copies |= {copy} if not value.is_contiguous() else set()
            for user in others:
                user.replace_input_with(x, copy)
    if copies:
        _traced_again(graph, made, copies)


def _is_part(node: fx.Node) -> bool:
    """Whether a value is a view, or one of several views."""
    return is_view(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _traced_again(graph: fx.Graph, made: dict[fx.Node, int], copies: set[fx.Node]) -> None:
    """Infers the metadata of the readers of these copies again, from the strides of the copies. If `view` does not
    support the new strides, it is applied to a contiguous copy instead."""
    changed, mode = {*copies}, next(x.meta["val"].fake_mode for x in copies)
    for x in list(graph.nodes):
        if x.op != "call_function" or x.target in MARKERS or changed.isdisjoint(x.all_input_nodes):
            continue
        with mode:
            try:
                value = _value(x)
            except (RuntimeError, ValueError):
                if x.target is not aten.view.default:
                    raise
                source = x.all_input_nodes[0]
                with graph.inserting_before(x):
                    copy = _clone(graph, source)
                made[copy] = made[x]
                x.replace_input_with(source, copy)
                value = _value(x)
        if _strides(value) != _strides(x.meta["val"]):
            x.meta["val"] = value
            changed.add(x)


def _value(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [x.stride() for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, torch.Tensor)]


def _grouped(markers: Sequence[fx.Node]) -> list[ExchangeStep]:
    """Groups collectives of the same kind, which are issued together."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for m in markers:
        groups.setdefault((m.target, *m.args[1:]), []).append(m)
    return [ExchangeStep(tuple(group)) for group in groups.values()]
