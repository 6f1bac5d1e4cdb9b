"""Reads the bytecode of functions: the instructions, the names that the code uses (globals, imports, attributes, and
the strings with which it accesses items), the names that it stores to, and the values of its closure variables.

This file does not know why other files ask about the code.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

WHOLE = frozenset({"vars", "__dict__", "getattr", "attrgetter", "asdict", "astuple", "fields"})
"""Names with which code reads attributes that it does not name."""
ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names with which code reads the environment of the process."""
_BY_TEXT = WHOLE | {"globals", "__globals__", "hasattr", "modules", "import_module", "__import__"}
"""Names with which code reads attributes that are named by a string."""


class CodeNames(NamedTuple):
    """The names in a function's code, including the code of nested functions. `keys`: strings that are used as keys.
    `whole`: names that are loaded and then used for anything other than reading an item by a constant key.
    `environment`: whether one of the names is that of the process's environment."""

    globals: tuple[str, ...]
    imports: tuple[str, ...]
    attributes: frozenset[str]
    keys: frozenset[str]
    whole: frozenset[str]
    environment: bool


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and the code objects of all functions and classes inside it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from nested(x)


def instructions(code: types.CodeType) -> list[dis.Instruction]:
    """The instructions of a code object that operate on values."""
    return [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]


def instructions_from(code: types.CodeType, offset: int) -> tuple[list[dis.Instruction], int | None]:
    """All instructions of a code object, and the index of the instruction at this offset, or None if there is none."""
    found = list(dis.get_instructions(code))
    return found, next((i for i, x in enumerate(found) if x.offset == offset), None)


def text_at(code: types.CodeType, instruction: dis.Instruction) -> str:
    """The source text of the expression that an instruction belongs to; empty if it is not known, for example because
    the code has no file."""
    at = instruction.positions
    if at is None or not (at.lineno and at.end_lineno) or at.col_offset is None or at.end_col_offset is None:
        return ""
    # Columns are counted in bytes of UTF-8.
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(at.lineno, at.end_lineno + 1)]
    lines[-1] = lines[-1][: at.end_col_offset]
    return b"".join([lines[0][at.col_offset :], *lines[1:]]).decode(errors="replace")


EMPTY = object()
"""The value of a closure cell that has not been assigned yet."""


def cells(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The closure variables of a function and their values."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, EMPTY


@functools.cache
def names_in(code: types.CodeType) -> CodeNames:
    """The names that a function's code uses."""
    codes = list(nested(code))
    found = [i for c in codes for i in dis.get_instructions(c)]
    read = {i.argval for i in found if i.opname in _LOADS}
    imported = {i.argval for i in found if i.opname == "IMPORT_NAME"}
    # `co_names` also has globals and imports. That does no harm: attributes are only read where they exist.
    attributes = frozenset(name for c in codes for name in c.co_names)
    texts = frozenset(text for c in codes for text in _texts(c.co_consts))
    keyed = [_keyed(c) for c in codes]
    keys, whole = frozenset[str]().union(*(k for k, _ in keyed)), frozenset[str]().union(*(w for _, w in keyed))
    if not _BY_TEXT.isdisjoint(attributes):
        parts = texts.union(*(text.split(".") for text in texts))
        read, imported, attributes, whole = read | texts, imported | texts, attributes | parts, whole | parts
    environment = not ENVIRONMENT.isdisjoint(attributes | read)
    return CodeNames(tuple(sorted(read)), tuple(sorted(imported)), attributes, keys, whole, environment)


def _keyed(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The `keys` and the `whole` of `CodeNames` for one code object. If an unknown instruction follows a name, the name
    counts as read in whole."""
    # Four empty entries at the end, because `_key` looks up to four instructions ahead.
    lines = [*((i.opname, i.argval, i.argrepr) for i in instructions(code)), *[("", None, "")] * 4]
    keys, whole = set[str](), set[str]()
    for at, (op, name, _) in enumerate(lines):
        if isinstance(name, str) and op != "LOAD_CONST" and (op.startswith("LOAD_") or op == "IMPORT_FROM"):
            key = _key(lines, at)
            keys.update([key] if key is not None else [])
            whole.update([name] if key is None else [])
    return frozenset(keys), frozenset(whole)


def _key(lines: list[tuple[str, Any, str]], at: int) -> str | None:
    """The key in `NAME["key"]`, `NAME.get("key", 1)`, `"key" in NAME` and `getenv("key")`, if the instruction at index
    `at` loads the name in such an expression; otherwise None."""

    def text(i: int) -> bool:
        return lines[i][0] == "LOAD_CONST" and type(lines[i][1]) is str

    def called(i: int) -> bool:
        default = lines[i][0].startswith("LOAD_") and lines[i + 1][:2] == ("CALL", 2)
        return lines[i][:2] == ("CALL", 1) or default

    # Python 3.14 replaced BINARY_SUBSCR by a BINARY_OP with the argument `[]`.
    if text(at + 1) and (lines[at + 2][0] == "BINARY_SUBSCR" or lines[at + 2][::2] == ("BINARY_OP", "[]")):
        return lines[at + 1][1]
    if text(at + 1) and lines[at][1] == "getenv" and called(at + 2):
        return lines[at + 1][1]
    # Since Python 3.12, LOAD_ATTR also loads methods.
    if lines[at + 1][:2] in (("LOAD_METHOD", "get"), ("LOAD_ATTR", "get")) and text(at + 2) and called(at + 3):
        return lines[at + 2][1]
    if lines[at + 1][0] == "CONTAINS_OP":
        while lines[at][0] in ("LOAD_ATTR", "LOAD_METHOD"):
            at -= 1
        return lines[at - 1][1] if at and text(at - 1) and lines[at][0].startswith("LOAD_") else None
    return None


_WRITERS = {"batch_norm", "instance_norm", "setattr", "_foreach_lerp_", "_foreach_add_", "_foreach_mul_"}
"""Functions that write to their arguments."""
_BETWEEN = frozenset({"PRECALL", "PUSH_NULL", "EXTENDED_ARG", "CACHE"})
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})  # the last two occur in class bodies


def _texts(constants: Collection[Any]) -> Iterator[str]:
    """The constants that can be names."""
    for x in constants:
        if isinstance(x, (tuple, frozenset)):
            yield from _texts(x)
        elif isinstance(x, str) and all(map(str.isidentifier, x.split("."))):
            yield x


@functools.cache
def stores(code: types.CodeType) -> dict[str, list[int]]:
    """The names of attributes that code writes to, each with the lines of the file that do: it binds or deletes
    them, assigns to their items, calls a writing method on them, or passes them to a function that writes to its
    argument. Code without source text counts as writing to none.
    """
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return {}
    found: dict[str, list[int]] = {}
    for node in sorted(ast.walk(body), key=lambda node: getattr(node, "lineno", 0)):
        for name in _stored(node):
            found.setdefault(name, []).append(code.co_firstlineno + getattr(node, "lineno", 1) - 1)
    return found


def _stored(node: ast.AST) -> Iterator[str]:
    """The names that a statement or a call writes to, without those inside it."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
        yield from (name for t in targets for name in _targets(t))
    elif isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if isinstance(called, ast.Attribute) and name.endswith("_") and not name.endswith("__"):
            yield from _root(called.value)
        given = node.args if name in _WRITERS else [k.value for k in node.keywords if k.arg == "out"]
        yield from (x for arg in given for x in _root(arg))
        if name == "setattr":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _targets(node: ast.expr) -> list[str]:
    if isinstance(node, (ast.Tuple, ast.List)):
        return [name for x in node.elts for name in _targets(x)]
    return _root(node)


def _root(node: ast.expr) -> list[str]:
    """`ema` in `self.ema`, `self.ema[0]`, `self.ema.mul_(2)`, `self.layer.ema.data`."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr not in ("data", "T", "mT"):
            return [node.attr]
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        else:
            return []
