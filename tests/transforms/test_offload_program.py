"""The program of a step with offload: the order of transforms, what nothing off leaves alone, what its plan holds at
any depth."""

from __future__ import annotations

import functools
import re
from typing import Any

import models
import pytest
from models import MODELS, OPTIMIZERS
from offloads import BOTH

import fzero as fz
from fzero.ir.program import Program


def lowered(*transforms: Any, ranks: int = 2, optimizer: str = "adamw", layers: int = 3, **mesh: Any) -> Program:
    step = fz.compose(*transforms)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS[optimizer]()))
    batch = models.meta_part(models.batches(1)[0], ranks)
    return fz.lower(step, fz.AbstractMesh(data=ranks, **mesh), lambda key: models.gpt_init(key, layers), batch).program


@pytest.mark.full
@pytest.mark.parametrize("unified", [True, False])
def test_the_order_of_transforms_changes_nothing(unified: bool) -> None:
    records = [
        fz.offload("cpu", "params"),
        fz.offload("nvme", "opt_state", path="/scratch"),
        fz.shard_params(),
        fz.mixed_precision("bf16"),
        fz.accumulate(2),
    ]
    orders = [records, records[::-1], records[2:] + records[:2], records[1:4] + records[:1] + records[4:]]
    texts = {fz.show(lowered(*order, unified_memory=unified)) for order in orders}
    assert len(texts) == 1


def test_a_step_with_nothing_off_is_unchanged() -> None:
    """Where the predicate takes nothing, and on a state of which no leaf is moved."""
    nothing = fz.offload("cpu", BOTH, where=lambda path, leaf: False)
    for transforms in ((fz.data_parallel(),), (fz.shard_params(), fz.accumulate(2))):
        with_, without_ = (fz.show(lowered(*transforms, *more, unified_memory=False)) for more in ((nothing,), ()))
        without_transforms = [re.sub(r"(?s)# transforms: .*?\n(?=# stored)", "", text) for text in (with_, without_)]
        assert without_transforms[0] == without_transforms[1] and "offload" in with_


@functools.cache
def plans(layers: int, *more: Any, optimizer: str = "adamw", unified: bool) -> tuple[fz.Plan, dict[str, int]]:
    """Of a wide model on disk; and how many elements it has, in all and in its first and last block."""
    records = (fz.offload("nvme", BOTH, path="/scratch"), fz.remat("full"), *more)
    step = fz.compose(*records)(fz.train_step(MODELS["gpt"].loss, OPTIMIZERS[optimizer]()))
    mesh = fz.AbstractMesh(data=1, unified_memory=unified)
    lowered = fz.lower(step, mesh, lambda key: models.gpt_init(key, layers, 64), models.meta(models.batches(1)[0]))
    sizes = {part: sum(x.numel for x in lowered.params.leaves if part in x.path) for part in ("", "embed", "head")}
    return lowered.plan_on("cpu", "eager"), sizes


@pytest.mark.full
@pytest.mark.parametrize("unified", [True, False])
def test_memory_does_not_grow_with_depth(unified: bool) -> None:
    """But for what each block was given, kept for its backward: nothing of its parameters, gradients or optimizer
    state."""
    (short, _), (long, _) = (plans(layers, unified=unified) for layers in (4, 12))
    given = models.BATCH * models.SEQ * 64 * 4
    room = 0 if unified else short.peak_bytes // 12  # for gaps in the pool
    assert 8 * given <= long.peak_bytes - short.peak_bytes < 8 * (given + 64) + room  # and a block's share of the norm
    assert long.persistent_bytes == short.persistent_bytes < 64
    (clipped, sizes), (more, deeper) = (plans(layers, optimizer="clipped", unified=unified) for layers in (4, 12))
    # all gradients wait for the norm
    assert more.peak_bytes - clipped.peak_bytes <= 1.05 * 4 * (deeper[""] - sizes[""]) + 8 * given


@pytest.mark.full
def test_activations_in_host_memory_do_not_grow_either() -> None:
    (short, _), (long, _) = (plans(layers, fz.offload("cpu", "activations"), unified=False) for layers in (4, 12))
    assert long.peak_bytes - short.peak_bytes < 8 * 64 + short.peak_bytes // 10  # gaps in the pool
    assert {"disk", "to_device", "to_host"} <= set(long.channels)


@pytest.mark.parametrize("layers", [4, 12])
def test_bytes_on_disk(layers: int) -> None:
    """Parameters once for the forward and once for the backward and the update, moments once, all of it written. The
    last block has forward and backward in one function."""
    plan, sizes = plans(layers, unified=True)
    assert plan.channels["disk"].bytes == (4 + 4 + 8 + 12) * sizes[""] - 4 * sizes["head"]
