"""Simulates the queues of one rank: when every op of a program starts and ends.

[Note: queues] Subgraphs run one after the other in the queue `compute`. Transfers run in *channels*, each a separate
queue: `gather:data`, `reduce:data`, `to_host`, `to_device`, and `disk`, whose reads and writes share one device.
Gathers and reductions over one axis share its link: one runs after the other, in the order of their starts, each at
the full rate of the link. On an asynchronous device, and for transfers to and from a disk, a start queues its
transfer in a channel when compute reaches it. The transfer begins once the channel is free, and a wait blocks compute
until it is done. On a device that is not asynchronous, a transfer takes its time where it is waited for. Time that
compute spends waiting is *exposed*.

[Note: the host's thread] On an asynchronous device one thread of the host issues the work of the device. Issuing
takes no time, and three things block the thread: a subgraph on the host (the queue `host`), a wait for `disk`, and a
wait for `to_host` unless only the device waits. Later ops begin no sooner than the thread is free again; work that
was issued earlier continues on the device meanwhile. If the device runs out of work, the time counts as exposed time
of the queue that blocks the thread.

[Note: stages in time] The stages of a pipeline are simulated together. A message between two stages moves, on any
device, once both sides have started and the direction between the two is free: each direction between two stages is a
separate link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fzero._utils.deprecation import attribute_alias
from fzero.ir.attributes import SendAttrs, WaitAttrs
from fzero.ir.program import Instruction, Program
from fzero.plan.cost import DISK, HOST, channel, on_host

COMPUTE = "compute"
_ALIKE = 1e-9  # fraction of an iteration's time: iterations that differ by less count as equal


class Event(NamedTuple):
    """Something that took `seconds` in a queue. `line` is the index of the op as `Program.walk` counts; `iteration` is
    that of the enclosing loop.
    """

    queue: str
    name: str
    start: float
    seconds: float
    line: int
    iteration: int = 0

    turn = attribute_alias("Event", "turn", "iteration")


@dataclass
class Timeline:
    """The result of a simulation. Seconds and counts are those of the complete step."""

    events: list[Event] = field(default_factory=list)
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    # by channel, like the next attribute; for `host`, the number of subgraphs
    num_transfers: dict[str, int] = field(default_factory=dict)
    busy_seconds: dict[str, float] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)  # by the op that waits
    waited: dict[int, str] = field(default_factory=dict)  # the channel that an op waits for
    # by channel, and for compute: how long it was busy before the first update
    before_update: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())


def simulate(
    programs: Sequence[Program], seconds: Callable[[Instruction, Program], float], asynchronous: bool
) -> list[Timeline]:
    """Simulates the queues of one step, for each program.

    Args:
        programs: the programs of all stages of a pipeline, whose sends and receives were verified to match; or one
            program. Ordered.
        seconds: returns the time of one execution of an op of a program; for a start, that of its transfer.
        asynchronous: whether transfers progress while the device computes, and a thread of the host launches the
            device's work.
    """
    meeting = _Rendezvous() if len(programs) > 1 else None
    stages = [
        _Simulation(program, lambda op, program=program: seconds(op, program), asynchronous, meeting, stage)
        for stage, program in enumerate(programs)
    ]
    left = [list(stage.numbered()) for stage in stages]
    at = [0] * len(stages)
    while any(i < len(ops) for i, ops in zip(at, left, strict=True)):
        before = [*at]
        for n, stage in enumerate(stages):
            while at[n] < len(left[n]) and stage.can_run(op := left[n][at[n]][0]):
                stage.one(op, left[n][at[n]][1], 0)
                at[n] += 1
        assert at != before, "stages wait for each other"
    return [stage.finish() for stage in stages]


@dataclass
class _Rendezvous:
    """The sends and receives of all stages, by direction and number.

    Attributes:
        begun: when the first side started.
        done: when the transfer is done, once both sides have started.
        free: by direction, when it has moved everything that was started.
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
    """The queues of one rank while its program is simulated op by op."""

    def __init__(
        self,
        program: Program,
        seconds: Callable[[Instruction], float],
        asynchronous: bool,
        meeting: _Rendezvous | None,
        stage: int,
    ):
        self.program, self.asynchronous, self.meeting, self.stage = program, asynchronous, meeting, stage
        self.meets: dict[str, tuple[int, int, int]] = {}  # by handle, for transfers between stages
        self.seconds = [seconds(op) for op, _ in program.walk()]
        self.op_channel = [channel(op) for op, _ in program.walk()]
        self.on_host = [asynchronous and on_host(op, program) for op, _ in program.walk()]
        # channels whose waits block the host's thread
        self.holds = {DISK} if program.mesh.unified_memory else {DISK, "to_host"}
        self.size = [sum(1 for _ in op.with_body()) for op, _ in program.walk()]
        self.found = Timeline()
        self.clock = 0.0  # when compute has finished all the work that it was given
        self.thread = 0.0  # when the host's thread is free: see [Note: the host's thread]
        # what blocked the thread since compute was last idle, each with its queue
        self.held: list[tuple[Event, str]] = []
        self.free: dict[str, float] = {}  # when a link has finished all the transfers that it was given
        # by handle: its channel, and when its transfer is done, or how long it will take
        self.moving: dict[str, tuple[str, float]] = {}

    def finish(self) -> Timeline:
        self._catch_up(0)
        self.found.step_seconds = max([self.clock, *self.free.values()])
        return self.found

    def numbered(self) -> Iterator[tuple[Instruction, int]]:
        """Yields the ops of the program, without those inside loops, with their indices."""
        number = 0
        for op in self.program.instructions:
            yield op, number
            number += self.size[number]

    def can_run(self, op: Instruction) -> bool:
        """Returns whether an op does not wait for something that another stage has not started yet."""
        key = self.meets.get(op.args[0]) if op.args and op.is_wait else None
        return key is None or self.meeting is None or key in self.meeting.done

    def one(self, op: Instruction, number: int, iteration: int) -> None:
        if op.op == "loop":
            self._loop(op, number)
        elif op.count:  # otherwise the plan assumes that it does not run
            self._one(op, number, iteration)

    def _run(self, ops: Sequence[Instruction], number: int, iteration: int) -> None:
        for op in ops:
            self.one(op, number, iteration)
            number += self.size[number]

    def _one(self, op: Instruction, number: int, iteration: int) -> None:
        """Simulates one op: a transfer between stages, another transfer, a wait, a subgraph on the host, or an op on
        the device.
        """
        seconds, queue = self.seconds[number], self.op_channel[number]
        if op.fn and op.writes and not self.found.before_update:
            self.found.before_update = {COMPUTE: self.found.compute_seconds, **self.found.busy_seconds}
        if self.meeting is not None and isinstance(said := op.attrs, SendAttrs):
            way = (said.peer, self.stage) if op.op == "recv_start" else (self.stage, said.peer)
            self._meet(op.out[0].name, queue or "", (*way, said.number), seconds)
        elif queue is not None:
            self._start(op.out[0].name, queue, seconds, number, iteration)
        elif op.is_wait:
            self._wait(op.args[0], number, iteration, op.says(WaitAttrs).host)
        elif self.on_host[number]:
            if seconds:
                self._count(HOST, seconds)
            self._hold(HOST, op.fn or op.op, seconds, number, iteration)
        else:
            self.found.compute_seconds += seconds
            self._catch_up(iteration)
            self._compute(op.fn or op.op, seconds, number, iteration)

    def _start(self, handle: str, queue: str, seconds: float, number: int, iteration: int) -> None:
        self._count(queue, seconds)
        if not self._overlaps(queue):
            self.moving[handle] = queue, seconds
            return
        link = queue.partition(":")[2] or queue  # all transfers over an axis share its link
        begins = max(self.clock, self.thread, self.free.get(link, 0.0))
        self.free[link] = begins + seconds
        self.moving[handle] = queue, begins + seconds
        self.found.events.append(Event(queue, handle, begins, seconds, number, iteration))

    def _meet(self, handle: str, queue: str, key: tuple[int, int, int], seconds: float) -> None:
        """Starts one side of a transfer between two stages."""
        assert self.meeting is not None
        self._count(queue, seconds)
        self.meets[handle] = key
        self.moving[handle] = queue, seconds
        self.meeting.start(key, max(self.clock, self.thread), seconds)

    def _wait(self, handle: str, number: int, iteration: int, host: bool) -> None:
        """Ends a transfer. The wait blocks the host's thread or only compute, and the time that compute is idle
        counts as exposed. On a device that is not asynchronous, the transfer itself takes place here.
        """
        queue, done = self.moving.pop(handle)
        if self.meeting is not None and (key := self.meets.pop(handle, None)) is not None:
            self.found.waited[number] = queue
            # For a message between stages, `moving` has its duration, and `meeting` the time at
            # which it is done.
            moved, done = done, self.meeting.done[key]
            self.found.events.append(Event(queue, handle, done - moved, moved, number, iteration))
            self._catch_up(iteration)
            self._expose(handle, max(0.0, done - self.clock), number, iteration)
            return
        self.found.waited[number] = queue
        self.found.exposed.setdefault(number, 0.0)
        if self.asynchronous and queue in self.holds and host:
            self._hold(queue, handle, max(0.0, done - self.thread), number, iteration)
            return
        self._catch_up(iteration)
        if self._overlaps(queue):
            self._expose(handle, max(0.0, done - self.clock), number, iteration)
        else:
            self.found.events.append(Event(queue, handle, self.clock, done, number, iteration))
            self._expose(handle, done, number, iteration)

    def _overlaps(self, queue: str) -> bool:
        return self.asynchronous or queue == DISK

    def _count(self, queue: str, seconds: float) -> None:
        self.found.num_transfers[queue] = self.found.num_transfers.get(queue, 0) + 1
        self.found.busy_seconds[queue] = self.found.busy_seconds.get(queue, 0.0) + seconds

    def _compute(self, name: str, seconds: float, number: int, iteration: int) -> None:
        self.found.events.append(Event(COMPUTE, name, self.clock, seconds, number, iteration))
        self.clock += seconds

    def _expose(self, name: str, seconds: float, number: int, iteration: int) -> None:
        self.found.exposed[number] = self.found.exposed.get(number, 0.0) + seconds
        self._compute(f"wait {name}", seconds, number, iteration)

    def _hold(self, queue: str, name: str, seconds: float, number: int, iteration: int) -> None:
        """Simulates something that blocks the host's thread."""
        if seconds > 0:
            event = Event(HOST, name if queue == HOST else f"wait {name}", self.thread, seconds, number, iteration)
            self.found.events.append(event)
            self.held.append((event, queue))
            self.thread += seconds

    def _catch_up(self, iteration: int) -> None:
        """Exposes the time that compute is idle until the thread is free."""
        for event, queue in self.held:
            if (ends := event.start + event.seconds) > self.clock:
                self.found.waited[event.line] = queue
                self._expose(event.name.removeprefix("wait "), ends - self.clock, event.line, iteration)
        self.held.clear()

    def _loop(self, loop: Instruction, number: int) -> None:
        """Simulates iterations of a loop until one finds the links in the same state as the one before: from then on
        each iteration takes as long as that one.
        """
        count, found = loop.count, self.found
        after: dict[str, float] = {}
        for iteration in range(count):
            begin, before, waits = self.clock, after, dict(found.exposed)
            compute, transfers, busy = found.compute_seconds, dict(found.num_transfers), dict(found.busy_seconds)
            self._run(loop.body, number + 1, iteration)
            took, left, after = self.clock - begin, count - iteration - 1, self._ahead(begin)
            if (
                left
                and iteration
                and all(abs(ahead - before.get(q, 0.0)) <= _ALIKE * took for q, ahead in after.items())
            ):
                found.compute_seconds += left * (found.compute_seconds - compute)
                found.num_transfers = {q: n + left * (n - transfers.get(q, 0)) for q, n in found.num_transfers.items()}
                found.busy_seconds = {q: s + left * (s - busy.get(q, 0.0)) for q, s in found.busy_seconds.items()}
                found.exposed = {n: s + left * (s - waits.get(n, 0.0)) for n, s in found.exposed.items()}
                self._compute(f"{left} more iterations", left * took, number, iteration + 1)
                # All clocks advance by the iterations that are not simulated.
                self.free = {q: t + left * took for q, t in self.free.items()}
                self.thread += left * took
                return

    def _ahead(self, begin: float) -> dict[str, float]:
        """Returns the seconds for which each link, and the host's thread, will still be busy when compute is not. The
        value of a thread that was blocked in this iteration may be negative.
        """
        found = {q: max(0.0, t - self.clock) for q, t in self.free.items()}
        return {**found, HOST: self.thread - self.clock} if self.thread > begin else found
