"""Reduces the memory and the events of a plan to what a screen can show, as columns of plain numbers.

A step of a large model has tens of thousands of events and samples. A chart shows at most a few thousand: of samples
that fall on the same point in time the largest is kept, so the peak is always there, and neighbouring events of a
queue that are too short to be seen are joined into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.plan.memory import ROLES
from fzero.plan.page.op_costs import kind_of
from fzero.plan.picture import memory_over_time
from fzero.plan.plan import Plan
from fzero.plan.timeline import COMPUTE, Event

_MOST_SAMPLES, _MOST_EVENTS = 1_200, 3_000
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def chart_data(plan: Plan, memory: int | None, measured: Sequence[Event] | None = None) -> dict[str, Any]:
    """Returns the data of the charts, with their units.

    Args:
        plan: a plan.
        memory: bytes that a rank's program may use, if that is known.
        measured: the result of `train.profile`, whose queues are further rows of the timeline.
    """
    ends = max([plan.step_seconds, *(e.start + e.seconds for e in measured or ())])
    per_second = next((x for x in _SECONDS if ends >= x[0]), _SECONDS[-1])
    per_byte = next((x for x in _BYTES if plan.peak_bytes >= x[0]), (1, "B"))
    near = memory is not None and memory < 2 * plan.peak_bytes  # a limit far above would flatten the memory
    return {
        "time_unit": per_second[1],
        "byte_unit": per_byte[1],
        "end": _number(ends / per_second[0]),
        "limit": _number(memory / per_byte[0]) if memory is not None and near else None,
        "roles": [role for i, role in enumerate(ROLES) if any(s.by_role[i] for s in plan.memory)],
        "memory": memory_columns(plan, per_second[0], per_byte[0]),
        "events": event_columns(plan, per_second[0], measured or ()),
        "queues": queues_of(plan, measured or ()),
    }


def memory_columns(plan: Plan, per_second: float, per_byte: float) -> dict[str, list[Any]]:
    """Returns the samples over time: `time` in units of `per_second` seconds, the op, the bytes of each role and of
    the host in units of `per_byte`, and whether the sample is the peak.
    """
    width = plan.step_seconds / _MOST_SAMPLES or 1.0
    largest: dict[int, Any] = {}
    for time, sample in memory_over_time(plan):
        at = int(time / width)
        if at not in largest or sample.total > largest[at][1].total:
            largest[at] = (time, sample)
    points = [largest[at] for at in sorted(largest)]
    peak = next((i for i, (_, s) in enumerate(points) if s.total == plan.peak_bytes), 0)
    points.append((max(plan.step_seconds, points[-1][0]), points[-1][1]))
    columns: dict[str, list[Any]] = {
        "time": [_number(time / per_second) for time, _ in points],
        "op": [s.line for _, s in points],
        "total": [_number(s.total / per_byte) for _, s in points],
        "peak": [i == peak for i in range(len(points))],
    }
    for i, role in enumerate(ROLES):
        if any(s.by_role[i] for _, s in points):
            columns[role] = [_number(s.by_role[i] / per_byte) for _, s in points]
    if plan.host_peak_bytes:
        columns["host"] = [_number(s.host / per_byte) for _, s in points]
    return columns


def event_columns(plan: Plan, per_second: float, measured: Sequence[Event] = ()) -> dict[str, list[Any]]:
    """Returns the events of all queues: the queue, the kind (`op_costs.KINDS`), start and end in units of `per_second`
    seconds, the op, and the name.
    """
    rows = list[tuple[str, str, Event]]()
    kinds = _kinds(plan, plan.stage)
    for event in plan.events:
        if event.queue != COMPUTE or not plan.stages:
            rows.append((event.queue, _kind(event, kinds), event))
    for stage, events in enumerate(plan.stage_events):
        kinds = _kinds(plan, stage)
        rows += [(f"stage {stage}", _kind(e, kinds), e) for e in events if e.queue == COMPUTE]
    kinds = _kinds(plan, plan.stage)
    rows += [(f"measured {e.queue}", _kind(e, kinds), e) for e in measured]
    rows = [row for row in rows if row[2].seconds > 0]
    if len(rows) > _MOST_EVENTS:
        rows = _joined(rows, plan.step_seconds / _MOST_EVENTS)
    return {
        "queue": [queue for queue, _, _ in rows],
        "kind": [kind for _, kind, _ in rows],
        "start": [_number(e.start / per_second) for _, _, e in rows],
        "end": [_number((e.start + e.seconds) / per_second) for _, _, e in rows],
        "op": [e.line for _, _, e in rows],
        "name": [e.name for _, _, e in rows],
    }


def queues_of(plan: Plan, measured: Sequence[Event] = ()) -> list[str]:
    """Returns the rows of the timeline: compute, or that of each stage, then the channels, then what was measured."""
    names = {e.queue for e in plan.events if e.seconds > 0} - {COMPUTE}
    stages = [f"stage {n}" for n in range(len(plan.stages))]
    measured_queues = {e.queue for e in measured if e.seconds > 0}
    return [
        *(stages or [COMPUTE]),
        *sorted(names, key=lambda name: (len(name), name)),
        *(f"measured {name}" for name in sorted(measured_queues, key=lambda name: (name != COMPUTE, len(name), name))),
    ]


def _kinds(plan: Plan, stage: int) -> list[str]:
    """Returns the kind of each op of a stage's program."""
    program = plan.programs[stage]
    return [kind_of(op, program, plan.device) for op, _ in program.walk()]


def _kind(event: Event, kinds: Sequence[str]) -> str:
    if event.name.startswith("wait "):
        return "wait"
    if event.name.endswith(" more turns"):
        return "other"
    kind = kinds[event.line]
    return "transfer" if kind == "wait" and event.queue != COMPUTE else kind


def _joined(rows: Sequence[tuple[str, str, Event]], least: float) -> list[tuple[str, str, Event]]:
    """Joins neighbouring events of a queue and a kind that are shorter than `least` seconds, and as close together."""
    out = list[tuple[str, str, Event]]()
    last: dict[str, int] = {}  # by queue, the index in `out` of its last event
    count: dict[int, int] = {}
    for queue, kind, event in rows:
        i = last.get(queue)
        if i is not None and out[i][1] == kind and max(event.seconds, _since(out[i][2], event)) < least:
            before = out[i][2]
            count[i] = count.get(i, 1) + 1
            name = f"{count[i]} events from {before.name.partition(' events from ')[2] or before.name} on"
            out[i] = queue, kind, before._replace(name=name, seconds=event.start + event.seconds - before.start)
        else:
            last[queue] = len(out)
            out.append((queue, kind, event))
    return out


def _since(before: Event, event: Event) -> float:
    """Returns the seconds between two events. An event that is already long is not made longer."""
    return event.start - before.start - before.seconds


def _number(x: float) -> float:
    """Rounds to six digits, so that a page is small and does not depend on the last bits of a sum."""
    return float(f"{x:.6g}")
