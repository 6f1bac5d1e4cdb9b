"""Verifies the programs of a pipeline's stages against each other, by running their transfers as if each met the other
side's: what is handed from one stage to another arrives in the order in which it is taken there.

A start goes on at once. The wait for a hand returns when its take has started, and the wait for a take when its hand
has: no buffers in between. So a program that passes here ends on any transport with a queue for each direction of two
stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero.errors import VerifyError
from fzero.ir.attributes import HandAttrs, TakeAttrs
from fzero.ir.ops import OPS
from fzero.ir.program import Line, Placement, Program, Value
from fzero.ir.verifier import BUG, shown


class _Moved(NamedTuple):
    """A hand or a take: its number, and the moved value."""

    line: Line
    number: int
    kinds: tuple[tuple[tuple[int, ...], torch.dtype, Placement], ...]


def meeting(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """The programs, if every hand and take of them meet, and no stages wait for each other.

    Raises:
        VerifyError: naming the lines of both stages.
    """
    problems, what = _Meeting(programs).problems()
    if problems:
        raise VerifyError("verify", f"{what} in the programs of {programs[0].name}", problems, BUG)
    return programs


class _Meeting:
    def __init__(self, programs: Sequence[Program]):
        self.programs = programs
        # by who hands and who takes, in order
        self.hands: dict[tuple[int, int], list[_Moved]] = defaultdict(list)
        self.takes: dict[tuple[int, int], list[_Moved]] = defaultdict(list)
        self.events = [self._events(stage, program) for stage, program in enumerate(programs)]

    def _events(self, stage: int, program: Program) -> list[tuple[Line, tuple[int, int], bool, int, bool]]:
        """The starts and waits of a stage: the line, its direction, whether it is of a hand, its place there, and
        whether it is the wait."""
        values, mesh = program.values_by_name, program.mesh
        brought = {line.args[0]: line.out for line in program.lines if OPS[line.op].waits}
        found, under_way = [], {}
        for line in program.lines:
            if isinstance(said := line.attrs, HandAttrs):
                hand = not isinstance(said, TakeAttrs)
                way = (stage, said.peer) if hand else (said.peer, stage)
                moved: Sequence[Value] = [values[a] for a in line.args] if hand else brought.get(line.out[0].name, ())
                queue = (self.hands if hand else self.takes)[way]
                queue.append(_Moved(line, said.number, tuple((v.held(mesh), v.dtype, v.placement) for v in moved)))
                under_way[line.out[0].name] = way, hand, len(queue)
                found.append((line, *under_way[line.out[0].name], False))
            elif line.args and line.args[0] in under_way and OPS[line.op].waits:
                found.append((line, *under_way.pop(line.args[0]), True))
        return found

    def problems(self) -> tuple[list[str], str]:
        """The violations, and their common description."""
        unlike = [x for way in sorted({*self.hands, *self.takes}) for x in self._unlike(way)]
        return (unlike, "hands and takes do not meet") if unlike else (self._stuck(), "stages wait for each other")

    def _unlike(self, way: tuple[int, int]) -> list[str]:
        """The first difference between the values that one stage hands and the values that another takes."""
        of, to = way
        hands, takes = self.hands[way], self.takes[way]
        for hand, take in zip(hands, takes, strict=False):
            if hand[1:] != take[1:]:
                return [f"stage {of} to {to}: {shown(hand.line)}, {hand[1:]}; {shown(take.line)}, {take[1:]}"]
        if len(hands) != len(takes):
            rest = max(hands, takes, key=len)[min(len(hands), len(takes))].line
            return [f"stage {of} to {to}: {shown(rest)} has no other side"]
        return []

    def _stuck(self) -> list[str]:
        """The line at which each stage waits for good."""
        at, started = [0] * len(self.events), defaultdict[tuple[tuple[int, int], bool], int](int)
        moving = True
        while moving:
            moving = False
            for stage, events in enumerate(self.events):
                while at[stage] < len(events):
                    _, way, hand, place, waits = events[at[stage]]
                    if waits and started[way, not hand] < place:
                        break
                    if not waits:
                        started[way, hand] = place
                    at[stage] += 1
                    moving = True
        left = (
            (stage, events[i]) for stage, (events, i) in enumerate(zip(self.events, at, strict=True)) if i < len(events)
        )
        return [
            f"stage {stage} waits for {line.args[0]}, {'which stage' if hand else 'from stage'} {way[hand]}"
            f"{' is to take' if hand else ''}"
            for stage, (line, way, hand, _, _) in left
        ]
