"""Lists state slots: all that a state carries besides parameters, optimizer state, step and key, one row each.

A row says which leaves a step carries, how they begin, and how a step advances them. Layouts, programs, `init`,
`restore`, `move` and checkpoints are made of the rows: a new slot is a new row. A checkpoint without a slot that the
step has restores, and the slot begins anew; one with a slot that the step has not leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.layout import Layout, Leaf, slot_path
from fzero.lowering.training import Training
from fzero.optim.loss_scale import LossScaleState
from fzero.precision.counters import PrecisionState, counted
from fzero.precision.statistics import Watched
from fzero.program.lines import Inputs
from fzero.step import Step
from fzero.transforms.base import find
from fzero.transforms.precision import MixedPrecision

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each leaf, by field."""


@dataclass(frozen=True, eq=False)
class StepResults:
    """The numbers of a step that are known at its end, where slots are advanced, all of them the same on every rank.

    Attributes:
        training: the step.
        loss, norm, finite: as the metrics say them.
        overflow: whether the step is skipped; None: no step ever is.
        watched: the blocks whose numbers are watched; None: they are not.
        statistics: makes the statistics of those, once.
    """

    training: Training
    loss: torch.Tensor
    norm: torch.Tensor
    finite: torch.Tensor
    overflow: torch.Tensor | None
    watched: Watched | None
    statistics: Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class StateSlot:
    """One row.

    Attributes:
        name: in `State.extras`, and the role of its leaves.
        kind: the NamedTuple whose fields are its leaves.
        leaves: of a step and its parameters the shape and dtype of each field; None: the step does not carry it.
        advance: of the slot before a step, and what that knows at its end, the slot behind it and metrics.
        init: the slot before the first step; None: zeros.
        moves: whether `fz.move` takes it along; what is a few bytes stays on the device.
    """

    name: str
    kind: type[Any]
    leaves: Callable[[Step, Inputs], Shapes | None]
    advance: Callable[[Any, StepResults], tuple[Any, Mapping[str, Any]]]
    init: Callable[[Step], Any] | None = None
    moves: bool = False

    def path(self, field: str) -> str:
        """The path of a leaf of it."""
        return slot_path(self.name, field)

    def table(self, step: Step, params: Inputs) -> list[Leaf]:
        """Its leaves in the state of a step."""
        shapes = self.leaves(step, params)
        if shapes is None:
            return []
        return [Leaf(self.path(f), self.name, shapes[f][0], Layout(shapes[f][1])) for f in self.kind._fields]

    def begins(self, step: Step, leaves: Sequence[Leaf]) -> dict[str, torch.Tensor]:
        """The values before the first step, in host memory, by path."""
        if self.init is None:
            return {leaf.path: torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in leaves}
        return {self.path(name): x for name, x in self.init(step)._asdict().items()}

    def of(self, values: Mapping[str, Any]) -> Any:
        """The slot of values by path; None: they are not there."""
        paths = [self.path(f) for f in self.kind._fields]
        return self.kind(*(values[p] for p in paths)) if paths[0] in values else None


# --- the loss scale of float16 ---


def _scaling(step: Step) -> Any:
    record = find(step.transforms, MixedPrecision)
    return None if record is None else record.scaling


def _scale_leaves(step: Step, params: Inputs) -> Shapes | None:
    fields = LossScaleState._fields
    dtypes = {name: torch.float32 if name == "scale" else torch.int64 for name in fields}
    return None if _scaling(step) is None else {name: ((), dtype) for name, dtype in dtypes.items()}


def _scale_advanced(before: LossScaleState, taken: StepResults) -> tuple[LossScaleState, Mapping[str, Any]]:
    scaling, overflow = taken.training.precision.loss_scale, taken.overflow
    assert scaling is not None and overflow is not None
    after, at_minimum = scaling.update(before, overflow)
    return after, {"loss_scale": before.scale.clone(), "skipped": overflow, "loss_scale_at_minimum": at_minimum}


# --- what mixed_precision("auto") counts of each parameter ---


def _count_leaves(step: Step, params: Inputs) -> Shapes | None:
    record = find(step.transforms, MixedPrecision)
    if record is None or not record.auto:
        return None
    return {name: ((len(params.ties),), torch.int32) for name in PrecisionState._fields}


def _counted(before: PrecisionState, taken: StepResults) -> tuple[PrecisionState, Mapping[str, Any]]:
    t = taken.training
    safer = [leaf.path in t.precision.safer for leaf in t.params.leaves] if t.precision.safer else ()
    assert taken.watched is not None
    return counted(before, taken.watched, taken.statistics(), safer), {}


SLOTS: dict[str, StateSlot] = {
    row.name: row
    for row in (
        StateSlot("loss_scale", LossScaleState, _scale_leaves, _scale_advanced, lambda step: _scaling(step).init()),
        StateSlot("precision", PrecisionState, _count_leaves, _counted),
    )
}
"""The table, by name. A step is given the slots in this order."""


def begun(step: Step, leaves: Iterable[Leaf]) -> dict[str, torch.Tensor]:
    """The values before the first step of those leaves that are in slots, by path."""
    by_slot: dict[str, list[Leaf]] = {name: [] for name in SLOTS}
    for leaf in leaves:
        by_slot.get(leaf.role, []).append(leaf)
    return {p: x for name, own in by_slot.items() if own for p, x in SLOTS[name].begins(step, own).items()}


def slots_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The slots that are among values by path, by name."""
    return {name: held for name, row in SLOTS.items() if (held := row.of(values)) is not None}
