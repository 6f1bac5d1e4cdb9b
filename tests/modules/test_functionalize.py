"""`fz.functionalize`: any module trains to the numbers that it has in PyTorch, or is refused by name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import re
import runpy
import sys
import tempfile
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripts import EXAMPLES, fresh_modules
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, TraceError
from fzero.testing.simulate import simulated


class Layer(nn.Module):
    """Takes and returns what modules take and return."""

    def __init__(self, width: int, index: int, dropout: float = 0.0):
        super().__init__()
        self.layer_idx, self.dropout = index, nn.Dropout(dropout)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, x, *, mask=None, gate=None, mode="relu"):
        y = getattr(torch, mode)(self.up(self.norm(x)))
        y = self.dropout(self.down(y)) * self.scale.to(y.dtype)
        return (x + (y if mask is None else y * mask), None, mode) if gate is None else (x + gate * y, gate, mode)


class Net(nn.Module):
    def __init__(self, layers: int = 3, dropout: float = 0.0, layer: Any = Layer):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(layer(8, i, dropout) for i in range(layers))
        self.head = nn.Linear(8, 3)

    def forward(self, x, mask=None):
        x = self.embed(x)
        for layer in self.layers:
            x, _, _ = layer(x, mask=mask)
        return self.head(x)


def batch_of(rows: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 4, generator=generator),
        "mask": torch.randint(0, 2, (rows, 1), generator=generator).float(),
        "y": torch.randint(0, 3, (rows,), generator=generator),
    }


def cross_entropy(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(out, batch["y"])


def net(**settings: Any) -> Net:
    torch.manual_seed(0)
    return Net(**settings)


def compiled(step: Any, *transforms: Any) -> Any:
    return fz.compile(fz.compose(*transforms)(step), fz.make_mesh(), backend="eager")


def named(tree: Any) -> dict[str, torch.Tensor]:
    return dict(zip(fz.tree.names(tree), fz.tree.leaves(tree), strict=True))


def plain_losses(module: nn.Module, batch: dict[str, torch.Tensor], steps: int, loss: Any) -> list[float]:
    """PyTorch's own loop."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        value = loss(module, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


# --- equal to PyTorch ---


def trained(ranks: int, step: Any, params: Any, batch: Any, *transforms: Any, key: Any = None) -> tuple[Any, Any]:
    """The losses of three steps on a batch, and the state after them. One rank is compiled, more are simulated."""
    if ranks == 1:
        train, losses = compiled(step, *transforms), []
        state = train.init(params, key)
        for _ in range(3):
            state, metrics = train(state, batch)
            losses.append(metrics["loss"].item())
        return losses, train.gather(state)
    _, *steps = simulated(fz.compose(*transforms)(step), fz.AbstractMesh(data=ranks), params, batch, 3, key)
    return [metrics["loss"].item() for _, metrics in steps], steps[-1][0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_module_trains_as_in_pytorch(ranks):
    module = net()
    want = plain_losses(module, batch_of(), 3, lambda m, b: F.cross_entropy(m(b["x"], b["mask"]), b["y"]))
    other = net()
    model = fz.functionalize(other)
    step = model.train_step(optim.sgd(0.1), cross_entropy)
    found, state = trained(ranks, step, model.params, batch_of(), fz.shard_params(), fz.accumulate(2))
    model.write_back(state.params)
    want.append(module.head.weight.sum().item())
    assert [*found, other.head.weight.sum().item()] == pytest.approx(want, rel=1e-5)


def test_params_have_the_names_of_the_state_dict():
    module = net()
    model = fz.functionalize(module)
    assert set(named(model.params)) == set(module.state_dict())
    assert all(x.data_ptr() == module.state_dict()[n].data_ptr() for n, x in named(model.params).items())
    assert model.blocks == ["layers.0", "layers.1", "layers.2"] and model.mutable is None
    assert torch.equal(model.apply(model.params, batch_of()["x"]), module(batch_of()["x"]))
    with pytest.raises(fz.errors.FzeroTypeError, match=r"missing: head.bias"):
        model.apply({k: x for k, x in model.params.items() if k != "head"}, batch_of()["x"])


def program_of(model: Any, loss: Any = cross_entropy, batch: Any = None) -> Any:
    step = model.train_step(optim.sgd(0.1), loss)
    return fz.lower(step, fz.AbstractMesh(data=1), model.params, batch or batch_of()).program


def functions(program: Any) -> tuple[int, int]:
    """Calls of blocks, and distinct functions."""
    calls = [op for op in program.instructions if op.op == "call" and op.block is not None]
    return len(calls), len({op.fn for op in calls})


def test_alike_layers_are_traced_once(monkeypatch):
    import fzero.trace.block_calls as traced

    count, trace = [], traced.trace_joint
    monkeypatch.setattr(traced, "trace_joint", lambda *args: count.append(1) or trace(*args))
    assert functions(program_of(fz.functionalize(net(layers=6)))) == (12, 2)
    assert len(count) == 1


class ByIndex(Layer):
    def forward(self, x, **kwargs):
        out, gate, mode = super().forward(x, **kwargs)
        return out / (self.layer_idx + 1), gate, mode


class ByRate(Layer):
    def __init__(self, width, index, dropout):
        super().__init__(width, index, dropout)
        self.rate = 0.5 if index else 2.0

    def forward(self, x, **kwargs):
        out, gate, mode = super().forward(x, **kwargs)
        return out * self.rate, gate, mode


@pytest.mark.parametrize(("layer", "distinct"), [(ByIndex, 6), (ByRate, 4)])
def test_layers_that_differ_in_what_they_read_are_functions_of_their_own(layer, distinct):
    module = net(layer=layer)
    model = fz.functionalize(module)
    assert functions(program_of(model)) == (6, distinct)
    train = compiled(model.train_step(optim.sgd(0.1), cross_entropy))
    _, metrics = train(train.init(model.params), batch_of())
    want = plain_losses(module, batch_of(), 1, lambda m, b: F.cross_entropy(m(b["x"], b["mask"]), b["y"]))
    assert metrics["loss"].item() == pytest.approx(want[0], rel=1e-6)


def test_blocks_may_be_chosen():
    assert functions(program_of(fz.functionalize(net(), blocks=["layers.1", nn.Embedding][:1])))[0] == 2
    assert fz.functionalize(net(), blocks=[Layer, "layers.*.up"]).blocks == ["layers.0", "layers.1", "layers.2"]
    assert fz.functionalize(net(), blocks=()).blocks == []
    with pytest.raises(fz.errors.FzeroValueError, match=r"no submodule matches `blocks`\n  'layer'"):
        fz.functionalize(net(), blocks=["layer"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def test_a_tied_tensor_is_one_leaf():
    torch.manual_seed(0)
    module, tokens = Tied(), torch.arange(12).view(3, 4)
    model = fz.functionalize(module)
    assert set(named(model.params)) == {"embed.weight", "norm.weight", "norm.bias"}

    def loss(out, batch):
        return F.cross_entropy(out.flatten(0, 1), batch.flatten())

    train = compiled(model.train_step(optim.sgd(0.1), loss), fz.shard_params())
    state, _ = train(train.init(model.params), tokens)
    plain_losses(module, {"x": tokens}, 1, lambda m, b: loss(m(b["x"]), b["x"]))
    torch.testing.assert_close(train.gather(state).params["embed"]["weight"], module.embed.weight.detach())


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    states: tuple[torch.Tensor, ...]
    text: str = ""


class OfOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, given: Output, options: dict[str, Any]) -> Output:
        y = self.inner(self.w(given.hidden)) * options["by"][0]
        return Output(y, (*given.states, y), text=options["name"])


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfOutputs() for _ in range(2))

    def forward(self, x):
        out = Output(x, ())
        for layer in self.layers:
            out = layer(out, {"by": [x[:, :1]], "name": "a"})
        return {"sum": sum(out.states), "text": out.text}


def test_containers_and_texts_cross_the_borders_of_blocks():
    torch.manual_seed(0)
    module, x = Outputs(), torch.randn(5, 4)
    model = fz.functionalize(module)
    want = module(x)
    found = model.apply(model.params, x)
    assert found["text"] == "a" and torch.equal(found["sum"], want["sum"])
    train = compiled(model.train_step(optim.sgd(0.1), lambda out, batch: out["sum"].square().mean()))
    _, metrics = train(train.init(model.params), x)
    assert metrics["loss"].item() == pytest.approx(want["sum"].square().mean().item())


# --- draws ---


def with_dropout(ranks: int, *transforms: Any) -> list[float]:
    model = fz.functionalize(net(dropout=0.5))
    step = model.train_step(optim.sgd(0.1), cross_entropy)
    return trained(ranks, step, model.params, batch_of(), *transforms)[0]


def test_dropout_is_the_same_on_every_mesh():
    want = with_dropout(1)
    assert len({round(x, 6) for x in want}) == 3
    remat, accumulate, shard = fz.remat("full"), fz.accumulate(2), fz.shard_params()
    for ranks, transforms in [(1, [remat, accumulate]), (2, [shard]), (3, [shard, accumulate, remat])]:
        assert with_dropout(ranks, *transforms) == pytest.approx(want, rel=1e-5)
    without = plain_losses(net(), batch_of(), 1, lambda m, b: F.cross_entropy(m(b["x"], b["mask"]), b["y"]))
    assert want[0] != pytest.approx(without[0], rel=1e-3)


class Draws(nn.Module):
    """One of each kind of draw."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)

    def forward(self, x):
        noise = torch.randn_like(x) + torch.rand(x.shape[0], 1) + torch.rand(()) + torch.normal(0.0, 1.0, (4,))
        order, coin = torch.randperm(4), torch.bernoulli(torch.full((x.shape[0], 1), 0.5))
        which = torch.multinomial(torch.ones(x.shape[0], 4), 1) + torch.randint(0, 3, (x.shape[0], 1))
        y = F.dropout(self.w(x), 0.25) + torch.empty_like(x).exponential_() + noise.transpose(0, 1).clone().normal_().T
        return y[:, order] * coin + which


class Generated(nn.Linear):
    """Draws from a generator of its own, which every call would go on with."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.rate = 0.1

    def forward(self, x):
        return super().forward(x) + torch.empty_like(x).uniform_(generator=torch.Generator())


def test_every_draw_comes_from_the_key():
    torch.manual_seed(0)
    model = fz.functionalize(Draws())
    step = model.train_step(optim.sgd(0.1), lambda out, batch: out.square().mean())
    first, second = (trained(n, step, model.params, batch_of()["x"], fz.data_parallel())[0] for n in (1, 3))
    assert first == pytest.approx(second, rel=1e-5) and first[0] != first[1]


def test_the_share_that_is_dropped():
    module = nn.Sequential(nn.Dropout(0.3))
    model = fz.functionalize(module)
    kept = model.apply([], torch.ones(1000, 100), key=fz.random.key(0))
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (kept != 0).float().mean().item() == pytest.approx(0.7, abs=3 * (0.3 * 0.7 / 1e5) ** 0.5)
    other = model.apply([], torch.ones(1000, 100), key=fz.random.key(1))
    assert not torch.equal(kept, other)
    with pytest.raises(fz.errors.TraceError, match="draws random numbers, but no key is given"):
        model.apply([], torch.ones(2, 2))
    given = fz.functionalize(Generated())
    with pytest.raises(
        fz.errors.TraceError, match=r"draws random numbers without access to a key \(aten.uniform_"
    ) as caught:
        given.apply(given.params, torch.ones(2, 4), key=fz.random.key(0))
    place, fix = str(caught.value).splitlines()[1:]
    assert re.search(r"test_functionalize.py:\d+: return super\(\)", place) and "leave the generator out" in fix
    given = fz.functionalize(Counts())
    with pytest.raises(fz.errors.TraceError, match=r"(?s)poisson.*: return torch.poisson\(x\).*bernoulli,.*randperm"):
        given.apply(given.params, torch.ones(2, 4), key=fz.random.key(0))


class Counts(nn.Dropout):
    def forward(self, x):
        return torch.poisson(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x, y, *, scale):
        return self.dropout(self.linear(x)) * y * scale


@pytest.mark.parametrize(
    ("batch", "settings", "says"),
    [
        (
            {"x": torch.ones(2, 4), "z": torch.ones(2)},
            {},
            ["missing: y", "missing: scale", "'x': float32[2, 4]", "'z'"],
        ),
        ((torch.ones(2, 4),), {"scale": 2.0}, ["missing: y", "the batch has 0: float32[2, 4]"]),
        (torch.ones(2, 4), {"scale": 2.0}, ["missing: y"]),
        ({"x": torch.ones(2, 4)}, {"z": 1}, ["unexpected keyword argument 'z'"]),
    ],
)
def test_batches_that_lack_arguments_of_forward(batch, settings, says):
    model = fz.functionalize(Scaled())
    step = model.train_step(fz.optim.sgd(0.1), lambda out, batch: out.mean(), **settings)
    with pytest.raises(
        fz.errors.FzeroTypeError, match=r"a batch does not fit Scaled.forward\(x, y, \*, scale\)"
    ) as caught:
        step(step.init(model.params), batch)
    assert all(text in str(caught.value) for text in says), caught.value


def test_settings_are_none_of_a_batch_s_entries():
    model = fz.functionalize(Scaled())
    step = model.train_step(fz.optim.sgd(0.1), lambda out, batch: (out - batch[1]).mean(), y=1.0, scale=2.0)
    step(step.init(model.params), (torch.ones(2, 4), torch.ones(2, 4)))


@pytest.mark.parametrize("writes", [False, True], ids=["", "buffers"])
def test_a_loss_with_aux(writes):
    """Of a forward that writes buffers the new values come third."""
    model = fz.functionalize(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3) if writes else nn.Identity()))

    def loss(out, batch):
        return out.square().mean(), {"largest": out.detach().max(), "rows": fz.weighted(out.detach().sum(), 3)}

    x = torch.randn(6, 4)
    step = model.train_step(optim.sgd(0.1), loss, has_aux=True)
    state, metrics = step(step.init(model.params), x)
    assert set(metrics["aux"]) == {"largest", "rows"}
    if writes:
        assert not torch.equal(named(state.params)["1.running_mean"], named(model.params)["1.running_mean"])
    else:
        torch.testing.assert_close(metrics["aux"]["largest"], model.apply(model.params, x).max())
    wrong = model.train_step(optim.sgd(0.1), loss)
    with pytest.raises(fz.errors.FzeroTypeError, match="pass has_aux=True to return"):
        wrong(wrong.init(model.params), x)
    with pytest.raises(fz.errors.FzeroTypeError, match=r"the model's own loss has no aux\nFix: model.train_step"):
        model.train_step(optim.sgd(0.1), has_aux=True)


# --- buffers ---


class Statistics(nn.Module):
    """Buffers written in place, bound anew, and by batch norm; in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        y = self.w(self.norm(x)) * self.table
        if self.training:
            self.count += 1
            self.ema.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        return y + self.ema


def test_buffers_that_the_forward_writes_are_leaves_of_the_state():
    torch.manual_seed(0)
    module = nn.Sequential(Statistics(), Statistics(), nn.Linear(4, 3))
    model, batch = fz.functionalize(module), batch_of()
    assert model.blocks == ["0", "1"]
    written = {
        n
        for n, path in zip(named(model.params), fz.tree.paths(model.params, "params"), strict=True)
        if model.mutable(path, None)
    }
    kinds = ("count", "ema", "mean", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    assert written == {f"{i}.{kind}" for i in range(2) for kind in kinds}
    reference = copy.deepcopy(module)
    out, new = model.apply_mutable(model.params, batch["x"])
    assert torch.equal(out, copy.deepcopy(module)(batch["x"])) and new[0]["count"] == 1 and new[0]["table"] is None
    with pytest.raises(
        fz.errors.TraceError, match=r"apply cannot return the buffers that the forward writes\n  0.count"
    ):
        model.apply(model.params, batch["x"])
    train = compiled(model.train_step(optim.sgd(0.1), cross_entropy), fz.shard_params(), fz.remat("full"))
    state, losses = train.init(model.params), []
    for _ in range(3):
        state, metrics = train(state, {"input": batch["x"], "y": batch["y"]})
        losses.append(metrics["loss"].item())
    assert losses == pytest.approx(plain_losses(reference, batch, 3, lambda m, b: cross_entropy(m(b["x"]), b)))
    found = named(train.gather(state).params)
    for name, x in (*reference.named_buffers(), *reference.named_parameters()):
        torch.testing.assert_close(found[name], x.detach())
    evaluate = compiled(model.eval_step(), fz.shard_params())
    torch.testing.assert_close(evaluate(state.params, batch["x"]), reference.eval()(batch["x"]).detach())
    assert all(torch.equal(x, named(model.params)[n]) for n, x in module.state_dict().items()), (
        "the module is as it was"
    )


def test_buffers_are_never_cast():
    seen: list[torch.dtype] = []

    class Seen(Layer):
        def forward(self, x, **kwargs):
            seen.extend([self.scale.dtype, self.up.weight.dtype])
            return super().forward(x, **kwargs)

    model = fz.functionalize(net(layer=Seen))
    train = compiled(model.train_step(optim.sgd(0.1), cross_entropy), fz.mixed_precision("bf16"), fz.shard_params())
    state, _ = train(train.init(model.params), batch_of())
    assert set(seen[::2]) == {torch.float32} and set(seen[1::2]) == {torch.bfloat16}
    evaluate = compiled(model.eval_step(cross_entropy), fz.mixed_precision("bf16"), fz.shard_params())
    seen.clear()
    evaluate(state.params, batch_of())
    assert set(seen[::2]) == {torch.float32} and set(seen[1::2]) == {torch.bfloat16}
    step = fz.train_step(
        lambda p, b: cross_entropy(model.apply(p, b["x"]), b), optim.sgd(0.1), trainable=model.trainable
    )
    with pytest.raises(fz.errors.FzeroTypeError, match=r"buffers of Net are cast\n  layers.0.scale: bfloat16\[8\]"):
        fz.lower(fz.mixed_precision(step), fz.AbstractMesh(data=1), model.params, batch_of())


class Marked(Layer):
    """A layer with a sparse buffer, as Whisper marks attention heads."""

    def __init__(self, *args, reads: bool = False):
        super().__init__(*args)
        self.register_buffer("heads", torch.eye(8).to_sparse(), persistent=False)
        self.reads = reads

    def forward(self, x, **kwargs):
        x, gate, mode = super().forward(x, **kwargs)
        return torch.sparse.mm(self.heads, x.T).T if self.reads else x, gate, mode


def test_sparse_buffers_may_be_there_if_they_are_not_read():
    plain, marked = fz.functionalize(net()), fz.functionalize(net(layer=Marked))
    assert fz.tree.names(marked.params) == fz.tree.names(plain.params)
    found = []
    for model in (plain, marked):
        train = compiled(model.train_step(optim.sgd(0.1), cross_entropy), fz.shard_params())
        found.append(train(train.init(model.params), batch_of())[1]["loss"])
    assert torch.equal(*found)
    reading = fz.functionalize(net(layer=lambda *args: Marked(*args, reads=True)))
    where = (
        r"(?s)reads layers.0.heads, a buffer of layout torch.sparse_coo.*test_functionalize.py:\d+: return torch.sparse"
    )
    with pytest.raises(fz.errors.TraceError, match=where):
        fz.lower(reading.train_step(optim.sgd(0.1), cross_entropy), fz.AbstractMesh(data=1), reading.params, batch_of())


class Exact(nn.Module):
    """Buffers in fp32 beside parameters in bf16, as layers of transformers have them: frequencies, a router's bias, a
    parameter that is kept in fp32."""

    def __init__(self, width: int, index: int, dropout: float):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, width, width) / 3)
        self.register_buffer("bias", torch.linspace(0, 1e-3, 4))
        self.register_buffer("inv_freq", 1 / 1e4 ** (torch.arange(4) / 4), persistent=False)

    def forward(self, x, *, mask=None):
        y, turn = self.norm(x), (x.detach()[:, :1].float() * 100) * self.inv_freq
        scores = self.router(y.to(self.router.weight.dtype)).float() + self.bias
        out = torch.einsum("be,bd,edh->bh", scores.softmax(-1).to(y.dtype), y, self.experts)
        return x + out * torch.cat([turn.cos(), turn.sin()], -1).to(x.dtype), None, None


class KeepsRouter(Net):
    _keep_in_fp32_modules_strict = ("router",)

    def __init__(self) -> None:
        super().__init__(layer=Exact)
        self.embed = nn.Embedding(16, 8)  # type: ignore[assignment]


@pytest.mark.parametrize("embed", [torch.bfloat16, torch.float32])
def test_fp32_buffers_in_bf16_blocks_are_as_in_pytorch(embed):
    """What a layer is given is cast to the dtype of its parameters, whatever its buffers are in."""
    torch.manual_seed(0)
    module, batch = KeepsRouter(), {"x": torch.arange(12), "y": batch_of()["y"]}
    model = fz.functionalize(module)
    reference = copy.deepcopy(module)
    for name, p in reference.named_parameters():
        if "router" not in name and (name != "embed.weight" or embed is torch.bfloat16):
            p.data = p.data.bfloat16()
    dtype = reference.embed.weight.dtype
    if dtype is torch.float32:
        reference.layers[0].register_forward_pre_hook(lambda m, args: (args[0].bfloat16(), *args[1:]))
    want = cross_entropy(reference(batch["x"]).float(), batch)
    want.backward()

    where = None if embed is torch.bfloat16 else lambda path, leaf: "embed" not in path
    step = fz.mixed_precision(model.train_step(optim.sgd(1.0), lambda o, b: cross_entropy(o.float(), b)), where=where)
    train = compiled(step, fz.shard_params())
    state = train.init(model.params)
    before = {n: x.clone() for n, x in named(state.params).items()}
    state, metrics = train(state, batch)
    assert metrics["loss"].item() == pytest.approx(want.item(), rel=1e-6)
    after = named(state.params)
    assert all(
        torch.equal(x, before[n])
        for n, x in after.items()
        if n.endswith(("bias", "inv_freq")) and "norm" not in n and "head" not in n
    )
    for name, p in reference.named_parameters():
        grad = p.grad.float()
        torch.testing.assert_close(before[name] - after[name], grad, rtol=1e-2, atol=2e-3 * grad.abs().max().item())
    evaluate = compiled(
        model.eval_step(lambda out, batch: out),
        fz.mixed_precision("bf16", where=where, outputs=None),
        fz.shard_params(),
    )
    reference.load_state_dict({n: x for n, x in after.items() if n in reference.state_dict()})
    assert torch.equal(evaluate(state.params, batch), reference(batch["x"]).detach())


def test_frozen_parameters_have_no_optimizer_state():
    module = net()
    module.layers.requires_grad_(False)
    model = fz.functionalize(module)
    train = compiled(model.train_step(optim.adamw(0.1), cross_entropy), fz.shard_params())
    state, _ = train(train.init(model.params), batch_of())
    assert not [n for n in named(state.opt_state) if "layers" in n]
    after = named(train.gather(state).params)
    assert all(torch.equal(x, after[n]) == n.startswith("layers") for n, x in module.state_dict().items())


def frozen() -> list[Any]:
    module = net()
    module.layers.requires_grad_(False)
    model = fz.functionalize(module)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    batch = {k: x.chunk(ranks)[rank].contiguous() for k, x in batch_of().items()}
    step = fz.compose(fz.shard_params(), fz.mixed_precision("bf16"))(model.train_step(optim.adamw(0.1), cross_entropy))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state, losses = train.init(model.params), []
    for _ in range(2):
        state, metrics = train(state, batch)
        losses.append(metrics["loss"].item())
    mean = model.eval_step(lambda out, batch: fz.weighted(out.float().sum(), out.numel()))
    evaluate = compiled(mean, fz.shard_params(), fz.mixed_precision("bf16"))
    value = evaluate(state.params, batch).item()
    with tempfile.TemporaryDirectory() if ranks == 1 else contextlib.nullcontext() as folder:
        if folder is not None:
            fz.checkpoint.save(folder, state)
            state = train.restore(folder)
    before = {n: x.clone() for n, x in module.state_dict().items()}
    model.write_back(train.gather(state).params)
    same = {n for n, x in module.state_dict().items() if torch.equal(x, before[n])}
    assert same == {n for n in before if n.startswith("layers")}, "to the bit, in fp32"
    return [losses, value, {n: (str(x.dtype), x.numel()) for n, x in named(state.params).items()}]


class PartlyFrozen(nn.Module):
    """A frozen layer, a floating-point buffer that the loss depends on, and a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x) * self.scale)))


@pytest.mark.parametrize("how", ["loss", "calling", "chosen"])
def test_train_step_of_a_models_loss_trains_what_the_module_trains(how: str) -> None:
    net, x = PartlyFrozen(), torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    model = fz.functionalize(net)
    given = {"trainable": lambda path, leaf: "last" in path} if how == "chosen" else {}
    if how == "calling":
        loss = model.calling(lambda forward, batch: forward(batch).square().mean(), train=True)
    else:
        loss = model.loss(lambda out, batch: out.square().mean())
    step = fz.train_step(loss, optim.adamw(0.1), **given)
    state = step.init(model.params)
    for _ in range(2):
        state, _ = step(state, x)
    plain = PartlyFrozen()
    if how == "chosen":
        plain.norm.requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    found = dict(zip(fz.tree.names(state.params), fz.tree.leaves(state.params), strict=True))
    assert found.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_a_loss_that_calls_apply_is_told_of_frozen_parameters_that_it_trains(caplog: pytest.LogCaptureFixture) -> None:
    net, x = PartlyFrozen(), torch.ones(8, 4)
    net.norm = nn.Identity()
    model = fz.functionalize(net)
    loss = lambda params, batch: model.apply(params, batch).square().mean()  # noqa: E731
    for trainable in (model.trainable, None, None):
        step = fz.train_step(loss, optim.sgd(0.1), trainable=trainable)
        step(step.init(model.params), x)
        says = [r.getMessage() for r in caplog.records if "trainable=model.trainable" in r.getMessage()]
        assert len(says) == (trainable is None)  # once for a model
    assert "first.bias, first.weight" in says[0] and "last" not in says[0]


def test_frozen_parameters_rest_in_the_dtype_they_are_computed_in(run_ranks):
    (losses, value, dtypes), (others, other, _) = frozen(), run_ranks(2, frozen)[0]
    assert losses == pytest.approx(others, rel=2e-2) and value == pytest.approx(other, abs=2e-2)
    in_layers = {n: dtype for n, (dtype, _) in dtypes.items() if n.startswith("layers")}
    assert {n for n, dtype in in_layers.items() if dtype == "torch.float32"} == {f"layers.{i}.scale" for i in range(3)}
    assert set(in_layers.values()) == {"torch.float32", "torch.bfloat16"}
    assert dtypes["head.weight"][0] == dtypes["embed.weight"][0] == "torch.float32", "masters"


# --- refused by name ---


class Small(nn.Module):
    def __init__(self, forward: Any, **attributes: Any):
        super().__init__()
        self.a, self.b, self.fn = nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.register_buffer("ema", torch.zeros(4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.fn(self, x)


def branch(self, x):
    return self.a(x) if x.sum() > 0 else self.b(x)


def counts(self, x):
    self.calls += 1
    return self.a(x)


def keeps(self, x):
    self.last = self.a(x)
    return self.b(self.last)


def appends(self, x):
    self.seen.append(x.shape)
    return self.a(x)


def hides(self, x):
    getattr(self.ema, "mul" + "_")(0.5)
    return self.a(x) + self.ema


def binds(self, x):
    self.b.weight = nn.Parameter(self.b.weight * 2)
    return self.b(x)


def reads(self, x):
    return self.a(x) * self.tables[0]


REFUSED = {
    "a branch on a value": (branch, {}, "test_functionalize.py", "torch.where"),
    "a counter": (counts, {"calls": 0}, "Small.calls: 1 before, 2 now", "register_buffer"),
    "a tensor kept": (keeps, {"last": None}, "Small.last: None before, a tensor now", "return it"),
    "a list that grows": (appends, {"seen": []}, "Small.seen: a list of 0 before, a list of 1 now", "return it"),
    "a buffer written unseen": (hides, {}, "ema", "mutable="),
    "a parameter bound anew": (binds, {}, "Linear.weight (b.weight)", "optimizer"),
    "tensors in a list": (reads, {"tables": [torch.ones(4)]}, "float32[4]", "register"),
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside of blocks", "in a block"])
@pytest.mark.parametrize("case", REFUSED)
def test_hidden_state_is_refused_by_name(case, inside):
    forward, attributes, named_as, way_out = REFUSED[case]
    module = nn.Sequential(*(Small(forward, **copy.deepcopy(attributes)) for _ in range(2 if inside else 1)))
    model = fz.functionalize(module)
    assert len(model.blocks) == (2 if inside else 0)
    with pytest.raises(fz.errors.TraceError) as error:
        program_of(model, lambda out, batch: out.square().mean(), {"input": torch.ones(2, 4)})
    text = str(error.value)
    assert (
        named_as if inside else named_as.replace("Small.", "0.").replace("(b.", "(0.b.")
    ) in text and "Fix: " in text
    assert way_out in text or case == "tensors in a list"
    assert not getattr(module[0], "calls", 0) and not getattr(module[0], "seen", []), "the module is as it was"


def test_a_tensor_with_the_name_of_a_method_is_refused_by_name():
    module = nn.Sequential(Small(reads, half=torch.ones(4)))
    with pytest.raises(FzeroTypeError, match=r"(?s)0\.half: float32\[4\], hides Small\.half.*another name"):
        fz.functionalize(module)


def test_mutable_names_a_buffer_that_is_written_unseen():
    module = Small(hides)
    model = fz.functionalize(module, mutable=["em*"])
    program_of(model, lambda out, batch: out.square().mean(), {"x": torch.ones(2, 4)})
    with pytest.raises(fz.errors.FzeroValueError, match=r"one of `mutable`\n  'mean'\nFix: there are ema"):
        fz.functionalize(module, mutable=["mean"])


@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_that_keeps_outputs_is_refused(inside):
    kept: list[Any] = []
    module = nn.Sequential(*(Small(lambda self, x: self.a(x)) for _ in range(2 if inside else 1)))
    module[0].a.register_forward_hook(lambda m, args, out: kept.append(out))
    with pytest.raises(
        fz.errors.TraceError, match=r"hooks store inputs or outputs of modules\n  .*a: .*test_functionalize"
    ):
        program_of(fz.functionalize(module), lambda out, batch: out.mean(), {"input": torch.ones(2, 4)})


def test_a_hook_that_changes_outputs_runs():
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].register_forward_hook(lambda m, args, out: out * 2)
    model, x = fz.functionalize(module), torch.ones(2, 4)
    assert torch.equal(model.apply(model.params, x), module(x))


def test_what_is_no_module():
    with pytest.raises(fz.errors.FzeroTypeError, match="takes a module, not function"):
        fz.functionalize(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(fz.errors.FzeroTypeError, match=r"fz\.functionalize"):
        fz.train_step(lambda p, b: b.sum(), optim.sgd(0.1)).init(net())
    model = fz.functionalize(net())
    with pytest.raises(fz.errors.FzeroTypeError, match=r"returns float32\[2, 3\], which has no loss"):
        program_of(model, None, {"x": torch.ones(2, 4)})
    with pytest.raises(
        fz.errors.FzeroValueError, match=r"not full tensors\n  embed.weight: float32\[2\], not \[8, 4\]"
    ):
        model.write_back(fz.tree.map(lambda x: x.flatten()[:2], model.params))


# --- the model's own loss ---


class OwnLoss(nn.Module):
    """A model that computes its loss, as those of transformers do; `extra` beside its cross entropy."""

    def __init__(self, extra: float = 0.0, weight: bool = False, twice: bool = False):
        super().__init__()
        self.head, self.extra, self.twice = nn.Linear(4, 3), extra, twice
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]) if weight else None)

    def forward(self, x, labels):
        logits = self.head(x)
        loss = F.cross_entropy(logits, labels, weight=self.weight)
        if self.twice:
            loss = loss + F.cross_entropy(logits, labels)
        if self.extra:
            loss += self.extra * logits.square().mean()
        return {"loss": loss, "logits": logits}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnLoss()

    def forward(self, x, labels):
        return self.inner(x, labels)


def ragged() -> dict[str, torch.Tensor]:
    """On three ranks the first has no label at all."""
    labels = batch_of()["y"].clone()
    labels[:4], labels[5] = -100, -100
    return {"x": batch_of()["x"], "labels": labels}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"weight": True}])
def test_a_models_own_loss_is_the_mean_over_all_targets(settings, ranks):
    torch.manual_seed(0)
    want = plain_losses(OwnLoss(**settings), ragged(), 3, lambda m, b: m(**b)["loss"])
    torch.manual_seed(0)
    model = fz.functionalize(OwnLoss(**settings))
    step, transforms = model.train_step(optim.sgd(0.1)), (fz.shard_params(), fz.accumulate(2))
    assert trained(ranks, step, model.params, ragged(), *transforms)[0] == pytest.approx(want, rel=1e-5)


def test_a_term_beside_the_cross_entropy_keeps_its_weight():
    torch.manual_seed(0)
    module = OwnLoss(extra=0.5)
    model = fz.functionalize(module)
    train = compiled(model.train_step(optim.sgd(0.1)))
    _, metrics = train(train.init(model.params), ragged())
    assert metrics["loss"].item() == pytest.approx(module(**ragged())["loss"].item())


def test_a_loss_of_several_means_is_refused():
    with pytest.raises(fz.errors.FzeroTypeError, match="made of 2 cross entropies"):
        program_of(fz.functionalize(OwnLoss(twice=True)), None, ragged())
    with pytest.raises(fz.errors.FzeroTypeError, match="made of a cross entropy inside of a block"):
        program_of(fz.functionalize(Outer(), blocks=["inner"]), None, ragged())


# --- on the meta device ---


class Initialized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = nn.Linear(32, 64), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)
        self.attention, self.embed = nn.MultiheadAttention(8, 2), nn.Embedding(8, 8, padding_idx=0)
        self.lstm, self.own = nn.LSTM(4, 4), Truncated()

    def forward(self, x):
        return x @ self.linear.weight


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(64, 64))
        self.register_buffer("mask", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.trunc_normal_(self.w, std=0.5, a=-1.0, b=0.75)
        self.mask.fill_(1.0)


def first_values() -> dict[str, Any]:
    with torch.device("meta"):
        module = Initialized()
    model = fz.functionalize(module)
    step = model.train_step(optim.sgd(0.1), lambda out, batch: out.mean())
    train = compiled(step, fz.shard_params())
    return {n: x.clone() for n, x in named(train.gather(train.init(model.init, fz.random.key(3))).params).items()}


def test_a_module_on_the_meta_device_is_initialised_from_a_key(run_ranks):
    found, other = first_values(), run_ranks(2, first_values)[1]
    torch.manual_seed(0)
    like = Initialized().state_dict()
    assert set(found) == set(like) and all(torch.equal(x, other[n]) for n, x in found.items())
    for name, x in like.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)
        if x.numel() > 1000:
            assert found[name].std().item() == pytest.approx(x.std().item(), rel=0.05)
            assert not torch.equal(found[name], x)
    assert found["embed.weight"][0].abs().sum() == 0 and found["norm.running_var"].tolist() == [1.0] * 4
    w = found["own.w"]
    assert -1 <= w.min() < -0.99 and 0.74 < w.max() <= 0.75
    assert w.mean().item() == pytest.approx(like["own.w"].mean().item(), abs=0.03)


def test_a_tensor_that_nothing_initialises_is_refused_by_name():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), Small(branch))
        module.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(fz.errors.TraceError, match=r"these tensors\n  scale: float32\[3\]\n  1.ema: float32"):
        fz.functionalize(module).init(fz.random.key(0))
    with torch.device("cpu"):
        module = nn.Sequential(nn.Linear(4, 4), Small(branch, scale=nn.Parameter(torch.full((3,), 2.0))))
    assert fz.functionalize(module).init(fz.random.key(0))[1]["scale"].tolist() == [2.0] * 3
    with torch.device("meta"):
        module = net()
    model = fz.functionalize(module)
    given = fz.tree.map(lambda x: torch.ones(x.shape), model.params)
    model.write_back(given)
    assert all(x.eq(1).all() for x in module.state_dict().values()) and isinstance(module.head.weight, nn.Parameter)


# --- the example ---


def example(steps: int) -> str:
    sys.argv = ["train_module.py", str(steps)]
    with contextlib.redirect_stdout(io.StringIO()) as printed, fresh_modules():
        runpy.run_path(str(EXAMPLES / "train_module.py"), run_name="__main__")
    return printed.getvalue()


def test_the_example_says_what_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_module.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"), fresh_modules():
        runpy.run_path(str(EXAMPLES / "train_module.py"), run_name="__main__")
    assert "train_module.py [-h] [steps]" in capsys.readouterr().out


@pytest.mark.full
def test_the_example_is_the_same_on_every_mesh(run_ranks):
    one, three = run_ranks(1, example, 6)[0], run_ranks(3, example, 6)[0]
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", one)]
    assert one == three and len(losses) == 1 and losses[0] < 4, one


class Pair(nn.Module):
    """Two linear layers whose tensors may have to do with each other."""

    def __init__(self, kind: str):
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), kind
        if kind == "data":
            self.b.weight.data = self.a.weight.data
        if kind == "frozen":
            self.a.weight.requires_grad_(False)
        if kind in ("buffer", "frozen"):
            self.register_buffer("w", self.a.weight.data)
        if kind == "attribute":
            self.w = self.a.weight.detach()[:2]
        if kind == "transposed":
            self.b.weight = nn.Parameter(self.a.weight.T)
        if kind == "hook":
            self.a.weight.register_hook(lambda g: g * 0)
        if kind == "late hook":
            self.b.bias.register_post_accumulate_grad_hook(lambda p: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize("kind", ["data", "frozen"])
def test_parameters_in_one_memory_are_tied(kind: str) -> None:
    x = torch.randn(8, 6)
    torch.manual_seed(0)
    plain = Pair(kind)
    torch.manual_seed(0)
    net = Pair(kind)
    model = fz.functionalize(net)
    train = fz.compile(
        model.train_step(fz.optim.sgd(0.5), lambda out, b: out.square().mean()), fz.make_mesh(), backend="eager"
    )
    state, sgd = train.init(model.params), torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        loss = plain(x).square().mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        state, metrics = train(state, x)
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-5, atol=0.0)
    model.write_back(train.gather(state).params)
    torch.testing.assert_close(net.b.weight, plain.b.weight)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("buffer", "w, a.weight: share memory"),
        ("attribute", "w, a.weight: share memory"),
        ("transposed", "a.weight, b.weight: share memory"),
        ("hook", "a.weight: has hooks for its gradient"),
        ("late hook", "b.bias: has hooks for its gradient"),
    ],
)
def test_tensors_that_are_more_than_values_are_refused(kind: str, says: str) -> None:
    with pytest.raises(FzeroTypeError, match=says):
        fz.functionalize(Pair(kind))


@pytest.mark.parametrize("forked", [False, True])
def test_a_seed_of_its_own_is_refused(forked: bool) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng() if forked else contextlib.nullcontext():
                torch.manual_seed(0)
                return super().forward(x) + torch.randn(2)

    before = torch.get_rng_state()
    model = fz.functionalize(Noisy(6, 2))
    torch.set_rng_state(before)
    with pytest.raises(TraceError, match="draws from its own seed"):
        model.apply(model.params, torch.ones(3, 6), key=fz.random.key(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_code_that_computes_with_the_number_of_its_layer() -> None:
    class Scaled(nn.Module):
        def __init__(self, index: int):
            super().__init__()
            self.linear, self.layer_idx = nn.Linear(6, 6), index

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * (0.5**self.layer_idx) + self.layer_idx).tanh()

    net, x = nn.Sequential(*(Scaled(i) for i in range(3))), torch.randn(4, 6)
    model = fz.functionalize(net)
    assert model.blocks == ["0", "1", "2"] and torch.equal(model.apply(model.params, x), net(x))


# --- any mesh, any number of micro-batches, ragged labels ---


class Language(nn.Module):
    """A language model that computes its own loss, of labels that it shifts."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer(8, i, dropout) for i in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens, labels):
        x = self.dropout(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)[0]
        logits = self.head(x[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def language_batch() -> dict[str, torch.Tensor]:
    """Of 24 rows the first has all of its labels, one half, most few, and the last ten none."""
    tokens = torch.randint(0, 16, (24, 6), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    for row in range(1, 24):
        labels[row, : row % 5 + 1 if row < 14 else 6] = -100
    return {"tokens": tokens, "labels": labels}


MESHES = [(1, 4), (3, 1), (3, 4)]  # ranks, micro-batches


def language_losses(ranks: int, parts: int, dropout: float) -> list[float]:
    torch.manual_seed(0)
    model = fz.functionalize(Language(dropout))
    step, transforms = model.train_step(optim.sgd(0.5)), (fz.shard_params(), fz.accumulate(parts))
    return trained(ranks, step, model.params, language_batch(), *transforms, key=fz.random.key(3))[0]


def test_ragged_labels_are_averaged_exactly_on_every_mesh():
    torch.manual_seed(0)
    module = Language(0.0)
    sgd, want = torch.optim.SGD(module.parameters(), lr=0.5), []
    for _ in range(3):
        loss = module(**language_batch())["loss"]
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        want.append(loss.item())
    for mesh in MESHES:
        assert language_losses(*mesh, 0.0) == pytest.approx(want, rel=1e-5), mesh


@pytest.mark.full
def test_dropout_is_the_same_on_every_mesh_and_in_every_number_of_parts():
    want = language_losses(1, 1, 0.1)
    assert all(language_losses(*mesh, 0.1) == pytest.approx(want, rel=1e-5) for mesh in MESHES)
    assert want != pytest.approx(language_losses(1, 1, 0.0), rel=1e-3)


def of_its_kind(number: Any) -> float:
    return 1.0 + number if type(number) is int else 0.0


WITH_NUMBERS: dict[str, Any] = {
    "its type": lambda y, i: y * (1 + i) if type(i) is int else y,
    "its type, in a function": lambda y, i: y * of_its_kind(i),
    "torch.add": lambda y, i: torch.add(y, i),
    "torch.full": lambda y, i: y + torch.full((8,), i),
    "torch.pow": lambda y, i: torch.pow(y, i),
    "torch.roll": lambda y, i: torch.roll(y, i, 1),
    "other=": lambda y, i: torch.mul(y, other=i),
}


class Numbered(Layer):
    how: Any = None

    def forward(self, x, **kwargs):
        out, gate, mode = super().forward(x, **kwargs)
        return type(self).how(out, self.layer_idx), gate, mode


@pytest.mark.full(keep=["torch.roll", "torch.pow", "torch.full"])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_whatever_code_does_with_the_number_of_its_layer(name: str) -> None:
    """A number stands for itself while layers are traced: the code must not meet another kind of value."""
    module = net(layer=type("Numbered", (Numbered,), {"how": staticmethod(WITH_NUMBERS[name])}))
    model = fz.functionalize(module)
    train = compiled(model.train_step(optim.sgd(0.1), cross_entropy))
    state, losses = train.init(model.params), []
    for _ in range(2):
        state, metrics = train(state, batch_of())
        losses.append(metrics["loss"].item())
    want = plain_losses(module, batch_of(), 2, lambda m, b: F.cross_entropy(m(b["x"], b["mask"]), b["y"]))
    assert losses == pytest.approx(want, rel=1e-5)


def test_layers_that_ask_for_their_own_type_are_traced_once() -> None:
    class Own(Layer):
        def forward(self, x, **kwargs):
            assert type(self) is Own
            return super().forward(x, **kwargs)

    assert functions(program_of(fz.functionalize(net(layer=Own)))) == (6, 2)


# --- torch.utils.checkpoint ---


class Checkpointing(nn.Module):
    """A net that recomputes: a layer, a method of its own, a closure over itself, the inside of a layer."""

    def __init__(self, what: str, reentrant: bool):
        super().__init__()
        self.embed, self.head, self.what, self.reentrant = nn.Linear(4, 8), nn.Linear(8, 3), what, reentrant
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.embed.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            run = {
                "layer": layer,
                "method": self.part,
                "closure": lambda y, own=layer: own(y) @ self.layers[1][0].weight,
            }
            x = checkpoint(run[self.what], x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.full(keep=["closure-True", "method-True", "layer-True"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["layer", "method", "closure"])
def test_checkpoints_within_a_module(what: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    module = Checkpointing(what, reentrant)
    model = fz.functionalize(module)
    for transforms in ((), (fz.remat("full"), fz.shard_params(), fz.accumulate(2))):
        train = compiled(model.train_step(optim.sgd(0.1), lambda o, b: F.cross_entropy(o, b[1])), *transforms)
        state, losses = train.init({**model.params}), []
        for _ in range(2):
            state, metrics = train(state, (batch_of()["x"], batch_of()["y"]))
            losses.append(metrics["loss"].item())
        want = plain_losses(copy.deepcopy(module), batch_of(), 2, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
        assert losses == pytest.approx(want, rel=1e-5)


def test_a_reentrant_checkpoint_of_what_needs_no_gradient_has_none() -> None:
    """As in PyTorch, which does not train the layer."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    model, x = fz.functionalize(First()), batch_of()["x"]
    train = compiled(model.train_step(optim.sgd(0.1), lambda out, b: out.square().mean()))
    state, _ = train(train.init(model.params), x)
    assert torch.equal(state.params["first"]["weight"], model.params["first"]["weight"])
    assert not torch.equal(state.params["last"]["weight"], model.params["last"]["weight"])


def test_a_checkpoint_in_a_module_that_the_loss_calls_itself_is_refused_with_a_way() -> None:
    """When it recomputes, `functional_call` has put the module's own tensors back."""
    module = Checkpointing("method", False)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (x,)).square().mean()

    train = compiled(fz.train_step(loss, optim.sgd(0.1)))
    state = train.init({n: p.detach().clone() for n, p in module.named_parameters()})
    with pytest.raises(TraceError, match=r"(?s)recomputes, in the backward.*Fix: leave torch.utils.checkpoint out"):
        train(state, batch_of()["x"])


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "prune"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_hooks_that_set_parameters_are_refused_and_parametrizations_train(kind: str) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    of = torch.nn.utils
    old = {"prune": lambda m: prune.l1_unstructured(m, "weight", 0.5)}.get(kind) or getattr(of, kind)
    with pytest.raises(FzeroTypeError, match=rf"(?s)0: torch.nn.utils.{kind} sets weight.*Fix: torch.nn.utils.param"):
        fz.functionalize(nn.Sequential(old(copy.deepcopy(module[0])), *module[1:]))
    if kind != "prune":
        getattr(of.parametrizations, kind)(module[0])
    else:
        of.parametrize.register_parametrization(module[0], "weight", nn.Hardtanh())
    model = fz.functionalize(module)
    train = compiled(model.train_step(optim.sgd(0.1), lambda o, b: F.cross_entropy(o, b[1])))
    state, losses = train.init(model.params), []
    for _ in range(2):
        state, metrics = train(state, (batch_of()["x"], batch_of()["y"]))
        losses.append(metrics["loss"].item())
    want = plain_losses(module, batch_of(), 2, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    assert losses == pytest.approx(want, rel=1e-5)


def test_a_distribution_that_checks_its_arguments_draws() -> None:
    class Latent(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.distributions.Normal(super().forward(x), F.softplus(x) + 0.1, validate_args=True).rsample()

    model, x = fz.functionalize(Latent(4, 4)), batch_of()["x"]
    train = compiled(model.train_step(optim.sgd(0.1), lambda out, b: out.square().mean()), fz.accumulate(2))
    whole = compiled(model.train_step(optim.sgd(0.1), lambda out, b: out.square().mean()))
    losses = [t(t.init(model.params), x)[1]["loss"].item() for t in (train, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("checked", [True, False])
def test_a_distribution_that_asks_for_values_says_how_it_draws(checked: bool) -> None:
    class Latent(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            of = torch.distributions.MultivariateNormal
            return of(super().forward(x), torch.eye(4), validate_args=checked).rsample()

    model, x = fz.functionalize(Latent(4, 4)), batch_of()["x"]
    train = compiled(model.train_step(optim.sgd(0.1), lambda out, b: out.square().mean()))
    if checked:
        with pytest.raises(TraceError, match=r"(?s)test_functionalize.py:\d+: return of\(.*validate_args=False"):
            train(train.init(model.params), x)
    else:
        assert train(train.init(model.params), x)[1]["finite"]


RATE = 1.0


class Asking(nn.Module):
    """Reads beside its tensors, in methods of its own and in a layer."""

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        self.w, self.layers = nn.Linear(4, 4), nn.ModuleList(Asking() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.scaled(self.w(x))

    def scaled(self, x):
        return x * RATE * (float(os.environ.get("FZERO_TEST_RATE", "1")) if self.layers else 1.0)


@pytest.mark.parametrize("name", ["environment", "global", "another"])
def test_what_a_module_s_code_reads_is_what_it_was(name, monkeypatch):
    model, x = fz.functionalize(Asking(layers=2)), torch.ones(2, 4)
    train = compiled(model.train_step(optim.sgd(0.1), lambda out, batch: out.mean()))
    state, _ = train(train.init(model.params), x)
    if name == "global":
        monkeypatch.setitem(globals(), "RATE", 2.0)
    else:
        monkeypatch.setenv("FZERO_TEST_RATE" if name == "environment" else "FZERO_TEST_OTHER", "2")
    says = {"global": "RATE: 1.0 before, 2.0 now", "environment": r"os.environ\['FZERO_TEST_RATE'\]: not set before"}
    expected = pytest.raises(fz.errors.FzeroValueError, match=says[name]) if name in says else contextlib.nullcontext()
    with expected:
        train(state, x)


class _Filter(nn.Module):
    """A layer with complex parameters, as Fourier neural operators have."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.up(x)) * self.filter, n=16)


def test_complex_parameters_are_trained_by_the_lines_of_the_error() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(_Filter(), nn.Tanh(), _Filter())
    theirs, x = copy.deepcopy(module), torch.randn(8, 16)
    step = fz.functionalize(module).train_step(fz.optim.adamw(1e-2, weight_decay=0.1), _mean_square)
    with pytest.raises(FzeroTypeError, match="complex parameters cannot be trained") as error:
        step.init(fz.functionalize(module).params)
    lines = str(error.value).partition("not leaf.is_complex()\n")[2]
    exec(textwrap.dedent(lines), {"torch": torch, "module": module})

    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        _mean_square(theirs(x), x).backward()
        optimizer.step()
    model = fz.functionalize(module)
    step = fz.shard_params(model.train_step(fz.optim.adamw(1e-2, weight_decay=0.1), _mean_square))
    state, _ = fz.testing.simulate(step, fz.AbstractMesh(data=2), model.params, x, steps=3)
    model.write_back(state.params)
    for name, want in theirs.named_parameters():
        layer, _, leaf = name.rpartition(".")
        torch.testing.assert_close(getattr(module.get_submodule(layer), leaf), want)


def _mean_square(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def test_a_parameter_whose_elements_share_memory_is_rejected():
    """An optimizer of PyTorch cannot update such a parameter in place, either."""
    module = nn.Linear(2, 2)
    module.bias = nn.Parameter(torch.randn(1).expand(2))
    with pytest.raises(FzeroTypeError, match=r"(?s)bias: several of its elements share memory.*Fix: .*contiguous"):
        fz.functionalize(module)
