"""The plain step is what a compiled one must equal: it writes to nothing that it is given, and takes every loss that a
compiled one takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero.errors import TraceError

MESH = fz.make_mesh(data=1)
PARAMS = {"w": torch.linspace(-1, 1, 16).reshape(4, 4), "mean": torch.zeros(4), "var": torch.ones(4)}
BATCH = torch.linspace(-1, 2, 12).reshape(3, 4)
frozen: dict[str, Any] = {"trainable": lambda path, leaf: "w" in path}


def norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x @ p["w"], p["mean"], p["var"], training=True).tanh().mean()


def norm_of_clones(p: Any, x: torch.Tensor) -> torch.Tensor:
    return norm({k: v.clone() for k, v in p.items()}, x)


def norm_in_evaluation(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x @ p["w"], p["mean"], p["var"]).tanh().mean()


def counts(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["mean"].add_(1)
    return (x @ p["w"]).mean()


def writes_a_view_of_the_batch(p: Any, x: torch.Tensor) -> torch.Tensor:
    x[1].view(2, 2).mul_(2.0)
    return (x @ p["w"]).mean()


def writes_with_out(p: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.add(x, 1.0, out=x)
    return (x @ p["w"]).mean()


def writes_under_vmap(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.func.vmap(lambda row: row.mul_(2.0))(x) @ p["w"]).mean()


WRITES = {
    norm: "params['mean']",
    counts: "params['mean']",
    writes_a_view_of_the_batch: "batch",
    writes_with_out: "batch",
    writes_under_vmap: "batch",
}


@pytest.mark.parametrize("loss", WRITES, ids=lambda f: f.__name__)
def test_what_writes_to_its_arguments_is_refused_before_it_does_as_by_the_compiled_step(
    loss: Callable[..., Any],
) -> None:
    step = fz.train_step(loss, optim.sgd(0.1), **frozen)
    state, batch, before = step.init(PARAMS), BATCH.clone(), dict(PARAMS)
    train = fz.compile(step, MESH, backend="eager")
    evaluate = fz.eval_step(loss)
    calls = [
        lambda: step(state, batch),
        lambda: train(train.init(PARAMS), batch),
        lambda: evaluate(state.params, batch),
    ]
    for call in calls:
        with pytest.raises(TraceError, match=r"fzero.(train|eval)_step: changes its arguments in place") as error:
            call()
        assert f"  {WRITES[loss]}" in str(error.value) and "test_plain_step.py:" in str(error.value), error.value
        assert "Fix: return the new value instead" in str(error.value)
    assert torch.equal(batch, BATCH) and all(torch.equal(x, before[k]) for k, x in state.params.items())


@pytest.mark.parametrize("loss", [norm_of_clones, norm_in_evaluation], ids=lambda f: f.__name__)
def test_what_writes_to_clones_or_to_nothing_trains_alike(loss: Callable[..., Any]) -> None:
    assert fz.testing.check_equivalent(
        fz.train_step(loss, optim.sgd(0.1), **frozen), PARAMS, BATCH, MESH, steps=2
    ).equivalent


def forces(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradient by the input that the caller gave, as of a potential."""
    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad((x @ p["w"]).tanh().sum(), x, create_graph=True)
    return force.square().mean()


def forces_by_the_batch_itself(p: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (force,) = torch.autograd.grad((x @ p["w"]).tanh().sum(), x, create_graph=True)
    return force.square().mean()


def with_aux(p: Any, x: torch.Tensor) -> Any:
    y = (x @ p["w"]).tanh()
    return y.square().mean(), {"rows": fz.weighted(y.sum(), y.shape[0]), "first": y[0, 0]}


@pytest.mark.parametrize("loss", [forces, forces_by_the_batch_itself, with_aux], ids=lambda f: f.__name__)
def test_check_equivalent_takes_losses_with_derivatives_of_their_own(loss: Callable[..., Any]) -> None:
    step = fz.train_step(loss, optim.sgd(0.1), has_aux=loss is with_aux)
    report = fz.testing.check_equivalent(fz.remat("full")(step), {"w": PARAMS["w"]}, BATCH, MESH, steps=2)
    assert report.equivalent and not BATCH.requires_grad
    _, metrics = step(step.init({"w": PARAMS["w"]}), BATCH)
    assert not any(x.requires_grad for x in (metrics["loss"], *metrics.get("aux", {}).values()))


def test_a_loss_without_parameters_is_refused_by_both() -> None:
    step = fz.train_step(lambda p, x: x.square().mean(), optim.sgd(0.1))
    train = fz.compile(step, MESH, backend="eager")
    for run in (step, train):
        with pytest.raises(TraceError, match="does not depend on any trainable parameter"):
            run(run.init({"w": PARAMS["w"]}), BATCH)
