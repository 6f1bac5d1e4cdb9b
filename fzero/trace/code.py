"""Reads the names that the code of a function uses: globals, imports, attributes, and the texts by
which it asks for items."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

WHOLE = frozenset({"vars", "__dict__", "getattr", "attrgetter", "asdict", "astuple", "fields"})
"""Names by which code reads attributes that it does not name."""
ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names by which code reads the environment of the process."""
_BY_TEXT = WHOLE | {"globals", "__globals__", "hasattr", "modules", "import_module", "__import__"}
"""Names by which code reads what it names in a text."""


class CodeNames(NamedTuple):
    """The names in a function's code, and in that of functions inside it. `keys`: texts that it uses as keys; `whole`:
    names that it loads and does something else with than to name an item of what they stand for; `environment`: whether
    one of the names is that of the process's environment."""

    globals: tuple[str, ...]
    imports: tuple[str, ...]
    attributes: frozenset[str]
    texts: frozenset[str]
    keys: frozenset[str]
    whole: frozenset[str]
    environment: bool


@functools.cache
def names_in(code: types.CodeType) -> CodeNames:
    """The names that a function's code uses."""
    inner = [names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
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
    environment = not ENVIRONMENT.isdisjoint(attributes | read)
    return CodeNames(tuple(sorted(read)), tuple(sorted(imported)), attributes, texts, keys, whole, environment)


def _keyed(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The `keys` and the `whole` of `CodeNames`, of one code. An instruction that is not known here makes a name one of
    those that are read as a whole."""
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
