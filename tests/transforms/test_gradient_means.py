"""Gradients are those of the mean of the whole batch, whatever it is cut in: scale for scale what fp16 by hand and
torch.autocast have, and the same numbers in a backward that is not linear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero.errors import TraceError
from fzero.testing.comparison_setting import setting_of
from fzero.testing.differing_op import first_differing

VOCAB, WIDTH, STEPS = 16, 8, 10
MOVING = fz.LossScale(initial=2.0**26, growth_interval=2)  # too large at first, and again whenever it has grown
LEARNING_RATE = 2.0


def given(rows: int, length: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Parameters, and a batch of texts of other lengths, of which the first half is short."""
    e, w = (fz.random.normal(fz.random.key(n), (VOCAB, WIDTH)) * 0.5 for n in (1, 2))
    x = fz.random.bits(fz.random.key(0), (rows, length)) % VOCAB
    lengths = 1 + torch.arange(rows) * (length - 1) // (rows - 1)
    real = torch.arange(length) < lengths[:, None]
    return {"e": e, "w": w.T.contiguous()}, {"x": x, "y": (x * 5 + 3) % VOCAB, "real": real}


def sums(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    e = params["e"]
    logits = torch.tanh(F.one_hot(batch["x"], VOCAB).to(e.dtype) @ e) @ params["w"]  # whose backwards add up in float32
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch["y"].flatten(), reduction="none")
    return (losses * batch["real"].flatten()).sum(), batch["real"].sum()


def weighted(params: Any, batch: Any) -> Any:
    return fz.weighted(*sums(params, batch))


def all_targets(params: Any, batch: Any) -> Any:
    batch = {**batch, "real": torch.ones_like(batch["real"])}
    return fz.weighted(sums(params, batch)[0], batch["real"].numel())


def mean(params: Any, batch: Any) -> torch.Tensor:
    total, _ = sums(params, {**batch, "real": torch.ones_like(batch["real"])})
    return total / batch["x"].numel()


Run = list[tuple[float, float, bool]]
"""Of each step the loss, the scale and whether it was skipped."""


def by_hand(params: Any, batch: Any, num_parts: int, scaling: fz.LossScale) -> Run:
    """fp16 as one writes it: the mean, by the count of the whole batch, times the scale, differentiated part by part
    in float16 and added up in float32."""
    params, scale, tracker, found = {n: x.clone() for n, x in params.items()}, scaling.initial, 0, Run()
    count = batch["real"].sum()
    for _ in range(STEPS):
        loss, grads = 0.0, {n: torch.zeros_like(x) for n, x in params.items()}
        for part in range(num_parts):
            half = {n: x.half().requires_grad_() for n, x in params.items()}
            total, _ = sums(half, {n: x.chunk(num_parts)[part] for n, x in batch.items()})
            value = total / count
            (value * scale).backward()
            loss += float(value.detach())
            for n, x in half.items():
                assert x.grad is not None
                grads[n] += x.grad.float()
        skipped = not all(bool(g.isfinite().all()) for g in grads.values())
        found.append((loss, scale, skipped))
        tracker = 0 if skipped else tracker + 1
        if skipped:
            scale /= 2
            continue
        params = {n: x - LEARNING_RATE * grads[n] / found[-1][1] for n, x in params.items()}
        if tracker == scaling.growth_interval:
            scale, tracker = scale * 2, 0
    return found


def by_fzero(loss_fn: Any, params: Any, batch: Any, *transforms: Any, mesh: Any = None) -> Run:
    mesh = fz.make_mesh() if mesh is None else mesh
    step = fz.compose(*transforms, fz.mixed_precision("fp16", loss_scale=MOVING))(
        fz.train_step(loss_fn, optim.sgd(LEARNING_RATE))
    )
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(params)
    found: Run = []
    for _ in range(STEPS):
        state, m = train(state, {n: x.chunk(mesh.size)[mesh.rank] for n, x in batch.items()})
        found.append((float(m["loss"]), float(m["loss_scale"]), bool(m["skipped"])))
    return found


def check(got: Run, want: Run) -> None:
    assert [x[1:] for x in got] == [x[1:] for x in want]
    assert [x[0] for x in got] == pytest.approx([x[0] for x in want], rel=2e-3)


@pytest.mark.full(keep=["4096"])
@pytest.mark.parametrize("shape", [(64, 64), (512, 256)], ids=["4096", "131072"])
def test_fp16_of_a_weighted_loss_is_that_of_its_mean(shape):
    params, batch = given(*shape)
    want = by_hand(params, batch, 1, MOVING)
    skipped = [x[2] for x in want]
    assert any(skipped) and not all(skipped) and want[-1][0] < 0.9 * want[0][0]
    check(by_fzero(weighted, params, batch), want)
    two = by_hand(params, batch, 2, MOVING)
    for transform in (fz.accumulate(2), fz.accumulate(2, schedule="layerwise")):
        check(by_fzero(weighted, params, batch, transform), two)
    every = {**batch, "real": torch.ones_like(batch["real"])}
    want = by_hand(params, every, 2, MOVING)
    for loss_fn in (all_targets, mean):
        check(by_fzero(loss_fn, params, batch, fz.accumulate(2)), want)


def on_ranks(shape: tuple[int, int]) -> list[Run]:
    params, batch = given(*shape)
    mesh = fz.make_mesh(data=2)
    each = [
        (weighted, fz.shard_params()),
        (weighted, fz.data_parallel(), fz.accumulate(2)),
        (weighted, fz.shard_params(), fz.accumulate(2, schedule="layerwise")),
        (all_targets, fz.shard_grads()),
        (mean, fz.shard_grads()),
    ]
    return [by_fzero(loss_fn, params, batch, *transforms, mesh=mesh) for loss_fn, *transforms in each]


@pytest.mark.full
def test_fp16_on_ranks(run_ranks):
    shape = (64, 64)
    params, batch = given(*shape)
    halves, quarters = (by_hand(params, batch, num, MOVING) for num in (2, 4))
    every = by_hand(params, {**batch, "real": torch.ones_like(batch["real"])}, 2, MOVING)
    for rank in run_ranks(2, on_ranks, shape):
        for got, want in zip(rank, [halves, quarters, quarters, every, every], strict=True):
            check(got, want)


def test_fp16_follows_autocast_and_its_grad_scaler():
    params, batch = given(64, 64)
    leaves = {n: x.clone().requires_grad_() for n, x in params.items()}
    opt = torch.optim.SGD(list(leaves.values()), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=MOVING.initial, growth_interval=MOVING.growth_interval)
    want: Run = []
    for _ in range(STEPS):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            # parameters outside of products are float32 in autocast
            total, count = sums({n: x.half() for n, x in leaves.items()}, batch)
            loss = total / count
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        want.append((float(loss.detach()), scale, scaler.get_scale() < scale))
    check(by_fzero(weighted, params, batch), want)


# --- a backward that is not linear ---


class Clipped(torch.autograd.Function):
    """As it is, with a gradient that is clipped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clamp(-2e-5, 2e-5)


class Clipping(torch.nn.Module):
    """A language model with its own loss, whose hidden states get clipped gradients."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.a = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.h, self.how = torch.nn.Linear(WIDTH, VOCAB), how
        if how == "module hook":
            self.a.register_full_backward_hook(lambda module, into, out: tuple(g.clamp(-2e-5, 2e-5) for g in into))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.a(self.e(x)))
        if self.how == "function":
            h = Clipped.apply(h)
        if self.how == "tensor hook" and h.requires_grad:
            h.register_hook(lambda g: g.clamp(-2e-5, 2e-5))
        logits = self.h(h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), "logits": logits}


def out_loss(out: Any, batch: Any) -> torch.Tensor:
    return out["loss"]


@pytest.mark.full
@pytest.mark.parametrize("how", ["tensor hook", "function", "module hook"])
def test_a_backward_that_clips_sees_the_whole_mean(how):
    _, batch = given(16, 32)
    ragged = {"x": batch["x"], "labels": batch["y"].where(batch["real"], -100)}
    full = {"x": batch["x"], "labels": batch["y"]}
    for loss_fn, data in ((None, ragged), (out_loss, full)):
        want = Clipping(how)
        opt = torch.optim.SGD(want.parameters(), lr=50.0)
        plain = Clipping("not at all")
        for module in (want, plain):
            module(**data)["loss"].backward()
        assert want.e.weight.grad is not None and plain.e.weight.grad is not None
        assert (want.e.weight.grad - plain.e.weight.grad).norm() > 0.2 * plain.e.weight.grad.norm()  # it clips
        opt.step()
        model = fz.functionalize(Clipping(how))
        step = model.train_step(optim.sgd(50.0), *([] if loss_fn is None else [loss_fn]))
        for transforms, ranks in (
            ([], 1),
            ([fz.accumulate(2)], 1),
            ([fz.accumulate(4, schedule="layerwise")], 1),
            ([fz.shard_params()], 2),
            ([fz.shard_params(), fz.accumulate(2)], 2),
        ):
            mesh = fz.AbstractMesh(data=ranks)
            state, _ = fz.testing.simulate(fz.compose(*transforms)(step), mesh, model.params, data)
            for name, x in want.named_parameters():
                module, leaf = name.split(".")
                torch.testing.assert_close(state.params[module][leaf], x.detach(), rtol=1e-4, atol=1e-6)


# --- counts of other origins ---


def drawn(params: Any, batch: Any, *, key: torch.Tensor) -> Any:
    """Predicts a drawn part of the targets."""
    real = fz.random.uniform(key, batch["x"].shape) < 0.3
    return fz.weighted(*sums(params, {**batch, "real": real}))


@fz.block
def hidden(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(p[x])


def confident(params: Any, batch: Any) -> Any:
    """Predicts the targets behind hidden states that are large."""
    h = hidden(params["e"], batch["x"])
    real = (h.detach().abs().mean(-1) > 0.3).flatten()
    losses = F.cross_entropy((h @ params["w"]).float().flatten(0, 1), batch["y"].flatten(), reduction="none")
    return fz.weighted((losses * real).sum(), real.sum())


def leaf_of_the_batch(params: Any, batch: Any) -> Any:
    """The count is given: one number, the same for every part."""
    return fz.weighted(sums(params, batch)[0], batch["number"])


@pytest.mark.parametrize("loss_fn", [drawn, confident, leaf_of_the_batch])
def test_a_count_of_any_origin_averages_exactly(loss_fn):
    params, batch = given(16, 8)
    batch |= {"number": torch.tensor(7.0)} if loss_fn is leaf_of_the_batch else {}
    step = fz.train_step(loss_fn, optim.sgd(1.0))
    replicated = (lambda path, leaf: "number" in path) if loss_fn is leaf_of_the_batch else None
    for schedule in ("sequential", "layerwise"):
        train = fz.compile(
            fz.accumulate(2, schedule=schedule, replicated=replicated)(step), fz.make_mesh(), backend="eager"
        )
        state, _ = train(train.init(params), batch)
        keys = fz.random.fold_in(train.init(params).key, torch.tensor(0))
        parts: list[Any] = []
        leaves = {n: x.clone().requires_grad_() for n, x in params.items()}
        for m in range(2):
            part = {n: x.chunk(2)[m] if x.dim() else x for n, x in batch.items()}
            key = {"key": fz.random.with_part(keys, torch.tensor(m))} if loss_fn is drawn else {}
            parts.append(loss_fn(leaves, part, **key))
        loss = torch.stack([p.total for p in parts]).sum() / sum(p.count for p in parts)
        for (n, x), g in zip(leaves.items(), torch.autograd.grad(loss, list(leaves.values())), strict=True):
            torch.testing.assert_close(state.params[n], x.detach() - g)


def test_in_fp16_a_count_must_be_known_before_the_backward():
    params, batch = given(16, 8)
    half = fz.mixed_precision(fz.train_step(confident, optim.sgd(1.0)), "fp16")
    assert fz.lower(half, fz.AbstractMesh(data=1), params, batch)  # one part: its own count
    with pytest.raises(TraceError, match=r"(?s)count: made by 'hidden'.*make the count of the batch"):
        fz.lower(fz.accumulate(2)(half), fz.AbstractMesh(data=1), params, batch)


def test_the_count_travels_while_the_forward_runs():
    params, batch = given(16, 8)
    names = {"e": params["e"], "w": params["w"]}

    def blocks(p: Any, b: Any) -> Any:
        h = hidden(p["e"], b["x"])
        losses = F.cross_entropy((h @ p["w"]).float().flatten(0, 1), b["y"].flatten(), reduction="none")
        return fz.weighted((losses * b["real"].flatten()).sum(), b["real"].sum())

    step = fz.data_parallel(fz.train_step(blocks, optim.sgd(1.0)))
    ops = fz.lower(step, fz.AbstractMesh(data=2), names, batch).program.instructions
    at = {op.fn or op.op: i for i, op in reversed([*enumerate(ops)])}
    assert at["count_fn"] < at["all_reduce_start"] < at["hidden"] < at["wait"] < at["seed_fn"]


@pytest.mark.full(keep=["mean"])
@pytest.mark.parametrize("loss_fn", [weighted, all_targets, drawn, confident, mean])
def test_every_line_is_what_the_step_means(loss_fn):
    params, batch = given(16, 8)
    for schedule in ("sequential", "layerwise"):
        step = fz.accumulate(4, schedule=schedule)(fz.train_step(loss_fn, optim.adamw(1e-2)))
        line, _ = first_differing(setting_of(step, params, batch, fz.make_mesh(), 1, None, "eager", {}), None)
        assert line is None, line


# --- the models of transformers ---


@pytest.mark.full
def test_models_of_transformers_in_fp16(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import test_trainer

    from fzero.hf import Trainer

    x = fz.random.bits(fz.random.key(3), (16, 64)) % 64
    batch = {"input_ids": x, "labels": ((x * 5 + 3) % 64).where(torch.arange(64) > 3, -100)}
    runs = []
    for loss_fn in (None, lambda out, b: out.loss):
        model = fz.functionalize(test_trainer.llama())
        step = fz.mixed_precision("fp16")(model.train_step(optim.adamw(1e-2), *([] if loss_fn is None else [loss_fn])))
        train = fz.compile(step, fz.make_mesh(), backend="eager")
        state, found = train.init(model.params), []
        for _ in range(6):
            state, m = train(state, batch)
            found.append((float(m["loss"]), bool(m["skipped"])))
        runs.append(found)
    own, of_output = runs
    assert not any(skipped for _, skipped in own + of_output)
    assert [x for x, _ in own] == pytest.approx([x for x, _ in of_output], rel=1e-3)

    def bert() -> Any:  # whose forward takes no further keywords
        torch.manual_seed(0)
        config = transformers.BertConfig(**test_trainer.TINY, **test_trainer.STILL, num_labels=64)
        return transformers.BertForTokenClassification(config)

    losses = []
    for half in (False, True):
        trainer = test_trainer.trained(Trainer, tmp_path, bert, max_steps=5, warmup_steps=0, fp16=half)
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
        assert int(trainer.state.global_step) == 5
    assert losses[1] == pytest.approx(losses[0], rel=5e-3) and losses[0][-1] < 0.97 * losses[0][0]


def test_a_model_whose_loss_is_in_fp16_adds_it_up_in_fp32():
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.nn.Embedding(VOCAB, VOCAB)
            self.loss = torch.nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, VOCAB))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.loss(self.h(x).flatten(0, 1), labels.flatten())}

    _, batch = given(512, 128)
    model = fz.functionalize(Head())
    train = fz.compile(fz.mixed_precision("fp16")(model.train_step(optim.sgd(1.0))), fz.make_mesh(), backend="eager")
    _, m = train(train.init(model.params), {"x": batch["x"], "labels": batch["y"]})
    assert bool(m["loss"].isfinite()) and not m["skipped"]
