"""Costs of a step's blocks on the ranks of one cut, for one row: one trace for each cut of its values. For all numbers
of devices along the other axes no program is made.

A cut is the part of a step's transforms that has functions compute with parts (fzero/transforms/cutting.py). Its
functions and collectives are those of every mesh with that cut; a micro-batch with fewer rows takes no less a row.

[Note: in order] Passes move transfers, and leave the order of functions as it is. So a function begins no sooner than
the one before ends, and than the collectives that it reads are done, each of which begins once its arguments are there.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fzero.lowering.choose_stages import even, work_of_blocks
from fzero.lowering.layouts import batch_inputs, params_inputs
from fzero.lowering.least_pipeline import StageSeconds, simulate_units
from fzero.lowering.traced import trace_step
from fzero.mesh import AbstractMesh
from fzero.passes.choice import Choice
from fzero.passes.stages import block_numbers
from fzero.plan.cost import direct_link, link_bandwidth, seconds
from fzero.plan.devices import Device
from fzero.program.ir import Line, Program, local_bytes
from fzero.program.ops import OPS, STARTS
from fzero.step import Step


class BlockCost(NamedTuple):
    """The least cost of a block for one row of a micro-batch, with the code around blocks in the first and the last.

    Attributes:
        forward, backward: seconds of its functions, and of the collectives that they wait for.
        saved: bytes of its arguments, which wait for the backward.
        numel: elements of the parameters that it reads first, on one rank of the cut.
    """

    forward: float
    backward: float
    saved: float
    numel: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class CutCost:
    """The least cost of a step's forward and backward with a cut, for one row.

    Attributes:
        blocks: of each, in order.
        path: seconds of one micro-batch from its first function to its last.
        handed: the least bytes that pass from a block to the next one, forward and backward.
        work: of each block, as stages are cut by it.
    """

    blocks: tuple[BlockCost, ...]
    path: float
    handed: tuple[float, float]
    work: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The seconds of the functions alone, whatever hides the collectives between blocks."""
        return sum(block.seconds for block in self.blocks)

    @property
    def numel(self) -> int:
        return sum(block.numel for block in self.blocks)

    def divided(self, n: int) -> CutCost:
        """The least cost with a further cut over `n` ranks. What blocks hand on may be whole there."""
        blocks = (BlockCost(b.forward / n, b.backward / n, 0.0, b.numel // n) for b in self.blocks)
        return CutCost(tuple(blocks), self.path / n, (self.handed[0] / n, self.handed[1] / n), self.work)

    def step_seconds(self, rows: int, micro: int) -> float:
        """The least seconds of the forwards and backwards of a rank's rows, without stages."""
        return rows * (self.path if micro == 1 else self.seconds)

    def staged_seconds(
        self, rows: int, micro: int, pipe: int, zero_bubble: bool, reduces: float, hands: tuple[float, float]
    ) -> float:
        """The least seconds of the forwards, backwards and reductions of a pipeline.

        Args:
            rows: of a rank, in `micro` micro-batches.
            pipe: stages.
            zero_bubble: whether gradients of parameters may wait for other stages.
            reduces: seconds in which a stage reduces its gradients, each behind the last micro-batch.
            hands: seconds in which a stage hands the next one a micro-batch, forward, and its gradients, backward.
        """
        # of the backward: a product has a gradient of its weights and one of its input, and attention has no weights
        shares = (0.0, 0.25, 0.5) if zero_bubble else (0.0,)
        return min(self._simulated(rows / micro, micro, pipe, zero_bubble, reduces, hands, share) for share in shares)

    def _simulated(
        self,
        rows: float,
        micro: int,
        pipe: int,
        zero_bubble: bool,
        reduces: float,
        hands: tuple[float, float],
        weights: float,
    ) -> float:
        """The least seconds by the order of units. `rows`: of a micro-batch; `weights`: the share of the backward that
        runs in units of its own."""
        units, stages = list[StageSeconds](), self._stages(pipe)
        for blocks in stages:
            # whose input is the batch, products of the first block may have gradients of weights alone
            first = blocks[0].backward if blocks is stages[0] else 0.0
            apart = weights * (first + sum(b.backward for b in blocks))
            forward, backward = (sum(b[i] for b in blocks) for i in range(2))
            units.append(StageSeconds(rows * forward, rows * (backward - apart), rows * apart))
        ends = simulate_units("zb" if zero_bubble else "1f1b", micro, units, hands)
        each = reduces * pipe / max(1, self.numel)
        behind = (x.gradient + each * sum(b.numel for b in blocks) for x, blocks in zip(ends, stages, strict=True))
        return max(*(x.ends for x in ends), *behind)

    def _stages(self, pipe: int) -> list[tuple[BlockCost, ...]]:
        """The blocks of each stage, as `choose_stages` cuts them."""
        blocks = iter(self.blocks)
        return [tuple(itertools.islice(blocks, n)) for n in _counts(self.work, pipe)]

    def waiting(self, rows: int, micro: int, pipe: int) -> tuple[float, float]:
        """The least bytes that wait for their backward on one rank, and the share of all parameters that it has. Of a
        pipeline the first stage has `pipe` micro-batches; else they are all of the batch."""
        if pipe == 1:
            return rows * sum(block.saved for block in self.blocks), 1.0
        first = self.blocks[: len(self.blocks) // pipe]
        share = sum(block.numel for block in first) / max(1, self.numel)
        return rows / micro * min(micro, pipe) * sum(block.saved for block in first), share


_counts = functools.lru_cache(maxsize=64)(even)


def cut_cost(
    step: Step, mesh: AbstractMesh, params: Any, batch: Any, rows: int, device: Device, backend: str
) -> CutCost:
    """Traces a step on the ranks of one cut.

    Args:
        step: with the transforms that cut values, and no other parallel ones.
        mesh: of their axes.
        params: the tree, with whole leaves.
        batch: of a rank.
        rows: that it has.
        device, backend: whose rates.
    """
    traced = trace_step(step, mesh, params_inputs(step, mesh, params), batch_inputs(batch))
    base, program = traced.base, traced.variants.cut(Choice(1.0))
    numbers = block_numbers(base) or [0]
    chain = _Chain(program, numbers, device, backend)
    for line in program.lines:
        if line.by != "optimizer":
            chain.line(line)
    saved, numel = _saved(base, program, numbers), _numel(base, program, numbers)
    blocks = tuple(
        BlockCost(chain.spent[n, False] / rows, chain.spent[n, True] / rows, saved[n] / rows, numel[n]) for n in numbers
    )
    forward, backward = (_handed(base, program, numbers, backward) / rows for backward in (False, True))
    return CutCost(blocks, chain.clock / rows, (forward, backward), tuple(work_of_blocks(base, numbers)))


class _Chain:
    """See [Note: in order]."""

    def __init__(self, program: Program, numbers: Sequence[int], device: Device, backend: str):
        self.program, self.numbers, self.device, self.backend = program, numbers, device, backend
        self.clock = 0.0
        self.seen = 0  # blocks' calls
        self.ready: dict[str, float] = {}  # when a value is there
        # the call that a value comes from, and when it is there after that began
        self.within: dict[str, tuple[tuple[int, bool], float]] = {}
        self.spent: dict[tuple[int, bool], float] = defaultdict(float)

    def line(self, line: Line) -> None:
        ready = max((self.ready.get(a, 0.0) for a in line.args), default=0.0)
        within = [self.within[a] for a in line.args if a in self.within]
        if line.op in STARTS:
            took = seconds(line, self.program, self.device, self.backend)
            self._made(line, ready + took, [(of, at + took) for of, at in within])
        elif OPS[line.op].waits:
            self._made(line, ready, within)
        elif line.fn:
            took = seconds(line, self.program, self.device, self.backend)
            call = self._call(line)
            begins = max([self.spent[call], *(at for of, at in within if of == call)])
            self.spent[call] = begins + took
            self.clock = max(self.clock, ready) + took
            self._made(line, self.clock, [(call, self.spent[call])])

    def _made(self, line: Line, at: float, within: Sequence[tuple[tuple[int, bool], float]]) -> None:
        for value in line.out:
            self.ready[value.name] = at
            if within:
                self.within[value.name] = max(within, key=lambda x: x[1])

    def _call(self, line: Line) -> tuple[int, bool]:
        if line.block is not None:
            self.seen += line.begins_block
            return line.block.number, line.block.part != "forward"
        # as lowering/choose_stages.py counts code outside blocks
        behind = self.seen and self.seen < 2 * len(self.numbers) - 1
        return (self.numbers[-1], False) if behind else (self.numbers[0], bool(self.seen))


def _saved(base: Program, program: Program, numbers: Iterable[int]) -> Mapping[int, int]:
    """By block, the bytes of a rank that it reads forward and backward, and another line made."""
    made = {v.name for line in base.lines if line.op == "call" and not line.is_backward for v in line.out}
    found, values = dict.fromkeys(numbers, 0), program.values_by_name
    for line in base.lines:
        if line.is_backward and line.block is not None:
            here = made.intersection(line.block.inputs[: line.block.joint.num_inputs], values)
            found[line.block.number] += sum(local_bytes(values[name], program.mesh) for name in here)
            made -= here
    return found


def _handed(base: Program, program: Program, numbers: Sequence[int], backward: bool) -> int:
    """The least bytes of a rank that a block reads of others, of blocks that are not the first to run."""
    made, taken, values = dict[str, int](), dict.fromkeys(numbers, 0), program.values_by_name
    for line in base.lines:
        if line.block is None:
            continue
        here = line.block.number
        if line.is_backward == backward:
            names = {a for a in line.args if made.get(a, here) != here and a in values}
            taken[here] += sum(local_bytes(values[a], program.mesh) for a in names)
        if line.is_backward == backward or line.block.part == "both":
            made.update((v.name, here) for v in line.out)
    return min((taken[n] for n in (numbers[:-1] if backward else numbers[1:])), default=0)


def _numel(base: Program, program: Program, numbers: Sequence[int]) -> Mapping[int, int]:
    """By block, the elements that a rank has of the parameters that it reads first."""
    found, origin = dict.fromkeys(numbers, 0), {}
    left = {name for name, leaf in base.leaves.items() if leaf.role == "params"}
    for line in base.lines:
        if line.op == "cast":
            origin.update((v.name, a) for a, v in zip(line.args, line.out, strict=False))
        elif line.op == "call":
            for name in left.intersection(origin.get(a, a) for a in line.args):
                leaf = program.leaves[name]
                found[line.block.number if line.block else numbers[0]] += (
                    leaf.shard_bytes(program.mesh) // leaf.dtype.itemsize
                )
                left.discard(name)
    return found


def link_seconds(nbytes: float, mesh: AbstractMesh, axes: Sequence[str], device: Device) -> float:
    """The least seconds in which the busiest link gathers values of so many bytes over axes, or reduces them to shards.
    Over the first axis the whole is gathered, over the second a part of it, and so on."""
    most = 0.0
    for axis in axes:
        n = mesh.axes.get(axis, 1)
        if n > 1:
            most = max(most, (n - 1) / n * nbytes / link_bandwidth(mesh, (axis,), device))
            nbytes /= n
    return most


def hand_seconds(nbytes: float, mesh: AbstractMesh, axis: str, device: Device) -> float:
    """The seconds in which a rank hands the next one along an axis values of so many bytes."""
    link = direct_link(mesh, (axis,), device)
    return link.latency + nbytes / link.bandwidth


__all__ = ["BlockCost", "CutCost", "cut_cost", "hand_seconds", "link_seconds"]
