"""Lowers a step to a program: every arrow of the picture in docs/design.md, in order.

    step + example batch -- trace --> base program -- passes (fzero/compiler/passes.py) --> finished program

The finished program is verified. With a memory budget, the passes are run for several combinations of options
(fzero/compiler/candidate_programs.py); the best is selected (fzero/compiler/program_selection.py) and verified. Nothing
here needs devices: `lower` works for any mesh, on abstract tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fzero._compat.inductor_folder import guard_inductor
from fzero._utils.arguments import keywords, shown
from fzero._utils.units import parse_budgets
from fzero.compiler.abstract_values import abstract, batch_inputs
from fzero.compiler.auto_compress import check_links_known
from fzero.compiler.auto_offload import resolve
from fzero.compiler.auto_stages import choose_stages
from fzero.compiler.auto_tensor_parallel import choose_rules
from fzero.compiler.budget_report import Budget
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.lowered import Lowered
from fzero.compiler.program_selection import lower_inputs
from fzero.errors import FzeroTypeError
from fzero.mesh import AbstractMesh, Mesh
from fzero.plan.cost import check_backend_name
from fzero.plan.device_lookup import Device, get_device
from fzero.step import EvalStep, Step
from fzero.step.checks import check_params, no_step
from fzero.trace.graph_capture import without_gc
from fzero.transforms.transform import current_pass_name, on_device


@keywords
def lower(
    step: Step | EvalStep,
    mesh: AbstractMesh,
    params: Any,
    batch: Any,
    *,
    memory_budget: int | str | None = None,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    device: Device | str | None = None,
    backend: str = "inductor",
    skip: Iterable[str] = (),
) -> Lowered:
    """Returns the program of a step on a mesh, from abstract values: no process group, no memory.

    Args:
        step: a training or evaluation step with its transforms.
        mesh: a `Mesh`, or an `AbstractMesh` of devices that need not exist here.
        params: a pytree of tensors with the unsharded shapes (meta tensors suffice), or a function of a key that
            returns one.
        batch: one rank's batch: a pytree of tensors (meta tensors suffice). For an evaluation, the tuple of its
            arguments.
        memory_budget: bytes of each rank, or text ("80GB"): the result is the program that is predicted to be fastest
            within this budget. By default, it is the one that keeps at most two blocks' parameters unsharded.
        host_budget, disk_budget: the same for the host's memory, if it is separate from the device's, and for scratch
            files. They limit `Plan.host_peak_bytes` and `disk_bytes`. With a host budget, its memory is used if that
            makes the step faster (docs/transforms/offload.md).
        device: the device that the plan and the budget are for: a `Device`, the name of a known one ("h100", …), or the
            path of a calibration file; an abstract mesh consists of such devices. By default this machine's, or the
            mesh's.
        backend: the backend that the plan and the budget are for.
        skip: names of passes to leave out, for finding faults (`fzero show --skip`).

    Raises: every error of a step, a transform or a batch, before anything runs; a `BudgetError` if it does not fit.

    A step with `offload("auto")`, or with `tensor_parallel` without rules, is resolved first, for this batch and these
    budgets: `plan.decisions` lists the results and the reasons.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1)))
        >>> params, batch = {"w": torch.empty(4, 3, device="meta")}, torch.empty(2, 4, device="meta")
        >>> lowered = lower(step, fz.AbstractMesh(data=2), params, batch)
        >>> [op.op for op in lowered.program.instructions if op.op.endswith("start")]
        ['all_gather_start', 'all_reduce_start', 'reduce_scatter_start', 'all_reduce_start']
    """
    if not isinstance(step, (Step, EvalStep)):
        raise no_step("lower", "lowers", step)
    names = (skip,) if isinstance(skip, str) or not isinstance(skip, Iterable) else tuple(skip)
    wrong = fix = None
    if not isinstance(mesh, AbstractMesh):
        wrong = f"a mesh is made by make_mesh or AbstractMesh, not {type(mesh).__name__}"
        fix = "e.g. fz.AbstractMesh(data=8)"
    elif not all(isinstance(name, str) for name in names):
        wrong, fix = f"skip={shown(skip)}: must be names of passes", 'e.g. skip=["overlap"]'
    elif isinstance(step, EvalStep) and not isinstance(batch, tuple):
        wrong = f"the batch of an evaluation is the tuple of its arguments, not {type(batch).__name__}"
        fix = "pass (batch,)"
    if wrong is not None:
        raise FzeroTypeError("lower", wrong, fix=fix)
    check_backend_name("lower", backend)
    guard_inductor()
    if callable(params):
        params = abstract(params)
    check_params(params)
    rates = device if isinstance(device, Device) else get_device(device, mesh.device_type)
    if device is not None and type(mesh) is AbstractMesh and mesh.device_type != rates.type:
        # An abstract mesh has no devices of its own, so it takes the type of the device that the plan is asked for.
        mesh = mesh.of_type(rates.type)
    step = on_device(step, mesh.device if isinstance(mesh, Mesh) else None)
    # With a named device the user has decided which rates count. Otherwise rates that nobody has measured would
    # silently choose formats.
    if device is None:
        check_links_known(step, mesh, rates)
    nbytes, host, disk = parse_budgets(memory_budget, host_budget, disk_budget)
    skip = frozenset(current_pass_name(name, step.transforms, 7) for name in names)
    return resolve_and_lower(step, mesh, params, batch, Budget(nbytes, rates, backend, host, disk), skip)


def resolve_and_lower(
    step: Step | EvalStep,
    mesh: AbstractMesh,
    params: Any,
    batch: Any,
    budget: Budget,
    skip: frozenset[str] = frozenset(),
    draft: bool = False,
) -> Lowered:
    """Like `lower`, with arguments that have been checked. `draft`: the result is used only for planning, as in
    `lower_inputs`."""
    chosen, traced, options = (), None, None
    with without_gc():
        if isinstance(step, Step):
            step, ruled = choose_rules(step, mesh, params, batch_inputs(batch))
            step, chosen, traced, options = resolve(step, mesh, params, batch_inputs(batch), budget, skip)
            step, staged = choose_stages(step, mesh, params, batch_inputs(batch), budget.device, budget.backend)
            # A trace that was made before stages were chosen is the trace of another step.
            chosen, traced, options = (
                (*ruled, *chosen, *staged),
                None if staged else traced,
                None if staged else options,
            )
        inputs = params_inputs(step, mesh, params), batch_inputs(batch)
        lowered = lower_inputs(step, mesh, *inputs, budget, traced, skip=skip, draft=draft, start=options)
    return replace(lowered, device=budget.device, backend=budget.backend, chosen=chosen)
