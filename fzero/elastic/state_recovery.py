"""Recovers the newest state of a run: from the memory of the hosts, else from its checkpoints, else an initial
state."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.checkpoint.index import Index
from fzero.comm import collective_sequence, control_group
from fzero.comm.launcher_environment import Processes
from fzero.elastic import recovery_source
from fzero.elastic.health import Finding
from fzero.elastic.memory_checkpoint import Damage
from fzero.errors import CheckpointError, FzeroValueError
from fzero.mesh import Mesh
from fzero.runtime.compiled_step import CompiledStep
from fzero.step import State

logger = logging.getLogger("fzero")

_REMOVERS = "as logind does at the user's last logout, RemoveIPC, or a cleaner of temporary files"


class InMemory(NamedTuple):
    """What the memories of all hosts hold together.

    Attributes:
        kept: the newest complete state; None if there is none.
        lost: if there is none, a message that says what is lost; "" if nothing is.
        reached: the largest number of batches that a rank had seen before it began its last step.
    """

    kept: Index | None = None
    lost: str = ""
    reached: int = 0


class Recovered(NamedTuple):
    """A state, where it was found ("memory", "disk" or "init"), and the number of batches that it has seen."""

    state: State
    source: str
    seen: int


def in_memory(memory: Path | None, mesh: Mesh, note: Callable[[Finding], None]) -> InMemory:
    """Looks for the newest state in the memories of all hosts. `note` is called with a finding for each damaged
    slot."""
    if memory is None:
        return InMemory()
    here = Processes.of()
    mine = 0 if collective_sequence.watcher is None else collective_sequence.watcher.reached
    reached = max(
        control_group.all_gather_values(mesh.control, "run", lambda: mine)
    )  # after this no rank still writes a slot
    what = "cannot check the memory of a host"
    look = lambda: recovery_source.let_go_of_damaged(memory, here.local, here.num_local)  # noqa: E731
    damaged = control_group.all_gather_values(
        mesh.control, "run", look, form=list[Damage], what=what, failure=CheckpointError
    )
    for rank, seen, leaves, sent in (x for those in damaged for x in those):
        how = "sent of its state" if sent else "kept"
        after = f"after {seen} batches" if seen >= 0 else "after an unknown number of batches"
        text = f"what rank {rank} {how} {after} has changed in memory, and is not used: "
        text += ", ".join(leaves[:5])
        note(Finding("slot", seen, (rank,), text))
    kept, lost = recovery_source.newest(memory, mesh, mesh.control)
    if kept is None and not lost and reached:
        ranks = ", ".join(map(str, range(mesh.size)))
        lost = f"of the state after {reached} batches no host's memory has the shards of rank{'s' * (mesh.size > 1)} "
        lost += f"{ranks} (its files may have been removed: {_REMOVERS})"
    return InMemory(kept, lost, reached)


def recovered(
    mesh: Mesh,
    train: CompiledStep,
    params: Any,
    key: torch.Tensor | None,
    found: InMemory,
    on_disk: Index | None,
    seen: int | None,
    path: str | os.PathLike[str] | None,
    refuse_resize: bool,
) -> Recovered:
    """Returns the newest state that all ranks can have.

    Args:
        train, params, key: the step that restores or initializes the state, with the arguments of its `init`.
        found: what the hosts' memory holds.
        on_disk, seen: the newest checkpoint, and the number of batches that its state has seen.
        path: of the run's checkpoints.
        refuse_resize: whether a state that another number of ranks has trained is an error.
    """
    kept = found.kept
    if found.lost:
        _say_lost(found, path, mesh, on_disk, seen or 0)
    state: State | None = None
    source = ""
    _check_resize(kept if kept is not None and (seen is None or kept.step >= seen) else on_disk, mesh, refuse_resize)
    if kept is not None and (seen is None or kept.step >= seen):
        try:
            source, state = "memory", train.restore(kept, params)
        except CheckpointError as error:  # on every rank: the step has been changed since
            if on_disk is None:
                raise
            logger.warning("fzero.run: the states in the hosts' memory are not used: %s", error)
    if state is None and on_disk is not None:
        source, state = "disk", train.restore(on_disk, params)
    elif state is None:
        source, state = "init", train.init(params, key)
        if not found.lost and mesh.rank == 0 and (lives := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
            text = (
                "fzero.run: torchrun has started the ranks again (%s), and no "
                "state is in memory%s: the run begins from scratch"
            )
            logger.warning(text, lives, "" if path is None else f" or under {path}")
    logger.info("fzero.run: the state after %d steps, from %s, on %d ranks", int(state.step), source, mesh.size)
    return Recovered(state, source, {"memory": kept.step if kept else 0, "disk": seen or 0, "init": 0}[source])


def _check_resize(found: Index | None, mesh: Mesh, refuse: bool) -> None:
    """Logs that another number of ranks has trained this state, or raises an error if `refuse`."""
    if found is None or (before := recovery_source.ranks_of(found)) == (now := mesh.size):
        return
    if refuse:
        what = f"the state of step {found.step} was trained by {before} ranks, and there are now {now}"
        fix = f"start the run on {before} ranks, or allow another number: fz.run(main, on_resize='keep_batch')"
        raise FzeroValueError("run", what, fix=fix)
    logger.info("fzero.run: from %d ranks to %d", before, now)


def _say_lost(
    found: InMemory, path: str | os.PathLike[str] | None, mesh: Mesh, on_disk: Index | None, seen: int
) -> None:
    """Logs that no state in memory is complete, and from where the run continues.

    Raises:
        FzeroValueError: the run has no path, so no checkpoint could have a newer state than the initial one.
    """
    if path is None:
        fix = "start the run again, from its first state; run.state(..., path=...) and run.save(state) outlive what "
        fix += "fz.redundant does not"
        raise FzeroValueError("run.state", "the state of this run is lost", [found.lost], fix)
    if mesh.rank == 0:
        anew = f"there is no checkpoint under {path}, and the run begins from scratch"
        where = anew if on_disk is None else f"the run goes back to {on_disk.directory}"
        more = found.reached - seen
        again = f", and does {more} batch{'es' * (more > 1)} again" if more > 0 else ""
        logger.warning("fzero.run: %s: %s%s", found.lost, where, again)
