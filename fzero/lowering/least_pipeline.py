"""Simulates the units of a pipeline with the hands between its stages, without a program.

The order, the starts of takes and the waits are those of programs (passes/schedules.py), the links those of
plan/timeline.py. Given the least seconds of each unit and hand, the step takes no less.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fzero.passes.schedules import BACKWARD, FORWARD, Table, Unit, hand_ends, table, take_starts, when


class StageSeconds(NamedTuple):
    """The seconds of each kind of unit on a stage; weights are none where a backward makes them."""

    forward: float
    backward: float
    weights: float = 0.0


class StageEnd(NamedTuple):
    """The times at which a stage may have its first whole gradient, of all micro-batches, and at which it is done. The
    last stage has gradients of the loss in its forward."""

    gradient: float
    ends: float


def simulate_units(
    schedule: str, micro: int, stages: Sequence[StageSeconds], hands: tuple[float, float]
) -> list[StageEnd]:
    """The end of each stage.

    Args:
        schedule: its name, of one stage a rank.
        micro: micro-batches.
        stages: seconds of one micro-batch.
        hands: seconds in which values reach the next stage, and gradients the one before.
    """
    run = _UnitsInTime(_plan(schedule, len(stages), micro), stages, hands)
    ranks = [run.rank(n) for n in range(len(stages))]
    found: dict[int, StageEnd] = {}
    while len(found) < len(ranks):
        for n, rank in enumerate(ranks):
            if n not in found and (end := next(rank)) is not None:
                found[n] = end
    return [found[n] for n in range(len(ranks))]


class _Plan(NamedTuple):
    """The order of units; by rank and number of a unit, the units of others whose values it starts to take before, and
    its own whose hands it waits for."""

    order: Table
    takes: tuple[dict[int, list[Unit]], ...]
    waits: tuple[dict[int, list[Unit]], ...]


@functools.lru_cache(maxsize=64)
def _plan(schedule: str, ranks: int, micro: int) -> _Plan:
    order = table(schedule, ranks, 1, micro)
    times, index = when(order, ranks), {unit: i for units in order for i, unit in enumerate(units)}
    takes = tuple(defaultdict[int, list[Unit]](list) for _ in order)
    waits = tuple(defaultdict[int, list[Unit]](list) for _ in order)
    for rank, units in enumerate(order):
        for kind, to in ((FORWARD, rank + 1), (BACKWARD, rank - 1)):
            if not 0 <= to < ranks:
                continue
            handed = [(u, index[u._replace(stage=to)]) for u in units if u.kind == kind]
            for unit, number in take_starts(handed, len(order[to])).items():
                takes[to][number].append(unit)
                waits[rank][hand_ends(units, index[unit], times[order[to][number]][0], times)].append(unit)
    return _Plan(order, takes, waits)


class _UnitsInTime:
    """The hands of all ranks: when their first side started, when they are done, and when each direction is free."""

    def __init__(self, plan: _Plan, stages: Sequence[StageSeconds], hands: tuple[float, float]):
        self.plan, self.stages, self.hands = plan, stages, hands
        self.begun: dict[Unit, float] = {}
        self.done: dict[Unit, float] = {}
        self.free: dict[tuple[int, int], float] = defaultdict(float)

    def rank(self, n: int) -> Iterator[StageEnd | None]:
        """Runs the units of a rank: None where it waits for another one, at last its end."""
        clock = gradient = 0.0
        order, takes, waits = self.plan.order[n], self.plan.takes[n], self.plan.waits[n]
        for number, unit in enumerate(order):
            for taken in takes.get(number, ()):
                self._start(taken, clock)
            before = unit._replace(stage=n + (-1 if unit.kind == FORWARD else 1))
            needed = [*waits.get(number, ())]
            if unit.kind in (FORWARD, BACKWARD) and 0 <= before.stage < len(self.stages):
                needed.append(before)
            for one in needed:
                while one not in self.done:
                    yield None
                clock = max(clock, self.done[one])
            if unit.kind == (FORWARD if n + 1 == len(self.stages) else BACKWARD):
                gradient = clock
            clock += self.stages[n][unit.kind]
            to = n + (1 if unit.kind == FORWARD else -1)
            if unit.kind in (FORWARD, BACKWARD) and 0 <= to < len(self.stages):
                self._start(unit, clock)
        for one in waits.get(len(order), ()):
            while one not in self.done:
                yield None
            clock = max(clock, self.done[one])
        yield StageEnd(gradient, clock)

    def _start(self, unit: Unit, now: float) -> None:
        """Starts one side of the hand of a unit's values."""
        if unit not in self.begun:
            self.begun[unit] = now
            return
        way = unit.kind, unit.stage
        self.free[way] = max(now, self.begun[unit], self.free[way]) + self.hands[unit.kind]
        self.done[unit] = self.free[way]


__all__ = ["StageEnd", "StageSeconds", "simulate_units"]
