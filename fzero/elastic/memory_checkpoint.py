"""In-memory checkpoints: keeps the newest states of a run in files in host memory that outlive the processes that write
them.

    of-00002/rank-00000.json             what rank 0 of 2 stores, and where it lies in the rank's files
    of-00002/rank-00000.0.safetensors    one of two slots: the newest state and the one before it
    of-00002/replica-00001.*             what rank 1, of another host, has sent (fzero/elastic/peer_replicas.py)

Storing a state costs one copy of it. A slot is not sealed while it is being written (fzero/elastic/memory_slots.py), so
a process that is killed while writing leaves the other slot valid. The ranks of a host store only one copy of each
element that any of them holds. A rank that is restarted on the host finds all of its state there; if the number of
ranks changes, the new ranks find everything that the old ranks held together.

[Note: slots] Ranks are at most one step apart: one rank may have stored state S + 1 while another, still in step S,
has sealed state S - 1 of a third rank for which it is the peer. So if states are sent to peers, three slots hold the
newest three states. If states are sent less often than they are stored, there are four: for the newest state, the
newest two states that are sent, and the one that is being written.
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
from fzero.checkpoint.index import File, Index, parse
from fzero.checkpoint.safetensors_format import Entry
from fzero.checkpoint.saving import make_plan, written_by
from fzero.checkpoint.tensor_digests import word_sum
from fzero.elastic.memory_slots import SEALED, MemorySlots
from fzero.elastic.peer_replicas import PeerReplica, PeerReplicas
from fzero.errors import FzeroValueError
from fzero.mesh import Mesh
from fzero.sharding.shard_regions import claimed, whole
from fzero.train_state import lasting

_MOST = 1 << 48  # batches: a slot with a larger number is damaged


class _KeptSlot(NamedTuple):
    """Where a tensor is stored: its index among the tensors of a state, how many of its elements this rank stores, and
    the memory for them in each slot."""

    index: int
    numel: int
    slots: Sequence[torch.Tensor]


class MemoryCheckpoint:
    """The in-memory checkpoint of one rank.

    Args:
        memory: the run's directory on this host (elastic/host_directory.py).
        rank, size: of the mesh.
        host: the ranks of this host.

    Attributes:
        peer_replicas: the slots for the state that another rank sends, or None if no rank sends any.
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
        self.peer_replicas: PeerReplicas | None = None

    def open(
        self, state: Any, step: int, every: int = 1, mesh: Mesh | None = None, replica: PeerReplica | None = None
    ) -> None:
        """Makes the slots for states like this one. Existing slots keep their states up to `step`, from which the run
        continues.

        Args:
            state: the run's state.
            step: its number.
            every: one state is stored every `every` steps.
            mesh, replica: the mesh of all ranks, and which state another rank sends to this one.

        Raises:
            OSError: there is not enough memory.
        """
        plan = make_plan(state, self._rank, self._size, among=self._host)
        mine = written_by(plan, self._rank)
        entries = [Entry(name, plan.leaves[name][1], (boxes.numel,)) for name, boxes in mine.items()]
        self._directory.mkdir(mode=0o700, exist_ok=True)
        # One slot is overwritten while another one has the newest state. With `redundant`, the slots of the last two
        # states that were sent are needed too: the newer one may not have arrived everywhere. They coincide with the
        # newest state only if every state that is stored is also sent.
        num = 2 if replica is None else 3 if replica.spec.every == every else 4
        slots = MemorySlots(self._directory / f"rank-{self._rank:05d}.json", num, entries, plan, mine, step)
        if replica is not None:
            assert mesh is not None
            self._sent = replica.spec.every
            self.peer_replicas = PeerReplicas(self._directory, plan, mesh, replica, step)
        order = {name: i for i, name in enumerate(plan.tensors)}
        self._form = _form(state)
        self._leaves = [_KeptSlot(order[n], boxes.numel, [s[n] for s in slots.tensors]) for n, boxes in mine.items()]
        self._sealed, self._sums = slots.sealed, slots.sums

    def has(self, step: int) -> bool:
        """Whether this rank stores the state of a step."""
        return any(int(sealed) == step + 1 for sealed in self._sealed)

    def keep(self, state: Any, step: int) -> None:
        """Copies this rank's shard of a state into the slot that is needed least.

        Raises:
            FzeroValueError: the tensors of the state differ from those given to `open`.
        """
        if (form := _form(state)) != self._form:
            odd = [f"{a[0]}: {tree.form(*a[1:])}" for a in form if a not in self._form]
            odd += [f"{b[0]}: {tree.form(*b[1:])} is missing" for b in self._form if b not in form]
            fix = "keep the state that run.state returned, as its steps return it"
            raise FzeroValueError("run.commit", "this is not the run's state", odd[:8], fix)
        flat = tree.leaves(lasting(state))
        slot = self._spare(step)
        self._sealed[slot].fill_(0)  # invalid from here on, in case the process is killed while it writes
        sums = []
        for leaf in self._leaves:
            # Without the padding, which is at the end.
            part = flat[leaf.index].detach().resolve_conj().resolve_neg().reshape(-1)[: leaf.numel]
            sums.append(word_sum(part))
            leaf.slots[slot].copy_(part)
        if sums:
            self._sums[slot].copy_(on_host(sums))
        self._sealed[slot].fill_(step + 1)  # this commits the slot, so it comes after everything else
        self._count += 1
        # By now every rank of a mesh of this size has stored the state before, and the shards sent of it have arrived,
        # so the states that another number of ranks has stored are not needed any more.
        if self._count == len(self._sealed) and self._rank == self._host[0]:
            for other in self._memory.glob("of-*"):
                if other != self._directory:
                    shutil.rmtree(other, ignore_errors=True)

    def _spare(self, step: int) -> int:
        """Returns the slot to write the state of a step into.

        It is the slot that already has a state of this step number (the step was skipped), else the oldest one that
        no rank may have to go back to. See [Note: slots].
        """
        held = [int(sealed) for sealed in self._sealed]
        if step + 1 in held:
            return held.index(step + 1)
        # The newest state stays valid until the one that is being written is sealed.
        needed = {max(held)}
        if self._sent is not None:
            # The states of which another host has, or is about to have, a copy. `sealed` is the number of batches plus
            # one.
            needed.update(sorted(s for s in held if s and (s - 1) % self._sent == 0)[-2:])
        free = [i for i, s in enumerate(held) if not s or s not in needed]
        return min(free or range(len(held)), key=held.__getitem__)


def on_host(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copies scalar tensors on any devices into one tensor on the host, int64[n], with one copy per device."""
    out = torch.empty(len(sums), dtype=torch.int64, device="cpu")
    for device in dict.fromkeys(x.device for x in sums):
        at = [i for i, x in enumerate(sums) if x.device == device]
        out[at] = torch.stack([sums[i] for i in at]).cpu()
    return out


def _form(state: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Returns the names, shapes and dtypes of the tensors of a state that are stored."""
    kept = lasting(state)
    return [(n, x.shape, x.dtype) for n, x in tree.with_names(kept)]


def held(memory: Path) -> dict[tuple[int, int], Index]:
    """Returns the states in this host's memory by step and number of ranks, with the shards of its own ranks and those
    received from other hosts."""
    found: dict[tuple[int, int], Index] = {}
    for directory in memory.glob("of-*"):
        size = int(directory.name.removeprefix("of-"))
        for note in (*sorted(directory.glob("rank-*.json")), *sorted(directory.glob("replica-*.json"))):
            with contextlib.suppress(FileNotFoundError):  # another rank may be removing it
                content = read(note, dict[str, Any])
                for slot in range(content["slots"]):
                    file = f"{note.stem}.{slot}.safetensors"
                    # 0 means that the process died while it wrote this slot.
                    if step := _sealed(directory / file, content):
                        one = _of_slot(parse(directory, content), step - 1, content["bytes"], file)
                        key = step - 1, size
                        found[key] = _joined(found[key], one) if key in found else one
    return found


class Damage(NamedTuple):
    """A damaged slot.

    It has the slot's rank, the step of its state (-1 if that number is damaged too), the names of the damaged
    tensors, and whether the slot was received from another rank.
    """

    rank: int
    step: int
    leaves: list[str]
    sent: bool = False


def let_go_of_damaged(memory: Path, first: int = 0, num: int = 1) -> list[Damage]:
    """Compares the slots in this host's memory with the checksums stored with them, and invalidates those that differ.

    No rank restores a slot that is invalidated. To be called while no rank writes a slot.

    Args:
        first, num: this process checks every `num`-th file, starting with file `first`.

    Time: 10 GB/s per core.
    """
    found: list[Damage] = []
    notes = sorted(n for kind in ("rank", "replica") for n in memory.glob(f"of-*/{kind}-*.json"))
    for note in notes[first::num]:
        content = read(note, dict[str, Any])
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
                # Invalidated in the mapped file itself, so that every rank of the host sees it.
                held[content["sealed"] :][:8].zero_()
                kind, _, rank = note.stem.partition("-")
                found.append(Damage(int(rank), step - 1, odd, kind != "rank"))
    return found


def _summed(note: Path, content: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns, by tensor name, the offset in a slot of the bytes that its checksum covers, and their number."""
    index, places = parse(note.parent, content), {}
    for name in content["summed"]:
        (part,) = index.parts[name] or (None,)
        places[name] = (0, 0) if part is None else (part.offset, part.boxes.numel * index.leaves[name][1].itemsize)
    return places


def is_whole(index: Index) -> bool:
    """Whether every element of every tensor is present at least once."""
    for name, parts in index.parts.items():
        leaf = whole(index.leaves[name][0])
        left = [(0, leaf.numel)] if leaf.numel else []
        for part in parts:
            _, left = claimed(left, leaf.runs(part.boxes))
        if left:
            return False
    return True


def _sealed(path: Path, note: Mapping[str, Any]) -> int:
    """Returns the value of the tensor `sealed` of a slot's file, which must have the size that its JSON file gives."""
    with path.open("rb") as f:
        if (size := os.fstat(f.fileno()).st_size) != note["bytes"]:
            raise ValueError(f"{path.name} has {size} bytes where {note['bytes']} were written")
        f.seek(note["sealed"])
        return int.from_bytes(f.read(8), "little")


def _of_slot(index: Index, step: int, nbytes: int, file: str) -> Index:
    """Returns an index of one slot's file, for the state of this step."""
    parts = {name: tuple(replace(p, file=file) for p in parts) for name, parts in index.parts.items()}
    return replace(index, step=step, files={file: File(nbytes, "", None)}, parts=parts)


def _joined(one: Index, other: Index) -> Index:
    """Merges two parts of a state. Elements that both have are read from the first."""
    parts = {name: (*one.parts[name], *other.parts[name]) for name in one.parts}
    return replace(one, files={**one.files, **other.files}, parts=parts)
