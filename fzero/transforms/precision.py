"""mixed_precision: compute in one dtype, keep the masters and reduce in another. Acts on the functions, before the trace.

The loss function sees parameters and batch in the compute dtype; what rests, and what the optimizer sees, is in the dtype of
the parameters. A sharded leaf is cast on its shard and gathered in the compute dtype: half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fzero.errors import FzeroValueError, message
from fzero.layout import Leaf
from fzero.transforms.base import Transform, applied

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MixedPrecision(Transform):
    compute: str = "bf16"
    params: str = "fp32"
    reduce: str = "fp32"
    order: ClassVar[int] = 20
    name: ClassVar[str] = "mixed_precision"

    def compute_dtype(self, leaf: Leaf) -> torch.dtype:
        return DTYPES[self.compute] if leaf.dtype.is_floating_point else leaf.dtype

    def reduce_dtype(self, leaf: Leaf) -> torch.dtype:
        return DTYPES[self.reduce] if leaf.dtype.is_floating_point else leaf.dtype

    def resting_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter given as `dtype` rests."""
        return DTYPES[self.params] if dtype.is_floating_point else dtype


def mixed_precision(step: Any = None, compute: str = "bf16", *, params: str = "fp32", reduce: str = "fp32") -> Any:
    """Computes in `compute`, with masters, moments and updates in `params`, and gradients reduced and accumulated in `reduce`.

    The loss function is called with floating-point parameters and batch leaves cast to `compute`; gradients are cast back.
    Masters start from the values given, never from rounded ones. What must be exact inside the function, it casts itself
    (`logits.float()` before a cross entropy). Integer leaves are never cast.

    Args:
        step: a step, or the compute dtype when called without one: `mixed_precision("bf16")`.
        compute: "bf16" or "fp32".
        params: dtype in which parameters, and hence optimizer state, rest.
        reduce: dtype in which gradients cross the wire and are accumulated.

    Communication: `shard_params` gathers `compute`: half the bytes of fp32. Gradients are reduced in `reduce`.
    Memory: the masters are part of the optimizer's memory: with `shard_opt_state` and `shard_grads` they rest sharded and the whole
        copy in `compute` (2 bytes a parameter) exists during the step only.

    Raises:
        FzeroValueError: an unknown dtype.

    Paper: Micikevicius et al., Mixed precision training, ICLR 2018.
    """
    if isinstance(step, str):
        step, compute = None, step
    unknown = [f"{what}={value!r}" for what, value in (("compute", compute), ("params", params), ("reduce", reduce)) if value not in DTYPES]
    if unknown:
        raise FzeroValueError(message("mixed_precision", "unknown dtype", unknown, f"one of {', '.join(map(repr, DTYPES))}"))
    return applied(MixedPrecision(compute, params, reduce), step)
