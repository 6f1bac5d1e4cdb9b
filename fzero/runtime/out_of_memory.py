"""Adds to an out-of-memory error the planned memory of the step, and the transforms that lower it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fzero._utils.units import size
from fzero.compiler.budget_report import Budget
from fzero.compiler.lowered import Lowered
from fzero.compiler.program_selection import advice_on
from fzero.mesh import Mesh
from fzero.plan.device_lookup import get_device
from fzero.plan.plan import Plan
from fzero.runtime.error_translation import raise_out_of_memory
from fzero.step import Step


def raise_with_advice(
    error: Exception,
    owner: str,
    step: Step,
    mesh: Mesh,
    backend: str,
    lowered: Lowered,
    plan: Callable[[], Plan],
) -> None:
    """Raises OutOfMemory with advice in place of an error that says that memory is full; returns for any other error.

    Args:
        plan: returns the plan of the program.
    """
    raise_out_of_memory(error, owner, lambda: _advice(step, mesh, backend, lowered, plan()))


def _advice(step: Step, mesh: Mesh, backend: str, lowered: Lowered, plan: Plan) -> list[str]:
    """Returns the planned peak of a program that ran out of memory, and transforms that lower it, each with the new
    peak."""
    kind = mesh.device.type
    total = torch.cuda.mem_get_info(mesh.device)[1] if kind == "cuda" else None
    problems = [f"planned: {size(plan.peak_bytes)}" + (f" of {size(total)}" if total else "")]
    if total is not None and plan.peak_bytes <= total:
        problems.append("this does not include other memory that this process or other processes hold on the device")
        total = None
    budget = Budget(total, get_device(None, kind), backend)
    return problems + advice_on(step, mesh, lowered.params, lowered.batch, budget, plan)
