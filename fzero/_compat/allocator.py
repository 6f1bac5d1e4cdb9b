"""Tunes glibc's allocator, which the whole process shares: large freed blocks are kept for the next allocation."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks for the next allocation instead of returning them to the system. The system
    would map and clear every page again, which takes up to ten times as long as the computation in this
    memory.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold = -3, -1  # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        # Blocks above this threshold are mapped separately and unmapped when they are freed. glibc limits the threshold
        # that adapts by itself to 32 MiB, less than the values of a step.
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def return_freed_memory() -> None:
    """Makes glibc return the freed memory that it keeps to the system: for use after something that will not be
    allocated again.
    """
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
