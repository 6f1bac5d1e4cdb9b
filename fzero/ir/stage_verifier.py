"""Verifies the programs of a pipeline's stages against each other, by simulating their transfers: the values that one
stage sends arrive in the order in which another stage receives them.

A start returns at once. The wait for a send returns when the matching receive has started, and the wait for a receive
when the matching send has started: there are no buffers in between. So a program that passes this check terminates on
any transport that has a queue for each direction between two stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.errors import VerifyError
from fzero.ir.attributes import SendAttrs
from fzero.ir.program import Instruction, Program, Value
from fzero.ir.verifier import BUG, shown
from fzero.sharding.placements import MeshPlacement


class _Moved(NamedTuple):
    """A send or a receive: its op and number, and the shape, dtype and placement of each moved value."""

    op: Instruction
    number: int
    kinds: tuple[tuple[tuple[int, ...], torch.dtype, MeshPlacement], ...]


def meeting(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Returns the programs, if all their sends and receives match and no stages deadlock.

    Raises:
        VerifyError: naming the ops of both stages.
    """
    problems, what = _Meeting(programs).problems()
    if problems:
        raise VerifyError("verify", f"{what} in the programs of {programs[0].name}", problems, BUG)
    return programs


class _Meeting:
    """The sends and receives of all stages, by direction, and the order of the starts and waits of each stage."""

    def __init__(self, programs: Sequence[Program]):
        self.programs = programs
        # by the sending and the receiving stage, in order
        self.sends: dict[tuple[int, int], list[_Moved]] = defaultdict(list)
        self.recvs: dict[tuple[int, int], list[_Moved]] = defaultdict(list)
        self.events = [self._events(stage, program) for stage, program in enumerate(programs)]

    def _events(self, stage: int, program: Program) -> list[tuple[Instruction, tuple[int, int], bool, int, bool]]:
        """Returns the starts and waits of a stage: the op, its direction, whether it belongs to a send, its position
        in the queue, and whether it is the wait.
        """
        values, mesh = program.values_by_name, program.mesh
        brought = {op.args[0]: op.out for op in program.instructions if op.is_wait}
        found, under_way = [], {}
        for op in program.instructions:
            if isinstance(said := op.attrs, SendAttrs):
                send = op.op == "send_start"
                way = (stage, said.peer) if send else (said.peer, stage)
                moved: Sequence[Value] = [values[a] for a in op.args] if send else brought.get(op.out[0].name, ())
                queue = (self.sends if send else self.recvs)[way]
                queue.append(_Moved(op, said.number, tuple((v.local_shape(mesh), v.dtype, v.placement) for v in moved)))
                under_way[op.out[0].name] = way, send, len(queue)
                found.append((op, *under_way[op.out[0].name], False))
            elif op.args and op.args[0] in under_way and op.is_wait:
                found.append((op, *under_way.pop(op.args[0]), True))
        return found

    def problems(self) -> tuple[list[str], str]:
        """Returns the violations, and a common description of them."""
        unlike = [x for way in sorted({*self.sends, *self.recvs}) for x in self._unlike(way)]
        return (unlike, "sends and receives do not match") if unlike else (self._stuck(), "stages wait for each other")

    def _unlike(self, way: tuple[int, int]) -> list[str]:
        """Returns the first difference between the values that one stage sends and the values that another receives."""
        of, to = way
        sends, recvs = self.sends[way], self.recvs[way]
        for send, recv in zip(sends, recvs, strict=False):
            if send[1:] != recv[1:]:
                return [f"stage {of} to {to}: {shown(send.op)}, {send[1:]}; {shown(recv.op)}, {recv[1:]}"]
        if len(sends) != len(recvs):
            rest = max(sends, recvs, key=len)[min(len(sends), len(recvs))].op
            return [f"stage {of} to {to}: {shown(rest)} has no counterpart"]
        return []

    def _stuck(self) -> list[str]:
        """Returns the op at which each stage waits forever."""
        at, started = [0] * len(self.events), defaultdict[tuple[tuple[int, int], bool], int](int)
        moving = True
        while moving:
            moving = False
            for stage, events in enumerate(self.events):
                while at[stage] < len(events):
                    _, way, send, place, waits = events[at[stage]]
                    # Transfer n of a direction can be waited for once the other side has started n
                    # transfers.
                    if waits and started[way, not send] < place:
                        break
                    if not waits:
                        started[way, send] = place
                    at[stage] += 1
                    moving = True
        left = (
            (stage, events[i]) for stage, (events, i) in enumerate(zip(self.events, at, strict=True)) if i < len(events)
        )
        return [
            f"stage {stage} waits for {op.args[0]}, {'which stage' if send else 'from stage'} {way[send]}"
            f"{' is to receive it' if send else ''}"
            for stage, (op, way, send, _, _) in left
        ]
