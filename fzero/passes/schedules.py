"""Orders the units of a pipeline's stages: the tables that ship, tables of a user, and when each unit runs.

A unit is the forward or backward of a micro-batch on a stage. A table has for each rank the order of its units. Stage s
is on rank s mod p: with `chunks` stages a rank, the chunk of a stage is s div p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fzero.errors import FzeroValueError
from fzero.transforms.pipeline import UNIT

FORWARD, BACKWARD = 1.0, 2.0
"""The seconds of a unit, of which the order of transfers is worked out. Any numbers above 0 give a right order."""


class Unit(NamedTuple):
    """The forward or backward of a micro-batch on a stage."""

    backward: bool
    micro: int
    stage: int

    def text(self, ranks: int) -> str:
        """As a user writes it: `F0`, or `B3.1` for the chunk 1 of a rank."""
        chunk = self.stage // ranks
        return f"{'FB'[self.backward]}{self.micro}{f'.{chunk}' if chunk else ''}"


Table = tuple[tuple[Unit, ...], ...]


def table(schedule: str | Sequence[Sequence[str]], ranks: int, chunks: int, micro: int) -> Table:
    """The order of units of each rank.

    Args:
        schedule: a name, or for each rank the texts of its units.
        ranks: along the axis of the pipeline.
        chunks: stages of a rank.
        micro: micro-batches of a step.

    Raises:
        FzeroValueError: a user's table that is not one, or whose ranks wait for each other.

    Example:
        >>> [" ".join(u.text(2) for u in order) for order in table("1f1b", 2, 1, 3)]
        ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
        >>> [" ".join(u.text(2) for u in order) for order in table("interleaved", 2, 2, 2)]
        ['F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1', 'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1']
    """
    if not isinstance(schedule, str):
        found = tuple(_read(order, rank, ranks) for rank, order in enumerate(schedule))
        _check(found, ranks, chunks, micro)
    else:
        found = tuple(_named(schedule, rank, ranks, chunks, micro) for rank in range(ranks))
    when(found, chunks * ranks)
    return found


def _named(schedule: str, rank: int, ranks: int, chunks: int, micro: int) -> tuple[Unit, ...]:
    """Interleaved 1F1B runs as many micro-batches as there are ranks through a chunk before the next chunk (Narayanan
    et al., Efficient large-scale language model training on GPU clusters, 2021); of the last round, what there is."""
    padded = -(-micro // ranks) * ranks if schedule == "interleaved" else micro
    rounds = [range(i, min(i + ranks, padded)) for i in range(0, padded, ranks)]
    groups = [(c, m) for r in rounds for c in range(chunks) for m in r]
    forward = [Unit(False, m, c * ranks + rank) for c, m in groups]
    groups = [(c, m) for r in rounds for c in reversed(range(chunks)) for m in r]
    backward = [Unit(True, m, c * ranks + rank) for c, m in groups]
    behind = ranks - rank - 1
    ahead = {"gpipe": len(forward), "1f1b": behind, "interleaved": 2 * behind + (chunks - 1) * ranks}[schedule]
    ahead = min(ahead, len(forward))
    steady = [u for pair in zip(forward[ahead:], backward, strict=False) for u in pair]
    order = (*forward[:ahead], *steady, *backward[len(forward) - ahead :])
    return tuple(u for u in order if u.micro < micro)


def _read(order: Sequence[str], rank: int, ranks: int) -> tuple[Unit, ...]:
    found = [m for text in order if (m := UNIT.fullmatch(text))]
    return tuple(Unit(m[1] == "B", int(m[2]), int(m[3] or 0) * ranks + rank) for m in found)


def _check(found: Table, ranks: int, chunks: int, micro: int) -> None:
    """Raises where a table lacks units, or has them twice or too many."""
    problems = [] if len(found) == ranks else [f"{len(found)} orders, and {ranks} ranks along the axis"]
    for rank, order in enumerate(found if not problems else ()):
        every = {Unit(b, m, c * ranks + rank) for b in (False, True) for m in range(micro) for c in range(chunks)}
        wrong = {"lacks": every - {*order}, "has besides": {*order} - every}
        wrong["repeats"] = {u for u in order if order.count(u) > 1}
        wrong["has behind a later micro-batch of its kind and chunk"] = {
            u
            for i, u in enumerate(order)
            if any(v.micro > u.micro for v in order[:i] if v._replace(micro=u.micro) == u)
        }
        for what, units in wrong.items():
            if units:
                texts = sorted(u.text(ranks) for u in units)
                problems.append(f"rank {rank} {what} {', '.join(texts[:4])}{', …' * (len(texts) > 4)}")
    if problems:
        fix = f"each rank runs the units F0 to F{micro - 1} and B0 to B{micro - 1} once"
        fix += f", and with a chunk behind, F0.1 to B{micro - 1}.{chunks - 1}" if chunks > 1 else ""
        raise FzeroValueError("pipeline", "the table of units does not fit the step", problems, fix)


def when(orders: Table, num_stages: int) -> dict[Unit, tuple[float, float]]:
    """The start and the end of each unit, each as soon as its rank and the units before it on other stages are done.

    Raises:
        FzeroValueError: ranks wait for each other.
    """
    found: dict[Unit, tuple[float, float]] = {}
    at, clock = [0] * len(orders), [0.0] * len(orders)
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                unit = order[at[rank]]
                before = _before(unit, num_stages)
                if before is not None and before not in found:
                    break
                start = max(clock[rank], found[before][1] if before is not None else 0.0)
                clock[rank] = start + (BACKWARD if unit.backward else FORWARD)
                found[unit] = start, clock[rank]
                at[rank] += 1
                moving = True
    if stuck := [(r, order[at[r]]) for r, order in enumerate(orders) if at[r] < len(order)]:
        n, needs = len(orders), [(r, u, b) for r, u in stuck if (b := _before(u, num_stages))]
        problems = [
            f"rank {r} waits at {u.text(n)} for {b._replace(stage=0).text(n)} of stage {b.stage}" for r, u, b in needs
        ]
        fix = "a forward runs behind that of the stage before, a backward behind that of the stage after"
        raise FzeroValueError("pipeline", "ranks wait for each other", problems, fix)
    return found


def _before(unit: Unit, num_stages: int) -> Unit | None:
    """The unit of another stage, or of its own, that a unit needs."""
    if not unit.backward:
        return unit._replace(stage=unit.stage - 1) if unit.stage else None
    if unit.stage == num_stages - 1:
        return unit._replace(backward=False)
    return unit._replace(stage=unit.stage + 1)
