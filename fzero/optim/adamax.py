"""Defines Adamax, Adam with the infinity norm (Kingma & Ba 2015, arXiv:1412.6980)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.scaling_and_clipping import descent
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, new_count, new_moment, scalars
from fzero.tree import Tree

_WHERE = "optim.adamax"


class AdamaxState(NamedTuple):
    """The state of the part of `adamax`'s chain that scales gradients.

    Attributes:
        count: int64[], the number of updates done.
        mu: like params, float32 (float64 for float64 params): running mean of gradients.
        largest: like mu: the largest magnitude of a gradient so far, decaying.

    Example:
        >>> state = adamax(0.1).init({"w": torch.ones(2)})[0]
        >>> state.count.item(), state.mu, state.largest
        (0, {'w': tensor([0., 0.])}, {'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    mu: Tree
    largest: Tree


@keywords
def adamax(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Adamax, equal to `torch.optim.Adamax`.

    `updates = -lr * (mu / (1 - b1**t)) / largest` in update number t = 1, 2, ..., with `largest = max(b2 * largest,
    abs(grads) + eps)`.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        b1: decay of the mean of gradients, at least 0 and less than 1.
        b2: decay of the largest magnitude, at least 0 and less than 1.
        eps: greater than 0.
        weight_decay: L2 regularization, `weight_decay * params` added to the gradients; at least 0.
        maximize: ascend instead of descend.

    Memory: 8 bytes per parameter (16 for float64).

    Raises:
        FzeroValueError: if a number is out of range.

    Paper: Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015.

    Example:
        >>> params, optimizer = {"w": torch.zeros(2)}, adamax(0.1)
        >>> optimizer.update({"w": torch.tensor([1.0, -3.0])}, optimizer.init(params), params)[0]
        {'w': tensor([-0.1000,  0.1000])}
    """
    not_negative, flags = {"weight_decay": weight_decay}, {"maximize": maximize}
    check(_WHERE, lr, positive={"eps": eps}, not_negative=not_negative, betas={"b1": b1, "b2": b2}, flags=flags)

    def init(params: Tree) -> AdamaxState:
        return AdamaxState(new_count(params), new_moment(_WHERE, params), new_moment(_WHERE, params))

    def update(grads: Tree, state: AdamaxState, params: Tree = None) -> tuple[Tree, AdamaxState]:
        count = state.count + 1
        at = scalars(1 - b1 ** count.to(torch.float64))

        def leaf(g: Any, m: Any, n: Any) -> tuple[Any, Any, Any]:
            (correction,) = at(m.dtype)
            g = g.to(m.dtype)
            m = torch.lerp(m, g, 1 - b1)
            n = torch.maximum(n * b2, g.abs() + eps)
            return m / (n * correction), m, n

        updates, mu, largest = leafwise(_WHERE, 3, leaf, grads=grads, mu=state.mu, largest=state.largest)
        return updates, AdamaxState(count, mu, largest)

    return descent([GradientTransformation(init, update)], lr, weight_decay, maximize)
