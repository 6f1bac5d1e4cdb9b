"""A run that ends in the middle on one rank is the last call on the mesh, on every rank: nothing is computed from what
it has left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import fzero as fz
from fzero.comm.collective_sequence import CollectiveSequence
from fzero.runtime import read_values

PARAMS = {"t": torch.linspace(-1, 1, 20).view(5, 4), "w": torch.linspace(-1, 1, 12).view(4, 3)}
GOOD, BAD, LONGER = torch.tensor([1, 2]), torch.tensor([1, 9]), torch.tensor([1, 2, 3, 4])
RATE = 0.1


def loss_fn(p: Any, rows: torch.Tensor) -> torch.Tensor:
    return torch.tanh(p["t"][rows] @ p["w"]).square().mean()


STEP = fz.shard_params(fz.train_step(loss_fn, fz.optim.sgd(RATE)))


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def a_bad_row(folder: str, shared: bool) -> tuple[list[str], float]:
    """What a step, and what comes after it, raises when one rank's batch names a row that is not there; and the loss on
    a new mesh."""
    mesh = fz.make_mesh(shared_memory=shared)
    train = fz.compile(STEP, mesh, backend="eager")
    state, _ = train(train.init(PARAMS), GOOD)
    fz.checkpoint.save(folder, state)
    texts = [
        raised(lambda: train(state, BAD if mesh.rank == 1 else GOOD)),
        raised(lambda: train.init(PARAMS)),
        raised(lambda: fz.checkpoint.save(folder, state)),
    ]
    fz.close_mesh()
    train = fz.compile(STEP, fz.make_mesh(shared_memory=shared), backend="eager")
    _, metrics = train(train.restore(folder), GOOD)
    fz.close_mesh()
    return texts, float(metrics["loss"])


def bad_rows(folder: str) -> list[tuple[list[str], float]]:
    return [a_bad_row(f"{folder}/{shared}", shared) for shared in (True, False)]


@pytest.mark.full
def test_a_step_that_fails_on_one_rank_ends_the_mesh_on_all(run_ranks: Any, tmp_path: Path) -> None:
    """Every later call says so, on every rank; what the error says to do works."""
    gradients = torch.func.grad(loss_fn)(PARAMS, GOOD)
    expected = float(loss_fn({name: x - RATE * gradients[name] for name, x in PARAMS.items()}, GOOD))
    for (heard, loss), (own, same) in zip(*run_ranks(2, bad_rows, str(tmp_path), timeout=90), strict=True):
        assert own[0].startswith("FzeroValueError: fzero.step: an index is out of range"), own
        for owner, text in zip(("step", "init", "checkpoint.save"), heard, strict=True):
            assert (
                text.startswith(f"DivergenceError: fzero.{owner}: ")
                and "rank 1: FzeroValueError: fzero.step: an index is out of range (index 9" in text
            ), text
            assert (
                "what it wrote is lost" in text
                and "close_mesh(), make_mesh(), compile, and restore" in text.splitlines()[-1]
            ), text
        assert own[1:] == heard[1:]
        assert loss == same and abs(loss - expected) < 1e-6


def parted(shared: bool) -> list[str]:
    """What ranks raise one of which makes another program while the other runs the one that both have; and what they
    raise afterwards."""
    mesh = fz.make_mesh(shared_memory=shared)
    train = fz.compile(STEP, mesh, backend="eager")
    state, _ = train(train.init(PARAMS), GOOD)
    with patch.object(read_values, "LOOKED_AT_EVERY", float("nan")), patch.object(CollectiveSequence, "pause", 0.2):
        texts = [raised(lambda: train(state, LONGER if mesh.rank == 1 else GOOD)), raised(lambda: train.init(PARAMS))]
    fz.close_mesh()
    return texts


def partings() -> list[list[str]]:
    return [parted(shared) for shared in (True, False)]


def test_ranks_that_have_parted_do_not_go_on(run_ranks: Any) -> None:
    """One has told the others that it begins to run, and the next run would take that for its own."""
    for here, there in zip(*run_ranks(2, partings, timeout=90), strict=True):
        assert "rank 0: runs " in here[0] and "rank 1: makes a program" in here[0], here
        assert (
            here[1] == there[1] and "rank 1: makes a program" in here[1] and "close_mesh()" in here[1].splitlines()[-1]
        ), (here, there)


def begun() -> tuple[fz.Mesh, Any, Any]:
    mesh = fz.make_mesh(shared_memory=False)
    train = fz.compile(STEP, mesh, backend="eager")
    return mesh, train, train(train.init(PARAMS), GOOD)


def kept_on_one_side() -> float:
    """The loss on a new mesh of ranks of which one still has the process groups of a run that ended in the middle, and
    the other lets go of them."""
    begun()
    fz.close_mesh()  # modules of PyTorch that were imported on the way keep its process group
    held: list[Any] = [begun()]
    mesh, train, (state, _) = held[0]
    raised(lambda: train(state, BAD if mesh.rank == 1 else GOOD))
    fz.close_mesh()
    if mesh.rank == 0:
        held.clear()
        del mesh, train, state, _
        gc.collect()
    _, _, (_, metrics) = begun()
    fz.close_mesh()
    return float(metrics["loss"])


def test_letting_go_of_a_run_that_ended_waits_for_nobody(run_ranks: Any) -> None:
    """Its transfers are under way until the other rank closes its connections, or 600 s are over."""
    expected = float(loss_fn(PARAMS, GOOD))
    for loss in run_ranks(2, kept_on_one_side, timeout=60):
        assert abs(loss - expected) < 1e-6
