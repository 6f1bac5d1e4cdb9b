"""Defines NAdam, Adam with Nesterov momentum (Dozat 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.scaling_and_clipping import descent
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, new_count, new_moment, scalars
from fzero.tree import Tree

_WHERE = "optim.nadam"


class NAdamState(NamedTuple):
    """The state of the part of `nadam`'s chain that scales gradients.

    Attributes:
        count: int64[], the number of updates done.
        product: float64[], product of the momenta of all updates.
        mu: like params, float32 (float64 for float64 params): running mean of gradients.
        nu: like mu: running mean of squared gradients.

    Example:
        >>> state = nadam(0.1).init({"w": torch.ones(2)})[0]
        >>> state.count.item(), state.product.item(), state.mu, state.nu
        (0, 1.0, {'w': tensor([0., 0.])}, {'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    product: torch.Tensor
    mu: Tree
    nu: Tree


@keywords
def nadam(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """NAdam, equal to `torch.optim.NAdam`.

    In update number t = 1, 2, ... the momentum is `m(t) = b1 * (1 - 0.96**(t * momentum_decay) / 2)`, and `updates =
    -lr * (grads * (1 - m(t)) / (1 - product) + mu * m(t + 1) / (1 - product * m(t + 1))) / (sqrt(nu / (1 - b2**t)) +
    eps)`, with the product of m(1) to m(t).

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        b1: decay of the mean of gradients, at least 0 and less than 1.
        b2: decay of the mean of squared gradients, at least 0 and less than 1.
        eps: greater than 0.
        weight_decay: at least 0: L2 regularization, `weight_decay * params` added to the gradients.
        momentum_decay: how fast the momentum rises to b1, at least 0.
        decoupled_weight_decay: `lr * weight_decay * params` is subtracted from the parameters instead, as in `adamw`.
        maximize: ascend instead of descend.

    Memory: 8 bytes per parameter (16 for float64).

    Raises:
        FzeroValueError: if a number is out of range.

    Paper: Dozat, Incorporating Nesterov momentum into Adam, ICLR 2016 workshop.

    Example:
        >>> params, optimizer = {"w": torch.zeros(2)}, nadam(0.1, momentum_decay=0.0)
        >>> optimizer.update({"w": torch.tensor([1.0, -3.0])}, optimizer.init(params), params)[0]
        {'w': tensor([-0.1056,  0.1056])}
    """
    check(
        _WHERE,
        lr,
        positive={"eps": eps},
        not_negative={"weight_decay": weight_decay, "momentum_decay": momentum_decay},
        betas={"b1": b1, "b2": b2},
        flags={"decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize},
    )

    def init(params: Tree) -> NAdamState:
        count = new_count(params)
        product = torch.ones_like(count, dtype=torch.float64)
        return NAdamState(count, product, new_moment(_WHERE, params), new_moment(_WHERE, params))

    def update(grads: Tree, state: NAdamState, params: Tree = None) -> tuple[Tree, NAdamState]:
        count = state.count + 1
        t = count.to(torch.float64)
        # The momenta of this update and of the next one.
        now, later = (b1 * (1 - 0.5 * 0.96 ** (x * momentum_decay)) for x in (t, t + 1))
        product = state.product * now
        at = scalars((1 - now) / (1 - product), later / (1 - product * later), (1 - b2**t).sqrt())

        def leaf(g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
            of_gradient, of_mean, root = at(m.dtype)
            g = g.to(m.dtype)
            m = torch.lerp(m, g, 1 - b1)
            v = torch.addcmul(v * b2, g, g, value=1 - b2)
            return (g * of_gradient + m * of_mean) / (v.sqrt() / root + eps), m, v

        updates, mu, nu = leafwise(_WHERE, 3, leaf, grads=grads, mu=state.mu, nu=state.nu)
        return updates, NAdamState(count, product, mu, nu)

    links = [GradientTransformation(init, update)]
    return descent(links, lr, weight_decay, maximize, decoupled_weight_decay)
