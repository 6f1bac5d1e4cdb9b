"""Defines Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.masking import Mask, check_mask, resolve_mask
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, need_params, new_count, new_moment, rate, scalars
from fzero.tree import Tree


class LionState(NamedTuple):
    """The state of `lion`: the number of updates, and the mean of gradients.

    Attributes:
        count: int64[], the number of updates done.
        mu: like params, float32 (float64 for float64 params): running mean of gradients.

    Example:
        >>> state = lion(0.1).init({"w": torch.ones(2)})
        >>> state.count.item(), state.mu
        (0, {'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    mu: Tree


@keywords
def lion(
    lr: float | Schedule, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0, mask: Mask | None = None
) -> GradientTransformation:
    """Lion: updates are the signs of a momentum, so all of them have the same magnitude.

    `updates = -lr * (sign(b1 * mu + (1 - b1) * grads) + weight_decay * params)`, then `mu = b2 * mu + (1 - b2) *
    grads`.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update. Typically a third to a
            tenth of AdamW's.
        b1: weight of the momentum in the update, at least 0 and less than 1.
        b2: decay of the momentum, at least 0 and less than 1.
        weight_decay: at least 0, multiplied by the learning rate. Typically three to ten times AdamW's.
        mask: which parameters decay, as in `masked`; None: all.

    Memory: 4 bytes per parameter (8 for float64), half of Adam's.

    Raises:
        FzeroValueError: if a number is out of range, if the mask has another structure, or if update is called
            without params although there is decay.

    Paper: Chen et al., Symbolic discovery of optimization algorithms, NeurIPS 2023.

    Example:
        >>> opt = lion(0.1)
        >>> params = {"w": torch.zeros(3)}
        >>> opt.update({"w": torch.tensor([5.0, 0.0, -0.01])}, opt.init(params), params)[0]
        {'w': tensor([-0.1000, -0.0000,  0.1000])}
    """
    where = "optim.lion"
    check(where, lr, not_negative={"weight_decay": weight_decay}, betas={"b1": b1, "b2": b2})
    check_mask(where, mask)

    def init(params: Tree) -> LionState:
        return LionState(new_count(params), new_moment(where, params))

    def update(grads: Tree, state: LionState, params: Tree = None) -> tuple[Tree, LionState]:
        size = -rate(where, lr, state.count)
        at = scalars(size, size * weight_decay)

        def leaf(g: Any, m: Any, p: Any = None, decayed: bool = False) -> tuple[Any, Any]:
            step, decay = at(m.dtype)
            g = g.to(m.dtype)
            # The sign is taken of one interpolation, and the momentum is updated below by another, with b2.
            u = torch.lerp(m, g, 1 - b1).sign() * step
            return (u + p.to(m.dtype) * decay if decayed else u), torch.lerp(m, g, 1 - b2)

        decaying = {}
        if weight_decay:
            need_params(where, grads, params)
            decaying = {"params": params, "mask": resolve_mask(where, mask, params)}
        updates, mu = leafwise(where, 2, leaf, grads=grads, mu=state.mu, **decaying)
        return updates, LionState(state.count + 1, mu)

    return GradientTransformation(init, update)
