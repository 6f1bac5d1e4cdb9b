"""Prints the progress of long operations: on a terminal, lines that overwrite each other; elsewhere, an occasional
plain line. Operations that finish soon print nothing.

`FZERO_PROGRESS=off` in the environment turns progress off.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

from fzero._utils.units import size

FIRST, OFTEN, SELDOM = (1.0, 2.0), 0.5, 15.0
"""Seconds until the first line (on a terminal, and elsewhere), and seconds between lines on a terminal and
elsewhere.
"""


class Progress:
    """Progress lines on a stream. On a terminal each line is drawn over the previous one and cut to the width of the
    terminal, because a line that wraps cannot be overwritten.

    Args:
        what: what is being done; each line begins with it.
        stream: by default stderr.
        clock: returns seconds since any fixed time.
    """

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._what, self._stream, self._clock = what, stream or sys.stderr, clock
        self._begin, self._shown, self._width = clock(), 0.0, 0
        # While a live display of rich redirects stderr, each write becomes a line of its own above that display.
        redirected = hasattr(self._stream, "rich_proxied_file")
        self._terminal = self._stream.isatty() and not redirected
        self._off = os.environ.get("FZERO_PROGRESS") == "off"

    def __call__(self, text: str, about: float = 0.0) -> None:
        """Shows the progress if a line is due. `about`: the estimated total in seconds."""
        elapsed = self._clock() - self._begin
        due = self._shown + (OFTEN if self._terminal else SELDOM) if self._shown else FIRST[not self._terminal]
        if elapsed >= due and not self._off:
            self._shown = elapsed
            # never an estimate that has already passed
            total = f" of about {about:.0f} s" if round(about) > round(elapsed) else ""
            line = f"{self._what}: {elapsed:.0f} s{total}, {text}"
            if self._terminal:
                self._draw(line)
            else:
                self._stream.write(f"{line}\n")
                self._stream.flush()

    def close(self) -> None:
        """Removes the line from a terminal."""
        if self._terminal and self._width:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()

    def _draw(self, line: str) -> None:
        """Draws a line over the previous one."""
        from rich.cells import cell_len, set_cell_size

        room = max(1, _columns(self._stream) - 1)  # some terminals wrap once the last column is written
        if cell_len(line) > room:
            line = set_cell_size(line, room - 1) + "…"
        width = cell_len(line)
        self._stream.write("\r" + line + " " * (min(self._width, room) - width))
        self._stream.flush()
        self._width = width


@contextmanager
def shown(
    what: str, text: Callable[[], str], stream: TextIO | None = None, about: Callable[[], float] | None = None
) -> Iterator[None]:
    """Shows how long an operation has been running, and the progress that `text` returns, until it is done. If
    another operation is already being shown, that one's lines show the progress of this one instead.

    Args:
        what: what is being done.
        text: called in a separate thread.
        stream: as for `Progress`.
        about: returns the estimated total in seconds.
    """
    _INNERMOST.append((what, text))
    try:
        if len(_INNERMOST) > 1:
            yield
            return
        progress, over = Progress(what, stream), threading.Event()

        def tell() -> None:
            while not over.wait(OFTEN):
                inner, says = _INNERMOST[-1]
                told = says() if inner == what else f"{inner.removeprefix('fzero.')}: {says()}"
                progress(told, about() if about is not None else 0.0)

        thread = threading.Thread(target=tell, name=what, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            progress.close()
    finally:
        _INNERMOST.remove((what, text))


def announce(what: str, text: str) -> None:
    """Prints a line about an operation that goes on in the background, unless progress is turned off."""
    if os.environ.get("FZERO_PROGRESS") != "off":
        print(f"{what}: {text}", file=sys.stderr, flush=True)


@contextmanager
def moving(what: str, doing: str, rank: int) -> Iterator[None]:
    """Shows on the first rank how many bytes `moved` has counted since the context began.

    Args:
        what: what is being done.
        doing: what happens to the bytes: "made", "read".
        rank: rank of this process.
    """
    before = _MOVED[0]

    def text() -> str:
        nbytes = _MOVED[0] - before
        return f"{size(nbytes)} {doing}" if nbytes else "starting"

    with nullcontext() if rank else shown(what, text):
        yield


def moved(nbytes: int) -> None:
    """Counts bytes of a state that were made or read."""
    _MOVED[0] += nbytes


@contextmanager
def within(what: str, text: str) -> Iterator[None]:
    """Shows what a part of a longer operation is doing, if such an operation is being shown; otherwise shows
    nothing.
    """
    if not _INNERMOST:
        yield
        return
    with shown(what, lambda: text):
        yield


def _columns(stream: TextIO) -> int:
    """Returns the width of a stream's terminal, which may be resized at any time."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # a stream without a file, such as an editor's terminal
        columns = 0
    return columns or shutil.get_terminal_size().columns  # 0: a pseudo terminal whose size was never set


_MOVED = [0]
"""Bytes of states that this process has made and read."""

_INNERMOST: list[tuple[str, Callable[[], str]]] = []
"""The progress being shown, and the operations inside it: two lines on one terminal would overwrite each other."""
