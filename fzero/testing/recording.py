"""Records the values that a running program reads and makes, op by op, by copying them before and after each op.

While the program runs, values are only copied, not compared, so its transfers overlap almost as they do without
recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.ir.attributes import AssignAttrs
from fzero.ir.ops import OPS, STARTS, is_superseded
from fzero.ir.program import Instruction, Program
from fzero.runtime.execute import Executable
from fzero.runtime.op_hooks import observe
from fzero.runtime.op_timers import OpPlace


@dataclass
class ExecutedOp:
    """An op that ran: its index in the text, the iteration of the enclosing loop, the values that it read,
    and those that it made or wrote, by name.
    """

    op: Instruction
    number: int
    iteration: int
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    made: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def recording(run: Executable, program: Program) -> Iterator[list[ExecutedOp]]:
    """Records each op of a single run of an executable in the body, in the order in which the ops run. Of ops that a
    `rollback` repeats, only the second execution is kept.
    """
    ran: list[ExecutedOp] = []
    again = False

    def before(place: OpPlace, args: tuple[Any, ...]) -> tuple[ExecutedOp, dict[str, torch.Tensor]] | None:
        if place[0].body:  # its result says whether the body runs
            return None
        entry = ExecutedOp(*place)
        ran.append(entry)
        op, row, given = entry.op, OPS[entry.op.op], list(_tensors(args))
        names = row.given(op)
        if row.outlives:  # it also gets the total so far
            given = given[-len(names) :]
        by_name = dict(zip(names, given, strict=True)) if len(names) == len(given) else {}
        entry.read = {
            name: x.detach().clone()
            # Copied before the op runs: an op that writes in place would otherwise record its result as its argument.
            for name, x in by_name.items()
            if not x.is_meta and not (isinstance(op.attrs, AssignAttrs) and name in op.writes)
        }
        return entry, by_name

    def after(place: OpPlace, noted: Any, args: tuple[Any, ...], result: Any) -> None:
        nonlocal again
        if noted is None:
            again = result
            return
        entry, by_name = noted
        op, made = entry.op, list(_tensors((result,)))
        if op.op in STARTS:
            return
        if len(made) == len(op.out):
            entry.made = {v.name: x.detach().clone() for v, x in zip(op.out, made, strict=True)}
        entry.made |= {w: by_name[w].detach().clone() for w in op.writes if w in by_name and not by_name[w].is_meta}

    try:
        with observe(run, program, before, after):
            yield ran
    finally:
        if again:
            in_vain = is_superseded([x.op for x in ran])
            ran[:] = [x for x in ran if not in_vain(x.op)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for x in values:
            yield from _tensors(x)
