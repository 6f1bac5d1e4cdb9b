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
from typing import Any, NamedTuple

import torch

from fzero.program.guess import is_guess
from fzero.program.ir import Line, Program
from fzero.schedule.cost import channel
from fzero.schedule.timeline import COMPUTE, Event


@contextmanager
def timing(run: Callable[..., Any], program: Program, device: torch.device) -> Iterator[list[Event]]:
    """Times each line of the one run of an executable in the body. The list that it gives is filled when the body is left."""
    clock = _Clock(device)
    marks: list[tuple[str, Any, Any, bool]] = []  # of each line that ran: what it calls, before and after it, whether that is true
    namespace: dict[str, Any] = run.namespace  # type: ignore[attr-defined]
    before = {name: namespace[name] for name in {line.fn or line.op for line, _ in program.walk() if line.op != "loop"}}

    def timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock.mark()
            result = fn(*args, **kwargs)
            marks.append((name, start, clock.mark(), result is True))
            return result

        return call

    events: list[Event] = []
    namespace.update({name: timed(name, fn) for name, fn in before.items()})
    try:
        yield events
    finally:
        namespace.update(before)
    events += _events(program, [_Mark(name, clock.seconds(a), clock.seconds(b), true) for name, a, b, true in marks])


class _Mark(NamedTuple):
    """What was called, when it began and ended, and whether it returned True."""

    name: str
    begin: float
    end: float
    true: bool


def _events(program: Program, marks: Sequence[_Mark]) -> list[Event]:
    """An event a line, and one for each transfer from its start to the end of its wait."""
    events: list[Event] = []
    started: dict[str, tuple[str, float]] = {}
    for line, number, turn, (_, begin, end, _) in _ran(program.lines, iter(marks)):
        queue = channel(line)
        name = f"{line.op} {line.args[0]}" if line.op == "wait" else line.out[0].name if queue else line.fn or line.op
        if queue is not None:
            started[name] = queue, begin
        elif line.op == "wait":
            queue, since = started.pop(line.args[0])
            events.append(Event(queue, line.args[0], since, end - since, number, turn))
        events.append(Event(COMPUTE, name, begin, end - begin, number, turn))
    return events


def _ran(lines: Sequence[Line], marks: Iterator[_Mark]) -> Iterator[tuple[Line, int, int, _Mark]]:
    """The lines that ran, in order, each with its number, the turn of the loop around it, and its mark. A function that was to run on a guess has none if the
    step did not guess; what a redo was to do again ran if it says so."""
    following = next(marks, None)

    def visit(lines: Sequence[Line], number: int, turn: int) -> Iterator[tuple[Line, int, int, _Mark]]:
        nonlocal following
        for line in lines:
            again = line.attrs["count"] if line.op == "loop" else 0
            if line.op != "loop" and not (line.op == "call" and is_guess(line) and (following is None or following.name != line.fn)):
                assert following is not None and following.name == (line.fn or line.op), "a mark for each line that ran"
                again = int(line.op == "redo" and following.true)
                yield line, number, turn, following
                following = next(marks, None)
            for inner in range(again):
                yield from visit(line.body, number + 1, inner)
            number += 1 + _size(line)

    return visit(lines, 0, 0)


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
