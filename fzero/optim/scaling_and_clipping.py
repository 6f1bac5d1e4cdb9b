"""Defines transformations that scale, clip or decay. Their only state is a step count, if any."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import function, number, plain_numbers
from fzero.optim.gradient_transformation import GradientTransformation, chain, global_norm, stateless
from fzero.optim.masking import Mask, check_mask, resolve_mask
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, need_params, new_count, reject, scalars, scheduled, upcast
from fzero.tree import Tree


class ScaleByScheduleState(NamedTuple):
    """The state of `scale_by_schedule`: the number of updates.

    Attributes:
        count: int64[], the number of updates done.

    Example:
        >>> scale_by_schedule(lambda count: 0.1).init({"w": torch.ones(2)})
        ScaleByScheduleState(count=tensor(0))
    """

    count: torch.Tensor


@plain_numbers
def scale(factor: float) -> GradientTransformation:
    """Multiplies the gradients by `factor`.

    Args:
        factor: a finite number.

    Raises:
        FzeroValueError: if `factor` is not a finite number.

    Example:
        >>> opt = scale(-2.0)
        >>> opt.update({"w": torch.ones(2)}, opt.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([-2., -2.])}
    """
    reject("optim.scale", number("factor", factor, below=math.inf))
    return stateless(lambda grads, params: _scaled("optim.scale", grads, factor))


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiplies the gradients by `schedule(count)`; `count` is 0 in the first update.

    Unlike `scale_by_learning_rate`, it does not change the sign: the updates ascend if the schedule is positive.

    Memory: 8 bytes.

    Raises:
        FzeroValueError: if `schedule` is not a function of a step.

    Example:
        >>> optimizer = scale_by_schedule(lambda count: 1 / (1 + count))
        >>> _, state = optimizer.update({"w": torch.ones(2)}, optimizer.init(None), None)
        >>> optimizer.update({"w": torch.ones(2)}, state, None)[0]
        {'w': tensor([0.5000, 0.5000])}
    """
    where = "optim.scale_by_schedule"
    reject(where, function("schedule", schedule, "step"), "give a function of the step, e.g. optim.constant(1e-3)")

    def init(params: Tree) -> ScaleByScheduleState:
        return ScaleByScheduleState(new_count(params))

    def update(grads: Tree, state: ScaleByScheduleState, params: Tree = None) -> tuple[Tree, ScaleByScheduleState]:
        return _scaled(where, grads, scheduled(where, schedule, state.count)), ScaleByScheduleState(state.count + 1)

    return GradientTransformation(init, update)


@plain_numbers
def scale_by_learning_rate(lr: float | Schedule) -> GradientTransformation:
    """Multiplies the gradients by `-lr`: the last transformation of a chain that descends.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.

    Raises:
        FzeroValueError: if `lr` is negative.

    Example:
        >>> optimizer = scale_by_learning_rate(0.1)
        >>> optimizer.update({"w": torch.ones(2)}, optimizer.init(None), None)[0]
        {'w': tensor([-0.1000, -0.1000])}
    """
    where = "optim.scale_by_learning_rate"
    check(where, lr)
    return scale_by_schedule(lambda count: -scheduled(where, lr, count)) if callable(lr) else scale(-lr)


def set_to_zero() -> GradientTransformation:
    """Sets updates to zero. In a `partition`, use it for parameters that should not change.

    Example:
        >>> set_to_zero().update({"w": torch.ones(2)}, (), None)[0]
        {'w': tensor([0., 0.])}
    """
    return stateless(
        lambda grads, params: leafwise("optim.set_to_zero", 1, lambda g: (torch.zeros_like(g),), grads=grads)[0]
    )


@plain_numbers
def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scales all gradients by `min(1, max_norm / (norm + 1e-6))`, where `norm` is their `global_norm`.

    Equal to `torch.nn.utils.clip_grad_norm_`. As there, a gradient that is infinite anywhere makes the updates NaN.

    Args:
        max_norm: greater than 0.

    Communication: on shards, one all-reduce of 4 bytes.

    Raises:
        FzeroValueError: if `max_norm` is not greater than 0.

    Example:
        >>> opt = clip_by_global_norm(1.0)
        >>> opt.update({"w": torch.tensor([3.0, 4.0])}, opt.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([0.6000, 0.8000])}
    """
    check("optim.clip_by_global_norm", positive={"max_norm": max_norm})

    def clip(grads: Tree, params: Tree) -> Tree:
        # 1e-6 as in torch, and a clamp instead of a branch, so that the norm stays on the device.
        return _scaled("optim.clip_by_global_norm", grads, (max_norm / (global_norm(grads) + 1e-6)).clamp(max=1.0))

    return stateless(clip)


@plain_numbers
def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> GradientTransformation:
    """Returns updates `grads + weight_decay * params`: L2 regularization before a preconditioner, decoupled decay
    after it.

    Args:
        weight_decay: at least 0.
        mask: which parameters decay, as in `masked`; None: all.

    Raises:
        FzeroValueError: if `weight_decay` is negative, if the mask has another structure, or if update is called
            without params.

    Example:
        >>> opt = add_decayed_weights(0.1, mask=lambda path, p: p.ndim >= 2)
        >>> params = {"bias": torch.ones(2), "w": torch.ones(1, 2)}
        >>> opt.update({"bias": torch.zeros(2), "w": torch.zeros(1, 2)}, opt.init(params), params)[0]
        {'bias': tensor([0., 0.]), 'w': tensor([[0.1000, 0.1000]])}
    """
    where = "optim.add_decayed_weights"
    check(where, not_negative={"weight_decay": weight_decay})
    check_mask(where, mask)

    def decay(grads: Tree, params: Tree) -> Tree:
        need_params(where, grads, params)

        def leaf(g: torch.Tensor, p: torch.Tensor, decayed: bool) -> tuple[torch.Tensor]:
            return (upcast(g) + upcast(p) * weight_decay if decayed and weight_decay else upcast(g),)

        return leafwise(where, 1, leaf, grads=grads, params=params, mask=resolve_mask(where, mask, params))[0]

    return stateless(decay)


def first_links(weight_decay: float = 0.0, maximize: bool = False) -> list[GradientTransformation]:
    """Returns the transformations of a chain before the optimizer's own: negated gradients to maximize, and L2
    regularization.

    The order is that of torch, which adds the regularization after it has negated the gradient.
    """
    links = [scale(-1.0)] if maximize else []
    return [*links, add_decayed_weights(weight_decay)] if weight_decay else links


def descent(
    links: Sequence[GradientTransformation],
    lr: float | Schedule,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled: bool = False,
) -> GradientTransformation:
    """Returns the chain of an optimizer of torch.optim whose own transformations (`links`) do not depend on the
    learning rate.

    Args:
        decoupled: whether weight decay is added to the updates, as in AdamW, instead of to the gradients.
    """
    if decoupled and weight_decay:
        # Decoupled: the decay is added after the preconditioner, and only the learning rate scales it.
        return chain(*first_links(0.0, maximize), *links, add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    return chain(*first_links(weight_decay, maximize), *links, scale_by_learning_rate(lr))


def _scaled(where: str, grads: Tree, factor: float | torch.Tensor) -> Tree:
    at: Callable[[torch.dtype], tuple[Any, ...]] = scalars(factor)

    def leaf(g: torch.Tensor) -> tuple[torch.Tensor]:
        g = upcast(g)
        return (g * at(g.dtype)[0],)

    return leafwise(where, 1, leaf, grads=grads)[0]
