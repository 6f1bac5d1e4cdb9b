"""Predicts the peak memory inside a call: the buffers that are alive between a subgraph's inputs and its outputs,
kernel by kernel.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from fzero.ir.program import Function
from fzero.mesh import AbstractMesh
from fzero.plan.inductor.fusion import Kernels, compiler, given_to, kernels
from fzero.plan.inductor.reuse import Lives, alive, best_order, lives, shared
from fzero.trace.device_decompositions import on_device

_peaks: dict[object, weakref.WeakKeyDictionary[Function, int]] = {}


def temporaries(function: Function, backend: str = "inductor", device: torch.device | None = None) -> int:
    """Returns the most bytes that are alive at once inside a call, beyond its inputs and outputs. Computed once per
    subgraph and backend.

    Outputs count from the kernel that makes them, so earlier temporaries may use their memory. Outputs that are
    written to a given buffer (`function.into`) count from the beginning.

    Args:
        function: a subgraph of a program.
        backend: "inductor" and "triton": values that are fused into a kernel need no memory, kernels run in the order
            with the lowest peak, and memory is reused; "eager": the result of every operation needs memory, in the
            order of the graph.
        device: the device that subgraphs of the device run on, with the decompositions of `on_device`. A CPU is this
            machine's.
    """
    known = _peaks.setdefault((backend, device), weakref.WeakKeyDictionary())
    if function not in known:
        ours = function.on == "device"
        graph = on_device(function.graph, device) if device is not None and ours else function.graph
        by = "inductor" if backend == "triton" and not ours else backend
        graph = given_to(by, graph, function.into)
        into = function.into if by == "inductor" else ()
        found = kernels(graph, by)
        on_gpu = device is not None and device.type == "cuda"
        known[function] = _eager(found, on_gpu) if by == "eager" else _compiled(found, graph.outputs, into)
    return known[function]


def temporaries_on(
    mesh: AbstractMesh, backend: str = "inductor", device: torch.device | None = None
) -> Callable[[Function], int]:
    """Returns `temporaries` for the subgraphs that a mesh's devices compute."""
    return functools.partial(temporaries, backend=compiler(mesh, backend), device=device)


def _eager(found: Kernels, on_gpu: bool) -> int:
    lived = lives(found, range(len(found.kernels)))
    return _beyond(found, lived, found.outputs, [on_gpu * kernel.inside for kernel in found.kernels])


def _compiled(found: Kernels, outputs: Sequence[fx.Node], into: Sequence[int]) -> int:
    """Returns the temporaries of a compiled subgraph. It computes a result in the buffer that is given for it if the
    compiler allocates the result's memory, and only for that result; otherwise it copies the result there
    (runtime/build/cpu/cpp_kernels.py).
    """
    order = best_order(found)
    first, lived = shared(found, order)
    places = [found.buffers[node] for node in outputs]
    count = Counter(first[b] for b in places if b in first)
    foreign = {b for kernel in found.kernels for b in kernel.allocated}
    given = {
        first[places[i]]
        for i in into
        if places[i] in first and count[first[places[i]]] == 1 and first[places[i]] not in foreign
    }
    returned = {b for i, b in enumerate(places) if i not in into}
    return _beyond(found, {b: life for b, life in lived.items() if b not in given}, returned, [0] * len(order))


def _beyond(found: Kernels, lived: Lives, returned: set[fx.Node] | frozenset[fx.Node], inside: Sequence[int]) -> int:
    """Returns the peak of the bytes alive plus those inside each step, beyond the returned values."""
    peak = max(map(operator.add, alive(found, lived), inside), default=0)
    return max(0, peak - sum(found.sizes[b] for b in returned - found.inputs))
