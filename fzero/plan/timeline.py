"""Simulates the queues of one rank: the start and the end of every line of a program.

[Note: queues] Functions run one after the other in the queue `compute`. Transfers run in *channels*, each a queue of
its own: `gather:data`, `reduce:data`, `to_host`, `to_device`, and `disk`, whose reads and writes share one device.
Gathers and reductions over one axis share its link: one runs after the other, in the order of their starts, as if each
had it to itself. On an asynchronous device, and to and from a disk, a start queues its transfer in a channel when
compute reaches it. The transfer begins once the channel is free, and a wait holds compute until it is done. On a device
that is not, a transfer takes its time where it is waited for. Time that compute spends waiting is *exposed*.

[Note: the host's thread] On an asynchronous device one thread of the host tells the device what to do. Issuing takes no
time, and three things hold it: a function on the host (the queue `host`), a wait for `disk`, and a wait for `to_host`
unless the device alone waits. Later lines begin no sooner than the thread is free again; earlier work of the device
goes on meanwhile. If the device runs out of work, the time is exposed time of the queue that holds the thread.

[Note: stages in time] The stages of a pipeline are simulated together. What one hands another moves, on any device,
once both have started and the direction between the two is free: each direction of two stages is a link of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fzero.ir.attributes import HandAttrs, TakeAttrs, WaitAttrs
from fzero.ir.ops import OPS
from fzero.ir.program import Line, Program
from fzero.plan.cost import DISK, HOST, channel, on_host

COMPUTE = "compute"
_ALIKE = 1e-9  # of a turn's seconds: turns that differ by less are one another's repetition


class Event(NamedTuple):
    """Something that took `seconds` in a queue. `line` counts as `Program.walk` does, `turn` is that of the loop around
    it."""

    queue: str
    name: str
    start: float
    seconds: float
    line: int
    turn: int = 0


@dataclass
class Timeline:
    """The result of a simulation; seconds and counts are of the whole step."""

    events: list[Event] = field(default_factory=list)
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    num_transfers: dict[str, int] = field(default_factory=dict)  # by channel, as the next; of `host`, functions
    busy_seconds: dict[str, float] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)  # by the line that waits
    waited: dict[int, str] = field(default_factory=dict)  # the channel that a line waits for
    # by channel, and of compute: how long it was busy before the first update
    before_update: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())


def simulate(
    programs: Sequence[Program], seconds: Callable[[Line, Program], float], asynchronous: bool
) -> list[Timeline]:
    """The queues of one step, for each program.

    Args:
        programs: of all stages of a pipeline, which were verified to meet; or one. Ordered.
        seconds: of one execution of a line of a program; of a start, of its transfer.
        asynchronous: whether transfers progress while the device computes; a thread of the host launches the device's
            work.
    """
    meeting = _Rendezvous() if len(programs) > 1 else None
    stages = [
        _Simulation(program, lambda line, program=program: seconds(line, program), asynchronous, meeting, stage)
        for stage, program in enumerate(programs)
    ]
    left = [list(stage.numbered()) for stage in stages]
    at = [0] * len(stages)
    while any(i < len(lines) for i, lines in zip(at, left, strict=True)):
        before = [*at]
        for n, stage in enumerate(stages):
            while at[n] < len(left[n]) and stage.can_run(line := left[n][at[n]][0]):
                stage.one(line, left[n][at[n]][1], 0)
                at[n] += 1
        assert at != before, "stages wait for each other"
    return [stage.finish() for stage in stages]


@dataclass
class _Rendezvous:
    """The hands and takes of all stages, by direction and number.

    Attributes:
        begun: when the first side started.
        done: when the transfer is done, once both sides have started.
        free: by direction, when it has moved all that it was given.
    """

    begun: dict[tuple[int, int, int], float] = field(default_factory=dict)
    done: dict[tuple[int, int, int], float] = field(default_factory=dict)
    free: dict[tuple[int, int], float] = field(default_factory=dict)

    def start(self, key: tuple[int, int, int], now: float, seconds: float) -> None:
        if key not in self.begun:
            self.begun[key] = now
            return
        self.done[key] = self.free[key[:2]] = max(now, self.begun[key], self.free.get(key[:2], 0.0)) + seconds


class _Simulation:
    def __init__(
        self,
        program: Program,
        seconds: Callable[[Line], float],
        asynchronous: bool,
        meeting: _Rendezvous | None,
        stage: int,
    ):
        self.program, self.asynchronous, self.meeting, self.stage = program, asynchronous, meeting, stage
        self.meets: dict[str, tuple[int, int, int]] = {}  # by handle, of transfers between stages
        self.seconds = [seconds(line) for line, _ in program.walk()]
        self.line_channel = [channel(line) for line, _ in program.walk()]
        self.on_host = [asynchronous and on_host(line, program) for line, _ in program.walk()]
        # channels whose waits hold the host's thread
        self.holds = {DISK} if program.mesh.unified_memory else {DISK, "to_host"}
        self.size = [sum(1 for _ in line.with_body()) for line, _ in program.walk()]
        self.found = Timeline()
        self.clock = 0.0  # when compute has done all it was given
        self.thread = 0.0  # when the host's thread is free: see [Note: the host's thread]
        # its holders since compute last had nothing to do, each with its queue
        self.held: list[tuple[Event, str]] = []
        self.free: dict[str, float] = {}  # when a link has done all it was given
        # a handle's channel, and when its transfer is done, or how long it will take
        self.moving: dict[str, tuple[str, float]] = {}

    def finish(self) -> Timeline:
        self._catch_up(0)
        self.found.step_seconds = max([self.clock, *self.free.values()])
        return self.found

    def numbered(self) -> Iterator[tuple[Line, int]]:
        """The lines of the program, without those of loops, with their numbers."""
        number = 0
        for line in self.program.lines:
            yield line, number
            number += self.size[number]

    def can_run(self, line: Line) -> bool:
        """Whether a line waits for nothing that another stage has not started."""
        key = self.meets.get(line.args[0]) if line.args and OPS[line.op].waits else None
        return key is None or self.meeting is None or key in self.meeting.done

    def one(self, line: Line, number: int, turn: int) -> None:
        if line.op == "loop":
            self._loop(line, number)
        elif line.count:  # else the plan counts it as not carried out
            self._line(line, number, turn)

    def _lines(self, lines: Sequence[Line], number: int, turn: int) -> None:
        for line in lines:
            self.one(line, number, turn)
            number += self.size[number]

    def _line(self, line: Line, number: int, turn: int) -> None:
        seconds, queue = self.seconds[number], self.line_channel[number]
        if line.fn and line.writes and not self.found.before_update:
            self.found.before_update = {COMPUTE: self.found.compute_seconds, **self.found.busy_seconds}
        if self.meeting is not None and isinstance(said := line.attrs, HandAttrs):
            way = (said.peer, self.stage) if isinstance(said, TakeAttrs) else (self.stage, said.peer)
            self._meet(line.out[0].name, queue or "", (*way, said.number), seconds)
        elif queue is not None:
            self._start(line.out[0].name, queue, seconds, number, turn)
        elif OPS[line.op].waits:
            self._wait(line.args[0], number, turn, line.says(WaitAttrs).host)
        elif self.on_host[number]:
            if seconds:
                self._count(HOST, seconds)
            self._hold(HOST, line.fn or line.op, seconds, number, turn)
        else:
            self.found.compute_seconds += seconds
            self._catch_up(turn)
            self._compute(line.fn or line.op, seconds, number, turn)

    def _start(self, handle: str, queue: str, seconds: float, number: int, turn: int) -> None:
        self._count(queue, seconds)
        if not self._overlaps(queue):
            self.moving[handle] = queue, seconds
            return
        link = queue.partition(":")[2] or queue  # of an axis that of all its transfers
        begins = max(self.clock, self.thread, self.free.get(link, 0.0))
        self.free[link] = begins + seconds
        self.moving[handle] = queue, begins + seconds
        self.found.events.append(Event(queue, handle, begins, seconds, number, turn))

    def _meet(self, handle: str, queue: str, key: tuple[int, int, int], seconds: float) -> None:
        """Starts one side of a transfer between two stages."""
        assert self.meeting is not None
        self._count(queue, seconds)
        self.meets[handle] = key
        self.moving[handle] = queue, seconds
        self.meeting.start(key, max(self.clock, self.thread), seconds)

    def _wait(self, handle: str, number: int, turn: int, host: bool) -> None:
        queue, done = self.moving.pop(handle)
        if self.meeting is not None and (key := self.meets.pop(handle, None)) is not None:
            self.found.waited[number] = queue
            moved, done = done, self.meeting.done[key]
            self.found.events.append(Event(queue, handle, done - moved, moved, number, turn))
            self._catch_up(turn)
            self._expose(handle, max(0.0, done - self.clock), number, turn)
            return
        self.found.waited[number] = queue
        self.found.exposed.setdefault(number, 0.0)
        if self.asynchronous and queue in self.holds and host:
            self._hold(queue, handle, max(0.0, done - self.thread), number, turn)
            return
        self._catch_up(turn)
        if self._overlaps(queue):
            self._expose(handle, max(0.0, done - self.clock), number, turn)
        else:
            self.found.events.append(Event(queue, handle, self.clock, done, number, turn))
            self._expose(handle, done, number, turn)

    def _overlaps(self, queue: str) -> bool:
        return self.asynchronous or queue == DISK

    def _count(self, queue: str, seconds: float) -> None:
        self.found.num_transfers[queue] = self.found.num_transfers.get(queue, 0) + 1
        self.found.busy_seconds[queue] = self.found.busy_seconds.get(queue, 0.0) + seconds

    def _compute(self, name: str, seconds: float, number: int, turn: int) -> None:
        self.found.events.append(Event(COMPUTE, name, self.clock, seconds, number, turn))
        self.clock += seconds

    def _expose(self, name: str, seconds: float, number: int, turn: int) -> None:
        self.found.exposed[number] = self.found.exposed.get(number, 0.0) + seconds
        self._compute(f"wait {name}", seconds, number, turn)

    def _hold(self, queue: str, name: str, seconds: float, number: int, turn: int) -> None:
        """Something that the host's thread does before it goes on."""
        if seconds > 0:
            event = Event(HOST, name if queue == HOST else f"wait {name}", self.thread, seconds, number, turn)
            self.found.events.append(event)
            self.held.append((event, queue))
            self.thread += seconds

    def _catch_up(self, turn: int) -> None:
        """Compute has nothing to do until the thread is free."""
        for event, queue in self.held:
            if (ends := event.start + event.seconds) > self.clock:
                self.found.waited[event.line] = queue
                self._expose(event.name.removeprefix("wait "), ends - self.clock, event.line, turn)
        self.held.clear()

    def _loop(self, loop: Line, number: int) -> None:
        """Turns until one finds the links as the one before left them: from there on each takes as long as that one."""
        count, found = loop.count, self.found
        after: dict[str, float] = {}
        for turn in range(count):
            begin, before, waits = self.clock, after, dict(found.exposed)
            compute, transfers, busy = found.compute_seconds, dict(found.num_transfers), dict(found.busy_seconds)
            self._lines(loop.body, number + 1, turn)
            took, left, after = self.clock - begin, count - turn - 1, self._ahead(begin)
            if left and turn and all(abs(ahead - before.get(q, 0.0)) <= _ALIKE * took for q, ahead in after.items()):
                found.compute_seconds += left * (found.compute_seconds - compute)
                found.num_transfers = {q: n + left * (n - transfers.get(q, 0)) for q, n in found.num_transfers.items()}
                found.busy_seconds = {q: s + left * (s - busy.get(q, 0.0)) for q, s in found.busy_seconds.items()}
                found.exposed = {n: s + left * (s - waits.get(n, 0.0)) for n, s in found.exposed.items()}
                self._compute(f"{left} more turns", left * took, number, turn + 1)
                self.free = {q: t + left * took for q, t in self.free.items()}
                self.thread += left * took
                return

    def _ahead(self, begin: float) -> dict[str, float]:
        """Seconds for which each link will still be busy when compute is not, and the host's thread; less than nothing
        of a thread that was held in this turn."""
        found = {q: max(0.0, t - self.clock) for q, t in self.free.items()}
        return {**found, HOST: self.thread - self.clock} if self.thread > begin else found
