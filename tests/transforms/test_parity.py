"""Every transformed step against the plain step, and the plain step against torch.optim: the claim that transforms
change how a step runs, not what it does."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import models
import pytest
import torch
from models import MODELS, OPTIMIZERS, STAGES

import fzero as fz

NUM_STEPS = 12


def transformed(
    step: Any,
    stage: int,
    accumulate: int = 1,
    remat: str | float | None = None,
    precision: dict[str, str] | None = None,
) -> Any:
    step = STAGES[stage](step)
    if accumulate > 1:
        step = fz.accumulate(step, accumulate)
    if remat:
        step = fz.remat(step, remat)
    return fz.mixed_precision(step, **precision) if precision else step


def run_cases(cases: list[dict[str, Any]], num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
    """On every rank: each case's losses and gradient norms, and the final state gathered."""
    mesh = fz.make_mesh(data=-1)
    return [run_case(mesh, num_steps, **case) for case in cases]


def run_case(
    mesh: fz.Mesh,
    num_steps: int,
    model: str,
    optimizer: str,
    backend: str = "eager",
    dtype: torch.dtype = torch.float32,
    **transforms: Any,
) -> dict[str, Any]:
    init, loss = MODELS[model].init, MODELS[model].loss
    train = fz.compile(transformed(fz.train_step(loss, OPTIMIZERS[optimizer]()), **transforms), mesh, backend=backend)
    params = fz.tree.map(lambda x: x.to(dtype), init(fz.random.key(0)))
    state, losses, norms = train.init(params), [], []
    for batch in models.batches(num_steps):
        state, metrics = train(state, models.part(batch, mesh))
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "state": train.gather(state)}


@functools.cache
def plain(model: str, optimizer: str, dtype: torch.dtype = torch.float32, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    step = fz.train_step(MODELS[model].loss, OPTIMIZERS[optimizer]())
    state, losses, norms = step.init(fz.tree.map(lambda x: x.to(dtype), MODELS[model].init(fz.random.key(0)))), [], []
    for batch in models.batches(num_steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "state": state}


def difference(got: Any, want: Any) -> float:
    """The largest relative difference of a leaf: the norm of the difference over the norm."""
    assert fz.tree.structure(got) == fz.tree.structure(want)
    worst = 0.0
    for a, b in zip(fz.tree.leaves(got), fz.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = b.double().norm().item()
        worst = max(worst, (a.double() - b.double()).norm().item() / (scale or 1.0))
    return worst


TRAINED = [("gpt", "adamw"), ("bare", "sgd"), ("bare", "lamb"), ("mixed", "lion"), ("mixed", "clipped")]


def grid(num_ranks: int, model: str, optimizer: str) -> list[dict[str, Any]]:
    """Every stage of every model, on one rank alone and on three over micro-batches, or the other way round.

    Of any two of a model with its optimizer, a stage, an accumulation, a policy and a number of ranks, all values meet.
    """
    which, cases = TRAINED.index((model, optimizer)), []
    for stage in STAGES:
        accumulate = 1 + (stage + which + num_ranks // 2) % 2
        remat = ("full", "min_cut", "none", None)[(stage + which // 2 + num_ranks) % 4]
        cases.append({"model": model, "optimizer": optimizer, "stage": stage, "accumulate": accumulate, "remat": remat})
    return cases


def test_the_grid_has_every_pair():
    found = [
        (n, trained, c["stage"], c["accumulate"], c["remat"])
        for n in (1, 3)
        for trained in TRAINED
        for c in grid(n, *trained)
    ]
    for i, j in itertools.combinations(range(5), 2):
        one, other = ({case[k] for case in found} for k in (i, j))
        assert {(case[i], case[j]) for case in found} == set(itertools.product(one, other)), (i, j)


@pytest.mark.full(keep=["mixed-clipped-1"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("model", "optimizer"), TRAINED)
def test_every_stage_equals_the_plain_step(run_or_call, num_ranks, model, optimizer):
    cases = grid(num_ranks, model, optimizer)
    want = plain(model, optimizer)
    assert want["losses"][-4:].mean() < want["losses"][:4].mean()  # it trains
    for results in run_or_call(num_ranks, run_cases, cases):
        for case, got in zip(cases, results, strict=True):
            assert difference(got["losses"], want["losses"]) < 1e-5, case
            assert difference(got["norms"], want["norms"]) < 1e-5, case
            assert difference(got["state"].params, want["state"].params) < 1e-5, case
            assert difference(got["state"].opt_state, want["state"].opt_state) < 1e-5, case
            assert torch.equal(got["state"].step, want["state"].step) and torch.equal(
                got["state"].key, want["state"].key
            )
            if num_ranks == 1 and case["accumulate"] == 1:  # the same operations in the same order
                assert difference(got, want) == 0.0, case


@pytest.mark.full
def test_float64_leaves_no_room_for_chance(run_ranks):
    """The same at a precision where nothing but the order of summation can differ."""
    cases = [
        {"model": model, "optimizer": "clipped", "stage": stage, "accumulate": accumulate, "dtype": torch.float64}
        for model, stage, accumulate in (("gpt", 3, 2), ("bare", 2, 1), ("mixed", 1, 2), ("mixed", 3, 1))
    ]
    for results in run_ranks(3, run_cases, cases):
        for case, got in zip(cases, results, strict=True):
            want = plain(case["model"], "clipped", torch.float64)
            # a compiled step's metrics are float32
            assert difference(got["losses"].float(), want["losses"].float()) < 1e-6, case
            # the gpt's head is in float32
            assert difference(got["state"].params, want["state"].params) < (
                1e-6 if case["model"] == "gpt" else 1e-12
            ), case


def test_inductor_equals_the_plain_step(run_ranks):
    """Compiled functions agree on what passes between them, strides included: of what attention saves, say. One
    process: tests/transforms/test_offload.py."""
    case = {"model": "gpt", "optimizer": "adamw", "stage": 3, "accumulate": 2, "remat": 0.8, "backend": "inductor"}
    want = plain("gpt", "adamw", num_steps=3)
    for (got,) in run_ranks(2, run_cases, [case], 3, timeout=280):
        assert difference(got["losses"], want["losses"]) < 1e-5
        assert difference(got["norms"], want["norms"]) < 1e-5
        assert difference(got["state"].params, want["state"].params) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_bf16_follows_fp32(run_ranks, reduce):
    """Computing in bf16 moves the losses by less than 1e-2, and which stage does it by less than 1e-3."""
    stages = (0, 1, 3) if reduce == "fp32" else (0, 2, 3)
    cases = [
        {
            "model": "gpt",
            "optimizer": "adamw",
            "stage": stage,
            "accumulate": 1,
            "precision": {"compute": "bf16", "reduce": reduce},
        }
        for stage in stages
    ]
    want = plain("gpt", "adamw")["losses"]
    first, *others = run_ranks(2, run_cases, cases)
    for result in first:
        assert ((result["losses"] - want) / want).abs().max() < 1e-2
        assert ((result["losses"] - first[0]["losses"]) / want).abs().max() < 1e-3
        assert not torch.equal(result["losses"], want)  # it did compute in bf16
        assert all(x.dtype == torch.float32 for x in fz.tree.leaves(result["state"].params))
    # ranks stay together
    assert all(difference(a, b) == 0.0 for other in others for a, b in zip(first, other, strict=True))


# the plain step against torch.optim


def torch_optim(
    make: Any, model: str, clip: float | None, dtype: torch.dtype
) -> tuple[list[float], list[torch.Tensor]]:
    init, loss = MODELS[model].init, MODELS[model].loss
    params = fz.tree.map(lambda x: x.to(dtype).requires_grad_(), init(fz.random.key(0)))
    leaves, losses = fz.tree.leaves(params), []
    optimizer = make(leaves)
    for batch in models.batches(NUM_STEPS):
        optimizer.zero_grad()
        value = loss(params, batch)
        value.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        optimizer.step()
        losses.append(value.detach())
    return losses, [x.detach() for x in leaves]


@pytest.mark.full(keep=["clipped-<lambda>-0.5-bare", "sgd-<lambda>-None-bare", "clipped-<lambda>-0.5-mixed"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("name", "make", "clip"),
    [
        ("adamw", lambda leaves: torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1), None),
        ("sgd", lambda leaves: torch.optim.SGD(leaves, lr=0.3, momentum=0.9), None),
        ("clipped", lambda leaves: torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.01), 0.5),
    ],
)
def test_the_plain_step_equals_torch_optim(model, name, make, clip):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-10)):
        losses, leaves = torch_optim(make, model, clip, dtype)
        got = plain(model, name, dtype)
        assert difference(got["losses"], torch.stack(losses)) < 1e-6
        assert difference(fz.tree.leaves(got["state"].params), leaves) < tolerance * (
            1 if dtype == torch.float64 else 2
        ), dtype
