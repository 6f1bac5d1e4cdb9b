"""Defines the error of a full memory, apart from the others: it is PyTorch's error too."""

from __future__ import annotations

import torch

from fzero.errors import FzeroError


class OutOfMemory(FzeroError, torch.OutOfMemoryError):
    """A memory that was full while a step ran, with what would take less. The state of a training step is lost.

    Example:
        >>> import fzero as fz
        >>> issubclass(fz.errors.OutOfMemory, RuntimeError)
        True
    """
