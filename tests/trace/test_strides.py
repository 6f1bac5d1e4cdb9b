"""What an operation makes has other strides than fake tensors say: the view that was traced of it copies, and numbers
stay PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rejections import raises

import fzero as fz
from fzero import optim
from fzero.errors import TraceError


def over_dim_1(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).log_softmax(1).transpose(1, 2)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "log_softmax, reshape": lambda p, x: over_dim_1(x @ p).reshape(-1, 8).square().mean(),
    "log_softmax, flatten": lambda p, x: (over_dim_1(x @ p).flatten(0, 1) @ p).square().mean(),
    "probability targets": lambda p, x: F.cross_entropy((x @ p).transpose(1, 2), x.softmax(-1).transpose(1, 2)),
    "batch_norm between transposes": lambda p, x: (
        (F.batch_norm((x @ p).transpose(1, 2), None, None, training=True).transpose(1, 2).reshape(-1, 8) @ p)
        .square()
        .mean()
    ),
    "layer_norm over the last but one": lambda p, x: (
        (F.layer_norm((x @ p).transpose(1, 2), (6,)).transpose(1, 2).reshape(-1, 8) @ p).tanh().square().mean()
    ),
    "mse_loss of a transposed result": lambda p, x: F.mse_loss((x @ p).transpose(1, 2), x.transpose(1, 2)),
    "norm of a transposed result": lambda p, x: (x @ p).transpose(1, 2).norm(dim=1).mean(),
    "logsigmoid": lambda p, x: F.logsigmoid((x @ p).transpose(1, 2)).transpose(1, 2).reshape(-1, 8).square().mean(),
    "channel_shuffle of channels_last": lambda p, x: (
        (
            F.channel_shuffle((x.view(4, 8, 6, 1).to(memory_format=torch.channels_last)), 2)
            .permute(0, 2, 3, 1)
            .flatten(1)
            .view(-1, 8)
            @ p
        )
        .square()
        .mean()
    ),
    "as_strided of a result": lambda p, x: over_dim_1(x @ p).as_strided((4, 6, 4), (48, 8, 2)).square().mean(),
}


def normed(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm((x @ p).transpose(1, 2), None, None, training=True)


ASKED: dict[str, Callable[..., torch.Tensor]] = {
    "a norm of a transposed tensor": normed,
    "what is made of it": lambda p, x: normed(p, x) + 1.0,
    "two that lie otherwise": lambda p, x: torch.logaddexp((x @ p).transpose(1, 2), x.transpose(1, 2).contiguous()),
}
KNOWN: dict[str, Callable[..., torch.Tensor]] = {
    "a view": lambda p, x: (x @ p).transpose(1, 2),
    "of one tensor": lambda p, x: (x @ p).transpose(1, 2).tanh() * 2.0,
    "a product": lambda p, x: F.linear(x.transpose(1, 2)[..., :6], p[:6, :6], p[0, :6]),
    "contiguous": lambda p, x: normed(p, x).contiguous(),
}


def test_strides_that_a_trace_does_not_know_are_not_told() -> None:
    """`is_contiguous` and `stride` of a result are PyTorch's, or the question is refused."""
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    w = {"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) * 0.3}
    for name, made in {**ASKED, **KNOWN}.items():

        def loss(p: Any, x: torch.Tensor, made: Any = made) -> torch.Tensor:
            h = made(p["w"], x)
            return h.square().mean() * (2.0 if h.is_contiguous() else 3.0)

        train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
        if name in ASKED:
            raises(
                TraceError,
                lambda train=train: train(train.init(w), x),
                "asks how a tensor is laid out",
                "test_strides.py:",
                "x.contiguous()",
            )
        else:
            torch.testing.assert_close(
                train(train.init(w), x)[1]["loss"], loss(w, x), msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_views_of_such_results(name: str, block: bool) -> None:
    loss, x = LOSSES[name], torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) * 0.3
    inner: Any = fz.block(loss) if block else loss
    train = fz.compile(
        fz.train_step(lambda p, x: inner(p["w"], x), optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager"
    )
    state = train.init({"w": w})
    want = w.clone().requires_grad_()
    for _ in range(2):
        state, metrics = train(state, x)
        plain = loss(want, x)
        want = (want - 0.1 * torch.autograd.grad(plain, want)[0]).detach().requires_grad_()
        torch.testing.assert_close(metrics["loss"], plain.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.params["w"], want.detach(), rtol=1e-5, atol=1e-6)
