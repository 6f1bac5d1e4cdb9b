"""Checks that a compiled step gives the same bits when it is repeated (`check_deterministic`)."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fzero import tree
from fzero.comm.control_group import all_gather_values
from fzero.errors import DivergenceError, FzeroTypeError
from fzero.runtime.compiled_step import CompiledStep
from fzero.step import State


def check_deterministic(train: CompiledStep, state: State, batch: Any) -> None:
    """Runs a step twice from the same state, and compares the bits of both results.

    Operations that are not deterministic make a run impossible to repeat; on a machine whose steps are usually
    deterministic, a difference points to failing hardware. On several ranks every rank calls it.

    Args:
        train: the compiled step.
        state: is copied, and stays as it is.
        batch: of the step, as `train` takes it.

    Communication: that of two steps, and a few bytes.
    Memory: two more states.

    Raises:
        DivergenceError: the results differ. On every rank it names the first tensor that differs on each rank.
        FzeroTypeError: arguments of the wrong type; a state with tensors on disk, which cannot be copied.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.adamw(1e-3))
        >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        >>> fz.testing.check_deterministic(train, train.init({"w": torch.ones(3)}), torch.ones(3))
    """
    if not isinstance(train, CompiledStep) or not isinstance(state, State):
        what = f"compares steps of a compiled step and a state, not of {type(train).__name__}, {type(state).__name__}"
        raise FzeroTypeError(
            "check_deterministic", what, fix="check_deterministic(fz.compile(step, mesh), state, batch)"
        )
    # Copied, because a step writes its state in place.
    results = [train(copy.deepcopy(state), batch) for _ in range(2)]
    first, second = (dict(tree.with_names({"loss": metrics["loss"], **after._asdict()})) for after, metrics in results)
    differing = [name for name in first if not torch.equal(_bits(first[name]), _bits(second[name]))]
    found = all_gather_values(
        train.mesh.control, "check_deterministic", lambda: differing[:1] and [differing[0], len(differing)]
    )
    problems = [f"rank {rank}: {x[0]} (tensors that differ: {x[1]})" for rank, x in enumerate(found) if x]
    if problems:
        what = "two runs of a step from the same state gave different bits; the first tensor that differs on each rank:"
        fix = "torch.use_deterministic_algorithms(True) raises at operations that are not deterministic; without any, "
        fix += "suspect the hardware of a rank whose bits change"
        raise DivergenceError("check_deterministic", what, problems, fix)


def _bits(x: torch.Tensor) -> torch.Tensor:
    # Bytes and not values: NaN differs from itself, and zeros of different sign are equal.
    return x.detach().contiguous().view(-1).view(torch.uint8)
