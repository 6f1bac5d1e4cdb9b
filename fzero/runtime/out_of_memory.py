"""Tells errors of a memory that is full, and says what would fit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fzero.errors import FzeroError, OutOfMemory

_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")
"""Parts of the texts of RuntimeErrors that PyTorch's allocators raise, on CPUs too."""


def raise_out_of_memory(error: Exception, owner: str, advice: Callable[[], list[str]]) -> None:
    """Raises in place of an error that says that memory is full; returns for any other. `advice`: lines on what takes
    less."""
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _TEXTS)
    if not full or isinstance(error, FzeroError):
        return
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    try:
        lines = advice()
    except (FzeroError, RuntimeError, MemoryError):  # there is no memory for it either
        lines = []
    fix = "apply what lowers it most, or " if any(text.startswith("with fz.") for text in lines) else ""
    fix += "use a smaller batch; fz.compile(..., memory_budget='70GB') plans for as much"
    raise OutOfMemory(owner, "out of memory", [said, *lines], fix) from error
