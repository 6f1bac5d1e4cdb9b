"""Chooses the transport of a mesh: process groups or shared memory."""

from __future__ import annotations

from fzero.comm.collectives import ProcessGroups
from fzero.comm.shared import SharedMemory, connect
from fzero.mesh import Mesh


def transport(mesh: Mesh) -> ProcessGroups | SharedMemory:
    """The transport of a mesh, made on first use, by all its ranks together: shared memory where they are CPU processes
    of one host."""
    found = mesh.transport
    if found is None:
        found = (connect(mesh) if mesh.shared_memory else None) or ProcessGroups(mesh)
        object.__setattr__(mesh, "transport", found)
    return found
