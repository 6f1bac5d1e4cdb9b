"""Predicts the kernels of a compiled subgraph, and what they read and write, from the recorded graph.

[Note: kernels] A recorded graph names every intermediate value; a compiled subgraph writes few of them to memory.
These are operands and results of products (matrix products, convolutions, attention), values that are scattered,
concatenated, reduced or returned, and pointwise values that are too expensive to recompute. Everything else is
computed inside the kernels that read it, once per kernel. Operations between the same products that read the same
values form one kernel. A *buffer* is memory that is written once and may be viewed many times; it is named by the
node that makes it. Run eagerly, a subgraph writes every value that is not a view, with one kernel each. The rules are
those of PyTorch's Inductor, as its code has them.

[Note: triton] Inductor compiles the subgraphs of a GPU to Triton kernels. There, as in eager mode, a subgraph copies
a result into the buffer that it is given for it. A pointwise result is computed in the copying kernel; results of
products and scatters are in separate memory until then. On a CPU, results are computed in the given buffer
(runtime/build/cpu/cpp_kernels.py). A pointwise value of many operations on several buffers is written to memory. A
value may overwrite a buffer that it reads only if all other readers of that buffer have finished.

This file must not know how fast a device is.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from fzero.mesh import AbstractMesh
from fzero.ops.registration import buffers_of
from fzero.plan.inductor.nodes import by_locality, contiguous, in_order, maker_of, nbytes, numel
from fzero.trace.flops import PRODUCTS, packet, transcendentals
from fzero.trace.recorder import Recorded
from fzero.trace.storages import is_view, storage_of, writes
from fzero.trace.subgraph import into_buffers

aten = torch.ops.aten

_GATHERS = {aten.index, aten.embedding, aten.gather, aten.index_select}
_WRITES = {
    aten.index_put,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.index_add,
    aten.embedding_dense_backward,
    aten.sort,
    aten.topk,
}
_WRITES |= {aten.cumsum, aten.cat, aten.stack}
# operations that read nothing
_FILLS = {
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.new_empty,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
}
# On a CPU, a value that is computed with one of the operations in _HEAVY is written to memory if it is read twice.
_HEAVY = {
    aten.exp,
    aten.log,
    aten.log1p,
    aten.sigmoid,
    aten.tanh,
    aten.gelu,
    aten.silu,
    aten._log_softmax_backward_data,
}
# the number of Inductor's operations for an ATen operation that it decomposes
_OPERATIONS: dict[object, int] = {aten.gelu: 14, aten.gelu_backward: 25, aten.silu: 6, aten.silu_backward: 12}
_MOST_OPERATIONS = 30  # operations of a value on a GPU before it is written (Inductor's realize_opcount_threshold)
_MOST_READS = 8  # reads of a value before it is written (Inductor's realize_acc_reads_threshold)


@dataclass(frozen=True, eq=False)
class Kernel:
    """Values that are computed together.

    Attributes:
        reads, writes: the buffers, with the number of bytes that the kernel touches in each.
        product: the node of a product, or None.
        in_place: for each buffer that it writes, the buffers of the same size that it reads element by element, and
            so may overwrite.
        allocated: buffers that the operation itself allocates, rather than the compiler.
        transcendentals: number of elementwise evaluations of transcendental functions; see trace/flops.py.
        inside: bytes that it allocates while it runs, on a GPU.
    """

    reads: Mapping[fx.Node, int]
    writes: Mapping[fx.Node, int]
    product: fx.Node | None
    in_place: Mapping[fx.Node, frozenset[fx.Node]]
    allocated: frozenset[fx.Node]
    transcendentals: int = 0
    inside: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a subgraph, each after the kernels that it needs, otherwise in the order of the graph.

    Attributes:
        after: for each kernel, the indices of the kernels that must come before it.
        sizes: bytes of every buffer.
        buffers: the buffer that every value lies in.
        inputs, outputs: the buffers that the subgraph is given and those that it returns.
        on_cpu: whether the kernels are compiled for a CPU.
    """

    kernels: tuple[Kernel, ...]
    after: tuple[frozenset[int], ...]
    sizes: Mapping[fx.Node, int]
    buffers: Mapping[fx.Node, fx.Node]
    inputs: frozenset[fx.Node]
    outputs: frozenset[fx.Node]
    on_cpu: bool


def compiler(mesh: AbstractMesh, backend: str) -> str:
    """Returns what makes the kernels of subgraphs on a mesh's devices: "eager", "inductor" for a CPU, or "triton"."""
    return "triton" if backend == "inductor" and mesh.device_type == "cuda" else backend


def given_to(compiler: str, graph: Recorded, into: Sequence[int]) -> Recorded:
    """Returns a subgraph's graph as a `compiler` gets it. Except on a CPU, it copies results into the buffers that
    are given for them. `into` lists these results, as in `Function.into`.
    """
    return graph if compiler == "inductor" else into_buffers(graph, into)


def kernels(graph: Recorded, backend: str = "inductor") -> Kernels:
    """Returns the kernels that a subgraph runs when it is built by `backend`: see [Note: kernels], and [Note: triton]
    for its buffers.
    """
    return _Analysis(graph, backend).run()


@dataclass(frozen=True)
class _Read:
    """The bytes of a buffer that a value reads, and whether it reads them element by element."""

    nbytes: int
    aligned: bool


class _Analysis:
    """Decides which values of a graph are written to memory, and groups these into kernels."""

    def __init__(self, graph: Recorded, backend: str):
        self.graph, self.eager = graph, backend == "eager"
        self.on_cpu, self.on_gpu = backend == "inductor", backend == "triton"
        nodes = list(graph.graph.nodes) if self.eager else by_locality(list(graph.graph.nodes))
        self.nodes = [n for n in nodes if n.op != "output"]
        self.inputs = frozenset(n for n in self.nodes if n.op in ("placeholder", "get_attr"))
        self.buffer = {n: storage_of(n) for n in self.nodes}
        self.sizes = {
            n: nbytes(graph.constants[str(n.target)] if n.op == "get_attr" else n.meta.get("val"))
            for n in self.nodes
            if self.buffer[n] is n
        }
        self.outputs = frozenset(self.buffer[n] for n in graph.outputs)
        # the values that are computed: buffers that operations make, and operations that write to an existing buffer
        self.made = [
            n
            for n in self.nodes
            if n not in self.inputs
            and isinstance(n.meta.get("val"), torch.Tensor)
            and (self.buffer[n] is n or writes(n))
        ]
        # values of too many operations whose elements are in another order than in the kernel that computes and reads
        # them
        self.turned = set[fx.Node]()
        self.written = self._written()  # adds to `turned`
        self.makers: dict[fx.Node, set[fx.Node]] = {}  # the operations that compute a written value, in its kernel
        self.reads = {n: self._reads(n) for n in self.made if n in self.written}
        self.readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node, reads in self.reads.items():
            for base in reads:
                self.readers[base].add(node)

    def run(self) -> Kernels:
        made = [self._kernel(group) for group in self._groups()]
        made = [k for k in made if k.writes]
        before = self._before(made)
        order = in_order(before)
        number = {i: place for place, i in enumerate(order)}
        after = tuple(frozenset(number[j] for j in before[i] if number[j] < number[i]) for i in order)
        return Kernels(
            tuple(made[i] for i in order), after, self.sizes, self.buffer, self.inputs, self.outputs, self.on_cpu
        )

    def _written(self) -> set[fx.Node]:
        """Returns the values that are written to memory. If one operation returns several values, the smaller ones
        are reductions.
        """
        if self.eager:
            return set(self.made)
        readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        largest: dict[fx.Node, int] = defaultdict(int)
        for node in self.nodes:
            if node.op == "call_function" and not is_view(node) and node.target is not operator.getitem:
                for arg in node.all_input_nodes:
                    readers[self.buffer[arg]].add(node)
            if node in self.sizes:
                largest[maker_of(node)] = max(largest[maker_of(node)], self.sizes[node])
        written = {n for n in self.made if n in self.outputs or writes(n)}
        num_reads: dict[fx.Node, int] = {}
        operations: dict[fx.Node, int] = {}  # number of operations that compute a value from memory
        for node in self.made:
            maker, kind = maker_of(node), packet(maker_of(node))
            arguments = {self.buffer[a] for a in maker.all_input_nodes}
            # the buffers that the value reads if everything that is not written is recomputed for it
            num_reads[node] = sum(1 if a in written or a in self.inputs else num_reads.get(a, 1) for a in arguments)
            # a reduction has fewer elements than an operand
            shrinks = any(numel(a) > numel(node) for a in maker.all_input_nodes) and kind not in _GATHERS | _FILLS
            reduced = shrinks or self.sizes.get(node, 0) < largest[maker]
            operations[node] = self._operations(maker) + sum(
                1 if a in written or a in self.inputs else operations.get(a, 1) for a in arguments
            )
            long = self.on_gpu and operations[node] > _MOST_OPERATIONS and num_reads[node] > 1
            if long and not contiguous(node):
                self.turned.add(node)
            many = num_reads[node] > _MOST_READS or (self.on_cpu and kind in _HEAVY and len(readers[node]) > 1)
            operand = any(packet(r) in PRODUCTS for r in readers[node])
            if kind in PRODUCTS or kind in _WRITES or reduced or long or many or operand:
                written.add(node)
        return written

    def _operations(self, maker: fx.Node) -> int:
        """Returns the number of Inductor's operations for an ATen operation, including constants."""
        return _OPERATIONS.get(packet(maker), 1 + sum(isinstance(a, int | float) for a in maker.args))

    def _reads(self, node: fx.Node) -> dict[fx.Node, _Read]:
        """Returns the buffers in memory that a written value is computed from."""
        found: dict[fx.Node, _Read] = {}
        todo = [(maker_of(node), packet(maker_of(node)) not in _WRITES)]
        seen: set[tuple[fx.Node, bool]] = set()
        while todo:
            maker, aligned = todo.pop()
            if (maker, aligned) in seen:
                continue
            seen.add((maker, aligned))
            arguments = [] if packet(maker) in _FILLS else maker.all_input_nodes
            for i, arg in enumerate(arguments[1:] if writes(maker) and len(arguments) > 1 else arguments):
                base = self.buffer[arg]
                table = packet(maker) in _GATHERS and i == 0
                straight = aligned and not table and numel(arg) == numel(node) and contiguous(arg)
                if base in self.written or base in self.inputs:
                    size = min(nbytes(arg.meta.get("val")), self.sizes[base]) or self.sizes[base]
                    size = min(size, nbytes(maker.meta.get("val")) or size) if table else size
                    known = found.get(base, _Read(0, True))
                    found[base] = _Read(max(known.nbytes, size), known.aligned and straight)
                else:
                    todo.append((maker_of(base), straight))
        self.makers[node] = {maker for maker, _ in seen}
        return found

    def _groups(self) -> list[list[fx.Node]]:
        """Returns the written values grouped by kernel, each group at the position of its first value."""
        order = [n for n in self.made if n in self.written]
        parent = {n: n for n in order}

        def root(node: fx.Node) -> fx.Node:
            while parent[node] is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        depth: dict[fx.Node, int] = {}  # number of products before a value
        together: dict[object, fx.Node] = {}
        for node in order:
            maker = maker_of(node)
            product = packet(maker) in PRODUCTS
            alone = product or packet(maker) in _WRITES
            depth[node] = max((depth.get(b, 0) for b in self.reads[node]), default=0) + product
            # group the results of one operation, but not sums over columns with values that are computed by row
            ndim = node.meta["val"].dim() if not product and not self.eager else None
            parent[root(node)] = root(together.setdefault((maker, ndim), node))
            if alone or self.eager:
                continue
            largest = max((r.nbytes for r in self.reads[node].values()), default=0)
            for base, read in self.reads[node].items():
                # not if the value is transposed in between
                fits = read.aligned or numel(base) != numel(node) or base in self.turned
                if base in parent and depth[base] == depth[node] and packet(maker_of(base)) not in PRODUCTS | _WRITES:
                    if not fits:
                        continue
                    parent[root(node)] = root(base)
                elif read.nbytes == largest:
                    parent[root(node)] = root(together.setdefault((base, depth[node], numel(node)), node))
        groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in order:
            groups[root(node)].append(node)
        return list(groups.values())

    def _kernel(self, group: list[fx.Node]) -> Kernel:
        """Returns the kernel that computes a group of written values: what it reads and writes, and what it may
        overwrite.
        """
        inside = set(group)
        reads: dict[fx.Node, int] = {}
        written: dict[fx.Node, int] = {}
        in_place: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in group:
            target = self.buffer[node]
            if not (target is node and self._vanishes(node, inside)):
                written[target] = self.sizes[target]
            for base, read in self.reads[node].items():
                if base not in inside:
                    reads[base] = max(reads.get(base, 0), read.nbytes)
            if target is node:
                in_place[node] = self._overwritten(node, inside)
        maker = maker_of(group[0])
        product = maker if packet(maker) in PRODUCTS else None
        allocated = written if product is not None and group[0] is not product else ()  # a product with several results
        functions = sum(transcendentals(m) for m in {m for node in group for m in self.makers[node]})
        return Kernel(
            reads,
            written,
            product,
            in_place if product is None else {},
            frozenset(allocated),
            functions,
            self._inside(maker),
        )

    def _overwritten(self, node: fx.Node, inside: set[fx.Node]) -> frozenset[fx.Node]:
        """Returns the buffers that a value may overwrite: buffers of its size that it reads element by element. On a
        GPU, no other value of its kernel may read them.
        """
        found = {b for b, read in self.reads[node].items() if read.aligned and self.sizes[b] == self.sizes[node]}
        others = inside - {node} if self.on_gpu else set()
        return frozenset(b for b in found - inside if not any(b in self.reads[other] for other in others))

    def _inside(self, maker: fx.Node) -> int:
        if not self.eager or maker.op != "call_function":
            return 0
        return buffers_of(maker.target, *(a.meta.get("val") if isinstance(a, fx.Node) else a for a in maker.args))

    def _vanishes(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Returns whether a value is read only in its own kernel, so that it is never written to memory."""
        if self.eager or node in self.outputs or node in self.turned or packet(maker_of(node)) in PRODUCTS | _WRITES:
            return False
        return self.readers[node] <= inside

    def _before(self, made: list[Kernel]) -> tuple[frozenset[int], ...]:
        """Returns, for each kernel, the kernels that write its inputs or read the memory that it overwrites."""
        if self.eager:
            return tuple(frozenset([i - 1] if i else []) for i in range(len(made)))
        writers: dict[fx.Node, list[int]] = defaultdict(list)
        readers: dict[fx.Node, list[int]] = defaultdict(list)
        for i, kernel in enumerate(made):
            for base in kernel.writes:
                writers[base].append(i)
            for base in kernel.reads:
                readers[base].append(i)
        before = []
        for i, kernel in enumerate(made):
            given = {j for base in kernel.reads if base not in self.inputs for j in writers[base]}
            taken = {j for base in kernel.writes if base in self.inputs for j in readers[base]}
            before.append(frozenset((given | taken) - {i}))
        return tuple(before)
