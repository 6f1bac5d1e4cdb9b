"""fp8: what is rounded how, against a reference written by hand; which products; that no transform changes a bit; what
it costs; what cannot be had."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from typing import Any

import models
import pytest
import simulated
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import MODELS, STAGES, part
from offloads import same

import fzero as fz
from fzero import optim
from fzero._compat import compat
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.ir.program import Function
from fzero.ops import scaled_matmul
from fzero.ops.scaled_matmul import E4M3, E5M2, quantized, scale_of, scaled_mm
from fzero.plan.cost import cost_of, model_flops
from fzero.runtime.build.build import build
from fzero.trace.graph_capture import record

WIDTH, TOKENS, BATCH = 32, 16, 4


# how a number is rounded


def numbers(dtype: torch.dtype) -> list[float]:
    """All finite numbers of a format that are not negative, in order."""
    found = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    return found[found.isfinite()].tolist()


def nearest(x: float, dtype: torch.dtype) -> float:
    """The number of a format nearest to x; of two, the one with an even last bit."""
    values = numbers(dtype)
    best = min(range(len(values)), key=lambda i: (abs(values[i] - abs(x)), i % 2))
    return math.copysign(values[best], x)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(
    st.lists(
        st.floats(min_value=-(2.0**60), max_value=2.0**60, width=32, allow_subnormal=False), min_size=1, max_size=9
    )
)
def test_numbers_are_rounded_to_nearest_by_a_power_of_two(dtype, values):
    x = torch.tensor(values)
    q, scale = quantized(x, dtype)
    most = max(map(abs, values))
    power = math.frexp(scale.item())
    assert power[0] == 0.5
    if most > 2.0**-90:
        assert torch.finfo(dtype).max / 2 <= most / scale.item() < torch.finfo(dtype).max * (1 + 2**-23)
        assert [y * scale.item() for y in q.float().tolist()] == [
            nearest(v / scale.item(), dtype) * scale.item() for v in values
        ]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dim", [None, 1])
def test_what_is_not_finite_stays_so(dtype, bad, dim):
    x = torch.ones(16, 16)
    x[3, 5] = bad
    q, scale = quantized(x, dtype, dim)
    eye, one = quantized(torch.eye(16), E4M3, None if dim is None else 0)
    y = scaled_mm(q, eye, scale, one, torch.float32)
    assert not y[3, 5].isfinite() and (dim is None or (y[:3] == 1).all())


def test_zeros_are_zeros():
    q, scale = quantized(torch.zeros(16, 16), E4M3)
    assert scale > 0 and not scaled_mm(q, q, scale, scale, torch.float32).any()


# by hand


def scale_by_hand(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """The smallest power of two with every |x| / scale below the format's largest number."""
    most = x.abs().max().reshape(1, 1) if dim is None else x.abs().max(dim, keepdim=True).values
    return torch.ldexp(
        torch.ones_like(most, dtype=torch.float32), torch.frexp(most.float() / torch.finfo(dtype).max).exponent
    )


def by_hand(a: torch.Tensor, b: torch.Tensor, formats: tuple[torch.dtype, torch.dtype], rows: bool) -> torch.Tensor:
    factors = []
    for x, dtype, dim in zip((a, b), formats, (1, 0), strict=True):
        scale = scale_by_hand(x, dtype, dim if rows else None)
        factors.append((x.float() / scale).to(dtype).float() * scale)
    return torch.mm(*factors).to(a.dtype)


class Linear(torch.autograd.Function):
    """x @ w for matrices, in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, rows: bool) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.rows = rows
        return by_hand(x, w, (E4M3, E4M3), rows)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), (dy,) = ctx.saved_tensors, tangents
        return by_hand(dy, w.t(), (E5M2, E4M3), ctx.rows), by_hand(x.t(), dy, (E4M3, E5M2), ctx.rows), None


class LinearT(torch.autograd.Function):
    """x @ w.T: its own gradient is a product in the other order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, rows: bool) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.rows = rows
        return by_hand(x, w.t(), (E4M3, E4M3), rows)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), (dy,) = ctx.saved_tensors, tangents
        return by_hand(dy, w, (E5M2, E4M3), ctx.rows), by_hand(dy.t(), x, (E5M2, E4M3), ctx.rows), None


PLAIN = {"x w": lambda x, w: x @ w, "x w.T": lambda x, w: x @ w.T}


def hand(rows: bool) -> dict[str, Any]:
    def of(function: Any) -> Any:
        return lambda x, w: function.apply(x.reshape(-1, x.shape[-1]), w, rows).reshape(*x.shape[:-1], -1)

    return {"x w": of(Linear), "x w.T": of(LinearT)}


def mlp(p, x, product):
    h = F.gelu(product["x w"](x, p["up"]) + p["bias"])
    return x + product["x w.T"](h, p["down"])


block = fz.block(functools.partial(mlp, product=PLAIN))


def loss_of(layer: Any, product: Any) -> Any:
    """Three layers, glue before and behind them: an embedding tied to the head."""

    def loss(params, batch):
        x = product["x w"](batch["x"], params["table"])
        for p in params["layers"]:
            x = layer(p, x)
        return (product["x w.T"](x, params["table"]) - batch["y"]).float().square().mean()

    return loss


def reference_loss(rows: bool) -> Any:
    return loss_of(functools.partial(mlp, product=hand(rows)), hand(rows))


LOSS = loss_of(block, PLAIN)


def init(key: torch.Tensor) -> Any:
    keys = iter(fz.random.split(key, 10))

    def matrix(*shape: int) -> torch.Tensor:
        # rows of very different sizes: with one scale for all the last are subnormal
        spread = torch.exp2(-torch.arange(shape[0]).float() / 1.5)
        return 0.3 * fz.random.normal(next(keys), shape) * spread[:, None]

    layers = [{"up": matrix(WIDTH, 48), "down": matrix(WIDTH, 48), "bias": torch.zeros(48)} for _ in range(3)]
    return {"layers": layers, "table": matrix(16, WIDTH)}


def batches(num: int = 3) -> list[dict[str, torch.Tensor]]:
    keys = fz.random.split(fz.random.key(9), num)
    draw = lambda k, i: fz.random.normal(fz.random.fold_in(k, i), (BATCH, TOKENS, 16))  # noqa: E731
    return [{"x": draw(k, 0) * torch.exp2(-torch.arange(TOKENS).float())[:, None], "y": draw(k, 1)} for k in keys]


LR = 1e-3


def trained(
    *transforms: Any, loss: Any = LOSS, backend: str = "eager", mesh: Any = None
) -> tuple[list[torch.Tensor], Any]:
    mesh = mesh or fz.make_mesh(data=-1)
    train = fz.compile(fz.compose(*transforms)(fz.train_step(loss, optim.sgd(LR))), mesh, backend=backend)
    state, losses = train.init(init, fz.random.key(0)), []
    for batch in batches():
        state, metrics = train(state, part(batch, mesh))
        losses.append(metrics["loss"])
    return losses, train.gather(state).params


@functools.cache
def alone(*transforms: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """What `trained` comes to on this process, in eager mode: once for all tests that compare with it."""
    return trained(*transforms, **options)


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_step_is_what_one_writes_by_hand(scales):
    losses, params = alone(fz.fp8(scales=scales))
    want, found = init(fz.random.key(0)), []
    for batch in batches():
        leaves = [x.clone().requires_grad_() for x in fz.tree.leaves(want)]
        loss = reference_loss(scales == "row")(fz.tree.unflatten(fz.tree.structure(want), leaves), batch)
        grads = torch.autograd.grad(loss, leaves)
        want = fz.tree.unflatten(
            fz.tree.structure(want), [x.detach() - LR * g for x, g in zip(leaves, grads, strict=True)]
        )
        found.append(loss.detach())
    assert same(found, losses) and same(want, params)


@pytest.mark.full
@pytest.mark.parametrize(("scales", "dtype"), [("tensor", "fp16"), ("row", "bf16")])
def test_with_mixed_precision_results_have_its_dtype(scales, dtype):
    """The reference is computed by the same step: only its products are by hand."""
    precision = fz.mixed_precision(dtype, loss_scale=128.0 if dtype == "fp16" else None)
    want = alone(precision, loss=reference_loss(scales == "row"))
    assert same(alone(precision, fz.fp8(scales=scales)), want) and not same(want, alone(precision))


def test_scales_differ_where_rows_differ():
    plain, tensor, row = (alone(*t)[0] for t in [(), (fz.fp8(),), (fz.fp8(scales="row"),)])
    assert not same(tensor, row) and not same(plain, row)
    for found in (tensor, row):
        torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=0.02, atol=0.0)


# each way to write a product


def products(p, x):
    """Every product with `w`: by @, by linear with a bias, by einsum, by bmm of one, of two axes at once; and what is
    none: a part of it, two of a batch."""
    a = F.linear(x, p["w"], p["b"])
    a = torch.einsum("btd,de->bte", a, p["w"]) + torch.matmul(a, p["w"].T)
    a = torch.bmm(a.reshape(1, -1, WIDTH), p["w"][None]).view(a.shape) + (a @ p["w"].to(torch.float64).float())
    return a @ p["other"][:, :WIDTH] + torch.baddbmm(a, a, p["w"].expand(len(a), WIDTH, WIDTH))


def product_nodes(program: Any) -> dict[str, int]:
    names = [
        "scaled_mm" if n.target is scaled_mm else "mm"
        for n in every_node(program)
        if n.target is scaled_mm or "mm" in str(n.target)
    ]
    return {name: names.count(name) for name in set(names)}


def every_node(program: Any) -> list[Any]:
    ops = [op for op, _ in program.walk() if op.op == "call"]
    return [n for op in ops for n in program.functions[op.fn].graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("in_block", [True, False])
def test_products_however_written(in_block):
    layer = fz.block(products) if in_block else products
    step = fz.train_step(lambda params, x: layer(params, x).square().mean(), optim.sgd(0.1))
    params = {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH), "other": torch.randn(WIDTH, WIDTH + 16)}
    program = fz.lower(fz.fp8(step), fz.AbstractMesh(data=1), params, torch.empty(2, TOKENS, WIDTH)).program
    found = product_nodes(program)
    assert found["scaled_mm"] == 5 * 3 - 1, (
        "each forward, gradient of its weight, gradient of its input; the batch needs none"
    )
    assert found["mm"] == 6, "of a part of a leaf, and of a batch of matrices"


@fz.block
def heads(p, x):
    return (x @ p["q"]) * (x @ p["k"]) + x @ p["v"]


def test_what_several_parameters_multiply_is_rounded_once():
    step = fz.train_step(lambda params, x: heads(params, x).square().mean(), optim.sgd(LR))
    params = {n: torch.empty(16, 16) for n in "qkv"}
    program = fz.lower(fz.fp8(step), fz.AbstractMesh(data=1), params, torch.empty(16, 16)).program
    forward = program.functions[
        next(x.fn for x in program.instructions if x.op == "call" and x.block is not None)
    ].graph
    rounded = [n for n in forward.graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert len([n for n in rounded if n.meta["val"].dtype is E4M3]) == 4, "q, k, v, and x once"


def test_formats_and_dtypes_of_the_products():
    step = fz.fp8(fz.mixed_precision(fz.train_step(LOSS, optim.sgd(LR)), "bf16"))
    program = fz.lower(step, fz.AbstractMesh(data=1), init, batches()[0]).program
    kinds = [
        (*(a.meta["val"].dtype for a in n.args[:2]), n.meta["val"].dtype)
        for n in every_node(program)
        if n.target is scaled_mm
    ]
    assert set(kinds) == {(E4M3, E4M3, torch.bfloat16), (E5M2, E4M3, torch.bfloat16), (E4M3, E5M2, torch.bfloat16)}
    assert not [n for n in every_node(program) if n.target is torch.ops.aten.mm.default]


# the same bits under every other transform


@pytest.mark.full
def test_other_transforms_change_no_bit():
    want = alone(fz.fp8())
    for others in [
        (fz.remat("full"),),
        (fz.remat("none"),),
        (fz.remat(0.5),),
        (fz.offload("cpu", ("params", "opt_state")),),
    ]:
        assert same(alone(fz.fp8(), *others), want), others
    micro = alone(fz.fp8(), fz.accumulate(2))
    assert same(alone(fz.fp8(), fz.accumulate(2, schedule="layerwise")), micro) and not same(micro, want), (
        "scales are those of a micro-batch"
    )


def on_ranks(cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    mesh = fz.make_mesh(data=-1)
    return {name: trained(*transforms, mesh=mesh) for name, transforms in cases.items()}


@pytest.mark.full
@pytest.mark.parametrize(("scales", "stages"), [("tensor", (0, 3)), ("row", (1, 2, 3))])
def test_two_ranks_are_two_micro_batches(run_ranks, scales, stages):
    """Of two summands the order does not matter: what each rank rounds is what each micro-batch does."""
    fp8 = fz.fp8(scales=scales)
    want = alone(fp8, fz.accumulate(2))
    for ranks in run_ranks(2, on_ranks, {f"stage {n}": (STAGES[n](), fp8) for n in stages}):
        for name, found in ranks.items():
            assert same(found, want), name


# operands that are sharded along a dim


@fz.block
def transformer(p, x):
    q, k, v = (F.layer_norm(x, (64,), p["norm"]) @ p["qkv"]).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
    return x + F.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def gpt_loss(params, batch):
    x = params["table"][batch["x"]]
    for p in params["layers"]:
        x = transformer(p, x)
    return F.cross_entropy((x @ params["head"]).flatten(0, 1), batch["y"].flatten())


def gpt() -> tuple[Any, Any]:
    """Parameters of two layers, and a batch."""
    g = torch.Generator().manual_seed(1)
    shapes = {"qkv": (64, 192), "out": (64, 64), "up": (64, 128), "bias": (128,), "down": (128, 64)}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) / 8

    layers = [{name: draw(*shape) for name, shape in shapes.items()} | {"norm": torch.ones(64)} for _ in range(2)]
    batch = {name: torch.randint(0, 128, (4, 32), generator=g) for name in "xy"}
    return {"table": draw(128, 64), "head": draw(64, 128), "layers": layers}, batch


RULES = {"table": 0, "qkv": (1, 3), "out": 0, "up": 1, "bias": 0, "down": 0, "head": 1}
SHARDED: dict[str, tuple[dict[str, int], list[Any]]] = {
    "tensor": ({"model": 2}, [fz.tensor_parallel(rules=RULES)]),
    "tensor of 4": ({"model": 4}, [fz.tensor_parallel(rules=RULES)]),
    "tensor, positions": ({"model": 2}, [fz.tensor_parallel(rules=RULES, sequence=True)]),
    "sequence": ({"seq": 2}, [fz.sequence_parallel()]),
    "sequence of 4, keys": ({"seq": 4}, [fz.sequence_parallel(attention="keys")]),
    "both": ({"model": 2, "seq": 2}, [fz.tensor_parallel(rules=RULES), fz.sequence_parallel()]),
}


@functools.cache
def gpt_trained(*transforms: Any, **axes: int) -> Any:
    """The parameters after a step of gradient descent on simulated ranks."""
    params, batch = gpt()
    step, mesh = fz.compose(*transforms)(fz.train_step(gpt_loss, optim.sgd(1.0))), fz.AbstractMesh(**axes)
    parts = simulated.batch_parts(step, mesh, batch)
    ((leaves, _),) = simulated.run(fz.lower(step, mesh, params, parts[0]), step, mesh, params, parts, 1)
    return {name: x for name, x in leaves.items() if name.startswith("params")}


@pytest.mark.full(keep=["tensor-tensor", "sequence-row"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("way", SHARDED)
def test_shards_have_the_scales_of_the_unsharded_operands(way, scales):
    """The largest magnitudes are reduced over the axis, so the same values are rounded as without it."""
    fp8, (axes, transforms) = fz.fp8(scales=scales), SHARDED[way]
    plain, want, found = gpt_trained(data=1), gpt_trained(fp8, data=1), gpt_trained(fp8, *transforms, **axes)
    for name, x in found.items():
        assert (x - want[name]).norm() <= 0.02 * (plain[name] - want[name]).norm(), name


@pytest.mark.full(keep=["tensor, positions"])
@pytest.mark.parametrize("way", SHARDED)
def test_shards_with_zero_3_and_bf16(way):
    axes, transforms = SHARDED[way]
    step = fz.compose(fz.fp8(), fz.mixed_precision("bf16"), *transforms, fz.shard_params())
    params, batch = gpt()
    mesh = fz.AbstractMesh(data=2, **axes)
    program = fz.lower(step(fz.train_step(gpt_loss, optim.sgd(0.1))), mesh, params, batch).program
    assert not program.notes and "scaled_mm" in product_nodes(program) and "mm" not in product_nodes(program)
    fz.testing.check_equivalent(step(fz.train_step(gpt_loss, optim.sgd(0.1))), params, batch, mesh)


def gpt_on_ranks(way: str) -> Any:
    axes, transforms = SHARDED[way]
    params, batch = gpt()
    step = fz.compose(fz.fp8(), *transforms)(fz.train_step(gpt_loss, optim.sgd(1.0)))
    train = fz.compile(step, fz.make_mesh(**axes), backend="eager")
    return dict(fz.tree.with_paths(train.gather(train(train.init(params), batch)[0]).params, "params"))


@pytest.mark.full
def test_shards_on_real_ranks(run_ranks):
    for way in ("tensor, positions", "sequence"):
        want = gpt_trained(fz.fp8(), *SHARDED[way][1], **SHARDED[way][0])
        for found in run_ranks(2, gpt_on_ranks, way):
            for name, x in found.items():
                torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-6)


def test_a_shard_that_no_kernel_multiplies_is_computed_unsharded():
    """48 columns on two ranks are 24 on each."""
    params, batch = {"w": torch.empty(32, 48), "v": torch.empty(48, 32)}, torch.empty(32, 32)
    step = fz.fp8(fz.train_step(lambda p, x: (x @ p["w"] @ p["v"]).square().mean(), optim.sgd(LR)))
    step = fz.tensor_parallel(step, rules={"w": 1, "v": 0})
    notes = fz.lower(step, fz.AbstractMesh(model=2), params, batch).program.notes
    assert "fzero.scaled_mm.default" in notes[0] and "computed unsharded" in notes[0]


def both(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """What a step rounds, and a product of it."""
    (a, scale), (b, scales) = quantized(torch.tanh(x), E5M2), quantized(y * 3, E4M3, 0)
    return [a.float(), b.float(), scale_of(y, E4M3), scaled_mm(a, b, scale, scale, torch.bfloat16), scales * 1]


@pytest.mark.full
def test_compiled_it_rounds_the_same(compiled_here):
    """A compiler may leave out a rounding between two operations, or multiply by what it should divide by."""
    x, y = torch.randn(64, 48) * 1e-3, torch.randn(48, 64) * torch.exp2(-torch.arange(64.0))
    with compat.FakeTensorMode():
        fakes = [torch.empty(x.shape), torch.empty(y.shape)]
        function = Function("both", record(lambda *xs: both(*xs), fakes, owner="test", names=["x", "y"]))
    mesh = fz.make_mesh(data=1)
    eager, compiled = (build({"both": function}, backend, mesh)["both"](x, y) for backend in ("eager", "inductor"))
    assert all(torch.equal(a, b) for a, b in zip(eager[1:3], compiled[1:3], strict=True)) and torch.equal(
        eager[4], compiled[4]
    )
    assert (eager[0] == compiled[0]).float().mean() > 0.99, "but for tanh, in its last bit"
    torch.testing.assert_close(eager[3].float(), compiled[3].float(), rtol=2**-7, atol=1e-6)


@pytest.mark.full
def test_a_compiled_step_is_the_eager_one(compiled_here):
    (want, _), (found, _) = alone(fz.fp8()), trained(fz.fp8(), backend="inductor")
    torch.testing.assert_close(torch.stack(found), torch.stack(want), rtol=2e-3, atol=0.0)


def test_order_of_transforms():
    transforms = [fz.fp8(scales="row"), fz.mixed_precision("bf16"), fz.shard_params(), fz.remat("full")]
    texts = set()
    for order in (transforms, transforms[::-1], transforms[2:] + transforms[:2]):
        step = fz.compose(*order)(fz.train_step(LOSS, optim.sgd(LR)))
        texts.add(str(fz.lower(step, fz.AbstractMesh(data=2), init, batches()[0]).program))
    (text,) = texts
    assert "fp8(scales='row')" in text.splitlines()[1]


def test_an_evaluation_rounds_as_the_forward_does():
    params, batch = init(fz.random.key(0)), batches()[0]
    evaluate = fz.compile(fz.fp8(fz.eval_step(LOSS)), fz.make_mesh(data=1), backend="eager")
    assert torch.equal(evaluate(params, batch), reference_loss(False)(params, batch)) and not torch.equal(
        evaluate(params, batch), LOSS(params, batch)
    )


@pytest.mark.full
def test_it_learns_as_bf16_does():
    def train_gpt(*transforms: Any) -> list[float]:
        model = MODELS["gpt"]
        step = fz.compose(fz.mixed_precision("bf16"), *transforms)(fz.train_step(model.loss, optim.adamw(1e-2)))
        train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        state, losses = train.init(model.init, fz.random.key(1)), []
        for batch in models.batches(60, size=16):
            state, metrics = train(state, batch)
            losses.append(metrics["loss"].item())
        return losses

    plain, tensor, row = train_gpt(), train_gpt(fz.fp8()), train_gpt(fz.fp8(scales="row"))
    assert plain[0] - sum(plain[-5:]) / 5 > 1.0, "it learns"
    for found in (tensor, row):
        assert found != plain and sum(found[-5:]) / 5 == pytest.approx(sum(plain[-5:]) / 5, rel=0.05)


def test_check_equivalent():
    step = fz.remat(fz.fp8(fz.train_step(LOSS, optim.sgd(LR))), "full")
    report = fz.testing.check_equivalent(step, init, batches()[0], fz.make_mesh(data=1), backend="eager")
    assert "multiplied in float8_e5m2" in str(report) and report.exact is not None and report.exact.equivalent


# what it costs


def large(*transforms: Any, tokens: int = 4096, width: int = 1024) -> Any:
    square = torch.empty(width, width, device="meta")
    layers = [
        {"up": square.clone(), "down": square.clone(), "bias": torch.empty(width, device="meta")} for _ in range(2)
    ]
    params: Any = {"layers": layers, "table": square}
    batch = {"x": torch.empty(1, tokens, width, device="meta"), "y": torch.empty(1, tokens, width, device="meta")}
    step = fz.compose(fz.mixed_precision("bf16"), *transforms)(fz.train_step(LOSS, optim.sgd(LR)))
    return fz.lower(step, fz.AbstractMesh(data=1), params, batch, device="h100")


def test_products_are_priced_at_the_rate_of_8_bits():
    plain, fp8 = large(), large(fz.fp8())
    flops: dict[torch.dtype, float] = {}
    for op, times in fp8.program.walk():
        if op.op == "call":
            for dtype, n in cost_of(fp8.program.functions[op.fn]).flops.items():
                flops[dtype] = flops.get(dtype, 0.0) + times * n
    one = 2 * 4096 * 1024 * 1024
    assert flops == {E4M3: 9 * one, E5M2: 8 * one}, (
        "by the first operand: in 3 gradients of weights that is what the forward left"
    )
    assert model_flops(fp8.program) == model_flops(plain.program) == 17 * one
    assert fp8.device.rate(E4M3) == fp8.device.rate(E5M2) == 2 * fp8.device.rate(torch.bfloat16) * (1979 / 1978)
    assert fp8.plan.step_seconds < plain.plan.step_seconds


def kept(program: Any) -> Counter[int]:
    """How often the backward of a layer reads something of so many bytes besides its gradient."""
    values = program.values()
    ops = [op for op, _ in program.walk() if op.is_backward]
    return Counter(
        values[a].nbytes for op in ops for a in op.args if a not in op.block.inputs[op.block.joint.num_inputs :]
    )


def saved(program: Any) -> list[Any]:
    return [v for op, _ in program.walk() for v in op.out if v.name.startswith("saved_")]


@pytest.mark.parametrize("policy", ["min_cut", "none", 0.5, 1.0])
def test_blocks_keep_8_bits_of_activations_and_none_of_parameters(policy):
    plain, fp8 = (large(fz.remat(policy), *t).program for t in ((), (fz.fp8(),)))
    assert all(4096 in v.shape or v.numel == max(v.shape, default=1) for v in saved(fp8)), "activations have 4096 rows"
    if policy == "min_cut":  # a layer reads in its backward: its input, what gelu read, what it gave
        assert [kept(program)[1024 * 4096 * n] for program, n in ((plain, 2), (fp8, 2), (fp8, 1))] == [6, 2, 4]


# on a GPU, as far as can be seen without one


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [False, True])
def test_operands_lie_as_tensor_cores_read_them(monkeypatch, formats, dtype, rows):
    """Whatever views they are. PyTorch's own rules for CUDA are asked, on fake tensors; the values are those of the
    emulation."""
    calls = []

    def on_tensor_cores(a, b, scale_a, scale_b, dtype, fast):
        calls.append((scale_a.numel(), fast))
        with compat.FakeTensorMode() as mode:
            fakes = [compat.new_fake(mode, x.shape, x.dtype, "cuda", x.stride()) for x in (a, b, scale_a, scale_b)]
            out = real(fakes[0], fakes[1], fakes[2], fakes[3], dtype, fast)
        assert out.device.type == "cuda" and out.dtype is dtype and out.shape == (a.shape[0], b.shape[1])
        assert not (scale_a.numel() > 1 and (b.dtype is E5M2 or dtype is not torch.bfloat16)), (
            "kernels of older releases have no others by row"
        )
        return scaled_matmul._emulated(a, b, scale_a, scale_b, dtype)

    real = compat.scaled_mm
    monkeypatch.setattr(compat, "scaled_mm", on_tensor_cores)
    x, y = torch.randn(32, 48), torch.randn(48, 64)
    for a, b in ((x, y), (x.t().contiguous().t(), y.t().contiguous().t())):
        (qa, sa), (qb, sb) = (
            quantized(a, formats[0], 1 if rows else None),
            quantized(b, formats[1], 0 if rows else None),
        )
        assert torch.equal(scaled_matmul._native(qa, qb, sa, sb, dtype), scaled_mm(qa, qb, sa, sb, dtype))
    assert {fast for _, fast in calls} == {formats == (E4M3, E4M3)}, "sums of fewer bits in the forward alone"
    assert {n for n, _ in calls} == {32 if rows and dtype is torch.bfloat16 and formats[1] is E4M3 else 1}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_devices(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    record = fz.fp8()
    record.check_device(torch.device("cpu"))
    with pytest.raises(FzeroValueError, match="mps has no products"):
        record.check_device(torch.device("mps"))
    refused = pytest.raises(
        FzeroValueError, match=r"a card has no products in float8(.|\n)*Fix: a CUDA device of capability 8\.9"
    )
    with contextlib.nullcontext() if capability >= (8, 9) else refused:
        record.check_device(torch.device("cuda"))


# which leaves


def test_where_selects():
    def up(path: str, leaf: torch.Tensor) -> bool:
        assert leaf.is_meta
        return path.endswith("['up']")

    step = fz.fp8(fz.train_step(LOSS, optim.sgd(LR)), where=up)
    found = product_nodes(fz.lower(step, fz.AbstractMesh(data=1), init, batches()[0]).program)
    assert found == {"scaled_mm": 9, "mm": 3 * 3 + 5}


def test_layers_that_are_selected_differ_from_those_that_are_not():
    step = fz.fp8(fz.train_step(LOSS, optim.sgd(LR)), where=lambda path, leaf: "[1]" in path and leaf.ndim == 2)
    program = fz.lower(fz.remat(step, "full"), fz.AbstractMesh(data=1), init, batches()[0]).program
    assert product_nodes(program)["scaled_mm"] == 7, "2 forward, 4 backward, and the first of them again"


def test_of_a_tied_leaf_all_paths_are_asked():
    def loss(params, x):
        return ((x @ params["a"]) @ params["b"]).square().mean()

    w = torch.randn(16, 16)
    tied, batch = {"a": w, "b": w}, torch.randn(16, 16)
    step = fz.fp8(fz.train_step(loss, optim.sgd(LR)))
    assert product_nodes(fz.lower(step, fz.AbstractMesh(data=1), tied, batch).program) == {"scaled_mm": 5}
    step = fz.fp8(fz.train_step(loss, optim.sgd(LR)), where=lambda path, leaf: "a" in path.removeprefix("params"))
    with pytest.raises(TransformError, match="no parameter is selected"):
        fz.lower(step, fz.AbstractMesh(data=1), tied, batch)


def test_what_where_accepts_and_cannot_be_is_named():
    params = {
        "bias": torch.zeros(32),
        "cube": torch.zeros(2, 16, 16),
        "odd": torch.zeros(24, 31),
        "index": torch.zeros(16, 16, dtype=torch.int64),
        "w": torch.zeros(16, 16),
    }
    step = fz.fp8(fz.train_step(lambda p, x: (x @ p["w"]).sum(), optim.sgd(LR)), where=lambda path, leaf: True)
    with pytest.raises(TransformError) as caught:
        fz.lower(step, fz.AbstractMesh(data=1), params, torch.zeros(16, 16))
    text = str(caught.value)
    for why in (
        "['bias'] (float32[32]): 1-d",
        "['cube'] (float32[2, 16, 16]): 3-d",
        "['odd'] (float32[24, 31]): 24 and 31: not multiples of 16",
        "['index']",
    ):
        assert why in text
    assert "params['w']" not in text and text.splitlines()[-1].startswith("Fix: ")


def test_a_step_without_any_product_in_8_bits():
    params = {"read": torch.zeros(16, 16), "w": torch.zeros(16, 32)}
    step = fz.fp8(fz.train_step(lambda p, x: (x @ p["w"]).sum() + p["read"].sum(), optim.sgd(LR)))
    with pytest.raises(TransformError) as caught:
        fz.lower(step, fz.AbstractMesh(data=1), params, torch.zeros(6, 16))
    assert "params['w']: its products are of 6 x 16 x 32" in str(
        caught.value
    ) and "params['read']: no product reads all of it" in str(caught.value)


def test_arguments():
    with pytest.raises(FzeroValueError, match="unknown scales='column'"):
        fz.fp8(scales="column")
    with pytest.raises(FzeroTypeError, match="no argument 'scaling'"):
        fz.fp8(scaling="delayed")  # type: ignore[call-arg]
    with pytest.raises(FzeroTypeError, match="a predicate is a function"):
        fz.fp8(where="w")  # type: ignore[arg-type]
    with pytest.raises(TransformError, match="two different fp8"):
        fz.fp8(fz.fp8(fz.train_step(LOSS, optim.sgd(LR))), scales="row")
