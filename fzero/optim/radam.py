"""Defines RAdam, Adam with a rectified variance (Liu et al. 2020, arXiv:1908.03265)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.scaling_and_clipping import descent
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, new_count, new_moment, scalars
from fzero.tree import Tree

_WHERE = "optim.radam"


class RAdamState(NamedTuple):
    """The state of the part of `radam`'s chain that scales gradients.

    Attributes:
        count: int64[], the number of updates done.
        mu: like params, float32 (float64 for float64 params): running mean of gradients.
        nu: like mu: running mean of squared gradients.

    Example:
        >>> state = radam(0.1).init({"w": torch.ones(2)})[0]
        >>> state.count.item(), state.mu, state.nu
        (0, {'w': tensor([0., 0.])}, {'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    mu: Tree
    nu: Tree


@keywords
def radam(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """RAdam, equal to `torch.optim.RAdam`.

    In update number t = 1, 2, ... the variance of the mean of squares is that of `rho = rho_max - 2 t b2**t / (1 -
    b2**t)` samples, with `rho_max = 2 / (1 - b2) - 1`. While rho is at most 5, `updates = -lr * mu / (1 - b1**t)`;
    afterwards they are Adam's times `sqrt((rho - 4) (rho - 2) rho_max / ((rho_max - 4) (rho_max - 2) rho))`.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        b1: decay of the mean of gradients, at least 0 and less than 1.
        b2: decay of the mean of squared gradients, at least 0 and less than 1.
        eps: greater than 0, added to `sqrt(nu)` before its bias is corrected.
        weight_decay: at least 0: L2 regularization, `weight_decay * params` added to the gradients.
        decoupled_weight_decay: `lr * weight_decay * params` is subtracted from the parameters instead, as in `adamw`.
        maximize: ascend instead of descend.

    Memory: 8 bytes per parameter (16 for float64).

    Raises:
        FzeroValueError: if a number is out of range.

    Paper: Liu et al., On the variance of the adaptive learning rate and beyond, ICLR 2020.

    Example:
        >>> params, optimizer = {"w": torch.zeros(2)}, radam(0.1)
        >>> optimizer.update({"w": torch.tensor([1.0, -3.0])}, optimizer.init(params), params)[0]
        {'w': tensor([-0.1000,  0.3000])}
    """
    check(
        _WHERE,
        lr,
        positive={"eps": eps},
        not_negative={"weight_decay": weight_decay},
        betas={"b1": b1, "b2": b2},
        flags={"decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize},
    )

    def init(params: Tree) -> RAdamState:
        return RAdamState(new_count(params), new_moment(_WHERE, params), new_moment(_WHERE, params))

    def update(grads: Tree, state: RAdamState, params: Tree = None) -> tuple[Tree, RAdamState]:
        count = state.count + 1
        t = count.to(torch.float64)
        correction, rho_max = 1 - b2**t, 2 / (1 - b2) - 1
        rho = rho_max - 2 * t * b2**t / correction
        rectified = rho > 5
        rho = torch.where(rectified, rho, 5.0)  # otherwise the root of a negative number, or rho_max - 4 = 0
        factor = ((rho - 4) * (rho - 2) * rho_max / ((rho_max - 4) * (rho_max - 2) * rho) * correction).sqrt()
        at = scalars(torch.where(rectified, factor, 1.0) / (1 - b1**t))

        def leaf(g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
            (step,) = at(m.dtype)
            g = g.to(m.dtype)
            m = torch.lerp(m, g, 1 - b1)
            v = torch.addcmul(v * b2, g, g, value=1 - b2)
            # Both cases in one expression, because a compiled update has no branch on a tensor.
            return m * step / torch.where(rectified, v.sqrt() + eps, 1.0), m, v

        updates, mu, nu = leafwise(_WHERE, 3, leaf, grads=grads, mu=state.mu, nu=state.nu)
        return updates, RAdamState(count, mu, nu)

    links = [GradientTransformation(init, update)]
    return descent(links, lr, weight_decay, maximize, decoupled_weight_decay)
