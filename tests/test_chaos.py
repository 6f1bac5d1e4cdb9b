"""The short form of tests/chaos.py: a few faults of one run under torchrun, as a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import chaos
import pytest
from scripts import ROOT, environment


def test_a_run_goes_on_as_if_there_were_no_faults(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "chaos.py"), "--kills", "5", "--steps", "60", "--seed", "1"]
    flags = ["--ranks", "2", "--kinds", "transfer,mesh,raise,disk,memory", "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, *flags], env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": yes") >= 5 and ": no (" not in done.stdout, done.stdout


def test_a_plan_is_of_its_seed() -> None:
    kinds = list(chaos.KINDS)
    plan = chaos.draw(100, 3, 400, 0, kinds)
    assert plan == chaos.draw(100, 3, 400, 0, kinds) != chaos.draw(100, 3, 400, 1, kinds)
    assert {s.kind for s in plan} == set(kinds) and len({s.fault for s in plan}) == 100
    assert all(s.rank < 3 and 0 < s.step < 400 for s in plan)


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--kinds", "fire"], "--kinds: fire: of trainer,"), (["--ranks", "1"], "--ranks must be at least 2")],
)
def test_wrong_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", ["chaos.py", *flags])
        chaos.main()
    assert words in capsys.readouterr().err
