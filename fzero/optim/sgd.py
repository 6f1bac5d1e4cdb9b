"""Defines stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords, plain_numbers
from fzero.errors import FzeroValueError
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.scaling_and_clipping import descent
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, new_count, new_moment, reject, scalars
from fzero.tree import Tree


class TraceState(NamedTuple):
    """The state of `trace`: the running sum of gradients.

    Attributes:
        trace: like params, float32 (float64 for float64 params): the running sum of gradients.

    Example:
        >>> trace(0.9).init({"w": torch.ones(2)})
        TraceState(trace={'w': tensor([0., 0.])})
    """

    trace: Tree


class DampedTraceState(NamedTuple):
    """The state of `trace` with dampening, which is not applied to the first gradient.

    Attributes:
        count: int64[], the number of updates done.
        trace: like params, float32 (float64 for float64 params): the running sum of gradients.

    Example:
        >>> trace(0.9, dampening=0.5).init({"w": torch.ones(2)})
        DampedTraceState(count=tensor(0), trace={'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    trace: Tree


@plain_numbers
def trace(decay: float, nesterov: bool = False, dampening: float = 0.0) -> GradientTransformation:
    """Returns updates `trace = grads + decay * trace`, or, with Nesterov momentum, `grads + decay * trace` of that
    new trace.

    Args:
        decay: the momentum, at least 0 and less than 1.
        nesterov: look one step ahead.
        dampening: in the sum, gradients except the first are multiplied by `1 - dampening`; at least 0.

    Memory: 4 bytes per parameter (8 for float64).

    Raises:
        FzeroValueError: a number out of range, or Nesterov momentum with dampening.

    Example:
        >>> optimizer = trace(0.5)
        >>> _, state = optimizer.update({"w": torch.ones(2)}, optimizer.init({"w": torch.ones(2)}), None)
        >>> optimizer.update({"w": torch.ones(2)}, state, None)[0]
        {'w': tensor([1.5000, 1.5000])}
    """
    where = "optim.trace"
    check(where, not_negative={"dampening": dampening}, betas={"decay": decay}, flags={"nesterov": nesterov})
    reject(where, ["nesterov=True: needs dampening=0"] if nesterov and dampening else [])

    def init(params: Tree) -> Any:
        sums = new_moment(where, params)
        return DampedTraceState(new_count(params), sums) if dampening else TraceState(sums)

    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        at = scalars(torch.where(state.count == 0, 1.0, 1 - dampening).to(torch.float64) if dampening else 1.0)

        def leaf(g: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            g = g.to(t.dtype)
            t = t * decay + (g * at(t.dtype)[0] if dampening else g)
            return (g + t * decay if nesterov else t), t

        updates, new = leafwise(where, 2, leaf, grads=grads, trace=state.trace)
        return updates, DampedTraceState(state.count + 1, new) if dampening else TraceState(new)

    return GradientTransformation(init, update)


@keywords
def sgd(
    lr: float | Schedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Gradient descent, equal to `torch.optim.SGD` (Sutskever et al. 2013).

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        momentum: at least 0 and less than 1; 0 keeps no state.
        nesterov: look one step ahead; needs momentum, and no dampening.
        weight_decay: L2 regularization, `weight_decay * params` added to the gradients.
        dampening: gradients, except the first, are multiplied by `1 - dampening` before they are added to the momentum;
            at least 0.
        maximize: ascend instead of descend.

    Memory: 4 bytes per parameter with momentum, none without.

    Raises:
        FzeroValueError: a number out of range, or nesterov without momentum or with dampening.

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
        not_negative={"weight_decay": weight_decay, "dampening": dampening},
        betas={"momentum": momentum},
        flags={"nesterov": nesterov, "maximize": maximize},
    )
    if nesterov and not momentum:
        raise FzeroValueError(
            "optim.sgd", "nesterov=True without momentum is plain gradient descent", fix="give a momentum, e.g. 0.9"
        )
    links = [trace(momentum, nesterov, dampening)] if momentum else []
    return descent(links, lr, weight_decay, maximize)
