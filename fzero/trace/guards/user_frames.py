"""Finds the user's line among the running frames, skipping the frames of PyTorch, this library and the standard
library."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

Place = tuple[str, int]
"""A file and a line number in it."""

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def user_place(outside: FrameType | None) -> Place | None:
    """The innermost running line above the tracing frame that belongs to neither PyTorch, nor fzero, nor the standard
    library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not outside and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None and frame is not outside else None


def asking_frame() -> FrameType | None:
    """The frame of the function that asks for the running op, either the user's or PyTorch's own, skipping the frames
    that only pass the request on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_CARRIERS):
        frame = frame.f_back
    return frame


def is_pytorchs(filename: str) -> bool:
    """Whether a file is part of PyTorch."""
    return filename.startswith(os.path.dirname(torch.__file__) + os.sep)


def within(outside: FrameType | None, folder: str) -> bool:
    """Whether a function in this folder or file of PyTorch is running, above the tracing frame."""
    frame, prefix = sys._getframe(1), os.path.join(os.path.dirname(torch.__file__), folder)
    while frame is not None and frame is not outside:
        if frame.f_code.co_filename.startswith(prefix):
            return True
        frame = frame.f_back
    return False


def line(place: Place) -> str:
    """A place with its source text, such as `file:3: y = x + 1`."""
    code = linecache.getline(*place).strip()
    return f"{place[0]}:{place[1]}" + (f": {code}" if code else "")


def own_line() -> list[str]:
    """The innermost running line of the user's code. Lines of installed libraries are used only if there is
    no other."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    own = [place for place in found if not _is_installed(place[0])]
    return [line((own or found)[0])] if found else []


def condition_line() -> str:
    """The innermost running line of the user's code, and the statements of an installed library that it is in, if it
    calls one: the innermost statement, and the one that called it, because a library's check is often a function that
    gets the condition and the text of the error from its caller."""
    frame, inner = sys._getframe(1), list[str]()
    while frame is not None and len(inner) < 2:
        filename = frame.f_code.co_filename
        if not is_library(filename):
            if not _is_installed(filename):
                break
            inner.append(_statement(frame))
        frame = frame.f_back
    own = own_line() or ["a line that is not known"]
    return "\n    in ".join([*own, *reversed(inner)])


def _statement(frame: FrameType) -> str:
    """The place and the source text of the expression that a frame is evaluating, which may have several lines."""
    first, last, _, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    first, filename = first or frame.f_lineno, frame.f_code.co_filename
    lines = (linecache.getline(filename, at).strip() for at in range(first, (last or first) + 1))
    return f"{filename}:{first}: {' '.join(lines)}"


def _is_installed(filename: str) -> bool:
    return "site-packages" in filename or "dist-packages" in filename


_CARRIERS = (
    _PACKAGE,
    *(
        os.path.dirname(torch.__file__) + f"/{name}"
        for name in ("_ops.py", "_compile.py", "_tensor.py", "overrides.py", "_subclasses/", "_dynamo/", "utils/")
    ),
)


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file is part of this library, PyTorch or the standard library."""
    if filename.startswith(("<eval_with_key>", "<frozen ", "<fzero ")):
        return True
    if filename.startswith((os.path.dirname(torch.__file__) + os.sep, _PACKAGE)):
        return True
    return filename.startswith(sysconfig.get_path("stdlib") + os.sep) and "site-packages" not in filename
