"""The pool: one arena in which everything that moves has its place, planned before the run and reused all along it. On the CPU, where fresh memory costs
more than arithmetic, what functions hand to later lines lies in it too.

A region of the pool belongs to one transfer: to what it gathers, what it reduces, or what it leaves. It is taken from the line that first writes
it to the last that reads it, and what a transfer reads on other ranks' behalf until they are known to have read it (see [Note: release]). Regions
whose times do not meet share bytes. So two blocks' gathers alternate between two places, gradients are made where they are
reduced, and the peak is known.

[Note: release] Ranks of one host read each other's buffers (comm/shared.py): a rank is done with its wait, but another may still be reading. It has
read all it needs once a later transfer over the same axis, started after that wait, has arrived: every rank starts its transfers in the same order.
Until then the region stays taken. It costs nothing but the distance to the next transfer, and needs no message of its own. But the last wait in a
loop returns only when all ranks are done with it (`together`): the next turn writes the same buffers again. Ranks that share no memory have got
copies: what they were sent is free with the wait.

Copies between tiers have regions too, in the pool of the tier they are to. What a copy reads is free with its wait, as is what a
gather reads, which may lie in such a region: a block's state that comes from disk is
updated in its region, which is taken until all of it is written back; so three regions alternate, one that is read, one updated, one written.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from fzero import layout
from fzero.program.ir import COLLECTIVES, COPIES, TRANSFERS, Function, Line, Place, Program, Value, copied, stays
from fzero.program.storages import Output, output_storages
from fzero.schedule.packing import Interval, Item, pack

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like
SMALL_RESULT = 1 << 12  # bytes: a function's results below this are left to the allocator
SMALL = 1 << 16  # bytes: an all_reduce of less is packed, and its sums do not overwrite its summands


def place(program: Program) -> Program:
    """The program with a place in the pool for all that moves."""
    return _Placer(program).run()


@dataclass(eq=False)
class _Region:
    """Bytes that live and die together."""

    nbytes: int = 0
    times: list[Interval] = field(default_factory=list)
    offset: int = 0
    arena: str = "device"
    align: int = ALIGNMENT
    first: int | None = None  # the first line that writes it

    def add(self, numel: int, value: Value, align: int = ALIGNMENT) -> _Slot:
        self.nbytes = -(-self.nbytes // align) * align
        slot = _Slot(self, self.nbytes, numel, value)
        self.nbytes += numel * value.dtype.itemsize
        return slot

    def add_leaves(self, values: Sequence[Value], numels: Sequence[int]) -> list[_Slot]:
        """Slots as leaves lie in host memory: at whole sectors, as a disk reads and writes, and none where the same cache sets hold another."""
        *offsets, self.nbytes = layout.apart([n * v.dtype.itemsize for v, n in zip(values, numels, strict=True)])
        self.align, self.nbytes = layout.SECTOR, layout.padded(self.nbytes)
        return [_Slot(self, at, n, v) for at, n, v in zip(offsets, numels, values, strict=True)]

    def written(self, number: int) -> None:
        self.first = number if self.first is None else min(self.first, number)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A flat in a region, `numel` elements with its padding, for a value."""

    region: _Region
    at: int
    numel: int
    value: Value

    def place(self, numel: int | None = None, part: tuple[str, ...] = ()) -> Place:
        return Place(self.region.offset + self.at, self.numel if numel is None else numel, self.value.dtype, part, self.region.arena)


class _Placer:
    def __init__(self, program: Program):
        self.program, self.mesh = program, program.mesh
        self.lines = list(_numbered(program.lines))  # in order, with where the loop around each begins and ends
        self.made: dict[str, int] = {}
        self.read: dict[str, int] = {}  # the last line that reads a value; for one from outside a loop the loop's end
        self.reads: Counter[str] = Counter()
        self.views = _Views(program)
        self.copying: dict[str, tuple[str, ...]] = {}
        for i, (line, span) in enumerate(self.lines):
            for name in line.args:
                self.reads[name] += 1
                for root in self.views.roots(name):
                    inside = span is not None and self.made.get(root, -1) >= span[0]
                    self.read[root] = max(self.read.get(root, -1), i if span is None or inside else span[1])
            if line.op == "wait":  # a copy between tiers and a gather read until they are waited for
                for root in (r for a in self.copying.get(line.args[0], ()) for r in self.views.roots(a)):
                    self.read[root] = max(self.read.get(root, -1), i)
            elif line.op in COPIES or line.op == "all_gather_start":
                self.copying[line.out[0].name] = copied(line)
            for value in line.out:
                self.made[value.name] = i
        self.values = program.values_by_name
        self.scattered = {a: line.attrs["axes"] for line, _ in self.lines if line.op == "reduce_scatter_start" for a in line.args}
        self.waits = {line.args[0]: i for i, (line, _) in enumerate(self.lines) if line.op == "wait"}
        self.adds = {a: v.name for line, _ in self.lines if line.op == "add" for a, v in zip(line.args, line.out, strict=False)}
        self.starts = [(i, self.waits[line.out[0].name], line.attrs["axes"]) for i, (line, _) in enumerate(self.lines) if line.op in COLLECTIVES]
        ends = sorted(self.starts, key=lambda t: t[1]) if self.mesh.shared_memory else []
        self.together = {(span, axes): w for _, w, axes in ends if (span := self.lines[w][1]) is not None}
        # of each loop and axis the starts, and the first wait of any transfer from that start on
        self.arrivals: dict[tuple[Interval | None, tuple[str, ...]], tuple[list[int], list[int]]] = {}
        for start, wait, axes in self.starts:
            starts, waits = self.arrivals.setdefault((self.lines[wait][1], axes), ([], []))
            starts.append(start)
            waits.append(wait)
        for _, waits in self.arrivals.values():
            waits[:] = reversed(list(accumulate(reversed(waits), min)))
        self.slots: dict[str, _Slot] = {}  # values that lie in the pool
        self.into: dict[int, list[_Slot | None]] = {}
        self.parts: dict[int, tuple[str, ...]] = {}  # casts that write a rank's part of a gather
        self.regions: list[_Region] = []

    def run(self) -> Program:
        for i, (line, span) in enumerate(self.lines):
            if line.op == "accumulate":
                self._total(i, line.out[0], span)
            elif line.op == "add":
                self._sum(i, line)
        for i, (line, _) in enumerate(self.lines):
            if line.op == "all_gather_start":
                self._gather(i, line)
            elif line.op == "reduce_scatter_start":
                self._scatter(i, line)
            elif line.op == "all_reduce_start":
                self._reduce(i, line)
            elif line.op in COPIES and not line.writes and not stays(line, self.mesh):
                self._fetch(i, line)
            elif line.op == "buffer":
                self._leaves(i, line.out)
        for i, (line, _) in enumerate(self.lines):
            if line.op == "cast" and self._on_host(line.out[0]) and i not in self.into:
                self._leaves(i, line.out)
        if self.mesh.device_type == "cpu":
            for i, (line, _) in enumerate(self.lines):
                if line.op in ("call", "cast") and not line.writes:
                    self._results(i, line)
        pool_bytes, host_pool_bytes = (_assign([r for r in self.regions if r.arena == arena]) for arena in ("device", "host"))
        numbers = iter(range(len(self.lines)))

        def visit(lines: Sequence[Line]) -> tuple[Line, ...]:
            out = []
            for line in lines:
                number = next(numbers)
                out.append(self._placed(number, replace(line, body=visit(line.body)) if line.body else line))
            return tuple(out)

        lines = visit(self.program.lines)
        return _with_functions(replace(self.program, lines=lines, pool_bytes=pool_bytes, host_pool_bytes=host_pool_bytes))

    def _placed(self, number: int, line: Line) -> Line:
        slots = self.into.get(number)
        if number in self.together.values():
            line = replace(line, attrs={**line.attrs, "together": True})
        if slots is None:
            return line
        size = self.mesh.axis_size
        if number in self.parts:
            return replace(line, into=tuple(s and s.place(s.numel // size(self.parts[number]), self.parts[number]) for s in slots))
        if line.op in TRANSFERS:
            return replace(line, into=tuple(s and s.place() for s in slots))
        return replace(line, into=tuple(s and s.place(_numel(v.held(self.mesh))) for s, v in zip(slots, line.out, strict=True)))

    # --- the regions of each kind of line ---

    def _total(self, number: int, value: Value, span: Interval | None) -> None:
        """A sum over micro-batches: from the beginning of the loop to its last reader, padded for the reduction that may read it."""
        region = self._region()
        self.slots[value.name] = region.add(self._padded(value, self.scattered.get(value.name, ())), value)
        assert span is not None
        region.times.append((span[0], self._last(value.name)))
        self.into[number] = [self.slots[value.name]]

    def _sum(self, number: int, line: Line) -> None:
        """Totals that are added to where they lie: each from where it is made to its last reader, padded like those of a loop. What is added lies in the pool
        too, as long as it must: one function makes the one and the other."""
        num, parts = len(line.out), self._region()
        for value, total, part in zip(line.out, line.args[:num], line.args[num:], strict=True):
            slot = self.slots.get(total)
            if slot is None:
                region = self._region()
                slot = region.add(self._padded(value, self.scattered.get(self._summed(value.name), ())), value)
                region.times.append((self._make(total, slot), self._last(total)))
            self.slots[value.name] = self.slots[total] = slot
            parts.written(self._make(part, parts.add(_numel(value.held(self.mesh)), value)))
        assert parts.first is not None
        parts.times.append((parts.first, number))

    def _make(self, name: str, slot: _Slot) -> int:
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
        return layout.shard_numel(value.shape, size) * size if axes and (size := self.mesh.axis_size(axes)) else _numel(value.held(self.mesh))

    def _gather(self, number: int, line: Line) -> None:
        region, axes, wait = self._region(), line.attrs["axes"], self.waits[line.out[0].name]
        outs = self.lines[wait][0].out
        slots = [region.add(self._padded(v, axes), v) for v in outs]
        begins = number
        for name, slot in zip(map(self.views.origin, line.args), slots, strict=True):
            maker = self.made.get(name)
            if maker is not None and self.reads[name] == 1 and self.lines[maker][0].op == "cast" and self._same_loop(maker, number):
                self.into[maker], self.parts[maker] = [slot], axes
                begins = min(begins, maker)
        self.into[number], self.into[wait] = list(slots), list(slots)
        self.slots.update((v.name, s) for v, s in zip(outs, slots, strict=True))
        self._take(region, begins, max(self._last(v.name) for v in outs), wait, axes)

    def _scatter(self, number: int, line: Line) -> None:
        axes, wait = line.attrs["axes"], self.waits[line.out[0].name]
        source, result = self._region(), self._region()
        outs = self.lines[wait][0].out
        wholes = [self._source(source, a, number, self._padded(self.values[a], axes)) for a in line.args]
        shards = [result.add(_numel(v.held(self.mesh)), v) for v in outs]
        self.into[number], self.into[wait] = [*wholes, *shards], list(shards)
        self.slots.update((v.name, s) for v, s in zip(outs, shards, strict=True))
        self._take(source, source.first if source.first is not None else number, wait, wait, axes)
        for slot in wholes:
            if slot.region is not source:
                self._take(slot.region, number, wait, wait, axes)
        result.times.append((number, max(self._last(v.name) for v in outs)))

    def _reduce(self, number: int, line: Line) -> None:
        axes, wait = line.attrs["axes"], self.waits[line.out[0].name]
        outs = self.lines[wait][0].out
        source = self._region()
        packed = sum(_numel(self.values[a].held(self.mesh)) * self.values[a].dtype.itemsize for a in line.args) <= SMALL
        slots = [self._source(source, a, number, _numel(self.values[a].held(self.mesh)), packed) for a in line.args]
        results = slots
        if packed:  # what is small is summed beside its summands: no second message
            result = self._region()
            results = [result.add(_numel(v.held(self.mesh)), v, v.dtype.itemsize) for v in outs]
            result.times.append((number, max(self._last(v.name) for v in outs)))
        last = wait if packed else max(self._last(v.name) for v in outs)
        self.into[number], self.into[wait] = list(slots), list(results)
        self.slots.update((v.name, s) for v, s in zip(outs, results, strict=True))
        self._take(source, source.first if source.first is not None else number, last, wait, axes)
        for slot in slots:
            if slot.region is not source:
                self._take(slot.region, number, last, wait, axes)

    def _fetch(self, number: int, line: Line) -> None:
        """What a copy makes: from the copy's start to its last reader, and until it is stored. A cast that is copied is made in the pool too."""
        wait = self.waits[line.out[0].name]
        outs = self.lines[wait][0].out
        self._leaves(number, outs)
        self.into[wait] = list(self.into[number])
        for name in line.args:
            maker = self.made.get(name)
            if maker is not None and self.lines[maker][0].op == "cast" and maker not in self.into:
                source = self._region(self.values[name].tier)
                self.into[maker] = [source.add(_numel(self.values[name].held(self.mesh)), self.values[name])]
                source.times.append((maker, self._last(name)))

    def _leaves(self, number: int, outs: Sequence[Value]) -> None:
        """A region for values that come from a tier, or are to go to one."""
        region = self._region(outs[0].tier)
        slots = region.add_leaves(outs, [_numel(v.held(self.mesh)) for v in outs])
        self.into[number] = list(slots)
        self.slots.update((v.name, slot) for v, slot in zip(outs, slots, strict=True))
        region.times.append((number, max(self._last(v.name) for v in outs)))

    def _results(self, number: int, line: Line) -> None:
        """What a function returns and later lines read, but for what is small, a view, or handed to the user."""
        into = self.into.get(number, [None] * len(line.out))
        for k, value in enumerate(line.out):
            free = value.name in self.views.alone and value.name not in self.views.returned and self._contiguous(line, k)
            if into[k] is None and free and value.nbytes >= SMALL_RESULT:
                region = self._region()
                into[k] = region.add(_numel(value.held(self.mesh)), value)
                region.times.append((number, self._last(value.name)))
        if any(into):
            self.into[number] = into

    def _contiguous(self, line: Line, which: int) -> bool:
        if line.op == "cast":
            return True
        return self.program.functions[line.fn].graph.outputs[which].meta["val"].is_contiguous()  # compiled readers rely on the strides they were traced with

    def _source(self, region: _Region, name: str, number: int, numel: int, packed: bool = False) -> _Slot:
        """Where what is reduced lies: where it lies already, else in `region`, made there if its maker can."""
        known = self.slots.get(name)
        if known is not None and known.numel >= numel and self.reads[name] == 1 and not packed:
            return known
        value = self.values[name]
        slot = region.add(numel, value, value.dtype.itemsize if packed else ALIGNMENT)
        maker = self.made.get(name)
        if maker is None or packed or self.reads[name] != 1 or name in self.views.returned or not self._same_loop(maker, number):
            return slot
        line = self.lines[maker][0]
        if line.op in ("call", "cast") and not line.writes:
            into = self.into.setdefault(maker, [None] * len(line.out))
            into[[v.name for v in line.out].index(name)] = slot
            region.written(maker)
        return slot

    # --- times ---

    def _region(self, tier: str = "device") -> _Region:
        self.regions.append(_Region(arena="device" if self.mesh.unified_memory else tier))
        return self.regions[-1]

    def _on_host(self, value: Value) -> bool:
        return value.tier == "host" and not self.mesh.unified_memory

    def _last(self, name: str) -> int:
        return len(self.lines) if name in self.views.returned else self.read.get(name, self.made[name])

    def _same_loop(self, one: int, other: int) -> bool:
        return self.lines[one][1] == self.lines[other][1]

    def _take(self, region: _Region, first: int, last: int, wait: int, axes: tuple[str, ...]) -> None:
        """Takes a region from `first` until both its last reader here and, where memory is shared, the other ranks' reads at their wait are done."""
        if not self.mesh.shared_memory:
            region.times.append((first, last))
            return
        span = self.lines[wait][1]
        starts, arrivals = self.arrivals.get((span, axes), ([], []))
        later = bisect_right(starts, wait)
        read = arrivals[later] if later < len(arrivals) else len(self.lines)
        if span is not None:
            read = min(read, self.together[span, axes])
        region.times.append((first, max(last, read)))


class _Views:
    """Which values share memory: a function may return views of what it is given, or of one tensor several."""

    def __init__(self, program: Program):
        self._of: dict[str, str] = {}
        self._same: dict[str, str] = {}  # copies that are what they are copied from
        self.alone: set[str] = set()  # results that share no memory with another result
        found: dict[str, list[Output]] = {}
        started: dict[str, Line] = {}
        for line, _ in program.walk():
            if line.op in COPIES and not line.writes and stays(line, program.mesh):
                started[line.out[0].name] = line
            if line.op == "wait" and line.args[0] in started:
                self._of.update((v.name, a) for v, a in zip(line.out, started[line.args[0]].args, strict=True))
                self._same.update((v.name, a) for v, a in zip(line.out, started[line.args[0]].args, strict=True))
            if line.op == "add":
                self._of.update((v.name, total) for v, total in zip(line.out, line.args, strict=False))
            if line.op == "cast":
                self.alone.add(line.out[0].name)
            if line.op in ("take_shard", "take_part"):
                self._of[line.out[0].name] = line.args[0]
            if line.op != "call":
                continue
            if line.fn not in found:
                found[line.fn] = output_storages(program.functions[line.fn].graph)
            num = Counter(output.root for output in found[line.fn])
            for value, output in zip(line.out, found[line.fn], strict=True):
                if output.argument is not None:
                    self._of[value.name] = line.args[output.argument]
                elif num[output.root] == 1 and output.nbytes:
                    self.alone.add(value.name)
        self.returned = {root for name in program.outputs for root in self.roots(name)}

    def origin(self, name: str) -> str:
        """The value that a value is, under the name it was made with."""
        while name in self._same:
            name = self._same[name]
        return name

    def roots(self, name: str) -> set[str]:
        """A value and those whose memory it lies in."""
        return {name} | (self.roots(self._of[name]) if name in self._of else set())


def _numbered(lines: Sequence[Line], span: Interval | None = None, at: int = 0) -> Iterator[tuple[Line, Interval | None]]:
    """Lines in the order of their text, each with the first and last number of the loop it is in. The line that has a body comes before it."""
    for line in lines:
        yield line, span
        at += 1
        if line.body:
            size = sum(1 + len(x.body) for x in line.body)
            yield from _numbered(line.body, (at, at + size - 1) if line.op == "loop" else span, at)
            at += size


def _assign(regions: Sequence[_Region]) -> int:
    """Offsets for the regions of an arena. Returns its size in bytes."""
    regions = [r for r in regions if r.nbytes]
    packing = pack([Item(r.nbytes, tuple(r.times), r.align) for r in regions])
    for region, offset in zip(regions, packing.offsets, strict=True):
        region.offset = offset
    return packing.nbytes


def _with_functions(program: Program) -> Program:
    """Functions that write into buffers, as their lines ask: one for each set of results that is written."""
    functions, names = dict(program.functions), {}
    called: dict[str, set[tuple[int, ...]]] = {}
    for line, _ in program.walk():
        if line.op == "call":
            called.setdefault(line.fn, set()).add(_indices(line))
    for name in (n for n, kinds in called.items() if any(kinds)):
        for k, into in enumerate(sorted(called[name])):
            new = name if k == 0 else f"{name}_into_{k}"
            names[name, into] = new
            functions[new] = _writing(program.functions[name], new, into)
    new = lambda line: names.get((line.fn, _indices(line)), line.fn) if line.op == "call" else line.fn  # noqa: E731
    return replace(program.map_lines(lambda line: [line if new(line) == line.fn else replace(line, fn=new(line))]), functions=functions)


_variants: weakref.WeakKeyDictionary[Function, dict[tuple[str, tuple[int, ...]], Function]] = weakref.WeakKeyDictionary()


def _writing(function: Function, name: str, into: tuple[int, ...]) -> Function:
    """A function that writes these results into buffers: the same object whenever it is asked for, for what is known of it is kept by object."""
    known = _variants.setdefault(function, {})
    return known.setdefault((name, into), replace(function, name=name, into=into))


def _indices(line: Line) -> tuple[int, ...]:
    return tuple(i for i, p in enumerate(line.into) if p is not None)


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
