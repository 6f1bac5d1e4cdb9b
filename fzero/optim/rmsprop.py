"""Defines RMSprop (Hinton 2012, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf; centered:
Graves 2013, arXiv:1308.0850)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.scaling_and_clipping import descent
from fzero.optim.schedules import Schedule
from fzero.optim.sgd import trace
from fzero.optim.tree_updates import check, leafwise, new_moment
from fzero.tree import Tree

_WHERE = "optim.rmsprop"


class RMSpropState(NamedTuple):
    """The state of the part of `rmsprop`'s chain that divides gradients.

    Attributes:
        nu: like params, float32 (float64 for float64 params): running mean of squared gradients.
        mu: like nu, if centered: running mean of gradients; else None.

    Example:
        >>> rmsprop(0.1).init({"w": torch.ones(2)})[0]
        RMSpropState(nu={'w': tensor([0., 0.])}, mu=None)
    """

    nu: Tree
    mu: Tree


@keywords
def rmsprop(
    lr: float | Schedule,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """RMSprop, equal to `torch.optim.RMSprop`: `updates = -lr * grads / (sqrt(nu) + eps)`.

    `nu = alpha * nu + (1 - alpha) * grads**2`. With momentum the quotients are accumulated as in `sgd`.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        alpha: decay of the mean of squared gradients, at least 0 and less than 1.
        eps: greater than 0.
        weight_decay: L2 regularization, `weight_decay * params` added to the gradients; at least 0.
        momentum: at least 0 and less than 1; 0 keeps no state.
        centered: divide by the root of the variance, `nu - mu**2`, with the running mean of gradients `mu`.
        maximize: ascend instead of descend.

    Memory: 4 bytes per parameter (8 for float64), 4 more with momentum, 4 more if centered.

    Raises:
        FzeroValueError: if a number is out of range.

    Paper: Hinton, Neural networks for machine learning, lecture 6, 2012. Graves, Generating sequences with recurrent
        neural networks, 2013, for `centered`.

    Example:
        >>> params, optimizer = {"w": torch.zeros(2)}, rmsprop(0.1, alpha=0.75)
        >>> optimizer.update({"w": torch.tensor([1.0, -3.0])}, optimizer.init(params), params)[0]
        {'w': tensor([-0.2000,  0.2000])}
    """
    check(
        _WHERE,
        lr,
        positive={"eps": eps},
        not_negative={"weight_decay": weight_decay},
        betas={"alpha": alpha, "momentum": momentum},
        flags={"centered": centered, "maximize": maximize},
    )

    def init(params: Tree) -> RMSpropState:
        return RMSpropState(new_moment(_WHERE, params), new_moment(_WHERE, params) if centered else None)

    def update(grads: Tree, state: RMSpropState, params: Tree = None) -> tuple[Tree, RMSpropState]:
        def leaf(g: Any, v: Any, m: Any = None) -> tuple[Any, ...]:
            g = g.to(v.dtype)
            v = torch.addcmul(v * alpha, g, g, value=1 - alpha)
            if m is None:
                return g / (v.sqrt() + eps), v, None
            m = torch.lerp(m, g, 1 - alpha)
            # A variance of 0 may be rounded to a negative number.
            return g / ((v - m * m).clamp(min=0.0).sqrt() + eps), v, m

        means = {"nu": state.nu, "mu": state.mu} if centered else {"nu": state.nu}
        updates, *new = leafwise(_WHERE, 1 + len(means), leaf, grads=grads, **means)
        return updates, RMSpropState(new[0], new[1] if centered else None)

    links = [GradientTransformation(init, update), *([trace(momentum)] if momentum else [])]
    return descent(links, lr, weight_decay, maximize)
