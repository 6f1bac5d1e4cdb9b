"""Keeps the tensors of a trace out of caches that outlive it.

A function under `functools.lru_cache` that makes a positional grid would keep the grid of the trace, a tensor without
values, and return it to later traces and to the user's own code. As for `torch.compile`, such a cache does not exist
for a trace: it is emptied before and after, if it holds tensors, and the function computes its result again.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fzero import compat
from fzero.trace.reads.settings_walk import KNOWN, installed, met_caches, package

_CACHE: Any = functools._lru_cache_wrapper
_of_libraries: tuple[int, weakref.WeakSet[Any]] = (0, weakref.WeakSet())
"""The number of modules that were imported, and the caches that existed then."""
_without: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The misses and sizes of caches when they were last found without tensors: some take long to look through."""
_DEPTH = 3
"""Containers within each other that are looked into."""


@contextmanager
def emptied() -> Iterator[None]:
    """No cache of functools has tensors at the beginning of the body, or has those of the body after it."""
    _empty()
    try:
        yield
    finally:
        _empty()


def _empty() -> None:
    for cache in {*met_caches, *_caches_of_libraries()}:
        state = cache.cache_info()[1:]
        if _without.get(cache) == state:
            continue
        if _holds_tensors(gc.get_referents(cache), _DEPTH):
            cache.cache_clear()
        else:
            _without[cache] = state


def _caches_of_libraries() -> weakref.WeakSet[Any]:
    """The caches of this process, but for those of PyTorch, the standard library and the like."""
    global _of_libraries
    if _of_libraries[0] != len(sys.modules):
        caches = [x for x in gc.get_objects() if type(x) is _CACHE]
        found = weakref.WeakSet(x for x in caches if package(getattr(x, "__module__", None)) not in KNOWN)
        _of_libraries = len(sys.modules), found
    return _of_libraries[1]


def _holds_tensors(value: Any, depth: int, kind: type = torch.Tensor) -> bool:
    if isinstance(value, kind):
        return True
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return bool(depth) and any(_holds_tensors(x, depth - 1, kind) for x in held)


def kept_in(tensor: torch.Tensor) -> str | None:
    """The global variable, or the attribute of a class, of the user's modules that holds a tensor, for an error.
    Tensors of a trace are removed from a dictionary there: other code could not use them."""
    for name, module in list(sys.modules.items()):
        if module is None or installed(name):
            continue
        for variable, value in list(vars(module).items()):
            own = isinstance(value, type) and value.__module__ == name
            places = {f"{variable}.{k}": x for k, x in vars(value).items()} if own else {variable: value}
            for place, x in places.items():
                if _holds(x, tensor, _DEPTH):
                    _remove_fakes(x)
                    return f"kept in {place} of {name}"
    return None


def _holds(value: Any, tensor: torch.Tensor, depth: int) -> bool:
    if value is tensor:
        return True
    held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return bool(depth) and any(_holds(x, tensor, depth - 1) for x in list(held))


def _remove_fakes(value: Any) -> None:
    if type(value) is dict:
        for key, x in list(value.items()):
            if _holds_tensors(x, _DEPTH, compat.FakeTensor):
                value.pop(key)
