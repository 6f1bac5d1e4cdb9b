"""Keeps the lines of generated code, so that tracebacks show them."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

_made = itertools.count()


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
    # A process makes new programs for new batches, so entries without this would accumulate. At exit there is nothing
    # to clean up, and `linecache` may already be gone.
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    return function
