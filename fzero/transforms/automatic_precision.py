"""Implements `mixed_precision("auto")`: blocks that overflow or underflow too often are promoted to float32.

Policy: every step counts overflows and underflows. The counters are a part of the state (`state.extras["precision"]`).
Whenever a step is restored or a program is built, each parameter with a counter that has reached `LIMIT` is computed
in float32 from then on (`Promotion`).

Counters belong to parameters, not to blocks, because the number of parameters is known before the step is traced, and
because the compute dtype is chosen for each parameter. Blocks that share a parameter are promoted together, so they
are counted together. The statistics of blocks that are counted here are those of `mixed_precision(watch=True)`
(transforms/precision_statistics.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fzero import tree
from fzero.comm import control_group
from fzero.errors import message
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf
from fzero.step import Step
from fzero.trace.device_decompositions import computes_in
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.precision_statistics import Watched
from fzero.transforms.transform import Transform, find

if TYPE_CHECKING:
    from fzero.transforms.transform_state import StepResults

logger = logging.getLogger("fzero")

LIMIT = 256
"""A parameter whose counter reaches this number is computed in float32 from the next build on. The counter stays at
LIMIT until then, and is LIMIT + 1 afterwards."""
OVERFLOW = 8
"""An overflow adds this number to a counter, and each step without one subtracts 1. So the limit is reached by 32
overflows in a row, or by more than one in 9 steps for a long time. The overflows that a growing loss scale causes, one
in thousands of steps, never reach it."""
UNDERFLOW = 0.5
"""If more than this share of a block's gradient, not counting zeros, underflows, the step adds 1 to the counter of
underflows; any other step subtracts 1."""


class PrecisionState(NamedTuple):
    """The counters in a state."""

    overflows: torch.Tensor  # int32[number of parameters]
    underflows: torch.Tensor  # int32[number of parameters]


@dataclass(frozen=True)
class AutomaticPrecision(MixedPrecision):
    """The configuration of `mixed_precision("auto")`. `compute` is the initial dtype; with "auto" the device determines
    it."""

    safer: tuple[str, ...] = ()  # paths of the parameters that have been promoted to float32

    def on_device(self, device: torch.device | None) -> Transform:
        if self.compute != "auto":
            return self
        return replace(self, compute="bf16" if device is None or computes_in(device, torch.bfloat16) else "fp16")

    def conflict(self, other: Transform) -> str | None:
        return f"two different {self.name}" if isinstance(other, MixedPrecision) else super().conflict(other)

    def slots(self, params: Any) -> dict[str, Any]:
        num = len(tree.leaves(params))
        counts = PrecisionState(*(torch.zeros(num, dtype=torch.int32) for _ in PrecisionState._fields))
        return {**super().slots(params), "precision": counts}

    def advanced(self, slots: Mapping[str, Any], results: StepResults) -> tuple[dict[str, Any], dict[str, Any]]:
        after, metrics = super().advanced(slots, results)
        assert results.watched is not None
        safer = [path in self.safer for path in results.paths] if self.safer else ()
        after["precision"] = counted(slots["precision"], results.watched, results.statistics(), safer)
        return after, metrics

    def compute_dtype(self, leaf: Leaf) -> torch.dtype:
        return torch.float32 if self._is_promoted(leaf) else super().compute_dtype(leaf)

    def reduce_dtype(self, leaf: Leaf) -> torch.dtype:
        return torch.float32 if self._is_promoted(leaf) else super().reduce_dtype(leaf)

    def _is_promoted(self, leaf: Leaf) -> bool:
        return self.selects(leaf) and leaf.path in self.safer

    @property
    def casts_in_blocks(self) -> bool:
        return True

    def frozen_dtype(self, leaf: Leaf) -> torch.dtype:
        return self.resting_dtype(leaf)  # a promotion may need all of its digits

    def shown(self) -> list[str]:
        compute, params, reduce, *others = (x for x in super().shown() if x != "watch=True")
        auto = "auto=True" + (f", safer={len(self.safer)} leaves" if self.safer else "")
        return [compute, params, reduce, auto, *others]


def counted(
    state: PrecisionState, watched: Watched, statistics: Mapping[str, torch.Tensor], safer: Sequence[bool] = ()
) -> PrecisionState:
    """Returns the counters after a step.

    An overflow counts only for the block where it begins: the first block of the forward whose output is not finite. If
    every output is finite, it is the last block whose gradient is not finite, because the backward propagates it to all
    earlier blocks. Code outside blocks comes last, and has no counters.

    Args:
        state: the counters before the step.
        watched: the n watched blocks.
        statistics: the statistics of this step, float32[n] each (transforms/precision_statistics.py).
        safer: for each parameter, whether it is computed in float32 already; empty if none is.
    """
    num, device = len(watched.names), state.overflows.device
    number = torch.tensor(range(num), device=device)
    outputs = torch.logical_not(torch.isfinite(statistics["output_max"]))
    grads = torch.logical_and(torch.logical_not(torch.isfinite(statistics["grad_norm"])), number < num - 1)
    # If an output is not finite, `last` is -1. If all outputs are finite, the minimum below is
    # `num`. So at most one block counts.
    last = torch.where(outputs.any(), -1, torch.where(grads, number, -1).amax())
    begins = torch.logical_or(number == torch.where(outputs, number, num).amin(), number == last)
    zero = statistics["zero"]
    # The share among the elements that are not zero is (underflow - zero) / (1 - zero); this form
    # does not divide by 0 if all elements are zero.
    lost = statistics["underflow"] - zero > UNDERFLOW * (1.0 - zero)
    of_block, of_param = _families(watched)
    own = torch.tensor(of_param, device=device)[:, None] == torch.tensor(of_block, device=device)

    def moved(count: torch.Tensor, hit: torch.Tensor, rise: int) -> torch.Tensor:
        here = torch.logical_and(own, hit).any(1).to(torch.int32)
        # Adds `rise` to the counters that are hit, and subtracts 1 from the others. A counter at
        # the limit stays there.
        new = torch.where(count >= LIMIT, count, (count + here * (rise + 1) - 1).clamp(0, LIMIT))
        if not safer:
            return new
        return torch.where(torch.logical_and(torch.tensor(safer, device=device), new >= LIMIT), LIMIT + 1, new)

    return PrecisionState(moved(state.overflows, begins, OVERFLOW), moved(state.underflows, lost, 1))


def _families(watched: Watched) -> tuple[list[int], list[int]]:
    """Returns a group number for each block and for each parameter.

    Blocks that share parameters, directly or through other blocks, have the same number. It is -1 for code outside
    blocks, and -2 for a parameter that no block reads.
    """
    family = list(range(len(watched.names) - 1))
    first: dict[int, int] = {}  # a parameter -> the first block that takes it
    for number, reads in enumerate(watched.reads[:-1]):
        for other in {family[first.setdefault(i, number)] for i in reads}:
            family = [family[number] if f == other else f for f in family]
    return [*family, -1], [family[n] if n < len(family) else -2 for n in watched.owner]


Decision = tuple[str, str, str]
"""What is decided, the choice, and the reason: the fields of a `PlanDecision`."""


class Promotion:
    """Promotes parameters according to the counters of a state.

    A restored state's counters are evaluated before its layouts are chosen, and the current state's before a program is
    built. A state without counters, or a step without "auto", is left unchanged. All methods must be called on all
    ranks of the mesh together.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._counts: PrecisionState | None = None  # those that the last promotion followed
        self._moved: tuple[Decision, ...] = ()  # the blocks that have been promoted

    def resolved(self, step: Step, leaves: Sequence[Leaf], counts: PrecisionState) -> Step:
        """Returns the step in which every parameter whose counter has reached its limit is computed in float32.

        All ranks use the counters of the first rank.

        Args:
            step: if it has no `mixed_precision("auto")`, it is returned unchanged.
            leaves: the parameters.
            counts: the counters of the state.

        Communication: a few bytes between the ranks.
        """
        record = find(step.transforms, AutomaticPrecision)
        if record is None:
            return step
        highest = [max(pair) for pair in zip(*(x.tolist() for x in counts), strict=True)]
        mine = [x.path for x, count in zip(leaves, highest, strict=True) if count >= LIMIT and record.selects(x)]
        safer = tuple(control_group.broadcast_from_rank0(self._mesh.control, "mixed_precision", lambda: mine))
        return replace(step, transforms=tuple(replace(t, safer=safer) if t is record else t for t in step.transforms))

    def before_build(
        self, step: Step, leaves: Sequence[Leaf], extras: Mapping[str, Any], layout_of: Callable[[Step], Any]
    ) -> Step:
        """Returns the step, resolved with the counters in a state's `extras`.

        If the resolved step would store other tensors than the state has (`layout_of`), the step stays unchanged, and
        the next restore resolves it.
        """
        if (counts := extras.get("precision")) is None:
            return step
        found = self.resolved(step, leaves, counts)
        if layout_of(found) != layout_of(step):
            return step
        self._counts = counts
        record = find(found.transforms, AutomaticPrecision)
        newly_promoted = any(bool((x == LIMIT).any()) for x in counts)
        if record is not None and record.scaling is not None and newly_promoted:
            # The overflows of these blocks have lowered the loss scale, so it starts again.
            scale = extras["loss_scale"]
            for old, new in zip(scale, record.scaling.init()._replace(skipped=scale.skipped), strict=True):
                old.copy_(new)
        return found

    def explained(self, step: Step, leaves: Sequence[Leaf], watched: Watched | None) -> tuple[Decision, ...]:
        """Returns the promoted blocks of a resolved step, with the reasons. The first rank logs changes."""
        if self._counts is None or watched is None:
            return ()
        moved = _decisions(step, leaves, watched, self._counts)
        if moved and moved != self._moved and self._mesh.rank == 0:
            problems = [f"{what.removeprefix('mixed_precision: ')}: {why}" for what, _, why in moved]
            fix = "nothing to do; mixed_precision(where=...) sets it from the start"
            logger.warning(message("mixed_precision", "these blocks compute in fp32 from here on", problems, fix))
        self._moved = moved
        return moved


def _decisions(step: Step, leaves: Sequence[Leaf], watched: Watched, counts: PrecisionState) -> tuple[Decision, ...]:
    """Returns, for each block with promoted parameters, the decision and the counters that caused it."""
    record = find(step.transforms, AutomaticPrecision)
    safer = () if record is None else record.safer
    held = {name: x.tolist() for name, x in counts._asdict().items()}
    out = []
    for name, reads in zip(watched.names[:-1], watched.reads[:-1], strict=True):
        if moved := [i for i in reads if leaves[i].path in safer]:
            numbers = {kind: max(x[i] for i in moved) for kind, x in held.items()}
            why = [f"it {kind}: {min(n, LIMIT)} of {LIMIT} counts" for kind, n in numbers.items() if n >= LIMIT]
            out.append((f"mixed_precision: {name}", "fp32", "; ".join(why)))
    return tuple(out)
