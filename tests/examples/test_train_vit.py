"""examples/train_vit.py: the same losses on two processes as PyTorch's own loop has, and going on where it stopped, on
one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import Script

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

VIT = Script("train_vit.py", ("--steps", "4", "--batch", "24", "--backend", "eager"))


def losses(file: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]


@pytest.mark.full
def test_losses_are_those_of_pytorch(run_ranks: Any, tmp_path: Path) -> None:
    plain, two = tmp_path / "plain", tmp_path / "two"
    assert "held-out accuracy" in VIT.on(run_ranks, "--plain", "--json", plain).stdout
    run = VIT.on(run_ranks, "--out", tmp_path / "run", "--json", two, "--accumulate", 2, ranks=2)
    expected = losses(plain)
    assert len(expected) == 4
    assert losses(two) == pytest.approx(expected, abs=1e-4)
    again = VIT.on(run_ranks, "--out", tmp_path / "run", "--resume", "--zero", 1)  # nothing is left to do
    assert "held-out" in run.stdout and again.stdout.splitlines()[-1] == run.stdout.splitlines()[-1]


def test_flags_that_are_wrong(run_ranks: Any) -> None:
    refused = VIT.on(run_ranks, "--resume", "--batch", 0, code=2).stderr
    assert "--resume needs --out" in refused and "--batch 0 is less than 1" in refused
