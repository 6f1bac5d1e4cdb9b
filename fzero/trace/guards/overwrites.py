"""Finds the arguments that an operator overwrites. An operator that overwrites arguments although its schema says
otherwise is replaced by a functional operator and a copy to each of these arguments.

The operators in question are PyTorch's batch norms, which overwrite the running statistics that they are given while
training. `batch_norm` and `instance_norm` decompose into one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fzero import tree

aten = torch.ops.aten
Do = Callable[..., Any]
"""Runs an operator: `do(op, *args)`."""
Overwrite = Callable[[torch.Tensor, torch.Tensor], None]
"""`overwrite(old, new)`: from here on, `old` has the values of `new`."""


def _native(
    do: Do,
    overwrite: Overwrite,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The rule for PyTorch's native batch norm."""
    if not training or mean is None or var is None:
        return None
    *results, new_mean, new_var = do(
        aten._native_batch_norm_legit_functional.default, x, weight, bias, mean, var, training, momentum, eps
    )
    return _written(overwrite, results, (mean, new_mean), (var, new_var))


def _of_a_library(
    do: Do,
    overwrite: Overwrite,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    num_results: int,
) -> Any:
    """The batch norms of cuDNN and MIOpen, which this operator calls under the same conditions."""
    if not training or mean is None or var is None:
        return None
    *results, new_mean, new_var = do(
        aten._batch_norm_with_update_functional.default, x, weight, bias, mean, var, momentum, eps
    )
    # The functional operator returns a reserve as its last result, as cuDNN's does; MIOpen's does not.
    return _written(overwrite, results[:num_results], (mean, new_mean), (var, new_var))


def _written(
    overwrite: Overwrite, results: Any, *values: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    for old, new in values:
        overwrite(old, new)
    return tuple(results)


REWRITTEN: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _native,
    aten.cudnn_batch_norm.default: lambda do, overwrite, *args: _of_a_library(do, overwrite, *args, num_results=4),
    aten.miopen_batch_norm.default: lambda do, overwrite, *args: _of_a_library(do, overwrite, *args, num_results=3),
}
"""`rule(do, overwrite, *args)` returns the operator's results, or None if this call writes nothing."""

REFUSED = {
    aten.batch_norm_gather_stats.default: ("running_mean", "running_var"),
    aten.batch_norm_gather_stats_with_counts.default: ("running_mean", "running_var"),
}
"""Operators without a functional form, and the arguments that they overwrite if these are given."""


def given(func: Any, args: Any, kwargs: Any, names: Iterable[str]) -> list[torch.Tensor]:
    """The tensors that are passed to an operator for the arguments with these names."""
    values = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [x for name in names for x in tree.leaves(values.get(name)) if isinstance(x, torch.Tensor)]


def overwritten(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to, whatever its schema says."""
    names = _written_names(func)
    if func in REWRITTEN:
        names += (
            ("running_mean", "running_var")
            if dict(zip([a.name for a in func._schema.arguments], args, strict=False)).get("training")
            else ()
        )
    return given(func, args, kwargs, names) if names else []


@functools.cache
def _written_names(func: Any) -> tuple[str, ...]:
    """The names of the arguments that an operator always writes to."""
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return (*names, *REFUSED.get(func, ()))
