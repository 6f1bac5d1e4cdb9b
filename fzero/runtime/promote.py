"""Applies mixed_precision("auto"): when a step is restored or built, parameters whose overflow or underflow counter
reached the limit are promoted to float32."""

from __future__ import annotations

import logging
from dataclasses import replace

from fzero.errors import message
from fzero.lowering.layouts import leaves_made_anew, precision_of
from fzero.lowering.lowered import Lowered
from fzero.mesh import Mesh
from fzero.optim.loss_scale import LossScale, LossScaleState
from fzero.plan.plan import PlanDecision
from fzero.precision.counters import LIMIT, PrecisionState
from fzero.precision.statistics import Watched
from fzero.program.lines import Inputs
from fzero.ranks import agreement
from fzero.step import State, Step
from fzero.transforms.base import find
from fzero.transforms.precision import MixedPrecision

logger = logging.getLogger("fzero")


class Safer:
    """Makes a step safer by the counts of a state: of the one that is restored, before it is laid out; of the one at
    hand, before a program is built.

    A state without counts, or of a step without "auto", changes nothing. All ranks of the mesh call these together.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._counts: PrecisionState | None = None  # what was decided by
        self._moved: tuple[PlanDecision, ...] = ()  # the blocks that compute in a safer dtype

    def resolved(self, step: Step, params: Inputs, counts: PrecisionState) -> Step:
        """The step with every parameter whose count has reached its limit computed with in float32. All ranks go by the
        counts of the first.

        Args:
            step: with `mixed_precision("auto")`, or without: then it is returned as it is.
            params: the leaf table.
            counts: of the state.

        Communication: a few bytes through the store.
        """
        record = find(step.transforms, MixedPrecision)
        if record is None or not record.auto:
            return step
        highest = [max(pair) for pair in zip(*(x.tolist() for x in counts), strict=True)]
        mine = [
            leaf.path
            for leaf, count in zip(params.leaves, highest, strict=True)
            if count >= LIMIT and record.selects(leaf)
        ]
        safer = tuple(agreement.from_first(self._mesh, "mixed_precision", lambda: mine))
        return replace(step, transforms=tuple(replace(t, safer=safer) if t is record else t for t in step.transforms))

    def before_build(self, step: Step, params: Inputs, state: State) -> Step:
        """The step resolved by the counts of a state, unless that has been laid out otherwise: then the next restore
        does it."""
        if (counts := state.extras.get("precision")) is None:
            return step
        found = self.resolved(step, params, counts)
        if leaves_made_anew(found, self._mesh, params) != leaves_made_anew(step, self._mesh, params):
            return step
        self._counts = counts
        if (scaling := precision_of(found).loss_scale) is not None:
            _renew(state.extras["loss_scale"], scaling, counts)
        return found

    def explained(self, lowered: Lowered, step: Step, params: Inputs) -> Lowered:
        """Adds the blocks that moved, and the reasons, to the decisions of a lowered step; a change goes to the log."""
        if self._counts is None or lowered.watched is None:
            return lowered
        moved = _decisions(step, params, lowered.watched, self._counts)
        if moved != self._moved:
            _say(moved, self._mesh)
        self._moved = moved
        return replace(lowered, chosen=(*lowered.chosen, *moved))


def _renew(scale: LossScaleState, scaling: LossScale, counts: PrecisionState) -> None:
    """Resets the loss scale of a state in which blocks move only now: their overflows have lowered it."""
    if any(bool((x == LIMIT).any()) for x in counts):
        for old, new in zip(scale, scaling.init()._replace(skipped=scale.skipped), strict=True):
            old.copy_(new)


def _decisions(step: Step, params: Inputs, watched: Watched, counts: PrecisionState) -> tuple[PlanDecision, ...]:
    """The blocks of a resolved step that compute in float32, with the reasons."""
    record = find(step.transforms, MixedPrecision)
    if record is None or not record.safer:
        return ()
    held = {name: x.tolist() for name, x in counts._asdict().items()}
    out = []
    for name, reads in zip(watched.names[:-1], watched.reads[:-1], strict=True):
        moved = [i for i in reads if params.leaves[i].path in record.safer]
        if moved:
            numbers = {kind: max(x[i] for i in moved) for kind, x in held.items()}
            why = "; ".join(
                f"it {_WHAT[kind]}: {min(number, LIMIT)} of {LIMIT} counts"
                for kind, number in numbers.items()
                if number >= LIMIT
            )
            out.append(PlanDecision(f"mixed_precision: {name}", "fp32", why))
    return tuple(out)


def _say(found: tuple[PlanDecision, ...], mesh: Mesh) -> None:
    """Tells the log of the first rank."""
    if mesh.rank == 0 and found:
        problems = [f"{d.what.removeprefix('mixed_precision: ')}: {d.why}" for d in found]
        fix = "nothing to do; mixed_precision(where=...) says it from the start"
        logger.warning(message("mixed_precision", "these blocks compute in fp32 from here on", problems, fix))


_WHAT = {"overflows": "overflows", "underflows": "underflows"}
