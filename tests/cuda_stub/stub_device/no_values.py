"""Lets fzero run on a device that computes no values: without checks of values, and with cuDNN's attention, whose
results have the shapes of PyTorch's own fakes.

Scripts of this folder begin with `install`; benchmarks get it from common.py where FAKE_GPUS is set.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C._dynamo.guards import _empty_strided_cuda
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fzero.checkpoint import tensor_digests
from fzero.runtime import state_validation

_OPS = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
_library = torch.library.Library("aten", "IMPL", "CUDA")


def install() -> None:
    """Replaces cuDNN's attention. Leaves out the checks that values are finite, and the same on all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that implementations are replaced
        for name in _OPS:
            _library.impl(name, _empty(getattr(torch.ops.aten, name).default))
    state_validation.check_finite = lambda *given: None  # type: ignore[assignment]
    tensor_digests.same = lambda mesh, owner, held, fix: held()  # type: ignore[assignment]


def _empty(op: Any) -> Callable[..., Any]:
    """An implementation whose results are memory that nobody has written."""
    known: dict[Any, list[Callable[[], Any]]] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        key = tuple([(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in args])
        if key not in known:
            mode = FakeTensorMode()
            given = pytree.tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            with mode:
                known[key] = [_made_as(x) for x in op(*given[0], **given[1])]
        return [make() for make in known[key]]

    return run


def _made_as(result: Any) -> Callable[[], Any]:
    """What makes such a result, quickly: cuDNN does not run Python."""
    if not isinstance(result, FakeTensor):
        return lambda: result
    layout = tuple(result.shape), tuple(result.stride())
    if result.device.type == "cuda":  # the current one
        return partial(_empty_strided_cuda, *layout, result.dtype)
    return partial(torch.empty_strided, *layout, dtype=result.dtype, device=result.device)
