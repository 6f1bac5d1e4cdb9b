"""Reads and writes a rank's scratch files as one range of bytes, in threads, while the caller continues.

Nothing here interprets the bytes. One pool of threads serves all files of a process. A system call of 4 MiB releases
the GIL, so a few Python threads keep a disk as busy as a C program would. Pieces are processed in the order in which
they were submitted.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.errors import FzeroValueError, TierError
from fzero.memory import scratch_allocation
from fzero.memory.scratch_allocation import ALIGNMENT, PIECE, ScratchFile

Runs = Iterable[tuple[int, torch.Tensor]]
_FIX = "the state is lost; continue from the last checkpoint; free space or use another path"


class ScratchFiles:
    """Bytes 0 to `nbytes` on disk, private to this process and striped over directories in pieces of 4 MiB.

    Blocks are allocated immediately; bytes that were never written read as zeros. The files have no names, so no other
    process can open them. They are freed by `close`, when the last reference to this object goes away, and when the
    process ends, however it ends.

    Args:
        directories: one or several existing directories, ideally on separate disks.
        nbytes: rounded up to a multiple of `ALIGNMENT`.
        num_threads: number of threads that move pieces. The pool of the process has as many threads as the largest
            number that any of its files requests.

    Attributes:
        direct: whether reads and writes of all files bypass the page cache.
        bytes_read, bytes_written: so far.
        busy_seconds: wall time during which at least one piece was being read or written.

    Memory: none. A transfer keeps the memory that it reads or writes alive until it is done.

    Raises:
        FzeroValueError: the directories cannot hold the files; shows the bytes they need and have.

    Example:
        >>> import tempfile
        >>> files = ScratchFiles(tempfile.gettempdir(), 8192)
        >>> files.write([(4096, scratch_allocation.aligned(4096).fill_(7))]).wait()
        >>> found = scratch_allocation.aligned(8192)
        >>> files.read([(0, found)]).wait()
        >>> found[4094:4098].tolist()
        [0, 0, 7, 7]
        >>> files.close()
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
        nbytes: int,
        *,
        num_threads: int = 4,
    ):
        if nbytes < 0 or num_threads < 1:
            raise FzeroValueError(
                "offload", f"{nbytes} bytes, moved by {num_threads} threads", fix="give at least 0 bytes and 1 thread"
            )
        self.directories, self.nbytes, self._num_threads = (
            scratch_allocation.paths(directories),
            scratch_allocation.padded(nbytes),
            num_threads,
        )
        self._parts = scratch_allocation.allocate(self.directories, self.nbytes)
        self.direct = all(part.direct for part in self._parts)
        self._open = _Open(self._parts)
        self._finalizer = weakref.finalize(self, self._open.close)

    def read(self, runs: Runs) -> Transfer:
        """Starts to read into the memory of each run the bytes from its offset on.

        Args:
            runs: `(offset, flat)`. `flat` is uint8, in host memory; its offset, size and address are multiples of
                `ALIGNMENT`. Consecutive runs that are adjacent in the file become one read, wherever their memory is.
        """
        return self._start("read", runs)

    def write(self, runs: Runs) -> Transfer:
        """Starts to write the memory of each run to the bytes from its offset on.

        The memory must not change until the wait.
        """
        return self._start("write", runs)

    def extend(self, nbytes: int) -> int:
        """Makes room for more bytes at the end.

        Args:
            nbytes: rounded up to a multiple of `ALIGNMENT`.

        Returns: the offset of the first of them.

        Raises:
            FzeroValueError: the paths do not have the room; shows the bytes they need and have. The files are
                unchanged.
        """
        begin = self.nbytes
        scratch_allocation.extend(self._parts, begin, begin + scratch_allocation.padded(nbytes))
        self.nbytes = begin + scratch_allocation.padded(nbytes)
        return begin

    def close(self) -> None:
        """Removes the files. Pieces that are being moved are finished first; the other pieces of their transfers
        fail."""
        self._finalizer()

    @property
    def bytes_read(self) -> int:
        return self._open.moved["read"]

    @property
    def bytes_written(self) -> int:
        return self._open.moved["write"]

    @property
    def busy_seconds(self) -> float:
        return self._open.busy_seconds()

    def _start(self, operation: str, runs: Runs) -> Transfer:
        runs = list(runs)
        _check_runs(runs, self.nbytes)
        if self._open.pid != os.getpid():
            raise FzeroValueError(
                "offload",
                f"these files are process {self._open.pid}'s",
                fix="create separate files in a process that was forked",
            )
        transfer = Transfer(self, operation)
        transfer.start(
            [_FilePiece(transfer, self._open, *located) for located in self._located(runs)], self._num_threads
        )
        return transfer

    def _located(self, runs: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[ScratchFile, int, int, int, Any]]:
        """Splits runs into pieces. Returns for each the file, the offset in that file, the offset in the whole range,
        the number of bytes, and the memory."""
        num = len(self._parts)
        pieces: list[Any] = []
        spans: list[tuple[int, int]] = []  # for each piece, its begin and its largest possible end
        end = -1
        for offset, flat in runs:
            view, done = flat.numpy().data, 0
            while done < len(view):
                # A piece has at most PIECE bytes. It ends earlier where the runs are not adjacent and, if there are
                # several files, at the boundary of a stripe.
                if offset + done != end or end == spans[-1][1]:
                    end = offset + done
                    spans.append((end, end + PIECE - (end % PIECE if num > 1 else 0)))
                    pieces.append([])
                size = min(len(view) - done, spans[-1][1] - end)
                pieces[-1].append(view[done : done + size])
                done, end = done + size, end + size
        out = []
        for (begin, _), views in zip(spans, pieces, strict=True):
            stripe, inside = divmod(begin, PIECE)
            out.append((self._parts[stripe % num], stripe // num * PIECE + inside, begin, sum(map(len, views)), views))
        return out


class Transfer:
    """A read or a write in flight. It keeps its files, and its memory, alive until it is done.

    Attributes:
        nbytes: the number of bytes to move.
        seconds: the time from its start to the end of its last piece; 0.0 until then.
    """

    def __init__(self, files: ScratchFiles, operation: str):
        self.operation, self.nbytes, self.seconds = operation, 0, 0.0
        self._files: ScratchFiles | None = files
        self._left = 0
        self._error: tuple[BaseException, str] | None = None
        self._lock, self._done = threading.Lock(), threading.Event()
        self._started = time.perf_counter()

    def start(self, pieces: Sequence[_FilePiece], num_threads: int) -> None:
        """Submits its pieces to the threads."""
        self.nbytes, self._left = sum(piece.nbytes for piece in pieces), len(pieces)
        if pieces:
            _pool.submit(pieces, num_threads)
        else:
            self._files = None
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Returns when every piece is done or has failed.

        Raises:
            TierError: the first error of any piece, with its location.
        """
        self._done.wait()
        if self._error is not None:
            error, where = self._error
            what = (
                f"a {self.operation} of scratch files failed: "
                f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
            )
            raise TierError("offload", what, [where], _FIX) from error

    def ended(self, failure: tuple[BaseException, str] | None) -> None:
        """Records that a piece is done. Called by the threads."""
        with self._lock:
            self._left -= 1
            # The first failure is kept. The transfer ends only when all its pieces have, because they use its memory.
            self._error = self._error or failure
            last = self._left == 0
        if last:
            self.seconds = time.perf_counter() - self._started
            # A transfer that is done does not keep its files open, however long its caller holds it.
            self._files = None
            self._done.set()


@dataclass(frozen=True)
class _FilePiece:
    """The unit of work of a thread: consecutive bytes of one file."""

    transfer: Transfer
    open: _Open
    part: ScratchFile
    at: int
    offset: int
    nbytes: int
    views: list[memoryview]

    def run(self) -> None:
        """Moves the piece. Never raises, so that the transfer ends in any case."""
        failure = None
        try:
            self.open.begin()
            try:
                _move(self.transfer.operation, self.part.fd, self.views, self.at, self.nbytes)
            finally:
                self.open.end()
            self.open.count(self.transfer.operation, self.nbytes)
        except BaseException as error:
            if isinstance(error, OSError):  # its traceback would keep the memory alive
                error = error.with_traceback(None)
            failure = (error, f"{self.part.path}: {self.nbytes} bytes at offset {self.offset}")
        self.transfer.ended(failure)


def _move(operation: str, fd: int, views: Sequence[memoryview], at: int, nbytes: int) -> None:
    """Reads or writes a complete piece.

    If a system call stops within a block, the moved bytes of that block are moved again, because direct I/O continues
    only at block boundaries.
    """
    move, done = (os.preadv if operation == "read" else os.pwritev), 0
    while done < nbytes:
        num = move(fd, views, at + done)
        # A short transfer is continued at an aligned offset, as direct I/O requires. The bytes after it are moved
        # again.
        num -= num % ALIGNMENT
        if num <= 0:
            raise OSError(errno.EIO, f"it stopped after {done} of {nbytes} bytes")
        done += num
        while views and num >= len(views[0]):
            num, views = num - len(views[0]), views[1:]
        if num:
            views = [views[0][num:], *views[1:]]


class _Open:
    """The open files of a `ScratchFiles`, with their statistics. A separate object, so that they can be closed after
    the `ScratchFiles` is gone."""

    def __init__(self, parts: Sequence[ScratchFile]):
        self.pid = os.getpid()
        self.moved = {"read": 0, "write": 0}
        self._parts, self._closed = parts, False
        self._idle = threading.Condition()
        self._active, self._since, self._busy = 0, 0.0, 0.0

    def begin(self) -> None:
        """Records that a piece begins: the files stay open until its end."""
        with self._idle:
            if self._closed:
                raise OSError(errno.EBADF, "the files were closed before it was done")
            if self._active == 0:
                self._since = time.perf_counter()
            self._active += 1

    def end(self) -> None:
        with self._idle:
            self._active -= 1
            if self._active == 0:
                self._busy += time.perf_counter() - self._since
                self._idle.notify_all()

    def count(self, operation: str, nbytes: int) -> None:
        with self._idle:
            self.moved[operation] += nbytes

    def busy_seconds(self) -> float:
        with self._idle:
            return self._busy + (time.perf_counter() - self._since if self._active else 0.0)

    def close(self) -> None:
        if self.pid != os.getpid():  # after a fork the files belong to the parent, which may still use them
            return
        with self._idle:
            self._closed = True
            # Closing a descriptor that a thread uses would let the kernel give its number to another file.
            while self._active:
                self._idle.wait()
        for part in self._parts:
            part.remove()


class _ThreadPool:
    """The threads of this process. They are daemon threads, so that an abandoned step does not keep the process
    alive."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # a forked process has no copies of the threads

    def _begin(self) -> None:
        self._pieces: queue.SimpleQueue[_FilePiece] = queue.SimpleQueue()
        self._lock, self._num_threads = threading.Lock(), 0

    def submit(self, pieces: Sequence[_FilePiece], num_threads: int) -> None:
        with self._lock:
            while self._num_threads < num_threads:
                threading.Thread(
                    target=_work, args=(self._pieces,), name=f"fzero-disk-{self._num_threads}", daemon=True
                ).start()
                self._num_threads += 1
            for piece in pieces:  # under the lock, so that the pieces of one transfer stay together
                self._pieces.put(piece)


def _work(pieces: queue.SimpleQueue[_FilePiece]) -> None:
    while True:
        piece = pieces.get()
        piece.run()
        del piece  # otherwise this thread would keep its memory and files alive until the next piece arrives


_pool = _ThreadPool()


def _check_runs(runs: Sequence[tuple[int, torch.Tensor]], nbytes: int) -> None:
    problems = []
    for offset, flat in runs:
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous() or flat.device.type != "cpu":
            problems.append(
                f"offset {offset}: {flat.dtype}{list(flat.shape)} on {flat.device} is not a flat uint8 in host memory"
            )
        elif offset % ALIGNMENT or flat.numel() % ALIGNMENT or (flat.numel() and flat.data_ptr() % ALIGNMENT):
            problems.append(
                f"offset {offset}: {flat.numel()} bytes at address {flat.data_ptr():#x} are not aligned to {ALIGNMENT}"
            )
        elif not 0 <= offset <= offset + flat.numel() <= nbytes:
            problems.append(f"offset {offset}: {flat.numel()} bytes are not within the {nbytes} of these files")
    if problems:
        raise FzeroValueError(
            "offload",
            f"{len(problems)} runs cannot be read or written",
            problems,
            "slice them from memory of disk.aligned",
        )
