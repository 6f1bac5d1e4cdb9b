"""Ranks that would not run the same program: an error on every rank within seconds that shows where they differ, never
a hang."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import ending
from rejections import BATCH, PARAMS, make
from rejections import loss_fn as rejected_loss

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError
from fzero.runtime.read_values import LOOKED_AT_EVERY

SECONDS = 25.0
"""By when every rank must have raised; what is waited for (`make_mesh(timeout=)`) is ten minutes by default."""


def parts(
    scale: float = 1.0, lr: float = 0.1, batch: torch.Tensor | None = None, transform: Any = None, raises: Any = None
) -> Any:
    """A small model with everything that can differ between ranks."""

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"]) * scale

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["layers"]:
            x = layer(p, x)
        if raises is not None:
            raise raises
        return (x * params["scale"]).pow(2).mean()

    params = {"layers": [{"w": torch.eye(4)} for _ in range(2)], "scale": torch.ones(4)}
    step = fz.compose(fz.shard_params(), transform or fz.remat("full"))(fz.train_step(loss_fn, optim.adamw(lr)))
    return step, params, torch.ones(2, 4) if batch is None else batch


def _runs(rank_of_change: int, changes: dict[str, Any], size: int) -> float:
    mesh = fz.make_mesh(data=size)
    step, params, batch = parts(**(changes if mesh.rank == rank_of_change else {}))
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(params)
    started = time.monotonic()
    try:
        train(state, batch)
    except Exception as error:
        assert time.monotonic() - started < SECONDS
        raise error from None
    return time.monotonic() - started


DIFFERENCES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a constant in a block": ({"scale": 2.0}, "1.0", "2.0"),
    "a learning rate": ({"lr": 0.2}, "0.1", "0.2"),
    "a transform": ({"transform": fz.accumulate(2)}, "remat", "accumulate"),
}


@pytest.mark.full(keep=["a transform"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_one_rank_differs(run_ranks: Any, name: str) -> None:
    changes, here, there = DIFFERENCES[name]
    changed = 1
    ranks = run_ranks(2, _runs, changed, changes, 2, expect_error=True, timeout=60)
    for r in ranks:
        assert r.type == "DivergenceError", r
        lines = r.message.splitlines()
        assert "rank 1 would run a different program than rank 0" in lines[0] and lines[-1].startswith("Fix: ")
        at = next(i for i, line in enumerate(lines) if "first difference, line" in line)
        assert lines[at + 1].strip().startswith("rank 0: ") and here in lines[at + 1]
        assert lines[at + 2].strip().startswith("rank 1: ") and there in lines[at + 2]
        assert lines[at + 1].split(": ", 1)[1] != lines[at + 2].split(": ", 1)[1]
    assert ranks[0].message == ranks[1].message


BATCHES: dict[str, tuple[Any, list[str]]] = {
    "shape": (torch.ones(3, 4), ["batch: float32[2, 4] on rank 0, float32[3, 4] on rank 1"]),
    "dtype": (
        torch.ones(2, 4, dtype=torch.float64),
        ["batch: float32[2, 4] on rank 0, float64[2, 4] on rank 1"],
    ),
    "structure": (
        {"x": [torch.ones(2, 4)]},
        [
            "batch: float32[2, 4] on rank 0, missing on rank 1",
            "batch['x'][0]: missing on rank 0, float32[2, 4] on rank 1",
        ],
    ),
    "no tensor": ([], ["batch: float32[2, 4] on rank 0, missing on rank 1"]),
    "a number": (3, ["batch: float32[2, 4] on rank 0, int on rank 1"]),
}


@pytest.mark.full(keep=["structure"])
@pytest.mark.parametrize("name", BATCHES)
def test_one_ranks_batch_differs(run_ranks: Any, name: str) -> None:
    """The loss cannot be traced with most of them; the batches are compared before."""
    batch, lines = BATCHES[name]
    first, second = run_ranks(2, _runs, 1, {"batch": batch}, 2, expect_error=True, timeout=60)
    assert first.type == second.type == "DivergenceError" and first.message == second.message
    what, *problems, fix = first.message.splitlines()
    assert what == "fzero.step: the batch of rank 1 differs from that of rank 0" and fix.startswith("Fix: ")
    assert [line.strip() for line in problems] == lines


def test_an_error_of_one_rank_has_one_fix_on_the_others(run_ranks: Any) -> None:
    changed = {"raises": FzeroTypeError("step", "a mistake of rank 1", ["a detail"], "correct it")}
    first, second = run_ranks(2, _runs, 1, changed, 2, expect_error=True, timeout=60)
    assert second.type == "FzeroTypeError" and first.type == "DivergenceError"
    for told in (first, second):
        assert told.message.count("Fix: ") == 1 and told.message.endswith("Fix: correct it")
    assert "rank 1: fzero.step: a mistake of rank 1" in first.message and "a detail" in first.message


def _swapped() -> None:
    mesh = fz.make_mesh(data=2)
    step, params, batch = parts()
    train, evaluate = (
        fz.compile(step, mesh, backend="eager"),
        fz.compile(fz.compose(*step.transforms)(fz.eval_step(lambda p, x: x.sum())), mesh, backend="eager"),
    )
    state = train.init(params)
    for _ in range(LOOKED_AT_EVERY):  # the calls in which ranks meet anyway
        state, _ = train(state, batch)
        evaluate(state.params, batch)
    for call in sorted(("evaluate", "train"), reverse=mesh.rank == 1):
        _ = evaluate(state.params, batch) if call == "evaluate" else train(state, batch)


def test_ranks_that_call_their_steps_in_another_order(run_ranks: Any) -> None:
    """Their programs are known to all, so nothing is compared when they are built: each run says which it is."""
    for r in run_ranks(2, _swapped, expect_error=True, timeout=60):
        assert r.type == "DivergenceError" and "ranks run different programs" in r.message, r
        assert "rank 0: " in r.message and "rank 1: " in r.message and r.message.splitlines()[-1].startswith("Fix: ")


def test_the_last_of_three_differs(run_ranks: Any) -> None:
    for r in run_ranks(3, _runs, 2, {"scale": 3.0}, 3, expect_error=True, timeout=60):
        assert (
            r.type == "DivergenceError"
            and "rank 2 would run a different program than rank 0" in r.message
            and "3.0" in r.message
        ), r


def test_the_first_of_three_differs(run_ranks: Any) -> None:
    for r in run_ranks(3, _runs, 0, {"scale": 3.0}, 3, expect_error=True, timeout=60):
        assert r.type == "DivergenceError" and "rank 0: " in r.message and "3.0" in r.message, r


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_raises_while_tracing(run_ranks: Any, rank: int) -> None:
    ranks = run_ranks(2, _runs, rank, {"raises": KeyError("no such layer")}, 2, expect_error=True, timeout=60)
    assert ranks[rank].type == "KeyError"
    other = ranks[1 - rank]
    assert other.type == "DivergenceError" and f"rank {rank}: KeyError: 'no such layer'" in other.message
    assert other.message.splitlines()[-1].startswith("Fix: ")


def test_all_ranks_raise_their_own_error(run_ranks: Any) -> None:
    for r in run_ranks(2, _runs_alike, {"raises": KeyError("no such layer")}, expect_error=True, timeout=60):
        assert r.type == "KeyError"


def _runs_alike(changes: dict[str, Any]) -> None:
    mesh = fz.make_mesh(data=2)
    step, params, batch = parts(**changes)
    train = fz.compile(step, mesh, backend="eager")
    train(train.init(params), batch)


def _absent(rank: int, size: int, folder: str) -> float:
    mesh = fz.make_mesh(data=size, timeout=5)
    step, params, batch = parts()
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(params)
    started = time.monotonic()
    with ending(folder, last=mesh.rank == rank, others=size - 1):  # it lives, but does something else
        if mesh.rank != rank:
            try:
                train(state, batch)
            except fz.errors.DivergenceError:
                assert 1 < time.monotonic() - started < SECONDS
                raise
    return 0.0


@pytest.mark.full
@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3)])
def test_one_rank_never_calls(run_ranks: Any, tmp_path: Path, rank: int, size: int) -> None:
    ranks = run_ranks(size, _absent, rank, size, str(tmp_path), expect_error=True, timeout=60)
    assert ranks[rank].type is None
    for other in (r for i, r in enumerate(ranks) if i != rank):
        assert other.type == "DivergenceError" and f"rank {rank} timed out after 5 s" in other.message, other
        assert other.message.splitlines()[-1].startswith("Fix: ")


def _never_joins(rank: int, folder: str) -> None:
    absent, started = int(os.environ["RANK"]) == rank, time.monotonic()
    with ending(folder, last=absent):
        if absent:
            return
        try:
            fz.make_mesh(data=2, timeout=2)
        finally:
            assert time.monotonic() - started < SECONDS


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_never_joins_the_mesh(run_ranks: Any, tmp_path: Path, rank: int) -> None:
    other = run_ranks(2, _never_joins, rank, str(tmp_path), expect_error=True, timeout=60)[1 - rank]
    assert other.type == "DivergenceError" and f"rank {rank} timed out after 2 s" in other.message, other
    assert other.message.splitlines()[-1].startswith("Fix: ")


def _second_shape(changed: int) -> None:
    mesh = fz.make_mesh(data=2, timeout=2)
    step, params, batch = parts()
    train = fz.compile(step, mesh, backend="eager")
    state, _ = train(train.init(params), batch)
    state, _ = train(state, batch)
    started = time.monotonic()
    try:
        _, metrics = train(state, torch.ones(4, 4) if mesh.rank == changed else batch)
        metrics["loss"].item()
    except Exception:
        assert time.monotonic() - started < SECONDS
        raise


@pytest.mark.parametrize("changed", [0, 1])
def test_a_second_kind_of_batch_on_one_rank(run_ranks: Any, changed: int) -> None:
    """The other is in a step that it has a program for: both sides say what each does."""
    for r in run_ranks(2, _second_shape, changed, expect_error=True, timeout=60):
        assert (
            r.type == "DivergenceError"
            and f"rank {changed}: makes a program of " in r.message
            and f"rank {1 - changed}: runs train " in r.message
        ), r
        assert "batches of one shape" in r.message.splitlines()[-1] and r.message.splitlines()[-1].startswith("Fix: ")


def _second_shape_everywhere() -> tuple[int, int]:
    mesh = fz.make_mesh(data=2)
    step, params, _ = parts()
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(params)
    for rows in (2, 4, 2, 6, 4):
        state, metrics = train(state, torch.ones(rows, 4))
        metrics["loss"].item()
    return int(state.step), len(train._runs)


def test_several_kinds_of_batch_on_every_rank(run_ranks: Any) -> None:
    assert run_ranks(2, _second_shape_everywhere) == [(5, 3), (5, 3)]


def _bad(kind: str) -> None:
    mesh = fz.make_mesh(data=2)
    outside = torch.ones(3)
    loss = {"vector": lambda p, x: x @ p["w"], "closure": lambda p, x: rejected_loss(p, x) * outside.sum()}
    transform = fz.accumulate(4) if kind == "micro" else fz.remat("full")
    step = transform(fz.shard_params(make(loss.get(kind, rejected_loss))))
    train = fz.compile(step, mesh, backend="eager")
    train(train.init({"w": "x"} if kind == "params" else PARAMS), BATCH)


@pytest.mark.parametrize(
    ("kind", "type_", "word"),
    [
        ("vector", "FzeroTypeError", "float32[6, 3]"),
        ("closure", "TraceError", "closure variable outside"),
        ("micro", "FzeroValueError", "batch [6, 4]"),
        ("params", "FzeroTypeError", "params['w']"),
    ],
)
def test_every_rank_raises_its_own_error(run_ranks: Any, kind: str, type_: str, word: str) -> None:
    for r in run_ranks(2, _bad, kind, expect_error=True, timeout=60):
        assert r.type == type_ and word in r.message, r
        assert re.search(r"^Fix: .+\Z", r.message, re.MULTILINE), r.message


def _changes_before_a_save(path: Path) -> None:
    mesh = fz.make_mesh(data=2)
    factor = [1.0]

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"]) * factor[0]

    step = fz.shard_params(fz.train_step(lambda p, x: layer(p, x).square().mean(), optim.sgd(0.1)))
    train = fz.compile(step, mesh, backend="eager")
    state = train.init({"w": torch.eye(4)})
    for _ in range(3):
        state, _ = train(state, torch.ones(2, 4))
    if mesh.rank == 1:
        factor[0] = 2.0
    says = r"(?s)rank 1: .*computes something different than when it was traced.*diverging_ranks.py.*layer: .*now: "
    for act in (lambda: fz.checkpoint.save(path, state), lambda: train.gather(state)):
        with pytest.raises(fz.errors.FzeroValueError, match=says):
            act()
    assert not path.exists()
    factor[0] = 1.0
    assert fz.checkpoint.save(path, state).name == "step-00000003"


def test_code_that_changes_on_one_rank_is_found_on_all_before_a_save(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(2, _changes_before_a_save, tmp_path / "run", timeout=60)


def _gathers_another_state() -> None:
    mesh = fz.make_mesh(data=2)
    step, params, batch = parts()
    train = fz.compile(step, mesh, backend="eager")
    untrained, trained = train.init(params), train.init(params)
    trained, _ = train(trained, batch)
    train.gather(trained if mesh.rank else untrained)


def test_a_trained_and_an_untrained_state_are_gathered(run_ranks: Any) -> None:
    for r in run_ranks(2, _gathers_another_state, expect_error=True, timeout=60):
        assert r.type == "DivergenceError" and "make different calls" in r.message, r
