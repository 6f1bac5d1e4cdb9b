"""Verifies the arena of a finished program by simulating its execution, with two iterations of each loop. It does not
rely on how the buffers were chosen.

Bytes of the arena belong to the value that was written there last. An op that reads a value must find that the bytes
still belong to it, and an op that processes several values in the same way must not write one result over another
argument. While a transfer is in flight, nothing may write what it reads or fills, and what other ranks read from
shared memory must stay unchanged until they are known to have read it ([Note: release] in ir/liveness.py). Host
memory that a copy to the device reads, or that a copy from the device fills while only the device has waited for it,
may be written only by ops that wait for such copies themselves (`Op.settles`). An update in place counts as a write.
No transfer is waited for before it is started, so with the same program on every rank (runtime/program_agreement.py)
there is no order in which ranks wait for each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from fzero.ir.attributes import WaitAttrs
from fzero.ir.ops import OPS, STARTS, Op, Start, iterations, stays
from fzero.ir.ops.transfers import AllToAllV, Copy, Send
from fzero.ir.program import Instruction, Place, Program
from fzero.ir.verifier import refuse, shown

# bytes of the arena, half open; the host's arena comes after the device's, then each separate allocation
Span = tuple[int, int]
_APART = 1 << 52  # distance between the beginnings of separate allocations, which are not part of the arena


def check(program: Program) -> Program:
    """Returns the program, if its buffers follow the rules of the arena.

    Raises:
        VerifyError: listing every rule that is broken, with the op.
    """
    checker = _PoolChecker(program)
    checker.run(program.instructions)
    refuse(program, checker.problems, "the pool")
    return program


@dataclass(eq=False)
class _Guard:
    """Bytes that a transfer reads or fills until its wait, and bytes that other ranks read from shared memory until
    they are known to have finished.
    """

    start: Instruction
    spans: list[Span]
    waited: bool = False
    # transfers started since the wait: once one of them arrives, every rank has finished reading
    after: set[str] = field(default_factory=set)


class _PoolChecker:
    """Simulates the execution of a program on the bytes of its arena, and collects the violations."""

    def __init__(self, program: Program):
        self.program, self.problems = program, list[str]()
        self.places: dict[str, Span] = {}
        # which value was written last to which bytes: sorted by the bytes, which do not overlap
        self.owners: list[tuple[Span, str]] = []
        self.guards: dict[str, _Guard] = {}
        self.staying: dict[str, tuple[str, ...]] = {}  # results of copies that move nothing
        # for copies that only the device has waited for: the host memory that they read or fill
        self.sent: dict[str, list[Span]] = {}
        self.sent_leaves: dict[str, list[str]] = {}  # and the stored tensors that they read there
        self.same: dict[str, str] = {}  # copies that move nothing and views, with their sources

    def run(self, ops: Sequence[Instruction]) -> None:
        """Executes ops: checks what each reads, then records what it writes."""
        for op in ops:
            row = OPS[op.op]
            for name in map(self._origin, op.args):
                self._read(op, name)
            for name, source in row.shares(op):
                self.same[name] = self._origin(source)
                if row.in_place:
                    self._write(op, self.same[name], self.places[self.same[name]])
            if stays(op, self.program.mesh):
                self.staying[op.out[0].name] = () if op.writes else op.args
            elif op.is_wait and op.args[0] in self.staying:
                self.same.update(
                    (v.name, self._origin(a)) for v, a in zip(op.out, self.staying[op.args[0]], strict=True)
                )
            elif isinstance(row, Start):
                self._start(op, row)
            elif op.is_wait:
                self._wait(op)
            else:
                self._compute(op, row)
            for _ in range(iterations(op)):
                self.run(op.body)

    def _compute(self, op: Instruction, row: Op) -> None:
        """Executes an op that is no transfer: it writes tensors of the state, and its results."""
        for name in op.writes if not row.settles else ():
            for moving in (m for m, leaves in self.sent_leaves.items() if name in leaves):
                self._add(op, f"{name} is written, which {moving} may still read on the host")
        for name in (n for n in map(self._origin, op.writes) if n in self.places):
            self._write(op, name, self.places[name])
        read = [(a, self.places.get(a)) for a in map(self._origin, op.args)] if row.batched else []
        for value, place in zip_longest(op.out, op.into):
            if place is None:  # in an earlier iteration of a loop, a transfer may have copied it to the arena
                self.places.pop(value.name, None)
                continue
            if over := [a for a, at in read if at is not None and _meet(at, self._span(place))]:
                self._add(op, f"{value.name} is written over {', '.join(over)}, which it reads meanwhile")
            self._write(op, value.name, self._span(place))

    def _start(self, op: Instruction, row: Start) -> None:
        """Begins a transfer: it writes its own buffers now, and guards what it reads or fills until its wait."""
        buffers = [(k, self._span(p)) for k, p in enumerate(op.into) if p is not None]
        spans, num = [span for _, span in buffers], len(op.args)
        for k, span in buffers:
            # The start copies an argument of a reduction into its buffer, unless it lies there already. Other
            # transfers fill their buffers themselves.
            mine = self.places.get(self._origin(op.args[k])) if k < num else None
            in_place = mine is not None and span[0] <= mine[0] and mine[1] <= span[1]
            if row.reads_until_wait or not in_place:
                self._write(op, op.args[k] if k < num and not row.reads_until_wait else f"{op.out[0].name}:{k}", span)
        if row.reads_until_wait:
            spans += [self.places[a] for a in map(self._origin, row.sent(op)) if a in self.places]
        self.guards[op.out[0].name] = _Guard(op, spans)
        # [Note: release]: when this transfer has arrived, every rank has finished the reads of earlier ones.
        for guard in self.guards.values() if not row.direct else ():
            if guard.waited and guard.start.axes == op.axes:
                guard.after.add(op.out[0].name)

    def _wait(self, op: Instruction) -> None:
        """Ends a transfer: its results now own their bytes. Its guard is dropped here if no other rank reads the
        buffers; otherwise a later transfer over the same axis, or a wait of all ranks (`together`), drops it.
        """
        name = op.args[0]
        guard = self.guards.get(name)
        if guard is None or guard.waited:
            self._add(op, f"{name} has not been started")
            return
        guard.waited = True
        row = STARTS[guard.start.op]
        released = self._released(op, name, guard, row)
        self._arrive(op, guard, row)
        to_device = guard.start.tiers[1:] == ("device",)  # of these, the wait blocks only the device
        if to_device or not op.says(WaitAttrs).host:
            self.sent[name] = [s for s in guard.spans if self.program.pool_bytes <= s[0] < _APART]
        if to_device:
            self.sent_leaves[name] = [a for a in map(self._origin, guard.start.args) if a in self.program.leaves]
        read = guard.start.into[: len(guard.start.args)]
        guard.spans = [self._span(p) for p in read if p is not None]
        self.guards = {n: g for n, g in self.guards.items() if n not in released}

    def _released(self, op: Instruction, name: str, guard: _Guard, row: Start) -> list[str]:
        """Returns the transfers of which no rank reads the buffers any more after the wait for the transfer `name`."""
        released = [n for n, g in self.guards.items() if name in g.after]
        if op.says(WaitAttrs).together:
            released += [n for n, g in self.guards.items() if g.waited and g.start.axes == guard.start.axes]
        if not self.program.mesh.shared_memory or isinstance(row, Copy | Send | AllToAllV):
            released.append(name)
        return released

    def _arrive(self, op: Instruction, guard: _Guard, row: Start) -> None:
        """Gives the results of a transfer their bytes."""
        for value, (place, filled) in zip(op.out, zip(op.into, row.filled(guard.start), strict=False), strict=False):
            if place is None or filled is None:
                continue
            span, source = self._span(place), self._span(filled)
            if not (source[0] <= span[0] and span[1] <= source[1]):
                self._write(op, value.name, span, guard)
            self.places[value.name] = span
            self._own(span, value.name)

    def _origin(self, name: str) -> str:
        return self.same.get(name, name)

    def _read(self, op: Instruction, name: str) -> None:
        span = self.places.get(name)
        if span is None:
            return
        for _, owner in self.owners[self._on(span)]:
            if owner != name:
                self._add(op, f"{name} is read, but {owner} has overwritten its buffer")

    def _write(self, op: Instruction, name: str, span: Span, by: _Guard | None = None) -> None:
        bound = self.program.pool_bytes + (self.program.host_pool_bytes if span[0] >= self.program.pool_bytes else 0)
        if span[1] > bound and span[0] < _APART:
            self._add(op, f"{name} ends at byte {span[1]} of an arena of {bound}")
        for moving, guard in self.guards.items():
            if guard is not by and _meets_any(span, guard.spans):
                what = "other ranks may still be reading it" if guard.waited else "it has not been waited for"
                self._add(op, f"{name} is written over the buffers of {moving}: {what}")
        if not OPS[op.op].settles:
            for moving, spans in self.sent.items():
                if _meets_any(span, spans):
                    self._add(op, f"{name} is written over memory that {moving} may still read or fill on the host")
        self.places[name] = span
        self._own(span, name)

    def _own(self, span: Span, name: str) -> None:
        self.owners[self._on(span)] = [(span, name)]

    def _on(self, span: Span) -> slice:
        """Returns the slice of `owners` that these bytes belong to."""
        first = bisect_right(self.owners, span[0], key=lambda owner: owner[0][1])
        return slice(first, max(first, bisect_left(self.owners, span[1], key=lambda owner: owner[0][0])))

    def _span(self, place: Place) -> Span:
        size = self.program.mesh.axis_size(place.part) if place.part else 1
        begin = place.offset + (self.program.pool_bytes if place.arena == "host" else 0)
        if place.arena == "apart":
            begin += (1 + place.room) * _APART
        return begin, begin + place.nbytes * size

    def _add(self, op: Instruction, text: str) -> None:
        self.problems.append(f"{shown(op)}: {text}")


def _meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _meets_any(one: Span, others: Sequence[Span]) -> bool:
    begin, end = one
    for other in others:  # noqa: SIM110 - millions in a large program, and a generator takes three times as long
        if begin < other[1] and other[0] < end:
            return True
    return False
