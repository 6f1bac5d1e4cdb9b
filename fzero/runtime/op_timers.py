"""Profiles a step against its plan: the time of every line, and the most memory alive."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from fzero._utils.bounded_json import read
from fzero.ir.program import Line
from fzero.plan.cost import channel
from fzero.plan.timeline import COMPUTE, Event

LinePlace = tuple[Line, int, int]
"""A line, its number as `Program.walk` counts, and the turn of the loop around it."""


class Clock(Protocol):
    def mark(self) -> Any:
        """This moment."""
        ...

    def wait(self, mark: Any) -> None: ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that have come."""
        ...


class HostClock:
    mark = staticmethod(time.perf_counter)

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """Moments in the queue of work of the current CUDA device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device's work."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class Timer:
    """Times each line of one run of a program; its methods are called before and after each (runtime/op_hooks.py)."""

    def __init__(self, device: torch.device):
        self._clock = clock_of(device)
        self._zero = self._clock.mark()
        self._marks: list[tuple[LinePlace, Any, Any]] = []  # each line that ran, before and after it

    def before(self, place: LinePlace, args: tuple[Any, ...]) -> Any:
        return self._clock.mark()

    def after(self, place: LinePlace, start: Any, args: tuple[Any, ...], result: Any) -> None:
        self._marks.append((place, start, self._clock.mark()))

    def events(self) -> list[Event]:
        """The time of each line, once all have run."""
        if self._marks:
            self._clock.wait(self._marks[-1][2])
        seconds = lambda mark: self._clock.seconds(self._zero, mark)  # noqa: E731
        return _events((place, seconds(begin), seconds(end)) for place, begin, end in self._marks)


def _events(marks: Iterable[tuple[LinePlace, float, float]]) -> list[Event]:
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
