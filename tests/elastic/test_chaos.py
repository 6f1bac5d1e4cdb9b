"""The short form of tests/chaos.py: a few faults of two runs under torchrun, as a process; and that its conditions can
fail."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chaos
import pytest
from scripts import ROOT, environment

pytestmark = pytest.mark.forks


@pytest.mark.full
def test_runs_go_on_as_if_there_were_no_faults(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "chaos.py"), "--kills", "5", "--steps", "40", "--seed", "0"]
    flags = ["--ranks", "2", "--kinds", "transfer,disk,slot,build,host", "--out", str(tmp_path / "out")]
    flags += ["--results", str(tmp_path)]
    done = subprocess.run([*command, *flags], env=environment(), capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "chaos.json").read_text())
    verdicts = {c["number"]: c["verdict"] for c in found["conditions"]}
    assert verdicts == {n: "not exercised" if n in (5, 6) else "verified" for n in range(1, 11)}, done.stdout
    struck = {kind: sum(n) for kind, n in found["kinds"].items() if any(n)}
    assert struck == dict.fromkeys(("transfer", "disk", "slot", "build", "host"), 1)
    assert [c["times"] for c in found["conditions"]][-1] == 1, "a flipped bit in a slot"


def test_a_plan_is_of_its_seed() -> None:
    shares = chaos.shares(100, 400, list(chaos.KINDS))
    assert {leg: (num, steps) for leg, (num, steps, _) in shares.items()} == {
        "disk": (71, 400), "hosts": (25, 100), "resized": (4, 100)
    }  # fmt: skip
    for leg, (num, steps, kinds) in shares.items():
        plans = [chaos.planned(argparse.Namespace(ranks=3, seed=s), leg, num, steps, kinds) for s in (0, 0, 1)]
        assert plans[0] == plans[1] and (plans[0] != plans[2] or leg == "resized")
        assert {s.kind for s in plans[0]} == set(kinds) and len({s.fault for s in plans[0]}) == num
        assert all(s.rank < 3 and (0 < s.step < steps - 2 or s.kind in chaos.ONCE) for s in plans[0])
        assert [s.step for s in plans[0] if s.kind in ("first", "last")] in ([], [0, steps - 1])


def noted(driver: chaos.Driver, losses: dict[int, float], *more: Any) -> None:
    """Has two ranks of a run have noted these losses, and rank 0 more."""
    for rank in (0, 1):
        lines = [["from", "init", 0, 2], *([w, s, *x] for s, loss in losses.items() for w, x in turns_of(loss))]
        lines += [*(more if rank == 0 else ()), ["end", "digest"]]
        text = "".join(json.dumps([float(i), 1, 0.01 * i, *line]) + "\n" for i, line in enumerate(lines))
        (driver._out / f"notes-{rank}").write_text(text)


def turns_of(loss: float) -> list[tuple[str, list[float]]]:
    return [("done", [loss]), ("kept", [])]


def driver(tmp_path: Path, name: str, kind: str = "", calm: bool = False, leg: str = "hosts") -> chaos.Driver:
    args = argparse.Namespace(out=tmp_path / name, ranks=2, hang=10.0, kills=1)
    plan = [chaos.Strike("000-x-0".replace("x", kind), 0, kind, 0, "step", kind, 2)] if kind else []
    made = chaos.Driver(args, leg, 4, plan, calm)
    made.ended, made.seconds = "whole", 1.0
    (made._out / "output").write_text("")
    for strike in plan:
        (made.taken / strike.id).write_text("6.5")
    return made


CALM = {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}


@pytest.mark.parametrize(
    ("kind", "failed", "change"),
    [
        ("trainer", set(), lambda d: None),
        ("trainer", {1, 4}, lambda d: setattr(d, "ended", "no step")),
        ("trainer", {1, 4}, lambda d: d.plan.append(chaos.Strike("001-two-0", 1, "two", 0, "step", "kill", 3))),
        ("trainer", {2, 4}, lambda d: noted(d, {**CALM, 3: 2.0000002})),
        ("trainer", {2, 3, 4}, lambda d: noted(d, {1: 4.0, 2: 3.0, 4: 1.0})),
        ("trainer", {3, 4}, lambda d: noted(d, CALM, ["from", "memory", 3, 2])),
        ("host", set(), lambda d: noted(d, CALM, ["from", "memory", 3, 2])),
        ("host", {3, 4}, lambda d: noted(d, CALM, ["from", "memory", 2, 2])),
        ("trainer", {4}, lambda d: d.saved.mkdir()),
        ("trainer", {3, 4}, lambda d: noted(d, CALM, ["from", "init", 0, 2])),
        ("stop", {5}, lambda d: None),
        ("stop", set(), lambda d: d.named.append(20.0)),
        ("torchrun", {6}, lambda d: d.slow.append("still there")),
        ("trainer", {8}, lambda d: (d._out / "tmp" / "pool").write_text("")),
        ("slot", {10}, lambda d: noted(d, CALM, ["flipped", "slot", 1, 2])),
        ("slot", {10}, lambda d: (d._out / "output").write_text("what rank 1 kept after 2 batches has changed")),
    ],
)  # fmt: skip
def test_each_condition_can_fail(tmp_path: Path, kind: str, failed: set[int], change: Any) -> None:
    calm, struck = driver(tmp_path, "calm", calm=True), driver(tmp_path, "struck", kind)
    for one in (calm, struck):
        noted(one, CALM)
    change(struck)
    conditions = chaos.judge([(struck, calm)], struck._args)
    assert {c.number for c in conditions if c.verdict == "failed"} == failed, [c.problems for c in conditions]


def test_other_conditions_can_fail(tmp_path: Path) -> None:
    """No warning of a full disk, no error of a stop on a full disk, a checkpoint that is not there; too many CPU
    seconds."""
    calm, struck = (driver(tmp_path, name, kind, leg="disk") for name, kind in (("calm", ""), ("struck", "disk")))
    for one in (calm, struck):
        noted(one, CALM)
    slow = [[0.0, 1, 1.0, "kept", 4], [1.0, 1, 1.5, "from", "memory", 4, 2], [2.0, 1, 4.0, "done", 4, 1.0]]
    full = [[0.0, 1, 1.0, "full", 9, False], [0.0, 1, 1.0, "full", 3, True]]
    with (struck._out / "notes-1").open("a") as f:
        f.writelines(json.dumps(line) + "\n" for line in (*full, *slow))
    conditions = chaos.judge([(struck, calm)], struck._args)
    assert [c.number for c in conditions if c.verdict == "failed"] == [7, 9], [c.problems for c in conditions]
    assert len(conditions[6].problems) == 3 and conditions[8].problems == ["survivor: 3.0"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kinds", "fire"], "--kinds: fire: of trainer,"),
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--kills", "101"], "--kills between 1 and a quarter of --steps"),
    ],
)
def test_wrong_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", ["chaos.py", *flags])
        chaos.main()
    assert words in capsys.readouterr().err
