"""Compares a measured step with the roofline: the share of the device's peak, how busy each link was, and how long
compute waited for it.

A clock goes around every start and every wait that a program's text names (runtime/observe.py). What a link moved is
known from the program; how long it was busy is what it says itself, a disk or a stream of copies, and of others the
time that compute waited for them. The host's memory is a link too, `host`: it is busy while the host computes.

[Note: late] On a CPU the clock is the host's, and a step has run when its call returns. On CUDA it is in the device's
queue of work: marks are events, read once they are done, and nothing waits for them but the first step. So the numbers
there are those of the last step that was done when the next one had been issued, as a rule the one before. A wait of
the host, for a disk or for what comes to it, counts there for as long as the device had nothing to do.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fzero.layout import DiskFiles, extent_of
from fzero.mesh import Mesh
from fzero.plan.cost import HOST, channel, host_bytes, model_flops, on_host
from fzero.plan.devices import get_device
from fzero.plan.plan import compute_dtype
from fzero.plan.timeline import COMPUTE
from fzero.program.attrs import HandAttrs
from fzero.program.ir import Program
from fzero.program.ops import COPIES, TRANSFERS, transfer_bytes

OBSERVED = (*TRANSFERS, "wait")
"""The transfers and waits of a program, which a `Limits` hears of beside what the host computes."""


def limits_of(program: Program, mesh: Mesh, backend: str) -> Limits | None:
    """The measurement of a program's runs; None for one that copies nothing between tiers and is no pipeline's."""
    if not any(line.op in COPIES or isinstance(line.attrs, HandAttrs) for line, _ in program.walk()):
        return None
    return Limits(program, mesh, clock_of(mesh.device), backend)


def report(
    peak_seconds: float,
    seconds: float,
    moved: Mapping[str, int],
    busy: Mapping[str, float],
    stalled: Mapping[str, float],
) -> dict[str, Any]:
    """The metrics of a step: plain numbers and one name.

    Args:
        peak_seconds: that the device would need for the step's model FLOPs at the rate it attains.
        seconds: of the step.
        moved: bytes, by link.
        busy, stalled: seconds that a link moved something and that compute waited for it; none if not said.

    Example:
        >>> found = report(1.0, 4.0, {"disk": 6 << 30}, {"disk": 3.0}, {"disk": 2.0})
        >>> found["speed_of_light"], found["links"]["disk"], found["bound_by"]
        (0.25, {'bytes': 6442450944, 'bytes_per_second': 2147483648.0, 'busy': 0.75, 'stalled': 0.5}, 'disk')
    """
    links = {}
    for name, nbytes in moved.items():
        took = busy.get(name, 0.0)
        links[name] = {
            "bytes": nbytes,
            "bytes_per_second": nbytes / took if took else 0.0,
            "busy": took / seconds,
            "stalled": stalled.get(name, 0.0) / seconds,
        }
    shares = {COMPUTE: 1 - sum(link["stalled"] for link in links.values())}
    shares |= {name: max(link["busy"], link["stalled"]) for name, link in links.items()}
    passing = [name for name in links if name.startswith(("hand:", "take:"))]
    return {
        "speed_of_light": peak_seconds / seconds,
        "links": links,
        "bound_by": max(shares, key=lambda name: shares[name]),
        **({"bubble": sum(links[name]["stalled"] for name in passing)} if passing else {}),
    }


# --- clocks ---


class Clock(Protocol):
    def mark(self) -> Any:
        """This moment."""
        ...

    def done(self, mark: Any) -> bool:
        """Whether a moment has come."""
        ...

    def wait(self, mark: Any) -> None: ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that have come."""
        ...


class HostClock:
    mark = staticmethod(time.perf_counter)

    def done(self, mark: float) -> bool:
        return True

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

    def done(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device's work."""
    return DeviceClock() if device.type == "cuda" else HostClock()


# --- a step ---


@dataclass
class _TimedRun:
    """One run of a program: when it began and ended, its waits, and what links say of themselves."""

    begin: Any
    end: Any = None
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)
    copies: list[tuple[str, Any, Any]] = field(default_factory=list)
    # seconds that they had been busy before their first transfer
    files: dict[DiskFiles, float] = field(default_factory=dict)
    disk_seconds: float = 0.0
    host_seconds: float = 0.0
    disk_bytes: int = 0  # more than planned where a guess was wrong


class Limits:
    """Measures the runs of one program.

    Attributes:
        metrics: of the last run that is known; see `report` and [Note: late].
        names: of what `before` and `after` are to be called around.
    """

    def __init__(self, program: Program, mesh: Mesh, clock: Clock, backend: str = "eager"):
        self.metrics: dict[str, Any] = {}
        self._clock = clock
        sides: dict[str, set[bool]] = defaultdict(set)
        for line, _ in program.walk():
            sides[line.fn or line.op].add(on_host(line, program))
        self._on_host = {name for name, side in sides.items() if side == {True}}
        self.names = (*OBSERVED, *sorted(self._on_host))
        self._peak_seconds = model_flops(program) / get_device(None, mesh.device_type).rate(compute_dtype(program))
        moved: dict[str, int] = {}
        self._links: dict[tuple[str, str | None], str] = {}  # by what a start's line shows
        for line, times in program.walk():
            if (link := channel(line)) is not None:
                moved[link] = moved.get(link, 0) + times * transfer_bytes(line, program.values_by_name, program.mesh)
                self._links[line.op, line.axes[0] if line.axes else None] = link
            elif (line.fn or line.op) in self._on_host:
                moved[HOST] = moved.get(HOST, 0) + times * int(host_bytes(line, program, backend))
        self._moved = dict(sorted(moved.items()))
        # links of a run's transfers, by identity; transfers of nothing are one, on the link of the last
        self._moving: dict[int, str] = {}
        self._run = _TimedRun(None)
        self._running: deque[_TimedRun] = deque()  # that ended for the host

    def before(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Called before each of `names`."""
        if op == "wait":
            return self._clock.mark()
        if op in self._on_host:
            return self._clock.mark(), time.perf_counter()
        if op in ("disk_read_start", "disk_write_start"):
            extent = extent_of((args[0] if op == "disk_read_start" else kwargs["into"])[0])
            for files in {e.files for e in (extent, extent and extent.spare) if e is not None}:
                self._run.files.setdefault(files, files.busy_seconds)
        return None

    def after(self, op: str, begin: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Called after each of `names`, with what `before` returned."""
        if op in self._on_host:
            self._run.host_seconds += time.perf_counter() - begin[1]
            self._run.waits.append((HOST, begin[0], self._clock.mark()))
            return
        if op != "wait":
            self._moving[id(result)] = self._links[op, kwargs.get("axis")]
            if op in ("disk_read_start", "disk_write_start"):
                self._run.disk_bytes += result.disk_bytes
            return
        transfer = args[0]
        link = self._moving[id(transfer)]
        self._run.waits.append((link, begin, self._clock.mark()))
        if (span := getattr(transfer, "span", None)) is not None:
            self._run.copies.append((link, *span))

    def begin(self) -> None:
        self._moving.clear()
        self._run = _TimedRun(self._clock.mark())

    def end(self) -> None:
        run = self._run
        run.end = self._clock.mark()
        run.disk_seconds = sum(files.busy_seconds - before for files, before in run.files.items())
        run.files.clear()
        if not self.metrics:
            self._clock.wait(run.end)
        self._running.append(run)
        while self._running and self._clock.done(self._running[0].end):
            self.metrics = self._reported(self._running.popleft())

    def _reported(self, run: _TimedRun) -> dict[str, Any]:
        stalled: dict[str, float] = defaultdict(float)
        for link, begin, end in run.waits:
            stalled[link] += self._clock.seconds(begin, end)
        own: dict[str, float] = defaultdict(float)
        for link, begin, end in run.copies:
            own[link] += self._clock.seconds(begin, end)
        busy = {**stalled, **own, **({"disk": run.disk_seconds} if "disk" in self._moved else {})}
        busy |= {HOST: run.host_seconds} if HOST in self._moved else {}
        moved = {**self._moved, **({"disk": run.disk_bytes} if "disk" in self._moved else {})}
        return report(self._peak_seconds, self._clock.seconds(run.begin, run.end), moved, busy, stalled)
