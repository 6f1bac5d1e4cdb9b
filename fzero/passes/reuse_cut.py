"""Reuses the cut of an update from another program: other choices of saved values and of sums change names around an
update, not the update.

To cut an update is most of the work of rewriting a program, and under a memory budget there are many programs
(fzero/lowering/variants.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fzero.program.attrs import UpdateAttrs
from fzero.program.ir import Function, Line, Program, Value
from fzero.program.names import Names
from fzero.trace.subgraph import signature


def cut_as(program: Program, before: Program, after: Program) -> Program | None:
    """The program with its update cut as another's is, or None if the two updates differ in more than the names they
    read.

    Args:
        program: with its update whole.
        before: another program, with its update whole.
        after: the same, cut (fzero/passes/cut_update.py).
    """
    at, update = next((i, line) for i, line in enumerate(program.lines) if line.op == "update")
    first, model = next((i, line) for i, line in enumerate(before.lines) if line.op == "update")
    values, known = program.values_by_name, before.values_by_name
    names = dict(zip(model.args, update.args, strict=False))
    now, said = update.says(UpdateAttrs), model.says(UpdateAttrs)
    same = (
        now.graph is said.graph
        and (program.mesh, program.owners, update.out) == (before.mesh, before.owners, model.out)
        and [names.get(a) for a in model.args] == list(update.args)
        and len(set(names.values())) == len(names)
        and [names.get(w) for w in model.writes] == list(update.writes)
        and all(_alike(values[b], known[a]) for a, b in names.items())
        and {leaf: names.get(g) for leaf, g in before.grads.items()} == program.grads
        and {names.get(a): leaf for a, leaf in said.leaf.items()} == now.leaf
    )
    if not same:
        return None
    lines = after.lines[first : len(after.lines) - (len(before.lines) - first - 1)]
    fresh, metrics = Names(values), {v.name for v in update.out}
    names.update((v.name, fresh(v.name)) for line in lines for v in line.out if v.name not in metrics)
    functions, called = _joined(program.functions, {line.fn: after.functions[line.fn] for line in lines if line.fn})
    new = tuple(_renamed(line, names, called) for line in lines)
    return replace(program, lines=(*program.lines[:at], *new, *program.lines[at + 1 :]), functions=functions)


def _alike(one: Value, other: Value) -> bool:
    return (one.shape, one.dtype, one.placement) == (other.shape, other.dtype, other.placement)


def _renamed(line: Line, names: Mapping[str, str], called: Mapping[str, str]) -> Line:
    out = tuple(replace(v, name=names.get(v.name, v.name)) for v in line.out)
    return replace(
        line.rename(names), out=out, writes=tuple(names.get(w, w) for w in line.writes), fn=called.get(line.fn, line.fn)
    )


def _joined(known: Mapping[str, Function], more: Mapping[str, Function]) -> tuple[dict[str, Function], dict[str, str]]:
    """Functions with more of them, and what each of those is called there: equal ones are one, the others stay the
    objects they are."""
    functions, called = dict(known), {}
    names, by_signature = Names(known), {(signature(f.graph), f.writes): name for name, f in known.items()}
    for name, function in more.items():
        found = by_signature.get((signature(function.graph), function.writes))
        called[name] = found or names(name)
        if found is None:
            functions[called[name]] = function if called[name] == name else replace(function, name=called[name])
    return functions, called
