"""Handles the signals that end a run, and tells the loss of a rank from an error of this one."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from fzero.comm import control_group, launcher
from fzero.errors import CheckpointError, DivergenceError, FzeroError, FzeroValueError, RankLost, StorageError
from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

STOPPED = 143  # the exit code of a process that SIGTERM ends
_PATIENCE = 5.0  # seconds to wait for the news that a rank has died, after an error that its death may have caused
_RAISED = "fzero/run/raised"


class Signals:
    """Records that a signal has arrived, so that the run can act on it between two steps.

    Attributes:
        came: whether a signal has arrived.
        free: whether the process exits at once when a signal arrives, because nothing would be lost. This holds
            until the first step after a state that is no newer than the one on disk. Without it, bringing the ranks
            together and building could take longer than the seconds that a process has left after a signal.
    """

    def __init__(self, numbers: Sequence[int]):
        # Python sets signal handlers in the main thread only.
        self._numbers = numbers if threading.current_thread() is threading.main_thread() else ()
        self._before: dict[int, Any] = {}
        self.came, self.free = False, False

    def __enter__(self) -> Signals:
        launcher.listen()
        self._before = {n: signal.signal(n, self._hear) for n in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for n, handler in self._before.items():
            signal.signal(n, handler)

    def _hear(self, number: int, _: Any) -> None:
        # Nothing would be lost, so the process ends at once. Otherwise the run ends between two steps, and the state is
        # saved first.
        if self.free:
            sys.exit(128 + number)
        self.came = True


def in_different_runs(mesh: Mesh, ended: int) -> FzeroValueError | None:
    """Returns the error, the same on every rank, if ranks are in different runs of their script, else None.

    A script may call `fz.run` several times, and a rank that is restarted begins with the first run.
    """
    runs = control_group.all_gather_values(mesh.control, "run", lambda: ended)
    if len(set(runs)) == 1:
        return None
    problems = [f"rank {rank}: in run {number + 1} of its script" for rank, number in enumerate(runs)]
    fix = "start the script again; with a script for each fz.run, a rank that was lost rejoins it"
    return FzeroValueError("run", "a rank that was lost cannot rejoin this run", problems, fix)


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
        with contextlib.suppress(RuntimeError):
            mesh.store.compare_set(_RAISED, "", f"rank {mesh.rank} has raised {_title(error)}")


def said_why(mesh: Mesh) -> str:
    """Returns the error that a rank has reported with `say_why`, or "" if no rank has."""
    with contextlib.suppress(RuntimeError):
        return mesh.store.get(_RAISED).decode() if mesh.store.check([_RAISED]) else ""
    return ""


def alike(error: Exception, why: str) -> bool:
    """Whether this rank has raised the same error as the first rank that reported one (`said_why`)."""
    return not isinstance(error, RankLost) and why.endswith(f" has raised {_title(error)}")


def _title(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def cause(error: Exception) -> str:
    """Returns the line of an error message that says what happened, not the line that says what this rank was doing."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if "has left" in line and not line.startswith("fzero.")]
    return (told or lines[1:2] or lines[:1] or [type(error).__name__])[0]
