"""The only file that touches private PyTorch names. Each is tested against every supported release (tests/test_compat.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["DATA_DEPENDENT", "FakeTensor", "FakeTensorMode", "TorchDispatchMode"]

DATA_DEPENDENT: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises when Python asks for its value."""


@contextmanager
def no_modes() -> Iterator[None]:
    """Leaves every dispatch mode for the body: work aside, in the middle of a trace."""
    with _disable_current_modes():
        yield


def functorch_active() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp) is running around the caller."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def min_cut(joint: fx.GraphModule, num_outputs: int, recompute: set[fx.Node]) -> set[str]:
    """Names of the forward values that the min-cut partitioner would save for the backward of a joint graph.

    The joint graph's inputs are `primals_i` and `tangents_i`, its outputs the forward's `num_outputs` followed by the
    gradients. Nodes in `recompute` are never saved.
    """
    for node in recompute:
        node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
    forward, _ = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_outputs)
    returned = forward.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    return {node.name for node in returned[num_outputs:] if isinstance(node, fx.Node)}


def inductor_compile(graph: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A graph of ATen operations as an Inductor artifact without guards: about 11 us a call, where a compiled function takes 59."""
    from torch._inductor import standalone_compile

    return standalone_compile(graph, list(example_inputs), dynamic_shapes="from_example_inputs")


def native_bf16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 run at full speed on the device, or crawl (../docs/design.md, bf16 on a CPU)."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.backends.mkldnn.enabled)
    return True


def default_store() -> dist.Store:
    """The key-value store that the processes met at: messages without a collective."""
    return dist.distributed_c10d._get_default_store()


def all_gather(whole: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    """Starts a gather of flat shards. Returns the work to wait for. 2.13 renamed the function."""
    return _ALL_GATHER(whole, shard, group=group, async_op=True)


def reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, op: Any, group: Any) -> Any:
    """Starts a reduction that leaves each rank its flat shard. Returns the work to wait for. 2.13 renamed the function."""
    return _REDUCE_SCATTER(shard, whole, op=op, group=group, async_op=True)


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def coalesced(group: Any, device: torch.device) -> Iterator[list[Any]]:
    """A list to append works to. On CUDA the collectives of the body become one, and after it the list holds that one's work."""
    works: list[Any] = []
    if device.type != "cuda":
        yield works
        return
    with dist.distributed_c10d._coalescing_manager(group=group, device=device, async_ops=True) as manager:
        yield works
    works[:] = [manager]


def is_view(op: Any) -> bool:
    """Whether an operator returns a view of its first argument."""
    return isinstance(op, torch._ops.OpOverload) and op.is_view


def is_operator(op: Any) -> bool:
    """Whether the target of a graph's node is an operator, and not a Python function."""
    return isinstance(op, torch._ops.OpOverload)
