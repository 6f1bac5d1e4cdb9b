"""Defines the ops that repeat other ops, combine the values of micro-batches, and write the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero._compat import compat
from fzero.ir.attributes import AssignAttrs, JoinAttrs, LoopAttrs, UpdateAttrs
from fzero.ir.ops.op import Op, Rules, Running, Text, into, join_text
from fzero.ir.program import Instruction, Program, Value, local_bytes
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
    writes = "always"
    attrs = UpdateAttrs

    def check(self, op: Instruction[UpdateAttrs], args: list[Value], rules: Rules) -> None:
        graph = op.attrs.graph
        counts = len(args), len(op.writes) + len(op.out)
        if counts != (len(graph.inputs), len(graph.outputs)):
            rules.bad(
                op,
                f"takes {len(graph.inputs)} values and gives {len(graph.outputs)}, not {counts[0]} and {counts[1]}",
            )
        read = {*op.attrs.sums, *op.attrs.maxima, *rules.program.grads.values(), *op.writes}
        for name in sorted(read - {*op.args}):
            rules.bad(op, f"{name} is not among its arguments")


class Loop(Op[LoopAttrs]):
    """Runs its body once per micro-batch."""

    name = "loop"
    args = 0
    out = 0
    attrs = LoopAttrs
    computes = ""

    def check(self, op: Instruction[LoopAttrs], args: list[Value], rules: Rules) -> None:
        if op.attrs.count < 2 or not op.body:
            rules.bad(op, f"repeats {len(op.body)} lines {op.attrs.count} times")

    def iterations(self, op: Instruction[LoopAttrs]) -> int:
        """Returns two: the second iteration shows the values that one iteration leaves to the next."""
        return min(op.attrs.count, 2)

    def iterations_run(self, op: Instruction[LoopAttrs], result: Any) -> int:
        return op.attrs.count

    def text(self, op: Instruction[LoopAttrs], program: Program) -> Text:
        return Text(f"for micro in range({op.attrs.count}):")


class Accumulation(Op[JoinAttrs]):
    """Sums one or several values, or takes their maximum, over the iterations of the enclosing loop. The result is
    read after the loop.
    """

    name = "accumulate"
    attrs = JoinAttrs
    computes = "there"
    settles = True
    pool = "total"
    batched = True

    def check(self, op: Instruction[JoinAttrs], args: list[Value], rules: Rules) -> None:
        _joins(op, args, rules)
        if rules.iterations == 1 or op.micro or op.attrs.reduction not in JOINS:
            rules.bad(op, f"accumulates by {op.attrs.reduction!r} over {rules.iterations} iterations")
        if not args or len(args) != len(op.out):
            rules.bad(op, f"accumulates {len(args)} values to {len(op.out)}")
        for part, total in zip(args, op.out, strict=False):
            if replace(total, name=part.name) != part:
                rules.bad(op, f"{part} accumulates to {total}")

    def touched(self, op: Instruction[JoinAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(3 * local_bytes(v, mesh) for v in op.out)

    def text(self, op: Instruction[JoinAttrs], program: Program) -> Text:
        totals, parts = [v.name for v in op.out], op.args
        first = [*totals, *parts] if len(totals) == 1 else [f"[{', '.join(totals)}]", f"[{', '.join(parts)}]"]
        return Text(f"accumulate({', '.join([*first, *join_text(op), *into(op, program)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def accumulate(
            total: torch.Tensor | Sequence[torch.Tensor | None] | None,
            part: torch.Tensor | Sequence[torch.Tensor],
            into: Sequence[torch.Tensor],
            op: str = "sum",
        ) -> torch.Tensor | Sequence[torch.Tensor]:
            if isinstance(part, torch.Tensor):
                assert total is None or isinstance(total, torch.Tensor)
                # The first micro-batch is copied instead of added to zeros, which saves clearing the buffer.
                return into[0].copy_(part) if total is None else JOINS[op]([total], [part])[0]
            assert isinstance(total, (list, tuple))
            totals = [x for x in total if x is not None]
            if totals:  # from the second iteration on, all of them exist
                return JOINS[op](totals, part)
            compat.copy_all(into, part)
            return into

        return on.tiers.settled(accumulate, lambda *args: args[-1])


class Add(Op[JoinAttrs]):
    """Adds to totals in place: its results are new names of its first arguments."""

    name = "add"
    attrs = JoinAttrs
    settles = True
    pool = "sum"

    def check(self, op: Instruction[JoinAttrs], args: list[Value], rules: Rules) -> None:
        num = len(op.out)
        _joins(op, args, rules)
        if op.micro is None or op.attrs.reduction not in JOINS:
            rules.bad(op, f"adds by {op.attrs.reduction!r}")
        if len(args) != 2 * num:
            rules.bad(op, f"adds {len(args) - num} values to {num} totals")
        rules.pairs(op, args[:num], args[num:], "added")
        rules.pairs(op, op.out, args[num:], "added")
        # The totals are read by their new names from now on.
        rules.overwritten |= {*op.args[:num]}

    def shares(self, op: Instruction[JoinAttrs]) -> Iterable[tuple[str, str]]:
        return [(v.name, total) for v, total in zip(op.out, op.args, strict=False)]

    def touched(self, op: Instruction[JoinAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(3 * local_bytes(v, mesh) for v in op.out)

    def text(self, op: Instruction[JoinAttrs], program: Program) -> Text:
        totals, parts = (f"[{', '.join(names)}]" for names in _halves(op))
        return Text(f"add({', '.join([totals, parts, *join_text(op)])})", "in place", listed=True)

    def runs(self, on: Running) -> Callable[..., Any]:
        def add(
            totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], op: str = "sum"
        ) -> Sequence[torch.Tensor]:
            return JOINS[op](totals, parts)

        return on.tiers.settled(add, lambda *args: args[0])


def _joins(op: Instruction[JoinAttrs], args: list[Value], rules: Rules) -> None:
    """Checks that micro-batches combine a partial value by the same reduction as ranks do."""
    for v in args:
        # The maximum of sums is not the sum of maxima, so the two reductions must be the same one.
        if not v.placement.reduces(v.placement.partial, op.attrs.reduction):
            rules.bad(op, f"{v.name} is {v.placement}, joined by {op.attrs.reduction!r}")


def _halves(op: Instruction[JoinAttrs]) -> tuple[Sequence[str], Sequence[str]]:
    return op.args[: len(op.out)], op.args[len(op.out) :]


class Assign(Op[AssignAttrs]):
    """Writes new values to tensors of the state. Its arguments are those tensors, then the values."""

    name = "assign"
    out = 0
    writes = "always"
    attrs = AssignAttrs
    computes = "there"
    settles = True

    def check(self, op: Instruction[AssignAttrs], args: list[Value], rules: Rules) -> None:
        num = len(op.writes)
        if len(args) != 2 * num or op.args[:num] != op.writes:
            rules.bad(op, f"assigns {len(args) - num} values to {num} leaves")
        rules.pairs(op, args[:num], args[num:], "assigned")

    def reads_new(self, op: Instruction[AssignAttrs], name: str, aliases: Mapping[str, str]) -> bool:
        return name in op.writes

    def touched(self, op: Instruction[AssignAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(local_bytes(values[a], mesh) for a in op.args)

    def text(self, op: Instruction[AssignAttrs], program: Program) -> Text:
        num = len(op.writes)
        return Text(f"{op.callee}([{', '.join(op.args[:num])}], [{', '.join(op.args[num:])}])", "in place")

    def runs(self, on: Running) -> Callable[..., Any]:
        def assign(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
            compat.copy_all(targets, sources)

        return on.tiers.settled(assign, lambda *args: args[0])


ROWS: Sequence[Op[Any]] = (Update(), Loop(), Accumulation(), Add(), Assign())
