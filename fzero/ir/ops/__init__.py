"""Defines the ops of programs: one class per op, with everything that the package knows about it.

`ir/verifier.py` rejects an op that is not in this table, and an attribute that the op's class does
not name. To add an op, add a class here (or pass it to `bring`, for the op of a transform) and the
rewrite that inserts the op.

| file | what it does |
|---|---|
| `op.py` | the base class `Op`: verification, aliasing, cost, text, execution and reference semantics |
| `values.py` | calls of subgraphs, casts, buffers, and this rank's shard or micro-batch of a value |
| `dim_shards.py` | layout changes of values sharded along a dim, and stacks for round-robin ownership |
| `transfers.py` | collectives, sends and receives, copies between memory tiers, and the wait |
| `control.py` | loops over micro-batches, accumulation, assignment to the state, and the whole optimizer |
| `redo.py` | `redo`: repeats speculative updates with the actual scalars if they were wrong |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fzero.errors import FzeroTypeError
from fzero.ir.attributes import Attrs, HandAttrs, SendAttrs, required
from fzero.ir.ops import control, dim_shards, redo, transfers, values
from fzero.ir.ops.op import ANY, Op, Text, micro_of
from fzero.ir.ops.redo import Attempt, is_superseded, written_aside
from fzero.ir.ops.transfers import DISK, STARTS, Copy, Start
from fzero.ir.program import Line, Program, Value
from fzero.mesh import AbstractMesh

OPS: dict[str, Op[Any]] = {
    row.name: row for row in (*values.ROWS, *dim_shards.ROWS, *transfers.ROWS, *control.ROWS, *redo.ROWS)
}
OWNERS: dict[str, str] = {}
"""By op the name of the transform that brings it (`bring`); ops of the package are left out."""

COLLECTIVES = frozenset(name for name, row in STARTS.items() if row.between == "ranks")
"""Transfers between ranks, over mesh axes."""
COPIES = frozenset(name for name, row in STARTS.items() if row.between == "tiers")
"""Transfers between the tiers of one rank."""
TRANSFERS = COLLECTIVES | COPIES


def bring(rows: Iterable[Op[Any]], owner: str) -> None:
    """Adds the rows that a transform brings, for programs of steps that have it.

    Raises:
        FzeroTypeError: an op of that name is the package's, or another transform's.
    """
    rows = [*rows]
    taken = [x.name for x in rows if x.name in OPS and OWNERS.get(x.name) != owner]
    if problems := [f"{name}: {f'of {OWNERS[name]}' if name in OWNERS else 'of fzero'}" for name in taken]:
        raise FzeroTypeError(owner, "ops that are there already", problems, "give them other names")
    OPS.update((x.name, x) for x in rows)
    OWNERS.update((x.name, owner) for x in rows)


def misformed(line: Line) -> list[str]:
    """Problems of a line by its op's row."""
    row = OPS.get(line.op)
    if row is None:
        return [f"{line.op!r} is not an op"]
    problems = []
    if row.args not in (ANY, len(line.args)):
        problems.append(f"reads {len(line.args)} values, not {row.args}")
    if row.out not in (ANY, len(line.out)):
        problems.append(f"makes {len(line.out)} values, not {row.out}")
    if line.writes if not row.writes else row.writes == "always" and not line.writes:
        problems.append(f"writes {len(line.writes)} leaves")
    if line.body and not row.body:
        problems.append("has lines of its own")
    if bool(line.fn) != (row.name == "call"):
        problems.append(f"calls {line.fn or 'no function'}")
    if type(line.attrs) is not row.attrs:
        return [*problems, f"has {type(line.attrs).__name__}, not {row.attrs.__name__}"]
    return problems + line.attrs.ill_typed


def unsaid(op: str) -> Attrs:
    """The attributes of a line that says nothing; of an op that must say something `verify` refuses them."""
    row = OPS.get(op)
    return Attrs() if row is None or required(row.attrs) else row.attrs()


def turns(line: Line) -> int:
    """The number of times to go through a line's body to see all its effects: two turns of a loop, because one leaves
    values to the next."""
    return OPS[line.op].turns(line) if line.body else 0


def from_to(line: Line) -> tuple[str, str]:
    """The tiers that a copy is from and to."""
    row = STARTS[line.op]
    assert isinstance(row, Copy), line.op
    return row.tiers(line)


def batch_axes_of(program: Program) -> tuple[str, ...]:
    """The axes that a program counts the parts of the batch along."""
    return next((line.axes for line, _ in program.walk() if line.op == values.PartIndex.name), ())


def sends_of(program: Program) -> list[tuple[str, ...]]:
    """The paths of the leaves that each send of a program sends, in the order of their numbers."""
    found = [line.attrs for line, _ in program.walk() if isinstance(line.attrs, SendAttrs)]
    return [said.leaves for said in sorted(found, key=lambda said: said.number)]


def handed(programs: Sequence[Program]) -> set[tuple[str, int, int]]:
    """The directions in which stages of a pipeline hand values, by their programs: an axis, the place of the giver, and
    the place of the taker."""
    hands = transfers.Hand.name
    return {
        (line.axes[0], stage, line.attrs.peer)
        for stage, program in enumerate(programs)
        for line, _ in program.walk()
        if line.op == hands and isinstance(line.attrs, HandAttrs)
    }


def transfer_bytes(line: Line, named: Mapping[str, Value], mesh: AbstractMesh) -> int:
    """Bytes a rank moves in a transfer. Over the mesh it sends, with a ring algorithm, (n-1)/n of the whole to gather
    or to reduce-scatter, twice that to all-reduce. A copy between tiers moves the rank's part of its values; between
    host and device nothing if they are one memory."""
    return STARTS[line.op].moved_bytes(line, named, mesh)


def stays(line: Line, mesh: AbstractMesh) -> bool:
    """Whether a copy between tiers moves nothing, because host and device are one memory."""
    row = STARTS.get(line.op)
    return isinstance(row, Copy) and row.stays(mesh)


__all__ = [
    "ANY",
    "COLLECTIVES",
    "COPIES",
    "DISK",
    "OPS",
    "OWNERS",
    "STARTS",
    "TRANSFERS",
    "Attempt",
    "Copy",
    "Op",
    "Start",
    "Text",
    "batch_axes_of",
    "bring",
    "from_to",
    "handed",
    "is_superseded",
    "micro_of",
    "misformed",
    "sends_of",
    "stays",
    "transfer_bytes",
    "turns",
    "unsaid",
    "written_aside",
]
