"""Reads one element of each row of a matrix, by an operator that no compiler fuses with others."""

from __future__ import annotations

from typing import Any

import torch

from fzero.operators.base import define


def _picked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index)


PICKED: Any = define("picked", "(Tensor x, Tensor index) -> Tensor", _picked, lambda x, index: x.new_empty(index.shape))
"""The elements of `x`, [n, m], at the columns `index`, int64[n, 1]: of the shape of `index` and the dtype of `x`."""
