"""Allocates host memory, for leaves of a state that rest there and for copies of a program. Page-locked on CUDA."""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fzero._utils.cpu_affinity import node_of
from fzero._utils.units import size
from fzero.errors import TierError

if TYPE_CHECKING:
    from fzero.mesh import Mesh


SECTOR = 4096  # bytes: a page, and what is read from disk, or written there, begins and ends at a multiple of it
_EVERY, _GAP = 16 << 20, 68 << 10  # bytes


def padded(nbytes: int) -> int:
    """Bytes of a leaf on disk, rounded up to a sector: O_DIRECT needs aligned offsets, sizes and addresses.

    Example:
        >>> padded(0), padded(1), padded(4096)
        (0, 4096, 4096)
    """
    return -(-nbytes // SECTOR) * SECTOR


def host_offsets(sizes: Sequence[int]) -> list[int]:
    """The beginnings of leaves of these bytes that lie one behind the other in host memory, and where the last one
    ends: each at a sector, with a gap of 68 KiB behind every 16 MiB.

    An update reads and writes several leaves of one size at once: parameters, moments, gradients. They lie as far apart
    as all parameters take bytes; if that is a multiple of 2^28 the same cache sets hold all of them, and the update
    takes two to six times as long. With the gaps no multiple of 2^28 below 2^40 stays one.

    Example:
        >>> host_offsets([10, 1 << 24, 10])
        [0, 4096, 16850944, 16850954]
    """
    out, at, end = [], 0, 0
    for nbytes in sizes:
        out.append(at + at // _EVERY * _GAP)
        end = out[-1] + nbytes
        at += padded(nbytes)
    return [*out, end]


_HUGE = 2 << 20  # bytes of a huge page


def host_tensors(specs: Sequence[tuple[Sequence[int], torch.dtype]], mesh: Mesh) -> list[torch.Tensor]:
    """The tensors of a state that rest on the host, zeros, out of one allocation.

    Each has a storage of its own that begins at a page; the allocation is freed after the last of them.

    Args:
        specs: shape and dtype of each.
        mesh: whose device they are copied to and from.

    Memory: the tensors' bytes in whole pages, and 68 KiB for every 16 MiB of them. On a CPU a page takes none before it
        is written. On CUDA all pages are locked at once, huge ones where the system has them, of which there are 512
        times fewer, on the NUMA node of the device where the system names it.

    Raises:
        TierError: that much memory cannot be had, or not locked.

    Example:
        >>> import fzero as fz
        >>> weight, bias = host_tensors([((2, 3), torch.float32), ((3,), torch.bfloat16)], fz.make_mesh(data=1))
        >>> bias.data_ptr() - weight.data_ptr() == mmap.PAGESIZE, weight.sum().item()
        (True, 0.0)
    """
    *offsets, end = host_offsets([math.prod(shape) * dtype.itemsize for shape, dtype in specs])
    memory, out = _allocated(end, mesh.device, mesh.device.type == "cuda"), []
    for (shape, dtype), offset in zip(specs, offsets, strict=True):
        num = math.prod(shape)
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=num, offset=offset)
            if num
            else torch.empty(0, dtype=dtype, device="cpu")
        )
        out.append(flat.view(tuple(shape)))
    return out


def host_pool(nbytes: int, mesh: Mesh) -> torch.Tensor:
    """Bytes on the host, zeros, for what a program copies to and from the device or a disk; memory and errors as of
    `host_tensors`.

    In huge pages where the system has them: what a disk writes to them, or reads from them, is up to twice as fast as
    where small pages are scattered.
    """
    return host_bytes(nbytes, mesh.device)


def host_bytes(nbytes: int, device: torch.device, owner: str = "offload") -> torch.Tensor:
    """As `host_pool`, for copies to and from a device. PyTorch rounds page-locked memory of its own up to a power of
    two, and keeps it. `owner`: who asks, for errors."""
    return torch.frombuffer(_allocated(nbytes, device, True, owner), dtype=torch.uint8)[:nbytes]


def _allocated(nbytes: int, device: torch.device, huge: bool, owner: str = "offload") -> memoryview:
    try:
        mapped = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused(owner, nbytes, "cannot be allocated", str(error)) from error
    if huge and nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapped)
    if device.type == "cuda":
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        _prefer(address, len(mapped), node_of(device))
        runtime: Any = torch.cuda.cudart()
        if status := int(runtime.cudaHostRegister(address, len(mapped), 0)):
            raise _refused(owner, nbytes, "cannot be page-locked", f"cudaHostRegister: error {status}")
        # the process ends anyway, perhaps while something is copied
        weakref.finalize(view, _unlock, address, mapped).atexit = False
    return view


def _unlock(address: int, mapped: mmap.mmap) -> None:
    """Called when the last tensor has gone, with the mapping, which therefore has not."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


_INSTEAD = {
    "offload": "offload less of the state, or to disk",
    "checkpoint.save": "save with wait=True, which copies nothing",
    "step": "give smaller batches, or batches on the device",
}


def _refused(owner: str, nbytes: int, what: str, reason: str) -> TierError:
    limits = "`ulimit -v` and a container's limit bound what a process may have, `ulimit -l` what it may lock"
    return TierError(owner, f"{size(nbytes)} of host memory {what}", [reason], f"{_INSTEAD[owner]}; {limits}")


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
