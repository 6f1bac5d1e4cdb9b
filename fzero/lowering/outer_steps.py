"""Lowers the outer steps of `fz.local_sgd`, for a plan of them, and holds them against a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero.errors import BudgetError
from fzero.layout import ANCHOR
from fzero.lowering.budget import Budget
from fzero.lowering.layouts import batch_inputs, params_inputs
from fzero.lowering.lowered import Lowered
from fzero.lowering.slots import Slots
from fzero.mesh import AbstractMesh
from fzero.plan.plan import plan
from fzero.program.lines import Inputs
from fzero.step import Step
from fzero.transforms.base import find
from fzero.transforms.local_sgd import OUTER, LocalSGD
from fzero.units import exact_size, size


def outer_steps(
    step: Step, mesh: AbstractMesh, slots: Slots, lower: Callable[[Step, AbstractMesh, Inputs, Inputs], Lowered]
) -> tuple[Lowered, ...]:
    """The outer step of each fragment that has parameters on this rank, lowered for the ranks along its axis."""
    spec = find(step.transforms, LocalSGD)
    if spec is None:
        return ()
    axes: dict[str, Any] = {spec.axis: mesh.axes[spec.axis]}
    memories = mesh.shared_memory, mesh.unified_memory
    line = AbstractMesh(device_type=mesh.device_type, shared_memory=memories[0], unified_memory=memories[1], **axes)
    leaves = slots.inputs.leaves
    metas = {i: torch.empty(leaf.shard_numel(mesh), dtype=leaf.dtype, device="meta") for i, leaf in enumerate(leaves)}
    found = []
    for anchor in slots.inputs.rebuild(metas)[ANCHOR]:
        if tree.leaves(anchor):
            outer = spec.outer_step(anchor, line.size)
            found.append(lower(outer, line, params_inputs(outer, line, anchor), batch_inputs(anchor)))
    return tuple(found)


def check_sync(lowered: Lowered, budget: Budget) -> None:
    """Raises BudgetError if a sync of replicas takes more of the device than the budget has. There are the state at
    rest and the pool of the step then. An outer step comes on top, without its own state and the parameters: they
    rest."""
    if budget.nbytes is None or not lowered.outer:
        return
    program, leaves = lowered.program, lowered.program.leaves.values()
    tiers = {leaf.path.removeprefix("params"): leaf.layout.tier for leaf in lowered.params.leaves}
    step, problems = plan(program, budget.device, backend=budget.backend), list[str]()
    for i, outer in enumerate(lowered.outer):
        start = f"extras['{ANCHOR}'][{i}]"
        anchors = [leaf for leaf in leaves if leaf.path.startswith(start)]
        moments = [leaf for leaf in leaves if leaf.path.startswith(f"extras['{OUTER}'][{i}]")]
        counted = [leaf for leaf in anchors + moments if leaf.layout.tier == "device"]
        counted += [leaf for leaf in anchors if tiers[leaf.path.removeprefix(start)] == "device"]
        besides = outer.plan_on(budget.device, budget.backend).peak_bytes
        besides -= sum(leaf.shard_bytes(program.mesh) for leaf in counted)
        needed = step.resting_bytes + step.pool_bytes + max(0, besides)
        if needed > budget.nbytes:
            part = f" of fragment {i}" if len(lowered.outer) > 1 else ""
            problems.append(
                f"a sync{part} needs {size(needed)}, {exact_size(needed - budget.nbytes)} more than the "
                f"{size(budget.nbytes)} it may have: {size(besides)} beside the state and the step's pool"
            )
    if problems:
        fix = "let fewer parameters meet at once, fz.local_sgd(fragments=4), or raise the budget"
        raise BudgetError("memory_budget", "the sync of replicas does not fit", problems, fix)
