"""Stores tensors on disk: allocates them in a rank's scratch files, and reads and writes them, at once or in pieces,
with bounded memory.

A tensor on disk is represented by a meta tensor of its stored shape with an `Extent`: its bytes start at `offset` and
number `nbytes` without padding. Extents begin at multiples of the alignment, and tensors are read and written in
multiples of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fzero.errors import FzeroValueError, TierError
from fzero.memory.scratch_allocation import ALIGNMENT, PIECE, aligned, check, padded
from fzero.memory.scratch_files import ScratchFiles, Transfer
from fzero.mesh import Mesh
from fzero.sharding.layout import Extent, Leaf, extent_of, leaf_of, place

__all__ = [
    "ALIGNMENT",
    "PIECE",
    "ScratchFiles",
    "Transfer",
    "aligned",
    "check",
    "load",
    "padded",
    "pieces",
    "rest",
    "store",
    "write_pieces",
]

BUFFER = 1 << 24  # bytes of each piece in which a tensor is read or written if it is not needed at once


def rest(
    leaves: Sequence[Leaf],
    mesh: Mesh,
    directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
) -> list[torch.Tensor]:
    """Allocates this rank's shards of leaves on disk, filled with zeros.

    Returns placed meta tensors, which share one range of files that lives as long as any of them.

    Args:
        leaves: in their order on disk. Consecutive ones can be read with one read.
        mesh: determines which shards belong to this rank.
        directories: as in `ScratchFiles`.

    Memory: none.

    Raises:
        FzeroValueError: the directories cannot hold the leaves; shows the bytes they need and have.

    Example:
        >>> import tempfile
        >>> from fzero.sharding.layout import Layout
        >>> leaf = Leaf("params['w']", "params", (2, 3), Layout(torch.float32, tier="disk"))
        >>> (w,) = rest([leaf], Mesh({"data": 1}, 0, torch.device("cpu")), tempfile.gettempdir())
        >>> store(torch.ones(2, 3), w)
        >>> w.device, load(w).sum()
        (device(type='meta'), tensor(6.))
    """
    tensors = [torch.empty(leaf.stored_shape(mesh), dtype=leaf.dtype, device="meta") for leaf in leaves]
    files, offset = ScratchFiles(directories, sum(padded(t.nbytes) for t in tensors)), 0
    for tensor, leaf in zip(tensors, leaves, strict=True):
        place(tensor, leaf, mesh, Extent(files, offset, tensor.nbytes))
        offset += padded(tensor.nbytes)
    return tensors


def load(tensor: torch.Tensor) -> torch.Tensor:
    """Reads the value of a tensor on disk into a new tensor in host memory.

    Raises:
        TierError: a read that failed.
    """
    extent = _extent(tensor)
    flat = aligned(padded(extent.nbytes))
    extent.files.read([(extent.offset, flat)]).wait()
    return flat[: extent.nbytes].view(tensor.dtype).view(tensor.shape)


def store(value: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes a value in host memory to a tensor on disk of the same shape and dtype. Returns when it has been written.

    Memory: 32 MiB, or the size of the tensor if that is less.

    Raises:
        TierError: a write that failed.
    """
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        problem = (
            f"{value.dtype}{list(value.shape)} for {_name(tensor)}, which "
            f"is stored as {tensor.dtype}{list(tensor.shape)}"
        )
        raise FzeroValueError(
            "offload", "this value does not match the tensor", [problem], "give a value of the tensor's shape and dtype"
        )
    with write_pieces(tensor) as write:
        write(value)


def pieces(tensor: torch.Tensor, nbytes: int = BUFFER) -> Iterator[torch.Tensor]:
    """Yields the value of a tensor on disk in flat, consecutive pieces of up to `nbytes`. Each piece is valid until the
    next one is requested.

    Memory: 2 x `nbytes`, or the size of the tensor if that is less: one piece is read ahead.

    Raises:
        TierError: a read that failed.
    """
    extent, size = _extent(tensor), _part_bytes(nbytes)
    # Two buffers: one is filled from disk while the caller reads the other one.
    buffers = _buffers(extent, size)

    def start(at: int) -> tuple[Transfer, torch.Tensor] | None:
        if at >= extent.nbytes:
            return None
        part = buffers[at // size % 2][: padded(min(size, extent.nbytes - at))]
        return extent.files.read([(extent.offset + at, part)]), part[: min(size, extent.nbytes - at)]

    following = start(0)
    for at in range(0, extent.nbytes, size):
        assert following is not None
        transfer, part = following
        transfer.wait()
        # The next piece is read into the other buffer while the caller uses this one.
        following = start(at + size)
        yield part.view(tensor.dtype)


@contextmanager
def write_pieces(tensor: torch.Tensor, nbytes: int = BUFFER) -> Iterator[_Writer]:
    """The inverse of `pieces`: yields a writer that takes the value of a tensor on disk in consecutive pieces of any
    sizes, each of which is flattened.

    At the end of the block everything has been written. If the block raises, the pieces given so far may have been
    written.

    Memory: 2 x `nbytes`, or the size of the tensor if that is less: one buffer is filled while the other is written.

    Raises:
        TierError: a write that failed.
        FzeroValueError: pieces of another dtype, or of more or fewer elements than the tensor has.
    """
    writer = _Writer(tensor, nbytes)
    try:
        yield writer
    except BaseException:
        # The buffers are freed after the error. Threads may still be writing from them.
        writer.settle()
        raise
    writer.finish()


class _Writer:
    """Fills one buffer while the other is being written."""

    def __init__(self, tensor: torch.Tensor, nbytes: int):
        self._tensor, self._extent, self._size = tensor, _extent(tensor), _part_bytes(nbytes)
        self._buffers = _buffers(self._extent, self._size)
        self._writes: list[Transfer | None] = [None, None]  # the last write from each buffer
        self._at = 0

    def __call__(self, part: torch.Tensor) -> None:
        if part.dtype != self._tensor.dtype or self._at + part.nbytes > self._extent.nbytes:
            self._refuse(f"bytes {self._at} to {self._at + part.nbytes} of {part.dtype}")
        flat = (
            part.detach().contiguous().view(-1).view(torch.uint8)
            if part.numel()
            else part.new_empty(0, dtype=torch.uint8)
        )
        done = 0
        while done < flat.numel():
            which, used = self._at // self._size % 2, self._at % self._size
            # A buffer is filled again only after its last write has ended, which may still read it.
            if used == 0:
                self._wait(which)
            num = min(self._size - used, flat.numel() - done)
            self._buffers[which][used : used + num].copy_(flat[done : done + num])
            done, self._at = done + num, self._at + num
            if used + num == self._size:
                self._write(which, self._size)

    def finish(self) -> None:
        # Extents are not cleared before they are written, so missing bytes would silently keep their old values.
        if self._at != self._extent.nbytes:
            self.settle()
            self._refuse(f"{self._at} bytes in total")
        if rest := self._at % self._size:
            self._write(self._at // self._size % 2, rest)
        for which in range(2):
            self._wait(which)

    def settle(self) -> None:
        """Waits until no write reads the buffers any more, also after an error."""
        for which in range(2):
            with suppress(TierError):
                self._wait(which)

    def _write(self, which: int, num: int) -> None:
        # The last write is padded to whole blocks. It cannot reach the next tensor, because extents are padded as well.
        begin = self._at - num
        self._writes[which] = self._extent.files.write(
            [(self._extent.offset + begin, self._buffers[which][: padded(num)])]
        )

    def _wait(self, which: int) -> None:
        if (write := self._writes[which]) is not None:
            write.wait()

    def _refuse(self, given: str) -> None:
        problem = f"{given} for {_name(self._tensor)}, which is {self._extent.nbytes} bytes of {self._tensor.dtype}"
        raise FzeroValueError(
            "offload",
            "these parts do not match the tensor",
            [problem],
            "give every element once, in the tensor's dtype",
        )


def _extent(tensor: torch.Tensor) -> Any:
    if (extent := extent_of(tensor)) is None:
        raise FzeroValueError(
            "offload", f"{_name(tensor)} is not stored on disk", fix="use it directly: it is in memory"
        )
    return extent


def _name(tensor: torch.Tensor) -> str:
    return found[0].path if (found := leaf_of(tensor)) else "a tensor"


def _part_bytes(nbytes: int) -> int:
    """Rounds down to a multiple of the alignment, at least one; such a piece holds complete elements of any dtype."""
    return max(nbytes // ALIGNMENT, 1) * ALIGNMENT


def _buffers(extent: Extent, size: int) -> list[torch.Tensor]:
    whole = padded(extent.nbytes)
    return [aligned(min(size, whole)), aligned(min(size, max(whole - size, 0)))]
