"""mixed_precision: float16 with its loss scale, dtypes by leaf and block, what is cast and what travels, and what
cannot be had."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import MODELS, OPTIMIZERS, STAGES
from offloads import same

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError, LossScaleError, TraceError, TransformError
from fzero.ir.ops import transfer_bytes
from fzero.runtime import metrics_watch
from fzero.transforms import precision

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# how a scale moves


class Reference:
    """DeepSpeed's DynamicLossScaler (hysteresis, minimum) with torch.amp's count of steps before growth, in plain
    Python."""

    def __init__(self, settings: fz.LossScale):
        self.settings, self.scale, self.good, self.patience, self.skipped, self.stuck = (
            settings,
            settings.initial,
            0,
            settings.hysteresis,
            0,
            False,
        )

    def update(self, overflow: bool) -> None:
        s, self.stuck = self.settings, False
        if overflow:
            self.skipped += 1
            self.good = 0
            if self.patience > 1:
                self.patience -= 1
            else:
                self.stuck = self.scale <= s.minimum
                self.scale = max(self.scale * s.backoff_factor, s.minimum)
            return
        self.good += 1
        if s.consecutive_hysteresis:
            self.patience = s.hysteresis
        if self.good == s.growth_interval:
            self.scale, self.good, self.patience = self.scale * s.growth_factor, 0, s.hysteresis

    @property
    def state(self) -> tuple[float, int, int, int]:
        return self.scale, self.good, self.patience, self.skipped


SETTINGS = [
    fz.LossScale(growth_interval=3),
    fz.LossScale(initial=8.0, growth_interval=2, hysteresis=3, minimum=0.5),
    fz.LossScale(
        initial=64.0,
        growth_interval=4,
        growth_factor=3.0,
        backoff_factor=0.25,
        hysteresis=2,
        consecutive_hysteresis=True,
        minimum=2.0,
    ),
    fz.LossScale(growth_interval=1, hysteresis=2),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_the_scale_moves_as_the_reference_says(settings):
    state, reference = settings.init(), Reference(settings)
    rng = random.Random(0)
    for step in range(300):
        # calm stretches and rough ones: it meets its minimum, and grows again
        overflow = rng.random() < (0.6 if step // 30 % 2 else 0.1)
        state, stuck = settings.update(state, torch.tensor(overflow))
        reference.update(overflow)
        if settings.growth_factor**120 < 1e30:
            assert tuple(x.item() for x in state) == reference.state and stuck.item() == reference.stuck
        assert state.scale.isfinite()
    assert reference.skipped > 50


def test_the_scale_moves_as_torch_amp_does():
    # up to where float32 ends: a scale that would be infinite stays
    settings = fz.LossScale(initial=2.0**120, growth_interval=2, minimum=1e-30)
    state, scaler = settings.init(), torch.amp.GradScaler("cpu", init_scale=settings.initial, growth_interval=2)
    leaf, rng, found = torch.zeros(1, requires_grad=True), random.Random(1), []
    optimizer = torch.optim.SGD([leaf], lr=0.0)
    for _ in range(60):
        overflow = rng.random() < 0.08
        assert scaler.scale(leaf).numel() == 1  # makes the scaler's tensors
        leaf.grad = torch.full((1,), torch.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        state, _ = settings.update(state, torch.tensor(overflow))
        found.append(state.scale.item())
        assert found[-1] == scaler.get_scale()
    assert max(found) == 2.0**127 and found.count(2.0**127) > 2  # it did meet the end


# a step under overflows


@fz.block
def scale_and_shift(p, x):
    return torch.tanh(x * p["w"] + p["b"])


def pointwise_loss(params, batch):
    x = batch["x"]
    for p in params:
        x = scale_and_shift(p, x)
    return (x.float() - batch["y"]).square().mean()


WIDTH, ROWS, HUGE = 5, 8, 1e6  # float16 ends at 65504
# step -> the row of the global batch that overflows: on one rank, in one micro-batch
SCRIPT = {2: 7, 5: 0, 6: 3, 7: 2, 11: 5}


def pointwise_params():
    generator = torch.Generator().manual_seed(3)
    return [{"w": torch.randn(WIDTH, generator=generator), "b": torch.zeros(WIDTH)} for _ in range(3)]


def scripted_batches(num: int = 14) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    out = []
    for i in range(num):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        if i in SCRIPT:
            x[SCRIPT[i], 1] = HUGE
        out.append({"x": x, "y": torch.zeros(ROWS, WIDTH)})
    return out


SCALE = fz.LossScale(initial=1024.0, growth_interval=3, hysteresis=2)


def make_step(*transforms: Any, lr: Any = None, **keywords: Any) -> Any:
    lr = lr or optim.warmup_cosine(1e-1, 4, 40, init=1e-2)
    step = fz.train_step(pointwise_loss, optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(lr)))
    return fz.compose(*transforms)(fz.mixed_precision(step, "fp16", **{"loss_scale": SCALE, **keywords}))


def run_script(cases: dict[str, tuple[Any, ...]], backend: str = "eager", **keywords: Any) -> dict[str, Any]:
    """On every rank: each case trained over the script; the metrics of each step, and the gathered state after it."""
    mesh, out = fz.make_mesh(data=-1), {}
    for name, transforms in cases.items():
        train = fz.compile(make_step(*transforms, **keywords), mesh, backend=backend)
        state, metrics, states = train.init(pointwise_params()), [], []
        states.append(train.gather(state))
        for batch in scripted_batches():
            state, found = train(state, models.part(batch, mesh))
            metrics.append({k: v.item() for k, v in found.items() if isinstance(v, torch.Tensor)})
            states.append(train.gather(state))
        out[name] = metrics, states
    return out


def follows_the_script(metrics: list[dict[str, Any]], states: list[Any]) -> None:
    """The scale is the reference's; a skipped step leaves all else as it was, bit for bit, and the next one goes on
    from there."""
    reference = Reference(SCALE)
    for i, (found, before, after) in enumerate(itertools.zip_longest(metrics, states[:-1], states[1:])):
        assert found["loss_scale"] == reference.scale and found["skipped"] == (i in SCRIPT)
        reference.update(i in SCRIPT)
        assert tuple(x.item() for x in after.extras["loss_scale"]) == reference.state
        assert found["loss_scale_at_minimum"] == reference.stuck
        kept = [same(getattr(before, part), getattr(after, part)) for part in ("step", "params", "opt_state", "key")]
        assert kept == ([True] * 4 if i in SCRIPT else [False] * 3 + [True]), i
        assert all(x.isfinite().all() for x in fz.tree.leaves(after))
    assert states[-1].step == len(metrics) - len(SCRIPT) and states[-1].extras["loss_scale"].skipped == len(SCRIPT)


@functools.cache
def by_hand() -> tuple[list[dict[str, Any]], list[Any]]:
    """The same training with torch.autograd and the reference scale: float16 copies of float32 masters, gradients
    unscaled in float32."""
    step = make_step()
    params, reference = pointwise_params(), Reference(SCALE)
    opt_state, out = step.optimizer.init(params), []
    for batch in scripted_batches():
        half = fz.tree.map(lambda x: x.half().requires_grad_(), params)
        loss = pointwise_loss(half, fz.tree.map(torch.Tensor.half, batch))
        grads = torch.autograd.grad(loss * reference.scale, fz.tree.leaves(half))
        grads = fz.tree.unflatten(fz.tree.structure(params), [g.float() * (1 / reference.scale) for g in grads])
        overflow = not all(g.isfinite().all() for g in fz.tree.leaves(grads))
        if not overflow:
            updates, opt_state = step.optimizer.update(grads, opt_state, params)
            params = optim.apply_updates(params, updates)
        reference.update(overflow)
        out.append((loss.item(), params, opt_state))
    return out


def test_one_rank_is_what_one_writes_by_hand():
    metrics, states = run_script({"plain": ()})["plain"]
    follows_the_script(metrics, states)
    for (loss, params, opt_state), found, state in zip(by_hand(), metrics, states[1:], strict=True):
        assert (
            (found["loss"] == loss or loss != loss) and same(state.params, params) and same(state.opt_state, opt_state)
        )


CASES = {
    "data_parallel": (STAGES[0](),),
    "zero_1": (STAGES[1](), fz.accumulate(2)),
    "zero_3, accumulate": (STAGES[3](), fz.accumulate(4)),
    "layerwise": (STAGES[2](), fz.accumulate(2, schedule="layerwise"), fz.remat("none")),
    "offload": (STAGES[3](), fz.offload("cpu", "opt_state")),
    "offload all": (STAGES[1](), fz.accumulate(2), fz.offload("cpu", ("params", "opt_state"), update_on="device")),
}


@pytest.mark.full
def test_an_overflow_anywhere_skips_the_step_everywhere(run_ranks):
    """Row 7 is of the last rank and the last micro-batch, row 0 of the first: the others' gradients are finite."""
    ranks = run_ranks(2, run_script, CASES)
    for name in CASES:
        for results in ranks:
            metrics, states = results[name]
            follows_the_script(metrics, states)
            assert same(states, ranks[0][name][1])
            for (_, params, _), state in zip(by_hand(), states[1:], strict=True):
                pairs = zip(fz.tree.leaves(state.params), fz.tree.leaves(params), strict=True)
                assert all(torch.allclose(a, b, atol=2e-3) for a, b in pairs), name


def test_compiled_it_skips_the_same_steps(compiled_here):
    metrics, states = run_script({"zero_3": (STAGES[3](), fz.accumulate(2))}, backend="inductor")["zero_3"]
    follows_the_script(metrics, states)


def test_without_masters_a_skipped_step_rounds_nothing():
    metrics, states = run_script({"zero_3": (STAGES[3](), fz.accumulate(2))}, params="bf16")["zero_3"]
    assert {x.dtype for x in fz.tree.leaves(states[-1].params)} == {torch.bfloat16}
    follows_the_script(metrics, states)


def train_gpt(names: list[str]) -> list[list[float]]:
    mesh, out = fz.make_mesh(data=-1), []
    for name in names:
        step = fz.train_step(MODELS["gpt"].loss, OPTIMIZERS["clipped"]())
        step = fz.mixed_precision(step, name, where=lambda path, leaf: leaf.dim() > 1) if name != "fp32" else step
        train = fz.compile(fz.accumulate(fz.shard_params(step), 2), mesh, backend="eager")
        state, losses = train.init(MODELS["gpt"].init, fz.random.key(1)), []
        for batch in models.batches(15):
            state, metrics = train(state, models.part(batch, mesh))
            losses.append(metrics["loss"].item())
        assert not state.extras or state.extras["loss_scale"].skipped == 0
        out.append(losses)
    return out


@pytest.mark.full
def test_fp16_follows_fp32(run_ranks):
    """A gpt whose norms and biases stay in float32: layer norms take matrices in float16 and vectors in float32, as on
    a GPU."""
    first, second = run_ranks(2, train_gpt, ["fp32", "fp16"])
    assert first == second
    want, got = map(torch.tensor, first)
    assert ((got - want) / want).abs().max() < 1e-2 and not torch.equal(got, want)


# which leaves, which dtypes, which bytes


def lowered(*transforms: Any, model: str = "gpt", ranks: int = 2) -> Any:
    step = fz.compose(*transforms)(fz.train_step(MODELS[model].loss, OPTIMIZERS["clipped"]()))
    return fz.lower(
        step, fz.AbstractMesh(data=ranks), MODELS[model].init, models.meta_part(models.batches(1)[0], ranks)
    ).program


def sent(program: Any, kind: str, by: str) -> int:
    values = program.values()
    return sum(
        times * transfer_bytes(op, values, program.mesh)
        for op, times in program.walk()
        if op.op == kind and op.by == by
    )


def matrices(path: str, leaf: torch.Tensor) -> bool:
    return leaf.dim() > 1


@pytest.mark.full(keep=["bf16-None-fp32", "fp32-None-fp32", "fp16-matrices-fp16"])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize(("reduce", "where"), [("fp32", None), ("bf16", None), ("fp16", matrices)])
def test_bytes_are_dtype_times_elements(compute, reduce, where):
    """Every leaf's shard is cast once and travels in its compute dtype, twice but for the last block's; its gradient in
    its reduce dtype, once."""
    ranks = 2
    program = lowered(fz.shard_params(), fz.mixed_precision(compute, reduce=reduce, where=where), ranks=ranks)
    leaves = {path: leaf for path, leaf in program.leaves.items() if leaf.role == "params"}

    def total(dtype: str, times: Any) -> int:
        sizes = {
            p: BYTES[dtype] if where is None or where(p, torch.empty(leaf.shape, device="meta")) else 4
            for p, leaf in leaves.items()
        }
        padded = {p: -(-leaf.numel // ranks) * ranks for p, leaf in leaves.items()}
        return sum(times(p) * padded[p] * sizes[p] for p in leaves) * (ranks - 1) // ranks

    # the head is the last block, and the vjp of the embedding does not read it
    once = ("params['embed']", "params['head']")
    assert sent(program, "all_gather_start", "shard_params") == total(compute, lambda p: 1 if p.startswith(once) else 2)
    assert sent(program, "reduce_scatter_start", "shard_params") == total(reduce, lambda p: 1)
    values = program.values()
    casts = [op for op, _ in program.walk() if op.op == "cast" and op.args[0] in leaves]
    assert all(
        values[op.out[0].name].placement.is_flat_shard and values[op.out[0].name].dtype == DTYPES[compute]
        for op in casts
    )
    if compute != "fp32":
        assert {op.args[0] for op in casts} == {p for p, leaf in leaves.items() if where is None or len(leaf.shape) > 1}


@fz.block
def norm(p, x):
    assert x.dtype == p["scale"].dtype, "cast where the block begins"
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * p["scale"]


@fz.block
def linear(p, x, index, offset=1):
    assert x.dtype == p["w"].dtype and index.dtype == torch.int64 and offset == 1
    return x[index] @ p["w"]


@fz.block
def normed(p, x):
    assert x.dtype in (p["w"].dtype, torch.float32)
    # leaves of two dtypes: arguments stay as they are, but those of a block inside
    return x + norm(p["norm"], x).to(p["w"].dtype) @ p["w"]


def normed_loss(params, batch):
    x = linear(params["linear"], norm(params["norm"], batch["x"]), batch["index"])
    out = linear(params["head"], normed(params["normed"], x), batch["index"])
    aux = {
        "half": out.mean().half(),
        "bits": torch.full((), 8 * out.element_size()),
        "count": fz.weighted(out.sum(), out.numel()),
    }
    return out.square().mean(), {**aux, "table_bits": torch.full((), 8 * params["table"].element_size())}


def normed_params():
    generator = torch.Generator().manual_seed(5)
    square = lambda: torch.randn(4, 4, generator=generator) * 0.5  # noqa: E731
    linears = {
        "linear": {"w": square()},
        "head": {"w": square()},
        "normed": {"w": square(), "norm": {"scale": torch.ones(4)}},
    }
    return {**linears, "norm": {"scale": torch.ones(4)}, "table": torch.arange(3)}


def not_norm_nor_head(path: str, leaf: torch.Tensor) -> bool:
    return "norm']['scale" not in path and "head" not in path


NORMED_BATCH = {
    "x": torch.randn(6, 4, generator=torch.Generator().manual_seed(6)),
    "index": torch.tensor([5, 0, 1, 2, 4, 4]),
}


def test_where_keeps_leaves_and_their_blocks_in_full_precision():
    step = fz.train_step(normed_loss, optim.sgd(0.1), has_aux=True)
    train = fz.compile(
        fz.mixed_precision(step, "fp16", params="bf16", where=not_norm_nor_head), fz.make_mesh(data=1), backend="eager"
    )
    state = train.init(normed_params())
    dtypes = {
        path: x.dtype
        for path, x in zip(fz.tree.paths(state.params, "params"), fz.tree.leaves(state.params), strict=True)
    }
    kept = [path for path, dtype in dtypes.items() if dtype == torch.float32]
    # as they were given, not as `params` says
    assert kept == ["params['head']['w']", "params['norm']['scale']", "params['normed']['norm']['scale']"]
    assert dtypes["params['table']"] == torch.int64 and dtypes["params['linear']['w']"] == torch.bfloat16
    state, metrics = train(state, NORMED_BATCH)
    # the head's block is in float32, an integer as it was
    assert metrics["aux"]["bits"] == 32 and metrics["aux"]["table_bits"] == 64
    casts = {
        op.args[0]: op.out[0].dtype for op in train.program.instructions if op.op == "cast" and op.args[0] in dtypes
    }
    assert casts == {f"params['{name}']['w']": torch.float16 for name in ("linear", "normed")}
    nothing = fz.compile(
        fz.mixed_precision(step, "bf16", where=lambda path, leaf: False), fz.make_mesh(data=1), backend="eager"
    )
    (plain, want), (alike, got) = (
        step(step.init(normed_params()), NORMED_BATCH),
        nothing(nothing.init(normed_params()), {**NORMED_BATCH}),
    )
    assert not torch.equal(want["loss"], got["loss"])  # the batch is rounded still
    assert same(plain.params["table"], alike.params["table"])


@pytest.mark.parametrize("outputs", ["fp32", "bf16", "fp16", None])
def test_outputs_are_what_the_caller_gets(outputs):
    mesh, transform = fz.make_mesh(data=1), fz.mixed_precision("bf16", outputs=outputs)
    train = fz.compile(transform(fz.train_step(normed_loss, optim.sgd(0.1), has_aux=True)), mesh, backend="eager")
    state, metrics = train(train.init(normed_params()), NORMED_BATCH)
    asked = DTYPES[outputs] if outputs else torch.float32  # a mean is made in float32
    assert {metrics["loss"].dtype, metrics["aux"]["half"].dtype, metrics["aux"]["count"].dtype} == {asked}
    assert metrics["grad_norm"].dtype == torch.float32  # the step's own
    evaluate = fz.compile(
        transform(fz.eval_step(lambda p, x: (x @ p["linear"]["w"], x.argmax(), fz.weighted(x.sum(), 4)))),
        mesh,
        backend="eager",
    )
    out, index, mean = evaluate(state.params, NORMED_BATCH["x"])
    assert (out.dtype, index.dtype, mean.dtype) == (DTYPES[outputs] if outputs else torch.bfloat16, torch.int64, asked)


# what cannot be


def raises(kind: type[Exception], act: Any, *parts: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert "\nFix: " in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_dtypes_by_the_names_of_pytorch():
    short = fz.mixed_precision("fp16", params="bf16", reduce="fp32", outputs=None)
    assert fz.mixed_precision("float16", params="bfloat16", reduce="float32", outputs=None) == short
    assert fz.mixed_precision(torch.half, params="torch.bfloat16", reduce="float", outputs=None) == short
    assert fz.mixed_precision("auto", start="bfloat16") == fz.mixed_precision("auto", start="bf16")


def test_arguments_that_cannot_work():
    for scale in (0, -1.0, float("nan"), float("inf"), True, "static"):
        raises(
            FzeroValueError, lambda scale=scale: fz.mixed_precision("fp16", loss_scale=scale), f"loss_scale={scale!r}"
        )
    raises(
        FzeroValueError,
        lambda: fz.mixed_precision("bf16", loss_scale=128.0, loss_scale_at_minimum="stop"),
        "loss_scale_at_minimum='stop'",
    )
    raises(
        FzeroValueError,
        lambda: fz.mixed_precision("bf16", loss_scale="dynamic"),
        "loss_scale='dynamic'",
        "neither compute='bf16' nor reduce='fp32' needs one",
    )
    raises(
        FzeroValueError,
        lambda: fz.mixed_precision("fp32", loss_scale_at_minimum="raise"),
        "loss_scale_at_minimum='raise'",
    )
    raises(FzeroValueError, lambda: fz.mixed_precision("fp16", outputs="fp64"), "outputs='fp64'", "'fp16'")
    raises(
        FzeroValueError, lambda: fz.mixed_precision(torch.int8), "compute='torch.int8'", "for 8 bits there is fz.fp8"
    )
    raises(FzeroTypeError, lambda: fz.mixed_precision("fp16", where="norms"), "where='norms'")
    bad = {
        "initial": 0,
        "growth_interval": 0,
        "growth_factor": 0.5,
        "backoff_factor": 2.0,
        "hysteresis": 1.5,
        "consecutive_hysteresis": 1,
        "minimum": -1,
    }
    raises(FzeroValueError, lambda: fz.LossScale(**bad), *(f"{name}={value!r}" for name, value in bad.items()))
    raises(FzeroValueError, lambda: fz.LossScale(initial=1.0, minimum=2.0), "initial=1.0", "minimum=2.0")
    assert "loss_scale='dynamic')" in str(fz.mixed_precision("fp16")) and "loss_scale='dynamic')" in str(
        fz.mixed_precision("bf16", reduce="fp16")
    )
    assert "loss_scale=1024)" in str(fz.mixed_precision("fp16", loss_scale=1024)) and "loss_scale" not in str(
        fz.mixed_precision("bf16")
    )
    raises(
        TransformError,
        lambda: fz.mixed_precision(fz.mixed_precision(make_step(), "bf16"), "fp32"),
        "loss_scale=LossScale(",
    )


def test_two_precisions_for_a_tied_leaf():
    tied = dict.fromkeys("ab", torch.ones(3, 3))
    step = fz.train_step(lambda p, x: (x @ p["a"] @ p["b"]).mean(), optim.sgd(0.1))
    step = fz.data_parallel(fz.mixed_precision(step, "bf16", where=lambda path, leaf: "a" in path[6:]))
    for act in (
        lambda: fz.compile(step, fz.make_mesh(data=1)).init(tied),
        lambda: fz.lower(step, fz.AbstractMesh(data=2), tied, torch.ones(2, 3)),
    ):
        raises(
            TransformError, act, "params['a'] and params['b'] are one tensor", "matches params['a'], not params['b']"
        )


def test_a_dtype_the_device_lacks(monkeypatch):
    monkeypatch.setattr(precision, "computes_in", lambda device, dtype: dtype != torch.bfloat16)
    step = fz.mixed_precision(fz.eval_step(lambda params, x: x), "fp32", reduce="bf16")
    raises(
        FzeroValueError, lambda: fz.compile(step, fz.make_mesh(data=1)), "cpu", "reduce='bf16'", "it has 'fp32', 'fp16'"
    )


def diverge(at_minimum: str, steps: int, **scale: Any) -> tuple[Any, list[dict[str, Any]]]:
    step = make_step(loss_scale=fz.LossScale(**scale), loss_scale_at_minimum=at_minimum)
    train, found = fz.compile(step, fz.make_mesh(data=1), backend="eager"), []
    state = train.init(pointwise_params())
    for _ in range(steps):
        state, metrics = train(state, scripted_batches()[2])
        found.append(metrics)
    return state, found


def test_at_the_minimum_it_warns_once_and_goes_on():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diverge("warn", 2, initial=4.0)  # 4, 2: lowered to 1
    with pytest.warns(RuntimeWarning, match="at the minimum loss scale") as caught:
        state, found = diverge("warn", 5, initial=4.0)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert [m["loss_scale_at_minimum"].item() for m in found] == [False, False, True, True, True] and state.extras[
        "loss_scale"
    ].scale == 1.0
    assert state.step == 0 and same(state.params, pointwise_params())


def test_at_the_minimum_it_can_raise():
    diverge("raise", 2, initial=4.0)
    raises(LossScaleError, lambda: diverge("raise", 3, initial=4.0), "loss scale 1:")
    raises(
        LossScaleError,
        lambda: diverge("raise", 1, initial=128.0, growth_factor=1.0, backoff_factor=1.0, minimum=128.0),
        "loss scale 128:",
    )


def not_finite() -> str:
    mesh = fz.make_mesh(data=-1)
    train = fz.compile(fz.shard_params(make_step()), mesh, backend="eager")
    params = pointwise_params()
    params[1]["w"][-1] = torch.nan  # in the last rank's shard alone
    params[2]["b"][0] = torch.inf
    state = train.init(params)
    try:
        train(state, models.part(scripted_batches()[0], mesh))
    except FzeroValueError as error:
        return str(error)
    return ""


def test_parameters_that_are_not_finite_at_the_start(run_ranks):
    for text in run_ranks(2, not_finite):
        assert (
            "not finite" in text and "params[1]['w']" in text and "params[2]['b']" in text and "params[0]" not in text
        )
    masked = fz.train_step(
        lambda p, x: (x * p["w"] + p["mask"]).clamp(min=0).mean(),
        optim.sgd(0.1),
        trainable=lambda path, leaf: "mask" not in path,
    )
    train = fz.compile(masked, fz.make_mesh(data=1), backend="eager")
    _, metrics = train(train.init({"w": torch.ones(2), "mask": torch.tensor([0.0, -torch.inf])}), torch.ones(3, 2))
    assert metrics["finite"]  # what is not trained may be infinite


class Late:
    """The event of a device that is a step behind the host."""

    def __init__(self, waited: list[Any]):
        self.done, self.waited = False, waited

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited.append(self)


def test_a_device_behind_the_host_is_not_waited_for(monkeypatch):
    """A warning comes when the flag has come; an error a step late, in the same step on every rank, however far each
    device is."""
    waited, events = [], []

    def fetched(flag: torch.Tensor) -> tuple[torch.Tensor, Any]:
        events.append(Late(waited))
        return flag, events[-1]

    monkeypatch.setattr(metrics_watch, "fetched", fetched)
    flags, mesh = [torch.tensor(x) for x in (False, True, False, False)], fz.make_mesh(data=1)
    warns = metrics_watch.AtMinimum(mesh, 1.0, raises=False)
    for flag in flags[:3]:
        warns(flag)
    for event in events[:2]:
        event.done = True
    with pytest.warns(RuntimeWarning, match="loss scale 1:"):
        warns(flags[3])
    assert not waited
    events.clear()
    stops = metrics_watch.AtMinimum(mesh, 1.0, raises=True)
    stops(flags[0])
    assert not waited  # the newest is never waited for
    stops(flags[1])
    assert waited == events[:1]
    raises(LossScaleError, lambda: stops(flags[2]), "loss scale 1:")
    assert waited == events[:2]


# the state


def saved_and_restored(directory: Any) -> Any:
    mesh = fz.make_mesh(data=-1)
    train = fz.compile(make_step(fz.shard_params(), fz.offload("cpu", "opt_state")), mesh, backend="eager")
    batches, state = scripted_batches(), train.init(pointwise_params())
    for batch in batches[:7]:
        state, _ = train(state, models.part(batch, mesh))
    fz.checkpoint.save(directory, state)
    again = fz.compile(make_step(), fz.make_mesh(data=1), backend="eager") if mesh.size == 1 else train
    other = again.restore(directory)
    equal = same(train.gather(state), again.gather(other))
    state = fz.move(fz.move(state, "cpu"), "home")
    for batch in batches[7:]:
        state, _ = train(state, models.part(batch, mesh))
        other, _ = again(other, models.part(batch, mesh))
    return equal, train.gather(state).extras, again.gather(other).extras, same(train.gather(state), again.gather(other))


@pytest.mark.full(keep=["1"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_scale_is_part_of_a_checkpoint(run_or_call, num_ranks, tmp_path):
    """One rank restores without offload what was saved with it."""
    for equal, one, other, still in run_or_call(num_ranks, saved_and_restored, tmp_path / "run"):
        assert equal and still and same(one, other) and one["loss_scale"].skipped == len(SCRIPT)


def test_checkpoints_of_other_precisions(tmp_path):
    """A run in float16 goes on from one in bfloat16 with a new scale, and the other way round without one."""
    mesh, batch = fz.make_mesh(data=1), scripted_batches()[0]
    plain = fz.train_step(pointwise_loss, optim.adamw(1e-2))
    half, brain = (fz.compile(fz.mixed_precision(plain, dtype), mesh, backend="eager") for dtype in ("fp16", "bf16"))
    state, _ = brain(brain.init(pointwise_params()), batch)
    fz.checkpoint.save(tmp_path / "brain", state)
    begun = half.restore(tmp_path / "brain")
    assert tuple(x.item() for x in begun.extras["loss_scale"]) == (2.0**16, 0, 1, 0) and same(
        begun.params, state.params
    )
    begun, _ = half(begun, batch)
    fz.checkpoint.save(tmp_path / "half", begun)
    back = brain.restore(tmp_path / "half")
    assert back.extras == {} and same(back.opt_state, begun.opt_state) and back.step == 2
    raises(FzeroValueError, lambda: half(back, batch), "extras['loss_scale'].scale", "not in the state")


BITS = torch.randint(-(2**15), 2**15, (64, 128), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
"""Codes of 16 bits, among which are the patterns of NaNs."""
NO_CODES: dict[str, Any] = {"where": lambda path, leaf: path != "params['codes']"}
CODES = {"codes": BITS.view(torch.bfloat16), "w": torch.randn(128, 64, generator=torch.Generator().manual_seed(1))}
AS_NUMBERS: dict[str, Callable[..., Any]] = {
    "bf16": fz.mixed_precision,
    "fp16": lambda **more: fz.mixed_precision("fp16", **more),
    "fp32": lambda **more: fz.mixed_precision("fp32", **more),
    "auto": lambda **more: fz.mixed_precision("auto", **more),
    "in 8 bits": lambda **more: fz.compose(fz.mixed_precision(**more), fz.fp8()),
    "compressed": fz.compress,
}


def _by_codes(params: Any, x: torch.Tensor) -> torch.Tensor:
    codes = params["codes"].view(torch.int16) / 2**15
    return (x @ params["w"] @ codes.to(x.dtype)).float().square().mean()


def _by_parts_in_a_block(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Both as numbers and as codes, behind views and copies."""

    @fz.block
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        codes = torch.cat([p["codes"][32:], p["codes"][:32].clone()]).view(torch.int16) / 2**15
        return x @ p["w"] @ codes.to(x.dtype) + 0 * p["codes"].nan_to_num().mean()

    return layer(params, x).float().square().mean()


@pytest.mark.full(keep=["fp32-_by_codes", "fp16-_by_codes", "in 8 bits-_by_parts_in_a_block"])
@pytest.mark.parametrize("loss", [_by_codes, _by_parts_in_a_block])
@pytest.mark.parametrize("name", AS_NUMBERS)
def test_codes_in_a_floating_dtype_are_not_converted_as_numbers(name: str, loss: Any) -> None:
    step = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: "'w'" in path)
    mesh, x = fz.AbstractMesh(data=2), torch.randn(16, 128)
    with pytest.raises(
        TraceError, match=r"params\['codes'\]: changed by .* read in (?s:.)*view\(torch.int16\)"
    ) as error:
        fz.lower(fz.compose(AS_NUMBERS[name](), fz.shard_params())(step), mesh, CODES, x)
    assert "where=lambda path, leaf: path not in [\"params['codes']\"]" in str(error.value)
    lowered = fz.lower(fz.compose(AS_NUMBERS[name](**NO_CODES), fz.shard_params())(step), mesh, CODES, x)
    leaf = next(leaf for leaf in lowered.params.leaves if "codes" in leaf.path)
    assert leaf.dtype == torch.bfloat16


def test_codes_that_are_left_out_keep_their_bits() -> None:
    step = fz.train_step(_by_codes, optim.sgd(0.1), trainable=lambda path, leaf: "'w'" in path)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    want = (x @ CODES["w"] @ (BITS / 2**15)).square().mean()
    for transform in (fz.compress(grads=None, **NO_CODES), fz.mixed_precision(**NO_CODES)):
        sharded = fz.compose(transform, fz.shard_params())(step)
        state, metrics = fz.testing.simulate(sharded, fz.AbstractMesh(data=2), CODES, x)
        assert torch.equal(state.params["codes"].view(torch.int16), BITS)
        torch.testing.assert_close(metrics["loss"], want, rtol=1e-2, atol=0.0)


def test_the_bits_of_a_batch_are_not_converted_either() -> None:
    def loss(params: Any, codes: torch.Tensor) -> torch.Tensor:
        return (codes.view(torch.int16).to(params["w"].dtype) @ params["w"]).mean()

    step = fz.mixed_precision("fp16")(fz.train_step(loss, optim.sgd(0.1)))
    with pytest.raises(TraceError, match=r"batch: changed by mixed_precision(?s:.)*in the integer dtype"):
        fz.lower(step, fz.AbstractMesh(data=1), {"w": CODES["w"]}, CODES["codes"])


def test_complex_numbers_in_pairs_of_floats_are_numbers() -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (params["w"].view(torch.complex64).abs().mean() * params["scale"] * x).mean()

    step = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: "scale" in path)
    params = {"w": CODES["w"], "scale": torch.ones(())}
    step = fz.compose(fz.compress(), fz.shard_params())(step)
    assert fz.lower(step, fz.AbstractMesh(data=2), params, torch.ones(4)).program.instructions
