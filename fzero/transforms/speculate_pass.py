"""Speculative updates: runs updates that would wait for all gradients, such as for a clipping norm, on assumed scalars,
and again if the assumption was wrong.

The assumed scalars are those that result if every reduction of gradients is zero: a norm below the clipping threshold,
and no overflow. So the update of a block runs directly after its backward, as a call of the same subgraph as without
speculation, and tensors on disk are written next to their old values. Once the scalars are known, they are compared bit
for bit with the assumed ones. If they are equal, the new values are kept; otherwise the old values are restored, and
the same updates run again with the actual scalars:

    if rollback([scale], [assumed_scale]):
        …

A wrong assumption affects only the time: the step after a wrong one does not speculate, and waits. For a tensor on
disk, the old value stays where it is, in one of two extents; for every other tensor a copy is kept, for which there
must be memory. Therefore updates of tensors in host memory are speculative only if a host budget says that there is
enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fzero.ir.attributes import AssignAttrs, CastAttrs, LoopAttrs
from fzero.ir.program import Instruction, Program
from fzero.ir.value_names import Names

TIERS = (("disk",), ("disk", "host"))
"""The sets of tiers whose tensors can have speculative updates. With only the disk, no more memory is needed between
steps."""


def rewrite(program: Program, tiers: Sequence[str]) -> Program:
    """Returns a program with speculative updates for the state on these tiers, if its updates would wait for reductions
    of gradients.

    Returns the program unchanged if no update would, or if the scalars they wait for depend on more than gradients:
    then the assumption would hardly ever be right.

    Precondition: the update is partitioned, and not hoisted yet.

    Cost: gradients are held until the end of the step, as without speculation (`waiting_on_host` of offload.py
        determines where); for tensors with speculative updates that are not stored on disk, a copy, made before the
        update. Tensors on disk take twice the bytes, and a wrong assumption reads and writes them twice. No
        communication.
    """
    return _Speculation(program, tiers).run()


def with_old_values(program: Program) -> Program:
    """Adds copies of the tensors that speculative updates overwrite, and has `rollback` restore them.

    The updates must have been hoisted already. A tensor on disk needs no copy: its new value is written next to the old
    one. Compute copies of masters need none: no update reads them.
    """
    names, ops, kept = Names(program.values_by_name), list[Instruction](), dict[str, str]()
    tier_of = lambda name: program.leaves[name].layout.tier  # noqa: E731
    for op in program.instructions:
        for name in op.writes if op.speculative else ():
            if tier_of(name) != "disk" and program.leaves[name].role != "compute":
                old = replace(program.values_by_name[name], name=names(f"{names.stem(name)}_kept"))
                attrs = CastAttrs(dtype=old.dtype, speculative=True)
                ops.append(Instruction("cast", (name,), (old,), attrs=attrs, by="optimizer"))
                kept[name] = old.name
        if op.op == "rollback":
            attrs, written = AssignAttrs(restores=True, speculative=True), [w for x in op.body for w in x.writes]
            for tier in ("host", "device"):
                if ws := tuple(w for w in written if w in kept and tier_of(w) == tier):
                    back = Instruction("assign", (*ws, *(kept[w] for w in ws)), attrs=attrs, writes=ws, by="optimizer")
                    op = replace(op, body=(back, *op.body))
        ops.append(op)
    return replace(program, instructions=tuple(ops)) if kept else program


def useful_tiers(program: Program) -> list[tuple[str, ...]]:
    """Returns each of `TIERS` with which more updates can be speculative than with the one before it. The program's
    update must have been partitioned."""
    counts = [0, *(len(_Speculation(program, tiers).updates) for tiers in TIERS)]
    return [tiers for tiers, before, num in zip(TIERS, counts, counts[1:], strict=False) if before < num]


class _Speculation:
    """The rewrite of one program: finds the updates that can be speculative (`updates`), and makes them so."""

    def __init__(self, program: Program, tiers: Sequence[str]):
        self.program, self.values, self.tiers = program, program.values_by_name, {*tiers}
        self.ops = [op for op in program.instructions if op.by == "optimizer"]
        self.made = {v.name: op for op in self.ops for v in op.out}
        self.keys = {name for name, leaf in program.leaves.items() if leaf.role == "key"}
        self.updates = [op for op in self.ops if self._may_be_speculative(op)]

    def _may_be_speculative(self, op: Instruction) -> bool:
        leaves = self.program.leaves
        off = {leaves[w].layout.tier if w in leaves else "" for w in op.writes} - {"device"}
        if not op.fn or not off or not off <= self.tiers:
            return False
        waits_for = set().union(*(self._reductions(a) for a in op.args if a in self.made))
        return bool(waits_for) and all(self._of_gradients(r) for r in waits_for)

    def _reductions(self, name: str) -> set[str]:
        """Returns the reductions over tensors that a value of the optimizer depends on, by the names of their results
        on all ranks."""
        op = self.made[name]
        if op.is_wait:
            return {name}
        inside = [a for a in op.args if a in self.made]
        return {name} if self._reduces(op) else set().union(*map(self._reductions, inside))

    def _reduces(self, op: Instruction) -> bool:
        """Whether a call reduces a tensor to scalars: it reads a value from outside the optimizer that is larger than a
        scalar or a key."""
        return bool(op.fn) and any(a not in self.made and a not in self.keys and self.values[a].shape for a in op.args)

    def _of_gradients(self, name: str) -> bool:
        """Whether a reduction reads only gradients."""
        op = self.made[name]
        if op.is_wait:
            start = self.made[op.args[0]]
            return start.op == "all_reduce_start" and all(self._of_gradients(a) for a in start.args)
        return self._reduces(op) and not any(a in self.program.leaves or a in self.made for a in op.args)

    def run(self) -> Program:
        """Returns the program in which these updates run on assumed scalars, followed by the `rollback`."""
        if not self.updates:
            return self.program
        names = Names(self.values)
        zeros: dict[tuple[tuple[int, ...], str], str] = {}
        known: dict[str, str] = {}  # scalar -> its assumed value
        new: list[Instruction] = []

        def assumed(name: str) -> str:
            """Returns the name of a scalar's assumed value; if it does not depend on gradients, its own name."""
            if name not in self.made or not (reductions := self._reductions(name)):
                return name
            if name in known:
                return known[name]
            if name in reductions:
                value = self.values[name]
                key = value.shape, str(value.dtype)
                if key not in zeros:
                    zeros[key] = names("neutral")
                    new.append(Instruction("zeros", (), (replace(value, name=zeros[key]),), by="optimizer"))
                return known.setdefault(name, zeros[key])
            op = self.made[name]
            args = tuple(map(assumed, op.args))
            out = tuple(replace(v, name=names(f"assumed_{v.name}")) for v in op.out)
            known.update((v.name, g.name) for v, g in zip(op.out, out, strict=True))
            new.append(replace(op, args=args, out=out))
            return known[name]

        chosen = {id(op) for op in self.updates}
        # `assumed` also appends the ops that compute the assumed scalars to `new`.
        first = [replace(x, args=tuple(map(assumed, x.args))).saying(speculative=True) for x in self.updates]
        scalars = dict.fromkeys(a for x in self.updates for a in x.args if assumed(a) != a)
        rollback = Instruction(
            "rollback",
            (*scalars, *map(assumed, scalars)),
            attrs=LoopAttrs(count=0),
            body=tuple(self.updates),
            by="optimizer",
        )
        at = next(i for i, op in enumerate(self.program.instructions) if id(op) in chosen)
        rest = [op for op in self.program.instructions[at:] if id(op) not in chosen]
        assert not any(v.name in scalars for op in rest for v in op.out), "scalars before updates"
        return replace(self.program, instructions=(*self.program.instructions[:at], *new, *first, rollback, *rest))
