"""When every line of a program runs: a simulation of one rank's queues.

[Note: queues] Functions run one after the other in the queue `compute`. Transfers run in *channels*, each a queue of its own: `gather:data`,
`reduce:data`, `disk`. On an asynchronous device, and to and from a disk, a start puts its transfer in its channel at the moment compute comes to
it; the transfer begins once the channel is free, and a wait holds compute until it is done. On a device that is not, a transfer takes its time where it
is waited for. Time that compute spends waiting is *exposed*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fzero.program.ir import Line, Program
from fzero.schedule.cost import DISK, channel

COMPUTE = "compute"
_ALIKE = 1e-9  # of a turn's seconds: turns that differ by less are one another's repetition


class Event(NamedTuple):
    """Something that took `seconds` in a queue. `line` counts as `Program.walk` does, `turn` is that of the loop around it."""

    queue: str
    name: str
    start: float
    seconds: float
    line: int
    turn: int = 0


@dataclass
class Timeline:
    """What a simulation found; seconds and counts are of the whole step."""

    events: list[Event] = field(default_factory=list)
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    num_transfers: dict[str, int] = field(default_factory=dict)  # by channel, as the next
    busy_seconds: dict[str, float] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)  # by the line that waits
    waited: dict[int, str] = field(default_factory=dict)  # the channel that a line waits for

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())


def simulate(program: Program, seconds: Callable[[Line], float], asynchronous: bool) -> Timeline:
    """The queues of one step.

    Args:
        program: ordered.
        seconds: of one execution of a line; of a start, of its transfer.
        asynchronous: whether transfers progress while the device computes.
    """
    return _Simulation(program, seconds, asynchronous).run()


class _Simulation:
    def __init__(self, program: Program, seconds: Callable[[Line], float], asynchronous: bool):
        self.program, self.asynchronous = program, asynchronous
        self.seconds = [seconds(line) for line, _ in program.walk()]
        self.line_channel = [channel(line) for line, _ in program.walk()]
        self.size = [1 + sum(1 for _ in _inner(line)) for line, _ in program.walk()]
        self.found = Timeline()
        self.clock = 0.0
        self.free: dict[str, float] = {}  # when a channel has done all it was given
        self.moving: dict[str, tuple[str, float]] = {}  # a handle's channel, and when its transfer is done, or how long it will take

    def run(self) -> Timeline:
        self._lines(self.program.lines, 0, 0)
        self.found.step_seconds = max([self.clock, *self.free.values()])
        return self.found

    def _lines(self, lines: Sequence[Line], number: int, turn: int) -> None:
        for line in lines:
            if line.op == "loop":
                self._loop(line, number)
            else:
                self._line(line, number, turn)
            number += self.size[number]

    def _line(self, line: Line, number: int, turn: int) -> None:
        seconds, queue, found = self.seconds[number], self.line_channel[number], self.found
        if queue is not None:
            handle = line.out[0].name
            found.num_transfers[queue] = found.num_transfers.get(queue, 0) + 1
            found.busy_seconds[queue] = found.busy_seconds.get(queue, 0.0) + seconds
            if not self._overlaps(queue):
                self.moving[handle] = queue, seconds
                return
            begins = max(self.clock, self.free.get(queue, 0.0))
            self.free[queue] = begins + seconds
            self.moving[handle] = queue, begins + seconds
            found.events.append(Event(queue, handle, begins, seconds, number, turn))
        elif line.op == "wait":
            queue, done = self.moving.pop(line.args[0])
            overlaps = self._overlaps(queue)
            waiting = max(0.0, done - self.clock) if overlaps else done
            if not overlaps:
                found.events.append(Event(queue, line.args[0], self.clock, done, number, turn))
            found.waited[number] = queue
            found.exposed[number] = found.exposed.get(number, 0.0) + waiting
            self._compute(f"wait {line.args[0]}", waiting, number, turn)
        else:
            found.compute_seconds += seconds
            self._compute(line.fn or line.op, seconds, number, turn)

    def _overlaps(self, queue: str) -> bool:
        return self.asynchronous or queue == DISK

    def _compute(self, name: str, seconds: float, number: int, turn: int) -> None:
        self.found.events.append(Event(COMPUTE, name, self.clock, seconds, number, turn))
        self.clock += seconds

    def _loop(self, loop: Line, number: int) -> None:
        """Turns until one finds the channels as the one before left them: from there on each takes as long as that one."""
        count, found = loop.attrs["count"], self.found
        for turn in range(count):
            begin, before, waits = self.clock, self._busy(), dict(found.exposed)
            compute, transfers, busy = found.compute_seconds, dict(found.num_transfers), dict(found.busy_seconds)
            self._lines(loop.body, number + 1, turn)
            took, left = self.clock - begin, count - turn - 1
            if left and turn and all(abs(after - before.get(q, 0.0)) <= _ALIKE * took for q, after in self._busy().items()):
                found.compute_seconds += left * (found.compute_seconds - compute)
                found.num_transfers = {q: n + left * (n - transfers.get(q, 0)) for q, n in found.num_transfers.items()}
                found.busy_seconds = {q: s + left * (s - busy.get(q, 0.0)) for q, s in found.busy_seconds.items()}
                found.exposed = {n: s + left * (s - waits.get(n, 0.0)) for n, s in found.exposed.items()}
                self._compute(f"{left} more turns", left * took, number, turn + 1)
                self.free = {q: t + left * took for q, t in self.free.items()}
                return

    def _busy(self) -> dict[str, float]:
        """How long each channel will still be busy."""
        return {q: max(0.0, t - self.clock) for q, t in self.free.items()}


def _inner(line: Line) -> Iterator[Line]:
    for x in line.body:
        yield x
        yield from _inner(x)
