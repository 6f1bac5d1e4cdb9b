"""Functions made executable: by the eager backend as they are, by Inductor as compiled artifacts, once per distinct function."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx

from fzero import compat
from fzero.errors import FzeroValueError, message
from fzero.mesh import Mesh
from fzero.program.ir import Function
from fzero.program.record import Recorded, Recorder
from fzero.program.segment import into_buffers
from fzero.random import DECOMPOSITIONS
from fzero.runtime import inductor
from fzero.runtime.execute import as_called

BACKENDS = ("inductor", "eager")
aten = torch.ops.aten


def check_backend(backend: str, device: torch.device) -> None:
    """Raises if a backend cannot run here."""
    if backend not in BACKENDS:
        raise FzeroValueError(message("compile", f"unknown backend {backend!r}", fix=f"one of {', '.join(map(repr, BACKENDS))}"))
    if backend == "inductor" and device.type == "cpu" and not has_compiler():
        raise FzeroValueError(
            message("compile", "the inductor backend needs a C++ compiler on the CPU, and there is none", fix="install g++ or clang, or use backend='eager'")
        )


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler for Inductor's CPU code."""
    import os

    return any(shutil.which(c) for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c)


def build(
    functions: Mapping[str, Function], backend: str, mesh: Mesh, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, Callable[..., Any]]:
    """The functions as a program's lines call them (see `execute.as_called`). All ranks of the mesh call it together.

    With the inductor backend a function is compiled once: what an earlier run compiled is loaded (runtime/cache.py), the rest is divided
    among the ranks that share a cache. See docs/build.md.

    Args:
        functions: by name.
        backend: "inductor" or "eager".
        mesh: whose device they run on.
        progress: called with the number of functions this rank has compiled, the number it compiles in all, and the name of the last. By default
            a line in the log `fzero`, at level INFO.

    Communication: a few hundred bytes through the store.

    Raises:
        FzeroError: a function cannot be compiled.
        DivergenceError: naming the rank that did not deliver what it had to compile.
    """
    built: dict[str, Callable[..., Any]] = {}
    waiting: dict[str, tuple[Function, Recorded]] = {}
    for name, function in functions.items():
        graph = on_device(function.graph, mesh.device)
        if backend == "eager" or not _worth_compiling(graph):
            built[name] = as_called(function, into_buffers(graph, function.into).module().forward)
        else:
            waiting[name] = function, _with_graph(graph, {**DECOMPOSITIONS})
    if waiting:
        built |= inductor.compiled(waiting, mesh, progress)
    return {name: built[name] for name in functions}


def on_device(graph: Recorded, device: torch.device) -> Recorded:
    """The graph as it should run on a device: matrix products in bfloat16 in float32 where the device has no native ones.

    A product of bfloat16 matrices has float32 sums wherever it runs; computing it from upcast operands and rounding once is the same
    arithmetic. On a CPU without bfloat16 instructions it is also 3 to 80 times faster.
    """
    if compat.native_bf16(device) or not any(n.target in _MATMULS and _is_bf16(n) for n in graph.graph.nodes):
        return graph
    return _with_graph(graph, {op: _in_float32(op) for op in _MATMULS})


_MATMULS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def _is_bf16(node: fx.Node) -> bool:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.dtype is torch.bfloat16


def _in_float32(op: Any) -> Callable[..., Any]:
    def up(x: Any) -> Any:
        return x.float() if isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 else x

    def run(*args: Any, **kwargs: Any) -> Any:
        low = any(isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 for a in args)
        out = op(*map(up, args), **{k: up(v) for k, v in kwargs.items()})
        if not low:
            return out
        if isinstance(out, torch.Tensor):
            return out.to(torch.bfloat16)
        stays = 1 if op is aten._scaled_dot_product_flash_attention_for_cpu.default else len(out)  # its logsumexp is float32
        return tuple(x.to(torch.bfloat16) if i < stays and isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x for i, x in enumerate(out))

    return run


def _with_graph(graph: Recorded, rules: dict[Any, Callable[..., Any]]) -> Recorded:
    """The graph with each operation of `rules` replaced by what its rule does."""
    if not any(n.target in rules for n in graph.graph.nodes):
        return graph
    places = graph.inputs
    recorder = Recorder("compile")

    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            run: Callable[..., Any] = rules.get(target) or target
            return run(*args, **kwargs)

    with compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=_real(v, graph)) for v in (p.meta["val"] for p in places)]
        for fake, place in zip(fakes, places, strict=True):
            recorder.input(fake, place.name)
        module = graph.module()
        for name, value in graph.constants.items():
            recorder.constants[name] = value
            recorder.track(fake := mode.from_tensor(value), recorder.graph.create_node("get_attr", name))
            setattr(module, name, fake)
        with recorder:
            outputs = Interpreter(module).run(*fakes)
    return recorder.finish(outputs)


def _real(value: torch.Tensor, graph: Recorded) -> torch.device:
    if value.device.type != "meta":
        return value.device
    devices = {v.device for n in graph.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor) and v.device.type != "meta"}
    return next(iter(devices), torch.device("cpu"))


def _worth_compiling(graph: Recorded) -> bool:
    """A function of scalars, or of one operation, gains nothing from a compiler."""
    values = [n.meta.get("val") for n in graph.graph.nodes]
    operations = [n for n in graph.graph.nodes if n.op == "call_function" and not compat.is_view(n.target)]
    return len(operations) > 1 and any(isinstance(v, torch.Tensor) and v.numel() > 1024 for v in values)
