"""Profiles a step to compare it with its plan: measures the time of every op, and the peak memory of tensors."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from fzero._utils.bounded_json import read
from fzero.ir.program import Instruction
from fzero.plan.cost import channel
from fzero.plan.timeline import COMPUTE, Event

OpPlace = tuple[Instruction, int, int]
"""An op, its number as `Program.walk` counts, and the iteration of the loop around it."""


class Clock(Protocol):
    def mark(self) -> Any:
        """Returns the current moment."""
        ...

    def wait(self, mark: Any) -> None: ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the time between two moments that have passed."""
        ...


class HostClock:
    mark = staticmethod(time.perf_counter)

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """Measures moments in the work queue of the current CUDA device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Returns the clock for the work of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class Timer:
    """Times each op in one run of a program. Its methods are called before and after each op (runtime/op_hooks.py)."""

    def __init__(self, device: torch.device):
        self._clock = clock_of(device)
        self._zero = self._clock.mark()
        self._marks: list[tuple[OpPlace, Any, Any]] = []  # each op that ran, with the moments before and after it

    def before(self, place: OpPlace, args: tuple[Any, ...]) -> Any:
        return self._clock.mark()

    def after(self, place: OpPlace, start: Any, args: tuple[Any, ...], result: Any) -> None:
        self._marks.append((place, start, self._clock.mark()))

    def events(self) -> list[Event]:
        """Returns the time of each op, after all have run."""
        if self._marks:
            self._clock.wait(self._marks[-1][2])
        seconds = lambda mark: self._clock.seconds(self._zero, mark)  # noqa: E731
        return _events((place, seconds(begin), seconds(end)) for place, begin, end in self._marks)


def _events(marks: Iterable[tuple[OpPlace, float, float]]) -> list[Event]:
    """Returns an event for each op, and one for each transfer from its start to the end of its wait."""
    events: list[Event] = []
    started: dict[str, tuple[str, float]] = {}
    for (op, number, iteration), begin, end in marks:
        queue = channel(op)
        name = f"{op.op} {op.args[0]}" if op.op == "wait" else op.out[0].name if queue else op.fn or op.op
        if queue is not None:
            started[name] = queue, begin
        elif op.op == "wait":
            queue, since = started.pop(op.args[0])
            events.append(Event(queue, op.args[0], since, end - since, number, iteration))
        events.append(Event(COMPUTE, name, begin, end - begin, number, iteration))
    return events


def allocated(run: Callable[[], Any], device: torch.device) -> int:
    """Runs `run` and returns the peak bytes of tensors that are alive at the same time, minus those alive before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    kinds = [torch.profiler.ProfilerActivity.CPU]
    # torch 2.12 warns of events that a second cycle would clear, unless they are accumulated
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
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
