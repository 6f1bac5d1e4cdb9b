"""Chooses the rules of a `tensor_parallel` without rules.

Along each chain of products (sharding/matmul_chains.py), as in Megatron-LM, the matrices before the last one are
sharded along the dim that their results have ("columns"), and the last one along the dim that it sums over ("rows").
Then each other matrix is tried on its own, in products only by columns, and then the vectors of the same subgraphs. A
change is kept if it lowers the price of a step, which is a sum of bytes on one rank:

- the bytes that collectives send, and a fixed number more for each;
- the bytes that are gathered for operations that are computed on unsharded values;
- the results of products that every rank computes redundantly;
- parameters that stay replicated, twice: for their gradient and their update.

Parameters that equal blocks read at the same position are sharded alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
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
    shardings = _choose(prices)
    if not shardings:
        _raise_nothing(prices)
    by_path = {path: shard for position, shard in shardings.items() for path in prices.paths[position]}
    leaves = [x for x in inputs.leaves if x.role != "mutable"]
    # Tied parameters are one tensor, so they get the rule of the first.
    of_first = {x.path: inputs.leaves[t].path for x, t in zip(inputs.leaves, inputs.ties, strict=True)}
    rules = rules_for({dotted(x.path): by_path.get(of_first[x.path]) for x in leaves})
    chosen = replace(spec, rules=rules)
    why = (
        f"of {prices.num_tried} assignments the one with the fewest bytes sent, or computed by every rank alike: "
        f"{size(int(prices.best))} a step, with {size(int(prices.each))} more for each collective; unsharded "
        f"{size(int(prices.none))}"
    )
    transforms = tuple(sorted((*others, chosen), key=lambda t: (t.order, str(t))))
    return Chosen(replace(step, transforms=transforms), (PlanDecision(spec.name, chosen.shown_rules, why),))


def _raise_nothing(prices: _Prices) -> None:
    """Raises because the best assignment shards no parameter."""
    axis, n = prices.spec.axis, prices.n
    why = f"no parameter has a dim that is divisible by {n}, the size of axis {axis!r}"
    if any(prices.able.values()):
        unsharded = f"unsharded {size(int(prices.none))} per step, for this batch"
        why = f"each sharding has a higher cost, in bytes sent or computed redundantly, than none: {unsharded}"
    fix = f"another size of {axis!r}; or leave tensor_parallel out, or give it rules"
    raise FzeroValueError(prices.spec.name, "does nothing: no parameter is sharded", [why], fix)


Position = tuple[str, int]
"""A subgraph, and the index of its input. Parameters are named by the position at which they are read first."""
Shardings = Mapping[Position, Shard]


class _Prices:
    """The prices of assignments of shardings to a program's parameters.

    Attributes:
        paths: the parameters of each position, in the order of the calls.
        able: the possible shardings of each position.
        best, none: the lowest price so far, and the price of sharding nothing.
        each: the price of a collective in addition to its bytes.
        num_tried: the number of assignments so far.
    """

    def __init__(self, program: Program, spec: TensorParallel, zero: Zero):
        self.program, self.spec, self.zero, self.n = program, spec, zero, program.mesh.axes[spec.axis]
        self.share = (self.n - 1) / self.n
        self.known: dict[Any, ShardedGraph] = {}
        self.of_call: dict[Any, float] = {}  # prices of calls, by their subgraph
        self.paths = _paths(program)
        self.able = {position: self._able(*position, program.leaves[x[0]]) for position, x in self.paths.items()}
        self.num_tried, self.each, self.best = 0, 0.0, math.inf
        self.none = self.best = self({})
        # A fraction of the average price of a call when nothing is sharded, which sends nothing.
        self.each = 0.02 * self.none / max(sum(op.op == "call" for op in program.instructions), 1)

    def _able(self, fn: str, index: int, leaf: Leaf) -> list[Shard]:
        sharded = bool(leaf.layout.dims)  # by another transform
        dims = () if sharded or len(leaf.shape) > 2 else range(len(leaf.shape))
        graph = self.program.functions[fn].graph
        able = (Shard(d, groups) for d in dims for groups in pieces(graph, leaf.shape[d]))
        return [x for x in able if divides(leaf.shape, x, self.n)]

    def __call__(self, shardings: Shardings) -> float:
        """Returns the price of an assignment; infinite if it is not lower than the best so far, or if more bytes are
        gathered for an operation than the spec allows."""
        self.num_tried += 1
        leaves, total = dict(self.program.leaves), 0.0
        for position, paths in self.paths.items():
            for path in paths:
                leaf, shard = leaves[path], shardings.get(position)
                if shard is None:
                    total += 2 * self.share * leaf.numel * leaf.dtype.itemsize
                else:
                    leaves[path] = leaf.with_layout(axes=(self.spec.axis,), dims=(shard,))
        for op, made in calls_on_parts(replace(self.program, leaves=leaves), self.spec, self.zero, self.known):
            key = made or op.fn
            if key not in self.of_call:
                self.of_call[key] = self._price(op, made)
            total += self.of_call[key]
            if total >= self.best:
                return math.inf
        return total

    def _price(self, op: Instruction, made: ShardedGraph | None) -> float:
        """Returns the price of one call: the bytes of its collectives, its redundant products and its gathered
        operands."""
        graph = self.program.functions[op.fn].graph if made is None else made.graph
        total = 0.0
        for node in graph.graph.nodes:
            if node.target in MARKERS:
                # An all-reduce sends as much as a reduce-scatter and a gather.
                total += (2 if node.target is all_reduce else 1) * self.share * _nbytes(node.meta["val"]) + self.each
            elif product_flops(node) and (made is None or node not in made.varies):
                total += self.share * _nbytes(node.meta["val"])
        whole = [x.nbytes for x in made.whole] if made else []
        return math.inf if max(whole, default=0) > self.spec.max_replicated_bytes else total + sum(whole)


def _paths(program: Program) -> dict[Position, list[str]]:
    """Returns the parameters that are first read at each position, in the order of the calls."""
    params = {name for name, leaf in program.leaves.items() if leaf.role == "params"}
    casts = (op for op in program.instructions if op.op == "cast")
    origin = {v.name: a for op in casts for a, v in zip(op.args, op.out, strict=False)}
    readers: dict[str, Position] = {}
    for op in program.instructions:
        for i, a in enumerate(op.args if op.op == "call" else ()):
            if (path := origin.get(a, a)) in params:
                readers.setdefault(path, (op.fn, i))
    found: dict[Position, list[str]] = {}
    for path, position in readers.items():
        found.setdefault(position, []).append(path)
    return found


def _nbytes(value: Any) -> int:
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(v.numel() * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor))


def _choose(prices: _Prices) -> Shardings:
    """Returns the best assignment found: see the module's documentation."""
    best: dict[Position, Shard] = {}
    matrices = {i for i, paths in prices.paths.items() if len(prices.program.leaves[paths[0]].shape) == 2}
    kept: dict[Position, int] = {}

    def try_all(changes: Iterable[Shardings]) -> None:
        nonlocal best
        for change in changes:
            if (price := prices({**best, **change})) < prices.best:
                best, prices.best = {**best, **change}, price

    found = list[tuple[str, Chain]]()
    for fn in dict.fromkeys(fn for fn, _ in prices.paths):
        here = [i for f, i in prices.paths if f == fn and (f, i) in matrices]
        found += [(fn, chain) for chain in chains(prices.program.functions[fn].graph, here)]
    # Twice, because a later chain may have changed a matrix that ends an earlier one.
    for fn, chain in found * 2:
        kept.setdefault((fn, chain.last.matrix), chain.last.kept)  # by its product in the forward
        try_all(_of_chain(prices, fn, chain))
    for position in sorted(prices.paths, key=lambda i: i not in matrices):
        follows = any(fn == position[0] for fn, _ in best)
        if position not in best and (position in matrices or follows):
            try_all({position: x} for x in prices.able[position] if x.dim == kept.get(position, x.dim))
    return best


def _of_chain(prices: _Prices, fn: str, chain: Chain) -> Iterator[Shardings]:
    """Yields the shardings of a chain: there are several if a dim can be taken as different numbers of equal pieces."""
    last, rows = (fn, chain.last.matrix), Shard(chain.last.summed)
    before = {(fn, x.matrix): x.kept for x in chain.before if x.matrix != chain.last.matrix}
    if before and rows in prices.able[last]:
        columns = [[x for x in prices.able[i] if x.dim == kept] for i, kept in before.items()]
        for ways in itertools.islice(itertools.product(*columns), 16):
            yield {**dict(zip(before, ways, strict=True)), last: rows}
