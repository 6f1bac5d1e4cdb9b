"""Divides compilation among the ranks of one host: which of them see the same cache, which rank compiles what, and
which have delivered.

A rank that fails or dies while others wait for it is an error that names it. There are no locks that could be left
behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fzero._utils.cpu_affinity import listed, own_cores, share_of, spelled
from fzero.comm import control_group
from fzero.errors import DivergenceError
from fzero.mesh import Mesh

NOT_COMPILED = "not every rank has compiled its share; FZERO_CACHE=off lets every rank compile for itself"


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
            mine = _Needs(host, _digest(cache), _digest(sorted(costs.items())), spelled(own))
            notes = dict(enumerate(mesh.control.all_gather(mine, _Needs, "compile")))
            self.ranks = [r for r, note in notes.items() if (note.host, note.cache) == (host, mine.cache)]
            needs = dict.fromkeys(self.ranks, costs)
            # The costs of thousands of keys are exchanged only if ranks need different subgraphs; usually the digests
            # are equal.
            if any(note.needs != notes[0].needs for note in notes.values()):
                all_costs = mesh.control.all_gather(dict(costs), dict[str, float], "compile")
                needs = {r: all_costs[r] for r in self.ranks}
            everyone = [listed(note.cores) for note in notes.values() if note.host == host]
        self.mine = divided(needs)[mesh.rank]
        self.cores = share_of(own, everyone)

    def deliver(self, act: Callable[[], object]) -> None:
        """Runs `act`, in which this rank delivers its keys, and returns after all ranks have delivered theirs.

        Raises:
            DivergenceError: other ranks failed; names them. A rank that failed raises its own exception.
        """
        control_group.run_on_all_ranks(
            self._mesh.control, "compile", act, what=NOT_COMPILED, failure=DivergenceError, about="compiles functions"
        )


class _Needs(NamedTuple):
    """What a rank tells the others: its host, digests of its cache and of the costs of its keys, and its cores."""

    host: str
    cache: str
    needs: str
    cores: str


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
