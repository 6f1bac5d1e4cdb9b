"""Decomposes ops that read all of a sharded dim (softmax, losses, norms) into ops that include reductions along that
dim."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from fzero.sharding.layer_strategies import ATTENTION, gathers_keys
from fzero.sharding.op_strategies import WholeOp, Writer, reduced_dims, shape_of
from fzero.sharding.placements import Shard

aten = torch.ops.aten

Decomposition = Callable[[WholeOp, Writer], fx.Node | tuple[Any, ...] | None]
DECOMPOSITIONS: dict[Any, Decomposition] = {}
"""Rewrites of ops on full values into other ops. A rewrite returns None if the placements of the inputs do not require
it."""


def _decomposes(*targets: Any) -> Callable[[Decomposition], Decomposition]:
    def add(fn: Decomposition) -> Decomposition:
        DECOMPOSITIONS.update(dict.fromkeys(targets, fn))
        return fn

    return add


def _sharded_along(op: WholeOp, node: Any, *dims: int) -> bool:
    """Whether a value is sharded along one of these dims."""
    if not isinstance(node, fx.Node):
        return False
    place, count = op.place[node], max(1, len(shape_of(node)))
    return isinstance(place, Shard) and place.dim in [d % count for d in dims]


def _to(w: Writer, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if x.meta["val"].dtype == dtype else w(aten._to_copy.default, x, dtype=dtype)


def _number(w: Writer, value: float, like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    x = like.meta["val"]
    return w(aten.full.default, [], value, dtype=dtype or x.dtype, device=x.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which PyTorch computes with values of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@_decomposes(aten.addmm.default, aten.baddbmm.default)
def _addmm(op: WholeOp, w: Writer) -> fx.Node | None:
    """Adds the bias once, to the sum of the partial products."""
    one, two = (op["mat1"], op["mat2"]) if op.target is aten.addmm.default else (op["batch1"], op["batch2"])
    if not (_sharded_along(op, one, -1) or _sharded_along(op, two, -2)):
        return None
    y = w(aten.mm.default if op.target is aten.addmm.default else aten.bmm.default, one, two)
    y = y if op["alpha"] == 1 else w(aten.mul.Scalar, y, op["alpha"])
    return w(aten.add.Tensor, y, op["self"] if op["beta"] == 1 else w(aten.mul.Scalar, op["self"], op["beta"]))


@_decomposes(aten.convolution.default)
def _convolution(op: WholeOp, w: Writer) -> fx.Node | None:
    x, weight, bias = op["input"], op["weight"], op["bias"]
    into = 0 if op["transposed"] else 1
    if bias is None or not (_sharded_along(op, x, 1) or _sharded_along(op, weight, into)):
        return None
    y = w.named(op.target, op.named | {"bias": None})
    return w(aten.add.Tensor, y, w.view(bias, [-1 if d == 1 else 1 for d in range(len(op.shape))]))


@_decomposes(aten._softmax.default, aten._log_softmax.default)
def _softmax(op: WholeOp, w: Writer) -> fx.Node | None:
    x, dim = op["self"], op["dim"]
    if not _sharded_along(op, x, dim):
        return None
    result = op.outputs[0].dtype
    x = _to(w, x, _wide(result))
    shifted = w(aten.sub.Tensor, x, w(aten.amax.default, x, [dim], True))
    powers = w(aten.exp.default, shifted)
    total = w(aten.sum.dim_IntList, powers, [dim], True)
    if op.target is aten._softmax.default:
        return _to(w, w(aten.div.Tensor, powers, total), result)
    return _to(w, w(aten.sub.Tensor, shifted, w(aten.log.default, total)), result)


@_decomposes(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(op: WholeOp, w: Writer) -> fx.Node | None:
    grad, out, dim = op["grad_output"], op["output"], op["dim"]
    if not (_sharded_along(op, grad, dim) or _sharded_along(op, out, dim)):
        return None
    result = op.outputs[0].dtype
    grad, out = (_to(w, x, _wide(x.meta["val"].dtype)) for x in (grad, out))
    if op.target is aten._softmax_backward_data.default:
        grad = w(aten.mul.Tensor, grad, out)
    else:
        out = w(aten.exp.default, out)
    # With p = softmax(x): g * p - p * sum(g * p) for softmax, and g - p * sum(g) for log_softmax,
    # whose p is exp(out).
    total = w(aten.sum.dim_IntList, grad, [dim], True)
    return _to(w, w(aten.sub.Tensor, grad, w(aten.mul.Tensor, out, total)), result)


@_decomposes(aten.logsumexp.default)
def _logsumexp(op: WholeOp, w: Writer) -> fx.Node | None:
    x, dims = op["self"], reduced_dims(op)
    if not _sharded_along(op, x, *dims) or not x.meta["val"].is_floating_point():
        return None
    result = x.meta["val"].dtype
    x = _to(w, x, _wide(result))
    top = w(aten.amax.default, x, dims, True)
    # If the maximum is infinite, x - top would be NaN (inf - inf). Shifted by 0 instead, the result
    # is the same infinity.
    infinite = w(aten.eq.Scalar, w(aten.abs.default, top), math.inf)
    top = w(aten.where.self, infinite, _number(w, 0.0, top), top)
    total = w(aten.sum.dim_IntList, w(aten.exp.default, w(aten.sub.Tensor, x, top)), dims, True)
    return _to(w, w.view(w(aten.add.Tensor, w(aten.log.default, total), top), op.shape), result)


@_decomposes(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def _extreme(op: WholeOp, w: Writer) -> fx.Node | tuple[Any, ...] | None:
    """The index of the first maximum or minimum: the smallest index among the elements that are equal to it."""
    x, dim, keep = op["self"], op["dim"], op["keepdim"]
    if dim is None or not _sharded_along(op, x, dim):
        return None
    of = aten.amax.default if op.target in (aten.argmax.default, aten.max.dim) else aten.amin.default
    shape, dim = shape_of(x), dim % len(shape_of(x))
    top = w(of, x, [dim], True)
    hit = w(aten.eq.Tensor, x, top)
    if x.meta["val"].is_floating_point():
        # A NaN is the maximum and the minimum, as in PyTorch, but it is not equal to itself.
        hit = w(aten.logical_or.default, hit, w(aten.isnan.default, x))
    numbers = w(aten.arange.default, shape[dim], dtype=torch.int64, device=x.meta["val"].device)
    numbers = w.view(numbers, [-1 if d == dim else 1 for d in range(len(shape))])
    # 2**62 is larger than any index, so the minimum ignores it.
    numbers = w(aten.where.self, hit, numbers, _number(w, 2**62, x, torch.int64))
    first = w(aten.amin.default, numbers, [dim], keep)
    if op.target in (aten.argmax.default, aten.argmin.default):
        return first
    return w.view(top, op.shape), first


@_decomposes(aten.var.correction, aten.var_mean.correction, aten.std.correction, aten.std_mean.correction)
def _variance(op: WholeOp, w: Writer) -> fx.Node | tuple[Any, ...] | None:
    x, dims = op["self"], reduced_dims(op)
    if not _sharded_along(op, x, *dims) or not x.meta["val"].is_floating_point():
        return None
    shape, result = shape_of(x), x.meta["val"].dtype
    count = math.prod(shape[d] for d in dims)
    left = count - (1 if op["correction"] is None else op["correction"])
    if left <= 0:
        return None
    x = _to(w, x, _wide(result))
    mean = w(aten.mean.dim, x, dims, True)
    away = w(aten.sub.Tensor, x, mean)
    out = w(aten.div.Scalar, w(aten.sum.dim_IntList, w(aten.mul.Tensor, away, away), dims, True), left)
    if op.target in (aten.std.correction, aten.std_mean.correction):
        out = w(aten.sqrt.default, out)
    out = _to(w, w.view(out, op.shape), result)
    if op.target in (aten.var.correction, aten.std.correction):
        return out
    return out, _to(w, w.view(mean, op.shape), result)


# --- attention ---


def _fewer_keys(op: WholeOp, w: Writer) -> fx.Node | tuple[Any, ...] | None:
    """Repeats the heads of keys and values if there are fewer of them than ranks, for attention that exchanges
    positions for heads. Each head is repeated as often as necessary to have some heads for each rank."""
    if op.by_position is None or not any(_sharded_along(op, op[name], 2) for name in ("query", "key", "value")):
        return None
    heads = shape_of(op["key"])[1]
    if gathers_keys(op) or heads % op.n == 0 or shape_of(op["query"])[1] % heads:
        return None
    times = math.lcm(heads, op.n) // heads

    def more(x: fx.Node) -> fx.Node:
        rows, _, *rest = shape_of(x)
        y = w(aten.expand.default, w(aten.unsqueeze.default, x, 2), [rows, heads, times, *rest])
        return w(
            aten.view.default,
            w(aten.clone.default, y, memory_format=torch.contiguous_format),
            [rows, heads * times, *rest],
        )

    new = w.named(op.target, op.named | {name: more(op[name]) for name in ("key", "value")})
    out = [w(operator.getitem, new, i) if isinstance(v, torch.Tensor) else v for i, v in enumerate(op.outputs)]
    if op["grad_out"] is not None or op["grad_out_"] is not None:
        # Outputs 1 and 2 are the gradients of keys and values: the gradient of a head is the sum
        # over its copies.
        for i in (1, 2):
            rows, _, *rest = op.outputs[i].shape
            out[i] = w(aten.sum.dim_IntList, w(aten.view.default, out[i], [rows, heads, times, *rest]), [2])
    return tuple(out)


DECOMPOSITIONS.update(dict.fromkeys(ATTENTION, _fewer_keys))


# --- losses ---


@_decomposes(aten.nll_loss_forward.default)
def _nll_loss(op: WholeOp, w: Writer) -> tuple[Any, ...] | None:
    """The log-probability of the target, as a sum over the classes in which only one term is not zero."""
    x, target, reduction = op["self"], op["target"], op["reduction"]
    if op["weight"] is not None or len(shape_of(x)) != 2 or (reduction == 0 and not _sharded_along(op, x, 1)):
        return None
    hit, valid = _hits(op, w, x, target)
    picked = w(aten.where.self, hit, x, _number(w, 0.0, x))
    losses = w(aten.neg.default, w(aten.sum.dim_IntList, picked, [1]))
    dtype, device = x.meta["val"].dtype, x.meta["val"].device
    # a target that is not a valid class raises an error, as it does without sharding
    zeros = w(aten.full.default, [shape_of(x)[1]], 0.0, dtype=dtype, device=device)
    counted = w(aten.where.self, valid, target, w(aten.full.default, [], 0, dtype=torch.int64, device=device))
    losses = w(aten.add.Tensor, losses, w(aten.index_select.default, zeros, 0, counted))
    if reduction == 0:
        return losses, _number(w, 0.0, x)
    total = _to(w, w(aten.sum.default, valid), dtype)
    loss = w(aten.sum.default, losses)
    return (w(aten.div.Tensor, loss, total) if reduction == 1 else loss), total


@_decomposes(aten.nll_loss_backward.default)
def _nll_loss_backward(op: WholeOp, w: Writer) -> fx.Node | None:
    x, target, reduction = op["self"], op["target"], op["reduction"]
    if op["weight"] is not None or len(shape_of(x)) != 2 or (reduction == 0 and not _sharded_along(op, x, 1)):
        return None
    hit, _ = _hits(op, w, x, target)
    grad = w(aten.neg.default, op["grad_output"])
    if reduction == 1:
        grad = w(aten.div.Tensor, grad, op["total_weight"])
    if reduction == 0:
        grad = w.view(grad, [shape_of(x)[0], 1])
    return w(aten.where.self, hit, grad, _number(w, 0.0, x))


def _hits(op: WholeOp, w: Writer, x: fx.Node, target: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Whether a column is the target class of its row, and whether a target counts (is not `ignore_index`)."""
    rows, columns = shape_of(x)
    valid = w(aten.ne.Scalar, target, op["ignore_index"])
    numbers = w.view(w(aten.arange.default, columns, dtype=torch.int64, device=x.meta["val"].device), [1, columns])
    hit = w(aten.eq.Tensor, numbers, w.view(target, [rows, 1]))
    return w(aten.logical_and.default, hit, w.view(valid, [rows, 1])), valid


def _elementwise(loss: Callable[[Writer, WholeOp], fx.Node]) -> Decomposition:
    """A loss that is computed element by element, with its reduction."""

    def of(op: WholeOp, w: Writer) -> fx.Node | None:
        if not op.sharded() or op["weight"] is not None:
            return None
        y = loss(w, op)
        return y if op["reduction"] == 0 else w((aten.mean if op["reduction"] == 1 else aten.sum).default, y)

    return of


def _squared(w: Writer, op: WholeOp) -> fx.Node:
    away = w(aten.sub.Tensor, op["self"], op["target"])
    return w(aten.mul.Tensor, away, away)


DECOMPOSITIONS[aten.mse_loss.default] = _elementwise(_squared)


@_decomposes(aten.mse_loss_backward.default)
def _squared_backward(op: WholeOp, w: Writer) -> fx.Node | None:
    x, target, grad = op["self"], op["target"], op["grad_output"]
    if not op.sharded():
        return None
    share: Sequence[int] = shape_of(x) if op["reduction"] == 1 else []
    y = w(aten.mul.Scalar, w(aten.sub.Tensor, x, target), 2.0 / math.prod(share))
    return w(aten.mul.Tensor, y, grad)
