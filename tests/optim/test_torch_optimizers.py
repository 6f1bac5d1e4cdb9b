"""The optimizers of torch.optim on meshes, on other memory tiers and in checkpoints: as in one process.

One optimizer gives each parameter another one of them, so each case has them all. That the plain ones are equal to
torch's: tests/optim/test_optimizers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import meta
from test_parity import difference

import fzero as fz
from fzero import optim

LR = optim.linear(0.05, 0.0, 10)
EVERY = {
    "amsgrad": optim.adamw(0.01, optim.linear(0.8, 0.9, 5), amsgrad=True, maximize=True),
    "dampening": optim.sgd(0.01, 0.9, weight_decay=0.1, dampening=0.3),
    "rmsprop": optim.rmsprop(LR, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": optim.adagrad(LR, lr_decay=0.1, initial_accumulator_value=0.1),
    "nadam": optim.nadam(LR, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": optim.radam(0.01, b2=0.9, weight_decay=0.1),
    "adamax": optim.adamax(0.01, maximize=True),
    "adadelta": optim.adadelta(0.5, weight_decay=0.1),
    "asgd": optim.asgd(LR, 0.1, t0=1),
    "rprop": optim.rprop(0.01),
}
NAMES = list(EVERY)


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["layers"]:
        x = layer(p, x)
    return (x @ params["out"]).square().mean() + params["bias"].square().sum()


def params_of(width: int = 10) -> Any:
    draw = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=draw) * 0.4  # noqa: E731
    layers = [{"w": make(width, width), "b": make(width)} for _ in range(4)]
    return {"layers": layers, "out": make(width, 4), "bias": torch.ones(5)}


X = torch.randn(24, 10, generator=torch.Generator().manual_seed(4))
PATHS = fz.tree.paths(params_of(), "params")


def step_of() -> Any:
    """Of ten parameters each has an optimizer of its own."""
    label = lambda path, leaf: NAMES[PATHS.index(path)]  # noqa: E731
    return fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.partition(EVERY, label)))


Axes = dict[str, Any]
MESHES: dict[str, tuple[Any, Axes]] = {
    "stage 0": (fz.data_parallel(), {"data": 2}),
    "stage 1": (fz.shard_opt_state(), {"data": 3}),
    "stage 2": (fz.compose(fz.shard_grads(), fz.accumulate(2)), {"data": 4}),
    "stage 3": (fz.shard_params(), {"data": 3}),
    "layerwise": (fz.compose(fz.shard_params(), fz.accumulate(2, schedule="layerwise")), {"data": 2}),
    "replicas": (fz.compose(fz.shard_params(), fz.data_parallel(axis="replica")), {"replica": 2, "data": 2}),
    "tensor": (
        fz.compose(fz.tensor_parallel(rules={"layers.*.w": 1, "layers.*.b": 0}), fz.shard_params()),
        {"data": 2, "model": 2},
    ),
    "pipeline": (fz.compose(fz.accumulate(4, schedule="layerwise"), fz.pipeline()), {"pipe": 2}),
    "pipeline of shards": (
        fz.compose(fz.shard_params(), fz.accumulate(2, schedule="layerwise"), fz.pipeline()),
        {"pipe": 2, "data": 2},
    ),
}


def test_each_parameter_has_another_optimizer() -> None:
    assert len(PATHS) == len(NAMES)


@pytest.mark.full(keep=["pipeline"])
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_is_one_process(name: str) -> None:
    transform, mesh = MESHES[name]
    plain = step_of()
    want = plain.init(params_of())
    for _ in range(3):
        want, _ = plain(want, X)
    got, _ = fz.testing.simulate(transform(plain), fz.AbstractMesh(**mesh), params_of(), X, steps=3)
    assert difference(got.params, want.params) < 1e-5
    assert difference(got.opt_state, want.opt_state) < 1e-4


def trained(train: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state, _ = train(state, X.chunk(train.mesh.size)[train.mesh.rank])
    return state


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(fz.tree.leaves(one), fz.tree.leaves(other), strict=True))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_offload_is_bit_for_bit(tier: Any, tmp_path: Path) -> None:
    found = []
    path = str(tmp_path) if tier == "nvme" else None
    for transforms in ((), (fz.offload(tier, ("opt_state", "params"), path=path),)):
        mesh = fz.make_mesh(data=1, unified_memory=False)
        train = fz.compile(fz.compose(*transforms)(step_of()), mesh, backend="eager")
        found.append(train.gather(trained(train, train.init(params_of()), 3)))
    assert same(*found)


def test_fp16_steps_that_overflow_change_nothing() -> None:
    """No state moves in a step that the loss scale skips, and the numbers of the step (NAdam's product) neither."""
    scale = fz.LossScale(initial=2.0**40)
    train = fz.compile(fz.mixed_precision("fp16", loss_scale=scale)(step_of()), fz.make_mesh(data=1), backend="eager")
    first = train.gather(state := train.init(params_of()))
    state = trained(train, state, 1)
    assert same((first.params, first.opt_state), (train.gather(state).params, train.gather(state).opt_state))
    state = trained(train, state, 40)
    after = train.gather(state)
    assert all(x.isfinite().all() for x in fz.tree.leaves((after.params, after.opt_state)))
    assert not any(torch.equal(a, b) for a, b in zip(*map(fz.tree.leaves, (first.params, after.params)), strict=True))


def saved(path: str) -> Any:
    train = fz.compile(fz.shard_params(step_of()), fz.make_mesh(data=-1), backend="eager")
    state = trained(train, train.init(params_of()), 2)
    fz.checkpoint.save(path, state)
    return train.gather(trained(train, state, 2))


def resumed(path: str) -> Any:
    train = fz.compile(fz.shard_opt_state(step_of()), fz.make_mesh(data=-1), backend="eager")
    return train.gather(trained(train, train.restore(path, params_of()), 2))


@pytest.mark.full
def test_a_checkpoint_goes_on_with_other_ranks_and_another_stage(
    run_ranks: Any, run_or_call: Any, tmp_path: Path
) -> None:
    want = run_or_call(2, saved, str(tmp_path / "saved"))[0]
    for ranks in (1, 3):
        for got in run_or_call(ranks, resumed, str(tmp_path / "saved")):
            assert difference(got.params, want.params) < 1e-5
            assert difference(got.opt_state, want.opt_state) < 1e-4


def test_numbers_of_the_step_are_no_part_of_a_parameters_arithmetic() -> None:
    """Bias corrections and momenta are powers of the count: computed once, not in the functions of parameters."""
    program = fz.lower(fz.shard_params(step_of()), fz.AbstractMesh(data=2), *meta((params_of(), X[:12]))).program
    targets = {name: {str(n.target) for n in fn.graph.graph.nodes} for name, fn in program.functions.items()}
    updates = [found for name, found in targets.items() if name.startswith("update")]
    assert len(updates) > 3 and not any(".pow." in x for found in updates for x in found)
    assert any(".pow." in x for x in targets["scalars_0"])
