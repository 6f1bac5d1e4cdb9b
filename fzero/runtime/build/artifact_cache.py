"""Caches compiled functions on disk: one file a function, under a key of everything that decided what was compiled.

It knows how files are kept, not how functions are compiled. An entry is a shared library (or another opaque payload),
the Python around it and a footer with a digest of both: a library that was cut short would crash the process that loads
it, so nothing is loaded before its digest is right.
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
from fzero._utils.path_permissions import exposed, not_writable
from fzero._utils.units import parse_bytes
from fzero.errors import FzeroValueError
from fzero.ir.program import Function
from fzero.trace.guards import deterministic_mode
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import signature

FORMAT = 4
"""Version of the entries. A change in what fzero makes of a function, or in how it is stored, needs another number."""

LIMIT = 10 * 2**30
"""Bytes that a cache holds by default."""

_MAGIC = b"fzero-\x00\x01"
_FOOTER = struct.Struct(">QQ32s8s")  # bytes of the library, bytes of the text, digest of both, magic
_ABANDONED_S = 3600.0  # after which a temporary file has no writer any more

logger = logging.getLogger("fzero")


@dataclass(frozen=True)
class CacheEntry:
    """A compiled function: the Python that is run, and the library (or the payload) that it calls."""

    text: str
    library: bytes

    @property
    def digest(self) -> str:
        """The digest of the library: functions that were compiled together share one."""
        return hashlib.sha256(self.library).hexdigest()


@dataclass(frozen=True)
class Cache:
    """A folder of entries, at most `limit` bytes of them: those used longest ago leave first."""

    folder: Path
    limit: int = LIMIT

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.so"

    def read(self, key: str) -> CacheEntry | None:
        """The entry of a key, if there is one and it is whole; a damaged one is removed. Reading counts as use."""
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
            os.utime(path)
        return entry

    def write(self, key: str, entry: CacheEntry) -> None:
        """Keeps an entry. Whoever reads at the same time sees the old file or the new one, never a part."""
        text = entry.text.encode()
        digest = hashlib.sha256(entry.library + text).digest()
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{key[:16]}.", suffix=".tmp")  # 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(entry.library + text + _FOOTER.pack(len(entry.library), len(text), digest, _MAGIC))
            os.rename(temporary, self.path(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def trim(self) -> None:
        """Removes what was used longest ago until the limit is kept. A process that has loaded an entry keeps what it
        loaded."""
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process trims too
                about = path.stat()
                if path.suffix == ".tmp" and time.time() - about.st_mtime > _ABANDONED_S:
                    path.unlink(missing_ok=True)
                elif path.suffix == ".so":
                    files.append((about.st_mtime, about.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def identity(self) -> tuple[Any, ...]:
        """The same for processes that see the same folder: device and inode, on the kernel that numbered them."""
        about = self.folder.stat()
        return host(), about.st_dev, about.st_ino


def _decode(data: bytes) -> CacheEntry | None:
    if len(data) < _FOOTER.size:
        return None
    size, text_size, digest, magic = _FOOTER.unpack(data[-_FOOTER.size :])
    body = data[: -_FOOTER.size]
    if magic != _MAGIC or size + text_size != len(body) or hashlib.sha256(body).digest() != digest:
        return None
    return CacheEntry(body[size:].decode(), body[:size])


def open_cache() -> Cache | None:
    """The cache that the environment asks for: FZERO_CACHE is a folder or "off" (~/.cache/fzero by default),
    FZERO_CACHE_LIMIT its size ("10GiB" by default). None if it is off, or cannot be used; then a line in the log says
    why.

    Raises:
        FzeroValueError: a limit that is not a size.
    """
    where = os.environ.get("FZERO_CACHE") or "~/.cache/fzero"
    if where == "off":
        return None
    limit = _limit()
    folder = Path(where).expanduser() / "functions"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (why := exposed(folder)) is not None:
            logger.warning("the cache %s is not used: %s, and what a cache holds is run", folder, why)
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
            fix="give a number of bytes, or a unit too, e.g. 10GiB",
        ) from error


def key(graph: Recorded, function: Function, device: torch.device) -> str:
    """A hash of what decides how a function is compiled.

    Args:
        graph: its operations as they are compiled: shapes, strides, dtypes and literals are part of them.
        function: which inputs it writes, and which results it is given buffers for.
        device: what it will run on; its index is not part of it. The number of threads is this process's.
    """
    constants = [
        x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in graph.constants.values()
    ]
    parts = (
        FORMAT,
        torch.__version__,
        sys.implementation.cache_tag,
        _hardware(device),
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
    """The target of generated code: a CPU's instructions, all of them, because kernels are compiled for the machine
    they are compiled on."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return device.type, name, str(capability), str(torch.version.cuda), _triton()
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return device.type, platform.machine(), torch.backends.cpu.get_cpu_capability(), flags


def _triton() -> str:
    """The version of the compiler of a GPU's kernels."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def host() -> str:
    """The same in all processes of one running kernel, containers included."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
