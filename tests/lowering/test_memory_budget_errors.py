"""What a budget that cannot be kept says: what fills the memory, what the gradients wait for, and what would help,
tried."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.errors import BudgetError, FzeroValueError


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def loss_fn(params, batch):
    for p in params:
        batch = layer(p, batch)
    return batch.square().mean()


PLAIN = fz.train_step(loss_fn, optim.adamw(1e-3))
CLIPPED = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
WEIGHTS = 4 * 2 * 32 * 128 * 4  # bytes of the parameters


def refused(
    step: Any, rows: int = 1, budget: Any = "1KB", device: str = "h100", mesh: fz.AbstractMesh | None = None
) -> list[str]:
    """The lines of the error."""
    params = [
        {"up": torch.empty(32, 128, device="meta"), "down": torch.empty(128, 32, device="meta")} for _ in range(4)
    ]
    with pytest.raises(BudgetError) as caught:
        fz.lower(
            step,
            mesh or fz.AbstractMesh(data=1),
            params,
            torch.empty(rows, 32, device="meta"),
            memory_budget=budget,
            device=device,
        )
    return str(caught.value).splitlines()


def line(lines: list[str], begins: str) -> str:
    return next((x.strip() for x in lines if x.strip().startswith(begins)), "")


def test_what_fills_the_memory_and_what_the_gradients_wait_for() -> None:
    lines = refused(CLIPPED, budget=WEIGHTS)
    roles = line(lines, "there: ").removeprefix("there: ").split(", ")
    assert roles[:3] == ["opt_state 256.0 KiB", "params 128.0 KiB", "gradients 128.0 KiB"] and len(roles) > 4
    assert "more than the 128.0 KiB it may have" in lines[1] and " bytes) more" in lines[1]
    assert "clip_by_global_norm" in line(lines, "gradients: ")
    assert not line(refused(PLAIN), "gradients: "), "each is used in the backward, as soon as it is made"
    assert "micro-batches of a loop" in line(refused(fz.accumulate(2)(PLAIN), rows=2), "gradients: ")


@pytest.mark.full
def test_advice_was_tried() -> None:
    """With the peak that it leads to; of the tiers that there are; more batch only where there is a batch."""
    lines = refused(CLIPPED, budget=3 * WEIGHTS)
    offloaded = line(lines, "with fz.offload('cpu', ('opt_state', 'params')): ")
    assert re.search(r", which fits, and \d+\.\d KiB on the host$", offloaded) and "together" not in str(lines)
    assert lines[-1] == "Fix: apply what lowers it most, or raise the budget" and "remat" not in str(lines), (
        "a batch of one row: not a smaller one"
    )
    lines = refused(PLAIN, rows=4096, budget=4 * WEIGHTS)
    assert line(lines, "with fz.accumulate(num_micro_batches=8): ") and line(lines, "with fz.remat(policy='full')")
    assert "use a smaller batch" in lines[-1] and "idle places" not in line(lines, "there: ")
    together = line(lines, "with fz.accumulate(num_micro_batches=8), ")
    assert "together: " in together and together.count("fz.accumulate") == 1
    lines = refused(PLAIN, device="cpu")
    assert line(lines, "with fz.offload('nvme', ('opt_state', 'params'), path='DIR'): ") and "'cpu'" not in str(
        lines
    ), "one memory: there is a disk alone"
    lines = refused(fz.data_parallel(fz.accumulate(4)(PLAIN)), rows=4, mesh=fz.AbstractMesh(data=4))
    assert line(lines, "with fz.shard_params(axis='data'): ") or "fz.shard_params(axis='data')" in str(lines)
    assert line(lines, "with fz.accumulate(num_micro_batches=4, vertical=True): ") or "vertical=True" in str(lines)


def test_few_programs_are_lowered_for_advice_on_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first ones are about what takes the most."""
    monkeypatch.setattr(importlib.import_module("fzero.lowering.advice"), "LINES_FOR_ADVICE", 0)
    advice = [x.strip() for x in refused(PLAIN, rows=4096, budget=4 * WEIGHTS) if x.strip().startswith("with ")]
    assert len(advice) == 1 and advice[0].startswith(("with fz.remat", "with fz.accumulate"))
    advice = [x.strip() for x in refused(CLIPPED, budget=3 * WEIGHTS) if x.strip().startswith("with ")]
    assert len(advice) == 1 and advice[0].startswith("with fz.offload('cpu', ('opt_state', 'params'))")


def test_auto_says_what_fills_the_device() -> None:
    lines = refused(fz.offload("auto")(CLIPPED), budget="40KiB")
    assert " of 40.0 KiB, host " in line(lines, "opt_state and params on the host: device ")
    assert line(lines, "there: ") and "clip_by_global_norm" in line(lines, "gradients: ")
    assert lines[-1] == 'Fix: give it a disk, fz.offload("auto", path=DIR), or raise a budget'


def test_sizes_below_a_mebibyte_can_be_told_apart() -> None:
    assert (
        "B, " in (first := refused(PLAIN, budget="1000B")[1])
        and first.count("KiB") == 2
        and first.endswith("more than the 1000 B it may have")
    )


@pytest.mark.parametrize("wrong", ["0GB", -1, "lots", 1.5])
def test_budgets_that_are_none_are_refused_by_name(wrong: Any) -> None:
    mesh = fz.make_mesh(data=1)
    with pytest.raises(FzeroValueError) as caught:
        fz.compile(PLAIN, mesh, memory_budget=wrong, backend="eager")
    assert f"memory_budget={wrong!r}" in str(caught.value) and "24GiB" in str(caught.value)
    if wrong != "0GB":
        with pytest.raises(FzeroValueError, match=r"host_budget=.*\n.*disk_budget="):
            fz.compile(PLAIN, mesh, host_budget=wrong, disk_budget=wrong, backend="eager")
