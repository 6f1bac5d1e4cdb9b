"""Keeps the old spelling of a public name working for one release, with a warning that names the new one.

An alias stays for the release that introduces the new name and is removed in `REMOVED_IN`. Everything that must be
removed then uses a function of this module.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from fzero.errors import FzeroTypeError

F = TypeVar("F", bound=Callable[..., Any])

REMOVED_IN = "0.4"


def message(old: str, new: str) -> str:
    """Returns the text of a deprecation warning."""
    return f"{old} is deprecated and will be removed in {REMOVED_IN}: use {new}"


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns that a public name is deprecated.

    The category is `FutureWarning`, because Python hides a `DeprecationWarning` unless the code that caused it is in
    `__main__`, and a model or a dataset is usually defined in a module.

    Args:
        old: the old spelling, as a user writes it: "fz.once_a_step".
        new: the new spelling.
        stacklevel: as in `warnings.warn`. The default attributes the warning to the caller of the function that calls
            `warn`.
    """
    warnings.warn(message(old, new), FutureWarning, stacklevel=stacklevel)


def keyword_aliases(owner: str, **aliases: str | tuple[str, Mapping[Any, Any]]) -> Callable[[F], F]:
    """A decorator of a function or class that still accepts old keyword arguments, with a warning.

    Args:
        owner: the function, as a user writes it: "fz.accumulate".
        aliases: for each old keyword the new one, or the new one and a mapping from old to new values. If both keywords
            are the same, only the values in the mapping are deprecated.

    Raises:
        FzeroTypeError: from the decorated function, if the old and the new keyword are both given.

    Example:
        >>> @keyword_aliases("repeat", text="message", loud=("style", {True: "bold", False: "plain"}))
        ... def repeat(message, style="plain"):
        ...     return style, message
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     repeat(text="yes", loud=True)
        ('bold', 'yes')
        >>> print(caught[1].message)
        repeat(loud=True) is deprecated and will be removed in 0.4: use repeat(style='bold')
    """

    def decorate(fn: F) -> F:
        if isinstance(fn, type):  # keeps the class itself, so that isinstance and subclasses work as before
            fn.__init__ = decorate(fn.__init__)  # type: ignore[misc]
            return fn  # type: ignore[return-value]

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            for old, alias in aliases.items():
                if old not in kwargs:
                    continue
                new, values = (alias, {}) if isinstance(alias, str) else alias
                value = kwargs[old]
                new_value = values.get(value, value) if isinstance(value, (bool, str)) else value
                if old == new and new_value == value:
                    continue
                if old != new and new in kwargs:
                    what = f"{old}= is the old name of {new}=, and both are given"
                    raise FzeroTypeError(owner.removeprefix("fz."), what, fix=f"leave {old}= out")
                del kwargs[old]
                kwargs[new] = new_value
                before, after = (repr(value), repr(new_value)) if values else ("", "")
                warn(f"{owner}({old}={before})", f"{owner}({new}={after})")
            return fn(*args, **kwargs)

        return called  # type: ignore[return-value]

    return decorate


def attribute_alias(owner: str, old: str, new: str) -> Any:
    """Returns a property of a class that warns, for the old name of an attribute or method: `keep =
    attribute_alias("run", "keep", "commit")`.
    """

    def get(self: Any) -> Any:
        warn(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(get, doc=f"The old name of `{new}`.")


def renamed_flags(args: Sequence[str], renamed: Mapping[str, str], owner: str | None) -> list[str]:
    """Returns command-line arguments with the new names of deprecated flags, which may be given as `--flag value` or
    `--flag=value`.

    Args:
        args: the arguments.
        renamed: the new name of each deprecated flag.
        owner: the command, which starts the message on stderr; None prints no message.

    Example:
        >>> renamed_flags(["--hang=5", "--memory", "/tmp"], {"--hang": "--hang-timeout"}, None)
        ['--hang-timeout=5', '--memory', '/tmp']
    """
    found = list[str]()
    for arg in args:
        flag, equals, value = arg.partition("=")
        new = renamed.get(flag, flag)
        if new != flag and owner is not None:
            print(f"{owner}: {message(flag, new)}", file=sys.stderr, flush=True)
        found.append(f"{new}{equals}{value}")
    return found


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by the names that they had until 0.2, with a warning: an entry of `sys.meta_path`.

    Only the modules that the documentation of 0.2 imported have an entry. An import by the old name returns the module
    itself, not a copy. If it is a package whose modules have moved too, an import returns a `MovedPackage`.

    Args:
        moved: for each old name the new one.
        public: for each old name that has one, the public name to use instead.
    """

    def __init__(self, moved: Mapping[str, str], public: Mapping[str, str]):
        self.moved, self.public = moved, public
        self.packages = {name for name in moved if any(other.startswith(f"{name}.") for other in moved)}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=name in self.packages) if name in self.moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns the package. Of any other module, Python makes an empty one, which `exec_module` replaces."""
        return MovedPackage(spec.name, self) if spec.name in self.packages else None

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, MovedPackage):
            return
        self.warn(module.__name__, 3)  # the import statement: `warnings` skips frames of the import system
        sys.modules[module.__name__] = importlib.import_module(self.moved[module.__name__])

    def warn(self, name: str, stacklevel: int) -> None:
        warn(name, self.public.get(name, self.moved[name]), stacklevel + 1)


class MovedPackage(ModuleType):
    """A package by the name that it had until 0.2. Its names are those of the new package, and the first that is used
    warns. Importing it does not, because Python imports it for each of its modules, which has a warning already.
    """

    def __init__(self, name: str, finder: MovedModules):
        super().__init__(name)
        self._finder, self._has_warned = finder, False

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in self._finder.moved:  # Python then imports this module
            raise AttributeError(name)
        found = getattr(importlib.import_module(self._finder.moved[self.__name__]), name)
        if not name.startswith("__") and not self._has_warned:
            self._has_warned = True
            self._finder.warn(self.__name__, 3)
        return found

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._finder.moved[self.__name__]))


def install(moved: Mapping[str, str], public: Mapping[str, str]) -> None:
    """Makes modules importable by their old names. It comes first, because the old name of a package has the new
    package's path, where Python would find a second copy of each module. `public`: see `MovedModules`."""
    sys.meta_path.insert(0, MovedModules(moved, public))
