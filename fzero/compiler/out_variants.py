"""Makes variants of subgraphs that write selected results into buffers of the arena, and return the others."""

from __future__ import annotations

import weakref
from dataclasses import replace

from fzero.ir.program import Function, Instruction, Program


def with_out_variants(program: Program) -> Program:
    """Makes subgraphs that write into buffers as their ops require: one variant for each set of results that are
    written."""
    functions, names = dict(program.functions), {}
    called: dict[str, set[tuple[int, ...]]] = {}
    for op, _ in program.walk():
        if op.op == "call":
            called.setdefault(op.fn, set()).add(_indices(op))
    for name in (n for n, kinds in called.items() if any(kinds)):
        for k, into in enumerate(sorted(called[name])):
            new = name if k == 0 else f"{name}_into_{k}"
            names[name, into] = new
            functions[new] = _writing(program.functions[name], new, into)
    new = lambda op: names.get((op.fn, _indices(op)), op.fn) if op.op == "call" else op.fn  # noqa: E731
    return replace(
        program.map_instructions(lambda op: [op if new(op) == op.fn else replace(op, fn=new(op))]),
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


def _indices(op: Instruction) -> tuple[int, ...]:
    return tuple(i for i, p in enumerate(op.into) if p is not None)
