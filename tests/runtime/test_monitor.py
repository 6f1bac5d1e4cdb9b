"""What is logged of a loop: lines, JSON lines, trackers (`fz.log`)."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import types

import pytest
import rich.console
import torch

import fzero as fz


def trained():
    step = fz.train_step(
        lambda p, x: ((x @ p["w"]).square().mean(), {"half": {"of": x.mean() / 2}, "wide": x}),
        fz.optim.sgd(0.1),
        has_aux=True,
    )
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    return train, train.init({"w": torch.eye(4)})


def take(train, state, report, steps: int, **more):
    for _ in range(steps):
        state, metrics = train(state, torch.ones(2, 4))
        report(state, metrics, **more)
    return state


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_and_what_goes_on_from_them(tmp_path):
    """Steps that come again take the place of those that a run before had written, a line cut off among them."""
    path, said = tmp_path / "deep" / "log.jsonl", []
    train, state = trained()
    with fz.log(train, path, steps=40, tokens=8, lr=lambda step: 0.1 * (step + 1), print_fn=said.append) as report:
        take(train, state, report, 40)
    first = records(path)
    assert [r["step"] for r in first] == list(range(1, 41))
    assert first[2]["lr"] == pytest.approx(0.3) and first[2]["half.of"] == 0.5 and "wide" not in first[2]
    assert first[2]["tokens_per_s"] == pytest.approx(8 / first[2]["step_s"]) and first[2]["peak_bytes"] > 1 << 20
    assert len(said) == 21 and said[0].startswith("step  1/40  loss 1.0000  grad_norm "), "the first, then every second"
    assert said[-1].startswith("step 40/40  loss ")

    with path.open("a") as file:
        file.write('{"step": 41, "lo')
    train, state = trained()
    for _ in range(10):
        state, _ = train(state, torch.ones(2, 4))
    with fz.log(train, path, print_fn=said.append) as report:
        take(train, state, report, 2, rows=2)
    again = records(path)
    assert [r["step"] for r in again] == list(range(1, 13)) and again[:10] == first[:10] and again[-1]["rows"] == 2
    assert said[-1].startswith("step 11  loss ") and said[-1].endswith("  rows 2"), "then seldom, by the clock"


def test_a_schedule_is_called_as_the_optimizer_calls_it():
    """The schedule of docs/migrate/pytorch.md, which uses torch functions of the step."""

    def schedule(step):
        return 0.1 * torch.clamp((step + 1) / 4, max=1.0) * 0.5 * (1 + torch.cos(math.pi * step / 40))

    found = []
    train, state = trained()
    with fz.log(train, None, lr=schedule, to=found.append, print_fn=lambda line: None) as report:
        take(train, state, report, 6)
    expected = [0.1 * min(1.0, (k + 1) / 4) * 0.5 * (1 + math.cos(math.pi * k / 40)) for k in range(6)]
    assert [r["lr"] for r in found] == pytest.approx(expected, rel=1e-6)


def test_a_record_that_fails_is_not_logged_again_when_the_log_closes():
    asked = []

    def schedule(step):
        asked.append(int(step))
        return torch.ones(2)

    train, state = trained()
    with (
        pytest.raises(fz.errors.FzeroTypeError, match="a schedule returns one number"),
        fz.log(train, None, lr=schedule, print_fn=lambda line: None) as report,
    ):
        take(train, state, report, 2)
    assert asked == [0]


def test_a_terminal_has_one_live_line(monkeypatch):
    out = io.StringIO()
    terminal = rich.console.Console(file=out, force_terminal=True, width=150)
    monkeypatch.setattr(rich.console, "Console", lambda: terminal)
    train, state = trained()
    with fz.log(train, None, steps=3, below=lambda r: f"below step {r['step']}") as report:
        take(train, state, report, 3)
    assert "step 3/3" in out.getvalue() and "▁" in out.getvalue() and "below step" in out.getvalue()


@pytest.mark.parametrize(("width", "bar", "curve"), [(40, False, False), (80, False, False), (150, True, True)])
def test_a_narrow_terminal_keeps_the_step_and_the_time(monkeypatch, width, bar, curve):
    """The curve of the loss goes first, then the bar."""
    out = io.StringIO()
    terminal = rich.console.Console(file=out, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(rich.console, "Console", lambda: terminal)
    with fz.log(path=None, steps=250, tokens=8192, lr=1e-3) as report:
        for step in range(1, 31):
            report(step, {"loss": 12.0 - step / 10, "grad_norm": 11.5})
    lines = [line for line in out.getvalue().splitlines() if "step 30/250" in line]
    whole = re.compile(r"step 30/250 .*loss 9\.0000.* (\d+:\d\d:\d\d|-:--:--)")
    assert lines and all(map(whole.search, lines)), lines
    assert all(("━" in line, "▁" in line) == (bar, curve) for line in lines)
    assert all(len(re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", line).strip("\r")) <= width for line in lines)


def test_trackers(monkeypatch):
    logged = []
    wandb = types.SimpleNamespace(run=object(), log=lambda record, step: logged.append((step, record)))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train, state = trained()
    with fz.log(train, None, to=["wandb", logged.append], print_fn=lambda line: None) as report:
        take(train, state, report, 2, note="text")
    (step, scalars), record = logged[:2]
    assert step == record["step"] == 1 and scalars["loss"] == record["loss"] and record["note"] == "text"
    assert "note" not in scalars and set(scalars) < set(record)


def test_what_is_wrong_is_said_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(fz.errors.FzeroValueError, match=r"'mlflow' is not installed") as error:
        fz.log(path=None, to="mlflow")
    assert str(error.value).endswith("Fix: pip install mlflow")
    with pytest.raises(fz.errors.FzeroValueError) as error:
        fz.log(torch.nn.Linear(2, 2), 3, steps=0, to="tensorbord")
    text = str(error.value)
    assert all(part in text for part in ("not a compiled step", "path=3", "steps=0", "to='tensorbord'")), text
    with fz.log(path=None) as report, pytest.raises(fz.errors.FzeroTypeError, match=r"report\(state, metrics\)"):
        report({"loss": 1.0}, {})


def other_rank(path: str) -> list[str]:
    """Every rank calls the log, and the first alone writes."""
    said: list[str] = []
    step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1)))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state = train.init({"w": torch.eye(4)})
    with fz.log(train, path, print_fn=said.append) as report:
        take(train, state, report, 2)
    return said


def test_the_first_rank_alone_writes(run_ranks, tmp_path):
    first, second = run_ranks(2, other_rank, str(tmp_path / "log.jsonl"))
    assert len(first) == 1 and second == [] and [r["step"] for r in records(tmp_path / "log.jsonl")] == [1, 2]
