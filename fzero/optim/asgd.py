"""Defines averaged stochastic gradient descent (Polyak & Juditsky 1992, https://doi.org/10.1137/0330046)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords, number
from fzero.optim.gradient_transformation import GradientTransformation, chain
from fzero.optim.scaling_and_clipping import first_links
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, need_params, new_count, new_moment, rate, reject, scalars
from fzero.tree import Tree

_WHERE = "optim.asgd"


class ASGDState(NamedTuple):
    """The state of the last part of `asgd`'s chain.

    Attributes:
        count: int64[], the number of updates done.
        eta: float64[], step size of the next update; that of the first update is the learning rate.
        averages: like params, float32 (float64 for float64 params): the averaged parameters.

    Example:
        >>> state = asgd(0.1).init({"w": torch.ones(2)})[-1]
        >>> state.count.item(), state.eta.item(), state.averages
        (0, 0.0, {'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    eta: torch.Tensor
    averages: Tree


@keywords
def asgd(
    lr: float | Schedule,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Averaged gradient descent, equal to `torch.optim.ASGD`: `updates = -eta * (grads + lambd * params)`.

    After update number t = 1, 2, ... `eta = lr / (1 + lambd * lr * t)**alpha`. The averages, `state[-1].averages`, are
    the parameters of this update until t exceeds `t0 + 1`, and the mean of all parameters since then. Evaluate with
    the averages; training continues from the parameters.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update. As in torch, the value of an
            update sets the step size of the next one.
        lambd: decay of the parameters, at least 0.
        alpha: power of the decay of the step size.
        t0: the number of updates before averaging starts.
        weight_decay: L2 regularization, `weight_decay * params` added to the gradients; at least 0.
        maximize: ascend instead of descend.

    Memory: 4 bytes per parameter (8 for float64).

    Raises:
        FzeroValueError: if a number is out of range, or if update is called without params.

    Paper: Polyak and Juditsky, Acceleration of stochastic approximation by averaging, SIAM J. Control Optim. 1992.

    Example:
        >>> params, optimizer = {"w": torch.ones(1)}, asgd(0.1, lambd=0.5)
        >>> updates, state = optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)
        >>> updates, state[-1].averages
        ({'w': tensor([-0.1500])}, {'w': tensor([0.8500])})
    """
    check(_WHERE, lr, not_negative={"lambd": lambd, "weight_decay": weight_decay}, flags={"maximize": maximize})
    reject(_WHERE, [*number("alpha", alpha), *number("t0", t0)])

    def init(params: Tree) -> ASGDState:
        count = new_count(params)
        return ASGDState(count, torch.zeros_like(count, dtype=torch.float64), new_moment(_WHERE, params))

    def update(grads: Tree, state: ASGDState, params: Tree = None) -> tuple[Tree, ASGDState]:
        need_params(_WHERE, grads, params)
        before, size = state.count.to(torch.float64), rate(_WHERE, lr, state.count)
        eta = torch.where(state.count == 0, size, state.eta)
        # The second is torch's `mu`. It is 1 until averaging starts: then the averages equal the parameters.
        at = scalars(-eta, 1 / (before - t0).clamp(min=1.0))

        def leaf(g: Any, a: Any, p: Any) -> tuple[Any, Any]:
            step, share = at(a.dtype)
            p = p.to(a.dtype)
            u = (g.to(a.dtype) + p * lambd) * step
            return u, torch.lerp(a, p + u, share)

        updates, averages = leafwise(_WHERE, 2, leaf, grads=grads, averages=state.averages, params=params)
        eta = size / (1 + lambd * size * (before + 1)) ** alpha
        return updates, ASGDState(state.count + 1, eta, averages)

    return chain(*first_links(weight_decay, maximize), GradientTransformation(init, update))
