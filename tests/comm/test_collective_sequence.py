"""Ranks that part after they have begun alike: an error on each of them that names what both sides do, long before the
mesh's timeout of ten minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fzero as fz
from fzero import optim
from fzero.comm.collective_sequence import CollectiveSequence
from fzero.errors import DivergenceError
from fzero.runtime import read_values


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return layer(params, batch["x"]).square().mean()


class Run:
    """A step and an evaluation that have run once on all ranks."""

    def __init__(self, folder: str, **kwargs: Any):
        self.folder, self.mesh = folder, fz.make_mesh(**kwargs)
        step = fz.shard_params(fz.train_step(loss_fn, optim.adamw(0.1)))
        self.train = fz.compile(step, self.mesh, backend="eager")
        self.other = fz.compile(fz.shard_params(fz.eval_step(lambda p, b: b["x"].sum())), self.mesh, backend="eager")
        self.known = fz.compile(fz.shard_params(fz.eval_step(loss_fn)), self.mesh, backend="eager")
        self.state = self.train.init({"w": torch.eye(4)})
        self.steps()
        self.known(self.state.params, self.batch())

    def batch(self, rows: int = 2, **more: torch.Tensor) -> Any:
        return {"x": torch.ones(rows, 4), **more}

    def steps(self) -> None:
        self.state, metrics = self.train(self.state, self.batch())
        metrics["loss"].item()


def with_autocast(run: Run) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.steps()


def deterministically(run: Run) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        run.steps()
    finally:
        torch.use_deterministic_algorithms(False)


PARTINGS: dict[str, tuple[Any, str]] = {
    "another shape": (
        lambda run: run.train(run.state, run.batch(3)),
        "makes a program of loss_fn (Step): batch['x'] float32[3, 4], before float32[2, 4]",
    ),
    "another tree": (
        lambda run: run.train(run.state, run.batch(y=torch.ones(2))),
        "the batch's tree PyTreeSpec({'x': *, 'y': *}), before PyTreeSpec({'x': *}); "
        "batch['y'] float32[2], before missing",
    ),
    "a batch that cannot be traced": (
        lambda run: run.train(run.state, torch.ones(2, 4)),
        "the batch's tree PyTreeSpec(*), before PyTreeSpec({'x': *})",
    ),
    "autocast": (with_autocast, "autocast's enabled (True, False), before (False, False)"),
    "a switch": (deterministically, "deterministic algorithms on, before off"),
    "an evaluation": (lambda run: run.other(run.state.params, run.batch()), "makes a program of <lambda> (EvalStep)"),
    "an evaluation that has run": (lambda run: run.known(run.state.params, run.batch()), "evaluate loss_fn"),
    "a save": (lambda run: fz.checkpoint.save(run.folder, run.state), "checkpoint.save"),
    "gather": (lambda run: run.train.gather(run.state), "gather"),
    "leaving": (lambda run: fz.close_mesh(), "has left, after: runs evaluate loss_fn, program 1"),
}


def _part(folder: str, cases: list[str], kwargs: dict[str, Any]) -> list[str]:
    """What one rank does while the others take a step; and the errors."""
    # never: between two calls at which ranks compare settings
    told, CollectiveSequence.pause, read_values.LOOKED_AT_EVERY = ([], 0.2, float("nan"))
    for case in cases:
        run = Run(folder, **kwargs)
        run.mesh.store.set(f"ready/{run.mesh.rank}", "")
        run.mesh.store.wait([f"ready/{r}" for r in range(run.mesh.size)])
        try:
            (PARTINGS[case][0] if run.mesh.rank == 1 else Run.steps)(run)
            told.append("")
        except DivergenceError as error:
            told.append(str(error))
        fz.close_mesh()
    CollectiveSequence.pause, read_values.LOOKED_AT_EVERY = 1.0, 16
    return told


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "cases", "kwargs"),
    [
        (2, list(PARTINGS), {}),
        (2, ["another shape", "an evaluation", "leaving"], {"shared_memory": False}),
        (3, ["another shape"], {}),
    ],
    ids=["shared memory", "process groups", "three ranks"],
)
def test_ranks_that_part_name_both_sides(
    run_ranks: Any, tmp_path: Path, ranks: int, cases: list[str], kwargs: dict[str, Any]
) -> None:
    for rank, told in enumerate(run_ranks(ranks, _part, str(tmp_path), cases, kwargs)):
        for case, text in zip(cases, told, strict=True):
            if case == "leaving" and rank == 1:
                assert text == ""
                continue
            assert ("another rank has left" if case == "leaving" else "different") in text.splitlines()[
                0
            ] and text.splitlines()[-1].startswith("Fix: "), (case, rank, text)
            assert any(line.startswith("  rank 1") and PARTINGS[case][1] in line for line in text.splitlines()), (
                case,
                rank,
                text,
            )
            assert any(line.startswith(f"  rank {rank}: ") for line in text.splitlines()), (case, rank, text)


def test_a_rank_that_is_late_or_ahead_has_not_parted() -> None:
    store = dist.HashStore()
    ahead, here = CollectiveSequence(store, 0, 2), CollectiveSequence(store, 1, 2)
    for _ in range(2):
        ahead.begin("b")
    here.begin("a")
    ahead.look("step")
    here.look("step")  # the other is in a later turn
    note = json.loads(store.get("fzero/collectives/of/1"))
    assert note["kind"] == "a"
    here.begin("b")
    ahead.leave()
    here.look("step")  # it was in this one
    here.begin("c")
    with pytest.raises(DivergenceError, match="rank 0 has left, after: b"):
        here.look("step")


def test_a_process_of_this_host_that_is_gone_is_noticed() -> None:
    store, ended = dist.HashStore(), subprocess.Popen([sys.executable, "-c", ""])
    here, _ = CollectiveSequence(store, 0, 2), CollectiveSequence(store, 1, 2)
    note = json.loads(store.get("fzero/collectives/of/1"))
    here.begin("a")
    here.look("step")
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for reaped in (False, True):  # before its parent has asked how it ended, and after
        if reaped:
            ended.wait()
        store.set("fzero/collectives/of/1", json.dumps(note | {"process": [*note["process"][:2], ended.pid]}))
        with pytest.raises(DivergenceError, match="rank 1 has left, after: it joined"):
            here.look("step")
    store.set("fzero/collectives/of/1", json.dumps(note | {"process": ["another host", "", ended.pid]}))
    here.look("step")
