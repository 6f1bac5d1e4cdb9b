"""Replaces PyTorch's errors for full memory and for indices out of range by errors of fzero that explain them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroError, FzeroValueError, OutOfMemory

_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Substrings of the RuntimeErrors that PyTorch's allocators raise when memory is full, on CPUs too."""


def raise_out_of_memory(error: Exception, owner: str, advice: Callable[[], list[str]]) -> None:
    """Raises OutOfMemory in place of an error that says that memory is full; returns for any other error.

    Args:
        advice: returns lines that say what would take less memory.
    """
    # The CPU allocator of PyTorch raises a plain RuntimeError, which only its text distinguishes.
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _TEXTS)
    if not full or isinstance(error, FzeroError):
        return
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    try:
        lines = advice()
    except (FzeroError, RuntimeError, MemoryError):  # there may not be enough memory for the advice either
        lines = []
    fix = "apply the transform that lowers it most, or " if any(text.startswith("with fz.") for text in lines) else ""
    fix += "use a smaller batch; fz.compile(..., memory_budget='70GB') plans for as much"
    raise OutOfMemory(owner, "out of memory", [said, *lines], fix) from error


@contextmanager
def indices_explained(owner: str, batch: Any) -> Iterator[None]:
    """Wraps a run of a program on a batch. The batch is examined only if the run fails.

    Raises:
        FzeroValueError: for PyTorch's error of an index out of range; shows the ranges of the integers in the batch.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        said = next(iter(str(error).splitlines()), "").rstrip(" .")
        if not re.search("out of (bounds|range)", said):
            raise
        named = tree.with_paths(batch, "batch")
        held = [
            # On a GPU, an index out of range is a device-side assertion after which no operation works. Such errors do
            # not match the text above, so these values can be read.
            f"{path}: {tree.describe(x)}, from {x.min().item()} to {x.max().item()}"
            for path, x in named
            if x.numel() and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        ]
        fix = (
            "labels are from 0 to the number of classes - 1, or ignore_index; ids are less than the rows of their "
            "embedding"
        )
        raise FzeroValueError(owner, f"an index is out of range ({said})", held, fix) from error
