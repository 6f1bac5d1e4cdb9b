"""Forwards as users write them: each trains to PyTorch's numbers, or is rejected while it is traced, with its line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.while_loop import while_loop

import fzero as fz
from fzero import optim
from fzero.errors import TraceError

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24.0).reshape(6, 4).sin()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Stack(nn.Module):
    """Two layers of a kind, which become blocks."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def module(layer: Any, in_block: bool) -> nn.Module:
    torch.manual_seed(0)
    return Stack(layer) if in_block else layer()


def squares(out: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(out.float(), batch[1])


def trained(net: nn.Module, *transforms: Any, steps: int = 2) -> tuple[list[float], Any]:
    """The losses of some steps, and the module's model."""
    model = fz.functionalize(net)
    step = fz.compose(*transforms)(model.train_step(optim.sgd(0.1), squares))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state, losses = train.init(model.params), []
    for _ in range(steps):
        state, metrics = train(state, (X, Y))
        losses.append(metrics["loss"].item())
    model.write_back(train.gather(state).params)
    return losses, model


def plain(net: nn.Module, steps: int = 2) -> list[float]:
    net, losses = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = squares(net(X), (X, Y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- operators of functions ---


class Cond(Base):
    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        return torch.cond(y.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (y,))


class While(Base):
    def forward(self, x: Any) -> Any:
        return while_loop(lambda y: y.sum() < 3, lambda y: (y + 1,), (self.linear(x),))[0]


class Map(Base):
    def forward(self, x: Any) -> Any:
        return mapped(lambda row: self.linear(row), x)


@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
@pytest.mark.parametrize("layer", [Cond, While, Map])
def test_operators_of_functions_are_rejected_by_name(layer: Any, in_block: bool) -> None:
    with pytest.raises(TraceError, match=r"(?s)operator of functions.*test_forwards.py:\d+: .*Fix: write it with"):
        trained(module(layer, in_block))


class Hessian(Base):
    """Derivatives of derivatives, of which some are PyTorch's tensors of zeros without memory."""

    def forward(self, x: Any) -> Any:
        rows = torch.func.jacfwd(lambda z: self.linear(z).sin().sum(0))(x).sum(0)
        _, along = torch.func.jvp(lambda z: self.linear(z).sin(), (x,), (torch.ones_like(x),))
        return rows + along + torch.func.hessian(lambda z: self.linear(z).sin().sum())(x[0]).sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own derivatives
@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
def test_forward_mode_derivatives_train_as_in_pytorch_and_sharded(in_block: bool) -> None:
    net = module(Hessian, in_block)
    want = plain(net)
    for _ in range(2):  # PyTorch's shapes are remembered from the first trace
        got, model = trained(copy.deepcopy(net))
        assert got == pytest.approx(want, rel=1e-5)
    step = fz.tensor_parallel(axis="model", rules={"weight": 0, "bias": 0})(model.train_step(optim.sgd(0.1), squares))
    fz.testing.check_equivalent(step, model.params, (X, Y), fz.AbstractMesh(model=2), steps=1)


# --- dtypes ---


class FloatLayerNorm(nn.LayerNorm):
    """Whisper's."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Any) -> Any:
        return super().forward(x.float()).type(x.dtype)


class FloatGroupNorm(nn.GroupNorm):
    def __init__(self) -> None:
        super().__init__(2, 4)

    def forward(self, x: Any) -> Any:
        return super().forward(x.float()).type(x.dtype)


class FloatBatchNorm(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(4, track_running_stats=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x.float()).type(x.dtype)


NORMS = {
    FloatLayerNorm: lambda x, w, b: F.layer_norm(x, (4,), w, b),
    FloatGroupNorm: lambda x, w, b: F.group_norm(x, 2, w, b),
    FloatBatchNorm: lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
}


@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_in_float32_under_bf16_has_its_parameters_cast(norm: Any, in_block: bool) -> None:
    class Layer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm()

        def forward(self, x: Any) -> Any:
            return self.norm(self.linear(x))

    net = module(Layer, in_block)
    layers = list(net.layers) if isinstance(net, Stack) else [net]
    masters = [x.detach().clone().requires_grad_() for layer in layers for x in layer.parameters()]
    want = []
    for _ in range(2):
        x = X.bfloat16()
        for i in range(0, len(masters), 4):
            w, b, scale, bias = (p.bfloat16() for p in masters[i : i + 4])
            x = NORMS[norm](F.linear(x, w, b).float(), scale.float(), bias.float()).bfloat16()
        loss = F.mse_loss(x.float(), Y.bfloat16())
        grads = torch.autograd.grad(loss, masters)
        masters = [(p - 0.1 * g).detach().requires_grad_() for p, g in zip(masters, grads, strict=True)]
        want.append(loss.item())
    assert trained(net, fz.mixed_precision("bf16"))[0] == pytest.approx(want, rel=1e-6)


class Autocast(Base):
    def forward(self, x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.linear(x.float()).float()


class FloatLinear(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x.float())


@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
def test_autocast_is_pytorchs_and_the_way_out_of_products_of_two_dtypes(in_block: bool) -> None:
    net = module(Autocast, in_block)
    assert trained(copy.deepcopy(net))[0] == pytest.approx(plain(net), rel=1e-6)
    trained(net, fz.mixed_precision("bf16"))
    with pytest.raises(TraceError, match=r"(?s)test_forwards.py:\d+: return self.linear.*Fix: .*torch.autocast"):
        trained(module(FloatLinear, in_block), fz.mixed_precision("bf16"))
