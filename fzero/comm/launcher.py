"""Ties a rank to its launcher: it dies with torchrun, and an error of fzero's is told once, short, and last.

torchrun prints the whole traceback of every rank, then forty lines of its own. Here one rank tells an error that all of
them raise, without the frames of fzero and PyTorch, and where torchrun is about to end it tells through torchrun's own
summary, the last thing on the screen. Other exceptions are printed as ever.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fzero.comm.launcher_environment import restarts_left
from fzero.errors import DivergenceError, FzeroError, VerifyError

_NUM_FRAMES = 5  # of the user's code, above an error
_PATIENCE = 30.0  # seconds that a rank with nothing to tell lets the one that tells leave first
_OURS = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_STDLIB = str(Path(os.__file__).parent) + os.sep
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # that torchrun passes on, and ends
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_parent = os.getppid()
_store: dist.Store | None = None
_installed: Any = None
_signals: int | None = None  # where Python writes the number of each signal that a handler hears
_stopped = False


def _forked() -> None:
    global _parent, _signals
    _parent = os.getppid()
    if _signals is not None:  # those of a DataLoader's worker are its own
        signal.set_wakeup_fd(-1)
        _signals = None


os.register_at_fork(after_in_child=_forked)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_parent() -> None:
    """Has the kernel kill this process when torchrun dies: otherwise it would train on, and nobody would own the run.

    Raises:
        DivergenceError: torchrun has died since fzero was imported.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _parent:  # it died before it was asked for
        raise DivergenceError("make_mesh", "torchrun, which started this process, is gone", fix="start the job again")


def tell_through(store: dist.Store) -> None:
    """Lets the ranks agree through this store which of them tells an error."""
    global _store
    _store = store


def listen() -> None:
    """Remembers the signals of this process, whoever handles them. After an ending signal torchrun prints no summary
    with errors."""
    global _signals
    if _signals is not None or not under_torchrun() or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    if (other := signal.set_wakeup_fd(writer, warn_on_full_buffer=False)) != -1:  # an event loop's
        signal.set_wakeup_fd(other)
        os.close(reader)
        os.close(writer)
        return
    _signals = reader


def stopped() -> bool:
    """Whether a signal has come that torchrun passes on when it ends."""
    global _stopped
    while _signals is not None and not _stopped:
        try:
            _stopped = any(number in _ENDING for number in os.read(_signals, 1 << 12))
        except BlockingIOError:
            break
    return _stopped


def starts_again() -> bool:
    """Whether torchrun will start the ranks again when they fail."""
    return restarts_left() and not stopped()


def install_excepthook() -> None:
    """Has an uncaught error of fzero's told by `tell`. A hook of the user's own is still called for everything, on
    every rank."""
    global _installed
    listen()
    previous = sys.excepthook
    is_torchs = (getattr(previous, "__module__", None) or "").startswith("torch.")
    if _installed is not None:
        if is_torchs:  # around it since the process group before, as it will be around it again
            sys.excepthook = _installed
        return
    plain = previous is sys.__excepthook__ or is_torchs

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, FzeroError) and not isinstance(error, VerifyError):  # which is a bug, to be reported whole
            tell(error, frames, None if plain else lambda: previous(kind, error, frames))
        else:
            previous(kind, error, frames)

    _installed = sys.excepthook = excepthook


def tell(error: FzeroError, frames: TracebackType | None = None, otherwise: Callable[[], Any] | None = None) -> None:
    """Prints an error that is raised on several ranks, on one of them; the others return when that one has left, or
    after a while. Where torchrun prints a summary, the error stands there; after a signal it prints none, and kills
    what is left after 30 s: then the error is printed at once, and nobody waits.

    A `DivergenceError`, which is what the other ranks raise when one fails, is not told after the error it follows
    from.

    Args:
        error: what was raised.
        frames: its traceback, of which the user's own last lines are printed.
        otherwise: called in place of printing, on every rank.
    """
    world, file = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("TORCHELASTIC_ERROR_FILE")
    me, here = os.environ.get("RANK", "0"), os.environ.get("GROUP_RANK", "0")  # torchrun's word for the host
    teller = _claim(error, f"{me} {here}") if world > 1 else f"{me} {here}"
    summary = file is not None and not stopped()  # torchrun's, about whoever left first
    if otherwise is not None:
        otherwise()
    if teller.split(" ")[0] == me:
        text = error_text(error, frames)
        if file and summary and not starts_again() and not isinstance(error, DivergenceError):
            # which torchrun's SIGTERM may follow at once: it would be lost
            facts = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": facts}))
        elif otherwise is None:
            print(text, file=sys.stderr, flush=True)
    elif summary and teller.split(" ")[1] == here:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE)


def error_text(error: BaseException, frames: TracebackType | None = None) -> str:
    """An error's text below the user's own last lines that led to it."""
    theirs = [f for f in traceback.extract_tb(frames) if not _is_inside(f.filename)]
    return "".join(traceback.format_list(theirs[-_NUM_FRAMES:])) + str(error)


def _is_inside(filename: str) -> bool:
    """Whether a line is of fzero, torch or the standard library."""
    stdlib = filename.startswith(_STDLIB) and "site-packages" not in filename
    return stdlib or filename.startswith((*_OURS, "<frozen "))


def _claim(error: FzeroError, mine: str) -> str:
    """Who tells this error: the rank that asks first. Without a store to ask rank 0; every rank if one has not come, or
    if the store is gone too."""
    follows = isinstance(error, DivergenceError)
    if _store is None:
        return mine if follows else f"0 {mine.split(' ')[1]}"
    try:
        if follows and _store.check(["fzero/told/cause"]):
            return _store.get("fzero/told/cause").decode()
        return _store.compare_set(f"fzero/told/{'consequence' if follows else 'cause'}", "", mine).decode()
    except (dist.DistError, RuntimeError):
        return mine
