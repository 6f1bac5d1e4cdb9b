"""Brings the ranks of a run together on a mesh, hears the signals that end it, and tells the loss of a rank from an
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

from fzero.comm import agreement, collective_sequence, launcher
from fzero.elastic import host_directory
from fzero.errors import CheckpointError, DivergenceError, FzeroError, FzeroValueError, RankLost, StorageError
from fzero.mesh import Mesh, close_mesh, make_mesh

logger = logging.getLogger("fzero")

STOPPED = 143  # the exit code of a process that SIGTERM ends
_PATIENCE = 5.0  # seconds in which a rank that others were torn away from turns out to have died
_TRIES = 3  # to come together, of which all but one end with the loss of a rank
_ANSWER = 5.0  # seconds in which the host of the store answers
_RAISED = "fzero/run/raised"


class Signals:
    """Remembers that a signal has come, to be acted on between two steps.

    Attributes:
        came: whether one has.
        free: nothing is lost if the process ends at once, and it does: until the first step that follows a state which
            is no newer than what is on disk. Ranks may come, and build, for longer than the seconds that are left.
    """

    def __init__(self, numbers: Sequence[int]):
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
        if self.free:
            sys.exit(128 + number)
        self.came = True


def joined(signals: Signals, again: bool, timeout: float, axes: Mapping[str, Any]) -> Mesh:
    """The mesh of all ranks. One that is lost while they come together is waited for, too."""
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
            if (
                not tries
                or not _store_answers()
                or (collective_sequence.watcher is not None and collective_sequence.watcher.absent())
            ):
                raise
            logger.warning("fzero.run: a rank was lost while all came together (%s)", cause(error))
        leave()
    if collective_sequence.watcher is not None:
        collective_sequence.watcher.say(host_directory.COMING)
    return mesh


def _store_answers() -> bool:
    """Whether there is still a store to meet in; without it no rank comes back."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _ANSWER):
            return True
    except (KeyError, ValueError):
        return True
    except OSError:
        return False


def in_different_runs(mesh: Mesh, ended: int) -> FzeroValueError | None:
    """The error, the same on every rank, of ranks that are in different runs of their script: one that is started again
    begins with the first."""
    everyones = agreement.everyones(mesh, "run", lambda: ended)
    if len(set(everyones)) == 1:
        return None
    problems = [f"rank {rank}: in run {number + 1} of its script" for rank, number in enumerate(everyones)]
    fix = "start the script again; with a script for each fz.run, a rank that was lost comes back to it"
    return FzeroValueError("run", "a rank that was lost cannot come back to this run", problems, fix)


def lost(mesh: Mesh, error: Exception) -> bool:
    """Whether an error on this rank comes of another one that is gone."""
    if isinstance(error, RankLost):
        return True
    follows = isinstance(error, (DivergenceError, CheckpointError)) and not isinstance(error, StorageError)
    deadline = time.monotonic() + (_PATIENCE if follows else 0.0)
    while isinstance(error, (FzeroError, torch.distributed.DistError)):
        if mesh.turns.gone():
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return False


def leave() -> None:
    """Leaves a mesh that has lost a rank, with all that was made on it."""
    gc.collect()
    with contextlib.suppress(FzeroError, RuntimeError):  # what nobody can end any more
        close_mesh()


def say_why(mesh: Mesh, error: Exception) -> None:
    """Tells the other ranks, which see this one go, that it has raised and does not come back."""
    if mesh.size > 1:
        with contextlib.suppress(RuntimeError):
            mesh.store.compare_set(_RAISED, "", f"rank {mesh.rank} has raised {_title(error)}")


def said_why(mesh: Mesh) -> str:
    """The error of its own that a rank has left with, "" if none has."""
    with contextlib.suppress(RuntimeError):
        return mesh.store.get(_RAISED).decode() if mesh.store.check([_RAISED]) else ""
    return ""


def alike(error: Exception, why: str) -> bool:
    """Whether this rank has raised what `said_why` says of the rank that was the first to leave with it."""
    return not isinstance(error, RankLost) and why.endswith(f" has raised {_title(error)}")


def _title(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def cause(error: Exception) -> str:
    """The line of an error that says what happened, rather than what this rank was doing."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if "has left" in line and not line.startswith("fzero.")]
    return (told or lines[1:2] or lines[:1] or [type(error).__name__])[0]
