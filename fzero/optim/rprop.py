"""Defines resilient backpropagation (Riedmiller & Braun 1993, https://doi.org/10.1109/ICNN.1993.298623)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero._utils.arguments import keywords, number, shown
from fzero.optim.gradient_transformation import GradientTransformation, chain
from fzero.optim.scaling_and_clipping import first_links
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import check, leafwise, new_count, new_moment, rate, reject, scalars
from fzero.tree import Tree

_WHERE = "optim.rprop"


class RpropState(NamedTuple):
    """The state of the last part of `rprop`'s chain.

    Attributes:
        count: int64[], the number of updates done.
        sizes: like params, float32 (float64 for float64 params): step sizes; initially the learning rate.
        before: like sizes: gradients of the previous update, 0 where their sign changed.

    Example:
        >>> state = rprop(0.1).init({"w": torch.ones(2)})[-1]
        >>> state.count.item(), state.sizes, state.before
        (0, {'w': tensor([0., 0.])}, {'w': tensor([0., 0.])})
    """

    count: torch.Tensor
    sizes: Tree
    before: Tree


@keywords
def rprop(
    lr: float | Schedule,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    maximize: bool = False,
) -> GradientTransformation:
    """Rprop, equal to `torch.optim.Rprop`: `updates = -sizes * sign(grads)`, with a step size for each element.

    A step size is multiplied by `etas[1]` if the gradient has the sign that it had before, and by `etas[0]` if its sign
    has changed; in that case the element is not updated. Rprop is meant for gradients of the complete dataset.

    Args:
        lr: the initial step size: a number of at least 0, or a schedule, whose value at 0 alone is used, as in torch.
        etas: the factors, the first greater than 0 and less than 1, the second greater than 1.
        step_sizes: the smallest and the largest step size, greater than 0.
        maximize: ascend instead of descend.

    Memory: 8 bytes per parameter (16 for float64).

    Raises:
        FzeroValueError: if a number is out of range.

    Paper: Riedmiller and Braun, A direct adaptive method for faster backpropagation learning: the RPROP algorithm,
        IEEE ICNN 1993.

    Example:
        >>> params, optimizer = {"w": torch.zeros(2)}, rprop(0.1)
        >>> _, state = optimizer.update({"w": torch.tensor([1.0, -3.0])}, optimizer.init(params), params)
        >>> optimizer.update({"w": torch.tensor([5.0, 2.0])}, state, params)[0]
        {'w': tensor([-0.1200, -0.0000])}
    """
    check(_WHERE, lr, flags={"maximize": maximize})
    reject(_WHERE, [*_pair("etas", etas, 1.0), *_pair("step_sizes", step_sizes)])
    (minus, plus), (least, most) = etas, step_sizes

    def init(params: Tree) -> RpropState:
        return RpropState(new_count(params), new_moment(_WHERE, params), new_moment(_WHERE, params))

    def update(grads: Tree, state: RpropState, params: Tree = None) -> tuple[Tree, RpropState]:
        first = state.count == 0
        at = scalars(rate(_WHERE, lr, state.count))

        def leaf(g: Any, size: Any, before: Any) -> tuple[Any, Any, Any]:
            (initial,) = at(size.dtype)
            g = g.to(size.dtype)
            turn = g.sign() * before.sign()
            size = torch.where(first, initial, size)
            size = torch.where(turn > 0, size * plus, torch.where(turn < 0, size * minus, size)).clamp(least, most)
            g = torch.where(turn < 0, torch.zeros_like(g), g)
            return -size * g.sign(), size, g

        updates, sizes, before = leafwise(_WHERE, 3, leaf, grads=grads, sizes=state.sizes, before=state.before)
        return updates, RpropState(state.count + 1, sizes, before)

    return chain(*first_links(maximize=maximize), GradientTransformation(init, update))


def _pair(name: str, value: Any, between: float | None = None) -> list[str]:
    """Checks that two numbers are greater than 0, in order, and on both sides of `between`."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return [f"{name}={shown(value)}: must be two numbers"]
    low, high = value
    wrong = number(f"{name}[0]", low, above=0) + number(f"{name}[1]", high, above=0)
    if not wrong and not (low <= high if between is None else low < between < high):
        wrong.append(
            f"{name}={value!r}: must be in order{'' if between is None else f', less and greater than {between:g}'}"
        )
    return wrong
