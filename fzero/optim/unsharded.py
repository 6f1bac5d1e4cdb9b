"""Lets a function of an optimizer read whole tensors, such as matrices, where ranks have shards of them."""

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
    """A function that receives unsharded tensors although the optimizer's update that calls it has shards of them. Its
    results are sharded again.

    It may be a function of one matrix, or a whole `update`: then gradients, state and params are all unsharded. A
    matrix product, a transpose, a sort or a factorisation needs it; pointwise operations and full reductions do not.

    Args:
        fn: a pure function of trees of tensors. Other arguments are passed on.

    Communication: of a leaf that is sharded over N ranks, whose tensors and results are `nbytes`: N calls that are
        alike are dealt to the N ranks, one each, for `nbytes * (N - 1) / N**2` bytes a leaf and rank. A call that is
        like no other runs on every rank, for (N - 1) / N of the bytes that arrive.

    Memory: of a deal one leaf's tensors and results on each rank.

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
        mark = lambda x: WHOLE(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        args, kwargs = tree.map(mark, (args, kwargs))
        return fn(*args, **kwargs)

    return on_unsharded
