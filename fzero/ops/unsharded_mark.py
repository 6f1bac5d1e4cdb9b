"""Marks tensors that a function reads as a whole, not element by element: what ranks have shards of is brought together
for it (fzero/sharding/flat_propagation.py)."""

from __future__ import annotations

from typing import Any

import torch

from fzero.ops.registration import define

WHOLE: Any = define("whole", "(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x))
"""The tensor itself, as a copy."""
