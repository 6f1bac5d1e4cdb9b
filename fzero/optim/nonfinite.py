"""Skips updates whose gradients are not finite."""

from __future__ import annotations

from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroTypeError
from fzero.optim.gradient_transformation import GradientTransformation, global_norm, is_transformation
from fzero.tree import Tree


class SkipsNonfinite(GradientTransformation):
    """The result of `skip_nonfinite`. A step recognizes it by this type, and also skips the update if the loss is
    NaN, which the optimizer itself cannot see.
    """


def skip_nonfinite(optimizer: GradientTransformation) -> GradientTransformation:
    """Returns the same optimizer, except that an update with a gradient that is infinite or NaN anywhere changes
    nothing.

    In that case the updates are zeros, and the state stays unchanged, including the count that schedules depend on.
    This does for bf16 and fp32 what a loss scale does for float16 (`mixed_precision("fp16")` needs no such wrapper).
    The step count of the step's state is incremented all the same, and the metric `finite` says which steps were
    skipped.

    A training step with this optimizer also skips the update if the loss is NaN while the gradients are finite. That
    happens with `F.cross_entropy` if all targets are ignored: its gradients are zeros.

    Args:
        optimizer: the complete chain: transformations outside of it still see the gradients.

    Memory: that of `optimizer`.
    Communication: on shards one all-reduce of 4 bytes, shared with `clip_by_global_norm` if there is one.

    Raises:
        FzeroTypeError: if an argument is not a pair of init and update.

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
        # The norm is not finite if any gradient is not, and a step that clips has computed it already.
        finite = torch.isfinite(global_norm(grads))
        updates, new = optimizer.update(grads, state, params)
        kept = tree.map(lambda u: torch.where(finite, u, torch.zeros_like(u)), updates)
        return kept, tree.map(lambda now, old: torch.where(finite, now, old), new, state)

    return SkipsNonfinite(optimizer.init, update)
