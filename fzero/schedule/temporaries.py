"""Memory inside a call: what is alive between a function's inputs and its outputs, kernel by kernel."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from fzero.program.ir import Function
from fzero.program.segment import into_buffers
from fzero.schedule.fusion import kernels
from fzero.schedule.reuse import alive, best_order, lives, merged

_peaks: dict[object, weakref.WeakKeyDictionary[Function, int]] = {}


def temporaries(function: Function, backend: str = "inductor", device: torch.device | None = None) -> int:
    """Most bytes alive at once inside a call beyond its inputs and outputs, worked out once per function and backend.

    Outputs count from the kernel that makes them, so what is alive before that may take their place.

    Args:
        function: a function of a program; the buffers of `into` are inputs.
        backend: "inductor": values that kernels are fused over need no memory, kernels run in the order with the lowest peak, and memory is used again;
            "eager": every operation's result needs memory, in the order of the graph.
        device: of this machine, if it is to run there: without native bfloat16, operands and results of products exist in float32 as well.
    """
    known = _peaks.setdefault((backend, device), weakref.WeakKeyDictionary())
    if function not in known:
        graph = into_buffers(function.graph, function.into)
        if device is not None:
            from fzero.runtime.build import on_device  # what runs in float32 is for the runtime to say

            graph = on_device(graph, device)
        found = kernels(graph, backend)
        lived = lives(found, range(len(found.kernels))) if backend == "eager" else merged(found, best_order(found))
        returned = sum(found.sizes[b] for b in found.outputs - found.inputs)
        known[function] = max(0, max(alive(found, lived), default=0) - returned)
    return known[function]
