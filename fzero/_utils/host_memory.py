"""Allocates host memory for tensors of a state that are stored there and for copies of a program. Page-locked on
CUDA.
"""

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


SECTOR = 4096  # bytes: a page; reads from and writes to a disk begin and end at a multiple of it
_EVERY, _GAP = 16 << 20, 68 << 10  # bytes


def padded(nbytes: int) -> int:
    """Returns the bytes of a tensor on disk, rounded up to a sector: O_DIRECT needs aligned offsets, sizes and
    addresses.

    Example:
        >>> padded(0), padded(1), padded(4096)
        (0, 4096, 4096)
    """
    return -(-nbytes // SECTOR) * SECTOR


def host_offsets(sizes: Sequence[int]) -> list[int]:
    """Returns the offsets of tensors with these sizes that lie one after another in host memory, and where the last
    one ends: each begins at a sector, with a gap of 68 KiB after every 16 MiB.

    An update reads and writes several tensors of one size at once: parameters, moments, gradients. Their distance is
    the size of all parameters. If that is a multiple of 2^28, the same cache sets hold all of them, and the update
    takes two to six times as long. With the gaps, no multiple of 2^28 below 2^40 stays one.

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
    """Returns the tensors of a state that are stored on the host, zero-initialized, from one allocation.

    Each has a separate storage that begins at a page; the allocation is freed after the last of them.

    Args:
        specs: shape and dtype of each tensor.
        mesh: the mesh whose device they are copied to and from.

    Memory: the tensors' bytes in full pages, and 68 KiB for every 16 MiB of them. On a CPU a page takes no memory
        before it is written. On CUDA all pages are locked at once: huge pages if the system has them, of which there
        are 512 times fewer, and on the NUMA node of the device if the system names it.

    Raises:
        TierError: if this much memory cannot be allocated, or not locked.

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
    """Returns bytes on the host, zero-initialized, for what a program copies to and from the device or a disk. Memory
    and errors are as for `host_tensors`.

    The memory consists of huge pages if the system has them: a disk reads and writes them up to twice as fast as
    scattered small pages.
    """
    return host_bytes(nbytes, mesh.device)


def host_bytes(nbytes: int, device: torch.device, owner: str = "offload") -> torch.Tensor:
    """Allocates as `host_pool` does, for copies to and from a device. (PyTorch's own page-locked memory is rounded up
    to a power of two, and never released.) `owner`: the caller, for errors.
    """
    return torch.frombuffer(_allocated(nbytes, device, True, owner), dtype=torch.uint8)[:nbytes]


def _allocated(nbytes: int, device: torch.device, huge: bool, owner: str = "offload") -> memoryview:
    """Returns zero-initialized host memory from the system, in huge pages if asked for and available, and page-locked
    on CUDA.
    """
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
        # the process ends anyway, perhaps while something is still being copied
        weakref.finalize(view, _unlock, address, mapped).atexit = False
    return view


def _unlock(address: int, mapped: mmap.mmap) -> None:
    """Unlocks the memory when the last tensor is gone. It gets the mapping as an argument, so the mapping still
    exists.
    """
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
    """Makes pages that are not allocated yet come from a NUMA node, as long as it has any. If the system rejects the
    request, nothing changes.
    """
    # of mbind, which no C library but libnuma provides
    number = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
    if node < 0 or number is None or platform.system() != "Linux":
        return
    bits = ctypes.c_uint64 * 16
    nodes, preferred = bits(*(1 << node % 64 if i == node // 64 else 0 for i in range(16))), 1
    ctypes.CDLL(None).syscall(
        number, ctypes.c_void_p(address), ctypes.c_size_t(nbytes), preferred, nodes, ctypes.c_ulong(64 * 16), 0
    )
