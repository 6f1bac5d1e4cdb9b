"""Adds at indices in the order of the indices, on a CPU: the gradient of reads by index, such as an embedding.

PyTorch adds such values with several threads in any order, and so does compiled code, so that two runs of one step
differ in their last bits. `ADD_AT` adds them one after the other. It is one operator for a compiler, too: compiled
code calls it. `scatter_add` needs no replacement: PyTorch's threads divide the output among them, and Inductor's code
calls PyTorch's if there are several threads. On a GPU, compiled code adds values in any order, unless deterministic
algorithms are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero._compat import compat
from fzero.ops.registration import define

aten = torch.ops.aten
Indices = Sequence[torch.Tensor | None]


def _add_at(x: torch.Tensor, indices: Indices, values: torch.Tensor) -> None:
    first, *others = indices
    if first is None or first.dtype == torch.bool or any(i is not None for i in others) or x.dim() == 0:
        with compat.in_order():
            aten.index_put_(x, indices, values, True)
        return
    rows = values.expand(*first.shape, *x.shape[1:]).reshape(first.numel(), *x.shape[1:])
    flat = first.reshape(-1)
    # `index_add_` does not take negative indices.
    x.index_add_(0, torch.where(flat < 0, flat + x.shape[0], flat), rows)


ADD_AT = define(
    "add_at_",
    "(Tensor(a!) x, Tensor?[] indices, Tensor values) -> ()",
    _add_at,
    lambda x, indices, values: None,
)
"""Adds `values` to `x` at `indices`, as `aten.index_put_(x, indices, values, accumulate=True)` does, with the values
for each element in the order of the indices. It works in place, so that a gradient of many rows is written directly
to its destination.
"""


def add_at(x: torch.Tensor, indices: Indices, values: torch.Tensor) -> torch.Tensor:
    """Returns `x` with `values` added at `indices`."""
    sums = x.clone(memory_format=torch.contiguous_format)
    ADD_AT(sums, indices, values)
    return sums


def _index_put(x: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    return add_at(x, indices, values) if accumulate else aten.index_put.default(x, indices, values)


def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num: int, padding: int, by_frequency: bool
) -> torch.Tensor:
    if by_frequency:
        rows = indices.reshape(-1).long()
        counts = rows.new_zeros(num).scatter_add(0, rows, torch.ones_like(rows))
        grad = grad / counts[indices].unsqueeze(-1)
    kept = grad if padding < 0 else torch.where((indices == padding).unsqueeze(-1), 0.0, grad)
    sums = grad.new_zeros(num, grad.shape[-1])
    ADD_AT(sums, [indices], kept)
    return sums


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    if x.dim() == 0:
        return aten.index_add.default(x, dim, index, source, alpha=alpha)
    places = index.long().reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return x.scatter_add(dim, places.expand_as(source), source if alpha == 1 else source * alpha)


IN_ORDER: dict[Any, Any] = {
    aten.index_put.default: _index_put,
    aten.index_add.default: _index_add,
    aten.embedding_dense_backward.default: _embedding_backward,
}
"""The operators that a CPU runs in place of operations that add in any order."""
