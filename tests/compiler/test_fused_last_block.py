"""The last block as one function: when it is, when it is not, and that it changes no bit."""

from __future__ import annotations

import importlib
from typing import Any

import models
import pytest
import torch
from models import MODELS, STAGES, batches, meta, meta_part
from replaced_passes import replace_pass

import fzero as fz
from fzero import optim
from fzero.ir.program import Program

fuse_pass = importlib.import_module("fzero.compiler.fuse_last_block")


def lowered(
    loss: Any, params: Any, batch: Any, transform: Any = lambda step: step, ranks: int = 1, **options: Any
) -> Program:
    step = transform(fz.train_step(loss, optim.sgd(0.1), **options))
    return fz.lower(step, fz.AbstractMesh(data=ranks), params, batch).program


def gpt(transform: Any = lambda step: step, loss: Any = models.gpt_loss, ranks: int = 1, **options: Any) -> Program:
    return lowered(
        loss, meta(models.gpt_init(fz.random.key(0))), meta_part(batches(1)[0], ranks), transform, ranks, **options
    )


def fused(program: Program) -> list[str]:
    return [op.fn for op, _ in program.walk() if op.fn.endswith("_value_and_grad")]


def vjps(program: Program) -> list[str]:
    return [op.fn for op, _ in program.walk() if "_vjp" in op.fn]


@pytest.mark.parametrize("policy", ["full", "min_cut", "none", 0.5])
def test_the_last_block_is_one_function_under_any_policy(policy):
    program = gpt(fz.remat(policy))
    assert fused(program) == ["head_value_and_grad"]
    assert not any("head" in name for name in vjps(program)) and len(vjps(program)) == 3
    assert (
        set(program.functions) >= set(fused(program))
        and "head" not in program.functions
        and "head_vjp" not in program.functions
    )
    targets = [str(n.target) for n in program.functions["head_value_and_grad"].graph.graph.nodes]
    assert targets.count("aten._log_softmax.default") == 1  # nothing is repeated


def test_it_is_gathered_once():
    program = gpt(STAGES[3](), ranks=2)
    gathers = [op for op in program.instructions if op.op == "all_gather_start"]
    assert sum("params['head']['out']" in op.args for op in gathers) == 1
    assert sum("params['layers'][0]['up']" in op.args for op in gathers) == 2


def test_in_every_micro_batch():
    program = gpt(fz.accumulate(3))
    (loop,) = [op for op in program.instructions if op.op == "loop"]
    assert sum(op.fn == "head_value_and_grad" for op in loop.body) == 1


def with_aux(params, batch):
    loss = models.gpt_loss(params, batch)
    count = (batch["targets"] > 0).sum()
    return fz.weighted(loss * count, count), {"perplexity": loss.exp(), "squared": loss * loss}


def test_glue_between_is_taken_in():
    program = gpt(loss=with_aux, has_aux=True)
    calls = [op.fn for op in program.instructions if op.op == "call"]
    # which made the loss and the seed of the backward
    assert fused(program) == ["head_value_and_grad"] and "glue_1" not in calls


def with_scale(params, batch):
    return models.gpt_loss(params["gpt"], batch) * params["scale"]


def with_a_block_aside(params, batch):
    loss = models.gpt_loss(params, batch)
    return loss, {"embedded": models.embed(params["embed"], batch["tokens"]).detach().mean()}


def test_glue_that_reads_parameters_is_not_taken_in():
    params = {"gpt": meta(models.gpt_init(fz.random.key(0))), "scale": torch.empty((), device="meta")}
    batch = meta_part(batches(1)[0], 1)
    for transform in (fz.remat("none"), fz.mixed_precision("bf16")):  # also not by way of a cast
        assert not fused(lowered(with_scale, params, batch, transform))
    assert not fused(lowered(models.mixed_loss, meta(models.mixed_init(fz.random.key(0))), batch))


def test_a_block_between_keeps_them_apart():
    assert not fused(gpt(loss=with_a_block_aside, has_aux=True))


def with_literals(p, x):
    table = torch.tensor([1.0, -2.0, 3.0])
    return (x @ p * table).tanh().sum() + torch.tensor([0.5, 0.25]).sum()


literals = fz.block(with_literals)


def literals_loss(params, x):
    return literals(params, x) * torch.tensor([2.0, 1.0]).sum()


def trained(loss: Any, params: Any, data: Any, **options: Any) -> Any:
    train = fz.compile(fz.train_step(loss, optim.adamw(1e-2), **options), fz.make_mesh(), backend="eager")
    state, found = train.init(params), []
    for batch in data:
        state, metrics = train(state, batch)
        found.append(metrics)
    return bool(fused(train.program)), state, found


CASES = {
    **{name: (model.loss, model.init, batches(3), {}) for name, model in MODELS.items()},
    "aux": (with_aux, models.gpt_init, batches(3), {"has_aux": True}),
    "literals": (literals_loss, torch.linspace(-1, 1, 6).view(2, 3), [torch.ones(4, 2), torch.full((4, 2), 0.5)], {}),
}


@pytest.mark.full(keep=["bare", "mixed", "literals"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_apart(monkeypatch, name):
    loss, params, data, options = CASES[name]
    made, *got = trained(loss, params, data, **options)
    replace_pass(monkeypatch, "fuse", rewrite=lambda program: program)
    apart, *want = trained(loss, params, data, **options)
    assert made == (name in ("gpt", "aux", "literals")) and not apart
    for a, b in zip(fz.tree.leaves(got), fz.tree.leaves(want), strict=True):
        assert torch.equal(a, b)
