"""The first half hour on a GPU, rehearsed on a CPU: it starts, parses, goes on where it was and writes its page."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
APART = {"beside_036b", "offload_7b"}
"""Checks that run another script; those run by themselves below."""


@pytest.fixture(scope="module")
def hour() -> Any:
    """The modules `gpu_hour` and `gpu_checks`, which need rich."""
    pytest.importorskip("rich")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("gpu_hour"), importlib.import_module("gpu_checks")
    finally:
        sys.path.remove(str(BENCHMARKS))


def _told(out: Path, **more: Any) -> argparse.Namespace:
    given = {"device": "cpu", "small": True, "out": out, "only": None, "again": False, "minutes": 9.5, **more}
    return argparse.Namespace(**given)


def test_every_check_runs_small_or_says_why_not(hour: Any, tmp_path: Path) -> None:
    script, checks = hour
    for check in checks.CHECKS.values():
        if check.name in APART:
            continue
        result = tmp_path / f"{check.step}_{check.name}.json"
        script.run_check(check.name, _told(tmp_path, result=result))
        found = {"check": check.name, "step": check.step, "device": "cpu", "small": True, "seconds": 1.0}
        result.write_text(json.dumps(found | json.loads(result.read_text())))
        found = json.loads(result.read_text())
        assert "error" not in found, found["error"]
        assert found.get("skipped", "x") and ("skipped" in found or found["values"])
        assert all(t["verdict"] == "met" for t in found.get("targets", ())), found
    assert script.page(tmp_path) == 0
    page = (tmp_path / "gpu_hour.md").read_text()
    assert "losses beside a CPU's | 0 | at most 1e-05 | met" in page and "not run yet" in page
    assert all(f"{c.step} {c.name} |" in page for c in checks.CHECKS.values())


def test_steps_are_at_most_ten_minutes_and_all_of_them_half_an_hour(hour: Any) -> None:
    checks = hour[1].CHECKS.values()
    for step in hour[1].STEPS:
        assert 0 < sum(c.seconds for c in checks if c.step == step) < 570
    assert sum(c.seconds for c in checks) <= 1800


def test_targets() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        target = importlib.import_module("gpu_checks").Target
    finally:
        sys.path.remove(str(BENCHMARKS))
    verdicts = [target("x", value, 0.9, 1.1).told()["verdict"] for value in (0.89, 0.9, 1.1, 1.2, float("nan"))]
    assert verdicts == ["MISSED", "met", "met", "MISSED", "MISSED"]
    assert target("x", 2.0, most=1).told() == {"what": "x", "value": 2.0, "wanted": "at most 1", "verdict": "MISSED"}


def _call(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OUT": str(out), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(BENCHMARKS / "gpu_hour.sh"), "--device", "cpu", "--small", *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.exhaustive
def test_the_script_goes_on_where_it_was(hour: Any, tmp_path: Path) -> None:
    """What is done is not done again; what failed, or had no time, is."""
    said = _call(tmp_path, "3", "5", "--only", *APART)
    assert said.returncode == 0, said.stdout + said.stderr
    found = {p.name: json.loads(p.read_text()) for p in tmp_path.glob("[1-6]_*.json")}
    assert set(found) == {"3_beside_036b.json", "5_offload_7b.json"} and not any("error" in x for x in found.values())
    (tmp_path / "3_beside_036b.json").write_text(json.dumps({"error": "planted"}))
    script, checks = hour
    assert script.run_step(5, _told(tmp_path, only=["offload_7b"])) == 0
    assert script.run_step(3, _told(tmp_path, only=["beside_036b"], minutes=0.0)) == 1
    # one that hangs is ended with all it has started, and named
    hangs = checks.Check(3, "beside_036b", 1.0, "", None)
    timed_out = script.apart(hangs, 0.2, _told(tmp_path))
    assert re.search("was not done after", timed_out["error"]) and not list(tmp_path.glob(".*"))


def test_what_cannot_be_done_is_refused_before_anything_is_made(hour: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wrong = _call(out, "7")
    assert wrong.returncode == 2 and "name a step, 1 to 6" in wrong.stderr
    told = _call(out, "--help")
    assert told.returncode == 0 and "--device {cuda,cpu}" in told.stdout
    if not torch.cuda.is_available():
        refused = _call(out, "1", "--device", "cuda")
        assert refused.returncode == 2 and "there is no CUDA device here; --device cpu --small runs" in refused.stderr
    assert not out.exists()
