"""Tells the loss of a rank from an error of this one."""

from __future__ import annotations

import contextlib
import logging
import time

import torch

from fzero.errors import CheckpointError, DivergenceError, FzeroError, RankLost, StorageError
from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

_PATIENCE = 5.0  # seconds to wait for the news that a rank has died, after an error that its death may have caused
_RAISED = "fzero/run/raised"


def lost(mesh: Mesh, error: Exception) -> bool:
    """Whether an error on this rank was caused by the loss of another rank."""
    if isinstance(error, RankLost):
        return True
    follows = isinstance(error, (DivergenceError, CheckpointError)) and not isinstance(error, StorageError)
    # Such an error may be the consequence of a death that the store does not show yet.
    deadline = time.monotonic() + (_PATIENCE if follows else 0.0)
    while isinstance(error, (FzeroError, torch.distributed.DistError)):
        if mesh.collective_sequence.gone():
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return False


def say_why(mesh: Mesh, error: Exception) -> None:
    """Tells the other ranks, which see this rank leave, that it has raised an error and does not come back."""
    if mesh.size > 1:
        title = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        with contextlib.suppress(RuntimeError):
            mesh.store.compare_set(_RAISED, "", f"rank {mesh.rank} has raised {title}")


def said_why(mesh: Mesh) -> str:
    """Returns the error that a rank has reported with `say_why`, or "" if no rank has."""
    if mesh.size > 1:
        with contextlib.suppress(RuntimeError):
            return mesh.store.get(_RAISED).decode() if mesh.store.check([_RAISED]) else ""
    return ""


def cause(error: Exception) -> str:
    """Returns the line of an error message that says what happened, not the line that says what this rank was doing."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if "has left" in line and not line.startswith("fzero.")]
    return (told or lines[1:2] or lines[:1] or [type(error).__name__])[0]
