"""Copies tensors between the device and the host.

On a CPU, host and device are one memory, and a copy returns its sources. On CUDA, copies run on two streams, one per
direction. Every copy is a start, which returns immediately, and a wait. Nothing here depends on programs: a program
plans where values are stored, and when their memory may be overwritten.
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
    """A copy in flight.

    Attributes:
        filled: the destinations.
        sources: the sources.
        done: waits for the copy.
        hold: for a copy to the host, a wait of the device's stream that does not block the host.
    """

    filled: Tensors
    sources: Tensors
    done: Callable[[], None]
    hold: Callable[[], None] | None = None

    def wait(self) -> Tensors:
        """Waits for the copy and returns its destinations. The next operations of the host, or of the device, whichever
        memory they are in, may then read them."""
        self.done()
        return self.filled


class Copies(Protocol):
    """Copies between the device and the host of a mesh.

    A tensor of `into` that shares its memory with its source is left as it is. Without `into`, which is allowed only if
    host and device share one memory, the sources are returned.
    """

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy: ...

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy: ...

    def settle(self, written: Tensors) -> None:
        """Returns when the host may write to these tensors. On CUDA, a wait for a copy may block only the device, so
        the copy may still be reading or filling them."""


def copies(mesh: Mesh) -> Copies:
    """Returns the object that copies between device and host of a mesh. It is created on first use."""
    if mesh.context.copies is None:
        if mesh.device.type == "cuda":
            mesh.context.copies = Streams(mesh.device)
        elif mesh.unified_memory:
            mesh.context.copies = Unified()
        else:
            from fzero.memory.simulated_copies import LateCopies  # used by tests; most runs need not import it

            mesh.context.copies = LateCopies(mesh.timeout)
    return mesh.context.copies


class Unified:
    """Copies within one memory. Nothing moves, except into a tensor of the state that gets the value of another
    tensor."""

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        for source, target in moves(sources, into or sources):
            target.copy_(source)
        return PendingCopy(into or sources, sources, lambda: None)

    to_device_start = to_host_start

    def settle(self, written: Tensors) -> None:
        pass


class Streams:
    """Copies on a CUDA device, on two streams, so that transfers to the host do not queue behind transfers to the
    device.

    A copy begins after the device has finished all work that was issued before the start. By then the sources have been
    computed, and nothing reads the old values of `into` any more. The copy keeps its sources alive until it is dropped,
    after its wait.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # host memory of copies that only the device has waited for: these may still be in flight
        self._using: list[tuple[torch.cuda.Event, Tensors]] = []

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        filled, done = self._start(self._to_host, sources, into)
        return PendingCopy(filled, sources, done.synchronize, lambda: self._hold(done, filled))

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        filled, done = self._start(self._to_device, sources, into)
        return PendingCopy(filled, sources, lambda: self._hold(done, sources))

    def _hold(self, done: torch.cuda.Event, on_host: Tensors) -> None:
        """Makes the device, but not the host, wait for a copy that uses this host memory."""
        # For the host nothing has been waited for, so the memory that the copy uses is remembered until the event has
        # occurred.
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
        # The copy must see what the device was told to compute before it, and must not overwrite what the device still
        # reads.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in moves(sources, into):
                target.copy_(source, non_blocking=True)
        # blocking=True: the waiting thread sleeps instead of spinning, because updates on the host need its cores
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
        return into, done


def meet(some: Tensors, others: Tensors) -> bool:
    """Whether any tensor of one sequence overlaps in memory with one of the other, judged by the address ranges they
    span."""
    spans = [[(x.data_ptr(), x.data_ptr() + _extent(x)) for x in tensors if x.numel()] for tensors in (some, others)]
    # A false alarm only waits for a copy that would have been waited for later, so comparing spans is enough.
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def _extent(x: torch.Tensor) -> int:
    """Returns the bytes from the first element of a tensor to the end of its last one."""
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def moves(sources: Tensors, into: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the pairs of source and destination that have elements and do not share memory."""
    return [(s, t) for s, t in zip(sources, into, strict=True) if s.data_ptr() != t.data_ptr() and s.numel()]
