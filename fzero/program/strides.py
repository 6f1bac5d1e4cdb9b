"""Where a function asks how its tensors are laid out. A program is given its batch contiguous: of any other batch PyTorch would answer something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


@contextmanager
def noted() -> Iterator[list[str]]:
    """The lines that ask, of what is traced inside."""
    asked: list[str] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def note(where: list[str]) -> None:
    asked = _asked.get()
    if asked is not None:
        asked += [place for place in where if place not in asked]


_asked: ContextVar[list[str] | None] = ContextVar("fzero_strides", default=None)
