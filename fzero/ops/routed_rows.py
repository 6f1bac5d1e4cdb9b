"""Moves rows of tokens to their experts and back, without a capacity: an expert takes as many rows as choose it.

The rows of all choices are in the order of their experts, and `ends` contains the end of each expert's rows. On one
rank, `ROUTE` and `UNROUTE` read rows at indices. `fz.expert_parallel` makes the ranks exchange rows there, as many as
the experts of each rank were chosen (fzero/sharding/expert_propagation.py), so they are operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.ops.registration import define


def _route(x: torch.Tensor, index: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    return x.index_select(0, index)


def _unroute(rows: torch.Tensor, index: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    return rows.index_select(0, index)


def _ends(ends: torch.Tensor) -> torch.Tensor:
    return ends.clone()


def _read(x: torch.Tensor, index: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    return x.new_empty([*index.shape, x.shape[1]])


ROUTE: Any = define("route", "(Tensor x, Tensor index, Tensor ends, int k) -> Tensor", _route, _read)
"""The rows of `x` with these indices, `x[index]`, in the order of the experts. Each token chooses `k` experts."""
UNROUTE: Any = define("unroute", "(Tensor rows, Tensor index, Tensor ends, int k) -> Tensor", _unroute, _read)
"""The rows of experts in the order of the choices, `rows[index]`."""
ROUTED_ENDS: Any = define("routed_ends", "(Tensor ends) -> Tensor", _ends, torch.empty_like)
"""The end of the rows of each expert of this rank, as `ROUTE` returns the rows."""

ROUTES = frozenset({ROUTE, UNROUTE, ROUTED_ENDS})
WRITTEN_OUT: dict[Any, Callable[..., torch.Tensor]] = {ROUTE: _route, UNROUTE: _unroute, ROUTED_ENDS: _ends}
"""The functions that devices run in place of these operators."""
