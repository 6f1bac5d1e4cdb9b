"""Defines Adafactor, which factors the second moments of a matrix into the means of its rows and columns (Shazeer and
Stern 2018, arXiv:1804.04235).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fzero import tree
from fzero._utils.arguments import keywords, number
from fzero.errors import FzeroValueError
from fzero.optim.gradient_transformation import GradientTransformation
from fzero.optim.schedules import Schedule
from fzero.optim.tree_updates import (
    check,
    check_floating,
    compute_dtype,
    leafwise,
    need_params,
    new_count,
    rate,
    reject,
    scalars,
    sum_of_squares,
    upcast,
)
from fzero.optim.unsharded import unsharded
from fzero.tree import Tree

_WHERE = "optim.adafactor"


class AdafactorState(NamedTuple):
    """The state of `adafactor`.

    Attributes:
        count: int64[], the number of updates done.
        rows: [..., m] for a parameter [..., m, n]: running means of squared gradients along rows; None for
            vectors.
        columns: [..., n]: the same along columns.
        nu: like params, for vectors and scalars: running mean of squared gradients; None for matrices.

    Example:
        >>> state = adafactor(0.1).init({"b": torch.ones(2), "w": torch.ones(1, 2)})
        >>> state.rows, state.columns, state.nu
        ({'b': None, 'w': tensor([0.])}, {'b': None, 'w': tensor([0., 0.])}, {'b': tensor([0., 0.]), 'w': None})
    """

    count: torch.Tensor
    rows: Tree
    columns: Tree
    nu: Tree


@keywords
def adafactor(
    lr: float | Schedule,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    clip: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> GradientTransformation:
    """Adafactor, equal to `torch.optim.Adafactor`.

    `updates = -alpha * u / max(1, rms(u) / clip) - lr * weight_decay * params`, with `u = grads / sqrt(nu)` and
    `alpha = max(eps2, rms(params)) * min(lr, 1 / sqrt(t))`. In update number t = 1, 2, ... the running means move
    towards the new value by the fraction `t**beta2_decay`. For a parameter with at least two dims,
    `nu = rows x columns / mean(rows)` over the last two of them.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        beta2_decay: at most 0.
        eps1: lower bound for the root of `nu`, and for the mean of rows that is divided by; None: the machine epsilon
            of the parameter's dtype.
        eps2: lower bound for the scale of a parameter, at least 0.
        clip: upper bound for the root mean square of `u`, at least 1; torch's `d`.
        weight_decay: at least 0, multiplied by the learning rate.
        maximize: ascend instead of descend.

    Communication: on shards, the gradients of matrices are gathered, as for `optim.unsharded`; in addition, two
        all-reduces of 4 bytes per parameter, before coalescing.

    Memory: `4 (m + n)` bytes for a matrix [m, n], on every rank; 4 bytes per element for a vector (8 for float64).

    Raises:
        FzeroValueError: if a number is out of range, or if update is called without params.

    Paper: Shazeer and Stern, Adafactor: adaptive learning rates with sublinear memory cost, ICML 2018.

    Example:
        >>> params, optimizer = {"w": torch.ones(2, 2)}, adafactor(0.1)
        >>> optimizer.update({"w": 3 * torch.ones(2, 2)}, optimizer.init(params), params)[0]
        {'w': tensor([[-0.1000, -0.1000],
                [-0.1000, -0.1000]])}
    """
    not_negative = {"eps2": eps2, "weight_decay": weight_decay}
    check(_WHERE, lr, not_negative=not_negative, flags={"maximize": maximize})
    wrong = number("clip", clip, at_least=1) + ([] if eps1 is None else number("eps1", eps1, at_least=0))
    wrong += number("beta2_decay", beta2_decay) or ([] if beta2_decay <= 0 else [f"{beta2_decay=}: must be at most 0"])
    reject(_WHERE, wrong)

    def init(params: Tree) -> AdafactorState:
        check_floating(_WHERE, params)

        def zeros(p: torch.Tensor, kind: int) -> torch.Tensor | None:
            shape = _shapes(p)[kind]
            return None if shape is None else torch.zeros(shape, dtype=compute_dtype(p), device=p.device)

        return AdafactorState(
            new_count(params), *(tree.map(lambda p, kind=kind: zeros(p, kind), params) for kind in range(3))
        )

    def update(grads: Tree, state: AdafactorState, params: Tree = None) -> tuple[Tree, AdafactorState]:
        need_params(_WHERE, grads, params)
        count = state.count + 1
        t, size = count.to(torch.float64), torch.as_tensor(rate(_WHERE, lr, state.count), dtype=torch.float64)
        at = scalars(t**beta2_decay, torch.minimum(size, t**-0.5), size * weight_decay)
        means = _checked(state, grads)
        # Each of these trees is None for other parameters, so `leafwise` cannot walk over them together with the
        # gradients.
        before = [iter(tree.leaves(x)) for x in means]
        after: list[list[torch.Tensor]] = [[], [], []]

        def leaf(g: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor]:
            share, rho, decay = at(compute_dtype(g))
            # The update is traced with unsharded shapes, so `numel` is the same on every rank. Where parameters are
            # sharded, a transform all-reduces `sum_of_squares`.
            least, numel = torch.finfo(p.dtype).eps if eps1 is None else eps1, max(1, g.numel())
            g, alpha = upcast(-g if maximize else g), (sum_of_squares(p) / numel).sqrt().clamp(min=eps2) * rho
            if g.dim() > 1:
                u, rows, columns = _factored(g, next(before[0]), next(before[1]), share, least)
                after[0].append(rows)
                after[1].append(columns)
            else:
                nu = torch.lerp(next(before[2]), g * g, share)
                # `least` bounds the root, so its square bounds `nu`.
                u = g * nu.clamp(min=least * least).rsqrt()
                after[2].append(nu)
            u = u * (-alpha / ((sum_of_squares(u) / numel).sqrt() / clip).clamp(min=1.0))
            return (u - upcast(p) * decay if weight_decay else u,)

        (updates,) = leafwise(_WHERE, 1, leaf, grads=grads, params=params)
        made = [tree.unflatten(tree.structure(x), y) for x, y in zip(means, after, strict=True)]
        return updates, AdafactorState(count, *made)

    return GradientTransformation(init, update)


@unsharded
def _factored(
    g: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, share: torch.Tensor, least: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradient divided by the root of its second moments, and the new means along rows and columns."""
    means = ((g * g).sum(d) / max(1, g.shape[d]) for d in (-1, -2))
    rows, columns = (torch.lerp(x, mean, share) for x, mean in zip((rows, columns), means, strict=True))
    # [..., m, n]: the matrix of rank 1 that has these means along rows and columns (section 3 of the paper).
    nu = rows[..., None] * (columns / rows.mean(-1, keepdim=True).clamp(min=least))[..., None, :]
    return g * nu.clamp(min=least * least).rsqrt(), rows, columns


def _shapes(leaf: torch.Tensor) -> tuple[Sequence[int] | None, ...]:
    """Returns the shapes of a parameter's means along rows, along columns, and of squares; None for those that it
    does not have.
    """
    *others, rows, columns = leaf.shape if leaf.dim() > 1 else (0, 0)
    return ([*others, rows], [*others, columns], None) if leaf.dim() > 1 else (None, None, leaf.shape)


def _checked(state: AdafactorState, grads: Tree) -> tuple[Tree, Tree, Tree]:
    """Returns the means of a state, after checking that they belong to these parameters."""
    means = state.rows, state.columns, state.nu
    for kind, found in enumerate(means):
        wanted = tree.map(lambda g, kind=kind: None if _shapes(g)[kind] is None else g, grads)
        shapes = [list(_shapes(g)[kind] or ()) for g in tree.leaves(wanted)]
        if tree.structure(found) != tree.structure(wanted) or shapes != [list(x.shape) for x in tree.leaves(found)]:
            raise FzeroValueError(_WHERE, "the state belongs to other params", fix="make the state with init(params)")
    return means
