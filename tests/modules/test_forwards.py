"""Forwards as users write them: each trains to PyTorch's numbers, or is rejected while it is traced, with its line."""

from __future__ import annotations

import copy
import functools
import random
import time
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from einops.layers.torch import Rearrange
from torch import nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.while_loop import while_loop

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, FzeroTypeError, TraceError

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
    return F.mse_loss(out.float(), batch[1].float())  # torch 2.11 has no backward for two dtypes


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


@pytest.mark.full
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
        loss = F.mse_loss(x.float(), Y.bfloat16().float())
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


class Moved(Base):
    def forward(self, x: Any) -> Any:
        return self.linear.to(x.device).to(device=x.device, dtype=x.dtype)(x)


class Recast(Base):
    def forward(self, x: Any) -> Any:
        return self.linear.float()(x.float())


@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
def test_a_part_that_is_moved_to_where_it_is(in_block: bool) -> None:
    net = module(Moved, in_block)
    assert trained(copy.deepcopy(net))[0] == pytest.approx(plain(net), rel=1e-6)
    assert trained(module(Recast, in_block))[0] == pytest.approx(plain(module(Recast, in_block)), rel=1e-6)
    with pytest.raises(
        TraceError, match=r"(?s)converts the tensors.*py:\d+: return self.linear.*weight: from torch.bfloat16"
    ):
        trained(module(Recast, in_block), fz.mixed_precision("bf16"))


# --- tensors that code keeps ---


@functools.cache
def angles(width: int) -> torch.Tensor:
    return torch.arange(width, dtype=torch.float32).sin()


@functools.lru_cache(maxsize=4)
def rotation(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(width, device=device) / width
    return angle.cos(), angle.sin()


class Cached(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    @functools.lru_cache(maxsize=2)  # noqa: B019 as users write it
    def grid(self, width: int) -> torch.Tensor:
        return torch.arange(width).float().tan()

    def forward(self, x: Any) -> Any:
        cos, sin = rotation(x.shape[-1], x.device)
        return self.drop(self.linear(x) * cos + sin + angles(x.shape[-1]) + self.grid(x.shape[-1]))


@pytest.mark.parametrize("before", [False, True], ids=["", "after a call"])
@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
def test_a_trace_leaves_nothing_in_caches_of_functions(in_block: bool, drop: float, before: bool) -> None:
    for cache in (angles, rotation, Cached.grid):
        cache.cache_clear()
    net = module(Cached, in_block)
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.p = drop
    if before:
        net(X)
    want = plain(net) if not drop else None
    got, model = trained(net)
    assert want is None or got == pytest.approx(want, rel=1e-5)
    net.eval()
    expected = squares(net(X), (X, Y)).item()  # the caches have tensors of this call
    evaluate = fz.compile(model.eval_step(squares), fz.make_mesh(), backend="eager")
    for rows in (6, 3):
        batch = X[:rows], Y[:rows]
        assert evaluate(model.params, batch).item() == pytest.approx(squares(net(X[:rows]), batch).item(), rel=1e-5)
    assert squares(net(X), (X, Y)).item() == expected
    assert model.apply(model.params, X, key=fz.random.key(0)).isfinite().all()


class Einops(Base):
    def __init__(self) -> None:
        super().__init__()
        self.heads = Rearrange("b (head d) -> b head d", head=2)

    def forward(self, x: Any) -> Any:
        q, k = rearrange(self.linear(x), "b (two head d) -> two b head d", two=2, head=2)
        mean = repeat(reduce(self.heads(x), "b head d -> b d", "mean"), "b d -> b head d", head=2)
        return x + rearrange(torch.cat([q * k, k], -1) + mean, "b head d -> b (head d)")


@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
def test_einops_keeps_its_caches(in_block: bool, tmp_path: Any) -> None:
    """einops remembers each pattern, and the class of each tensor it has seen, in caches that fill while a step is
    traced and afterwards."""
    net = module(Einops, in_block)
    want = plain(net, steps=3)
    model = fz.functionalize(net)
    step = fz.accumulate(2)(model.train_step(optim.sgd(0.1), squares))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state, losses = train.init(model.params), []
    for _ in range(3):
        state, metrics = train(state, (X, Y))
        losses.append(metrics["loss"].item())
        rearrange(np.zeros((2, 3)), "a b -> b a")  # a new pattern, and a class that no trace has seen
    fz.checkpoint.save(tmp_path, state)
    assert losses == pytest.approx(want, rel=1e-5)


GRIDS: dict[int, torch.Tensor] = {}


class InGlobal(Base):
    def forward(self, x: Any) -> Any:
        if x.shape[-1] not in GRIDS:
            GRIDS[x.shape[-1]] = torch.arange(x.shape[-1]).float().sin()
        return self.linear(x) + GRIDS[x.shape[-1]]


class InClass(Base):
    grids: ClassVar[dict[int, Any]] = {}

    def forward(self, x: Any) -> Any:
        if x.shape[-1] not in self.grids:
            self.grids[x.shape[-1]] = (torch.arange(x.shape[-1]).float().sin(), x.shape[-1])
        return self.linear(x) + self.grids[x.shape[-1]][0]


class InModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[int, torch.Tensor] = {}

    def forward(self, x: Any) -> Any:
        if x.shape[-1] not in self.grids:
            self.grids[x.shape[-1]] = torch.arange(x.shape[-1]).float().sin()
        return self.linear(x) + self.grids[x.shape[-1]]


class InProperty(Base):
    @functools.cached_property
    def grid(self) -> torch.Tensor:
        return torch.arange(4.0).sin()

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.grid


KEPT = {
    InGlobal: rf"a cache.*test_forwards.py:\d+: return .*kept in GRIDS of {__name__}\nFix: .*functools.lru_cache",
    InClass: rf"a cache.*test_forwards.py:\d+: .*kept in InClass.grids of {__name__}\nFix: .*functools.lru_cache",
    InModule: r"changes attributes.*grids: a dict of 0 before, a dict of 1 now\nFix: .*persistent=False",
    InProperty: r"changes attributes.*grid: absent before, a tensor now\nFix: .*persistent=False",
}


@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
@pytest.mark.parametrize("layer", KEPT)
def test_other_caches_are_rejected_by_the_first_trace_and_the_module_still_works(layer: Any, in_block: bool) -> None:
    GRIDS.clear()
    InClass.grids.clear()
    net = module(layer, in_block)
    with pytest.raises(TraceError, match=f"(?s){KEPT[layer]}"):
        trained(net, steps=1)
    assert plain(net)[1] > 0


# --- draws of others ---


class DrawsNumPy(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x) + np.random.randn()


class DrawsPython(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x) * random.random()


class ReadsTime(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x) + time.perf_counter()


class DrawsArray(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x) + torch.tensor(np.random.randn(4).tolist())


@pytest.mark.parametrize("in_block", [False, True], ids=["", "block"])
@pytest.mark.parametrize("layer", [DrawsNumPy, DrawsPython, ReadsTime])
def test_draws_that_no_step_has_are_rejected_with_their_line(layer: Any, in_block: bool) -> None:
    says = "a different result each time it is called|something different than when it was traced"
    with pytest.raises(FzeroError, match=rf"(?s){says}.*\n  [^\n]*test_forwards.py:\d+: return self.linear\(x\)"):
        trained(module(layer, in_block))


def test_the_block_of_a_layer_that_draws_is_named_by_its_own_file() -> None:
    with pytest.raises(TraceError, match=r"each time it is called\n  [^\n]*test_forwards.py:\d+\nFix"):
        trained(module(DrawsArray, in_block=True))


class Linear(Base):
    def forward(self, x: Any) -> Any:
        return self.linear(x)


def test_a_hook_of_a_parameter_is_rejected_with_a_way_out_that_works() -> None:
    net = module(Linear, in_block=False)
    hooked = copy.deepcopy(net)
    hooked.linear.weight.register_hook(torch.triu)  # type: ignore[union-attr]
    with pytest.raises(FzeroTypeError, match=r"(?s)linear.weight: has hooks.*fz.optim.unsharded\(hook\)"):
        fz.functionalize(hooked)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return {"linear": {**grads["linear"], "weight": optim.unsharded(torch.triu)(grads["linear"]["weight"])}}, state

    model = fz.functionalize(net)
    optimizer = optim.chain(optim.GradientTransformation(lambda params: (), update), optim.sgd(0.1))
    step = fz.shard_params(model.train_step(optimizer, squares))
    fz.testing.check_equivalent(step, model.params, (X, Y), fz.AbstractMesh(data=2), steps=1)
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state, losses = train.init(model.params), []
    for _ in range(2):
        state, metrics = train(state, (X, Y))
        losses.append(metrics["loss"].item())
    sgd, want = torch.optim.SGD(hooked.parameters(), 0.1), []
    for _ in range(2):
        sgd.zero_grad()
        loss = squares(hooked(X), (X, Y))
        loss.backward()
        sgd.step()
        want.append(loss.item())
    assert losses == pytest.approx(want, rel=1e-6)
