"""Encodes the structure of a pytree (containers, names of tensors, and plain values) as JSON, and decodes it.

A node is null, `{"leaf": name}`, `{"value": x}` (a bool, int or str; floats as `{"float": hex}`, which is exact),
`{"tuple": [...]}`, `{"list": [...]}`, `{"dict": [[key, node], ...]}`, `{"ordered_dict": ...}` in the same way, or
`{"namedtuple" | "dataclass": "module:qualname", "fields": [[name, node], ...]}`.

Nothing in a checkpoint is executed as code. A class is only looked up, by plain attributes of modules that the
program has already imported (or that are fzero's own), and is used only if it is a NamedTuple or dataclass with exactly
the stored fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

Node = Any


def encode(tree: Any) -> tuple[Node, dict[str, torch.Tensor], list[str]]:
    """Returns the treespec of a pytree, its tensors by dotted name (in the order of `fz.tree`), and a message for
    everything that cannot be stored."""
    leaves: dict[str, torch.Tensor] = {}
    paths: dict[str, str] = {}
    problems: list[str] = []

    def visit(x: Any, name: tuple[str, ...], path: str) -> Node:
        def inner(items: list[tuple[Any, Any]], access: str) -> list[Node]:
            return [visit(child, (*name, str(key)), path + access.format(key)) for key, child in items]

        if x is None:
            return None
        if isinstance(x, torch.Tensor):
            dotted = ".".join(name)
            if dotted in paths:
                problems.append(f"{paths[dotted]} and {path} have the same dotted name {dotted!r}: rename one")
            elif dotted == "__metadata__":
                problems.append(f"{path}: the name {dotted!r} is reserved by the safetensors format")
            paths[dotted], leaves[dotted] = path, x
            return {"leaf": dotted}
        # Exact types: a subclass, such as an enum, would be read back as a plain value.
        if type(x) in (bool, int, str):
            return {"value": x}
        if type(x) is float:
            return {"float": x.hex()}
        if type(x) in (tuple, list):
            return {type(x).__name__: inner(list(enumerate(x)), "[{}]")}
        if type(x) in (dict, OrderedDict):
            if odd := [k for k in x if type(k) not in (str, int)]:
                problems.append(f"{path}: keys must be str or int, not {', '.join(map(repr, odd))}")
                return None
            keys = list(x) if type(x) is OrderedDict else _sorted(x)
            nodes = inner([(k, x[k]) for k in keys], "[{!r}]")
            return {
                "dict" if type(x) is dict else "ordered_dict": [[k, node] for k, node in zip(keys, nodes, strict=True)]
            }
        if (kind := _kind(type(x))) is not None:
            fields = _fields(type(x))
            nodes = inner([(f, getattr(x, f)) for f in fields], ".{}")
            return {
                kind: f"{type(x).__module__}:{type(x).__qualname__}",
                "fields": [[f, node] for f, node in zip(fields, nodes, strict=True)],
            }
        problems.append(
            f"{path}: a {type(x).__module__}.{type(x).__qualname__} is not a tensor, number, str or known container"
        )
        return None

    return visit(tree, (), "state"), leaves, problems


def decode(treespec: Node, leaf: Callable[[str], Any]) -> tuple[Any, list[str]]:
    """Rebuilds the pytree of a treespec with `leaf(name)` for each tensor. Also returns a message for every class that
    cannot be used."""
    problems: dict[str, None] = {}

    def build(kind: str, where: str, fields: dict[str, Any]) -> Any:
        if where in _REMOVED:
            return None
        cls, problem = _resolve(kind, where, tuple(fields))
        if problem:
            problems[problem] = None
            return None
        return cls(**fields)

    return _visit(treespec, leaf, build), list(problems)


def names(treespec: Node) -> list[str]:
    """Returns the names of all tensors in order. Raises ValueError for anything that `encode` does not write."""
    found: list[str] = []
    _visit(treespec, found.append, lambda *_: None)
    return found


def _visit(node: Node, leaf: Callable[[str], Any], build: Callable[[str, str, dict[str, Any]], Any]) -> Any:
    """Makes the value of a node. `build` makes that of a class, from the values of its fields."""

    def visit(nodes: list[Node]) -> list[Any]:
        return [_visit(child, leaf, build) for child in nodes]

    def items(nodes: list[Node], *types: type) -> dict[Any, Any]:
        if odd := [key for key, _ in nodes if type(key) not in types]:
            raise ValueError(f"not a key: {odd[0]!r}")
        return {key: _visit(child, leaf, build) for key, child in nodes}

    match node:
        case None:
            return None
        case {"leaf": str(name), **rest} if not rest:
            return leaf(name)
        case {"value": bool() | int() | str() as value, **rest} if not rest:
            return value
        case {"float": str(text), **rest} if not rest:
            return float.fromhex(text)
        case {"tuple": list(nodes), **rest} if not rest:
            return tuple(visit(nodes))
        case {"list": list(nodes), **rest} if not rest:
            return visit(nodes)
        case {"dict": list(nodes), **rest} if not rest:
            return items(nodes, str, int)
        case {"ordered_dict": list(nodes), **rest} if not rest:
            return OrderedDict(items(nodes, str, int))
        case {"namedtuple": str(where), "fields": list(nodes), **rest} if not rest:
            return build("namedtuple", where, items(nodes, str))
        case {"dataclass": str(where), "fields": list(nodes), **rest} if not rest:
            return build("dataclass", where, items(nodes, str))
    raise ValueError(f"not a node of a treespec: {str(node)[:80]}")


def _sorted(x: Mapping[Any, Any]) -> list[Any]:
    """Returns the keys in the order of optree: sorted, or by type and then value if they cannot be compared."""
    try:
        return sorted(x)
    except TypeError:
        return sorted(x, key=lambda k: (f"{type(k).__module__}.{type(k).__qualname__}", k))


def _kind(cls: type) -> str | None:
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return "namedtuple"
    return "dataclass" if dataclasses.is_dataclass(cls) else None


def _fields(cls: type) -> tuple[str, ...]:
    if _kind(cls) == "namedtuple":
        return tuple(cls._fields)  # type: ignore[attr-defined]
    # Fields without `init` are computed by the class itself, and its constructor does not accept them.
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)


_MOVED = {
    "fzero.program.counters:PrecisionState": "fzero.transforms.precision:PrecisionState",
    "fzero.optim.base:EmptyState": "fzero.optim.gradient_transformation:EmptyState",
    "fzero.optim.transforms:ScaleByScheduleState": "fzero.optim.scaling_and_clipping:ScaleByScheduleState",
    "fzero.precision.counters:PrecisionState": "fzero.transforms.precision:PrecisionState",
}
"""Types of a state, by the module that defined them when a checkpoint was written, with the module that defines them
now."""
_REMOVED = ("fzero.program.delayed:Fp8State", "fzero.precision.delayed:Fp8State")
"""Parts of a state that fzero no longer has. Each is read as None, because nothing needs their values."""


def _resolve(kind: str, where: str, fields: tuple[str, ...]) -> tuple[Any, str | None]:
    """Looks up the class of a node. Returns the class, or None and the reason why it cannot be used."""
    module_name, _, qualname = _MOVED.get(where, where).partition(":")
    # Importing a module runs its code. Only fzero's own modules, which are trusted, may be imported because a file
    # names them.
    if module_name not in sys.modules and module_name.split(".")[0] == "fzero":
        with contextlib.suppress(ImportError):
            importlib.import_module(module_name)
    if module_name not in sys.modules:
        return None, f"{where}: the module {module_name!r} is not imported; a checkpoint imports nothing by itself"
    found: Any = sys.modules[module_name]
    for part in qualname.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None  # no getattr: it can run code
    if not isinstance(found, type) or _kind(found) is None:
        return None, f"{where}: {'not found' if found is None else f'{found!r} is not a NamedTuple or dataclass'}"
    if (_kind(found), _fields(found)) != (kind, fields):
        return (
            None,
            f"{where}: stored as a {kind} of ({', '.join(fields)}), it is a {_kind(found)} of "
            f"({', '.join(_fields(found))})",
        )
    return found, None
