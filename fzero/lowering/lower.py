"""Lowers a step to a program: every arrow of the design's picture, in order.

    step + example batch -- trace --> base program -- passes (fzero/passes/pipeline.py) --> finished program

After every pass the program is verified. Under a memory budget the arrows after the trace are gone through for several
choices (fzero/lowering/variants.py); the best is taken (fzero/lowering/search.py) and verified. Nothing here needs
devices: `lower` works for any mesh on abstract tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fzero.arguments import plain_numbers
from fzero.errors import FzeroTypeError
from fzero.inductor_folder import guard_inductor
from fzero.lowering.advice import advise
from fzero.lowering.auto import resolve
from fzero.lowering.base_program import lower_eval
from fzero.lowering.budget import Budget, unmet
from fzero.lowering.choose_formats import check_links_known, choose_formats, open_formats
from fzero.lowering.choose_rules import choose_rules
from fzero.lowering.choose_stages import choose_stages
from fzero.lowering.layouts import abstract, abstract_params, batch_inputs, params_inputs, precision_of, zero_of
from fzero.lowering.lowered import Lowered
from fzero.lowering.search import Search
from fzero.lowering.slots import check_used
from fzero.lowering.traced import Traced, trace_step
from fzero.lowering.variants import Variants, first_choice
from fzero.mesh import AbstractMesh, Mesh
from fzero.passes.choice import Choice
from fzero.passes.pipeline import FIRST, Asked
from fzero.plan.cost import check_backend_name
from fzero.plan.devices import Device, get_device
from fzero.plan.inductor.temporaries import temporaries_on
from fzero.plan.plan import Plan, peak_bytes, plan
from fzero.program.ir import Program
from fzero.program.lines import Inputs
from fzero.program.verify_stages import meeting
from fzero.progress import within
from fzero.step import EvalStep, Step
from fzero.step.checks import check_arguments, check_params, no_step
from fzero.trace.record import without_gc
from fzero.transforms import accumulate
from fzero.transforms.base import find, on_device
from fzero.transforms.compress import Formats
from fzero.units import parse_budgets


@plain_numbers
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
    """The program of a step on a mesh, from abstract values: no process group, no memory.

    Args:
        step: a training or evaluation step with its transforms.
        mesh: a `Mesh`, or an `AbstractMesh` of devices one does not have.
        params: a pytree of tensors with the shapes of the whole leaves (meta tensors will do), or a function of a key
            that returns one.
        batch: one rank's batch: a pytree of tensors (meta tensors will do). For an evaluation the tuple of its
            arguments.
        memory_budget: bytes of each rank, or text ("80GB"): the program that is predicted to be fastest within it. By
            default the one that keeps at most two blocks' parameters whole.
        host_budget, disk_budget: likewise, of the host's memory, where it is another than the device's, and of scratch
            files. What they are is `Plan.host_peak_bytes` and `disk_bytes`. With a host budget its room is used: what
            rests there may then be updated on a guess.
        device: that the plan and the budget are for, a `Device`, the name of a known one ("h100", …), or the path of a
            calibration file: an abstract mesh is one of such devices. By default this machine's, or the mesh's.
        backend: likewise.
        skip: names of passes to leave out, for whoever looks for a fault (`fzero show --skip`).

    Raises: everything that can be wrong with a step, a transform or a batch, before anything runs; a `BudgetError` if
        it does not fit.

    A step with `offload("auto")`, or `tensor_parallel` without rules, is resolved first, for this batch and these
    budgets: `plan.decisions` says to what, and why.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1)))
        >>> params, batch = {"w": torch.empty(4, 3, device="meta")}, torch.empty(2, 4, device="meta")
        >>> lowered = lower(step, fz.AbstractMesh(data=2), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start")]
        ['all_gather_start', 'all_reduce_start', 'reduce_scatter_start', 'all_reduce_start']
    """
    if not isinstance(step, (Step, EvalStep)):
        raise no_step("lower", "lowers", step)
    wrong = fix = None
    if not isinstance(mesh, AbstractMesh):
        wrong = f"a mesh is made by make_mesh or AbstractMesh, not {type(mesh).__name__}"
        fix = "e.g. fz.AbstractMesh(data=8)"
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
        mesh = mesh.of_type(rates.type)
    step = on_device(step, mesh.device if isinstance(mesh, Mesh) else None)
    if device is None:
        check_links_known(step, mesh, rates)
    nbytes, host, disk = parse_budgets(memory_budget, host_budget, disk_budget)
    skip = frozenset((skip,) if isinstance(skip, str) else skip)
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
    """As `lower`, whose arguments are checked. `draft`: to be planned alone, as of `lower_inputs`."""
    chosen, traced = (), None
    with without_gc():
        if isinstance(step, Step):
            step, ruled = choose_rules(step, mesh, params, batch_inputs(batch))
            step, chosen, traced = resolve(step, mesh, params, batch_inputs(batch), budget, skip)
            step, staged = choose_stages(step, mesh, params, batch_inputs(batch))
            chosen, traced = (*ruled, *chosen, *staged), None if staged else traced
        inputs = params_inputs(step, mesh, params), batch_inputs(batch)
        lowered = lower_inputs(step, mesh, *inputs, budget, traced, skip=skip, draft=draft)
    return replace(lowered, device=budget.device, backend=budget.backend, chosen=chosen)


def lower_inputs(
    step: Step | EvalStep,
    mesh: AbstractMesh,
    params: Inputs,
    batch: Inputs,
    budget: Budget | None = None,
    traced: Traced | None = None,
    limited: bool = False,
    skip: frozenset[str] = frozenset(),
    formats: Formats | None = None,
    draft: bool = False,
) -> Lowered:
    """As `lower`, from leaf tables. `traced`: the step as `resolve` has traced it already; `limited`: the choice that
    takes least memory is asked for, without a budget; `formats`: those of `compress("auto")` that a state has
    recorded; `draft`: programs are not verified, and an error has no advice."""
    opt_state = watched = None
    raises = ()
    if isinstance(step, EvalStep):
        check_arguments(step.fn, batch.structure.num_children)
        recorded, structure, *_ = lower_eval(step.name, step.fn, params, batch, mesh, precision_of(step))
        variants = Variants(
            replace(recorded, transforms=step.transforms),
            Asked(zero_of(step, mesh), skip=skip, temporaries=temporaries_on(mesh)),
        )
        starts, passes = [[Choice()]], ()  # nothing is open
    else:
        traced = traced or trace_step(step, mesh, params, batch, skip=skip)
        variants, opt_state, structure, watched = traced.variants, traced.opt_state, traced.structure, traced.watched
        raises = traced.raises
        limited = limited or (budget is not None and budget.nbytes is not None)
        starts, passes = variants.starts(first_choice(step, mesh, limited), budget), variants.passes

    axis, spec = zero_of(step, mesh).stages, open_formats(step)
    here = mesh.index(axis) if axis and isinstance(mesh, Mesh) else 0
    stages = range(mesh.axes[axis] if axis else 1)

    def programs_of(choice: Choice) -> tuple[Program, ...]:
        return tuple(variants(replace(choice, stage=n)) for n in stages)

    def lowered(choice: Choice) -> Lowered:
        programs = programs_of(choice) if draft else variants.all_verified(choice)
        if traced is not None:
            check_used(programs[0], traced.slots)
        return Lowered(
            meeting(programs) if axis else programs,
            params,
            opt_state,
            batch,
            structure,
            budget,
            choice,
            watched=watched,
            raises=raises,
            stage=here,
            stages=lambda: _stages(variants, replace(choice, stage=here)),
        )

    if budget is None:
        return lowered(starts[0][0])
    search = Search(programs_of, passes, budget)
    with within("planning", "the fastest program that fits"):
        choice = next(filter(None, map(search.best, starts)), None)
        if choice is not None and spec is not None:
            choice = _with_formats(variants, search, choice, starts, formats or ())
    if choice is None:
        programs = programs_of(starts[-1][0]) if draft else variants.all_verified(starts[-1][0])
        program = _largest(programs, budget)
        found = plan(program, budget.device, backend=budget.backend, stages=programs)
        over = budget.nbytes is not None and found.peak_bytes > budget.nbytes and not draft
        advice = advice_on(step, mesh, params, batch, budget, found) if over and isinstance(step, Step) else ()
        raise unmet(program, found, budget, advice, _rows(step, batch))
    return lowered(choice)


def _with_formats(
    variants: Variants, search: Search, choice: Choice, starts: Sequence[Sequence[Choice]], recorded: Formats
) -> Choice:
    """The best choice with the formats of `compress("auto")`. `choice`: the best one without."""
    chosen = choose_formats(variants, search, choice, recorded)
    formats = {"wire": chosen.wire, "wire_because": chosen.wire_because}
    if not search.passes or not any(x.params or x.grads for x in chosen.wire):
        return chosen
    again = (search.best([replace(c, **formats) for c in group]) for group in starts)
    why = "in codes the step does not fit the budget"
    plain = tuple(x._replace(params=None, grads=None) for x in chosen.wire)
    return next(filter(None, again), replace(choice, wire=plain, wire_because=(why,) * len(plain)))


def advice_on(step: Step, mesh: AbstractMesh, params: Inputs, batch: Inputs, budget: Budget, found: Plan) -> list[str]:
    """Transforms that lower the peak of a plan, each with the new peak."""

    def asked(more: Step) -> Program:
        leaves = params_inputs(more, mesh, abstract_params(params))
        return _largest(lower_inputs(more, mesh, leaves, batch, limited=True).programs, budget)

    return advise(step, mesh, params, budget, found, asked)


def _largest(programs: Sequence[Program], budget: Budget) -> Program:
    """The program that takes most of the device's memory."""
    return max(programs, key=lambda program: peak_bytes(program, budget.device, budget.backend)[0])


def _stages(variants: Variants, choice: Choice) -> dict[str, Program]:
    """The recorded program, and that of each pass that runs."""
    return {FIRST: variants.recorded, **{passed.name: made for passed, made in variants.stages(choice)}}


def _rows(step: Step | EvalStep, batch: Inputs) -> int:
    """The rows of a rank's batch that are computed with at once."""
    found = find(step.transforms, accumulate.Accumulate) if isinstance(step, Step) else None
    return max((leaf.shape[0] for leaf in batch.leaves if leaf.shape), default=1) // (
        found.num_micro_batches if found else 1
    )
