"""Measuring a step as a plan predicts it: the time of every line, and the most memory alive.

Lines are timed by putting a clock around each function and transfer that the program's source names, so what is timed is what runs.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fzero.program.ir import Line, Program
from fzero.schedule.cost import channel
from fzero.schedule.timeline import COMPUTE, Event


@contextmanager
def timing(run: Callable[..., Any], program: Program, device: torch.device) -> Iterator[list[Event]]:
    """Times each line of the one run of an executable in the body. The list that it gives is filled when the body is left."""
    clock = _Clock(device)
    marks: list[tuple[Any, Any]] = []  # before and after each line
    namespace: dict[str, Any] = run.namespace  # type: ignore[attr-defined]
    before = {name: namespace[name] for name in {line.fn or line.op for line, _ in program.walk() if line.op != "loop"}}

    def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock.mark()
            result = fn(*args, **kwargs)
            marks.append((start, clock.mark()))
            return result

        return call

    events: list[Event] = []
    namespace.update({name: timed(fn) for name, fn in before.items()})
    try:
        yield events
    finally:
        namespace.update(before)
    events += _events(program, [(clock.seconds(a), clock.seconds(b)) for a, b in marks])


def _events(program: Program, times: Sequence[tuple[float, float]]) -> list[Event]:
    """An event a line, and one for each transfer from its start to the end of its wait."""
    events: list[Event] = []
    started: dict[str, tuple[str, float]] = {}
    for (line, number, turn), (begin, end) in zip(run_order(program.lines), times, strict=True):
        queue = channel(line)
        name = f"{line.op} {line.args[0]}" if line.op == "wait" else line.out[0].name if queue else line.fn or line.op
        if queue is not None:
            started[name] = queue, begin
        elif line.op == "wait":
            queue, since = started.pop(line.args[0])
            events.append(Event(queue, line.args[0], since, end - since, number, turn))
        events.append(Event(COMPUTE, name, begin, end - begin, number, turn))
    return events


def run_order(lines: Sequence[Line], number: int = 0, turn: int = 0) -> Iterator[tuple[Line, int, int]]:
    """The lines that run, in order, each with its number and the turn of the loop around it."""
    for line in lines:
        for inner in range(line.attrs["count"] if line.op == "loop" else 0):
            yield from run_order(line.body, number + 1, inner)
        if line.op != "loop":
            yield line, number, turn
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
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak
