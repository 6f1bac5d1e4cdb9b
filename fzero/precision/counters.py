"""Counts overflows and underflows of each parameter's block for `mixed_precision("auto")`, as a part of the state.

Counts are kept for parameters, not for blocks: how many those are is known before the step is traced, and it is
parameters that are computed with in one dtype or another. Blocks that share a parameter move together, so they are
counted together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.precision.statistics import Watched

LIMIT = 256
"""A parameter with this count is computed with in float32 from the next build on; it stays until then, and is one more
from then on."""
OVERFLOW = 8
"""Added to a count by an overflow; a step without one takes 1 away. So 32 overflows in a row reach the limit, or more
than one in 9 steps for long, and what a growing loss scale brings, one in thousands, does not."""
UNDERFLOW = 0.5
"""The share of a block's gradient, zeros aside, above which a step adds 1 to the other count; any other step takes 1
away."""


class PrecisionState(NamedTuple):
    """The counters of blocks' precision in a state."""

    overflows: torch.Tensor  # int32[number of parameters]
    underflows: torch.Tensor  # int32[number of parameters]


def counted(
    state: PrecisionState, watched: Watched, statistics: Mapping[str, torch.Tensor], safer: Sequence[bool] = ()
) -> PrecisionState:
    """The state after a step.

    An overflow counts for the one block where it begins: the first of the forward whose output is not finite. Without
        one, it is the last block whose gradient is not finite, because the backward passes it on to all blocks before.
        Code outside blocks comes last, and has no counts.

    Args:
        state: before the step.
        watched: n blocks.
        statistics: of this step, float32[n] each (precision/statistics.py).
        safer: for each parameter whether it is computed with in float32 already; empty: none is.
    """
    num, device = len(watched.names), state.overflows.device
    number = torch.tensor(range(num), device=device)
    outputs = torch.logical_not(torch.isfinite(statistics["output_max"]))
    grads = torch.logical_and(torch.logical_not(torch.isfinite(statistics["grad_norm"])), number < num - 1)
    last = torch.where(outputs.any(), -1, torch.where(grads, number, -1).amax())
    begins = torch.logical_or(number == torch.where(outputs, number, num).amin(), number == last)
    zero = statistics["zero"]
    lost = statistics["underflow"] - zero > UNDERFLOW * (1.0 - zero)
    of_block, of_param = _families(watched)
    own = torch.tensor(of_param, device=device)[:, None] == torch.tensor(of_block, device=device)

    def moved(count: torch.Tensor, hit: torch.Tensor, rise: int) -> torch.Tensor:
        here = torch.logical_and(own, hit).any(1).to(torch.int32)
        new = torch.where(count >= LIMIT, count, (count + here * (rise + 1) - 1).clamp(0, LIMIT))
        return (
            new
            if not safer
            else torch.where(torch.logical_and(torch.tensor(safer, device=device), new >= LIMIT), LIMIT + 1, new)
        )

    return PrecisionState(moved(state.overflows, begins, OVERFLOW), moved(state.underflows, lost, 1))


def _families(watched: Watched) -> tuple[list[int], list[int]]:
    """A number for each block and for each parameter: the same for what shares parameters; -1 for code outside blocks,
    -2 for a parameter of no block."""
    family = list(range(len(watched.names) - 1))
    first: dict[int, int] = {}  # a parameter -> the first block that takes it
    for number, reads in enumerate(watched.reads[:-1]):
        for other in {family[first.setdefault(i, number)] for i in reads}:
            family = [family[number] if f == other else f for f in family]
    return [*family, -1], [family[n] if n < len(family) else -2 for n in watched.owner]
