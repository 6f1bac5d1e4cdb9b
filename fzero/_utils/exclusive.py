"""Grants a resource to one call at a time. It is released whatever interrupts that call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType


class Exclusive:
    """A resource that is held by a stack frame for as long as its body runs. (A lock could stay locked if a
    KeyboardInterrupt arrived between its acquisition and the `try`.)

    A frame that took the resource and is not running any more, in any thread, does not hold it: the next caller takes
    it over. The frame of a generator must not take it.
    """

    def __init__(self) -> None:
        self._held: dict[str, FrameType] = {}

    def take(self, frame: FrameType) -> bool:
        """Returns whether this frame holds the resource now."""
        holder = self._held.setdefault("by", frame)  # atomic in the interpreter: of two threads, one comes first
        if holder is not frame and not _runs(holder):
            self._held["by"] = frame
        return self._held.get("by") is frame

    def give(self, frame: FrameType) -> None:
        if self._held.get("by") is frame:
            del self._held["by"]


class Holding:
    """A context manager whose body holds the resource; `busy` makes the error for the case that another frame holds
    it.
    """

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
