"""Means that are exact however the batch was cut: what a function returned, as sums that ranks and micro-batches add up, and as the tree that comes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.errors import FzeroTypeError, TraceError, message


class Weighted(NamedTuple):
    """A sum and what it is a sum over: `total / count` is the mean, exact however the batch was cut."""

    total: torch.Tensor
    count: torch.Tensor


class Loss(NamedTuple):
    total: torch.Tensor
    count: torch.Tensor | None


def split_loss(result: Any, has_aux: bool) -> tuple[Loss, Any]:
    """Checks what a loss function returned and splits it into the loss and the auxiliary values."""
    aux = None
    if has_aux:
        if not isinstance(result, tuple) or isinstance(result, Weighted) or len(result) != 2:
            raise FzeroTypeError(message("train_step", f"has_aux=True, but the loss function returned {tree.describe(result)}", fix="return (loss, aux)"))
        result, aux = result
    elif isinstance(result, tuple) and not isinstance(result, Weighted):
        raise FzeroTypeError(message("train_step", f"the loss function returned a tuple of {len(result)}", fix="pass has_aux=True to return (loss, aux)"))
    loss = Loss(*result) if isinstance(result, Weighted) else Loss(result, None)
    problems = []
    for what, x in (("total", loss.total), ("count", loss.count)) if loss.count is not None else (("loss", loss.total),):
        if not isinstance(x, torch.Tensor):
            problems.append(f"{what} is {type(x).__name__}")
        elif x.dim() != 0:
            problems.append(f"{what} is {tree.describe(x)}, not a scalar")
    if isinstance(loss.total, torch.Tensor) and not loss.total.is_floating_point():
        problems.append(f"{'loss' if loss.count is None else 'total'} is {tree.describe(loss.total)}, not floating point")
    if problems:
        raise FzeroTypeError(message("train_step", "the loss is not a scalar tensor", problems, "reduce it with .mean(), or return fz.weighted(total, count)"))
    if loss.count is not None and loss.count.requires_grad:
        raise TraceError(
            message(
                "train_step",
                "the count of a weighted loss depends on trainable parameters",
                ["count: ranks and micro-batches add up totals and counts apart, so there is no gradient of their quotient through it"],
                "detach it: fz.weighted(total, count.detach()); or return total / count, a mean of the parts' means",
            )
        )
    if not loss.total.requires_grad:
        raise TraceError(
            message(
                "train_step",
                "the loss does not depend on any trainable parameter",
                fix="use the params argument (not a closure), and check `trainable` and .detach()",
            )
        )
    return loss, aux


def summable(x: torch.Tensor) -> torch.Tensor:
    """A value in the dtype it is summed in over ranks and micro-batches: float32, or float64."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


class Means(NamedTuple):
    """How a flat list of sums becomes a tree of means: for each result whether it is a total and a count, and for each flat value whether it is summed."""

    structure: tree.TreeSpec
    weighted: tuple[bool, ...]
    summed: tuple[bool, ...]


def flatten_means(result: Any) -> tuple[list[torch.Tensor], Means]:
    is_pair = lambda x: isinstance(x, Weighted)  # noqa: E731
    leaves, structure = tree.flatten(result, is_leaf=is_pair)
    flat: list[Any] = [y for x in leaves for y in (x if is_pair(x) else (x,))]
    wrong = [f"{p}: {type(x).__name__}" for p, x in zip(tree.paths(result, "result"), tree.leaves(result), strict=True) if not isinstance(x, torch.Tensor)]
    if wrong:
        raise FzeroTypeError(message("step", "the function returned something other than tensors", wrong, "return a pytree of tensors"))
    return flat, Means(structure, tuple(map(is_pair, leaves)), tuple(is_pair(x) for x in leaves for _ in (x if is_pair(x) else (x,))))
