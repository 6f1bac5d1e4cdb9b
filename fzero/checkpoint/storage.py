"""Defines the storage of checkpoint files: directories of a filesystem, or objects in a store behind a URL.

    path               a directory has another name while it is written; a rename publishes it
    scheme://bucket/…  through fsspec. Objects are not renamed, and each is there completely or not at all. The objects
                       of a save have names that no object had before; the index, written last, publishes them

Whether a checkpoint is complete, and which one is the latest, is decided by requesting an object. A listing, which
may lag behind, only tells which objects to request. This file deals with names, not with contents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from fzero._utils.bounded_json import MOST, Malformed
from fzero.checkpoint.storage_paths import Place

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


class Reader(ABC):
    """An open file."""

    @abstractmethod
    def read_into(self, out: memoryview, offset: int) -> int:
        """Reads from this offset on and returns the number of bytes: 0 at the end of the file, and possibly fewer than
        `out` takes."""

    def fill(self, out: memoryview, offset: int) -> int:
        """Reads from this offset on and returns the number of bytes, fewer than `out` takes only if the file ends."""
        got = 0
        # A single `preadv` returns at most 2 GiB on Linux, and network filesystems may return less than requested.
        while got < len(out) and (n := self.read_into(out[got:], offset + got)):
            got += n
        return got

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(ABC):
    """The operations on files that checkpoints need. For a file that does not exist they raise FileNotFoundError."""

    span: int
    """The number of bytes per read when an entire file is read."""

    @abstractmethod
    def names(self, directory: Any) -> list[str]:
        """Returns the names in a directory, or none if it does not exist.

        An object store may still list what was just deleted, and not yet list what was just written.
        """

    @abstractmethod
    def size(self, file: Any) -> int:
        """Returns the size of a file in bytes."""

    @abstractmethod
    def read(self, file: Any, nbytes: int) -> bytes:
        """Returns the first `nbytes` bytes of a file, or all if there are fewer."""

    @abstractmethod
    def is_directory(self, place: Any) -> bool: ...

    @abstractmethod
    def is_published(self, directory: Any) -> bool:
        """Whether something with the name of a checkpoint is or was a checkpoint, and not a save that did not
        finish."""

    @abstractmethod
    def reader(self, file: Any) -> Reader: ...

    @abstractmethod
    def writer(self, file: Any, nbytes: int) -> AbstractContextManager[Callable[[memoryview], object]]:
        """Writes a new file of this many bytes, piece by piece. The file is on stable storage when the context ends
        without an error."""

    @abstractmethod
    def write(self, file: Any, data: bytes) -> None:
        """Writes an entire file at once."""

    @abstractmethod
    def link(self, directory: Any, name: str) -> str | None:
        """Returns where a name leads if it does not lead to a file of this directory, else None."""

    @abstractmethod
    def stand_in(self, file: Any, nbytes: int) -> AbstractContextManager[Path]:
        """Provides a local file with the same size and the same first bytes."""

    @abstractmethod
    def begin(self, root: Any, name: str, private: bool = False) -> Staging:
        """Prepares a checkpoint of this name, after finishing or removing what killed saves have left behind.

        Staged checkpoints that have not been written to for an hour are considered abandoned. One process calls it.
        `private`: only this user can access the files.
        """

    @abstractmethod
    def publish(
        self, root: Any, staging: Staging, name: str, index: bytes, spare: Iterable[str], files: Iterable[str]
    ) -> list[Place]:
        """Makes a staged checkpoint the checkpoint of this name and the latest one, atomically. Returns the checkpoints
        that may be deleted now.

        Args:
            index: the contents of the index, which is written last.
            spare: staged files that the checkpoint does not need.
            files: files that the checkpoint has.
        """

    @abstractmethod
    def undo(self, root: Any, staging: Staging) -> None:
        """Removes a staged checkpoint that was not published. Does not raise."""

    @abstractmethod
    def retire(self, root: Any, directory: Any) -> None:
        """Deletes a checkpoint in such a way that a partly deleted one is never taken for a complete one."""

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

    def has(self, file: Any) -> bool:
        try:
            self.size(file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def storage_of(place: Place) -> Storage:
    """Returns the storage for the files of a path or URL.

    Raises:
        CheckpointError: for a URL: fsspec is not installed, it has no package for this protocol, or the protocol
            does not accept the configured options.
    """
    if isinstance(place, Path):
        from fzero.checkpoint.filesystem import FILES

        return FILES
    from fzero.checkpoint.object_store import objects_of

    return objects_of(place)
