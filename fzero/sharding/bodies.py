"""The bodies of ops: how ops that read all of a sharded dim are computed by ops that only reduce over it.

A body is a PyTorch function of the op's arguments. It is used if a factor that the op's rule calls blocked arrives
sharded: it is traced into the recorded function, in place of the op. For example, a softmax over a sharded dim becomes
a maximum, a difference, an exponential, a sum and a quotient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.sharding.attention_rules import ATTENTION, by_position, gathers_keys
from fzero.sharding.factors import body, rule_of
from fzero.sharding.operations import Operation, shape_of

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    """The value in the dtype in which PyTorch computes with its dtype."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(x: Tensor, dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim or range(x.dim()))


@body(aten.addmm.default, aten.baddbmm.default)
def _addmm(op: Operation, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Adds the bias once, to the reduced product."""
    y = aten.mm.default(a, b) if op.target is aten.addmm.default else aten.bmm.default(a, b)
    y = y if alpha == 1 else aten.mul.Scalar(y, alpha)
    return y + (bias if beta == 1 else aten.mul.Scalar(bias, beta))


@body(aten.convolution.default)
def _convolution(op: Operation, x: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor | None:
    if bias is None or op["groups"] != 1:
        return None
    y = aten.convolution.default(x, weight, None, *more)
    return y + bias.view([-1 if d == 1 else 1 for d in range(y.dim())])


@body(aten._softmax.default, aten._log_softmax.default)
def _softmax(op: Operation, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result = op.results[0].dtype
    x = _wide(x)
    shifted = x - x.amax(dim, True)
    powers = shifted.exp()
    total = powers.sum(dim, True)
    return (powers / total if op.target is aten._softmax.default else shifted - total.log()).to(result)


@body(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(op: Operation, grad: Tensor, out: Tensor, dim: int, dtype: Any) -> Tensor:
    grad, out = _wide(grad), _wide(out)
    if op.target is aten._softmax_backward_data.default:
        grad = grad * out
    else:
        out = out.exp()
    return (grad - out * grad.sum(dim, True)).to(op.results[0].dtype)


@body(aten.logsumexp.default)
def _logsumexp(op: Operation, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor | None:
    if not x.is_floating_point():
        return None
    result, x, over = x.dtype, _wide(x), _dims(x, dim)
    top = x.amax(over, True)
    top = torch.where(top.abs() == math.inf, torch.full([], 0.0, dtype=top.dtype, device=top.device), top)
    total = (x - top).exp().sum(over, True)
    return (total.log() + top).view(op.shape).to(result)


@body(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def _extreme(op: Operation, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The index of the first largest (or smallest) element, and that element. NaN counts as both."""
    if dim is None:
        return None
    largest = op.target in (aten.argmax.default, aten.max.dim)
    top = x.amax([dim], True) if largest else x.amin([dim], True)
    hit = x == top
    if x.is_floating_point():
        hit = torch.logical_or(hit, x.isnan())
    numbers = torch.arange(x.shape[dim], device=x.device).view(
        [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    )
    none = torch.full([], 2**62, dtype=torch.int64, device=x.device)
    first = torch.where(hit, numbers, none).amin([dim], keepdim)
    return first if op.target in (aten.argmax.default, aten.argmin.default) else (top.view(op.shape), first)


@body(aten.var.correction, aten.var_mean.correction, aten.std.correction, aten.std_mean.correction)
def _variance(op: Operation, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    over = _dims(x, dim)
    left = math.prod(x.shape[d] for d in over) - (1 if correction is None else correction)
    if not x.is_floating_point() or left <= 0:
        return None
    result, x = x.dtype, _wide(x)
    mean = x.mean(over, True)
    away = x - mean
    out = aten.div.Scalar((away * away).sum(over, True), left)
    out = out.sqrt() if op.target in (aten.std.correction, aten.std_mean.correction) else out
    out = out.view(op.shape).to(result)
    several = op.target in (aten.var_mean.correction, aten.std_mean.correction)
    return (out, mean.view(op.shape).to(result)) if several else out


@body(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def _truth(op: Operation, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The maximum (for any) or minimum (for all) of zeros and ones."""
    numbers, over = (x != 0).to(torch.int32), _dims(x, dim)
    some = "any" in str(op.target)
    return (numbers.amax(over, keepdim) if some else numbers.amin(over, keepdim)).to(op.results[0].dtype)


@body(aten.linalg_vector_norm.default)
def _norm(
    op: Operation, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor | None:
    if ord != 2 or dtype is not None or x.is_complex():
        return None
    y = _wide(x)
    return (y * y).sum(_dims(x, dim), keepdim).sqrt().to(x.dtype)


def _hits(op: Operation, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of the entries in the columns of the targets, and a mask of the targets that are not ignored."""
    valid = target != op["ignore_index"]
    hit = torch.arange(x.shape[1], device=x.device).view(1, -1) == target.view(-1, 1)
    return torch.logical_and(hit, valid.view(-1, 1)), valid


@body(aten.nll_loss_forward.default)
def _nll_loss(op: Operation, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> Any:
    """The log-probability of each target as a sum over the classes with one nonzero term."""
    if weight is not None or x.dim() != 2:
        return None
    hit, valid = _hits(op, x, target)
    zero = torch.full([], 0.0, dtype=x.dtype, device=x.device)
    losses = -torch.where(hit, x, zero).sum([1])
    # a target that is not a class raises, as it does without sharding
    none = torch.full([x.shape[1]], 0.0, dtype=x.dtype, device=x.device)
    counted = torch.where(valid, target, torch.full([], 0, dtype=torch.int64, device=x.device))
    losses = losses + none.index_select(0, counted)
    if reduction == 0:
        return losses, zero
    total = valid.sum().to(x.dtype)
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


@body(aten.nll_loss_backward.default)
def _nll_loss_backward(
    op: Operation,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor | None:
    if weight is not None or x.dim() != 2:
        return None
    hit, _ = _hits(op, x, target)
    grad = -grad
    grad = grad / total if reduction == 1 else grad.view(-1, 1) if reduction == 0 else grad
    return torch.where(hit, grad, torch.full([], 0.0, dtype=x.dtype, device=x.device))


@body(aten.mse_loss.default)
def _squared(op: Operation, x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    y = (x - target) * (x - target)
    return y if reduction == 0 else y.mean() if reduction == 1 else y.sum()


@body(aten.mse_loss_backward.default)
def _squared_backward(op: Operation, grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    count = x.numel() if reduction == 1 else 1
    return aten.mul.Scalar(x - target, 2.0 / count) * grad


def _repeated_keys(op: Operation) -> Callable[..., Any] | None:
    """The body of attention whose positions are exchanged for heads, if there are fewer heads of keys than ranks: each
    head is repeated until every rank has one."""
    if not by_position(op):
        return None
    heads = shape_of(op["key"])[1]
    if gathers_keys(op) or heads % op.n == 0 or shape_of(op["query"])[1] % heads:
        return None
    times = math.lcm(heads, op.n) // heads
    names = list(op.named)
    backward = op["grad_out"] is not None or op["grad_out_"] is not None

    def more(x: Tensor) -> Tensor:
        rows, _, *rest = x.shape
        y = x.unsqueeze(2).expand(rows, heads, times, *rest).clone(memory_format=torch.contiguous_format)
        return y.view(rows, heads * times, *rest)

    def body(op: Operation, *args: Any, **kwargs: Any) -> Any:
        args = tuple(more(x) if name in ("key", "value") else x for name, x in zip(names, args, strict=False))
        out = list(op.target(*args, **kwargs))
        for i in (1, 2) if backward else ():
            rows, _, *rest = op.results[i].shape
            out[i] = out[i].view(rows, heads, times, *rest).sum([2])
        return tuple(out)

    return body


def body_of(op: Operation) -> Callable[..., Any] | None:
    """The body of an op that the placements of its inputs require; None if they require none, or there is none."""
    if op.target in ATTENTION:
        return _repeated_keys(op)
    rule = rule_of(op.target)
    factors = rule.factors(op) if rule is not None and rule.body is not None and rule.factors is not None else None
    if rule is None or factors is None:
        return None
    labels = dict(factors.operands)
    blocked = any(labels[x][p.dim] in factors.blocked for x, p in op.sharded() if x in labels)
    return rule.body if blocked else None
