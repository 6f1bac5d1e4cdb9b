"""Allocates anonymous scratch files in the directories that the user gives.

A file has no name (`O_TMPFILE`, or a name that is removed at once), so no other process can open it, and the kernel
frees it when its process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fzero._utils.host_memory import SECTOR as ALIGNMENT
from fzero._utils.host_memory import padded
from fzero._utils.units import size
from fzero.errors import FzeroValueError

# bytes of one system call, and of a stripe: 4 threads with 4 MiB each keep a disk busy, smaller pieces do not
PIECE = 1 << 22
_HUGE = 1 << 21  # bytes of a huge page

_SPACE = "free space, or give other paths"

logger = logging.getLogger("fzero")
_told: set[str] = set()  # paths for which a missing O_DIRECT has been logged


@dataclass(frozen=True)
class ScratchFile:
    """A rank's file under one path.

    Attributes:
        path: the path that the user gave.
        fd: the descriptor of the file.
        direct: whether I/O bypasses the page cache.
    """

    path: Path
    fd: int
    direct: bool

    def remove(self) -> None:
        os.close(self.fd)


def paths(directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> tuple[Path, ...]:
    """Returns the paths that a user gave, one or several, as a tuple."""
    one = isinstance(directories, (str, os.PathLike))
    return tuple(Path(x) for x in ([directories] if one else directories))


def aligned(nbytes: int) -> torch.Tensor:
    """Allocates memory for direct reads and writes: `nbytes` of uint8, uninitialized, at an address that is a multiple
    of `ALIGNMENT`.

    From 2 MiB on, huge pages are requested, and the memory begins at one. A disk receives memory as runs of physical
    pages. Scattered small pages halved its speed for half of the buffers tried, depending on which pages the system had
    free, and doubled the CPU time for all of them.

    Memory: `nbytes`, plus up to a page.

    Example:
        >>> aligned(8192).data_ptr() % ALIGNMENT
        0
    """
    if nbytes < _HUGE:
        memory, boundary = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu"), ALIGNMENT
    else:
        pages, boundary = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), _HUGE
        with suppress(AttributeError, OSError):  # the system may not support huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    # Allocated larger than asked for and cut at the first aligned address, because PyTorch offers no alignment beyond
    # its own.
    return memory[-memory.data_ptr() % boundary :][:nbytes]


def shares(nbytes: int, num: int) -> list[int]:
    """Returns the bytes in each of `num` files over which a range is striped.

    Example:
        >>> shares(2 * PIECE + 4096, 2)
        [4198400, 4194304]
    """
    whole, rest = divmod(nbytes, PIECE)
    last = whole % num
    return [(whole // num + (i < last)) * PIECE + (rest if i == last else 0) for i in range(num)]


def check(
    directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str], nbytes: int, *, num_ranks: int = 1
) -> None:
    """Checks whether files can be striped over these paths. Creates nothing.

    Args:
        directories: existing directories. Those on the same file system share its free space.
        nbytes: bytes of each rank.
        num_ranks: number of ranks that will use the same paths.

    Raises:
        FzeroValueError: paths that are missing, are not directories, are not writable, or are too small. Lists all of
            them, with the bytes they need and have.

    Example:
        >>> check("/nowhere", 1 << 30)
        Traceback (most recent call last):
        fzero.errors.FzeroValueError: fzero.offload: cannot keep 1.00 GiB a rank on disk
          /nowhere: the directory does not exist
        Fix: free space, or give other paths
    """
    places = paths(directories)
    problems = [f"{place}: {problem}" for place in places if (problem := _unusable(place))]
    systems: dict[int, list[tuple[Path, int]]] = {}
    for place, share in zip(places, shares(padded(nbytes), len(places)) if places else [], strict=True):
        if not _unusable(place):
            systems.setdefault(place.stat().st_dev, []).append((place, share * num_ranks))
    for sharing in systems.values():
        needed, free = sum(share for _, share in sharing), _free(sharing[0][0])
        if needed > free:
            problems.append(
                f"{', '.join(dict.fromkeys(str(place) for place, _ in sharing))}: {size(needed)} needed, {size(free)} "
                f"free"
            )
    if not places:
        problems.append("no path is given")
    if problems:
        raise _impossible(nbytes, problems)


def allocate(directories: Sequence[Path], nbytes: int) -> list[ScratchFile]:
    """Makes a file under each path. Together they hold `nbytes`, and read as zeros until they are written.

    Raises:
        FzeroValueError: as for `check`, and if the blocks cannot be allocated after all. Then nothing is left behind.
    """
    check(directories, nbytes)
    parts: list[ScratchFile] = []
    problems = []
    for path, share in zip(directories, shares(nbytes, len(directories)), strict=True):
        try:
            parts.append(_make(path, share))
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}: {size(share)} needed, {size(_free(path))} free")
    if problems:
        for part in parts:
            part.remove()
        raise _impossible(nbytes, problems)
    return parts


def extend(parts: Sequence[ScratchFile], before: int, nbytes: int) -> None:
    """Grows the files, which together hold `before` bytes, to `nbytes`.

    Raises:
        FzeroValueError: as for `allocate`. Then the files are unchanged.
    """
    old, new = shares(before, len(parts)), shares(nbytes, len(parts))
    check([part.path for part in parts], nbytes - before)
    problems = []
    for part, has, needs in zip(parts, old, new, strict=True):
        try:
            if needs > has:
                os.posix_fallocate(part.fd, has, needs - has)
        except OSError as error:
            problems.append(
                f"{part.path}: {error.strerror or error}: {size(needs - has)} more needed, {size(_free(part.path))} "
                f"free"
            )
    if problems:
        for part, has in zip(parts, old, strict=True):
            # All or nothing: a file that could be grown is cut back, so that the stripes of all files stay equally
            # long.
            os.ftruncate(part.fd, has)
        raise _impossible(nbytes - before, problems)


def _impossible(nbytes: int, problems: Sequence[str]) -> FzeroValueError:
    return FzeroValueError("offload", f"cannot keep {size(nbytes)} a rank on disk", problems, _SPACE)


def _unusable(path: Path) -> str | None:
    if not path.is_dir():
        return "it is not a directory" if path.exists() else "the directory does not exist"
    return None if os.access(path, os.W_OK | os.X_OK) else "it is not writable"


def _free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


# --- creation ---


def _make(path: Path, nbytes: int) -> ScratchFile:
    """Makes a file of `nbytes` under a path, whose blocks are allocated."""
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        direct = _is_direct(file.fileno())
        os.ftruncate(file.fileno(), 0)
        if not direct and (name := str(path.resolve())) not in _told:
            _told.add(name)
            logger.warning(
                "fzero.offload: %s cannot be read and written directly (O_DIRECT): the system's page cache takes "
                "memory for what rests there",
                name,
            )
        if nbytes:
            # Allocates the blocks now, so that a full disk is found here and not in the middle of a step.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return ScratchFile(path, os.dup(file.fileno()), direct)


def _is_direct(fd: int) -> bool:
    """Makes I/O of an empty file bypass the page cache, and returns whether it really does.

    Setting O_DIRECT proves nothing, and neither does a read of an odd size, which finds a hole on every file system. If
    I/O is direct, a block can be written and read back, and an odd number of bytes cannot be written. File systems that
    only accept the flag (such as those in memory) allow both.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    block = aligned(2 * ALIGNMENT)
    written, found = block[:ALIGNMENT].fill_(0x5A).numpy().data, block[ALIGNMENT:].fill_(0).numpy().data
    direct = False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if os.pwritev(fd, [written], 0) == ALIGNMENT == os.preadv(fd, [found], 0) and found == written:
            direct = not _writes_odd_sizes(fd, written)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    if not direct:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return direct


def _writes_odd_sizes(fd: int, block: memoryview) -> bool:
    try:
        os.pwritev(fd, [block[1:100]], ALIGNMENT)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
