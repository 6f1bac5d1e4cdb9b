"""Counts the floating-point operations of recorded operations: what remat recomputes, and what a plan prices; and
their transcendental functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fzero.ops.grouped_matmul import EXPERT_MM, EXPERT_OUTER
from fzero.ops.scaled_matmul import scaled_mm
from fzero.trace.storages import is_view

aten = torch.ops.aten

PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten._scaled_mm,
    scaled_mm.overloadpacket,
    EXPERT_MM.overloadpacket,
    EXPERT_OUTER.overloadpacket,
    aten.convolution,
    aten.convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
}
"""Operations that are a library's own kernel: what they read and write is in memory."""


def packet(node: fx.Node) -> object:
    """The operator of a node, whatever its overload; None of what calls none."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def product_flops(node: fx.Node) -> float:
    """Floating point operations of a node, a multiplication and an addition counted as two; 0 of what is not a product.

    They are those of torch.utils.flop_counter: causal attention counts as if nothing were masked, its backward with the
    scores that it computes again.
    """
    kind = packet(node)
    if kind not in PRODUCTS:
        return 0
    formula = _ATTENTION_ON_CPU.get(kind) or flop_registry[kind]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # type: ignore[arg-type]
    return formula(*args, **kwargs, out_val=node.meta["val"])


_ATTENTION_ON_CPU: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda d, q, k, v, *_, **__: sdpa_backward_flop_count(
        d.shape, q.shape, k.shape, v.shape
    ),
}
"""Formulas that torch's registry lacks."""


def operations(node: fx.Node) -> int:
    """Floating-point operations of one node: of products as `product_flops`, of anything else one an element; none for
    a view."""
    if node.target is operator.getitem or is_view(node):
        return 0
    if amount := product_flops(node):
        return int(amount)
    arguments, value = fx.map_arg(node.args, lambda n: n.meta["val"]), node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    tensors = (x for x in (*arguments, *results) if isinstance(x, torch.Tensor))  # type: ignore[misc]
    return max((x.numel() for x in tensors), default=0)


_TRANSCENDENTAL: dict[Any, int] = {
    **dict.fromkeys((aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2, aten.log10, aten.log1p), 1),
    **dict.fromkeys((aten.sin, aten.cos, aten.erf, aten.erfc, aten.sigmoid, aten.silu, aten.silu_backward), 1),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten._log_softmax_backward_data, aten.logsumexp), 1),
    **dict.fromkeys((aten.elu, aten.elu_backward, aten.softplus_backward, aten.log_sigmoid_backward), 1),
    **dict.fromkeys((aten.softplus, aten.log_sigmoid_forward, aten.binary_cross_entropy_with_logits, aten.tan), 2),
    **dict.fromkeys((aten.mish, aten.mish_backward), 5),
    aten.gelu: 1,
    aten.gelu_backward: 2,
    aten.logaddexp: 2,
    aten.tanh: 3,
    aten.pow: 4,
}
"""Transcendental functions an element, in those that take as long as an exponential: compiled for AVX-512, an error
function or a logarithm does, a tanh takes three times as long, a power four times."""


def transcendentals(node: fx.Node) -> int:
    """Transcendental functions that a node computes, in exponentials: see `_TRANSCENDENTAL`. Those of fused attention
    are a part of its rate."""
    kind = packet(node)
    if not (each := _TRANSCENDENTAL.get(kind, 0)):
        return 0
    if kind in (aten.gelu, aten.gelu_backward) and node.kwargs.get("approximate") == "tanh":
        each = 3
    if kind is aten.pow and isinstance(by := node.args[1], (int, float)) and 2 * by == int(2 * by):
        return 0  # products and square roots
    return each * operations(node)


def attention_of(node: fx.Node) -> str:
    """ "forward" or "backward" of a node that is fused attention, else nothing."""
    name = str(packet(node))
    return "" if "attention" not in name else "backward" if name.endswith("backward") else "forward"
