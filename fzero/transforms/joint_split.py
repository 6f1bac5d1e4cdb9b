"""Splits a block's joint graph in two: a forward that returns saved values beside its outputs, and a vjp that takes
them and recomputes the rest.

Only storages can be kept: of a value and its views the value, for a view holds all of it. What parameters alone enter,
their views or themselves rounded, is always recomputed, unless it is a number or a row of numbers; so is what no input
enters. The choice among the others is a minimum cut. Every node of the forward that the backward depends on is kept
(for its bytes), recomputed from available inputs (for its FLOPs), or not needed. A weight of bytes against FLOPs gives
each cut. Its solutions for all weights are the corners of the trade of memory for time; between two corners nodes are
taken one by one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.ir.from_graph import Functions
from fzero.sharding.dim_propagation import CutEnds
from fzero.trace.flops import operations
from fzero.trace.joint_graph import Joint
from fzero.trace.recorder import Recorded
from fzero.trace.storages import storage_of
from fzero.trace.subgraph import Subgraph, ancestors, extract, reached, views_of

MOST_CUTS = 256
"""Blocks whose minimum cut a process remembers; then it begins anew."""
_known_cuts: dict[Any, frozenset[int]] = {}


@dataclass(frozen=True)
class Kept:
    """The values that a block keeps for its backward: nodes of its joint graph, their bytes, and the FLOPs of what the
    backward recomputes."""

    nodes: frozenset[fx.Node]
    nbytes: int
    flops: int


@dataclass(frozen=True)
class Split:
    """The two functions of a block, and what passes between them by the names of its nodes: values saved for it, and
    outputs that are there anyway."""

    forward: str
    backward: str
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]  # of the joint graph: inputs of the block, then tangents
    kept: tuple[str, ...]  # in the order the backward takes them, after its inputs
    saved: dict[str, torch.Tensor]
    reused: dict[str, int]  # kept node -> the output of the forward that it is


class Choices:
    """The values that can be kept of a block, for the gradients that are wanted, by the bytes and FLOPs of a rank.

    Args:
        joint: the block.
        grads: numbers of its gradients.
        alive: outputs of the block that its surroundings keep anyway.
        cuts: those of its inputs and outputs, along each axis that cuts any.
    """

    def __init__(
        self,
        joint: Joint,
        grads: tuple[int, ...],
        alive: frozenset[int] = frozenset(),
        cuts: tuple[CutEnds, ...] = (),
    ):
        self.joint, graph, outputs = joint, joint.graph.graph, joint.graph.outputs
        self.places = joint.graph.inputs
        self.outputs = list(outputs[: joint.num_outputs])
        self.grads = [outputs[joint.num_outputs + g] for g in grads]
        late = reached(graph, self.places[joint.num_inputs :])
        varying = reached(graph, self.places)
        needed = ancestors(self.grads, stop=set())
        roots = {n: storage_of(n) for n in graph.nodes}
        self.early = [
            n for n in graph.nodes if n.op == "call_function" and n in needed and n not in late and n in varying
        ]
        self.read = {n for n in self.early if n in self.grads or any(u in late and u in needed for u in n.users)}
        self.reused = {outputs[i]: i for i in sorted(alive, reverse=True)}
        others = reached(graph, self.places[joint.num_params :])
        self._of_params = {n for n in self.early if n not in others and not _is_row(n.meta["val"])} | views_of(
            graph, set(self.places[: joint.num_params])
        )
        can = [
            n
            for n in self.early
            if roots[n] is n and isinstance(n.meta["val"], torch.Tensor) and n not in self._of_params
        ]
        self.held, computed = self._shares(cuts)
        self.nbytes = {
            n: 0 if n in self.reused else n.meta["val"].numel() * n.meta["val"].dtype.itemsize // self.held[n]
            for n in can
        }
        self.flops = {n: operations(n) // computed[n] for n in self.early}
        self._stop = set(self.places)
        self._roots = roots

    def _shares(self, cuts: tuple[CutEnds, ...]) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """The numbers of ranks that share a value, and that share the work of computing it."""
        inputs, ends = self.places[: self.joint.num_inputs], [*self.outputs, *(n for n in self.early if n in self.read)]
        shares = [x.of_a_rank(self.joint.graph, inputs, ends) for x in cuts]
        held = {n: math.prod(x[n.name].held for x in shares if n.name in x) for n in (*inputs, *self.early)}
        return held, {n: math.prod(x[n.name].computed for x in shares if n.name in x) for n in self.early}

    def keep(self, nodes: Iterable[fx.Node]) -> Kept:
        """The exact consequences of keeping these nodes: those that the backward turns out not to read are not kept."""
        nodes = self.nbytes.keys() & set(nodes)
        needed = ancestors(self.grads, stop=self._stop | nodes)
        nodes = frozenset(nodes & needed)
        return Kept(
            nodes,
            sum(self.nbytes[n] for n in nodes),
            sum(self.flops[n] for n in self.early if n in needed and n not in nodes),
        )

    @functools.cached_property
    def none(self) -> Kept:
        """Everything the backward reads."""
        return self.keep(self._roots[n] for n in self.read)

    @functools.cached_property
    def min_cut(self) -> Kept:
        """The choice of PyTorch's min-cut partitioner; in a process it is asked once for equal blocks."""
        graph = Subgraph(self.joint.graph, self.places, [*self.outputs, *self.grads])
        recompute = {n.name for n in self._of_params}
        number = {n.name: i for i, n in enumerate(graph.between)}
        never = frozenset(number[name] for name in recompute & number.keys())
        held = {n.name: parts for n, parts in self.held.items() if parts > 1}
        cut = tuple(held.get(n.name, 1) for n in (*self.places, *graph.between)) if held else ()
        key = graph.signature, never, cut, self.joint.num_outputs, compat.min_cut_settings()
        if key not in _known_cuts:
            copy = graph.extract([n.name for n in self.places])
            for n in copy.graph.nodes:
                if n.name in held and isinstance(value := n.meta["val"], torch.Tensor):
                    # PyTorch asks for its bytes alone
                    n.meta["val"] = compat.new_fake(
                        value.fake_mode,  # type: ignore[attr-defined]
                        [value.numel() // held[n.name]],
                        value.dtype,
                        value.device,
                    )
            names = compat.min_cut(
                copy.module(), self.joint.num_outputs, {n for n in copy.graph.nodes if n.name in recompute}
            )
            if len(_known_cuts) >= MOST_CUTS:
                _known_cuts.clear()
            _known_cuts[key] = frozenset(number[name] for name in names & number.keys())
        found = _known_cuts[key]
        return self.keep(self._roots[n] for n in self.early if number.get(n.name) in found)

    @functools.cached_property
    def frontier(self) -> list[Kept]:
        """The choices worth having, from nothing to everything: each keeps more bytes and recomputes fewer FLOPs than
        the one before."""
        corners = self._corners()
        found = {*corners, self.keep(()), self.none}
        for lower, upper in itertools.pairwise(corners):
            found.update(self._between(lower, upper))
        out: list[Kept] = []
        for kept in sorted(found, key=lambda k: (k.nbytes, k.flops, len(k.nodes), sorted(n.name for n in k.nodes))):
            if not out or kept.flops < out[-1].flops:
                out.append(kept)
        return out if self.none.nbytes <= out[-1].nbytes else [*out, self.none]

    def fraction(self, share: float) -> Kept:
        """The most of the frontier that keeps at most this share of the bytes that `none` does."""
        if share == 1.0:
            return self.none
        return [k for k in self.frontier if k.nbytes <= share * self.none.nbytes][-1]

    def _corners(self) -> list[Kept]:
        """The corners of the lower hull of (bytes, FLOPs): each the minimum cut for some price of a byte in FLOPs."""
        first, last = self.keep(()), self._cut(sum(self.nbytes.values()) + 1, 1)

        def within(low: Kept, high: Kept) -> list[Kept]:
            per_flop, per_byte = high.nbytes - low.nbytes, low.flops - high.flops
            if per_flop <= 0 or per_byte <= 0:
                return []
            middle = self._cut(per_flop, per_byte)
            if middle.flops * per_flop + middle.nbytes * per_byte >= low.flops * per_flop + low.nbytes * per_byte:
                return []
            return [*within(low, middle), middle, *within(middle, high)]

        return [first, *within(first, last), last]

    def _cut(self, per_flop: int, per_byte: int) -> Kept:
        """The nodes to keep if a FLOP and a byte cost this much."""
        import networkx as nx

        net = nx.DiGraph()
        net.add_nodes_from(("source", "sink"))
        at = {n: i for i, n in enumerate(self.early)}  # numbers, not nodes: every rank must find the same cut
        for n, i in at.items():  # on the sink's side: (i, 0) is recomputed, (i, 1) is there in the backward
            net.add_edge("source", (i, 0), capacity=self.flops[n] * per_flop)
            # no capacity: infinite
            net.add_edge((i, 0), (i, 1), **({"capacity": self.nbytes[n] * per_byte} if n in self.nbytes else {}))
            net.add_edges_from(((i, 1), (at[u], 0)) for u in n.users if u in at)
            if n in self.read:
                net.add_edge((i, 1), "sink")
        _, (source_side, _) = nx.minimum_cut(net, "source", "sink")
        return self.keep(
            n for n, i in at.items() if n in self.nbytes and (i, 0) in source_side and (i, 1) not in source_side
        )

    def _between(self, lower: Kept, upper: Kept) -> Iterator[Kept]:
        """Choices between two corners: from the lower one on, always the node that saves most FLOPs a byte, counted
        exactly; and what else was tried."""
        current = lower
        while True:
            tried = [self.keep(current.nodes | {n}) for n in self.nbytes if n not in current.nodes]
            tried = [k for k in tried if k.flops < current.flops and k.nbytes < upper.nbytes]
            if not tried:
                return
            yield from tried
            current = max(tried, key=lambda k, now=current: (now.flops - k.flops) / max(1, k.nbytes - now.nbytes))

    def split(self, kept: Kept, functions: Functions) -> Split:
        """The two functions that keep this."""
        joint, graph = self.joint, self.joint.graph
        keep = [n for n in graph.graph.nodes if n in kept.nodes]
        saved = [n for n in keep if n not in self.reused]
        forward, forward_inputs = _pruned(graph, self.places[: joint.num_inputs], [*self.outputs, *saved])
        backward, used = _pruned(graph, [*self.places, *keep], self.grads)
        return Split(
            functions.add(joint.name, forward),
            functions.add(f"{joint.name}_vjp", backward),
            forward_inputs,
            tuple(i for i in used if i < len(self.places)),
            tuple(n.name for n in keep),
            {n.name: n.meta["val"] for n in saved},
            {n.name: self.reused[n] for n in keep if n in self.reused},
        )


def _pruned(source: Recorded, inputs: list[fx.Node], outputs: list[fx.Node]) -> tuple[Recorded, tuple[int, ...]]:
    needed = ancestors(outputs, stop=set(inputs))
    used = tuple(i for i, n in enumerate(inputs) if n in needed)
    return extract(source, [inputs[i] for i in used], outputs), used


def _is_row(value: Any) -> bool:
    """Whether a value is a number, or a row of numbers."""
    return isinstance(value, torch.Tensor) and value.numel() == max(value.shape, default=1)
