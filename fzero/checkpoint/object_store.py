"""Stores checkpoints as objects in a store that fsspec supports. Objects are not renamed; the index, written last,
publishes the others."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

from fzero._utils.bounded_json import Malformed, parsed
from fzero.checkpoint.storage import ABANDONED, Reader, Staging, Storage
from fzero.checkpoint.storage_paths import INDEX, LATEST, LONGEST_INDEX, STEP, Place, Url
from fzero.errors import CheckpointError, StorageError

_PART = 16 << 20  # bytes of an object that are sent at a time
_PARTS = 9000  # parts of one object; stores accept 10000
_THREADS = 8


class Objects(Storage):
    """Storage in the objects of a store that fsspec supports."""

    span = 16 << 20

    def __init__(self, fs: Any):
        self._fs = fs

    def names(self, directory: Url) -> list[str]:
        path = self._path(directory)
        with self._asked("list", directory):
            # fsspec caches listings, and these lack what other processes have written since.
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        found = [p.rstrip("/") for p in found]
        return sorted({p.rpartition("/")[2] for p in found if p != path.rstrip("/")})

    def size(self, file: Url) -> int:
        with self._asked("read", file):
            self._fs.invalidate_cache()
            found = self._fs.info(self._path(file))
        if found["type"] != "file":
            raise FileNotFoundError(str(file))
        return found["size"]

    def is_directory(self, place: Url) -> bool:
        return bool(self.names(place))

    def is_published(self, directory: Url) -> bool:
        return self.has(directory / INDEX)

    @contextlib.contextmanager
    def reader(self, file: Url) -> Iterator[Reader]:
        def read(out: memoryview, offset: int) -> int:
            data = self.ranged(file, offset, offset + len(out))
            out[: len(data)] = data
            return len(data)

        yield read

    def ranged(self, file: Url, start: int | None = None, stop: int | None = None) -> bytes:
        with self._asked("read", file):
            return self._fs.cat_file(self._path(file), start=start, end=stop)

    def read(self, file: Url, nbytes: int) -> bytes:
        return self.ranged(file, stop=nbytes)

    @contextlib.contextmanager
    def writer(self, file: Url, nbytes: int) -> Iterator[Callable[[memoryview], object]]:
        with self._asked("write", file, new=True):
            # Stores limit the number of parts of an upload, so the parts of a very large file have to be larger.
            part = max(_PART, -(-nbytes // _PARTS // (1 << 20)) * (1 << 20))
            stream = self._fs.open(self._path(file), "wb", block_size=part)

        def write(data: memoryview) -> None:
            with self._asked("write", file, new=True):
                stream.write(data)

        try:
            yield write
            with self._asked("write", file, new=True):
                stream.close()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.discard()  # the parts of a multipart upload that were already sent
            with contextlib.suppress(Exception):
                stream.closed = True  # otherwise garbage collection would finish the upload
            raise

    def write(self, file: Url, data: bytes) -> None:
        with self._asked("write", file, new=True):
            self._fs.pipe_file(self._path(file), data)

    def link(self, directory: Url, name: str) -> str | None:
        return None

    def begin(self, root: Url, name: str, private: bool = False) -> Staging:
        if self.has(root):
            fix = "give the place under which checkpoints are to be made"
            raise CheckpointError("checkpoint.save", f"{root} is an object", fix=fix)
        here = [root / n for n in self.names(root) if n.startswith(STEP)]
        with ThreadPool(_THREADS) as pool:
            complete = pool.map(self.is_published, here)
        for directory in (directory for directory, whole in zip(here, complete, strict=True) if not whole):
            files = [directory / n for n in self.names(directory)]
            # All of them: a save that is under way writes at least one object per hour, so its older objects are not
            # deleted.
            if all(time.time() - self._written(file) > ABANDONED for file in files):
                self._delete(files)
        return Staging(root / name, f".{uuid.uuid4().hex[:8]}")

    def publish(self, root: Url, staging: Staging, name: str, index: bytes) -> list[Place]:
        target, before = root / name, None
        # The index of the checkpoint that this one replaces. Its files have other names, so they are still there if
        # this save has to be undone.
        with contextlib.suppress(FileNotFoundError):
            before = self.whole(target / INDEX, LONGEST_INDEX)
        try:
            self.write(target / INDEX, index)
            self.write(root / LATEST, f"{name}\n".encode())
        except BaseException:
            with contextlib.suppress(Exception):
                if before is not None:  # restores the checkpoint that this save would have replaced
                    self.write(target / INDEX, before)
                elif self.whole(target / INDEX, LONGEST_INDEX) == index:  # not that of another save
                    self._delete([target / INDEX])
            raise
        with contextlib.suppress(CheckpointError):  # leftover objects do no harm
            self._delete([target / n for n in _files_of(before)])
        return []

    def undo(self, root: Url, staging: Staging) -> None:
        home: Any = staging.directory
        with contextlib.suppress(Exception):
            with contextlib.suppress(FileNotFoundError):
                if staging.mark.encode() in self.whole(home / INDEX, LONGEST_INDEX):
                    return  # the index was written although the store reported an error
            self._delete([home / n for n in self.names(home) if staging.mark in n])

    def _written(self, file: Url) -> float:
        """Returns when an object was written, in seconds since the epoch; the current time if its store does not
        tell."""
        try:
            with self._asked("read", file):
                return self._fs.modified(self._path(file)).timestamp()
        except (FileNotFoundError, NotImplementedError):
            return time.time()

    def retire(self, root: Url, directory: Url) -> None:
        # Without an index it is not a checkpoint any more, whatever is deleted of the rest.
        self._delete([directory / INDEX])
        self._delete([directory / n for n in self.names(directory)])

    def _delete(self, files: Iterable[Any]) -> None:
        def delete(file: Url) -> None:
            with contextlib.suppress(FileNotFoundError), self._asked("delete", file):
                self._fs.rm_file(self._path(file))

        with ThreadPool(_THREADS) as pool:
            pool.map(delete, files)

    def _path(self, url: Url) -> str:
        return self._fs._strip_protocol(str(url))

    @contextlib.contextmanager
    def _asked(self, to: str, url: Url, new: bool = False) -> Iterator[None]:
        """Turns the errors of a store into a `StorageError` that says what was attempted: errors of the operating
        system, and classes that the store's client defines. Other errors are not the store's and pass through.

        With `new`, a missing file means that its bucket does not exist.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            # For example a MemoryError or a TypeError: a fault of this program, not of the store.
            if not isinstance(error, OSError) and type(error).__module__ in ("builtins", "torch"):
                raise
            if isinstance(error, FileNotFoundError) and not new:
                raise
            fix = (
                "check that the store can be reached from here, that the credentials may read, write, list and delete "
            )
            fix += "there, and the store's options; fsspec's package for it reads both from its usual places"
            if isinstance(error, FileNotFoundError):
                fix = "make the bucket or container first, or correct its name"
            raise StorageError("checkpoint", f"cannot {to} {url}", [_said(error)], fix) from error


def _files_of(index: bytes | None) -> list[str]:
    """Returns the names of the files of a checkpoint with this index; none if the index is damaged."""
    try:
        return [n for n in parsed(index or b"", dict[str, Any]).get("files", ()) if "/" not in n and n != INDEX]
    except (Malformed, TypeError):
        return []


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return text if len(text) < 300 else text[:300] + "…"


def objects_of(url: Url) -> Objects:
    """Returns the object store of a URL.

    Raises:
        CheckpointError: fsspec is not installed, it has no package for this protocol, or the protocol does not
            accept the configured options.
    """
    scheme, _, rest = str(url).partition("://")
    # The process is part of the key of the cache, because the event loop and the connections of an fsspec filesystem do
    # not survive a fork.
    return _objects(os.getpid(), f"{scheme}://{rest.partition('/')[0]}")


@functools.cache
def _objects(process: int, root: str) -> Objects:
    """Returns the object store of a scheme and bucket.

    `process` is part of the cache key because a filesystem made in another process has none of its threads in this
    one.
    """
    what = f"{root} needs a package that is not installed"
    try:
        import fsspec
    except ImportError:
        fix = "pip install fsspec, and its package for this protocol (s3fs, gcsfs, adlfs, ...)"
        raise CheckpointError("checkpoint", what, ["fsspec"], fix) from None
    problem = f"chains of protocols ({root!r})" if "::" in root else None
    if problem is None:
        try:
            return Objects(fsspec.core.url_to_fs(root)[0])
        except ImportError as error:
            raise CheckpointError("checkpoint", what, [str(error)], "install the package that it names") from error
        except Exception as error:
            problem = _said(error)
    fix = "give a path, or the URL of an object store whose protocol fsspec has: s3://, gs://, az://, …"
    raise CheckpointError("checkpoint", f"cannot open {root}", [problem], fix)
