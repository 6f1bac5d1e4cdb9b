"""Marks tensors that a function reads unsharded, not element by element: their shards are gathered for it
(fzero/sharding/flat_propagation.py).
"""

from __future__ import annotations

from typing import Any

import torch

from fzero.ops.registration import define

WHOLE: Any = define("whole", "(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x))
"""Returns the tensor itself, as a copy."""
