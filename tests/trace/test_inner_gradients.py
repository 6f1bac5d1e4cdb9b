"""Gradients that a loss or a block computes itself: of tensors of its own they are values like others; those that it
adds to its arguments' are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rejections import INPUTS, ONE, WEIGHTS, raises, scaled

import fzero as fz
from fzero import optim
from fzero.errors import TraceError


def backward(p: Any, x: torch.Tensor) -> torch.Tensor:
    loss = scaled(p, x)
    loss.backward(retain_graph=True)
    return loss


def of_autograd(p: Any, x: torch.Tensor) -> torch.Tensor:
    loss = scaled(p, x)
    torch.autograd.backward([loss], inputs=[p["w"]], retain_graph=True)
    return loss


def caught(p: Any, x: torch.Tensor) -> torch.Tensor:
    loss = scaled(p, x)
    try:
        loss.backward(retain_graph=True)
    except Exception:
        loss = loss * 2
    return loss


def stepping(p: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD([p["w"]], lr=0.1)
    scaled(p, x).backward()
    optimizer.step()
    return scaled(p, x)


def assigned(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["w"].grad = torch.ones(4)
    return scaled(p, x)


def hooked(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["w"].register_post_accumulate_grad_hook(lambda w: w.grad.mul_(2))
    return scaled(p, x)


REFUSED = {
    backward: ("accumulates gradients itself", "['w'].grad", "loss.backward(retain_graph=True)", "return the loss"),
    of_autograd: ("accumulates gradients itself", "['w'].grad", "inputs=[p", "torch.autograd.grad("),
    caught: ("accumulates gradients itself", "['w'].grad", "loss.backward(retain_graph=True)"),
    stepping: ("accumulates gradients itself", "['w'].grad", "scaled(p, x).backward()"),
    assigned: ("sets gradients itself", "['w'].grad"),
    hooked: ("register_post_accumulate_grad_hook", "['w']"),
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda f: f.__name__)
def test_gradients_added_to_those_of_arguments_are_refused(loss):
    for fn in (loss, lambda p, x: fz.block(loss)(p, x) * 1.0):
        step = fz.train_step(fn, optim.sgd(0.1))
        for act in (
            lambda step=step: step(step.init(WEIGHTS), INPUTS),
            lambda step=step: fz.lower(step, ONE, WEIGHTS, INPUTS),
        ):
            raises(TraceError, act, *REFUSED[loss])


def of_its_own(p: Any, x: torch.Tensor) -> torch.Tensor:
    z, q = x.clone().requires_grad_(), torch.zeros(4, requires_grad=True)
    (z * p["w"].detach()).square().sum().backward()
    optimizer = torch.optim.SGD([q], lr=0.1)
    (q - 1).square().sum().backward()
    optimizer.step()
    torch.optim.SGD([p["w"]], lr=0.1).zero_grad()
    return (z.grad * (x @ p["v"]) * q.detach()).sum() * (2.0 if p["w"].grad is None else 3.0)


def of_the_batch(p: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    scaled(p, x).backward(inputs=[x], create_graph=True)
    return x.grad.square().sum()


def with_hooks(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["v"]
    h.retain_grad()
    h.register_hook(lambda g: g * 2)
    h.grad_fn.register_prehook(lambda grads: tuple(3 * g for g in grads))
    (g,) = torch.autograd.grad((h * p["w"]).sum(), p["w"], create_graph=True)
    return (h * p["w"]).square().mean() + g.square().sum()


@pytest.mark.parametrize("loss", [of_its_own, of_the_batch, with_hooks], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_other_tensors_train_as_in_pytorch(loss):
    leaves = {k: v.clone().requires_grad_() for k, v in WEIGHTS.items()}
    value = loss(leaves, INPUTS.clone())
    want = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()), allow_unused=True), strict=True))
    step = fz.train_step(loss, optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for run, first in ((step, step.init(WEIGHTS)), (train, train.init(WEIGHTS))):
        state, metrics = run(first, INPUTS)
        torch.testing.assert_close(metrics["loss"], value.detach())
        for name, g in want.items():
            torch.testing.assert_close(state.params[name], WEIGHTS[name] if g is None else WEIGHTS[name] - 0.1 * g)


@fz.block
def element(p):
    return p["w"][0], p["w"] * 2.0


@pytest.mark.parametrize(
    "loss",
    [lambda p, x: p["w"][0], lambda p, x: p["s"], lambda p, x: fz.weighted(p["w"][0], 1), lambda p, x: element(p)[0]],
)
def test_a_loss_that_is_an_element_of_a_parameter_is_told_as_it_was(loss):
    """The step overwrites the parameter."""
    step = fz.train_step(loss, optim.sgd(0.1))
    params = {**WEIGHTS, "s": torch.tensor(3.0)}
    want = loss(params, INPUTS)
    want = want.total if isinstance(want, tuple) else want
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    for run, first in ((step, step.init(params)), (train, train.init(params))):
        assert run(first, INPUTS)[1]["loss"] == want


@fz.block
def row(p):
    return p["v"][1], p["w"] * 2.0


def test_what_an_evaluation_returns_of_a_parameter_stays_as_it_was():
    """The next training step overwrites the parameter."""
    parts = {
        "element": lambda p: p["w"][0],
        "row": lambda p: p["v"][1].detach(),
        "turned": lambda p: p["v"].T,
        "whole": lambda p: p["v"],
        "of a block": lambda p: row(p)[0],
    }
    train = fz.compile(fz.train_step(scaled, optim.sgd(0.1)), fz.make_mesh(), backend="eager")
    evaluate = fz.compile(
        fz.eval_step(lambda p, x: {name: part(p) for name, part in parts.items()}), fz.make_mesh(), backend="eager"
    )
    state = train.init(WEIGHTS)
    found, want = evaluate(state.params, INPUTS), {name: part(state.params).clone() for name, part in parts.items()}
    train(state, INPUTS)
    for name in parts:
        assert torch.equal(found[name], want[name]) and not torch.equal(parts[name](state.params), want[name]), name
