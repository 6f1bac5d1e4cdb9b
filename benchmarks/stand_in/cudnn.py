"""cuDNN's attention for a device that computes nothing: results of the shapes that PyTorch's own fakes have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_OPS = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
_library = torch.library.Library("aten", "IMPL", "CUDA")


def install() -> None:
    for name in _OPS:
        _library.impl(name, _empty(getattr(torch.ops.aten, name).default))


def _empty(op: Any) -> Callable[..., Any]:
    """An implementation whose results are memory that nobody has written."""
    known: dict[Any, list[Any]] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in args)
        if key not in known:
            mode = FakeTensorMode()
            given = pytree.tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            with mode:
                out = op(*given[0], **given[1])
            known[key] = list(out)
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if isinstance(x, FakeTensor) else x
            for x in known[key]
        ]

    return run
