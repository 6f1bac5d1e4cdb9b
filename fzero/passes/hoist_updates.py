"""Hoists every optimizer update to directly after the backward that produces its gradients, unless it depends on a
global reduction such as the clipping norm. Gradients need not pile up, and transfers of one block's state overlap the
backward of the next.

Where an update waits, for other ranks or for a host that is not the device, it comes a block later: the device has that
block to run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fzero.program.aliases import Aliases
from fzero.program.ir import Line, Program
from fzero.program.ops import COLLECTIVES, OPS


def hoist_updates(program: Program) -> Program:
    """The program with each line of the optimizer, and of what else follows the last block, right after the last line
    that it must come after, or, of the optimizer, a block later."""
    optimizer = next((i for i, line in enumerate(program.lines) if line.by == "optimizer"), None)
    if optimizer is None:
        return program
    first = next(
        (i + 1 for i in reversed(range(optimizer)) if program.lines[i].body or program.lines[i].block is not None),
        optimizer,
    )
    after = _Dependencies(program)
    slots: list[list[Line]] = [[line] for line in program.lines[:first]]  # a line, and those that come right after it
    for i, line in enumerate(program.lines[:first]):
        after.ran(line, i)
    head: list[Line] = []
    later = _next_blocks(program.lines[:first])
    travels = not program.mesh.unified_memory and any(leaf.layout.tier != "device" for leaf in program.leaves.values())
    for line in program.lines[first:]:
        at = after.needed(line)
        if at >= 0 and line.by == "optimizer" and (travels or after.arrives(line, at)):
            at = later[at]
        (slots[at] if at >= 0 else head).append(line)
        after.ran(line, at)
    return replace(program, lines=(*head, *(line for slot in slots for line in slot)))


def _next_blocks(lines: Sequence[Line]) -> list[int]:
    """For each line where the next block after it has run, and what it made is on its way to the other ranks; at the
    end the last line."""
    out, found = [len(lines) - 1] * len(lines), len(lines) - 1
    for i in reversed(range(len(lines))):
        out[i] = found
        micro, count = lines[i].micro or (0, 1)
        if lines[i].is_backward and micro == count - 1:
            found = i
            while found + 1 < len(lines) and lines[found + 1].op in ("cast", "add", *COLLECTIVES):
                found += 1
    return out


class _Dependencies:
    """After which line another may run: what it reads has been made, and nobody reads any more, or moves, what it
    writes."""

    def __init__(self, program: Program):
        self._aliases = Aliases(program.functions)
        self._of: dict[str, set[str]] = {}  # whose memory a value may lie in
        self._made: dict[str, int] = {}
        self._read: dict[str, int] = {}  # the last line that reads a value's memory
        self._written: dict[str, int] = {}
        self._started: dict[str, Line] = {}
        self._arriving: set[str] = set()  # what waits for other ranks hand out

    def arrives(self, line: Line, at: int) -> bool:
        """Whether a line reads what comes from other ranks right there."""
        return any(a in self._arriving and self._made[a] == at for a in _read(line))

    def needed(self, line: Line) -> int:
        at = [-1, *(self._made.get(a, -1) for a in _read(line))]
        at += [self._written.get(root, -1) for a in _read(line) for root in self._roots(a)]
        at += [self._read.get(root, -1) for w in _written(line) for root in self._roots(w)]
        return max(at)

    def ran(self, line: Line, at: int) -> None:
        if line.op in COLLECTIVES:
            self._started[line.out[0].name] = line
        # a transfer reads until its wait
        moved = self._started[line.args[0]].args if OPS[line.op].waits and line.args[0] in self._started else ()
        self._arriving.update(v.name for v in line.out if moved)
        for name in (*_read(line), *moved):
            for root in self._roots(name):
                self._read[root] = max(self._read.get(root, -1), at)
        for x in (line, *line.body):
            shares = dict(self._aliases.of(x))
            for value in x.out:
                self._made[value.name] = at
                self._of[value.name] = {value.name, *(self._roots(shares[value.name]) if value.name in shares else ())}
        for name in _written(line):
            for root in self._roots(name):
                self._written[root] = at

    def _roots(self, name: str) -> set[str]:
        return self._of.get(name, {name})


def _read(line: Line) -> tuple[str, ...]:
    return (*line.args, *(a for x in line.body for a in x.args))


def _written(line: Line) -> tuple[str, ...]:
    return (*line.writes, *(w for x in line.body for w in x.writes))
