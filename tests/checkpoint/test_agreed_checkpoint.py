"""Ranks that restore together restore one checkpoint, or none: `latest` is what the first of them finds, and what the
others see is compared."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import checkpoint, optim
from fzero.checkpoint import directory, index


def _step() -> fz.Step:
    return fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), optim.sgd(0.1)))


def _trained(root: str, scale: float = 36) -> None:
    """Checkpoints of steps 1 and 2."""
    train = fz.compile(_step(), fz.make_mesh(), backend="eager")
    state = train.init({"w": torch.arange(36.0).view(6, 6) / scale})
    for _ in range(2):
        state, _ = train(state, torch.ones(4, 6))
        checkpoint.save(root, state)


def _restored(root: str, others: dict[int, str], stale: bool) -> tuple[int, int, torch.Tensor]:
    """The step that was restored, how often an index was read, and the weights. `stale`: all but the first rank see the
    `latest` of before."""
    mesh = fz.make_mesh()
    read, latest = index.read_index, directory.latest
    counted: list[Path] = []
    index.read_index = lambda path: counted.append(path) or read(path)
    directory.latest = lambda path: Path(path) / "step-00000001" if stale and mesh.rank else latest(path)
    try:
        train = fz.compile(_step(), mesh, backend="eager")
        state = train.restore(others.get(mesh.rank, root))
        return int(state.step), len(counted), train.gather(state).params["w"]
    finally:
        index.read_index, directory.latest = read, latest


@pytest.mark.full
def test_a_rank_that_sees_an_older_latest_restores_what_the_first_does(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(2, _trained, str(tmp_path))
    (one, first, a), (two, second, b) = run_ranks(2, _restored, str(tmp_path), {}, True)
    assert (one, two) == (2, 2) and torch.equal(a, b)
    assert (first, second) == (1, 1), "each rank reads the index once"


def test_ranks_with_other_checkpoints_name_both(run_ranks: Any, tmp_path: Path) -> None:
    root, copy, older, renamed = (tmp_path / name for name in ("shared", "local", "older", "renamed"))
    run_ranks(2, _trained, str(root))
    run_ranks(2, _trained, str(copy), 40)  # what a host has of its own
    shutil.copytree(root / "step-00000001", renamed / "step-00000002")
    shutil.copytree(root / "step-00000001", older / "step-00000001")
    for other, words in {
        str(root / "step-00000001"): [
            "rank 0: ",
            "step-00000002, step 2, index ",
            "rank 1: ",
            "step-00000001, step 1, index ",
        ],
        str(copy): [f"rank 0: {root}/step-00000002, step 2", f"rank 1: {copy}/step-00000002, step 2"],
        str(renamed): ["cannot read step-00000002, the checkpoint that rank 0", "step 1", "directory named for step 2"],
        str(older): [
            f"rank 1: fzero.checkpoint: cannot use the checkpoint {older}/step-00000002",
            "the checkpoint that rank 0 found",
        ],
        str(tmp_path / "none"): [f"rank 1: fzero.checkpoint: cannot use the checkpoint {tmp_path}/none/step-00000002"],
    }.items():
        for r in run_ranks(2, _restored, str(root), {1: other}, False, expect_error=True):
            assert (
                r.type == "CheckpointError" and all(word in r.message for word in words) and "\nFix: " in r.message
            ), r


def test_a_path_of_a_step_and_its_root_are_one_checkpoint(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(2, _trained, str(tmp_path))
    for others in (
        {0: str(tmp_path / "step-00000001")},
        {0: str(tmp_path / "step-00000001"), 1: str(tmp_path / "step-00000001")},
    ):
        (one, _, a), (two, _, b) = run_ranks(2, _restored, str(tmp_path), others, False)
        assert (one, two) == (1, 1) and torch.equal(a, b)
