"""Makes safetensors files on an in-memory filesystem whose tensors are overwritten in place
(elastic/memory_checkpoint.py)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fzero.checkpoint.safetensors_format import Entry, header


class MemoryFile(NamedTuple):
    """A file whose tensors are memory-mapped: each flat tensor by name, its offset in the file, and the size of the
    file."""

    tensors: Mapping[str, torch.Tensor]
    offsets: Mapping[str, int]
    bytes: int


def reserve(path: Path, entries: Sequence[Entry]) -> MemoryFile:
    """Makes, or opens, a file for these tensors.

    An existing file with the same header is used with its content. A new file is filled with zeros, and gets its
    name only when it is complete.

    Raises:
        OSError: there is not enough space. Nothing has been given its final name then.
    """
    entries = sorted(entries, key=lambda e: -e.dtype.itemsize)  # each tensor is aligned to its own dtype
    head, offsets = header(entries, {})
    size = len(head) + sum(e.nbytes for e in entries)
    # An equal header means that the file has the same tensors at the same offsets, so its states can be continued from
    # and its pages need not be allocated again.
    is_new = not _begins(path, head, size)
    where = path.with_suffix(".new") if is_new else path
    fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if is_new:
            os.ftruncate(fd, 0)
            # Without allocated pages, a write to the mapping of a full filesystem would end the process with SIGBUS.
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, head, 0)
            os.replace(where, path)
        data = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    except OSError:
        if is_new:
            where.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    tensors = {e.name: data[offsets[e.name] : offsets[e.name] + e.nbytes].view(e.dtype) for e in entries}
    return MemoryFile(tensors, offsets, size)


def _begins(path: Path, head: bytes, size: int) -> bool:
    """Whether there is a file of this size that begins with this header."""
    try:
        with path.open("rb") as f:
            return f.read(len(head)) == head and os.fstat(f.fileno()).st_size == size
    except FileNotFoundError:
        return False
