"""Compares what ranks were sent of a state (`fz.redundant`) with what its owner kept of it, by sums of leaves' words.

Sums of a slot are its own: they tell memory that changed later, not what has changed on the way, or in the live state
between `run.keep` and the sends of the next step. The owner's sums of the same state tell that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from fzero.elastic.health import Finding
from fzero.elastic.vault import Vault
from fzero.elastic.wards import Ward
from fzero.mesh import Mesh
from fzero.ranks.notes import Notes


class Sent:
    """Compares one in so many states, off the path of steps. Each rank notes a digest of its sums in the store. The
    receiver reads it when the state has arrived. All ranks look for a difference one step later.

    Args:
        mesh: of all ranks.
        vault: what this rank keeps, and is sent.
        ward: the source of what it is sent.
        every: states of which one is compared, rounded up to those that are sent.

    Communication: of one state in so many about 50 bytes to the store, as many from it, and a question.
    """

    def __init__(self, mesh: Mesh, vault: Vault, ward: Ward, every: int):
        self._mesh, self._vault, self._owner = mesh, vault, ward.rank_of_owner(mesh)
        self._notes = Notes(mesh.store, "fzero/sent", mesh.rank)
        self._every = -(-every // ward.spec.every) * ward.spec.every

    def kept(self, seen: int) -> list[Finding]:
        """Called when the state after so many batches is kept, and what was sent of the one before it has come. The
        same on every rank."""
        if self._due(seen):
            self._note(seen)
        if self._due(seen - 1):
            self._compare(seen - 1)
        return self._told(seen - 2) if self._due(seen - 2) else []

    def _due(self, seen: int) -> bool:
        return seen > 0 and seen % self._every == 0

    def _note(self, seen: int) -> None:
        """Says what this rank keeps of what it is about to send: of leaves that several ranks of a host have one keeps
        them, and all send."""
        wards, sums = self._vault.wards, self._vault.sums(seen)
        if wards is not None and sums is not None:
            kept = [i for i, name in enumerate(wards.names) if name in sums]
            note = {"leaves": "all" if len(kept) == len(wards.names) else kept}
            note["digest"] = _digest([sums[wards.names[i]] for i in kept])
            self._notes.write(seen, note)

    def _compare(self, seen: int) -> None:
        """Compares what has come with what its owner keeps, and lets go of it if it is not that."""
        wards = self._vault.wards
        sums = None if wards is None else wards.sums(seen)
        if wards is None or sums is None or not self._notes.come(seen, [self._owner]):
            return
        note = self._notes.read(seen, [self._owner], dict[str, Any])[self._owner]
        kept = wards.names if note["leaves"] == "all" else [wards.names[i] for i in note["leaves"]]
        if note["digest"] != _digest([sums[name] for name in kept]):
            wards.unseal(seen)
            self._notes.store.compare_set(self._notes.key(seen, "odd"), "", str(self._owner))

    def _told(self, seen: int) -> list[Finding]:
        """A difference that some rank has found: all have compared before any could end the step after that."""
        store, odd = self._notes.store, self._notes.key(seen, "odd")
        if self._notes.come(seen, [self._mesh.rank]):
            self._notes.clear(seen)
        if not store.check([odd]):
            return []
        owner = int(store.get(odd))
        text = f"what rank {owner} sent of its state after {seen} batches is not what it kept, and is not used"
        return [Finding("sent", seen, (owner,), text)]


def _digest(sums: Sequence[int]) -> str:
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
