"""Compares what ranks were sent of a state (`fz.redundant`) with what its owner kept of it, by sums of leaves' words.

Sums of a slot are its own: they tell memory that changed later, not what has changed on the way, or in the live state
between `run.keep` and the sends of the next step. The owner's sums of the same state tell that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from fzero.elastic.health import Finding
from fzero.elastic.vault import Vault
from fzero.elastic.wards import Ward
from fzero.mesh import Mesh


class Sent:
    """The comparison of one in so many states, off the path of steps: of such a state each rank notes a digest of its
    sums in the store; whom it sends to reads it when the state has come; all look a step later for a difference.

    Args:
        mesh: of all ranks.
        vault: what this rank keeps, and is sent.
        ward: the source of what it is sent.
        every: states of which one is compared, rounded up to those that are sent.

    Communication: of one state in so many 16 bytes to the store, 16 from it, and a question.
    """

    def __init__(self, mesh: Mesh, vault: Vault, ward: Ward, every: int):
        self._mesh, self._vault, self._owner = mesh, vault, ward.rank_of_owner(mesh)
        self._every = -(-every // ward.spec.every) * ward.spec.every

    def kept(self, seen: int) -> list[Finding]:
        """Called when the state after so many batches is kept, and what was sent of the one before it has come. The
        same on every rank."""
        store, rank, vault = self._mesh.store, self._mesh.rank, self._vault
        wards, now, before, told = vault.wards, *(n if n > 0 and n % self._every == 0 else 0 for n in _last(seen))
        if wards is None:
            return []
        if now and (sums := vault.sums(now)) is not None:
            store.set(_key(now, rank), _digest({name: sums.get(name, 0) for name in wards.names}))
        sums, key = wards.sums(before) if before else None, _key(before, self._owner)
        if sums is not None and store.check([key]) and store.get(key).decode() != _digest(sums):
            wards.unseal(before)
            store.compare_set(_key(before), "", str(self._owner))
        if told and store.check([_key(told, rank)]):
            store.delete_key(_key(told, rank))
        if not told or not store.check([_key(told)]):
            return []
        owner = int(store.get(_key(told)))
        text = f"what rank {owner} sent of its state after {told} batches is not what it kept, and is not used"
        return [Finding("sent", told, (owner,), text)]


def _last(seen: int) -> tuple[int, int, int]:
    return seen, seen - 1, seen - 2


def _digest(sums: Mapping[str, int]) -> str:
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]


def _key(seen: int, rank: int | None = None) -> str:
    return f"fzero/sent/{seen}/{'odd' if rank is None else rank}"
