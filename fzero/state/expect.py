"""Compares parameters with those of the model that a step is made of."""

from __future__ import annotations

from typing import Any

from fzero import tree
from fzero.errors import CheckpointError, FzeroValueError


def model_of(fn: Any) -> Any:
    """The model that a step's function is made of, if it says so (`fz.functionalize`); None."""
    return getattr(fn, "model", None)


def check_model(
    owner: str, model: Any, params: Any = None, error: type[FzeroValueError | CheckpointError] = FzeroValueError
) -> None:
    """Raises if a model is another than when the step was made of it, or a tree of whole leaves is another model's.

    Args:
        model: of `model_of`.
        params: the tree; dtypes are its own.

    Raises:
        FzeroValueError, or `error`: listing every leaf that is missing, not of the model or of another shape, with both
            sides.
    """
    if model is None:
        return
    if hasattr(model, "check"):
        model.check()
    if params is None:
        return
    given, own = (dict(tree.with_paths(x, "params")) for x in (params, model.params))
    wrong = [f"{p}: missing, the model has {tree.describe(x)}" for p, x in own.items() if p not in given]
    wrong += [f"{p}: {tree.describe(x)}, not of the model" for p, x in given.items() if p not in own]
    wrong += [
        f"{p}: {tree.describe(given[p])}, the model has {tree.describe(x)}"
        for p, x in own.items()
        if p in given and given[p].shape != x.shape
    ]
    if wrong:
        what = (
            f"these are the parameters of another model: {len(wrong)} of {len(given.keys() | own.keys())} leaves differ"
        )
        fix = "give model.params, of the model that the step was made of, or make a step of the other model"
        raise error(owner, what, wrong, fix)
