"""Where lines of the optimizer stand: as early as what they read is there and what they write is read by nobody any
more, and no earlier."""

from __future__ import annotations

from typing import Any

import models
import pytest
import test_trees_of_every_shape as test_trees
import test_update_functions as test_update
import torch
from models import MODELS, OPTIMIZERS

import fzero as fz
from fzero import optim
from fzero.ir.ops import COLLECTIVES
from fzero.ir.program import Instruction


def lowered(step: Any, init: Any, batch: Any, ranks: int = 1, **mesh: Any) -> list[Instruction]:
    return list(fz.lower(step, fz.AbstractMesh(data=ranks, **mesh), init, batch).program.instructions)


def gpt(*transforms: Any, optimizer: str = "adamw", ranks: int = 1, layers: int = 4) -> list[Instruction]:
    step = fz.compose(fz.remat("full"), *transforms)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS[optimizer]()))
    return lowered(step, lambda key: models.gpt_init(key, layers), models.meta_part(models.batches(1)[0], ranks), ranks)


def updates(ops: list[Instruction]) -> list[int]:
    return [i for i, op in enumerate(ops) if op.op == "call" and op.by == "optimizer" and op.writes]


def backwards(ops: list[Instruction]) -> list[int]:
    return [i for i, op in enumerate(ops) if op.is_backward]


def maker(ops: list[Instruction], name: str) -> int:
    """The line that makes a value, or, if it came from other ranks, the one that made what was sent."""
    at = next(i for i, op in enumerate(ops) if name in {v.name for v in op.out})
    if ops[at].op != "wait":
        return at
    start = next(op for op in ops if op.out and op.out[0].name == ops[at].args[0])
    return max(maker(ops, a) for a in start.args)


def gradients(ops: list[Instruction], update: int) -> list[str]:
    made = {v.name for op in ops for v in op.out}
    return [a for a in ops[update].args if a in made and a.startswith("d_")]


def test_on_one_device_a_block_is_updated_right_after_its_backward() -> None:
    ops = gpt()
    assert len(updates(ops)) == 6
    for i in updates(ops):
        at = max(maker(ops, g) for g in gradients(ops, i))
        assert ops[at].is_backward or "value_and_grad" in ops[at].fn
        assert not [x for x in ops[at + 1 : i] if x.block is not None], "no other block in between"


def test_over_ranks_one_block_later() -> None:
    """The block that runs meanwhile hides the reduction; after the last one there is none."""
    ops = gpt(fz.shard_params(), ranks=2)
    between = []
    for i in updates(ops):
        at = max(maker(ops, g) for g in gradients(ops, i))
        between.append(sum(x.block is not None for x in ops[at + 1 : i]))
    assert sorted(between) == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("transforms", [(), (fz.shard_params(),)], ids=["one device", "ranks"])
def test_what_is_clipped_waits_for_the_norm(transforms: Any) -> None:
    ops = gpt(*transforms, optimizer="clipped", ranks=2 if transforms else 1)
    norm = max(i for i, op in enumerate(ops) if any(v.name == "metric_grad_norm" for v in op.out))
    assert updates(ops) and min(updates(ops)) > norm > max(backwards(ops))


def test_after_the_last_micro_batch() -> None:
    ops = gpt(fz.accumulate(2))
    assert min(updates(ops)) > next(i for i, op in enumerate(ops) if op.op == "loop")


def reads_after_writes(ops: list[Instruction]) -> list[str]:
    """What a line reads, or a transfer under way, after its memory was overwritten; but for new shards, which are
    gathered and put over their leaves."""
    written, moving, parts, out = set[str](), dict[str, set[str]](), dict[str, str](), list[str]()
    for op in ops:
        if op.op == "take_shard":
            parts[op.out[0].name] = op.args[0]
        elif op.op == "wait":
            moving.pop(op.args[0], None)
        new = set(op.args if op.op == "all_gather_start" else op.writes if op.op == "assign" else ()) & {
            *parts,
            *parts.values(),
        }
        out += [a for a in op.args if parts.get(a, a) in written and a not in new]
        out += [w for w in op.writes if any(parts.get(w, w) in args for args in moving.values())]
        if op.op in COLLECTIVES:
            moving[op.out[0].name] = {parts.get(a, a) for a in op.args}
        written |= {parts.get(w, w) for w in op.writes}
    return out


@fz.block
def rows(p: Any, x: torch.Tensor) -> Any:
    return x @ p["w"], p["w"][:2]


@fz.block
def dense(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def views_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    x, view = rows(params["first"], x)
    for p in params["layers"]:
        x = dense(p, x)
    return (x**2).mean() + (view.detach() ** 2).sum()


VIEWS = {"first": {"w": torch.eye(4) + 0.1}, "layers": [{"w": torch.eye(4)} for _ in range(3)]}


@pytest.mark.parametrize("transforms", [(), (fz.offload("cpu", ("opt_state", "params")),)], ids=["device", "host"])
def test_a_block_that_returns_a_view_of_a_parameter(transforms: Any) -> None:
    """The parameter is not overwritten before the view was read: the numbers are those of the plain step."""
    step = fz.compose(fz.remat("full"), *transforms)(fz.train_step(views_loss, optim.adamw(0.1)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    plain, state = step.init(VIEWS), train.init(VIEWS)
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        plain, want = step(plain, x)
        state, found = train(state, x)
        assert torch.equal(want["loss"], found["loss"])
    assert all(
        torch.equal(a, b) for a, b in zip(fz.tree.leaves(plain), fz.tree.leaves(train.gather(state)), strict=True)
    )


def test_a_view_is_a_reader() -> None:
    ops = lowered(fz.remat("full")(fz.train_step(views_loss, optim.adamw(0.1))), VIEWS, torch.ones(2, 4))
    (made,) = [
        op
        for op in ops
        if op.op == "call" and "params['first']['w']" in op.args and not op.writes and not op.is_backward
    ]
    view = {v.name for v in made.out if v.shape == (2, 4)} - {op.args[0] for op in ops if op.fn.startswith("dense")}
    update = next(i for i, op in enumerate(ops) if "params['first']['w']" in op.writes)
    readers = [i for i, op in enumerate(ops) if view & set(op.args)]
    assert readers and max(readers) < update


@pytest.mark.parametrize("name", ["tied", "tied and frozen"])
def test_tied_leaves_are_updated_after_their_last_reader(name: str) -> None:
    case = test_trees.CASES[name]
    keywords = {"trainable": case.trainable} if case.trainable else {}
    ops = lowered(fz.train_step(case.loss, optim.adamw(1e-2), **keywords), case.make(), case.batch(0))
    assert updates(ops) and not reads_after_writes(ops)


@pytest.mark.parametrize(
    "name", ["exchanges_two_leaves", "keeps_the_last_gradients", "keeps_the_last_norms", "makes_one_value_twice"]
)
def test_states_that_exchange_values(name: str) -> None:
    """Leaves that are assigned other leaves' old values: each is read before it is overwritten."""
    step = fz.shard_params(fz.train_step(test_update.loss_fn, getattr(test_update, name)()))
    assert not reads_after_writes(lowered(step, test_update.PARAMS, test_update.BATCHES[0], 2))


@pytest.mark.full(keep=["3-bare", "1-bare", "2-bare"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", models.STAGES)
def test_no_leaf_is_read_after_it_was_overwritten(model: str, stage: int) -> None:
    step = models.STAGES[stage](fz.train_step(MODELS[model].loss, OPTIMIZERS["lamb"]()))
    ops = lowered(step, MODELS[model].init, models.meta_part(models.batches(1)[0], 2), 2)
    assert updates(ops)
    assert not reads_after_writes(ops)
