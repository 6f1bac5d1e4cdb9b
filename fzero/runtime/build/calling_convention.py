"""Adapts a built subgraph to the way the ops of a program call it: it returns one result or a tuple of several, or
writes into buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fzero.ir.program import Function


def as_called(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as the program's ops call it: it returns its only result, a tuple of several, or nothing if it
    writes to its arguments."""
    if function.into:
        return _writing(function, run)
    return (lambda *args: run(*args)[0]) if len(function.graph.outputs) == 1 else run


def _writing(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that is given buffers for some of its results. The buffers are returned in the positions of
    these results."""
    number, given = len(function.graph.outputs), function.into
    returned = [i for i in range(number) if i not in given]

    def call(*args: Any, into: Sequence[Any]) -> Any:
        results = list(into)
        for i, x in zip(returned, run(*args, *(into[i] for i in given)), strict=True):
            results[i] = x
        return results if number > 1 else results[0]

    return call
