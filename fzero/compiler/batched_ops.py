"""Merges ops that do one small thing to one value each (casts, and sums over micro-batches) into ops that do it to
several values: on a GPU that is one kernel launch.

This runs after buffers have been allocated: two ops are merged only if neither writes memory that the other reads. So
the arena keeps its planned peak. On a CPU, where a launch is a function call, nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fzero.ir.aliases import Views
from fzero.ir.ops import OPS, STARTS
from fzero.ir.program import Instruction, Place, Program


def rewrite(program: Program) -> Program:
    """Returns the program in which consecutive ops of a batched kind (`Op.batched`) with the same attributes are
    merged.

    Precondition: buffers are placed.
    """
    return _Batcher(program).run()


@dataclass(frozen=True, eq=False)
class _Group:
    """Ops that are merged into one."""

    key: object
    ops: list[Instruction]


class _Batcher:
    """The rewrite of one program: collects consecutive ops that can be merged into groups."""

    def __init__(self, program: Program):
        self.program, self.values, self.views = program, program.values_by_name, Views(program)
        self.places = {
            v.name: place
            for op, _ in program.walk()
            if op.op not in STARTS  # buffers of a start belong to its transfer
            for v, place in zip(op.out, op.into, strict=False)
            if place is not None
        }

    def run(self) -> Program:
        return replace(self.program, instructions=tuple(self._ops(self.program.instructions)))

    def _ops(self, ops: Sequence[Instruction]) -> list[Instruction]:
        out: list[Instruction] = []
        groups: list[_Group] = []  # the groups since the last op of another kind
        for op in ops:
            key = self._key(op)
            if key is None:
                out += map(_joined, groups)
                groups = []
                out.append(replace(op, body=tuple(self._ops(op.body))) if op.body else op)
                continue
            at = self._joins(groups, key, op)
            if at is None:
                groups.append(_Group(key, [op]))
            else:
                groups[at].ops.append(op)
        return out + [*map(_joined, groups)]

    def _key(self, op: Instruction) -> object:
        """Returns a key that is equal for ops that can be merged; None for an op that cannot."""
        if not OPS[op.op].batched or not op.out or len(op.args) % len(op.out):
            return None
        source, out = self.values[op.args[0]], op.out[0]
        if "host" in (source.tier, out.tier):
            return None
        num = len(op.args) // len(op.out)
        return op.op, op.attrs, op.by, num, source.dtype, out.dtype, tuple(p is None for p in op.into[:1])

    def _joins(self, groups: Sequence[_Group], key: object, op: Instruction) -> int | None:
        """Returns the index of the last group that an op may join. The op then runs before all groups after that
        one."""
        for at in reversed(range(len(groups))):
            if any(self._meet(other, op) for other in groups[at].ops):
                return None
            if groups[at].key == key:
                return at
        return None

    def _meet(self, one: Instruction, other: Instruction) -> bool:
        """Whether one of two ops reads or writes what the other writes."""
        named = {v.name for v in one.out} & {*other.args} or {v.name for v in other.out} & {*one.args}
        mine, its = self._written(one), self._written(other)
        return bool(named) or _overlap(mine, its + self._read(other)) or _overlap(its, self._read(one))

    def _written(self, op: Instruction) -> list[_Span]:
        return [self._span(place) for place in op.into if place is not None]

    def _read(self, op: Instruction) -> list[_Span]:
        roots = {root for name in op.args for root in self.views.roots(name)}
        return [self._span(self.places[root]) for root in roots if root in self.places]

    def _span(self, place: Place) -> _Span:
        size = self.program.mesh.axis_size(place.part) if place.part else 1
        return (place.arena, place.room), place.offset, place.offset + place.nbytes * size


_Span = tuple[tuple[str, int], int, int]
"""An arena or a separate allocation, and the first byte and the end of a range in it."""


def _overlap(some: Sequence[_Span], others: Sequence[_Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


def _joined(group: _Group) -> Instruction:
    first = group.ops[0]
    if len(group.ops) == 1:
        return first
    return replace(
        first,
        args=tuple(
            a
            # first the first argument for each result, then the second one
            for begin in range(len(first.args) // len(first.out))
            for op in group.ops
            for a in op.args[begin * len(op.out) :][: len(op.out)]
        ),
        out=tuple(v for op in group.ops for v in op.out),
        into=tuple(p for op in group.ops for p in op.into),
    )
