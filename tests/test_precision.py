"""mixed_precision: float16 with its loss scale, dtypes by leaf and block, what is cast and what travels, and what cannot be had."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from typing import Any

import models
import pytest
import torch
from models import MODELS, OPTIMIZERS, STAGES
from offloads import same

import fzero as fz
from fzero import optim
from fzero.errors import FzeroTypeError, FzeroValueError, LossScaleError, TransformError
from fzero.program.ir import transfer_bytes
from fzero.transforms import precision

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# how a scale moves


class Reference:
    """DeepSpeed's DynamicLossScaler (hysteresis, minimum) with torch.amp's count of steps before growth, in plain Python."""

    def __init__(self, settings: fz.LossScale):
        self.settings, self.scale, self.good, self.patience, self.skipped, self.stuck = settings, settings.initial, 0, settings.hysteresis, 0, False

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
    fz.LossScale(initial=64.0, growth_interval=4, growth_factor=3.0, backoff_factor=0.25, hysteresis=2, consecutive_hysteresis=True, minimum=2.0),
    fz.LossScale(growth_interval=1, hysteresis=2),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_the_scale_moves_as_the_reference_says(settings):
    state, reference = settings.init(), Reference(settings)
    rng = random.Random(0)
    for step in range(300):
        overflow = rng.random() < (0.6 if step // 30 % 2 else 0.1)  # calm stretches and rough ones: it meets its minimum, and grows again
        state, stuck = settings.update(state, torch.tensor(overflow))
        reference.update(overflow)
        if settings.growth_factor ** 120 < 1e30:
            assert tuple(x.item() for x in state) == reference.state and stuck.item() == reference.stuck
        assert state.scale.isfinite()
    assert reference.skipped > 50


def test_the_scale_moves_as_torch_amp_does():
    settings = fz.LossScale(initial=2.0**120, growth_interval=2, minimum=1e-30)  # up to where float32 ends: a scale that would be infinite stays
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
SCRIPT = {2: 7, 5: 0, 6: 3, 7: 2, 11: 5}  # step -> the row of the global batch that overflows: on one rank, in one micro-batch


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


def run_script(cases: dict[str, tuple[Any, ...]], backend: str = "eager") -> dict[str, Any]:
    """On every rank: each case trained over the script; the metrics of each step, and the gathered state after it."""
    mesh, out = fz.make_mesh(data=-1), {}
    for name, transforms in cases.items():
        train = fz.compile(make_step(*transforms), mesh, backend=backend)
        state, metrics, states = train.init(pointwise_params()), [], []
        states.append(train.gather(state))
        for batch in scripted_batches():
            state, found = train(state, models.part(batch, mesh))
            metrics.append({k: v.item() for k, v in found.items() if isinstance(v, torch.Tensor)})
            states.append(train.gather(state))
        out[name] = metrics, states
    return out


def follows_the_script(metrics: list[dict[str, Any]], states: list[Any]) -> None:
    """The scale is the reference's; a skipped step leaves all else as it was, bit for bit, and the next one goes on from there."""
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
    """The same training with torch.autograd and the reference scale: float16 copies of float32 masters, gradients unscaled in float32."""
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
        assert (found["loss"] == loss or loss != loss) and same(state.params, params) and same(state.opt_state, opt_state)


CASES = {
    "data_parallel": (STAGES[0](),),
    "zero_1": (STAGES[1](), fz.accumulate(2)),
    "zero_3": (STAGES[3](),),
    "zero_3, accumulate": (STAGES[3](), fz.accumulate(4)),
    "vertical": (STAGES[2](), fz.accumulate(2, vertical=True), fz.remat("none")),
    "offload": (STAGES[3](), fz.offload("cpu", "opt_state")),
    "offload all": (STAGES[1](), fz.accumulate(2), fz.offload("cpu", ("params", "opt_state"), update_on="device")),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_overflow_anywhere_skips_the_step_everywhere(run_ranks, num_ranks):
    """Row 7 is of the last rank and the last micro-batch, row 0 of the first: the others' gradients are finite."""
    ranks = run_ranks(num_ranks, run_script, CASES)
    for name in CASES:
        for results in ranks:
            metrics, states = results[name]
            follows_the_script(metrics, states)
            assert same(states, ranks[0][name][1])
            for (_, params, _), state in zip(by_hand(), states[1:], strict=True):
                pairs = zip(fz.tree.leaves(state.params), fz.tree.leaves(params), strict=True)
                assert all(torch.allclose(a, b, atol=2e-3) for a, b in pairs), name


def test_compiled_it_skips_the_same_steps():
    metrics, states = run_script({"zero_3": (STAGES[3](), fz.accumulate(2))}, backend="inductor")["zero_3"]
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
