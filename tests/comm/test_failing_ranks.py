"""A rank that fails, or is stopped, while the others wait for it: they hear of it and why, at once, and none is left
waiting. One that raises alike goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fzero as fz
from fzero.checkpoint import tensor_digests
from fzero.comm import control_group
from fzero.runtime import program_build, step_resolution

CONFIG = {"scale": 1.0, "last loss": 0.0}
STEP = fz.shard_params(fz.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean() * CONFIG["scale"], fz.optim.sgd(0.0)))
PARAMS, BATCH = {"w": torch.ones(3, 2)}, torch.ones(2, 3)


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def one_after_another(folder: str) -> tuple[dict[str, str], float]:
    """What each failure is on this rank; and the loss of a step after all of them, for which the ranks must be where
    they were. Ten minutes are waited."""
    mesh = fz.make_mesh(data=2)
    failing = mesh.rank == 1
    train = fz.compile(STEP, mesh, backend="eager")
    state = train.init(PARAMS)

    def fails(owner: Any, name: str, error: BaseException, act: Callable[[], Any], here: bool = failing) -> str:
        with patch.object(owner, name, raises(error) if here else getattr(owner, name)):
            try:
                act()
            except BaseException as caught:
                return f"{type(caught).__name__}: {caught}"
        return ""

    planned = fz.compile(fz.offload("cpu", "opt_state")(STEP), mesh, backend="eager", memory_budget="1GB")
    said = {
        "build": fails(program_build, "build", RuntimeError("no space left"), lambda: train(state, BATCH)),
        "rates": fails(
            step_resolution,
            "get_device",
            RuntimeError("cannot measure"),
            lambda: planned(planned.init(PARAMS), BATCH),
            here=mesh.rank == 0,
        ),
        "stopped": fails(
            torch,
            "ones",
            KeyboardInterrupt(),
            lambda: control_group.run_on_all_ranks(mesh.control, "init", lambda: torch.ones(1)),
        ),
        "compared": fails(tensor_digests, "digest", RuntimeError("out of memory"), lambda: train.init(PARAMS)),
        "saved": fails(
            tensor_digests, "digest", RuntimeError("out of memory"), lambda: fz.checkpoint.save(folder, state)
        ),
        "saving": fails(
            fz.checkpoint.saving, "write_rank_file", KeyboardInterrupt(), lambda: fz.checkpoint.save(folder, state)
        ),
    }
    state, metrics = train(state, BATCH)
    if failing:  # what it writes down is nobody's error, and what the loss reads is everybody's
        CONFIG["last loss"] = float(metrics["loss"])
    state, _ = train(state, BATCH)
    with patch.dict(CONFIG, {"scale": 2.0} if failing else {}):
        said["settings"] = fails(torch, "ones", ValueError(), lambda: train(state, BATCH), here=False)
    return said, float(train(state, BATCH)[1]["loss"])


def test_a_rank_that_fails_keeps_nobody_waiting(run_ranks: Any, tmp_path: Path) -> None:
    (other, loss), (failing, same) = run_ranks(2, one_after_another, str(tmp_path), timeout=90)
    assert loss == same == 9.0 and not list(tmp_path.iterdir())
    assert failing["build"] == "RuntimeError: no space left", failing
    assert "rank 1: RuntimeError: no space left" in other["build"], other
    assert failing["rates"] == other["rates"] and "rank 0: RuntimeError: cannot measure" in other["rates"], other
    assert failing["stopped"].startswith("KeyboardInterrupt") and "rank 1: KeyboardInterrupt" in other["stopped"], other
    assert failing["compared"] == "RuntimeError: out of memory", failing
    assert "rank 1: RuntimeError: out of memory" in other["compared"], other
    assert failing["saved"] == other["saved"] and "rank 1: RuntimeError: out of memory" in other["saved"], other
    assert failing["settings"] == other["settings"] and "CONFIG['scale']: 1.0 before, 2.0 now" in other["settings"], (
        other
    )
    assert failing["saving"].startswith("KeyboardInterrupt") and "rank 1: KeyboardInterrupt" in other["saving"], other
