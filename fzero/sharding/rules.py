"""The sharding rules of products, reductions, norms, losses and lookups, and of ops along a dim, as labels.

More rules are in view_rules.py, lookup_rules.py, attention_rules.py, layer_rules.py and expert_rules.py. A pointwise op
needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fzero.ops.scaled_matmul import MULTIPLE, scaled_mm
from fzero.sharding.factors import Factors, dims, factors_of, labelled, moved, pointwise, rule
from fzero.sharding.operations import Operation, shape_of

aten = torch.ops.aten

rule(aten.mm.default, "mk,kn->mn", linear="0|1")
rule(aten.bmm.default, "bmk,bkn->bmn", linear="0|1")
rule(aten.mv.default, "mk,k->m", linear="0|1")
rule(aten.dot.default, "k,k->", linear="0|1")


@labelled(aten.addmm.default, aten.baddbmm.default)
def _addmm(op: Operation) -> Factors:
    """The bias would be added on every rank, so the factor that is summed over is blocked."""
    batched = op.target is aten.baddbmm.default
    a, b = (op["batch1"], op["batch2"]) if batched else (op["mat1"], op["mat2"])
    of_a, of_b, out = (tuple(s) for s in (("bmk", "bkn", "bmn") if batched else ("mk", "kn", "mn")))
    bias = op["self"]
    return factors_of(
        op, [(bias, out[len(out) - len(shape_of(bias)) :]), (a, of_a), (b, of_b)], [out], blocked="k", seeds=(1, 2)
    )


@labelled(scaled_mm)
def _scaled_mm(op: Operation) -> Factors:
    """A scale is a number, or the scales of the rows or columns have a dim of the result. A shard of a dim must be
    a multiple of 16, as a kernel requires."""
    a, b = (x.meta["val"].shape for x in (op["a"], op["b"]))
    sizes = {"m": a[0], "k": a[1], "n": b[1]}
    scale_a, scale_b = (("m", ""), ("", "n")) if len(shape_of(op["scale_a"])) else ((), ())
    operands = [(op["a"], ("m", "k")), (op["b"], ("k", "n")), (op["scale_a"], scale_a), (op["scale_b"], scale_b)]
    blocked = {label for label, size in sizes.items() if size % (MULTIPLE * op.n)}
    return factors_of(op, operands, [("m", "n")], blocked=blocked, seeds=(0, 1))


labelled(
    aten._to_copy.default, aten.copy.default, aten.fill.Scalar, aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default, aten.softplus_backward.default, aten.elu_backward.default,
    aten.hardswish.default, aten.hardswish_backward.default, aten.hardshrink_backward.default,
    aten.softshrink_backward.default, aten.rsub.Tensor,
)(pointwise)  # fmt: skip


@labelled(aten.binary_cross_entropy_with_logits.default)
def _loss_of_elements(op: Operation) -> Factors | None:
    return pointwise(op) if op["reduction"] == 0 else None


REDUCTIONS: dict[Any, str] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.nansum.default), "sum"),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), "mean"),
    **dict.fromkeys((aten.amax.default, aten.max.default), "max"),
    **dict.fromkeys((aten.amin.default, aten.min.default), "min"),
    **dict.fromkeys(
        (
            aten.any.default,
            aten.any.dim,
            aten.any.dims,
            aten.all.default,
            aten.all.dim,
            aten.all.dims,
            aten.linalg_vector_norm.default,
            aten.prod.dim_int,
            aten.prod.default,
            aten.argmax.default,
            aten.argmin.default,
            aten.max.dim,
            aten.min.dim,
            aten.logsumexp.default,
            aten.var.correction,
            aten.var_mean.correction,
            aten.std.correction,
            aten.std_mean.correction,
            aten.median.dim,
            aten.mode.default,
            aten.kthvalue.default,
        ),
        "",
    ),
}
"""The reduction of each reducing op; "" if the dims that it reduces are blocked."""


def reduced_dims(op: Operation) -> list[int]:
    count, which = len(shape_of(op["self"])), op["dim"]
    which = [which] if isinstance(which, int) else list(which or range(count))
    return [d % count for d in which] if count else []


@labelled(*REDUCTIONS)
def _reduction(op: Operation) -> Factors:
    x, over, kind = op["self"], reduced_dims(op), REDUCTIONS[op.target]
    of = dims(len(shape_of(x)))
    out = tuple("" if d in over else k for d, k in enumerate(of) if op["keepdim"] or d not in over)
    linear = [(0,)] if kind in ("sum", "mean") and op.target is not aten.nansum.default else []
    blocked = () if kind else {of[d] for d in over}
    return factors_of(op, [(x, of)], [out] * len(op.results), blocked=blocked, reduce=kind, linear=linear, asks=False)


def _alike(op: Operation, blocked: Iterable[int], **how: Any) -> Factors | None:
    """The factors of an op along some dims, which are blocked. Every input has the dims of the result."""
    out = dims(len(op.shape))
    if any(len(shape_of(x)) != len(out) for x in op.inputs):
        return None
    fixed = {out[d % len(out)] for d in blocked} if out else ()
    how = {"linear": ()} | how
    return factors_of(op, [(x, out) for x in op.inputs], [out] * len(op.results), blocked=fixed, reduce="", **how)


@labelled(
    aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.cumsum.default,
    aten.cumprod.default, aten.logcumsumexp.default, aten.sort.default, aten.sort.stable, aten.topk.default,
    aten.glu.default,
)  # fmt: skip
def _along_dim(op: Operation) -> Factors | None:
    return _alike(op, [op["dim"]], linear=[(0,)] if op.target is aten.cumsum.default else [])


@labelled(aten.flip.default, aten.roll.default, aten.tril.default, aten.triu.default)
def _rearranged(op: Operation) -> Factors | None:
    over = op["dims"] if op["dims"] is not None else (-1, -2)
    return _alike(
        op, over or range(len(op.shape)), linear=[(0,)], moves=op.target in (aten.flip.default, aten.roll.default)
    )


@labelled(aten.constant_pad_nd.default)
def _pad(op: Operation) -> Factors | None:
    count = len(op.shape)
    return _alike(op, range(count - len(op["pad"]) // 2, count), linear=[(0,)] if op["value"] == 0 else [])


@labelled(
    aten.avg_pool2d.default, aten.max_pool2d_with_indices.default, aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default, aten.reflection_pad1d.default,
    aten.reflection_pad2d.default, aten.replication_pad2d.default, aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default, aten._adaptive_avg_pool2d_backward.default,
)  # fmt: skip
def _over_images(op: Operation) -> Factors | None:
    return _alike(op, (-1,) if op.target is aten.reflection_pad1d.default else (-1, -2))


@labelled(aten.select.int, aten.unbind.int)
def _select(op: Operation) -> Factors:
    of = dims(len(shape_of(op["self"])))
    d = op["dim"] % len(of)
    return moved(op, op["self"], of, [(*of[:d], *of[d + 1 :])] * len(op.results), blocked=(of[d],))


@labelled(aten.select_backward.default)
def _select_backward(op: Operation) -> Factors:
    out = dims(len(op.shape))
    d = op["dim"] % len(out)
    return moved(op, op["grad_output"], (*out[:d], *out[d + 1 :]), [out], blocked=(out[d],), sizes={"input_sizes": 0})


@labelled(aten.expand.default)
def _expand(op: Operation) -> Factors:
    out = dims(len(op.shape))
    return moved(op, op["self"], out[len(out) - len(shape_of(op["self"])) :], [out], sizes={"size": 0})


@labelled(aten.full.default, aten.zeros.default, aten.ones.default)
def _full(op: Operation) -> Factors:
    return factors_of(op, [], [dims(len(op.shape))], sizes={"size": 0})


@labelled(aten.stack.default)
def _stack(op: Operation) -> Factors | None:
    out = dims(len(op.shape))
    d = op["dim"] % len(out)
    of = (*out[:d], *out[d + 1 :])
    items = list(dict.fromkeys(op["tensors"]))
    return factors_of(
        op, [(x, of) for x in items], [out], blocked=(out[d],), reduce="", linear=[range(len(items))], moves=True
    )


rule(
    [aten.native_layer_norm.default, aten._fused_rms_norm.default],
    "RZ,Z,Z->RZ,R.,R.",
    runs=lambda op: {"Z": len(op["normalized_shape"])},
    blocked=lambda op: {f"Z{i}" for i in range(len(op["normalized_shape"]))},
    seeds=(0,), reduce="",
)  # fmt: skip
rule(
    aten.native_layer_norm_backward.default,
    "RZ,RZ,R.,R.,Z,Z->RZ,Z,Z",
    runs=lambda op: {"Z": len(op["normalized_shape"])},
    blocked=lambda op: {f"Z{i}" for i in range(len(op["normalized_shape"]))},
)
rule(
    aten._fused_rms_norm_backward.default,
    "RZ,RZ,R.,Z->RZ,Z",
    runs=lambda op: {"Z": len(op["normalized_shape"])},
    blocked=lambda op: {f"Z{i}" for i in range(len(op["normalized_shape"]))},
)
rule(
    aten.native_group_norm.default,
    "nS,.,.->nS,n.,n.",
    blocked=lambda op: {f"S{i}" for i in range(len(op.shape))},
    seeds=(0,), reduce="",
    local=lambda op, label, a: a | {"N": a["N"] // op.n},
)  # fmt: skip


rule(
    [aten.nll_loss_forward.default, aten.nll_loss2d_forward.default],
    "ncS,nS,.->nS,",
    blocked=lambda op: "c" if op["reduction"] == 0 else "cn",
    when=lambda op: len(shape_of(op["self"])) > 1 and (op["reduction"] == 0 or len(shape_of(op["self"])) == 2),
    free=((1, "n"), (1, "S0"), (1, "S1")),
)
rule(
    [aten.nll_loss_backward.default, aten.nll_loss2d_backward.default],
    "nS,ncS,nS,.,.->ncS",
    runs=lambda op: {"S": len(shape_of(op["self"])) - 2},
    blocked=lambda op: "c" if op["reduction"] == 0 else "cn",
    when=lambda op: len(shape_of(op["self"])) > 1 and (op["reduction"] == 0 or len(shape_of(op["self"])) == 2),
)


@labelled(aten.mse_loss.default, aten.mse_loss_backward.default)
def _squared_error(op: Operation) -> Factors | None:
    """Every factor is blocked, so the body is used for any sharding."""
    x = op["self"]
    of = dims(len(shape_of(x)))
    ins = [(a, of[len(of) - len(shape_of(a)) :]) for a in op.inputs]
    return factors_of(op, ins, [of if len(op.shape) else ()], blocked={*of})


rule(aten.embedding.default, "v.,I->I.", linear="0", blocked="v", moves=True)
rule(aten.embedding_dense_backward.default, "Iz,I->.z", linear="0", when=lambda op: not op["scale_grad_by_freq"])


@labelled(aten.embedding.default)
def _embedding(op: Operation) -> Factors:
    rows = tuple(f"i{k}" for k in range(len(shape_of(op["indices"]))))
    operands = [(op["weight"], ("v", "z")), (op["indices"], rows)]
    return factors_of(op, operands, [(*rows, "z")], blocked="v", linear=[(0,)], moves=True, reduce="")
