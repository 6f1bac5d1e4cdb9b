"""Tensors that a loss or a block reads and is not given: closures, globals, defaults, caches. Each is named."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from rejections import ROWS, VECTOR, blocked, loss_fn, lower, make, raises

import fzero as fz
from fzero import optim
from fzero.errors import TraceError

GLOBAL = torch.ones(3)


def test_tensors_from_elsewhere_are_named() -> None:
    scale, holder, listed = torch.ones(3), SimpleNamespace(t=torch.ones(3)), {"a": [torch.ones(3)]}

    def default(p: Any, x: Any, t: torch.Tensor = scale) -> Any:
        return x @ p["w"] + t

    def helper(y: torch.Tensor) -> torch.Tensor:
        return y + GLOBAL

    module = torch.nn.Linear(3, 3)
    cases = {
        "closure variable scale": lambda p, x: x @ p["w"] * scale,
        "global variable GLOBAL": lambda p, x: x @ p["w"] + GLOBAL,
        "closure variable holder.t": lambda p, x: x @ p["w"] + holder.t,
        "closure variable listed['a'][0]": lambda p, x: x @ p["w"] + listed["a"][0],
        "closure variable module.weight": lambda p, x: module(x @ p["w"]),
        "default of t": default,
        "global variable GLOBAL of helper": lambda p, x: helper(x @ p["w"]),
        "argument 0 of the partial": functools.partial(lambda t, p, x: x @ p["w"] + t, scale),
    }
    for name, fn in cases.items():
        raises(TraceError, lambda fn=fn: lower(blocked(fn)), "fzero.block", name, "float32[3")
    text = raises(
        TraceError,
        lambda: lower(make(lambda p, x: loss_fn(p, x) * scale.sum())),
        "fzero.train_step",
        "closure variable scale: float32[3]",
    )
    assert "block" not in text


def test_tensors_of_the_loss_function_are_named_in_a_block() -> None:
    """Also a parameter that is a leaf of autograd: an error while autograd asks for its device used to end the
    process."""
    raises(
        TraceError,
        lambda: lower(make(lambda p, x: fz.block(lambda q, z: z @ q["w"] + p["b"])({"w": p["w"]}, x).mean())),
        "closure variable p['b']",
    )

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return fz.block(lambda q, z: z @ q["w"] + y.sum())(p, x).mean()

    raises(TraceError, lambda: lower(make(loss)), "closure variable y: float32[6, 4]")


def test_a_tensor_that_the_loss_keeps():
    """A cache, filled while traced, would hold a tensor without values."""
    kept = {}

    def loss(p, x):
        if "scale" not in kept:
            kept["scale"] = x.square().mean()
        return (x @ p["w"]).square().mean() * kept["scale"]

    train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init(VECTOR), ROWS)  # traced again at the second call
    raises(
        TraceError,
        lambda: train(state, ROWS),
        "reads a tensor that is not one of its arguments, but was kept from an earlier trace (a cache)",
        "closure variable kept['scale']: float32[]",
        "Fix: compute it in each call",
    )
