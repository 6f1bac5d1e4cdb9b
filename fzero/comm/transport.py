"""Chooses the transport of a mesh: process groups or shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fzero.comm.collectives import ProcessGroups
from fzero.comm.shared_memory import SharedMemory, connect

if TYPE_CHECKING:
    from fzero.mesh import Mesh


def transport(mesh: Mesh) -> ProcessGroups | SharedMemory:
    """Returns the transport of a mesh. It is created on first use, by all its ranks together.

    It is shared memory if the ranks are CPU processes of one host, and process groups otherwise.
    """
    if mesh.context.transport is None:
        mesh.context.transport = (connect(mesh) if mesh.shared_memory else None) or ProcessGroups(mesh)
    return mesh.context.transport
