"""Code as PyTorch's users write it, in a block and outside one: it trains as PyTorch trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
from fzero import compat, optim
from fzero.trace.device import on_device
from fzero.trace.record import record

Loss = Callable[[Any, Any], torch.Tensor]


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(a: Any, b: Any) -> bool:
    return all(
        torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
        for x, y in zip(fz.tree.leaves(a), fz.tree.leaves(b), strict=True)
    )


def trains_as_pytorch(fn: Loss, params: Any, batch: Any, *, blocks: bool = True) -> None:
    """Two steps of `fn(params, batch) -> output`, as a block, as a recomputed block and as no block: its loss and
    parameters are those of the plain step."""

    def loss_of(f: Loss) -> Loss:
        return lambda p, x: sum(y.float().square().mean() for y in fz.tree.leaves(f(p, x)))  # type: ignore[return-value]

    ways = {
        "outside": (fn, ()),
        **({"block": (fz.block(fn), ()), "full": (fz.block(fn), (fz.remat("full"),))} if blocks else {}),
    }
    plain = fz.train_step(loss_of(fn), optim.sgd(0.1))
    expected, metrics = plain.init(params), {}
    for _ in range(2):
        expected, metrics = plain(expected, batch)
    assert not close(expected.params, params), "nothing was trained"
    for name, (f, transforms) in ways.items():
        train = fz.compile(
            fz.compose(*transforms)(fz.train_step(loss_of(f), optim.sgd(0.1))), fz.make_mesh(data=1), backend="eager"
        )
        state, found = train.init(params), {}
        for _ in range(2):
            state, found = train(state, batch)
        assert close(found["loss"], metrics["loss"]), name
        assert close(state.params, expected.params), name


# --- operations ---


def convolutions(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.conv2d(x, p["first"], p["bias"], padding=1).relu()  # whose input needs no gradient
    y = F.conv_transpose2d(y, p["second"], stride=2)
    return F.conv1d(y.flatten(2), p["third"], groups=2)


def in_place_beside_literals(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, scale = x @ p["w"], torch.tensor([1.0, 2.0])
    y += torch.tensor([1.0, -1.0])
    scale *= 2  # a literal itself
    y[:, :1].mul_(scale[1])
    return y[:, torch.tensor([1, 0])] * scale


def in_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = (x @ p["w"]).relu_()
    z = y.view(-1).clone()
    z[2:].mul_(3)
    rows = torch.zeros(2, 4)
    rows[0], rows[1:] = y[0], y[1:2] * 2
    torch.add(rows.detach(), 1.0, out=torch.empty(2, 4))
    doubled = y * 2
    doubled.detach().add_(1)
    y = y + doubled
    return torch.stack([rows, z.view(3, 4)[:2].contiguous().clamp_(max=2.0), y[:2]])


def backwards_in_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Whose derivatives PyTorch computes in place."""
    y = F.normalize(x @ p["w"], dim=-1) + (x @ p["w"]).std(0) + torch.linalg.norm(x @ p["w"], dim=0)
    y = y * F.cosine_similarity(y, x[:, :4], dim=-1)[:, None] + torch.cumprod(y, 0)
    return y + torch.vmap(lambda row: torch.softmax(torch.tanh(row @ p["w"]), 0))(y)


def strides(p: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = x @ p["w"]
    return {
        "t": y.t(),
        "expanded": y.sum(0).expand(3, 4),
        "every other": y[:, ::2],
        "flipped": y.flip(0).t()[1:],
        "last": y.unsqueeze(1).permute(2, 0, 1),
    }


CASES: dict[str, tuple[Loss, Any, Any]] = {
    "in place": (in_place, {"w": wide(4, 4)}, wide(3, 4)),
    "backwards in place": (backwards_in_place, {"w": wide(4, 4)}, wide(3, 4)),
    "strides": (strides, {"w": wide(4, 4)}, wide(3, 4)),
    "convolutions": (
        convolutions,
        {"first": wide(4, 3, 3, 3), "bias": wide(4), "second": wide(4, 2, 2, 2), "third": wide(4, 1, 3)},
        wide(2, 3, 6, 6),
    ),
    "in place beside literals": (in_place_beside_literals, {"w": wide(4, 2)}, wide(3, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_pytorch(name):
    trains_as_pytorch(*CASES[name])


def test_a_convolution_runs_with_and_without_native_bfloat16():
    """The gradient of the first of its arguments is None where that needs none."""

    def grads(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        w = w.detach().requires_grad_()
        return list(torch.autograd.grad(F.conv2d(x, w).square().sum(), [w]))

    real = [wide(2, 3, 5, 5).bfloat16(), wide(4, 3, 2, 2).bfloat16()]
    with compat.FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in real]
        graph = record(grads, fakes, owner="test", names=["x", "w"])
    expected = grads(*[x.float() for x in real])
    for slow in ((), (torch.bfloat16,)):
        adapted = on_device(graph, torch.device("cpu"), slow)
        (found,) = adapted.module()(*real)
        assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), expected[0], rtol=0.05, atol=0.5)
        in_float32 = any(
            n.target is torch.ops.aten.convolution_backward.default and n.meta["val"][1].dtype == torch.float32
            for n in adapted.graph.nodes
        )
        assert in_float32 == bool(slow)


RECURRENT = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True),
    "lstm without biases": lambda: nn.LSTM(3, 4, bias=False),
    "lstm with a projection": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


@pytest.mark.full(keep=["lstm without biases", "lstm"])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_train_as_pytorch(name):
    module = RECURRENT[name]()
    params = {k: v.detach().clone() for k, v in module.named_parameters()}
    trains_as_pytorch(lambda p, x: torch.func.functional_call(module, p, (x,)), params, wide(3, 5, 3))


def test_a_layer_whose_gradients_pytorch_returns_as_one_tensor():
    """Both biases of an LSTM have one gradient: fakes of it are one tensor in a process's first trace, and two in its
    others."""
    compat.FakeTensorMode.cache_clear()
    module = nn.LSTM(3, 5, batch_first=True)
    params = {k: v.detach().clone() for k, v in module.named_parameters()}
    step = fz.train_step(
        lambda p, x: fz.block(lambda p, x: torch.func.functional_call(module, p, (x,))[0])(p, x).square().mean(),
        optim.sgd(0.1),
    )
    train = fz.compile(fz.accumulate(2)(step), fz.make_mesh(data=1), backend="eager")
    state, plain = train.init(params), step.init(params)
    for _ in range(2):
        state, plain = train(state, wide(4, 6, 3))[0], step(plain, wide(4, 6, 3))[0]
    assert close(state.params, plain.params) and not close(state.params, params)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rms norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.LayerNorm(4)), (3, 4)),
    "attention": (lambda: Attention(), (3, 5, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (3, 5, 4)),
    "cells": (lambda: Cells(), (3, 4)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)),
        (2, 3, 6, 6),
    ),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.rnn(x), self.lstm(x)[0])


@pytest.mark.full(keep=["convolutions", "rms norm"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_train_as_pytorch(name):
    make, shape = MODULES[name]
    module = make()
    params = {k: v.detach().clone() for k, v in module.named_parameters()}
    trains_as_pytorch(lambda p, x: torch.func.functional_call(module, p, (x,)), params, wide(*shape))


LOSSES = [
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.MSELoss(),
    nn.SmoothL1Loss(),
    nn.KLDivLoss(reduction="batchmean"),
    nn.BCEWithLogitsLoss(),
]


def test_losses_that_are_modules_train_as_pytorch():
    def losses(p: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y, target = x @ p["w"], torch.softmax(x, -1)
        return [torch.func.functional_call(loss, {}, (y, target)) for loss in LOSSES]

    trains_as_pytorch(losses, {"w": wide(4, 4)}, wide(3, 4))


# --- running statistics ---


def test_a_batch_norm_on_clones_of_its_statistics_is_pytorchs():
    """Bit for bit, in a block and outside one, recomputed or not; the leaves themselves are as they were."""

    def layer(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One norm called twice, as a module that is shared, and then another."""
        new = {name: p[name].clone() for name in ("mean", "var")}
        for _ in range(2):
            x = F.batch_norm(F.conv1d(x, p["w"]), new["mean"], new["var"], training=True, momentum=0.3).tanh()[:, :3]
        other = {name: value.clone() for name, value in new.items()}
        return F.instance_norm(x, other["mean"][:3], other["var"][:3], use_input_stats=True), {
            **new,
            **{f"other {k}": v for k, v in other.items()},
        }

    params = {"mean": wide(4), "var": wide(4).square(), "w": wide(4, 3, 2)}
    batch = wide(5, 3, 6) + 1
    out, expected = layer(params, batch)  # which writes to its own clones
    for f in (layer, fz.block(layer)):

        def loss(p: Any, x: torch.Tensor, f: Any = f) -> tuple[torch.Tensor, Any]:
            y, new = f(p, x)
            return (y * x[:, :3, :4]).square().mean(), new

        step = fz.train_step(loss, optim.sgd(0.1), has_aux=True, trainable=lambda path, leaf: "w" in path)
        for transforms in ((), (fz.remat("full"),), (fz.remat("none"),), (fz.mixed_precision("bf16"),)):
            train = fz.compile(fz.compose(*transforms)(step), fz.make_mesh(data=1), backend="eager")
            state, metrics = train(train.init(params), batch)
            exact = not (transforms and transforms[0].name == "mixed_precision")
            assert torch.equal(state.params["mean"], params["mean"]) and torch.equal(state.params["var"], params["var"])
            for name, running in expected.items():
                assert torch.allclose(
                    metrics["aux"][name].float(), running, rtol=0 if exact else 0.05, atol=0 if exact else 0.05
                ), (name, transforms)
            assert torch.allclose(
                metrics["loss"].float(), (out * batch[:, :3, :4]).square().mean(), rtol=1e-6 if exact else 0.05
            )
            assert not torch.equal(state.params["w"], params["w"])


# --- values that no argument makes ---


def test_a_block_is_given_what_is_made_of_nothing():
    """The function that makes it takes no arguments, and writes into the pool."""
    layer = fz.block(lambda p, x, slopes: x @ p["w"] * slopes)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(p, x, torch.arange(1.0, 5.0) / 4).square().mean()

    trains_as_pytorch(loss, {"w": wide(4, 4)}, wide(2, 4), blocks=False)


# --- layers stacked in one tensor ---


def test_stacked_parameters_train_as_pytorch():
    layer = fz.block(lambda p, x: x + torch.tanh(x @ p["w"] + p["b"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            x = layer({"w": p["w"][i], "b": p["b"][i]}, x)
        return x @ p["out"].T

    trains_as_pytorch(loss, {"w": wide(4, 4, 4), "b": wide(4, 4), "out": wide(4, 4)}, wide(2, 4), blocks=False)
