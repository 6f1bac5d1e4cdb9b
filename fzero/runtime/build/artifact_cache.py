"""Caches compiled subgraphs on disk: one file per subgraph, under a key that covers everything that affects the
compiled code.

It knows how files are stored, not how subgraphs are compiled. An entry is a shared library (or another opaque payload),
the Python code around it, and a footer with a digest of both. Loading a truncated library would crash the process, so
nothing is loaded before its digest has been verified.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero._compat import compat
from fzero._utils.path_permissions import exposed, make_private_directory, not_writable
from fzero._utils.procfs import boot_id
from fzero._utils.units import parse_bytes
from fzero.errors import FzeroValueError
from fzero.ir.program import Function
from fzero.trace.guards import deterministic_mode
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import signature

FORMAT = 4
"""Version of the entries. Increase it when fzero generates different code for a subgraph, or stores it differently."""

LIMIT = 10 * 2**30
"""Default size limit of a cache in bytes."""

_MAGIC = b"fzero-\x00\x01"
_FOOTER = struct.Struct(">QQ32s8s")  # size of the library, size of the text, digest of both, magic number
_ABANDONED_S = 3600.0  # age after which a temporary file is considered abandoned

logger = logging.getLogger("fzero")


@dataclass(frozen=True)
class CacheEntry:
    """A compiled subgraph: the Python code that is run, and the library (or the payload) that it calls."""

    text: str
    library: bytes

    @property
    def digest(self) -> str:
        """The digest of the library. Subgraphs that were compiled together have the same library."""
        return hashlib.sha256(self.library).hexdigest()


@dataclass(frozen=True)
class Cache:
    """A folder of entries with at most `limit` bytes; the least recently used entries are removed first."""

    folder: Path
    limit: int = LIMIT

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.so"

    def read(self, key: str) -> CacheEntry | None:
        """Returns the entry of a key if there is an intact one. A damaged entry is removed. Reading counts as use."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        entry = _decode(data)
        if entry is None:
            logger.info("the cached function %s is damaged and will be compiled again", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            # The time of the last access is not reliable, because most filesystems are mounted with relatime or
            # noatime. `trim` therefore sorts by the time of modification.
            os.utime(path)
        return entry

    def write(self, key: str, entry: CacheEntry) -> None:
        """Stores an entry atomically: a concurrent reader sees the old file or the new one, never a part."""
        text = entry.text.encode()
        digest = hashlib.sha256(entry.library + text).digest()
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{key[:16]}.", suffix=".tmp")  # 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(entry.library + text + _FOOTER.pack(len(entry.library), len(text), digest, _MAGIC))
            # Readers open the file by name, so they see the old contents or the new. A process that has mapped the old
            # library keeps its inode. No fsync: after a crash of the host, the digest finds an entry that was not
            # written completely.
            os.rename(temporary, self.path(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def trim(self) -> None:
        """Removes the least recently used entries until the size is within the limit. A process that has loaded an
        entry keeps what it loaded."""
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may be trimming at the same time
                about = path.stat()
                if path.suffix == ".tmp" and time.time() - about.st_mtime > _ABANDONED_S:
                    path.unlink(missing_ok=True)
                elif path.suffix == ".so":
                    files.append((about.st_mtime, about.st_size, path))
        total = sum(size for _, size, _ in files)
        # Sorted by time of modification, so the entries that were read or written longest ago come first.
        for _, size, path in sorted(files):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def identity(self) -> tuple[Any, ...]:
        """Returns a value that is equal for processes that see the same folder: the device and inode numbers, and the
        kernel that assigned them."""
        about = self.folder.stat()
        return boot_id(), about.st_dev, about.st_ino


def _decode(data: bytes) -> CacheEntry | None:
    if len(data) < _FOOTER.size:
        return None
    size, text_size, digest, magic = _FOOTER.unpack(data[-_FOOTER.size :])
    body = data[: -_FOOTER.size]
    # The sizes and the magic number are at the end, so a file that was truncated anywhere fails this test.
    if magic != _MAGIC or size + text_size != len(body) or hashlib.sha256(body).digest() != digest:
        return None
    return CacheEntry(body[size:].decode(), body[:size])


def open_cache() -> Cache | None:
    """Opens the cache that the environment configures: FZERO_CACHE is a folder or "off" (~/.cache/fzero by default),
    FZERO_CACHE_LIMIT its size ("10GiB" by default). Returns None if the cache is off, or cannot be used; in the latter
    case a line in the log says why.

    Raises:
        FzeroValueError: the limit is not a size.
    """
    where = os.environ.get("FZERO_CACHE") or "~/.cache/fzero"
    if where == "off":
        return None
    limit = _limit()
    folder = Path(where).expanduser() / "functions"
    try:
        make_private_directory(folder)
        # Whoever can write to the folder can run code in this process, and the digest does not protect against that: it
        # is in the file that it covers.
        if (why := exposed(folder)) is not None:
            logger.warning("the cache %s is not used: %s, and the contents of a cache are executed", folder, why)
            return None
        why = not_writable(folder)
    except OSError as error:
        why = str(error)
    if why is not None:
        logger.warning("the cache %s is not used: %s", folder, why)
        return None
    return Cache(folder, limit)


def _limit() -> int:
    text = os.environ.get("FZERO_CACHE_LIMIT", "")
    try:
        return parse_bytes(int(text) if text.isdigit() else text) if text else LIMIT
    except FzeroValueError as error:
        raise FzeroValueError(
            "cache",
            f"FZERO_CACHE_LIMIT={text!r} is not a size",
            fix="give a number of bytes, or add a unit, e.g. 10GiB",
        ) from error


def key(graph: Recorded, function: Function, device: torch.device) -> str:
    """Hashes everything that affects how a subgraph is compiled.

    Args:
        graph: its operations as they are compiled: the hash covers shapes, strides, dtypes and literals.
        function: the inputs that it writes, and the results for which it is given buffers.
        device: the device it will run on, with the index of a GPU. The hash also covers the number of threads of this
            process.
    """
    constants = [
        x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in graph.constants.values()
    ]
    parts = (
        FORMAT,
        torch.__version__,
        sys.implementation.cache_tag,
        _hardware(device),
        # Inductor writes the number of threads into CPU kernels.
        torch.get_num_threads(),
        os.environ.get("CXX", ""),
        compat.native_bf16(device),
        compat.native_fp16(device),
        compat.inductor_settings_text(),
        deterministic_mode.setting(),
        signature(graph),
        [hashlib.sha256(c).hexdigest() for c in constants],
        function.writes,
        function.into,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _hardware(device: torch.device) -> tuple[str, ...]:
    """Describes the target of generated code. For a CPU it includes all instruction sets, because kernels are compiled
    for the exact machine on which they are compiled."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        # Inductor writes the index into the code around the kernels.
        return device.type, str(device.index), name, str(capability), str(torch.version.cuda), _triton()
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return device.type, platform.machine(), torch.backends.cpu.get_cpu_capability(), flags


def _triton() -> str:
    """Returns the version of Triton, which compiles the kernels of a GPU."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""
