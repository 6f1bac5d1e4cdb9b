"""What cannot be traced is refused in this library's words, in a block and outside one: the function's own line, the
operands, a fix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import compat, optim
from fzero.errors import TraceError
from fzero.trace.reads import overwrites
from fzero.trace.recorder import Recorder

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


HERE = "test_rejected_operations.py:"


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
    overwritten: ("overwrites what its backward needs", "y.add_(1)"),
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


# --- mistakes ---

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


def test_a_block_names_its_arguments_and_their_leaves():
    layer = fz.block(lambda p, y, *, scale: (y * scale) @ p["w"])
    step = fz.train_step(lambda p, x: layer(p["layers"][1], x[:, :2], scale=2.0).mean(), optim.sgd(0.1))
    with pytest.raises(TraceError) as caught:
        fz.lower(step, fz.AbstractMesh(data=1), {"layers": [{"w": torch.ones(4, 4)}] * 2}, BATCH)
    assert "p['w'] = params['layers']" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)


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


def test_an_optimizer_names_its_line():
    def update(grads: Any, state: Any, params: Any) -> Any:
        return fz.tree.map(lambda g: g.reshape(3, 7) if g is not None else None, grads), state

    step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), optim.GradientTransformation(lambda params: (), update))
    with pytest.raises(TraceError, match=r"(?s)optimizer.*test_rejected_operations.py:\d+.*g\.reshape\(3, 7\).*Fix: "):
        fz.lower(step, fz.AbstractMesh(data=1), PARAMS, BATCH)


# --- operators whose schema denies what they write ---

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
