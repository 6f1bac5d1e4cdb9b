"""Makes the program of a step for a kind of batch, and an executable of it: traces, lowers and builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from fzero._utils.progress import announce, shown
from fzero.compiler.abstract_values import batch_inputs
from fzero.compiler.budget_report import Budget
from fzero.compiler.lowered import Lowered
from fzero.compiler.program_selection import lower_inputs
from fzero.compiler.search import PredictedCost
from fzero.ir.from_graph import Inputs
from fzero.ir.ops import message_directions
from fzero.mesh import Mesh
from fzero.plan.plan import Plan
from fzero.runtime.build.build import build, build_in_background
from fzero.runtime.build.warm_up import WarmUp
from fzero.runtime.execute import Executable
from fzero.step import EvalStep, Step
from fzero.trace.device_decompositions import on_device
from fzero.transforms.compress import Formats


def title_of(step: Step | EvalStep) -> str:
    """Returns the name of a step as progress lines show it."""
    return f"evaluation {step.name}" if isinstance(step, EvalStep) else step.name


def lower_for_batch(
    step: Step | EvalStep,
    mesh: Mesh,
    params: Inputs,
    batch: Any,
    budget: Callable[[], Budget | None],
    formats: Formats | None,
) -> Lowered:
    """Lowers a step for a batch.

    Args:
        step: the step, with its open choices decided.
        params: the leaf table of the parameters.
        budget: returns limits and rates; called each time that the step is lowered.
        formats: the compression formats that the state has recorded.
    """
    text = lambda: f"tracing and planning {title_of(step)}"  # noqa: E731
    with shown("fzero.compile", text) if mesh.rank == 0 else nullcontext():
        return lower_inputs(step, mesh, params, batch_inputs(batch), budget(), formats=formats)


def build_functions(
    lowered: Lowered, backend: str, mesh: Mesh, title: str, eager: bool
) -> tuple[Mapping[str, Callable[..., Any]], WarmUp | None]:
    """Builds the subgraphs of a program, after all ranks have agreed on the program.

    Args:
        title: what the program is, for messages.
        eager: whether the program may run eagerly while its subgraphs are compiled (`warmup="eager"`). It waits if it
            would then need more memory than its budget.

    Returns: the subgraphs, and the warm-up if some of them are still compiled.
    """
    # the subgraphs of all stages: the ranks divide their compilation among themselves
    used = {op.fn for x in lowered.programs for op, _ in x.walk() if op.op == "call"}
    functions = {n: f for n, f in lowered.program.functions.items() if n in used}
    if eager and backend == "inductor" and _fits_eagerly(lowered, mesh):
        return build_in_background(functions, mesh, title)
    return build(functions, backend, mesh, title), None


def _fits_eagerly(lowered: Lowered, mesh: Mesh) -> bool:
    """Whether the programs of all stages fit the budget if their subgraphs run eagerly, with more temporary values."""
    if lowered.budget is None or lowered.budget.limits == (None, None, None):
        return True
    budget = replace(lowered.budget, backend="eager")
    fits = not budget.over(PredictedCost(lowered.programs, budget).peaks)
    if not fits and mesh.rank == 0:
        announce("fzero.compile", "the first step waits, because eager steps would need more memory than the budget")
    return fits


def connect(
    lowered: Lowered, functions: Mapping[str, Callable[..., Any]], mesh: Mesh, graphs: bool | None
) -> Executable:
    """Makes a program with built subgraphs executable. All ranks call it together.

    Args:
        graphs: whether runs are captured, as in `Executable`.
    """
    return Executable(lowered.program, functions, mesh, graphs=graphs, pairs=message_directions(lowered.programs))


def plan_as_built(lowered: Lowered, backend: str, mesh: Mesh) -> Plan:
    """Returns the plan of a program as it is built for the mesh's device."""
    programs = lowered.programs
    graphs = {id(f.graph): f.graph for program in programs for f in program.functions.values()}
    built = {of: on_device(graph, mesh.device) for of, graph in graphs.items()}  # stages share subgraphs
    functions = (
        {name: replace(f, graph=built[id(f.graph)]) for name, f in program.functions.items()} for program in programs
    )
    as_built = replace(
        lowered,
        programs=tuple(replace(x, functions=f) for x, f in zip(programs, functions, strict=True)),
    )
    return as_built.plan_on(None, backend)
