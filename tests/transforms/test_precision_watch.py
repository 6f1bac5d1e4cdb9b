"""The precision watch: its statistics beside those of plain autograd, on any mesh, and that the step is the same with
it."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from models import MODELS, STAGES, batches, part
from offloads import same

import fzero as fz
from fzero import optim

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = fz.LossScale(initial=64.0, growth_interval=2)
NAMES = ("embed", "layers.0", "layers.1", "head", "gpt_loss")
CASES: dict[str, tuple[tuple[Any, ...], int]] = {  # and micro-batches
    "plain": ((fz.data_parallel,), 1),
    "accumulate": ((fz.shard_opt_state, fz.accumulate(3)), 3),
    "no remat": ((fz.shard_grads, fz.remat("none"), fz.accumulate(2)), 2),
    "remat": ((fz.shard_params, fz.remat("full")), 1),
    "offload": ((fz.shard_params, fz.offload("cpu", ("opt_state", "activations"))), 1),
    "layerwise": (
        (fz.shard_params, fz.accumulate(3, schedule="layerwise"), fz.offload("cpu", ("params", "opt_state"))),
        3,
    ),
}


def make_step(transforms: Any, dtype: str, watch: bool = True, clip: float | None = None) -> Any:
    optimizer = optim.adamw(1e-2) if clip is None else optim.chain(optim.clip_by_global_norm(clip), optim.adamw(1e-2))
    keywords: dict[str, Any] = {"loss_scale": SCALE} if dtype == "fp16" else {}
    return fz.compose(*transforms, fz.mixed_precision(dtype, watch=watch, **keywords))(
        fz.train_step(models.gpt_loss, optimizer)
    )


def by_hand(params: Any, batch: Any, dtype: str, num_parts: int) -> dict[str, torch.Tensor]:
    """The statistics of one step with plain autograd: each part of the batch by itself, in the order of ranks and
    micro-batches."""
    low, scale = DTYPES[dtype], SCALE.initial if dtype == "fp16" else 1.0
    grads, outputs, total = fz.tree.map(torch.zeros_like, params), torch.zeros(4), 0.0
    for rows in range(num_parts):
        here = fz.tree.map(lambda x, rows=rows: x.chunk(num_parts)[rows], batch)
        p = fz.tree.map(lambda x: x.to(low).requires_grad_(), params)
        found = [models.embed(p["embed"], here["tokens"])]
        for layer in p["layers"]:
            found.append(models.layer(layer, found[-1]))
        found.append(models.head(p["head"], found[-1], here["targets"]))
        outputs = torch.maximum(outputs, torch.stack([x.detach().float().abs().max() for x in found]))
        parts = torch.autograd.grad(found[-1] * scale, fz.tree.leaves(p))
        grads = fz.tree.unflatten(
            fz.tree.structure(grads), [a + b.float() for a, b in zip(fz.tree.leaves(grads), parts, strict=True)]
        )
        total += found[-1].item() / num_parts
    blocks = [grads["embed"], *grads["layers"], grads["head"]]
    flat = [torch.cat([x.flatten() for x in fz.tree.leaves(block)]) / num_parts for block in blocks]
    return {
        "grad_norm": torch.tensor([(x / scale).norm() for x in flat] + [0.0]),
        "grad_max": torch.tensor([(x / scale).abs().max() for x in flat] + [0.0]),
        "underflow": torch.tensor([(x.abs() < torch.finfo(low).tiny).float().mean() for x in flat] + [0.0]),
        "output_max": torch.cat([outputs, torch.tensor([total])]),
    }


def watched(case: str, dtype: str, watch: bool = True, steps: int = 2) -> Any:
    """What each step said, and the first and the last state, whole."""
    mesh = fz.make_mesh(data=-1)
    train = fz.compile(make_step(CASES[case][0], dtype, watch), mesh, backend="eager")
    state = train.init(models.gpt_init)
    first, said = train.gather(state), []
    for batch in batches(steps):
        state, metrics = train(state, part(batch, mesh))
        said.append(metrics)
    return first, said, train.gather(state), train.blocks


def both(case: str, dtype: str) -> Any:
    return watched(case, dtype), watched(case, dtype, watch=False)


WATCHED = [  # every case in float32 on two ranks or one, every dtype on both
    *(("fp32", case, 2) for case in CASES if case != "plain"),
    *(("fp32", "plain", 1), ("fp32", "offload", 1)),
    *(("bf16", "no remat", 1), ("bf16", "plain", 2), ("fp16", "accumulate", 1), ("fp16", "layerwise", 2)),
]


@pytest.mark.full(keep=["fp32-offload-1"])
@pytest.mark.parametrize(("dtype", "case", "num_ranks"), WATCHED)
def test_statistics_are_those_of_plain_autograd(run_or_call, num_ranks, dtype, case):
    """Besides, the step is the same to the bit as without them."""
    results = run_or_call(num_ranks, both, case, dtype)
    tolerance = {"fp32": 1e-5, "bf16": 4e-2, "fp16": 5e-3}[dtype]
    for (first, said, last, names), (_, plain, last_plain, no_names) in results:
        assert names == NAMES and no_names == ()
        expected = by_hand(first.params, batches(1)[0], dtype, num_ranks * CASES[case][1])
        found = said[0]["precision"]
        for name in ("grad_norm", "grad_max", "output_max"):
            torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=0.0)
        torch.testing.assert_close(
            found["underflow"], expected["underflow"], rtol=0.0, atol=1e-6 if dtype == "fp32" else 5e-3
        )
        assert found["underflow"][0] > 0 and all(x.dtype == torch.float32 and x.shape == (5,) for x in found.values())
        torch.testing.assert_close(found["grad_norm"].square().sum().sqrt(), said[0]["grad_norm"])
        assert same(last, last_plain)
        for with_it, without in zip(said, plain, strict=True):
            assert same({k: v for k, v in with_it.items() if k != "precision"}, without)
    assert all(same(said[-1], results[0][0][1][-1]) for (_, said, *_), _ in results)


def test_fp16_gradients_underflow_below_the_scale():
    """A larger loss scale keeps more of them; what is counted is what is lost."""
    shares = []
    for scale in (1.0, 2.0**16):
        step = fz.mixed_precision(fz.train_step(models.gpt_loss, optim.sgd(0.1)), "fp16", loss_scale=scale, watch=True)
        train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        _, metrics = train(train.init(models.gpt_init), batches(1)[0])
        shares.append(metrics["precision"]["underflow"][:4])
    assert (shares[0] > shares[1] + 5e-4).all(), shares


# numbers that are not finite


@fz.block
def scaled(p, x):
    return x * p["w"]


def scaled_loss(params, batch):
    x = batch["x"]
    for p in params["layers"]:
        x = scaled(p, x)
    return (x.float() * params["last"]).mean()


def overflowing(value: float) -> Any:
    """Steps in which one row, on one rank and in one micro-batch, is too large for the second block, or not a
    number."""
    mesh = fz.make_mesh(data=-1)
    step = fz.compose(fz.shard_params, fz.accumulate(2))(
        fz.mixed_precision(fz.train_step(scaled_loss, optim.sgd(0.0)), "fp16", loss_scale=SCALE, watch=True)
    )
    train = fz.compile(step, mesh, backend="eager")
    state = train.init({"layers": [{"w": torch.full((5,), w)} for w in (2.0, 300.0, 0.5)], "last": torch.ones(5)})
    x = torch.ones(8, 5)
    x[6, 3] = value
    _, metrics = train(state, part({"x": x}, mesh))
    return metrics["precision"], train.blocks


@pytest.mark.full(keep=["nan-1", "-500.0-1", "500.0-1"])
@pytest.mark.parametrize(("value", "num_ranks"), [(500.0, 1), (-500.0, 1), (float("nan"), 1), (500.0, 2)])
def test_an_overflow_shows_where_it_begins(run_or_call, num_ranks, value):
    for found, names in run_or_call(num_ranks, overflowing, value):
        assert names == ("layers.0", "layers.1", "layers.2", "scaled_loss")
        begins = 0 if value != value else 1
        assert found["output_max"].isfinite().tolist() == [i < begins for i in range(4)]
        if begins:
            assert found["output_max"][0] == 1000.0
        assert not found["grad_norm"][-1].isfinite() and not found["grad_max"][-1].isfinite()


def test_compiled_they_are_the_same(compiled_here):
    found = []
    for backend in ("eager", "inductor"):
        for x in (torch.linspace(-40.0, 40.0, 40).reshape(8, 5), torch.full((8, 5), float("nan"))):
            step = fz.accumulate(2)(
                fz.mixed_precision(fz.train_step(scaled_loss, optim.sgd(0.0)), "fp16", loss_scale=SCALE, watch=True)
            )
            train = fz.compile(step, fz.make_mesh(data=1), backend=backend)
            params = {"layers": [{"w": torch.full((5,), w)} for w in (2.0, 300.0, 1e-5)], "last": torch.ones(5)}
            found.append(train(train.init(params), {"x": x})[1]["precision"])
    for eager, compiled in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=0.0, equal_nan=True)
    assert found[0]["output_max"][1] == 24_000 and not found[1]["output_max"].isfinite().any()


# names, shapes, and what has none


def test_code_outside_blocks_is_the_last_entry():
    for model, names in (("bare", ("bare_loss",)), ("mixed", ("layers.0", "layers.1", "layers.2", "mixed_loss"))):
        step = fz.mixed_precision(fz.train_step(MODELS[model].loss, optim.adamw(1e-2)), "fp32", watch=True)
        train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        _, metrics = train(train.init(MODELS[model].init), batches(1)[0])
        assert train.blocks == names
        assert metrics["precision"]["output_max"][-1] == metrics["loss"] and metrics["precision"]["grad_norm"][-1] > 0
        torch.testing.assert_close(metrics["precision"]["grad_norm"].square().sum().sqrt(), metrics["grad_norm"])


def test_a_block_that_is_called_twice():
    """Its parameters belong to the first call; outputs are of each."""

    def loss_fn(params, batch):
        return scaled(params["a"], scaled(params["a"], batch)).mean()

    step = fz.mixed_precision(fz.train_step(loss_fn, optim.sgd(0.1)), "fp32", watch=True)
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    _, metrics = train(train.init({"a": {"w": torch.tensor([3.0])}}), torch.tensor([2.0]))
    assert train.blocks == ("a", "a (2)", "loss_fn")
    assert metrics["precision"]["output_max"].tolist() == [6.0, 18.0, 18.0] and metrics["precision"][
        "grad_norm"
    ].tolist() == [12.0, 0.0, 0.0]


def test_evaluations_are_not_watched():
    mesh, transform = fz.make_mesh(data=1), fz.mixed_precision("bf16", watch=True)
    evaluate = [
        fz.compile(t(fz.eval_step(models.gpt_loss)), mesh, backend="eager")
        for t in (transform, fz.mixed_precision("bf16"))
    ]
    params, batch = models.gpt_init(fz.random.key(0)), batches(1)[0]
    assert same(*(run(params, batch) for run in evaluate))
    assert [len(f.graph.outputs) for f in evaluate[0].program.functions.values()] == [
        len(f.graph.outputs) for f in evaluate[1].program.functions.values()
    ]


@pytest.mark.full
def test_its_cost_in_lines_and_bytes_does_not_grow_with_depth():
    """Equal blocks stay one function, and all maxima travel together."""
    for number, stage in ((n, STAGES[n]) for n in (0, 1, 3)):
        programs = []
        for layers in (2, 4):
            step = stage(fz.mixed_precision(fz.train_step(models.gpt_loss, optim.adamw(1e-2)), "bf16", watch=True))
            params = models.gpt_init(fz.random.key(0), layers=layers)
            programs.append(fz.lower(step, fz.AbstractMesh(data=4), params, models.meta_part(batches(1)[0], 4)).program)
        assert len(programs[0].functions) == len(programs[1].functions)
        maxima = [
            [x for x, _ in p.walk() if x.op == "all_reduce_start" and x.attrs.reduction == "max"] for p in programs
        ]
        assert [len(x) for x in maxima] == [1 + (number > 0)] * 2  # of outputs, and of gradients that are sharded


@pytest.mark.full
@pytest.mark.parametrize("compute", ["fp32", "auto"])
def test_a_check_of_a_watched_step(compute):
    step = fz.compose(fz.shard_params, fz.accumulate(2))(
        fz.mixed_precision(fz.train_step(models.mixed_loss, optim.adamw(1e-2)), compute, watch=True)
    )
    report = fz.testing.check_equivalent(
        step, models.mixed_init(fz.random.key(0)), batches(1)[0], mesh=fz.make_mesh(data=1)
    )
    assert str(report).splitlines()[-1]
