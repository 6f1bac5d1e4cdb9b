"""The slots in which states are kept in memory: safetensors files on an in-memory filesystem that are overwritten in
turn, in place, and a JSON file that says what they hold.

    rank-00000.json             which elements of which tensors, and where they lie in each slot
    rank-00000.0.safetensors    a slot

The header and the pages of a slot are allocated once. Besides the tensors of a state, a slot has two of its own:

    sealed    int64[1]: 0 while the slot is written, otherwise the number of batches that its state has seen plus one
              (a skipped step also consumes a batch)
    sums      int64[n]: a checksum of each tensor
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.checkpoint import safetensors_format
from fzero.checkpoint.index import StoredPart, to_json
from fzero.checkpoint.safetensors_format import Entry, header
from fzero.checkpoint.saving import SavePlan
from fzero.sharding.shard_regions import Boxes

SEALED = "sealed"
_SUMS = "sums"


class MemorySlots:
    """Makes slots, or opens those that exist with the same tensors. They keep the states from which the run may
    continue; later ones, which will be computed again, are invalidated.

    Args:
        path: of the JSON file.
        num: the number of slots.
        entries: the tensors of a slot.
        plan: the plan of the state.
        boxes: which elements of each tensor of the plan the slots hold.
        seen: the number of batches seen by the state from which the run continues.

    Attributes:
        tensors: the tensors of each slot by name.
        sealed, sums: these tensors of each slot.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(
        self, path: Path, num: int, entries: Sequence[Entry], plan: SavePlan, boxes: Mapping[str, Boxes], seen: int
    ):
        own = [Entry(SEALED, torch.int64, (1,)), Entry(_SUMS, torch.int64, (len(boxes),))]
        files = [_reserve(path.with_suffix(f".{i}.safetensors"), [*own, *entries]) for i in range(num)]
        _write(path, json.dumps(_note(plan, boxes, files)))
        self.tensors = [file.tensors for file in files]
        self.sealed = [tensors[SEALED] for tensors in self.tensors]
        self.sums = [tensors[_SUMS] for tensors in self.tensors]
        for sealed in self.sealed:
            if int(sealed) > seen + 1:
                sealed.fill_(0)


class _MemoryFile(NamedTuple):
    """A file whose tensors are memory-mapped: each flat tensor by name, its offset in the file, and the size of the
    file."""

    tensors: Mapping[str, torch.Tensor]
    offsets: Mapping[str, int]
    bytes: int


def _reserve(path: Path, entries: Sequence[Entry]) -> _MemoryFile:
    """Makes, or opens, a file for these tensors.

    An existing file with the same header is used with its content. A new file is filled with zeros, and gets its
    name only when it is complete.

    Raises:
        OSError: there is not enough space. Nothing has been given its final name then.
    """
    entries = sorted(entries, key=lambda e: -e.dtype.itemsize)  # each tensor is aligned to its own dtype
    head, offsets = header(entries, {})
    size = len(head) + sum(e.nbytes for e in entries)
    # An equal header means that the file has the same tensors at the same offsets, so its states can be continued from
    # and its pages need not be allocated again.
    is_new = not _begins(path, head, size)
    where = path.with_suffix(".new") if is_new else path
    fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if is_new:
            os.ftruncate(fd, 0)
            # Without allocated pages, a write to the mapping of a full filesystem would end the process with SIGBUS.
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, head, 0)
            os.replace(where, path)
        data = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    except OSError:
        if is_new:
            where.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    tensors = {e.name: data[offsets[e.name] : offsets[e.name] + e.nbytes].view(e.dtype) for e in entries}
    return _MemoryFile(tensors, offsets, size)


def _begins(path: Path, head: bytes, size: int) -> bool:
    """Whether there is a file of this size that begins with this header."""
    try:
        with path.open("rb") as f:
            return f.read(len(head)) == head and os.fstat(f.fileno()).st_size == size
    except FileNotFoundError:
        return False


def _note(plan: SavePlan, boxes: Mapping[str, Boxes], files: Sequence[_MemoryFile]) -> dict[str, Any]:
    """Returns the content of the JSON file."""
    offsets = files[0].offsets
    parts = {n: [StoredPart("", n, boxes[n], offsets[n])] if n in boxes and boxes[n].numel else [] for n in plan.parts}
    content = to_json(0, plan.leaves, parts, plan.aliases, plan.treespec, {}, {})
    content |= {"chunk": safetensors_format.CHUNK, "sha256": "", "bytes": files[0].bytes, "slots": len(files)}
    return content | {"sealed": offsets[SEALED], "sums": offsets[_SUMS], "summed": list(boxes)}


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:  # an unchanged file is not rewritten: there may be no room left
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)
