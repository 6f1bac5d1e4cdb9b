"""Numbers of NumPy are taken as Python's own, by everything public that takes a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from rejections import BATCH, PARAMS, STEP

import fzero as fz
from fzero import optim

KEY = fz.random.key(0)
Number = Callable[[float], Any]  # of NumPy, or Python's own


def _profile(n: Number) -> Any:
    train = fz.compile(STEP, fz.make_mesh(), backend="eager")
    return train.profile(train.init(PARAMS), BATCH, steps=n(1))[0].step


DATA = fz.data.TokenDataset(torch.arange(100), seq=4, batch=2)


NUMBERS: dict[str, Callable[[Number], Any]] = {
    "AbstractMesh": lambda n: fz.AbstractMesh(data=n(2)),
    "make_mesh": lambda n: fz.make_mesh(data=(n(2), n(1)), timeout=n(600)).axes,
    "accumulate": lambda n: (fz.accumulate(n(2)), fz.accumulate(num_micro_batches=n(2))),
    "expert_parallel": lambda n: fz.expert_parallel(where=bool, max_replicated_bytes=n(4096)),
    "mixed_precision": lambda n: fz.mixed_precision("fp16", loss_scale=n(128)),
    "offload": lambda n: fz.offload("cpu", fraction=n(1)),
    "hierarchical": lambda n: fz.hierarchical(gathers=n(1)),
    "pipeline": lambda n: fz.pipeline(schedule="interleaved", stages=[n(1), n(2)], chunks=n(2)),
    "redundant": lambda n: fz.redundant(every=n(2)),
    "remat": lambda n: fz.remat(n(1)),
    "sequence_parallel": lambda n: fz.sequence_parallel(max_replicated_bytes=n(4096)),
    "tensor_parallel": lambda n: fz.tensor_parallel(rules={"w": n(0), "v": (n(1), n(2))}, max_replicated_bytes=n(4096)),
    "LossScale": lambda n: fz.LossScale(initial=n(8), growth_interval=n(3), hysteresis=n(2)),
    "Health": lambda n: fz.Health(check_replicas_every=n(7)),
    "run": lambda n: fz.run(
        lambda run: run.num_micro_batches(n(24), max_samples=n(5)), every=n(1), timeout=n(60), device="cpu"
    ),
    "weighted": lambda n: fz.weighted(torch.ones(()), n(3)),
    "adamw": lambda n: optim.adamw(n(1), b1=n(0), b2=n(0), eps=n(1)).update(
        PARAMS, optim.adamw(1).init(PARAMS), PARAMS
    ),
    "schedules": lambda n: [
        schedule(n(3))
        for schedule in (
            optim.cosine(n(1), n(0), n(10)),
            optim.warmup_cosine(n(1), n(2), n(10)),
            optim.warmup_decay_lr(n(10), warmup_steps=n(2)),
            optim.warmup_stable_decay(n(1), n(2), n(3), n(10)),
        )
    ],
    "muon": lambda n: optim.muon(1e-2, ns_steps=n(5), where=lambda p, x: n(1)).init({"w": torch.ones(4, 4)}),
    "random": lambda n: [
        fz.random.key(n(3)),
        fz.random.split(KEY, n(2)),
        fz.random.fold_in(KEY, n(2)),
        fz.random.with_part(KEY, n(2)),
        fz.random.uniform(KEY, (n(2), n(3)), minval=n(0), maxval=n(2)),
        fz.random.bernoulli(KEY, (n(3),), n(1)),
    ],
    "TokenDataset": lambda n: fz.data.TokenDataset(
        torch.arange(100), seq=n(4), batch=n(2), seed=n(1), skip=[(n(3), n(5))]
    ).cursor(n(4)),
    "batches": lambda n: (DATA.batch_at(n(3), n(1), n(2)), DATA.resume({**DATA.cursor(3), "next": n(3)})),
    "windows": lambda n: DATA.windows(n(0), n(3)),
    "prefetch": lambda n: list(fz.data.prefetch(DATA, n(3), n(5), rank=n(0), size=n(1), depth=n(2))),
    "dispatch": lambda n: fz.experts.dispatch(
        torch.ones(4, 2), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), num_experts=n(2), capacity=n(1)
    ),
    "profile": _profile,
    "simulate": lambda n: fz.testing.simulate(
        fz.data_parallel(STEP), fz.AbstractMesh(data=n(2)), PARAMS, BATCH, steps=n(1)
    ),
    "lower": lambda n: fz.lower(STEP, fz.AbstractMesh(), PARAMS, BATCH, memory_budget=n(1 << 40)).program.instructions,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_taken_as_pythons_own(name: str) -> None:
    assert str(NUMBERS[name](numpy.int64)) == str(NUMBERS[name](int))
