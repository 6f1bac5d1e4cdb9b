"""Counts the floating-point operations of recorded ops, for remat (the cost of recomputation) and for plans (the
predicted time); also counts their transcendental functions."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from fzero.ops.grouped_matmul import EXPERT_MM, EXPERT_OUTER, GROUPED_MM, GROUPED_OUTER
from fzero.ops.scaled_matmul import scaled_mm
from fzero.trace.storages import is_view

aten = torch.ops.aten

_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}
_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
}

PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten._scaled_mm,
    scaled_mm.overloadpacket,
    EXPERT_MM.overloadpacket,
    EXPERT_OUTER.overloadpacket,
    GROUPED_MM.overloadpacket,
    GROUPED_OUTER.overloadpacket,
    aten.convolution,
    aten.convolution_backward,
    *_ATTENTION,
    *_ATTENTION_BACKWARD,
}
"""Ops that run as a library kernel of their own, so that their operands and results are in memory and cannot be fused.
"""


def packet(node: fx.Node) -> object:
    """The operator of a node, independent of its overload; None if the node does not call an operator."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def product_flops(node: fx.Node) -> float:
    """The floating-point operations of a node, where a multiplication and an addition count as two; 0 for nodes that
    are not products.

    The counts are those of torch.utils.flop_counter: causal attention counts as if nothing were masked, and its
    backward includes the scores that it recomputes.
    """
    kind = packet(node)
    if kind not in PRODUCTS:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # type: ignore[arg-type]
    # torch 2.11 rejects fewer heads of keys than of queries, and no version counts the kernels for CPUs.
    if kind in _ATTENTION:
        return _attention_flops(*args[:3], products=(1, 1))  # type: ignore[arg-type]
    if kind in _ATTENTION_BACKWARD:
        return _attention_flops(*args[1:4], products=(3, 2))  # type: ignore[arg-type]
    return flop_registry[kind](*args, **kwargs, out_val=node.meta["val"])


def _attention_flops(query: Any, key: Any, value: Any, products: tuple[int, int]) -> int:
    """`products` is the number of matrix products over the width of the queries and over that of the values."""
    batch, heads, positions, width = query.shape
    return 2 * batch * heads * positions * key.shape[2] * (products[0] * width + products[1] * value.shape[3])


def operations(node: fx.Node) -> int:
    """The floating-point operations of one node: `product_flops` for products, 0 for views, and one per element for all
    other ops."""
    if node.target is operator.getitem or is_view(node):
        return 0
    if amount := product_flops(node):
        return int(amount)
    arguments, value = fx.map_arg(node.args, lambda n: n.meta["val"]), node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    tensors = (x for x in (*arguments, *results) if isinstance(x, torch.Tensor))  # type: ignore[misc]
    # The largest tensor, because a reduction computes with each element of its argument, and a broadcast makes each
    # element of its result.
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
"""The transcendental functions per element, in units of one exponential. Compiled for AVX-512, an error function or a
logarithm takes as long as an exponential, a tanh three times as long, and a power four times as long."""


def transcendentals(node: fx.Node) -> int:
    """The transcendental functions that a node computes, in units of one exponential; see `_TRANSCENDENTAL`. Those of
    fused attention are not counted, because they are already included in the rate of attention."""
    kind = packet(node)
    if not (each := _TRANSCENDENTAL.get(kind, 0)):
        return 0
    if kind in (aten.gelu, aten.gelu_backward) and node.kwargs.get("approximate") == "tanh":
        each = 3
    # Powers of whole and half numbers, which Inductor writes as multiplications and square roots.
    if kind is aten.pow and isinstance(by := node.args[1], (int, float)) and 2 * by == int(2 * by):
        return 0  # products and square roots
    return each * operations(node)


def attention_of(node: fx.Node) -> str:
    """ "forward" or "backward" if a node is fused attention, else an empty string."""
    name = str(packet(node))
    return "" if "attention" not in name else "backward" if name.endswith("backward") else "forward"
