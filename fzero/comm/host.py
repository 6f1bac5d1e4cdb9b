"""The host tier: memory in which leaves of a state rest, and what copies between it and the device.

On a CPU host and device are one memory and a copy hands on what it is given. On CUDA host memory is page-locked, and
copies run on two streams, one each way. Every copy is a start, which returns at once, and a wait. Nothing here knows
programs: what lies where, and when it may be written again, is planned.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fzero.errors import TierError, message
from fzero.layout import apart
from fzero.mesh import Mesh
from fzero.units import size

Tensors = Sequence[torch.Tensor]


_HUGE = 2 << 20  # bytes of a huge page

# --- memory ---


def host_tensors(specs: Sequence[tuple[Sequence[int], torch.dtype]], mesh: Mesh) -> list[torch.Tensor]:
    """The tensors of a state that rest on the host, zeros, out of one allocation.

    Each has a storage of its own that begins at a page; the allocation is freed after the last of them.

    Args:
        specs: shape and dtype of each.
        mesh: whose device they are copied to and from.

    Memory: the tensors' bytes in whole pages, and 68 KiB for every 16 MiB of them. On a CPU a page takes none before it
        is written. On CUDA all pages are
    locked at once, on the NUMA node of the device where the system names it.

    Raises:
        TierError: that much memory cannot be had, or not locked.

    Example:
        >>> import fzero as fz
        >>> weight, bias = host_tensors([((2, 3), torch.float32), ((3,), torch.bfloat16)], fz.make_mesh(data=1))
        >>> bias.data_ptr() - weight.data_ptr() == mmap.PAGESIZE, weight.sum().item()
        (True, 0.0)
    """
    *offsets, end = apart([math.prod(shape) * dtype.itemsize for shape, dtype in specs])
    memory, out = _allocated(end, mesh), []
    for (shape, dtype), offset in zip(specs, offsets, strict=True):
        num = math.prod(shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=num, offset=offset) if num else torch.empty(0, dtype=dtype)
        out.append(flat.view(tuple(shape)))
    return out


def host_pool(nbytes: int, mesh: Mesh) -> torch.Tensor:
    """Bytes on the host, zeros, for what a program copies to and from the device or a disk; memory and errors as of
    `host_tensors`.

    In huge pages where the system has them: what a disk writes to them, or reads from them, is up to twice as fast as
    where small pages are scattered.
    """
    return torch.frombuffer(_allocated(nbytes, mesh, huge=True), dtype=torch.uint8)[:nbytes]


def _allocated(nbytes: int, mesh: Mesh, huge: bool = False) -> memoryview:
    try:
        mapped = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused(nbytes, "cannot be allocated", str(error)) from error
    if huge and nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapped)
    if mesh.device.type == "cuda":
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        _prefer(address, len(mapped), _numa_node(mesh.device))
        runtime: Any = torch.cuda.cudart()
        if status := int(runtime.cudaHostRegister(address, len(mapped), 0)):
            raise _refused(nbytes, "cannot be page-locked", f"cudaHostRegister: error {status}")
        # the process ends anyway, perhaps while something is copied
        weakref.finalize(view, _unlock, address, mapped).atexit = False
    return view


def _unlock(address: int, mapped: mmap.mmap) -> None:
    """Called when the last tensor has gone, with the mapping, which therefore has not."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def _refused(nbytes: int, what: str, reason: str) -> TierError:
    fix = (
        "offload less of the state, or to disk; `ulimit -v` and a container's limit bound what a process may have, "
        "`ulimit -l` what it may lock"
    )
    return TierError(message("offload", f"{size(nbytes)} of host memory {what}", [reason], fix))


def _numa_node(device: torch.device) -> int:
    """The NUMA node of a GPU, -1 where the system does not say."""
    gpu = torch.cuda.get_device_properties(device)
    return _node_of(
        Path(f"/sys/bus/pci/devices/{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    )


def _node_of(device: Path) -> int:
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _prefer(address: int, nbytes: int, node: int) -> None:
    """Has pages that are not there yet come from a NUMA node, as long as it has any. What the system refuses is left as
    it is."""
    number = {"x86_64": 237, "aarch64": 235}.get(platform.machine())  # of mbind, which no C library but libnuma has
    if node < 0 or number is None or platform.system() != "Linux":
        return
    bits = ctypes.c_uint64 * 16
    nodes, preferred = bits(*(1 << node % 64 if i == node // 64 else 0 for i in range(16))), 1
    ctypes.CDLL(None).syscall(
        number, ctypes.c_void_p(address), ctypes.c_size_t(nbytes), preferred, nodes, ctypes.c_ulong(64 * 16), 0
    )


# --- copies ---


@dataclass(frozen=True)
class Copy:
    """A copy under way: the tensors that it fills, those that it reads, what waits for it, and on CUDA the events at
    its begin and end."""

    filled: Tensors
    sources: Tensors
    done: Callable[[], None]
    span: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def wait(self) -> Tensors:
        """The tensors, filled: for what the host or the device, whichever they are on, does next."""
        self.done()
        return self.filled


class Copies(Protocol):
    """What copies between the device and the host of a mesh. Tensors of `into` that are their sources stay as they are.

    Without `into`, which only one memory for both allows, the sources are handed on.
    """

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> Copy: ...

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> Copy: ...

    def settle(self, written: Tensors) -> None:
        """Returns once the host may write these: on CUDA the wait for a copy to the device holds up the device alone,
        and the copy may still read them."""

    def reached(self) -> Callable[[], object] | None:
        """What returns once the device has done all that it was told before this call; None where it has."""


def copies(mesh: Mesh) -> Copies:
    """What copies between device and host of a mesh, made on first use."""
    if mesh.context.copies is None:
        mesh.context.copies = (
            Streams(mesh.device)
            if mesh.device.type == "cuda"
            else Unified()
            if mesh.unified_memory
            else Apart(mesh.timeout)
        )
    return mesh.context.copies


class Unified:
    """Of one memory: everything is where it should be, except for a leaf of the state that is to have another's
    value."""

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> Copy:
        for source, target in _moves(sources, into or sources):
            target.copy_(source)
        return Copy(into or sources, sources, lambda: None)

    to_device_start = to_host_start

    def settle(self, written: Tensors) -> None:
        pass

    def reached(self) -> None:
        pass


class Apart:
    """Of a CPU whose host and device are taken for two memories, so that tests find there what would go wrong on a GPU.

    A thread copies one after the other, late: what is read before its wait is not there yet, and what is written before
    it is copied as it then is. Until then `into` has every bit set, which is a NaN in every floating point format.

    Args:
        timeout: seconds that a wait waits.
        pause: called before every copy, in the thread.
    """

    def __init__(self, timeout: float, pause: Callable[[], object] = lambda: time.sleep(1e-3)):
        self._timeout = timeout
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_copy_all, args=(self._queue, pause), name="fzero-copies", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._queue, thread)

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> Copy:
        assert into is not None, "two memories"
        moves = _moves(sources, into)
        for _, target in moves:
            target.view(-1).view(torch.uint8).fill_(255)
        done: Future[None] = Future()
        self._queue.put((done, moves))
        return Copy(into, sources, lambda: self._wait(done))

    to_device_start = to_host_start

    def settle(self, written: Tensors) -> None:
        pass

    def reached(self) -> None:
        pass

    def _wait(self, done: Future[None]) -> None:
        try:
            done.result(self._timeout)
        except Exception as error:
            what = f"it was not done in {self._timeout:g} s" if not done.done() else f"{type(error).__name__}: {error}"
            fix = "go on from the last checkpoint: the state is lost"
            raise TierError(message("step", "a copy between host and device failed", [what], fix)) from error


_Job = tuple["Future[None]", Sequence[tuple[torch.Tensor, torch.Tensor]]]


@torch.no_grad()
def _copy_all(jobs: queue.SimpleQueue[_Job | None], pause: Callable[[], object]) -> None:
    """The thread of `Apart`: it ends when it reads a None."""
    while (job := jobs.get()) is not None:
        pause()
        _copy(*job)
        del job  # not alive until the next


def _copy(done: Future[None], moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    try:
        for source, target in moves:
            target.copy_(source)
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    """Ends the thread with its carrier, or with the process: one that the interpreter finds in the middle of a copy
    when it ends takes the process with it."""
    jobs.put(None)
    if thread is not threading.current_thread():  # which may be the one that collects garbage
        thread.join(1.0)


class Streams:
    """Of a CUDA device: two streams, so that what goes to the host does not queue behind what comes from there.

    A copy begins when the device has done all that it was told before the start: sources are made by then, and nobody
    reads what lay in `into`. The copy keeps its sources alive until it is dropped, after its wait.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # of copies to the device that were waited for and may not be done: what they read
        self._reading: list[tuple[torch.cuda.Event, Tensors]] = []

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> Copy:
        filled, begin, done = self._start(self._to_host, sources, into)
        return Copy(filled, sources, done.synchronize, (begin, done))

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> Copy:
        filled, begin, done = self._start(self._to_device, sources, into)

        def wait() -> None:
            torch.cuda.current_stream(self._device).wait_event(done)
            self._reading = [(e, read) for e, read in (*self._reading, (done, sources)) if not e.query()]

        return Copy(filled, sources, wait, (begin, done))

    def settle(self, written: Tensors) -> None:
        for done, read in self._reading:
            if meet(read, written):
                done.synchronize()

    def reached(self) -> Callable[[], object]:
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        return done.synchronize

    def _start(
        self, stream: torch.cuda.Stream, sources: Tensors, into: Tensors | None
    ) -> tuple[Tensors, torch.cuda.Event, torch.cuda.Event]:
        assert into is not None, "two memories"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        begin = torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        with torch.cuda.stream(stream):
            for source, target in _moves(sources, into):
                target.copy_(source, non_blocking=True)
        # the host sleeps meanwhile: its cores have updates to compute
        done = torch.cuda.Event(enable_timing=True, blocking=True)
        done.record(stream)
        return into, begin, done


def meet(some: Tensors, others: Tensors) -> bool:
    """Whether tensors have bytes of memory in common, by the ranges they span."""
    spans = [[(x.data_ptr(), x.data_ptr() + _extent(x)) for x in tensors if x.numel()] for tensors in (some, others)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _moves(sources: Tensors, into: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of which the second is not the first."""
    return [(s, t) for s, t in zip(sources, into, strict=True) if s.data_ptr() != t.data_ptr() and s.numel()]
