"""Defines Adagrad (Duchi, Hazan & Singer 2011, https://jmlr.org/papers/v12/duchi11a.html)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._utils.arguments import keywords
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.scaling_and_clipping import descent
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, new_moment, rate
from fzero.tree import Tree

_WHERE = "optim.adagrad"


class AdagradState(NamedTuple):
    """The state of the part of `adagrad`'s chain that divides gradients.

    Attributes:
        sums: like params, float32 (float64 for float64 params): sum of squared gradients.

    Example:
        >>> adagrad(0.1, initial_accumulator_value=0.5).init({"w": torch.ones(2)})[0]
        AdagradState(sums={'w': tensor([0.5000, 0.5000])})
    """

    sums: Tree


@keywords
def adagrad(
    lr: float | Schedule,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> GradientTransformation:
    """Adagrad, equal to `torch.optim.Adagrad`: `updates = -lr * grads / (sqrt(sums) + eps)`.

    `sums` are the sums of squared gradients so far, including those of this update.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        lr_decay: the learning rate is divided by `1 + lr_decay * count`, where `count` is the number of previous
            updates; at least 0.
        weight_decay: L2 regularization, `weight_decay * params` added to the gradients; at least 0.
        initial_accumulator_value: the initial value of the sums, at least 0.
        eps: greater than 0.
        maximize: ascend instead of descend.

    Memory: 4 bytes per parameter (8 for float64).

    Raises:
        FzeroValueError: if a number is out of range.

    Paper: Duchi, Hazan and Singer, Adaptive subgradient methods for online learning and stochastic optimization,
        JMLR 2011.

    Example:
        >>> params, optimizer = {"w": torch.zeros(2)}, adagrad(0.1)
        >>> optimizer.update({"w": torch.tensor([1.0, -3.0])}, optimizer.init(params), params)[0]
        {'w': tensor([-0.1000,  0.1000])}
    """
    not_negative = {"lr_decay": lr_decay, "initial_accumulator_value": initial_accumulator_value}
    not_negative["weight_decay"] = weight_decay
    check(_WHERE, lr, positive={"eps": eps}, not_negative=not_negative, flags={"maximize": maximize})

    def init(params: Tree) -> AdagradState:
        return AdagradState(tree.map(lambda z: z + initial_accumulator_value, new_moment(_WHERE, params)))

    def update(grads: Tree, state: AdagradState, params: Tree = None) -> tuple[Tree, AdagradState]:
        def leaf(g: Any, s: Any) -> tuple[Any, Any]:
            g = g.to(s.dtype)
            s = torch.addcmul(s, g, g)
            return g / (s.sqrt() + eps), s

        updates, sums = leafwise(_WHERE, 2, leaf, grads=grads, sums=state.sums)
        return updates, AdagradState(sums)

    def decayed(count: Any) -> torch.Tensor:
        return rate(_WHERE, lr, count) / (1 + count.to(torch.float64) * lr_decay)

    links = [GradientTransformation(init, update)]
    return descent(links, decayed if lr_decay else lr, weight_decay, maximize)
