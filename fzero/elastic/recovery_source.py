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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero._utils import procfs
from fzero._utils.bounded_json import formed
from fzero.checkpoint import safetensors_format
from fzero.checkpoint.index import Index, StoredPart, parse, to_json
from fzero.checkpoint.peer_reads import PeerReads
from fzero.checkpoint.storage import storage_of
from fzero.comm.control_group import ControlGroup, all_gather_values
from fzero.elastic import memory_checkpoint
from fzero.elastic.memory_checkpoint import held, is_whole
from fzero.errors import CheckpointError
from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

_RANKS = "ranks"  # the key, in the meta of a state from memory, of the number of ranks that stored it

_WRONG = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged memory can raise."""


class Held(NamedTuple):
    """What one host's memory holds: its states by step and number of ranks, or why it is unusable; and the ranks that
    can read it."""

    ranks: Sequence[int]
    states: Mapping[tuple[int, int], Index]
    problem: str | None


def newest(memory: Path, mesh: Mesh, ranks: ControlGroup) -> tuple[Index | None, str]:
    """Returns the newest state that is complete in the memories of all hosts together, as this rank reads it.

    If there is none, returns None and a message that says what is lost, or "" if nothing was stored. A damaged
    memory is reported in the log and treated as lost.

    Args:
        memory: the run's directory on this host.
        mesh: the mesh whose ranks all call this.
        ranks: of the mesh.

    Communication: two exchanges of what each memory holds, packed, about ten bytes per tensor and slot.
    """
    memories = found(memory, ranks)
    for one in memories:
        if one.problem is not None and ranks.rank == 0:
            logger.warning("fzero.run: the memory of rank %d's host counts as lost: %s", one.ranks[0], one.problem)
    mine = next(i for i, one in enumerate(memories) if ranks.rank in one.ranks)
    states = _states(memories, mine)
    # The newest state; of equally new ones, that of as many ranks as there are now. The rest only makes the order
    # total, so that all ranks choose the same.
    better = lambda key: (key[0], key[1] == mesh.size, key[1:])  # noqa: E731
    usable = [key for key, parts in states.items() if _is_whole(parts)]
    if not usable:
        return None, _lost(max(states, key=better), states) if states else ""
    best = max(usable, key=better)
    return replace(_read_by(mesh, memory, memories, mine, states[best]), meta={_RANKS: best[1]}), ""


def _lost(key: tuple[int, int, str], states: Mapping[tuple[int, int, str], Sequence[tuple[int, Index]]]) -> str:
    """Returns a message that names the ranks whose shard of a state is lost.

    It is "" for the first state (after 0 batches), because that can be made again.
    """
    files = {file for _, index in states[key] for parts in index.parts.values() for file in (p.file for p in parts)}
    gone = [r for r in range(key[1]) if not any(f"-{r:05d}." in file for file in files)]
    who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "some ranks"
    return f"of the state after {key[0]} batches no host's memory has the shards of {who}" if key[0] else ""


def _states(memories: Sequence[Held], mine: int) -> dict[tuple[int, int, str], list[tuple[int, Index]]]:
    """Groups the states of all memories by step, number of ranks and form, each with the memories that hold shards of
    it."""
    states: dict[tuple[int, int, str], list[tuple[int, Index]]] = {}
    for number in (*range(mine, len(memories)), *range(mine)):  # its own first; the order of the others differs by host
        for (step, size), index in memories[number].states.items():
            states.setdefault((step, size, _form(index)), []).append((number, index))
    return states


def _is_whole(states: Sequence[tuple[int, Index]]) -> bool:
    return is_whole(replace(states[0][1], parts=_joined(states)))


def ranks_of(index: Index) -> int:
    """Returns the number of ranks that saved a state to disk, or stored it in memory."""
    return index.meta[_RANKS] if _RANKS in index.meta else len(index.files)


def let_go_of_damaged(memory: Path, turn: int, num: int) -> list[memory_checkpoint.Damage]:
    """Calls `memory_checkpoint.let_go_of_damaged`, and returns no damage if the files do not even have the expected
    form: `found` treats such a memory as lost."""
    try:
        return memory_checkpoint.let_go_of_damaged(memory, turn, num)
    except _WRONG:
        return []


def found(memory: Path, ranks: ControlGroup) -> list[Held]:
    """Returns the contents of all memories, each reported by the first rank that can read it."""
    what, form = "cannot find the memory of a host", tuple[str, str, int, int]
    names = all_gather_values(ranks, "run", lambda: _name(memory), form=form, what=what, failure=CheckpointError)
    # Ranks are grouped by the inode of the directory, not by host name: containers of one host may or may not share it.
    readers = [[r for r, other in enumerate(names) if other == one] for one in dict.fromkeys(names)]

    def look() -> dict[str, Any] | None:
        if not any(ranks.rank == those[0] for those in readers):
            return None
        try:
            states, problem = held(memory), None
        except _WRONG as error:
            states, problem = {}, f"{memory}: {type(error).__name__}: {error}"
        of_states = [[*key, str(index.directory), _told(index)] for key, index in states.items()]
        return {"states": of_states, "problem": problem}

    def heard(those: Sequence[int]) -> Held:
        content = told[those[0]] or {}
        states = formed(content["states"], list[tuple[int, int, str, Any]])
        indices = {(step, size): parse(Path(directory), index) for step, size, directory, index in states}
        return Held(those, indices, formed(content["problem"], str | None))

    what = "cannot read the memory of a host"
    told = all_gather_values(ranks, "run", look, what=what, failure=CheckpointError)
    try:
        return [heard(those) for those in readers]
    except _WRONG as error:  # the same error on every rank: all have received the same data
        raise CheckpointError("run", what, [f"its metadata is damaged: {type(error).__name__}: {error}"]) from None


def _told(index: Index) -> dict[str, Any]:
    """Serializes an index in the form that another rank parses."""
    content = to_json(
        index.step, index.leaves, index.parts, index.aliases, index.treespec, dict(index.meta), index.files
    )
    return {**content, "chunk": safetensors_format.CHUNK, "sha256": index.sha256}


def _name(memory: Path) -> tuple[str, str, int, int]:
    """Returns an identifier of a memory that is equal on exactly those ranks that can read it."""
    here = os.stat(memory)
    return *procfs.host_id(), here.st_dev, here.st_ino


def _form(index: Index) -> str:
    """Returns a digest of the tensors and the tree of a state, so that shards of different models are not combined."""
    facts = list(index.leaves.items()), list(index.aliases.items()), index.treespec
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _joined(
    states: Sequence[tuple[int, Index]], named: Callable[[int, str], str] = lambda number, file: file
) -> dict[str, tuple[StoredPart, ...]]:
    """Concatenates the parts that several memories hold of one state, in the order of these memories."""
    names = states[0][1].parts
    return {
        name: tuple(replace(p, file=named(number, p.file)) for number, index in states for p in index.parts[name])
        for name in names
    }


def _read_by(
    mesh: Mesh, memory: Path, memories: Sequence[Held], mine: int, states: Sequence[tuple[int, Index]]
) -> Index:
    """Returns the index of a state as this rank reads it.

    `files` are those of its own host's memory. The names of other hosts' files are prefixed with the number of their
    memory.
    """
    by_number = dict(states)
    own = by_number.get(mine)
    index = states[0][1] if own is None else own
    what = f"the state in the hosts' memory of step {index.step}"
    directory = memory if own is None else Path(own.directory)
    return replace(
        index,
        directory=directory,
        files={} if own is None else own.files,
        parts=_joined(states, lambda number, file: file if number == mine else f"{number}:{file}"),
        peer_reads=None if len(memories) == 1 else _peer_reads(mesh, directory, memories, what),
    )


def _peer_reads(mesh: Mesh, directory: Path, memories: Sequence[Held], what: str) -> PeerReads:
    """Returns the reader of the files of all memories.

    A file is named by the number of its memory and its name. `directory` holds the files of this host.
    """

    def holder(file: str) -> int:
        ranks = memories[int(file.partition(":")[0])].ranks
        # Spreads the requests over the ranks of that host.
        return ranks[mesh.rank % len(ranks)]

    def take(file: str, offset: int, out: torch.Tensor) -> str | None:
        path = directory / file.partition(":")[2]
        try:
            with storage_of(path).reader(path) as reader:
                got = reader.fill(memoryview(out.numpy()), offset)  # type: ignore[arg-type]
        except OSError as error:
            return f"{path.name}: {error}"
        return None if got == out.numel() else f"{path.name}: ends inside {offset} to {offset + out.numel()}"

    return PeerReads(mesh, "run", what, holder, take)
