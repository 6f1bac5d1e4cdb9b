"""The update cut into functions: optimizers whose state keeps, exchanges or shares values, and that no function is made
twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import batches, meta, meta_part

import fzero as fz
from fzero import optim
from fzero.transforms import partition_update_pass

PARAMS = {"v": torch.arange(5.0), "w": torch.arange(12.0).reshape(4, 3) / 12}
BATCHES = list((torch.arange(24.0).reshape(3, 2, 4) / 24).unbind())


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return ((batch @ params["w"]) ** 2).mean() + (params["v"] ** 2).sum()


def zeros(params: Any) -> Any:
    return fz.tree.map(torch.zeros_like, params)


def keeps_the_last_gradients() -> optim.GradientTransformation:
    def init(params: Any) -> Any:
        return {"before": zeros(params), "last": zeros(params)}

    def step(grads: Any, state: Any, params: Any = None) -> Any:
        return fz.tree.map(lambda g, b: -0.1 * g - 0.01 * b, grads, state["before"]), {
            "before": state["last"],
            "last": grads,
        }

    return optim.GradientTransformation(init, step)


def keeps_the_last_norms() -> optim.GradientTransformation:
    def init(params: Any) -> Any:
        return {"a_last": torch.zeros(()), "before": torch.zeros(())}

    def step(grads: Any, state: Any, params: Any = None) -> Any:
        return fz.tree.map(lambda g: -0.1 * g - state["before"], grads), {
            "a_last": optim.global_norm(grads),
            "before": state["a_last"],
        }

    return optim.GradientTransformation(init, step)


def exchanges_two_leaves() -> optim.GradientTransformation:
    def init(params: Any) -> Any:
        return {"a": zeros(params), "b": fz.tree.map(torch.ones_like, params)}

    def step(grads: Any, state: Any, params: Any = None) -> Any:
        return fz.tree.map(lambda g, a: -0.1 * g * a, grads, state["a"]), {"a": state["b"], "b": state["a"]}

    return optim.GradientTransformation(init, step)


def makes_one_value_twice() -> optim.GradientTransformation:
    def init(params: Any) -> Any:
        return {"a": zeros(params), "b": zeros(params)}

    def step(grads: Any, state: Any, params: Any = None) -> Any:
        twice = fz.tree.map(lambda g, a: g * 2 + a, grads, state["a"])
        return fz.tree.map(lambda t: -0.1 * t, twice), {"a": twice, "b": twice}

    return optim.GradientTransformation(init, step)


@pytest.mark.parametrize("transform", [lambda step: step, fz.shard_params], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    "make",
    [keeps_the_last_gradients, keeps_the_last_norms, exchanges_two_leaves, makes_one_value_twice],
    ids=lambda f: f.__name__,
)
def test_states_that_move(make: Callable[[], Any], transform: Any) -> None:
    """Leaves are overwritten one after another; the new values are those of before any was."""
    step = transform(fz.train_step(loss_fn, make()))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    plain, state = step.init(PARAMS), train.init(PARAMS)
    for batch in BATCHES:
        plain, _ = step(plain, batch)
        state, _ = train(state, batch)
    for name, one, two in zip(fz.tree.paths(plain), fz.tree.leaves(plain), fz.tree.leaves(state), strict=True):
        torch.testing.assert_close(two.reshape(one.shape), one, msg=name)
    if transform is fz.shard_params:
        fz.lower(step, fz.AbstractMesh(data=2), PARAMS, BATCHES[0])


def test_alike_blocks_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep the model, the update is extracted as often."""
    extracted: list[Any] = []

    class Counted(partition_update_pass.Subgraph):
        def extract(self, names: Any = None) -> Any:
            extracted.append(self)
            return super().extract(names)

    monkeypatch.setattr(partition_update_pass, "Subgraph", Counted)
    step = fz.shard_params(
        fz.train_step(models.gpt_loss, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    )
    counts = []
    for layers in (2, 8):
        extracted.clear()
        fz.lower(
            step,
            fz.AbstractMesh(data=2),
            meta(models.gpt_init(fz.random.key(0), layers=layers)),
            meta_part(batches(1)[0], 2),
        )
        counts.append(len(extracted))
    assert counts[0] == counts[1] > 2


@pytest.mark.parametrize("transform", [fz.data_parallel, fz.shard_params])
def test_an_optimizer_may_hand_its_state_back_as_it_came(transform: Any) -> None:
    """Averages that are fixed from some step on, a schedule of one's own: a leaf of the state that no step changes is
    not written."""

    def init(params: Any) -> Any:
        return {"mu": fz.tree.map(torch.ones_like, params)}

    def hands_back(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(lambda g, mu: -0.1 * g * mu, grads, state["mu"]), state

    keeps = optim.GradientTransformation(init, hands_back)
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), keeps)
    params, batch = {"w": torch.ones(4, 3)}, torch.ones(6, 4)
    assert fz.lower(transform(step), fz.AbstractMesh(data=2), params, batch).program.assigns == ("step", "params['w']")
    want, _ = step(step.init(params), batch)
    train = fz.compile(transform(step), fz.make_mesh(data=1), backend="eager")
    got, _ = train(train.init(params), batch)
    torch.testing.assert_close(train.gather(got).params, want.params)
