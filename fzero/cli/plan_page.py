"""Writes the page of `fzero plan --html`: the plan, with what the command knows in addition to it.

The command has the step, so it can plan it with other transforms and on other devices; and it has the budgets and the
script of a transformers model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fzero._utils.progress import shown
from fzero.cli.hf_script import Script
from fzero.cli.plan_summary import Answer
from fzero.compiler.alternatives import NOT_PLANNED, devices_table, other_transforms, transforms_table
from fzero.compiler.budget_report import Budget
from fzero.compiler.combined_transforms import auto_of
from fzero.plan.page.op_costs import shown_path
from fzero.plan.page.suggestions import Suggestions
from fzero.plan.plan import Plan
from fzero.plan.render import TextTable
from fzero.step import Step

if TYPE_CHECKING:
    from fzero.cli.plan_command import PlanCommand
    from fzero.cli.step_command import LoweredTarget


def write_page(command: PlanCommand, path: Path, found: LoweredTarget, answer: Answer, refusal: str = "") -> None:
    """Writes the page of a plan.

    Args:
        command: the flags.
        path: the file; it has been checked.
        found: the lowered step, with the step, its parameters and its batch.
        answer: what the command prints.
        refusal: the error, if the step does not fit its budgets and was lowered without them.
    """
    plan, script = found.lowered.plan, found.script
    memory, source = _memory(command, answer)
    given = Suggestions(
        title="" if script is None else f"{script.name} on {answer.num_ranks} x {plan.device.name}",
        memory=memory,
        memory_source=source,
        problems=[line.strip() for line in refusal.splitlines()[1:] if line.strip()],
        better=[] if refusal else answer.better(),
        tables=_tables(command, found, plan, memory),
        assumptions=answer.assumptions(),
        code=_code(command, script),
    )
    plan.html(path, suggestions=given)
    print(f"the page: {path}", file=sys.stderr)


def _memory(command: PlanCommand, answer: Answer) -> tuple[int | None, str]:
    """Returns the bytes that a rank's program may use, and what they are."""
    if command.budget_bytes is not None:
        return command.budget_bytes, "the budget"
    plan, budget = answer.plan, answer.lowered.budget
    limit = budget.nbytes if budget else None
    if limit is None and not answer.known:
        return None, ""
    left = plan.device.memory_bytes - plan.process_bytes
    return left if limit is None else limit, f"available to a process on {plan.device.name}"


def _tables(command: PlanCommand, found: LoweredTarget, plan: Plan, memory: int | None) -> Sequence[TextTable]:
    """Returns the alternatives. Those within a budget are planned within it."""
    tables, lowered = list[TextTable](), found.lowered
    if isinstance(found.step, Step):
        tables.append(_other_transforms(found, plan, memory, command.html_seconds))
    devices = devices_table(lowered, plan)
    return [*tables, *([devices] if devices.rows else [])]


def _other_transforms(found: LoweredTarget, plan: Plan, memory: int | None, seconds: float) -> TextTable:
    """Returns the plans with other transforms. The title says what was not varied or not planned.

    For a step with `offload("auto")`, each alternative would be another search for the best tiers, which takes many
    times as long as one plan. The alternatives keep the tiers that were chosen for the step itself.
    """
    step, lowered, title = found.step, found.lowered, "With other transforms"
    if auto_of(step) is not None:
        # The tiers are fixed as they were chosen. Choosing them anew for each alternative would take minutes.
        step = replace(step, transforms=lowered.program.transforms)
        title += ", on the tiers that offload('auto') chose"
    budget = lowered.budget or Budget(None, plan.device, lowered.backend)
    with shown("fzero.plan", lambda: "planning alternatives"):
        others = other_transforms(
            step, lowered.program.mesh, found.params, found.batch, plan, budget, memory, seconds=seconds
        )
    if any(x.why == NOT_PLANNED for x in others):
        title += f" (within {seconds:g} s: --html-seconds)"
    return transforms_table(others, plan, memory, title)


def _code(command: PlanCommand, script: Script | None) -> str:
    """Returns the script of a transformers model, or the calls that compile the target; "" if neither is known. A path
    of the model outside the current folder is shortened, because a page is sent to others.
    """
    if script is not None:
        path = shown_path(script.path)
        return script.with_path(path if Path(path).exists() else f"path/to/{Path(path).name}")
    module, _, function = (command.target or "").rpartition(":")
    name = Path(module).stem if module.endswith(".py") else module
    axes = ", ".join(pair for text in (command.mesh[0] if command.mesh else ()) for pair in text.split(",") if pair)
    if not axes or not name.isidentifier():
        return ""
    budget = "" if command.budget is None else f', batch=batch, memory_budget="{command.budget}"'
    return (
        f"import fzero as fz\nfrom {name} import {function}\n\n"
        f"step, params, batch = {function}()  # the step has its transforms\n"
        f"mesh = fz.make_mesh({axes})\ntrain = fz.compile(step, mesh{budget})\n"
    )
