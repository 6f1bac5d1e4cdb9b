"""Normalizes a float32 tensor with parameters in half precision, which PyTorch's kernels do not support.

A layer such as Whisper's `super().forward(x.float())` computes its norm in float32. Its parameters are in bf16 under
`mixed_precision("bf16")`; they are cast where they are used, so the norm is computed in float32 as under
`torch.autocast`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

NORMS = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias"),
    F.group_norm: ("input", "num_groups", "weight", "bias"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias"),
}
"""The arguments of each norm up to the last of its parameters, in order."""
_HALF = (torch.bfloat16, torch.float16)


def with_parameters_cast(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a norm. If the input is float32, a weight and a bias in half precision are cast to
    float32.
    """
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32:
        return args, kwargs

    def cast(name: str, value: Any) -> Any:
        is_half = name in ("weight", "bias") and isinstance(value, torch.Tensor) and value.dtype in _HALF
        return value.to(x.dtype) if is_half else value

    names = NORMS[func]
    first = (cast(name, value) for name, value in zip(names, args, strict=False))
    return (*first, *args[len(names) :]), {name: cast(name, value) for name, value in kwargs.items()}
