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

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fzero import tree
from fzero.checkpoint.safetensors_format import Entry
from fzero.checkpoint.saving import make_plan, written_by
from fzero.checkpoint.tensor_digests import word_sum
from fzero.elastic.memory_slots import MemorySlots
from fzero.elastic.peer_replicas import PeerReplicas
from fzero.errors import FzeroValueError
from fzero.mesh import Mesh
from fzero.train_state import lasting
from fzero.transforms.redundant import Redundant


class MemoryCheckpoint:
    """The in-memory checkpoint of one rank: slots for states of the same form. Existing slots keep their states up to
    `step`, from which the run continues.

    Args:
        memory: the run's directory on this host (elastic/host_directory.py).
        rank, size: of the mesh.
        host: the ranks of this host.
        state: the run's state.
        step: its number.
        every: one state is stored every `every` steps.
        mesh, redundant: the mesh of all ranks, and how they send their states; None if they do not.

    Attributes:
        peer_replicas: the slots for the state that another rank sends, or None if no rank sends any.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(
        self,
        memory: Path,
        rank: int,
        size: int,
        host: Sequence[int],
        state: Any,
        step: int,
        every: int = 1,
        mesh: Mesh | None = None,
        redundant: Redundant | None = None,
    ):
        self._memory, self._directory = memory, memory / f"of-{size:05d}"
        self._is_first = rank == host[0]
        self._count = 0
        plan = make_plan(state, rank, size, among=host)
        mine = written_by(plan, rank)
        entries = [Entry(name, plan.leaves[name][1], (boxes.numel,)) for name, boxes in mine.items()]
        self._directory.mkdir(mode=0o700, exist_ok=True)
        # One slot is overwritten while another one has the newest state. With `redundant`, the slots of the last two
        # states that were sent are needed too: the newer one may not have arrived everywhere. They coincide with the
        # newest state only if every state that is stored is also sent.
        num = 2 if redundant is None else 3 if redundant.every == every else 4
        self._slots = MemorySlots(self._directory / f"rank-{rank:05d}.json", num, entries, plan, mine, step)
        self._sent = None if redundant is None else redundant.every
        self.peer_replicas: PeerReplicas | None = None
        if redundant is not None:
            assert mesh is not None
            self.peer_replicas = PeerReplicas(self._directory, plan, mesh, redundant, step)
        self._form = {n: (x.shape, x.dtype) for n, x in tree.with_names(lasting(state))}
        self._numel = {name: boxes.numel for name, boxes in mine.items()}  # elements that this rank stores

    def has(self, step: int) -> bool:
        """Whether this rank stores the state of a step."""
        return any(int(sealed) == step + 1 for sealed in self._slots.sealed)

    def keep(self, state: Any, step: int) -> None:
        """Copies this rank's shard of a state into the slot that is needed least.

        Raises:
            FzeroValueError: the tensors of the state differ from those of the first one.
        """
        named = dict(tree.with_names(lasting(state)))
        if (form := {n: (x.shape, x.dtype) for n, x in named.items()}) != self._form:
            odd = [f"{n}: {tree.form(*a)}" for n, a in form.items() if self._form.get(n) != a]
            odd += [f"{n}: {tree.form(*b)} is missing" for n, b in self._form.items() if form.get(n) != b]
            fix = "keep the state that run.state returned, as its steps return it"
            raise FzeroValueError("run.commit", "this is not the run's state", odd[:8], fix)
        slot = self._spare(step)
        kept, sums = self._slots.open(slot), []
        for name, numel in self._numel.items():
            # Without the padding, which is at the end.
            part = named[name].detach().resolve_conj().resolve_neg().reshape(-1)[:numel]
            sums.append(word_sum(part))
            kept[name].copy_(part)
        self._slots.seal(slot, step, sums)
        self._count += 1
        # By now every rank of a mesh of this size has stored the state before, and the shards sent of it have arrived,
        # so the states that another number of ranks has stored are not needed any more.
        if self._count == len(self._slots.sealed) and self._is_first:
            for other in self._memory.glob("of-*"):
                if other != self._directory:
                    shutil.rmtree(other, ignore_errors=True)

    def _spare(self, step: int) -> int:
        """Returns the slot to write the state of a step into.

        It is the slot that already has a state of this step number (the step was skipped), else the oldest one that
        no rank may have to go back to. See [Note: slots].
        """
        held = [int(sealed) for sealed in self._slots.sealed]
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
