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

from fzero.ir.attributes import AddAttrs, JoinAttrs, Over, ReduceAttrs, ScatterAttrs, TakeShardAttrs, UpdateAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.ops import STARTS
from fzero.ir.program import (
    MOVING,
    REPLICATED,
    Instruction,
    Placement,
    Program,
    Value,
    moving,
    repeats,
    stored_placement,
)
from fzero.ir.value_names import Names
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import Shard
from fzero.transforms import multi_axis_gather
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.transform import find
from fzero.transforms.zero_placement import Zero


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


class _Rewrite:
    """The rewrite of one program: visits its ops in order, gives each value its placement, and inserts gathers before
    ops that read sharded parameters, and reductions after the last gradient of each block."""

    def __init__(self, program: Program, options: ShardOptions):
        zero, secondary_shard = options.zero, options.secondary_shard
        self.program, self.zero, self.full_grads, self.cast_once = program, zero, options.full_grads, options.cast_once
        blocks = sorted(
            {self._owner(x.path) for x in program.leaves.values() if x.role in ("params", "compute") and x.layout.axes}
        )
        # blocks whose parameters are gathered once per step over a slow axis
        # Counted from the front, because `blocks[-n:]` would be all blocks if n is 0.
        self.staying = {*blocks[len(blocks) - round(secondary_shard * len(blocks)) :]}
        self.names, self.values = Names(program.values()), program.values()
        kept = {op.fn for op, _ in program.walk()}
        self.functions = Functions({name: f for name, f in program.functions.items() if name in kept})
        self.placement: dict[str, Placement] = {}
        # name of a sharded parameter, or of its cast -> the parameter and the cast
        self.leaf_of: dict[str, tuple[str, Instruction | None]] = {}
        self.kept: dict[str, str] = {}  # copies that are gathered once per step
        self.renamed: dict[str, str] = {}  # partial value -> its reduction
        self.shared: dict[str, str] = {}  # gathered copies that an op and its repetitions for other micro-batches read
        # with a pipeline: "step" if parameters stay gathered until their last micro-batch, "micro" if they are gathered
        # for each
        self.gathers = pipeline.gather if (pipeline := find(program.transforms, Pipeline)) else ""
        names = (
            [max(zero.specs, key=lambda r: r.stage).name] if zero.specs else [spec.name for spec in zero.dim_shardings]
        )
        self.by = names[0] if names else ""
        self.batch_placement = Placement("varying", zero.batch_axes) if zero.batch_axes else REPLICATED
        self.varying: set[str] = set()  # values that differ between ranks along a batch axis
        # by handle of a collective: the axes over which its results are the same on all ranks
        self.brought: dict[str, Sequence[str]] = {}
        # For a subgraph in segments: the values they read, and the names gathered for the first segment, by
        # micro-batch.
        self.reads_of: dict[int, dict[str, None]] = defaultdict(dict)
        self.gathered_for: dict[tuple[int, tuple[int, int] | None], dict[str, str]] = {}
        for op, _ in program.walk():
            if op.segment.count > 1:
                self.reads_of[op.segment.of].update(dict.fromkeys(op.args))
        self._name_sums()

    def _name_sums(self) -> None:
        """Collects gradients and sums by the names under which the backward makes them, and their totals over a
        loop."""
        program, update = self.program, self.program.update
        self.totals = {x.args[0]: x.out[0].name for x, _ in program.walk() if x.op == "accumulate"}
        summand: dict[str, str] = {total: name for name, total in self.totals.items()}
        self.grads = {summand.get(g, g): leaf for leaf, g in program.grads.items()}
        self.param_of = {**self.grads, **{self.totals[g]: leaf for g, leaf in self.grads.items() if g in self.totals}}
        self.added = {a for x in program.instructions if x.op == "add" for a in x.args}
        self.of_maxima = {
            a
            for x in program.instructions
            if isinstance(x.attrs, AddAttrs) and x.attrs.reduction == "max"
            for a in x.args
        }
        self.sums = [summand.get(s, s) for s in (program.sums if update is None else update.attrs.sums)]
        # sums that the backward waits for, each reduced separately
        ahead = (
            {summand.get(a, a) for x in program.instructions if x.of_sums for a in x.args}
            if update is not None
            else set()
        )
        self.ahead = ahead.intersection(self.sums)
        self.maxima: list[str] = [] if update is None else [str(summand.get(m, m)) for m in update.attrs.maxima]

    def run(self) -> Program:
        inputs = []
        for value in self.program.inputs:
            leaf = self.program.leaves.get(value.name)
            placement = self.batch_placement if leaf is None else stored_placement(leaf.layout)
            self.placement[value.name] = placement
            self.varying |= {value.name} if leaf is None else set()
            inputs.append(replace(value, placement=placement))
            if leaf is not None and leaf.role in ("params", "compute") and leaf.layout.axes:
                self.leaf_of[value.name] = (value.name, None)
        ops = self._rewrite_ops(self.program.instructions)
        outputs = tuple(self.renamed.get(o, o) for o in self.program.outputs)
        grads = {leaf: self.renamed.get(g, g) for leaf, g in self.program.grads.items()}
        functions = self.functions.by_name
        return replace(
            self.program,
            inputs=tuple(inputs),
            instructions=tuple(ops),
            outputs=outputs,
            functions=functions,
            grads=grads,
        )

    def _rewrite_ops(self, ops: Sequence[Instruction]) -> list[Instruction]:
        """Returns these ops, sharded, with the gathers and reductions that they need."""
        out: list[Instruction] = []
        # gradients that are reduced together: those of one block
        together = {g: self._owner(leaf) for g, leaf in self.grads.items()}
        awaited = Counter(together.values())  # gradients that each still lacks
        ready: dict[int, list[str]] = defaultdict(list)
        sums: list[str] = []
        for op in ops:
            if op.op == "cast" and op.args[0] in self.leaf_of and op.out[0].name not in self.sums and op.micro is None:
                # cast as a shard, before its gather
                self.leaf_of[op.out[0].name] = (op.args[0], op)
            elif op.op == "accumulate":
                continue  # placed with the gradient or the sum it adds
            elif op.op == "loop":
                # Gathered before the loop, once per step instead of in every iteration.
                out += self._keep((a for x in op.body for a in x.args), self.cast_once)
                out.append(replace(op, body=tuple(self._rewrite_ops(op.body))))
                out += self._after_loop({x.args[0] for x in op.body if x.op == "accumulate"})
            elif op.op == "update":
                out += self._update(op)
            else:
                if op.of_sums:  # all values that it reads are reduced, so its results are the same on every rank
                    made = tuple(replace(v, placement=REPLICATED) for v in op.out)
                    op = replace(op.rename(self.renamed), out=made)
                new, gathers = self._reads(op)
                out += [*gathers, self._placed(new)]
                for value in op.out:
                    if value.name in self.grads:
                        owner = together[value.name]
                        ready[owner].append(value.name)
                        awaited[owner] -= 1
                        if not awaited[owner]:
                            out += self._reduce_block(ready.pop(owner))
                    if value.name in self.ahead:
                        out += self._reduce_sums([value.name])
                    elif value.name in self.sums:
                        sums.append(value.name)
                        if len(sums) == len(self.sums) - len(self.ahead):
                            out += self._reduce_sums(sums)
                    if value.name in self.maxima:
                        out += self._reduce_sums([value.name], "max")
        return out

    def _param(self, name: str) -> Leaf:
        """Returns the parameter that a value is a shard or a cast of."""
        return self.program.leaves[self.program.leaves[self.leaf_of[name][0]].master]

    def _owner(self, leaf: str) -> int:
        return self.program.owners.get(leaf, -1)

    # --- reads of parameters ---

    def _reads(self, op: Instruction) -> tuple[Instruction, list[Instruction]]:
        """Returns the op with the gathered values of the sharded parameters that it reads, and the ops that gather
        them."""
        part, micro = op.segment.of, op.micro if self.gathers == "micro" else None
        if (part, micro) in self.gathered_for:
            return op.rename(self.gathered_for[part, micro]), []
        wanted = [a for a in (self.reads_of.get(part) or dict.fromkeys(op.args)) if a in self.leaf_of]
        ops = self._keep(wanted)
        names = {a: self.kept.get(a, a) for a in wanted}
        fresh = [a for a in wanted if a not in self.kept or self.placement[self.kept[a]] != REPLICATED]
        if repeats(op) and self.gathers != "micro":
            return op.rename({**names, **{a: self.shared[a] for a in fresh}}), ops
        gathered, more = self._gather({a: names[a] for a in fresh}, {a: self._computed(a) for a in fresh})
        for a, name in gathered.items():
            if self.placement[name].is_flat_shard:
                gathered[a], tensor = self._unflatten(a, name)
                more.append(tensor)
        if part in self.reads_of:
            self.gathered_for[part, micro] = {**names, **gathered}
        # Ops that read no parameters, such as casts of gradients between two repetitions of an op,
        # keep the copies for the next repetition.
        self.shared = gathered or self.shared
        return op.rename({**names, **gathered}), ops + more

    def _computed(self, name: str) -> tuple[str, ...]:
        """The axes over which a parameter is still sharded when subgraphs read it."""
        layout = self._param(name).layout
        return tuple(a for a in layout.axes[: len(layout.dims)] if a in self.zero.computed)

    def _unflatten(self, name: str, shard: str) -> tuple[str, Instruction]:
        """Reshapes the flat shard of a parameter to the tensor that subgraphs read. Returns its name and the op."""
        at = self.placement[shard]
        dim_shards = tuple(zip(at.axes, at.dims, strict=True))
        value = replace(self.values[name], name=self.names(self.names.stem(self.leaf_of[name][0])))
        value = replace(value, placement=Placement(dim_shards=dim_shards))
        self.placement[value.name] = value.placement
        return value.name, Instruction("reshape", (shard,), (value,), by=self.by)

    def _keep(self, args: Iterable[str], cast: Collection[str] = ()) -> list[Instruction]:
        """Gathers parameters once per step, as far as they stay gathered until its end. `cast`: parameters that are
        only cast once, even if they do not stay gathered."""
        groups: dict[int, list[str]] = defaultdict(list)
        for a in (a for a in dict.fromkeys(args) if a in self.leaf_of and a not in self.kept):
            path, by = self.leaf_of[a]
            casts = path in cast and by is not None
            if casts or self.placement[path].axes != self._stays(a):
                groups[self._owner(path)].append(a)
        ops: list[Instruction] = []
        for group in groups.values():
            names, more = self._gather({a: a for a in group}, {a: self._stays(a) for a in group})
            self.kept.update(names)
            ops += more
        return ops

    def _stays(self, name: str) -> tuple[str, ...]:
        """The axes over which a parameter is still sharded in the form that is kept until the end of the step."""
        if self.gathers == "step":  # forwards and backwards of micro-batches alternate
            return self._computed(name)
        staying = self._owner(self.leaf_of[name][0]) in self.staying
        return (self.zero.stays if staying else self.zero.params)(self._param(name))

    def _gather(
        self, sources: Mapping[str, str], to: Mapping[str, tuple[str, ...]] | None = None
    ) -> tuple[dict[str, str], list[Instruction]]:
        """Returns the names of gathered parameters, and the ops that gather them, one axis after the other.

        Args:
            sources: for each name that ops read, its source: the parameter itself, or a shard that is gathered as far
                as it stays gathered.
            to: the axes that still shard each one afterwards; by default none.
        """
        ops, now = [], dict[str, Value]()
        for a, source in sources.items():
            path, cast = self.leaf_of[a]
            name = path if source == a else source
            now[a] = Value(name, self.values[a].shape, self.values[a].dtype, self.placement[name])
            if cast is not None and source == a:
                now[a] = replace(now[a], name=self.names(f"{self.names.stem(path)}_shard"))
                self.placement[now[a].name] = now[a].placement
                ops.append(replace(cast, out=(now[a],)))
        gathered, more = self._hops(now, to or {}, lambda a: self.names.stem(self.leaf_of[a][0]))
        return {a: v.name for a, v in gathered.items()}, ops + more

    def _hops(
        self, values: Mapping[str, Value], to: Mapping[str, tuple[str, ...]], named: Callable[[str], str]
    ) -> tuple[dict[str, Value], list[Instruction]]:
        """Gathers values, by any key, until only these axes shard them: over one axis after the other, all values of
        one axis in one transfer."""
        now, ops = multi_axis_gather.gathered(
            values, to, named, self.names, lambda: moving(self.names.numbered("gather")), self.by
        )
        self.placement.update((v.name, v.placement) for op in ops for v in op.out)
        return now, ops

    # --- gradients and sums ---

    def _placed(self, op: Instruction) -> Instruction:
        """Returns the op with the placements of its results: varying as soon as it reads any varying value."""
        of_batch = op.op == "rank_index" and not op.axes  # the index of the part of the batch
        local = of_batch or op.op == "take_part" or not self.varying.isdisjoint(op.args)
        if op.op in ("all_gather_start", "all_reduce_start"):
            self.brought[op.out[0].name] = op.axes
        brought = self.brought.get(op.args[0], ()) if op.op == "wait" else ()
        out = []
        for value in op.out:
            self.varying |= {value.name} if local else set()
            # along axes that shard or sum a value, it belongs to the samples of all ranks
            known = {*value.placement.partial, *(axis for axis, _ in value.placement.dim_shards), *brought}
            axes = tuple(a for a in self.zero.batch_axes if a not in known)
            summand = value.name in self.grads or value.name in (*self.sums, *self.maxima) or value.name in self.added
            by = "max" if value.name in self.maxima or value.name in self.of_maxima else "sum"
            if value.placement == MOVING:
                placement = MOVING
            elif summand and self.zero.batch_axes:
                placement = _both(Placement(partial=axes, by=by) if axes else REPLICATED, value.placement)
            else:
                placement = _both(Placement("varying", axes) if local and axes else REPLICATED, value.placement)
            self.placement[value.name] = placement
            out.append(replace(value, placement=placement))
        op = op.saying(axes=self.zero.batch_axes) if of_batch else op
        return replace(op, out=tuple(out))

    def _reduce_block(self, names: list[str]) -> list[Instruction]:
        """Returns the reduction of a block's gradients, directly after the last of them has been computed. In a loop,
        only gradients that must not be accumulated unsharded are reduced."""
        if not self.totals:
            return self._reduce(names)
        ops = self._scatter({n: self._adds_up(self.grads[n]) for n in names})
        return ops + [self._accumulate(self.renamed.pop(n, n), self.totals[n]) for n in names]

    def _adds_up(self, path: str) -> tuple[str, ...]:
        """The axes that shard a parameter's gradients while a loop accumulates them over micro-batches."""
        return () if self.full_grads else self.zero.grads(self.program.leaves[path])

    def _reduce_sums(self, names: Sequence[str], op: str = "sum") -> list[Instruction]:
        return (
            [self._accumulate(n, self.totals[n], op) for n in names] if self.totals else self._all_reduce(names, op=op)
        )

    def _accumulate(self, name: str, total: str, op: str = "sum") -> Instruction:
        self.placement[total] = self.placement[name]
        return Instruction(
            "accumulate",
            (name,),
            (replace(self.values[total], placement=self.placement[name]),),
            attrs=JoinAttrs(reduction=op),
            by="accumulate",
        )

    def _after_loop(self, added: Collection[str]) -> list[Instruction]:
        """Returns the remaining reductions of a loop's totals, which run once per step: sharded totals are reduced over
        the axes that do not shard them, the others over all axes."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name, path in self.grads.items():
            if name in added and self.placement[self.totals[name]].partial:
                groups[self._owner(path)].append(name)
        ops = self._all_reduce([self.totals[s] for s in self.sums if s in added]) + self._all_reduce(
            [self.totals[m] for m in self.maxima if m in added], op="max"
        )
        for names in groups.values():
            ops += self._reduce([self.totals[n] for n in names])
        return ops

    def _reduce(self, names: Sequence[str]) -> list[Instruction]:
        """Reduces gradients to the form that updates read: sharded like their optimizer state, and reduced over all
        axes."""
        finest = {n: self._finest(n) for n in names}
        ops = self._scatter(finest)
        return (
            ops
            + self._all_reduce([n for n in names if finest[n]])
            + self._all_reduce([n for n in names if not finest[n]])
        )

    def _finest(self, name: str) -> tuple[str, ...]:
        """The axes that shard a gradient, or its total over micro-batches, for the update."""
        return self.zero.opt_state(self._param_of(name))

    def _scatter(self, to: Mapping[str, tuple[str, ...]]) -> list[Instruction]:
        """Shards gradients over these axes, which also reduces them over these axes: one axis after the other, all
        values of one axis in one transfer."""
        ops, now = list[Instruction](), {n: self.renamed.get(n, n) for n in to}
        ops += [self._flatten(now, n) for n, axes in to.items() if axes and self.placement[now[n]].dim_shards]
        while left := [n for n, axes in to.items() if self.placement[now[n]].axes != axes]:
            sharded = {n: self.placement[now[n]].axes for n in left}
            axes = {n: to[n][len(sharded[n]) :][:1] for n in left}
            # the axes that an unsharded value is padded for; for a shard, its placement determines it
            padding = {n: () if sharded[n] or self._finest(n) == axes[n] else self._finest(n) for n in left}
            # Values that are sharded over the fewest axes come first: once they have caught up with
            # the others, all of them share the transfers over the remaining axes.
            nearest = min(left, key=lambda n: len(sharded[n]))
            axis, padded = axes[nearest], padding[nearest]
            here = [n for n in left if (axes[n], padding[n]) == (axis, padded)]
            for n in here:
                dims = self._param_of(n).layout.dims
                if len(sharded[n]) < len(dims):
                    ops.append(self._split(now, n, axis, self._finest(n), dims[: len(sharded[n]) + 1]))
            handle, arrives = moving(self.names.numbered("scatter")), STARTS["reduce_scatter_start"].arrives
            start = Instruction(
                "reduce_scatter_start",
                tuple(now[n] for n in here),
                (handle,),
                attrs=ScatterAttrs(axes=axis, reduction="sum", grid=padded),
                by=self.by,
            )
            for n in here:
                value = replace(
                    self.values[now[n]], name=self.names(f"{n}_shard"), placement=arrives(start, self.placement[now[n]])
                )
                self.placement[value.name], self.values[value.name], now[n] = value.placement, value, value.name
            ops += [start, Instruction("wait", (handle.name,), tuple(self.values[now[n]] for n in here), by=self.by)]
        self.renamed.update((n, name) for n, name in now.items() if name != n)
        return ops

    def _flatten(self, now: dict[str, str], grad: str) -> Instruction:
        """Flattens the gradient of a shard along dims to the flat shard in which it is stored."""
        at, value = self.placement[now[grad]], self.values[now[grad]]
        axes, dims = zip(*at.dim_shards, strict=True)
        flat = Placement("shard", axes, at.partial, at.by, self._finest(grad), dims)
        shard = replace(value, name=self.names(f"{grad}_flat"), placement=flat)
        op = Instruction("reshape", (now[grad],), (shard,), by=self.by)
        now[grad], self.placement[shard.name], self.values[shard.name] = shard.name, flat, shard
        return op

    def _param_of(self, grad: str) -> Leaf:
        return self.program.leaves[self.param_of[grad]]

    def _split(
        self, now: dict[str, str], grad: str, axis: tuple[str, ...], grid: tuple[str, ...], dims: tuple[Shard, ...]
    ) -> Instruction:
        """Arranges a gradient as permuted shards: the parts into which an axis divides it along a dim."""
        source, value = self.placement[now[grad]], self.values[now[grad]]
        placement = replace(source, kind="permuted", axes=(*source.axes, *axis), grid=source.grid or grid, dims=dims)
        parts = replace(value, name=self.names(f"{grad}_parts"), placement=placement)
        op = Instruction("split_parts", (now[grad],), (parts,), attrs=Over(axes=axis), by=self.by)
        now[grad], self.placement[parts.name], self.values[parts.name] = parts.name, placement, parts
        return op

    def _all_reduce(self, names: Sequence[str], op: str = "sum") -> list[Instruction]:
        """Returns the reductions of values over all axes over which they are partial."""
        ops, now = list[Instruction](), {n: self.renamed.get(n, n) for n in names}
        base = dict(now)
        for axis in (*self.zero.batch_axes, *self.zero.computed):
            here = [n for n in names if axis in self.placement[now[n]].partial]
            if not here:
                continue
            placed = next((spec.name for spec in self.zero.dim_shardings if spec.axis == axis), "data_parallel")
            handle, arrives = moving(self.names.numbered("reduce")), STARTS["all_reduce_start"].arrives
            start = Instruction(
                "all_reduce_start",
                tuple(now[n] for n in here),
                (handle,),
                attrs=ReduceAttrs(axes=(axis,), reduction=op),
                by=placed,
            )
            for n in here:
                placement = arrives(start, self.placement[now[n]])
                name = self.names(f"{base[n]}_sum")
                value = replace(self.values[now[n]], name=name, placement=placement)
                self.placement[name], self.values[name], now[n] = placement, value, name
            ops += [start, Instruction("wait", (handle.name,), tuple(self.values[now[n]] for n in here), by=placed)]
        self.renamed.update((n, name) for n, name in now.items() if name != n)
        return ops

    # --- the update ---

    def _update(self, op: Instruction) -> list[Instruction]:
        """Returns the update on shards and, if parameters are stored unsharded, the gathers of their new values."""
        before, rename, aliases = [], dict(self.renamed), dict[str, str]()
        # by block and number of axes: the values that are gathered together
        groups: dict[tuple[int, int], dict[str, Value]] = defaultdict(dict)
        for path in op.args:
            leaf = self.program.leaves.get(path)
            if (
                leaf is not None
                and leaf.role == "params"
                and (more := self.zero.opt_state(leaf)[len(leaf.layout.axes) :])
            ):
                value = Value(
                    self.names(f"{self.names.stem(path)}_shard"),
                    leaf.shape,
                    leaf.dtype,
                    self.placement[path].with_shard(more),
                )
                before.append(Instruction("take_shard", (path,), (value,), attrs=TakeShardAttrs(axes=more), by=self.by))
                rename[path] = value.name
                aliases[value.name] = path
                if path in op.writes:
                    groups[self._owner(path), len(leaf.layout.axes)][path] = value
        said = op.says(UpdateAttrs)
        sums, maxima = (tuple(self.renamed.get(a, a) for a in names) for names in (said.sums, said.maxima))
        update = op.rename(rename).saying(sums=sums, maxima=maxima, leaf=aliases)
        out = [*before, replace(update, writes=tuple(rename.get(w, w) for w in op.writes))]
        for paths in groups.values():
            values, ops = self._hops(
                paths, {p: self.program.leaves[p].layout.axes for p in paths}, lambda p: f"{self.names.stem(p)}_new"
            )
            out += [
                *ops,
                Instruction("assign", (*paths, *(values[p].name for p in paths)), writes=tuple(paths), by=self.by),
            ]
        return out


def _both(over_batch: Placement, computed: Placement) -> Placement:
    """Combines the placement of a value over the batch axes with that over axes along which subgraphs compute on
    shards."""
    if computed == REPLICATED:
        return over_batch
    assert not computed.partial or not over_batch.partial or computed.by == over_batch.by, (over_batch, computed)
    local = tuple(dict.fromkeys((*over_batch.axes, *(computed.axes if computed.kind == "varying" else ()))))
    return replace(
        over_batch,
        kind="varying" if local else over_batch.kind,
        axes=local,
        partial=tuple(dict.fromkeys((*over_batch.partial, *computed.partial))),
        by=computed.by if computed.partial else over_batch.by,
        dim_shards=computed.dim_shards,
    )
