"""Makes the HTML page of a plan: its sentences and tables, the charts' data, and the scripts that draw them."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fzero._utils.units import as_argument, duration, size
from fzero.errors import FzeroValueError
from fzero.plan.memory import ROLE_NAMES
from fzero.plan.page.chart_data import chart_data
from fzero.plan.page.op_costs import KINDS, OpCost, line_seconds, op_costs, shown_path
from fzero.plan.page.program_listing import Row, listing
from fzero.plan.page.suggestions import Suggestions
from fzero.plan.render import assumed, brief, tables
from fzero.plan.timeline import Event
from fzero.sharding.placements import Varying
from fzero.trace.guards.user_frames import Place

if TYPE_CHECKING:
    from fzero.plan.plan import Plan

_FILES = resources.files("fzero.plan.page")
_CONTEXT = 3  # lines of code shown before and after a line that costs something
_APART = 8  # lines: two lines of code that are further apart are shown as two excerpts


class Page(str):
    """An HTML page. A notebook shows it in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 80vh; border: 1px solid #8884; border-radius: 6px"
        return f'<iframe srcdoc="{escape(self)}" style="{style}" title="plan of a training step"></iframe>'


def page(
    plan: Plan,
    path: Path | None,
    budget: int | None,
    measured: Sequence[Event] | None,
    suggestions: Suggestions | None = None,
) -> Page:
    """Returns the page of a plan, and writes it if there is a path; see `Plan.html`."""
    check_charts()
    if path is not None and path.suffix not in (".html", ".htm"):
        raise FzeroValueError("plan", f"a page is a .html, not {path.name!r}", fix=f"name it {path.stem}.html")
    given = suggestions or Suggestions()
    memory, source = _memory(plan, budget, given)
    files = {name: (_FILES / name).read_text("utf-8") for name in ("page.css", "page.js")}
    costs = [_stage_costs(plan, stage) for stage in range(len(plan.programs))]
    seconds = line_seconds(plan.programs[plan.stage], costs[plan.stage], plan.device, plan.backend)
    text = _template().render(
        plan=plan,
        title=given.title or f"{plan.name} on {plan.mesh} of {plan.device.name}",
        answer=answer(plan, memory, source),
        fits=None if memory is None else plan.peak_bytes <= memory,
        tiles=_tiles(plan, memory),
        shares=_shares(plan, memory),
        given=given,
        measured=bool(measured),
        peak_row=_peak(plan, costs[plan.stage]),
        tables={t.title: t for t in tables(plan)},
        assumed=assumed(plan),
        programs=[(stage, listing(x, costs[stage])) for stage, x in enumerate(plan.programs)],
        total=max(plan.step_seconds, 1e-12),
        excerpts=list(_excerpts(seconds)),
        hottest=max((sum(kinds.values()) for kinds in seconds.values()), default=1.0) or 1.0,
        code=given.code or code_of(plan, budget),
        data=chart_data(plan, memory, measured) | {"texts": _texts(plan), "words": ROLE_NAMES},
        kinds=KINDS,
        css=files["page.css"],
        js=files["page.js"],
        bundle=_charts(),
    )
    if path is not None:
        path.write_text(text, "utf-8")
    return Page(text)


def check_charts() -> Any:
    """Returns the library of the charts, or raises an error that says how to install it."""
    try:
        import vl_convert  # pyright: ignore[reportMissingImports] - of the extra `plan`
    except ImportError as error:
        fix = "pip install 'fzero[plan]', or pip install vl-convert-python"
        raise FzeroValueError("plan", "a page with charts needs vl-convert", [str(error)], fix) from error
    return vl_convert


@functools.cache
def _charts() -> str:
    """Returns the script with Vega, Vega-Lite and Vega-Embed."""
    return check_charts().javascript_bundle().replace("</script", "<\\/script")


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters |= {"size": size, "duration": duration, "brief": brief, "place": _place, "anchor": _anchor}
    return environment.from_string((_FILES / "page.html.jinja").read_text("utf-8"))


# --- the answer ---


def _memory(plan: Plan, budget: int | None, given: Suggestions) -> tuple[int | None, str]:
    """Returns the bytes that the program of a rank may use, and what they are; None if nothing says how many."""
    if budget is not None:
        return budget, "the budget"
    if given.memory is not None:
        return given.memory, given.memory_source
    if plan.device.asynchronous or plan.device.machine:
        return plan.device.memory_bytes - plan.process_bytes, f"available to a process on {plan.device.name}"
    return None, ""


def answer(plan: Plan, memory: int | None, source: str) -> str:
    """Returns the answer in a sentence: whether the step fits, and how fast it is."""
    peak = max([plan.peak_bytes, *(stage.peak_bytes for stage in plan.stages)])
    step = f"a step takes {duration(plan.step_seconds)}"
    if (speed := throughput(plan)) is not None:
        step += f", {speed[0]:,.0f} {speed[1]} per second on all ranks"
    if memory is None:
        return f"{step[0].upper()}{step[1:]}, and a rank needs {size(peak)} at the peak."
    if peak <= memory:
        return f"It fits: {size(peak)} of {size(memory)} ({source}). {step[0].upper()}{step[1:]}."
    return f"It does not fit: a rank needs {size(peak)}, {size(peak - memory)} more than {size(memory)} ({source})."


def throughput(plan: Plan) -> tuple[float, str] | None:
    """Returns how much all ranks train on per second, and its unit: tokens if the batch has integers in two
    dimensions, such as [batch, positions], and samples otherwise. None for a step without a batch.
    """
    program = plan.programs[0] if plan.programs else None
    batch = [v for v in program.inputs if v.name not in program.leaves and v.shape] if program else []
    if program is None or not batch or not plan.step_seconds:
        return None
    first = next((v for v in batch if not v.dtype.is_floating_point and len(v.shape) == 2), batch[0])
    tokens = not first.dtype.is_floating_point and len(first.shape) == 2
    number = first.numel if tokens else first.shape[0]
    ranks = program.mesh.axis_size(first.placement.over(Varying))
    return number * ranks / plan.step_seconds, "tokens" if tokens else "samples"


class _Tile(NamedTuple):
    """A number of the answer, with its name and a remark."""

    name: str
    number: str
    remark: str


def _tiles(plan: Plan, memory: int | None) -> list[_Tile]:
    exposed = plan.exposed_seconds / plan.step_seconds if plan.step_seconds else 0.0
    found = [_Tile("step", duration(plan.step_seconds), f"{duration(plan.compute_seconds)} compute")]
    if (speed := throughput(plan)) is not None:
        found.append(_Tile(f"{speed[1]} per second", f"{speed[0]:,.0f}", "on all ranks"))
    found.append(_Tile("peak memory", size(plan.peak_bytes), "" if memory is None else f"of {size(memory)}"))
    if plan.host_peak_bytes:
        found.append(_Tile("host memory", size(plan.host_peak_bytes), "at its peak, each rank"))
    if plan.disk_bytes:
        found.append(_Tile("disk", size(plan.disk_bytes), "scratch files, each rank"))
    found.append(_Tile("bound by", plan.bound_by, f"{plan.busy[plan.bound_by]:.0%} busy"))
    found.append(_Tile("compute waits", f"{exposed:.1%}", f"of the step, {duration(plan.exposed_seconds)}"))
    if plan.mfu is not None:
        found.append(_Tile("MFU", f"{plan.mfu:.1%}", f"{plan.roofline_fraction:.0%} of what the device attains"))
    if plan.stages:
        found.append(_Tile("bubble", f"{plan.bubble:.1%}", "of the step, stages wait for each other"))
    return found


def _shares(plan: Plan, memory: int | None) -> list[tuple[str, int, float]]:
    """Returns the roles at the peak: name, bytes, and the share of the peak; or of the memory, if not much is free."""
    of = max(plan.peak_bytes, memory if memory is not None and memory < 2 * plan.peak_bytes else 0, 1)
    return [(role, n, n / of) for role, n in plan.breakdown.items() if n]


def code_of(plan: Plan, budget: int | None) -> str:
    """Returns the calls that make the planned step of a step without transforms."""
    program = plan.programs[plan.stage]
    mesh = ", ".join(f"{axis}={n}" for axis, n in program.mesh.axes.items())
    transforms = ",\n    ".join(f"fz.{transform}" for transform in program.transforms)
    made = f"step = fz.compose(\n    {transforms},\n)(step)\n" if transforms else ""
    limit = "" if budget is None else f', memory_budget="{as_argument(budget)}"'
    return f"import fzero as fz\n\nmesh = fz.make_mesh({mesh})\n{made}train = fz.compile(step, mesh{limit})\n"


# --- the program and the user's lines ---


def _stage_costs(plan: Plan, stage: int) -> list[OpCost]:
    exposed: dict[int, float] = {}
    if stage == plan.stage:
        exposed = {wait.line.index: wait.seconds for wait in plan.waits}
    return op_costs(plan.programs[stage], plan.device, plan.backend, exposed)


def _peak(plan: Plan, costs: Sequence[OpCost]) -> Row:
    """Returns the op at which the memory is at its peak, as a row."""
    at = plan.peak_line.index
    return Row(brief(plan.peak_line.text, 160), ops=(at,), kind=costs[at].kind, place=costs[at].place)


def _texts(plan: Plan) -> list[str]:
    """Returns the text of each op for the charts: the op in short, and the user's line."""
    return [brief(text, 100) for text in plan.lines]


class _Excerpt(NamedTuple):
    """Lines of one file: number, text, and seconds per step by kind (empty for a line without cost). The number is
    None where lines are left out.
    """

    path: str
    lines: list[tuple[int | None, str, Mapping[str, float]]]


def _excerpts(seconds: Mapping[Place, Mapping[str, float]]) -> Iterator[_Excerpt]:
    """Yields the lines of the user's code that cost something, with their neighbours, the costliest file first."""
    files: dict[str, dict[int, Mapping[str, float]]] = {}
    for (file, number), kinds in seconds.items():
        files.setdefault(file, {})[number] = kinds
    for file in sorted(files, key=lambda file: -sum(sum(kinds.values()) for kinds in files[file].values())):
        lines = list[tuple[int | None, str, Mapping[str, float]]]()
        for group in _groups(sorted(files[file])):
            last = max(group[-1], min(group[-1] + _CONTEXT, len(linecache.getlines(file))))
            lines += [(None, "", {})] if lines else []
            for number in range(max(1, group[0] - _CONTEXT), last + 1):
                lines.append((number, linecache.getline(file, number).rstrip(), files[file].get(number, {})))
        yield _Excerpt(shown_path(file), lines)


def _groups(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yields runs of line numbers without a large gap."""
    group = [numbers[0]]
    for before, number in pairwise(numbers):
        if number - before > _APART:
            yield group
            group = []
        group.append(number)
    yield group


def _place(place: Place) -> str:
    return f"{Path(shown_path(place[0])).name}:{place[1]}"


def _anchor(path: str, number: int) -> str:
    """Returns the identifier of a line of code in the page."""
    return f"{shown_path(path)}:{number}".replace(" ", "_")
