"""Walks over everything that a function can read, value by value, and records a fact about each.

This file does not know what the facts are used for.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import hashlib
import marshal
import numbers
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch

from fzero._compat import compat
from fzero.trace.guards.bytecode import EMPTY, ENVIRONMENT, WHOLE, cells, names_in
from fzero.trace.guards.value_keys import PLAIN, PLAIN_TYPES, Same, attributes_of, contents, exact, hashes

MOST = 20_000
"""The largest number of values that are inspected for one function; each takes 1 to 2 us."""
_LONG = 32
"""A container with more items than this is compared at once, if it holds only plain values."""
KNOWN = frozenset(
    {"torch", "torchgen", "functorch", "fzero", "numpy", "optree", *sys.stdlib_module_names} - {"__main__"}
)
"""Packages whose objects have no settings unless they compare by value. PyTorch's own settings are captured by
torch_switches.py."""
_FIELDS = WHOLE - {"getattr", "attrgetter"}
"""Names with which code reads everything that a record holds."""
_NUMBERS = (*PLAIN, numbers.Number)
_CALLED = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
"""Methods that PyTorch calls. Python itself calls the methods with double underscores, but some of those do not compute
anything."""
_NOT_CALLED = frozenset(
    {
        "__init__",
        "__new__",
        "__init_subclass__",
        "__repr__",
        "__str__",
        "__del__",
        "__reduce__",
        "__getstate__",
        "__setstate__",
    }
)
_OF_MODULES = frozenset({"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"})


met_caches: weakref.WeakSet[Any] = weakref.WeakSet()
"""Caches of functools that the user's code can read, wherever they are stored (function_caches.py)."""


class SelfChecked:
    """An object that reports which of its parts are read. It belongs to this package, whose objects are not
    inspected."""

    def stands_for(self) -> tuple[Hashable, tuple[Any, ...]]:
        """A fact about the object, and the values to inspect in its place."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises if the object cannot be used any more."""


class _Scope:
    """The attributes of an object, a class or a module; only those that some code names are read. `always`: attributes
    that are read regardless. `fields`: attributes that are read if code reads a record as a whole."""

    def __init__(
        self, values: Mapping[str, Any], path: str, always: Collection[str] = (), fields: Collection[str] = ()
    ):
        self.values, self.path, self.fields = values, path, fields
        self._keys, self.always = set(values), always
        self._due = self._keys.intersection(always)  # read regardless of the names in code

    def named(self, names: Collection[str]) -> list[str]:
        """Names not read yet, in a fixed order."""
        new = self._keys.intersection(names)
        if self._due:
            new |= self._due
            self._due = set()
        if not new:
            return []
        self._keys -= new
        # The order of a set depends on its history.
        return sorted(new)


class _Module(_Scope):
    """A module. Only attributes that code names are ever read from it."""


class Walk:
    """A breadth-first walk over the values that functions can read. The result is in `facts`, with the place of each
    fact in `places`.

    Which attributes of an object are read depends on the names that occur in code, and code is found during the walk.
    So `run` visits values until none are left, then reads the attributes that have newly been named, and repeats until
    nothing is added.
    """

    def __init__(self, strict: bool, without: Callable[[Any], bool] = lambda value: False):
        self.facts: list[Hashable] = []
        self.places: list[str] = []
        self._strict, self._without = strict, without
        self._todo: list[tuple[Any, str]] = []
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is valid only while its value is alive
        self.names: set[str] = set()
        self._keys: set[str] = set()  # strings that code uses as keys
        self._whole: set[str] = set()  # names that code uses for more than reading items by key
        self._scopes: list[_Scope] = []
        self.standing: list[SelfChecked] = []
        self._dicts: dict[int, tuple[_Scope, set[str]]] = {}  # dictionaries, and the names under which code reads each

    def run(self, values: Collection[Any]) -> None:
        """Walks over these values and everything that they can read, up to `MOST` values."""
        self._todo += [(x, "") for x in values]
        todo, at = self._todo, 0
        while at < len(todo) and at < MOST:
            while at < len(todo) and at < MOST:
                self._visit(*todo[at])
                at += 1
            whole = self._strict and not WHOLE.isdisjoint(self.names)
            fields = not _FIELDS.isdisjoint(self.names)
            for scope in self._scopes:
                named = self.names.union(scope.fields) if fields else self.names
                for name in scope.named(scope.values if whole and not isinstance(scope, _Module) else named):
                    path = f"{scope.path}.{name}" if scope.path else name
                    self._fact(name, path)
                    if name in self.names and name not in scope.always:
                        self._read(scope.values[name], path, name)
                    else:
                        self._todo.append((scope.values[name], path))
            for scope, names in self._dicts.values():  # after the scopes, because these find some of the dictionaries
                for key in scope.named(self._keys if names.isdisjoint(self._whole) else scope.values):
                    self._fact(key, f"keys of {scope.path}")
                    self._todo.append((scope.values[key], f"{scope.path}[{key!r}]"))

    def _read(self, x: Any, path: str, *names: str) -> None:
        """Reads a value that code accesses under a name. A dictionary with string keys is deferred until it is known
        how code uses it."""
        if self._strict or type(x) not in (dict, type(os.environ)) or not all(type(key) is str for key in list(x)):
            self._todo.append((x, path))
        else:
            self._dicts.setdefault(id(x), (_Scope(x, path), set()))[1].update(names)

    def _fact(self, fact: Hashable, path: str) -> None:
        self.facts.append(fact)
        self.places.append(path)

    def _visit(self, x: Any, path: str) -> None:
        """Records a fact about one value, and schedules the values that it contains."""
        kind = type(x)
        if kind in PLAIN_TYPES:
            return self._fact(exact(x), path)
        known = _BY_TYPE.get(kind)
        if known is None:
            if isinstance(x, enum.Enum):
                return self._fact((kind, x.name), path)
            if isinstance(x, _NUMBERS) and package(kind.__module__) in KNOWN:
                return self._fact((kind, repr(x)), path)
            if isinstance(x, torch.Tensor):
                return self._tensor(x, path)
            if isinstance(x, weakref.ref):  # compare like their referents, and tensors compare by value
                return self._visit(x(), path)
        # Values are numbered in the order of the walk, so that two walks over equal values find equal facts.
        number = self._seen.setdefault(id(x), len(self._seen))
        if number < len(self._alive):
            return self._fact(("again", number), path)
        self._alive.append(x)
        if self._without(x):
            return None
        if known is not None:
            return known(self, x, path)
        for kinds, visit in _VISITS:
            if isinstance(x, kinds):
                return visit(self, x, path)
        return self._object(x, path)

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        known = not self._strict or x.is_meta or isinstance(x, compat.FakeTensor)
        self._fact((tuple(x.shape), x.dtype, x.device.type) if known else (Same(x), x._version), path)

    def _function(self, fn: types.FunctionType, path: str) -> None:
        """Records a function's code, and schedules its closure cells, defaults, attributes, and the globals and imports
        that its code names."""
        code = fn.__code__
        # Code objects compare by value: the functions that one `def` makes have equal code.
        self._fact(code, path or fn.__name__)
        for name, value in cells(fn):
            if value is EMPTY:
                self._fact("empty", name)
            else:
                self._read(value, name, name)
        for defaults in (fn.__defaults__, fn.__kwdefaults__):
            if defaults is not None:
                self._todo.append((defaults, f"defaults of {fn.__name__}"))
        if vars(fn):
            self._scopes.append(_Scope(vars(fn), path or fn.__name__, ("__wrapped__",)))
        if installed(fn.__globals__.get("__name__")):
            return
        named = names_in(code)
        if named.environment:
            self._read(os.environ, "os.environ", *ENVIRONMENT)
        self.names.update(named.attributes)
        self._keys.update(named.keys)
        self._whole.update(named.whole)
        for name in named.globals:
            if name in fn.__globals__:
                self._fact(name, name)
                self._read(fn.__globals__[name], name, name)
        self._todo += [(sys.modules[name], name) for name in named.imports if name in sys.modules]

    def _method(self, method: types.MethodType, path: str) -> None:
        self._todo += [(method.__func__, path), (method.__self__, "self")]

    def _builtin(self, fn: types.BuiltinMethodType, path: str) -> None:
        self._fact(fn.__name__, path)
        self._todo.append((fn.__self__, f"{path}.__self__"))

    def _partial(self, fn: functools.partial, path: str) -> None:
        self._fact(functools.partial, path)
        self._todo += [
            (fn.func, path),
            (fn.args, f"arguments of {path or 'the partial'}"),
            (fn.keywords, f"keywords of {path or 'the partial'}"),
        ]

    def _module(self, module: types.ModuleType, path: str) -> None:
        self._fact(module.__name__, path)
        if not installed(module.__name__):
            self._scopes.append(_Module(vars(module), path))

    def _class(self, cls: type, path: str) -> None:
        self._fact(cls, path)
        if not installed(type(cls).__module__):
            self._todo.append((type(cls), type(cls).__name__))
        for base in cls.__mro__:
            if not installed(base.__module__):
                called = [
                    n
                    for n, x in vars(base).items()
                    if isinstance(x, types.FunctionType) and n not in _NOT_CALLED and n[:2] == "__"
                ]
                self._scopes.append(_Scope(vars(base), path or base.__name__, _CALLED.union(called)))

    def _context(self, x: contextvars.ContextVar, path: str) -> None:
        self._todo.append((x.get(None), path or x.name))

    def _mapping(self, x: Any, path: str) -> None:
        self._fact((type(x), "of", len(x)), path)
        if self._at_once(x, path):
            return
        for key, value in list(x.items()):
            if type(key) in PLAIN_TYPES:
                self._fact(exact(key), f"keys of {path}")
            else:
                self._todo.append((key, f"keys of {path}"))
            self._todo.append((value, f"{path}[{key!r}]" if isinstance(key, (str, int)) else path))
        self._attributes(x, path)

    def _sequence(self, x: Any, path: str) -> None:
        self._fact((type(x), "of", len(x)), path)
        if self._at_once(x, path):
            return
        self._todo += [(item, f"{path}[{i}]") for i, item in enumerate(list(x))]
        self._attributes(x, path)

    def _at_once(self, x: Any, path: str) -> bool:
        """Whether a long container held only plain values and was recorded as one fact."""
        if len(x) <= _LONG:
            return False
        try:
            # version 2 of the format has no back references, which depend on the reference counts of values
            self._fact(hashlib.sha256(marshal.dumps(x, 2)).hexdigest(), path)
        except ValueError:
            return False
        return True

    def _set(self, x: Any, path: str) -> None:
        plain = all(type(item) in PLAIN_TYPES for item in x)
        self._fact((type(x), frozenset(map(exact, x))) if plain else (type(x), "of", len(x)), path)
        if not plain:  # in an order that does not depend on the history of the set
            self._todo += [
                (item, f"items of {path}") for item in sorted(x, key=lambda item: (type(item).__qualname__, hash(item)))
            ]
        self._attributes(x, path)

    def _getter(self, x: Any, path: str) -> None:
        """`operator.attrgetter("rate")` and similar objects name the attributes that they read in their arguments."""
        made, args = x.__reduce__()
        self._fact(type(x), path)
        args = (*getattr(made, "args", ()), *args, getattr(made, "keywords", {}))
        self.names.update(name for arg in args if isinstance(arg, str) for name in arg.split("."))
        self._todo.append((args, f"arguments of {path}"))

    def _accessor(self, x: Any, path: str) -> None:
        self._todo += [
            (f, path)
            for f in (getattr(x, "__func__", None), getattr(x, "fget", None), getattr(x, "func", None))
            if f is not None
        ]

    def _attributes(self, x: Any, path: str, always: Collection[str] = ()) -> None:
        """The attributes of an object in addition to its items. All attributes are read if the code of its class is not
        inspected."""
        if package(type(x).__module__) not in KNOWN:
            held = dict(attributes_of(x))
            fields = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else ()
            self._scopes.append(_Scope(held, path, held if any(map(_of_library, type(x).__mro__)) else always, fields))
            self._todo.append((type(x), type(x).__name__))

    def _object(self, x: Any, path: str) -> None:
        """Records an object of a type without a special handler: by its own report, its contents, its value, its
        attributes, or its identity."""
        kind = type(x)
        equal = kind.__eq__ is not object.__eq__
        if isinstance(x, SelfChecked):
            fact, values = x.stands_for()
            self._fact((kind, Same(x) if self._strict else None, fact), path)
            self._todo += [(value, path) for value in values]
            self.standing.append(x)
        elif isinstance(x, torch.nn.Module):
            self._fact(kind, path)
            held = dict(attributes_of(x))
            layers = [base for base in kind.__mro__ if base not in (object, torch.nn.Module)]
            self._scopes.append(
                _Scope(held, path, held if any(installed(base.__module__) for base in layers) else _OF_MODULES)
            )
            self._todo.append((kind, kind.__name__))
        elif (data := contents(x)) is not None:
            self._fact((kind, *data, Same(x) if self._strict and len(data) < 3 else None), path)
        elif package(kind.__module__) not in KNOWN:
            self._fact((kind, repr(x)) if isinstance(x, _NUMBERS) else kind, path)
            self._attributes(x, path)
        elif equal and kind.__hash__ is not None and hashes(x):
            self._fact((kind, x), path)
        elif hasattr(x, "items") and hasattr(x, "keys"):  # os.environ
            self._mapping(x, path)
        elif hasattr(x, "__dict__") and (equal or isinstance(x, threading.local)):
            # SimpleNamespace, argparse.Namespace
            self._fact(kind, path)
            self._scopes.append(_Scope(vars(x), path, fields=list(vars(x))))
        elif hasattr(x, "__wrapped__"):  # functools.lru_cache
            met_caches.add(x)
            self._todo.append((x.__wrapped__, path))
        else:
            self._fact((kind, Same(x)) if self._strict else kind, path)


_VISITS: list[tuple[Any, Callable[[Walk, Any, str], None]]] = [
    (types.FunctionType, Walk._function),
    (types.MethodType, Walk._method),
    (types.BuiltinMethodType, Walk._builtin),
    (functools.partial, Walk._partial),
    (types.ModuleType, Walk._module),
    (contextvars.ContextVar, Walk._context),
    (type, Walk._class),
    ((operator.attrgetter, operator.itemgetter, operator.methodcaller), Walk._getter),
    ((dict, types.MappingProxyType, collections.UserDict), Walk._mapping),
    (
        (
            list,
            tuple,
            collections.deque,
            collections.UserList,
            *(type(view) for view in ({}.keys(), {}.values(), {}.items())),
        ),
        Walk._sequence,
    ),
    ((set, frozenset), Walk._set),
    ((staticmethod, classmethod, property, functools.cached_property), Walk._accessor),
]
_BY_TYPE = {
    kind: visit
    for kinds, visit in _VISITS
    for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    if kind.__module__ in ("builtins", "types")
}
"""The handlers by exact type, for the types that most values have."""


def package(name: Any) -> str:
    return str(name).partition(".")[0]


@functools.cache
def installed(module: Any) -> bool:
    """Whether code belongs to a library, whose functions are not inspected. The settings of a library are in its
    objects, of which all attributes are read."""
    top = package(module)
    file = str(getattr(sys.modules.get(top), "__file__", None) or "")
    return top in KNOWN or any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages"))


def _of_library(cls: type) -> bool:
    """Whether code that is not inspected may read any attribute of an object of this class."""
    return installed(cls.__module__) and package(cls.__module__) not in KNOWN
