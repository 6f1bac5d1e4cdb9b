"""Draws a plan: each queue over the time of a step, next to the measured queues, and the memory below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fzero._utils.units import duration
from fzero.errors import FzeroValueError
from fzero.plan.memory import ROLE_NAMES, ROLES, Sample
from fzero.plan.render import brief
from fzero.plan.timeline import COMPUTE, Event

if TYPE_CHECKING:
    from fzero.plan.plan import Plan

_NAMED = 0.045  # of the width: bars at least this long have room for their names
_LETTER = 0.0062  # of the width: one letter of a name
_MORE = " more iterations"  # of a loop, which the timeline merges into one event
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def picture(plan: Plan, path: Path, budget: int | None, measured: Sequence[Event] | None) -> None:
    """Draws the timelines and the memory over one time axis; see `Plan.save_picture`."""
    if path.suffix not in (".png", ".svg"):
        raise FzeroValueError("plan", f"a picture is a .png or .svg, not {path.name!r}", fix="name it so")
    Figure = check_matplotlib()
    shown: dict[str, Sequence[Event]] = {}
    if plan.stages:
        shown[f"stages, of which {plan.bubble:.1%} is bubble"] = [
            e._replace(queue=f"stage {n}")
            for n, events in enumerate(plan.stage_events)
            for e in events
            if e.queue == COMPUTE
        ]
    shown[f"predicted: {duration(plan.step_seconds)} a step"] = plan.events
    if measured:
        shown[f"measured: {duration(max(e.start + e.seconds for e in measured))} a step"] = measured
    ends = [plan.step_seconds, *(e.start + e.seconds for events in shown.values() for e in events)]
    scale, unit = next((s for s in _SECONDS if max(ends) >= s[0]), _SECONDS[-1])
    queues = [sorted({e.queue for e in events}, key=lambda q: (q != COMPUTE, len(q), q)) for events in shown.values()]
    heights = [0.6 + 0.42 * len(rows) for rows in queues]
    figure = Figure(figsize=(11, sum(heights) + 3.9), layout="constrained")
    *lanes, memory = figure.subplots(len(shown) + 1, 1, sharex=True, height_ratios=[*heights, 3.6])
    for axes, rows, (title, events) in zip(lanes, queues, shown.items(), strict=True):
        _draw_queues(axes, rows, events, max(ends), scale)
        axes.set_title(title, loc="left", fontsize=9)
    _add_legend(lanes[0], [e for events in shown.values() for e in events])
    _draw_memory(memory, plan, budget, scale)
    memory.set(xlim=(0, max(ends) / scale or 1), xlabel=unit)
    figure.suptitle(f"{plan.name} on mesh {plan.mesh} of {plan.device.name}", fontsize=11)
    figure.savefig(path, dpi=150)


def check_matplotlib() -> Any:
    """Returns matplotlib's class of figures, or raises an error that says how to install it."""
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports] - of the extra `plan`
    except ImportError as error:
        raise FzeroValueError("plan", "a picture needs matplotlib", [str(error)], "pip install matplotlib") from error
    return Figure


def _draw_queues(axes: Any, queues: list[str], events: Sequence[Event], last: float, scale: float) -> None:
    """Draws one row per queue, compute first. Transfers that compute waits for are hatched."""
    for row, queue in enumerate(queues):
        for waits in (False, True):
            of = [e for e in events if e.queue == queue and e.seconds > 0 and e.name.startswith("wait ") == waits]
            look = {"facecolor": "white", "edgecolor": "C3", "hatch": "////"} if waits else {"facecolor": f"C{row}"}
            # One call for all bars of the same look: matplotlib takes seconds for thousands of separate patches.
            for together in (False, True):
                spans = [(e.start / scale, e.seconds / scale) for e in of if e.name.endswith(_MORE) == together]
                drawn = {"edgecolor": "white", "linewidth": 0.4, "alpha": 0.5 if together else 1.0, **look}
                axes.broken_barh(spans, (row - 0.38, 0.76), **drawn)
            for e in of:
                if e.seconds >= _NAMED * last:
                    name = brief(e.name, max(4, int(e.seconds / last / _LETTER)))
                    where = ((e.start + e.seconds / 2) / scale, row)
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if waits else None
                    color = "C3" if waits else "white"
                    axes.annotate(
                        name, where, ha="center", va="center", fontsize=6, color=color, bbox=box, parse_math=False
                    )
    axes.set(yticks=range(len(queues)), yticklabels=queues, ylim=(len(queues) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)


def _add_legend(axes: Any, events: Sequence[Event]) -> None:
    """Explains the bars that are drawn. Their colors are those of their rows."""
    from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports] - of the extra `plan`

    looks = [Patch(facecolor="gray", label="at work, a color a row")]
    if any(e.name.startswith("wait ") for e in events):
        looks.append(Patch(facecolor="white", edgecolor="C3", hatch="////", label="compute waits"))
    if any(e.name.endswith(_MORE) for e in events):
        looks.append(Patch(facecolor="gray", alpha=0.5, label="more iterations of a loop"))
    axes.legend(handles=looks, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_memory(axes: Any, plan: Plan, budget: int | None, scale: float) -> None:
    """Draws the memory stacked by role, with the peak and its op."""
    unit, name = _unit(max(plan.peak_bytes, plan.host_peak_bytes, budget or 0))
    points = list(memory_over_time(plan))
    # The last sample holds until the end of the step, which may be later than the last op because transfers are still
    # under way.
    points.append((max(plan.step_seconds, points[-1][0]), points[-1][1]))
    times = [time / scale for time, _ in points]
    rows = [[s.by_role[i] / unit for _, s in points] for i in range(len(ROLES))]
    shown = [i for i in range(len(ROLES)) if any(rows[i])]
    colors = ["lightgray" if ROLES[i] == "idle_pool" else f"C{i}" for i in shown]
    labels = [ROLE_NAMES[ROLES[i]] for i in shown]
    axes.stackplot(times, [rows[i] for i in shown], labels=labels, colors=colors, step="post", linewidth=0)
    peak = max(range(len(points)), key=lambda i: points[i][1].total)
    top, left = plan.peak_bytes / unit, times[peak] < times[-1] / 2
    axes.plot([times[peak]], [top], "k.", markersize=8, label="peak")
    axes.annotate(
        f"{top:.3g} {name} at op {plan.peak_line.index}\n{brief(plan.peak_line.text, 70)}",
        (times[peak], top),
        xytext=(8 if left else -8, 6),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom",
        # over the line that marks a budget
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        zorder=5,
        fontsize=8,
        family="monospace",
        parse_math=False,
    )
    if plan.host_peak_bytes:
        host = [s.host / unit for _, s in points]
        axes.plot(times, host, color="black", linewidth=1, drawstyle="steps-post", label="host memory")
    if budget is not None:
        axes.axhline(budget / unit, color="black", linestyle="--", linewidth=1, label="budget")
    highest = max(top, plan.host_peak_bytes / unit, (budget or 0) / unit)
    axes.set(ylim=(0, 1.25 * highest), ylabel=f"{name} on each rank")
    axes.set_title("memory", loc="left", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def memory_over_time(plan: Plan) -> Iterator[tuple[float, Sample]]:
    """Yields the samples with the time from which they hold, which is when compute reaches their ops. Iterations of a
    loop after the second look like the second; for iterations that the timeline merges, the largest sample counts.

    """
    spans = {(e.line, e.iteration): (e.start, e.start + e.seconds) for e in plan.events if e.queue == COMPUTE}
    more = [e for e in plan.events if e.name.endswith(_MORE)]
    now, repeated = 0.0, list[Sample]()
    for sample in (*plan.memory, None):
        if repeated and (sample is None or not sample.iteration):
            lines = {s.line for s in repeated}
            for iteration in range(2, 1 + max((t for n, t in spans if n in lines), default=1)):
                for again in repeated:
                    begins, now = spans.get((again.line, iteration), (now, now))
                    yield begins, again
            for event in more:
                if (event.line + 1) in lines:
                    yield event.start, max(repeated, key=lambda s: s.total)
                    now = event.start + event.seconds
            repeated = []
        if sample is not None:
            begins, now = spans.get((sample.line, sample.iteration), (now, now))
            yield begins, sample
            repeated += [sample] if sample.iteration else []


def _unit(num: float) -> tuple[float, str]:
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num >= scale:
            return scale, unit
    return 1.0, "B"
