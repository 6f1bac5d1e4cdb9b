"""Tunes glibc's allocator, which a process has one of: large freed blocks stay for the next allocation."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Has glibc keep large freed blocks for the next allocation instead of returning them to the system, which maps and
    clears every page anew: up to ten times the time of what is computed in them."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold = -3, -1  # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def return_freed_memory() -> None:
    """Has glibc return what it keeps of freed memory to the system: after something that will not be allocated
    again."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
