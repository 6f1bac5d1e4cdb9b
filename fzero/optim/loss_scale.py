"""Updates the dynamic loss scale of float16 training.

float16 cannot represent numbers below 6e-8, so gradients are computed of a scaled loss, and the scale is divided out
in float32. A scale that is too large leads to a gradient that is not finite: then the step is skipped and the scale
is lowered. These are pure functions of a small state, like optimizers; fzero/transforms/precision.py says how a step
uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from fzero._utils.arguments import count, python_numbers
from fzero.optim.tree_updates import reject


class LossScaleState(NamedTuple):
    """The state of a loss scale: tensors of a step's state, the same on every rank.

    Attributes:
        scale: float32[], the scale of the next step's loss.
        growth_tracker: int64[], the number of steps since the last overflow or growth.
        hysteresis: int64[], the number of overflows that remain until the scale is lowered, at least 1.
        skipped: int64[], the number of steps that were skipped so far.
    """

    scale: torch.Tensor
    growth_tracker: torch.Tensor
    hysteresis: torch.Tensor
    skipped: torch.Tensor


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale: lowered when gradients overflow, raised after `growth_interval` steps without an
    overflow.

    It grows like that of `torch.amp.GradScaler`, whose defaults it has: in the `growth_interval`-th step in a row
    without an overflow, unless the scale would become infinite. `hysteresis`, `consecutive_hysteresis` and `minimum`
    are DeepSpeed's; DeepSpeed's defaults are `LossScale(growth_interval=1000, hysteresis=2)`, and DeepSpeed 0.19
    counts one step more before the first growth after an overflow.

    Args:
        initial: the scale of the first step.
        growth_interval: number of steps in a row without an overflow after which the scale grows, at least 1.
        growth_factor: the factor by which it grows, at least 1.
        backoff_factor: the factor by which it is multiplied at an overflow, above 0 and at most 1.
        hysteresis: the scale is lowered at this overflow, and at every one after it, until it grows again; 1 lowers
            it at every overflow. Each overflow skips a step.
        consecutive_hysteresis: whether one step without an overflow restores the full hysteresis.
        minimum: the scale is never lowered below this value.

    Raises:
        FzeroValueError: listing every argument that is out of range.

    Example:
        >>> scale = LossScale(initial=8.0, growth_interval=2)
        >>> state, found = scale.init(), []
        >>> for overflow in (True, False, False):
        ...     state, _ = scale.update(state, torch.tensor(overflow))
        ...     found.append(state.scale.item())
        >>> found
        [4.0, 4.0, 8.0]
    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        given = {f.name: python_numbers(getattr(self, f.name)) for f in fields(self)}
        vars(self).update(given)  # a frozen dataclass forbids plain assignment
        problems = [
            f"{name}={given[name]!r}: must be a number above 0"
            for name in ("initial", "minimum")
            if not _positive(given[name])
        ]
        counts = [name for name in ("growth_interval", "hysteresis") if count(name, given[name])]
        problems += [f"{name}={given[name]!r}: must be a whole number of at least 1" for name in counts]
        if not _positive(self.growth_factor) or self.growth_factor < 1:
            problems.append(f"growth_factor={self.growth_factor!r}: must be at least 1")
        if not _positive(self.backoff_factor) or self.backoff_factor > 1:
            problems.append(f"backoff_factor={self.backoff_factor!r}: must be above 0 and at most 1")
        if not isinstance(self.consecutive_hysteresis, bool):
            problems.append(f"consecutive_hysteresis={self.consecutive_hysteresis!r}: must be True or False")
        if not problems and self.initial < self.minimum:
            problems.append(f"initial={self.initial!r}: must be at least minimum={self.minimum!r}")
        reject("LossScale", problems)

    @property
    def fixed(self) -> bool:
        """Whether the scale never changes."""
        return self.growth_factor == self.backoff_factor == 1

    def init(self) -> LossScaleState:
        """Returns the state before the first step, in host memory."""
        return LossScaleState(
            torch.tensor(float(self.initial), dtype=torch.float32),
            torch.zeros((), dtype=torch.int64),
            torch.full((), self.hysteresis, dtype=torch.int64),
            torch.zeros((), dtype=torch.int64),
        )

    def update(self, state: LossScaleState, overflow: torch.Tensor) -> tuple[LossScaleState, torch.Tensor]:
        """Returns the state after a step, and whether the scale should have been lowered but is at its minimum.

        Args:
            state: the state before the step.
            overflow: bool[], whether a gradient of the step is not finite.
        """
        # Tensor operations only: the step does not know on the host whether it has overflowed, and must not wait to
        # find out.
        count = state.growth_tracker + 1
        grows = torch.logical_and(torch.logical_not(overflow), count >= self.growth_interval)
        lowers = torch.logical_and(overflow, state.hysteresis <= 1)
        grown = state.scale * self.growth_factor
        # An infinite scale would make every later gradient overflow.
        grown = torch.where(torch.isfinite(grown), grown, state.scale)
        # The minimum must not raise a scale that is below it, which a restored state may have.
        lowered = torch.minimum((state.scale * self.backoff_factor).clamp(min=self.minimum), state.scale)
        refills = torch.logical_not(overflow) if self.consecutive_hysteresis else grows
        # At least 1, so that every further overflow lowers the scale until the hysteresis is restored.
        left = torch.where(overflow, (state.hysteresis - 1).clamp(min=1), state.hysteresis)
        new = LossScaleState(
            torch.where(lowers, lowered, torch.where(grows, grown, state.scale)),
            torch.where(torch.logical_or(overflow, grows), torch.zeros_like(count), count),
            torch.where(refills, torch.full_like(left, self.hysteresis), left),
            state.skipped + overflow.to(torch.int64),
        )
        return new, torch.logical_and(lowers, state.scale <= self.minimum)

    def __repr__(self) -> str:
        """Shows only values that differ from the defaults."""
        changed = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) != f.default}
        return f"LossScale({', '.join(f'{name}={x!r}' for name, x in changed.items())})"


def fixed_scale(scale: float) -> LossScale:
    """Returns a loss scale that never changes: an overflow only skips a step."""
    return LossScale(scale, growth_factor=1.0, backoff_factor=1.0, minimum=scale)


def _positive(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < math.inf
