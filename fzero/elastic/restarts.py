"""Calls the user's training function, and again on a new mesh whenever a rank is lost, with the state from host memory
(`fz.run`)."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from fzero._utils.arguments import function, number, path_like, plain_numbers, shown
from fzero._utils.deprecation import keyword_aliases
from fzero.comm import collective_sequence, control_group, launcher
from fzero.comm.launcher_environment import Processes
from fzero.elastic import host_directory
from fzero.elastic.abort_transfers import freed
from fzero.elastic.health import Health
from fzero.elastic.recovery_manager import RecoveryManager, cause
from fzero.elastic.run_context import Run
from fzero.elastic.stop_request import STOPPED, StopSignals
from fzero.errors import CheckpointError, DivergenceError, FzeroError, FzeroValueError, RankLost, StorageError
from fzero.mesh import Mesh, close_mesh

T = TypeVar("T")

logger = logging.getLogger("fzero")

_PATIENCE = 5.0  # seconds to wait for the news that a rank has died, after an error that its death may have caused
_RAISED = "fzero/run/raised"

_has_run = False  # whether a run of several processes, or under a supervisor, has ended in this process


@keyword_aliases("fz.run", on_resize=("on_resize", {"refuse": "error"}))
@plain_numbers
def run(
    main: Callable[[Run], T],
    *,
    memory: str | os.PathLike[str] | None = None,
    every: int = 1,
    stop_on: Sequence[int] = (signal.SIGTERM,),
    timeout: float = 600.0,
    health: Health | None = None,
    on_resize: Literal["keep_batch", "error"] = "keep_batch",
    **mesh: Any,
) -> T:
    """Calls `main`, and calls it again on a new mesh whenever a rank was lost, until it returns.

    Under `python -m fzero.run` (docs/guides/fault-tolerance.md) only the process that died is restarted; the others
    keep running, with their memory and their compiled code. If the script is started by torchrun without it, torchrun
    restarts all processes. In both cases `run.state` finds the state that `run.commit` stored in the memory of the
    hosts. In a single process with neither, `main` is called once. If a script calls `fz.run` several times, this holds
    for the first call; later runs continue from their checkpoints, because a restarted process begins with the first.

    Args:
        main: the training function. It takes a `Run` and trains on `run.mesh`, from `run.state(...)`, over
            `run.steps(...)`.
        memory: the directory for in-memory checkpoints, instead of `/dev/shm` or the directory for temporary files.
            The run makes a directory in it that only the user can read, and removes it at the end.
        every: one state is stored every `every` steps. After a loss, the steps since the last stored state are
            repeated.
        stop_on: signals that end the run after the current step. The process then exits with code 143.
        timeout: of `make_mesh`: seconds within which all ranks must have come, and for which they wait in a
            collective.
        health: what the run checks while it trains.
        on_resize: what happens to a state that a different number of ranks has trained. "keep_batch": training
            continues from it, and `run.data_shard` and `run.num_micro_batches` keep the global batch the same. "error":
            an error is raised.
        mesh: further arguments of `make_mesh`.

    Raises:
        SystemExit: with code 143, if a signal asked the run to stop.
        FzeroValueError: invalid arguments. Any other exception of `main` ends the run and is raised.
        DivergenceError: the ranks' store is gone, together with the host that kept it.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.5))
        >>> def main(run):
        ...     train = fz.compile(step, run.mesh, backend="eager")
        ...     state = run.state(train, {"w": torch.ones(2)})
        ...     for index in run.steps(state, 3):
        ...         state, metrics = train(state, torch.ones(2))
        ...         run.commit(state)
        ...     return int(state.step)
        >>> run(main, device="cpu")
        3
    """
    health = health if health is not None else Health()
    if problems := _problems(main, memory, every, stop_on, timeout, health, on_resize):
        main_is_wrong = any(p.startswith("main=") for p in problems)
        fix = (
            "define main(run), a function that trains and returns"
            if main_is_wrong
            else "correct each of these arguments"
        )
        left_out = "; an argument that is left out has a valid default"
        raise FzeroValueError("run", "invalid arguments", problems, fix + left_out)
    global _has_run
    here, supervised = Processes.of(), host_directory.SUPERVISOR in os.environ and not _has_run
    torchrun = launcher.under_torchrun() and not _has_run
    try:
        kept_in = host_directory.memory(memory) if supervised or torchrun or memory is not None else None
        if kept_in is not None:
            host_directory.make_directory(kept_in)
            if not supervised and here.local == 0 and host_directory.logout_removes(kept_in):
                logger.warning("fzero.run: %s", host_directory.LOGOUT)
            collective_sequence.watcher = host_directory.RankProgress(kept_in, here.rank)
            if not supervised:  # the recorded steps belong to an earlier run
                collective_sequence.watcher.say(host_directory.PREPARING, 0)
    except OSError as error:
        what = "the host's memory cannot be used"
        raise FzeroValueError(
            "run", what, [str(error)], f"{host_directory.elsewhere()} uses another directory"
        ) from error
    try:
        with StopSignals(stop_on) as signals:
            if supervised:
                # The supervisor sends this signal before it kills a rank that hangs, to log where its threads are.
                faulthandler.register(signal.SIGUSR1, all_threads=True)
            again = supervised and here.world > 1
            manager = RecoveryManager(kept_in, every, signals, again, timeout, mesh, on_resize == "error")
            result, stopped = _until_it_returns(main, manager, signals, again, health)
            if collective_sequence.watcher is not None:
                collective_sequence.watcher.say(host_directory.FINISHED)
    except torch.distributed.DistNetworkError as error:
        what = (
            "the store is gone: the process that kept it, of the launcher or of rank 0, has left or cannot be reached"
        )
        fix = "start the run again, unless torchrun does (--max-restarts); keep --rdzv-endpoint on a host that stays"
        raise DivergenceError("run", what, [cause(error)], fix) from error
    finally:
        collective_sequence.watcher = None
    close_mesh()
    _has_run = _has_run or supervised or torchrun
    if kept_in is not None and here.local == 0 and not supervised:
        host_directory.remove(kept_in)
    elif kept_in is not None and here.local == 0 and not stopped:  # torchrun may start a stopped run again
        host_directory.forget(kept_in)
    if stopped:
        sys.exit(STOPPED)
    return result


def _problems(main: Any, memory: Any, every: Any, stop_on: Any, timeout: Any, health: Any, on_resize: Any) -> list[str]:
    """Returns a message for each argument of `run` that is invalid, or does not fit how this process was started."""
    problems = number("timeout", timeout, above=0) + _stops(stop_on)
    if memory is not None:
        problems += path_like("memory", memory) or host_directory.not_a_directory(os.fspath(memory))
    if type(every) is not int or every < 1:
        problems.append(f"every={every!r}: must be a whole number of at least 1")
    if isinstance(health, Health):
        problems += health.problems()
    else:
        problems.append(f"health={health!r}: must be fz.Health(...)")
    if on_resize not in ("keep_batch", "error"):
        problems.append(f"on_resize={on_resize!r}: must be 'keep_batch' or 'error'")
    problems += function("main", main, "run")
    if any(
        kind(main) for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    ):
        problems.append(f"main={shown(main)}: a generator, or an async function: calling it does not run its body")
    here, supervised, torchrun = Processes.of(), host_directory.SUPERVISOR in os.environ, launcher.under_torchrun()
    if memory is not None and supervised:
        problems.append(
            "memory: the supervisor of a rank decides where its states are kept: python -m fzero.run --memory DIR"
        )
    elif memory is not None and here.world > 1 and not torchrun:
        problems.append("memory: no process owns these ranks' memory: start them by torchrun, or python -m fzero.run")
    return problems


def _stops(numbers: Any) -> list[str]:
    """Returns a message if these are not signals that a process can handle."""
    heard = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if isinstance(numbers, Sequence) and not isinstance(numbers, str) and all(n in heard for n in numbers):
        return []
    return [f"stop_on={shown(numbers)}: must be signals that can be caught, e.g. (signal.SIGTERM,), or ()"]


def _until_it_returns(
    main: Callable[[Run], T], manager: RecoveryManager, signals: StopSignals, again: bool, health: Health
) -> tuple[T, bool]:
    """Returns the result of `main`, and whether the run was asked to stop. `again`: whether a lost rank is
    restarted."""
    while True:
        mesh = manager.join()
        run = Run(manager, signals, health)
        try:
            with freed(mesh):
                result = main(run)
            run._end(any(control_group.all_gather_values(mesh.control, "run", lambda: signals.came)))
            return result, run.stopping
        except Exception as error:
            if why := _said_why(mesh):  # that rank does not come back
                logger.warning("fzero.run: %s, which ends the run", why)
                raise
            if not (again and _is_lost(mesh, error)):
                _say_why(mesh, error)
                raise
            if signals.came:
                text = (
                    "fzero.run: a stop was requested, and a rank was lost (%s): "
                    "steps since the last checkpoint are not saved"
                )
                logger.warning(text, cause(error))
            else:
                logger.warning("fzero.run: a rank was lost (%s); joining again", cause(error))
        # References to the lost mesh would keep its process groups alive, and with them the connections that `leave`
        # closes.
        del mesh, run
        manager.leave()


def _is_lost(mesh: Mesh, error: Exception) -> bool:
    """Whether an error on this rank was caused by the loss of another rank."""
    if isinstance(error, RankLost):
        return True
    in_collective = isinstance(error, RuntimeError) and _raised_in_collective(error)
    follows = in_collective or isinstance(error, (DivergenceError, CheckpointError))
    # Such an error may be the consequence of a death that the store does not show yet.
    deadline = time.monotonic() + (_PATIENCE if follows and not isinstance(error, StorageError) else 0.0)
    while in_collective or isinstance(error, (FzeroError, torch.distributed.DistError)):
        if mesh.collective_sequence.gone():
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return False


def _raised_in_collective(error: Exception) -> bool:
    """Whether an error comes from a collective of torch.distributed, which the user's code or a library may have
    called: of a lost rank, gloo raises a plain RuntimeError."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("torch.distributed") for frame in frames)


def _say_why(mesh: Mesh, error: Exception) -> None:
    """Tells the other ranks, which see this rank leave, that it has raised an error and does not come back."""
    if mesh.size > 1:
        title = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        with contextlib.suppress(RuntimeError):
            mesh.store.compare_set(_RAISED, "", f"rank {mesh.rank} has raised {title}")


def _said_why(mesh: Mesh) -> str:
    """Returns the error that a rank has reported with `_say_why`, or "" if no rank has."""
    if mesh.size > 1:
        with contextlib.suppress(RuntimeError):
            return mesh.store.get(_RAISED).decode() if mesh.store.check([_RAISED]) else ""
    return ""
