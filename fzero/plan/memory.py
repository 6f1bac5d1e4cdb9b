"""Counts the bytes alive at every op of a program, by role. The counts are exact and need only the program.

A value is a name for a *storage*: memory that several names may share, because a subgraph may return a view of its
argument, and a wait returns the buffers that its transfer filled. A storage is alive from the op that makes it until
no name refers to it; names are dropped where the program says so (`del`). While a call runs, its temporaries are
alive as well. The arena (see [Note: pool] in ir/program.py) exists for the complete run; values in it have a role,
but no bytes of their own. Separate allocations outside the arena are memory like any other. Host memory is counted
separately, unless host and device are one memory. Tensors on disk take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fzero._utils.deprecation import attribute_alias
from fzero._utils.host_memory import padded
from fzero.ir.aliases import Aliases
from fzero.ir.attributes import BufferAttrs, ReplicateAttrs
from fzero.ir.ops import OPS, STARTS, Start, iterations, stays, written_aside
from fzero.ir.printer import last_reads
from fzero.ir.program import Function, Instruction, Place, Program, Value, local_bytes

ROLES: tuple[str, ...] = (
    "params",
    "opt_state",
    "batch",
    "gathered",
    "gradients",
    "saved",
    "activations",
    "temporaries",
    "idle_pool",
    "other",
)
"""Roles of bytes. `gathered`: full parameters as subgraphs read them, gathered over an axis or cast to the compute
dtype. `gradients`: from the backward to the update, full and sharded. `saved`: kept from the forward for the
backward. `activations`: other results of subgraphs. `temporaries`: inside a call. `idle_pool`: the part of the arena
that is unused at the moment. `other`: scalars, the step, the key, literal tensors.
"""

ROLE_NAMES: dict[str, str] = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "batch": "batch",
    "gathered": "gathered parameters",
    "gradients": "gradients",
    "saved": "activations saved for the backward",
    "activations": "other activations",
    "temporaries": "temporaries of an op",
    "idle_pool": "unused buffers",
    "other": "scalars",
}
"""The roles as tables, pictures and messages name them."""


class Sample(NamedTuple):
    """The bytes alive while an op runs, in the order of `ROLES`, and those in the host's memory if that is separate.
    `line` is the index of the op as `Program.walk` counts; `iteration` is that of the enclosing loop.
    """

    line: int
    iteration: int
    by_role: tuple[int, ...]
    host_by_role: tuple[int, ...] = ()

    turn = attribute_alias("Sample", "turn", "iteration")

    @property
    def host(self) -> int:
        return sum(self.host_by_role)

    @property
    def total(self) -> int:
        return sum(self.by_role)


def resting_bytes(program: Program, tier: str = "device") -> int:
    """Returns the bytes of the state between steps on each rank: on the device (including the host's if they are one
    memory), or on another tier.
    """
    tiers = (
        {tier, "host"}
        if tier == "device" and program.mesh.unified_memory
        else {tier}
        if tier != "host" or not program.mesh.unified_memory
        else set()
    )
    return sum(leaf.shard_bytes(program.mesh) for leaf in program.leaves.values() if leaf.layout.tier in tiers)


def disk_bytes(program: Program) -> int:
    """Returns the bytes of each rank's scratch files: its tensors on disk, each padded to the beginning of the next,
    with tensors whose next value is written next to the old one counted twice.
    """
    on_disk = [leaf for leaf in program.leaves.values() if leaf.layout.tier == "disk"] + [
        program.leaves[n] for n in written_aside(program)
    ]
    return sum(padded(leaf.shard_bytes(program.mesh)) for leaf in on_disk)


def ward_bytes(program: Program) -> int:
    """Returns the bytes of the two slots in which a rank's host keeps shards of another rank's state."""
    return 2 * sum(
        local_bytes(program.values_by_name[name], program.mesh)
        for op, _ in program.walk()
        if isinstance(op.attrs, ReplicateAttrs)
        for name in op.args
    )


def memory_of(program: Program, temporaries: Callable[[Function], int]) -> list[Sample]:
    """Returns a sample for each op that runs, in order. Of a loop, the first two iterations are sampled: the others
    are like the second.

    Args:
        program: ordered, with or without an arena.
        temporaries: returns the peak bytes inside a call of a subgraph beyond its inputs and outputs.
    """
    return list(_Memory(program, temporaries).run())


@dataclass(frozen=True, eq=False)
class _Storage:
    """Memory that one or several names refer to: its size, its role, and whether it lies in the arena and on the
    host.
    """

    nbytes: int
    role: str
    pooled: bool = False
    on_host: bool = False


class _Memory:
    """The storages that are alive, while walking through the ops."""

    def __init__(self, program: Program, temporaries: Callable[[Function], int]):
        self.program, self.values, self.roles = program, program.values_by_name, roles(program)
        self.waits = {op.args[0]: op for op, _ in program.walk() if op.is_wait}
        self.temporaries = {name: temporaries(f) for name, f in program.functions.items()}
        self.outputs = Aliases(program.functions).outputs
        self.names: dict[str, tuple[_Storage, ...]] = {}
        self.references: dict[_Storage, int] = {}
        self.lying: dict[Place, _Storage] = {}  # the value that lies, or lay last, in a buffer of the arena
        self.pooled = [0, 0]  # bytes in use of the device's arena, and of the host's
        self.alive = (dict.fromkeys(ROLES, 0), dict.fromkeys(ROLES, 0))
        self.number = -1
        for value in program.inputs:
            leaf = program.leaves.get(value.name)
            nbytes = value.nbytes if leaf is None else leaf.shard_bytes(program.mesh)
            self._hold(
                value.name,
                (
                    _Storage(
                        0 if value.tier == "disk" else nbytes, self.roles[value.name], on_host=self._on_host(value)
                    ),
                ),
            )
        for function in program.functions.values():
            self.alive[0]["other"] += sum(x.nbytes for x in function.graph.constants.values())

    def run(self) -> Iterator[Sample]:
        return self._samples(self.program.instructions, 0)

    def _samples(self, ops: Sequence[Instruction], iteration: int, leaving: Sequence[str] = ()) -> Iterator[Sample]:
        """Yields the samples of these ops. `leaving`: values made before these ops that no later op reads; each is
        released after its last reader here.
        """
        last = {a: i for i, op in enumerate(ops) for a in self._read(op) if a in leaving}
        for i, (op, dead) in enumerate(zip(ops, last_reads(ops, self.program), strict=True)):
            self.number += 1
            begin = self.number
            for inner in range(iterations(op)):
                # The ops have the same indices in each iteration.
                self.number = begin
                yield from self._samples(op.body, inner, dead if iterations(op) == 1 else ())
            if not op.body:
                for name, storages in self._made(op):
                    self._hold(name, storages)
                yield self._sample(op, iteration)
            for name in (*dead, *(a for a in leaving if last.get(a) == i)):
                if name in self.names:
                    self._release(name)

    def _read(self, op: Instruction) -> set[str]:
        """Returns the names that an op, or an op of its body, reads."""
        return {*op.args}.union(*(self._read(inner) for inner in op.body))

    def _sample(self, op: Instruction, iteration: int) -> Sample:
        now = [dict(alive) for alive in self.alive]
        if op.fn:
            now[op.on_host and not self.program.mesh.unified_memory]["temporaries"] += self.temporaries[op.fn]
        for arena, nbytes in enumerate((self.program.pool_bytes, self.program.host_pool_bytes)):
            now[arena]["idle_pool"] = nbytes - self.pooled[arena]
        return Sample(self.number, iteration, *(tuple(alive[role] for role in ROLES) for alive in now))

    def _on_host(self, value: Value) -> bool:
        return value.tier == "host" and not self.program.mesh.unified_memory

    def _hold(self, name: str, storages: tuple[_Storage, ...]) -> None:
        for storage in storages:
            before = self.references.get(storage, 0)
            self.references[storage] = before + 1
            if before == 0:
                self._count(storage, 1)
        self.names[name] = storages

    def _release(self, name: str) -> None:
        for storage in self.names.pop(name):
            self.references[storage] -= 1
            if self.references[storage] == 0:
                del self.references[storage]
                self._count(storage, -1)

    def _count(self, storage: _Storage, sign: int) -> None:
        self.alive[storage.on_host][storage.role] += sign * storage.nbytes
        self.pooled[storage.on_host] += sign * storage.nbytes * storage.pooled

    # --- what an op makes ---

    def _made(self, op: Instruction) -> Iterator[tuple[str, tuple[_Storage, ...]]]:
        """Yields the names that an op defines and the storages they refer to. A transfer's handle refers to its
        results, then to the buffers that it still reads.
        """
        row = OPS[op.op]
        if op.fn:
            made: dict[int, _Storage] = {}
            for k, (value, (argument, root, nbytes)) in enumerate(zip(op.out, self.outputs(op.fn), strict=True)):
                place = op.into[k] if op.into else None
                # a view of an argument, without a buffer, is no new storage
                if argument is not None and place is None:
                    yield value.name, self.names[op.args[argument]]
                else:
                    if place is not None or root not in made:
                        made[root] = self._storage(value.name, nbytes, place)
                    yield value.name, (made[root],)
        elif op.is_wait:
            for value, storage in zip(op.out, self.names[op.args[0]], strict=False):
                yield value.name, (storage,)
        elif isinstance(row, Start):
            yield op.out[0].name, self._moving(op, row)
        elif (shared := list(row.shares(op))) and row.is_view(op, self.values, self.program.mesh):
            for name, source in shared:
                yield name, self.names[source]
        else:
            for k, value in enumerate(op.out):
                if not (row.outlives and value.name in self.names):  # a total is one storage, in every iteration
                    yield value.name, (self._fresh(value, k, op),)

    def _moving(self, op: Instruction, row: Start) -> tuple[_Storage, ...]:
        sources = [storage for a in row.sent(op) for storage in self.names[a]]
        if op.writes or stays(op, self.program.mesh):
            return tuple(sources)
        wait = self.waits[op.out[0].name]
        results = [self._fresh(v, k, wait) for k, v in enumerate(wait.out)]
        if op.tiers:
            return (*results, *sources)
        if not row.reads_until_wait or not op.into:
            results += [self._lie(a, op.into[k]) if op.into else self.names[a][0] for k, a in enumerate(op.args)]
        return tuple(results)

    def _fresh(self, value: Value, k: int, op: Instruction) -> _Storage:
        """Returns the storage of result `k` of an op that makes it as a new value."""
        return self._storage(value.name, local_bytes(value, self.program.mesh), op.into[k] if op.into else None)

    def _lie(self, name: str, place: Place | None) -> _Storage:
        """Returns the storage that an argument of a transfer is read from: its buffer in the arena, which may be a
        copy.
        """
        return self.names[name][0] if place is None else self._storage(name, place.nbytes, place)

    def _storage(self, name: str, nbytes: int, place: Place | None) -> _Storage:
        on_host = name in self.values and self._on_host(self.values[name])
        if place is None:
            return _Storage(nbytes, self.roles.get(name, "activations"), on_host=on_host)
        known = self.lying.get(place)
        if known is None or known not in self.references:
            # a rank's shard of a gather lies within the gathered buffer
            pooled = place.arena != "apart"
            known = self.lying[place] = _Storage(
                0 if place.part else place.nbytes, self.roles.get(name, "activations"), pooled, on_host
            )
        return known


# --- roles ---


def roles(program: Program) -> dict[str, str]:
    """Returns the role of every value, one of `ROLES`."""
    ops = [op for op, _ in program.walk()]
    values = program.values_by_name
    known = {v.name: "batch" if v.name not in program.leaves else program.leaves[v.name].role for v in program.inputs}
    known = {
        name: role if role in ROLES else "params" if role in ("compute", "mutable") else "other"
        for name, role in known.items()
    }
    leaves = set(known)
    backward = next((i for i, op in enumerate(ops) if op.is_backward), len(ops))
    # results of the backward that updates read, and what they are computed from
    gradients = {name for name, role in known.items() if role == "gradients"}
    gathered: set[str] = set()
    copies = _copies(program)
    late: set[str] = set()  # read in the backward
    for i, op in reversed(list(enumerate(ops))):
        made = {v.name for v in op.out} | {*op.writes}
        read = {a for a in op.args if a not in leaves}
        if op.fn:
            gradients |= {a for a in read if op.writes and values[a].shape and copies.get(a, a) not in leaves}
        elif op.op != "take_shard" and not made.isdisjoint(gradients):
            gradients |= read
        if OPS[op.op].pool == "gather":
            gathered |= made | read
        if i >= backward and op.fn:
            late |= read
    for i, op in enumerate(ops):
        cast = dict(zip(op.out, op.args, strict=False)) if op.op == "cast" else {}
        for value in op.out:
            source = copies.get(value.name)
            if source in leaves:
                role = "gathered" if known[source] == "params" else known[source]
            elif value.name in gradients:
                role = "gradients"
            elif source is not None:
                role = known[source]
            elif (
                value.name in gathered
                or (op.is_wait and op.args[0] in gathered)
                or (value in cast and known.get(cast[value]) == "params")
            ):
                role = "gathered"
            elif op.op == "take_part" or (value in cast and known.get(cast[value]) == "batch"):
                role = "batch"
            elif not value.shape:
                role = "other"
            else:
                role = "saved" if i < backward and value.name in late else "activations"
            known[value.name] = role
    return known


def _copies(program: Program) -> dict[str, str]:
    """Returns the origin of each copy between tiers: a tensor of the state, or a result of an op."""
    started: dict[str, Instruction] = {}
    out: dict[str, str] = {}
    for op, _ in program.walk():
        if op.tiers:
            started[op.out[0].name] = op
        elif op.is_wait and op.args[0] in started:
            start = started[op.args[0]]
            out.update((v.name, out.get(a, a)) for v, a in zip(op.out, STARTS[start.op].sent(start), strict=False))
        elif isinstance(op.attrs, BufferAttrs):
            out.update((v.name, leaf) for v, leaf in zip(op.out, op.attrs.leaves, strict=True))
        elif op.op == "cast":  # a cast in between
            out.update((v.name, out[a]) for v, a in zip(op.out, op.args, strict=False) if a in out)
    return out
