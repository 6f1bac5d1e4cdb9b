"""Keeps the lines of generated code, so that tracebacks show them."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

_made = itertools.count()
_dead: list[str] = []  # file names of functions that no longer exist


def compiled(text: str, title: str, namespace: dict[str, Any], name: str) -> Callable[..., Any]:
    """Runs the text in a namespace and returns the function `name` that it defines. Tracebacks show its lines as long
    as it lives.

    Example:
        >>> compiled("def f(x):\\n    return x + 1\\n", "increment", {}, "f")(1)
        2
    """
    filename = f"<fzero {title} {next(_made)}>"
    exec(compile(text, filename, "exec"), namespace)
    function = namespace[name]
    # With None as the time of modification, `linecache.checkcache` keeps an entry without a file.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    # A process makes new programs for new batches, so entries without this would accumulate. A finalizer may run while
    # `linecache.checkcache` goes through the entries, which then must not disappear: they are removed by the next call.
    forget_dead()
    weakref.finalize(function, _dead.append, filename).atexit = False
    return function


def forget_dead() -> None:
    """Removes the lines of functions that no longer exist."""
    while _dead:
        linecache.cache.pop(_dead.pop(), None)
