"""Blocks: what their functions may do, take and return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rejections import BATCH, ONE, ONES, PARAMS, STEP, blocked, compiled, everywhere, loss_fn, lower, make, raises

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, TraceError


def add_in_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x @ p["w"]


def set_item(p: Any, x: torch.Tensor) -> torch.Tensor:
    x[0] = 0
    return x @ p["w"]


def through_a_view(p: Any, x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[2:].mul_(2)
    return x @ p["w"]


def scale_weight(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["w"].mul_(2)
    return x @ p["w"]


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (add_in_place, "x.add_(1)"),
        (set_item, "x[0] = 0"),
        (through_a_view, "x.view(-1)[2:].mul_(2)"),
        (scale_weight, 'p["w"].mul_(2)'),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_mutated_arguments(fn: Any, word: str) -> None:
    step = blocked(fn)
    everywhere(TraceError, step, f"block {fn.__name__}", word, plain=False)
    raises(
        TraceError,
        lambda: step(step.init(PARAMS), BATCH),
        "changes its arguments in place",
        word if fn is not scale_weight else "test_blocks.py",
    )
    everywhere(TraceError, make(lambda p, x: fn(p, x).mean()), "in place")  # outside a block


RETURNS = {
    "number": (lambda p, x: 1.0, "result is float"),
    "string": (lambda p, x: (x @ p["w"], {"note": "text"}), "result[1]['note'] is str"),
    "none": (lambda p, x: None, "no tensor"),
}


@pytest.mark.parametrize("name", RETURNS)
def test_blocks_that_return_other_things(name: str) -> None:
    fn, word = RETURNS[name]
    run = fz.block(fn)
    everywhere(TraceError, make(lambda p, x: loss_fn(p, x) + 0 * (run(p, x) is None)), "block", word, plain=False)


def own_intermediates(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(len(x), 3)
    y.copy_(x @ p["w"])
    y[1:].add_(1)
    y[0] = 0
    z = y * 2 + p["b"]
    z += p["b"]
    return F.relu(z, inplace=True)


def nested(p: Any, x: torch.Tensor) -> torch.Tensor:
    return fz.block(lambda q, z: torch.tanh(z @ q))(p["w"], x) + fz.block(lambda q, z: z.sum() * q)(p["b"], x)


@functools.partial(fz.block)
def linear(p: Any, x: torch.Tensor, heads: int = 2, *, mode: str = "a", twice: Any = None) -> Any:
    y = x @ p["w"] * heads + p["b"]
    return y if mode == "a" else (y, {"index": y.argmax(-1), "pair": [x, y * twice]})


def pieces(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, more = linear(p, x, heads=4, mode="b", twice=torch.ones(()))
    return (y * F.one_hot(more["index"], 3)).sum() + more["pair"][1].mean() + more["pair"][0].sum() * 0


def methods(p: Any, x: torch.Tensor) -> torch.Tensor:
    class Scale:
        def __init__(self, by: float):
            self.by = by

        def apply(self, q: Any, z: torch.Tensor) -> torch.Tensor:
            return z @ q["w"] * self.by

    return sum((fz.block(Scale(by).apply)(p, x).mean() for by in (1.0, 2.0, 3.0)), torch.zeros(()))


def settings(p: Any, x: torch.Tensor) -> torch.Tensor:
    total, one = torch.zeros(()), [0.0]
    for by in range(4):
        one[0] = float(by)  # the same list, another value
        total = total + fz.block(lambda q, z: (z @ q["w"]).mean() * one[0])(p, x)
        options = {"by": by}  # another dict, perhaps where the last one was
        total = total + fz.block(lambda q, z, options=options: (z @ q["w"]).mean() * options["by"])(p, x)
    return total


def unused(p: Any, x: torch.Tensor) -> torch.Tensor:
    fz.block(lambda q, z: z @ q["w"] * 100)(p, x)
    fz.block(lambda q, z: (z, q["w"]))(p, x)
    return loss_fn(p, x)


FINE: dict[str, Callable[..., torch.Tensor]] = {
    "in place on its own": lambda p, x: fz.block(own_intermediates)(p, x).mean(),
    "nested": lambda p, x: fz.block(nested)(p, x).mean(),
    "under vmap": lambda p, x: torch.func.vmap(lambda row: linear(p, row[None]).mean())(x).sum(),
    "under grad": lambda p, x: (
        torch.func.grad(lambda w: (linear({"w": w, "b": p["b"]}, x) ** 2).mean())(p["w"]).pow(2).sum()
    ),
    "constants": lambda p, x: (linear(p, x, 3) * linear(p, x, heads=4, mode="a")).mean(),
    "partial": lambda p, x: (
        fz.block(functools.partial(lambda by, q, z: z @ q["w"] * by, 3))(p, x)
        + fz.block(functools.partial(lambda by, q, z: z @ q["w"] * by, 4))(p, x)
    ).mean(),
    "the same tensor twice": lambda p, x: fz.block(lambda q, a, b: (a @ q["w"]) * (b @ q["w"]))(p, x, x).mean(),
    "the same weight twice": lambda p, x: fz.block(lambda q, z: z @ q[0] + z @ q[1] * 2)((p["w"], p["w"]), x).mean(),
    "its input back": lambda p, x: (
        fz.block(lambda q, z: z)(p, x @ p["w"]).mean() + fz.block(lambda q, z: (z, q["w"], z))(p, x)[1].sum()
    ),
    "its input and a view": lambda p, x: fz.block(lambda q, z: (z, z.T, z[0]))(p, x @ p["w"])[1].pow(2).mean(),
    "trees and integers": pieces,
    "None in a tree": lambda p, x: fz.block(lambda q, z: (z @ q["w"], None))(p, x)[0].mean(),
    "methods": methods,
    "settings that change": settings,
    "unused": unused,
    "no_grad inside": lambda p, x: fz.block(lambda q, z: z @ q["w"] * (z @ q["w"]).detach())(p, x).mean(),
    "params alone": lambda p, x: fz.block(lambda q: (q["w"] ** 2).sum())(p),
}


@pytest.mark.full(keep=["params alone", "None in a tree", "no_grad inside"])
@pytest.mark.parametrize("name", FINE)
def test_what_blocks_may_do(name: str) -> None:
    """Equal to the plain step, whole and in micro-batches, and lowered for two ranks."""
    step = make(FINE[name])
    expected, metrics = step(step.init(PARAMS), BATCH)
    train = compiled(step)
    state, got = train(train.init(PARAMS), BATCH)
    torch.testing.assert_close(
        (state.params, got["loss"], got["grad_norm"]),
        (expected.params, metrics["loss"], metrics["grad_norm"]),
        rtol=1e-6,
        atol=1e-7,
    )
    assert lower(step).program.instructions


def test_a_block_names_its_arguments_and_their_leaves():
    layer = fz.block(lambda p, y, *, scale: (y * scale) @ p["w"])
    step = fz.train_step(lambda p, x: layer(p["layers"][1], x[:, :2], scale=2.0).mean(), optim.sgd(0.1))
    with pytest.raises(TraceError) as caught:
        fz.lower(step, ONE, {"layers": [{"w": torch.ones(4, 4)}] * 2}, ONES)
    assert "p['w'] = params['layers']" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)


def test_a_module_given_to_a_block_names_functional_call() -> None:
    class Layer(torch.nn.Linear):
        forward = fz.block(torch.nn.Linear.forward)

    layer = Layer(4, 4)
    step = fz.train_step(lambda p, x: torch.func.functional_call(layer, p, (x,)).square().mean(), optim.sgd(0.1))
    params = {name: x.detach() for name, x in layer.named_parameters()}
    says = "params: Layer\nFix: give the layer's tensors: fz.block("
    raises(FzeroError, lambda: fz.lower(step, ONE, params, ONES), says)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: fz.block(3), "fn=3: must be a function of (params, ...)"),
    (lambda: fz.block(lambda: 3), "must be a function of (params, ...)"),
    (lambda: fz.block(STEP), "fn is a step"),
]


def test_wrong_arguments_are_named() -> None:
    for call, words in WRONG:
        raises(FzeroError, call, words)
