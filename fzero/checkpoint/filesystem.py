"""Stores checkpoints in directories of a filesystem. A directory has a temporary name while it is written, and a rename
publishes it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fzero._utils.bounded_json import open_regular
from fzero._utils.path_permissions import make_private_directory
from fzero.checkpoint.storage import ABANDONED, Reader, Staging, Storage
from fzero.checkpoint.storage_paths import GIVE, INDEX, LATEST, SET_ASIDE, STEP, TEMPORARY, Place
from fzero.errors import CheckpointError


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


class _File(Reader):
    """An open regular file of a filesystem."""

    def __init__(self, path: Path):
        self._file = open_regular(path)
        self._fd = self._file.fileno()

    def read_into(self, out: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [out], offset)

    def close(self) -> None:
        self._file.close()


class Files(Storage):
    """Storage in directories and files. A directory is published by a rename."""

    span = 1 << 20

    def names(self, directory: Path) -> list[str]:
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CheckpointError("checkpoint", f"{directory} is not a directory", fix=GIVE) from None

    def size(self, file: Path) -> int:
        return os.stat(file).st_size

    def read(self, file: Path, nbytes: int) -> bytes:
        with open_regular(file) as opened:
            return opened.read(min(nbytes, os.fstat(opened.fileno()).st_size))

    def is_directory(self, place: Path) -> bool:
        return place.is_dir()

    def is_published(self, directory: Path) -> bool:
        return True

    def reader(self, file: Path) -> Reader:
        return _File(file)

    @contextlib.contextmanager
    def writer(self, file: Path, nbytes: int) -> Iterator[Callable[[memoryview], object]]:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _mode(file.parent))
        try:
            yield functools.partial(write_all, fd)
            # Makes the contents durable. The name is durable only after the directory has been synced too (`publish`).
            os.fsync(fd)
        finally:
            os.close(fd)

    def write(self, file: Path, data: bytes) -> None:
        with self.writer(file, len(data)) as write:
            write(memoryview(data))

    def link(self, directory: Path, name: str) -> str | None:
        home = os.path.realpath(directory)
        real = os.path.realpath(os.path.join(home, name))
        return None if os.path.dirname(real) == home else real

    @contextlib.contextmanager
    def stand_in(self, file: Path, nbytes: int) -> Iterator[Path]:
        yield file

    def begin(self, root: Path, name: str, private: bool = False) -> Staging:
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

    def publish(
        self, root: Path, staging: Staging, name: str, index: bytes, spare: Iterable[str], files: Iterable[str]
    ) -> list[Place]:
        temporary, target = staging.directory, root / name
        assert isinstance(temporary, Path)
        self.write(temporary / INDEX, index)
        for one in spare:
            os.unlink(temporary / one)
        # The names of the files have to be durable before the rename makes them reachable.
        sync(temporary)
        pointer = _pointer(root, staging)  # written before the rename: a full disk must not prevent it afterwards
        pointer.unlink(missing_ok=True)
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

    def undo(self, root: Path, staging: Staging) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(staging.directory, ignore_errors=True)
            _pointer(root, staging).unlink(missing_ok=True)

    def retire(self, root: Path, directory: Path) -> None:
        # Renamed before it is deleted, so that a partly deleted checkpoint is never found under its name.
        gone = root / f"{TEMPORARY}old-{directory.name}.{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):  # another job has deleted it
            os.rename(directory, gone)
            _remove(gone)


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


FILES = Files()
