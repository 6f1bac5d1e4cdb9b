"""Inserts the sends of `redundant`: each starts at the beginning of the step, and is waited for before the first op
that overwrites the sent values.

Tensors that are written by the same op are sent together. Those in separate device memory are copied to the host first,
and are sent after the first block has run.
"""

from __future__ import annotations

from dataclasses import replace

from fzero.ir.aliases import Views
from fzero.ir.attributes import ReplicateAttrs
from fzero.ir.program import Instruction, Program, moving
from fzero.ir.value_names import Names
from fzero.transforms.redundant import Redundant
from fzero.transforms.transform import find


def spec_of(program: Program) -> Redundant | None:
    """Returns the configuration of a program whose mesh has other ranks to send to."""
    spec = find(program.transforms, Redundant)
    return spec if spec is not None and spec.has_receivers(program.mesh) else None


def rewrite(program: Program) -> Program:
    """Returns the program with its sends. All its other transfers must have been placed already."""
    spec = spec_of(program)
    assert spec is not None
    values, names = program.values(), Names(program.values())
    groups: dict[tuple[int, bool], list[str]] = {}
    writers, end = _writers(program), len(program.instructions)
    for name, leaf in program.leaves.items():
        if spec.sends(leaf):
            apart = values[name].tier == "device" and not program.mesh.unified_memory
            groups.setdefault((writers.get(name, end), apart), []).append(name)
    before: dict[int, list[Instruction]] = {}  # by the index of an op: the ops that come before it
    # after the first block has run, or the loop over all of them, if the step begins with it
    later = next(
        (i for i, x in enumerate(program.instructions[1:], 1) if x.block or x.body or program.instructions[0].body), end
    )
    on_the_way = f"{spec.name}, to the host"
    for number, ((writer, apart), leaves) in enumerate(groups.items()):
        sent, leaves_at = leaves, 0
        if apart:
            copied = moving(names(f"replicate_{number}_to_host"))
            copies = tuple(replace(values[n], name=names(f"{names.stem(n)}_sent"), tier="host") for n in leaves)
            before.setdefault(0, []).append(Instruction("to_host_start", tuple(leaves), (copied,), by=on_the_way))
            sent, leaves_at = [v.name for v in copies], min(writer, later)
            before.setdefault(leaves_at, []).append(Instruction("wait", (copied.name,), copies, by=on_the_way))
        handle = moving(names(f"replicate_{number}"))
        attrs = ReplicateAttrs(
            axes=(spec.axis,),
            shift=spec.shift(program.mesh),
            every=spec.every,
            # A tensor that no op writes never changes.
            once=writer == end,
            leaves=tuple(leaves),
            number=number,
        )
        start = Instruction("replicate_start", tuple(sent), (handle,), attrs=attrs, by=spec.name)
        before.setdefault(leaves_at, []).append(start)
        before.setdefault(writer, []).append(Instruction("wait", (handle.name,), by=spec.name))
    ops = [x for i, op in enumerate(program.instructions) for x in (*before.get(i, ()), op)]
    return replace(program, instructions=(*ops, *before.get(end, ())))


def _writers(program: Program) -> dict[str, int]:
    """Returns, for each tensor of the state, the index of the first op that writes it, or a value in its memory."""
    views, found = Views(program), dict[str, int]()
    for number, op in enumerate(program.instructions):
        for x in op.with_body():
            for name in (root for written in x.writes for root in views.roots(written)):
                found.setdefault(name, number)
    return found
