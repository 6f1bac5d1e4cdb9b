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
from fzero.ir.program import Line


def lowered(step: Any, init: Any, batch: Any, ranks: int = 1, **mesh: Any) -> list[Line]:
    return list(fz.lower(step, fz.AbstractMesh(data=ranks, **mesh), init, batch).program.lines)


def gpt(*transforms: Any, optimizer: str = "adamw", ranks: int = 1, layers: int = 4) -> list[Line]:
    step = fz.compose(fz.remat("full"), *transforms)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS[optimizer]()))
    return lowered(step, lambda key: models.gpt_init(key, layers), models.meta_part(models.batches(1)[0], ranks), ranks)


def updates(lines: list[Line]) -> list[int]:
    return [i for i, line in enumerate(lines) if line.op == "call" and line.by == "optimizer" and line.writes]


def backwards(lines: list[Line]) -> list[int]:
    return [i for i, line in enumerate(lines) if line.is_backward]


def maker(lines: list[Line], name: str) -> int:
    """The line that makes a value, or, if it came from other ranks, the one that made what was sent."""
    at = next(i for i, line in enumerate(lines) if name in {v.name for v in line.out})
    if lines[at].op != "wait":
        return at
    start = next(line for line in lines if line.out and line.out[0].name == lines[at].args[0])
    return max(maker(lines, a) for a in start.args)


def gradients(lines: list[Line], update: int) -> list[str]:
    made = {v.name for line in lines for v in line.out}
    return [a for a in lines[update].args if a in made and a.startswith("d_")]


def test_on_one_device_a_block_is_updated_right_after_its_backward() -> None:
    lines = gpt()
    assert len(updates(lines)) == 6
    for i in updates(lines):
        at = max(maker(lines, g) for g in gradients(lines, i))
        assert lines[at].is_backward or "value_and_grad" in lines[at].fn
        assert not [x for x in lines[at + 1 : i] if x.block is not None], "no other block in between"


def test_over_ranks_one_block_later() -> None:
    """The block that runs meanwhile hides the reduction; after the last one there is none."""
    lines = gpt(fz.shard_params(), ranks=2)
    between = []
    for i in updates(lines):
        at = max(maker(lines, g) for g in gradients(lines, i))
        between.append(sum(x.block is not None for x in lines[at + 1 : i]))
    assert sorted(between) == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("transforms", [(), (fz.shard_params(),)], ids=["one device", "ranks"])
def test_what_is_clipped_waits_for_the_norm(transforms: Any) -> None:
    lines = gpt(*transforms, optimizer="clipped", ranks=2 if transforms else 1)
    norm = max(i for i, line in enumerate(lines) if any(v.name == "metric_grad_norm" for v in line.out))
    assert updates(lines) and min(updates(lines)) > norm > max(backwards(lines))


def test_after_the_last_micro_batch() -> None:
    lines = gpt(fz.accumulate(2))
    assert min(updates(lines)) > next(i for i, line in enumerate(lines) if line.op == "loop")


def reads_after_writes(lines: list[Line]) -> list[str]:
    """What a line reads, or a transfer under way, after its memory was overwritten; but for new shards, which are
    gathered and put over their leaves."""
    written, moving, parts, out = set[str](), dict[str, set[str]](), dict[str, str](), list[str]()
    for line in lines:
        if line.op == "take_shard":
            parts[line.out[0].name] = line.args[0]
        elif line.op == "wait":
            moving.pop(line.args[0], None)
        new = set(line.args if line.op == "all_gather_start" else line.writes if line.op == "assign" else ()) & {
            *parts,
            *parts.values(),
        }
        out += [a for a in line.args if parts.get(a, a) in written and a not in new]
        out += [w for w in line.writes if any(parts.get(w, w) in args for args in moving.values())]
        if line.op in COLLECTIVES:
            moving[line.out[0].name] = {parts.get(a, a) for a in line.args}
        written |= {parts.get(w, w) for w in line.writes}
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
    lines = lowered(fz.remat("full")(fz.train_step(views_loss, optim.adamw(0.1))), VIEWS, torch.ones(2, 4))
    (made,) = [
        line
        for line in lines
        if line.op == "call" and "params['first']['w']" in line.args and not line.writes and not line.is_backward
    ]
    view = {v.name for v in made.out if v.shape == (2, 4)} - {
        line.args[0] for line in lines if line.fn.startswith("dense")
    }
    update = next(i for i, line in enumerate(lines) if "params['first']['w']" in line.writes)
    readers = [i for i, line in enumerate(lines) if view & set(line.args)]
    assert readers and max(readers) < update


@pytest.mark.parametrize("name", ["tied", "tied and frozen"])
def test_tied_leaves_are_updated_after_their_last_reader(name: str) -> None:
    case = test_trees.CASES[name]
    keywords = {"trainable": case.trainable} if case.trainable else {}
    lines = lowered(fz.train_step(case.loss, optim.adamw(1e-2), **keywords), case.make(), case.batch(0))
    assert updates(lines) and not reads_after_writes(lines)


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
    lines = lowered(step, MODELS[model].init, models.meta_part(models.batches(1)[0], 2), 2)
    assert updates(lines)
    assert not reads_after_writes(lines)
