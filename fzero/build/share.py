"""Divides compilation among the ranks of one host: which of them see the same cache, who compiles what, and who has
delivered.

Messages go through the store, so that a rank that fails or dies while the others wait for it is an error that names it,
and there are no locks to be left behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fzero.cores import listed, own_cores, share_of, spelled
from fzero.errors import DivergenceError
from fzero.mesh import Mesh
from fzero.ranks.notes import Notes, timed_out


class Share:
    """One division of work between the ranks whose notes agree. All ranks of the mesh make it together.

    Args:
        mesh: the ranks, and how long to wait for one.
        host: the same on ranks of one host.
        what: the same on ranks that can use each other's results, e.g. the folder and the keys of what they need.
    """

    def __init__(self, mesh: Mesh, host: str, what: Any):
        self._mesh = mesh
        self.ranks, own = [mesh.rank], own_cores()
        everyone = [own]
        if mesh.size > 1:
            turn = mesh.store.add(f"fzero/share/turns/{mesh.rank}", 1)
            self._notes = Notes(mesh.store, f"fzero/share/{turn}", mesh.rank)
            mine = {"host": host, "what": hashlib.sha256(repr(what).encode()).hexdigest()}
            notes = self._exchange("note", {**mine, "cores": spelled(own)}, range(mesh.size))
            self.ranks = [r for r, note in notes.items() if {**note, **mine} == note]
            everyone = [listed(note["cores"]) for note in notes.values() if note["host"] == host]
        self.cores = share_of(own, everyone)

    def owned(self, costs: Mapping[str, float]) -> set[str]:
        """The keys that are this rank's to deliver: the same division on every rank, about the same cost for each."""
        loads = dict.fromkeys(self.ranks, 0.0)
        mine = set()
        for key, cost in sorted(costs.items(), key=lambda kc: (-kc[1], kc[0])):
            rank = min(loads, key=lambda r: (loads[r], r))
            loads[rank] += cost
            if rank == self._mesh.rank:
                mine.add(key)
        return mine

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Tells the other ranks, after the body, that this one has delivered, or why it has not."""
        try:
            yield
        except BaseException as error:
            if len(self.ranks) > 1:
                self._notes.write("done", {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
            raise

    def wait(self) -> None:
        """Until all ranks have delivered.

        Raises:
            DivergenceError: naming the ranks that failed, or timed out.
        """
        if len(self.ranks) > 1:
            self._exchange("done", {}, self.ranks)

    def _exchange(self, topic: str, note: dict[str, str], ranks: Sequence[int]) -> dict[int, dict[str, str]]:
        self._notes.write(topic, note)
        missing = {ranks[i] for i in self._mesh.turns.absent(self._notes.keys(topic, ranks), "compile")}
        notes = self._notes.read(topic, [r for r in ranks if r not in missing], dict[str, str])
        problems = [f"rank {r}: {n['error']}" for r, n in notes.items() if "error" in n]
        problems += [f"rank {r} {timed_out(self._mesh.timeout)}" for r in sorted(missing)]
        if problems:
            fix = "look at the first of these ranks; FZERO_CACHE=off lets every rank compile for itself"
            raise DivergenceError("compile", "not every rank has compiled its part", problems, fix)
        return notes
