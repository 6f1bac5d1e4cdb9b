"""Finds the newest state that the memories of all hosts hold together, and lets each rank read its shard of it.

A rank reads what its own host's memory has from there, and the rest from the other hosts.

Only the ranks of a host can read the memory of that host. So the first rank of each host reports what its memory
holds, and all ranks make the same choice: the newest state of which every element exists somewhere. Each rank then
knows which bytes it needs from which memory, and requests them from a rank of that host (checkpoint/peer_reads.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from fzero._utils import procfs
from fzero.checkpoint.index import File, Index, parse
from fzero.checkpoint.peer_reads import PeerReads
from fzero.checkpoint.safetensors_format import FormatError, Ranges
from fzero.comm.control_group import all_gather_values
from fzero.elastic.memory_slots import Damage, HostSlots, Stored, examine
from fzero.errors import CheckpointError
from fzero.mesh import Mesh
from fzero.sharding.shard_regions import claimed, whole

logger = logging.getLogger("fzero")

_RANKS = "ranks"  # the key, in the meta of a state from memory, of the number of ranks that stored it
_REMOVERS = "as logind does at the user's last logout, RemoveIPC, or a cleaner of temporary files"

Key = tuple[int, int, str]
"""A state in memory: the number of batches that it has seen, the number of ranks that stored it, and a digest of its
tensors and tree, so that shards of different models are not combined."""


class InMemory(NamedTuple):
    """What the memories of all hosts hold together.

    Attributes:
        kept: the newest complete state, as this rank reads it; None if there is none.
        lost: if there is none, a message that says what is lost; "" if nothing is.
        reached: the largest number of batches that a rank had seen before it began its last step.
        damaged: the slots that have changed since they were written, and are not used.
    """

    kept: Index | None
    lost: str
    reached: int
    damaged: Sequence[Damage]


def newest(memory: Path, mesh: Mesh, reached: int = 0) -> InMemory:
    """Returns the newest state that is complete in the memories of all hosts together.

    Damaged files are reported in the log and treated as lost.

    Args:
        memory: the run's directory on this host.
        mesh: the mesh whose ranks all call this.
        reached: the number of batches that this rank had seen before it began its last step.

    Communication: two exchanges of what each memory holds, packed, about ten bytes per tensor and rank.
    """
    ranks = mesh.control
    what, form = "cannot find the memory of a host", tuple[int, tuple[str, str, int, int]]
    told = all_gather_values(
        ranks, "run", lambda: (reached, _name(memory)), form=form, what=what, failure=CheckpointError
    )
    reached, names = max(at for at, _ in told), [name for _, name in told]
    # Ranks are grouped by the inode of the directory, not by host name: containers of one host may or may not share it.
    readers = [[r for r, other in enumerate(names) if other == one] for one in dict.fromkeys(names)]
    # After the first exchange no rank writes a slot. The ranks that share a memory share the work.
    mine = next(i for i, those in enumerate(readers) if ranks.rank in those)
    look = lambda: examine(memory, readers[mine].index(ranks.rank), len(readers[mine]))  # noqa: E731
    what = "cannot read the memory of a host"
    found = all_gather_values(ranks, "run", look, form=HostSlots, what=what, failure=CheckpointError)
    for rank, one in enumerate(found if ranks.rank == 0 else ()):
        for problem in one.problems:
            logger.warning("fzero.run: in the memory of rank %d's host, this counts as lost: %s", rank, problem)
    kept, lost = None, ""
    states = states_of(memory, [[x for rank in those for x in found[rank].stored] for those in readers], mine)
    # The newest state; of equally new ones, that of as many ranks as there are now. The rest only makes the order
    # total, so that all ranks choose the same.
    order = sorted(states, key=lambda key: (key[0], key[1] == mesh.size, key[1:]), reverse=True)
    if (best := next((key for key in order if is_whole(states[key])), None)) is not None:
        peer_reads = None if len(readers) == 1 else _peer_reads(mesh, states[best], readers)
        kept = replace(states[best], peer_reads=peer_reads)
    elif order:
        lost = _lost(order[0], states[order[0]])
    if kept is None and not lost and reached:
        who = f"rank{'s' * (mesh.size > 1)} {', '.join(map(str, range(mesh.size)))}"
        lost = f"of the state after {reached} batches no host's memory has the shards of {who}"
        lost += f" (its files may have been removed: {_REMOVERS})"
    return InMemory(kept, lost, reached, [x for one in found for x in one.damaged])


def states_of(memory: Path, memories: Sequence[Sequence[Stored]], mine: int) -> dict[Key, Index]:
    """Returns the states that the slots of all memories hold together, as a rank reads them whose host has the memory
    number `mine`.

    The files of a state are those of its own host's memory. The names of other hosts' files are prefixed with the
    number of their memory. Elements that several slots hold are listed in the order of the memories, its own first,
    and those of a memory's own ranks before those received from other hosts.
    """
    states: dict[Key, Index] = {}
    for number in (*range(mine, len(memories)), *range(mine)):
        for stem, size, content, sealed in sorted(memories[number], key=lambda slots: slots[:2]):
            index = replace(parse(memory / f"of-{size:05d}", content), sha256="")  # no file has this index
            form = _form(index)
            for slot, seal in enumerate(sealed):
                if not seal:
                    continue
                file = f"{stem}.{slot}.safetensors" if number == mine else f"{number}:{stem}.{slot}.safetensors"
                files = {file: File(content["bytes"], "", None)} if number == mine else {}
                key = seal - 1, size, form
                state = states.get(key) or replace(index, step=seal - 1, parts=dict.fromkeys(index.parts, ()))
                parts = {n: (*state.parts[n], *(replace(p, file=file) for p in ps)) for n, ps in index.parts.items()}
                states[key] = replace(state, files={**state.files, **files}, parts=parts, meta={_RANKS: size})
    return states


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


def ranks_of(index: Index) -> int:
    """Returns the number of ranks that saved a state to disk, or stored it in memory."""
    return index.meta[_RANKS] if _RANKS in index.meta else len(index.files)


def _lost(key: Key, index: Index) -> str:
    """Returns a message that names the ranks whose shard of a state is lost.

    It is "" for the first state (after 0 batches), because that can be made again.
    """
    files = {p.file for parts in index.parts.values() for p in parts}
    gone = [r for r in range(key[1]) if not any(f"-{r:05d}." in file for file in files)]
    who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "some ranks"
    return f"of the state after {key[0]} batches no host's memory has the shards of {who}" if key[0] else ""


def _name(memory: Path) -> tuple[str, str, int, int]:
    """Returns an identifier of a memory that is equal on exactly those ranks that can read it."""
    here = os.stat(memory)
    return *procfs.host_id(), here.st_dev, here.st_ino


def _form(index: Index) -> str:
    facts = list(index.leaves.items()), list(index.aliases.items()), index.treespec
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _peer_reads(mesh: Mesh, index: Index, readers: Sequence[Sequence[int]]) -> PeerReads:
    """Returns the reader of the files of all memories. `readers` lists the ranks that can read each memory."""

    def holder(file: str) -> int:
        ranks = readers[int(file.partition(":")[0])]
        # Spreads the requests over the ranks of that host.
        return ranks[mesh.rank % len(ranks)]

    def take(file: str, offset: int, out: torch.Tensor) -> str | None:
        path = index.directory / file.partition(":")[2]
        try:
            with Ranges(path, None) as ranges:
                ranges.read_into(out, offset)
        except (OSError, FormatError) as error:
            return f"{path.name}: {error}"
        return None

    return PeerReads(mesh, "run", f"the state in the hosts' memory of step {index.step}", holder, take)
