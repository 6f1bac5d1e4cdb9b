"""Offload against the same step without it, on one process: every tier and role beside every other transform, bit for
bit.

Ranks: test_offload_ranks.py. The program: test_offload_program.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import test_trees_of_every_shape as test_trees
import test_update_functions as test_update
import torch
from models import MODELS, OPTIMIZERS
from offloads import EXTRAS, OFFLOADS, same, trained

import fzero as fz
from fzero import optim
from fzero.compiler.search import Search
from fzero.sharding.layout import leaf_of
from fzero.transforms.offload import blocks_updated_on_host

TRAINED = [("gpt", "clipped"), ("mixed", "adamw"), ("mixed", "lamb"), ("bare", "sgd"), ("bare", "lion")]
MEMORIES = {"one memory": True, "apart": False}


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few cases in which every two values of different axes meet."""

    def pairs(case: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    everything = list(itertools.product(*axes))
    missing, out = set().union(*map(pairs, everything)), []
    while missing:
        out.append(max(everything, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(out[-1])
    return out


# which differ from others in the leaves that they take
CHOSEN = ["cpu half", "cpu where", "nvme half", "nvme where", "other mix"]
BESIDE = ["none", "accumulate", "bf16, remat full", "bf16, accumulate", "shard"]
CASES = [
    *pairwise(sorted(OFFLOADS.keys() - CHOSEN), BESIDE, range(len(TRAINED)), sorted(MEMORIES)),
    *pairwise(CHOSEN, ["bf16, accumulate", "shard"], [0, 2, 4], sorted(MEMORIES)),
]
BITS = {"remat full": "none", "bf16, remat full": "bf16", "shard": "none"}
"""What changes no bit on one rank: the step without it is the reference, of the offload and of this."""


def without(extra: str, model: str, optimizer: str) -> Any:
    return plain(BITS.get(extra, extra), model, optimizer)


@functools.cache
def plain(extra: str = "none", model: str = "gpt", optimizer: str = "adamw", num_steps: int = 3) -> Any:
    return trained(fz.make_mesh(data=1), EXTRAS[extra], model, optimizer, num_steps)[0]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(OFFLOADS))
def test_a_step_with_offload_equals_the_step_without(tmp_path: Path, name: str) -> None:
    cases = [case for case in CASES if case[0] == name]
    assert {case[1] for case in cases} == set(BESIDE[3:] if name in CHOSEN else BESIDE) and len(
        {case[3] for case in cases}
    ) == 2
    for _, extra, which, memory in cases:
        mesh = fz.make_mesh(data=1, unified_memory=MEMORIES[memory])
        found, train, state = trained(mesh, (*EXTRAS[extra], *OFFLOADS[name](tmp_path)), *TRAINED[which])
        assert same(found, without(extra, *TRAINED[which])), (name, extra, TRAINED[which], memory)
        tiers = {leaf_of(x)[0].layout.tier for x in fz.tree.leaves((state.params, state.opt_state))}
        assert {"cpu": "host", "nvme": "disk"}.get(name.split()[0], "disk") in tiers
        assert any(op.tiers for op, _ in train.program.walk())


MIXED = [
    ("cpu opt_state", "bf16", "gpt", "adamw"),
    ("cpu all", "bf16, accumulate", "gpt", "clipped"),
    ("cpu half", "accumulate", "mixed", "lamb"),
    ("nvme both", "shard", "mixed", "clipped"),
    ("other mix", "none", "gpt", "lion"),
]


@pytest.mark.full(keep=["cpu half-accumulate-mixed-lamb", "cpu all-bf16, accumulate-gpt-clipped"])
@pytest.mark.parametrize(("name", "extra", "model", "optimizer"), MIXED)
def test_blocks_that_are_updated_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str, model: str, optimizer: str
) -> None:
    monkeypatch.setattr(Search, "best", lambda self, starts: replace(starts[0], host_share=0.5))
    found, train, _ = trained(
        fz.make_mesh(data=1, unified_memory=False), (*EXTRAS[extra], *OFFLOADS[name](tmp_path)), model, optimizer
    )
    num, total = blocks_updated_on_host(train.program)
    assert 0 < num < total and same(found, without(extra, model, optimizer))


MOVING = ["exchanges_two_leaves", "keeps_the_last_gradients", "keeps_the_last_norms", "makes_one_value_twice"]
TIED = ["tied", "tied and frozen"]


def half_of(*offloads: str, by: str) -> list[tuple[str, bool]]:
    """Each with one memory or with memories apart; with the other by the next of the names above."""
    first = next(names.index(by) for names in (MOVING, TIED) if by in names)
    return [(name, (first + i) % 2 == 0) for i, name in enumerate(offloads)]


@pytest.mark.parametrize("name", MOVING)
def test_optimizers_whose_state_moves(tmp_path: Path, name: str) -> None:
    """Leaves that take each other's values: those of before any was overwritten, wherever they rest."""
    out = []
    for transforms, memory in [
        ((), True),
        *((OFFLOADS[o](tmp_path), m) for o, m in half_of("cpu all", "nvme both", "mix", "nvme on device", by=name)),
    ]:
        step = fz.compose(*transforms)(fz.train_step(test_update.loss_fn, getattr(test_update, name)()))
        train = fz.compile(step, fz.make_mesh(data=1, unified_memory=memory), backend="eager")
        state = train.init(test_update.PARAMS)
        for batch in test_update.BATCHES:
            state, _ = train(state, batch)
        out.append(train.gather(state))
    assert all(same(found, out[0]) for found in out)


@pytest.mark.parametrize("name", TIED)
def test_tied_leaves_rest_once(tmp_path: Path, name: str) -> None:
    case, out = test_trees.CASES[name], []
    keywords = {"trainable": case.trainable} if case.trainable else {}
    for transforms, memory in [
        ((), True),
        *((OFFLOADS[o](tmp_path), m) for o, m in half_of("cpu all", "nvme both", "nvme half", by=name)),
    ]:
        step = fz.compose(*transforms)(fz.train_step(case.loss, optim.adamw(1e-2), **keywords))
        train = fz.compile(step, fz.make_mesh(data=1, unified_memory=memory), backend="eager")
        state = train.init(case.make())
        assert test_trees._ties(state.params) == test_trees._ties(case.make())
        for i in range(3):
            state, metrics = train(state, case.batch(i))
        out.append((train.gather(state), metrics["loss"]))
    assert all(same(found, out[0]) for found in out)


def dropout_loss(params: Any, batch: Any, *, key: torch.Tensor) -> torch.Tensor:
    x = models.embed(params["embed"], batch["tokens"])
    for p, k in zip(params["layers"], fz.random.split(key, len(params["layers"])), strict=True):
        x = fz.random.dropout(k, models.layer(p, x), 0.3)
    return models.head(params["head"], x, batch["targets"])


@pytest.mark.full
def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "dropout", models.Model(models.gpt_init, dropout_loss))
    for extra in ("accumulate", "bf16"):
        want = trained(fz.make_mesh(data=1), EXTRAS[extra], "dropout")[0]
        assert not same(want, without(extra, "gpt", "adamw"))
        for name in ("cpu all", "nvme both"):
            found = trained(
                fz.make_mesh(data=1, unified_memory=False), (*EXTRAS[extra], *OFFLOADS[name](tmp_path)), "dropout"
            )[0]
            assert same(found, want), (extra, name)


@functools.cache
def evaluated(extra: str, model: str) -> tuple[Any, torch.Tensor]:
    """Without offload: a training, and the loss of its last parameters."""
    found, _, state = trained(fz.make_mesh(data=1), EXTRAS[extra], model)
    evaluate = fz.compile(
        fz.compose(*EXTRAS[extra])(fz.eval_step(MODELS[model].loss)), fz.make_mesh(data=1), backend="eager"
    )
    return found, evaluate(state.params, models.batches(1)[0])


@pytest.mark.full(keep=["mix-bare-none-True", "cpu opt_state-bare-none-True"])
@pytest.mark.parametrize(("extra", "memory"), [("none", True), ("bf16", False)])
@pytest.mark.parametrize(
    ("name", "model"),
    [("cpu opt_state", "bare"), ("cpu all", "mixed"), ("nvme both", "gpt"), ("nvme where", "mixed"), ("mix", "bare")],
)
def test_evaluation_reads_what_training_keeps(tmp_path: Path, name: str, model: str, extra: str, memory: bool) -> None:
    transforms, mesh = (*OFFLOADS[name](tmp_path), *EXTRAS[extra]), fz.make_mesh(data=1, unified_memory=memory)
    want, predicted = evaluated(extra, model)
    found, train, state = trained(mesh, transforms, model)
    evaluate = fz.compile(fz.compose(*transforms)(fz.eval_step(MODELS[model].loss)), mesh, backend="eager")
    assert torch.equal(evaluate(state.params, models.batches(1)[0]), predicted)
    assert same(found, want) and same(train.gather(state), want[1]), "an evaluation changes nothing"


def wide_init(key: torch.Tensor) -> Any:
    first, *rest = fz.random.split(key, 3)
    layers = [{"w": fz.random.normal(k, (40, 40)) * 0.3, "b": torch.zeros(40)} for k in rest]
    return {"token": fz.random.normal(first, (models.VOCAB, 40)) * 0.3, "layers": layers}


def wide_loss(params: Any, batch: Any) -> torch.Tensor:
    """Of layers with few operations, but wide enough to be worth compiling."""
    x = params["token"][batch["tokens"]]
    for p in params["layers"]:
        x = models.dense(p, x)
    return x.float().square().mean()


@pytest.mark.full
@pytest.mark.usefixtures("compiled_here")
def test_compiled_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "wide", models.Model(wide_init, wide_loss))
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "disk").mkdir()
    apart, off = fz.make_mesh(data=1, unified_memory=False), OFFLOADS["nvme both"](tmp_path / "disk")
    want, *_ = trained(fz.make_mesh(data=1), EXTRAS["bf16"], "wide", "clipped", backend="inductor")
    num = len(list((tmp_path / "cache" / "functions").iterdir()))
    found, *_ = trained(apart, (*EXTRAS["bf16"], *off), "wide", "clipped", backend="inductor")
    assert num >= 8 and len(list((tmp_path / "cache" / "functions").iterdir())) > num, (
        "the host's updates are compiled as well"
    )
    assert same(found, want)
    torch.testing.assert_close(want[0], without("bf16", "wide", "clipped")[0], rtol=1e-2, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("name", ["cpu opt_state", "nvme both"])
def test_a_memory_budget_beside_offload(tmp_path: Path, name: str) -> None:
    """What is kept for the backward, chosen to fit: fewer bytes, the same numbers."""
    mesh, transforms = (
        fz.make_mesh(data=1, unified_memory=False),
        (*OFFLOADS[name](tmp_path), fz.remat("auto"), fz.accumulate(2)),
    )
    want = trained(fz.make_mesh(data=1), (fz.accumulate(2), fz.remat("full")))[0]
    free, train, _ = trained(mesh, transforms, memory_budget="1GiB")
    least = trained(mesh, (*OFFLOADS[name](tmp_path), fz.remat("full"), fz.accumulate(2)))[1].plan.peak_bytes
    budget = (least + train.plan.peak_bytes) // 2
    assert least < train.plan.peak_bytes
    tight, small, _ = trained(mesh, transforms, memory_budget=budget)
    assert small.plan.peak_bytes <= budget < train.plan.peak_bytes
    for (metrics, state), (_, other) in itertools.product((free, tight), (want,)):
        assert torch.isfinite(torch.stack([loss for loss, _ in metrics])).all()
        for a, b in zip(fz.tree.leaves(state.params), fz.tree.leaves(other.params), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.full(keep=["mix-nothing-mixed"])
@pytest.mark.parametrize(
    ("name", "other", "model"),
    [
        ("nvme both", "nothing", "gpt"),
        ("nvme opt_state", "nvme half", "mixed"),
        ("mix", "nothing", "mixed"),
        ("cpu all", "nvme half", "bare"),
    ],
)
def test_a_restored_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str, other: str, model: str) -> None:
    """From a checkpoint of any tier into any tier; and a state is gathered in the middle without a trace."""
    transforms, mesh, data = OFFLOADS[name](tmp_path), fz.make_mesh(data=1, unified_memory=False), models.batches(4)
    (_, want), (_, middle) = (plain(model=model, num_steps=num) for num in (4, 2))
    _, train, state = trained(mesh, transforms, model, num_steps=2)
    assert same(train.gather(state), middle)
    fz.checkpoint.save(tmp_path / "saved", state)
    for into in (transforms, OFFLOADS[other](tmp_path) if other != "nothing" else ()):
        step = fz.compose(*into)(fz.train_step(MODELS[model].loss, OPTIMIZERS["adamw"]()))
        resumed = fz.compile(step, mesh, backend="eager")
        restored = resumed.restore(tmp_path / "saved", MODELS[model].init)
        for batch in data[2:]:
            restored, _ = resumed(restored, batch)
        assert same(resumed.gather(restored), want), into
    for batch in data[2:]:
        state, _ = train(state, batch)
    assert same(train.gather(state), want)
