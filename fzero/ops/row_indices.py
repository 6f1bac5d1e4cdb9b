"""Numbers the rows that choices of experts fill, and reads rows by such numbers; -1 stands for none.

Each token chooses k experts. `SLOTS` returns for each choice the row that it fills, and `CHOICES` for each row its
choice; each contains indices of the other's flattened elements. `ROWS_AT` reads rows by such indices, and its
gradient reads by those of the other, so nothing is added at indices. They are operators so that ranks with shards of
the tokens can number rows separately (fzero/sharding/expert_rules.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.ops.registration import define


def _slots(experts: torch.Tensor, num_experts: int, size: int) -> torch.Tensor:
    (tokens, k), device = experts.shape, experts.device
    chosen, order = torch.sort(experts.t().flatten(), stable=True)  # first choices before second ones
    first = torch.searchsorted(chosen, torch.arange(num_experts, device=device))
    # the position of each choice among those of its expert
    at = torch.arange(tokens * k, device=device) - first[chosen]
    slots = torch.zeros_like(order).scatter(0, order, torch.where(at < size, chosen * size + at, -1))
    return slots.view(k, tokens).t().contiguous()


def _choices(slots: torch.Tensor, num_experts: int, size: int) -> torch.Tensor:
    flat, rows = slots.flatten(), num_experts * size
    # All dropped choices are written to an additional row at the end, which is removed.
    found = torch.full((rows + 1,), -1, dtype=torch.int64, device=slots.device)
    numbers = torch.arange(flat.shape[0], device=slots.device)
    return found.scatter(0, torch.where(flat < 0, rows, flat), numbers)[:rows].view(num_experts, size)


def _rows_at(x: torch.Tensor, index: torch.Tensor, back: torch.Tensor, fill: bool) -> torch.Tensor:
    rows = x[index.clamp(min=0)]
    return rows if fill else torch.where((index < 0)[..., None], 0, rows)


SLOTS: Any = define(
    "slots",
    "(Tensor experts, int num_experts, int size) -> Tensor",
    _slots,
    lambda experts, num_experts, size: experts.new_empty(experts.shape),
)
"""The row of each choice, with `size` rows per expert: int64[tokens, k]."""
CHOICES: Any = define(
    "choices",
    "(Tensor slots, int num_experts, int size) -> Tensor",
    _choices,
    lambda slots, num_experts, size: slots.new_empty([num_experts, size]),
)
"""The choice that fills each row: int64[num_experts, size], token x k + the number of the choice."""
ROWS_AT: Any = define(
    "rows_at",
    "(Tensor x, Tensor index, Tensor back, bool fill) -> Tensor",
    _rows_at,
    lambda x, index, back, fill: x.new_empty([*index.shape, x.shape[1]]),
)
"""The rows of `x` with these indices; for -1, zeros or, with `fill`, any row. `back` has one row for each row of `x`:
the indices of the elements of `index` that read it.
"""

WRITTEN_OUT: dict[Any, Callable[..., torch.Tensor]] = {SLOTS: _slots, CHOICES: _choices, ROWS_AT: _rows_at}
"""The functions that devices run in place of these operators."""
