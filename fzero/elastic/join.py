"""Brings the ranks of a run together on a mesh, handles the signals that end the run, and tells a lost rank from an
error."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fzero.comm import collective_sequence, control_group, launcher
from fzero.elastic import host_directory
from fzero.errors import CheckpointError, DivergenceError, FzeroError, FzeroValueError, RankLost, StorageError
from fzero.mesh import Mesh, close_mesh, make_mesh

logger = logging.getLogger("fzero")

STOPPED = 143  # the exit code of a process that SIGTERM ends
_PATIENCE = 5.0  # seconds to wait for the news that a rank has died, after an error that its death may have caused
_TRIES = 3  # attempts to bring the ranks together; all but the last may fail because a rank is lost
_ANSWER = 5.0  # seconds to wait for an answer of the store's host
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


def joined(signals: Signals, again: bool, timeout: float, axes: Mapping[str, Any]) -> Mesh:
    """Returns the mesh of all ranks. If a rank is lost while they come together, waits for it as well."""
    if signals.came:
        sys.exit(STOPPED)
    if collective_sequence.watcher is not None:
        collective_sequence.watcher.say(host_directory.COMING)
    tries, signals.free = _TRIES if again else 1, True
    while True:
        try:
            mesh = make_mesh(timeout=timeout, **axes)
            break
        except (torch.distributed.DistError, RuntimeError) as error:
            tries -= 1
            # A rank that cannot come back makes another attempt pointless: the store is gone, or a rank has ended
            # without calling `fz.run`.
            if (
                not tries
                or not _store_answers()
                or (collective_sequence.watcher is not None and collective_sequence.watcher.absent())
            ):
                raise
            logger.warning("fzero.run: a rank was lost while the ranks joined (%s)", cause(error))
        leave()
    if collective_sequence.watcher is not None:
        collective_sequence.watcher.say(host_directory.COMING)
    return mesh


def _store_answers() -> bool:
    """Whether the ranks' store still answers. Without it no lost rank can come back."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _ANSWER):
            return True
    except (KeyError, ValueError):
        return True
    except OSError:
        return False


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


def leave() -> None:
    """Closes a mesh that has lost a rank, and everything that was made on it."""
    # Programs and transports of the old mesh may be in reference cycles. Their pools and connections have to be closed
    # before the groups are.
    gc.collect()
    with contextlib.suppress(FzeroError, RuntimeError):  # for example groups that nobody can close any more
        close_mesh()


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
