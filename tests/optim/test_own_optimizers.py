"""Users' own optimizers: which pair of functions is one, what an update must return, and on which line it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rejections import ONE, ONES, ROWS, VECTOR, everywhere, loss_fn, lower, make, optimizer, own_loss, raises, squares

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, FzeroTypeError, TraceError
from fzero.optim import GradientTransformation


def test_what_is_no_optimizer() -> None:
    for wrong in (
        3,
        torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1),
        (lambda p: None, lambda g, s, p: None),
        SimpleNamespace(init=1, update=2),
    ):
        raises(
            FzeroTypeError, lambda wrong=wrong: fz.train_step(loss_fn, wrong), type(wrong).__name__, "init and update"
        )


UPDATES = {
    "no pair": (lambda g, s, p: g, "dict"),
    "other structure": (lambda g, s, p: ({"w": g["w"]}, s), "params['b']"),
    "other shape": (lambda g, s, p: ({"w": g["w"].sum(0), "b": g["b"]}, s), "params['w']"),
    "numbers": (lambda g, s, p: ({"w": 0.0, "b": g["b"]}, s), "updates['w']: float"),
    "state of other structure": (lambda g, s, p: (g, {"mu": s["mu"], "nu": s["mu"]}), "structure of opt_state"),
    "state of other shape": (
        lambda g, s, p: (g, {"mu": {"w": s["mu"]["w"][0], "b": s["mu"]["b"]}}),
        "opt_state['mu']['w']: float32[4, 3] before, float32[3] after",
    ),
    "state of other dtype": (
        lambda g, s, p: (g, {"mu": {"w": s["mu"]["w"], "b": s["mu"]["b"].double()}}),
        "opt_state['mu']['b']: float32[3] before, float64[3] after",
    ),
    "state of numbers": (lambda g, s, p: (g, {"mu": {"w": s["mu"]["w"], "b": 0}}), "opt_state['mu']['b']: int"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates(name: str) -> None:
    update, word = UPDATES[name]
    everywhere(FzeroError, make(optimizer=optimizer(update)), word)


def test_inits() -> None:
    step = make(optimizer=optimizer(lambda g, s, p: (g, s), lambda params: {"count": 0, "mu": params}))
    everywhere(FzeroTypeError, step, "opt_state['count']: int", "not tensors")


def test_updates_that_cannot_run_on_shards() -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return {"b": -grads["b"], "w": grads["w"] @ torch.eye(3)}, state

    raises(FzeroTypeError, lambda: lower(make(optimizer=optimizer(update))), "aten.mm", "w", "where=")


LAYER = {"mean": torch.zeros(4), "rows": torch.ones(10, 4), "var": torch.ones(4), "w": torch.ones(4, 4)}


def test_an_optimizer_names_its_line():
    def update(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(lambda g: g.reshape(3, 7) if g is not None else None, grads), state

    step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), optim.GradientTransformation(lambda params: (), update))
    with pytest.raises(TraceError, match=r"(?s)optimizer.*test_own_optimizers.py:\d+.*g\.reshape\(3, 7\).*Fix: "):
        fz.lower(step, ONE, LAYER, ONES)


def doubled(grads, state, params):
    grads["w"].mul_(2)
    return grads, state


def counted(grads, state, params):
    state["n"].add_(1)
    return grads, state


def decayed(grads, state, params):
    params["w"] *= 0.9
    return grads, state


def misshapen(grads, state, params):
    return {"w": grads["w"] @ torch.ones(3)}, state


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (doubled, "the gradient of params['w']: "),
        (counted, "opt_state['n']: "),
        (decayed, "params['w']: "),
        (misshapen, "the gradient of params['w']: float32[4]"),
    ],
)
def test_an_optimizer_s_mistake_names_the_leaf(update, says):
    step = fz.train_step(squares, optim.GradientTransformation(lambda params: {"n": torch.zeros(())}, update))
    state = step.init(VECTOR)
    raises(TraceError, lambda: fz.lower(step, ONE, VECTOR, ROWS), "test_own_optimizers.py:", says)
    if update is not misshapen:
        raises(TraceError, lambda: step(state, ROWS), "test_own_optimizers.py:", says)
        assert torch.equal(state.params["w"], VECTOR["w"]) and not state.opt_state["n"]


def test_a_norm_of_order_0_counts_on_shards_too() -> None:
    """Elements that are not zero: padding is none of them."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(lambda g: g / (1 + torch.linalg.vector_norm(g, 0)), grads), state

    step = fz.train_step(lambda p, x: (p["w"] * x.sum()).square().sum(), GradientTransformation(lambda p: (), update))
    params = {"w": torch.arange(5.0)}  # one element is zero, and so is its gradient
    train = fz.compile(fz.shard_params(step), fz.make_mesh(), backend="eager")
    want = train.gather(train(train.init(params), torch.ones(2, 1))[0]).params["w"]
    state, _ = fz.testing.simulate(fz.shard_params(step), fz.AbstractMesh(data=3), params, torch.ones(6, 1))
    assert torch.equal(state.params["w"], want)


OF_PYTORCH: dict[str, tuple[Any, tuple[str, ...]]] = {
    "PyTorch's optimizer": (
        lambda: fz.train_step(own_loss, torch.optim.AdamW),
        ("AdamW is an optimizer of PyTorch's,", "Fix:", "optim.adamw(3e-4)"),
    ),
}


def test_other_things_for_an_optimizer() -> None:
    for act, says in OF_PYTORCH.values():
        raises(FzeroError, act, *says)
    without_params = optim.GradientTransformation(lambda params: (), lambda grads, state: (grads, state))
    said = "optimizer.update=<lambda>(grads, state): must be a function of (grads, opt_state, params)"
    raises(FzeroError, lambda: fz.train_step(loss_fn, without_params), said)
    chain = lambda: optim.chain(optim.adamw(1e-3), 3, "sgd")  # noqa: E731
    raises(FzeroTypeError, chain, "argument 1: int", "argument 2: str", "clip_by_global_norm")
