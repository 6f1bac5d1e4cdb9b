"""Puts transforms that say where leaves rest in the place of `offload("auto")`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from fzero.lowering.auto import check_auto, choose_tiers
from fzero.lowering.budget import Budget
from fzero.lowering.layouts import auto_of, mirrors, offloads, params_inputs, precision_of, zero_of
from fzero.lowering.traced import Traced, trace_step, with_leaves
from fzero.lowering.variants import Variants, first_choice
from fzero.mesh import AbstractMesh
from fzero.plan.plan import PlanDecision
from fzero.program.lines import Inputs
from fzero.progress import shown
from fzero.step import Step
from fzero.transforms.offload import Offload, tiers_of


class Resolved(NamedTuple):
    """A step without open tiers, the reasons, and its trace if the decision was made here."""

    step: Step
    chosen: tuple[PlanDecision, ...] = ()
    traced: Traced | None = None


def resolve(
    step: Step, mesh: AbstractMesh, params: Any, batch: Inputs, budget: Budget, skip: frozenset[str] = frozenset()
) -> Resolved:
    """The step with what its `offload("auto")` comes to in its place, and why; the step itself if it has none.

    Args:
        step, mesh: as for `lower`.
        params: the tree, with whole leaves.
        batch: that it is resolved for.
        budget: to fit.
        skip: passes to leave out.
    """
    auto = auto_of(step)
    if auto is None:
        return Resolved(step)
    check_auto(auto, budget.limits)
    left = replace(step, transforms=tuple(t for t in step.transforms if t != auto))
    inputs = params_inputs(left, mesh, params)
    traced = trace_step(left, mesh, inputs, batch, precision_of(left), skip=skip)  # with whatever may rest elsewhere
    mirrored = mirrors(traced.opt_state.leaves, inputs)
    built: dict[tuple[Offload, ...], Traced] = {}

    def build(records: tuple[Offload, ...]) -> Variants:
        asked = _with_records(left, records)
        rests = params_inputs(asked, mesh, params)
        tiers = tiers_of(offloads(asked), rests.leaves, rests.ties, zero_of(asked, mesh).casts)
        on = {leaf.path: leaf.layout.tier for leaf in rests.leaves}
        on |= {
            leaf.path: tiers[i].opt_state
            for leaf, i in zip(traced.opt_state.leaves, mirrored, strict=True)
            if i is not None
        }
        copies, gradients = with_leaves(asked, mesh, rests)
        recorded = traced.variants.recorded
        rest = lambda leaf: leaf.with_layout(tier=on.get(leaf.path, leaf.layout.tier))  # noqa: E731
        laid_out = replace(
            recorded, leaves={name: rest(leaf) for name, leaf in recorded.leaves.items()}, transforms=asked.transforms
        )
        demands = replace(traced.variants.asked, copies=copies, gradients=gradients)
        variants = Variants(laid_out, demands, traced.variants)
        opt_state = replace(traced.opt_state, leaves=tuple(map(rest, traced.opt_state.leaves)))
        built[records] = replace(traced, variants=variants, opt_state=opt_state)
        return variants

    progress_texts = ["the first program"]
    with nullcontext() if getattr(mesh, "rank", 0) else shown("fzero.offload('auto')", lambda: progress_texts[-1]):
        least = first_choice(left, mesh, budget.nbytes is not None)[0]
        records, decision = choose_tiers(build, least, auto, budget, mesh.unified_memory, progress_texts.append)
    return Resolved(_with_records(left, records), (decision,), built[records])


def _with_records(step: Step, records: Sequence[Offload]) -> Step:
    """The step with these transforms more, in the canonical order."""
    return replace(step, transforms=tuple(sorted((*step.transforms, *records), key=lambda t: (t.order, str(t)))))
