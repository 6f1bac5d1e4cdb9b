"""Finds code that compares the exact type of a value. In a trace, tensors and layer numbers are instances of special
classes, which `type(x) is torch.Tensor` would distinguish from the usual ones."""

from __future__ import annotations

import ast
import functools
import itertools
from types import CodeType
from typing import Any

from fzero.errors import TraceError
from fzero.trace.guards.bytecode import instructions, nested, text_at
from fzero.trace.guards.captured_settings import settings
from fzero.trace.guards.user_frames import is_library, line


def check_types(owner: str, fn: Any) -> None:
    """Raises if the code of a function, or of a function that it may call, compares a type with the type of tensors.
    Libraries are not inspected."""
    if asked := list(dict.fromkeys(place for code in _codes(fn) for place in _compared(code))):
        what = "compares a type with that of tensors: while being traced, a tensor has another class"
        raise TraceError(owner, what, [line(place) for place in asked], "isinstance(x, torch.Tensor)")


def asks_types(fn: Any) -> bool:
    """Whether the code of a function, or of a function that it may call, evaluates `type(x)` for anything
    but `self`."""
    return any(map(_asks, _codes(fn)))


def _codes(fn: Any) -> list[CodeType]:
    return [
        fact
        for fact in settings(fn, strict=False).facts
        if isinstance(fact, CodeType) and not is_library(fact.co_filename)
    ]


@functools.cache
def _asks(code: CodeType) -> bool:
    return any(
        x.opname in ("LOAD_GLOBAL", "LOAD_NAME") and x.argval == "type" and after.argval != "self"
        for inner in nested(code)
        for x, after in itertools.pairwise(instructions(inner))
    )


@functools.cache
def _compared(code: CodeType) -> tuple[tuple[str, int], ...]:
    """The places where a code object, or one nested in it, compares a type with the type of tensors. Code without a
    file is not inspected."""
    return tuple(
        (inner.co_filename, x.positions.lineno)  # type: ignore[union-attr]  # of an instruction with a text
        for inner in nested(code)
        for x in instructions(inner)
        if x.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
        and "Tensor" in (text := text_at(inner, x))
        and _is_of_types(text)
    )


def _is_of_types(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(f"({text})", mode="eval")))
    except SyntaxError:  # the file has changed since the code was compiled
        return False
    types = [
        n
        for n in nodes
        if (isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "type")
        or getattr(n, "attr", "") == "__class__"
    ]
    return bool(types) and any(
        "Tensor" in (getattr(n, "id", ""), getattr(n, "attr", ""), getattr(n, "value", "")) for n in nodes
    )
