"""Orders ops so that communication overlaps computation: starts each transfer before its consumer needs it, and delays
its wait. It also shares gathers between forward and backward.

The result is deterministic, and the same on every rank: all free choices are in `ScheduleOptions`, which a memory
budget determines (fzero/compiler/search.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fzero.ir.attributes import AssignAttrs, SendAttrs
from fzero.ir.ops import COLLECTIVES
from fzero.ir.ops.rollback import Rollback
from fzero.ir.program import Instruction, Program, repeats

_GATHER, _SCATTER, _DEAL, _COPY = "all_gather_start", "reduce_scatter_start", "all_to_all_start", "copy_start"
_TO_DEVICE, _TO_HOST, _READ, _WRITE = ("host", "device"), ("device", "host"), ("disk", "host"), ("host", "disk")


@dataclass(frozen=True)
class ScheduleOptions:
    """The free choices of the schedule.

    Attributes:
        shared: the number of gathers, from the last block backwards, that serve both the forward and the backward: the
            parameters of their blocks stay unsharded in between.
        late_sums: in a loop over micro-batches, the result of a reduction is added to the earlier ones a block later,
            as reduction results are used a block later elsewhere: so the reduction overlaps the computation of that
            block.
        narrow: as few values are in flight as possible. A gather starts when its block needs it, so the parameters of
            one block are unsharded at a time, and not of two; nothing computes meanwhile. Gradients are cast and
            reduced one parameter at a time, so only one parameter of a block at a time has the dtype of the reduction.
    """

    shared: int = 0
    late_sums: bool = False
    narrow: bool = False


_DEFAULT = ScheduleOptions()


def rewrite(program: Program, options: ScheduleOptions = _DEFAULT) -> Program:
    """Returns the program with every start and wait in its final position.

    Precondition: every transfer of the step exists, between its operands and the ops that read its results.
    """
    state = set(program.leaves)
    pairs = sharable(program)
    program = _share(program, dict(pairs[len(pairs) - options.shared :])) if options.shared else program

    def visit(ops: Sequence[Instruction]) -> tuple[Instruction, ...]:
        ops = [replace(x, body=visit(x.body)) if x.body else x for x in ops]
        for kind, tiers in ((_GATHER, ()), (_COPY, _TO_DEVICE), (_COPY, _TO_HOST), (_COPY, _READ)):
            if not (program.mesh.unified_memory and "device" in tiers):
                ops = _Hoisting(ops, kind, tiers, state, int(not options.narrow)).run()
        ops = _Sinking(ops, options.late_sums).run()
        ops = _leafwise(ops) if options.narrow else ops
        return tuple(_pair_updates(ops))

    return replace(program, instructions=visit(program.instructions))


def sharable(program: Program) -> list[tuple[str, str]]:
    """Returns the gathers of the same parameters in forward and backward: pairs of the names of their transfers, in the
    order of the forward."""
    found: list[tuple[str, str]] = []
    sources, onward = _sources(program), _hops([x for x, _ in program.walk()])
    values = program.values()

    def visit(ops: Sequence[Instruction]) -> None:
        first: dict[tuple[tuple[str, object], ...], str] = {}
        for op in ops:
            visit(op.body)
            if op.op == _GATHER and op.out[0].name not in onward:
                leaves = tuple((_origin(a, sources), values[a].dtype) for a in op.args)
                if leaves in first:
                    found.append((first.pop(leaves), op.out[0].name))
                else:
                    first[leaves] = op.out[0].name

    visit(program.instructions)
    place = {x.out[0].name: i for i, (x, _) in enumerate(program.walk()) if x.op == _GATHER}
    return sorted(found, key=lambda pair: place[pair[0]])


def _sources(program: Program) -> dict[str, str]:
    """Maps each cast value to the value that was cast, and each gathered value to the value that was gathered."""
    started = {x.out[0].name: x for x, _ in program.walk() if x.op == _GATHER}
    casts = [x for x, _ in program.walk() if x.op == "cast"]
    found = {v.name: a for x in casts for v, a in zip(x.out, x.args, strict=True)}
    for op, _ in program.walk():
        if op.is_wait and op.args[0] in started:
            found.update(zip((v.name for v in op.out), started[op.args[0]].args, strict=True))
    return found


def _origin(name: str, sources: Mapping[str, str]) -> str:
    while name in sources:
        name = sources[name]
    return name


def _hops(ops: Sequence[Instruction]) -> dict[str, int]:
    """Returns, for each gather whose results are gathered further over other axes, how many times they are."""
    brought = {x.args[0]: x.out for x in ops if x.is_wait}
    # the gathers that read the result of another gather, by that result
    readers: dict[str, list[str]] = {}
    found: dict[str, int] = {}
    for op in reversed([x for x in ops if x.op == _GATHER]):
        handle = op.out[0].name
        if further := [found.get(h, 0) for v in brought.get(handle, ()) for h in readers.get(v.name, ())]:
            found[handle] = 1 + max(further)
        for a in op.args:
            readers.setdefault(a, []).append(handle)
    return found


def _share(program: Program, pairs: dict[str, str]) -> Program:
    """Removes these second gathers, and the values that are computed only for them; their readers read the results of
    the first gathers."""
    waits = {x.args[0]: x for x, _ in program.walk() if x.is_wait}
    again = set(pairs.values())
    names = {
        b.name: a.name
        for first, second in pairs.items()
        for a, b in zip(waits[first].out, waits[second].out, strict=True)
    }
    readers: dict[str, set[int]] = {}
    for i, (op, _) in enumerate(program.walk()):
        for a in op.args:
            readers.setdefault(a, set()).add(i)
    dropped: set[int] = set()
    needless = set(again)  # results that no remaining op reads
    for i, (op, _) in reversed([*enumerate(program.walk())]):  # readers before what they read
        made = {v.name for v in op.out}
        if (made and made <= needless) or (op.is_wait and op.args[0] in again):
            dropped.add(i)
            needless |= {a for a in op.args if a not in program.leaves and readers[a] <= dropped}
    numbers = {id(op): i for i, (op, _) in enumerate(program.walk())}
    return program.map_instructions(lambda op: [] if numbers.get(id(op)) in dropped else [op.rename(names)])


def _is_update(op: Instruction) -> bool:
    return bool(op.fn and op.writes)


_CARRIED = {"cast", "join_parts", "wait", _COPY}
"""The ops that a transfer takes along when it starts earlier: casts of its shards, and copies from another tier. The
calls that encode its values come along too."""


class _Hoisting:
    """Moves each gather, or each copy between two tiers, to the block that is `ahead` of its reader (0 or 1), but not
    before its last input is available.

    A copy from the device starts directly after its last input, unless it only moves stored state. Values that are
    written in this step also start directly after they are written, except on disk: those wait until there is memory.

    Code between blocks that reads gathered parameters counts as a block here. A block's repetitions for more
    micro-batches count as one block, except for a transfer that is for a single one of them. Transfers for an update
    start before the update that is `ahead` of it: between two updates a block may run.
    """

    def __init__(self, ops: Sequence[Instruction], kind: str, tiers: tuple[str, ...], state: set[str], ahead: int):
        self.ops, self.kind, self.tiers, self.state, self.ahead = ops, kind, tiers, state, ahead
        # the first of several gathers starts this many blocks earlier, so that the last is done in time
        self.hops = _hops(ops)
        self.updates = {id(x) for x in ops if _is_update(x)}
        reads = _outside_blocks(ops)
        self.calls = {id(x) for x in ops if x.begins_block or id(x) in reads}
        self.blocks = {id(x) for x in ops if id(x) in self.calls and not repeats(x)}
        self.readers = _readers(ops)
        self.stores = {x.out[0].name: x for x in ops if x.tiers}
        self.made: dict[str, Instruction] = {}
        self.writers: dict[str, list[Instruction]] = {}
        self.out: list[Instruction] = []
        self.passed, self.updated = 0, 0  # the number of blocks in `out`, and of updates

    def run(self) -> list[Instruction]:
        """Returns the ops in their new order."""
        for op in self.ops:
            if op.op == self.kind and op.tiers == self.tiers and not op.writes:
                self._hoist(op)
            else:
                self.out.append(op)
                self.passed += id(op) in self.blocks
                self.updated += id(op) in self.updates
            self.made.update((v.name, op) for x in (op, *op.body) for v in x.out)
            store = self.stores.get(op.args[0]) if op.is_wait else None
            for name in (store or op).writes:
                self.writers.setdefault(name, []).append(op)
        return self.out

    def _hoist(self, op: Instruction) -> None:
        """Adds a transfer to `out`, moved forward past the blocks that may run while it is in flight."""
        carried, needed, written = self._upstream(op)
        counted, before = self._passes(op)
        far = written or (self.tiers == _TO_HOST and not self.state.issuperset(op.args))
        # the number of blocks that it may start before
        left = before + 1 if far else min(self.ahead + self.hops.get(op.out[0].name, 0), before)
        after: list[Instruction] = []  # the ops after it, last one first
        along: list[Instruction] = []  # ops that come along, except those that are already before its new position
        while self.out and left and id(self.out[-1]) not in needed:
            last = self.out.pop()
            (along if id(last) in carried else after).append(last)
            left -= id(last) in counted and id(last) not in carried
        self.out += [*reversed(along), op, *reversed(after)]

    def _passes(self, op: Instruction) -> tuple[set[int], int]:
        """Returns the ops that count as blocks for a transfer, and the number of those before it."""
        reader = self.readers.get(op.out[0].name)
        if reader is not None and _is_update(reader):  # the first ones start before blocks
            if self.updated >= self.ahead:
                return self.updates, self.updated
            return self.blocks | self.updates, self.updated + self.passed
        return self.calls if reader is not None and repeats(reader) else self.blocks, self.passed

    def _upstream(self, op: Instruction) -> tuple[set[int], set[int], bool]:
        """Returns the ops that come along, the ops that must come before, and whether one of the latter writes a
        transferred value, other than to disk."""
        carried, makers, written = set[int](), set[int](), False
        todo = [op]
        while todo:
            for a in todo.pop().args:
                writers = self.writers.get(a, ())
                makers.update(map(id, writers))
                written |= any(x.tiers != _WRITE and not x.is_wait for x in writers)
                maker = self.made.get(a)
                if maker is not None and self._comes_along(op, maker):
                    todo += [] if id(maker) in carried else [maker]
                    carried.add(id(maker))
                elif maker is not None:
                    makers.add(id(maker))
        return carried, makers, written

    def _comes_along(self, op: Instruction, maker: Instruction) -> bool:
        """Whether an argument of a transfer is computed only for it: from stored state, or by a gather over another
        axis."""
        if maker.op == "wait" and op.op == self.made[maker.args[0]].op == _GATHER:
            return True
        carried = maker.op in _CARRIED or maker.of_codes
        return carried and not maker.writes and _from_state(maker, self.made, self.state)


def _outside_blocks(ops: Sequence[Instruction]) -> set[int]:
    """Returns the calls between blocks that read gathered parameters."""
    fetches = {v.name for x in ops if x.op in (_GATHER, _COPY) for v in x.out}
    fetched = {v.name for x in ops if x.is_wait and x.args[0] in fetches for v in x.out}
    calls = (x for x in ops if x.fn and not x.writes and not x.of_codes and x.segment.index == 0)
    return {id(x) for x in calls if not fetched.isdisjoint(x.args)}


def _readers(ops: Sequence[Instruction]) -> dict[str, Instruction]:
    """Returns, for each transfer, the first op that reads its result, directly or after further transfers."""
    started = {x.args[0]: x.out for x in ops if x.is_wait}
    first: dict[str, Instruction] = {}
    for op in ops:
        for a in op.args:
            first.setdefault(a, op)

    def reader(name: str) -> Instruction | None:
        op = first.get(name)
        while op is not None and (op.op in (_GATHER, *_CARRIED) or op.of_codes):
            made = started.get(op.out[0].name, ()) if op.op in (_GATHER, _COPY) and op.out else op.out
            op = next((first[v.name] for v in made if v.name in first), None)
        return op

    found = {
        handle: next((r for v in out if (r := reader(v.name)) is not None), None) for handle, out in started.items()
    }
    return {handle: op for handle, op in found.items() if op is not None}


def _from_state(op: Instruction, made: Mapping[str, Instruction], state: set[str]) -> bool:
    """Whether all values that an op reads are stored state or copies of it, except for the scale of a cast."""
    args = op.args[:1] if op.op == "cast" else op.args
    carried = lambda x: x.op in _CARRIED or x.of_codes  # noqa: E731
    return all(a in state or (a in made and carried(made[a]) and _from_state(made[a], made, state)) for a in args)


class _Sinking:
    """Delays each wait until its first reader.

    The wait of a reduction, a store or a copy to the host, whose buffers nobody reads, is delayed by at most one block:
    from its current position or, for copies to the host, from its start. An update counts as such a block too, but not
    for copies to the host; and an update on the host does not count for values that the device stores, which continues
    meanwhile.
    """

    def __init__(self, ops: Sequence[Instruction], late_sums: bool):
        self.ops, self.waits = ops, {x.args[0]: x for x in ops if x.is_wait}
        self.sums = _sums(ops, self.waits, late_sums)
        self.onward = _onward(ops, self.waits, self.sums)
        away = {x.out[0].name: x for x in ops if x.tiers == _TO_HOST}
        self.leaving = {handle for handle, x in away.items() if not x.writes}
        reduced = {x.out[0].name for x in ops if _is_reduction(x) or (x.tiers and x.writes)}
        self.reduced = reduced | {*away, *self.onward}
        # the transfers for which an update counts as a block; for an update on the host: `kept`
        self.here = self.reduced - self.leaving
        self.kept = self.reduced - {*away}
        self.written = {x.out[0].name: {*x.writes} for x in ops if x.tiers == _WRITE}
        self.staying = {x.out[0].name for x in ops if x.op == "send_start"}
        self.left: dict[str, int] = {}  # by pending transfer: the number of blocks that may still run before its wait
        self.out: list[Instruction] = []

    def run(self) -> list[Instruction]:
        """Returns the ops in their new order."""
        # these are placed together with the wait before them
        further = {id(x) for start in self.onward.values() for x in (start, self.waits[start.out[0].name])}
        further.update(id(x) for added in self.sums.values() for x in added)
        for op in self.ops:
            if id(op) in further:
                continue
            if op.is_wait and op.args[0] not in self.staying:
                if op.args[0] not in self.leaving:
                    self.left[op.args[0]] = 1
                continue
            self._pass(op)
            self.out.append(op)
            if op.out and op.out[0].name in self.leaving:
                self.left[op.out[0].name] = 1
        # Not a loop over the dictionary, because a wait may add a transfer to it.
        while self.left:
            self._wait(next(iter(self.left)))
        return self.out

    def _pass(self, op: Instruction) -> None:
        """Adds the waits that must come before an op, and counts the op as a block for the other transfers."""
        counted, done = self._counted(op), self._done(op)
        # Again until none is due, because a wait may start a further transfer that is due too.
        while due := [
            handle
            for handle, left in self.left.items()
            if self._reads(op, handle) or (left == 0 and handle in counted) or handle in done
        ]:
            for handle in due:
                self._wait(handle)
        for handle in self.left:
            self.left[handle] -= handle in counted

    def _wait(self, handle: str) -> None:
        del self.left[handle]
        self.out += [self.waits[handle], *self.sums.get(handle, ())]
        if (start := self.onward.get(handle)) is not None:
            self.out.append(start)
            self.left[start.out[0].name] = 1

    def _counted(self, op: Instruction) -> set[str]:
        """Returns the transfers for which an op counts as a block."""
        if op.begins_block and not repeats(op):
            return self.reduced
        return set() if not _is_update(op) else self.kept if op.on_host else self.here

    def _done(self, op: Instruction) -> set[str]:
        """Returns the transfers that must end before an op that does not read their results: writes end before ops that
        read old values, and writes to disk before the next read of the same tensors."""
        if op.tiers == _READ:
            return {handle for handle, leaves in self.written.items() if not leaves.isdisjoint(op.args)}
        return self.reduced if op.op == Rollback.name else set()

    def _reads(self, op: Instruction, handle: str) -> bool:
        """Whether an op reads the result of a transfer, unchanged or reduced further."""
        start = self.onward.get(handle)
        brings = (self.waits[handle], *self.sums.get(handle, ()))
        return any(_reads(op, x) for x in brings) or (start is not None and self._reads(op, start.out[0].name))


def _leafwise(ops: Sequence[Instruction]) -> list[Instruction]:
    """Splits each reduction into one per parameter, each of which is waited for before the next gradient is cast."""
    waits, readers = {x.args[0]: x for x in ops if x.is_wait}, _every_reader(ops)
    casts = {x.out[0].name: x for x in ops if x.op == "cast" and len(x.out) == 1}
    new: dict[int, list[Instruction]] = {}
    for start in (x for x in ops if x.op == _SCATTER):
        handle = start.out[0]
        wait = waits[handle.name]
        new[id(start)] = made = []
        new[id(wait)] = []
        for k, (name, value) in enumerate(zip(start.args, wait.out, strict=True)):
            own = handle if k == 0 else replace(handle, name=f"{handle.name}_{k}")
            if name in casts and readers[name] == [start]:
                made.append(casts[name])
                new[id(casts[name])] = []
            made.append(replace(start, args=(name,), out=(own,)))
            made.append(replace(wait, args=(own.name,), out=(value,)))
    return [y for x in ops for y in new.get(id(x), [x])]


def _every_reader(ops: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """Returns, for each name, the ops that read it, directly or in their bodies."""
    readers: dict[str, list[Instruction]] = {}
    for op in ops:
        for a in (*op.args, *(a for x in op.body for a in x.args)):
            readers.setdefault(a, []).append(op)
    return readers


def _is_reduction(op: Instruction) -> bool:
    """Whether a transfer reduces to shards: its wait returns shards of a sum, or encoded summands."""
    return op.op == _SCATTER or (op.op == _DEAL and op.by == "compress")


def _sums(ops: Sequence[Instruction], waits: Mapping[str, Instruction], late: bool) -> dict[str, list[Instruction]]:
    """Returns, for each reduction, the ops that are placed together with its wait.

    These are calls that decode and add up summands, encode their sum for a further transfer, or decode it. Ops that add
    its results to totals are included if they are to be `late` and no other op reads these results.
    """
    readers, found = _every_reader(ops), dict[str, list[Instruction]]()
    summed = {x.out[0].name for x in ops if x.by == "compress" and x.op in (_DEAL, _GATHER)}
    for handle in (x.out[0].name for x in ops if _is_reduction(x) or (x.out and x.out[0].name in summed)):
        along, brought = _decoding([v.name for v in waits[handle].out], readers)
        added = [x for a in brought for x in readers.get(a, [])]
        if late and added and all(x.op == "accumulate" for x in added):
            along += added
        if along:
            found[handle] = along
    return found


def _decoding(brought: list[str], readers: Mapping[str, Sequence[Instruction]]) -> tuple[list[Instruction], list[str]]:
    """Returns the calls that decode these values, add them up and encode the sums, and the values they result in."""
    along = list[Instruction]()
    while True:
        reading = {id(x): x for a in brought for x in readers.get(a, [])}
        calls = [x for x in reading.values() if x.of_codes and {*x.args} <= {*brought}]
        if not calls:
            return along, brought
        along += calls
        brought = [v.name for x in calls for v in x.out]


def _onward(
    ops: Sequence[Instruction], waits: Mapping[str, Instruction], sums: Mapping[str, Sequence[Instruction]]
) -> dict[str, Instruction]:
    """Returns, for each reduction, the transfer that sends all its results further, over the next axis or as an encoded
    sum, if nothing else reads them. It starts when the first one is waited for, which delays no block."""
    readers, found = _every_reader(ops), {}
    for start in (x for x in ops if x.op in COLLECTIVES and (x.op != _GATHER or x.by == "compress")):
        handle = start.out[0].name
        last = (sums.get(handle) or [waits[handle]])[-1]
        brought = [v.name for v in last.out]
        next_ = {id(x): x for a in brought for x in readers.get(a, [])}
        if len(next_) != 1:
            continue
        (op,) = next_.values()
        # Values that another stage waits for are sent at once, because a block later may be too late.
        if op.op in COLLECTIVES and not isinstance(op.attrs, SendAttrs) and [*op.args] == brought:
            found[handle] = op
    return found


def _pair_updates(ops: Sequence[Instruction]) -> list[Instruction]:
    """Orders the gathers of new parameters after an update: each is assigned while the next one is in flight, so that
    two blocks' parameters are live instead of all."""
    targets = {a: x for x in ops if isinstance(x.attrs, AssignAttrs) for a in x.args[len(x.writes) :]}
    waits = {x.args[0]: x for x in ops if x.is_wait and all(v.name in targets for v in x.out)}
    starts = [x for x in ops if x.op == _GATHER and x.out[0].name in waits]
    finish: dict[int, list[Instruction]] = {}  # start -> the ops directly after it
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        wait = waits[start.out[0].name]
        finish.setdefault(id(following), []).extend(
            [wait, *{id(x): x for v in wait.out for x in [targets[v.name]]}.values()]
        )
    moved = {id(x) for group in finish.values() for x in group}
    out: list[Instruction] = []
    for op in ops:
        if id(op) not in moved:
            out.append(op)
            out += finish.get(id(op), []) if op.op == _GATHER else []
    return out + finish.get(id(None), [])


def _reads(op: Instruction, maker: Instruction) -> bool:
    names = {v.name for v in maker.out}
    return bool(names & set(op.args)) or any(_reads(x, maker) for x in op.body)
