"""Defines the ops of programs: one class per op, with everything that the package knows about it.

`ir/verifier.py` rejects an op that is not in this table, and an attribute that the op's class does
not name. To add an op, add a class here (or pass it to `bring`, for the op of a transform) and the
rewrite that inserts the op.

| file | what it does |
|---|---|
| `op.py` | the base class `Op`: verification, aliasing, cost, text and execution |
| `values.py` | calls of subgraphs, casts, buffers, and this rank's shard or micro-batch of a value |
| `dim_shards.py` | layout changes of values sharded along a dim, and stacks for round-robin ownership |
| `transfers.py` | collectives, sends and receives, copies between memory tiers, and the wait |
| `control.py` | loops over micro-batches, accumulation, assignment to the state, and the whole optimizer |
| `rollback.py` | `rollback`: repeats speculative updates with the actual scalars if they were wrong |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fzero.errors import FzeroTypeError
from fzero.ir.attributes import Attrs, LoopAttrs, ReplicateAttrs, SendAttrs, required
from fzero.ir.ops import control, dim_shards, rollback, transfers, values
from fzero.ir.ops.op import ANY, Op, Text, micro_of
from fzero.ir.ops.rollback import Attempt, is_superseded, written_aside
from fzero.ir.ops.transfers import DISK, STARTS, Copy, Start, stays
from fzero.ir.program import Instruction, Program, Value
from fzero.mesh import AbstractMesh

OPS: dict[str, Op[Any]] = {
    row.name: row for row in (*values.ROWS, *dim_shards.ROWS, *transfers.ROWS, *control.ROWS, *rollback.ROWS)
}
OWNERS: dict[str, str] = {}
"""The name of the transform that adds an op (see `bring`), by op. Ops of the package itself are not listed."""

COLLECTIVES = frozenset(STARTS) - {Copy.name}
"""Transfers between ranks, over mesh axes."""


def bring(rows: Iterable[Op[Any]], owner: str) -> None:
    """Adds the ops that a transform defines, for programs of steps that use the transform.

    Raises:
        FzeroTypeError: if an op of that name belongs to the package, or to another transform.
    """
    rows = [*rows]
    # A transform may bring its ops again, for example when its module is reloaded in a notebook.
    taken = [x.name for x in rows if x.name in OPS and OWNERS.get(x.name) != owner]
    if problems := [f"{name}: {f'of {OWNERS[name]}' if name in OWNERS else 'of fzero'}" for name in taken]:
        raise FzeroTypeError(owner, "ops of these names exist already", problems, "give them other names")
    OPS.update((x.name, x) for x in rows)
    OWNERS.update((x.name, owner) for x in rows)


def misformed(op: Instruction) -> list[str]:
    """Returns the ways in which an op differs from what its class in the op table requires."""
    row = OPS.get(op.op)
    if row is None:
        return [f"{op.op!r} is not an op"]
    problems = []
    if row.args not in (ANY, len(op.args)):
        problems.append(f"reads {len(op.args)} values, not {row.args}")
    if row.out not in (ANY, len(op.out)):
        problems.append(f"makes {len(op.out)} values, not {row.out}")
    if op.writes if not row.writes else row.writes == "always" and not op.writes:
        problems.append(f"writes {len(op.writes)} leaves")
    if op.body and not issubclass(row.attrs, LoopAttrs):
        problems.append("has lines of its own")
    if bool(op.fn) != (row.name == "call"):
        problems.append(f"calls {op.fn or 'no function'}")
    if type(op.attrs) is not row.attrs:
        return [*problems, f"has {type(op.attrs).__name__}, not {row.attrs.__name__}"]
    return problems + op.attrs.ill_typed


def unsaid(op: str) -> Attrs:
    """Returns the default attributes of an op. If an op has required attributes, the result is empty and `verify`
    rejects it.
    """
    row = OPS.get(op)
    return Attrs() if row is None or required(row.attrs) else row.attrs()


def iterations(op: Instruction) -> int:
    """Returns how often to go through an op's body to see all its effects: two iterations of a loop, because one
    iteration leaves values to the next.
    """
    return OPS[op.op].iterations(op) if op.body else 0


def replicated_leaves(program: Program) -> list[tuple[str, ...]]:
    """Returns the paths of the tensors that each send of a program sends, in the order of the sends' numbers."""
    found = [op.attrs for op, _ in program.walk() if isinstance(op.attrs, ReplicateAttrs)]
    return [said.leaves for said in sorted(found, key=lambda said: said.number)]


def message_directions(programs: Sequence[Program]) -> set[tuple[str, int, int]]:
    """The directions in which pipeline stages send values, from their programs: an axis, the index of the sender, and
    the index of the receiver."""
    send = transfers.Send.name
    return {
        (op.axes[0], stage, op.attrs.peer)
        for stage, program in enumerate(programs)
        for op, _ in program.walk()
        if op.op == send and isinstance(op.attrs, SendAttrs)
    }


def transfer_bytes(op: Instruction, named: Mapping[str, Value], mesh: AbstractMesh) -> int:
    """Returns the number of bytes that a rank moves in a transfer. With ring algorithms a rank sends (n-1)/n of the
    full tensor for a gather or a reduce-scatter, and twice that for an all-reduce. A copy between tiers moves this
    rank's shard of its values; a copy between host and device moves nothing if they are one memory.
    """
    return STARTS[op.op].moved_bytes(op, named, mesh)


__all__ = [
    "ANY",
    "COLLECTIVES",
    "DISK",
    "OPS",
    "OWNERS",
    "STARTS",
    "Attempt",
    "Op",
    "Start",
    "Text",
    "bring",
    "message_directions",
    "is_superseded",
    "micro_of",
    "misformed",
    "replicated_leaves",
    "stays",
    "transfer_bytes",
    "iterations",
    "unsaid",
    "written_aside",
]
