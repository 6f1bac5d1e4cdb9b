"""Chooses the rules of a `tensor_parallel` without rules: the shardings of matrices that cost a step the fewest bytes.

The price of an assignment of shardings is a sum of bytes on one rank, over all calls of a step:

- the bytes that collectives send, and a fixed number more for each;
- the bytes that are gathered for operations that are computed on unsharded values;
- the results of products that every rank computes redundantly;
- parameters that stay replicated, twice: for their gradient and their update.

[Note: descent] Parameters that equal blocks read at the same position are sharded alike: together they are a slot. At
first all slots are replicated.

1. Each chain of products (sharding/matmul_chains.py) is tried: the matrices before the last are sharded along the dim
that their results have, and the last along the dim that it sums over.
2. Each slot is tried replicated and with each of its shardings, and all matrices of one shape in a chain are tried
replicated together, until nothing lowers the price. A vector is sharded like a matrix of the same subgraph.

Among equal prices, the first is taken. A subgraph is rewritten once for each way in which its arguments are sharded.
The computation of a price stops when it exceeds the best one, or when its calls before the first backward exceed those
of the best by 1 % of the best price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fzero._utils.units import size
from fzero.compiler.combined_transforms import auto_of, zero_of
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.traced_step import trace_step
from fzero.errors import FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Instruction, Program
from fzero.mesh import AbstractMesh
from fzero.plan.plan import PlanDecision
from fzero.sharding.graph_writer import MARKERS, all_reduce
from fzero.sharding.layout import Leaf
from fzero.sharding.matmul_chains import Chain, chains, pieces
from fzero.sharding.placements import Shard, divides
from fzero.sharding.sharded_graph import ShardedGraph
from fzero.step import Step
from fzero.trace.flops import product_flops
from fzero.trace.recorder import Recorded
from fzero.transforms.dim_sharding import calls_on_parts
from fzero.transforms.tensor import TensorParallel, rules_for
from fzero.transforms.zero import Zero
from fzero.tree import dotted


def open_rules(step: Step, mesh: AbstractMesh) -> TensorParallel | None:
    """Returns the `tensor_parallel` of a step if it has no rules yet."""
    found = next((t for t in step.transforms if isinstance(t, TensorParallel) and t.rules is None), None)
    if found is not None:
        zero_of(step, mesh)  # which checks the axis
    return found


def check_batch_given(given: bool) -> None:
    """Raises if there is no batch for which to choose rules."""
    if not given:
        problems = ["batch: the layout of the state is decided before the first batch is seen"]
        fix = "fz.compile(step, mesh, batch=batch), for which meta tensors are enough; or give rules"
        raise FzeroValueError("tensor_parallel", "rules are chosen for a batch", problems, fix)


class Chosen(NamedTuple):
    """A step whose options have been chosen, and the reasons for the choices."""

    step: Step
    decisions: tuple[PlanDecision, ...] = ()


def choose_rules(step: Step, mesh: AbstractMesh, params: Any, batch: Inputs) -> Chosen:
    """Returns the step with rules for its `tensor_parallel`; the unchanged step if it has rules. On one rank, the
    transform is removed.

    Args:
        step, mesh: as for `lower`.
        params: the tree of unsharded parameters.
        batch: the batch for which they are chosen.
    """
    spec = open_rules(step, mesh)
    if spec is None:
        return Chosen(step)
    others = tuple(t for t in step.transforms if t != spec)
    if mesh.axes[spec.axis] == 1:
        return Chosen(replace(step, transforms=others))
    bare = replace(step, transforms=tuple(t for t in step.transforms if t != auto_of(step)))
    inputs = params_inputs(bare, mesh, params)
    program = trace_step(bare, mesh, inputs, batch).pass_cache.recorded
    prices = _Prices(program, spec, zero_of(bare, mesh))
    shardings = _descend(prices)
    if not any(shardings.values()):
        _raise_nothing(prices)
    by_path = {path: dim for slot, dim in shardings.items() for path in slot.paths}
    leaves = [x for x in inputs.leaves if x.role != "mutable"]
    # Tied parameters are one tensor, so they get the rule of the first.
    of_first = {x.path: inputs.leaves[t].path for x, t in zip(inputs.leaves, inputs.ties, strict=True)}
    rules = rules_for({dotted(x.path): by_path.get(of_first[x.path]) for x in leaves})
    chosen = replace(spec, rules=rules)
    why = (
        f"of {len(prices.found)} assignments the one with the fewest bytes sent, or computed by every rank alike: "
        f"{size(int(prices.best))} a step, with {size(int(prices.each))} more for each collective; unsharded "
        f"{size(int(prices.none))}"
    )
    transforms = tuple(sorted((*others, chosen), key=lambda t: (t.order, str(t))))
    return Chosen(replace(step, transforms=transforms), (PlanDecision(spec.name, chosen.shown_rules, why),))


def _raise_nothing(prices: _Prices) -> None:
    """Raises because the best assignment shards no parameter."""
    axis, n = prices.spec.axis, prices.n
    why = f"no parameter has a dim that is divisible by {n}, the size of axis {axis!r}"
    if any(slot.able for slot in prices.slots):
        unsharded = f"unsharded {size(int(prices.none))} per step, for this batch"
        why = f"each sharding has a higher cost, in bytes sent or computed redundantly, than none: {unsharded}"
    fix = f"another size of {axis!r}; or leave tensor_parallel out, or give it rules"
    raise FzeroValueError(prices.spec.name, "does nothing: no parameter is sharded", [why], fix)


@dataclass(frozen=True, eq=False)
class _Slot:
    """Parameters that are sharded alike, and their possible shardings. `fn` is the subgraph that reads them first;
    `kept` is the dim of a matrix that the result of its product has."""

    paths: tuple[str, ...]
    fn: str
    shape: tuple[int, ...]
    able: tuple[Shard, ...]
    kept: int | None

    def follows(self, shardings: Mapping[_Slot, Shard | None]) -> list[Shard]:
        """Returns the possible shardings; for a vector, only those that match how a matrix of the same subgraph shards
        its results."""
        if len(self.shape) > 1:
            return [*self.able]
        sharded = {
            (s.shape[c.dim], c.groups) for s, c in shardings.items() if c and s.fn == self.fn and s.kept == c.dim
        }
        return [x for x in self.able if (self.shape[x.dim], x.groups) in sharded]


_Shardings = dict[_Slot, Shard | None]


class _Prices:
    """The prices of assignments of shardings to a program's parameters.

    Attributes:
        slots: in the order in which subgraphs read them.
        chains: for each chain, its last slot with the dim that is summed over, and the slots before it with the dims
            that are kept.
        found: the prices so far, by the shardings of the slots; infinite if the price was above the best.
        best, none: the lowest price, and the price of sharding nothing.
        each: the price of a collective in addition to its bytes.
    """

    def __init__(self, program: Program, spec: TensorParallel, zero: Zero):
        self.program, self.spec, self.zero, self.n = program, spec, zero, program.mesh.axes[spec.axis]
        self.slots: list[_Slot] = []
        self.chains: list[tuple[_Slot, int, tuple[tuple[_Slot, int], ...]]] = []
        self.found: dict[tuple[Shard | None, ...], float] = {}
        self.known: dict[Any, ShardedGraph] = {}
        self.of_function: dict[Any, float] = {}  # prices
        self.best = self.ahead = math.inf  # `ahead`: the part of the price before the first backward of a block
        calls = [op for op in program.instructions if op.op == "call"]
        self.num_ahead = next((i for i, op in enumerate(calls) if op.is_backward), len(calls))
        self._find()
        # The price of a collective is a fraction of the price of sharding nothing, which has no collectives.
        self.each = 0.0
        self.none = self({})
        self.each = _OF_A_CALL * self.none / max(len(calls), 1)

    def _find(self) -> None:
        """Finds slots and chains."""
        params = {name: leaf for name, leaf in self.program.leaves.items() if leaf.role == "params"}
        together = self._read_together(params)
        for fn in dict.fromkeys(fn for fn, _ in together):
            graph = self.program.functions[fn].graph
            order = {x: i for i, x in enumerate(graph.graph.nodes)}
            here = [i for name, i in together if name == fn]
            here.sort(key=lambda i: min((order[u] for u in graph.inputs[i].users), default=0))
            found = chains(graph, [i for i in here if len(params[together[fn, i][0]].shape) == 2])
            kept = {x.last.matrix: x.last.kept for x in found}
            slots = {i: self._slot(together[fn, i], fn, params, graph, kept.get(i)) for i in here}
            self.slots += slots.values()
            self.chains += self._chains(found, slots)

    def _read_together(self, params: Mapping[str, Leaf]) -> dict[tuple[str, int], list[str]]:
        """Returns the parameters that are first read as each input of a subgraph."""
        origin = {
            v.name: a for x in self.program.instructions if x.op == "cast" for a, v in zip(x.args, x.out, strict=False)
        }
        readers: dict[str, tuple[str, int]] = {}
        for op in self.program.instructions:
            for i, a in enumerate(op.args if op.op == "call" else ()):
                if (leaf := origin.get(a, a)) in params:
                    readers.setdefault(leaf, (op.fn, i))
        together: dict[tuple[str, int], list[str]] = {}
        for path, reader in readers.items():
            together.setdefault(reader, []).append(path)
        return together

    def _slot(
        self, paths: Sequence[str], fn: str, params: Mapping[str, Leaf], graph: Recorded, kept: int | None
    ) -> _Slot:
        shape = params[paths[0]].shape
        sharded = any(params[path].layout.dims for path in paths)  # by another transform
        dims = range(len(shape)) if len(shape) in (1, 2) and not sharded else ()
        able = (Shard(d, groups) for d in dims for groups in pieces(graph, shape[d]))
        return _Slot(tuple(paths), fn, shape, tuple(x for x in able if divides(shape, x, self.n)), kept)

    def _chains(
        self, found: Iterable[Chain], slots: Mapping[int, _Slot]
    ) -> Iterator[tuple[_Slot, int, tuple[tuple[_Slot, int], ...]]]:
        for x in found:
            before = {slots[p.matrix]: p.kept for p in x.before if p.matrix != x.last.matrix}
            yield slots[x.last.matrix], x.last.summed, tuple(before.items())

    def __call__(self, shardings: Mapping[_Slot, Shard | None]) -> float:
        """Returns the bytes of an assignment; infinite if they exceed the best so far, or if more bytes are gathered
        for an operation than the spec allows."""
        key = tuple(shardings.get(slot) for slot in self.slots)
        if key not in self.found:
            self.found[key] = self._price(shardings)
            self.best = min(self.best, self.found[key])
        return self.found[key]

    def _price(self, shardings: Mapping[_Slot, Shard | None]) -> float:
        """Computes the price of an assignment: see the module's documentation. Stops early if it exceeds the best price
        so far."""
        leaves, total = dict(self.program.leaves), 0.0
        for slot in self.slots:
            for path in slot.paths:
                leaf, dim = leaves[path], shardings.get(slot)
                if dim is None:
                    total += 2 * self._share * leaf.numel * leaf.dtype.itemsize
                else:
                    leaves[path] = leaf.with_layout(axes=(self.spec.axis,), dims=(dim,))
        program = replace(self.program, leaves=leaves)
        ahead = math.inf
        for number, (op, made) in enumerate(calls_on_parts(program, self.spec, self.zero, self.known), 1):
            total += self._of(op, made)
            ahead = total if number == self.num_ahead else ahead
            if total > self.best or (number == self.num_ahead and total > self.ahead + _SLACK * self.best):
                return math.inf
        self.ahead = ahead
        return total

    @property
    def _share(self) -> float:
        return (self.n - 1) / self.n

    def _of(self, op: Instruction, made: ShardedGraph | None) -> float:
        key = made or op.fn
        if key not in self.of_function:
            self.of_function[key] = self._function(op, made)
        return self.of_function[key]

    def _function(self, op: Instruction, made: ShardedGraph | None) -> float:
        """Returns the price of one call: the bytes of its collectives, its redundant products and its gathered
        operands."""
        graph = self.program.functions[op.fn].graph if made is None else made.graph
        total = 0.0
        for node in graph.graph.nodes:
            if node.target in MARKERS:
                # An all-reduce sends as much as a reduce-scatter and a gather. `each` is divided by the share because
                # the sum is multiplied by it below.
                total += (2 if node.target is all_reduce else 1) * _nbytes(node.meta["val"]) + self.each / self._share
            elif product_flops(node) and (made is None or node not in made.varies):
                total += _nbytes(node.meta["val"])
        whole = made.whole if made else ()
        if any(x.nbytes > self.spec.max_replicated_bytes for x in whole):
            return math.inf
        return self._share * total + sum(x.nbytes for x in whole)


_SLACK = 0.01
"""See [Note: descent]."""
_OF_A_CALL = 0.02
"""The cost of a collective in addition to its bytes, as a fraction of the average price of a call when nothing is
sharded."""


def _nbytes(value: Any) -> int:
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(v.numel() * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor))


def _descend(prices: _Prices) -> _Shardings:
    """Returns the assignment that no move improves: see [Note: descent]."""
    shardings: _Shardings = dict.fromkeys(prices.slots)
    best = prices.none

    def tried(changes: Iterable[Mapping[_Slot, Shard | None]]) -> bool:
        nonlocal shardings, best
        better = False
        for change in changes:
            changed = {**shardings, **change}
            price = prices(changed)
            if price < best:
                shardings, best, better = changed, price, True
        return better

    for chain in prices.chains:
        tried(itertools.islice(_ways(*chain), _MOST_WAYS))
    order = sorted(prices.slots, key=lambda slot: len(slot.shape) < 2)  # vectors come after matrices
    whole = [alike for *_, before in prices.chains for alike in _of_one_shape(before)]
    better = True
    while better:
        found = [tried({slot: c} for c in (None, *slot.follows(shardings))) for slot in order]
        better = any(found) or tried(whole)
    return shardings


def _ways(last: _Slot, summed: int, before: Sequence[tuple[_Slot, int]]) -> Iterator[_Shardings]:
    """Yields the possible shardings of a chain."""
    slots = [slot for slot, _ in before]
    able = [[c for c in slot.able if c.dim == kept] for slot, kept in before]
    ends = [c for c in last.able if c == Shard(summed)] if before else []
    for end, *way in itertools.product(ends, *able):
        yield {**dict(zip(slots, way, strict=True)), last: end}


def _of_one_shape(before: Sequence[tuple[_Slot, int]]) -> Iterator[_Shardings]:
    """Yields, for each shape that several matrices of a chain have, the assignment that replicates them."""
    for shape in dict.fromkeys(slot.shape for slot, _ in before):
        alike = [slot for slot, _ in before if slot.shape == shape]
        if len(alike) > 1:
            yield dict.fromkeys(alike)


_MOST_WAYS = 16
"""The maximum number of tried shardings of a chain; there are several if a dim can be taken as different numbers of
equal pieces."""
