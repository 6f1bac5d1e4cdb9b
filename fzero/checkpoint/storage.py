"""Stores checkpoints in directories of a filesystem, and defines the interface to other storage (object_store.py).

    path               a directory has another name while it is written; a rename publishes it
    scheme://bucket/…  through fsspec. Objects are not renamed, and each is there completely or not at all. The objects
                       of a save have names that no object had before; the index, written last, publishes them

Whether a checkpoint is complete, and which one is the latest, is decided by requesting an object. A listing, which
may lag behind, only tells which objects to request. This file deals with names, not with contents.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fzero._utils.bounded_json import MOST, Malformed, open_regular
from fzero._utils.path_permissions import make_private_directory
from fzero.checkpoint.storage_paths import GIVE, INDEX, LATEST, SET_ASIDE, STEP, TEMPORARY, Place
from fzero.errors import CheckpointError

ABANDONED = 3600.0
"""The number of seconds without a write after which a staged checkpoint is assumed to be left by a save that was
killed."""


class Staging(NamedTuple):
    """A checkpoint that is being written: the directory of its files, and a suffix that makes their names unique."""

    directory: Place
    mark: str

    def name(self, plain: str) -> str:
        """Returns the name of a staged file. For example, rank-00000.json becomes rank-00000.5c1ab3f0.json."""
        stem, _, suffix = plain.partition(".")
        return f"{stem}{self.mark}.{suffix}"


Reader = Callable[[memoryview, int], int]
"""Reads an open file: fills a buffer from an offset on, and returns the number of bytes, fewer than the buffer takes
only if the file ends."""


class Storage:
    """Storage in directories and files. For a file that does not exist, its methods raise FileNotFoundError.

    Attributes:
        span: the number of bytes per read when an entire file is read.
    """

    span = 1 << 20

    def names(self, directory: Any) -> list[str]:
        """Returns the names in a directory, or none if it does not exist.

        An object store may still list what was just deleted, and not yet list what was just written.
        """
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CheckpointError("checkpoint", f"{directory} is not a directory", fix=GIVE) from None

    def size(self, file: Any) -> int:
        return os.stat(file).st_size

    def has(self, file: Any) -> bool:
        try:
            self.size(file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_directory(self, place: Any) -> bool:
        return place.is_dir()

    def is_published(self, directory: Any) -> bool:
        """Whether something with the name of a checkpoint is or was a checkpoint, and not a save that did not
        finish."""
        return True

    def read(self, file: Any, nbytes: int) -> bytes:
        """Returns the first `nbytes` bytes of a file, or all if there are fewer."""
        with open_regular(file) as opened:
            return opened.read(min(nbytes, os.fstat(opened.fileno()).st_size))

    def whole(self, file: Any, most: int = MOST) -> bytes:
        """Returns the contents of an entire file.

        Raises:
            Malformed: the file has more than `most` bytes.
        """
        # One byte more than allowed shows that a file is too long, without reading all of it.
        data = self.read(file, most + 1)
        if len(data) > most:
            raise Malformed(f"more than {most} bytes")
        return data

    @contextlib.contextmanager
    def reader(self, file: Any) -> Iterator[Reader]:
        """Opens a file for reading."""
        with open_regular(file) as opened:

            def read(out: memoryview, offset: int) -> int:
                got = 0
                # A call returns at most 2 GiB on Linux, and network filesystems may return less than requested.
                while got < len(out) and (n := os.preadv(opened.fileno(), [out[got:]], offset + got)):
                    got += n
                return got

            yield read

    @contextlib.contextmanager
    def writer(self, file: Any, nbytes: int) -> Iterator[Callable[[memoryview], object]]:
        """Writes a new file of this many bytes, piece by piece. The file is on stable storage when the context ends
        without an error."""
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _mode(file.parent))
        try:
            yield functools.partial(write_all, fd)
            # Makes the contents durable. The name is durable only after the directory has been synced too (`publish`).
            os.fsync(fd)
        finally:
            os.close(fd)

    def write(self, file: Any, data: bytes) -> None:
        """Writes an entire file at once."""
        with self.writer(file, len(data)) as write:
            write(memoryview(data))

    def link(self, directory: Any, name: str) -> str | None:
        """Returns where a name leads if it does not lead to a file of this directory, else None."""
        home = os.path.realpath(directory)
        real = os.path.realpath(os.path.join(home, name))
        return None if os.path.dirname(real) == home else real

    def begin(self, root: Any, name: str, private: bool = False) -> Staging:
        """Prepares a checkpoint of this name, after finishing or removing what killed saves have left behind.

        Staged checkpoints that have not been written to for an hour are considered abandoned. One process calls it.
        `private`: only this user can access the files.
        """
        if root.exists() and not root.is_dir():
            fix = "give the directory in which checkpoints are to be made"
            raise CheckpointError("checkpoint.save", f"{root} is not a directory", fix=fix)
        if not root.is_dir():
            if private:
                make_private_directory(root)
            else:
                root.mkdir(parents=True)
            sync(root.parent)
        for entry in list(root.iterdir()):
            if entry.name.startswith(TEMPORARY):
                # A staged directory may belong to another job that saves here at this moment, so only old ones are
                # removed.
                if time.time() - _written(entry) > ABANDONED:
                    _remove(entry)
            elif entry.name.startswith(STEP) and entry.name.endswith(SET_ASIDE):
                if entry.with_name(entry.name.removesuffix(SET_ASIDE)).exists():
                    self.retire(root, entry)
                else:
                    # A save was killed between its two renames, so the old checkpoint of this step gets its name back.
                    os.rename(entry, entry.with_name(entry.name.removesuffix(SET_ASIDE)))
        directory = root / f"{TEMPORARY}{name}.{uuid.uuid4().hex[:8]}"
        directory.mkdir(0o700 if private else 0o777)
        return Staging(directory, "")

    def publish(self, root: Any, staging: Staging, name: str, index: bytes) -> list[Place]:
        """Writes the index of a staged checkpoint, and makes it the checkpoint of this name and the latest one,
        atomically. Returns the checkpoints that may be deleted now."""
        temporary, target = staging.directory, root / name
        assert isinstance(temporary, Path)
        self.write(temporary / INDEX, index)
        # The names of the files have to be durable before the rename makes them reachable.
        sync(temporary)
        pointer = _pointer(root, staging)  # written before the rename: a full disk must not prevent it afterwards
        self.write(pointer, f"{name}\n".encode())
        pointer.chmod(_mode(temporary) & pointer.stat().st_mode)
        old = target.with_name(name + SET_ASIDE)
        # A directory that is not empty cannot be replaced by a rename, so replacing a step takes two renames. `begin`
        # repairs the state between them.
        if target.exists():
            os.rename(target, old)  # until the next rename, readers find this step under its other name
        os.rename(temporary, target)
        sync(root)
        # Only now may `latest` name the checkpoint: the rename that published it is durable.
        os.replace(pointer, root / LATEST)
        sync(root)
        return [old] if old.exists() else []

    def undo(self, root: Any, staging: Staging) -> None:
        """Removes a staged checkpoint that was not published. Does not raise."""
        with contextlib.suppress(OSError):
            shutil.rmtree(staging.directory, ignore_errors=True)
            _pointer(root, staging).unlink(missing_ok=True)

    def retire(self, root: Any, directory: Any) -> None:
        """Deletes a checkpoint in such a way that a partly deleted one is never taken for a complete one."""
        gone = root / f"{TEMPORARY}old-{directory.name}.{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):  # another job has deleted it
            os.rename(directory, gone)
            _remove(gone)


_FILES = Storage()


def storage_of(place: Place) -> Storage:
    """Returns the storage for the files of a path or URL.

    Raises:
        CheckpointError: for a URL: fsspec is not installed, it has no package for this protocol, or the protocol
            does not accept the configured options.
    """
    if isinstance(place, Path):
        return _FILES
    from fzero.checkpoint.object_store import objects_of

    return objects_of(place)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Calls `os.write` until all data is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync(directory: Path) -> None:
    """Makes the names in a directory durable (fsync)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mode(directory: Path) -> int:
    """Returns the permissions of a new file, before the umask: only the user's own in a directory that only that user
    can access."""
    return 0o666 if directory.stat().st_mode & 0o077 else 0o600


def _pointer(root: Path, staging: Staging) -> Path:
    """Returns the temporary file that is renamed to `latest`."""
    return root / f"{TEMPORARY}{LATEST}{Path(staging.directory).suffix}"


def _written(path: Path) -> float:
    """Returns when a file, or a directory or a file in it, was last written, in seconds since the epoch."""
    times = [time.time()]
    with contextlib.suppress(FileNotFoundError):  # it is being published at this moment
        times = [p.lstat().st_mtime for p in (path, *(path.iterdir() if path.is_dir() else ()))]
    return max(times)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
