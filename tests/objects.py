"""Keeps objects, `objects://bucket/…`, behind fsspec: no renames, no directories, nothing written in part, listings
that lag behind, and faults where a test wants them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Gone(OSError):
    """What a store says that cannot be reached."""


class Objects(AbstractFileSystem):
    """Everything is in the class: all threads see one store."""

    protocol = "objects"
    cachable = False
    store: ClassVar[dict[str, bytes]] = {}
    calls: ClassVar[list[tuple[str, str, int, int]]] = []  # what was asked for: act, object, first byte, end
    parts: ClassVar[list[int]] = []  # bytes sent at a time
    refuse: ClassVar[Callable[[str, str], Exception | None] | None] = None  # of an act and an object
    lags: ClassVar[bool] = False
    age: ClassVar[float] = 0.0  # seconds since all objects were written
    _listed: ClassVar[list[str]] = []
    _lock: ClassVar[Any] = threading.RLock()

    @classmethod
    def reset(cls) -> None:
        cls.store, cls.calls, cls.parts, cls._listed = {"bucket/": b""}, [], [], []
        cls.refuse, cls.lags, cls.age = None, False, 0.0

    @classmethod
    def ask(cls, act: str, path: str, start: int = 0, stop: int = 0) -> None:
        with cls._lock:
            cls.calls.append((act, path, start, stop))
            if cls.refuse is not None and (error := cls.refuse(act, path)) is not None:
                raise error

    @classmethod
    def put(cls, path: str, data: bytes) -> None:
        if not path.startswith("bucket/"):
            raise FileNotFoundError(f"the bucket of {path} does not exist")
        cls.ask("put", path)
        cls.store[path] = data

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        self.ask("list", path)
        with self._lock:
            now = sorted(self.store)
            keys, type(self)._listed = (self._listed if self.lags else now), now
        below = {k[len(path) + 1 :].partition("/") for k in keys if k.startswith(path + "/")} - {("", "", "")}
        if not below:
            raise FileNotFoundError(path)
        found = {
            f"{path}/{name}": {"name": f"{path}/{name}", "type": "directory" if more else "file"}
            for name, more, _ in below
        }
        return list(found.values()) if detail else list(found)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        self.ask("head", path)
        if path in self.store:
            return {"name": path, "size": len(self.store[path]), "type": "file"}
        raise FileNotFoundError(path)

    def modified(self, path: str) -> datetime:
        self.ask("head", self._strip_protocol(path))
        return datetime.now(UTC) - timedelta(seconds=self.age)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        self.ask("get", path, start or 0, -1 if end is None else end)
        if path not in self.store:
            raise FileNotFoundError(path)
        if start and start >= len(self.store[path]):
            raise Gone("416: the range is not satisfiable")
        return self.store[path][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.put(self._strip_protocol(path), bytes(value))

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self.ask("delete", path)
        self.store.pop(path, None)  # a store does not mind

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, autocommit: bool = True, **kwargs: Any) -> Any:
        return Upload(self, path, mode, block_size=block_size, autocommit=autocommit)


class Upload(AbstractBufferedFile):
    """An object that is sent in parts, and there when the last has come."""

    def _initiate_upload(self) -> None:
        self.sent: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        assert isinstance(self.buffer, io.BytesIO)
        data = self.buffer.getvalue()
        self.fs.ask("part", self.path)
        Objects.parts.append(len(data))
        self.sent.append(data)
        if final:
            Objects.put(self.path, b"".join(self.sent))
        return True

    def discard(self) -> None:
        self.fs.ask("abort", self.path)
        self.sent = []


fsspec.register_implementation("objects", Objects, clobber=True)
