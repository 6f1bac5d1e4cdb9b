"""Computes live ranges of program values, including reads by other ranks from shared memory.

[Note: release] Ranks of one host read each other's buffers (comm/shared_memory.py): when this rank's wait returns,
another rank may still be reading. All ranks have finished reading once a later transfer over the same axis, started
after that wait, has arrived, because every rank starts its transfers in the same order. (A send does not count: it
involves two ranks only, and none in a step that sends nothing.) Until then the buffer stays allocated. This costs
only the distance to the next transfer and needs no additional message. The last wait in a loop is different: it
returns only when all ranks have finished (`together`), because the next iteration writes the same buffers again.
Ranks that do not share memory receive copies, so there the sent buffers are free after the wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from fzero.ir.aliases import Views
from fzero.ir.ops import COLLECTIVES, OPS, STARTS, Start
from fzero.ir.program import Instruction, Program

Interval = tuple[int, int]
"""The indices of the first and the last op, both inclusive."""


class Uses:
    """The ops of a program by index, and for each value the op that makes it and the ops that read it. An op that has
    a body comes before its body.
    """

    def __init__(self, program: Program):
        self.mesh = program.mesh
        self.ops = list(
            _numbered(program.instructions)
        )  # in order, each with the first and last op of the enclosing loop
        self.made: dict[str, int] = {}
        self.read: dict[
            str, int
        ] = {}  # the last op that reads a value; the end of the loop for a value from outside it
        self.reads: Counter[str] = Counter()
        self.views = Views(program)
        self.copying: dict[str, tuple[str, ...]] = {}
        for i, (op, span) in enumerate(self.ops):
            self._add(i, op, span)
        self.waits = {op.args[0]: i for i, (op, _) in enumerate(self.ops) if op.is_wait}
        self.starts = [
            (i, self.waits[op.out[0].name], op.axes)
            for i, (op, _) in enumerate(self.ops)
            if op.op in COLLECTIVES and not STARTS[op.op].direct
        ]
        self.met = {  # the waits of transfers that every rank takes part in: over which axes, and in which loop
            wait: (axes, self.ops[wait][1]) for _, wait, axes in self.starts
        }
        ends = sorted(self.starts, key=lambda t: t[1]) if self.mesh.shared_memory else []
        # the last wait of each loop and axis: later entries replace earlier ones
        self.together = {(span, axes): w for _, w, axes in ends if (span := self.ops[w][1]) is not None}
        self.arrivals = self._first_arrivals()

    def _add(self, i: int, op: Instruction, span: Interval | None) -> None:
        """Records what an op reads and makes. `span`: the first and the last op of the enclosing loop."""
        for name in op.args:
            self.reads[name] += 1
            for root in self.views.roots(name):
                # A value from outside a loop is read again in every iteration, so it lives to the end of the loop.
                inside = span is not None and self.made.get(root, -1) >= span[0]
                self.read[root] = max(self.read.get(root, -1), i if span is None or inside else span[1])
        row = OPS[op.op]
        if op.is_wait:  # a copy between tiers and a gather read until they are waited for
            for root in (r for a in self.copying.get(op.args[0], ()) for r in self.views.roots(a)):
                self.read[root] = max(self.read.get(root, -1), i)
        elif isinstance(row, Start) and row.reads_until_wait:
            self.copying[op.out[0].name] = row.sent(op)
        for value in op.out:
            self.made[value.name] = i

    def _first_arrivals(self) -> dict[tuple[Interval | None, tuple[str, ...]], tuple[list[int], list[int]]]:
        """Returns for each loop and axis the starts, and the first wait of any transfer that starts there or later."""
        arrivals: dict[tuple[Interval | None, tuple[str, ...]], tuple[list[int], list[int]]] = {}
        for start, wait, axes in self.starts:
            starts, waits = arrivals.setdefault((self.ops[wait][1], axes), ([], []))
            starts.append(start)
            waits.append(wait)
        for _, waits in arrivals.values():
            waits[:] = reversed(list(accumulate(reversed(waits), min)))  # a suffix minimum
        return arrivals

    def last(self, name: str) -> int:
        """Returns the last op that reads a value, or the op that makes it if none does. Returned values live to the
        end.
        """
        return len(self.ops) if name in self.views.returned else self.read.get(name, self.made[name])

    def same_loop(self, one: int, other: int) -> bool:
        return self.ops[one][1] == self.ops[other][1]

    def until(self, last: int, wait: int, axes: tuple[str, ...]) -> int:
        """Returns the op after which a buffer is free: the last reader on this rank is done and, if memory is shared,
        so are the other ranks' reads of the transfer that `wait` waits for.
        """
        if not self.mesh.shared_memory:
            return last
        span = self.ops[wait][1]
        starts, arrivals = self.arrivals.get((span, axes), ([], []))
        later = bisect_right(starts, wait)
        read = arrivals[later] if later < len(arrivals) else len(self.ops)
        if span is not None:
            read = min(read, self.together[span, axes])
        return max(last, read)


def _numbered(
    ops: Sequence[Instruction], span: Interval | None = None, at: int = 0
) -> Iterator[tuple[Instruction, Interval | None]]:
    """Yields the ops in the order of their text, each with the first and last index of the loop that contains it. An
    op that has a body comes before its body.
    """
    for op in ops:
        yield op, span
        at += 1
        if op.body:
            size = sum(1 for _ in op.with_body()) - 1
            yield from _numbered(op.body, (at, at + size - 1) if OPS[op.op].iterations(op) > 1 else span, at)
            at += size
