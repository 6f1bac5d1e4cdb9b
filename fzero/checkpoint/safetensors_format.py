"""Writes safetensors files and reads ranges of them, in bounded memory, computing and verifying checksums on the way.

A file is 8 bytes of little-endian header length, a JSON header, and the raw bytes of its tensors end to end. All
data goes through one staging buffer of `BLOCK` bytes, from and to any device, so the host never holds a copy of a
complete tensor. The `safetensors` library, in contrast, writes tensors that are completely in memory, reads local files
only, and has no checksums. This file knows nothing of checkpoints or ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import torch

from fzero._utils.bounded_json import Malformed, formed, parsed
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.storage_paths import Place

CHUNK = 1 << 20
"""The number of bytes under one crc32. A restore that reads only a range reads and checks the full chunks around it."""

_HEADER = 100 << 20  # bytes: the safetensors library rejects longer headers, too

BLOCK = 16 * CHUNK
"""The size of the staging buffer in bytes, which is also the size of one read or write."""

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
"""The dtypes that can be stored, with the names that the format uses for them."""

DTYPES = {code: dtype for dtype, code in CODES.items()}


class FormatError(ValueError):
    """A file does not match its index or header. The message is one line without the file's name."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `offset` is where its bytes begin, counted from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ElementRun(NamedTuple):
    """The elements `start` to `stop` of a flattened tensor, which are those of the flattened stored tensor `key` from
    element `at` on."""

    start: int
    stop: int
    key: str
    at: int


@dataclass(frozen=True)
class Written:
    """A file that has been written: its size, its digests, and the offset of each tensor."""

    bytes: int
    sha256: str
    crc32: str
    offsets: Mapping[str, int]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as uint8[nbytes], without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def write(
    path: Place,
    entries: Sequence[Entry],
    blocks: Callable[[Entry], Iterable[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Writes a new safetensors file to stable storage.

    Args:
        path: must not exist.
        entries: the tensors; their offsets are ignored. They are laid out with the widest dtypes first, so that
            every tensor is aligned to its own dtype.
        blocks: returns the bytes of an entry in order, as uint8 tensors on any device.
        metadata: what the header's `__metadata__` has in addition to `{"format": "pt"}`.

    Memory: one buffer of `BLOCK` bytes, or of the size of the file if that is smaller.
    """
    # Large dtypes first: then each tensor begins at a multiple of its element size, as readers that map the file
    # require. The sort is stable, so the order within a dtype is kept.
    entries = sorted(entries, key=lambda e: -e.dtype.itemsize)
    head, offsets = header(entries, metadata or {})
    size = len(head) + sum(e.nbytes for e in entries)
    with storage_of(path).writer(path, size) as put, _Sink(put, size) as sink:
        sink.add(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for entry in entries:
            for block in blocks(entry):
                sink.add(block)
        sink.flush()
        if sink.written != size:
            raise FormatError(f"{sink.written} bytes were produced where the header announces {size}")
    return Written(size, sink.sha256.hexdigest(), "".join(sink.crc32), offsets)


@dataclass
class Ranges:
    """Reads byte ranges of one file in full chunks whose crc32 is checked. `bad` collects the chunks that fail the
    check.

    `crc32` is the concatenation of 8 hex digits per chunk, or None for a file without checksums. Not thread-safe.
    """

    path: Place
    crc32: str | None
    bad: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._opened = storage_of(self.path).reader(self.path)
        self._read = self._opened.__enter__()
        self._buffer = bytearray()
        self._start = self._stop = 0  # the file range that the buffer holds

    def __enter__(self) -> Ranges:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)

    def views(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yields the range in order, as views of the buffer. Each is overwritten by the next."""
        stop = offset + nbytes
        while offset < stop:
            if not self._start <= offset < self._stop:
                self._fill(offset, stop)
            here = min(stop, self._stop)
            yield memoryview(self._buffer)[offset - self._start : here - self._start]
            offset = here

    def read_into(self, out: torch.Tensor, offset: int) -> list[int]:
        """Fills `out`, uint8[n] on any device, from `offset` on. Returns the damaged chunks among those that it has
        read."""
        if self.crc32 is None and out.device.type == "cpu":  # nothing to verify: read into the memory itself
            if (got := self._read(memoryview(out.numpy()), offset)) < out.numel():  # type: ignore[arg-type]
                raise FormatError(f"ends at byte {offset + got}, inside a tensor")
            return []
        done = 0
        for view in self.views(offset, out.numel()):
            out[done : done + len(view)].copy_(torch.frombuffer(view, dtype=torch.uint8))
            done += len(view)
        # `bad` also has chunks of earlier ranges that were read with this object.
        return sorted(c for c in self.bad if c * CHUNK < offset + out.numel() and offset < (c + 1) * CHUNK)

    def _fill(self, offset: int, stop: int) -> None:
        """Reads the chunks around `offset` into the buffer, up to `stop` or as many as fit, and verifies their
        checksums."""
        # Whole chunks are read, because a checksum covers a whole chunk.
        start = offset // CHUNK * CHUNK
        want = min(BLOCK, -(-(stop - start) // CHUNK) * CHUNK)
        if len(self._buffer) < want:
            self._buffer = bytearray(want)
        with memoryview(self._buffer) as view:
            got = self._read(view[:want], start)
            for at in range(0, got if self.crc32 is not None else 0, CHUNK):
                chunk = (start + at) // CHUNK
                # Damaged bytes are delivered all the same, and the chunk is recorded: the caller collects all damage
                # before it raises one error.
                if _crc(view[at : min(at + CHUNK, got)]) != self.crc32[8 * chunk : 8 * chunk + 8]:  # type: ignore[index]
                    self.bad.add(chunk)
        if start + got <= offset:
            raise FormatError(f"ends at byte {start + got}, inside a tensor")
        self._start, self._stop = start, start + got


class _Sink:
    """A file that is being written. Bytes are collected in the buffer; a full buffer is hashed and written in
    parallel."""

    def __init__(self, put: Callable[[memoryview], object], size: int):
        self.written, self.sha256, self.crc32 = 0, hashlib.sha256(), list[str]()
        self._put, self._fill = put, 0
        self._buffer = bytearray(min(BLOCK, size))
        self._tensor = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._pool = ThreadPool(2)  # an executor accepts no work after the main thread has ended (async_save.py)

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        self._pool.join()  # the caller closes the output next

    def add(self, data: torch.Tensor) -> None:
        """Adds bytes to the buffer, which is written whenever it is full."""
        at = 0
        while at < data.numel():
            n = min(data.numel() - at, len(self._buffer) - self._fill)
            if not n:
                raise FormatError("more bytes were produced than the header announces")
            self._tensor[self._fill : self._fill + n].copy_(data[at : at + n])
            at, self._fill = at + n, self._fill + n
            if self._fill == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Writes the contents of the buffer. Every flush except the last has `BLOCK` bytes, so no chunk straddles
        two."""
        data = memoryview(self._buffer)[: self._fill]
        # All three release the GIL: the sha256 and the write in the pool, and crc32 in this thread.
        digest = self._pool.apply_async(self.sha256.update, (data,))
        write = self._pool.apply_async(self._put, (data,))
        self.crc32 += [_crc(data[i : i + CHUNK]) for i in range(0, self._fill, CHUNK)]
        # The buffer is refilled next, so both must have finished with it. `get` also raises their errors.
        digest.get()
        write.get()
        self.written, self._fill = self.written + self._fill, 0


def _crc(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Returns the bytes of a file before its first tensor, for tensors in this order, and the offset of each tensor."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at, starts = 0, {}
    for entry in entries:
        if entry.name in fields:
            raise FormatError(f"two tensors are named {entry.name!r}, or the name is reserved")
        fields[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        starts[entry.name] = at
        at += entry.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    # The format allows spaces after the JSON text. They make the tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


class _Header(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Place) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the tensors of a file in the order of their bytes, and its metadata.

    Raises:
        FormatError: the file is no safetensors file, or has another size than its header says.
        OSError: it cannot be read.
    """
    storage = storage_of(path)
    size, begin = storage.size(path), 8 + int.from_bytes(storage.read(path, 8), "little")
    if not 8 < begin <= min(size, _HEADER):
        raise FormatError(f"{size} bytes, truncated or not safetensors")
    try:
        fields = parsed(storage.read(path, begin)[8:], dict[str, Any])
        metadata = formed(fields.pop("__metadata__", {}), dict[str, str], "__metadata__")
        told = {name: formed(x, _Header, name) for name, x in fields.items()}
    except Malformed as error:
        raise FormatError(f"{size} bytes, its header is damaged: {error}") from None
    entries, at = {}, begin
    for name, (dtype, shape, offsets) in sorted(told.items(), key=lambda item: item[1].data_offsets):
        if dtype not in DTYPES:
            raise FormatError(f"the dtype {dtype!r} of {name!r} is not one of PyTorch's")
        entry = entries[name] = Entry(name, DTYPES[dtype], shape, at)
        # Without gaps, so that no tensor has bytes of another one.
        if offsets != (at - begin, at - begin + entry.nbytes) or min(shape, default=0) < 0:
            raise FormatError(f"{size} bytes, its header is damaged: {name!r} does not follow the tensor before it")
        at += entry.nbytes
    if at != size:
        raise FormatError(f"{size} bytes, truncated or damaged: its header says {at}")
    return entries, metadata
