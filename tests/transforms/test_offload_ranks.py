"""Offload over several ranks: beside every stage of sharding, in shared memory and over gloo, bit for bit what the same
step does without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
from models import STAGES
from offloads import EXTRAS, OFFLOADS, same, trained

import fzero as fz
from fzero.sharding.layout import leaf_of

NAMES = ["cpu opt_state", "cpu all", "nvme opt_state", "nvme both", "mix"]
MIXED = ["none", "bf16", "accumulate", "bf16, accumulate"]  # of the offloads at each stage another


def differing(
    path: str, axes: dict[str, int], cases: list[tuple[int, str, str, str, str]], shared: bool = True
) -> list[Any]:
    """On every rank: the cases, (stage, offload, extra, model, optimizer), whose run is not that of the same step
    without offload."""
    mesh, apart = (
        fz.make_mesh(**axes, shared_memory=shared),
        fz.make_mesh(**axes, shared_memory=shared, unified_memory=False),
    )
    sums = (fz.data_parallel(axis="replica"),) if "replica" in axes else ()
    want: dict[Any, Any] = {}
    out = []
    for i, (stage, name, extra, model, optimizer) in enumerate(cases):
        transforms = (*sums, STAGES[stage](), *EXTRAS[extra])
        key = (stage, extra, model, optimizer)
        if key not in want:
            want[key] = trained(mesh, transforms, model, optimizer)[0]
        found, _, state = trained((mesh, apart)[i % 2], (*OFFLOADS[name](path), *transforms), model, optimizer)
        tiers = {leaf_of(x)[0].layout.tier for x in fz.tree.leaves((state.params, state.opt_state))}
        if not same(found, want[key]) or tiers == {"device"}:
            out.append((stage, name, extra, model, optimizer))
    return out


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage(run_ranks: Any, tmp_path: Path, stage: int) -> None:
    # at each stage all three, two of them beside two offloads
    trains = [("gpt", "clipped"), ("mixed", "lamb"), ("bare", "sgd")]
    cases = [(stage, name, MIXED[(i % 3 + stage) % 4], *trains[(i + stage) % 3]) for i, name in enumerate(NAMES)]
    assert run_ranks(2, differing, str(tmp_path), {"data": 2}, cases) == [[], []]
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_over_gloo(run_ranks: Any, tmp_path: Path) -> None:
    cases = [(3, name, "bf16, accumulate", "mixed", "clipped") for name in ("cpu all", "nvme both", "mix")]
    assert run_ranks(2, differing, str(tmp_path), {"data": 2}, cases, False) == [[], []]


@pytest.mark.full
def test_replicas_of_shards(run_ranks: Any, tmp_path: Path) -> None:
    cases = [(3, "cpu all", "none", "mixed", "adamw"), (1, "mix", "bf16", "bare", "clipped")]
    assert run_ranks(4, differing, str(tmp_path), {"replica": 2, "data": 2}, cases) == [[]] * 4


def resumed(path: str) -> bool:
    """Whether a run on disk, saved and restored in the middle, is one that never stopped and had no disk."""
    mesh, transforms, data = fz.make_mesh(data=-1), (fz.shard_params(), *OFFLOADS["nvme both"](path)), models.batches(4)
    _, want = trained(mesh, (fz.shard_params(),), num_steps=4)[0]
    _, train, state = trained(mesh, transforms, num_steps=2)
    fz.checkpoint.save(f"{path}/saved", state)
    state = train.restore(f"{path}/saved", models.gpt_init)
    for batch in data[2:]:
        state, _ = train(state, models.part(batch, mesh))
    return same(train.gather(state), want)


@pytest.mark.full
def test_a_restored_run_goes_on_as_if_it_had_not_stopped(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(2, resumed, str(tmp_path)) == [True, True]
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
