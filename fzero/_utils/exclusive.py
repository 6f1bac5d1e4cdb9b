"""Grants a resource to one call at a time; whatever interrupts that call leaves nothing held."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType


class Exclusive:
    """Held by a frame, for as long as its body runs; a lock that a KeyboardInterrupt may leave locked, between it and
    its `try`, would stay so.

    A frame that took it and runs no more, in any thread, does not hold it: who comes next takes it over. A generator's
    frame must not take it.
    """

    def __init__(self) -> None:
        self._held: dict[str, FrameType] = {}

    def take(self, frame: FrameType) -> bool:
        """Whether it is this frame's now."""
        holder = self._held.setdefault("by", frame)  # one step of the interpreter: of two threads one comes first
        if holder is not frame and not _runs(holder):
            self._held["by"] = frame
        return self._held.get("by") is frame

    def give(self, frame: FrameType) -> None:
        if self._held.get("by") is frame:
            del self._held["by"]


class Holding:
    """The body of a `with` that holds it; `busy` makes the error if another does."""

    def __init__(self, of: Exclusive, busy: Callable[[], Exception]):
        self._of, self._busy = of, busy

    def __enter__(self) -> None:
        if self._of._held.get("by") is (frame := sys._getframe(1)) or not self._of.take(frame):
            raise self._busy()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._of.give(sys._getframe(1))


def _runs(frame: FrameType) -> bool:
    for current in sys._current_frames().values():
        at: FrameType | None = current
        while at is not None:
            if at is frame:
                return True
            at = at.f_back
    return False
