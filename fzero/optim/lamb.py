"""Defines LAMB: Adam with a step size per parameter, for very large batches (You et al. 2020,
arXiv:1904.00962).
"""

from __future__ import annotations

import torch

from fzero._utils.arguments import keywords
from fzero.optim.adam import scale_by_adam
from fzero.optim.gradient_transformation import GradientTransformation, chain, stateless
from fzero.optim.masking import Mask
from fzero.optim.scaling_and_clipping import add_decayed_weights, scale_by_learning_rate
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, need_params, sum_of_squares, upcast
from fzero.tree import Tree


def scale_by_trust_ratio() -> GradientTransformation:
    """Multiplies each gradient by `norm(params) / norm(grads)` of its parameter, or by 1 if either norm is 0.

    The norms are those of unsharded parameters, in float32 (float64 for float64 parameters).

    Communication: on shards, two all-reduces of 4 bytes per parameter, before coalescing.

    Raises:
        FzeroValueError: if update is called without params.

    Example:
        >>> opt = scale_by_trust_ratio()
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> opt.update({"w": torch.tensor([0.0, 2.0])}, opt.init(params), params)[0]
        {'w': tensor([0., 5.])}
    """
    where = "optim.scale_by_trust_ratio"

    def leaf(g: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor]:
        p_norm, g_norm = sum_of_squares(p).sqrt(), sum_of_squares(g).sqrt()
        # With a ratio of 0, a parameter that is 0 could never change; for a zero gradient the ratio would be infinite.
        ratio = torch.where((p_norm > 0) & (g_norm > 0), p_norm / g_norm, 1.0)
        g = upcast(g)
        return (g * ratio.to(g.dtype),)

    def rescale(grads: Tree, params: Tree) -> Tree:
        need_params(where, grads, params)
        return leafwise(where, 1, leaf, grads=grads, params=params)[0]

    return stateless(rescale)


@keywords
def lamb(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """LAMB: Adam with a step size for each parameter that is proportional to the norm of the parameter, for very large
    batches.

    `updates = -lr * (norm(params) / norm(r)) * r` for each parameter, with `r = mu_hat / (sqrt(nu_hat) + eps) +
    weight_decay * params`, where `mu_hat` and `nu_hat` are the bias-corrected means of Adam. The ratio is 1 if either
    norm is 0; otherwise it is not clipped.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        b1: decay of the mean of gradients, at least 0 and less than 1.
        b2: decay of the mean of squared gradients, at least 0 and less than 1.
        eps: greater than 0.
        weight_decay: at least 0.
        mask: which parameters decay, as in `masked`; None: all.

    Communication: on shards, two all-reduces of 4 bytes per parameter, before coalescing.

    Memory: 8 bytes per parameter (16 for float64).

    Raises:
        FzeroValueError: if a number is out of range, if the mask has another structure, or if update is called
            without params.

    Paper: You et al., Large batch optimization for deep learning: training BERT in 76 minutes, ICLR 2020.

    Example:
        >>> params, optimizer = {"w": torch.ones(4)}, lamb(0.1)
        >>> updates, state = optimizer.update({"w": torch.ones(4)}, optimizer.init(params), params)
        >>> updates
        {'w': tensor([-0.1000, -0.1000, -0.1000, -0.1000])}
    """
    check(
        "optim.lamb", lr, positive={"eps": eps}, not_negative={"weight_decay": weight_decay}, betas={"b1": b1, "b2": b2}
    )
    # Before the trust ratio, because the norm in its denominator is that of the update with the decay.
    decay = [add_decayed_weights(weight_decay, mask)] if weight_decay else []
    return chain(scale_by_adam(b1, b2, eps), *decay, scale_by_trust_ratio(), scale_by_learning_rate(lr))
