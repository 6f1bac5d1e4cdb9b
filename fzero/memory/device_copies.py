"""Copies tensors between the device and the host.

On a CPU host and device are one memory and a copy hands on what it is given. On CUDA copies run on two streams, one
each way. Every copy is a start, which returns at once, and a wait. Nothing here knows programs: they plan the places of
values, and when these may be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fzero.mesh import Mesh

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class PendingCopy:
    """A copy in flight: its destinations, its sources and a wait. A copy to the host also has a wait of the stream
    alone."""

    filled: Tensors
    sources: Tensors
    done: Callable[[], None]
    hold: Callable[[], None] | None = None

    def wait(self) -> Tensors:
        """The tensors, filled: for the next operations of the host or of the device, whichever they are on."""
        self.done()
        return self.filled


class Copies(Protocol):
    """Copies between the device and the host of a mesh. Tensors of `into` that are their sources stay as they are.

    Without `into`, which only one memory for both allows, the sources are handed on.
    """

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy: ...

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy: ...

    def settle(self, written: Tensors) -> None:
        """Returns once the host may write these: on CUDA the wait for a copy may hold up the device alone, and the copy
        may still read or fill them."""


def copies(mesh: Mesh) -> Copies:
    """The copier between device and host of a mesh, made on first use."""
    if mesh.context.copies is None:
        if mesh.device.type == "cuda":
            mesh.context.copies = Streams(mesh.device)
        elif mesh.unified_memory:
            mesh.context.copies = Unified()
        else:
            from fzero.memory.simulated_copies import LateCopies  # a double, which most runs need not load

            mesh.context.copies = LateCopies(mesh.timeout)
    return mesh.context.copies


class Unified:
    """Copies within one memory: nothing moves, except into a leaf of the state that gets another's value."""

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        for source, target in moves(sources, into or sources):
            target.copy_(source)
        return PendingCopy(into or sources, sources, lambda: None)

    to_device_start = to_host_start

    def settle(self, written: Tensors) -> None:
        pass


class Streams:
    """Copies on a CUDA device by two streams, so that transfers to the host do not queue behind those from there.

    A copy begins when the device has finished all work from before the start: sources are made by then, and nobody
    reads the old values of `into`. The copy keeps its sources alive until it is dropped, after its wait.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # host memory of copies that only the device has waited for, which may not be done
        self._using: list[tuple[torch.cuda.Event, Tensors]] = []

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        filled, done = self._start(self._to_host, sources, into)
        return PendingCopy(filled, sources, done.synchronize, lambda: self._hold(done, filled))

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        filled, done = self._start(self._to_device, sources, into)
        return PendingCopy(filled, sources, lambda: self._hold(done, sources))

    def _hold(self, done: torch.cuda.Event, on_host: Tensors) -> None:
        """Has the device wait for a copy that uses this memory of the host."""
        torch.cuda.current_stream(self._device).wait_event(done)
        self._using = [(e, used) for e, used in (*self._using, (done, on_host)) if not e.query()]

    def settle(self, written: Tensors) -> None:
        for done, used in self._using:
            if meet(used, written):
                done.synchronize()

    def _start(
        self, stream: torch.cuda.Stream, sources: Tensors, into: Tensors | None
    ) -> tuple[Tensors, torch.cuda.Event]:
        assert into is not None, "two memories"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in moves(sources, into):
                target.copy_(source, non_blocking=True)
        # the host sleeps meanwhile: its cores have updates to compute
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
        return into, done


def meet(some: Tensors, others: Tensors) -> bool:
    """Whether tensors have bytes of memory in common, by the ranges they span."""
    spans = [[(x.data_ptr(), x.data_ptr() + _extent(x)) for x in tensors if x.numel()] for tensors in (some, others)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def moves(sources: Tensors, into: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs whose tensors have elements, and different memory."""
    return [(s, t) for s, t in zip(sources, into, strict=True) if s.data_ptr() != t.data_ptr() and s.numel()]
