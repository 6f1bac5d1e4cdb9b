"""Functions that raise under conditions, in a file whose `assert` pytest leaves alone."""

from __future__ import annotations

from typing import Any

import torch


def asserted(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    assert torch.isfinite(y).all(), f"of shape {tuple(y.shape)}"
    with torch.no_grad():
        if (y.abs() > 1e6).any() or y.isnan().any():
            raise ValueError("too large")
    return y


def an_assertion(p: Any, x: torch.Tensor) -> torch.Tensor:
    assert (x @ p["w"] > 0).all()
    return x @ p["w"]


def branches(x: Any) -> Any:
    if x:
        raise ValueError("a")
    if not x:
        raise ValueError(f"{x}")
    assert x, "b"
    if x:
        return 1
    try:
        if x:
            raise KeyError
    except KeyError:
        pass
    return 2
