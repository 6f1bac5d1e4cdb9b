"""Makes again what a lost host kept of a state, from the parity that others of its groups have of it
(`fz.redundant(scheme="parity")`).

Each of a group has the exclusive or of what the others sent to it (elastic/wards.py). With what all but one of them
kept themselves it gives what that one sent. A rank of the next start does this for each that is lost, leaf by leaf, and
keeps the result in its host's memory as if it had been sent there whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.boxes import Boxes
from fzero.checkpoint import format
from fzero.checkpoint.index import Index, Part, parse
from fzero.checkpoint.spread import Piece, Spread
from fzero.comm.replicas import word_sum
from fzero.elastic.wards import SEALED, SUMS, write_note
from fzero.errors import CheckpointError
from fzero.mesh import Mesh
from fzero.ranks.together import Ranks, together
from fzero.read_json import read
from fzero.routes import Route

logger = logging.getLogger("fzero")


class Parity(NamedTuple):
    """A rank's parity in a memory: its note, and by slot the number of batches that its state has seen, and its
    file."""

    note: Mapping[str, Any]
    slots: Mapping[int, str]


class Lost(NamedTuple):
    """The part of a state that a rank had, and no memory has: of which leaves, where its group's are; and its group."""

    rank: int
    leaves: Sequence[str]
    group: Mapping[int, tuple[int, Parity]]  # by rank, the number of the memory that its parity lies in

    def boxes(self, name: str) -> Boxes | None:
        """The elements of a leaf that are lost."""
        _, first = next(iter(self.group.values()))
        return _boxes(first, self.rank)[name] if name in self.leaves else None


def parities(memory: Path) -> dict[int, list[Parity]]:
    """The parities in a memory, by the number of ranks that kept the states."""
    found: dict[int, list[Parity]] = {}
    for path in sorted(memory.glob("of-*/parity-*.json")):
        note, slots = read(path, dict[str, Any]), dict[int, str]()
        for slot in range(note["slots"]):
            file = path.with_name(f"{path.stem}.{slot}.safetensors")
            with file.open("rb") as f:
                f.seek(note["sealed"])
                if sealed := int.from_bytes(f.read(8), "little"):
                    slots[sealed - 1] = file.name
        found.setdefault(int(path.parent.name.removeprefix("of-")), []).append(Parity(note, slots))
    return found


def lost(index: Index, parts: Mapping[str, Sequence[Part]], held: Sequence[tuple[int, Parity]]) -> list[Lost]:
    """The parts of a state that are in no memory and can be made again.

    Args:
        index: of the state.
        parts: that memories have of it.
        held: the parities of as many ranks, with the number of the memory that has each.
    """
    own = {_rank(p): (number, p) for number, p in held if index.step in p.slots}
    there = {name: {p.boxes for p in those} for name, those in parts.items()}
    found = []
    for _, one in own.values():
        members = [int(rank) for rank in one.note["members"]]
        boxes = {rank: _boxes(one, rank) for rank in members}
        missing = {
            rank: [name for name, b in boxes[rank].items() if b.numel and b not in there[name]] for rank in members
        }
        for rank, leaves in missing.items():
            others = [r for r in members if r != rank]
            if leaves and all(r in own for r in others) and not any({*leaves} & {*missing[r]} for r in others):
                found.append(Lost(rank, leaves, {r: own[r] for r in others}))
                for name in leaves:  # not again by another rank's note
                    there[name].add(boxes[rank][name])
    return found


def make_again(
    memory: Path,
    size: int,
    mesh: Mesh,
    ranks: Ranks,
    index: Index,
    parts: Mapping[str, Sequence[Part]],
    missing: Sequence[Lost],
    spread: Spread,
) -> bool:
    """Makes what is missing of a state in the memories of the ranks that stand in the places of the lost ones; whether
    that went well. Every rank calls it.

    Args:
        memory: the run's, on this host.
        size: the number of ranks that kept the state.
        index, parts: of the state, as `lost` had them; files have the numbers of their memories before their names.
        missing: what `lost` found.
        spread: reads files of all memories.

    Communication: for each lost byte one of each other rank of its group, and of its parity.
    Memory: so many copies of the largest leaf that a rank has lost; and what was lost, in the host's memory.
    """
    mine = [one for one in missing if one.rank % mesh.size == mesh.rank]
    what = f"cannot make again what was lost of the state after {index.step} batches"
    try:
        slots: list[_Slot] = []
        together(ranks, "run", what, lambda: slots.extend(_Slot(memory, size, index, one) for one in mine))
        for name in sorted({name for one in missing for name in one.leaves}):
            jobs: dict[str, list[Piece]] = {}
            for slot in slots:
                slot.ask(name, parts, jobs)
            problems = spread.fetch(jobs)
            together(ranks, "run", what, lambda problems=problems: _raise(problems))
            for slot in slots:
                slot.join(name)
        for slot in slots:
            slot.seal()
    except CheckpointError as error:  # on every rank
        logger.warning("fzero.run: %s", error)
        return False
    if mesh.rank == 0:
        who = ", ".join(f"rank {rank}" for rank in sorted({one.rank for one in missing}))
        logger.warning("fzero.run: made again from parity after %d batches: what %s had", index.step, who)
    return True


class _Slot:
    """The part of a state that one lost rank had, while it is made again."""

    def __init__(self, memory: Path, size: int, index: Index, lost: Lost):
        self._lost, self._index = lost, index
        _, first = next(iter(lost.group.values()))
        self._sent, self._route = first.note["sent"], Route(*first.note["route"])
        self._boxes = {rank: _boxes(first, rank) for rank in (lost.rank, *lost.group)}
        self._at = {int(rank): at for rank, at in first.note["members"].items()}
        boxes = {name: self._boxes[lost.rank][name] for name in lost.leaves}
        entries = [format.Entry(name, index.leaves[name][1], (b.numel,)) for name, b in boxes.items()]
        entries += [format.Entry(SEALED, torch.int64, (1,)), format.Entry(SUMS, torch.int64, (len(boxes),))]
        directory, stem = memory / f"of-{size:05d}", f"ward-{lost.rank:05d}"
        directory.mkdir(mode=0o700, exist_ok=True)
        reserved = format.reserve(directory / f"{stem}.0.safetensors", entries)
        self._slot = reserved.tensors
        self._slot[SEALED].zero_()
        write_note(directory / f"{stem}.json", index, boxes, [reserved])
        self._parts: list[tuple[int, torch.Tensor]] = []

    def ask(self, name: str, parts: Mapping[str, Sequence[Part]], jobs: dict[str, list[Piece]]) -> None:
        """Adds what is to be read for a leaf: by each other rank its parity, and what the rest have sent there."""
        if name not in self._lost.leaves:
            return
        size, here = self._index.leaves[name][1].itemsize, self._at[self._lost.rank]
        count = {rank: boxes[name].numel * size for rank, boxes in self._boxes.items()}
        for rank, (number, parity) in self._lost.group.items():
            begin, end = self._route.shares(here, self._sent[name])[self._at[rank]]
            length = min(end, count[self._lost.rank]) - begin
            if length <= 0:
                continue

            def read(file: str, offset: int, nbytes: int, begin: int = begin) -> None:
                piece = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                self._parts.append((begin, piece))
                jobs.setdefault(file, []).append(Piece(offset, piece, name))

            read(f"{number}:{parity.slots[self._index.step]}", parity.note["offsets"][name], length)
            for other in self._lost.group:
                first, last = self._route.shares(self._at[other], self._sent[name])[self._at[rank]]
                nbytes = min(last, count[other], first + length) - first
                if other != rank and nbytes > 0:
                    part = next(p for p in parts[name] if p.boxes == self._boxes[other][name])
                    read(part.file, part.offset + first, nbytes)

    def join(self, name: str) -> None:
        """Makes a leaf of what was read for it."""
        if name in self._lost.leaves:
            out = self._slot[name].view(torch.uint8).zero_()
            for begin, piece in self._parts:
                out[begin : begin + len(piece)].bitwise_xor_(piece)
            self._parts = []

    def seal(self) -> None:
        self._slot[SUMS].copy_(torch.stack([word_sum(self._slot[name]) for name in self._lost.leaves]))
        self._slot[SEALED].fill_(self._index.step + 1)


def _rank(parity: Parity) -> int:
    """The rank that has a parity."""
    return next(int(rank) for rank, at in parity.note["members"].items() if at == parity.note["here"])


def _boxes(parity: Parity, rank: int) -> dict[str, Boxes]:
    """By leaf the elements that a rank of the group holds, those that have any."""
    index = parse(Path(), parity.note["of"][str(rank)])
    return {name: index.parts[name][0].boxes for name in parity.note["sent"] if index.parts[name]}


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))
