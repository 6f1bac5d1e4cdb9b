"""Prints progress of what takes long: over itself on a terminal, elsewhere a plain line seldom, and none of what is
soon done.

With `FZERO_PROGRESS=off` in the environment there is none.
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

FIRST, OFTEN, SELDOM = (1.0, 2.0), 0.2, 15.0
"""Seconds: until the first line on a terminal and elsewhere, and between lines there and there."""


class Progress:
    """Lines on a stream. On a terminal each line is drawn over the one before and cut to the width of the terminal,
    because a line that wraps cannot be drawn over.

    Args:
        what: that is done, at the beginning of each line.
        stream: by default stderr.
        clock: seconds, of any beginning.
    """

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._what, self._stream, self._clock = what, stream or sys.stderr, clock
        self._begin, self._shown, self._width = clock(), 0.0, 0
        # While a live display of rich redirects stderr, each write becomes a line of its own above that display.
        redirected = hasattr(self._stream, "rich_proxied_file")
        self._terminal = self._stream.isatty() and not redirected
        self._off = os.environ.get("FZERO_PROGRESS") == "off"

    def __call__(self, text: str, about: float = 0.0) -> None:
        """Shows how far it is, if that is due; of about so many seconds."""
        elapsed = self._clock() - self._begin
        due = self._shown + (OFTEN if self._terminal else SELDOM) if self._shown else FIRST[not self._terminal]
        if elapsed >= due and not self._off:
            self._shown = elapsed
            total = f" of about {about:.0f} s" if round(about) > round(elapsed) else ""  # never one that has passed
            line = f"{self._what}: {elapsed:.0f} s{total}, {text}"
            if self._terminal:
                self._draw(line)
            else:
                self._stream.write(f"{line}\n")
                self._stream.flush()

    def close(self) -> None:
        """Takes the line off a terminal."""
        if self._terminal and self._width:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()

    def _draw(self, line: str) -> None:
        """Draws a line over the one before."""
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
    """Shows how long something has been going on, and what `text` says of it, until it is done. Within another that is
    being shown, that one says instead what this is and how far.

    Args:
        what: that is done.
        text: called in a thread beside it.
        stream: as for `Progress`.
        about: the seconds that it is likely to take in all.
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


@contextmanager
def moving(what: str, doing: str, rank: int) -> Iterator[None]:
    """Shows on the first rank how many bytes `moved` has been told of since it began.

    Args:
        what: that is done.
        doing: what becomes of the bytes: "made", "read".
        rank: of this process.
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
    """Says, where something longer is being shown, what a part of it is; alone it shows nothing."""
    if not _INNERMOST:
        yield
        return
    with shown(what, lambda: text):
        yield


def _columns(stream: TextIO) -> int:
    """The width of the terminal of a stream, which may be resized at any time."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # a stream without a file, as in an editor's terminal
        columns = 0
    return columns or shutil.get_terminal_size().columns  # 0: a pseudo terminal that was never given a size


_MOVED = [0]
"""Bytes of states that this process has made and read."""

_INNERMOST: list[tuple[str, Callable[[], str]]] = []
"""The progress being shown, and what is going on within it: two lines on one terminal would write over each other."""
