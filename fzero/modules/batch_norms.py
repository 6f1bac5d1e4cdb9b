"""Computes batch norms that average their statistics over all batches (`momentum=None`) without reading a tensor's
value.

PyTorch's own forward converts `num_batches_tracked` to a Python number.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def without_counts_read(meta_module: nn.Module) -> nn.Module:
    """Gives the batch norms of a meta module that have no momentum a forward that computes with their count as a
    tensor.
    """
    for m in meta_module.modules():
        if type(m).forward is nn.BatchNorm1d.forward and m.momentum is None and m.track_running_stats:
            m.forward = types.MethodType(_averaging, m)  # type: ignore[method-assign]
    return meta_module


def _averaging(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes the same as `_BatchNorm.forward`: the running statistics are the mean over all batches."""
    if not norm.training:
        return type(norm).forward(norm, x)
    norm._check_input_dim(x)
    norm.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var)
    # momentum 1.0 stores the statistics of this batch
    out = F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    share = 1.0 / norm.num_batches_tracked
    norm.running_mean.mul_(1 - share).add_(mean * share)
    norm.running_var.mul_(1 - share).add_(var * share)
    return out
