"""Selects the program of a step: the one that is predicted to be fastest within a budget. If none fits, the error says
what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fzero._utils.progress import within
from fzero.compiler.abstract_values import abstract_params
from fzero.compiler.advice import advise
from fzero.compiler.auto_compress import choose_formats, open_formats, rungs
from fzero.compiler.budget_report import Budget, unmet
from fzero.compiler.candidate_programs import CandidatePrograms, candidates
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.lowered import Lowered
from fzero.compiler.options import Options
from fzero.compiler.search import Search
from fzero.compiler.traced_step import Traced
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh
from fzero.plan.plan import Plan, peak_bytes, plan
from fzero.step import EvalStep, Step
from fzero.transforms import accumulate
from fzero.transforms.compress import Formats
from fzero.transforms.transform import find


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
    start: Options | None = None,
) -> Lowered:
    """Like `lower`, from tables of tensors.

    Args:
        step, mesh, params, batch, budget, skip: as for `lower`.
        traced: the step's trace, if `resolve` has traced it already.
        limited: the options with the least memory are requested, even without a budget.
        formats: the formats of `compress("auto")` that a state has recorded.
        draft: programs are not verified, and an error has no advice.
        start: options that fit the budget, from which the search begins, if `resolve` has found some.
    """
    found = candidates(step, mesh, params, batch, budget, traced, limited, skip)
    if budget is None:
        # Without rates nothing can be compared.
        return found.lowered(found.starts[0][0], draft)
    search = Search(found.programs, budget, trains=isinstance(step, Step))
    try:
        options = _chosen(step, found, search, formats, start)
    except (LookupError, AttributeError, AssertionError):
        # Programs are searched before they are verified. One that violates the rules may have no cost, so the pass that
        # violates them is named instead.
        found.pass_cache.all_verified(found.starts[0][0])
        raise
    if options is not None:
        return found.lowered(options, draft)
    # The last start needs the least memory of all, so the error names the smallest excess.
    programs = found.finished(found.starts[-1][0], draft)
    program = _largest(programs, budget)
    least = plan(program, budget.device, backend=budget.backend, stages=programs)
    over = budget.nbytes is not None and least.peak_bytes > budget.nbytes and not draft
    advice = advice_on(step, mesh, params, batch, budget, least) if over and isinstance(step, Step) else ()
    raise unmet(program, least, budget, advice, _rows(step, batch))


def _chosen(
    step: Step | EvalStep, found: CandidatePrograms, search: Search, formats: Formats | None, start: Options | None
) -> Options | None:
    """Returns the options of the fastest program that fits; None if none does."""
    with within("planning", "the fastest program that fits"):
        if open_formats(step) is not None:
            return _with_formats(found, search, formats or ())
        # `map` is lazy: a start that needs less memory is searched only if nothing fits from those before it.
        starts = found.starts
        if start is not None:
            # If compute waits for transfers, other options with as few values in flight may be faster.
            like = next(group for group in starts if group[0].order == start.order)
            starts = [like if search.waits(start) else [start]]
        return next(filter(None, map(search.best, starts)), None)


def _with_formats(found: CandidatePrograms, search: Search, recorded: Formats) -> Options | None:
    """Returns the best options with formats for `compress("auto")`: those of the fastest step if it fits with them,
    otherwise the least compression that fits. None if none fits."""

    def best(**formats: Any) -> Options | None:
        groups = ([replace(options, **formats) for options in group] for group in found.starts)
        return next(filter(None, map(search.best, groups)), None)

    plain, least = best(), found.starts[-1][0]
    chosen = choose_formats(found.pass_cache, search, plain or least, recorded)
    compressed = any(x.params or x.grads for x in chosen.wire)
    if plain is not None and not (search.limited and compressed):
        return chosen
    if compressed and (fitting := best(wire=chosen.wire, wire_because=chosen.wire_because)) is not None:
        return fitting
    none, *more = rungs(found.pass_cache, least) or [()]
    if plain is not None:
        why = "encoded, the step does not fit the budget"
        return replace(plain, wire=none, wire_because=(why,) * len(none))
    why = "with less compression the step does not fit the budget"
    return next(filter(None, (best(wire=wire, wire_because=(why,) * len(wire)) for wire in more)), None)


def advice_on(step: Step, mesh: AbstractMesh, params: Inputs, batch: Inputs, budget: Budget, found: Plan) -> list[str]:
    """Returns transforms that lower the peak of a plan, each with the new peak."""

    def asked(more: Step) -> Program:
        leaves = params_inputs(more, mesh, abstract_params(params))
        return _largest(lower_inputs(more, mesh, leaves, batch, limited=True).programs, budget)

    return advise(step, mesh, params, budget, found, asked)


def _largest(programs: Sequence[Program], budget: Budget) -> Program:
    """The program that takes the most device memory."""
    return max(programs, key=lambda program: peak_bytes(program, budget.device, budget.backend)[0])


def _rows(step: Step | EvalStep, batch: Inputs) -> int:
    """The number of samples of a rank's batch that are computed with at once."""
    found = find(step.transforms, accumulate.Accumulate) if isinstance(step, Step) else None
    return max((leaf.shape[0] for leaf in batch.leaves if leaf.shape), default=1) // (
        found.num_micro_batches if found else 1
    )
