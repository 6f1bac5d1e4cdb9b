"""Captures the settings of a function, the values that it reads beside its arguments, so that two functions or two
moments can be compared.

A function is its code and whatever that code can name: closure cells, defaults, globals, attributes of objects, modules
and classes, and the same of every function among them. Attributes are read where some code that was reached names them;
what code names is looked up, code is not run. A value of no kind that is known here (a file, a lock, an iterator) is
told by its identity, or not at all. It must not know what a block is, or a step.

A name that code has as text counts where code reads by text: `getattr(config, "rate")`, `vars(config)["rate"]`,
`globals()["RATE"]`. Of the environment, and of a dictionary of texts, only those items count that code names, where all
that it does with the dictionary's name is to name items (`CONFIG["rate"]`, `os.getenv("RATE", "1")`): what else a run
writes down there is none of its settings. Unless strict.

What is not seen: what a function draws or counts while it runs (`counted` is for that), the clock (`timed`), globals of
installed libraries, names that are put together while code runs (`globals()[prefix + "rate"]`, `eval`), files, tensors
that NumPy writes to, changes in place of arrays above `_LARGE` bytes, and what lies behind the first `MOST` values.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import dis
import enum
import functools
import hashlib
import io
import itertools
import marshal
import numbers
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fzero import compat

MOST = 20_000
"""Values that are looked at for one function, 1 to 2 us each."""
GLOBAL_GENERATORS = ("random (Python's generator)", "numpy.random")
_LONG = 32
"""Items of a container above which it is compared at once, if it holds plain values alone."""

_LARGE = 2**22
"""Bytes of an array above which it is told by its identity: reading as many takes about 3 ms."""


class Settings(NamedTuple):
    """Facts about what a function reads, in a fixed order, and where each was found. Two functions with equal facts and
    equal arguments do the same."""

    facts: tuple[Hashable, ...]
    places: tuple[str, ...]


def settings(*values: Any, strict: bool = True, without: Callable[[Any], bool] = lambda value: False) -> Settings:
    """The settings of functions, or of values that functions get: what they are and read now.

    Args:
        values: functions, and arguments that are not tensors.
        strict: whether values are different when in doubt: those of no known kind, and tensors in memory, are then told
            apart by identity, and where code reads attributes without naming them (`getattr`, `vars`) all are read; so
            are all items of a dictionary. Otherwise they are equal when in doubt.
        without: functions and objects of which this holds are not looked into.

    Example:
        >>> rate = [0.5]
        >>> def scaled(x, rate=rate): return x * rate[0]
        >>> before = settings(scaled)
        >>> rate[0] = 0.25
        >>> settings(scaled) == before
        False
    """
    walk = _Walk(strict, without)
    walk.run(values)
    return Settings(tuple(walk.facts), tuple(walk.places))


def exact(value: Any) -> tuple[type, Hashable]:
    """A number, text or another plain constant as a key: 1, 1.0 and True are three, 0.0 and -0.0 are two, nan is
    one."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def changes(old: Settings, new: Settings) -> list[str]:
    """The first difference between two looks at one function: `temperature: 1.0 before, 2.0 now`. Nothing if they are
    equal."""
    if old.facts == new.facts:
        return []
    before, after = _told(old), _told(new)
    for place in (*after, *before):
        if before.get(place) != after.get(place):
            return [f"{place}: {before.get(place, 'not set')} before, {after.get(place, 'not set')} now"]
    at = next((i for i, (a, b) in enumerate(zip(old.facts, new.facts, strict=False)) if a != b), 0)
    return [f"{new.places[at]}: another than before"]


def counted(*values: Any) -> dict[str, Hashable]:
    """The state that functions may change by counting or drawing, by place: the numbers that are alone there, and how
    far generators and iterators are, those of Python's `random` and NumPy's included."""
    walk = _Walk(strict=False)
    walk.run(values)
    found = [
        (place, fact)
        for fact, place in zip(walk.facts, walk.places, strict=True)
        if isinstance(fact, tuple) and fact[0] in (bool, int, float)
    ]
    often = collections.Counter(place for place, _ in found)
    numpy = sys.modules.get("numpy")
    drawn = dict(
        zip(GLOBAL_GENERATORS, (hash(random.getstate()), str(numpy.random.get_state()) if numpy else None), strict=True)
    )
    return {**{place: fact for place, fact in found if often[place] == 1}, **drawn, **walk.states}


def timed(*values: Any) -> list[str]:
    """The modules by which functions may read what is another each time: the clock, or numbers that nobody has
    seeded."""
    walk = _Walk(strict=False)
    walk.run(values)
    return sorted(walk.modules & _TIMED) + ["os.urandom"] * ("urandom" in walk._names)


class Position(NamedTuple):
    """The place in a file at which the next byte is written or read."""

    at: int


def _state(x: Any) -> Hashable:
    """The progress of a generator of random numbers or an iterator; None of other values."""
    numpy = sys.modules.get("numpy")
    if isinstance(x, random.Random):
        return hash(x.getstate())
    if numpy and isinstance(x, (numpy.random.Generator, numpy.random.RandomState)):
        return str(x.bit_generator.state if isinstance(x, numpy.random.Generator) else x.get_state())
    if isinstance(x, itertools.count):
        return repr(x)
    if isinstance(x, types.GeneratorType):
        frame = x.gi_frame
        return frame and (
            frame.f_lasti,
            *((name, value) for name, value in frame.f_locals.items() if type(value) in (bool, int, float, str)),
        )
    if isinstance(x, io.IOBase):
        return Position(x.tell()) if not x.closed and x.seekable() else None
    return operator.length_hint(x, -1) if isinstance(x, Iterator) else None


def _told(settings: Settings) -> dict[str, str]:
    """The values that can be shown, by place: plain ones, and the lengths of containers."""
    shown: dict[str, str] = {}
    for fact, place in zip(*settings, strict=True):
        match fact:
            case (type() as kind, value):
                shown[place] = str(value) if issubclass(kind, (float, complex)) else repr(value)
            case (type() as kind, "of", number):
                shown[place] = f"a {kind.__name__} of {number}"
    return shown


_KNOWN = frozenset(
    {"torch", "torchgen", "functorch", "fzero", "numpy", "optree", *sys.stdlib_module_names} - {"__main__"}
)
"""Packages whose objects have no settings unless they compare by value. PyTorch's own settings are `compat.ambient`."""
_WHOLE = frozenset({"vars", "__dict__", "getattr", "attrgetter", "asdict", "astuple", "fields"})
"""Names by which code reads attributes that it does not name."""
_FIELDS = _WHOLE - {"getattr", "attrgetter"}
"""Names by which code reads all that a record holds."""
_BY_TEXT = _WHOLE | {"globals", "__globals__", "hasattr", "modules", "import_module", "__import__"}
"""Names by which code reads what it names in a text."""
_ENVIRONMENT = frozenset({"environ", "getenv"})
_CALLED = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
"""Methods that PyTorch calls; Python calls those between underscores, but not all of them to compute something."""
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
_TIMED = frozenset({"time", "datetime", "uuid", "secrets"})
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_PLAIN_TYPES = frozenset(_PLAIN)
_NUMBERS = (*_PLAIN, numbers.Number)


class Same:
    """A value that equals itself alone, kept alive so that no later one can have its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Scope:
    """Attributes of which those are read that code names: of an object, a class or a module. `always`: read whatever
    code names. `fields`: read where code reads a record as a whole."""

    def __init__(
        self, values: Mapping[str, Any], path: str, always: Collection[str] = (), fields: Collection[str] = ()
    ):
        self.values, self.path, self.fields = values, path, fields
        self._keys, self.always = set(values), always
        self._due = self._keys.intersection(always)  # whatever code names

    def named(self, names: Collection[str]) -> list[str]:
        """Names not read yet, in a fixed order."""
        new = self._keys.intersection(names)
        if self._due:
            new |= self._due
            self._due = set()
        if not new:
            return []
        self._keys -= new
        return sorted(new)


class _Module(_Scope):
    """A module, of which no more is read than code names, ever."""


class _Walk:
    def __init__(self, strict: bool, without: Callable[[Any], bool] = lambda value: False):
        self.facts: list[Hashable] = []
        self.places: list[str] = []
        self._strict, self._without = strict, without
        self._todo: list[tuple[Any, str]] = []
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # ids are only good while the value lives
        self._names: set[str] = set()
        self._keys: set[str] = set()  # that code names
        self._whole: set[str] = set()  # names with which code does something else than to name items
        self._scopes: list[_Scope] = []
        self.states: dict[str, Hashable] = {}
        self.modules: set[str] = set()  # of what is read: themselves, classes and functions of them
        self._dicts: dict[int, tuple[_Scope, set[str]]] = {}  # dictionaries, and the names under which code reads each

    def run(self, values: Collection[Any]) -> None:
        self._todo += [(x, "") for x in values]
        todo, at = self._todo, 0
        while at < len(todo) and at < MOST:
            while at < len(todo) and at < MOST:
                self._visit(*todo[at])
                at += 1
            whole = self._strict and not _WHOLE.isdisjoint(self._names)
            fields = not _FIELDS.isdisjoint(self._names)
            for scope in self._scopes:
                named = self._names.union(scope.fields) if fields else self._names
                for name in scope.named(scope.values if whole and not isinstance(scope, _Module) else named):
                    path = f"{scope.path}.{name}" if scope.path else name
                    self._fact(name, path)
                    if name in self._names and name not in scope.always:
                        self._read(scope.values[name], path, name)
                    else:
                        self._todo.append((scope.values[name], path))
            for scope, names in self._dicts.values():  # behind the scopes, which find some
                for key in scope.named(self._keys if names.isdisjoint(self._whole) else scope.values):
                    self._fact(key, f"keys of {scope.path}")
                    self._todo.append((scope.values[key], f"{scope.path}[{key!r}]"))

    def _read(self, x: Any, path: str, *names: str) -> None:
        """The value that code reads under a name. A dictionary of texts waits until it is known what code does with
        that."""
        if self._strict or type(x) not in (dict, type(os.environ)) or not all(type(key) is str for key in list(x)):
            self._todo.append((x, path))
        else:
            self._dicts.setdefault(id(x), (_Scope(x, path), set()))[1].update(names)

    def _fact(self, fact: Hashable, path: str) -> None:
        self.facts.append(fact)
        self.places.append(path)

    def _visit(self, x: Any, path: str) -> None:
        kind = type(x)
        if kind in _PLAIN_TYPES:
            return self._fact(exact(x), path)
        known = _BY_TYPE.get(kind)
        if known is None:
            if isinstance(x, enum.Enum):
                return self._fact((kind, x.name), path)
            if isinstance(x, _NUMBERS) and _package(kind.__module__) in _KNOWN:
                return self._fact((kind, repr(x)), path)
            if isinstance(x, torch.Tensor):
                return self._tensor(x, path)
            if isinstance(x, weakref.ref):  # equal each other as what they refer to does, and tensors do by values
                return self._visit(x(), path)
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
        code = fn.__code__
        self.modules.add(fn.__module__)
        self._fact(code, path or fn.__name__)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                self._read(cell.cell_contents, name, name)
            except ValueError:  # not assigned yet
                self._fact("empty", name)
        for defaults in (fn.__defaults__, fn.__kwdefaults__):
            if defaults is not None:
                self._todo.append((defaults, f"defaults of {fn.__name__}"))
        if vars(fn):
            self._scopes.append(_Scope(vars(fn), path or fn.__name__, ("__wrapped__",)))
        if _installed(fn.__globals__.get("__name__")):
            return
        named = _named(code)
        if named.environment:
            self._read(os.environ, "os.environ", *_ENVIRONMENT)
        self._names.update(named.attributes)
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
        self.modules.add(module.__name__)
        if not _installed(module.__name__):
            self._scopes.append(_Module(vars(module), path))

    def _class(self, cls: type, path: str) -> None:
        self._fact(cls, path)
        self.modules.add(cls.__module__)
        if not _installed(type(cls).__module__):
            self._todo.append((type(cls), type(cls).__name__))
        for base in cls.__mro__:
            if not _installed(base.__module__):
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
            if type(key) in _PLAIN_TYPES:
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
        """Whether a long container was plain values alone, and compared as such."""
        if len(x) <= _LONG:
            return False
        try:
            # version 2 has no references, which depend on who else holds a value
            self._fact(hashlib.sha256(marshal.dumps(x, 2)).hexdigest(), path)
        except ValueError:
            return False
        return True

    def _set(self, x: Any, path: str) -> None:
        plain = all(type(item) in _PLAIN_TYPES for item in x)
        self._fact((type(x), frozenset(map(exact, x))) if plain else (type(x), "of", len(x)), path)
        if not plain:  # in an order that does not depend on how the set came about
            self._todo += [
                (item, f"items of {path}") for item in sorted(x, key=lambda item: (type(item).__qualname__, hash(item)))
            ]
        self._attributes(x, path)

    def _getter(self, x: Any, path: str) -> None:
        """`operator.attrgetter("rate")` and its like name what they read in their arguments."""
        made, args = x.__reduce__()
        self._fact(type(x), path)
        args = (*getattr(made, "args", ()), *args, getattr(made, "keywords", {}))
        self._names.update(name for arg in args if isinstance(arg, str) for name in arg.split("."))
        self._todo.append((args, f"arguments of {path}"))

    def _accessor(self, x: Any, path: str) -> None:
        self._todo += [
            (f, path)
            for f in (getattr(x, "__func__", None), getattr(x, "fget", None), getattr(x, "func", None))
            if f is not None
        ]

    def _attributes(self, x: Any, path: str, always: Collection[str] = ()) -> None:
        """The attributes of an object beside its items: all that it has, if its code is not looked into."""
        if _package(type(x).__module__) not in _KNOWN:
            held = dict(_held(x))
            fields = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else ()
            self._scopes.append(_Scope(held, path, held if any(map(_of_library, type(x).__mro__)) else always, fields))
            self._todo.append((type(x), type(x).__name__))

    def _object(self, x: Any, path: str) -> None:
        kind = type(x)
        if (state := _state(x)) is not None:
            self.states[path] = state
        equal = kind.__eq__ is not object.__eq__
        if isinstance(x, torch.nn.Module):
            self._fact(kind, path)
            held = dict(_held(x))
            layers = [base for base in kind.__mro__ if base not in (object, torch.nn.Module)]
            self._scopes.append(
                _Scope(held, path, held if any(_installed(base.__module__) for base in layers) else _OF_MODULES)
            )
            self._todo.append((kind, kind.__name__))
        elif (data := _bytes(x)) is not None:
            self._fact((kind, *data, Same(x) if self._strict and len(data) < 3 else None), path)
        elif _package(kind.__module__) not in _KNOWN:
            self._fact((kind, repr(x)) if isinstance(x, _NUMBERS) else kind, path)
            self._attributes(x, path)
        elif equal and kind.__hash__ is not None and _hashes(x):
            self._fact((kind, x), path)
        elif hasattr(x, "items") and hasattr(x, "keys"):  # os.environ
            self._mapping(x, path)
        elif hasattr(x, "__dict__") and (equal or isinstance(x, threading.local)):
            # SimpleNamespace, argparse.Namespace
            self._fact(kind, path)
            self._scopes.append(_Scope(vars(x), path, fields=list(vars(x))))
        elif hasattr(x, "__wrapped__"):  # functools.lru_cache
            self._todo.append((x.__wrapped__, path))
        else:
            self._fact((kind, Same(x)) if self._strict else kind, path)


_VISITS: list[tuple[Any, Callable[[_Walk, Any, str], None]]] = [
    (types.FunctionType, _Walk._function),
    (types.MethodType, _Walk._method),
    (types.BuiltinMethodType, _Walk._builtin),
    (functools.partial, _Walk._partial),
    (types.ModuleType, _Walk._module),
    (contextvars.ContextVar, _Walk._context),
    (type, _Walk._class),
    ((operator.attrgetter, operator.itemgetter, operator.methodcaller), _Walk._getter),
    ((dict, types.MappingProxyType, collections.UserDict), _Walk._mapping),
    (
        (
            list,
            tuple,
            collections.deque,
            collections.UserList,
            *(type(view) for view in ({}.keys(), {}.values(), {}.items())),
        ),
        _Walk._sequence,
    ),
    ((set, frozenset), _Walk._set),
    ((staticmethod, classmethod, property, functools.cached_property), _Walk._accessor),
]
_BY_TYPE = {
    kind: visit
    for kinds, visit in _VISITS
    for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    if kind.__module__ in ("builtins", "types")
}
"""By their exact type those that most values are of."""


class _Named(NamedTuple):
    """The names in a function's code, and in that of functions inside it. `keys`: texts that it uses as keys; `whole`:
    names that it loads and does something else with than to name an item of what they stand for."""

    globals: tuple[str, ...]
    imports: tuple[str, ...]
    attributes: frozenset[str]
    texts: frozenset[str]
    keys: frozenset[str]
    whole: frozenset[str]
    environment: bool


@functools.cache
def _named(code: types.CodeType) -> _Named:
    inner = [_named(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    read, imported = {x for i in inner for x in i.globals}, {x for i in inner for x in i.imports}
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            read.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imported.add(instruction.argval)
    attributes = frozenset(code.co_names).union(*(i.attributes for i in inner))
    texts = frozenset(_texts(code.co_consts)).union(*(i.texts for i in inner))
    found, whole = _keyed(code)
    keys, whole = found.union(*(i.keys for i in inner)), whole.union(*(i.whole for i in inner))
    if not _BY_TEXT.isdisjoint(attributes):
        parts = texts.union(*(text.split(".") for text in texts))
        read, imported, attributes, whole = read | texts, imported | texts, attributes | parts, whole | parts
    environment = not _ENVIRONMENT.isdisjoint(attributes | read)
    return _Named(tuple(sorted(read)), tuple(sorted(imported)), attributes, texts, keys, whole, environment)


def _keyed(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The keys and the names of `_Named`, of one code. An instruction that is not known here makes a name one of those
    that are read as a whole."""
    lines = [
        (i.opname, i.argval, i.argrepr)
        for i in dis.get_instructions(code)
        if i.opname not in ("PRECALL", "PUSH_NULL", "EXTENDED_ARG", "CACHE")
    ]
    lines += [("", None, "")] * 4
    keys, whole = set[str](), set[str]()
    for at, (op, name, _) in enumerate(lines):
        if isinstance(name, str) and op != "LOAD_CONST" and (op.startswith("LOAD_") or op == "IMPORT_FROM"):
            key = _key(lines, at)
            keys.update([key] if key is not None else [])
            whole.update([name] if key is None else [])
    return frozenset(keys), frozenset(whole)


def _key(lines: list[tuple[str, Any, str]], at: int) -> str | None:
    """The key in `NAME["key"]`, `NAME.get("key", 1)`, `"key" in NAME` and `getenv("key")`, where the name is loaded at
    this line; None anywhere else."""

    def text(i: int) -> bool:
        return lines[i][0] == "LOAD_CONST" and type(lines[i][1]) is str

    def called(i: int) -> bool:
        default = lines[i][0].startswith("LOAD_") and lines[i + 1][:2] == ("CALL", 2)
        return lines[i][:2] == ("CALL", 1) or default

    if text(at + 1) and (lines[at + 2][0] == "BINARY_SUBSCR" or lines[at + 2][::2] == ("BINARY_OP", "[]")):
        return lines[at + 1][1]
    if text(at + 1) and lines[at][1] == "getenv" and called(at + 2):
        return lines[at + 1][1]
    if lines[at + 1][:2] in (("LOAD_METHOD", "get"), ("LOAD_ATTR", "get")) and text(at + 2) and called(at + 3):
        return lines[at + 2][1]
    if lines[at + 1][0] == "CONTAINS_OP":
        while lines[at][0] in ("LOAD_ATTR", "LOAD_METHOD"):
            at -= 1
        return lines[at - 1][1] if at and text(at - 1) and lines[at][0].startswith("LOAD_") else None
    return None


_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})  # the others are of the bodies of classes


def _texts(constants: Collection[Any]) -> Iterator[str]:
    """Constants that can be names."""
    for x in constants:
        if isinstance(x, (tuple, frozenset)):
            yield from _texts(x)
        elif isinstance(x, str) and all(map(str.isidentifier, x.split("."))):
            yield x


def _package(name: Any) -> str:
    return str(name).partition(".")[0]


@functools.cache
def _installed(module: Any) -> bool:
    """Whether code is of a library, and not looked into: it has settings in its objects, all of which are read."""
    package = _package(module)
    file = str(getattr(sys.modules.get(package), "__file__", None) or "")
    return package in _KNOWN or any(
        f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages")
    )


def _of_library(cls: type) -> bool:
    """Whether code that is not looked into may read any attribute of an object of this class."""
    return _installed(cls.__module__) and _package(cls.__module__) not in _KNOWN


def _held(x: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(x, "__dict__", {}).items()
    for base in type(x).__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (
            (name, getattr(x, name))
            for name in ((slots,) if isinstance(slots, str) else slots)
            if name != "__dict__" and hasattr(x, name)
        )


def _bytes(x: Any) -> tuple[Any, ...] | None:
    """The contents of an array of numbers: format, shape and, where it is not large, a digest. None for anything
    else."""
    try:
        view = memoryview(x)
    except (TypeError, ValueError, BufferError):
        return None
    return view.format, view.shape, *([hashlib.sha256(view.tobytes()).hexdigest()] if view.nbytes <= _LARGE else [])


def _hashes(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
