"""Dispatches tokens to experts and combines the results, in plain functions of tensors with fixed shapes.

A token chooses k experts. Without a capacity, there is one row for each choice, in the order of the experts, and no
choice is dropped. With a *capacity*, each expert, or group of experts, takes a limited number of rows. The first
choices of all tokens come before the second ones, and tokens in their order; choices beyond the capacity are dropped.
The functions know nothing of ranks: `fz.expert_parallel` finds the products with experts' parameters and makes ranks
exchange the rows around them. So the number of groups, such as ranks, is an argument, and has the same meaning on any
mesh.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from fzero._compat import compat
from fzero._utils.arguments import count, plain_numbers
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.ops.grouped_matmul import EXPERT_MM, EXPERT_OUTER, GROUPED_MM, GROUPED_OUTER
from fzero.ops.routed_rows import ROUTE, ROUTED_ENDS, UNROUTE
from fzero.ops.row_indices import CHOICES, ROWS_AT, SLOTS
from fzero.tree import describe

__all__ = ["balance_loss", "combine", "dispatch", "load", "matmul"]

Capacity = float | tuple[Literal["rank"], float]


class Ends(NamedTuple):
    """The ends of the rows of each expert, if there is no capacity.

    Attributes:
        chosen: int64[experts], the end of each expert's rows among those of this rank's choices.
        routed: int64[experts], the end of each expert's rows where they are multiplied.
    """

    chosen: torch.Tensor
    routed: torch.Tensor


class Back(NamedTuple):
    """How dispatched tokens return.

    Attributes:
        place: int64[tokens, k], the row of each choice among those of all experts; -1 if it was dropped.
        weight: [tokens, k], the weight of each choice; 0 if it was dropped.
        dropped: float32[], the fraction of choices that were dropped.
        choice: int64[experts, rows], the choice that fills each row, numbered by token; -1 if none does. Without a
            capacity int64[rows].
        expert: for a capacity per rank, int64[ranks, rows], the number of each row's expert among those of its rank;
            -1 if no choice fills the row. Otherwise None.
        ends: without a capacity, the ends of the experts' rows. Otherwise None.
    """

    place: torch.Tensor
    weight: torch.Tensor
    dropped: torch.Tensor
    choice: torch.Tensor
    expert: torch.Tensor | None = None
    ends: Ends | None = None


@plain_numbers
def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    capacity: Capacity | None = None,
    ranks: int | None = None,
    overflow: Literal["drop", "error"] = "drop",
) -> tuple[torch.Tensor, Back]:
    """Returns the rows of the experts, and what is needed to combine their results.

    Args:
        x: tokens, [tokens, features].
        experts: int64[tokens, k], the experts that each token chooses, each at most once.
        weights: [tokens, k], the weight of each choice.
        num_experts: the number of experts.
        capacity: None: an expert takes as many rows as choose it, so that no choice is dropped and no row is padding.
            Otherwise the number of rows of an expert, as a multiple of tokens x k / experts. A factor of experts / k
            drops nothing. Under a transform that shards the batch, `tokens` is the number of tokens of a rank and
            micro-batch. ("rank", factor): the number of rows of all experts of a rank together, as a multiple of
            tokens x k / ranks; the smaller of `ranks` and ranks x experts of a rank / k drops nothing. `matmul`
            multiplies such rows, and those without a capacity.
        ranks: for a capacity per rank, the size of the axis that shards the experts, or a multiple of it: each rank
            has num_experts / ranks consecutive experts.
        overflow: "drop" leaves out choices that have no row; "error" raises an error, from a compiled step on every
            rank.

    Returns:
        rows: without a capacity, [tokens x k, features], in the order of the experts. Otherwise [experts, rows,
            features], or [ranks, rows, features]; a row that no choice fills contains any token, as a constant:
            `combine` does not read it.
        back: what `combine` needs. `back.dropped` is a metric.

    Memory: the rows, and two numbers per choice. Without a capacity, `fz.expert_parallel` reserves memory for the rows
        that a rank may receive. Time: a sort of tokens x k.

    Raises:
        FzeroTypeError: if an argument is not a tensor, or has another dtype.
        FzeroValueError: if shapes do not fit together, if a number is below 1 or a factor is not above 0, or for an
            overflow with overflow="error".

    Papers: Lepikhin et al., GShard: scaling giant models with conditional computation and automatic sharding, 2020;
        Gale et al., MegaBlocks: efficient sparse training with mixture-of-experts, 2022 (without a capacity).

    Example:
        >>> import torch, fzero as fz
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> chosen, weights = torch.tensor([[1], [1], [0]]), torch.ones(3, 1)
        >>> fz.experts.dispatch(x, chosen, weights, num_experts=2)[0][:, 0]
        tensor([3., 1., 2.])
        >>> rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2, capacity=1.0)
        >>> rows[1, :, 0], rows[0, 0, 0]
        (tensor([1., 2.]), tensor(3.))
        >>> fz.experts.combine(rows, back)[:, 0]
        tensor([1., 2., 3.])
    """
    _check(x, experts, weights, num_experts, capacity, ranks, overflow)
    if capacity is None:
        return _dispatch_all(x, experts, weights, num_experts)
    (tokens, k), of_rank = experts.shape, isinstance(capacity, tuple)
    factor, groups = (capacity[1], ranks or 1) if isinstance(capacity, tuple) else (capacity, num_experts)
    each = num_experts // groups
    # A token chooses each expert at most once, so a group of experts never needs more rows than the first term.
    size = min(tokens * min(k, each), max(1, math.ceil(factor * tokens * k / groups)))
    group = experts.div(each, rounding_mode="floor") if of_rank else experts
    place = SLOTS(group, groups, size)
    choice, kept = CHOICES(place, groups, size), place >= 0
    rows = _RowsAt.apply(x, choice, place, k, True)
    if overflow == "error":
        what = f"choices exceed the capacity of {'a rank' if of_rank else 'an expert'}"
        fix = "raise capacity, or drop them: overflow='drop'"
        compat.raise_unless(kept, FzeroValueError, lambda: message("experts.dispatch", what, [f"{size} rows"], fix))
    dropped = 1 - kept.sum() / (tokens * k)
    number = None
    if of_rank:
        found = ROWS_AT(experts.remainder(each).reshape(-1, 1), choice, place.reshape(-1, 1), True).squeeze(-1)
        number = torch.where(choice < 0, -1, found)
    return rows, Back(place, torch.where(kept, weights, 0), dropped.float(), choice, number)


def _dispatch_all(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, Back]:
    """Dispatches tokens without a capacity."""
    tokens, k = experts.shape
    numbers = torch.arange(tokens * k, device=x.device)
    chosen, order = torch.sort(experts.flatten(), stable=True)  # the choices in the order of their experts
    place = torch.zeros_like(order).scatter(0, order, numbers)
    ends = torch.searchsorted(chosen, torch.arange(num_experts, device=x.device), right=True)
    rows = _Route.apply(x, order, place, ends, k, k)
    dropped = torch.zeros((), device=x.device)
    return rows, Back(place.view(tokens, k), weights, dropped, order, ends=Ends(ends, ROUTED_ENDS(ends)))


def matmul(rows: torch.Tensor, w: torch.Tensor, back: Back) -> torch.Tensor:
    """Returns the product of each row with its expert's matrix: `torch.bmm(rows, w)`, or the equivalent for a
    capacity per rank and for rows without a capacity.

    Args:
        rows: [experts, rows, features], [ranks, rows, features] or [rows, features], from `dispatch` or computed from
            these.
        w: [experts, features, outputs].
        back: what `dispatch` returned.

    Returns:
        [experts, rows, outputs], [ranks, rows, outputs] or [rows, outputs]; for a capacity per rank, 0 in rows that
        no choice fills. To add a bias, add the product of `rows.new_ones(*rows.shape[:-1], 1)` with the bias as
        [experts, 1, outputs].

    Memory: for a capacity per rank, the rows and products once more, in the order of experts.
    Time: for a capacity per rank, a sort of the rows by their experts. A CPU multiplies expert by expert, a GPU uses
        one kernel in bfloat16, for widths that are multiples of 8; otherwise it multiplies every row by all matrices
        of its rank.

    Raises:
        FzeroValueError: if shapes or dtypes do not fit together.

    Example:
        >>> import torch, fzero as fz
        >>> x, chosen, weights = torch.ones(4, 2), torch.tensor([[0], [0], [0], [1]]), torch.ones(4, 1)
        >>> rows, back = fz.experts.dispatch(
        ...     x, chosen, weights, num_experts=2, capacity=("rank", 1.0), ranks=1, overflow="error"
        ... )
        >>> products = fz.experts.matmul(rows, torch.stack([torch.eye(2), 3 * torch.eye(2)]), back)
        >>> fz.experts.combine(products, back)[:, 0]
        tensor([1., 1., 1., 3.])
    """
    if back.ends is not None:
        num = back.ends.chosen.shape[0]
        fits = rows.dim() == 2 and w.dim() == 3 and w.shape[:2] == (num, rows.shape[1]) and rows.dtype == w.dtype
        if fits and rows.shape[0] == back.choice.shape[0]:
            return _GroupedMm.apply(back.ends.routed, rows, w, *back.place.shape)
        given = [f"rows {describe(rows)}, w {describe(w)}, for {num} experts and {back.choice.shape[0]} choices"]
        fix = "rows as of dispatch, w [experts, features, outputs], both of one dtype"
        raise FzeroValueError("experts.matmul", "shapes or dtypes do not match", given, fix)
    fits = rows.dim() == w.dim() == 3 and rows.shape[2] == w.shape[1] and rows.dtype == w.dtype
    groups = w.shape[:1] if back.expert is None else back.expert.shape[:1]
    if not fits or rows.shape[:1] != groups or w.shape[0] % max(1, groups[0]):
        given = [f"rows {describe(rows)}, w {describe(w)}, for {groups[0]} groups of experts"]
        fix = "rows as of dispatch, w [experts, features, outputs], both of one dtype"
        raise FzeroValueError("experts.matmul", "shapes or dtypes do not match", given, fix)
    return torch.bmm(rows, w) if back.expert is None else _ExpertMm.apply(back.expert, rows, w)


def combine(rows: torch.Tensor, back: Back) -> torch.Tensor:
    """Returns the weighted sum of the results of each token's experts: [tokens, features].

    Args:
        rows: computed from the rows of `dispatch`, with as many rows; the number of features may differ.
        back: what `dispatch` returned.

    Memory: one row per choice.

    Example:
        >>> import torch, fzero as fz
        >>> x, chosen, weights = torch.ones(4, 2), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
        >>> rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=2, capacity=1.0)
        >>> fz.experts.combine(rows * torch.tensor([1.0, 3.0])[:, None, None], back)[0]
        tensor([2., 2.])
    """
    # [tokens, k, features]
    if back.ends is not None:
        tokens, k = back.place.shape
        chosen = _Unroute.apply(rows, back.place.flatten(), back.choice, back.ends.chosen, k).view(tokens, k, -1)
        return (chosen * back.weight[..., None].to(rows.dtype)).sum(1)
    chosen = _RowsAt.apply(rows.flatten(0, 1), back.place, back.choice, 1, True)
    return (chosen * back.weight[..., None].to(rows.dtype)).sum(1)


@plain_numbers
def load(experts: torch.Tensor, num_experts: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the fraction of the choices that fall on each expert, float32[num_experts].

    As the new value of a tensor that `train_step(mutable=)` selects, it is averaged over ranks and micro-batches, so it
    is that of all tokens. A router bias is computed from it (docs/transforms/expert_parallel.md).

    Args:
        experts: int64[tokens, k], the experts that each token chooses. A number outside of 0, ..., num_experts - 1
            counts as a choice of no expert, so the sum over experts is then below 1. `mask` leaves tokens out.
        num_experts: the number of experts.
        mask: [tokens], 0 or False for tokens that do not count, such as padding. If no token counts, the load is 0.

    Memory: tokens x k x num_experts numbers, unless they are fused with their sum.

    Raises:
        FzeroTypeError: if an argument is not a tensor, or `experts` are not integers.
        FzeroValueError: if shapes do not fit together, or `num_experts` is below 1.

    Example:
        >>> import torch, fzero as fz
        >>> fz.experts.load(torch.tensor([[0, 1], [0, 2]]), num_experts=3)
        tensor([0.5000, 0.2500, 0.2500])
    """
    _check_choices("experts.load", experts, mask)
    if problems := count("num_experts", num_experts):
        raise FzeroValueError("experts.load", "invalid arguments", problems, "fz.experts.load(chosen, num_experts=8)")
    # Comparisons and a sum, because these are computed on any shard of the tokens.
    hits = (experts[..., None] == torch.arange(num_experts, device=experts.device)).float()  # [tokens, k, num_experts]
    return _token_mean(hits.mean(1), mask)


def balance_loss(probabilities: torch.Tensor, experts: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the load-balancing loss of a router, float32[]: num_experts x k x the sum over experts of `load` times
    the mean probability. It is k if all experts are chosen equally often.

    `transformers` adds it to the loss of a mixture as `router_aux_loss_coef` times the loss over all layers, whose
    tokens are concatenated.

    Args:
        probabilities: [tokens, num_experts], the softmax of the router's logits.
        experts: int64[tokens, k], the experts that each token chooses, as for `load`.
        mask: [tokens], 0 or False for tokens that do not count, such as padding. If no token counts, the loss and its
            gradients are 0.

    It is not a mean over tokens: under a transform that divides the batch, it balances the tokens of each rank and
    micro-batch, and the step averages these losses, as in Switch Transformer.

    Raises:
        FzeroTypeError: if an argument is not a tensor, `experts` are not integers, or `probabilities` are not of a
            floating dtype.
        FzeroValueError: if shapes do not fit together.

    Papers: Fedus et al., Switch Transformers: scaling to trillion parameter models with simple and efficient sparsity,
        2021.

    Example:
        >>> import torch, fzero as fz
        >>> probabilities = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        >>> fz.experts.balance_loss(probabilities, torch.tensor([[1], [0]]))
        tensor(1.)
    """
    _check_choices("experts.balance_loss", experts, mask, probabilities)
    k, num_experts = experts.shape[1], probabilities.shape[1]
    return num_experts * k * (load(experts, num_experts, mask) * _token_mean(probabilities.float(), mask)).sum()


def _token_mean(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns the mean of float32[tokens, n] over the tokens that count, float32[n]; 0 if there are none."""
    if mask is None:
        return x.mean(0) if x.shape[0] else x.sum(0)
    counted = mask.float()
    total = counted.sum()
    return (x * counted[:, None]).sum(0) / torch.where(total == 0, 1, total)


def _check_choices(
    owner: str, experts: torch.Tensor, mask: torch.Tensor | None, probabilities: torch.Tensor | None = None
) -> None:
    """Raises an error that lists the invalid arguments of `load` or `balance_loss`. Values are not checked: in a trace
    there are none."""
    given = {"probabilities": probabilities, "experts": experts, "mask": mask}
    given = {name: x for name, x in given.items() if x is not None or name == "experts"}
    problems = [f"{name}: a tensor, got {describe(x)}" for name, x in given.items() if not isinstance(x, torch.Tensor)]
    if not problems and (experts.dtype == torch.bool or experts.is_floating_point() or experts.is_complex()):
        problems.append(f"experts: int64, the numbers of experts, got {describe(experts)}")
    if not problems and probabilities is not None and not probabilities.is_floating_point():
        problems.append(f"probabilities: of a floating dtype, got {describe(probabilities)}")
    fix = "choose by probabilities.topk(k, -1).indices, with probabilities [tokens, experts] and mask [tokens]"
    if problems:
        raise FzeroTypeError(owner, "invalid arguments", problems, fix)
    fits = experts.dim() == 2 and experts.shape[1] > 0 and (mask is None or mask.shape == experts.shape[:1])
    if probabilities is not None:
        fits = fits and probabilities.dim() == 2 and probabilities.shape[:1] == experts.shape[:1]
        fits = fits and experts.shape[1] <= probabilities.shape[1]
    if not fits:
        wanted = {"probabilities": "[tokens, experts]", "experts": "[tokens, k]", "mask": "[tokens]"}
        problems = [f"{name} {wanted[name]}: got {describe(x)}" for name, x in given.items()]
        fix = "one row per token: chosen = probabilities.topk(k, -1).indices, and mask.flatten()"
        raise FzeroValueError(owner, "shapes do not match", problems, fix)


class _RowsAt(torch.autograd.Function):
    """Reads rows of `x`, each of which stands for `share` consecutive indices. The gradient reads by the inverse
    indices.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, index: torch.Tensor, back: torch.Tensor, share: int, fill: bool) -> torch.Tensor:
        numbers = index if share == 1 else index.div(share, rounding_mode="floor")
        return ROWS_AT(x, numbers, back.reshape(x.shape[0], share), fill)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, index, back, ctx.share, ctx.fill = inputs
        ctx.save_for_backward(index, back)
        ctx.save_for_forward(index, back)
        ctx.shape = x.shape[0], ctx.share

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        index, back = ctx.saved_tensors
        read = _RowsAt.apply(grad.flatten(0, -2), back.reshape(ctx.shape), index, 1, False)
        return read.squeeze(1) if ctx.shape[1] == 1 else read.sum(1), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, d_x: torch.Tensor, *_: Any) -> torch.Tensor:
        return _RowsAt.apply(d_x, *ctx.saved_tensors, ctx.share, ctx.fill)


class _Route(torch.autograd.Function):
    """Reads the rows of experts: for each of the choices `order` the row of its token in `x`, which has one row for
    `share` consecutive choices. `place` is the inverse of `order`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, k: int, share: int
    ) -> torch.Tensor:
        return ROUTE(x, order if share == 1 else order.div(share, rounding_mode="floor"), ends, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, order, place, ends, ctx.k, ctx.share = inputs
        ctx.save_for_backward(order, place, ends)
        ctx.save_for_forward(order, place, ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        order, place, ends = ctx.saved_tensors
        read = _Unroute.apply(grad, place, order, ends, ctx.k)
        return read if ctx.share == 1 else read.unflatten(0, (-1, ctx.share)).sum(1), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, d_x: torch.Tensor, *_: Any) -> torch.Tensor:
        return _Route.apply(d_x, *ctx.saved_tensors, ctx.k, ctx.share)


class _Unroute(torch.autograd.Function):
    """Reads the rows of experts in the order of the choices."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rows: torch.Tensor, place: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, k: int
    ) -> torch.Tensor:
        return UNROUTE(rows, place, ends, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, place, order, ends, ctx.k = inputs
        ctx.save_for_backward(place, order, ends)
        ctx.save_for_forward(place, order, ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        place, order, ends = ctx.saved_tensors
        return _Route.apply(grad, order, place, ends, ctx.k, 1), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, d_rows: torch.Tensor, *_: Any) -> torch.Tensor:
        return _Unroute.apply(d_rows, *ctx.saved_tensors, ctx.k)


class _GroupedMm(torch.autograd.Function):
    """Multiplies rows in the order of their experts by the matrices of these."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ends: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
        return GROUPED_MM(ends, rows, w, tokens * k, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, tokens, k = inputs
        ctx.sizes = tokens, k
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: Any, _: Any, d_rows: torch.Tensor | None, d_w: torch.Tensor | None, *__: Any) -> torch.Tensor:
        ends, rows, w = ctx.saved_tensors
        parts = [] if d_rows is None else [_GroupedMm.apply(ends, d_rows, w, *ctx.sizes)]
        parts += [] if d_w is None else [_GroupedMm.apply(ends, rows, d_w, *ctx.sizes)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ends, rows, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_rows = _GroupedMm.apply(ends, grad, w.mT, *ctx.sizes) if wanted[1] else None
        return None, d_rows, _GroupedOuter.apply(ends, rows, grad, *ctx.sizes) if wanted[2] else None, None, None


class _GroupedOuter(torch.autograd.Function):
    """Computes the gradient of the matrices of experts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ends: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
        return GROUPED_OUTER(ends, rows, grad, tokens * k, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, tokens, k = inputs
        ctx.sizes = tokens, k
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: Any, _: Any, d_rows: torch.Tensor | None, d_grad: torch.Tensor | None, *__: Any) -> torch.Tensor:
        ends, rows, grad = ctx.saved_tensors
        parts = [] if d_rows is None else [_GroupedOuter.apply(ends, d_rows, grad, *ctx.sizes)]
        parts += [] if d_grad is None else [_GroupedOuter.apply(ends, rows, d_grad, *ctx.sizes)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @staticmethod
    def backward(ctx: Any, d_w: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ends, rows, grad = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_rows = _GroupedMm.apply(ends, grad, d_w.mT, *ctx.sizes) if wanted[1] else None
        return None, d_rows, _GroupedMm.apply(ends, rows, d_w, *ctx.sizes) if wanted[2] else None, None, None


class _ExpertMm(torch.autograd.Function):
    """Multiplies rows by the matrices of their experts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(expert: torch.Tensor, rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return EXPERT_MM(expert, rows, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, _: Any, d_rows: torch.Tensor | None, d_w: torch.Tensor | None) -> torch.Tensor:
        expert, rows, w = ctx.saved_tensors
        parts = [] if d_rows is None else [_ExpertMm.apply(expert, d_rows, w)]
        parts += [] if d_w is None else [_ExpertMm.apply(expert, rows, d_w)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        expert, rows, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_rows = _ExpertMm.apply(expert, grad, w.mT) if wanted[1] else None
        d_w = _ExpertOuter.apply(expert, rows, grad, w.shape[0] // rows.shape[0]) if wanted[2] else None
        return None, d_rows, d_w


class _ExpertOuter(torch.autograd.Function):
    """Computes the gradient of the experts' matrices."""

    generate_vmap_rule = True

    @staticmethod
    def forward(expert: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, each: int) -> torch.Tensor:
        return EXPERT_OUTER(expert, rows.mT, grad, each)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        expert, rows, grad, ctx.each = inputs
        ctx.save_for_backward(expert, rows, grad)
        ctx.save_for_forward(expert, rows, grad)

    @staticmethod
    def jvp(ctx: Any, _: Any, d_rows: torch.Tensor | None, d_grad: torch.Tensor | None, *__: Any) -> torch.Tensor:
        expert, rows, grad = ctx.saved_tensors
        parts = [] if d_rows is None else [_ExpertOuter.apply(expert, d_rows, grad, ctx.each)]
        parts += [] if d_grad is None else [_ExpertOuter.apply(expert, rows, d_grad, ctx.each)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @staticmethod
    def backward(ctx: Any, d_w: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        expert, rows, grad = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        # The result is rows.mT @ grad, so the gradient of `rows` is grad @ d_w.mT, and that of
        # `grad` is rows @ d_w.
        d_rows = _ExpertMm.apply(expert, grad, d_w.mT) if wanted[1] else None
        return None, d_rows, _ExpertMm.apply(expert, rows, d_w) if wanted[2] else None, None


def capacity_problems(capacity: Any, ranks: Any) -> list[str]:
    """Returns the problems of a capacity and a number of ranks."""
    if capacity is None:
        return [] if ranks is None else [f"ranks={ranks!r}: only with capacity=('rank', factor)"]
    of_rank = isinstance(capacity, tuple) and len(capacity) == 2 and capacity[0] == "rank"
    factor = capacity[1] if of_rank else capacity
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        return [f"capacity={capacity!r}: a factor above 0, of tokens x k / experts, or ('rank', factor)"]
    if of_rank:
        return count("ranks", ranks)
    return [] if ranks is None else [f"ranks={ranks!r}: only with capacity=('rank', factor)"]


def _check(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    capacity: Capacity | None,
    ranks: int | None,
    overflow: str,
) -> None:
    """Raises an error that lists the invalid arguments of `dispatch`."""
    given = {"x": x, "experts": experts, "weights": weights}
    problems = [f"{name}: a tensor, got {describe(t)}" for name, t in given.items() if not isinstance(t, torch.Tensor)]
    if not problems and experts.dtype != torch.int64:
        problems.append(f"experts: int64, the numbers of experts, got {describe(experts)}")
    if not problems and not (x.is_floating_point() and weights.is_floating_point()):
        problems.append(f"x and weights: of a floating dtype, got {describe(x)} and {describe(weights)}")
    if problems:
        raise FzeroTypeError("experts.dispatch", "invalid arguments", problems, "see its example")
    problems = [*count("num_experts", num_experts), *capacity_problems(capacity, ranks)]
    if not problems and ranks is not None and num_experts % ranks:
        problems.append(f"ranks={ranks}: {num_experts} experts are not divisible among them")
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
