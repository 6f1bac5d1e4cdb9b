"""Stores the files of checkpoints: in directories of a filesystem, or as objects of a store behind a URL.

    path               a directory has another name while it is written; a rename publishes it
    scheme://bucket/…  through fsspec. Objects are not renamed, and are there whole or not at all: those of a save have
                       names that none had before, and the index, written last, publishes them

Whether a checkpoint is complete, and which is the latest, is decided by asking for an object; a listing, which may lag
behind, only says which there are to ask for. This file knows names, not contents.
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
"""Seconds after which a draft to which nobody has written is taken to be left by a save that was killed."""


class Draft(NamedTuple):
    """A checkpoint in progress: the place of its files, and a suffix that makes their names unique."""

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

    def fill(self, out: memoryview, offset: int) -> int:
        """Bytes read, from this offset on; fewer than wanted only where the file ends."""
        got = 0
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
    def read(self, file: Any, nbytes: int) -> bytes:
        """The first bytes of a file, or all if there are no more."""

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
    def begin(self, root: Any, name: str, private: bool = False) -> Draft:
        """Makes room for a checkpoint of this name, after finishing or removing what saves that were killed left:
        drafts to which nobody has written for an hour. One process calls it. `private`: its files are for this user
        alone.
        """

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

    def whole(self, file: Any, most: int = MOST) -> bytes:
        """A whole file.

        Raises:
            Malformed: it has more than so many bytes.
        """
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
    """The storage of the files of a place.

    Raises:
        CheckpointError: of a URL: no fsspec, nothing for this protocol, or options that it does not take.
    """
    if isinstance(place, Path):
        from fzero.checkpoint.filesystem import FILES

        return FILES
    from fzero.checkpoint.object_store import objects_of

    return objects_of(place)
