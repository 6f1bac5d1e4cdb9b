"""Finds which ops of a program must come after which, and sorts ops accordingly: a list scheduler.

The dependences follow from the op table: what each op reads, what it writes, and which values share memory. The
passes decide where an op is best placed within these limits (compiler/overlap.py, compiler/hoist_updates.py).

[Note: dependences] An op comes after
  - read after write: the producer of each argument, and the last writer of its memory;
  - write after read and write after write: every reader and the last writer of the memory that it writes. Tensors of
    the state are donated, and `add` adds in place. An op that writes a copy of a tensor of the state, or the buffer
    for its new value, counts as writing that tensor.
A transfer reads and writes until its wait, so for later ops both the start and the wait do. An op with a body depends
on everything that its body depends on.

Transfers over one axis may start in any order that is the same on every rank. It is, because the order is a function
of the program.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fzero.ir.aliases import Views
from fzero.ir.attributes import BufferAttrs
from fzero.ir.ops import OPS, STARTS
from fzero.ir.program import Instruction


def dependences(ops: Sequence[Instruction], views: Views) -> list[set[int]]:
    """Returns for each op the indices of the ops that it must come after. Dependences that follow from others may be
    left out. See [Note: dependences].

    Args:
        ops: the ops of a program, or of one body in it. Values that are made outside exist already.
        views: the views of the complete program.
    """
    before: list[set[int]] = []
    made: dict[str, int] = {}
    started: dict[str, int] = {}
    written: dict[str, int] = {}  # by value: the last op that wrote to its memory
    read: dict[str, list[int]] = defaultdict(list)  # by value: the ops that have read its memory since then
    leaf: dict[str, str] = {}  # by copy or buffer for a new value: the tensor of the state it belongs to
    for number, op in enumerate(ops):
        start = ops[started[op.args[0]]] if op.is_wait and op.args[0] in started else None
        touches = [*op.with_body()]
        reads, writes = _touched(touches, start)
        writes += filter(None, map(leaf.get, writes))
        memory = [root for a in reads for root in views.roots(a)]
        overwritten = [root for w in writes for root in views.roots(w)]
        makers = [*map(made.get, reads), *map(written.get, (*memory, *overwritten))]
        before.append({i for i in makers if i is not None}.union(*(read[root] for root in overwritten)))
        for root in memory:
            read[root].append(number)
        for root in overwritten:
            # Later ops need to follow only this writer, which follows the earlier readers.
            written[root], read[root] = number, []
        for x in touches:
            made.update((v.name, number) for v in x.out)
        if op.op in STARTS:
            started[op.out[0].name] = number
        leaf.update((v.name, leaf.get(a, a)) for v, a in zip(op.out, _held(op, start), strict=False))
    return before


def _held(op: Instruction, start: Instruction | None) -> Sequence[str]:
    """Returns the values of which the results of an op are copies, or buffers for new values."""
    if start and start.tiers:
        return STARTS[start.op].sent(start)
    return op.attrs.leaves if isinstance(op.attrs, BufferAttrs) else ()


def _touched(touches: Sequence[Instruction], start: Instruction | None) -> tuple[list[str], list[str]]:
    """Returns the values that ops read and write. A wait counts as its transfer."""
    reads = [a for x in touches for a in x.args] + ([*STARTS[start.op].sent(start)] if start else [])
    return reads, [w for x in touches for w in _writes(x)] + ([*start.writes] if start else [])


def scheduled(ops: Sequence[Instruction], before: Sequence[set[int]], priority: Sequence[Any]) -> list[Instruction]:
    """Returns the ops sorted by priority, as far as the dependences allow: of the ops that may come next, the one
    with the lowest priority value is chosen.

    Args:
        ops: the ops of a program, or of one body in it.
        before: for each op, the indices of the ops that it must come after.
        priority: the priority of each op. No two are equal.
    """
    left = [len(numbers) for numbers in before]
    after: list[list[int]] = [[] for _ in ops]
    for number, numbers in enumerate(before):
        for i in numbers:
            after[i].append(number)
    ready = [(priority[i], i) for i, num in enumerate(left) if not num]
    heapq.heapify(ready)
    out: list[Instruction] = []
    while ready:
        _, number = heapq.heappop(ready)
        out.append(ops[number])
        for i in after[number]:
            left[i] -= 1
            if not left[i]:
                heapq.heappush(ready, (priority[i], i))
    assert len(out) == len(ops), "dependencies form a cycle"
    return out


def _writes(op: Instruction) -> Sequence[str]:
    """Returns the values in whose memory an op writes."""
    return (*op.writes, *op.args[: len(op.out)]) if OPS[op.op].in_place else op.writes
