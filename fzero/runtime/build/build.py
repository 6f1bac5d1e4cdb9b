"""Makes subgraphs executable: the eager backend runs them as they are, Inductor compiles each distinct subgraph
once."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fzero import random
from fzero._compat import compat
from fzero.errors import FzeroValueError
from fzero.ir.program import Function
from fzero.mesh import Mesh
from fzero.ops import block_quantization
from fzero.plan.cost import check_backend_name
from fzero.runtime.build import inductor
from fzero.runtime.build.calling_convention import as_called
from fzero.runtime.build.warm_up import WarmUp
from fzero.trace.device_decompositions import by_operation, on_device, on_host, substituted
from fzero.trace.guards import deterministic_mode
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import into_buffers


def check_backend(backend: str, device: torch.device) -> None:
    """Raises if a backend cannot run on this machine."""
    check_deterministic(device)
    check_backend_name("compile", backend)
    if backend == "inductor" and device.type == "cpu" and not has_compiler():
        raise FzeroValueError(
            "compile",
            "the inductor backend needs a C++ compiler on the CPU, and there is none",
            fix="install g++ or clang, or use backend='eager'",
        )


def check_deterministic(device: torch.device) -> None:
    """Raises if PyTorch's deterministic algorithms are on, but matrix products on the device are not configured for
    them."""
    why = deterministic_mode.unsettled(
        device.type, deterministic_mode.setting(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    )
    if why is not None:
        fix = (
            f"start the process with CUBLAS_WORKSPACE_CONFIG={deterministic_mode.WORKSPACES[0]}, or call "
            f"torch.use_deterministic_algorithms(True, warn_only=True), which does not check matrix products"
        )
        what = "torch.use_deterministic_algorithms is on, with which cuBLAS raises at matrix products"
        raise FzeroValueError("compile", what, [why], fix)


def has_compiler() -> bool:
    """Whether this machine has the C++ compiler that Inductor uses for its CPU code: `CXX` if it is set, else g++.

    Example:
        >>> isinstance(has_compiler(), bool)
        True
    """
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def build(
    functions: Mapping[str, Function], backend: str, mesh: Mesh, title: str = ""
) -> dict[str, Callable[..., Any]]:
    """Returns the subgraphs as functions that the ops of a program call (see `calling_convention.as_called`). All ranks
    of the mesh call it together.

    With the inductor backend each subgraph is compiled once: what an earlier run has compiled is loaded from the cache
    (runtime/build/artifact_cache.py), and the rest is divided among the ranks that share a cache. The first rank shows
    its progress, and the log `fzero` has a line for each subgraph, at level INFO. See
    docs/internals/compilation-cache.md.

    Args:
        functions: the subgraphs, by name.
        backend: "inductor" or "eager".
        mesh: the mesh whose device they run on.
        title: the program that they belong to, for the progress line.

    Communication: a few hundred bytes between the ranks.

    Raises:
        FzeroError: a subgraph cannot be compiled.
        DivergenceError: a rank did not deliver the subgraphs it had to compile; names the rank.
    """
    found = _by_device(functions, backend, mesh)
    # Sorted, because the ranks compile together: all of them must go through the devices in the same order.
    for device in sorted(found.to_compile, key=str):
        found.built.update(inductor.Compilation(found.compiled_on(device), mesh, device, title).wait())
    return {name: found.built[name] for name in functions}


def build_in_background(
    functions: Mapping[str, Function], mesh: Mesh, title: str
) -> tuple[dict[str, Callable[..., Any]], WarmUp | None]:
    """Like `build` with the inductor backend, for a mesh of CPUs, but returns without waiting for compilations.
    Subgraphs that are missing in the cache of any rank run eagerly until the warm-up replaces them. The warm-up is None
    if all ranks have found everything in their caches."""
    found = _by_device(functions, "inductor", mesh)
    compilation = inductor.Compilation(found.compiled_on(mesh.device), mesh, mesh.device, title)
    warm_up = WarmUp(compilation, mesh, title)
    eager = {name: _eagerly(*x) for name, x in found.to_compile[mesh.device].items()}
    built = found.built | eager | warm_up.advance()
    return {name: built[name] for name in functions}, None if warm_up.done else warm_up


class _ByDevice(NamedTuple):
    """Subgraphs that are ready because they are not worth compiling, and by device those to compile, with their
    graphs."""

    built: dict[str, Callable[..., Any]]
    to_compile: dict[torch.device, dict[str, tuple[Function, Recorded]]]

    def compiled_on(self, device: torch.device) -> dict[str, tuple[Function, Recorded]]:
        """Returns the subgraphs of a device with the graphs that a compiler gets."""
        expanded = _expanded(device)
        return {name: (f, substituted(graph, expanded)) for name, (f, graph) in self.to_compile[device].items()}


def _by_device(functions: Mapping[str, Function], backend: str, mesh: Mesh) -> _ByDevice:
    check_deterministic(mesh.device)  # the switch may have changed since the step was compiled
    found = _ByDevice({}, defaultdict(dict))
    for name, function in functions.items():
        device = mesh.device if function.on == "device" else torch.device("cpu")
        graph = on_device(function.graph if device == mesh.device else on_host(function.graph), device)
        if backend == "eager" or not _worth_compiling(graph, device):
            found.built[name] = _eagerly(function, graph)
        else:
            found.to_compile[device][name] = function, graph
    return found


def _eagerly(function: Function, graph: Recorded) -> Callable[..., Any]:
    return as_called(function, by_operation(into_buffers(graph, function.into)))


def _expanded(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """Returns the decompositions of our own operators that a compiler gets instead of them. For the CPU, random draws
    are not among them: `random.RULES` generates their code."""
    return block_quantization.DECOMPOSITIONS | ({} if device.type == "cpu" else random.DECOMPOSITIONS)


def _worth_compiling(graph: Recorded, device: torch.device) -> bool:
    """Whether compiling a subgraph pays. On a CPU it does not for scalars, or for a single operation; on a GPU, where
    each operation is a kernel launch, it does for every subgraph with more than one operation."""
    values = [n.meta.get("val") for n in graph.graph.nodes]
    operations = [n for n in graph.graph.nodes if n.op == "call_function" and not compat.is_view(n.target)]
    large = device.type != "cpu" or any(isinstance(v, torch.Tensor) and v.numel() > 1024 for v in values)
    return len(operations) > 1 and large
