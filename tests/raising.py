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


def several(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Conditions of several tests, none of which makes it raise, whichever of their tests fail."""
    y = x @ p["w"]
    assert (y > 1e6).all() or (y < 1e6).all() or y.isnan().any()
    assert ((y > 1e6).all() or y.sum() < 1e9) and (y < 1e6).all()
    if (y < 1e6).all() and (y > 1e6).any():
        raise ValueError("both")
    if not ((y < 1e6).all() or (y > 1e6).any()):
        raise ValueError("neither")
    for given in (None, 1, 2):
        assert y.isnan().any() or given == 1 or (y < 1e6).all()
    return y


def an_alternative(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    assert (y > 1e6).all() or (y < -1e6).all()
    return y


def a_conjunction(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    if (y < 1e6).all() and (y > -1e6).all():
        raise ValueError("conjunction")
    return y


def not_known_at_first(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    assert (y < 1e6).all() or y.dim() == 3
    return y


def either(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    if (y > 1e6).all():
        y = y + 1
    elif (y < 1e6).all():
        y = y + 2
    else:
        raise ValueError("neither")
    return y


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
