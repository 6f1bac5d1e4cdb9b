"""Manages private directories for scratch files, one under each path a user gives:

    <path>/fzero-<pid>-<random>/    0700
        fzero.lock                  held by an flock for as long as its process lives
        data                        0600, preallocated

A directory whose lock can be had belongs to nobody any more: a killed run left it, and whoever comes next removes it.
One that is held is never touched, nor is anything that is not made as above by the same user.

[Note: meeting] A lock file is there for a moment before it is held, and another run may take it for a stale one
meanwhile. So whoever gets a lock looks whether its file is still linked: a remover that came second goes its way, a
maker whose directory was removed makes another.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fzero._utils.host_memory import SECTOR as ALIGNMENT
from fzero._utils.host_memory import padded
from fzero._utils.units import size
from fzero.errors import FzeroValueError

# bytes: of one system call, and of a stripe. 4 threads with 4 MiB each keep a disk busy; smaller ones do not
PIECE = 1 << 22
_HUGE = 1 << 21  # bytes: of a huge page

_NAME = re.compile(r"fzero-\d+-[0-9a-f]{16}")
_LOCK, _DATA, _PROBE = "fzero.lock", "data", "probe"
_SPACE = "free space, or give other paths"

logger = logging.getLogger("fzero")
_told: set[str] = set()  # paths of which the log already says that they are not written directly


@dataclass(frozen=True)
class ScratchFile:
    """A rank's file under one path: the file's private directory, its descriptor, that of the lock, and whether I/O
    goes past the page cache."""

    path: Path
    directory: Path
    fd: int
    lock: int
    direct: bool

    @property
    def data(self) -> Path:
        return self.directory / _DATA

    def remove(self) -> None:
        os.close(self.fd)
        _remove(self.directory)
        os.close(self.lock)


def paths(directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> tuple[Path, ...]:
    """The paths a user gave, one or several."""
    one = isinstance(directories, (str, os.PathLike))
    return tuple(Path(x) for x in ([directories] if one else directories))


def aligned(nbytes: int) -> torch.Tensor:
    """New memory that can be read to and written from directly: `nbytes` of uint8, undefined, at an address that is a
    multiple of `ALIGNMENT`.

    From 2 MiB on it is asked for in huge pages, and begins at one. A disk is handed memory by runs of physical pages:
    scattered small ones halved its speed on half of the buffers tried, by chance of what the system had free, and
    doubled the processor's part on all.

    Memory: `nbytes`, up to a page more.

    Example:
        >>> aligned(8192).data_ptr() % ALIGNMENT
        0
    """
    if nbytes < _HUGE:
        memory, boundary = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu"), ALIGNMENT
    else:
        pages, boundary = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), _HUGE
        with suppress(AttributeError, OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % boundary :][:nbytes]


def shares(nbytes: int, num: int) -> list[int]:
    """Bytes in each of `num` files over which a range is striped.

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
    """Whether files can be striped over these paths. Makes nothing.

    Args:
        directories: existing directories. Those on one file system share what is free there.
        nbytes: bytes of each rank.
        num_ranks: ranks that will use the same paths.

    Raises:
        FzeroValueError: paths that are missing, no directories, not writable, or too small; all of them, with what they
            need and have.

    Example:
        >>> check("/nowhere", 1 << 30)
        Traceback (most recent call last):
        fzero.errors.FzeroValueError: fzero.offload: cannot keep 1.00 GiB a rank on disk
          /nowhere: there is no such directory
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
    """A file under each path, which together hold `nbytes`; as long as nothing is written to them they read as zeros.

    Raises:
        FzeroValueError: as `check`, and if the blocks cannot be had after all. Then nothing is left behind.
    """
    check(directories, nbytes)
    parts: list[ScratchFile] = []
    problems = []
    for path, share in zip(directories, shares(nbytes, len(directories)), strict=True):
        try:
            _sweep(path)
            parts.append(_make(path, share))
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}: {size(share)} needed, {size(_free(path))} free")
    if problems:
        for part in parts:
            part.remove()
        raise _impossible(nbytes, problems)
    return parts


def extend(parts: Sequence[ScratchFile], before: int, nbytes: int) -> None:
    """Makes `nbytes` of `before` bytes that these files hold together.

    Raises:
        FzeroValueError: as `allocate`. Then the files are as they were.
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
            os.ftruncate(part.fd, has)
        raise _impossible(nbytes - before, problems)


def _impossible(nbytes: int, problems: Sequence[str]) -> FzeroValueError:
    return FzeroValueError("offload", f"cannot keep {size(nbytes)} a rank on disk", problems, _SPACE)


def _unusable(path: Path) -> str | None:
    if not path.is_dir():
        return "it is not a directory" if path.exists() else "there is no such directory"
    return None if os.access(path, os.W_OK | os.X_OK) else "it is not writable"


def _free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


# --- making ---


def _make(path: Path, nbytes: int) -> ScratchFile:
    """A directory of this process under a path, with a file of `nbytes` whose blocks are there."""
    directory, lock = _claim(path)
    fds = [lock]
    try:
        direct = _is_direct(directory / _PROBE)
        if not direct and (name := str(path.resolve())) not in _told:
            _told.add(name)
            logger.warning(
                "fzero.offload: %s cannot be read and written directly (O_DIRECT): the system's page cache takes "
                "memory for what rests there",
                name,
            )
        plain = os.open(directory / _DATA, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fds.append(plain)
        if nbytes:
            os.posix_fallocate(plain, 0, nbytes)
        if not direct:
            return ScratchFile(path, directory, plain, lock, False)
        fd = os.open(directory / _DATA, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        os.close(plain)
        return ScratchFile(path, directory, fd, lock, True)
    except BaseException:
        _remove(directory)
        for fd in reversed(fds):
            os.close(fd)
        raise


def _claim(path: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that holds its lock."""
    while True:
        directory = path / f"fzero-{os.getpid()}-{secrets.token_hex(8)}"
        directory.mkdir(mode=0o700)
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _hold(lock) is not False:  # where nothing can be locked, nobody can take it for a stale one either
            return directory, lock
        os.close(lock)  # [Note: meeting]


def _hold(lock: int) -> bool | None:
    """Whether this is now the one holder of a lock file that is still there; None where files cannot be locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return os.fstat(lock).st_nlink > 0


def _is_direct(probe: Path) -> bool:
    """Whether direct I/O is what it says here.

    Opening a file so proves nothing, nor does an odd read, which finds a hole everywhere. Where it is direct, a block
    can be written and read back and an odd number of bytes cannot be written; file systems that only pretend (those in
    memory do) take both.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    block = aligned(2 * ALIGNMENT)
    written, found = block[:ALIGNMENT].fill_(0x5A).numpy().data, block[ALIGNMENT:].fill_(0).numpy().data
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        with suppress(FileNotFoundError):  # some make the file before they refuse
            os.unlink(probe)
        return False
    try:
        if os.pwritev(fd, [written], 0) != ALIGNMENT or os.preadv(fd, [found], 0) != ALIGNMENT or found != written:
            return False
        try:
            os.pwritev(fd, [written[1:100]], ALIGNMENT)
        except OSError as error:
            return error.errno == errno.EINVAL
        return False
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    finally:
        os.close(fd)
        os.unlink(probe)


_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


# --- removing ---


def _sweep(path: Path) -> None:
    """Removes what killed runs of this user left under a path."""
    with os.scandir(path) as entries:
        found = [Path(e.path) for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    for directory in found:
        with suppress(OSError):  # another run removes it meanwhile, or it is not ours to remove
            if os.lstat(directory).st_uid != os.geteuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(lock).st_mode) and _hold(lock):
                    _remove(directory)
            finally:
                os.close(lock)


def _remove(directory: Path) -> None:
    """Removes a directory whose lock one holds, and what is made in it; the lock last, so that a removal cut short can
    be finished."""
    for name in (_PROBE, _DATA, _LOCK):
        with suppress(OSError):
            os.unlink(directory / name)
    with suppress(OSError):
        directory.rmdir()
