"""fz.chunked_cross_entropy: equal to F.cross_entropy of all logits, in less memory, under every transform."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError
from fzero.testing.simulate import parts_of

WORDS, WIDTH, LENGTH, ROWS = 48, 16, 8, 8


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return fz.random.normal(fz.random.key(seed), shape) * 0.3


def of_all_logits(hidden: Any, weight: Any, targets: Any, bias: Any = None, softcap: Any = None, **options: Any) -> Any:
    """The loss from all logits at once."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((24,), 5), ((3, 8), 4), ((3, 8), 5), ((2, 3, 8), None), ((1,), 7), ((2, 3), 100)],
    ids=["ragged", "positions", "ragged_positions", "default", "one_row", "more_chunks_than_rows"],
)
def test_equals_the_cross_entropy_of_all_logits(shape: Any, chunks: Any, dtype: torch.dtype) -> None:
    tolerance: Any = {
        torch.float64: {"rtol": 1e-12, "atol": 1e-12},
        torch.float32: {"rtol": 1e-5, "atol": 1e-6},
        torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
        torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    }[dtype]
    given = [drawn(*shape, WIDTH), drawn(WORDS, WIDTH, seed=1), drawn(WORDS, seed=2)]
    given = [x.to(dtype).requires_grad_() for x in given]
    targets = torch.arange(given[0].numel() // WIDTH).view(shape) * 7 % WORDS
    if targets.numel() > 1:
        targets.view(-1)[::3] = 5
    for bias in (None, given[2]):
        inputs = given if bias is not None else given[:2]
        for options in (
            {},
            {"reduction": "sum", "softcap": 2.0},
            {"ignore_index": 5, "label_smoothing": 0.1, "softcap": 30.0},
        ):
            found = fz.chunked_cross_entropy(given[0], given[1], targets, bias=bias, chunks=chunks, **options)
            expected = of_all_logits(given[0], given[1], targets, bias, **options)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, **tolerance)
            grads, wanted = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)
            for x, y in zip(grads, wanted, strict=True):
                assert x.dtype == dtype
                torch.testing.assert_close(x, y, **tolerance)


def test_frozen_operands_get_no_gradient() -> None:
    hidden, weight, targets = drawn(6, WIDTH).requires_grad_(), drawn(WORDS, WIDTH), torch.arange(6)
    expected = torch.autograd.grad(of_all_logits(hidden, weight, targets), hidden)
    found = torch.autograd.grad(fz.chunked_cross_entropy(hidden, weight, targets, chunks=3), hidden)
    torch.testing.assert_close(found, expected)
    weight, bias = weight.requires_grad_(), torch.zeros(WORDS)
    loss = fz.chunked_cross_entropy(hidden.detach(), weight, targets, bias=bias, chunks=3)
    (found,) = torch.autograd.grad(loss, weight)
    (wanted,) = torch.autograd.grad(of_all_logits(hidden.detach(), weight, targets), weight)
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        assert not fz.chunked_cross_entropy(hidden, weight, targets, chunks=3).requires_grad


def test_targets_that_are_all_ignored() -> None:
    hidden, weight = drawn(6, WIDTH).requires_grad_(), drawn(WORDS, WIDTH).requires_grad_()
    targets = torch.full((6,), -100)
    assert fz.chunked_cross_entropy(hidden, weight, targets, chunks=2).isnan()
    total, count = fz.chunked_cross_entropy(hidden, weight, targets, chunks=2, reduction="weighted")
    assert (total.item(), count.item()) == (0.0, 0)
    for grad in torch.autograd.grad(total, [hidden, weight]):
        assert not grad.any()


def test_a_loss_scale_beyond_float16() -> None:
    """float16 has no 2**17, but the gradient times 2**17."""
    hidden, weight = drawn(8, WIDTH).half().requires_grad_(), (drawn(WORDS, WIDTH) / 2**10).half()
    loss = fz.chunked_cross_entropy(hidden, weight, torch.arange(8), chunks=2, reduction="sum")
    (grad,) = torch.autograd.grad(loss, hidden, torch.tensor(2.0**17))
    wide = hidden.detach().float().requires_grad_()
    (wanted,) = torch.autograd.grad(of_all_logits(wide, weight.float(), torch.arange(8), reduction="sum"), wide)
    torch.testing.assert_close(grad.float() / 2**17, wanted, rtol=5e-3, atol=1e-6)


def test_many_rows_of_large_values_in_float16() -> None:
    """4096 rows add up to a gradient of `weight` above the largest float16, and their mean is far below it."""
    hidden, weight = torch.full((4096, 2), 32.0), torch.zeros(8, 2)
    given = [x.half().requires_grad_() for x in (hidden, weight, torch.zeros(8))]
    targets = torch.zeros(4096, dtype=torch.int64)
    loss = fz.chunked_cross_entropy(given[0], given[1], targets, bias=given[2], chunks=1)
    _, of_weight, of_bias = torch.autograd.grad(loss, given)
    share = torch.full((8,), 1 / 8) - F.one_hot(torch.tensor(0), 8)
    torch.testing.assert_close(of_weight.float(), 32 * share[:, None].expand(8, 2), rtol=1e-3, atol=0)
    torch.testing.assert_close(of_bias.float(), share, rtol=1e-3, atol=0)


class _Largest(TorchDispatchMode):
    """The most elements of a result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(x.numel() for x in fz.tree.leaves(out) if isinstance(x, torch.Tensor)), 0)
        return out


def test_no_operation_makes_more_than_a_chunk_of_logits() -> None:
    hidden, weight = drawn(64, 2).requires_grad_(), drawn(WORDS, 2).requires_grad_()
    with _Largest() as largest:
        fz.chunked_cross_entropy(hidden, weight, torch.arange(64) % WORDS, chunks=8).backward()
    assert largest.numel == 64 // 8 * WORDS


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_planned_memory_is_that_of_a_chunk(backend: str) -> None:
    words, rows = 4096, 512

    def loss(p: Any, batch: Any, chunks: int | None) -> Any:
        hidden = torch.tanh(p["embedding"][batch["x"]])
        if chunks is None:
            return of_all_logits(hidden, p["head"], batch["y"])
        return fz.chunked_cross_entropy(hidden, p["head"], batch["y"], chunks=chunks)

    params = {"embedding": torch.zeros(words, WIDTH), "head": torch.zeros(words, WIDTH)}
    batch = {name: torch.zeros(rows, dtype=torch.int64) for name in ("x", "y")}
    peaks = []
    for chunks in (None, 8):
        step = fz.train_step(lambda p, b, n=chunks: loss(p, b, n), optim.sgd(0.1))
        peaks.append(fz.lower(step, fz.AbstractMesh(), params, batch, backend=backend).plan.peak_bytes)
    logits = rows * words * 4
    assert peaks[0] - peaks[1] > 0.7 * logits


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def chunked(p: Any, batch: Any) -> Any:
    x = p["embedding"][batch["x"]]
    for q in p["layers"]:
        x = layer(q, x)
    options: Any = {"bias": p["bias"], "chunks": 4, "softcap": 5.0, "label_smoothing": 0.1}
    return fz.chunked_cross_entropy(x, p.get("head", p["embedding"]), batch["y"], reduction="weighted", **options)


def unchunked(p: Any, batch: Any) -> Any:
    x = p["embedding"][batch["x"]]
    for q in p["layers"]:
        x = layer(q, x)
    head = p.get("head", p["embedding"])
    total = of_all_logits(x, head, batch["y"], p["bias"], 5.0, label_smoothing=0.1, reduction="sum")
    return fz.weighted(total, (batch["y"] != -100).sum())


def params_of(tied: bool = False) -> Any:
    layers = [{"up": drawn(WIDTH, WIDTH, seed=i), "down": drawn(WIDTH, WIDTH, seed=i + 9)} for i in range(2)]
    out = {"embedding": drawn(WORDS, WIDTH, seed=3), "bias": drawn(WORDS, seed=4), "layers": layers}
    return out if tied else {**out, "head": drawn(WORDS, WIDTH, seed=5)}


def ragged_batch() -> Any:
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 11 % WORDS
    targets = (tokens * 5 + 3) % WORDS
    targets[:3, 1:] = -100
    return {"x": tokens, "y": targets}


RULES: Any = {"*.up": 1, "*.down": 0, "embedding": 0, "bias": 0}
UNTIED = {**RULES, "head": 0}
COMPOSITIONS: Any = {
    "remat": ({}, False, [fz.remat("full")]),
    "zero_3": ({"data": 2}, False, [fz.shard_params()]),
    "accumulate": ({"data": 2}, False, [fz.shard_params(), fz.accumulate(2)]),
    "tied": ({"data": 2}, True, [fz.shard_params()]),
    "pipeline": ({"pipe": 2}, False, [fz.pipeline(), fz.accumulate(4)]),
    "pipeline_tied": ({"pipe": 2, "data": 2}, True, [fz.pipeline(), fz.accumulate(2), fz.shard_params()]),
    "vocabulary": ({"model": 2}, False, [fz.tensor_parallel(rules=UNTIED)]),
    "vocabulary_tied": ({"model": 2}, True, [fz.tensor_parallel(rules=RULES)]),
    "vocabulary_sequence": (
        {"model": 2},
        False,
        [fz.tensor_parallel(rules=UNTIED, sequence=True, max_replicated_bytes=0)],
    ),
    "sequence": ({"seq": 2}, False, [fz.sequence_parallel(max_replicated_bytes=0)]),
}


@functools.cache
def plainly(tied: bool) -> Any:
    step = fz.train_step(unchunked, optim.sgd(0.5))
    return fz.testing.simulate(step, fz.AbstractMesh(), params_of(tied), ragged_batch(), steps=2)


@pytest.mark.full(keep=["zero_3", "pipeline", "vocabulary"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_under_transforms(name: str) -> None:
    """Two steps equal those of the loss from all logits in one process, and no more bytes are sent for the head."""
    axes, tied, transforms = COMPOSITIONS[name]
    params, batch, mesh = params_of(tied), ragged_batch(), fz.AbstractMesh(**axes)
    expected, plain_metrics = plainly(tied)
    step = fz.compose(*transforms)(fz.train_step(chunked, optim.sgd(0.5)))
    found, metrics = fz.testing.simulate(step, mesh, params, batch, steps=2)
    torch.testing.assert_close(metrics["loss"], plain_metrics["loss"])
    torch.testing.assert_close(found.params, expected.params)
    gathers = []
    for loss in (unchunked, chunked):
        one = fz.compose(*transforms)(fz.train_step(loss, optim.sgd(0.5)))
        program = fz.lower(one, mesh, params, parts_of(one, mesh, batch)[0]).program
        gathers.append(sum("all_gather" in op.op for op, _ in program.walk()))
    if "sequence" not in name:  # there a chunk's rows are gathered chunk by chunk
        assert gathers[0] == gathers[1]


@pytest.mark.parametrize(
    "transforms",
    [
        [fz.mixed_precision("fp16"), fz.accumulate(2)],
        [fz.offload("cpu", ("opt_state", "params")), fz.shard_params()],
    ],
    ids=["fp16", "offload"],
)
def test_compiled(transforms: Any) -> None:
    losses = []
    for loss in (unchunked, chunked):
        step = fz.compose(*transforms)(fz.train_step(loss, optim.adamw(1e-2)))
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        state = train.init(lambda key: params_of())
        for _ in range(3):
            state, metrics = train(state, ragged_batch())
        assert metrics["finite"]
        losses.append(metrics["loss"])
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=2e-3)


def test_an_evaluation_computes_no_gradient() -> None:
    step = fz.eval_step(lambda p, batch: chunked(p, batch))
    params, batch = params_of(), ragged_batch()
    found = fz.compile(step, fz.make_mesh(), backend="eager")(params, batch)
    total, count = unchunked(params, batch)
    torch.testing.assert_close(found, total / count)


def test_wrong_arguments_are_all_listed() -> None:
    with pytest.raises(FzeroTypeError) as error:
        fz.chunked_cross_entropy(
            torch.zeros(2, 3),
            torch.zeros(4, 5),
            torch.zeros(2),
            chunks=0,
            softcap=-1,
            ignore_index=1.5,  # type: ignore[arg-type]
            label_smoothing=2,
            reduction="none",
        )
    for text in (
        "weight: float32[4, 5], not [vocabulary, 3]",
        "targets: float32[2], not int64[2]",
        "chunks=0: must be at least 1",
        "softcap=-1: must be greater than 0",
        "ignore_index=1.5: must be a whole number",
        "label_smoothing=2: must be at most 1",
        "reduction='none': must be 'mean', 'sum' or 'weighted'",
        "Fix: fz.chunked_cross_entropy(hidden, head.weight, targets)",
    ):
        assert text in str(error.value)
    with pytest.raises(FzeroTypeError, match="weight: list, not a tensor"):
        fz.chunked_cross_entropy(torch.zeros(2, 3), [1], torch.zeros(2))  # type: ignore[arg-type]


def test_the_gradient_of_the_gradient_is_an_error() -> None:
    hidden, weight = drawn(4, WIDTH).requires_grad_(), drawn(WORDS, WIDTH)
    loss = fz.chunked_cross_entropy(hidden, weight, torch.arange(4), chunks=2)
    with pytest.raises(FzeroTypeError, match="gradient of its gradient"):
        torch.autograd.grad(loss, hidden, create_graph=True)


FUNCTIONAL: dict[str, Any] = {
    "grad": lambda fn, h, w: torch.func.grad(fn, (0, 1))(h, w),
    "vmap": lambda fn, h, w: torch.func.vmap(fn, (0, None))(torch.stack([h, 2 * h]), w),
    "grad of rows": lambda fn, h, w: torch.func.vmap(torch.func.grad(fn), (0, None))(torch.stack([h, 2 * h]), w),
    "jvp": lambda fn, h, w: torch.func.jvp(fn, (h, w), (w[: len(h)], w)),
    "hessian": lambda fn, h, w: torch.func.hessian(fn)(h, w),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of torch.func.jvp itself
@pytest.mark.parametrize("transform", FUNCTIONAL)
def test_under_the_transforms_of_torch_func(transform: str) -> None:
    hidden, weight, targets = drawn(6, WIDTH), drawn(WORDS, WIDTH, seed=1), torch.arange(6) * 7
    options: Any = {"softcap": 2.0, "label_smoothing": 0.1, "ignore_index": 7}
    found, expected = (
        FUNCTIONAL[transform](lambda h, w, loss=loss: loss(h, w, targets, **options), hidden, weight)
        for loss in (fz.chunked_cross_entropy, of_all_logits)
    )
    torch.testing.assert_close(found, expected)


def test_the_gradients_of_samples_in_a_step() -> None:
    """torch.func in a loss, traced and not."""

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        one = lambda h, t: fz.chunked_cross_entropy(h[None], params["w"], t[None])  # noqa: E731
        return torch.func.vmap(torch.func.grad(one))(batch["h"], batch["t"]).square().sum(-1).mean()

    step = fz.train_step(loss_fn, optim.sgd(0.1))
    params, batch = {"w": drawn(WORDS, WIDTH, seed=1)}, {"h": drawn(6, WIDTH), "t": torch.arange(6)}
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state, metrics = train(train.init(params), batch)
    plain, wanted = step(step.init(params), batch)
    torch.testing.assert_close(metrics["loss"], wanted["loss"])
    torch.testing.assert_close(state.params["w"], plain.params["w"])


def test_a_mean_over_nothing_changes_nothing() -> None:
    """Its gradients are zeros and not NaN, as those of F.cross_entropy are."""
    hidden, weight = drawn(6, WIDTH).requires_grad_(), drawn(WORDS, WIDTH, seed=1).requires_grad_()
    targets = torch.full((6,), -100)
    for loss in (fz.chunked_cross_entropy(hidden, weight, targets, chunks=2), of_all_logits(hidden, weight, targets)):
        assert loss.isnan()
        assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_computes_no_gradients(mode: Any) -> None:
    hidden, weight = drawn(6, WIDTH).requires_grad_(), drawn(WORDS, WIDTH, seed=1).requires_grad_()
    targets = torch.arange(6)
    with mode(), FlopCounterMode(display=False) as counter:
        loss = fz.chunked_cross_entropy(hidden, weight, targets, chunks=2)
    assert counter.get_total_flops() == 2 * 6 * WIDTH * WORDS
    assert loss.item() == pytest.approx(of_all_logits(hidden, weight, targets).item(), rel=1e-6)


def test_tensors_of_different_dtypes_are_named() -> None:
    """Unless autocast casts them."""
    hidden, weight, targets = drawn(6, WIDTH), drawn(WORDS, WIDTH, seed=1).double(), torch.arange(6)
    with pytest.raises(
        FzeroTypeError, match=r"weight: float64\[48, 16\], not of the dtype of hidden, float32\[6, 16\]"
    ):
        fz.chunked_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = fz.chunked_cross_entropy(hidden, weight.bfloat16(), targets)
    assert found.item() == pytest.approx(of_all_logits(hidden, weight.float(), targets).item(), rel=1e-2)
