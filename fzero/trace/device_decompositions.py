"""Replaces ops that a device lacks, and ops whose order of summation the device leaves undefined.

The code that runs a function and the code that predicts its cost both call this file, so that both see the same ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from fzero._compat import compat
from fzero.ops import grouped_matmul, routed_rows
from fzero.ops.index_sums import IN_ORDER
from fzero.ops.recurrent import LSTM
from fzero.ops.row_indices import WRITTEN_OUT
from fzero.ops.scaled_matmul import multiply_on, scaled_mm
from fzero.trace.functionalization import AGAIN
from fzero.trace.recorder import Recorded, Recorder

aten = torch.ops.aten


def on_device(graph: Recorded, device: torch.device, slow: Collection[torch.dtype] | None = None) -> Recorded:
    """Returns the graph in the form in which it should run on a device.

    - Matrix products in bfloat16 and float16 run in float32 if the device has no native products in these dtypes.
      `slow` names these dtypes; without it, the device is queried.
    - Products in 8 bits run by the device's own means (fzero/ops/scaled_matmul.py).
    - The operators that number and route rows of experts are replaced by functions of ATen ops
      (fzero/ops/row_indices.py, fzero/ops/routed_rows.py). On
      devices other than CPUs, so are the products of several experts' rows (fzero/ops/grouped_matmul.py).
    - A CPU adds at indices in their order (fzero/ops/index_sums.py), and has its own implementations of LSTM layers
      (fzero/ops/recurrent.py) and of batch norms with two dtypes.

    A product of bfloat16 matrices accumulates in float32 on every device. Computing it from upcast operands and
    rounding once is the same arithmetic, and on a CPU without bfloat16 instructions it is 3 to 80 times faster. The
    same holds for float16 matrices.
    """
    if slow is None:
        slow = [
            dtype
            for dtype, native in ((torch.bfloat16, compat.native_bf16), (torch.float16, compat.native_fp16))
            if not native(device)
        ]
    # No rules if no product needs one: `substituted` would record the graph again for nothing.
    rules = (
        {op: _in_float32(op, slow) for op in _MATMULS}
        if any(n.target in _MATMULS and _dtype(n) in slow for n in graph.graph.nodes)
        else {}
    )
    rules |= {scaled_mm: multiply_on(device), **WRITTEN_OUT, **routed_rows.WRITTEN_OUT}
    on_cpu = IN_ORDER | LSTM | _NORMS
    return substituted(graph, rules | (on_cpu if device.type == "cpu" else grouped_matmul.ON_GPU))


def by_operation(graph: Recorded) -> Callable[..., Any]:
    """Returns the graph as a function that runs it op by op.

    A result may have other strides on the device than on fake tensors; an example is a log_softmax over dim 1 of a
    transposed tensor. A traced view of such a result then makes a copy.
    """
    copy, env = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph.graph, env))
    for node in copy.nodes:
        node.target = AGAIN.get(node.target, node.target)
    return fx.GraphModule(dict(graph.constants), copy).forward


@functools.cache
def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device supports arithmetic and matrix products in a dtype. On a GPU, bfloat16 must be supported in
    hardware."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        x = torch.ones(2, 2, dtype=dtype, device=device)
        return bool((x @ x + x).isfinite().all())
    except (RuntimeError, TypeError):  # PyTorch's errors for a dtype that an operation does not support
        return False


def on_host(graph: Recorded) -> Recorded:
    """Returns a graph that was recorded for a device in the form in which the host runs it. Tensors that the graph
    creates are created on the host, and the metadata of its values names no other device."""
    here = torch.device("cpu")
    copy, env = fx.Graph(), dict[fx.Node, fx.Node]()
    returned = copy.graph_copy(graph.graph, env)
    copy.output(returned)
    for node in copy.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": here}
        if "val" in node.meta:
            node.meta["val"] = map_aggregate(node.meta["val"], _nowhere)
    return Recorded(copy, {name: value.to(here) for name, value in graph.constants.items()})


def _nowhere(value: Any) -> Any:
    """The metadata of a value, on the meta device."""
    return (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
    )


def substituted(graph: Recorded, rules: Mapping[Any, Callable[..., Any]]) -> Recorded:
    """Returns the graph with each op in `rules` replaced by the ops that its rule runs."""
    if not any(n.target in rules for n in graph.graph.nodes):
        return graph
    places = graph.inputs
    recorder = Recorder("compile")

    class Interpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.op != "call_function":
                return super().run_node(n)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            target: Any = n.target
            run = rules.get(target) or AGAIN.get(target, target)
            return run(*args, **kwargs)

    with compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=_real(v, graph))
            for v in (p.meta["val"] for p in places)
        ]
        for fake, place in zip(fakes, places, strict=True):
            recorder.input(fake, place.name)
        module = graph.module()
        for name, value in graph.constants.items():
            fake = mode.from_tensor(value)
            recorder.constant(name, value, fake)
            setattr(module, name, fake)
        with recorder:
            outputs = Interpreter(module, graph=graph.graph).run(*fakes)
    return recorder.finish(outputs)


_MATMULS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    grouped_matmul.EXPERT_MM,
    grouped_matmul.EXPERT_OUTER,
    grouped_matmul.GROUPED_MM,
    grouped_matmul.GROUPED_OUTER,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    # the gradient of a convolution's first input may be absent
    first = next(v for v in value if v is not None) if isinstance(value, (tuple, list)) else value
    return first.dtype


def _in_float32(op: Any, slow: Collection[torch.dtype]) -> Callable[..., Any]:
    """A replacement for an op that upcasts its arguments of the `slow` dtypes to float32 and rounds its results to the
    original dtype."""

    def up(x: Any) -> Any:
        return x.float() if isinstance(x, torch.Tensor) and x.dtype in slow else x

    def run(*args: Any, **kwargs: Any) -> Any:
        low = next((a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in slow), None)
        out = op(*map(up, args), **{k: up(v) for k, v in kwargs.items()})
        if low is None:
            return out
        if isinstance(out, torch.Tensor):
            return out.to(low)
        # the second result of attention, its logsumexp, stays float32
        stays = 1 if op is aten._scaled_dot_product_flash_attention_for_cpu.default else len(out)
        return tuple(
            x.to(low) if i < stays and isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x
            for i, x in enumerate(out)
        )

    return run


def _real(value: torch.Tensor, graph: Recorded) -> torch.device:
    if value.device.type != "meta":
        return value.device
    devices = {
        v.device
        for n in graph.graph.nodes
        if isinstance(v := n.meta.get("val"), torch.Tensor) and v.device.type != "meta"
    }
    return next(iter(devices), torch.device("cpu"))


# --- batch norms of two dtypes ---


def _forward(op: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
        if not _differ(weight, mean):
            return op(x, weight, bias, mean, var, *rest)
        out, *saved = op(*_widest(x, weight, bias, mean, var), *rest)
        return out.to(x.dtype), *(t.to(x.dtype) for t in saved[:2]), *(t.to(mean.dtype) for t in saved[2:])

    return run


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: Any, mean: Any, var: Any, save_mean: Any, save_rstd: Any, *rest: Any
) -> Any:
    op = aten.native_batch_norm_backward.default
    if not _differ(weight, mean):
        return op(grad, x, weight, mean, var, save_mean, save_rstd, *rest)
    grads = op(*_widest(grad, x, weight, mean, var, save_mean, save_rstd), *rest)
    return tuple(None if g is None else g.to(like.dtype) for g, like in zip(grads, (x, weight, weight), strict=True))


def _differ(weight: Any, mean: Any) -> bool:
    return weight is not None and mean is not None and weight.dtype != mean.dtype


def _widest(*tensors: Any) -> list[Any]:
    """Casts tensors to the widest dtype among them. None stays None."""
    dtype = functools.reduce(torch.promote_types, {x.dtype for x in tensors if x is not None})
    return [None if x is None else x.to(dtype) for x in tensors]


_NORMS: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _forward(aten.native_batch_norm.default),
    aten._native_batch_norm_legit_functional.default: _forward(aten._native_batch_norm_legit_functional.default),
    aten.native_batch_norm_backward.default: _backward,
}
"""Replacements for batch norms on a CPU. The CPU has no batch norm whose weight has a different floating-point dtype
than the running statistics. This combination occurs under `mixed_precision`: weights are used in bfloat16 or float16,
and the statistics, which the forward updates, stay in float32. The replacement computes in the wider of the two dtypes,
as PyTorch's own kernels do internally, and rounds its results once."""
