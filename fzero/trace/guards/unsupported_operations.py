"""Rejects ops that no program can contain: draws from the global generator, reads of a value, tensors that are not
dense, and writes outside of the trace."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.guards import overwrites
from fzero.trace.guards.rejections import TracedFunction, described
from fzero.trace.guards.user_frames import asking_frame, is_pytorchs, line

aten = torch.ops.aten

_VALUE = (
    "choose with torch.where or arithmetic instead of .item(), float(), bool() or Python's if on tensors; give modules "
    "numbers (momentum=0.1, not None)"
)
_VALUE_IN_UPDATE = (
    "what a schedule and an optimizer are given are tensors, the step too: write torch.clamp(step / 100, max=1) for "
    "min(1, step / 100), "
    "torch.cos for math.cos, torch.where for Python's if; or take a schedule of fz.optim (warmup_cosine)"
)
_SHAPE = "keep the shape: torch.where(mask, x, 0), or a sum weighted by the mask"
_INSTEAD = {
    aten.linalg_lstsq.default: "torch.linalg.pinv(a) @ b, or torch.linalg.solve of the normal equations",
    aten._pack_padded_sequence.default: (
        "run the layer on the padded sequences, and mask the positions after their ends"
    ),
}
_OBSERVERS = {aten.fused_moving_avg_obs_fake_quant.default, aten._fused_moving_avg_obs_fq_helper.default}
_PRODUCTS = {
    getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
}


def refuse_functions(traced: TracedFunction, name: str) -> NoReturn:
    """Raises because of a higher-order operator, which takes functions as arguments."""
    what = f"uses an operator of functions, which a program cannot contain ({name})"
    fix = "write it with torch.where, a Python loop over sizes, or torch.func.vmap"
    raise TraceError(traced.owner, what, traced.here(), fix)


def check_operation(traced: TracedFunction, func: Any, args: Any, kwargs: Any) -> None:
    """Raises if an op cannot be recorded, independent of its results."""
    if compat.fx_tracing():
        what = f"traces a function by torch.fx while being traced ({func})"
        fix = "use torch.func.jvp, which computes the same, in place of torch.func.linearize"
    elif draws(func, args, kwargs):
        what = f"draws from torch's global generator ({func})"
        fix = (
            "use fz.random (normal, uniform, bernoulli, dropout) with a key: its draws are the same on every mesh and "
            "when recomputed"
        )
    elif func in overwrites.REFUSED and overwrites.given(func, args, kwargs, overwrites.REFUSED[func]):
        what = f"overwrites {' and '.join(overwrites.REFUSED[func])} in a way that a trace cannot see ({func})"
        fix = "compute them by other operations, or with F.batch_norm on clones of them"
    elif func in _OBSERVERS and (resized := _resized(func, args, kwargs)):
        where = traced.here(*(described(x, traced.named(x) or name) for name, x in resized.items()))
        what = f"changes the size of its arguments ({func})"
        fix = (
            "let observers of quantisation have their sizes before: one forward of the module in training mode, then "
            "fz.functionalize; or observe per tensor: get_default_qat_qconfig('qnnpack')"
        )
        raise TraceError(traced.owner, what, where, fix)
    else:
        return
    raise TraceError(traced.owner, what, traced.here(), fix)


def _resized(func: Any, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """The arguments of an observer that it would resize to one number per channel, by name."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if not given.get("per_row_fake_quant"):
        return {}
    size = given["self"].shape[given["ch_axis"]]
    return {k: given[k] for k in ("running_min", "running_max", "scale", "zero_point") if given[k].numel() != size}


def check_dtypes(func: Any, args: Any) -> None:
    """Raises if an operator is given dtypes that fake tensors accept but PyTorch's devices reject."""
    if func in _CLASSES and args[1].dtype not in (torch.int64, torch.uint8):
        # A RuntimeError, as PyTorch's own kernels raise; `plainly` adds the user's line and a fix.
        raise RuntimeError(f"expected class indices of {torch.int64}, but got {args[1].dtype}")
    if func in _ONE_DTYPE:
        args = [args[i] for i in _ONE_DTYPE[func] if i < len(args)]
    elif func not in _PRODUCTS:
        return
    dtypes = {x.dtype for x in args if isinstance(x, torch.Tensor)}
    if len(dtypes) > 1:
        raise RuntimeError(f"expected operands of one dtype, but got {' and '.join(sorted(str(d) for d in dtypes))}")


_ONE_DTYPE: dict[Any, tuple[int, ...]] = {
    aten.grid_sampler_2d.default: (0, 1),
    aten.grid_sampler_3d.default: (0, 1),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
    aten.index_add.default: (0, 3),
    aten.index_add_.default: (0, 3),
    aten.index_copy.default: (0, 3),
    aten.index_copy_.default: (0, 3),
    aten._cdist_forward.default: (0, 1),
    aten.linalg_cross.default: (0, 1),
    aten.binary_cross_entropy.default: (0, 1),
    aten.huber_loss_backward.default: (1, 2),
    aten.nll_loss_forward.default: (0, 2),
    aten.nll_loss2d_forward.default: (0, 2),
    aten._embedding_bag.default: (0, 6),
}
"""Operators that require some of their arguments to have one dtype, with the positions of these arguments."""
_CLASSES = {
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
}
"""Losses whose second argument contains class indices."""


def check_dense(traced: TracedFunction, func: Any, result: Any) -> None:
    """Raises if an op creates a tensor that is not dense."""
    for x in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(x, torch.Tensor) and x.layout is not torch.strided:
            what = f"makes a tensor that is not dense ({func})"
            fix = "use only dense tensors, and to dense gradients: sparse=False"
            raise TraceError(traced.owner, what, traced.here(), fix)


def refuse_value(traced: TracedFunction, func: Any, error: Exception) -> NoReturn:
    """Raises because an op needs the value of a tensor."""
    of_shape = isinstance(error, compat.SHAPE_DEPENDENT)
    what = "needs the value of a tensor while being traced" + (", for a shape" if of_shape else "")
    asks = asking_frame()
    place = (asks.f_code.co_filename, asks.f_lineno) if asks is not None else ("", 0)
    where = traced.here(*([f"asked by {line(place)}"] if is_pytorchs(place[0]) else []))
    instead = _SHAPE if of_shape else _VALUE_IN_UPDATE if traced.owner == "optimizer" else _VALUE
    raise TraceError(traced.owner, f"{what} ({func})", where, _INSTEAD.get(func, instead)) from error


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws from the global generator. PyTorch's tag alone does not tell: attention and RNN layers have
    it independent of their dropout, and so do ops that draw only in training."""
    # Checked first, because this runs for every operation of a trace, and few have the tag.
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = (
        {a.name: a.default_value for a in func._schema.arguments}
        | {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}
        | dict(kwargs)
    )
    # An operator without such an argument counts as training.
    in_training = given.get("train", given.get("training")) is not False
    return in_training and given.get("dropout_p", given.get("dropout")) != 0.0
