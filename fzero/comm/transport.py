"""Which transport a mesh has."""

from __future__ import annotations

import os
import weakref

from fzero.comm.collectives import ProcessGroups
from fzero.comm.shared import SharedMemory, connect
from fzero.mesh import Mesh

_made: weakref.WeakKeyDictionary[Mesh, ProcessGroups | SharedMemory] = weakref.WeakKeyDictionary()


def transport(mesh: Mesh) -> ProcessGroups | SharedMemory:
    """The transport of a mesh, made on first use, by all its ranks together: shared memory where they are CPU processes of one host."""
    if mesh not in _made:
        shared = mesh.size > 1 and mesh.shared_memory and mesh.device.type == "cpu" and hasattr(os, "eventfd")
        _made[mesh] = (connect(mesh) if shared else None) or ProcessGroups(mesh)
    return _made[mesh]
