"""Finds which lines of a program must come after which, and puts lines in an order that this allows: a list scheduler.

The order of lines follows from the op table: reads, writes, and shared memory of each line. Where a line is best
placed, within that, is for the passes that ask (compiler/overlap.py, compiler/hoist_updates.py).

[Note: dependences] A line comes after
  - read after write: the producer of each argument, and the last writer of its memory;
  - write after read and write after write: every reader and the last writer of the memory it writes. Leaves of the
  state are donated, and `add` adds in place. Who writes a copy of a leaf, or the memory for its new value, writes the
  leaf.
A transfer reads and writes until its wait: for what comes later both of them do. Lines with a body do what that does.

Transfers over one axis may start in any order, if it is the same on every rank: it is, for all of this is a function of
the program.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fzero.ir.aliases import Views
from fzero.ir.attributes import BufferAttrs
from fzero.ir.ops import COPIES, OPS, STARTS
from fzero.ir.program import Line


def dependences(lines: Sequence[Line], views: Views) -> list[set[int]]:
    """For each line the numbers of those that it must come after; of some that follow from others only these. See
    [Note: dependences].

    Args:
        lines: of a program, or of one body in it: what is made outside is there.
        views: of the whole program.
    """
    before: list[set[int]] = []
    made: dict[str, int] = {}
    started: dict[str, int] = {}
    written: dict[str, int] = {}  # by the value whose memory it is the last line that wrote there
    read: dict[str, list[int]] = defaultdict(list)  # and those that have read it since
    leaf: dict[str, str] = {}  # by a copy, or memory for a new value, what it is of
    for number, line in enumerate(lines):
        start = lines[started[line.args[0]]] if OPS[line.op].waits and line.args[0] in started else None
        touches = [*line.with_body()]
        reads, writes = _touched(touches, start)
        writes += [leaf[w] for w in writes if w in leaf]
        memory = [root for a in reads for root in views.roots(a)]
        overwritten = [root for w in writes for root in views.roots(w)]
        after = {made[a] for a in reads if a in made}
        after.update(written[root] for root in (*memory, *overwritten) if root in written)
        after.update(reader for root in overwritten for reader in read[root])
        before.append(after)
        for root in memory:
            read[root].append(number)
        for root in overwritten:
            written[root], read[root] = number, []
        for x in touches:
            made.update((v.name, number) for v in x.out)
        if line.op in STARTS:
            started[line.out[0].name] = number
        reserved = line.attrs.leaves if isinstance(line.attrs, BufferAttrs) else ()
        sources = STARTS[start.op].sent(start) if start and start.op in COPIES else reserved
        leaf.update((v.name, leaf.get(a, a)) for v, a in zip(line.out, sources, strict=False))
    return before


def _touched(touches: Sequence[Line], start: Line | None) -> tuple[list[str], list[str]]:
    """The values that lines read and write; a wait counts as its transfer."""
    reads = [a for x in touches for a in x.args] + ([*STARTS[start.op].sent(start)] if start else [])
    return reads, [w for x in touches for w in _writes(x)] + ([*start.writes] if start else [])


def scheduled(lines: Sequence[Line], before: Sequence[set[int]], priority: Sequence[Any]) -> list[Line]:
    """The lines in the order of their priorities, as far as dependences allow it: of those that may come next the one
    with the least.

    Args:
        lines: of a program, or of one body in it.
        before: for each line those that it must come after.
        priority: of each line, no two alike.
    """
    left = [len(numbers) for numbers in before]
    after: list[list[int]] = [[] for _ in lines]
    for number, numbers in enumerate(before):
        for i in numbers:
            after[i].append(number)
    ready = [(priority[i], i) for i, num in enumerate(left) if not num]
    heapq.heapify(ready)
    out: list[Line] = []
    while ready:
        _, number = heapq.heappop(ready)
        out.append(lines[number])
        for i in after[number]:
            left[i] -= 1
            if not left[i]:
                heapq.heappush(ready, (priority[i], i))
    assert len(out) == len(lines), "dependences go in a circle"
    return out


def _writes(line: Line) -> Sequence[str]:
    """The values in whose memory a line writes."""
    return (*line.writes, *line.args[: len(line.out)]) if OPS[line.op].in_place else line.writes
