"""Profiles a step against its plan: the time of every line, and the most memory alive.

Lines are timed by putting a clock around each function and transfer that the program's source names, so what is timed
is what runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fzero.plan.cost import channel
from fzero.plan.timeline import COMPUTE, Event
from fzero.program.ir import Line, Program
from fzero.program.ops import is_skipped
from fzero.read_json import read

Place = tuple[Line, int, int]
"""A line, its number as `Program.walk` counts, and the turn of the loop around it."""


@contextmanager
def timing(run: Callable[..., Any], program: Program, device: torch.device) -> Iterator[list[Event]]:
    """Times each line of the one run of an executable in the body. The list that it gives is filled when the body is
    left."""
    clock = _Clock(device)
    marks: list[tuple[Place, Any, Any]] = []  # each line that ran, before and after it
    following = Following(program, run.guessing)  # type: ignore[attr-defined]
    namespace: dict[str, Any] = run.namespace  # type: ignore[attr-defined]
    before = {name: namespace[name] for name in {line.fn or line.op for line, _ in program.walk() if line.op != "loop"}}

    def timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place, start = following.called(name), clock.mark()
            result = fn(*args, **kwargs)
            marks.append((place, start, clock.mark()))
            following.returned(place, result)
            return result

        return call

    events: list[Event] = []
    namespace.update({name: timed(name, fn) for name, fn in before.items()})
    try:
        yield events
    finally:
        namespace.update(before)
    events += _events((place, clock.seconds(a), clock.seconds(b)) for place, a, b in marks)


def _events(marks: Iterable[tuple[Place, float, float]]) -> list[Event]:
    """An event a line, and one for each transfer from its start to the end of its wait."""
    events: list[Event] = []
    started: dict[str, tuple[str, float]] = {}
    for (line, number, turn), begin, end in marks:
        queue = channel(line)
        name = f"{line.op} {line.args[0]}" if line.op == "wait" else line.out[0].name if queue else line.fn or line.op
        if queue is not None:
            started[name] = queue, begin
        elif line.op == "wait":
            queue, since = started.pop(line.args[0])
            events.append(Event(queue, line.args[0], since, end - since, number, turn))
        events.append(Event(COMPUTE, name, begin, end - begin, number, turn))
    return events


class Following:
    """Follows the lines of a running program, as its functions and transfers are called one after the other. What is
    skipped if the step does not guess, as `guessing` says while it runs, is not called then; what a redo is to do again
    is, if it says so."""

    def __init__(self, program: Program, guessing: Callable[[], bool]):
        self._guessing, self._again = guessing, False
        self._coming = self._visit(program.lines, 0, 0)

    def called(self, name: str) -> Place:
        """The line that calls this now, its number and the turn of the loop around it."""
        place = next(self._coming, None)
        assert place is not None and (place[0].fn or place[0].op) == name, (
            f"{name} is called where the program has {place and place[0]}"
        )
        return place

    def returned(self, place: Place, result: Any) -> None:
        """Notes the result of that call."""
        self._again = place[0].op == "redo" and result is True

    def _visit(self, lines: Sequence[Line], number: int, turn: int) -> Iterator[Place]:
        for line in lines:
            for inner in range(line.count if line.op == "loop" else 0):
                yield from self._visit(line.body, number + 1, inner)
            if line.op != "loop" and (self._guessing() or not is_skipped(line)):
                yield line, number, turn
            if line.op == "redo" and self._again:
                yield from self._visit(line.body, number + 1, turn)
            number += 1 + _size(line)


def _size(line: Line) -> int:
    return sum(1 + _size(x) for x in line.body)


class _Clock:
    """Time in seconds since it was made, on the host or in the device's queue of work."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._zero = self.mark()

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        if not self._cuda:
            return mark - self._zero
        mark.synchronize()
        return self._zero.elapsed_time(mark) / 1e3


def allocated(run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors alive at once while `run` runs, beyond those alive before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for e in read(path)["traceEvents"] if e.get("name") == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak
