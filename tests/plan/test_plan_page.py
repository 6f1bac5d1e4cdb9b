"""The page of a plan: its contents without a browser, its errors, and, with --full, what a browser makes of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

import fzero as fz
from fzero import errors, optim
from fzero.plan.page.chart_data import event_columns, memory_columns
from fzero.plan.page.html_page import answer
from fzero.plan.page.op_costs import op_costs, shown_path
from fzero.plan.page.program_listing import listing
from fzero.plan.page.suggestions import Suggestions
from fzero.plan.render import TextTable

pytest.importorskip("vl_convert", reason="of the extra `plan`")


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]  # the line that costs most


def loss_fn(params, batch):
    for p in params:
        batch = layer(p, batch)
    return batch.square().mean()


def meta(*shape):
    return torch.empty(*shape, device="meta")


def lowered(*transforms, layers=6, width=256, device="h100", mesh=None):
    params = [{"up": meta(width, 4 * width), "down": meta(4 * width, width)} for _ in range(layers)]
    step = fz.compose(*transforms)(fz.train_step(loss_fn, optim.adamw(3e-4)))
    return fz.lower(step, mesh or fz.AbstractMesh(data=8), params, meta(64, width), device=device)


def zero_3():
    return lowered(fz.shard_params(), fz.mixed_precision("bf16"), fz.remat("full"))


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def visible(page):
    """The text of a page, without scripts and styles."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


# --- what it says ---


def test_a_page_has_the_answer_the_peak_the_program_the_users_lines_and_the_code():
    plan = zero_3().plan
    text = visible(plan.html())
    assert "It fits: " in text and "A step takes" in text and "samples per second" in text
    assert f"at op {plan.peak_line.index}" in text and "saved for the backward" in text
    assert "for i in range(" in text and "all_gather_start" in text
    assert 'return x + torch.relu(x @ p["up"]) @ p["down"] # the line that costs most' in text
    assert "mesh = fz.make_mesh(data=8)" in text and "fz.shard_params(axis='data')" in text
    assert "gather:data" in text and "of the step" in text and plan.device.source in text


def test_a_page_that_does_not_fit_says_by_how_much():
    plan = zero_3().plan
    page = plan.html(budget="1KiB")
    assert 'class="over"' in page and "It does not fit" in visible(page)
    assert answer(plan, plan.peak_bytes, "the budget").startswith("It fits")
    assert answer(plan, plan.peak_bytes - 1, "the budget").startswith("It does not fit")


def test_two_pages_of_a_plan_are_equal_and_name_no_folder_of_this_machine(tmp_path):
    first, second = zero_3().plan.html(tmp_path / "a.html"), zero_3().plan.html()
    assert first == second == (tmp_path / "a.html").read_text()
    assert str(tmp_path) not in first and __file__ not in first
    assert len(first) < 5_000_000


def test_a_page_loads_nothing():
    page = zero_3().plan.html()
    markup = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!#|data:,)', markup) and "<script src" not in page and "@import" not in markup
    assert "url(" not in re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]


def test_what_users_write_is_escaped():
    evil = "</script><script>alert(1)</script>"
    given = Suggestions(
        title=evil, problems=[evil], better=[evil], tables=[TextTable(evil, ("", evil), [(evil, evil)])], code=evil
    )
    plan = zero_3().plan
    page = replace(plan, name=evil, lines=(evil, *plan.lines[1:])).html(suggestions=given)
    assert evil not in page and html.escape(evil) in page
    assert data_of(page)["texts"][0] == evil


def test_a_notebook_shows_the_page_in_a_frame():
    page = zero_3().plan.html()
    assert page._repr_html_().startswith("<iframe srcdoc=") and html.escape(page) in page._repr_html_()


def test_a_compiled_step_has_a_page_with_what_was_measured():
    params = [{"up": torch.randn(16, 32), "down": torch.randn(32, 16)} for _ in range(2)]
    train = fz.compile(fz.train_step(loss_fn, optim.adamw(3e-4)), fz.make_mesh(data=1), backend="eager")
    _, measured = train.profile(train.init(params), torch.randn(8, 16), steps=1)
    page = train.plan.html(measured=measured)
    assert data_of(page)["queues"] == ["compute", "measured compute"] and "what was measured" in visible(page)
    assert "measured" not in data_of(train.plan.html())["queues"] and "nothing was run" in visible(train.plan.html())


# --- the program and its costs ---


def test_the_costs_of_the_ops_add_up_to_the_plan():
    found = zero_3()
    plan, program = found.plan, found.program
    costs = op_costs(program, plan.device, plan.backend, {})
    compute = sum(x.seconds for x in costs if x.kind not in ("transfer", "wait"))
    assert compute == pytest.approx(plan.compute_seconds)
    moved = sum(x.nbytes for x in costs)
    assert moved == sum(channel.bytes for channel in plan.channels.values())


def test_every_op_of_the_program_is_in_one_row_of_the_listing():
    found = lowered(fz.shard_params(), fz.accumulate(4), fz.remat("full"))
    plan, program = found.plan, found.program
    costs = op_costs(program, plan.device, plan.backend, {})

    def leaves(rows):
        for row in rows:
            yield from leaves(row.body) if row.body else [row]

    rows = listing(program, costs)
    listed = [op for row in leaves(rows) for op in row.ops]
    loops = [i for i, (op, _) in enumerate(program.walk()) if op.body]
    assert sorted(listed + loops) == list(range(len(costs)))
    assert any(row.body for row in rows)
    assert sum(x.seconds for x in leaves(rows)) == pytest.approx(sum(x.seconds for x in costs))


def test_ops_lead_to_the_users_lines():
    found = zero_3()
    costs = op_costs(found.program, found.plan.device, found.plan.backend, {})
    number = layer.__wrapped__.__code__.co_firstlineno + 2 if hasattr(layer, "__wrapped__") else None
    places = {x.kind: x.place for x in costs if x.place is not None}
    assert places["forward"][0] == places["backward"][0] == __file__
    assert number is None or places["forward"][1] == number
    gathers = [x.place for (op, _), x in zip(found.program.walk(), costs, strict=True) if op.op == "all_gather_start"]
    assert gathers and set(gathers) == {places["forward"]}  # the line that reads what is gathered
    assert shown_path(__file__).endswith("plan/test_plan_page.py")


def test_a_file_is_named_without_the_folders_of_this_machine(tmp_path, monkeypatch):
    file = tmp_path / "project" / "model.py"
    for folder, name in {"/": "project/model.py", __file__.rpartition("/")[0]: "project/model.py"}.items():
        monkeypatch.chdir(folder)
        assert shown_path(str(file)) == name
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(file)) == shown_path("project/model.py") == "project/model.py"


# --- the charts ---


def test_the_memory_of_a_long_step_is_reduced_and_keeps_its_peak():
    plan = lowered(fz.shard_params(), layers=40).plan
    columns = memory_columns(plan, 1.0, 1)
    assert len({len(column) for column in columns.values()}) == 1 and len(columns["time"]) <= 1202
    at = columns["peak"].index(True)
    assert columns["total"][at] == pytest.approx(plan.peak_bytes, rel=1e-5) == max(columns["total"])
    assert columns["time"] == sorted(columns["time"])


def test_events_that_are_too_short_to_be_seen_are_joined():
    plan = zero_3().plan
    many = [
        event._replace(start=i * plan.step_seconds + event.start, line=event.line)
        for i in range(60)
        for event in plan.events
    ]
    long = replace(plan, events=tuple(many), step_seconds=60 * plan.step_seconds)
    columns = event_columns(long, 1.0)
    assert len(columns["name"]) < len([e for e in many if e.seconds > 0])
    assert max(columns["end"]) == pytest.approx(max(e.start + e.seconds for e in many), rel=1e-4)
    assert any("events from" in name for name in columns["name"])


def test_a_pipeline_has_a_row_and_a_program_for_each_stage():
    plan = lowered(fz.pipeline(), fz.accumulate(4), mesh=fz.AbstractMesh(pipe=2)).plan
    page = plan.html()
    assert data_of(page)["queues"][:2] == ["stage 0", "stage 1"]
    text = visible(page)
    assert "Stage 0" in text and "Stage 1" in text and "bubble" in text


def test_offloaded_state_has_tiers_and_channels():
    plan = lowered(fz.shard_params(), fz.offload("nvme", ("opt_state", "params"), path="/scratch")).plan
    page = plan.html()
    assert "Memory tiers" in visible(page) and "host" in data_of(page)["memory"]
    assert {"disk", "to_device"} <= set(data_of(page)["queues"])


# --- errors ---


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("report.pdf", "a page is a .html"),
        ("missing/report.html", "the directory of"),
        (3, "a page is written to"),
        ("/proc/report.html", "'/proc/report.html' cannot be written: No such file or directory"),
    ],
)
def test_a_path_that_is_no_page_is_rejected(tmp_path, path, said):
    plan = zero_3().plan
    with pytest.raises(errors.FzeroError) as error:
        plan.html(tmp_path / path if isinstance(path, str) else path)
    assert said in str(error.value) and "Fix:" in str(error.value)


def test_a_page_without_vl_convert_says_what_to_install(monkeypatch):
    plan = zero_3().plan
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(errors.FzeroValueError) as error:
        plan.html()
    assert "pip install" in str(error.value)


# --- in a browser ---

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # there is no network
    "--enable-logging=stderr",
    "--virtual-time-budget=15000",
    "--dump-dom",
)
# A window has a least width, a frame has none. What is in the frame is written to the frame's own document.
FRAME = """<!DOCTYPE html><body style="margin: 0">{frame}<script>
const frame = document.querySelector("iframe");
frame.style = "width: {width}px; height: 1900px; border: 0";
setInterval(() => {{
  const inside = frame.contentDocument, box = (x) => x.getBoundingClientRect().width;
  if (!inside?.body?.dataset.drawn) return;  // the scripts are still running
  document.body.dataset.seen = JSON.stringify({{
    drawn: inside.body.dataset.drawn,
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map((x) => x.name),
    wide: inside.documentElement.scrollWidth,
    charts: [...inside.querySelectorAll("canvas")].map(box),
    failed: inside.querySelectorAll(".failed").length,
    paper: frame.contentWindow.getComputedStyle(inside.body).backgroundColor,
    answer: inside.querySelector("h1").textContent,
  }});
}}, 50);
</script>"""


def seen(page, folder, width, dark):
    """Opens a page in a frame in Chromium, without a network, as a notebook does. Returns what is in the frame after
    the scripts have run, and what the console said."""
    path = folder / "report.html"
    path.write_text(FRAME.format(frame=page._repr_html_(), width=width))
    options = [
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(width, 600)},2000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    command = [CHROMIUM, *FLAGS, *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[-2000:]
    return json.loads(html.unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_a_browser_draws_the_page_without_errors_and_without_the_network(tmp_path, width, dark):
    found, said = seen(zero_3().plan.html(budget="24GB"), tmp_path, width, dark)
    assert said == [] and found["loaded"] == []
    assert found["drawn"] == "2" and found["failed"] == 0 and "It fits" in found["answer"]
    assert found["wide"] == width  # nothing sticks out to the right
    assert len(found["charts"]) == 2 and all(0.8 * width < x < width for x in found["charts"])
    assert (found["paper"] == "rgb(255, 255, 255)") is not dark
