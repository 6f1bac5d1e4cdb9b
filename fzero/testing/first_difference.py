"""Finds the first op of a program whose value is wrong.

[Note: three accounts] A step is run once by its executable, and every op is recorded (recording.py). The same ops are
then run by the interpreter, from the same state: this is what the program *says* (interpreter.py). And the base
program of the plain step is run on every part of the global batch (rank x micro-batch), with unsharded tensors: this
is what the step *means*. The value names of a base program survive in all programs made from it. So a value's meaning
follows from its name and from the ops that moved it: a sum over parts, a tensor before or after the update, or a
metric; unsharded, or this rank's shard. So there are three ways in which an op can be the first one that is wrong:

  its result differs from what the program says      a compiled subgraph, a transfer or a buffer is at fault
  it read another value than was made                a buffer was overwritten, or read too early
  the program says something else than the step      an op or a rewrite, and so a transform, is at fault
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero.ir.attributes import JoinAttrs, PartAttrs
from fzero.ir.ops import OPS, STARTS, micro_of
from fzero.ir.printer import statements
from fzero.ir.program import Instruction, Program, Value
from fzero.mesh import Mesh
from fzero.sharding.layout import Layout, Leaf, shard
from fzero.testing.interpreter import Interpreter, ProcessExchange, ProgramCode
from fzero.testing.recording import ExecutedOp
from fzero.testing.report import FirstLine
from fzero.testing.tolerance import LAMBDA, unit

_REPEATED = re.compile(r"_micro_\d+$|_total_0$")


@dataclass(frozen=True)
class Meaning:
    """The meaning of a value: a value of the base program summed over parts of the global batch or, without parts, an
    input or a result of the step.

    `casts`: the dtypes that it was cast to since.
    """

    name: str
    parts: frozenset[int] | None = None
    casts: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class Reference:
    """The expected values of a step: the values of the base program for each part of the global batch, the tensors
    before and the results after the step, with their tolerances.

    Attributes:
        parts: for each part, the values by name.
        before: the tensors of the state, and the complete batch of this rank.
        after: the tensors of the state and the metrics, by their names in the program.
        tolerance: tolerances of `after`, in the Euclidean norm.
        coarse: the relative tolerance of `parts` if they were computed in other dtypes, otherwise 0.
    """

    parts: Sequence[Mapping[str, torch.Tensor]]
    before: Mapping[str, torch.Tensor]
    after: Mapping[str, torch.Tensor]
    tolerance: Mapping[str, float]
    coarse: float = 0.0


def part_values(
    base: Program, device: torch.device, parts: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Returns the values of a base program's loss and gradients for each part of the global batch.

    Args:
        base: a base program for a mesh of one device and these parts.
        device: the device of the tensors.
        parts: for each part, the unsharded tensors and its batch, by name.
    """
    # Each part is that of a rank.
    base = base.map_instructions(lambda op: [op.saying(axes=("data",)) if op.op == "rank_index" else op])
    code, axes = ProgramCode(base, device), {"data": len(parts)}
    runs = [Interpreter(code, Mesh(axes, part, device), leaves, ProcessExchange()) for part, leaves in enumerate(parts)]
    ops = [op for op in base.instructions if op.op != "update"]
    made = {v.name for op in ops for v in op.out}
    for op in ops:
        of_parts = [a for a in op.args if op.of_sums and a in made]
        # Ops that read sums of all parts, such as the seed of a weighted loss, get the sums that a collective would
        # give them.
        totals = {a: torch.stack([run.values[a] for run in runs]).sum(0) for a in of_parts}
        for run in runs:
            own = {a: run.values[a] for a in totals}
            run.values |= totals
            run.run(op)
            # Restored, because later ops of the part read its own value again.
            run.values |= own
    return [{v.name: run.values[v.name] for op in ops for v in op.out} for run in runs]


def first_line(
    ran: Sequence[ExecutedOp],
    program: Program,
    mesh: Mesh,
    leaves: Mapping[str, torch.Tensor],
    reference: Reference,
    axes: tuple[str, ...],
    loose: float,
) -> FirstLine | None:
    """Returns the first op on this rank that differs. Every rank of the mesh must call it.

    Args:
        ran: what the executable did.
        program: the program that it ran.
        mesh: the mesh that it ran on.
        leaves: this rank's part of the state before the step, and of the batch, by name.
        reference: the expected values.
        axes: the axes that shard the batch.
        loose: the relative tolerance of compiled subgraphs.
    """
    # The recorded ops are run in their order, so speculative ones run if they were recorded.
    interpreter = Interpreter(ProgramCode(program, mesh.device), mesh, leaves, ProcessExchange(), speculates=True)
    meanings = _Meanings(program, mesh, reference, axes)
    texts = statements(program)
    found: FirstLine | None = None

    def differs(
        entry: ExecutedOp, name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float, why: str
    ) -> None:
        nonlocal found
        off = distance(got, want)
        if found is None and not off <= tolerance:
            text, size = texts[entry.number], norm(want)
            found = FirstLine(
                entry.number, text.strip(), name, entry.iteration, mesh.rank, off / size if size else off, why
            )

    empty: set[str] = set()  # memory that nothing has written yet
    for entry in ran:
        op = entry.op
        # Second account of the note: it read another value than was made.
        for name, x in entry.read.items():
            # Transfers pass flat buffers, which have other shapes than the values in them.
            if name not in empty and x.shape == interpreter.values[name].shape:
                differs(
                    entry,
                    name,
                    x,
                    interpreter.values[name],
                    _rounding(x, interpreter.values[name], mesh, loose),
                    f"reads {name}, which differs from the value that was produced",
                )
        interpreter.run(op, entry.iteration)
        meanings.run(op, entry.iteration)
        if OPS[op.op].pool == "leaves":  # buffers for new values
            empty.update(v.name for v in op.out)
            continue
        empty.difference_update(op.writes)
        # First account: its result differs from what the program says.
        for name, x in entry.made.items():
            want = interpreter.values[name].reshape(x.shape)
            differs(
                entry,
                name,
                x,
                want,
                _rounding(x, want, mesh, loose),
                f"produces {name}, which is not what the program says",
            )
        # Third account: the program says something else than the step means.
        for name in (v.name for v in op.out if v.name in interpreter.values) if op.op not in STARTS else ():
            _compare(entry, name, interpreter, meanings, differs)
        for name in op.writes:
            _compare(entry, name, interpreter, meanings, differs)
    return found


def _compare(entry: ExecutedOp, name: str, interpreter: Interpreter, meanings: _Meanings, differs: Any) -> None:
    expected = meanings.expected(name)
    if expected is not None and expected[0].numel() == interpreter.values[name].numel():
        want, tolerance = expected
        differs(
            entry,
            name,
            interpreter.values[name],
            want.reshape(interpreter.values[name].shape),
            tolerance,
            f"{name} differs from its value in the plain step",
        )


class _Meanings:
    """The meanings of a program's values, followed through its ops: computed values have the names that they have in
    the base program, and ops that call no subgraph move, cast or add up the values that they read.
    """

    def __init__(self, program: Program, mesh: Mesh, reference: Reference, axes: tuple[str, ...]):
        self._mesh, self._reference, self._axes = mesh, reference, axes
        self._of: dict[str, Meaning] = {v.name: Meaning(v.name) for v in program.inputs}
        self._started: dict[str, Instruction] = {}
        self._values: dict[str, Value] = program.values_by_name
        self._num_micro = len(reference.parts) // max(mesh.axis_size(axes), 1)
        self._known = reference.parts[0].keys() if reference.parts else ()

    def run(self, op: Instruction, iteration: int) -> None:
        if op.op in STARTS:
            self._started[op.out[0].name] = op
        else:
            start = self._started.pop(op.args[0]) if op.is_wait else None
            moved = (start or op).args if not op.fn else ()
            # The last arguments: a sum into totals has these first, and a copy that writes has its targets first.
            sources = moved[-len(op.out) :] if len(moved) >= len(op.out) else ()
            for i, value in enumerate(op.out):
                found = None if start else self._computed(value.name, micro_of(op, iteration)[0])
                if found is None and sources:
                    found = self._carried(op, start, i, self._values[sources[i]], iteration)
                self._set(value.name, found)
        # Whatever was written: the expected value of a tensor of the state, or of a value that stands for a shard of
        # one, follows from which tensor it is.
        for name in op.writes:
            leaf = self._of.get(name)
            self._set(name, leaf and Meaning(leaf.name if leaf.name.startswith("after ") else f"after {leaf.name}"))

    def _computed(self, name: str, micro: int) -> Meaning | None:
        """Returns the meaning of a value that has the name of a metric, or of a value of the base program."""
        if (metric := f"after metrics {name}") in self._reference.after:
            return Meaning(metric)
        base = name if name in self._known else _REPEATED.sub("", name)
        return Meaning(base, frozenset([self._part(micro)])) if base in self._known else None

    def _carried(
        self, op: Instruction, start: Instruction | None, i: int, source: Value, iteration: int
    ) -> Meaning | None:
        """Returns the meaning of result `i` of an op that moves, casts or adds up values. `start`: the start of the
        transfer that the op waits for.
        """
        value, found, how = op.out[i], self._of.get(source.name), (start or op).attrs
        if found is None or (isinstance(how, JoinAttrs) and how.reduction != "sum"):
            return None
        if isinstance(how, PartAttrs):
            return replace(found, parts=frozenset([self._part(micro_of(op, iteration)[0])]))
        if value.shape != source.shape:
            return None
        if value.dtype != source.dtype:
            found = replace(found, casts=(*found.casts, value.dtype))
        if isinstance(how, JoinAttrs) and found.parts is not None:
            if start is not None:  # the parts of the other ranks along the axes are added to this rank's
                axes = [axis for axis in start.axes if axis in self._axes]
                return replace(found, parts=frozenset(self._others(found.parts, axes)))
            is_first = OPS[op.op].outlives and not iteration
            total = value.name if OPS[op.op].outlives else op.args[i]
            return found if is_first else _together(self._of.get(total), found)
        return found

    # --- what values should be ---

    def expected(self, name: str) -> tuple[torch.Tensor, float] | None:
        """Returns the expected value of a name on this rank, and its tolerance; None if the expected value is
        unknown.
        """
        meaning, reference = self._of.get(name), self._reference
        # A summand of a sum over ranks that have the same batch is not known.
        if meaning is None or not {*self._values[name].placement.partial} <= {*self._axes}:
            return None
        if meaning.parts is None:
            if meaning.name in reference.after and meaning.name.startswith("after "):
                value, tolerance = reference.after[meaning.name], reference.tolerance[meaning.name]
                return self._here(name, value, ()), tolerance + 2 * max(
                    (unit(d) for d in meaning.casts), default=0.0
                ) * norm(value)
            return (
                (self._here(name, value, meaning.casts), 0.0)
                if (value := reference.before.get(meaning.name)) is not None
                else None
            )
        values = [reference.parts[p].get(meaning.name) for p in sorted(meaning.parts)]
        if any(v is None for v in values):
            return None
        # Added in at least float32, so that the expected value is not rounded more often than the program's.
        total = sum(v if len(values) == 1 else v.to(_wide(v.dtype)) for v in values)  # type: ignore[union-attr]
        here = self._here(name, total.to(values[0].dtype), meaning.casts)  # type: ignore[union-attr]
        spread = sum(norm(v) for v in values)  # type: ignore[misc, arg-type]
        dtypes = (here.dtype, *meaning.casts, values[0].dtype)  # type: ignore[union-attr]
        return here, (max(map(unit, dtypes)) * 4 * LAMBDA * len(values) ** 0.5 + reference.coarse) * spread

    def _here(self, name: str, value: torch.Tensor, casts: tuple[torch.dtype, ...]) -> torch.Tensor:
        for dtype in casts:
            value = value.to(dtype)
        at, shape = self._values[name].placement, self._values[name].shape
        # An expected value that is already a shard, such as one of the state before the step, is not sharded again.
        if at.is_flat_shard and value.numel() == max(torch.Size(shape).numel(), 1):
            layout = Layout(value.dtype, at.flat_axes, grid=at.grid, dims=at.dims)
            value = shard(value, Leaf("", "", tuple(value.shape), layout), self._mesh)
        return value

    def _others(self, parts: frozenset[int], axes: Sequence[str]) -> set[int]:
        """Returns the parts that correspond to these parts on all ranks along axes."""
        found = set(parts)
        for axis in axes:
            at, stride = self._axes.index(axis), self._num_micro
            # Parts are numbered in row-major order of the batch axes, with micro-batches varying fastest.
            for later in self._axes[at + 1 :]:
                stride *= self._mesh.axes[later]
            size = self._mesh.axes[axis]
            found = {p + (k - p // stride % size) * stride for p in found for k in range(size)}
        return found

    def _part(self, micro: int) -> int:
        return (self._mesh.index(self._axes) if self._axes else 0) * self._num_micro + micro

    def _set(self, name: str, meaning: Meaning | None) -> None:
        if meaning is None:
            self._of.pop(name, None)
        else:
            self._of[name] = meaning


def _together(a: Meaning | None, b: Meaning | None) -> Meaning | None:
    if a is None or b is None or a.parts is None or b.parts is None:
        return None
    return replace(a, parts=a.parts | b.parts)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the Euclidean norm of a difference; infinite if one of the two is not finite where the other is not the
    same.
    """
    a, b = (x.detach().to(torch.float64).reshape(-1) for x in (a, b))
    # Two NaNs count as equal: what matters is that both steps have them in the same places.
    same = (a == b) | (a.isnan() & b.isnan())
    off = torch.where(same, torch.zeros_like(a), a - b).norm().item()
    return off if off == off else float("inf")


def norm(x: torch.Tensor) -> float:
    """Returns the Euclidean norm, computed in float64."""
    return x.detach().to(torch.float64).norm().item()


def _rounding(got: torch.Tensor, want: torch.Tensor, mesh: Mesh, loose: float) -> float:
    """Returns the tolerance for the same sum computed in another order, or by a compiled subgraph."""
    return max(unit(got.dtype) * 4 * LAMBDA * mesh.size**0.5, loose if got.is_floating_point() else 0.0) * norm(want)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
