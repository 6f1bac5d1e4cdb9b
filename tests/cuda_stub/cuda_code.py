"""Has Inductor generate its CUDA code without a GPU, and reads from the code what it would launch.

It takes a CUDA build of PyTorch with Triton (`pip install torch` on Linux, 5 GB in a virtual environment of its own)
and no driver. The GPU is an H200 by what Inductor asks of one; kernels are written and not compiled. Only `read` needs
no such build.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.fx as fx

from fzero.ir.program import Function
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import into_buffers


@dataclass(frozen=True)
class Code:
    """The wrapper that Inductor generates for a function, by what it does when it is called.

    Attributes:
        kernels: launches of Triton's kernels.
        externs: calls of libraries' kernels (matrix products, attention). A call may launch several.
        host: loops that the CPU runs in between; they wait for the GPU.
        allocated: tensors that it allocates.
        checked: arguments that it clones if they are not aligned to 16 bytes.
        strange: devices that it names and that are not the rank's.
    """

    kernels: int
    externs: int
    host: int
    allocated: int
    checked: int
    strange: tuple[str, ...]


def read(source: str, index: int) -> Code:
    """What generated code does.

    Args:
        source: as Inductor generated it.
        index: of the rank's device.
    """
    body = source[source.index("def call(") :]
    body = re.split(r"\n(?:runner = |def |if __name__)", body, maxsplit=1)[0]
    named = re.findall(r"cuda\.(?:_DeviceGuard|set_device)\((\d+)\)|get_raw_stream\((\d+)\)", source)
    named += re.findall(r"device\(type='cuda', index=(\d+)\)()|'cuda:(\d+)'", body)
    named += re.findall(r"DeviceProperties\(type='cuda', index=(\d+)()", source)
    found = sorted({int(number) for groups in named for number in groups if number})
    return Code(
        kernels=len(re.findall(r"\btriton_\w+\.run\(", body)),
        externs=len(re.findall(r"\bextern_kernels\.\w+\(|\btorch\.ops\.(?!inductor)\w+\.\w+\.\w+\(", body)),
        host=len(re.findall(r"\bcpp_fused\w*\(", body)),
        allocated=len(re.findall(r"\bempty_strided_\w+\(", body)),
        checked=body.count("copy_if_misaligned("),
        strange=tuple(f"cuda:{n}" for n in found if n != index),
    )


def generate(function: Function, graph: Recorded, index: int = 0) -> str:
    """The CUDA code of a function, as `fzero.runtime.build.inductor` has it compiled.

    Args:
        function: of a program that was traced without a GPU: attention is a CPU's operator, one call of a library.
        graph: its graph as it is to be compiled.
        index: of the rank's device.
    """
    _prepare()
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    device, sources = torch.device("cuda", index), list[str]()
    whole = into_buffers(graph, function.into)
    copy, env = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(whole.graph, env))
    for node in copy.nodes:
        node.meta.clear()
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}

    def inner(module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        made = compile_fx_inner(module, inputs, **kwargs)
        sources.append(made.source_code)  # type: ignore[union-attr]
        return made

    mode = FakeTensorMode(shape_env=ShapeEnv())
    settings = {
        "compile_threads": 1,
        "joint_graph_constant_folding": False,  # it computes constants on the device
        "force_disable_caches": True,
        "triton.autotune_at_compile_time": False,
        "use_static_triton_launcher": False,
    }
    with _pretended(index), config.patch(settings), tracing(TracingContext(mode)):
        with mode:
            inputs = [
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device)
                for v in (n.meta["val"] for n in whole.inputs)
            ]
        compile_fx(fx.GraphModule(dict(whole.constants), copy), inputs, inner_compile=inner, ignore_shape_env=True)
    return "\n".join(sources)


def can_generate() -> bool:
    """Whether this is a CUDA build of PyTorch, with Triton."""
    import importlib.util

    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


_H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 10**9,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    L2_cache_size=60 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    uuid="",
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=5120,
    is_integrated=0,
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
)


@functools.cache
def _prepare() -> None:
    """For the rest of the process: device guards that do nothing, and Triton's compiler for a GPU that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_device_interface=lambda: torch.cuda,
        )
    )


@contextlib.contextmanager
def _pretended(index: int) -> Iterator[None]:
    """While it lasts PyTorch finds an H200."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    import torch._subclasses.fake_tensor as fakes
    import torch.utils._triton as triton_utils
    from torch._inductor.async_compile import AsyncCompile

    def says(value: Any) -> Any:
        return lambda *args, **kwargs: value

    gpu, many = interface.CudaInterface, index + 1
    answers: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "is_available": says(True),
                "is_initialized": says(True),
                "device_count": says(many),
                "current_device": says(index),
                "get_device_properties": says(_H200),
                "get_device_capability": says((9, 0)),
                "get_device_name": says(_H200.name),
                "is_bf16_supported": says(True),
                "_lazy_init": says(None),
                "synchronize": says(None),
                "set_device": says(None),
                "_exchange_device": says(index),
                "_maybe_exchange_device": says(index),
                "get_rng_state": says(torch.zeros(16, dtype=torch.uint8)),
                "set_rng_state": says(None),
            },
        ),
        (
            gpu,
            {
                "get_device_properties": staticmethod(says(_H200)),
                "is_available": staticmethod(says(True)),
                "device_count": staticmethod(says(many)),
                "current_device": staticmethod(says(index)),
                "get_compute_capability": staticmethod(says(90)),
            },
        ),
        (
            gpu.Worker,
            {"get_device_properties": staticmethod(says(_H200)), "current_device": staticmethod(says(index))},
        ),
        (AsyncCompile, {"triton": says(None), "wait": says(None)}),
        (triton_utils, {"triton_hash_with_backend": says("none")}),
        (joint, {"lazy_init": says(None)}),  # which runs patterns on the device
        (post, {"lazy_init": says(None)}),
        (fakes, {"init_gpu_context": says(None)}),
    ]
    with contextlib.ExitStack() as stack:
        for owner, names in answers:
            for name, value in names.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, value))
        yield
