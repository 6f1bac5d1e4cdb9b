"""Detects what has changed in a module since it was given to `functionalize`, other than the values of its tensors.

A check takes about a microsecond per submodule: copies of the dictionaries and lists that the module consists of are
compared with the originals, which Python does by identity. Only if one differs are all the facts compared that a step
depends on. This file must not know about steps.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero import tree
from fzero.errors import FzeroValueError
from fzero.modules import hook_capture
from fzero.trace.guards.bytecode import WHOLE, instructions, names_in, nested
from fzero.trace.guards.settings_walk import KNOWN, Walk, installed, package
from fzero.trace.guards.value_keys import PLAIN_TYPES, Same, attributes_of, contents, exact

_DEPTH = 4
"""Nesting depth of containers and objects in an attribute beyond which nothing is compared."""
_MANY = 1000
"""Number of items of a container above which only the number is compared."""
_SMALL = 4096
"""Bytes of an array above which in-place changes are not looked for."""
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
"""Python's own classes whose objects have the attributes that they are given."""
_NOT_READ = frozenset(
    {"__init__", "__new__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__"}
    | {"__str__", "__del__", "__copy__", "__deepcopy__"}
)
"""Methods of an object that a forward does not call unless it names one. Dataclasses name all their fields in these
methods.
"""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BY_TORCH = frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_compiled_call_impl"}
"""Attributes of PyTorch itself. Those that matter are compared separately."""
_LIBRARIES = frozenset({"transformers", "peft", "accelerate", "diffusers"})
_BY_LIBRARIES = frozenset(
    {"generation_config", "use_cache", "_cache", "dtype", "torch_dtype", "name_or_path", "_name_or_path"}
    | {"architectures", "transformers_version", "_commit_hash", "_gradient_checkpointing_func"}
)
"""Attributes that these libraries write when models are prepared, saved or generate. A step reads none of them."""
_PREFIXES = ("_hf_", "hf_", "_is_hf_", "_accelerate", "_old_forward", "gradient_checkpointing")
_OF_MEMORY = "make_inputs_require_grads"
"""A hook of transformers that gradient checkpointing needs, and that changes no number."""
_TENSOR = operator.attrgetter("requires_grad", "dtype", "shape", "_backward_hooks", "_post_accumulate_grad_hooks")


class _Fact(NamedTuple):
    """A value as it is compared, and as it is shown."""

    key: Any
    shown: str


_ABSENT = _Fact(None, "none")


class Original:
    """A module as it was, other than the values of its tensors.

    Args:
        module: the module as it is now.
        written: names of attributes that its forwards write themselves.
        training: for each of its submodules, in order, whether it is in training mode when the module is trained.

    Attributes:
        read: what its code reads besides its attributes: the classes and functions that do not belong to an installed
            library.
    """

    def __init__(self, module: nn.Module, written: Collection[str], training: list[bool]):
        self._module, self._written, self._training = module, written, training
        self._functions: dict[int, Any] = {}
        classes = dict.fromkeys(type(m) for m in module.modules() if not installed(type(m).__module__))
        walk = Walk(strict=False)
        walk.run([*classes, *(hook for m in module.modules() for _, _, hook in _hooks(m))])
        self._unnamed, self._known = not WHOLE.isdisjoint(walk.names), dict[str, _Fact]()
        self._flags = [m.training for m in module.modules()]
        held = -1
        # the classes of the objects that it holds name further attributes of those objects
        while held != (held := len(self._functions)):
            self._names = walk.names | _reached(module, [x for x in self._functions.values() if isinstance(x, type)])
            known, self._look = self._facts()
        self._known = known
        self.read = (*classes, *self._functions.values())

    def changes(self) -> list[str]:
        """Returns the differences between the module then and now, by name: `temperature: 1.0 then, 2.0 now`."""
        if self._same():
            return []
        (now, look), was = self._facts(), self._known
        pairs = [(path, was.get(path, _ABSENT), now.get(path, _ABSENT)) for path in {**was, **now}]
        changed = {path: _said(path, a.shown, b.shown) for path, a, b in pairs if a.key != b.key}
        # If an object was replaced, changes inside it are not listed as well.
        outer = lambda path: any(path[:i] in changed for i, x in enumerate(path) if x in ".[")  # noqa: E731
        found = [line for path, line in changed.items() if not outer(path)]
        if not (found := found + self._other_modes()):
            self._look = look
        return found

    def check(self) -> None:
        """Raises an error if the module has changed.

        Raises:
            FzeroValueError: listing everything that has changed.
        """
        if changed := self.changes():
            what = f"{type(self._module).__name__} has changed since it was given to functionalize"
            fix = (
                "undo it; or functionalize and compile it again as it is now: a state goes on there if its leaves are "
                "the same and the same are trained, else model.write_back(train.gather(state).params) before the "
                "change and train.init of the new model.params. What changes from step to step is an entry of the "
                "batch, or a buffer that the forward overwrites"
            )
            raise FzeroValueError("functionalize", what, changed, fix)

    # --- whether anything at all differs ---

    def _same(self) -> bool:
        try:
            return self._look.same()
        except Exception:  # a value was replaced by one that cannot be compared
            return False

    # --- what of it matters ---

    def _facts(self) -> tuple[dict[str, _Fact], _Look]:
        """Returns everything that is compared, by name, and what is needed to see quickly that nothing has changed."""
        self._live: list[Any] = []
        self._slotted: list[Any] = []
        self._arrays: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        found: dict[str, _Fact] = {}
        first: dict[int, str] = {}
        seen: set[int] = set()
        for name, m in self._module.named_modules():
            prefix = f"{name}." if name else ""
            found[f"{name or type(m).__name__}.__class__"] = _Fact(type(m), type(m).__name__)
            self._live += [vars(m), m._modules, m._parameters, m._buffers]
            self._live += [vars(m)[kind] for kind in _HOOKS]
            for child, x in m._modules.items():
                if x is not None or child in self._names:
                    found[f"{prefix}{child}"] = _Fact(Same(x), "None" if x is None else f"a {type(x).__name__}")
            for kind, held in (("parameter", m._parameters), ("buffer", m._buffers)):
                for own, x in held.items():
                    self._tensor(found, f"{prefix}{own}", own, kind, x, first)
            for kind, text, hook in _hooks(m):
                at = f"{name or type(m).__name__}.{kind}"
                old = found.get(at, _Fact((), ""))
                shown = text if not old.key else f"{old.shown}, {text}"
                found[at] = _Fact((*old.key, Same(hook)), shown)
                self._functions.setdefault(id(hook), hook)
            for own, x in list(vars(m).items()):
                if own not in _BY_TORCH and not _own_method(m, own, x) and self._counts(m, own, f"{prefix}{own}"):
                    self._value(found, f"{prefix}{own}", own, x, seen, _DEPTH)
        return found, _Look(list(self._module.modules()), self._tensors, self._live, self._slotted, self._arrays)

    def _tensor(self, found: dict[str, _Fact], path: str, own: str, kind: str, x: Any, first: dict[int, str]) -> None:
        if x is None:
            if own not in self._written:
                found[path] = _Fact(None, "None")
            return
        self._tensors.append(x)
        if own in self._written and kind == "buffer":
            return
        tied = first.setdefault(id(x), path)
        shown = f"a {kind} {tree.describe(x)}" + (f", tied to {tied}" if tied != path else "")
        found[path] = _Fact((kind, x.shape, x.dtype, tied), shown)
        found[f"{path}.requires_grad"] = _Fact(x.requires_grad, str(x.requires_grad))
        if hooks := [*(x._backward_hooks or {}).values(), *(x._post_accumulate_grad_hooks or {}).values()]:
            found[f"{path}.hooks"] = _Fact(tuple(map(Same, hooks)), f"{len(hooks)} hooks for its gradient")

    def _counts(self, owner: Any, name: str, path: str) -> bool:
        """Returns whether code may read an attribute of a module, or of an object that a module holds."""
        if name.startswith(_PREFIXES) or name in self._written:
            return False
        if name in _BY_LIBRARIES and any(package(c.__module__) in _LIBRARIES for c in type(owner).__mro__):
            return False
        if name == "forward" and "_hf_hook" in vars(owner):  # the forward of accelerate calls the previous one
            return False
        if name in self._names:
            return True
        if (self._known and path not in self._known) or callable(getattr(type(owner), name, None)):
            return False
        return self._unnamed or any(
            c not in (nn.Module, object, *_RECORDS) and installed(c.__module__) for c in type(owner).__mro__
        )

    def _value(self, found: dict[str, _Fact], path: str, own: str, x: Any, seen: set[int], depth: int) -> None:
        """Adds the facts about an attribute, and recursively about the items of its containers and the attributes of
        its objects.
        """
        kind = type(x)
        if kind in PLAIN_TYPES or isinstance(x, enum.Enum):
            found[path] = _Fact(exact(x) if kind in PLAIN_TYPES else (kind, x.name), repr(x))
        elif isinstance(x, torch.Tensor):
            found[path] = _Fact((Same(x), x.shape, x.dtype), f"a tensor {tree.describe(x)}")
        elif isinstance(x, (nn.Module, type, *_FUNCTIONS)):
            found[path] = _Fact(Same(x), getattr(x, "__name__", kind.__name__))
            if isinstance(x, _FUNCTIONS) or (isinstance(x, type) and not installed(x.__module__)):
                self._functions.setdefault(id(x), x)
        elif (numbers := contents(x)) is not None:
            found[path] = _Fact((kind, *numbers), f"a {kind.__name__}")
            if memoryview(x).nbytes <= _SMALL:
                self._arrays.append(x)
        elif isinstance(x, (dict, list, tuple, set, frozenset, collections.deque)):
            found[path] = _Fact((kind, len(x)), f"a {kind.__name__} of {len(x)}")
            if id(x) in seen or not depth or len(x) > _MANY:
                return
            seen.add(id(x))
            if not isinstance(x, (tuple, frozenset)):
                self._live.append(x)
            if isinstance(x, (set, frozenset)):
                plain = frozenset(exact(y) for y in x if type(y) in PLAIN_TYPES)
                found[path] = _Fact((kind, len(x), plain), f"a {kind.__name__} of {len(x)}")
                return
            items = x.items() if isinstance(x, dict) else enumerate(x)
            for key, y in list(items):
                self._value(found, f"{path}[{key!r}]", own, y, seen, depth - 1)
        elif isinstance(x, _RECORDS) or (
            package(kind.__module__) not in KNOWN and (hasattr(x, "__dict__") or _slots(kind))
        ):
            found[path] = _Fact(kind, f"a {kind.__name__}")
            if id(x) in seen or not depth:
                return
            seen.add(id(x))
            if not installed(kind.__module__):
                self._functions.setdefault(id(kind), kind)
            if hasattr(x, "__dict__"):
                self._live.append(vars(x))
            if _slots(kind):
                self._slotted.append(x)
            for name, y in list(attributes_of(x)):
                if self._counts(x, name, f"{path}.{name}"):
                    self._value(found, f"{path}.{name}", name, y, seen, depth - 1)
        else:
            found[path] = _Fact(kind, f"a {kind.__name__}")

    # --- training mode ---

    def _other_modes(self) -> list[str]:
        """Returns the submodules that are neither in their original mode, nor in their mode for training or
        evaluation.
        """
        modules = list(self._module.modules())
        now = [m.training for m in modules]
        if not any(now) or len(now) != len(self._flags):
            return []
        names = [name for name, _ in self._module.named_modules()]
        of_parts = {id(part) for m in modules if _asks_parts(type(m)) for part in m.modules() if part is not m}
        asked = [i for i, m in enumerate(modules) if id(m) in of_parts or _asks_mode(type(m))]
        wrong = [[i for i in asked if now[i] != then[i]] for then in (self._flags, self._training)]
        return [f"{names[i]}.training: {not now[i]} then, {now[i]} now".lstrip(".") for i in min(wrong, key=len)]


def _said(path: str, then: str, now: str) -> str:
    other = "another " + now.removeprefix("a ") if then == now else now
    return f"{path}: {then} then, {other} now"


class _Look:
    """Copies of what a module consists of, to be compared with the module."""

    def __init__(
        self,
        modules: list[nn.Module],
        tensors: list[torch.Tensor],
        live: list[Any],
        slotted: list[Any],
        arrays: list[Any],
    ):
        self._modules, self._tensors, self._live, self._slotted, self._arrays = modules, tensors, live, slotted, arrays
        self._copies = [dict(x) if isinstance(x, dict) else x.copy() for x in live]
        self._classes, self._of_tensors = list(map(type, modules)), list(map(_TENSOR, tensors))
        self._of_slots, self._of_arrays = list(map(_in_slots, slotted)), list(map(contents, arrays))

    def same(self) -> bool:
        return (
            # Python compares items by identity first, so tensors are not compared by value; a replaced tensor makes the
            # comparison raise, which `_same` takes for a change.
            self._live == self._copies
            and list(map(type, self._modules)) == self._classes
            and list(map(_TENSOR, self._tensors)) == self._of_tensors
            and list(map(_in_slots, self._slotted)) == self._of_slots
            and list(map(contents, self._arrays)) == self._of_arrays
        )


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    """Returns the names of the slots of a class's objects."""
    own = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for x in own for name in ((x,) if isinstance(x, str) else x)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _in_slots(x: Any) -> list[Any]:
    return [getattr(x, name, None) for name in _slots(type(x))]


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def _hooks(m: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yields the hooks of a module that may change what it computes: kind, name and hook. Hooks of transformers
    itself are left out.
    """
    for kind in _HOOKS:
        for hook in vars(m)[kind].values():
            name, home = getattr(hook, "__name__", type(hook).__name__), getattr(hook, "__module__", "")
            if home != hook_capture.LIBRARY and (name, package(home)) != (_OF_MEMORY, "transformers"):
                yield kind, name, hook


def _own_method(m: nn.Module, name: str, x: Any) -> bool:
    """Returns whether an attribute is the method that the module has anyway, which accelerate leaves behind."""
    return isinstance(x, types.MethodType) and x.__self__ is m and x.__func__ is getattr(type(m), name, None)


def _reached(module: nn.Module, held: list[type]) -> frozenset[str]:
    """Returns the names in the forwards of a module's classes, in the methods that these name, and in the methods
    that Python calls on objects that the module holds.
    """
    methods: dict[str, list[types.CodeType]] = {}
    kinds = [*(type(m) for m in module.modules()), *held]
    for cls in dict.fromkeys(c for kind in kinds for c in kind.__mro__ if c not in (nn.Module, object)):
        for name, code in _methods(cls):
            methods.setdefault(name, []).append(code)
    called = {n for cls in held for c in cls.__mro__ if not installed(c.__module__) for n, _ in _methods(c)}
    todo = ["forward", *(n for n in called if n.startswith("__") and n not in _NOT_READ)]
    found = set(todo)
    while todo:
        new = frozenset[str]().union(*(names_in(code).attributes for code in methods.get(todo.pop(), ()))) - found
        found |= new
        todo += new
    return frozenset(found)


@functools.cache
def _methods(cls: type) -> list[tuple[str, types.CodeType]]:
    """Returns the code of a class, by name."""
    own = [(n, getattr(x, "fget", None) or getattr(x, "__func__", x)) for n, x in vars(cls).items()]
    functions = [(n, inspect.unwrap(x)) for n, x in own if isinstance(x, types.FunctionType)]
    return [(n, x.__code__) for n, x in functions if isinstance(x, types.FunctionType)]


@functools.cache
def _asks_mode(cls: type) -> bool:
    """Returns whether a class may compute something else in training mode. Classes of PyTorch that never read the
    mode do not.
    """
    classes = [c for c in cls.__mro__ if c not in (nn.Module, object)]
    if not all(c.__module__.startswith("torch.nn.") for c in classes if issubclass(c, nn.Module)):
        return True
    return any("training" in names_in(code).attributes for c in classes for _, code in _methods(c))


@functools.cache
def _asks_parts(cls: type) -> bool:
    """Returns whether a class that does not belong to a library may read the mode of its submodules: a `training`
    that is not `self.training`.
    """
    codes = [code for c in cls.__mro__ if not installed(c.__module__) for _, code in _methods(c)]
    return any(_reads_training(code, code.co_varnames[:1]) for code in codes)


def _reads_training(code: types.CodeType, own: tuple[str, ...]) -> bool:
    """Returns whether code reads `training` of an object other than the one with this name."""
    for inner in nested(code):
        held: Any = None
        for x in instructions(inner):
            if x.argval == "training" and x.opname == "LOAD_ATTR" and held not in own:
                return True
            loaded = x.argval if x.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else None
            held = loaded[-1] if isinstance(loaded, tuple) else loaded
    return False
