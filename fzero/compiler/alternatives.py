"""Plans a step in other ways: with one transform more, less or different, and on other devices.

Each alternative transform is lowered like the step itself, so planning them all takes as long as several plans. The
caller limits the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fzero._utils.units import duration, size
from fzero.compiler.abstract_values import abstract
from fzero.compiler.advice import candidates, with_transform
from fzero.compiler.budget_report import Budget
from fzero.compiler.lower import resolve_and_lower
from fzero.compiler.lowered import Lowered
from fzero.compiler.state_budget import shortage
from fzero.errors import BudgetError, FzeroError
from fzero.mesh import AbstractMesh
from fzero.plan.device_lookup import KNOWN
from fzero.plan.plan import Plan, queue_seconds
from fzero.plan.render import TextTable
from fzero.step import Step
from fzero.transforms import accumulate, offload, remat
from fzero.transforms import zero as shard
from fzero.transforms.transform import on_device

NOT_PLANNED = "not planned: no time left"
"""The reason of an alternative that was reached after the time to plan alternatives."""


@dataclass(frozen=True)
class Alternative:
    """A step that differs by one transform, and its plan; None if it has none, for the reason in `why`."""

    code: str
    plan: Plan | None
    why: str = ""

    def fits(self, memory: int | None) -> bool:
        return self.plan is not None and (memory is None or _peak(self.plan) <= memory)


def other_transforms(
    step: Step,
    mesh: AbstractMesh,
    params: Any,
    batch: Any,
    plan: Plan,
    budget: Budget,
    memory: int | None,
    seconds: float = math.inf,
) -> list[Alternative]:
    """Plans a step with other transforms, within the same budgets. Those that fit come first, the fastest first.
    Alternatives that make no difference, or that this step cannot have, are left out.

    Args:
        step, mesh, params, batch: as `lower` takes them.
        plan: the plan of the step itself.
        budget: the budgets that it was planned for, and its device.
        memory: bytes that the program of a rank may use, None if that is not known.
        seconds: the time after which no further alternative is planned. Those that remain are listed without a plan.
    """
    params = abstract(params) if callable(params) else params
    mesh = mesh.of_type(budget.device.type) if mesh.device_type != budget.device.type else mesh
    found, until = list[Alternative](), time.monotonic() + seconds
    short = memory is not None and _peak(plan) > memory
    for code, more in variants(on_device(step, None), mesh, plan, memory_first=short):
        # The remaining alternatives are listed as not planned, so that the table does not suggest that there are no
        # others.
        if time.monotonic() >= until:
            found.append(Alternative(code, None, NOT_PLANNED))
            continue
        try:
            # The state alone may be too large, which is known without tracing.
            fits = shortage(more, mesh, params, budget) is None
            lowered = resolve_and_lower(more, mesh, params, batch, budget, draft=True) if fits else None
        except BudgetError:
            lowered = None
        except FzeroError:  # for example, the batch does not divide into micro-batches
            continue
        if lowered is None:
            found.append(Alternative(code, None, "does not fit"))
        # An equal plan means that the transform changes nothing here, so it is no alternative.
        elif (lowered.plan.step_seconds, _peak(lowered.plan)) != (plan.step_seconds, _peak(plan)):
            found.append(Alternative(code, lowered.plan))
    return sorted(found, key=lambda x: (not x.fits(memory), x.plan.step_seconds if x.plan else math.inf))


def variants(step: Step, mesh: AbstractMesh, plan: Plan, memory_first: bool = False) -> Iterator[tuple[str, Step]]:
    """Yields steps that differ from a step by one transform, each with its code: first those that may be faster, then
    those that may lower the memory, by the share of the peak that they are about; or the other way round.
    """
    seen = {step}
    faster, smaller = list(_faster(step)), candidates(step, mesh, plan)
    for transform in (*smaller, *faster) if memory_first else (*faster, *smaller):
        more = with_transform(_without_higher_stages(step, transform), transform)
        if more is not None and more not in seen:
            seen.add(more)
            yield f"with fz.{transform}", more
    for transform in step.transforms:
        if isinstance(transform, (accumulate.Accumulate, offload.Offload)):
            yield (
                f"without fz.{transform}",
                replace(step, transforms=tuple(t for t in step.transforms if t != transform)),
            )


def _faster(step: Step) -> Iterator[Any]:
    """Yields transforms that recompute less, or communicate less, than those of a step."""
    yield remat.remat("none")
    stages = [t for t in step.transforms if isinstance(t, shard.Parallel) and t.stage]
    for transform in stages:
        lower_stages = (shard.shard_opt_state, shard.shard_grads)
        # A lower ZeRO stage sends less and stores more.
        yield from (make(axis=transform.axis) for make in lower_stages[: transform.stage - 1])


def _without_higher_stages(step: Step, transform: Any) -> Step:
    """Returns the step without the ZeRO stages that do more than `transform`, which could not be combined with it."""
    if not isinstance(transform, shard.Parallel):
        return step
    kept = (t for t in step.transforms if not (isinstance(t, shard.Parallel) and t.covers(transform)))
    return replace(step, transforms=tuple(kept))


def transforms_table(
    found: list[Alternative], plan: Plan, memory: int | None, title: str = "With other transforms"
) -> TextTable:
    """Returns the alternatives as a table, next to the step as it is."""
    rows = [_row(x, plan, memory) for x in (Alternative("as it is", plan), *found)]
    return TextTable(title, ("", "step", "speed", "peak of a rank", "host", ""), rows)


def _row(found: Alternative, plan: Plan, memory: int | None) -> tuple[str, ...]:
    if found.plan is None:
        return found.code, "", "", "", "", found.why
    peak, host = _peak(found.plan), max([found.plan.host_peak_bytes, *(x.host_peak_bytes for x in found.plan.stages)])
    speed = plan.step_seconds / found.plan.step_seconds if found.plan.step_seconds else 1.0
    fits = "" if memory is None else "fits" if peak <= memory else f"{size(peak - memory)} too much"
    return found.code, duration(found.plan.step_seconds), f"{speed:.2f} x", size(peak), size(host) if host else "", fits


def _peak(plan: Plan) -> int:
    return max([plan.peak_bytes, *(stage.peak_bytes for stage in plan.stages)])


def devices_table(lowered: Lowered, plan: Plan) -> TextTable:
    """Returns the time of the same program on other known devices, and whether its peak fits their memory."""
    rows, peak = list[tuple[str, ...]](), _peak(plan) + plan.process_bytes
    for device in KNOWN.values():
        if device.type != plan.device.type or device.name == plan.device.name:
            continue
        taken, _ = queue_seconds(lowered.programs, device, lowered.backend)
        fits = "fits" if peak <= device.memory_bytes else f"{size(peak - device.memory_bytes)} too much"
        speed = plan.step_seconds / taken if taken else 1.0
        rows.append((device.name, duration(taken), f"{speed:.2f} x", size(device.memory_bytes), fits))
    title = "The same program on other devices"
    return TextTable(title, ("", "step", "speed", "memory", "with the process"), rows)
