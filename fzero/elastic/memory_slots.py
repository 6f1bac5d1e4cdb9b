"""The slots in which states are kept in memory: safetensors files on an in-memory filesystem that are overwritten in
turn, in place, and a JSON file that says what they hold.

    of-00002/rank-00000.json             which elements of which tensors, and where they lie in each slot
    of-00002/rank-00000.0.safetensors    a slot

The header and the pages of a slot are allocated once. Besides the tensors of a state, a slot has two of its own:

    sealed    int64[1]: 0 while the slot is written, otherwise the number of batches that its state has seen plus one
              (a skipped step also consumes a batch)
    sums      int64[n]: for each tensor, a checksum of its bits plus the value of `sealed`
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero._utils.bounded_json import read
from fzero.checkpoint import safetensors_format
from fzero.checkpoint.index import Index, StoredPart, digest, parse, to_json
from fzero.checkpoint.safetensors_format import Entry, header
from fzero.checkpoint.saving import SavePlan
from fzero.checkpoint.tensor_digests import word_sum
from fzero.sharding.shard_regions import Boxes

SEALED = "sealed"
_SUMS = "sums"

_DAMAGED = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading damaged files can raise."""


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
        sealed: the tensor of this name of each slot.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(
        self, path: Path, num: int, entries: Sequence[Entry], plan: SavePlan, boxes: Mapping[str, Boxes], seen: int
    ):
        own = [Entry(SEALED, torch.int64, (1,)), Entry(_SUMS, torch.int64, (len(boxes),))]
        entries = sorted([*own, *entries], key=lambda e: -e.dtype.itemsize)  # each is aligned to its own dtype
        head, offsets = header(entries, {})
        size = len(head) + sum(e.nbytes for e in entries)
        data = [_reserve(path.with_suffix(f".{i}.safetensors"), head, size) for i in range(num)]
        _write(path, json.dumps(_note(plan, boxes, offsets, size, num)))
        self.tensors = [{e.name: x[offsets[e.name] :][: e.nbytes].view(e.dtype) for e in entries} for x in data]
        self.sealed = [tensors[SEALED] for tensors in self.tensors]
        for sealed in self.sealed:
            if int(sealed) > seen + 1:
                sealed.fill_(0)

    def open(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Returns the tensors of a slot to be written, which is invalid until it is sealed."""
        self.sealed[slot].fill_(0)
        return self.tensors[slot]

    def seal(self, slot: int, seen: int, sums: Sequence[torch.Tensor]) -> None:
        """Commits a slot, whose state has seen `seen` batches, with the checksum of each tensor, on any device."""
        at: dict[torch.device, list[int]] = {}
        for i, x in enumerate(sums):
            at.setdefault(x.device, []).append(i)
        for which in at.values():  # one copy per device
            self.tensors[slot][_SUMS][which] = torch.stack([sums[i] for i in which]).cpu()
        # With the number, so that a state is never taken for that of another step.
        self.tensors[slot][_SUMS].add_(seen + 1)
        # Last, because it makes the slot valid.
        self.sealed[slot].fill_(seen + 1)


class Stored(NamedTuple):
    """The slots of a rank, as they are found in a host's memory.

    Attributes:
        stem: the name of the files without suffixes.
        size: the number of ranks that stored states there.
        content: the content of the JSON file.
        sealed: the value of the tensor `sealed` of each slot; 0 for a damaged slot.
    """

    stem: str
    size: int
    content: dict[str, Any]
    sealed: list[int]


class Damage(NamedTuple):
    """A damaged slot.

    It has the slot's rank, the step of its state (-1 if that number is damaged too), the names of the damaged
    tensors, and whether the slot was received from another rank.
    """

    rank: int
    step: int
    leaves: list[str]
    sent: bool = False


class HostSlots(NamedTuple):
    """What is in a host's memory: the slots of each rank, the damaged slots, and a message for each rank whose files do
    not even have the expected form."""

    stored: list[Stored]
    damaged: list[Damage]
    problems: list[str]


def examine(memory: Path, first: int = 0, num: int = 1) -> HostSlots:
    """Reads the slots in this host's memory, compares them with the checksums stored with them, and invalidates those
    that differ. To be called while no rank writes a slot.

    Args:
        first, num: this process examines every `num`-th file, starting with file `first`.

    Time: 10 GB/s per core.
    """
    found = HostSlots([], [], [])
    notes = [note for kind in ("rank", "replica") for note in sorted(memory.glob(f"of-*/{kind}-*.json"))]
    for note in notes[first::num]:
        try:
            content = _content(note)
            index, sealed = parse(note.parent, content), list[int]()
            for slot in range(content["slots"]):
                value, odd = _examine_slot(note.with_suffix(f".{slot}.safetensors"), content, index)
                sealed.append(0 if odd else value)
                if odd:
                    kind, _, rank = note.stem.partition("-")
                    step = -1 if odd == [SEALED] else value - 1
                    found.damaged.append(Damage(int(rank), step, odd, kind != "rank"))
            found.stored.append(Stored(note.stem, int(note.parent.name.removeprefix("of-")), content, sealed))
        except FileNotFoundError:  # another rank may be removing it
            pass
        except _DAMAGED as error:
            found.problems.append(f"{note}: {type(error).__name__}: {error}")
    return found


def _examine_slot(path: Path, content: Mapping[str, Any], index: Index) -> tuple[int, list[str]]:
    """Returns the value of the tensor `sealed` of a slot, and the names of its damaged tensors. If there are any,
    invalidates the slot."""
    with path.open("r+b") as f:
        if (size := os.fstat(f.fileno()).st_size) != content["bytes"]:
            raise ValueError(f"{path.name} has {size} bytes where {content['bytes']} were written")
        try:
            mapped = mmap.mmap(f.fileno(), 0)
        except OSError as error:  # not damaged: passed over, it would count as checked
            raise MemoryError(f"{path} cannot be mapped: {error}") from error
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    sealed = data[content["sealed"] :][:8]
    if not (value := int(sealed.view(torch.int64))):  # the process died while it wrote this slot
        return 0, []
    sums = data[content["sums"] :][: 8 * len(content["summed"])].view(torch.int64).tolist()
    odd = []
    for name, known in zip(content["summed"], sums, strict=True):
        nbytes = index.leaves[name][1].itemsize
        bits = [data[p.offset :][: p.boxes.numel * nbytes] for p in index.parts[name]]
        if (sum(int(word_sum(x)) for x in bits) + value - known) % 2**64:
            odd.append(name)
    if odd:
        sealed.zero_()  # in the mapped file itself, so that every rank of the host sees it
    # If the number has changed, all sums differ, because they have it in common.
    return value, [SEALED] if len(odd) == len(sums) > 1 else odd


def _content(note: Path) -> dict[str, Any]:
    """Returns the content of a JSON file, which must be as it was written."""
    content = read(note, dict[str, Any])
    if content["sha256"] != digest(content):
        raise ValueError(f"{note.name} has changed in memory")
    return content


def _reserve(path: Path, head: bytes, size: int) -> torch.Tensor:
    """Makes, or opens, a file of this size with this header. Returns its bytes, uint8[size], mapped to memory.

    An existing file with the same header is used with its content. A new file is filled with zeros, and gets its
    name only when it is complete.

    Raises:
        OSError: there is not enough space. Nothing has been given its final name then.
    """
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
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    except OSError:
        if is_new:
            where.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _begins(path: Path, head: bytes, size: int) -> bool:
    """Whether there is a file of this size that begins with this header."""
    try:
        with path.open("rb") as f:
            return f.read(len(head)) == head and os.fstat(f.fileno()).st_size == size
    except FileNotFoundError:
        return False


def _note(
    plan: SavePlan, boxes: Mapping[str, Boxes], offsets: Mapping[str, int], size: int, num: int
) -> dict[str, Any]:
    """Returns the content of the JSON file."""
    parts = {n: [StoredPart("", n, boxes[n], offsets[n])] if n in boxes and boxes[n].numel else [] for n in plan.parts}
    # Without the step, so that the file stays the same when a run continues (`_write`).
    content = to_json(replace(plan, step=0), parts, {}, {})
    content |= {"chunk": safetensors_format.CHUNK, "bytes": size, "slots": num}
    content |= {"sealed": offsets[SEALED], "sums": offsets[_SUMS], "summed": list(boxes)}
    return content | {"sha256": digest(content)}


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:  # an unchanged file is not rewritten: there may be no room left
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)
