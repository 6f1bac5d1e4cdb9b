"""Finds out, from its code, whether a function looks at a module: a callback's method, or a method of a Trainer.

In doubt it does: what it is found to look at is brought up to date, which costs time and is never wrong.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from fzero.trace.reads.code import names_in
from fzero.trace.reads.user_lines import is_library

_HINTS = frozenset({"model", "model_wrapped", "unwrap_model", "parameters", "named_parameters", "state_dict", "params"})
"""Names by which code reaches a module or its tensors, those in an optimizer's groups included."""
_LIBRARIES = ("transformers.", "accelerate.", "torch.", "fzero.")
"""Modules of classes whose objects are known: what leads from a Trainer to its module is named above."""
GRADIENTS = frozenset({"grad"})


class Looking:
    """The code of a function, of the methods that it calls on its object, and of the functions that it names.

    Args:
        fn: the function. None, and one of the library's own: nothing.
        owner: the object whose method it is.
        module: at which it may look.
        keywords: whether its `**kwargs` have the module.

    Attributes:
        looks: whether it looks at the module.
        graded: whether it reads gradients.
    """

    def __init__(self, fn: Any, owner: Any, module: Any, keywords: bool):
        self._module = module
        self._seen: set[CodeType] = set()
        self.looks, self.graded, self._keywords = False, False, keywords
        self._read(fn, owner)
        self.graded &= self.looks

    @functools.cached_property
    def _parts(self) -> set[int]:
        return {id(x) for x in (*self._module.modules(), *self._module.parameters())}

    def _read(self, fn: Any, owner: Any) -> None:
        fn = inspect.unwrap(fn) if callable(fn) else fn
        while isinstance(fn, (functools.partial, functools.partialmethod, staticmethod, classmethod)):
            fn = fn.func if isinstance(fn, (functools.partial, functools.partialmethod)) else fn.__func__
        if isinstance(fn, property):
            fn = fn.fget
        if inspect.ismethod(fn):
            fn, owner = fn.__func__, fn.__self__
        if fn is None or str(getattr(fn, "__module__", "")).partition(".")[0] == "transformers":
            return
        if not isinstance(fn, FunctionType):
            self.looks |= callable(fn) and not inspect.isbuiltin(fn) and not isinstance(fn, type)
            return
        if fn.__code__ in self._seen or is_library(fn.__code__.co_filename):
            return
        self._seen.add(fn.__code__)
        named = names_in(fn.__code__)
        names = named.attributes | named.texts
        given = _keywords(fn.__code__) if self._keywords else None
        self.graded |= not GRADIENTS.isdisjoint(names)
        self.looks |= not _HINTS.isdisjoint(names) or "model" in _loaded(fn.__code__)
        self.looks |= given is not None and given in named.whole  # handed on
        for x in _reached(fn, owner, named.attributes):
            if isinstance(x, FunctionType) or inspect.ismethod(x):
                self._read(x, owner)
            elif self._holds(x):
                self.looks = True
            elif (
                hasattr(x, "__dict__")
                and not isinstance(x, type)
                and not any(c.__module__.startswith(_LIBRARIES) for c in type(x).__mro__)
            ):
                self.looks |= any(self._holds(y) for y in vars(x).values())
                for method in _methods(x, named.attributes):
                    self._read(method, x)

    def _holds(self, x: Any) -> bool:
        items = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
        return any(id(item) in self._parts for item in items)


def _reached(fn: FunctionType, owner: Any, names: frozenset[str]) -> Iterator[Any]:
    """The values that a function's names lead to: of its closure, its globals and its object."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (fn.__globals__[n] for n in names_in(fn.__code__).globals if n in fn.__globals__)
    if owner is not None:
        held = getattr(owner, "__dict__", {})
        yield from (held[n] for n in sorted(names) if n in held)
        yield from _methods(owner, names)


def _methods(x: Any, names: frozenset[str]) -> Iterator[Any]:
    """The functions among the attributes of an object's class."""
    for name in sorted(names):
        found = inspect.getattr_static(type(x), name, None)
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        found = found.fget if isinstance(found, property) else found
        if isinstance(found, FunctionType):
            yield found


def _loaded(code: CodeType) -> set[str]:
    """The local names whose values a function reads, and those of functions inside it."""
    found: set[str] = set()
    for x in dis.get_instructions(code):
        if x.opname.startswith("LOAD_"):
            found.update(x.argval if isinstance(x.argval, tuple) else [x.argval] if isinstance(x.argval, str) else [])
    return found.union(*(_loaded(c) for c in code.co_consts if isinstance(c, CodeType)))


def _keywords(code: CodeType) -> str | None:
    """The name of `**kwargs`."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    return code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
