"""Reserves host memory for copies of a run's state: this rank's own, and those that other ranks send."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from fzero import tree
from fzero.comm import control_group
from fzero.comm.launcher_environment import Processes
from fzero.comm.transport import transport
from fzero.elastic import host_directory
from fzero.elastic.memory_checkpoint import MemoryCheckpoint
from fzero.elastic.peer_replicas import PeerReplica
from fzero.errors import FzeroValueError
from fzero.mesh import Mesh
from fzero.runtime.compiled_step import CompiledStep
from fzero.sharding.layout import extent_of
from fzero.step import State
from fzero.transforms.redundant import Redundant
from fzero.transforms.transform import find

logger = logging.getLogger("fzero")


def memory_checkpoint_of(memory: Path, mesh: Mesh) -> MemoryCheckpoint:
    """Returns the in-memory checkpoint of this rank, in the memory of its host."""
    here = Processes.of()
    first = here.rank - here.local
    return MemoryCheckpoint(memory, mesh.rank, mesh.size, range(first, first + here.num_local))


def leaves_on_disk(state: State) -> list[str]:
    """Returns the names of the tensors that are stored on disk, which are not copied to memory."""
    return [name for name, x in tree.with_names(state) if extent_of(x)]


def reserve_copies(
    checkpoint: MemoryCheckpoint,
    memory: Path,
    train: CompiledStep,
    state: State,
    seen: int,
    every: int,
    mesh: Mesh,
) -> None:
    """Reserves the memory, and connects the ranks that send and receive copies.

    Args:
        checkpoint: the in-memory checkpoint, in `memory`.
        train: the compiled step, which may send copies (`fz.redundant`).
        seen: the number of batches that the state has seen.
        every: the state is stored every `every` steps.
    """
    replica = _received_replica(train, every, mesh)

    def reserve() -> None:
        try:
            checkpoint.open(state, seen, every, mesh, replica)
        except OSError as error:
            raise _no_room(memory, error) from error

    control_group.run_on_all_ranks(mesh.control, "run", reserve)
    if replica is not None:  # now, while all ranks are here: in a step it would wait for a rank that is lost meanwhile
        transport(mesh).connect(replica.spec.axis)
    mesh.context.peer_replicas = checkpoint.peer_replicas


def _received_replica(train: CompiledStep, every: int, mesh: Mesh) -> PeerReplica | None:
    """Returns which rank sends its state to this rank in the step, or None if none does."""
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
    return PeerReplica(spec, spec.shift(mesh))


def _no_room(memory: Path, error: OSError) -> FzeroValueError:
    space = os.statvfs(memory)
    free = f"{memory}: {space.f_bavail * space.f_frsize / 1e6:.0f} MB are free; {error.strerror}"
    fix = f"a larger /dev/shm (docker run --shm-size, a memory volume in Kubernetes), or {host_directory.elsewhere()}"
    return FzeroValueError("run", "the host's memory has no room for the copies of the state", [free], fix)
