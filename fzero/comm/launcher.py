"""Ties a rank to its launcher: the rank dies with torchrun, and an error of fzero is printed once, briefly, and last.

torchrun prints the complete traceback of every rank, followed by forty lines of its own. Here, if all ranks raise an
error, only one rank reports it, without the frames of fzero and PyTorch. If torchrun is about to exit, the rank reports
it through torchrun's own summary, which is the last output on the screen. Other exceptions are printed as usual.
"""

from __future__ import annotations

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

from fzero._utils import procfs
from fzero.comm.launcher_environment import restarts_left
from fzero.errors import DivergenceError, FzeroError, VerifyError

_NUM_FRAMES = 5  # frames of the user's code that are printed above an error
_PATIENCE = 30.0  # seconds that a rank that does not report the error waits, so that the reporting rank exits first
_OURS = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_STDLIB = str(Path(os.__file__).parent) + os.sep
# torchrun forwards these signals to the ranks and exits
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_parent = os.getppid()
_store: dist.Store | None = None
_installed: Any = None
_stopped = False  # whether fz.run has received a signal that torchrun forwards


def _forked() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_forked)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_parent() -> None:
    """Has the kernel kill this process when torchrun dies. Otherwise the process would keep training, with nobody in
    control of the run.

    Raises:
        DivergenceError: torchrun has died since fzero was imported.
    """
    procfs.die_with_parent()
    if os.getppid() != _parent:  # torchrun died before prctl took effect
        raise DivergenceError(
            "make_mesh", "torchrun, which started this process, has exited", fix="start the job again"
        )


def tell_through(store: dist.Store) -> None:
    """Sets the store in which the ranks agree which of them reports an error."""
    global _store
    _store = store


def received(number: int) -> None:
    """Records a signal. After a signal that ends the run, torchrun prints no summary of errors."""
    global _stopped
    _stopped = _stopped or number in _ENDING


def install_excepthook() -> None:
    """Installs an exception hook that reports uncaught errors of fzero through `tell`.

    An exception hook of the user is still called for every exception, on every rank.
    """
    global _installed
    previous = sys.excepthook
    is_torchs = (getattr(previous, "__module__", None) or "").startswith("torch.")
    if _installed is not None:
        if is_torchs:  # torch wrapped our hook when an earlier process group was made, and will wrap it again
            sys.excepthook = _installed
        return
    plain = previous is sys.__excepthook__ or is_torchs

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        # A VerifyError is a bug of fzero, for whose report the user needs the full traceback.
        if isinstance(error, FzeroError) and not isinstance(error, VerifyError):
            tell(error, frames, None if plain else lambda: previous(kind, error, frames))
        else:
            previous(kind, error, frames)

    _installed = sys.excepthook = excepthook


def tell(error: FzeroError, frames: TracebackType | None = None, otherwise: Callable[[], Any] | None = None) -> None:
    """Prints an error that several ranks raise, on only one of them. The other ranks return after that rank has left,
    or after a while.

    If torchrun prints a summary, the error appears there. After a signal torchrun prints no summary, and kills the
    remaining ranks after 30 s; then the error is printed immediately and no rank waits. The same holds for scripts that
    handle SIGTERM themselves.

    A `DivergenceError`, which the other ranks raise when one fails, is not reported after the error that caused it.

    Args:
        error: the error that was raised.
        frames: its traceback, of which the last frames of the user's code are printed.
        otherwise: called instead of printing, on every rank.
    """
    world, file = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("TORCHELASTIC_ERROR_FILE")
    me, here = os.environ.get("RANK", "0"), os.environ.get("GROUP_RANK", "0")  # torchrun's number of the host
    teller = _claim(error, f"{me} {here}") if world > 1 else f"{me} {here}"
    # torchrun's summary is about the rank that exits first. A script that handles SIGTERM itself may have received it.
    summary = file is not None and not _stopped and not callable(signal.getsignal(signal.SIGTERM))
    if otherwise is not None:
        otherwise()
    if teller.split(" ")[0] == me:
        text = error_text(error, frames)
        if file and summary and not restarts_left() and not isinstance(error, DivergenceError):
            # not printed directly: torchrun's SIGTERM may follow immediately, and the text would be lost
            facts = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": facts}))
        elif otherwise is None:
            print(text, file=sys.stderr, flush=True)
    elif summary and teller.split(" ")[1] == here:
        if threading.current_thread() is threading.main_thread():
            # torchrun's SIGTERM ends the wait below, whatever handler the user has installed.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE)


def error_text(error: BaseException, frames: TracebackType | None = None) -> str:
    """Returns the text of an error, below the last frames of the user's code that led to it."""
    theirs = [f for f in traceback.extract_tb(frames) if not _is_inside(f.filename)]
    return "".join(traceback.format_list(theirs[-_NUM_FRAMES:])) + str(error)


def _is_inside(filename: str) -> bool:
    """Whether a file belongs to fzero, torch or the standard library."""
    stdlib = filename.startswith(_STDLIB) and "site-packages" not in filename
    return stdlib or filename.startswith((*_OURS, "<frozen "))


def _claim(error: FzeroError, mine: str) -> str:
    """Returns which rank reports this error, and its host: the first rank that asks the store.

    Without a store, rank 0 reports it. If the error is a `DivergenceError`, or if the store is gone as well, every rank
    reports it.
    """
    follows = isinstance(error, DivergenceError)
    if _store is None:
        return mine if follows else f"0 {mine.split(' ')[1]}"
    try:
        if follows and _store.check(["fzero/errors/cause"]):
            return _store.get("fzero/errors/cause").decode()
        return _store.compare_set(f"fzero/errors/{'consequence' if follows else 'cause'}", "", mine).decode()
    except (dist.DistError, RuntimeError):
        return mine
