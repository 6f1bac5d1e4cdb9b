"""Calls built functions as the lines of a program do: one result, a tuple of several, or buffers that are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fzero.ir.program import Function


def as_called(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function as the program's lines call it: its one result, a tuple of several, or nothing when it writes its
    arguments."""
    if function.into:
        return _writing(function, run)
    return (lambda *args: run(*args)[0]) if len(function.graph.outputs) == 1 else run


def _writing(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is given buffers for some of its results: those come back in place of what it would have
    returned."""
    number, given = len(function.graph.outputs), function.into
    returned = [i for i in range(number) if i not in given]

    def call(*args: Any, into: Sequence[Any]) -> Any:
        results = list(into)
        for i, x in zip(returned, run(*args, *(into[i] for i in given)), strict=True):
            results[i] = x
        return results if number > 1 else results[0]

    return call
