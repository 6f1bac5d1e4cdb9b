"""Makes safetensors files on a filesystem in memory, whose tensors are overwritten in place
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
    """A file whose tensors are memory: each flat, by name, and where it lies in the file; and the file's size."""

    tensors: Mapping[str, torch.Tensor]
    offsets: Mapping[str, int]
    bytes: int


def reserve(path: Path, entries: Sequence[Entry]) -> MemoryFile:
    """A file for these tensors. One that is there and has the same header is taken as it is; a new one is zeros, and
    has its name when it is complete.

    Raises:
        OSError: not enough space, before anything has its name.
    """
    entries = sorted(entries, key=lambda e: -e.dtype.itemsize)  # each tensor is aligned to its own dtype
    head, offsets = header(entries, {})
    size = len(head) + sum(e.nbytes for e in entries)
    is_new = not _begins(path, head, size)
    where = path.with_suffix(".new") if is_new else path
    fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if is_new:
            os.ftruncate(fd, 0)
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
    """Whether there is a file of this size with this header."""
    try:
        with path.open("rb") as f:
            return f.read(len(head)) == head and os.fstat(f.fileno()).st_size == size
    except FileNotFoundError:
        return False
