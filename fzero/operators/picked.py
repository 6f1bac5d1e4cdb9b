"""Reads one element of each row of a matrix, as an operation that no compiler merges with others."""

from __future__ import annotations

from typing import Any

import torch

from fzero.operators.base import define


def _picked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index)


PICKED: Any = define("picked", "(Tensor x, Tensor index) -> Tensor", _picked, lambda x, index: x.new_empty(index.shape))
"""The elements of `x`, [n, m], at `index`, int64[n, 1]."""
