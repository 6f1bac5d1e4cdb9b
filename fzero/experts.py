"""Sends tokens to experts and brings their results back, in plain functions of tensors with fixed shapes.

A token chooses k experts. Each expert takes at most so many rows: its *capacity*. First choices of all tokens come
before second ones, and tokens in their order; what comes too late is dropped. The functions know nothing of ranks:
`fz.expert_parallel` finds the products with experts' parameters and has ranks exchange the rows around them.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from fzero import compat
from fzero.arguments import count
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.operators.row_numbers import CHOICES, ROWS_AT, SLOTS
from fzero.tree import describe

__all__ = ["combine", "dispatch"]


class Back(NamedTuple):
    """The way back of dispatched tokens.

    Attributes:
        place: int64[tokens, k], the row of each choice among those of all experts; -1 where it was dropped.
        weight: [tokens, k], the weight of each choice; 0 where it was dropped.
        dropped: float32[], the share of choices that were dropped.
        choice: int64[experts, rows], the choice that fills each row, numbered by token; -1 if none does.
    """

    place: torch.Tensor
    weight: torch.Tensor
    dropped: torch.Tensor
    choice: torch.Tensor


def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    capacity: float,
    overflow: Literal["drop", "error"] = "drop",
) -> tuple[torch.Tensor, Back]:
    """The rows of each expert, and the way back.

    Args:
        x: tokens, [tokens, features].
        experts: int64[tokens, k], the experts that each token chooses, each once.
        weights: [tokens, k], how much each choice counts.
        num_experts: the number of experts.
        capacity: the rows of an expert, as a factor of tokens x k / experts. A factor of experts / k drops nothing.
            Under a transform that cuts the batch these are the tokens of a rank and micro-batch.
        overflow: "drop" leaves out choices that have no row; "error" raises, from a compiled step on every rank.

    Returns:
        rows: [experts, rows, features]. A row that no choice fills is any token's, as a constant: `combine` does not
            read it.
        back: what `combine` needs. `back.dropped` is a metric.

    Memory: rows, and for each choice two numbers. Time: a sort of tokens x k.

    Raises:
        FzeroTypeError: an argument that is not a tensor, or of another dtype.
        FzeroValueError: shapes that do not go together; a number or factor below 1 and 0; an overflow, if it is one.

    Paper: Lepikhin et al., GShard: scaling giant models with conditional computation and automatic sharding, 2020.

    Example:
        >>> import torch, fzero as fz
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> chosen, weights = torch.tensor([[1], [1], [0]]), torch.ones(3, 1)
        >>> rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2, capacity=1.0)
        >>> rows[1, :, 0], rows[0, 0, 0]
        (tensor([1., 2.]), tensor(3.))
        >>> fz.experts.combine(rows, back)[:, 0]
        tensor([1., 2., 3.])
    """
    _check(x, experts, weights, num_experts, capacity, overflow)
    tokens, k = experts.shape
    size = min(tokens, max(1, math.ceil(capacity * tokens * k / num_experts)))
    place = SLOTS(experts, num_experts, size)
    choice, kept = CHOICES(place, num_experts, size), place >= 0
    rows = _RowsAt.apply(x, choice, place, k, True)
    if overflow == "error":
        what, fix = "choices exceed the capacity of an expert", "raise capacity, or drop them: overflow='drop'"
        compat.raise_unless(kept, FzeroValueError, lambda: message("experts.dispatch", what, [f"{size} rows"], fix))
    dropped = 1 - kept.sum() / (tokens * k)
    return rows, Back(place, torch.where(kept, weights, 0), dropped.float(), choice)


def combine(rows: torch.Tensor, back: Back) -> torch.Tensor:
    """The results of each token's experts, weighted and added: [tokens, features].

    Args:
        rows: [experts, rows, features], computed from those of `dispatch`; the features may be others.
        back: what `dispatch` returned.

    Memory: a row for each choice.

    Example:
        >>> import torch, fzero as fz
        >>> x, chosen, weights = torch.ones(4, 2), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
        >>> rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2, capacity=1.0)
        >>> fz.experts.combine(rows * torch.tensor([1.0, 3.0])[:, None, None], back)[0]
        tensor([2., 2.])
    """
    chosen = _RowsAt.apply(rows.flatten(0, 1), back.place, back.choice, 1, True)
    return (chosen * back.weight[..., None].to(rows.dtype)).sum(1)


class _RowsAt(torch.autograd.Function):
    """The rows of `x`, of which each stands for `share` numbers; the gradient reads by the numbers of those."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, index: torch.Tensor, back: torch.Tensor, share: int, fill: bool) -> torch.Tensor:
        numbers = index if share == 1 else index.div(share, rounding_mode="floor")
        return ROWS_AT(x, numbers, back.reshape(x.shape[0], share), fill)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, index, back, share, _ = inputs
        ctx.save_for_backward(index, back)
        ctx.shape = x.shape[0], share

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        index, back = ctx.saved_tensors
        read = _RowsAt.apply(grad.flatten(0, -2), back.reshape(ctx.shape), index, 1, False)
        return read.squeeze(1) if ctx.shape[1] == 1 else read.sum(1), None, None, None, None


def _check(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int, capacity: float, overflow: str
) -> None:
    given = {"x": x, "experts": experts, "weights": weights}
    problems = [f"{name}: a tensor, got {describe(t)}" for name, t in given.items() if not isinstance(t, torch.Tensor)]
    if not problems and experts.dtype != torch.int64:
        problems.append(f"experts: int64, the numbers of experts, got {describe(experts)}")
    if not problems and not (x.is_floating_point() and weights.is_floating_point()):
        problems.append(f"x and weights: of a floating dtype, got {describe(x)} and {describe(weights)}")
    if problems:
        raise FzeroTypeError("experts.dispatch", "invalid arguments", problems, "see its example")
    problems = count("num_experts", num_experts)
    if isinstance(capacity, bool) or not isinstance(capacity, (int, float)) or not 0 < capacity < math.inf:
        problems.append(f"capacity={capacity!r}: a factor above 0, of tokens x k / experts")
    if overflow not in ("drop", "error"):
        problems.append(f"overflow={overflow!r}: 'drop' or 'error'")
    if x.dim() != 2 or experts.dim() != 2 or experts.shape != weights.shape or experts.shape[:1] != x.shape[:1]:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in given.items())
        problems.append(f"x [tokens, features], experts and weights [tokens, k]: got {shapes}")
    elif not problems and (not 0 < experts.shape[1] <= num_experts or not x.shape[0]):
        problems.append(f"{experts.shape[1]} choices of {x.shape[0]} tokens among {num_experts} experts")
    if problems:
        fix = "flatten x to [tokens, features], and choose by router.topk(k, -1)"
        raise FzeroValueError("experts.dispatch", "invalid arguments", problems, fix)
