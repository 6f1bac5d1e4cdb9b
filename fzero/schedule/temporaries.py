"""Memory inside a call: what is alive between a function's inputs and its outputs, kernel by kernel."""

from __future__ import annotations

import weakref

import torch.fx as fx

from fzero.program.ir import Function
from fzero.program.segment import into_buffers
from fzero.schedule.fusion import Kernels, kernels

_peaks: dict[str, weakref.WeakKeyDictionary[Function, int]] = {}


def temporaries(function: Function, backend: str = "inductor") -> int:
    """Most bytes alive at once inside a call beyond its inputs and outputs, worked out once per function and backend.

    Args:
        function: a function of a program.
        backend: "inductor": intermediate values of fused kernels need no memory; "eager": every operation's result does.
    """
    known = _peaks.setdefault(backend, weakref.WeakKeyDictionary())
    if function not in known:
        known[function] = _peak(kernels(into_buffers(function.graph, function.into), backend))
    return known[function]


def _peak(found: Kernels) -> int:
    last: dict[fx.Node, int] = {}
    for i, kernel in enumerate(found.kernels):
        for buffer in (*kernel.reads, *kernel.writes):
            last[buffer] = i
    given = found.inputs | set(found.outputs)
    returned = sum(found.sizes[b] for b in set(found.outputs) - found.inputs)
    alive, out, peak = 0, 0, 0
    for i, kernel in enumerate(found.kernels):
        for buffer in kernel.writes:
            if buffer not in given:
                alive += found.sizes[buffer]
            elif buffer not in found.inputs:
                out += found.sizes[buffer]
        peak = max(peak, alive + out - returned)
        alive -= sum(found.sizes[b] for b in (*kernel.reads, *kernel.writes) if last[b] == i and b not in given)
    return peak
