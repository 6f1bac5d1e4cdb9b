"""Looks after the ranks of a run: says which are slower than the others (`fz.Health`).

It looks at numbers that are there anyway, and does nothing to a state.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fzero.arguments import python_numbers
from fzero.mesh import Mesh
from fzero.ranks.notes import Notes

SLOWER = 1.3  # times the median that a slow rank works
_IN_A_ROW = 3  # windows


class Finding(NamedTuple):
    """Something found wrong with a run.

    Attributes:
        kind: "straggler"; "slot": a kept state that changed in memory; "sent": one that came to another rank as another
            than was kept; "replay": a step that came to another result when it was done again.
        batch: how many batches the run had seen.
        ranks: which it is about; none if that is not known, or it is about all of them.
        text: what was logged.

    Example:
        >>> from fzero.elastic.health import Finding
        >>> Finding("straggler", 300, (5,), "rank 5 (node-b) takes 1.42 times the median").ranks
        (5,)
    """

    kind: str
    batch: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Health:
    """The care that a run takes of its health: `fz.run(main, health=fz.Health(...))`. What is found is logged, and in
    `run.health`. docs/elastic.md says what each costs.

    Args:
        stragglers: of so many steps each rank tells the others how long it worked, its waits left out; one that works
            1.3 times the median three times in a row is named. None: they do not.
        replay: one of so many steps is done again by `run.step`, from the state kept before it, and must come to the
            same bits. None: none is.
        replicas: of so many steps `run.step` compares what ranks hold in common (`check_replicas`). None: never.
        sent: of so many states one that ranks sent each other (`fz.redundant`) is compared with what their owners kept.
            None: none is.

    Example:
        >>> import fzero as fz
        >>> fz.Health(replay=100).stragglers
        50
        >>> fz.run(lambda run: run.health, health=fz.Health(stragglers=None), device="cpu")
        []
    """

    stragglers: int | None = 50
    replay: int | None = None
    replicas: int | None = None
    sent: int | None = 50

    def __post_init__(self) -> None:
        vars(self).update(python_numbers(vars(self)))  # a frozen dataclass forbids plain assignment

    def problems(self) -> list[str]:
        """A line for each argument that is invalid."""
        return [
            f"health: {name}={value!r}: must be a whole number of at least 1, or None"
            for name in ("stragglers", "replay", "replicas", "sent")
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < 1)
        ]


class Pace:
    """Tells the ranks of a mesh how long each of them works, off the path of their steps: notes go through the store,
    and are read a window later, when all have come.

    Args:
        mesh: of all ranks.
        every: steps of a window.

    Attributes:
        alike: groups of ranks that have the same work, such as those of one stage of a pipeline. A rank is compared
            with its group.

    Communication: of so many steps a note of about 100 bytes to the store, and those of all ranks from it.
    """

    def __init__(self, mesh: Mesh, every: int):
        self._mesh, self._every, self._notes = mesh, every, Notes(mesh.store, "fzero/health", mesh.rank)
        self._steps = self._window = 0
        self._began, self._slept = 0.0, dict[int | None, float]()
        self._in_a_row: dict[int, int] = {}
        self.alike: Sequence[Sequence[int]] = [range(mesh.size)]

    def step(self, batch: int) -> list[Finding]:
        """Called before each step. The same on every rank."""
        self._steps += 1
        if self._steps == 2:  # the first one makes programs: it is in no window
            self._begin()
        elif self._steps > 2 and (self._steps - 2) % self._every == 0:
            return self._turn(batch)
        return []

    def _begin(self) -> None:
        self._began, self._slept = time.monotonic(), dict(slept(self._mesh))

    def _turn(self, batch: int) -> list[Finding]:
        """Says how this window was, and reads how the last but one was for all."""
        seconds = time.monotonic() - self._began
        waited = {peer: s - self._slept.get(peer, 0.0) for peer, s in slept(self._mesh).items()}
        note = {
            "worked": seconds - sum(waited.values()),
            "on": {peer: round(s, 4) for peer, s in waited.items() if peer is not None and s > 0},
            "host": socket.gethostname(),
        }
        self._notes.write(self._window, note)
        if self._window > 1:
            self._notes.clear(self._window - 2)
        self._window += 1
        self._begin()
        last, ranks = self._window - 2, range(self._mesh.size)
        if self._window < 2 or not self._notes.come(
            last, ranks
        ):  # ranks of a loop that takes no steps can be far apart
            return []
        return self._judge([*self._notes.read(last, ranks, dict[str, Any]).values()], batch)

    def _judge(self, notes: list[dict[str, Any]], batch: int) -> list[Finding]:
        found = []
        medians = {r: statistics.median_low(notes[i]["worked"] for i in ranks) for ranks in self.alike for r in ranks}
        for rank, note in enumerate(notes):
            median = medians[rank]
            times = note["worked"] / median if median > 0 else 1.0
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if times > SLOWER else 0
            if self._in_a_row[rank] == _IN_A_ROW:
                others = sum(other["on"].get(str(rank), 0.0) for other in notes)
                text = f"rank {rank} ({note['host']}) works {times:.2f} times as long as the median rank"
                text += f", {note['worked'] / self._every:.3g} s a step; the others waited {others:.3g} s for it"
                found.append(Finding("straggler", batch, (rank,), text))
        return found


def slept(mesh: Mesh) -> Mapping[int | None, float]:
    """The seconds that this rank has waited on the host for others, by rank; None: it is not known for which."""
    found: dict[int | None, float] = dict(getattr(mesh.context.transport, "slept", {}))
    found[None] = found.get(None, 0.0) + mesh.turns.slept
    return found
