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
ROUNDINGS = ("stochastic", "nearest")


@dataclass(frozen=True)
class MixedPrecision(Transform):
    compute: str = "bf16"
    params: str = "fp32"
    reduce: str = "fp32"
    rounding: str | None = None
    order: ClassVar[int] = 20
    name: ClassVar[str] = "mixed_precision"

    def compute_dtype(self, leaf: Leaf) -> torch.dtype:
        return DTYPES[self.compute] if leaf.dtype.is_floating_point else leaf.dtype

    def reduce_dtype(self, leaf: Leaf) -> torch.dtype:
        return DTYPES[self.reduce] if leaf.dtype.is_floating_point else leaf.dtype

    def resting_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter given as `dtype` rests."""
        return DTYPES[self.params] if dtype.is_floating_point else dtype


def mixed_precision(step: Any = None, compute: str = "bf16", *, params: str = "fp32", reduce: str = "fp32", rounding: str | None = None) -> Any:
    """Computes in `compute`, with masters, moments and updates in `params`, and gradients reduced and accumulated in `reduce`.

    The loss function is called with floating-point parameters and batch leaves cast to `compute`; gradients are cast back.
    Masters start from the values given, never from rounded ones. What must be exact inside the function, it casts itself
    (`logits.float()` before a cross entropy). Integer leaves are never cast.

    Args:
        step: a step, or the compute dtype when called without one: `mixed_precision("bf16")`.
        compute: "bf16" or "fp32".
        params: dtype in which parameters, and hence optimizer state, rest.
        reduce: dtype in which gradients cross the wire and are accumulated.
        rounding: how new parameters, computed in fp32, are rounded to `params="bf16"`: "stochastic" (the default there; see
            `optim.stochastic_round`) or "nearest", which loses updates smaller than 1/512 of a parameter. What is drawn is a function of the state's key, the
            step, and the element's place in the whole leaf: the same on every mesh and tier.

    Communication: `shard_params` gathers `compute`: half the bytes of fp32. Gradients are reduced in `reduce`.
    Memory: with `params="bf16"` there are no masters, 2 bytes a parameter rest. Otherwise the masters are part of the optimizer's memory: with
        `shard_opt_state` and `shard_grads` they rest sharded and the whole copy in `compute` (2 bytes a parameter) exists during the step only.

    Raises:
        FzeroValueError: an unknown dtype or rounding; a rounding where masters are fp32.

    Paper: Micikevicius et al., Mixed precision training, ICLR 2018.
    """
    if isinstance(step, str):
        step, compute = None, step
    unknown = [f"{what}={value!r}" for what, value in (("compute", compute), ("params", params), ("reduce", reduce)) if value not in DTYPES]
    if unknown:
        raise FzeroValueError(message("mixed_precision", "unknown dtype", unknown, f"one of {', '.join(map(repr, DTYPES))}"))
    if rounding is not None and (rounding not in ROUNDINGS or params != "bf16"):
        problems = [] if rounding in ROUNDINGS else [f"rounding={rounding!r}: one of {', '.join(map(repr, ROUNDINGS))}"]
        problems += [] if params == "bf16" else [f"params={params!r}: nothing is rounded"]
        raise FzeroValueError(message("mixed_precision", "cannot round so", problems, 'params="bf16", rounding="stochastic"'))
    if params == "bf16":
        rounding = rounding or "stochastic"
    return applied(MixedPrecision(compute, params, reduce, rounding), step)
