"""Normalises a float32 tensor with parameters in half precision, which PyTorch's kernels reject.

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
"""The first arguments of each norm."""
_HALF = (torch.bfloat16, torch.float16)


def with_parameters_cast(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a norm; a weight and a bias in half precision are cast to the dtype of a float32 input."""
    given = dict(zip(NORMS[func], args, strict=False)) | kwargs
    x = given.get("input")
    half = {
        name: value
        for name in ("weight", "bias")
        if isinstance(value := given.get(name), torch.Tensor) and value.dtype in _HALF
    }
    if not half or not isinstance(x, torch.Tensor) or x.dtype is not torch.float32:
        return args, kwargs
    cast = {name: half[name].to(x.dtype) if name in half else value for name, value in given.items()}
    first = NORMS[func][: len(args)]
    return (*map(cast.pop, first), *args[len(first) :]), cast
