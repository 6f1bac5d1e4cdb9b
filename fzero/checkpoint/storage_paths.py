"""Represents the location of a checkpoint, a path or the URL of objects in a store, and names the files in it."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from fzero._utils.arguments import shown
from fzero.errors import CheckpointError

INDEX = "index.json"
LONGEST_INDEX = 2 << 30  # bytes: about ten million parts of tensors
LATEST = "latest"
TEMPORARY = ".tmp-"
STEP = "step-"

SET_ASIDE = ".replaced"
"""The suffix of a checkpoint that is being replaced by another one of the same step. It exists between two renames."""

GIVE = "give the path that fz.checkpoint.save was given"

# ":" is among the characters so that a chain of fsspec's protocols (simplecache::s3://…) is taken for a URL, which is
# rejected by name, and not for a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+)://")


class Url(os.PathLike[str]):
    """The location of objects in a store, such as s3://bucket/run/step-00000003. `save` returns one if it was given a
    URL.

    Its text, `str(url)`, is the form that other libraries accept.

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
        """The last component of the path."""
        return self._rest.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The location without its last component."""
        return Url(f"{self._scheme}://{posixpath.dirname(self._rest)}")

    def with_name(self, name: str) -> Url:
        """Returns the location with another last component."""
        return self.parent / name


Place: TypeAlias = Path | Url


def as_path(path: Any) -> Place:
    """Returns the `Path` or `Url` that an argument names, and raises an error if it names neither. A file:// URL
    becomes a path."""
    try:
        if path == "":
            raise CheckpointError("checkpoint", "'' has no path", fix=GIVE)
        text = path if isinstance(path, str) else os.fspath(path)
        if isinstance(text, str) and (match := _SCHEME.match(text)):
            if match[1].lower() in ("file", "local"):
                host, slash, path = text[match.end() :].partition("/")
                if host not in ("", "localhost"):
                    what = f"{text!r} names the host {host!r}"
                    raise CheckpointError("checkpoint", what, fix="file:///a/path has three slashes")
                if not path.strip("/"):
                    raise CheckpointError("checkpoint", f"{text!r} has no path", fix=GIVE)
                return Path(slash + unquote(path))
            if not text[match.end() :].strip("/"):
                fix = "give the bucket and a name in it, e.g. s3://bucket/run"
                raise CheckpointError("checkpoint", f"{text!r} has no path", fix=fix)
            return path if isinstance(path, Url) else Url(text)
        found = Path(text)
    except TypeError:
        fix = f"{GIVE}, as the first argument"
        raise CheckpointError("checkpoint", f"{shown(path)} is not a path", fix=fix) from None
    if re.match(r"[A-Za-z][A-Za-z0-9+.:-]+:/", str(found)) and not found.exists():
        fix = "give the URL as a str: a Path has one slash where a URL has two"
        raise CheckpointError("checkpoint", f"{str(found)!r} is not a path, and no longer a URL", fix=fix)
    return found


def local(path: Any, owner: str, what: str) -> Path:
    """Returns the path of a local directory, for functions that neither write to nor read from a URL."""
    place = as_path(path)
    if isinstance(place, Url):
        raise CheckpointError(owner, f"{place}: {what}", fix="give a local directory, and copy from or to there")
    return place
