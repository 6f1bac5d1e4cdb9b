"""Defines the out-of-memory error, in a separate file because it is also PyTorch's error."""

from __future__ import annotations

import torch

from fzero.errors import FzeroError


class OutOfMemory(FzeroError, torch.OutOfMemoryError):
    """A memory was full while a step ran; the message says what would take less. The state of a training step is
    lost.

    Example:
        >>> import fzero as fz
        >>> issubclass(fz.errors.OutOfMemory, RuntimeError)
        True
    """
