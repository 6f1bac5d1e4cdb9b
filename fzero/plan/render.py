"""Renders a plan as text, as JSON and as a trace. This file must not compute anything that a plan does not contain."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from fzero._utils.units import duration, rate, size
from fzero.plan.cost import DISK, HOST
from fzero.plan.memory import ROLE_NAMES, ROLES
from fzero.plan.timeline import COMPUTE, Event

if TYPE_CHECKING:
    from rich.console import Console

    from fzero.plan.plan import Channel, ExpertRows, Plan

_WIDTH = 120  # columns of a table
_LONGEST_WAITS = 5


class TextTable(NamedTuple):
    """Cells with a title above them. The first and the last column are text, those in between are numbers. With
    `prose`, all columns are text, wrapped into lines.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False


def table(plan: Plan) -> str:
    """Returns the plan as plain text: totals, what the peak consists of, channels, and the longest waits."""
    return plain(tables(plan))


def tables(plan: Plan) -> list[TextTable]:
    """Returns the contents of `table`."""
    share = plan.exposed_seconds / plan.step_seconds if plan.step_seconds else 0.0
    totals = [
        ("peak memory", size(plan.peak_bytes), f"op {plan.peak_line.index}: {brief(plan.peak_line.text, 72)}"),
        ("between steps", size(plan.persistent_bytes), "the stored state"),
        ("process overhead", size(plan.process_bytes), f"in addition to the peak: {_largest_part(plan)}"),
        *(
            [("peer replicas", size(plan.peer_replica_bytes), "host memory of fz.run: another rank's state")]
            if plan.peer_replica_bytes
            else []
        ),
        *([("rows of experts", *_expert_rows(plan.expert_rows))] if plan.expert_rows else []),
        ("time", duration(plan.step_seconds), f"{duration(plan.compute_seconds)} compute"),
        ("exposed transfers", duration(plan.exposed_seconds), f"{share:.1%} of the step"),
        ("bound by", plan.bound_by, f"{plan.busy[plan.bound_by]:.1%} busy"),
        ("model FLOPs", f"{plan.model_flops:.3g}", _utilisation(plan)),
        *([("bubble", f"{plan.bubble:.1%}", "of the step: stages wait for each other")] if plan.stages else []),
    ]
    out = [
        TextTable(
            f"{plan.name} on mesh {plan.mesh} of {plan.device.name}", ("per step and rank", "predicted", ""), totals
        )
    ]
    if plan.stages:
        columns = ("stage", "blocks", "peak", "between steps", "compute", "bubble", "sends")
        rows = [
            (str(n), str(x.num_blocks), size(x.peak_bytes), size(x.persistent_bytes), duration(x.compute_seconds))
            + (f"{x.bubble:.1%}", size(x.sent_bytes))
            for n, x in enumerate(plan.stages)
        ]
        out.append(TextTable("stages", columns, rows))
    roles = [(ROLE_NAMES[role], size(n), f"{n / plan.peak_bytes:.1%}") for role, n in plan.breakdown.items() if n]
    out.append(TextTable("at the peak", ("", "bytes", "share"), roles))
    if plan.host_peak_bytes or plan.disk_bytes:
        on_host = ", ".join(
            f"{ROLE_NAMES[role]} {size(n)}"
            for role, n in sorted(plan.host_breakdown.items(), key=lambda item: -item[1])
            if n
        )
        tiers = [
            ("device", size(plan.persistent_bytes), size(plan.peak_bytes), ""),
            ("host", size(plan.host_persistent_bytes), size(plan.host_peak_bytes), on_host or "the device's memory"),
            ("disk", size(plan.disk_bytes), size(plan.disk_bytes), "scratch files"),
        ]
        out.append(TextTable("memory tiers", ("", "between steps", "peak", ""), tiers))
    if plan.channels:
        columns = ("channel", "bytes", "transfers", "GB/s", "busy", "of the step", "exposed")
        rows = [
            (queue, *_moved(c), f"{plan.busy[queue]:.1%}", duration(c.exposed_seconds))
            for queue, c in plan.channels.items()
            if c.num_transfers
        ]
        out.append(TextTable("transfers", columns, rows))
    longest = sorted((w for w in plan.waits if w.seconds), key=lambda w: -w.seconds)[:_LONGEST_WAITS]
    if longest:
        waits = [(duration(w.seconds), w.channel, f"{w.line.index}: {brief(w.line.text)}") for w in longest]
        out.append(TextTable("longest waits", ("per step", "channel", "op"), waits))
    out.append(assumed(plan))
    if plan.decisions:
        out.append(TextTable("choices", ("", "chosen", "because"), plan.decisions, prose=True))
    return out


def _largest_part(plan: Plan) -> str:
    """Returns the largest part of the process, in the memory that the peak refers to, and whether it was measured."""
    where = "device" if plan.device.asynchronous else "host"
    largest = max((x for x in plan.process if x.where == where), key=lambda x: x.nbytes)
    return f"{largest.what}, {'by calibration' if largest.measured else 'assumed'}"


def _expert_rows(rows: ExpertRows) -> tuple[str, str]:
    balanced = f"{size(rows.balanced * rows.row_bytes)} if all experts are chosen equally often"
    return size(rows.reserved * rows.row_bytes), f"reserved for each exchange, at most; {balanced}"


def _utilisation(plan: Plan) -> str:
    attained = f"{plan.roofline_fraction:.1%} of"
    return (
        f"{attained} the attainable rate"
        if plan.mfu is None
        else f"{plan.mfu:.1%} of the device's peak (MFU), {attained} the attainable rate"
    )


def assumed(plan: Plan) -> TextTable:
    """Returns the rates that the plan assumes for the queues that it has."""
    device, host = plan.device, plan.device.host
    products = (
        f"{flops / 1e12:.4g} TFLOP/s in {dtype}"
        for dtype, flops in device.flops.items()
        if dtype in ("float32", "bfloat16")
    )
    rows = [("memory", size(device.memory_bytes), rate(device.memory_bandwidth)), ("products", "", ", ".join(products))]
    if any(":" in queue for queue in plan.channels):
        rows += [
            (f"link {name}", rate(link.bandwidth), f"to ranks of {_LINKS[name]}" if name in _LINKS else "as measured")
            for name, link in device.links.items()
        ]
    if plan.channels.keys() & {"to_host", "to_device"}:
        rows.append(("host copy", rate(device.host_copy.bandwidth), "each way"))
    shares = [("host memory", device.host_memory_bandwidth)] if HOST in plan.channels else []
    if DISK in plan.channels:
        shares += [("disk read", device.disk_read.bandwidth), ("disk write", device.disk_write.bandwidth)]
    whose = "while all ranks of the host are busy"
    if host is not None:
        whose = (
            f"{'for this rank only' if host.ranks == 1 else f'shared by the {host.ranks} ranks of a host'}: {host.what}"
        )
    rows += [(name, rate(attained), whose) for name, attained in shares]
    return TextTable(f"assumed of {device.name}: {device.source}", ("", "each rank", ""), rows)


_LINKS = {"intra": "the same host", "inter": "other hosts"}


def _moved(channel: Channel) -> tuple[str, ...]:
    return (
        size(channel.bytes),
        str(channel.num_transfers),
        f"{channel.bandwidth / 1e9:.3g}",
        duration(channel.busy_seconds),
    )


def plain(tables: Iterable[TextTable]) -> str:
    """Returns tables as text without colors."""
    from rich.console import Console

    text = io.StringIO()
    draw(tables, Console(file=text, width=_WIDTH, color_system=None, legacy_windows=False))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def draw(tables: Iterable[TextTable], console: Console) -> None:
    """Prints tables to a console, in its width if that is narrow."""
    from rich import table as rich
    from rich.text import Text

    width = min(_WIDTH, console.width)
    for title, columns, rows, prose in tables:
        console.print(Text(title))
        out = rich.Table(width=width, show_header=any(columns))
        for i, column in enumerate(columns):
            last = i == len(columns) - 1
            if prose:
                out.add_column(
                    column, ratio=1 if last else None, max_width=None if last else _WIDTH // 3, overflow="fold"
                )
            else:
                out.add_column(
                    column, justify="left" if i == 0 or last else "right", ratio=1 if last else None, no_wrap=True
                )
        for row in rows:
            out.add_row(*(Text(cell) for cell in row))  # no markup: ops contain brackets
        console.print(out)


def html(tables: Iterable[TextTable]) -> str:
    """Returns tables as HTML, for notebooks."""
    out = list[str]()
    for title, columns, rows, prose in tables:
        last = len(columns) - 1
        align = ["left" if prose or i in (0, last) else "right" for i in range(len(columns))]
        cells = lambda kind, row, align=align: "".join(  # noqa: E731
            f'<{kind} style="text-align: {how}">{escape(cell)}</{kind}>' for cell, how in zip(row, align, strict=True)
        )
        head = f"<thead><tr>{cells('th', columns)}</tr></thead>" if any(columns) else ""
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
        out.append(f"<table><caption>{escape(title)}</caption>{head}<tbody>{body}</tbody></table>")
    return "\n".join(out)


def brief(text: str, width: int = 84) -> str:
    """Shortens a statement to fit one cell of a table: of many results it shows the first, of many arguments as many
    as fit.
    """
    out, equals, code = text.partition(" = ")
    if equals and "(" not in out and len(text) > width and "," in out.rstrip(","):
        text = f"{out.split(',')[0]}, … = {code}"
    return text if len(text) <= width else text[: width - 1] + "…"


# --- data ---


_RENAMED = {
    "speed_of_light": "roofline_fraction",
    "resting_bytes": "persistent_bytes",
    "host_resting_bytes": "host_persistent_bytes",
    "ward_bytes": "peer_replica_bytes",
}
"""Deprecated keys of the JSON, and the new ones. JSON cannot warn, so both are included until the old ones are
removed.
"""


def as_json(plan: Plan) -> str:
    """Returns every field except the timeline and the programs as JSON. `memory` has one row per sample: line, turn,
    then bytes in the order of `memory_columns`.
    """
    apart = ("events", "lines", "stage_events", "programs", "stage")
    data = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in apart}
    data |= {
        "device": plan.device.name,
        "peak_line": plan.peak_line._asdict(),
        "breakdown": dict(plan.breakdown),
        "host_breakdown": dict(plan.host_breakdown),
        "process": [part._asdict() for part in plan.process],
        "process_bytes": plan.process_bytes,
        "bound_by": plan.bound_by,
        "busy": plan.busy,
        "channels": {name: {**c._asdict(), "bandwidth": c.bandwidth} for name, c in plan.channels.items()},
        "waits": [
            {"line": w.line.index, "text": w.line.text, "channel": w.channel, "seconds": w.seconds} for w in plan.waits
        ],
        "decisions": [d._asdict() for d in plan.decisions],
        "stages": [{**x._asdict(), "resting_bytes": x.persistent_bytes} for x in plan.stages],
        "bubble": plan.bubble,
        "memory_columns": ["line", "turn", *ROLES],
        "memory": [[s.line, s.iteration, *s.by_role] for s in plan.memory],
        "host_memory": [s.host for s in plan.memory],
    }
    data |= {old: data[new] for old, new in _RENAMED.items()}
    return json.dumps(data, indent=1) + "\n"


# --- a trace ---


def trace(plan: Plan, measured: Sequence[Event] | None) -> str:
    """Returns Chrome-trace JSON: the prediction and, if given, the measurement, each as a process with one thread per
    queue.
    """
    memory = {(s.line, s.iteration): s for s in plan.memory}
    events = _process(1, f"predicted: {plan.device.name}, mesh {plan.mesh}", plan.events, plan.lines)
    for event in plan.events:
        sample = memory.get((event.line, event.iteration)) if event.queue == COMPUTE else None
        if sample is not None:
            events.append(
                {
                    "ph": "C",
                    "pid": 1,
                    "name": "memory",
                    "ts": event.start * 1e6,
                    "args": dict(zip(ROLES, sample.by_role, strict=True)),
                }
            )
    if measured is not None:
        events += _process(2, "measured", measured, plan.lines)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _process(pid: int, name: str, events: Sequence[Event], lines: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the trace events of a process. Trace times are in microseconds."""
    threads = {queue: i for i, queue in enumerate(dict.fromkeys([COMPUTE, *sorted({e.queue for e in events})]))}
    out: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    for queue, tid in threads.items():
        out.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": queue}})
        out.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for e in events:
        if e.seconds > 0:
            args = {"line": e.line, "turn": e.iteration, "text": lines[e.line]}
            out.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": threads[e.queue],
                    "name": e.name,
                    "ts": e.start * 1e6,
                    "dur": e.seconds * 1e6,
                    "args": args,
                }
            )
    return out
