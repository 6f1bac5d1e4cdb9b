"""Defines Shampoo: gradients between inverse roots of what their products add up to (Gupta et al. 2018,
arXiv:1802.09568)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fzero import tree
from fzero.arguments import keywords
from fzero.optim.base import GradientTransformation
from fzero.optim.leaves import check, leafwise, need_params, new_count, new_moment, rate, scalars
from fzero.optim.matrices import Where, for_matrices, is_matrix
from fzero.optim.schedules import Schedule
from fzero.optim.whole import whole
from fzero.tree import Tree

_WHERE = "optim.shampoo"


class ShampooState(NamedTuple):
    """The state of `shampoo`, of matrices [m, n].

    Example:
        >>> state = shampoo(0.1, eps=0.5).init({"w": torch.ones(1, 2)})
        >>> state.inner_states["matrices"].right
        {'w': tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])}
    """

    count: torch.Tensor  # int64[], updates done
    mu: Tree  # [m, n]: running mean of gradients
    left: Tree  # [m, m]: eps I + the sum of G G^T
    right: Tree  # [n, n]: eps I + the sum of G^T G


@keywords
def shampoo(
    lr: float | Schedule,
    momentum: float = 0.9,
    eps: float = 1e-4,
    weight_decay: float = 0.0,
    where: Where | None = None,
    other: GradientTransformation | None = None,
) -> GradientTransformation:
    """`updates = -lr * (left**-1/4 @ mu @ right**-1/4 + weight_decay * params)`, with the sums of `G G^T` and `G^T G`.

    Args:
        lr: a number of at least 0, or a schedule, called with 0 in the first update.
        momentum: decay of the mean of gradients, at least 0 and less than 1.
        eps: the first value on the diagonals, greater than 0, and the least eigenvalue.
        weight_decay: at least 0, multiplied by the learning rate.
        where: `where(path, leaf)`, whether a leaf is a matrix for it; by default each of two dims.
        other: updates the other leaves, with a learning rate of its own.

    Communication: on shards as of `optim.whole`, with gradient, momentum and both sums.

    Memory: of a matrix [m, n] `4 (m n + m**2 + n**2)` bytes; a sum of fewer than 4096 elements is on every rank.

    Raises:
        FzeroValueError: a number out of range, a leaf that is not a matrix, or one for `other` where there is none.

    Example:
        >>> opt = shampoo(0.1, momentum=0.0)
        >>> params = {"w": torch.zeros(1, 1)}
        >>> opt.update({"w": torch.tensor([[3.0]])}, opt.init(params), params)[0]
        {'w': tensor([[-0.1000]])}
    """
    check(_WHERE, lr, positive={"eps": eps}, not_negative={"weight_decay": weight_decay}, betas={"momentum": momentum})

    def init(params: Tree) -> ShampooState:
        mu = new_moment(_WHERE, params)
        left, right = (
            tree.map(lambda m, dim=dim: eps * torch.eye(m.shape[dim], dtype=m.dtype, device=m.device), mu)
            for dim in (0, 1)
        )
        return ShampooState(new_count(params), mu, left, right)

    def update(grads: Tree, state: ShampooState, params: Tree = None) -> tuple[Tree, ShampooState]:
        need_params(_WHERE, grads, params)
        size = -rate(_WHERE, lr, state.count)
        at = scalars(size, size * weight_decay)
        before = zip(tree.leaves(state.left), tree.leaves(state.right), strict=True)
        after: list[tuple[torch.Tensor, torch.Tensor]] = []

        def leaf(g: torch.Tensor, m: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            step, decay = at(m.dtype)
            g = g.to(m.dtype)
            m = torch.lerp(m, g, 1 - momentum)
            u, left, right = _between_roots(g, m, *next(before), eps)
            after.append((left, right))
            return (u * step + p.to(m.dtype) * decay if weight_decay else u * step), m

        updates, mu = leafwise(_WHERE, 2, leaf, grads=grads, mu=state.mu, params=params)
        left, right = (tree.unflatten(tree.structure(mu), sums) for sums in zip(*after, strict=True))
        return updates, ShampooState(state.count + 1, mu, left, right)

    return for_matrices(_WHERE, GradientTransformation(init, update), where or is_matrix, other)


@whole
def _between_roots(
    g: torch.Tensor, m: torch.Tensor, left: torch.Tensor, right: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The momentum between the inverse fourth roots of the new sums, and these."""
    left, right = left + g @ g.T, right + g.T @ g
    return _inverse_root(left, eps) @ m @ _inverse_root(right, eps), left, right


def _inverse_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.clamp(min=eps) ** -0.25) @ vectors.T
