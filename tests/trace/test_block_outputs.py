"""What of a block's results the loss differentiates, and in which order a block finds its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim

PARAMS = {"w": torch.linspace(-1, 1, 35).reshape(5, 7), "v": torch.linspace(1, -1, 21).reshape(7, 3)}
X = torch.linspace(0, 1, 30).reshape(6, 5)
MASK = (0.0, 0.0, 0.0, 0.0, 0.0, float("-inf"), float("-inf"))


def attention(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = (x @ p["w"] + torch.tensor(MASK)).softmax(-1)
    # an entropy, whose derivative at 0 is inf
    return weights @ p["v"], -torch.where(weights > 0, weights * weights.log(), 0.0).sum(-1).mean()


def logged(layer: Any) -> Callable[..., Any]:
    def loss(p: Any, x: torch.Tensor) -> Any:
        y, entropy = layer(p, x)
        return y.square().mean(), {"entropy": entropy.detach()}

    return loss


def unread(layer: Any) -> Callable[..., Any]:
    return lambda p, x: (layer(p, x)[0].square().mean(), {})


def by_torch(loss: Callable[..., Any]) -> dict[str, torch.Tensor]:
    params = {k: v.clone().requires_grad_() for k, v in PARAMS.items()}
    sgd = torch.optim.SGD(params.values(), 0.1)
    for _ in range(2):
        sgd.zero_grad()
        loss(params, X)[0].backward()
        sgd.step()
    return {k: v.detach() for k, v in params.items()}


@pytest.mark.parametrize("uses", [logged, unread])
@pytest.mark.parametrize(
    "transform",
    [
        fz.compose(),
        fz.remat("full"),
        fz.remat("none"),
        fz.compose(fz.shard_params(), fz.accumulate(2, schedule="layerwise")),
    ],
)
def test_a_result_that_is_not_differentiated_has_no_backward(uses: Any, transform: Any) -> None:
    """Zeros in place of its gradient would be nan where they meet an infinite derivative."""
    want = by_torch(uses(attention))
    train = fz.compile(
        transform(fz.train_step(uses(fz.block(attention)), optim.sgd(0.1), has_aux=True)),
        fz.make_mesh(data=1),
        backend="eager",
    )
    state = train.init(PARAMS)
    for _ in range(2):
        state, _ = train(state, X)
    for name, x in want.items():
        torch.testing.assert_close(state.params[name].reshape(-1)[: x.numel()].reshape(x.shape), x)


def test_calls_of_one_block_differentiated_by_different_results() -> None:
    def layer(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(x @ p["w"])
        return h @ p["v"], h.square()

    def loss(layer: Any) -> Callable[..., torch.Tensor]:
        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            (a, _), (_, b), (c, d) = layer(p, x), layer(p, x * 2), layer(p, x * 3)
            (g,) = torch.autograd.grad(c.sum(), p["v"], retain_graph=True)  # one result, and then both
            return a.mean() + b.sum() * 0.1 + (c * d[:, :3]).mean() + g.sum() * 0.01

        return fn

    params = {k: v.clone().requires_grad_() for k, v in PARAMS.items()}
    loss(layer)(params, X).backward()
    train = fz.compile(fz.train_step(loss(fz.block(layer)), optim.sgd(1.0)), fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init(PARAMS), X)
    for name, x in params.items():
        assert x.grad is not None
        torch.testing.assert_close(state.params[name], PARAMS[name] - x.grad)


def test_the_order_of_a_dictionary_is_part_of_a_call() -> None:
    @fz.block
    def layer(p: Any, x: torch.Tensor, order: dict[str, int]) -> torch.Tensor:
        for name in order:
            x = torch.tanh(x @ p["w"][:, :5]) if name == "a" else x * 2
        return x

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (layer(p, x, {"a": 1, "b": 2}) * 3 + layer(p, x, {"b": 2, "a": 1})).square().mean()

    train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    _, metrics = train(train.init(PARAMS), X)
    torch.testing.assert_close(metrics["loss"], loss(PARAMS, X))
