"""Offload against the same step without it, on one process: every tier and role beside every other transform, bit for bit. Ranks: test_offload_ranks.py."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import test_trees
import test_update
import torch
from models import MODELS, OPTIMIZERS
from offloads import BOTH, OFFLOADS, matrices, same, trained

import fzero as fz
from fzero import optim
from fzero.layout import leaf_of
from fzero.program.ir import COPIES, Program

EXTRAS: dict[str, Any] = {
    "none": (),
    "bf16": (fz.mixed_precision("bf16"),),
    "accumulate": (fz.accumulate(2),),
    "remat full": (fz.remat("full"),),
    "bf16, accumulate": (fz.mixed_precision("bf16"), fz.accumulate(2)),
    "shard": (fz.shard_params(), fz.remat("none")),
}
TRAINED = [("gpt", "adamw"), ("gpt", "clipped"), ("mixed", "lamb"), ("mixed", "clipped"), ("bare", "sgd"), ("bare", "lion")]
MEMORIES = {"one memory": True, "apart": False}


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few cases in which every two values of different axes meet."""

    def pairs(case: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    everything = list(itertools.product(*axes))
    missing, out = set().union(*map(pairs, everything)), []
    while missing:
        out.append(max(everything, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(out[-1])
    return out


CASES = pairwise(sorted(OFFLOADS), sorted(EXTRAS), range(len(TRAINED)), sorted(MEMORIES))


@functools.cache
def without(extra: str, model: str, optimizer: str) -> Any:
    return trained(fz.make_mesh(data=1), EXTRAS[extra], model, optimizer)[0]


@pytest.mark.parametrize("name", sorted(OFFLOADS))
def test_a_step_with_offload_equals_the_step_without(tmp_path: Path, name: str) -> None:
    cases = [case for case in CASES if case[0] == name]
    assert len(cases) >= 6
    for _, extra, which, memory in cases:
        mesh = fz.make_mesh(data=1, unified_memory=MEMORIES[memory])
        found, train, state = trained(mesh, (*EXTRAS[extra], *OFFLOADS[name](tmp_path)), *TRAINED[which])
        assert same(found, without(extra, *TRAINED[which])), (name, extra, TRAINED[which], memory)
        tiers = {leaf_of(x)[0].layout.tier for x in fz.tree.leaves((state.params, state.opt_state))}
        assert {"cpu": "host", "nvme": "disk"}.get(name.split()[0], "disk") in tiers
        assert any(line.op in COPIES for line, _ in train.program.walk())
