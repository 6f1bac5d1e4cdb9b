"""Finds the first line of a program whose value is wrong.

[Note: three accounts] A step is run once by its executable, and every line recorded (recording.py). The same lines are
then run by the interpreter, from the same state: what the program *says* (interpreter.py). And the base program of the
plain step is run on every part of the global batch (rank x micro-batch), with whole leaves: what the step *means*. The
names of base programs survive in all programs made of them. So a value's meaning follows from its name and the lines
that moved it: a sum over parts, a leaf before or after the update, a metric; whole, or this rank's shard. So there are
three ways in which a line can be the first:

  it made something else than the program says       a function, a transfer or a buffer is at fault
  it read something else than was made               a buffer was overwritten, or read too early
  the program says something else than the step      a rewrite, that is a transform, is at fault
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero.ir.ops import OPS, STARTS, micro_of
from fzero.ir.printer import statements
from fzero.ir.program import Line, Program, Value
from fzero.mesh import Mesh
from fzero.testing.interpreter import Interpreter, cut
from fzero.testing.recording import RanLine
from fzero.testing.report import FirstLine
from fzero.testing.tolerance import LAMBDA, unit

_REPEATED = re.compile(r"_micro_\d+$|_total_0$")


@dataclass(frozen=True)
class Meaning:
    """The meaning of a value: a value of the base program summed over parts of the global batch, or, without parts, an
    input or a result of the step.

    `casts`: the dtypes it went through since.
    """

    name: str
    parts: frozenset[int] | None = None
    casts: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class Reference:
    """The meaning of a step: the values of the base program for each part of the global batch, the leaves before and
    the results after, with their tolerances.

    Attributes:
        parts: for each part the values by name.
        before: leaves of the state and the whole batch of this rank.
        after: leaves of the state and metrics, by the names that the program has for them.
        tolerance: of `after`, in the Euclidean norm.
        coarse: the relative tolerance of `parts`, where they were computed in other dtypes; 0 where they were not.
    """

    parts: Sequence[Mapping[str, torch.Tensor]]
    before: Mapping[str, torch.Tensor]
    after: Mapping[str, torch.Tensor]
    tolerance: Mapping[str, float]
    coarse: float = 0.0


def part_values(
    base: Program, mesh: Mesh, parts: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """The values of a base program's loss and gradients for each part of the global batch.

    Args:
        base: for a mesh of one device and these parts.
        mesh: of one device.
        parts: of each whole leaves and its batch, by name.
    """
    runs = [Interpreter(base, mesh, leaves, part) for part, leaves in enumerate(parts)]
    lines = [line for line in base.lines if line.op != "update"]
    made = {v.name for line in lines for v in line.out}
    for line in lines:
        of_parts = [a for a in line.args if line.of_sums and a in made]
        totals = {a: torch.stack([run.values[a] for run in runs]).sum(0) for a in of_parts}
        for run in runs:
            own = {a: run.values[a] for a in totals}
            run.values |= totals
            run.run(line)
            run.values |= own
    return [{v.name: run.values[v.name] for line in lines for v in line.out} for run in runs]


def first_line(
    ran: Sequence[RanLine],
    program: Program,
    mesh: Mesh,
    leaves: Mapping[str, torch.Tensor],
    reference: Reference,
    axes: tuple[str, ...],
    loose: float,
) -> FirstLine | None:
    """The first line on this rank that differs; every rank of the mesh calls it together.

    Args:
        ran: what the executable did.
        program: that it ran.
        mesh: that it ran on.
        leaves: this rank's part of the state before, and of the batch, by name.
        reference: what it should have come to.
        axes: the batch is cut over.
        loose: the relative tolerance of functions that were compiled.
    """
    told, meanings = Interpreter(program, mesh, leaves), _Meanings(program, mesh, reference, axes)
    texts = statements(program)
    found: FirstLine | None = None

    def differs(entry: RanLine, name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float, why: str) -> None:
        nonlocal found
        off = distance(got, want)
        if found is None and not off <= tolerance:
            text, size = texts[entry.number], norm(want)
            found = FirstLine(entry.number, text.strip(), name, entry.turn, mesh.rank, off / size if size else off, why)

    empty: set[str] = set()  # memory that nobody has written yet
    for entry in ran:
        line = entry.line
        for name, x in entry.read.items():
            if name not in empty and x.shape == told.values[name].shape:
                differs(
                    entry,
                    name,
                    x,
                    told.values[name],
                    _rounding(x, told.values[name], mesh, loose),
                    f"reads {name}, which is not what was made",
                )
        told.run(line, entry.turn)
        meanings.run(line, entry.turn)
        if OPS[line.op].pool == "leaves":  # memory for them
            empty.update(v.name for v in line.out)
            continue
        empty.difference_update(line.writes)
        for name, x in entry.made.items():
            want = told.values[name].reshape(x.shape)
            differs(
                entry,
                name,
                x,
                want,
                _rounding(x, want, mesh, loose),
                f"makes {name}, which is not what the program says",
            )
        for name in (v.name for v in line.out if v.name in told.values) if line.op not in STARTS else ():
            _compare(entry, name, told, meanings, differs)
        for name in line.writes:
            _compare(entry, name, told, meanings, differs)
    return found


def _compare(entry: RanLine, name: str, told: Interpreter, meanings: _Meanings, differs: Any) -> None:
    expected = meanings.expected(name)
    if expected is not None and expected[0].numel() == told.values[name].numel():
        want, tolerance = expected
        differs(
            entry,
            name,
            told.values[name],
            want.reshape(told.values[name].shape),
            tolerance,
            f"{name} is not what the step means",
        )


class _Meanings:
    """The meanings of a program's names, followed through its lines."""

    def __init__(self, program: Program, mesh: Mesh, reference: Reference, axes: tuple[str, ...]):
        self._mesh, self._reference, self._axes = mesh, reference, axes
        self._of: dict[str, Meaning] = {v.name: Meaning(v.name) for v in program.inputs}
        self._started: dict[str, Line] = {}
        self._values: dict[str, Value] = program.values_by_name
        self._num_micro = len(reference.parts) // max(mesh.axis_size(axes), 1)
        self._known = reference.parts[0].keys() if reference.parts else ()

    def run(self, line: Line, turn: int) -> None:
        if line.op in STARTS:
            self._started[line.out[0].name] = line
        OPS[line.op].stands(line, self, micro_of(line, turn)[0], turn)

    # --- what the rows of ops say (`Standing`) ---

    def start_of(self, handle: str) -> Line:
        return self._started.pop(handle)

    def same(self, name: str, source: str) -> None:
        """Takes over the meaning of another value."""
        self._set(name, self._of.get(source))

    def part(self, name: str, source: str, micro: int) -> None:
        """The part of a micro-batch."""
        self._set(name, replace(self._of[source], parts=frozenset([self._part(micro)])))

    def total(self, name: str, total: str | None, part: str) -> None:
        """A part added to a total, or, without one, the first."""
        new = self._of.get(part)
        self._set(name, new if total is None else _together(self._of.get(total), new))

    def reduced(self, name: str, source: str, axes: Sequence[str]) -> None:
        """Summed over the ranks along axes: their parts are added to this rank's."""
        meaning = self._of.get(source)
        if meaning is not None and meaning.parts is not None and axes:
            meaning = replace(meaning, parts=frozenset(self._others(meaning.parts, axes)))
        self._set(name, meaning)

    def made(self, values: Sequence[Value], micro: int, source: str | None = None) -> None:
        """Computed: known by its name, which base programs have too, or, of a cast, by what was cast."""
        for value in values:
            base = value.name if value.name in self._known else _REPEATED.sub("", value.name)
            result = f"after metrics {value.name}"
            if result in self._reference.after:
                self._set(value.name, Meaning(result))
            elif base in self._known:
                self._set(value.name, Meaning(base, frozenset([self._part(micro)])))
            else:
                cast = self._of.get(source) if source is not None else None
                self._set(value.name, cast and replace(cast, casts=(*cast.casts, value.dtype)))

    def written(self, names: Sequence[str]) -> None:
        """Overwritten, with whatever: what leaves, or what stands for parts of them, are to be is settled by what they
        are."""
        for name in names:
            leaf = self._of.get(name)
            self._set(name, leaf and Meaning(leaf.name if leaf.name.startswith("after ") else f"after {leaf.name}"))

    # --- what values should be ---

    def expected(self, name: str) -> tuple[torch.Tensor, float] | None:
        """The expected value of a name on this rank, and its tolerance; None where nobody can tell."""
        meaning, reference = self._of.get(name), self._reference
        if meaning is None:
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
        total = sum(v if len(values) == 1 else v.to(_wide(v.dtype)) for v in values)  # type: ignore[union-attr]
        here = self._here(name, total.to(values[0].dtype), meaning.casts)  # type: ignore[union-attr]
        spread = sum(norm(v) for v in values)  # type: ignore[misc, arg-type]
        dtypes = (here.dtype, *meaning.casts, values[0].dtype)  # type: ignore[union-attr]
        return here, (max(map(unit, dtypes)) * 4 * LAMBDA * len(values) ** 0.5 + reference.coarse) * spread

    def _here(self, name: str, value: torch.Tensor, casts: tuple[torch.dtype, ...]) -> torch.Tensor:
        for dtype in casts:
            value = value.to(dtype)
        placement = self._values[name].placement
        shape = self._values[name].shape
        if placement.kind == "shard" and value.numel() == max(torch.Size(shape).numel(), 1):
            value = cut(value, placement, self._mesh)
        return value

    def _others(self, parts: frozenset[int], axes: Sequence[str]) -> set[int]:
        """These parts of all ranks along axes."""
        found = set(parts)
        for axis in axes:
            at, stride = self._axes.index(axis), self._num_micro
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
    """The Euclidean norm of a difference; infinite where one of the two is not finite and the other is not the same."""
    a, b = (x.detach().to(torch.float64).reshape(-1) for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    off = torch.where(same, torch.zeros_like(a), a - b).norm().item()
    return off if off == off else float("inf")


def norm(x: torch.Tensor) -> float:
    return x.detach().to(torch.float64).norm().item()


def _rounding(got: torch.Tensor, want: torch.Tensor, mesh: Mesh, loose: float) -> float:
    """The tolerance of the same sum when it is taken in another order, or by a function that was compiled."""
    return max(unit(got.dtype) * 4 * LAMBDA * mesh.size**0.5, loose if got.is_floating_point() else 0.0) * norm(want)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
