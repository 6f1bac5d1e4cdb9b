"""Finds the newest state that the memories of all hosts have together, and has each rank read its part of it: from its
own host's memory what is there, from the others the rest.

A memory is read by the ranks of its host alone. So the first rank of each says what its memory has, and all ranks come
to the same choice: the newest state of which every element is somewhere. Each then knows which bytes it needs of which
memory, and asks a rank of that host for them (checkpoint/peer_reads.py).
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

from fzero._utils.bounded_json import formed, parsed
from fzero.checkpoint import safetensors_format
from fzero.checkpoint.index import Index, StoredPart, parse, to_json
from fzero.checkpoint.peer_reads import Spread
from fzero.checkpoint.storage import storage_of
from fzero.comm import collective_sequence
from fzero.comm.all_ranks import Ranks, together
from fzero.elastic import memory_checkpoint
from fzero.elastic.memory_checkpoint import held, is_whole
from fzero.errors import CheckpointError
from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

_RANKS = "ranks"  # among the meta of a state that memories have

_WRONG = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, RecursionError)
"""Raised by whoever reads a memory that is damaged."""


class Held(NamedTuple):
    """A memory's states by step and number of ranks, or why it is of no use; and the ranks that can read it."""

    ranks: Sequence[int]
    states: Mapping[tuple[int, int], Index]
    problem: str | None


def newest(memory: Path, mesh: Mesh, ranks: Ranks) -> tuple[Index | None, str]:
    """The newest state that is whole in the memories of all hosts together, as this rank reads it; None if there is
    none, and what is lost then, "" if nothing was kept. A memory that is damaged is named in the log, and is as if it
    were lost.

    Args:
        memory: the run's, on this host.
        mesh: whose ranks call this together.
        ranks: of the mesh.

    Communication: two exchanges: what each memory has, packed, some ten bytes a leaf and slot.
    """
    memories = found(memory, ranks)
    for one in memories:
        if one.problem is not None and ranks.rank == 0:
            logger.warning("fzero.run: the memory of rank %d's host counts as lost: %s", one.ranks[0], one.problem)
    mine = next(i for i, one in enumerate(memories) if ranks.rank in one.ranks)
    states = _states(memories, mine)
    better = lambda key: (key[0], key[1] == mesh.size, key[1:])  # noqa: E731
    usable = [key for key, parts in states.items() if _is_whole(parts)]
    if not usable:
        return None, _lost(max(states, key=better), states) if states else ""
    best = max(usable, key=better)
    return replace(_read_by(mesh, memory, memories, mine, states[best]), meta={_RANKS: best[1]}), ""


def _lost(key: tuple[int, int, str], states: Mapping[tuple[int, int, str], Sequence[tuple[int, Index]]]) -> str:
    """The ranks of whose part of a state nothing is left; of the first state nothing is lost that cannot be made."""
    files = {file for _, index in states[key] for parts in index.parts.values() for file in (p.file for p in parts)}
    gone = [r for r in range(key[1]) if not any(f"-{r:05d}." in file for file in files)]
    who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "some ranks"
    return f"of the state after {key[0]} batches no host's memory has what {who} had" if key[0] else ""


def _states(memories: Sequence[Held], mine: int) -> dict[tuple[int, int, str], list[tuple[int, Index]]]:
    """The states of all memories by step, number of ranks and form, each with those that have parts of it."""
    states: dict[tuple[int, int, str], list[tuple[int, Index]]] = {}
    for number in (*range(mine, len(memories)), *range(mine)):  # its own first, then not all of them the same
        for (step, size), index in memories[number].states.items():
            states.setdefault((step, size, _form(index)), []).append((number, index))
    return states


def _is_whole(states: Sequence[tuple[int, Index]]) -> bool:
    return is_whole(replace(states[0][1], parts=_joined(states)))


def ranks_of(index: Index) -> int:
    """The number of ranks that have saved, or kept, a state."""
    return index.meta[_RANKS] if _RANKS in index.meta else len(index.files)


def let_go_of_damaged(memory: Path, turn: int, num: int) -> list[memory_checkpoint.Damage]:
    """Calls the vault's; a memory that is not even of its form is left to `found`, for which it counts as lost."""
    try:
        return memory_checkpoint.let_go_of_damaged(memory, turn, num)
    except _WRONG:
        return []


def found(memory: Path, ranks: Ranks) -> list[Held]:
    """The contents of all memories, each told of by the first rank that has it."""
    what, form = "cannot find the memory of a host", tuple[str, str, int, int]
    names = together(ranks, "run", what, lambda: _name(memory), form=form)
    readers = [[r for r, other in enumerate(names) if other == one] for one in dict.fromkeys(names)]

    def look() -> dict[str, Any] | None:
        if not any(ranks.rank == those[0] for those in readers):
            return None
        try:
            states, problem = held(memory), None
            for index in states.values():
                check(index)
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
    told = together(ranks, "run", what, look, form=Any)
    try:
        return [heard(those) for those in readers]
    except _WRONG as error:  # on every rank: all have the same notes
        raise CheckpointError("run", what, [f"its note is damaged: {type(error).__name__}: {error}"]) from None


def _told(index: Index) -> dict[str, Any]:
    """An index as another rank parses it."""
    content = to_json(
        index.step, index.leaves, index.parts, index.aliases, index.skeleton, dict(index.meta), index.files
    )
    return {**content, "chunk": safetensors_format.CHUNK, "sha256": index.sha256}


def _name(memory: Path) -> tuple[str, str, int, int]:
    """The name of a memory that only those see who can read it."""
    here = os.stat(memory)
    return *collective_sequence._host(), here.st_dev, here.st_ino


def check(index: Index) -> None:
    """Raises if the headers of a memory's files are not as its index says.

    Raises:
        ValueError: it names the file.
        OSError: it cannot be read.
    """
    of_file: dict[str, list[StoredPart]] = {file: [] for file in index.files}
    for parts in index.parts.values():
        for part in parts:
            of_file[part.file].append(part)
    dtypes = {name: dtype for name, (_, dtype) in index.leaves.items()}
    for file, parts in of_file.items():
        with (Path(index.directory) / file).open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = parsed(f.read(length)) if 8 + length <= index.files[file].bytes else {}
        for part in parts:
            begin = part.offset - 8 - length
            told, nbytes = header.get(part.key, {}), part.boxes.numel * dtypes[part.key].itemsize
            at, end = told.get("data_offsets", (-1, -1))
            if at != begin or end - at < nbytes or told.get("dtype") != safetensors_format.CODES[dtypes[part.key]]:
                raise ValueError(f"{file}: its header is damaged, {part.key} is not where it should be")


def _form(index: Index) -> str:
    """A digest of what a state is made of: those of another model are not put together."""
    facts = list(index.leaves.items()), list(index.aliases.items()), index.skeleton
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _joined(
    states: Sequence[tuple[int, Index]], named: Callable[[int, str], str] = lambda number, file: file
) -> dict[str, tuple[StoredPart, ...]]:
    """The parts that several memories have of one state, in their order."""
    names = states[0][1].parts
    return {
        name: tuple(replace(p, file=named(number, p.file)) for number, index in states for p in index.parts[name])
        for name in names
    }


def _read_by(
    mesh: Mesh, memory: Path, memories: Sequence[Held], mine: int, states: Sequence[tuple[int, Index]]
) -> Index:
    """A state as this rank reads it: `files` are those of its own host's memory; others have the number of theirs
    before their names."""
    by_number = dict(states)
    own = by_number.get(mine)
    index = states[0][1] if own is None else own
    what = f"what the hosts' memory has of step {index.step}"
    directory = memory if own is None else Path(own.directory)
    return replace(
        index,
        directory=directory,
        files={} if own is None else own.files,
        parts=_joined(states, lambda number, file: file if number == mine else f"{number}:{file}"),
        spread=None if len(memories) == 1 else _spread(mesh, directory, memories, what),
    )


def _spread(mesh: Mesh, directory: Path, memories: Sequence[Held], what: str) -> Spread:
    """Reads files of all memories, each by its memory's number and its name; `directory` has those of this host."""

    def holder(file: str) -> int:
        ranks = memories[int(file.partition(":")[0])].ranks
        return ranks[mesh.rank % len(ranks)]

    def take(file: str, offset: int, out: torch.Tensor) -> str | None:
        path = directory / file.partition(":")[2]
        try:
            with storage_of(path).reader(path) as reader:
                got = reader.fill(memoryview(out.numpy()), offset)  # type: ignore[arg-type]
        except OSError as error:
            return f"{path.name}: {error}"
        return None if got == out.numel() else f"{path.name}: ends inside {offset} to {offset + out.numel()}"

    return Spread(mesh, "run", what, holder, take)
