"""Records the values that a running program reads and makes, op by op, by copying them before and after each op.

While the program runs, values are only copied, not compared, so its transfers overlap almost as they do without
recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.ir.ops import OPS, STARTS, is_superseded
from fzero.ir.program import Line, Program
from fzero.runtime.op_hooks import observe
from fzero.runtime.op_timers import LinePlace


@dataclass
class RanLine:
    """An op that ran: its index in the text, the iteration (`turn`) of the enclosing loop, the values that it read,
    and those that it made or wrote, by name.
    """

    line: Line
    number: int
    turn: int
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    made: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def recording(run: Callable[..., Any], program: Program) -> Iterator[list[RanLine]]:
    """Records each op of a single run of an executable in the body, in the order in which the ops run. Of ops that a
    `rollback` repeats, only the second execution is kept.
    """
    ran: list[RanLine] = []
    again = False

    def before(place: LinePlace, args: tuple[Any, ...]) -> tuple[RanLine, dict[str, torch.Tensor]] | None:
        if place[0].body:  # its result says whether the body runs
            return None
        entry = RanLine(*place)
        ran.append(entry)
        line, row, given = entry.line, OPS[entry.line.op], list(_tensors(args))
        names = row.given(line)
        if row.outlives:  # it also gets the total so far
            given = given[-len(names) :]
        by_name = dict(zip(names, given, strict=True)) if len(names) == len(given) else {}
        entry.read = {
            name: x.detach().clone()
            for name, x in by_name.items()
            if not x.is_meta and not (row.overwrites and name in line.writes)
        }
        return entry, by_name

    def after(place: LinePlace, noted: Any, args: tuple[Any, ...], result: Any) -> None:
        nonlocal again
        if noted is None:
            again = result
            return
        entry, by_name = noted
        line, made = entry.line, list(_tensors((result,)))
        if line.op in STARTS:
            return
        if len(made) == len(line.out):
            entry.made = {v.name: x.detach().clone() for v, x in zip(line.out, made, strict=True)}
        entry.made |= {w: by_name[w].detach().clone() for w in line.writes if w in by_name and not by_name[w].is_meta}

    try:
        with observe(run, program, before, after):
            yield ran
    finally:
        if again:
            in_vain = is_superseded([x.line for x in ran])
            ran[:] = [x for x in ran if not in_vain(x.line)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for x in values:
            yield from _tensors(x)
