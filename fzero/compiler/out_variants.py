"""Makes variants of subgraphs that write selected results into buffers of the arena, and return the others."""

from __future__ import annotations

import weakref
from dataclasses import replace

from fzero.ir.program import Function, Line, Program


def with_out_variants(program: Program) -> Program:
    """Makes subgraphs that write into buffers as their ops require: one variant for each set of results that are
    written."""
    functions, names = dict(program.functions), {}
    called: dict[str, set[tuple[int, ...]]] = {}
    for line, _ in program.walk():
        if line.op == "call":
            called.setdefault(line.fn, set()).add(_indices(line))
    for name in (n for n, kinds in called.items() if any(kinds)):
        for k, into in enumerate(sorted(called[name])):
            new = name if k == 0 else f"{name}_into_{k}"
            names[name, into] = new
            functions[new] = _writing(program.functions[name], new, into)
    new = lambda line: names.get((line.fn, _indices(line)), line.fn) if line.op == "call" else line.fn  # noqa: E731
    return replace(
        program.map_lines(lambda line: [line if new(line) == line.fn else replace(line, fn=new(line))]),
        functions=functions,
    )


_variants: weakref.WeakKeyDictionary[Function, dict[tuple[str, tuple[int, ...]], Function]] = (
    weakref.WeakKeyDictionary()
)


def _writing(function: Function, name: str, into: tuple[int, ...]) -> Function:
    """Returns a subgraph that writes these results into buffers. The same object is returned for the same arguments,
    because facts about a subgraph are cached by object."""
    known = _variants.setdefault(function, {})
    return known.setdefault((name, into), replace(function, name=name, into=into))


def _indices(line: Line) -> tuple[int, ...]:
    return tuple(i for i, p in enumerate(line.into) if p is not None)
