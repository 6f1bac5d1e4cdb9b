"""Divides compilation among the ranks of one host: which of them see the same cache, which rank compiles what, and
which have delivered.

Messages go through the store, so that a rank that fails or dies while others wait for it is an error that names it.
There are no locks that could be left behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fzero._utils.cpu_affinity import listed, own_cores, share_of, spelled
from fzero.comm.control_messages import Notes, timed_out
from fzero.errors import DivergenceError
from fzero.mesh import Mesh


class Share:
    """One division of work among the ranks that see the same cache. All ranks of the mesh construct it together.

    Args:
        mesh: its ranks, and how long to wait for one.
        host: an identifier that is the same on ranks of the same host.
        cache: a value that is the same on ranks that can use each other's results.
        costs: the keys that this rank needs, with the cost of each. Ranks may need different keys, for example as
            stages of a pipeline.

    Attributes:
        ranks: the ranks that see this rank's cache.
        mine: the keys that this rank delivers. Each key is assigned to one of the ranks that need it, so that all have
            about the same amount of work.
        cores: the number of cores of this rank.
    """

    def __init__(self, mesh: Mesh, host: str, cache: Any, costs: Mapping[str, float]):
        self._mesh = mesh
        self.ranks, own = [mesh.rank], own_cores()
        everyone, needs = [own], {mesh.rank: costs}
        if mesh.size > 1:
            # Every rank counts its own divisions. The counts agree because all ranks construct these objects in the
            # same order, so keys of an earlier division are never read again.
            number = mesh.store.add(f"fzero/share/counts/{mesh.rank}", 1)
            self._notes = Notes(mesh.store, f"fzero/share/{number}", mesh.rank)
            given = {"host": host, "cache": _digest(cache), "needs": _digest(sorted(costs.items()))}
            notes = self._exchange("note", {**given, "cores": spelled(own)}, range(mesh.size))
            together = {r: note for r, note in notes.items() if (note["host"], note["cache"]) == (host, given["cache"])}
            self.ranks, needs = [*together], dict.fromkeys(together, costs)
            # The costs of thousands of keys are exchanged only if the ranks need different subgraphs; usually the
            # digests are equal.
            if any(note["needs"] != given["needs"] for note in together.values()):
                texts = self._exchange("needs", {key: str(cost) for key, cost in costs.items()}, self.ranks)
                needs = {r: {key: float(cost) for key, cost in text.items()} for r, text in texts.items()}
            everyone = [listed(note["cores"]) for note in notes.values() if note["host"] == host]
        self.mine = divided(needs)[mesh.rank]
        self.cores = share_of(own, everyone)

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Runs a body in which this rank delivers its keys. If the body fails, the other ranks are told why."""
        try:
            yield
        except BaseException as error:
            # The others wait for this rank in `wait`, up to the timeout of the mesh.
            if len(self.ranks) > 1:
                self._notes.write("done", {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
            raise

    def wait(self) -> None:
        """Waits until all ranks have delivered.

        Raises:
            DivergenceError: ranks failed or timed out; names them.
        """
        if len(self.ranks) > 1:
            self._exchange("done", {}, self.ranks)

    def _exchange(self, topic: str, note: dict[str, str], ranks: Sequence[int]) -> dict[int, dict[str, str]]:
        self._notes.write(topic, note)
        missing = {ranks[i] for i in self._mesh.collective_sequence.absent(self._notes.keys(topic, ranks), "compile")}
        notes = self._notes.read(topic, [r for r in ranks if r not in missing], dict[str, str])
        problems = [f"rank {r}: {n['error']}" for r, n in notes.items() if "error" in n]
        problems += [f"rank {r} {timed_out(self._mesh.timeout)}" for r in sorted(missing)]
        if problems:
            fix = "look at the first of these ranks; FZERO_CACHE=off lets every rank compile for itself"
            raise DivergenceError("compile", "not every rank has compiled its share", problems, fix)
        return notes


def _digest(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def divided(needs: Mapping[int, Mapping[str, float]]) -> dict[int, set[str]]:
    """Returns the keys that each rank delivers. The division is the same on every rank.

    Args:
        needs: for each rank, the keys that it needs, and their costs.

    Example:
        >>> found = divided({0: {"a": 3.0, "b": 2.0}, 1: {"a": 3.0, "c": 2.0}})
        >>> [sorted(keys) for keys in found.values()]
        [['a', 'b'], ['c']]
    """
    costs = {key: cost for of in needs.values() for key, cost in of.items()}
    loads, found = dict.fromkeys(needs, 0.0), {rank: set[str]() for rank in needs}
    # First the keys that the fewest ranks can take, then the most expensive ones: the later a key, the more freedom is
    # left to even out the loads.
    for key in sorted(costs, key=lambda key: (sum(key in of for of in needs.values()), -costs[key], key)):
        rank = min((r for r, of in needs.items() if key in of), key=lambda r: (loads[r], r))
        loads[rank] += costs[key]
        found[rank].add(key)
    return found
