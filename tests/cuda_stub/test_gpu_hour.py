"""The first half hour on a GPU, rehearsed on a CPU: it starts, parses, goes on where it was and writes its page."""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_modules import BENCHMARKS

APART = {"beside_036b", "offload_3b"}
"""Checks that run another script; those run by themselves below."""


@pytest.fixture(scope="module")
def hour() -> Any:
    """The modules `gpu_hour` and `gpu_checks`, which need rich."""
    pytest.importorskip("rich")
    return importlib.import_module("gpu_hour"), importlib.import_module("gpu_checks")


def _told(out: Path, **more: Any) -> argparse.Namespace:
    work = out / "home" / "work"
    work.mkdir(parents=True, exist_ok=True)
    given = {"device": "cpu", "small": True, "out": out, "home": out / "home", "work": work, "only": None}
    return argparse.Namespace(**{**given, "again": False, "minutes": 9.0, "patience": 2.0, **more})


def _head(check: str, attempt: int = 1) -> dict[str, Any]:
    return {"call": 1, "check": check, "attempt": attempt, "device": "cpu", "small": True}


@pytest.mark.full
def test_every_check_runs_small_or_says_why_not(hour: Any, tmp_path: Path) -> None:
    script, checks = hour
    for check in checks.CHECKS.values():
        if check.name in APART:
            continue
        script.run_check(check.name, _told(tmp_path, head=json.dumps(_head(check.name))))
        lines = script.attempts([tmp_path])[check.name]
        kinds, last = [line["kind"] for line in lines], lines[-1]
        assert last["kind"] == "outcome" and last["how"] in ("done", "skipped"), last
        assert "value" in kinds or "target" in kinds or (last["how"] == "skipped" and last["why"])
        assert all(x["verdict"] == "reached" for x in lines if x["kind"] == "target"), lines
        checks.Found(tmp_path / "results.jsonl", _head(check.name)).line(
            "end", **{k: last[k] for k in ("how", "why") if k in last}, seconds=1.0, compiled=0
        )
    assert script.page([tmp_path]) == 0
    page = (tmp_path / "gpu_hour.md").read_text()
    assert "losses beside a CPU's in fp32 | 0 | at most 2e-05 | reached" in page and "not run yet" in page
    assert all(f"{c.call} {c.name} |" in page for c in checks.CHECKS.values())


def test_calls_are_at_most_nine_minutes_and_all_of_them_half_an_hour(hour: Any) -> None:
    checks = hour[1].CHECKS.values()
    for call in hour[1].CALLS:
        assert 0 < sum(c.seconds for c in checks if c.call == call) <= 540
    assert sum(c.seconds for c in checks) <= 1800
    names = [c.name for c in checks]
    assert names.index("offload_3b") < names.index("offload_7b")


def test_a_check_that_is_cut_short_leaves_what_it_found(hour: Any, tmp_path: Path) -> None:
    """Each number is a line as soon as it is known; a line that was cut is not read, and a later attempt replaces an
    earlier one, whichever folder it is in."""
    script, checks = hour
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, attempt in ((first, 1), (second, 2)):
        folder.mkdir()
        found = checks.Found(folder / "results.jsonl", _head("rates", attempt))
        found.value("bf16 TFLOP/s", 100.0 * attempt)
        found.target("planted", 0.5, least=1.0)
    with (second / "results.jsonl").open("a") as file:
        file.write('null\n3\n[]\n{}\n{"check": "rates"}\n{"call": 1, "check": "ra')
    for folders in ([first, second], [second, first]):
        lines = script.attempts(folders)["rates"]
        assert [line["attempt"] for line in lines] == [2, 2] and lines[0]["value"] == 200.0
        said = "\n".join(script.told(lines))
        assert "200" in said and "planted: 0.5, wanted at least 1: not reached" in said and "it was cut short" in said
    assert script.page([first, second]) == 2  # one is missed, and the check did not end


def test_what_a_call_wrote_is_packed(hour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest files are left out of an archive that would be too large; compiled functions come whole or not."""
    script = hour[0]
    folder, archive = tmp_path / "work", tmp_path / "packed.tgz"
    (folder / "functions").mkdir(parents=True)
    (folder / "small.txt").write_text("x")
    (folder / "functions" / "large.so").write_bytes(os.urandom(4000))
    for limit, whole, want in (
        (1 << 20, True, {"small.txt", "functions/large.so"}),
        (3000, False, {"small.txt"}),
        (3000, True, None),
    ):
        monkeypatch.setattr(script, "ARCHIVE_LIMIT", limit)
        script.pack(archive, folder, whole)
        assert archive.exists() == (want is not None)
        if want is not None:
            with tarfile.open(archive) as packed:
                assert {*packed.getnames()} == want


def test_targets(hour: Any, tmp_path: Path) -> None:
    found, no = hour[1].Found(tmp_path / "results.jsonl", {}), "not reached"
    for value in (0.89, 0.9, 1.1, 1.2, float("nan")):
        found.target("x", value, 0.9, 1.1)
    found.target("x", 2.0, most=1)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [x["verdict"] for x in lines] == [no, "reached", "reached", no, no, no]
    assert lines[0]["wanted"] == "at least 0.9, at most 1.1" and lines[-1]["wanted"] == "at most 1"


def _call(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OUT": str(out), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(BENCHMARKS / "gpu_hour.sh"), "--device", "cpu", "--small", "--home", f"{out}-home", *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.exhaustive
def test_the_script_goes_on_where_it_was(hour: Any, tmp_path: Path) -> None:
    """What is done is not done again; what failed, or had no time, is."""
    out = tmp_path / "out"
    said = _call(out, "2", "3", "--only", *APART)
    assert said.returncode == 0, said.stdout + said.stderr
    script, checks = hour
    found = script.attempts([out])
    assert {*found} == APART and all(script.ended(lines)["how"] == "done" for lines in found.values())
    assert {p.name for p in out.iterdir()} == {"results.jsonl", "gpu_hour_2.tgz", "gpu_hour_3.tgz", "cache.tgz"}
    before = (out / "results.jsonl").read_text()
    assert script.run_call(3, _told(out, only=["offload_3b"])) == 0
    assert (out / "results.jsonl").read_text() == before
    planted = {**_head("beside_036b", time.time_ns()), "call": 2}
    checks.Found(out / "results.jsonl", planted).line("end", how="failed", why="planted", seconds=1.0, compiled=0)
    assert script.run_call(2, _told(out, only=["beside_036b"], minutes=0.0)) == 1
    # one that hangs is ended with all it has started, and named
    hangs = checks.Check(2, "beside_036b", 1.0, "", None)
    assert "was not done after" in script.apart(hangs, 0.2, _told(out))["why"]


@pytest.mark.full
def test_what_cannot_be_done_is_refused_before_anything_is_made(hour: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for flags, why in (
        (("5",), "name a call, 1 to 4"),
        (("1", "--kept", "nowhere.tgz"), "there is no nowhere.tgz"),
        (("1", "--kept", __file__), "is no archive"),
        (("1", "--out", __file__), "File exists"),
        (("--page", str(tmp_path)), "there is no results.jsonl in"),
    ):
        wrong = _call(out, *flags)
        assert wrong.returncode == 2 and why in wrong.stderr, wrong.stderr
    told = _call(out, "--help")
    assert told.returncode == 0 and "--device {cuda,cpu}" in told.stdout
    if not torch.cuda.is_available():
        refused = _call(out, "1", "--device", "cuda")
        assert refused.returncode == 2 and "there is no CUDA device here; --device cpu --small runs" in refused.stderr
    assert not out.exists()


@pytest.mark.full
def test_two_calls_do_not_write_to_one_folder(hour: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "results.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        said = _call(tmp_path / "out", "1")
    assert said.returncode == 2 and "another call writes to" in said.stderr


@pytest.mark.full
def test_wheels_are_unpacked_first(hour: Any, tmp_path: Path) -> None:
    """A wheel in a folder serves a machine that has no index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "planted_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sitecustomize.py", "print('the wheel is there')\n")
        about = "planted_wheel-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: planted-wheel\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    said = _call(tmp_path / "out", "--list", "--wheels", str(wheels))
    assert said.returncode == 0 and said.stdout.startswith("the wheel is there"), said.stdout + said.stderr
    none = _call(tmp_path / "out", "--list", "--wheels", str(tmp_path / "nowhere"))
    assert none.returncode == 2 and "no wheels in" in none.stderr
