"""Parameters that the loss does not use have no gradient: they keep their values, as those whose `.grad` is None do in
torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim

PARAMS = {
    "used": torch.arange(6.0).reshape(2, 3),
    "head": torch.ones(4, 2),
    "pooler": {"w": torch.full((3, 2), 2.0), "b": torch.ones(5)},
}
BATCH = torch.linspace(-1, 1, 12).reshape(6, 2)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (
        fz.block(lambda p, x: (x @ p["used"]).tanh())({"used": params["used"], "head": params["head"]}, x)
        .square()
        .mean()
    )


def by_torch(optimizer: type[torch.optim.Optimizer], **options: Any) -> dict[str, torch.Tensor]:
    params = {n: x.clone().requires_grad_() for n, x in zip(fz.tree.names(PARAMS), fz.tree.leaves(PARAMS), strict=True)}
    step = optimizer(params.values(), **options)  # type: ignore[arg-type]
    for _ in range(3):
        step.zero_grad()
        loss(params, BATCH).backward()
        step.step()
    return {n: x.detach() for n, x in params.items()}


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (optim.adamw(0.1, weight_decay=0.3), torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    "sgd": (
        optim.sgd(0.1, momentum=0.9, weight_decay=0.3),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
    ),
}
STEPS: dict[str, Any] = {
    "plain": lambda step: step,
    "accumulate": fz.accumulate(2),
    "bf16": fz.mixed_precision("bf16"),
    "fp16": fz.mixed_precision("fp16"),
    "rounded": fz.mixed_precision("bf16", params="bf16"),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_as_torch_leaves_them(case: str) -> None:
    optimizer, its, options = CASES[case]
    want, mesh = by_torch(its, **options), fz.make_mesh(data=1)
    for name, transform in STEPS.items():
        train = fz.compile(transform(fz.train_step(loss, optimizer)), mesh, backend="eager")
        state = train.init(PARAMS)
        for _ in range(3):
            state, _ = train(state, BATCH)
        got = dict(zip(fz.tree.names(state.params), fz.tree.leaves(state.params), strict=True))
        assert all(torch.equal(got[n].float(), x) for n, x in want.items() if n != "used"), name
        if name != "fp16":  # which skips steps, until its scale is right
            assert torch.allclose(
                got["used"].float(), want["used"], atol=0.03 if name in ("bf16", "rounded") else 1e-5
            ), name
    step = fz.train_step(loss, optimizer)
    state = step.init(PARAMS)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert torch.allclose(state.params["used"], want["used"]) and torch.equal(
        state.params["pooler"]["w"], want["pooler.w"]
    )


def test_a_parameter_first_used_later_has_the_count_of_all() -> None:
    """Adam has one count, so the bias correction of the fifth update; torch has a count for each parameter."""
    mesh, optimizer = fz.make_mesh(data=1), optim.adam(0.01)

    def either(params: Any, batch: Any) -> torch.Tensor:
        x = batch["x"] * params["body"]
        return (x * params["head"]).mean() if "uses_head" in batch else x.mean()

    train = fz.compile(fz.train_step(either, optimizer), mesh, backend="eager")
    state = train.init({"body": torch.ones(3), "head": torch.ones(3)})
    for _ in range(4):
        state, _ = train(state, {"x": torch.ones(3)})
    assert torch.equal(state.params["head"], torch.ones(3))
    state, _ = train(state, {"x": torch.ones(3), "uses_head": torch.ones(3)})
    moved = 0.01 * (0.1 / (1 - 0.9**5)) / (0.001 / (1 - 0.999**5)) ** 0.5  # torch: 0.01
    torch.testing.assert_close(state.params["head"], torch.full((3,), 1 - moved), rtol=1e-5, atol=1e-6)


def on_shards() -> list[torch.Tensor]:
    mesh = fz.make_mesh()
    out = []
    for transform in (
        fz.shard_params(),
        fz.shard_opt_state(),
        fz.compose(fz.shard_grads(), fz.accumulate(3, schedule="layerwise"), fz.remat("full")),
    ):
        train = fz.compile(transform(fz.train_step(loss, CASES["adamw"][0])), mesh, backend="eager")
        state = train.init(PARAMS)
        for _ in range(3):
            state, _ = train(state, BATCH.chunk(mesh.size)[mesh.rank] if mesh.size == 2 else BATCH)
        out += fz.tree.leaves(train.gather(state).params)
    return out


@pytest.mark.full
def test_on_shards_too(run_ranks: Any) -> None:
    want = by_torch(*CASES["adamw"][1:2], **CASES["adamw"][2])
    expected = [want[n] for n in fz.tree.names(PARAMS)] * 3
    for got in run_ranks(2, on_shards):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
