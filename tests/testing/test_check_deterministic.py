"""Steps that are repeated from the same state (fz.testing.check_deterministic): equal bits, or the tensor and the rank
that differ by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import survivor
import torch

import fzero as fz


def errs_once(lowered: Any, run: Any) -> None:
    """Adds 0.5 to one element of what this rank's backward returns, the next time that it runs."""
    ops = [op for op, _ in lowered.program.walk()]
    summed = next(op.args for op in ops if op.op == "reduce_scatter_start")
    name = next(x.fn for x in ops if x.fn and {v.name for v in x.out} & {*summed})
    right = run.namespace[name]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        run.namespace[name] = right
        max(fz.tree.leaves(out), key=torch.Tensor.numel).view(-1)[5] += 0.5
        return out

    run.namespace[name] = wrong


def checked() -> list[Any]:
    mesh = fz.make_mesh(data=2)
    train = fz.compile(survivor.STEP, mesh, backend="eager")
    state, batch = train.init(survivor.init, fz.random.key(0)), survivor.batch_at(0, mesh.rank, 2)
    before = [x.clone() for x in fz.tree.leaves(state)]
    said = []
    for errs in (False, True):
        built = train.built(state, batch)
        if errs and mesh.rank == 1:
            errs_once(*built)
        try:
            fz.testing.check_deterministic(train, state, batch)
            said.append("")
        except fz.errors.DivergenceError as error:
            said.append(str(error))
    same = all(torch.equal(x, y) for x, y in zip(fz.tree.leaves(state), before, strict=True))
    fz.close_mesh()
    return [said, same]


def test_a_gradient_that_changes_once_on_one_rank_is_named_on_every_rank(run_ranks: Any) -> None:
    (zero, same), (one, also_same) = run_ranks(2, checked)
    assert zero == one and zero[0] == "" and same and also_same
    assert re.search(r"(?s)gave different bits.*rank 0: (params|opt_state).*rank 1: (params|opt_state)", zero[1]), zero


def test_bits_are_compared_so_a_frozen_nan_equals_itself() -> None:
    params = {"c": torch.full((3,), torch.nan, dtype=torch.complex64), "h": torch.ones(2, 5, dtype=torch.bfloat16)}
    optimizer = fz.optim.sgd(0.1)
    step = fz.train_step(lambda p, x: p["h"].sum() * x, optimizer, trainable=lambda path, x: not x.is_complex())
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    fz.testing.check_deterministic(train, train.init(params), torch.ones(()))


def test_wrong_arguments_and_a_state_on_disk(tmp_path: Path) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.adamw(0.5))
    train = fz.compile(fz.offload("nvme", "opt_state", path=tmp_path)(step), fz.make_mesh(data=1), backend="eager")
    state = train.init({"w": torch.ones(1 << 16)})
    with pytest.raises(fz.errors.FzeroTypeError, match="a tensor on disk cannot be copied"):
        fz.testing.check_deterministic(train, state, torch.ones(1 << 16))
    with pytest.raises(fz.errors.FzeroTypeError, match="not of Step, dict"):
        fz.testing.check_deterministic(step, {}, torch.ones(1))  # type: ignore[arg-type]
