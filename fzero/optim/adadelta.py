"""Defines Adadelta (Zeiler 2012, arXiv:1212.5701)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.scaling_and_clipping import descent
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, new_moment
from fzero.tree import Tree

_WHERE = "optim.adadelta"


class AdadeltaState(NamedTuple):
    """The state of the part of `adadelta`'s chain that scales gradients.

    Attributes:
        nu: like params, float32 (float64 for float64 params): running mean of squared gradients.
        deltas: like nu: running mean of squared updates, before the learning rate.

    Example:
        >>> adadelta(1.0).init({"w": torch.ones(2)})[0]
        AdadeltaState(nu={'w': tensor([0., 0.])}, deltas={'w': tensor([0., 0.])})
    """

    nu: Tree
    deltas: Tree


@keywords
def adadelta(
    lr: float | Schedule = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Adadelta, equal to `torch.optim.Adadelta`: `updates = -lr * grads * sqrt(deltas + eps) / sqrt(nu + eps)`.

    `nu` is the running mean of squared gradients, including the current one; `deltas` is that of the squared
    previous updates, without the learning rate.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        rho: decay of both means, at least 0 and less than 1.
        eps: greater than 0.
        weight_decay: L2 regularization, `weight_decay * params` added to the gradients; at least 0.
        maximize: ascend instead of descend.

    Memory: 8 bytes per parameter (16 for float64).

    Raises:
        FzeroValueError: if a number is out of range.

    Paper: Zeiler, ADADELTA: an adaptive learning rate method, 2012.

    Example:
        >>> params, optimizer = {"w": torch.zeros(2)}, adadelta(rho=0.75, eps=1e-2)
        >>> optimizer.update({"w": torch.tensor([1.0, -3.0])}, optimizer.init(params), params)[0]
        {'w': tensor([-0.1961,  0.1996])}
    """
    not_negative, flags = {"weight_decay": weight_decay}, {"maximize": maximize}
    check(_WHERE, lr, positive={"eps": eps}, not_negative=not_negative, betas={"rho": rho}, flags=flags)

    def init(params: Tree) -> AdadeltaState:
        return AdadeltaState(new_moment(_WHERE, params), new_moment(_WHERE, params))

    def update(grads: Tree, state: AdadeltaState, params: Tree = None) -> tuple[Tree, AdadeltaState]:
        def leaf(g: Any, v: Any, d: Any) -> tuple[Any, Any, Any]:
            g = g.to(v.dtype)
            v = torch.addcmul(v * rho, g, g, value=1 - rho)
            u = g * ((d + eps).sqrt() / (v + eps).sqrt())
            return u, v, torch.addcmul(d * rho, u, u, value=1 - rho)

        updates, nu, deltas = leafwise(_WHERE, 3, leaf, grads=grads, nu=state.nu, deltas=state.deltas)
        return updates, AdadeltaState(nu, deltas)

    return descent([GradientTransformation(init, update)], lr, weight_decay, maximize)
