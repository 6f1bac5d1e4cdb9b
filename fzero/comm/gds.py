"""Reads and writes a GPU's memory from disk by GPUDirect Storage, past the host's, through kvikio where that is
installed.

Where the system cannot do it kvikio copies through buffers of its own: slower, and the same bytes.

Documentation: https://docs.rapids.ai/api/kvikio/stable/
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class GpuFile:
    """A file that is read to a GPU's memory and written from it. It is opened anew, and stays open until `close`.

    Args:
        path: of a file that is there.
    """

    def __init__(self, path: Path):
        import kvikio  # type: ignore[import-not-found]

        self._file: Any = kvikio.CuFile(path, "r+")

    def move(self, operation: str, flat: torch.Tensor, at: int) -> int:
        """Reads bytes of the file from `at` on to memory, or writes them from there; returns how many, when they are
        moved.

        Args:
            operation: "read" or "write".
            flat: uint8, contiguous, on a GPU.
            at: a multiple of a page, as the number of bytes is.
        """
        move = self._file.read if operation == "read" else self._file.write
        # the caller has threads of its own
        return move(flat, size=flat.numel(), file_offset=at, task_size=flat.numel())

    def close(self) -> None:
        self._file.close()
