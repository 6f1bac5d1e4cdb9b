"""Defines stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fzero.arguments import keywords, plain_numbers
from fzero.errors import FzeroValueError
from fzero.optim.base import GradientTransformation, chain
from fzero.optim.leaves import check, leafwise, new_moment
from fzero.optim.schedules import Schedule
from fzero.optim.transforms import add_decayed_weights, scale_by_learning_rate
from fzero.tree import Tree


class TraceState(NamedTuple):
    """The state of `trace`: the running sum of gradients.

    Example:
        >>> trace(0.9).init({"w": torch.ones(2)})
        TraceState(trace={'w': tensor([0., 0.])})
    """

    trace: Tree  # like params, float32 (float64 for float64 params)


@plain_numbers
def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Updates are `trace = grads + decay * trace`, or `grads + decay * trace` with that new trace for Nesterov
    momentum.

    Args:
        decay: the momentum, at least 0 and less than 1.
        nesterov: look one step ahead.

    Memory: 4 bytes a parameter (8 for float64).

    Raises:
        FzeroValueError: `decay` out of range.

    Example:
        >>> optimizer = trace(0.5)
        >>> _, state = optimizer.update({"w": torch.ones(2)}, optimizer.init({"w": torch.ones(2)}), None)
        >>> optimizer.update({"w": torch.ones(2)}, state, None)[0]
        {'w': tensor([1.5000, 1.5000])}
    """
    check("optim.trace", betas={"decay": decay}, flags={"nesterov": nesterov})

    def init(params: Tree) -> TraceState:
        return TraceState(new_moment("optim.trace", params))

    def update(grads: Tree, state: TraceState, params: Tree = None) -> tuple[Tree, TraceState]:
        def leaf(g: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            g = g.to(t.dtype)
            t = t * decay + g
            return (g + t * decay if nesterov else t), t

        updates, new = leafwise("optim.trace", 2, leaf, grads=grads, trace=state.trace)
        return updates, TraceState(new)

    return GradientTransformation(init, update)


@keywords
def sgd(
    lr: float | Schedule, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> GradientTransformation:
    """Gradient descent, equal to `torch.optim.SGD` with dampening 0 (Sutskever et al. 2013).

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        momentum: at least 0 and less than 1; 0 keeps no state.
        nesterov: look one step ahead; needs momentum.
        weight_decay: L2 regularisation, `weight_decay * params` added to the gradients.

    Memory: 4 bytes a parameter with momentum, none without.

    Raises:
        FzeroValueError: a number out of range, or nesterov without momentum.

    Example:
        >>> opt = sgd(0.1, momentum=0.9)
        >>> params = {"w": torch.tensor([1.0])}
        >>> updates, state = opt.update({"w": torch.tensor([2.0])}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.2000])}
    """
    check(
        "optim.sgd",
        lr,
        not_negative={"weight_decay": weight_decay},
        betas={"momentum": momentum},
        flags={"nesterov": nesterov},
    )
    if nesterov and not momentum:
        raise FzeroValueError(
            "optim.sgd", "nesterov=True without momentum is plain gradient descent", fix="give a momentum, e.g. 0.9"
        )
    links = [add_decayed_weights(weight_decay)] if weight_decay else []
    links += [trace(momentum, nesterov)] if momentum else []
    return chain(*links, scale_by_learning_rate(lr))
