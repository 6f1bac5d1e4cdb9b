"""Widens batch norms on a CPU, which has none whose weight has another floating-point dtype than the running
statistics.

Under `mixed_precision` weights are computed with in bfloat16 or float16, and statistics, which the forward makes anew,
stay in float32. Such a norm is computed in the wider of the two, as PyTorch's own kernels do inside, and its results
are rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _forward(op: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
        if not _differ(weight, mean):
            return op(x, weight, bias, mean, var, *rest)
        out, *saved = op(*_widest(x, weight, bias, mean, var), *rest)
        return out.to(x.dtype), *(t.to(x.dtype) for t in saved[:2]), *(t.to(mean.dtype) for t in saved[2:])

    return run


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: Any, mean: Any, var: Any, save_mean: Any, save_rstd: Any, *rest: Any
) -> Any:
    op = aten.native_batch_norm_backward.default
    if not _differ(weight, mean):
        return op(grad, x, weight, mean, var, save_mean, save_rstd, *rest)
    grads = op(*_widest(grad, x, weight, mean, var, save_mean, save_rstd), *rest)
    return tuple(None if g is None else g.to(like.dtype) for g, like in zip(grads, (x, weight, weight), strict=True))


def _differ(weight: Any, mean: Any) -> bool:
    return weight is not None and mean is not None and weight.dtype != mean.dtype


def _widest(*tensors: Any) -> list[Any]:
    """Tensors in the widest dtype of any of them; what is not there stays so."""
    dtype = functools.reduce(torch.promote_types, {x.dtype for x in tensors if x is not None})
    return [None if x is None else x.to(dtype) for x in tensors]


NORMS: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _forward(aten.native_batch_norm.default),
    aten._native_batch_norm_legit_functional.default: _forward(aten._native_batch_norm_legit_functional.default),
    aten.native_batch_norm_backward.default: _backward,
}
"""Replacements of operations on a CPU."""
