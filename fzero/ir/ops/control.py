"""Defines the ops that repeat other ops, combine the values of micro-batches, and write the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero._compat import compat
from fzero.ir.attributes import AddAttrs, AssignAttrs, JoinAttrs, TurnsAttrs, UpdateAttrs
from fzero.ir.ops.op import Op, Rules, Running, Standing, Text, Told, into, join_text
from fzero.ir.program import Line, Program, Value, local_bytes
from fzero.mesh import AbstractMesh

Tensors = Sequence[torch.Tensor]


def _sums(totals: Tensors, parts: Tensors) -> Tensors:
    compat.add_all(totals, parts)
    return totals


def _maxima(totals: Tensors, parts: Tensors) -> Tensors:
    return [torch.maximum(total, part, out=total) for total, part in zip(totals, parts, strict=True)]


JOINS: Mapping[str, Callable[[Tensors, Tensors], Tensors]] = {"sum": _sums, "max": _maxima}
"""By reduction, the function that combines the values of two micro-batches, in place of the first."""


class Update(Op[UpdateAttrs]):
    """The complete optimizer, before it is partitioned into subgraphs. Its graph has an input for each argument, and
    an output for each written tensor and each new value.
    """

    name = "update"
    in_text = False
    writes = "always"
    attrs = UpdateAttrs

    def check(self, line: Line[UpdateAttrs], args: list[Value], rules: Rules) -> None:
        graph = line.attrs.graph
        counts = len(args), len(line.writes) + len(line.out)
        if counts != (len(graph.inputs), len(graph.outputs)):
            rules.bad(
                line,
                f"takes {len(graph.inputs)} values and gives {len(graph.outputs)}, not {counts[0]} and {counts[1]}",
            )
        read = {*line.attrs.sums, *line.attrs.maxima, *rules.program.grads.values(), *line.writes}
        for name in sorted(read - {*line.args}):
            rules.bad(line, f"{name} is not among its arguments")


class Loop(Op[TurnsAttrs]):
    """Runs its body once per micro-batch."""

    name = "loop"
    in_text = False
    args = 0
    out = 0
    attrs = TurnsAttrs
    body = True
    computes = ""

    def check(self, line: Line[TurnsAttrs], args: list[Value], rules: Rules) -> None:
        if line.attrs.count < 2 or not line.body:
            rules.bad(line, f"repeats {len(line.body)} lines {line.attrs.count} times")

    def turns(self, line: Line[TurnsAttrs]) -> int:
        """Returns two: the second iteration shows the values that one iteration leaves to the next."""
        return min(line.attrs.count, 2)

    def turns_run(self, line: Line[TurnsAttrs], result: Any) -> int:
        return line.attrs.count

    def text(self, line: Line[TurnsAttrs], program: Program) -> Text:
        return Text(f"for micro in range({line.attrs.count}):")


class Accumulation(Op[JoinAttrs]):
    """Sums one or several values, or takes their maximum, over the iterations of the enclosing loop. The result is
    read after the loop.
    """

    name = "accumulate"
    attrs = JoinAttrs
    computes = "there"
    settles = True
    pool = "total"
    outlives = True
    batched = True

    def check(self, line: Line[JoinAttrs], args: list[Value], rules: Rules) -> None:
        _joins(line, args, rules)
        if rules.turns == 1 or line.attrs.reduction not in JOINS:
            rules.bad(line, f"accumulates by {line.attrs.reduction!r} over {rules.turns} turns")
        if not args or len(args) != len(line.out):
            rules.bad(line, f"accumulates {len(args)} values to {len(line.out)}")
        for part, total in zip(args, line.out, strict=False):
            if replace(total, name=part.name) != part:
                rules.bad(line, f"{part} accumulates to {total}")

    def touched(self, line: Line[JoinAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(3 * local_bytes(v, mesh) for v in line.out)

    def text(self, line: Line[JoinAttrs], program: Program) -> Text:
        totals, parts = [v.name for v in line.out], line.args
        first = [*totals, *parts] if len(totals) == 1 else [f"[{', '.join(totals)}]", f"[{', '.join(parts)}]"]
        return Text(f"accumulate({', '.join([*first, *join_text(line), *into(line, program)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def accumulate(
            total: torch.Tensor | Sequence[torch.Tensor | None] | None,
            part: torch.Tensor | Sequence[torch.Tensor],
            into: Sequence[torch.Tensor],
            op: str = "sum",
        ) -> torch.Tensor | Sequence[torch.Tensor]:
            if isinstance(part, torch.Tensor):
                assert total is None or isinstance(total, torch.Tensor)
                return into[0].copy_(part) if total is None else JOINS[op]([total], [part])[0]
            assert isinstance(total, (list, tuple))
            totals = [x for x in total if x is not None]
            if totals:  # from the second iteration on, all of them exist
                return JOINS[op](totals, part)
            compat.copy_all(into, part)
            return into

        return on.tiers.settled(accumulate, lambda *args: args[-1])

    def means(self, line: Line[JoinAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        pairs = zip(line.out, args, strict=True)
        return [_joined(line, told.values[v.name], x) if turn else x.clone() for v, x in pairs]

    def stands(self, line: Line[JoinAttrs], of: Standing, micro: int, turn: int) -> None:
        if line.attrs.reduction == "sum":
            for value, part in zip(line.out, line.args, strict=True):
                of.total(value.name, value.name if turn else None, part)


class Add(Op[AddAttrs]):
    """Adds to totals in place: its results are new names of its first arguments."""

    name = "add"
    attrs = AddAttrs
    settles = True
    pool = "sum"
    in_place = True

    def check(self, line: Line[AddAttrs], args: list[Value], rules: Rules) -> None:
        num = len(line.out)
        _joins(line, args, rules)
        if line.attrs.reduction not in JOINS:
            rules.bad(line, f"adds by {line.attrs.reduction!r}")
        if len(args) != 2 * num:
            rules.bad(line, f"adds {len(args) - num} values to {num} totals")
        rules.pairs(line, args[:num], args[num:], "added")
        rules.pairs(line, line.out, args[num:], "added")
        rules.overwritten |= {*line.args[:num]}

    def shares(self, line: Line[AddAttrs]) -> Iterable[tuple[str, str]]:
        return [(v.name, total) for v, total in zip(line.out, line.args, strict=False)]

    def touched(self, line: Line[AddAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(3 * local_bytes(v, mesh) for v in line.out)

    def text(self, line: Line[AddAttrs], program: Program) -> Text:
        totals, parts = (f"[{', '.join(names)}]" for names in _halves(line))
        return Text(f"add({', '.join([totals, parts, *join_text(line)])})", "in place", listed=True)

    def runs(self, on: Running) -> Callable[..., Any]:
        def add(
            totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], op: str = "sum"
        ) -> Sequence[torch.Tensor]:
            return JOINS[op](totals, parts)

        return on.tiers.settled(add, lambda *args: args[0])

    def means(self, line: Line[AddAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        num = len(line.out)
        return [_joined(line, total, part) for total, part in zip(args[:num], args[num:], strict=True)]

    def stands(self, line: Line[AddAttrs], of: Standing, micro: int, turn: int) -> None:
        if line.attrs.reduction == "sum":
            for value, total, part in zip(line.out, *_halves(line), strict=True):
                of.total(value.name, total, part)


def _joins(line: Line[JoinAttrs], args: list[Value], rules: Rules) -> None:
    """Checks that micro-batches combine a partial value by the same reduction as ranks do."""
    for v in args:
        if v.placement.partial and v.placement.by != line.attrs.reduction:
            rules.bad(line, f"{v.name} is {v.placement}, joined by {line.attrs.reduction!r}")


def _joined(line: Line[JoinAttrs], total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return JOINS[line.attrs.reduction]([total.clone()], [part])[0]


def _halves(line: Line[AddAttrs]) -> tuple[Sequence[str], Sequence[str]]:
    return line.args[: len(line.out)], line.args[len(line.out) :]


class Assign(Op[AssignAttrs]):
    """Writes new values to tensors of the state. Its arguments are those tensors, then the values."""

    name = "assign"
    out = 0
    writes = "always"
    attrs = AssignAttrs
    computes = "there"
    settles = True
    overwrites = True

    def check(self, line: Line[AssignAttrs], args: list[Value], rules: Rules) -> None:
        num = len(line.writes)
        if len(args) != 2 * num or line.args[:num] != line.writes:
            rules.bad(line, f"assigns {len(args) - num} values to {num} leaves")
        rules.pairs(line, args[:num], args[num:], "assigned")

    def reads_new(self, line: Line[AssignAttrs], name: str, aliases: Mapping[str, str]) -> bool:
        return name in line.writes

    def touched(self, line: Line[AssignAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(local_bytes(values[a], mesh) for a in line.args)

    def text(self, line: Line[AssignAttrs], program: Program) -> Text:
        num = len(line.writes)
        return Text(f"{line.callee}([{', '.join(line.args[:num])}], [{', '.join(line.args[num:])}])", "in place")

    def runs(self, on: Running) -> Callable[..., Any]:
        def assign(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
            compat.copy_all(targets, sources)

        return on.tiers.settled(assign, lambda *args: args[0])

    def means(self, line: Line[AssignAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        told.write(line.writes, args[len(line.writes) :])
        return ()

    def stands(self, line: Line[AssignAttrs], of: Standing, micro: int, turn: int) -> None:
        of.written(line.writes)


ROWS: Sequence[Op[Any]] = (Update(), Loop(), Accumulation(), Add(), Assign())
