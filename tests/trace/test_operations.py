"""Operations in a traced function, in a block and outside one: those that train as in PyTorch, those that are rejected,
and mistakes, which name the line and the operands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rejections import ONE, ROWS, VECTOR, blocked, lower, make, raises
from torch import nn

import fzero as fz
from fzero import optim
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.device_decompositions import on_device
from fzero.trace.graph_capture import record
from fzero.trace.guards import overwrites
from fzero.trace.recorder import Recorder

Function = Callable[[Any, Any], torch.Tensor]


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(a: Any, b: Any) -> bool:
    return all(
        torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
        for x, y in zip(fz.tree.leaves(a), fz.tree.leaves(b), strict=True)
    )


def trains_as_pytorch(fn: Function, params: Any, batch: Any, *, blocks: bool = True) -> None:
    """Two steps of `fn(params, batch) -> output`, as a block, as a recomputed block and as no block: its loss and
    parameters are those of the plain step."""

    def loss_of(f: Function) -> Function:
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


CASES: dict[str, tuple[Function, Any, Any]] = {
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


def test_a_block_is_given_what_is_made_of_nothing():
    """The function that makes it takes no arguments, and writes into the pool."""
    layer = fz.block(lambda p, x, slopes: x @ p["w"] * slopes)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(p, x, torch.arange(1.0, 5.0) / 4).square().mean()

    trains_as_pytorch(loss, {"w": wide(4, 4)}, wide(2, 4), blocks=False)


def test_stacked_parameters_train_as_pytorch():
    layer = fz.block(lambda p, x: x + torch.tanh(x @ p["w"] + p["b"]))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            x = layer({"w": p["w"][i], "b": p["b"][i]}, x)
        return x @ p["out"].T

    trains_as_pytorch(loss, {"w": wide(4, 4, 4), "b": wide(4, 4), "out": wide(4, 4)}, wide(2, 4), blocks=False)


PARAMS = {"mean": torch.zeros(4), "rows": torch.ones(10, 4), "var": torch.ones(4), "w": torch.ones(4, 4)}
BATCH = torch.ones(8, 4)
TRAINED = {"trainable": lambda path, leaf: "rows" in path or "w" in path}


def refused(fn: Callable[[Any, Any], torch.Tensor], *words: str, operands: tuple[str, ...] = ()) -> None:
    """Lowering `fn`, as a block and outside one, says all of this; `operands` are named as the block names them, and as
    the step does."""
    for name, f in (("train_step", fn), (f"block {fn.__name__.strip('<>')}", fz.block(fn))):
        step = fz.train_step(lambda p, x, f=f: f(p, x).square().mean(), optim.sgd(0.1), **TRAINED)
        with pytest.raises(TraceError) as caught:
            fz.lower(step, fz.AbstractMesh(data=1), PARAMS, BATCH)
        text = str(caught.value)
        assert text.startswith(f"fzero.{name}") and text.splitlines()[-1].startswith("Fix: "), text
        for word in (*words, *operands):
            assert word in text, f"{word!r} is not in:\n{text}"


HERE = "test_operations.py:"


def condition(p: Any, x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y @ p["w"], lambda y: y + 1, (x,))


def scanned(p: Any, x: Any) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, y: (c + y, c * y), torch.zeros(4), x @ p["w"])[1]


def looped(p: Any, x: Any) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda y: y.sum() < 3, lambda y: (y + 1,), (x @ p["w"],))[0]


def sparse_gradient(p: Any, x: Any) -> Any:
    return F.embedding(torch.zeros(8, dtype=torch.long), p["rows"], sparse=True)


def sparse_matrix(p: Any, x: Any) -> Any:
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), p["rows"][0, :2], (4, 4)), p["w"])


def item(p: Any, x: Any) -> Any:
    return x @ p["w"] * x.sum().item()


def printed(p: Any, x: Any) -> Any:
    return x @ p["w"] * len(f"{x.sum():.3f}")


def nonzero(p: Any, x: Any) -> Any:
    return (x @ p["w"])[torch.nonzero(x)[:, 0]]


def masked(p: Any, x: Any) -> Any:
    return (x @ p["w"])[x > 0]


def inference(p: Any, x: Any) -> Any:
    with torch.inference_mode():
        y = x.square()
    return y @ p["w"]


def reentrant(p: Any, x: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: torch.tanh(y @ p["w"]), p["w"] * 2, use_reentrant=True)


def assigned(p: Any, x: Any) -> Any:
    y = x @ p["w"]
    y.data = torch.zeros(8, 4)
    return y


def overwritten(p: Any, x: Any) -> Any:
    y = torch.exp(x @ p["w"])
    y.add_(1)
    return y


def through_data(p: Any, x: Any) -> Any:
    p["w"].data.mul_(2)
    return x @ p["w"]


def renormed(p: Any, x: Any) -> Any:
    return F.embedding(torch.zeros(8, dtype=torch.long), p["rows"], max_norm=1.0)


def batch_norm(p: Any, x: Any) -> Any:
    return F.batch_norm(x @ p["w"], p["mean"], p["var"], training=True)


def instance_norm(p: Any, x: Any) -> Any:
    return F.instance_norm((x @ p["w"]).view(2, 4, 4), p["mean"].detach().view(4), p["var"], use_input_stats=True)


def trained_statistics(p: Any, x: Any) -> Any:
    return F.batch_norm(x, p["w"][0], p["w"][1], training=True)


def gathered_statistics(p: Any, x: Any) -> Any:
    return torch.batch_norm_gather_stats(x, x, x, p["mean"], p["var"], 0.1, 1e-5, 8)[0] * p["w"]


def random(p: Any, x: Any) -> Any:
    return x @ p["w"] + torch.rand(4)


REFUSED: dict[Callable[[Any, Any], Any], tuple[str, ...]] = {
    condition: ("operator of functions", "(cond)", "return torch.cond("),
    scanned: ("operator of functions", "return scan("),
    looped: ("operator of functions", "while_loop", "return while_loop("),
    sparse_gradient: ("not dense", "the backward of", "sparse=True)", "sparse=False"),
    sparse_matrix: ("not dense", "torch.sparse_coo_tensor("),
    item: ("needs the value", "x.sum().item()", "torch.where"),
    printed: ("needs the value", 'len(f"{x.sum():.3f}")'),
    nonzero: ("for a shape", "torch.nonzero(x)"),
    masked: ("for a shape", "[x > 0]"),
    inference: ("inference_mode", 'return y @ p["w"]', "torch.no_grad()"),
    reentrant: ("use_reentrant=True", "the backward of", "torch.tanh(y", "fz.remat"),
    assigned: ("assigns to .data", "y.data = torch.zeros(8, 4)"),
    overwritten: ("overwrites a value that its backward needs", "y.add_(1)"),
    through_data: ("in place", "params['w']", 'p["w"].data.mul_(2)'),
    renormed: ("in place", "params['rows']", "max_norm=1.0"),
    batch_norm: ("in place", "params['mean']", "params['var']", "F.batch_norm(", "clones of its running statistics"),
    instance_norm: ("in place", "params['mean']", "params['var']", "F.instance_norm("),
    trained_statistics: ("trains the running statistics", "F.batch_norm(", "mutable=", "or 'num_batches' in path"),
    gathered_statistics: ("overwrites running_mean and running_var", "torch.batch_norm_gather_stats("),
    random: ("global generator", "torch.rand(4)", "fz.random"),
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_refused_by_name(fn):
    refused(fn, HERE, *REFUSED[fn])


MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "a product of shapes": (
        lambda p, x: x @ p["w"][:, :3].T,
        ("torch.Tensor.matmul", "batch: float32[8, 4]", "params['w']: float32[3, 4]", "x @ p["),
    ),
    "a view": (
        lambda p, x: F.linear(x[:, :2], p["w"].t()),
        ("linear", "batch: float32[8, 2]", "params['w']: float32[4, 4]", "F.linear(x["),
    ),
    "a product of dtypes": (
        lambda p, x: x.double() @ p["w"],
        ("one dtype", "batch: float64[8, 4]", "params['w']: float32[4, 4]"),
    ),
    "an index put of another dtype": (
        lambda p, x: (x @ p["w"]).index_put((torch.tensor([0]),), x[0].double()),
        ("index_put", "one dtype", "torch.float32 and torch.float64", "index_put((torch"),
    ),
    "an index add of another dtype": (
        lambda p, x: (x @ p["w"]).index_add(0, torch.tensor([0]), x[:1].double()),
        ("index_add", "one dtype", "index_add(0"),
    ),
    "a grid of another dtype": (
        lambda p, x: F.grid_sample((x @ p["w"])[None, None], x.view(1, 4, 4, 2).double(), align_corners=False),
        ("grid_sample", "one dtype", "float64[1, 4, 4, 2]"),
    ),
    "distances of two dtypes": (lambda p, x: torch.cdist(x @ p["w"], x.double()), ("cdist", "one dtype")),
    "targets of another dtype": (
        lambda p, x: F.binary_cross_entropy((x @ p["w"]).sigmoid(), (x > 0).long()),
        ("binary_cross_entropy", "one dtype", "torch.float32 and torch.int64"),
    ),
    "the target of a huber loss": (
        lambda p, x: F.huber_loss(x @ p["w"], x.double()),
        ("huber_loss_backward", "one dtype", "the backward of "),
    ),
    "classes in int32": (
        lambda p, x: F.cross_entropy(x @ p["w"], x[:, 0].int()),
        ("cross_entropy", "class indices", "int32[8]", "F.cross_entropy(x", "labels.long()"),
    ),
    "classes of a margin": (
        lambda p, x: F.multi_margin_loss(x @ p["w"], x[:, 0].int()),
        ("multi_margin_loss", "class indices", "labels.long()"),
    ),
    "broadcasting": (lambda p, x: x @ p["w"] + p["rows"], ("float32[8, 4]", "params['rows']: float32[10, 4]")),
    "an index": (lambda p, x: (x @ p["w"])[:, 7], ("out of bounds", "float32[8, 4]", "[:, 7]")),
    "a dim": (lambda p, x: (x @ p["w"]).sum(5), ("Dimension out of range", "float32[8, 4]", ".sum(5)")),
    "a size": (lambda p, x: (x @ p["w"]).reshape(3, 5), ("[3, 5]", "float32[8, 4]", ".reshape(3, 5)")),
    "an argument": (lambda p, x: torch.matmul(p["w"], "x"), ("matmul()", "not str", "torch.matmul(p[")),
    "an equation": (
        lambda p, x: torch.einsum("ab,bcd->ad", x, p["w"]),
        ("einsum", "batch: float32[8, 4]", "params['w']: float32[4, 4]"),
    ),
    "a derivative": (
        lambda p, x: torch.autograd.grad(x @ p["w"], p["w"])[0],
        ("torch.autograd.grad", "scalar outputs", "torch.autograd.grad(x"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_line_and_the_leaves(name, caplog):
    with caplog.at_level(logging.DEBUG):
        refused(MISTAKES[name][0], HERE, *MISTAKES[name][1])
    assert not caplog.records, "the exception says it"


class OwnError(ValueError):
    """Of a user's."""


def raised(p: Any, x: Any) -> Any:
    if x.shape[0] == 8:
        raise OwnError("8 rows")
    return x @ p["w"]


def raised_in_a_hook(p: Any, x: Any) -> Any:
    y = x @ p["w"]
    y.register_hook(lambda grad: raised(p, grad))
    return y


@pytest.mark.parametrize("fn", [raised, raised_in_a_hook, lambda p, x: {}["a key"], lambda p, x: len(3)])  # type: ignore[arg-type]
def test_what_a_function_raises_itself_passes(fn):
    expected = (OwnError,) if "raised" in fn.__name__ else (KeyError, TypeError)
    for f in (fn, fz.block(fn)):
        step = fz.train_step(lambda p, x, f=f: f(p, x).mean(), optim.sgd(0.1), **TRAINED)
        with pytest.raises(expected) as caught:
            fz.lower(step, fz.AbstractMesh(data=1), PARAMS, BATCH)
        assert not isinstance(caught.value, TraceError)


aten = torch.ops.aten


@pytest.mark.parametrize("op", overwrites.REWRITTEN, ids=str)
def test_a_hidden_write_is_written_down(op):
    """Those of other devices too: what is recorded needs none."""
    settings = (True, 0.1, 1e-5)
    with compat.FakeTensorMode():
        fakes = [torch.empty(s) for s in ((2, 4, 3, 3), (4,), (4,), (4,), (4,))]
        recorder = Recorder("test")
        for fake, name in zip(fakes, ("x", "weight", "bias", "mean", "var"), strict=True):
            recorder.input(fake, name)
        with recorder:
            results = op(*fakes, *settings)
            assert list(recorder.memory.written) == ["mean", "var"]
            writes = [n.args[0].name for n in recorder.graph.nodes if n.target is aten.copy_.default]
            assert writes == ["mean", "var"] and all(n.target is not op for n in recorder.graph.nodes)
            assert [tuple(r.shape) for r in results][:3] == [(2, 4, 3, 3), (4,), (4,)] and len(results) == len(
                op._schema.returns
            )
            recorder.memory.written.clear()
            op(*fakes[:3], None, None, *settings)
            op(*fakes, False, 0.1, 1e-5)
            assert not recorder.memory.written


DRAWS = {
    "rand": lambda p, x: x @ p["w"] + torch.rand(3),
    "dropout": lambda p, x: F.dropout(x @ p["w"], 0.5),
    "generator": lambda p, x: x @ p["w"] + torch.rand(3, generator=torch.Generator()),
    "randperm": lambda p, x: (x @ p["w"])[torch.randperm(6)],
    "normal_": lambda p, x: x @ p["w"] + torch.empty(3).normal_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_from_the_global_generator(name: str) -> None:
    raises(TraceError, lambda: lower(blocked(DRAWS[name])), "block", "aten.", "fz.random")
    raises(TraceError, lambda: lower(make(lambda p, x: DRAWS[name](p, x).mean())), "fzero.train_step", "fz.random")


def test_dropout_of_nothing_draws_nothing() -> None:
    assert lower(blocked(lambda p, x: F.dropout(x @ p["w"], 0.0))).program.instructions


def if_positive(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] if x.sum() > 0 else -(x @ p["w"])


VALUES = {
    "item": lambda p, x: x @ p["w"] * x.sum().item(),
    "if": if_positive,
    "float": lambda p, x: x @ p["w"] * float(x.sum()),
    "boolean index": lambda p, x: (x @ p["w"])[x.sum(1) > 0],
    "tolist": lambda p, x: x @ p["w"] * x.tolist()[0][0],
    "numpy": lambda p, x: x @ p["w"] * float(x.detach().numpy()[0, 0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_control_flow_on_values(name: str) -> None:
    raises(TraceError, lambda: lower(blocked(VALUES[name])), "block", "needs the value of a tensor")
    raises(
        TraceError,
        lambda: lower(make(lambda p, x: VALUES[name](p, x).mean())),
        "fzero.train_step",
        "needs the value of a tensor",
    )


SWALLOWED = {
    "item": (lambda y: y.sum().item(), "needs the value of a tensor"),
    "bool": (lambda y: 1.0 if y.sum() > 0 else 3.0, "needs the value of a tensor"),
    "numpy": (lambda y: float(y.detach().numpy().sum()), "needs the value of a tensor while being traced (.numpy())"),
    "draw": (lambda y: torch.rand(()), "draws from torch's global generator"),
    "data": (lambda y: setattr(y, "data", y * 2), "assigns to .data"),
    "in a block": (lambda y: fz.block(lambda a: a * a.sum().item())(y), "needs the value of a tensor"),
}


@pytest.mark.parametrize("case", SWALLOWED)
def test_a_refusal_that_the_loss_swallows(case):
    """In PyTorch nothing would have been raised there, and its `except` not be run."""
    body, says = SWALLOWED[case]

    def loss(p, x):
        y = p["w"] * x
        try:
            scale = body(y)
        except Exception:
            scale = 2.0
        return (y * scale).square().mean()

    raises(TraceError, lambda: fz.lower(fz.train_step(loss, optim.sgd(0.1)), ONE, VECTOR, ROWS), says)


def test_what_fails_in_pytorch_too_may_be_swallowed():
    def loss(p, x):
        try:
            return (torch.ones(3) @ torch.ones(4)) * p["w"].sum()
        except RuntimeError:
            return (x @ p["w"]).square().mean()

    assert fz.lower(fz.train_step(loss, optim.sgd(0.1)), ONE, VECTOR, ROWS).program.instructions


def test_what_the_loss_raises_itself_passes_whatever_it_says():
    def loss(p, x):
        raise TypeError("scale(): argument 'rate' is missing")

    with pytest.raises(TypeError, match=r"^scale\(\): argument 'rate' is missing$"):
        fz.lower(fz.train_step(loss, optim.sgd(0.1)), ONE, VECTOR, ROWS)
