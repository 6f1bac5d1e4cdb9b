"""Splits a block's joint graph in two: a forward that returns saved values in addition to its outputs, and a vjp (the
backward) that takes them and recomputes the rest.

Only whole storages can be kept: of a value and its views, the value is kept, because a view keeps the whole storage
alive. Values that depend only on parameters (views of them, or rounded copies) are always recomputed, unless they are a
scalar or a row of numbers; so are values that depend on no input. The choice among the other values is a minimum cut:
every node of the forward that the backward depends on is either kept (at the cost of its bytes), recomputed from
available inputs (at the cost of its FLOPs), or not needed. Each price of a byte in FLOPs yields one cut. The cuts for
all prices are the corners of the trade-off between memory and time; between two corners, nodes are added one at a time.
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
from fzero.sharding.propagation import EndPlacements
from fzero.trace.flops import operations
from fzero.trace.joint_graph import Joint
from fzero.trace.recorder import Recorded
from fzero.trace.storages import storage_of
from fzero.trace.subgraph import Subgraph, ancestors, extract, reached, views_of

MOST_MIN_CUTS = 256
"""The number of blocks whose minimum cut a process caches; when it is reached, the cache is cleared."""
_known_min_cuts: dict[Any, frozenset[int]] = {}


@dataclass(frozen=True)
class Kept:
    """The values that a block keeps for its backward: nodes of its joint graph, their bytes, and the FLOPs that the
    backward recomputes."""

    nodes: frozenset[fx.Node]
    nbytes: int
    flops: int


@dataclass(frozen=True)
class Split:
    """The two subgraphs of a block, and the values that pass between them, by the names of their nodes: values that are
    saved for the backward, and outputs that exist anyway."""

    forward: str
    backward: str
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]  # inputs of the joint graph: the block's inputs, then tangents
    kept: tuple[str, ...]  # in the order in which the backward takes them, after its inputs
    saved: dict[str, torch.Tensor]
    reused: dict[str, int]  # kept node -> the index of the forward's output that it is


class Choices:
    """The values that can be kept of a block for the wanted gradients, with the bytes and FLOPs that one rank has of
    them.

    Args:
        joint: the block.
        grads: the indices of the wanted gradients.
        alive: the outputs of the block that other ops keep alive anyway.
        placements: the placements of its inputs and outputs, along each axis that shards any.
    """

    def __init__(
        self,
        joint: Joint,
        grads: tuple[int, ...],
        alive: frozenset[int] = frozenset(),
        placements: tuple[EndPlacements, ...] = (),
    ):
        self.joint, graph, outputs = joint, joint.graph.graph, joint.graph.outputs
        self.places = joint.graph.inputs
        self.outputs = list(outputs[: joint.num_outputs])
        self.grads = [outputs[joint.num_outputs + g] for g in grads]
        late = reached(graph, self.places[joint.num_inputs :])
        varying = reached(graph, self.places)
        needed = ancestors(self.grads, stop=set())
        early = (needed & varying) - late
        self.early = [n for n in graph.nodes if n.op == "call_function" and n in early]
        self.read = {n for n in self.early if n in self.grads or any(u in late and u in needed for u in n.users)}
        # In reverse, so that a value that is several outputs maps to the first of them.
        self.reused = {outputs[i]: i for i in sorted(alive, reverse=True)}
        self._of_params = self._computed_from_params()
        self._roots = {n: storage_of(n) for n in graph.nodes}
        self.held, computed = self._shares(placements)
        self.nbytes = {n: self._bytes_to_keep(n) for n in self.early if self._can_be_kept(n)}
        self.flops = {n: operations(n) // computed[n] for n in self.early}
        self._stop = set(self.places)

    def _computed_from_params(self) -> set[fx.Node]:
        """Returns the values that depend on nothing but parameters, and views of parameters."""
        graph, params = self.joint.graph.graph, self.places[: self.joint.num_params]
        others = reached(graph, self.places[self.joint.num_params :])
        return {n for n in self.early if n not in others and not _is_row(n.meta["val"])} | views_of(graph, set(params))

    def _can_be_kept(self, n: fx.Node) -> bool:
        return self._roots[n] is n and isinstance(n.meta["val"], torch.Tensor) and n not in self._of_params

    def _bytes_to_keep(self, n: fx.Node) -> int:
        value = n.meta["val"]
        return 0 if n in self.reused else value.numel() * value.dtype.itemsize // self.held[n]

    def _shares(self, placements: tuple[EndPlacements, ...]) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """Returns, for each value, the number of ranks among which it is sharded, and the number that share the work of
        computing it."""
        inputs, ends = self.places[: self.joint.num_inputs], [*self.outputs, *(n for n in self.early if n in self.read)]
        shares = [x.of_a_rank(self.joint.graph, inputs, ends) for x in placements]
        held = {n: math.prod(x[n.name].held for x in shares if n.name in x) for n in (*inputs, *self.early)}
        return held, {n: math.prod(x[n.name].computed for x in shares if n.name in x) for n in self.early}

    def keep(self, nodes: Iterable[fx.Node]) -> Kept:
        """Returns the exact costs of keeping these nodes. Nodes that the backward turns out not to read are not
        kept."""
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
        """Keeps everything that the backward reads."""
        return self.keep(self._roots[n] for n in self.read)

    @functools.cached_property
    def min_cut(self) -> Kept:
        """The choice of PyTorch's min-cut partitioner, which a process calls once for equal blocks."""
        graph = Subgraph(self.joint.graph, self.places, [*self.outputs, *self.grads])
        recompute = {n.name for n in self._of_params}
        number = {n.name: i for i, n in enumerate(graph.between)}
        never = frozenset(number[name] for name in recompute & number.keys())
        held = {n.name: parts for n, parts in self.held.items() if parts > 1}
        shares = tuple(held.get(n.name, 1) for n in (*self.places, *graph.between)) if held else ()
        key = graph.signature, never, shares, self.joint.num_outputs, compat.min_cut_settings()
        if key not in _known_min_cuts:
            copy = graph.extract([n.name for n in self.places])
            for n in copy.graph.nodes:
                if n.name in held and isinstance(value := n.meta["val"], torch.Tensor):
                    # the partitioner uses only the size in bytes
                    n.meta["val"] = compat.new_fake(
                        value.fake_mode,  # type: ignore[attr-defined]
                        [value.numel() // held[n.name]],
                        value.dtype,
                        value.device,
                    )
            names = compat.min_cut(
                copy.module(), self.joint.num_outputs, {n for n in copy.graph.nodes if n.name in recompute}
            )
            if len(_known_min_cuts) >= MOST_MIN_CUTS:
                _known_min_cuts.clear()
            _known_min_cuts[key] = frozenset(number[name] for name in names & number.keys())
        found = _known_min_cuts[key]
        return self.keep(self._roots[n] for n in self.early if number.get(n.name) in found)

    @functools.cached_property
    def frontier(self) -> list[Kept]:
        """The Pareto-optimal choices, from keeping nothing to keeping everything: each keeps more bytes and recomputes
        fewer FLOPs than the one before."""
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
        """The last choice of the frontier that keeps at most this share of the bytes that `none` keeps."""
        if share == 1.0:
            return self.none
        return [k for k in self.frontier if k.nbytes <= share * self.none.nbytes][-1]

    def _corners(self) -> list[Kept]:
        """The corners of the lower convex hull of (bytes, FLOPs): each is the minimum cut for some price of a byte in
        FLOPs."""
        # For `last`, one FLOP costs more than all bytes together: the fewest FLOPs, and the fewest
        # bytes for these.
        first, last = self.keep(()), self._minimum_cut(sum(self.nbytes.values()) + 1, 1)

        def within(low: Kept, high: Kept) -> list[Kept]:
            # With these prices, both choices cost the same. If a cut is cheaper, it is a corner
            # between them.
            per_flop, per_byte = high.nbytes - low.nbytes, low.flops - high.flops
            if per_flop <= 0 or per_byte <= 0:
                return []
            middle = self._minimum_cut(per_flop, per_byte)
            if middle.flops * per_flop + middle.nbytes * per_byte >= low.flops * per_flop + low.nbytes * per_byte:
                return []
            return [*within(low, middle), middle, *within(middle, high)]

        return [first, *within(first, last), last]

    def _minimum_cut(self, per_flop: int, per_byte: int) -> Kept:
        """Returns the nodes to keep if a FLOP and a byte cost this much, by a minimum cut."""
        import networkx as nx

        net = nx.DiGraph()
        net.add_nodes_from(("source", "sink"))
        at = {n: i for i, n in enumerate(self.early)}  # indices instead of nodes, so that every rank finds the same cut
        for n, i in at.items():  # Nodes on the sink's side: (i, 0) is recomputed, (i, 1) is available in the backward.
            net.add_edge("source", (i, 0), capacity=self.flops[n] * per_flop)
            # A missing capacity means infinity.
            net.add_edge((i, 0), (i, 1), **({"capacity": self.nbytes[n] * per_byte} if n in self.nbytes else {}))
            # If a reader is recomputed in the backward, this value must be available there.
            net.add_edges_from(((i, 1), (at[u], 0)) for u in n.users if u in at)
            if n in self.read:
                net.add_edge((i, 1), "sink")
        _, (source_side, _) = nx.minimum_cut(net, "source", "sink")
        return self.keep(
            n for n, i in at.items() if n in self.nbytes and (i, 0) in source_side and (i, 1) not in source_side
        )

    def _between(self, lower: Kept, upper: Kept) -> Iterator[Kept]:
        """Yields choices between two corners: starting from the lower one, it always adds the node that saves the most
        FLOPs per byte, with exact counts, and yields every choice that it tried."""
        current = lower
        while True:
            tried = [self.keep(current.nodes | {n}) for n in self.nbytes if n not in current.nodes]
            tried = [k for k in tried if k.flops < current.flops and k.nbytes < upper.nbytes]
            if not tried:
                return
            yield from tried
            current = max(tried, key=lambda k, now=current: (now.flops - k.flops) / max(1, k.nbytes - now.nbytes))

    def split(self, kept: Kept, functions: Functions) -> Split:
        """Returns the two subgraphs that keep these values."""
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
    """Whether a value is a scalar, or a tensor in which all dims but one are 1."""
    return isinstance(value, torch.Tensor) and value.numel() == max(value.shape, default=1)
