"""Times each op of a training step as it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fzero._utils.arguments import count
from fzero.errors import FzeroValueError
from fzero.ir.program import Program
from fzero.mesh import Mesh
from fzero.plan.timeline import Event
from fzero.runtime import op_timers
from fzero.runtime.op_hooks import observe
from fzero.step import State


def check_num_steps(steps: int) -> None:
    if problems := count("steps", steps):
        raise FzeroValueError("profile", "invalid arguments", problems, "e.g. train.profile(state, batch, steps=3)")


def profile_steps(
    take_step: Callable[[State], State], state: State, steps: int, run: Any, program: Program, mesh: Mesh
) -> tuple[State, list[Event]]:
    """Takes `steps` steps. Returns the last state with the events of the fastest step.

    Args:
        take_step: takes one step on the batch.
        run: the executable of the program that the step runs.
    """
    measured: list[list[Event]] = []
    for _ in range(steps):
        timer = op_timers.Timer(mesh.device)
        with observe(run, program, timer.before, timer.after):
            state = take_step(state)
        measured.append(timer.events())
    # The fastest step has the least noise from other processes. A mean of all steps would not belong to any timeline.
    return state, min(measured, key=lambda events: events[-1].start + events[-1].seconds - events[0].start)
