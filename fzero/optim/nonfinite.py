"""Skips updates whose gradients are not finite."""

from __future__ import annotations

from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroTypeError
from fzero.optim.gradient_transformation import GradientTransformation, global_norm, is_transformation
from fzero.tree import Tree


class SkipsNonfinite(GradientTransformation):
    """What `skip_nonfinite` returns. By this type a step recognizes it, and also skips the update if the loss is NaN,
    which the optimizer itself cannot see."""


def skip_nonfinite(optimizer: GradientTransformation) -> GradientTransformation:
    """The same optimizer, but an update with a gradient that is infinite or NaN anywhere changes nothing.

    Updates are zeros then, and the state, with the count that schedules go by, is what it was. That is what a loss
    scale does in float16 (`mixed_precision("fp16")` needs no such wrapper), for bf16 and fp32; the step count of the
    state goes on, and the metric `finite` says which steps they were.

    A training step with this optimizer also skips the update if the loss is NaN while the gradients are finite. That
    is so for `F.cross_entropy` if all targets are ignored: its gradients are zeros.

    Args:
        optimizer: the whole chain: what stands outside of it still sees the gradients.

    Memory: that of `optimizer`.
    Communication: on shards one all_reduce of 4 bytes, that of `clip_by_global_norm` if there is one.

    Raises:
        FzeroTypeError: an argument that is not a pair of init and update.

    Example:
        >>> from fzero import optim
        >>> params, optimizer = {"w": torch.ones(2)}, skip_nonfinite(optim.adam(0.1))
        >>> updates, state = optimizer.update({"w": torch.tensor([1.0, torch.nan])}, optimizer.init(params), params)
        >>> updates, state.count
        ({'w': tensor([0., 0.])}, tensor(0))
    """
    if not is_transformation(optimizer):
        what = f"takes an optimizer, not {type(optimizer).__name__}"
        raise FzeroTypeError("optim.skip_nonfinite", what, fix="e.g. optim.skip_nonfinite(optim.adamw(3e-4))")

    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        finite = torch.isfinite(global_norm(grads))
        updates, new = optimizer.update(grads, state, params)
        kept = tree.map(lambda u: torch.where(finite, u, torch.zeros_like(u)), updates)
        return kept, tree.map(lambda now, old: torch.where(finite, now, old), new, state)

    return SkipsNonfinite(optimizer.init, update)
