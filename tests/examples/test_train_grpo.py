"""The example of reinforcement learning: the reward of its toy task rises, and the log-probabilities of the sampler are
those of the trainer."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from scripts import EXAMPLES, fresh_modules

pytest.importorskip("transformers")


def test_the_reward_rises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--steps", "20"])
    with fresh_modules():
        runpy.run_path(str(EXAMPLES / "train_grpo.py"), run_name="__main__")
    lines = re.findall(r"step (\d+)/20  reward (\S+)  divergence (\S+)  drift (\S+)", capsys.readouterr().out)
    first, last = lines[0], lines[-1]
    assert (first[0], last[0]) == ("1", "20")
    assert float(last[1]) > 2 * float(first[1]) > 0
    assert all(float(drift) < 1e-5 for *_, drift in lines)


def test_a_group_of_one_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--group", "1"])
    with fresh_modules(), pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "train_grpo.py"), run_name="__main__")
    assert "--group at least 2" in capsys.readouterr().err
