"""Shards over one axis, replicas of them over another: with `accumulate` the slow axis carries each gradient once a
step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.ir.ops import transfer_bytes

AXES = {"replica": 2, "data": 2}
SHARDED = {"params": fz.shard_params, "grads": fz.shard_grads, "opt_state": fz.shard_opt_state}


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def loss_fn(params, batch):
    for p in params:
        batch = layer(p, batch)
    return batch.square().mean()


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers: what they add up to is exact, whatever the order."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def params() -> Any:
    return [{"up": whole((4, 8), i), "down": whole((8, 4), i + 7)} for i in range(2)]


def step(sharded: str, num_micro: int, optimizer: optim.GradientTransformation) -> fz.Step:
    out = fz.compose(fz.data_parallel(axis="replica"), SHARDED[sharded](axis="data"))(fz.train_step(loss_fn, optimizer))
    return fz.accumulate(num_micro)(out) if num_micro > 1 else out


def clipped() -> optim.GradientTransformation:
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


@pytest.mark.parametrize("sharded", SHARDED)
def test_replicas_reduce_once_a_step(sharded):
    """Each gradient's shard and the loss, however many micro-batches there are; not in the loop."""
    meta = fz.tree.map(lambda x: x.to("meta"), params())
    for num_micro in (1, 2, 4):
        lowered = fz.lower(
            step(sharded, num_micro, clipped()), fz.AbstractMesh(**AXES), meta, torch.empty(8, 4, device="meta")
        )
        program, moved, ops = lowered.program, Counter[str](), Counter[str]()
        for op, times in program.walk():
            if op.op.endswith("_start"):
                ops[op.axes[0]] += times
                moved[op.axes[0]] += times * transfer_bytes(op, program.values_by_name, program.mesh)
        assert (ops["replica"], moved["replica"]) == (3, 4 + 2 * 64 * 4 // 2), (
            "two blocks' shards, the loss, each sent once by either of two ranks"
        )
        in_loop = (x for op in program.instructions if op.op == "loop" for x in op.body)
        assert not any("replica" in x.axes for x in in_loop if x.op.endswith("_start"))


def wrong(cases: list[tuple[str, int]]) -> list[Any]:
    """On every rank: the cases that are not what one process does with the whole batch. Sums of whole numbers to the
    bit, training to 1e-6."""
    mesh, out = fz.make_mesh(**AXES), []
    for optimizer, tolerance, batches in (
        (optim.sgd(0.25), 0.0, [whole((16, 4), 100)]),
        (clipped(), 1e-6, [whole((16, 4), s) for s in range(3)]),
    ):
        plain = fz.train_step(loss_fn, optimizer)
        want = plain.init(params())
        for batch in batches:
            want, _ = plain(want, batch)
        for case in cases:
            train = fz.compile(step(*case, optimizer), mesh, backend="eager")
            state = train.init(params())
            for batch in batches:
                state, _ = train(state, batch[mesh.rank * 4 :][:4])
            pairs = zip(fz.tree.leaves(train.gather(state).params), fz.tree.leaves(want.params), strict=True)
            if not all((a - b).norm() <= tolerance * b.norm() for a, b in pairs):
                out.append((*case, tolerance))
    return out


@pytest.mark.full
def test_training_is_that_of_one_process(run_ranks):
    cases = [(sharded, num_micro) for sharded in SHARDED for num_micro in (1, 2, 4)]
    assert run_ranks(4, wrong, cases) == [[]] * 4
