"""Orders the actions of a pipeline's stages: the built-in schedules, a user's table, and the estimated time of each
action.

An action (class `Unit`) is the forward or backward of a micro-batch on a stage. In a schedule with weight actions, the
backward computes the gradients that other stages wait for, and the weight action those of parameters
(transforms/split_backward_pass.py). A table contains, for each rank, the order of its actions. Stage s is on rank s mod
p: with `chunks` stages per rank, its chunk is s div p.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from fzero.errors import FzeroValueError
from fzero.transforms.pipeline import UNIT

FORWARD, BACKWARD, WEIGHTS = range(3)
KINDS = "FBW"
"""The letter of each kind of action."""


class Unit(NamedTuple):
    """The forward, backward or weight action of a micro-batch on a stage."""

    kind: int
    micro: int
    stage: int

    def text(self, ranks: int) -> str:
        """The notation of users: `F0`, or `B3.1` for chunk 1 of a rank."""
        chunk = self.stage // ranks
        return f"{KINDS[self.kind]}{self.micro}{f'.{chunk}' if chunk else ''}"


Table = tuple[tuple[Unit, ...], ...]
Message = TypeVar("Message")
"""The values that an action sends to another rank, of any type."""


def table(schedule: str | Sequence[Sequence[str]], ranks: int, chunks: int, micro: int) -> Table:
    """Returns the order of actions of each rank.

    Args:
        schedule: a name, or for each rank the texts of its actions.
        ranks: the number of ranks along the axis of the pipeline.
        chunks: the number of stages per rank.
        micro: the number of micro-batches per step.

    Raises:
        FzeroValueError: a user's table is malformed, or its ranks wait for each other.

    Example:
        >>> [" ".join(u.text(2) for u in order) for order in table("1f1b", 2, 1, 3)]
        ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
        >>> [" ".join(u.text(2) for u in order) for order in table("interleaved", 2, 2, 2)]
        ['F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1', 'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1']
        >>> [" ".join(u.text(2) for u in order) for order in table("zb", 2, 1, 3)]
        ['F0 F1 B0 W0 F2 B1 W1 B2 W2', 'F0 B0 F1 B1 W0 F2 B2 W1 W2']
    """
    if not isinstance(schedule, str):
        found = tuple(_read(order, rank, ranks) for rank, order in enumerate(schedule))
        _check(found, ranks, chunks, micro)
    elif schedule == "zb":
        found = tuple(_zero_bubble(rank, ranks, micro) for rank in range(ranks))
    else:
        found = tuple(_named(schedule, rank, ranks, chunks, micro) for rank in range(ranks))
    # only to raise an error if ranks wait for each other
    when(found, chunks * ranks)
    return found


def _named(schedule: str, rank: int, ranks: int, chunks: int, micro: int) -> tuple[Unit, ...]:
    """Returns one rank's order of actions for a named schedule.

    Interleaved 1F1B runs as many micro-batches as there are ranks through a chunk before it starts the next chunk
    (Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021); in the last round, it runs
    those that are left.
    """
    # Padded with micro-batches that do not exist, so that every round is complete. Their actions
    # are removed at the end.
    padded = -(-micro // ranks) * ranks if schedule == "interleaved" else micro
    rounds = [range(i, min(i + ranks, padded)) for i in range(0, padded, ranks)]
    groups = [(c, m) for r in rounds for c in range(chunks) for m in r]
    forward = [Unit(FORWARD, m, c * ranks + rank) for c, m in groups]
    groups = [(c, m) for r in rounds for c in reversed(range(chunks)) for m in r]
    backward = [Unit(BACKWARD, m, c * ranks + rank) for c, m in groups]
    behind = ranks - rank - 1
    # The forwards before the first backward. For interleaved stages, this is the warm-up of
    # Megatron-LM: 2 (p - rank - 1) + (chunks - 1) p.
    ahead = {"gpipe": len(forward), "1f1b": behind, "interleaved": 2 * behind + (chunks - 1) * ranks}[schedule]
    ahead = min(ahead, len(forward))
    # `zip` stops after the last forward; the remaining `ahead` backwards follow.
    steady = [u for pair in zip(forward[ahead:], backward, strict=False) for u in pair]
    order = (*forward[:ahead], *steady, *backward[len(forward) - ahead :])
    return tuple(u for u in order if u.micro < micro)


def _read(order: Sequence[str], rank: int, ranks: int) -> tuple[Unit, ...]:
    found = [m for text in order if (m := UNIT.fullmatch(text))]
    return tuple(Unit(KINDS.index(m[1]), int(m[2]), int(m[3] or 0) * ranks + rank) for m in found)


def _check(found: Table, ranks: int, chunks: int, micro: int) -> None:
    """Raises if a table lacks actions, repeats them or has too many."""
    problems = [] if len(found) == ranks else [f"{len(found)} orders, and {ranks} ranks along the axis"]
    kinds = range(2 + any(u.kind == WEIGHTS for order in found for u in order))
    for rank, order in enumerate(found if not problems else ()):
        every = {Unit(k, m, c * ranks + rank) for k in kinds for m in range(micro) for c in range(chunks)}
        wrong = {"lacks": every - {*order}, "has besides": {*order} - every}
        wrong["repeats"] = {u for u in order if order.count(u) > 1}
        wrong["has after a later micro-batch of its kind and chunk"] = {
            u
            for i, u in enumerate(order)
            if any(v.micro > u.micro for v in order[:i] if v._replace(micro=u.micro) == u)
        }
        for what, units in wrong.items():
            if units:
                texts = sorted(u.text(ranks) for u in units)
                problems.append(f"rank {rank} {what} {', '.join(texts[:4])}{', …' * (len(texts) > 4)}")
    if problems:
        each = [f"{KINDS[k]}0 to {KINDS[k]}{micro - 1}" for k in kinds]
        fix = f"each rank runs the actions {', '.join(each[:-1])} and {each[-1]} once"
        fix += f", and with chunks, F0.1 to B{micro - 1}.{chunks - 1}" if chunks > 1 else ""
        raise FzeroValueError("pipeline", "the table of actions does not fit the step", problems, fix)


def _zero_bubble(rank: int, ranks: int, micro: int) -> tuple[Unit, ...]:
    """Returns one rank's order of actions for 1F1B with weight actions in its idle time: ZB-H1 of Qi et al., Zero
    Bubble Pipeline Parallelism, 2023.

    The weights of a micro-batch run `rank` backwards later, so that no rank has more micro-batches in flight than the
    first rank has under 1F1B.
    """
    # One forward more than in the warm-up of `_named`, because the loop below begins with a
    # backward.
    ahead = ranks - rank
    order = [Unit(FORWARD, m, rank) for m in range(min(ahead, micro))]
    for m in range(micro):
        order.append(Unit(BACKWARD, m, rank))
        order += [Unit(WEIGHTS, m - rank, rank)] if m >= rank else []
        order += [Unit(FORWARD, m + ahead, rank)] if m + ahead < micro else []
    return (*order, *(Unit(WEIGHTS, m, rank) for m in range(max(micro - rank, 0), micro)))


def when(
    orders: Table, num_stages: int, more: Mapping[Unit, Iterable[Unit]] | None = None
) -> dict[Unit, tuple[float, float]]:
    """Returns the start and end time of each action, which starts as soon as its rank and the actions that it depends
    on are done.

    A backward is assumed to take as long as two forwards or, with weight actions, as one. Any other durations give a
    correct order too.

    Args:
        orders: the table.
        num_stages: the number of stages on all ranks.
        more: further actions that an action depends on, in addition to the preceding one.

    Raises:
        FzeroValueError: ranks wait for each other.
    """
    found: dict[Unit, tuple[float, float]] = {}
    at, clock = [0] * len(orders), [0.0] * len(orders)
    seconds = (1.0, 1.0, 1.0) if any(u.kind == WEIGHTS for order in orders for u in order) else (1.0, 2.0)

    def needs(unit: Unit) -> set[Unit]:
        return {x for x in (_before(unit, num_stages), *(more or {}).get(unit, ())) if x is not None}

    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                unit = order[at[rank]]
                before = needs(unit)
                if not found.keys() >= before:
                    break
                start = max([clock[rank], *(found[x][1] for x in before)])
                clock[rank] = start + seconds[unit.kind]
                found[unit] = start, clock[rank]
                at[rank] += 1
                moving = True
    if stuck := [(r, order[at[r]]) for r, order in enumerate(orders) if at[r] < len(order)]:
        n = len(orders)
        problems = [
            f"rank {r} waits at {u.text(n)} for {b._replace(stage=0).text(n)} of stage {b.stage}"
            for r, u in stuck
            for b in sorted(needs(u) - found.keys())
        ]
        fix = "a forward runs after that of the stage before, a backward after that of the stage after"
        raise FzeroValueError("pipeline", "ranks wait for each other", problems, fix)
    return found


def recv_starts(needed: Sequence[tuple[Message, int]], num_units: int) -> dict[Message, int]:
    """Returns the index of the action before which a rank starts to receive each message of one other rank.

    It is one action before the first one that reads the message, and no later than the receives of messages that are
    sent later.

    Args:
        needed: messages in the order in which they are sent, each with the index of the action that first reads it.
        num_units: the number of actions of the receiving rank.

    Returns:
        The indices in the order of `needed`.

    Example:
        >>> recv_starts([("a", 3), ("b", 2)], 4)
        {'a': 1, 'b': 1}
    """
    found, number = dict[Message, int](), num_units
    for message, first in reversed(needed):
        found[message] = number = max(0, min(number, first - 1))
    return dict(reversed(found.items()))


def send_ends(order: Sequence[Unit], number: int, starts: float, times: Mapping[Unit, tuple[float, float]]) -> int:
    """Returns the index of the action before which a rank waits for the send of its action `number`.

    It is two actions later, or as many more as begin before the receive starts. The number of actions stands for the
    end of the step.

    Args:
        order: the actions of the sending rank.
        number: the index of the sending action among them.
        starts: the time at which the other rank starts to receive, as in `times`.
        times: the result of `when`.
    """
    return next((i for i in range(number + 2, len(order)) if times[order[i]][0] >= starts), len(order))


def _before(unit: Unit, num_stages: int) -> Unit | None:
    """Returns the action of another stage, or of the same stage, that an action depends on."""
    if unit.kind == FORWARD:
        return unit._replace(stage=unit.stage - 1) if unit.stage else None
    if unit.kind == WEIGHTS:
        return unit._replace(kind=BACKWARD)
    if unit.stage == num_stages - 1:
        # The last stage computes the loss, so its backward needs only its own forward.
        return unit._replace(kind=FORWARD)
    return unit._replace(stage=unit.stage + 1)
