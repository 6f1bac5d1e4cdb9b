"""Shards a program over the mesh, for every parallel transform: they all produce the same program, with more or fewer
tensors sharded.

The batch becomes varying (each rank has its own samples), so gradients and sums become partial, and every partial value
gets a reduction. A sharded parameter is gathered before each op that reads it and dropped afterwards; a sharded
gradient is reduced by a reduce_scatter, one for all parameters of a block. The optimizer's update reads and writes
shards.

[Note: hops] Values that are sharded over several axes are communicated over one axis after the other: a gather begins
with the axis that sharded last, a reduction with the one that sharded first. So over a slow axis, which shards last,
each rank sends only its part of a shard over the faster axes, and each byte crosses the slow axis once. There is a
separate number of axes over which a parameter is sharded while it is stored, while it is kept for a step, while its
gradients accumulate, and while it is updated. A parameter is gathered once per step as far as it stays gathered, and
the rest of the way around each reader. Gradients leave the backward sharded for accumulation; once per step they are
sharded further for the update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fzero.ir.attributes import (
    JoinAttrs,
    Over,
    ReduceAttrs,
    ScatterAttrs,
    TakeShardAttrs,
    UpdateAttrs,
)
from fzero.ir.from_graph import Functions
from fzero.ir.ops import STARTS
from fzero.ir.program import (
    Instruction,
    Program,
    Value,
    moving,
    repeats,
    stored_placement,
)
from fzero.ir.value_names import Names
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import IN_FLIGHT, REPLICATED, MeshPlacement, Partial, Shard, partial, varying
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.transform import find
from fzero.transforms.zero import Zero

K = TypeVar("K")


@dataclass(frozen=True)
class ShardOptions:
    """How a program is sharded over the ranks that have different samples.

    Attributes:
        zero: the sharding that the parallel transforms request.
        full_grads: whether unsharded gradients are accumulated over micro-batches, whatever the ZeRO stage, and
            reduced once per step.
        secondary_shard: the share of blocks, counted from the last, whose parameters stay gathered over the axis of
            `hierarchical`.
        cast_once: the parameters of which a loop over micro-batches gathers shards that were cast before the loop.
    """

    zero: Zero = field(compare=False)
    full_grads: bool = False
    secondary_shard: float = 0.0
    cast_once: tuple[str, ...] = ()


def rewrite(program: Program, options: ShardOptions) -> Program:
    """Shards a program over the mesh.

    Precondition: a base program whose micro-batches, if it has several, are a loop or repeated. No collective over the
    axes of the batch exists yet.
    """
    return _Rewrite(program, options).run()


# --- transfers over one axis after the other ---


def gathered(
    values: Mapping[K, Value],
    to: Mapping[K, tuple[str, ...]],
    named: Callable[[K], str],
    names: Names,
    handle: Callable[[], Value],
    by: str,
) -> tuple[dict[K, Value], list[Instruction]]:
    """Gathers values until they are sharded only over the given axes, and returns the values and the ops that gather
    them: see [Note: hops].

    Values that are gathered over the same axis are sent together.

    Args:
        values: the shards, by any key.
        to: the axes over which each value is still sharded afterwards; by default none.
        named: returns the name of a gathered value.
        names: the generator of unused names of the program.
        handle: makes the result of a start.
        by: the transform that inserts the ops.
    """
    now, ops = dict(values), list[Instruction]()

    def part_name(key: K, placement: MeshPlacement) -> str:
        part = f"{named(key)}_{'parts' if placement.is_permuted else 'part'}"
        return names(part if placement.flat_axes else named(key))

    while left := [key for key, v in now.items() if v.placement.flat_axes != to.get(key, ())]:
        # Values that are sharded over the most axes come first: the others join them at the axes that they have in
        # common.
        axis = max((now[key].placement.flat_axes for key in left), key=len)[-1:]
        here = [key for key in left if now[key].placement.flat_axes[-1:] == axis]
        ops += _transfer("all_gather_start", Over(axes=axis), now, here, part_name, handle(), by)
        for key in (key for key in here if now[key].placement.is_permuted):
            parts, placement = now[key], now[key].placement.gathered
            name = names(f"{named(key)}_part" if placement.flat_axes else named(key))
            now[key] = replace(parts, name=name, placement=placement)
            ops.append(Instruction("join_parts", (parts.name,), (now[key],), attrs=Over(axes=axis), by=by))
    return now, ops


def _transfer(
    op: str,
    attrs: Any,
    now: dict[K, Value],
    keys: Sequence[K],
    named: Callable[[K, MeshPlacement], str],
    handle: Value,
    by: str,
) -> list[Instruction]:
    """Returns a transfer of the values `now[key]`, and its wait; `now` then has the results. `named` returns their
    names, given their placements."""
    start = Instruction(op, tuple(now[key].name for key in keys), (handle,), attrs=attrs, by=by)
    for key in keys:
        placement = STARTS[op].arrives(start, now[key].placement)
        now[key] = replace(now[key], name=named(key, placement), placement=placement)
    return [start, Instruction("wait", (handle.name,), tuple(now[key] for key in keys), by=by)]


class _Values:
    """The values of a program, with the placements that they have been given so far.

    Attributes:
        by: the transform that inserts ops: the highest ZeRO stage.
    """

    def __init__(self, program: Program, zero: Zero):
        self.program, self.zero = program, zero
        self.by = max(zero.specs, key=lambda r: r.stage).name if zero.specs else ""
        if not zero.specs and zero.dim_shardings:
            self.by = zero.dim_shardings[0].name
        self.names, self.values = Names(program.values()), program.values()

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def at(self, name: str) -> MeshPlacement:
        return self.values[name].placement

    def put(self, value: Value) -> Value:
        self.values[value.name] = value
        return value

    def added(self, ops: list[Instruction]) -> list[Instruction]:
        """Returns the ops, whose results are noted."""
        self.values.update((v.name, v) for op in ops for v in op.out)
        return ops

    def owner(self, leaf: str) -> int:
        """The block that a parameter belongs to; -1 outside blocks."""
        return self.program.owners.get(leaf, -1)


# --- reads of parameters ---


class _Reads:
    """Gathers the sharded parameters that ops read."""

    def __init__(self, values: _Values, options: ShardOptions):
        program = values.program
        self.values, self.program, self.zero, self.cast_once = values, program, values.zero, options.cast_once
        computed = (x for x in program.leaves.values() if x.role in ("params", "compute") and x.layout.axes)
        # name of a sharded parameter, or of its cast -> the parameter and the cast
        self.leaf_of: dict[str, tuple[str, Instruction | None]] = {x.path: (x.path, None) for x in computed}
        blocks = sorted({values.owner(path) for path in self.leaf_of})
        # Blocks whose parameters are gathered once per step over a slow axis. Counted from the front, because
        # `blocks[-n:]` would be all blocks if n is 0.
        self.staying = {*blocks[len(blocks) - round(options.secondary_shard * len(blocks)) :]}
        self.kept: dict[str, str] = {}  # copies that are gathered once per step
        self.shared: dict[str, str] = {}  # gathered copies that an op and its repetitions for other micro-batches read
        # with a pipeline: "step" if parameters stay gathered until their last micro-batch, "micro" if they are gathered
        # for each
        self.gathers = pipeline.gather if (pipeline := find(program.transforms, Pipeline)) else ""
        # For a subgraph in segments: the values they read, and the names gathered for the first segment, by
        # micro-batch.
        self.reads_of: dict[int, dict[str, None]] = defaultdict(dict)
        self.gathered_for: dict[tuple[int, tuple[int, int] | None], dict[str, str]] = {}
        for op, _ in program.walk():
            if op.segment.count > 1:
                self.reads_of[op.segment.of].update(dict.fromkeys(op.args))

    def of(self, op: Instruction) -> tuple[Instruction, list[Instruction]]:
        """Returns the op with the gathered values of the sharded parameters that it reads, and the ops that gather
        them."""
        part, micro = op.segment.of, op.micro if self.gathers == "micro" else None
        if (part, micro) in self.gathered_for:
            return op.rename(self.gathered_for[part, micro]), []
        wanted = [a for a in (self.reads_of.get(part) or dict.fromkeys(op.args)) if a in self.leaf_of]
        ops = self.keep(wanted)
        names = {a: self.kept.get(a, a) for a in wanted}
        fresh = [a for a in wanted if a not in self.kept or self.values.at(self.kept[a]) != REPLICATED]
        if repeats(op) and self.gathers != "micro":
            return op.rename({**names, **{a: self.shared[a] for a in fresh}}), ops
        gathered, more = self._gather({a: names[a] for a in fresh}, {a: self._computed(a) for a in fresh})
        for a, name in gathered.items():
            if self.values.at(name).flat_axes:
                gathered[a], tensor = self._unflatten(a, name)
                more.append(tensor)
        if part in self.reads_of:
            self.gathered_for[part, micro] = {**names, **gathered}
        # Ops that read no parameters, such as casts of gradients between two repetitions of an op, keep the copies for
        # the next repetition.
        self.shared = gathered or self.shared
        return op.rename({**names, **gathered}), ops + more

    def keep(self, args: Iterable[str], cast: Collection[str] = ()) -> list[Instruction]:
        """Gathers parameters once per step, as far as they stay gathered until its end. `cast`: parameters that are
        only cast once, even if they do not stay gathered."""
        groups: dict[int, list[str]] = defaultdict(list)
        for a in (a for a in dict.fromkeys(args) if a in self.leaf_of and a not in self.kept):
            path, by = self.leaf_of[a]
            casts = path in cast and by is not None
            if casts or self.values.at(path).flat_axes != self._stays(a):
                groups[self.values.owner(path)].append(a)
        ops: list[Instruction] = []
        for group in groups.values():
            names, more = self._gather({a: a for a in group}, {a: self._stays(a) for a in group})
            self.kept.update(names)
            ops += more
        return ops

    def before_loop(self, loop: Instruction) -> list[Instruction]:
        """Gathers what a loop reads once per step, and not in every iteration."""
        return self.keep((a for x in loop.body for a in x.args), self.cast_once)

    def _param(self, name: str) -> Leaf:
        """Returns the parameter that a value is a shard or a cast of."""
        return self.program.leaves[self.program.leaves[self.leaf_of[name][0]].master]

    def _computed(self, name: str) -> tuple[str, ...]:
        """The axes over which a parameter is still sharded when subgraphs read it."""
        layout = self._param(name).layout
        return tuple(a for a in layout.axes[: len(layout.dims)] if a in self.zero.computed)

    def _stays(self, name: str) -> tuple[str, ...]:
        """The axes over which a parameter is still sharded in the form that is kept until the end of the step."""
        if self.gathers == "step":  # forwards and backwards of micro-batches alternate
            return self._computed(name)
        staying = self.values.owner(self.leaf_of[name][0]) in self.staying
        return (self.zero.stays if staying else self.zero.params)(self._param(name))

    def _unflatten(self, name: str, shard: str) -> tuple[str, Instruction]:
        """Reshapes the flat shard of a parameter to the tensor that subgraphs read. Returns its name and the op."""
        tensor_name = self.values.names(self.values.names.stem(self.leaf_of[name][0]))
        placement = self.values.at(shard).unflattened
        value = self.values.put(replace(self.values[name], name=tensor_name, placement=placement))
        return value.name, Instruction("reshape", (shard,), (value,), by=self.values.by)

    def _gather(
        self, sources: Mapping[str, str], to: Mapping[str, tuple[str, ...]]
    ) -> tuple[dict[str, str], list[Instruction]]:
        """Returns the names of gathered parameters, and the ops that gather them.

        Args:
            sources: for each name that ops read, its source: the parameter itself, or a shard that is gathered as far
                as it stays gathered.
            to: the axes that still shard each one afterwards.
        """
        ops, now = [], dict[str, Value]()
        for a, source in sources.items():
            path, cast = self.leaf_of[a]
            now[a] = self.values[path if source == a else source]
            if cast is not None and source == a:  # cast as a shard
                name = self.values.names(f"{self.values.names.stem(path)}_shard")
                now[a] = self.values.put(replace(self.values[a], name=name, placement=now[a].placement))
                ops.append(replace(cast, out=(now[a],)))
        found, more = self.hops(now, to, lambda a: self.values.names.stem(self.leaf_of[a][0]))
        return {a: v.name for a, v in found.items()}, ops + more

    def hops(
        self, values: Mapping[str, Value], to: Mapping[str, tuple[str, ...]], named: Callable[[str], str]
    ) -> tuple[dict[str, Value], list[Instruction]]:
        """Gathers values as `gathered` does."""
        names = self.values.names
        now, ops = gathered(values, to, named, names, lambda: moving(names.numbered("gather")), self.values.by)
        return now, self.values.added(ops)


# --- gradients and sums ---


class _Sums:
    """The gradients and sums of a program, by the names under which the backward makes them.

    Attributes:
        totals: the total of each over a loop.
        grads: the parameter of each gradient.
        param_of: likewise, also for totals.
        sums, maxima: the other values that are summed or maximized over ranks and micro-batches.
        ahead: the sums that the backward waits for, each reduced separately.
        summands: all of these, and the arguments of additions: values that are partial.
        largest: those that are maximized.
    """

    def __init__(self, program: Program):
        update = program.update
        self.totals = {x.args[0]: x.out[0].name for x, _ in program.walk() if x.op == "accumulate"}
        summand = {total: name for name, total in self.totals.items()}
        self.grads = {summand.get(g, g): leaf for leaf, g in program.grads.items()}
        self.param_of = {**self.grads, **{self.totals[g]: leaf for g, leaf in self.grads.items() if g in self.totals}}
        self.sums = [summand.get(s, s) for s in (program.sums if update is None else update.attrs.sums)]
        self.maxima = [] if update is None else [summand.get(m, m) for m in update.attrs.maxima]
        awaited = {summand.get(a, a) for x in program.instructions if x.of_sums for a in x.args}
        self.ahead = set() if update is None else awaited.intersection(self.sums)
        self.summands, self.largest = {*self.grads, *self.sums, *self.maxima}, {*self.maxima}
        for op in program.instructions:
            if op.op == "add":
                self.summands.update(op.args)
            if op.op == "add" and op.says(JoinAttrs).reduction == "max":
                self.largest.update(op.args)


@dataclass
class _Pending:
    """The gradients and sums among some ops that are still to be reduced.

    Attributes:
        awaited: for each block, the number of its gradients that have not been computed yet.
        ready: the gradients of each block that have been.
        sums: the sums that have been computed.
    """

    awaited: Counter[int]
    ready: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    sums: list[str] = field(default_factory=list)


class _Reductions:
    """Reduces gradients and sums.

    Attributes:
        renamed: the reduction of each partial value.
    """

    def __init__(self, values: _Values, full_grads: bool):
        self.values, self.zero, self.leaves = values, values.zero, values.program.leaves
        self.full_grads, self.of = full_grads, _Sums(values.program)
        self.renamed: dict[str, str] = {}

    def pending(self) -> _Pending:
        """Returns that no gradient and no sum has been computed."""
        return _Pending(Counter(map(self.values.owner, self.of.grads.values())))

    def after(self, name: str, pending: _Pending) -> list[Instruction]:
        """Returns the reductions that follow the op that computes a value: those of a block's gradients after the last
        of them, and that of all sums after the last of them."""
        ops, of = list[Instruction](), self.of
        if name in of.grads:
            owner = self.values.owner(of.grads[name])
            pending.ready[owner].append(name)
            pending.awaited[owner] -= 1
            if not pending.awaited[owner]:
                ops += self._reduce_block(pending.ready.pop(owner))
        if name in of.ahead:
            ops += self._reduce_sums([name])
        elif name in of.sums:
            pending.sums.append(name)
            if len(pending.sums) == len(of.sums) - len(of.ahead):
                ops += self._reduce_sums(pending.sums)
        if name in of.maxima:
            ops += self._reduce_sums([name], "max")
        return ops

    def after_loop(self, added: Collection[str]) -> list[Instruction]:
        """Returns the remaining reductions of a loop's totals, which run once per step: sharded totals are reduced over
        the axes that do not shard them, the others over all axes."""
        groups, totals = defaultdict[int, list[str]](list), self.of.totals
        for name, path in self.of.grads.items():
            if name in added and self.values.at(totals[name]).partial:
                groups[self.values.owner(path)].append(totals[name])
        ops = self._all_reduce([totals[s] for s in self.of.sums if s in added])
        ops += self._all_reduce([totals[m] for m in self.of.maxima if m in added], "max")
        return ops + [op for names in groups.values() for op in self._reduce(names)]

    def _reduce_block(self, names: list[str]) -> list[Instruction]:
        """Returns the reduction of a block's gradients. In a loop, only gradients that must not be accumulated
        unsharded are reduced."""
        if not self.of.totals:
            return self._reduce(names)
        # the axes that shard a parameter's gradients while a loop accumulates them over micro-batches
        leaves = {n: self.leaves[self.of.grads[n]] for n in names}
        ops = self._scatter({n: () if self.full_grads else self.zero.grads(leaf) for n, leaf in leaves.items()})
        return ops + [self._accumulate(self.renamed.pop(n, n), self.of.totals[n]) for n in names]

    def _reduce_sums(self, names: Sequence[str], op: str = "sum") -> list[Instruction]:
        if not self.of.totals:
            return self._all_reduce(names, op)
        return [self._accumulate(n, self.of.totals[n], op) for n in names]

    def _accumulate(self, name: str, total: str, op: str = "sum") -> Instruction:
        value = self.values.put(replace(self.values[total], placement=self.values.at(name)))
        return Instruction("accumulate", (name,), (value,), attrs=JoinAttrs(reduction=op), by="accumulate")

    def _reduce(self, names: Sequence[str]) -> list[Instruction]:
        """Reduces gradients to the form that updates read: sharded like their optimizer state, and reduced over all
        axes."""
        finest = {n: self._finest(n) for n in names}
        ops = self._scatter(finest)
        ops += self._all_reduce([n for n in names if finest[n]])
        return ops + self._all_reduce([n for n in names if not finest[n]])

    def _param_of(self, grad: str) -> Leaf:
        return self.leaves[self.of.param_of[grad]]

    def _finest(self, name: str) -> tuple[str, ...]:
        """The axes that shard a gradient, or its total over micro-batches, for the update."""
        return self.zero.opt_state(self._param_of(name))

    def _scatter(self, to: Mapping[str, tuple[str, ...]]) -> list[Instruction]:
        """Shards gradients over these axes, which also reduces them over these axes: one axis after the other, all
        values of one axis in one transfer."""
        ops, now = list[Instruction](), {n: self.values[self.renamed.get(n, n)] for n in to}
        for n, axes in to.items():
            if axes and now[n].placement.dim_shards:
                ops.append(self._flatten(now, n))
        while left := [n for n, axes in to.items() if now[n].placement.flat_axes != axes]:
            sharded = {n: now[n].placement.flat_axes for n in left}
            axes = {n: to[n][len(sharded[n]) :][:1] for n in left}
            # the axes that an unsharded value is padded for; for a shard, its placement determines it
            padding = {n: () if sharded[n] or self._finest(n) == axes[n] else self._finest(n) for n in left}
            # Values that are sharded over the fewest axes come first: once they have caught up with the others, all of
            # them share the transfers over the remaining axes.
            nearest = min(left, key=lambda n: len(sharded[n]))
            axis, padded = axes[nearest], padding[nearest]
            here = [n for n in left if (axes[n], padding[n]) == (axis, padded)]
            ops += [self._split(now, n, axis) for n in here if len(sharded[n]) < len(self._param_of(n).layout.dims)]
            attrs, handle = ScatterAttrs(axes=axis, reduction="sum", grid=padded), self._handle("scatter")
            named = lambda n, _: self.values.names(f"{n}_shard")  # noqa: E731
            ops += _transfer("reduce_scatter_start", attrs, now, here, named, handle, self.values.by)
        return self._renamed(now, ops)

    def _renamed(self, now: Mapping[str, Value], ops: list[Instruction]) -> list[Instruction]:
        self.renamed.update((n, value.name) for n, value in now.items() if value.name != n)
        return self.values.added(ops)

    def _handle(self, name: str) -> Value:
        return moving(self.values.names.numbered(name))

    def _flatten(self, now: dict[str, Value], grad: str) -> Instruction:
        """Flattens the gradient of a shard along dims to the flat shard in which it is stored."""
        value, at = now[grad], now[grad].placement
        axes, dims = zip(*at.dim_shards, strict=True)
        flat = at.without(axes, Shard).sharded(axes, self._finest(grad), dims)
        now[grad] = replace(value, name=self.values.names(f"{grad}_flat"), placement=flat)
        return Instruction("reshape", (value.name,), (now[grad],), by=self.values.by)

    def _split(self, now: dict[str, Value], grad: str, axis: tuple[str, ...]) -> Instruction:
        """Arranges a gradient as permuted shards: the parts into which an axis divides it along a dim."""
        value, at = now[grad], now[grad].placement
        dims = self._param_of(grad).layout.dims[len(at.flat_axes) :][:1]
        permuted = at.sharded(axis, self._finest(grad), dims).permuted(True)
        now[grad] = replace(value, name=self.values.names(f"{grad}_parts"), placement=permuted)
        return Instruction("split_parts", (value.name,), (now[grad],), attrs=Over(axes=axis), by=self.values.by)

    def _all_reduce(self, names: Sequence[str], op: str = "sum") -> list[Instruction]:
        """Returns the reductions of values over all axes over which they are partial."""
        now = {n: self.values[self.renamed.get(n, n)] for n in names}
        ops, base = list[Instruction](), {n: value.name for n, value in now.items()}
        named = lambda n, _: self.values.names(f"{base[n]}_sum")  # noqa: E731
        for axis in (*self.zero.batch_axes, *self.zero.computed):
            if here := [n for n in names if axis in now[n].placement.partial]:
                by = next((spec.name for spec in self.zero.dim_shardings if spec.axis == axis), "data_parallel")
                attrs, handle = ReduceAttrs(axes=(axis,), reduction=op), self._handle("reduce")
                ops += _transfer("all_reduce_start", attrs, now, here, named, handle, by)
        return self._renamed(now, ops)


# --- the program ---


class _Rewrite:
    """The rewrite of one program: visits its ops in order, gives each value its placement, and inserts gathers before
    ops that read sharded parameters, and reductions after the last gradient of each block."""

    def __init__(self, program: Program, options: ShardOptions):
        zero = options.zero
        self.program, self.zero, self.values = program, zero, _Values(program, zero)
        self.reads = _Reads(self.values, options)
        self.reductions = _Reductions(self.values, options.full_grads)
        self.batch_placement = varying(zero.batch_axes)
        self.varying: set[str] = set()  # values that differ between ranks along a batch axis
        # by handle of a collective: the axes over which its results are the same on all ranks
        self.brought: dict[str, Sequence[str]] = {}

    def run(self) -> Program:
        for value in self.program.inputs:
            leaf = self.program.leaves.get(value.name)
            placement = self.batch_placement if leaf is None else stored_placement(leaf.layout)
            self.values.put(replace(value, placement=placement))
            self.varying |= {value.name} if leaf is None else set()
        kept = {op.fn for op, _ in self.program.walk()}
        functions = Functions({name: f for name, f in self.program.functions.items() if name in kept})
        ops = self._rewrite_ops(self.program.instructions)
        renamed = self.reductions.renamed
        return replace(
            self.program,
            inputs=tuple(self.values[v.name] for v in self.program.inputs),
            instructions=tuple(ops),
            outputs=tuple(renamed.get(o, o) for o in self.program.outputs),
            functions=functions.by_name,
            grads={leaf: renamed.get(g, g) for leaf, g in self.program.grads.items()},
        )

    def _rewrite_ops(self, ops: Sequence[Instruction]) -> list[Instruction]:
        """Returns these ops, sharded, with the gathers and reductions that they need."""
        pending = self.reductions.pending()
        return [new for op in ops for new in self._rewrite_op(op, pending)]

    def _rewrite_op(self, op: Instruction, pending: _Pending) -> list[Instruction]:
        leaf_of, sums = self.reads.leaf_of, self.reductions.of.sums
        if op.op == "cast" and op.args[0] in leaf_of and op.out[0].name not in sums and op.micro is None:
            leaf_of[op.out[0].name] = (op.args[0], op)  # cast as a shard, before its gather
            return []
        if op.op == "accumulate":
            return []  # placed with the gradient or the sum it adds
        if op.op == "loop":
            before = self.reads.before_loop(op)
            body = tuple(self._rewrite_ops(op.body))
            after = self.reductions.after_loop({x.args[0] for x in op.body if x.op == "accumulate"})
            return [*before, replace(op, body=body), *after]
        if op.op == "update":
            return self._update(op)
        if op.of_sums:  # all values that it reads are reduced, so its results are the same on every rank
            made = tuple(replace(v, placement=REPLICATED) for v in op.out)
            op = replace(op.rename(self.reductions.renamed), out=made)
        new, gathers = self.reads.of(op)
        placed = self._placed(new)
        return [*gathers, placed, *(x for v in op.out for x in self.reductions.after(v.name, pending))]

    def _placed(self, op: Instruction) -> Instruction:
        """Returns the op with the placements of its results: varying as soon as it reads any varying value."""
        of_batch = op.op == "rank_index" and not op.axes  # the index of the part of the batch
        local = of_batch or op.op == "take_part" or not self.varying.isdisjoint(op.args)
        if op.op in ("all_gather_start", "all_reduce_start"):
            self.brought[op.out[0].name] = op.axes
        brought = self.brought.get(op.args[0], ()) if op.op == "wait" else ()
        self.varying |= {v.name for v in op.out} if local else set()
        out = tuple(self.values.put(replace(v, placement=self._placement(v, local, brought))) for v in op.out)
        op = op.saying(axes=self.zero.batch_axes) if of_batch else op
        return replace(op, out=out)

    def _placement(self, value: Value, local: bool, brought: Sequence[str]) -> MeshPlacement:
        """Returns the placement of an op's result.

        Args:
            value: the result, with its placement along the axes along which subgraphs compute on shards.
            local: whether the op reads a varying value.
            brought: the axes over which it is the same on all ranks, because a collective along them has brought it.
        """
        of = self.reductions.of
        # along axes that shard or sum a value, it belongs to the samples of all ranks
        known = {*value.placement.over(Partial), *value.placement.over(Shard), *brought}
        axes = tuple(a for a in self.zero.batch_axes if a not in known)
        if value.placement == IN_FLIGHT:
            return IN_FLIGHT
        if value.name in of.summands and self.zero.batch_axes:
            by = "max" if value.name in of.largest else "sum"
            return _both(partial(axes, by), value.placement)
        return _both(varying(axes if local else ()), value.placement)

    def _update(self, op: Instruction) -> list[Instruction]:
        """Returns the update on shards and, if parameters are stored unsharded, the gathers of their new values."""
        renamed, names, by = self.reductions.renamed, self.values.names, self.values.by
        before, rename, aliases = list[Instruction](), dict(renamed), dict[str, str]()
        # by block and number of axes: the values that are gathered together
        groups: dict[tuple[int, int], dict[str, Value]] = defaultdict(dict)
        for leaf in (self.program.leaves[path] for path in op.args if path in self.program.leaves):
            more = self.zero.opt_state(leaf)[len(leaf.layout.axes) :] if leaf.role == "params" else ()
            if not more:
                continue
            path, placement = leaf.path, self.values.at(leaf.path).sharded(more)
            value = Value(names(f"{names.stem(path)}_shard"), leaf.shape, leaf.dtype, placement)
            before.append(Instruction("take_shard", (path,), (value,), attrs=TakeShardAttrs(axes=more), by=by))
            rename[path], aliases[value.name] = value.name, path
            if path in op.writes:
                groups[self.values.owner(path), len(leaf.layout.axes)][path] = value
        said = op.says(UpdateAttrs)
        sums, maxima = (tuple(renamed.get(a, a) for a in names) for names in (said.sums, said.maxima))
        update = op.rename(rename).saying(sums=sums, maxima=maxima, leaf=aliases)
        out = [*before, replace(update, writes=tuple(rename.get(w, w) for w in op.writes))]
        for paths in groups.values():
            stored = {path: self.program.leaves[path].layout.axes for path in paths}
            values, ops = self.reads.hops(paths, stored, lambda path: f"{names.stem(path)}_new")
            args = (*paths, *(values[path].name for path in paths))
            out += [*ops, Instruction("assign", args, writes=tuple(paths), by=by)]
        return out


def _both(over_batch: MeshPlacement, computed: MeshPlacement) -> MeshPlacement:
    """Combines the placement of a value over the batch axes with that over axes along which subgraphs compute on
    shards."""
    return replace(over_batch, axes=tuple(dict.fromkeys((*over_batch.axes, *computed.axes))))
