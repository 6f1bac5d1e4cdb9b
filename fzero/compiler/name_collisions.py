"""Renames subgraphs that have the same name as a value."""

from __future__ import annotations

from dataclasses import replace

from fzero.ir.program import Program
from fzero.ir.value_names import Names


def rewrite(program: Program) -> Program:
    """Renames each subgraph that has the same name as a value: otherwise a parameter `embed` would hide the block
    `embed`.

    Precondition: no pass after this one names a value.
    """
    values = set(program.values())
    both = [name for name in program.functions if name in values]
    names = Names((*values, *program.functions))
    new = {name: names(f"{name}_fn") for name in both}
    program = program.map_instructions(lambda op: [replace(op, fn=new[op.fn])] if op.fn in new else [op])
    return replace(
        program, functions={new.get(n, n): replace(f, name=new.get(n, n)) for n, f in program.functions.items()}
    )
