"""The order of lines: a transfer starts ahead of the line that needs it and is waited for as late as it may.

The rule of this release keeps at most two blocks' gathered parameters alive: the gather for a block starts right before the block ahead of it
runs. A reduction is waited for one block later. Deterministic, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fzero.program.ir import TRANSFERS, Line, Program


def order(program: Program) -> Program:
    """The program with every start and wait in its place."""
    state = set(program.leaves)

    def visit(lines: Sequence[Line]) -> tuple[Line, ...]:
        lines = [replace(x, body=visit(x.body)) if x.body else x for x in lines]
        return tuple(_pair_updates(_sink_waits(_raise_gathers(lines, state))))

    return replace(program, lines=visit(program.lines))


def _is_block(line: Line) -> bool:
    return line.op == "call" and "joint" in line.attrs


def _raise_gathers(lines: Sequence[Line], state: set[str]) -> list[Line]:
    """Each gather to right before the block ahead of the one it is for, or to where the last of its inputs is made.

    Code between blocks that reads gathered parameters is a block too, here.
    """
    gathers = {v.name for x in lines if x.op == "all_gather_start" for v in x.out}
    gathered = {v.name for x in lines if x.op == "wait" and x.args[0] in gathers for v in x.out}
    out: list[Line] = []
    for line in lines:
        if line.op != "all_gather_start":
            out.append(line)
            continue
        makers = [x for x in out if any(v.name in line.args for v in x.out)]
        carried = [x for x in makers if x.op == "cast" and x.args[0] in state]  # casts of shards travel with their gather
        rest = [x for x in out if x not in carried]
        ready = max((i + 1 for i, x in enumerate(rest) if any(v.name in line.args for v in x.out) or set(x.writes) & set(line.args)), default=0)
        blocks = [i for i, x in enumerate(rest) if _is_block(x) or (x.op == "call" and not gathered.isdisjoint(x.args))]
        written = any(set(x.writes) & set(line.args) for x in rest)
        at = ready if written else max(ready, blocks[-1] if blocks else len(rest))
        out = [*rest[:at], *carried, line, *rest[at:]]
    return out


def _sink_waits(lines: Sequence[Line]) -> list[Line]:
    """Each wait to its first reader, a reduction's to one block later at most, that its buffers do not pile up."""
    reduced = {v.name for x in lines if x.op == "reduce_scatter_start" for v in x.out}
    scalars = {v.name for x in lines if x.op in TRANSFERS for v in x.out} - reduced
    out: list[Line] = []
    held: list[tuple[Line, int]] = []  # a wait, and how many blocks may still pass it
    for line in lines:
        if line.op == "wait":
            held.append((line, 1 if line.args[0] in reduced else 1_000_000 if line.args[0] in scalars else 0))
            continue
        due = [w for w, left in held if _reads(line, w) or (left == 0 and _is_block(line) and w.args[0] in reduced)]
        out += due
        held = [(w, left - (_is_block(line) and w.args[0] in reduced)) for w, left in held if w not in due]
        out.append(line)
    return out + [w for w, _ in held]


def _pair_updates(lines: Sequence[Line]) -> list[Line]:
    """New parameters gathered after an update: each is put in place while the next one travels, so that two blocks' are alive and not all."""
    targets = {x.args[1]: x for x in lines if x.op == "assign"}
    waits = {x.args[0]: x for x in lines if x.op == "wait" and all(v.name in targets for v in x.out)}
    starts = [x for x in lines if x.op == "all_gather_start" and x.out[0].name in waits]
    finish: dict[int, list[Line]] = {}  # start -> what is done right after it
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        wait = waits[start.out[0].name]
        finish.setdefault(id(following), []).extend([wait, *(targets[v.name] for v in wait.out)])
    moved = {id(x) for group in finish.values() for x in group}
    out: list[Line] = []
    for line in lines:
        if id(line) not in moved:
            out.append(line)
            out += finish.get(id(line), []) if line.op == "all_gather_start" else []
    return out + finish.get(id(None), [])


def _reads(line: Line, wait: Line) -> bool:
    names = {v.name for v in wait.out}
    return bool(names & set(line.args)) or any(_reads(x, wait) for x in line.body)
