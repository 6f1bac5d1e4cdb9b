"""Runs that go on with another number of ranks from the memories of their hosts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import resizer
import torch
from scripts import ROOT
from test_run import LIMIT, ended, logged, supervisors

import fzero as fz

pytestmark = pytest.mark.forks


def plainly(out: str, steps: int) -> int:
    Path(out).mkdir(exist_ok=True)
    return fz.run(lambda run: resizer.train(run, Path(out), steps), shared_memory=False)  # as on hosts of their own


def until(out: Path, steps: int) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and not ((out / "log").exists() and any(x[0] >= steps for x in logged(out))):
        time.sleep(0.05)


@pytest.mark.full
def test_three_ranks_then_two_then_three(run_ranks: Any, tmp_path: Path) -> None:
    """On hosts of their own, all killed in between, one with its memory: what that had was sent to the next one. No
    checkpoint is ever written. Programs are those of a start on that many ranks."""
    out, script = tmp_path / "resized", ROOT / "tests" / "resizer.py"
    out.mkdir()
    with supervisors(out, 1000, script=script, ranks=3, hosts=3):
        until(out, 4)
    shutil.rmtree(out / "memory-2")
    with supervisors(out, 1000, script=script, ranks=2, hosts=2):
        until(out, logged(out)[-1][0] + 3)
    last = logged(out)[-1][0] + 3
    with supervisors(out, last, script=script, ranks=3, hosts=3) as three:
        for process in three:
            code, text = ended(process)
            assert code == 0, text
    sources = [line.split() for line in (out / "sources").read_text().splitlines()]
    assert [(source, size) for source, _, size in sources] == [("init", "3"), ("memory", "2"), ("memory", "3")]
    run_ranks(3, plainly, str(tmp_path / "three"), last)
    run_ranks(2, plainly, str(tmp_path / "two"), 1)
    calm, struck = dict(logged(tmp_path / "three")), logged(out)
    assert [step for step, _ in struck if step] and {step for step, _ in struck} == set(calm)
    assert len(struck) - len(calm) <= 4, "a step that was done again each time, and one that was not sent yet"
    assert max(abs(loss - calm[step]) for step, loss in struck) < 1e-5
    for size, fresh in ((2, "two"), (3, "three")):
        name = f"programs-{size}"
        assert (out / name).read_text() == (tmp_path / fresh / name).read_text()


def saved(path: str) -> None:
    train = fz.compile(
        fz.data_parallel(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))), fz.make_mesh()
    )
    fz.checkpoint.save(path, train.init({"w": torch.ones(2)}))
    fz.close_mesh()


def test_what_a_resize_is_refused_for(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(2, saved, str(tmp_path))

    def main(run: Any) -> str:
        step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
        run.state(fz.compile(step, run.mesh, backend="eager"), {"w": torch.ones(2)}, path=tmp_path)
        return run.source

    assert fz.run(main) == "disk"
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)step 0 was trained by 2 ranks, and.*on 2 ranks"):
        fz.run(main, on_resize="error")
    wrong: Any = "scale"
    with pytest.raises(fz.errors.FzeroValueError, match="on_resize='scale': must be 'keep_batch' or 'error'"):
        fz.run(main, on_resize=wrong)
    with pytest.raises(
        fz.errors.FzeroValueError,
        match="Fix: correct each of these arguments; an argument that is left out has a valid",
    ):
        fz.run(main, every=0)
    with pytest.raises(
        fz.errors.FzeroValueError, match=r"Fix: define main\(run\), a function that trains and returns;"
    ):
        fz.run(wrong)


def test_micro_batches_keep_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest number that divides, of as few rows as asked for."""
    found = {}

    def main(run: Any) -> None:
        for size in (1, 2, 3, 5, 8):
            monkeypatch.setattr(type(run), "data_shard", {"rank": 0, "size": size})
            try:
                found[size] = run.num_micro_batches(24, max_samples=5)
            except fz.errors.FzeroValueError as error:
                found[size] = str(error)
        with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)batch=0.*max_samples=1.5"):
            run.num_micro_batches(0, 1.5)

    fz.run(main)
    assert {n: x for n, x in found.items() if n != 5} == {1: 6, 2: 3, 3: 2, 8: 1}
    assert "a batch of 24 samples is not divisible by 5 ranks" in found[5]
    assert "a number of ranks that divides it (1, 2, 3, 4, 6, 8)" in found[5]
