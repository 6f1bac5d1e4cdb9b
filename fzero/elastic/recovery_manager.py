"""Keeps the state of a run so that it outlives a lost rank: `RecoveryManager`, with four verbs.

join      brings all ranks together on a mesh, also after one of them was restarted
restore   finds the newest state: in the memory of the hosts, else in the checkpoints, else an initial one
commit    copies this rank's shard of a state to its host's memory
leave     closes a mesh that has lost a rank, and everything that was made on it
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.checkpoint.checkpoint_manager import CheckpointManager
from fzero.checkpoint.index import Index
from fzero.comm import collective_sequence, control_group
from fzero.comm.launcher_environment import Processes
from fzero.comm.transport import transport
from fzero.elastic import host_directory, recovery_source
from fzero.elastic.health import Finding
from fzero.elastic.memory_checkpoint import MemoryCheckpoint
from fzero.elastic.recovery_source import InMemory
from fzero.elastic.stop_request import STOPPED, StopSignals
from fzero.errors import FzeroError, FzeroValueError
from fzero.mesh import Mesh, close_mesh, make_mesh
from fzero.runtime.compiled_step import CompiledStep
from fzero.sharding.layout import extent_of
from fzero.step import State
from fzero.transforms.redundant import Redundant
from fzero.transforms.transform import find

logger = logging.getLogger("fzero")

_TRIES = 3  # attempts to bring the ranks together; all but the last may fail because a rank is lost
_ANSWER = 5.0  # seconds to wait for an answer of the store's host


class Recovered(NamedTuple):
    """A state, where it was found ("memory", "disk" or "init"), the number of batches that it has seen, and the damaged
    slots in memory."""

    state: State
    source: str
    seen: int
    damaged: list[Finding]


class RecoveryManager:
    """The state of a run in the memory of its hosts.

    Args:
        memory: the directory of the in-memory checkpoints on this host; None if the run keeps none.
        every: one state is stored every `every` steps.
        signals: the signals that end the run.
        again: whether a lost rank is restarted.
        timeout, axes: the arguments of `make_mesh`.
        refuse_resize: whether a state that another number of ranks has trained is an error.

    Attributes:
        mesh: the mesh that the ranks have joined last.
        on_disk: the names of the state's tensors that are stored on disk, so that no copies are kept in memory.
    """

    def __init__(
        self,
        memory: Path | None,
        every: int,
        signals: StopSignals,
        again: bool,
        timeout: float,
        axes: Mapping[str, Any],
        refuse_resize: bool,
    ):
        self._memory, self._every, self._signals, self._again = memory, every, signals, again
        self._make = {"timeout": timeout, **axes}
        self._refuse_resize = refuse_resize
        self.mesh: Mesh
        self.on_disk: list[str] = []
        self._checkpoint: MemoryCheckpoint | None = None

    @property
    def keeps(self) -> bool:
        """Whether states are kept in memory."""
        return self._memory is not None

    def join(self) -> Mesh:
        """Returns the mesh of all ranks. If a rank is lost while they come together, waits for it as well."""
        if self._signals.came:
            sys.exit(STOPPED)
        watcher = collective_sequence.watcher
        if watcher is not None:
            watcher.say(host_directory.PREPARING)
        tries, self._signals.exits = _TRIES if self._again else 1, True
        while True:
            try:
                self.mesh = make_mesh(**self._make)
                break
            except (torch.distributed.DistError, RuntimeError) as error:
                tries -= 1
                if not tries or not _store_answers():
                    raise
                logger.warning("fzero.run: a rank was lost while the ranks joined (%s)", cause(error))
            self.leave()  # after the handler, because the error's traceback refers to the groups that are closed here
        if watcher is not None:
            watcher.say(host_directory.PREPARING)
        if self._memory is not None:
            host_directory.make_directory(self._memory)  # somebody may have removed it since
        return self.mesh

    def restore(
        self,
        train: CompiledStep,
        params: Any,
        key: torch.Tensor | None,
        load: str | os.PathLike[str] | None,
        saves: CheckpointManager | None,
    ) -> Recovered:
        """Returns the newest state that all ranks can have, and keeps it in memory from now on.

        Args:
            train, params, key: the step that restores or initializes the state, with the arguments of its `init`.
            load: the weights of an initial state, if they are read from files.
            saves: the run's checkpoints, which count from this state on.
        """
        mesh, found = self.mesh, InMemory(None, "", 0, [])
        if self._memory is not None:
            watcher = collective_sequence.watcher
            found = recovery_source.newest(self._memory, mesh, 0 if watcher is None else watcher.reached)
        damaged = [_finding(*damage) for damage in found.damaged]
        for finding in damaged if mesh.rank == 0 else ():
            logger.warning("fzero.run: %s", finding.text)
        # The newest checkpoint, and the number of batches that its state has seen.
        on_disk, saved = (None, None) if saves is None else saves.newest(mesh)
        if found.lost:
            _say_lost(found, saves, mesh, on_disk, saved or 0)
        newest, source, seen = found.kept, "memory", 0 if found.kept is None else found.kept.step
        if newest is None or (saved is not None and newest.step < saved):
            newest, source, seen = on_disk, "disk", saved or 0
        if newest is None:
            state = train.init(params, key) if load is None else train.load(load, params, key)
            source = "init"
            if not found.lost:
                _say_from_scratch(mesh, saves)
        else:
            _check_resize(newest, mesh, self._refuse_resize)
            state = train.restore(newest, params)
        logger.info("fzero.run: the state after %d steps, from %s, on %d ranks", int(state.step), source, mesh.size)
        if saves is not None:
            saves.begin(seen, saved)
        self.on_disk = [name for name, x in tree.with_names(state) if extent_of(x)]
        if self._memory is not None and not self.on_disk:
            self._checkpoint = self._reserve(self._memory, train, state, seen)
            # this rank does not store the state yet: it came from disk, another host or another number of ranks
            if source != "memory" or not self._checkpoint.has(seen):
                self._checkpoint.keep(state, seen)
        return Recovered(state, source, seen, damaged)

    def begin(self, seen: int) -> None:
        """Marks the start of a step. `seen` is the number of batches that the state has consumed."""
        if self._checkpoint is not None and self._checkpoint.peer_replicas is not None:
            self._checkpoint.peer_replicas.begin(seen)

    def commit(self, state: State, seen: int) -> None:
        """Copies this rank's shard of a state to its host's memory, if that is due, and marks the shards that another
        rank has sent in this step as complete."""
        if self._checkpoint is None:
            return
        if self._checkpoint.peer_replicas is not None and self._checkpoint.has(seen - 1):
            self._checkpoint.peer_replicas.seal(seen)
        if seen % self._every == 0:
            self._checkpoint.keep(state, seen)

    def leave(self) -> None:
        """Closes a mesh that has lost a rank, and everything that was made on it."""
        self._checkpoint = None
        if hasattr(self, "mesh"):
            del self.mesh
        # Programs and transports of the old mesh may be in reference cycles. Their pools and connections have to be
        # closed before the groups are.
        gc.collect()
        with contextlib.suppress(FzeroError, RuntimeError):  # for example groups that nobody can close any more
            close_mesh()

    def _reserve(self, memory: Path, train: CompiledStep, state: State, seen: int) -> MemoryCheckpoint:
        """Reserves the memory, and connects the ranks that send and receive copies."""
        mesh, every = self.mesh, self._every
        redundant = _redundant(train, every, mesh)
        here = Processes.of()
        host = range(here.rank - here.local, here.rank - here.local + here.num_local)

        def reserve() -> MemoryCheckpoint:
            try:
                return MemoryCheckpoint(memory, mesh.rank, mesh.size, host, state, seen, every, mesh, redundant)
            except OSError as error:
                raise _no_room(memory, error) from error

        checkpoint = control_group.run_on_all_ranks(mesh.control, "run", reserve)
        if redundant is not None:
            # Now, while all ranks are here: in a step it would wait for a rank that is lost meanwhile.
            transport(mesh).connect(redundant.axis)
        mesh.context.peer_replicas = checkpoint.peer_replicas
        return checkpoint


def cause(error: Exception) -> str:
    """Returns the line of an error message that says what happened, not the line that says what this rank was doing."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if "has left" in line and not line.startswith("fzero.")]
    return (told or lines[1:2] or lines[:1] or [type(error).__name__])[0]


def _store_answers() -> bool:
    """Whether the ranks' store still answers. Without it no lost rank can come back."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _ANSWER):
            return True
    except (KeyError, ValueError):
        return True
    except OSError:
        return False


def _check_resize(found: Index, mesh: Mesh, refuse: bool) -> None:
    """Logs that another number of ranks has trained this state, or raises an error if `refuse`."""
    if (before := recovery_source.ranks_of(found)) == (now := mesh.size):
        return
    if refuse:
        what = f"the state of step {found.step} was trained by {before} ranks, and there are now {now}"
        fix = f"start the run on {before} ranks, or allow another number: fz.run(main, on_resize='keep_batch')"
        raise FzeroValueError("run", what, fix=fix)
    logger.info("fzero.run: from %d ranks to %d", before, now)


def _finding(rank: int, seen: int, leaves: list[str], sent: bool) -> Finding:
    """Describes a damaged slot."""
    how = "sent of its state" if sent else "kept"
    after = f"after {seen} batches" if seen >= 0 else "after an unknown number of batches"
    text = f"what rank {rank} {how} {after} has changed in memory, and is not used: {', '.join(leaves[:5])}"
    return Finding("slot", seen, (rank,), text)


def _say_lost(found: InMemory, saves: CheckpointManager | None, mesh: Mesh, on_disk: Index | None, seen: int) -> None:
    """Logs that no state in memory is complete, and from where the run continues.

    Raises:
        FzeroValueError: the run has no path, so no checkpoint could have a newer state than the initial one.
    """
    if saves is None:
        fix = "start the run again, from its first state; run.state(..., path=...) and run.save(state) outlive what "
        fix += "fz.redundant does not"
        raise FzeroValueError("run.state", "the state of this run is lost", [found.lost], fix)
    if mesh.rank == 0:
        anew = f"there is no checkpoint under {saves.path}, and the run begins from scratch"
        where = anew if on_disk is None else f"the run goes back to {on_disk.directory}"
        more = found.reached - seen
        again = f", and does {more} batch{'es' * (more > 1)} again" if more > 0 else ""
        logger.warning("fzero.run: %s: %s%s", found.lost, where, again)


def _say_from_scratch(mesh: Mesh, saves: CheckpointManager | None) -> None:
    """Logs that the run begins from scratch, if this is not the first start of the ranks."""
    lives = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if mesh.rank == 0 and lives != "0":
        text = "fzero.run: torchrun has started the ranks again (%s), and no state is in memory%s: "
        logger.warning(text + "the run begins from scratch", lives, "" if saves is None else f" or under {saves.path}")


def _redundant(train: CompiledStep, every: int, mesh: Mesh) -> Redundant | None:
    """Returns how ranks send their states to each other in the step, or None if they do not."""
    spec = find(train.resolved.transforms, Redundant)
    if spec is None:
        return None
    if not spec.has_receivers(mesh):
        if mesh.size > 1 and mesh.rank == 0:
            logger.warning(
                "fzero.run: one rank along %r: nothing is sent; after the loss of a host the run continues from disk",
                spec.axis,
            )
        return None
    if spec.every % every:
        what = f"{spec} sends states that fz.run(every={every}) does not commit"
        fix = f"send every {every} steps, or a multiple: fz.redundant(every={every})"
        raise FzeroValueError("run", what, fix=fix)
    return spec


def _no_room(memory: Path, error: OSError) -> FzeroValueError:
    space = os.statvfs(memory)
    free = f"{memory}: {space.f_bavail * space.f_frsize / 1e6:.0f} MB are free; {error.strerror}"
    fix = f"a larger /dev/shm (docker run --shm-size, a memory volume in Kubernetes), or {host_directory.elsewhere()}"
    return FzeroValueError("run", "the host's memory has no room for the copies of the state", [free], fix)
