"""Lets a function of an optimizer read unsharded tensors, such as matrices, although ranks hold shards of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._utils.arguments import shown
from fzero.ops.unsharded_mark import WHOLE
from fzero.optim.tree_updates import reject


def unsharded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function receive unsharded tensors although the optimizer's update that calls it has shards of them.
    Its results are sharded again.

    It may be a function of one matrix, or a complete `update`: then gradients, state and params are all unsharded. A
    matrix product, a transpose, a sort or a factorization needs it; pointwise operations and full reductions do not.

    Args:
        fn: a pure function of trees of tensors. Other arguments are passed on.

    Communication: for a parameter that is sharded over N ranks, and whose tensors and results have `nbytes`: N equal
        calls are assigned to the N ranks in round-robin order, one each, for `nbytes * (N - 1) / N**2` bytes per
        parameter and rank. A call that is equal to no other runs on every rank, for (N - 1) / N of the gathered bytes.

    Memory: for round-robin ownership, one parameter's tensors and results on each rank.

    Example:
        >>> from fzero import optim
        >>> cubed = optim.unsharded(lambda g: g @ g.T @ g)
        >>> optimizer = optim.GradientTransformation(
        ...     lambda params: (), lambda grads, state, params: ({"w": -0.1 * cubed(grads["w"])}, state)
        ... )
        >>> optimizer.update({"w": 2 * torch.ones(1, 1)}, (), None)[0]["w"]
        tensor([[-0.8000]])
    """
    wrong = [] if callable(fn) else [f"fn={shown(fn)}: must be a function of tensors"]
    reject("optim.unsharded", wrong, "e.g. optim.unsharded(lambda m: m @ m.T @ m)")

    @functools.wraps(fn)
    def on_unsharded(*args: Any, **kwargs: Any) -> Any:
        # An op that copies its argument. In a trace it marks that the unsharded tensor is needed here.
        mark = lambda x: WHOLE(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        args, kwargs = tree.map(mark, (args, kwargs))
        return fn(*args, **kwargs)

    return on_unsharded
