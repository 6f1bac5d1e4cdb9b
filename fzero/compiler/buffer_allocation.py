"""Places transfers' buffers in the pool: one arena planned before the run and reused all along it. On the CPU, where
fresh memory costs more than arithmetic, results that functions hand to later lines lie in it too.

A region of the pool belongs to one transfer: to its gathered values, its operands, or its results. It is taken from the
line that first writes it to the last that reads it, and what a transfer reads on other ranks' behalf until they are
known to have read it (see [Note: release] in ir/liveness.py). Regions whose times do not meet share bytes. So two
blocks' gathers alternate between two places, gradients are made where they are reduced, and the peak is known.

Copies between tiers have regions too, in the pool of the tier they are to. The source of a copy, or of a gather, is
free with its wait. A block's state from disk is updated in its region, which is taken until all of it is written back.
So three regions alternate: one is read, one updated, one written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from fzero.compiler.arena import ALIGNMENT, Region, RegionSlot, assign
from fzero.compiler.out_variants import with_out_variants
from fzero.compiler.packing import Bytes, Item, taken
from fzero.compiler.separate_allocation import STAYS, apart
from fzero.ir.attributes import ScatterAttrs
from fzero.ir.liveness import Uses
from fzero.ir.ops import OPS, STARTS, stays
from fzero.ir.program import Function, Line, Program, Value
from fzero.sharding import layout

SMALL_RESULT = 1 << 12  # bytes: a function's results below this are left to the allocator
VECTOR = 16  # bytes that a GPU's kernel reads at once; it copies arguments that are not aligned so
SMALL = 1 << 16  # bytes: an all_reduce of less is packed, and its sums do not overwrite its summands


def place(program: Program, temporaries: Callable[[Function], int] = lambda _: 0) -> Program:
    """The program with a place in the pool for all that moves. `temporaries`: peak bytes inside a call of a function
    beyond its inputs and outputs, by which places are chosen that lie apart from the arena."""
    return _Placer(program, temporaries).run()


class _Held(NamedTuple):
    """A region that other ranks may read: from when to when this rank needs it, with the wait at which they read it,
    and the axes of the transfer."""

    region: Region
    first: int
    last: int
    wait: int
    axes: tuple[str, ...]


class _Placer:
    def __init__(self, program: Program, temporaries: Callable[[Function], int]):
        self.program, self.mesh, self.uses = program, program.mesh, (uses := Uses(program))
        self.temporaries = temporaries
        self.lines, self.made, self.reads, self.views, self.waits = (
            uses.lines,
            uses.made,
            uses.reads,
            uses.views,
            uses.waits,
        )
        self.values = program.values_by_name
        self.scattered = {
            a: line.says(ScatterAttrs).grid or line.axes for line in self._with("scatter").values() for a in line.args
        }
        self.adds = {
            a: v.name for line in self._with("sum").values() for a, v in zip(line.args, line.out, strict=False)
        }
        self.slots: dict[str, RegionSlot] = {}  # values that lie in the pool
        self.into: dict[int, list[RegionSlot | None]] = {}
        self.parts: dict[int, tuple[str, ...]] = {}  # casts that write a rank's part of a gather
        self.regions: list[Region] = []
        self.held: list[_Held] = []
        self.together: set[int] = set()  # waits that return when all ranks are done with them

    def run(self) -> Program:
        totals = {"total": self._total, "sum": self._sum}
        for i, line in self._with(*totals).items():
            totals[OPS[line.op].pool](i, line)
        kinds = {
            "gather": self._gather,
            "scatter": self._scatter,
            "reduce": self._reduce,
            "exchange": self._exchange,
            "fetch": self._fetch,
            "send": self._send,
            "leaves": self._leaves,
        }
        for i, line in self._with(*kinds).items():
            kinds[OPS[line.op].pool](i, line)
        results = {i: line for i, line in self._with("results").items() if not line.writes}
        for i, line in results.items():
            if not line.fn and self._on_host(line.out[0]) and i not in self.into:
                self._leaves(i, line)
        if self.mesh.device_type == "cpu":
            for i, line in results.items():
                self._results(i, line)
        self.beside, self.resting = self._beside(), self._resting()
        self._release()
        pool_bytes = self._assign([r for r in self.regions if r.nbytes and r.arena == "device"])
        host_pool_bytes = assign([r for r in self.regions if r.arena == "host"])
        numbers = iter(range(len(self.lines)))

        def visit(lines: Sequence[Line]) -> tuple[Line, ...]:
            out = []
            for line in lines:
                number = next(numbers)
                out.append(self._placed(number, replace(line, body=visit(line.body)) if line.body else line))
            return tuple(out)

        lines = visit(self.program.lines)
        return with_out_variants(
            replace(self.program, lines=lines, pool_bytes=pool_bytes, host_pool_bytes=host_pool_bytes)
        )

    def _assign(self, regions: Sequence[Region]) -> int:
        """Offsets for the device's regions, those apart from the arena in rooms of their own. Returns the arena's
        size."""
        self._fix_across_bodies(regions)
        moved = self._moved(regions)
        for number, region in enumerate(sorted(moved, key=lambda r: r.times)):
            region.offset, region.room = 0, number
        return assign([r for r in regions if r.room is None])

    def _moved(self, regions: Sequence[Region]) -> list[Region]:
        """The regions that are allocated, if that lowers the peak as the arena is packed."""
        found = apart(regions, self.beside, self.resting)
        if not found:
            return []
        there = {id(r) for r in found}
        beside = self.beside + taken((r.item for r in found), len(self.beside))
        packed = assign([r for r in regions if id(r) not in there])
        return found if packed + int(beside.max()) < assign(regions) + int(self.beside.max()) else []

    def _fix_across_bodies(self, regions: Sequence[Region]) -> None:
        """Keeps those in the arena that lines of several bodies write or read: a room is allocated by the first line
        that runs, in each turn of a loop."""
        scopes: list[int] = [-1] * (len(self.lines) + 1)  # the line in whose body each is
        for i, (line, _) in enumerate(self.lines):
            for k in range(i + 1, i + sum(1 for _ in line.with_body())):
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
        """Bytes on the device at each line that have no place: results of functions, and their temporaries."""
        items, num = [], len(self.lines)
        for i, (line, _) in enumerate(self.lines):
            if not line.fn or (line.on_host and not self.mesh.unified_memory):
                continue
            items.append(Item(self.temporaries(self.program.functions[line.fn]), ((i, i),)))
            for value, slot in zip(line.out, self.into.get(i, [None] * len(line.out)), strict=True):
                if slot is None and value.name in self.views.alone:
                    held = math.prod(value.held(self.mesh)) * value.dtype.itemsize
                    items.append(Item(held, ((i, self.uses.last(value.name)),)))
        return taken(items, num)

    def _with(self, *kinds: str) -> dict[int, Line]:
        """The lines whose results lie in the pool in one of these ways (`Op.pool`), by number."""
        return {i: line for i, (line, _) in enumerate(self.lines) if OPS[line.op].pool in kinds}

    def _placed(self, number: int, line: Line) -> Line:
        slots = self.into.get(number)
        if number in self.together or number in self.uses.together.values():
            line = line.saying(together=True)
        if slots is None:
            return line
        size = self.mesh.axis_size
        if number in self.parts:
            return replace(
                line, into=tuple(s and s.place(s.numel // size(self.parts[number]), self.parts[number]) for s in slots)
            )
        if line.op in STARTS:
            return replace(line, into=tuple(s and s.place() for s in slots))
        return replace(
            line, into=tuple(s and s.place(math.prod(v.held(self.mesh))) for s, v in zip(slots, line.out, strict=True))
        )

    # --- the regions of each kind of line ---

    def _total(self, number: int, line: Line) -> None:
        """A sum over micro-batches: from the beginning of the loop to its last reader, padded for the reduction that
        may read it."""
        value, span = line.out[0], self.lines[number][1]
        region = self._region(value.tier)
        self.slots[value.name] = region.add(self._padded(value, self.scattered.get(value.name, ())), value)
        region.fixed = True
        assert span is not None
        region.times.append((span[0], self.uses.last(value.name)))
        self.into[number] = [self.slots[value.name]]

    def _sum(self, number: int, line: Line) -> None:
        """Totals that are added to in place: each lives from its first line to its last reader, padded like totals of a
        loop. The summands lie in the pool too, as long as they must: one function makes both."""
        parts = self._region(fixed=True)
        self._sums(line)
        for part, value in zip(line.args[len(line.out) :], line.out, strict=True):
            parts.written(self._make(part, parts.add(math.prod(value.held(self.mesh)), value)))
        assert parts.first is not None
        parts.times.append((parts.first, number))

    def _sums(self, line: Line) -> None:
        """The places of totals that are added to in place."""
        for total, value in zip(line.args, line.out, strict=False):
            slot = self.slots.get(total)
            if slot is None:
                region = self._region(fixed=True)
                slot = region.add(self._padded(value, self.scattered.get(self._summed(value.name), ())), value)
                region.times.append((self._make(total, slot), self.uses.last(total)))
            self.slots[value.name] = self.slots[total] = slot

    def _make(self, name: str, slot: RegionSlot) -> int:
        """Lets the function, or the cast, that makes a value write it to its place. Returns the number of that line."""
        maker = self.made[name]
        line = self.lines[maker][0]
        self.into.setdefault(maker, [None] * len(line.out))[[v.name for v in line.out].index(name)] = slot
        return maker

    def _summed(self, total: str) -> str:
        """The last total that a total becomes."""
        while total in self.adds:
            total = self.adds[total]
        return total

    def _padded(self, value: Value, axes: tuple[str, ...]) -> int:
        """Elements of what a rank holds of a value, with the padding of its shards over these axes."""
        if value.placement.is_cut or value.placement.cuts or not axes:  # of a shard that is there already
            return math.prod(value.held(self.mesh))
        return layout.shard_numel(value.shape, size := self.mesh.axis_size(axes)) * size

    def _gather(self, number: int, line: Line) -> None:
        region, axes, wait = self._region(kind="gather"), line.axes, self.waits[line.out[0].name]
        outs = self.lines[wait][0].out
        slots = [
            region.add(math.prod(self.values[a].held(self.mesh)) * self.mesh.axis_size(axes), v)
            for a, v in zip(line.args, outs, strict=True)
        ]
        begins = number
        for name, slot in zip(map(self.views.origin, line.args), slots, strict=True):
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

    def _scatter(self, number: int, line: Line) -> None:
        said = line.says(ScatterAttrs)
        padded = () if said.rows else said.grid or line.axes  # a part of rows has no padding
        self._apart(number, line, [self._padded(self.values[a], padded) for a in line.args])

    def _exchange(self, number: int, line: Line) -> None:
        self._apart(number, line, [math.prod(self.values[a].held(self.mesh)) for a in line.args])

    def _apart(self, number: int, line: Line, numels: Sequence[int]) -> None:
        """Regions of a transfer whose results lie apart from its operands, which have so many elements."""
        axes, wait = line.axes, self.waits[line.out[0].name]
        source, result = self._region(kind="source"), self._region(kind=STAYS)
        result.fixed = self.mesh.shared_memory and line.op != "reduce_scatter_start"  # others' bytes come in the arena
        outs = self.lines[wait][0].out
        sent = [self._source(source, a, number, n) for a, n in zip(line.args, numels, strict=True)]
        made = [result.add(math.prod(v.held(self.mesh)), v) for v in outs]
        self.into[number], self.into[wait] = [*sent, *made], list(made)
        self.slots.update((v.name, s) for v, s in zip(outs, made, strict=True))
        self._take(source, source.first if source.first is not None else number, wait, wait, axes)
        for slot in sent:
            if slot.region is not source:
                self._take(slot.region, number, wait, wait, axes)
        result.times.append((number, max(self.uses.last(v.name) for v in outs)))

    def _reduce(self, number: int, line: Line) -> None:
        axes, wait = line.axes, self.waits[line.out[0].name]
        outs = self.lines[wait][0].out
        source = self._region(kind="summed")
        sent = [self.values[a] for a in line.args]
        packed = sum(math.prod(v.held(self.mesh)) * v.dtype.itemsize for v in sent) <= SMALL
        slots = [self._source(source, v.name, number, math.prod(v.held(self.mesh)), packed) for v in sent]
        results = slots
        if packed:  # what is small is summed beside its summands: no second message
            result = self._region()
            # a GPU's kernels read them; ranks that share memory add up as one what lies without gaps
            gaps = self.mesh.device_type != "cpu"
            results = [result.add(math.prod(v.held(self.mesh)), v, VECTOR if gaps else v.dtype.itemsize) for v in outs]
            result.times.append((number, max(self.uses.last(v.name) for v in outs)))
        last = wait if packed else max(self.uses.last(v.name) for v in outs)
        self.into[number], self.into[wait] = list(slots), list(results)
        self.slots.update((v.name, s) for v, s in zip(outs, results, strict=True))
        self._take(source, source.first if source.first is not None else number, last, wait, axes)
        for slot in slots:
            if slot.region is not source:
                self._take(slot.region, number, last, wait, axes)

    def _fetch(self, number: int, line: Line) -> None:
        """Live ranges of copies: from the copy's start to its last reader, and until it is stored. A cast that is
        copied is made in the pool too."""
        if line.writes or stays(line, self.mesh):
            return
        wait = self.waits[line.out[0].name]
        self._leaves(number, self.lines[wait][0])
        self.into[wait] = list(self.into[number])
        for name in line.args:
            maker = self.made.get(name)
            if maker is not None and self._is_copy(maker) and maker not in self.into:
                source = self._region(self.values[name].tier, "sent")
                self.into[maker] = [source.add(math.prod(self.values[name].held(self.mesh)), self.values[name])]
                source.times.append((maker, self.uses.last(name)))

    def _send(self, number: int, line: Line) -> None:
        """Live ranges of the copies that another rank reads from shared memory. They are copies because a state lies
        elsewhere."""
        if not self.mesh.shared_memory:
            return
        region, wait = self._region(), self.waits[line.out[0].name]
        names = STARTS[line.op].sent(line)
        self.into[number] = [region.add(math.prod(self.values[a].held(self.mesh)), self.values[a]) for a in names]
        self._take(region, number, wait, wait, line.axes)

    def _is_copy(self, number: int) -> bool:
        """Whether a line makes a new value without a function, so the value can be made in its transfer's place."""
        line = self.lines[number][0]
        return not line.fn and OPS[line.op].pool == "results"

    def _leaves(self, number: int, line: Line) -> None:
        """A region for the results of a line, which come from a tier, or are to go to one; written from line `number`
        on."""
        outs = line.out
        region = self._region(outs[0].tier, "fetched", fixed=self.mesh.unified_memory)
        slots = region.add_leaves({v: math.prod(v.held(self.mesh)) for v in outs})
        self.into[number] = list(slots)
        self.slots.update((slot.value.name, slot) for slot in slots)
        region.times.append((number, max(self.uses.last(v.name) for v in outs)))

    def _results(self, number: int, line: Line) -> None:
        """Results of functions that later lines read, but for those that are small, a view, or handed to the user."""
        into = self.into.get(number, [None] * len(line.out))
        for k, value in enumerate(line.out):
            free = (
                value.name in self.views.alone and value.name not in self.views.returned and self._contiguous(line, k)
            )
            if into[k] is None and free and value.nbytes >= SMALL_RESULT:
                region = self._region(kind=line.fn)
                into[k] = region.add(math.prod(value.held(self.mesh)), value)
                region.times.append((number, self.uses.last(value.name)))
        if any(into):
            self.into[number] = into

    def _contiguous(self, line: Line, which: int) -> bool:
        # compiled readers rely on the strides they were traced with
        return not line.fn or self.program.functions[line.fn].graph.outputs[which].meta["val"].is_contiguous()

    def _source(self, region: Region, name: str, number: int, numel: int, packed: bool = False) -> RegionSlot:
        """The place of a reduction's operand: where it lies already, else in `region`, made there if its maker can."""
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
        line = self.lines[maker][0]
        if OPS[line.op].pool == "results" and not line.writes:
            into = self.into.setdefault(maker, [None] * len(line.out))
            into[[v.name for v in line.out].index(name)] = slot
            region.written(maker)
        return slot

    # --- regions and their times ---

    def _region(self, tier: str = "device", kind: str = "", fixed: bool = False) -> Region:
        arena = "device" if self.mesh.unified_memory else tier
        self.regions.append(Region(arena=arena, kind=kind, fixed=fixed))
        return self.regions[-1]

    def _on_host(self, value: Value) -> bool:
        return value.tier == "host" and not self.mesh.unified_memory

    def _take(self, region: Region, first: int, last: int, wait: int, axes: tuple[str, ...]) -> None:
        """Takes a region from `first` until it is read, here and by the other ranks that read it at their wait."""
        region.fixed |= self.mesh.shared_memory
        self.held.append(_Held(region, first, last, wait, axes))

    def _release(self) -> None:
        """Settles the times of regions that other ranks read."""
        if self.mesh.shared_memory:
            self._sooner()
        for x in self.held:
            x.region.times.append((x.first, self._until(x)))

    def _sooner(self) -> None:
        """Lets waits return only when all ranks are done with them, where the arena would be larger because regions are
        held longer than this rank itself needs them.

        A rank that waits so is held up by the slowest, as it is by its next transfer anyway.
        """
        num = len(self.lines)
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
        """The line until which a region is taken, which other ranks read."""
        end, met = self.uses.until(held.last, held.wait, held.axes), self.uses.met
        done = (w for w in self.together if w >= held.wait and met[w] == met.get(held.wait))
        return min(end, max(held.last, min(done, default=end)))
