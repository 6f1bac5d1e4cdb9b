"""Keeps the newest states of a run in the memory of its hosts, in files that outlive the processes that write them.

    of-00002/rank-00000.json             what rank 0 of 2 keeps, and where in its files it lies
    of-00002/rank-00000.0.safetensors    two slots: the newest state and the one before it
    of-00002/ward-00001.*                what rank 1, of another host, has sent (fzero/elastic/peer_replicas.py)

A slot is made once, header and pages, and overwritten in place: keeping a state costs a copy of it. Its tensor `sealed`
is 0 during a write, else the number of consumed batches plus one (a skipped step consumes one). So a killed process
leaves the other slot valid. The ranks of a host keep each element once that any of them holds. A rank that is started
again on that host finds there all it had, and another number of ranks all of what the ranks had together.

[Note: slots] Ranks are at most a step apart: one may have kept state S + 1 while another, still in step S, has state
S - 1 of a third sealed as its ward. So where states are sent three slots hold the newest three; where they are sent
less often than they are kept, four: the newest, the newest two that are sent, and the one that is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._utils.bounded_json import read
from fzero.checkpoint import safetensors_format
from fzero.checkpoint.index import File, Index, parse
from fzero.checkpoint.saving import make_plan, written_by
from fzero.checkpoint.tensor_digests import word_sum
from fzero.elastic.memory_files import reserve
from fzero.elastic.peer_replicas import SEALED, SUMS, Ward, Wards, write_note
from fzero.errors import FzeroValueError
from fzero.mesh import Mesh
from fzero.sharding.shard_regions import claimed, whole
from fzero.train_state import lasting

_MOST = 1 << 48  # batches: a slot that says more is damaged


class _KeptSlot(NamedTuple):
    """A leaf's place among those of a state, how many elements this rank keeps of it, and where in each slot."""

    index: int
    numel: int
    slots: Sequence[torch.Tensor]


class Vault:
    """The states that a rank keeps.

    Args:
        memory: the run's, on this host (elastic/host_directory.py).
        rank, size: of the mesh.
        host: the ranks of this host.

    Attributes:
        wards: the slots for what another rank sends; None: none does.
    """

    def __init__(self, memory: Path, rank: int, size: int, host: Sequence[int]):
        self._memory, self._rank, self._size, self._host = memory, rank, size, host
        self._directory = memory / f"of-{size:05d}"
        self._leaves: list[_KeptSlot] = []
        self._form: list[tuple[str, torch.Size, torch.dtype]] = []
        self._sealed: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._sent: int | None = None
        self._count = 0
        self.wards: Wards | None = None

    def open(self, state: Any, step: int, every: int = 1, mesh: Mesh | None = None, ward: Ward | None = None) -> None:
        """Makes the slots for states like this one. Existing slots keep their states up to this step, from which the
        run goes on.

        Args:
            state: the run's.
            step: its number.
            every: of so many steps one is kept.
            mesh, ward: of all ranks, and what comes from one of them.

        Raises:
            OSError: there is not enough memory.
        """
        plan = make_plan(state, self._rank, self._size, among=self._host)
        mine = written_by(plan, self._rank)
        entries = [
            safetensors_format.Entry(SEALED, torch.int64, (1,)),
            safetensors_format.Entry(SUMS, torch.int64, (len(mine),)),
        ]
        entries += [
            safetensors_format.Entry(name, plan.leaves[name][1], (boxes.numel,)) for name, boxes in mine.items()
        ]
        self._directory.mkdir(mode=0o700, exist_ok=True)
        num = 2 if ward is None else 3 if ward.spec.every == every else 4
        slots = [reserve(self._directory / _file(self._rank, i), entries) for i in range(num)]
        write_note(self._directory / f"rank-{self._rank:05d}.json", plan, mine, slots)
        if ward is not None:
            assert mesh is not None
            self._sent, self.wards = ward.spec.every, Wards(self._directory, plan, mesh, ward, step)
        order = {name: i for i, name in enumerate(plan.tensors)}
        self._form = _form(state)
        self._leaves = [_KeptSlot(order[n], boxes.numel, [s.tensors[n] for s in slots]) for n, boxes in mine.items()]
        self._sealed = [s.tensors[SEALED] for s in slots]
        self._sums = [s.tensors[SUMS] for s in slots]
        for sealed in self._sealed:
            if int(sealed) > step + 1:
                sealed.fill_(0)

    def has(self, step: int) -> bool:
        """Whether this rank keeps the state of a step."""
        return any(int(sealed) == step + 1 for sealed in self._sealed)

    def keep(self, state: Any, step: int) -> None:
        """Copies this rank's part of a state into the slot that is needed least.

        Raises:
            FzeroValueError: it is of another form than the state of `open`.
        """
        if (form := _form(state)) != self._form:
            odd = [f"{a[0]}: {tree.form(*a[1:])}" for a in form if a not in self._form]
            odd += [f"{b[0]}: {tree.form(*b[1:])} is not there" for b in self._form if b not in form]
            fix = "keep the state that run.state returned, as its steps return it"
            raise FzeroValueError("run.commit", "this is not the run's state", odd[:8], fix)
        flat = tree.leaves(lasting(state))
        slot = self._spare(step)
        self._sealed[slot].fill_(0)
        sums = []
        for leaf in self._leaves:
            part = flat[leaf.index].detach().resolve_conj().resolve_neg().reshape(-1)[: leaf.numel]
            sums.append(word_sum(part))
            leaf.slots[slot].copy_(part)
        if sums:
            self._sums[slot].copy_(on_host(sums))
        self._sealed[slot].fill_(step + 1)
        self._count += 1
        # every rank of this size has kept the one before, and what was sent of it has come
        if self._count == len(self._sealed) and self._rank == self._host[0]:
            for other in self._memory.glob("of-*"):
                if other != self._directory:
                    shutil.rmtree(other, ignore_errors=True)

    def _spare(self, step: int) -> int:
        """The slot for the state of a step: one that has a state of this step, which was skipped, else the oldest that
        no rank may have to go back to. See [Note: slots]."""
        held = [int(sealed) for sealed in self._sealed]
        if step + 1 in held:
            return held.index(step + 1)
        needed = {max(held)}
        if self._sent is not None:
            needed.update(sorted(s for s in held if s and (s - 1) % self._sent == 0)[-2:])
        free = [i for i, s in enumerate(held) if not s or s not in needed]
        return min(free or range(len(held)), key=held.__getitem__)


def on_host(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers, each where its tensor is, as one tensor on the host: int64[n]. One copy a device."""
    out = torch.empty(len(sums), dtype=torch.int64, device="cpu")
    for device in dict.fromkeys(x.device for x in sums):
        at = [i for i, x in enumerate(sums) if x.device == device]
        out[at] = torch.stack([sums[i] for i in at]).cpu()
    return out


def _form(state: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    kept = lasting(state)
    return [(n, x.shape, x.dtype) for n, x in tree.with_names(kept)]


def held(memory: Path) -> dict[tuple[int, int], Index]:
    """The states in the memory of this host, by step and number of ranks: the parts of its own ranks, and parts
    received from others."""
    found: dict[tuple[int, int], Index] = {}
    for directory in memory.glob("of-*"):
        size = int(directory.name.removeprefix("of-"))
        for note in (*sorted(directory.glob("rank-*.json")), *sorted(directory.glob("ward-*.json"))):
            with contextlib.suppress(FileNotFoundError):  # which another rank lets go of
                content = read(note, dict[str, Any])
                for slot in range(content["slots"]):
                    file = f"{note.stem}.{slot}.safetensors"
                    if step := _sealed(directory / file, content):
                        one = _of_slot(parse(directory, content), step - 1, content["bytes"], file)
                        key = step - 1, size
                        found[key] = _joined(found[key], one) if key in found else one
    return found


class Damage(NamedTuple):
    """A damaged slot: its rank, the step of its state (-1 if that is damaged too), the damaged leaves, and whether it
    was received from another rank."""

    rank: int
    step: int
    leaves: list[str]
    sent: bool = False


def let_go_of_damaged(memory: Path, turn: int = 0, num: int = 1) -> list[Damage]:
    """Compares slots in the memory of this host with the sums that were kept with them, and unseals those that differ:
    nobody goes on from these. While nothing is kept.

    Args:
        turn, num: this process takes every so manyeth file of so many.

    Time: 10 GB/s a core.
    """
    found: list[Damage] = []
    notes = sorted(n for kind in ("rank", "ward") for n in memory.glob(f"of-*/{kind}-*.json"))
    for note in notes[turn::num]:
        content = read(note, dict[str, Any])
        if "sums" not in content:
            continue
        places = _summed(note, content)
        for slot in range(content["slots"]):
            path = note.parent / f"{note.stem}.{slot}.safetensors"
            if not (step := _sealed(path, content)):
                continue
            with path.open("r+b") as f:
                held = torch.frombuffer(mmap.mmap(f.fileno(), 0), dtype=torch.uint8)
            sums = held[content["sums"] :][: 8 * len(content["summed"])].view(torch.int64).tolist()
            odd = []
            for name, known in zip(content["summed"], sums, strict=True):
                offset, nbytes = places[name]
                if int(word_sum(held[offset:][:nbytes])) != known:
                    odd.append(name)
            if step > _MOST:
                odd, step = [SEALED, *odd], 0
            if odd:
                held[content["sealed"] :][:8].zero_()
                kind, _, rank = note.stem.partition("-")
                found.append(Damage(int(rank), step - 1, odd, kind != "rank"))
    return found


def _summed(note: Path, content: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """By leaf where in a slot the bytes lie that a sum is of, and how many."""
    index, places = parse(note.parent, content), {}
    for name in content["summed"]:
        (part,) = index.parts[name] or (None,)
        places[name] = (0, 0) if part is None else (part.offset, part.boxes.numel * index.leaves[name][1].itemsize)
    return places


def is_whole(index: Index) -> bool:
    """Whether every element of every leaf is there, however often."""
    for name, parts in index.parts.items():
        leaf = whole(index.leaves[name][0])
        left = [(0, leaf.numel)] if leaf.numel else []
        for part in parts:
            _, left = claimed(left, leaf.runs(part.boxes))
        if left:
            return False
    return True


def _file(rank: int, slot: int) -> str:
    return f"rank-{rank:05d}.{slot}.safetensors"


def _sealed(path: Path, note: Mapping[str, Any]) -> int:
    with path.open("rb") as f:
        if (size := os.fstat(f.fileno()).st_size) != note["bytes"]:
            raise ValueError(f"{path.name} has {size} bytes where {note['bytes']} were written")
        f.seek(note["sealed"])
        return int.from_bytes(f.read(8), "little")


def _of_slot(index: Index, step: int, nbytes: int, file: str) -> Index:
    parts = {name: tuple(replace(p, file=file) for p in parts) for name, parts in index.parts.items()}
    return replace(index, step=step, files={file: File(nbytes, "", None)}, parts=parts)


def _joined(one: Index, other: Index) -> Index:
    """Two parts of a state as one; elements that both have are those of the first."""
    order = lambda p: (p.boxes.place, p.boxes.start)  # noqa: E731
    new = {
        name: [p for p in other.parts[name] if all(p.boxes != q.boxes for q in one.parts[name])] for name in one.parts
    }
    parts = {name: tuple(sorted((*one.parts[name], *new[name]), key=order)) for name in one.parts}
    return replace(one, files={**one.files, **other.files}, parts=parts)
