"""Sums at indices in the order of the indices, on a CPU: the gradient of what is read by indices, such as an embedding. Others (`scatter_add`, `index_add`) are
left as they are.

PyTorch adds such values up with several threads as they come, and compiled code likewise, so that two runs of one step differ in their last bits. `add_at`
takes them one after the other. It is one operator to a compiler, too: its code calls it. On a GPU PyTorch's own sorts them first, and needs no help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero import compat
from fzero.operators import define

aten = torch.ops.aten
Indices = Sequence[torch.Tensor | None]


def _add_at(x: torch.Tensor, indices: Indices, values: torch.Tensor) -> torch.Tensor:
    first, *others = indices
    if first is None or first.dtype == torch.bool or any(i is not None for i in others) or x.dim() == 0:
        with compat.in_order():
            return aten.index_put(x, indices, values, True)
    rows = values.expand(*first.shape, *x.shape[1:]).reshape(first.numel(), *x.shape[1:])
    flat = first.reshape(-1)
    return x.index_add(0, torch.where(flat < 0, flat + x.shape[0], flat), rows)


add_at = define("add_at", "(Tensor x, Tensor?[] indices, Tensor values) -> Tensor", _add_at, lambda x, indices, values: torch.empty_like(x))
"""`x` with `values` added at `indices`, as `aten.index_put(x, indices, values, accumulate=True)`, each element's in the order of the indices."""


def _index_put(x: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    return add_at(x, indices, values) if accumulate else aten.index_put.default(x, indices, values)


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, num: int, padding: int, by_frequency: bool) -> torch.Tensor:
    if by_frequency:
        return aten.embedding_dense_backward.default(grad, indices, num, padding, by_frequency)
    kept = grad if padding < 0 else torch.where((indices == padding).unsqueeze(-1), 0.0, grad)
    return add_at(torch.zeros(num, grad.shape[-1], dtype=grad.dtype, device=grad.device), [indices], kept)


IN_ORDER: dict[Any, Any] = {aten.index_put.default: _index_put, aten.embedding_dense_backward.default: _embedding_backward}
"""What a CPU runs instead of operations that add up in any order."""
