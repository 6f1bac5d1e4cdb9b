"""What a compiled function reads and writes: its kernels, from the recorded graph.

[Note: kernels] A recorded graph names every intermediate value; a compiled function writes few of them to memory. Those are the operands and results
of products (matrix products, convolutions, attention), what scatters, what is returned, and pointwise values that so much would have to be recomputed
for that the compiler keeps them. Everything else is computed again inside the kernels that read it. A *buffer* is memory that is written once and
perhaps viewed many times; it is named by the node that makes it. An eager function writes every value that is no view.

It must not know how fast a device is.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from fzero import compat
from fzero.program.record import Recorded

aten = torch.ops.aten

PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten._scaled_mm,
    aten.convolution,
    aten.convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
}
"""Operations that are a library's own kernel: what they read and write is in memory."""

_VIEWS = {aten._unsafe_view, aten._reshape_alias, aten.alias, aten.detach, aten.lift_fresh}
_GATHERS = {aten.index, aten.embedding, aten.gather, aten.index_select}
_SCATTERS = {aten.index_put, aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_add, aten.slice_scatter, aten.select_scatter, aten.sort, aten.topk}
_SCATTERS |= {aten.embedding_dense_backward, aten.cumsum}
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.prod, aten.var, aten.var_mean, aten.linalg_vector_norm, aten.any, aten.all}
_REDUCTIONS |= {aten.nll_loss_forward, aten.argmax, aten.argmin, aten.logsumexp}
_MOST_READS = 4  # of a value with several readers before Inductor keeps it (its realize_reads_threshold)
_MOST_READS_ONCE = 8  # of any value (its realize_acc_reads_threshold)


@dataclass(frozen=True)
class Kernel:
    """Values computed together: the buffers it reads and writes, with the bytes it touches of each. `product`: the node of one, else None."""

    reads: Mapping[fx.Node, int]
    writes: Mapping[fx.Node, int]
    product: fx.Node | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True)
class Kernels:
    """A function's kernels in an order they can run in; the bytes of every buffer; which buffer each of its outputs is in."""

    kernels: tuple[Kernel, ...]
    sizes: Mapping[fx.Node, int]
    inputs: frozenset[fx.Node]
    outputs: tuple[fx.Node, ...]


def packet(node: fx.Node) -> object:
    """The operator of a node, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target) if node.op == "call_function" else None


def nbytes(value: object) -> int:
    return value.numel() * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def kernels(graph: Recorded, backend: str = "inductor") -> Kernels:
    """The kernels that a function runs. See [Note: kernels]."""
    return _Analysis(graph, backend).kernels()


class _Analysis:
    def __init__(self, graph: Recorded, backend: str):
        self.graph, self.backend = graph, backend
        self.nodes = [n for n in graph.graph.nodes if n.op != "output"]
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.buffer: dict[fx.Node, fx.Node] = {}  # a node -> the node that made its memory
        self.sizes: dict[fx.Node, int] = {}
        for node in self.nodes:
            base = self._base(node)
            self.buffer[node] = base
            if base is node:
                value = node.meta.get("val") if node.op != "get_attr" else graph.constants[str(node.target)]
                self.sizes[node] = nbytes(value)
        self.inputs = frozenset(n for n in self.nodes if n.op in ("placeholder", "get_attr"))
        self.outputs = tuple(self.buffer[n] for n in graph.outputs)
        self.kept = self._kept()
        self.reads = {n: self._reads(n) for n in self.nodes if n in self.kept}

    def _base(self, node: fx.Node) -> fx.Node:
        if node.op == "call_function" and node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return self.buffer[source] if _is_view(source) else node
        if node.op == "call_function" and (_is_view(node) or str(node.target).endswith("_.default")):  # in place: copy_
            return self.buffer[node.all_input_nodes[0]]
        return node

    def _maker(self, node: fx.Node) -> fx.Node:
        """The operation that makes a buffer: its node, or the one with several results that it is taken from."""
        source = node.args[0] if node.op == "call_function" and node.target is operator.getitem else node
        assert isinstance(source, fx.Node)
        return source

    def _made(self) -> list[fx.Node]:
        """Buffers that operations make."""
        return [n for n in self.nodes if self.buffer[n] is n and n not in self.inputs and isinstance(n.meta.get("val"), torch.Tensor)]

    def _kept(self) -> set[fx.Node]:
        """The buffers that are written to memory."""
        made = self._made()
        kept = set(made) & set(self.outputs)
        if self.backend == "eager":
            return set(made)
        readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in self.nodes:
            if node.op == "call_function" and not _is_view(node) and node.target is not operator.getitem:
                for arg in node.all_input_nodes:
                    readers[self.buffer[arg]].add(node)
        num_reads: dict[fx.Node, int] = {}
        for node in made:
            maker = self._maker(node)
            kind = packet(maker)
            if kind in PRODUCTS or kind in _SCATTERS or kind in _REDUCTIONS or any(packet(r) in PRODUCTS for r in readers[node]):
                kept.add(node)
            args = {self.buffer[a] for a in maker.all_input_nodes}
            num_reads[node] = sum(1 if a in kept or a in self.inputs else num_reads.get(a, 1) for a in args)
            if num_reads[node] > (_MOST_READS if len(readers[node]) > 1 else _MOST_READS_ONCE):
                kept.add(node)
        return kept

    def _reads(self, node: fx.Node) -> dict[fx.Node, int]:
        """The buffers in memory that a kept value is computed from, with the bytes read of each."""
        found: dict[fx.Node, int] = {}
        todo, seen = [self._maker(node)], set[fx.Node]()
        while todo:
            maker = todo.pop()
            if maker in seen:
                continue
            seen.add(maker)
            for i, arg in enumerate(maker.all_input_nodes):
                base = self.buffer[arg]
                if base in self.kept or base in self.inputs:
                    size = min(nbytes(arg.meta.get("val")) or self.sizes[base], self.sizes[base])
                    if packet(maker) in _GATHERS and i == 0:
                        size = min(size, nbytes(maker.meta["val"]))
                    found[base] = max(found.get(base, 0), size)
                else:
                    todo.append(self._maker(base))
        return found

    def kernels(self) -> Kernels:
        groups = self._groups()
        made: list[Kernel] = []
        for group in groups:
            writes = {n: self.sizes[n] for n in group}
            reads: dict[fx.Node, int] = {}
            for node in group:
                for base, size in self.reads[node].items():
                    if base not in writes:
                        reads[base] = max(reads.get(base, 0), size)
            maker = self._maker(group[0])
            made.append(Kernel(reads, writes, maker if packet(maker) in PRODUCTS else None))
        for node in self.nodes:  # what is written to an input
            if node.op == "call_function" and self.buffer[node] in self.inputs and not _is_view(node) and node.target is not operator.getitem:
                made.append(self._in_place(node))
        return Kernels(tuple(_ordered(made, self.position)), self.sizes, self.inputs, self.outputs)

    def _in_place(self, node: fx.Node) -> Kernel:
        """A kernel that overwrites an input with what it computes."""
        reads = dict(self._reads(node))
        target = self.buffer[node]
        if all(self.buffer[a] is not target or a is node.all_input_nodes[0] for a in self._all_reads(node)):
            reads.pop(target, None)
        return Kernel(reads, {target: self.sizes[target]})

    def _all_reads(self, node: fx.Node) -> Iterable[fx.Node]:
        todo, seen = list(node.all_input_nodes), set[fx.Node]()
        while todo:
            arg = todo.pop()
            if arg not in seen:
                seen.add(arg)
                base = self.buffer[arg]
                if base not in self.kept and base not in self.inputs:
                    todo += self._maker(base).all_input_nodes
        return seen

    def _groups(self) -> list[list[fx.Node]]:
        """Kept values by the kernel that writes them: one operation's results together; pointwise values and reductions that lie between the same products
        and read each other."""
        order = [n for n in self.nodes if n in self.kept]
        parent = {n: n for n in order}

        def root(node: fx.Node) -> fx.Node:
            while parent[node] is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        depth: dict[fx.Node, int] = {}  # products that lie before a value
        by_maker: dict[fx.Node, fx.Node] = {}
        for node in order:
            maker = self._maker(node)
            fixed = packet(maker) in PRODUCTS
            depth[node] = max((depth.get(b, 0) for b in self.reads[node]), default=0) + fixed
            parent[node] = root(by_maker.setdefault(maker, node))
            if fixed or self.backend == "eager":
                continue
            for base in self.reads[node]:
                if base in parent and depth[base] == depth[node] and packet(self._maker(base)) not in PRODUCTS:
                    parent[root(node)] = root(base)
        groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in order:
            groups[root(node)].append(node)
        return list(groups.values())


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (compat.is_view(node.target) or packet(node) in _VIEWS)


def _ordered(made: list[Kernel], position: Mapping[fx.Node, int]) -> list[Kernel]:
    """The kernels, each after those that write what it reads, otherwise as the graph has them."""
    writer = {b: i for i, k in enumerate(made) for b in k.writes}
    waits = [{writer[b] for b in k.reads if b in writer and writer[b] != i} for i, k in enumerate(made)]
    readers: dict[int, list[int]] = defaultdict(list)
    for i, before in enumerate(waits):
        for j in before:
            readers[j].append(i)
    at = [max((position[b] for b in k.writes), default=0) for k in made]
    missing = [len(w) for w in waits]
    ready = [(at[i], i) for i, m in enumerate(missing) if not m]
    heapq.heapify(ready)
    out = []
    while ready:
        _, i = heapq.heappop(ready)
        out.append(made[i])
        for j in readers[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, (at[j], j))
    return out
