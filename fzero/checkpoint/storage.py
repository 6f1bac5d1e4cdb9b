"""Stores the files of checkpoints: in directories of a filesystem, or as objects of a store behind a URL.

    path               a directory has another name while it is written; a rename publishes it
    scheme://bucket/…  through fsspec. Objects are not renamed, and are there whole or not at all: those of a save have
                       names that none had before, and the index, written last, publishes them

Whether a checkpoint is complete, and which is the latest, is decided by asking for an object; a listing, which may lag
behind, only says which there are to ask for. This file knows names, not contents.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import re
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from fzero.errors import CheckpointError, StorageError, message

INDEX = "index.json"
LATEST = "latest"
TEMPORARY = ".tmp-"
STEP = "step-"

SET_ASIDE = ".replaced"
"""Suffix of a checkpoint that is being replaced by another of the same step: there for two renames."""

GIVE = "give the path that fz.checkpoint.save was given"

_PART = 16 << 20  # bytes of an object that are sent at a time
_PARTS = 9000  # stores take 10000 of one object
_THREADS = 8
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+)://")
_REFUSED = re.compile(
    r"credential|denied|forbidden|unauthorized|(expired|invalid|security|access)[ _-]?token|token (has |is )?expired",
    re.I,
)
"""Texts of the errors of a client that has no credentials, or not the right ones."""

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


class Url(os.PathLike[str]):
    """The place of objects in a store, e.g. s3://bucket/run/step-00000003: what `save` returns for one of a URL.

    Its text, `str(url)`, is what other libraries take.

    Example:
        >>> url = Url("s3://bucket/run") / "step-00000003"
        >>> url.name, str(url.parent)
        ('step-00000003', 's3://bucket/run')
    """

    __slots__ = ("_rest", "_scheme")

    def __init__(self, text: str):
        self._scheme, _, rest = text.partition("://")
        self._rest = rest.rstrip("/")

    def __str__(self) -> str:
        return f"{self._scheme}://{self._rest}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, Url) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def name(self) -> str:
        return self._rest.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(f"{self._scheme}://{posixpath.dirname(self._rest)}")

    def with_name(self, name: str) -> Url:
        return self.parent / name


Place: TypeAlias = Path | Url


def as_path(path: Any) -> Place:
    """The place that a path or a URL names; raises if it is neither. file:// is the path behind it."""
    try:
        if path == "":
            raise CheckpointError(message("checkpoint", "'' names nothing", fix=GIVE))
        text = path if isinstance(path, str) else os.fspath(path)
        if isinstance(text, str) and (match := _SCHEME.match(text)):
            if match[1].lower() in ("file", "local"):
                behind = re.sub("^localhost(?=/|$)", "", text[match.end() :])
                if not behind.strip("/"):
                    raise CheckpointError(message("checkpoint", f"{text!r} names nothing", fix=GIVE))
                if not behind.startswith("/"):
                    what, fix = (
                        f"{text!r} is of the host {behind.partition('/')[0]!r}",
                        "file:///a/path has three slashes",
                    )
                    raise CheckpointError(message("checkpoint", what, fix=fix))
                return Path(unquote(behind))
            if not text[match.end() :].strip("/"):
                fix = "give the bucket and a name in it, e.g. s3://bucket/run"
                raise CheckpointError(message("checkpoint", f"{text!r} names nothing", fix=fix))
            return path if isinstance(path, Url) else Url(text)
        found = Path(text)
    except TypeError:
        raise CheckpointError(message("checkpoint", f"{path!r} is not a path", fix=GIVE)) from None
    if re.match(r"[A-Za-z][A-Za-z0-9+.:-]+:/", str(found)) and not found.exists():
        fix = "give the URL as a str: a Path has one slash where a URL has two"
        raise CheckpointError(message("checkpoint", f"{str(found)!r} is not a path, and not a URL any more", fix=fix))
    return found


def local(path: Any, owner: str, what: str) -> Path:
    """The path of a directory here, for what is not written to, or read from, a URL."""
    place = as_path(path)
    if isinstance(place, Url):
        raise CheckpointError(
            message(owner, f"{place}: {what}", fix="give a local directory, and copy from or to there")
        )
    return place


class Draft(NamedTuple):
    """A checkpoint that is being written: where its files lie, and what their names have that no other's have."""

    directory: Place
    mark: str

    def name(self, plain: str) -> str:
        """The name of a file of it: rank-00000.json is rank-00000.5c1ab3f0.json, say."""
        stem, _, suffix = plain.partition(".")
        return f"{stem}{self.mark}.{suffix}"


class Reader(ABC):
    """An open file."""

    @abstractmethod
    def read_into(self, out: memoryview, offset: int) -> int:
        """Bytes read, from this offset on; 0 at the end, and perhaps fewer than wanted."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(ABC):
    """Files, and what checkpoints need of them. What is not there is a FileNotFoundError."""

    span: int
    """Bytes that are read at a time where a whole file is read."""

    @abstractmethod
    def names(self, directory: Any) -> list[str]:
        """The names of what lies in a directory; none where nothing is. A store may list what was just deleted, and not
        yet what was just written."""

    @abstractmethod
    def size(self, file: Any) -> int:
        """Bytes of a file."""

    @abstractmethod
    def read(self, file: Any, nbytes: int | None = None) -> bytes:
        """A whole file, or its first bytes."""

    @abstractmethod
    def is_directory(self, place: Any) -> bool: ...

    @abstractmethod
    def is_published(self, directory: Any) -> bool:
        """Whether what has the name of a checkpoint is, or was, one: not a save that did not come to its end."""

    @abstractmethod
    def reader(self, file: Any) -> Reader: ...

    @abstractmethod
    def writer(self, file: Any, nbytes: int) -> AbstractContextManager[Callable[[memoryview], object]]:
        """Writes a new file of this many bytes, piece by piece. It is on stable storage when the context ends well."""

    @abstractmethod
    def write(self, file: Any, data: bytes) -> None:
        """Writes a file as a whole."""

    @abstractmethod
    def link(self, directory: Any, name: str) -> str | None:
        """The place to which a name leads that does not lead to a file of this directory."""

    @abstractmethod
    def stand_in(self, file: Any, nbytes: int) -> AbstractContextManager[Path]:
        """A local file of the same size and the same first bytes."""

    @abstractmethod
    def begin(self, root: Any, name: str) -> Draft:
        """Makes room for a checkpoint of this name, after finishing or removing what saves that were killed left. One
        process calls it."""

    @abstractmethod
    def publish(
        self, root: Any, draft: Draft, name: str, index: bytes, spare: Iterable[str], files: Iterable[str]
    ) -> list[Place]:
        """Makes a draft the checkpoint of this name, and the latest, at once. Returns what may be retired.

        Args:
            index: written last.
            spare: files of the draft that the checkpoint does without.
            files: those that it has.
        """

    @abstractmethod
    def undo(self, root: Any, draft: Draft) -> None:
        """Leaves nothing of a draft that was not published. Does not fail."""

    @abstractmethod
    def retire(self, root: Any, directory: Any) -> None:
        """Deletes a checkpoint: one half deleted is never taken for a complete one."""

    def has(self, file: Any) -> bool:
        try:
            self.size(file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def storage_of(place: Place) -> Storage:
    """The storage of the files of a place.

    Raises:
        CheckpointError: of a URL: no fsspec, nothing for this protocol, or options that it does not take.
    """
    if isinstance(place, Path):
        return _files
    scheme, _, rest = str(place).partition("://")
    return _objects(os.getpid(), f"{scheme}://{rest.partition('/')[0]}")


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync(directory: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _File(Reader):
    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, out: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [out], offset)

    def close(self) -> None:
        os.close(self._fd)


class _Files(Storage):
    """Directories and files, of which a rename publishes a directory."""

    span = 1 << 20

    def names(self, directory: Path) -> list[str]:
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CheckpointError(message("checkpoint", f"{directory} is not a directory", fix=GIVE)) from None

    def size(self, file: Path) -> int:
        return os.stat(file).st_size

    def read(self, file: Path, nbytes: int | None = None) -> bytes:
        with file.open("rb") as opened:
            return opened.read(-1 if nbytes is None else nbytes)

    def is_directory(self, place: Path) -> bool:
        return place.is_dir()

    def is_published(self, directory: Path) -> bool:
        return True

    def reader(self, file: Path) -> Reader:
        return _File(file)

    @contextlib.contextmanager
    def writer(self, file: Path, nbytes: int) -> Iterator[Callable[[memoryview], object]]:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield functools.partial(write_all, fd)
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

    def begin(self, root: Path, name: str) -> Draft:
        if root.exists() and not root.is_dir():
            fix = "give the directory in which checkpoints are to be made"
            raise CheckpointError(message("checkpoint.save", f"{root} is not a directory", fix=fix))
        if not root.is_dir():
            root.mkdir(parents=True)
            sync(root.parent)
        for entry in list(root.iterdir()):
            if entry.name.startswith(TEMPORARY):
                _remove(entry)
            elif entry.name.startswith(STEP) and entry.name.endswith(SET_ASIDE):
                if entry.with_name(entry.name.removesuffix(SET_ASIDE)).exists():
                    self.retire(root, entry)
                else:
                    os.rename(entry, entry.with_name(entry.name.removesuffix(SET_ASIDE)))
        draft = Draft(root / (TEMPORARY + name), "")
        draft.directory.mkdir()  # type: ignore[union-attr]
        return draft

    def publish(
        self, root: Path, draft: Draft, name: str, index: bytes, spare: Iterable[str], files: Iterable[str]
    ) -> list[Place]:
        temporary, target = draft.directory, root / name
        assert isinstance(temporary, Path)
        self.write(temporary / INDEX, index)
        for one in spare:
            os.unlink(temporary / one)
        sync(temporary)
        pointer = root / (TEMPORARY + LATEST)  # written before the rename: a full disk must not come between the two
        pointer.unlink(missing_ok=True)
        self.write(pointer, f"{name}\n".encode())
        old = target.with_name(name + SET_ASIDE)
        if target.exists():
            os.rename(target, old)  # from here to the next rename, readers find this step under its other name
        os.rename(temporary, target)
        sync(root)
        os.replace(pointer, root / LATEST)
        sync(root)
        return [old] if old.exists() else []

    def undo(self, root: Path, draft: Draft) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(draft.directory, ignore_errors=True)
            (root / (TEMPORARY + LATEST)).unlink(missing_ok=True)

    def retire(self, root: Path, directory: Path) -> None:
        gone = root / f"{TEMPORARY}old-{directory.name}"
        os.rename(directory, gone)
        _remove(gone)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


_files = _Files()


class _Object(Reader):
    def __init__(self, objects: _Objects, url: Url):
        self._objects, self._url = objects, url
        self._end: int | None = None  # known when less came than was asked for

    def read_into(self, out: memoryview, offset: int) -> int:
        if self._end is not None and offset >= self._end:
            return 0
        data = self._objects.ranged(self._url, offset, offset + len(out))
        out[: len(data)] = data
        if len(data) < len(out):
            self._end = offset + len(data)
        return len(data)

    def close(self) -> None:
        pass


class _Objects(Storage):
    """Objects of a store that fsspec knows."""

    span = 16 << 20

    def __init__(self, fs: Any):
        self._fs = fs

    def names(self, directory: Url) -> list[str]:
        path = self._path(directory)
        with self._asked("list", directory):
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

    def reader(self, file: Url) -> Reader:
        return _Object(self, file)

    def ranged(self, file: Url, start: int | None = None, stop: int | None = None) -> bytes:
        with self._asked("read", file):
            return self._fs.cat_file(self._path(file), start=start, end=stop)

    def read(self, file: Url, nbytes: int | None = None) -> bytes:
        return self.ranged(file, stop=nbytes)

    @contextlib.contextmanager
    def writer(self, file: Url, nbytes: int) -> Iterator[Callable[[memoryview], object]]:
        with self._asked("write", file, new=True):
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
                stream.discard()  # what was sent already of an upload in parts
            with contextlib.suppress(Exception):
                stream.closed = True  # or it is finished when it is collected
            raise

    def write(self, file: Url, data: bytes) -> None:
        with self._asked("write", file, new=True):
            self._fs.pipe_file(self._path(file), data)

    def link(self, directory: Url, name: str) -> str | None:
        return None

    @contextlib.contextmanager
    def stand_in(self, file: Url, nbytes: int) -> Iterator[Path]:
        size = self.size(file)
        with tempfile.NamedTemporaryFile(prefix="fzero-", suffix="-" + file.name) as made:
            made.write(self.read(file, min(nbytes, size)))
            made.flush()
            os.truncate(made.name, size)  # a hole for what is not read
            yield Path(made.name)

    def begin(self, root: Url, name: str) -> Draft:
        if self.has(root):
            fix = "give the place under which checkpoints are to be made"
            raise CheckpointError(message("checkpoint.save", f"{root} is an object", fix=fix))
        here = [root / n for n in self.names(root) if n.startswith(STEP)]
        with ThreadPool(_THREADS) as pool:
            complete = pool.map(self.is_published, here)
        for directory, whole in zip(here, complete, strict=True):
            if not whole:
                self._delete([directory / n for n in self.names(directory)])
        return Draft(root / name, f".{uuid.uuid4().hex[:8]}")

    def publish(
        self, root: Url, draft: Draft, name: str, index: bytes, spare: Iterable[str], files: Iterable[str]
    ) -> list[Place]:
        target, before = root / name, None
        with contextlib.suppress(FileNotFoundError):
            before = self.read(target / INDEX)
        try:
            self.write(target / INDEX, index)
            here = [target / n for n in files]
            with ThreadPool(_THREADS) as pool:  # from now on nobody takes them for those of a save that was killed
                there = pool.map(self.has, here)
            if not all(there):
                fix = "give each job a URL of its own: one job at a time saves to one"
                gone = [str(file) for file, is_there in zip(here, there, strict=True) if not is_there]
                what = f"another job saves here: of what was written to {target} there is no more"
                raise CheckpointError(message("checkpoint.save", what, gone[:5], fix))
            self.write(root / LATEST, f"{name}\n".encode())
        except BaseException:
            with contextlib.suppress(Exception):
                if before is not None:
                    self.write(target / INDEX, before)
                elif self.read(target / INDEX) == index:  # not another's
                    self._delete([target / INDEX])
            raise
        with contextlib.suppress(CheckpointError):  # they are in nobody's way
            old = [n for n in self.names(target) if n != INDEX and draft.mark not in n]  # of this step before
            self._delete([target / n for n in (*spare, *old)])
        return []

    def undo(self, root: Url, draft: Draft) -> None:
        home: Any = draft.directory
        with contextlib.suppress(Exception):
            with contextlib.suppress(FileNotFoundError):
                if draft.mark.encode() in self.read(home / INDEX):
                    return  # the store did not say that it had written it
            self._delete([home / n for n in self.names(home) if draft.mark in n])

    def retire(self, root: Url, directory: Url) -> None:
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
        """Names the errors of a store: those of the operating system, and those that its client has classes of its own
        for. Others are no store's. `new`: that something is not there means its bucket."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if not isinstance(error, OSError) and type(error).__module__ in ("builtins", "torch"):
                raise
            if isinstance(error, FileNotFoundError) and not new:
                raise
            said = _said(error)
            if isinstance(error, FileNotFoundError):
                fix = "make the bucket or container first, or correct its name"
            elif isinstance(error, PermissionError) or _REFUSED.search(said):
                fix = "give credentials that may read, write, list and delete there, where fsspec's package for "
                fix += "this store looks for them (of s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
            else:
                fix = "see whether the store can be reached from here; its options are read from fsspec's configuration"
            raise StorageError(message("checkpoint", f"cannot {to} {url}", [said], fix)) from error


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return text if len(text) < 300 else text[:300] + "…"


@functools.cache
def _objects(process: int, root: str) -> _Objects:
    """The store of a scheme and bucket; `process`: a filesystem of another has none of its threads."""
    scheme, what = root.partition("://")[0], f"{root} needs a package that is not installed"
    package = _PACKAGES.get(scheme)
    try:
        import fsspec
    except ImportError:
        fix = f"pip install 'fzero[fsspec]'{f' {package}' if package else ''}"
        raise CheckpointError(message("checkpoint", what, ["fsspec"], fix)) from None
    problem = f"chains of protocols ({root!r})" if "::" in root else None
    if problem is None:
        try:
            return _Objects(fsspec.core.url_to_fs(root)[0])
        except ImportError as error:
            fix = f"pip install {package}" if package else "install what it names"
            raise CheckpointError(message("checkpoint", what, [str(error)], fix)) from error
        except Exception as error:
            problem = _said(error)
    fix = "give a path, or the URL of an object store whose protocol fsspec has: s3://, gs://, az://, …"
    raise CheckpointError(message("checkpoint", f"cannot open {root}", [problem], fix))
