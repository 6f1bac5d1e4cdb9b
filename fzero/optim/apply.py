"""Applies an optimizer's update to parameters, and checks that the optimizer keeps its contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.optim import apply_updates


def apply_optimizer(
    optimizer: Any, grads: Any, opt_state: Any, params: Any, key: torch.Tensor | None = None
) -> tuple[Any, Any, Any]:
    """Returns new parameters, the new state and the updates, after checking the contract: updates like params, and a
    state like the one that was passed in. `key`: a key for stochastic rounding.
    """
    result = optimizer.update(grads, opt_state, params)
    if not isinstance(result, tuple) or len(result) != 2:
        raise FzeroTypeError(
            "optimizer", f"update returned {tree.describe(result)}", fix="return a pair (updates, opt_state)"
        )
    updates, new = result
    wrong = [f"{p}: {type(x).__name__}" for p, x in tree.with_paths(result) if not isinstance(x, torch.Tensor)]
    wrong = [f"{'updates' if p.startswith('[0]') else 'opt_state'}{p[3:]}" for p in wrong]
    if wrong:
        raise FzeroTypeError(
            "optimizer",
            "update returned leaves that are not tensors",
            wrong,
            "keep numbers in the closure, tensors in the state",
        )
    # The state is written in place by compiled steps, so structure, shapes and dtypes must not change from step to
    # step.
    before, after = tree.structure(opt_state), tree.structure(new)
    if before != after:
        problems = [f"before: {before}", f"after: {after}"]
        raise FzeroTypeError(
            "optimizer", "update changes the structure of opt_state", problems, "return the same structure"
        )
    problems = [
        f"{path}: {tree.describe(old)} before, {tree.describe(now)} after"
        for path, old, now in zip(
            tree.paths(opt_state, "opt_state"), tree.leaves(opt_state), tree.leaves(new), strict=True
        )
        if now.shape != old.shape or now.dtype != old.dtype
    ]
    if problems:
        raise FzeroTypeError(
            "optimizer", "update changes shape or dtype of its state", problems, "keep shapes and dtypes fixed"
        )
    return apply_updates(params, updates, key), new, updates


def passed_on(updates: Any, grads: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the paths of the parameters whose update is the gradient itself, which no transformation has changed."""
    updated = {id(u) for u in tree.leaves(updates)}
    return [path for path, g in grads.items() if id(g) in updated]


def reject_passed_on(paths: list[str]) -> None:
    """Raises an error if gradients are updates: adding them to the parameters would increase the loss."""
    if paths:
        raise FzeroValueError(
            "optimizer",
            "the update of these parameters is their unchanged gradient, which would be added to them",
            paths,
            "optim.masked applies nothing to parameters outside its mask; choose an optimizer for each parameter: "
            "optim.partition({'train': optim.adamw(3e-4), 'keep': optim.set_to_zero()}, labels); to add gradients on "
            "purpose, return 1.0 * gradient",
        )
