"""Combines several transforms into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fzero.errors import FzeroTypeError
from fzero.step.evaluate import EvalStep
from fzero.step.train import Step


def compose(*transforms: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combines several transforms into one. Their order does not matter: transforms commute.

    Args:
        *transforms: transforms such as `fz.shard_params()`, or other functions that take a step and return a step.

    Returns:
        A function of a step that applies all of them.

    Raises:
        FzeroTypeError: if an argument is not a function, or does not return a step.
        TransformError: from the returned function, if two transforms contradict each other.

    Example:
        >>> import fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> a, b = fz.shard_params(), fz.accumulate(2)
        >>> compose(a, b)(step) == compose(b, a)(step)
        True
    """

    wrong = [
        f"argument {i}: {type(t).__name__}"
        for i, t in enumerate(transforms)
        if not callable(t) or isinstance(t, (Step, EvalStep))
    ]
    fix = "fz.compose(fz.shard_params(axis='data'), ...)(step)"
    if wrong:
        raise FzeroTypeError("compose", "takes transforms", wrong, fix)

    def apply(step: Any) -> Any:
        for i, transform in enumerate(transforms):
            # a transform that does nothing to an evaluation is recorded all the same
            step = transform.add(step) if hasattr(transform, "add") else transform(step)
            if not hasattr(step, "transforms"):
                raise FzeroTypeError(
                    "compose", "takes transforms", [f"argument {i} returns {type(step).__name__}, not a step"], fix
                )
        return step

    return apply
