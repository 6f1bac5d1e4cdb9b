"""Copies batches from pageable memory to a GPU through pinned (page-locked) buffers, so that the host does not wait.

When CUDA reads pageable memory, it may block the host until the device is ready. A copy from pinned memory is only
enqueued.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from fzero._utils.host_memory import host_bytes, host_offsets, padded
from fzero.errors import TierError

logger = logging.getLogger("fzero")
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
_DEPTH = 4  # number of steps by which the host may run ahead of the device before it waits for a buffer


class Staged:
    """A ring of pinned buffers for a device, each as large as the largest batch so far.

    Memory: pinned host memory for four batches.
    """

    def __init__(self, device: torch.device):
        self._device, self._next = device, 0
        self._buffers: Sequence[torch.Tensor] = ()
        self._copied: list[torch.cuda.Event | None] = [None] * _DEPTH

    def __call__(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns contiguous copies of the leaves on the device, ready for the next kernels on the current stream."""
        *offsets, end = host_offsets([x.nbytes for x in leaves])
        end = padded(end)
        if not self._buffers or end > len(self._buffers[0]):
            # The old buffers are freed below, and the device may still read them.
            for number in range(_DEPTH):
                self._wait(number)
            self._buffers = self._locked(end).chunk(_DEPTH) if end else [_EMPTY] * _DEPTH
        number, self._next = self._next, (self._next + 1) % _DEPTH
        # The buffer that was used `_DEPTH` steps ago. This waits only if the host is that far ahead of the device.
        self._wait(number)
        out = []
        for x, offset in zip(leaves, offsets, strict=True):
            place = self._buffers[number][offset : offset + x.nbytes].view(x.dtype).view(x.shape)
            out.append(place.copy_(x).to(self._device, non_blocking=True))
        # After the last copy: until this event the device may still read the buffer.
        event = self._copied[number] = torch.cuda.Event()
        event.record()
        return out

    def _locked(self, nbytes: int) -> torch.Tensor:
        """Allocates memory for all buffers. If it cannot be pinned, pageable memory is used instead."""
        try:
            return host_bytes(_DEPTH * nbytes, self._device, "step")
        except TierError as error:
            logger.warning("fzero.step: batches are copied from pageable memory, which may block the host: %s", error)
            return torch.empty(_DEPTH * nbytes, dtype=torch.uint8, device="cpu")

    def _wait(self, number: int) -> None:
        """Waits until the device has read a buffer."""
        copied = self._copied[number]
        if copied is not None and not copied.query():
            copied.synchronize()
