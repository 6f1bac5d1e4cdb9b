"""Keeps the tensors of a trace out of caches that outlive it.

A function under `functools.lru_cache` that computes a positional grid would cache the grid of the trace, a tensor
without values, and return it to later traces and to the user's own code. As in `torch.compile`, a trace does not use
such caches: a cache that holds tensors is emptied before and after the trace, and the function computes its result
again.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fzero._compat import compat
from fzero.trace.guards.settings_walk import KNOWN, installed, met_caches, package

_CACHE: Any = functools._lru_cache_wrapper
_of_libraries: tuple[int, weakref.WeakSet[Any]] = (0, weakref.WeakSet())
"""The number of imported modules when all objects were last searched for caches, and the caches found."""
_without: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The `cache_info` of caches without tensors, so that a large cache is searched again only after it has changed."""
_DEPTH = 3
"""How many levels of nested containers are searched."""


@contextmanager
def emptied() -> Iterator[None]:
    """Empties the caches of functools that hold tensors, before the body and after it."""
    _empty()
    try:
        yield
    finally:
        _empty()


def _empty() -> None:
    # `torch.compile` replaces functions by wrappers that only look like caches.
    for cache in (x for x in {*met_caches, *_caches_of_libraries()} if type(x) is _CACHE):
        state = cache.cache_info()[1:]
        if _without.get(cache) == state:
            continue
        # functools has no function that returns the contents of a cache.
        if _contains(gc.get_referents(cache), lambda x: isinstance(x, torch.Tensor)):
            cache.cache_clear()
        else:
            _without[cache] = state


def _caches_of_libraries() -> weakref.WeakSet[Any]:
    """The caches of this process except those of known libraries, such as PyTorch and the standard library."""
    global _of_libraries
    # Going through all objects is slow, so it is repeated only after an import, which may have defined new caches.
    if _of_libraries[0] != len(sys.modules):
        caches = [x for x in gc.get_objects() if type(x) is _CACHE]
        found = weakref.WeakSet(x for x in caches if package(getattr(x, "__module__", None)) not in KNOWN)
        _of_libraries = len(sys.modules), found
    return _of_libraries[1]


def _contains(value: Any, wanted: Callable[[Any], bool], depth: int = _DEPTH) -> bool:
    """Whether a value, or one in its containers, is wanted."""
    if wanted(value):
        return True
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return bool(depth) and any(_contains(x, wanted, depth - 1) for x in list(held))


def kept_in(tensor: torch.Tensor) -> str | None:
    """Says, for an error, which global variable or class attribute of the user's modules holds a tensor.

    If it is a dictionary, tensors of a trace are removed from it, because no other code could use them.
    """
    for name, module in list(sys.modules.items()):
        if module is None or installed(name):
            continue
        for variable, value in list(vars(module).items()):
            own = isinstance(value, type) and value.__module__ == name
            places = {f"{variable}.{k}": x for k, x in vars(value).items()} if own else {variable: value}
            for place, x in places.items():
                if _contains(x, lambda y: y is tensor):
                    _remove_fakes(x)
                    return f"kept in {place} of {name}"
    return None


def _remove_fakes(value: Any) -> None:
    if type(value) is dict:
        for key, x in list(value.items()):
            if _contains(x, lambda y: isinstance(y, compat.FakeTensor)):
                value.pop(key)
