"""Allocates buffers for communication and copies in the arena (also called the pool): one block of memory that is
planned before the run and reused throughout. On the CPU, where allocating memory costs more than arithmetic, results of
subgraphs that later ops read are allocated in it too.

An allocation in the arena belongs to one transfer: to its gathered values, its operands, or its results. Its live range
begins at the op that first writes it, and ends at the last op that reads it; if other ranks read it too, it ends when
they are known to have read it (see [Note: release] in ir/liveness.py). Allocations whose live ranges do not overlap
share bytes. So the gathers of consecutive blocks alternate between two buffers, gradients are computed directly in the
buffer that is reduced, and the peak is known.

Copies between tiers have allocations too, in the arena of the tier that they are copied to. The source of a copy, or of
a gather, is free after its wait. State from disk is updated in its allocation, which is live until all of it has been
written back. So three allocations alternate: one is being read, one updated, one written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fzero.compiler.arena import ALIGNMENT, Region, RegionSlot, assign
from fzero.compiler.out_variants import with_out_variants
from fzero.compiler.packing import Bytes, Item, taken
from fzero.compiler.separate_allocation import STAYS, apart
from fzero.ir.attributes import ScatterAttrs
from fzero.ir.liveness import Uses
from fzero.ir.ops import OPS, STARTS, stays
from fzero.ir.program import Function, Instruction, Program, Value
from fzero.sharding import layout

SMALL_RESULT = 1 << 12  # bytes: smaller results of subgraphs are left to the allocator
VECTOR = 16  # bytes that a GPU kernel reads at once; it copies arguments that are not aligned to this
SMALL = 1 << 16  # bytes: a smaller all_reduce is packed, and its sums do not overwrite its summands


@dataclass(frozen=True)
class Temporaries:
    """`nbytes` returns the peak bytes inside a call of a subgraph, beyond its inputs and outputs. It is used to choose
    buffers that are allocated separately from the arena."""

    nbytes: Callable[[Function], int] = field(default=lambda _: 0, compare=False)


def rewrite(program: Program, options: Temporaries) -> Program:
    """Returns the program with an offset in the arena for every value that is communicated or copied.

    Precondition: every op is in its final position.
    """
    return _Placer(program, options.nbytes).run()


class _Held(NamedTuple):
    """An allocation that other ranks may read: the first and last op for which this rank needs it, the wait at which
    the other ranks read it, and the axes of the transfer."""

    region: Region
    first: int
    last: int
    wait: int
    axes: tuple[str, ...]


class _Placer:
    """The allocation of one program's buffers.

    It first makes an allocation for each transfer, by the kind of its op (`Op.pool`), with its live range in indices of
    ops. Then it determines when allocations that other ranks read become free, and assigns offsets.
    """

    def __init__(self, program: Program, temporaries: Callable[[Function], int]):
        self.program, self.mesh, self.uses = program, program.mesh, (uses := Uses(program))
        self.temporaries = temporaries
        self.ops, self.made, self.reads, self.views, self.waits = (
            uses.ops,
            uses.made,
            uses.reads,
            uses.views,
            uses.waits,
        )
        self.values = program.values_by_name
        self.scattered = {
            a: op.says(ScatterAttrs).grid or op.axes for op in self._with("scatter").values() for a in op.args
        }
        self.adds = {a: v.name for op in self._with("sum").values() for a, v in zip(op.args, op.out, strict=False)}
        self.slots: dict[str, RegionSlot] = {}  # values with an offset in the arena
        self.into: dict[int, list[RegionSlot | None]] = {}
        self.parts: dict[int, tuple[str, ...]] = {}  # casts that write this rank's part of a gather
        self.regions: list[Region] = []
        self.held: list[_Held] = []
        self.together: set[int] = set()  # waits that return only after all ranks are done with them

    def run(self) -> Program:
        totals = {"total": self._total, "sum": self._sum}
        for i, op in self._with(*totals).items():
            totals[OPS[op.op].pool](i, op)
        kinds = {
            "gather": self._gather,
            "scatter": self._scatter,
            "reduce": self._reduce,
            "exchange": self._exchange,
            "exchange_rows": self._exchange_rows,
            "fetch": self._fetch,
            "replicate": self._replicate,
            "leaves": self._leaves,
        }
        for i, op in self._with(*kinds).items():
            kinds[OPS[op.op].pool](i, op)
        results = {i: op for i, op in self._with("results").items() if not op.writes}
        for i, op in results.items():
            if not op.fn and self._on_host(op.out[0]) and i not in self.into:
                self._leaves(i, op)
        if self.mesh.device_type == "cpu":
            for i, op in results.items():
                self._results(i, op)
        self.beside, self.resting = self._beside(), self._resting()
        self._release()
        pool_bytes = self._assign([r for r in self.regions if r.nbytes and r.arena == "device"])
        host_pool_bytes = assign([r for r in self.regions if r.arena == "host"])
        numbers = iter(range(len(self.ops)))

        def visit(ops: Sequence[Instruction]) -> tuple[Instruction, ...]:
            out = []
            for op in ops:
                number = next(numbers)
                out.append(self._placed(number, replace(op, body=visit(op.body)) if op.body else op))
            return tuple(out)

        ops = visit(self.program.instructions)
        return with_out_variants(
            replace(self.program, instructions=ops, pool_bytes=pool_bytes, host_pool_bytes=host_pool_bytes)
        )

    def _assign(self, regions: Sequence[Region]) -> int:
        """Assigns offsets to the device's allocations; those that are separate from the arena get their own numbers.
        Returns the size of the arena."""
        self._fix_across_bodies(regions)
        moved = self._moved(regions)
        for number, region in enumerate(sorted(moved, key=lambda r: r.times)):
            region.offset, region.room = 0, number
        return assign([r for r in regions if r.room is None])

    def _moved(self, regions: Sequence[Region]) -> list[Region]:
        """Returns the allocations that are better made separately, if that lowers the peak with the arena as it is
        packed."""
        found = apart(regions, self.beside, self.resting)
        if not found:
            return []
        there = {id(r) for r in found}
        beside = self.beside + taken((r.item for r in found), len(self.beside))
        packed = assign([r for r in regions if id(r) not in there])
        return found if packed + int(beside.max()) < assign(regions) + int(self.beside.max()) else []

    def _fix_across_bodies(self, regions: Sequence[Region]) -> None:
        """Keeps allocations in the arena if ops of several bodies write or read them, because a separate allocation is
        made by the first op that runs, in each iteration of a loop."""
        scopes: list[int] = [-1] * (len(self.ops) + 1)  # the index of the op whose body contains each op
        for i, (op, _) in enumerate(self.ops):
            for k in range(i + 1, i + sum(1 for _ in op.with_body())):
                scopes[k] = i
        found = {id(r): {scopes[i] for times in r.times for i in times} for r in regions}
        for i, slots in self.into.items():
            for slot in slots:
                if slot is not None and id(slot.region) in found:
                    found[id(slot.region)].add(scopes[i])
        for region in regions:
            region.fixed |= len(found[id(region)]) > 1

    def _resting(self) -> int:
        tiers = {"device", "host"} if self.mesh.unified_memory else {"device"}
        return sum(x.shard_bytes(self.mesh) for x in self.program.leaves.values() if x.layout.tier in tiers)

    def _beside(self) -> Bytes:
        """Returns the bytes on the device at each op that are outside the arena: results of subgraphs, and their
        temporaries."""
        items, num = [], len(self.ops)
        for i, (op, _) in enumerate(self.ops):
            if not op.fn or (op.on_host and not self.mesh.unified_memory):
                continue
            items.append(Item(self.temporaries(self.program.functions[op.fn]), ((i, i),)))
            for value, slot in zip(op.out, self.into.get(i, [None] * len(op.out)), strict=True):
                if slot is None and value.name in self.views.alone:
                    held = math.prod(value.local_shape(self.mesh)) * value.dtype.itemsize
                    items.append(Item(held, ((i, self.uses.last(value.name)),)))
        return taken(items, num)

    def _with(self, *kinds: str) -> dict[int, Instruction]:
        """Returns the ops whose results are allocated in the arena in one of these ways (`Op.pool`), by index."""
        return {i: op for i, (op, _) in enumerate(self.ops) if OPS[op.op].pool in kinds}

    def _placed(self, number: int, op: Instruction) -> Instruction:
        slots = self.into.get(number)
        if number in self.together or number in self.uses.together.values():
            op = op.saying(together=True)
        if slots is None:
            return op
        size = self.mesh.axis_size
        if number in self.parts:
            return replace(
                op, into=tuple(s and s.place(s.numel // size(self.parts[number]), self.parts[number]) for s in slots)
            )
        if op.op in STARTS:
            return replace(op, into=tuple(s and s.place() for s in slots))
        return replace(
            op,
            into=tuple(s and s.place(math.prod(v.local_shape(self.mesh))) for s, v in zip(slots, op.out, strict=True)),
        )

    # --- the allocations of each kind of op ---

    def _total(self, number: int, op: Instruction) -> None:
        """Allocates a sum over micro-batches: live from the beginning of the loop to its last reader, and padded for
        the reduction that may read it."""
        value, span = op.out[0], self.ops[number][1]
        region = self._region(value.tier)
        self.slots[value.name] = region.add(self._padded(value, self.scattered.get(value.name, ())), value)
        region.fixed = True
        assert span is not None
        region.times.append((span[0], self.uses.last(value.name)))
        self.into[number] = [self.slots[value.name]]

    def _sum(self, number: int, op: Instruction) -> None:
        """Allocates totals that are accumulated in place: each is live from its first op to its last reader, and padded
        like the totals of a loop. The summands are in the arena too, while they are live, because the same subgraph
        computes both."""
        parts = self._region(fixed=True)
        self._sums(op)
        for part, value in zip(op.args[len(op.out) :], op.out, strict=True):
            parts.written(self._make(part, parts.add(math.prod(value.local_shape(self.mesh)), value)))
        assert parts.first is not None
        parts.times.append((parts.first, number))

    def _sums(self, op: Instruction) -> None:
        """Allocates the totals that are accumulated in place."""
        for total, value in zip(op.args, op.out, strict=False):
            slot = self.slots.get(total)
            if slot is None:
                region = self._region(fixed=True)
                slot = region.add(self._padded(value, self.scattered.get(self._summed(value.name), ())), value)
                region.times.append((self._make(total, slot), self.uses.last(total)))
            self.slots[value.name] = self.slots[total] = slot

    def _make(self, name: str, slot: RegionSlot) -> int:
        """Lets the subgraph, or the cast, that computes a value write it to its buffer. Returns the index of that
        op."""
        maker = self.made[name]
        op = self.ops[maker][0]
        self.into.setdefault(maker, [None] * len(op.out))[[v.name for v in op.out].index(name)] = slot
        return maker

    def _summed(self, total: str) -> str:
        """Returns the last total that a total becomes."""
        while total in self.adds:
            total = self.adds[total]
        return total

    def _padded(self, value: Value, axes: tuple[str, ...]) -> int:
        """Returns the number of elements of a value on one rank, including the padding of its shards over these
        axes."""
        at = value.placement
        if at.flat_axes or at.dim_shards or not axes:  # already a shard, or no padding needed
            return math.prod(value.local_shape(self.mesh))
        return layout.shard_numel(value.shape, size := self.mesh.axis_size(axes)) * size

    def _gather(self, number: int, op: Instruction) -> None:
        """Makes the allocation of a gather. If its operand is a cast that nothing else reads, the cast writes directly
        to this rank's part of the gathered buffer."""
        region, axes, wait = self._region(kind="gather"), op.axes, self.waits[op.out[0].name]
        outs = self.ops[wait][0].out
        slots = [
            region.add(math.prod(self.values[a].local_shape(self.mesh)) * self.mesh.axis_size(axes), v)
            for a, v in zip(op.args, outs, strict=True)
        ]
        begins = number
        for name, slot in zip(map(self.views.origin, op.args), slots, strict=True):
            maker = self.made.get(name)
            if (
                maker is not None
                and self.reads[name] == 1
                and self._is_copy(maker)
                and self.uses.same_loop(maker, number)
            ):
                self.into[maker], self.parts[maker] = [slot], axes
                begins = min(begins, maker)
        self.into[number], self.into[wait] = list(slots), list(slots)
        self.slots.update((v.name, s) for v, s in zip(outs, slots, strict=True))
        self._take(region, begins, max(self.uses.last(v.name) for v in outs), wait, axes)

    def _scatter(self, number: int, op: Instruction) -> None:
        said = op.says(ScatterAttrs)
        padded = () if said.rows else said.grid or op.axes  # a transfer along dim 0 has no padding
        self._apart(number, op, [self._padded(self.values[a], padded) for a in op.args])

    def _exchange(self, number: int, op: Instruction) -> None:
        self._apart(number, op, [math.prod(self.values[a].local_shape(self.mesh)) for a in op.args])

    def _exchange_rows(self, number: int, op: Instruction) -> None:
        """Makes the allocations of a transfer that other ranks do not read from this rank's memory."""
        wait, source, result = self.waits[op.out[0].name], self._region(kind="source"), self._region(kind=STAYS)
        outs = self.ops[wait][0].out
        numels = [math.prod(self.values[a].local_shape(self.mesh)) for a in STARTS[op.op].sent(op)]
        sent = [self._source(source, a, number, n) for a, n in zip(op.args, numels, strict=False)]
        made = [result.add(math.prod(v.local_shape(self.mesh)), v) for v in outs]
        self.into[number], self.into[wait] = [*sent, None, *made], list(made)
        self.slots.update((v.name, s) for v, s in zip(outs, made, strict=True))
        source.times.append((source.first if source.first is not None else number, wait))
        for slot in sent:
            if slot.region is not source:
                slot.region.times.append((number, wait))
        result.times.append((number, max(self.uses.last(v.name) for v in outs)))

    def _apart(self, number: int, op: Instruction, numels: Sequence[int]) -> None:
        """Makes the allocations of a transfer whose results are separate from its operands; `numels` are the elements
        of the operands."""
        axes, wait = op.axes, self.waits[op.out[0].name]
        source, result = self._region(kind="source"), self._region(kind=STAYS)
        # other ranks write directly into the arena
        result.fixed = self.mesh.shared_memory and op.op != "reduce_scatter_start"
        outs = self.ops[wait][0].out
        sent = [self._source(source, a, number, n) for a, n in zip(op.args, numels, strict=True)]
        made = [result.add(math.prod(v.local_shape(self.mesh)), v) for v in outs]
        self.into[number], self.into[wait] = [*sent, *made], list(made)
        self.slots.update((v.name, s) for v, s in zip(outs, made, strict=True))
        self._take(source, source.first if source.first is not None else number, wait, wait, axes)
        for slot in sent:
            if slot.region is not source:
                self._take(slot.region, number, wait, wait, axes)
        result.times.append((number, max(self.uses.last(v.name) for v in outs)))

    def _reduce(self, number: int, op: Instruction) -> None:
        """Makes the allocation of an all_reduce: in place, except for small ones, whose operands are packed and whose
        sums get a separate allocation."""
        axes, wait = op.axes, self.waits[op.out[0].name]
        outs = self.ops[wait][0].out
        source = self._region(kind="summed")
        sent = [self.values[a] for a in op.args]
        packed = sum(math.prod(v.local_shape(self.mesh)) * v.dtype.itemsize for v in sent) <= SMALL
        slots = [self._source(source, v.name, number, math.prod(v.local_shape(self.mesh)), packed) for v in sent]
        results = slots
        if packed:  # small values are summed next to their summands, which saves a second message
            result = self._region()
            # GPU kernels need alignment; ranks that share memory add up values without gaps in one operation
            gaps = self.mesh.device_type != "cpu"
            results = [
                result.add(math.prod(v.local_shape(self.mesh)), v, VECTOR if gaps else v.dtype.itemsize) for v in outs
            ]
            result.times.append((number, max(self.uses.last(v.name) for v in outs)))
        last = wait if packed else max(self.uses.last(v.name) for v in outs)
        self.into[number], self.into[wait] = list(slots), list(results)
        self.slots.update((v.name, s) for v, s in zip(outs, results, strict=True))
        self._take(source, source.first if source.first is not None else number, last, wait, axes)
        for slot in slots:
            if slot.region is not source:
                self._take(slot.region, number, last, wait, axes)

    def _fetch(self, number: int, op: Instruction) -> None:
        """Makes the allocations of copies: live from the start of the copy to its last reader, and until it is stored.
        If a cast is copied, its result is computed in the arena too."""
        if op.writes or stays(op, self.mesh):
            return
        wait = self.waits[op.out[0].name]
        self._leaves(number, self.ops[wait][0])
        self.into[wait] = list(self.into[number])
        for name in op.args:
            maker = self.made.get(name)
            if maker is not None and self._is_copy(maker) and maker not in self.into:
                source = self._region(self.values[name].tier, "sent")
                self.into[maker] = [source.add(math.prod(self.values[name].local_shape(self.mesh)), self.values[name])]
                source.times.append((maker, self.uses.last(name)))

    def _replicate(self, number: int, op: Instruction) -> None:
        """Makes the allocations of copies that another rank reads from shared memory. They are copies because the state
        is stored outside the shared memory."""
        if not self.mesh.shared_memory:
            return
        region, wait = self._region(), self.waits[op.out[0].name]
        names = STARTS[op.op].sent(op)
        self.into[number] = [
            region.add(math.prod(self.values[a].local_shape(self.mesh)), self.values[a]) for a in names
        ]
        self._take(region, number, wait, wait, op.axes)

    def _is_copy(self, number: int) -> bool:
        """Whether an op computes a new value without calling a subgraph, so that it can write the value directly to the
        buffer of the transfer."""
        op = self.ops[number][0]
        return not op.fn and OPS[op.op].pool == "results"

    def _leaves(self, number: int, op: Instruction) -> None:
        """Makes an allocation for the results of an op that come from a tier or are copied to one; it is written from
        op `number` on."""
        outs = op.out
        region = self._region(outs[0].tier, "fetched", fixed=self.mesh.unified_memory)
        slots = region.add_leaves({v: math.prod(v.local_shape(self.mesh)) for v in outs})
        self.into[number] = list(slots)
        self.slots.update((slot.value.name, slot) for slot in slots)
        region.times.append((number, max(self.uses.last(v.name) for v in outs)))

    def _results(self, number: int, op: Instruction) -> None:
        """Makes allocations for results of subgraphs that later ops read, except for small results, views, and values
        that are returned to the user."""
        into = self.into.get(number, [None] * len(op.out))
        for k, value in enumerate(op.out):
            free = value.name in self.views.alone and value.name not in self.views.returned and self._contiguous(op, k)
            if into[k] is None and free and value.nbytes >= SMALL_RESULT:
                region = self._region(kind=op.fn)
                into[k] = region.add(math.prod(value.local_shape(self.mesh)), value)
                region.times.append((number, self.uses.last(value.name)))
        if any(into):
            self.into[number] = into

    def _contiguous(self, op: Instruction, which: int) -> bool:
        # compiled subgraphs rely on the strides with which they were traced
        return not op.fn or self.program.functions[op.fn].graph.outputs[which].meta["val"].is_contiguous()

    def _source(self, region: Region, name: str, number: int, numel: int, packed: bool = False) -> RegionSlot:
        """Returns the buffer of a reduction's operand: the one it already has, or one in `region`, where it is computed
        if the op that computes it can write there."""
        known = self.slots.get(name)
        if known is not None and known.numel >= numel and self.reads[name] == 1 and not packed:
            return known
        value = self.values[name]
        slot = region.add(numel, value, value.dtype.itemsize if packed else ALIGNMENT)
        maker = self.made.get(name)
        if (
            maker is None
            or packed
            or self.reads[name] != 1
            or name in self.views.returned
            or not self.uses.same_loop(maker, number)
        ):
            return slot
        op = self.ops[maker][0]
        if OPS[op.op].pool == "results" and not op.writes:
            into = self.into.setdefault(maker, [None] * len(op.out))
            into[[v.name for v in op.out].index(name)] = slot
            region.written(maker)
        return slot

    # --- allocations and their live ranges ---

    def _region(self, tier: str = "device", kind: str = "", fixed: bool = False) -> Region:
        arena = "device" if self.mesh.unified_memory else tier
        self.regions.append(Region(arena=arena, kind=kind, fixed=fixed))
        return self.regions[-1]

    def _on_host(self, value: Value) -> bool:
        return value.tier == "host" and not self.mesh.unified_memory

    def _take(self, region: Region, first: int, last: int, wait: int, axes: tuple[str, ...]) -> None:
        """Keeps an allocation live from `first` until it has been read, both on this rank and by the other ranks, which
        read it at their wait."""
        # The other ranks read it in this rank's pool, so it cannot be allocated separately.
        region.fixed |= self.mesh.shared_memory
        self.held.append(_Held(region, first, last, wait, axes))

    def _release(self) -> None:
        """Determines the live ranges of allocations that other ranks read."""
        if self.mesh.shared_memory:
            self._sooner()
        for x in self.held:
            x.region.times.append((x.first, self._until(x)))

    def _sooner(self) -> None:
        """Lets waits return only when all ranks are done with them, if otherwise the arena would be larger, because
        allocations would be held longer than this rank itself needs them.

        A rank that waits in this way is delayed by the slowest rank, as it would be by its next transfer anyway.
        """
        num = len(self.ops)
        rest = taken((r.item for r in self.regions if r.arena == "device" and r.times), num)

        def arena(until: Callable[[_Held], int]) -> Bytes:
            return rest + taken((Item(x.region.nbytes, ((x.first, until(x)),)) for x in self.held), num)

        needed = int(arena(lambda x: x.last).max())
        over = arena(self._until) > needed
        for x in sorted((x for x in self.held if x.wait in self.uses.met), key=lambda x: x.wait):
            if over[x.last + 1 : self._until(x) + 1].any():
                self.together.add(x.wait)
                over = arena(self._until) > needed

    def _until(self, held: _Held) -> int:
        """Returns the op until which an allocation that other ranks read is live."""
        end, met = self.uses.until(held.last, held.wait, held.axes), self.uses.met
        done = (w for w in self.together if w >= held.wait and met[w] == met.get(held.wait))
        return min(end, max(held.last, min(done, default=end)))
