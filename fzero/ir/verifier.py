"""Verifies the rules of a program after every rewrite. A violation is a bug of the rewrite, never of the user.

Every name is assigned once, before it is read. Every start is waited for once, and only its wait reads its result. A
subgraph gets the shapes, the dtypes and the unsharded values that it was traced with; only an update gets shards. A
result that is computed from values that differ between ranks is not `replicated`. A gather takes shards, a reduction
takes summands, and their results are placed accordingly. Only a tensor of the state (or its shard) is written, once,
while no transfer in flight reads it, and nothing reads the old value afterwards except the gather of new shards.
Outputs are neither partial, nor shards, nor overwritten. An op reads values of the tier it computes on; a copy between
tiers reads those of its source tier, and a copy of a state tensor that is written is stored. Every tensor that the
step assigns is written. The only other tensors that are written are compute copies and waiting gradients, which are
read only after they are written.

Nothing is allowed merely because no rule forbids it: an op, an attribute or a number of arguments that fzero/ir/ops
does not list is a violation, and so is an axis that the mesh does not have. The rule of an op is in its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fzero.errors import VerifyError
from fzero.ir.attributes import AssignAttrs
from fzero.ir.ops import OPS, OWNERS, STARTS, Op, misformed
from fzero.ir.program import Instruction, Program, Value
from fzero.sharding.layout import sharding_over
from fzero.sharding.placements import REPLICATED, Flat, MeshPlacement
from fzero.sharding.shard_regions import DimShard, uneven

BUG = "this is a bug in fzero: please report it with the program"
"""The fix for a violation that a pass of this package made."""


def verify(program: Program) -> Program:
    """Returns the program, if it follows the rules.

    Raises:
        VerifyError: listing every rule that is broken, with the op.
    """
    checker = _Checker(program)
    checker.check_ops(program.instructions, {v.name: v for v in program.inputs})
    checker.problems += [text for row in OPS.values() for text in row.check_program(program)]
    checker.outputs()
    refuse(program, checker.problems)
    return program


def refuse(program: Program, problems: Iterable[str], what: str = "the program") -> None:
    """Raises an error if there are any violations.

    Raises:
        VerifyError: listing all of them.
    """
    if listed := dict.fromkeys(problems):
        raise VerifyError("verify", f"{what} of {program.name} breaks its rules", listed, BUG)


class _Checker:
    """Walks through the ops of a program in order, keeps track of what exists, is in flight or has been written, and
    collects the violations.
    """

    def __init__(self, program: Program):
        self.program = program
        self.problems: list[str] = []
        self.known: dict[str, Value] = {}
        self.started: dict[str, Instruction] = {}
        self.written: set[str] = set()
        self.carried: set[str] = set()  # copies of values that were written
        self.overwritten: set[str] = set()  # tensors of the state that were written, completely or in one shard
        self.device_only: set[str] = set()  # values in host memory that only the device has waited for
        self.iterations = 1  # number of iterations of the enclosing loop
        batch = (v for v in program.inputs if v.name not in program.leaves)
        # the axes along which the batch is sharded
        self.batch_axes = frozenset(axis for v in batch for axis in v.placement.varies_over)
        # by a shard that may be a view of a state tensor, or a copy of one on another tier: that tensor
        self.aliases: dict[str, str] = {}
        self.possible: set[tuple[Any, MeshPlacement]] = set()  # shapes and placements that are possible on the mesh

    def check_ops(self, ops: Sequence[Instruction], known: dict[str, Value]) -> None:
        """Checks ops in order: what each reads, its own rule, then the values that it makes and the tensors that it
        writes. Values made inside a loop are unknown after it, except accumulations.
        """
        self.known = dict(known)
        waiting_outside = set(self.started)
        for op in ops:
            for name in op.args:
                if wrong := self._unreadable(op, name):
                    self.bad(op, f"{name} {wrong}")
            self._check(op)
            if op.body:
                self._check_body(op)
            for value in op.out:
                if value.name in self.known:
                    self.bad(op, f"{value.name} is made twice")
                # An impossible placement is a violation already. The value is then treated as replicated, so that it
                # causes no further violations.
                possible = not self._impossible(value)
                self.known[value.name] = value if possible else replace(value, placement=REPLICATED)
            self._check_writes(op)
        for name, start in self.started.items():
            if name not in waiting_outside:
                self.bad(start, f"{name} is never waited for")

    def _check_body(self, op: Instruction) -> None:
        """Checks the body of a loop."""
        outside, iterations, self.iterations = dict(self.known), self.iterations, op.count
        self.check_ops(op.body, self.known)
        self.iterations = iterations
        # Values of the body are not known after the loop, except accumulations.
        inner, self.known = self.known, outside
        self.known.update((v.name, inner[v.name]) for x in op.body if _row(x).outlives for v in x.out)

    def _check_writes(self, op: Instruction) -> None:
        """Checks the tensors of the state that an op writes, and records that they have been overwritten."""
        # A rollback puts old values back, which may then be read again.
        if isinstance(op.attrs, AssignAttrs) and op.attrs.restores:
            self.overwritten -= {*op.writes}
            return
        for name in op.writes:
            if name not in self.known:
                self.bad(op, f"writes {name}, which does not exist")
            elif name in self.written:
                self.bad(op, f"{name} is written twice")
            elif name in self.device_only:
                self.bad(op, f"{name} is written, and only the device has waited for it")
            for handle in self._read_by(op, name):
                self.bad(op, f"{name} is written while {handle} still reads it")
            self.written.add(name)
            if not self._gradient_waits(name):  # tensors that have no old value
                self.overwritten.add(self.root(name))

    def _unreadable(self, op: Instruction, name: str) -> str | None:
        """Returns why an op may not read a value, or None if it may."""
        if name not in self.known:
            return "is read before it is made"
        if name in self.started and not op.is_wait:
            return "is still moving"
        # A copy to the device reads in the order of the device's queue.
        if name in self.device_only and op.tiers[1:] != ("device",):
            return "is read on the host, and only the device has waited for it"
        if name not in op.writes and self._gradient_waits(name) and not self._has_arrived(name):
            return "is read before it is written"
        if self.root(name) in self.overwritten and not _row(op).reads_new(op, name, self.aliases):
            return "has been overwritten"
        return None

    def outputs(self) -> None:
        """Checks the results of a complete program: its outputs, its gradients, and that exactly the tensors that the
        step assigns are written.
        """
        self._returned()
        self.problems += [
            f"{name}, the gradient of {leaf}, is never made"
            for leaf, name in self.program.grads.items()
            if name not in self.known
        ]
        self._assigned()

    def _returned(self) -> None:
        """Checks the outputs."""
        for name in self.program.outputs:
            value = self.known.get(name)
            at_rest = value.placement if value else REPLICATED
            if value is None:
                self.problems.append(f"output {name} is never made")
            elif at_rest.partial or at_rest.flat_axes or at_rest.dim_shards or at_rest.in_flight:
                self.problems.append(f"output {name} is {value.placement}")
            elif name in self.device_only:
                self.problems.append(f"output {name} is returned, and only the device has waited for it")
            elif self.root(name) in self.overwritten:
                self.problems.append(f"output {name} has been overwritten")

    def _assigned(self) -> None:
        """Checks that exactly the tensors that the step assigns are written."""
        state = {n for n, leaf in self.program.leaves.items() if leaf.role != "key"}
        for name in sorted(self.written - set(self.aliases)):
            if name not in state:
                self.problems.append(f"{name} is written, but is not a tensor of the state")
            elif name not in self.program.assigns and self.program.leaves[name].role not in ("compute", "gradients"):
                self.problems.append(f"{name} is written, but the step does not assign it")
        self.problems += [
            f"{name} is never written, but the step assigns it"
            for name in self.program.assigns
            if name not in self.written
        ]
        for name in sorted(self.written & set(self.aliases)):
            if self.aliases[name] not in self.written:
                self.problems.append(
                    f"{name} is written, but {self.aliases[name]}, of which it is a shard or a copy, is not"
                )

    def _gradient_waits(self, name: str) -> bool:
        """Returns whether a name is a tensor of the state that holds a waiting gradient."""
        return name in self.program.leaves and self.program.leaves[name].role == "gradients"

    def _has_arrived(self, name: str) -> bool:
        return name in self.written and not any(name in start.writes for start in self.started.values())

    def _read_by(self, op: Instruction, name: str) -> list[str]:
        """Returns the transfers in flight, other than an op's own, that read memory that the op writes."""
        root, unified = self.root(name), self.program.mesh.unified_memory

        def same(read: str) -> bool:
            if read == name or read not in self.known or self.root(read) != root:
                return read == name
            # A shard lies in the memory of its tensor, and so does a copy if all memory is one. Two copies lie in
            # different memory.
            return unified or (root in (name, read) and self.known[read].tier == self.known[name].tier)

        return [
            handle
            for handle, start in self.started.items()
            if start is not op
            and start.op in STARTS
            and STARTS[start.op].reads_until_wait
            and any(map(same, STARTS[start.op].sent(start)))
        ]

    def root(self, name: str) -> str:
        """Returns the tensor of the state whose buffer a value may share."""
        return self.aliases.get(name, name)

    def _check(self, op: Instruction) -> None:
        """Checks one op: its form, the axes and placements of its results, the tiers of its values, and the rule of
        its class.
        """
        problems = misformed(op)
        if (owner := OWNERS.get(op.op)) and owner not in {t.name for t in self.program.transforms}:
            problems.append(f"{op.op} is an op of {owner}, which is not a transform of this step")
        for text in problems:
            self.bad(op, text)
        args = [self.known[a] for a in op.args if a in self.known]
        if problems or len(args) != len(op.args):
            return
        impossible = [text for v in op.out if (text := self._impossible(v))]
        if unknown := [a for a in op.axes if a not in self.program.mesh.axes]:
            impossible.append(f"the mesh has no axis {', '.join(map(repr, unknown))}")
        for text in impossible:
            self.bad(op, text)
        if impossible:
            return
        for v in op.out:
            if not v.placement.is_nested:
                self.bad(op, f"{v.name} is {v.placement}, which does not begin with its axes")
        self._tiers(op, args)
        OPS[op.op].check(op, args, self)

    def _impossible(self, value: Value) -> str | None:
        """Returns why a value cannot have its placement on the mesh, or None if it can."""
        at, mesh = value.placement, self.program.mesh
        if (value.shape, at) in self.possible:
            return None
        if unknown := sorted({*at.varies_over} - {*mesh.axes}):
            return f"the mesh has no axis {', '.join(map(repr, unknown))}"
        # Along a permuted axis every rank holds all shards, which may still be summands over that axis.
        over = [axis for axis, place in at.axes if not (isinstance(place, Flat) and place.permuted)]
        if len({*over}) < len(over) or (at.flat_axes and at.dim_shards):
            return f"{value.name} is {at}: an axis shards a value only once"
        along = [DimShard(*dim, mesh.axes[axis]) for axis, dim in at.dim_shards]
        if why := uneven(value.shape, along or sharding_over(mesh, at.flat_axes, dims=at.dims).along):
            return f"{value.name} is {at}: {why}"
        self.possible.add((value.shape, at))
        return None

    def micro(self, op: Instruction) -> tuple[int, int]:
        """Returns the micro-batch that an op is for, and how many there are. The index is -1 if the op is for the
        micro-batch of each iteration of the enclosing loop.
        """
        micro, count = op.micro or (-1, op.count)
        if count != self.iterations if micro < 0 else micro >= count:
            self.bad(op, f"is for micro-batch {micro} of {count}, in a loop of {self.iterations} iterations")
        return micro, count

    def pairs(self, op: Instruction, targets: Sequence[Value], sources: Sequence[Value], how: str) -> None:
        for target, source in zip(targets, sources, strict=False):
            if (target.shape, target.dtype, target.placement) != (source.shape, source.dtype, source.placement):
                self.bad(op, f"{source} is {how} to {target}")

    def _tiers(self, op: Instruction, args: Sequence[Value]) -> None:
        """Checks that an op's operands lie on the tier that it reads from, written tensors on the tier that it writes
        to, and results where it computes.
        """
        row = OPS[op.op]
        if op.tiers:
            reads, writes = op.tiers
        elif row.computes:
            reads = writes = "host" if row.on_host(op, args[0] if args else None) else "device"
        else:
            return
        num = len(op.writes) if op.tiers else 0
        for v, tier in ((v, writes if i < num else reads) for i, v in enumerate(args)):
            if v.tier != tier:
                self.bad(op, f"{v.name} is on the {v.tier}, not on the {tier}")
        for v in op.out if not op.tiers else ():
            if v.tier != writes:
                self.bad(op, f"{v.name} is made on the {writes}, but declared on the {v.tier}")

    def bad(self, op: Instruction, text: str) -> None:
        self.problems.append(f"{shown(op)}: {text}")


def _row(op: Instruction) -> Op:
    """Returns the class of an op in the op table; an empty one for an op that is not in the table."""
    return OPS.get(op.op, _NOTHING)


_NOTHING = Op()


def shown(op: Instruction) -> str:
    """Returns an op as violations name it."""
    return f"{op.op} {op.fn} -> {', '.join(v.name for v in op.out)}"
