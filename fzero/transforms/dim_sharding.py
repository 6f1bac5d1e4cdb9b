"""Makes subgraphs compute on values that a mesh axis shards along a dim: the common part of tensor_parallel,
sequence_parallel and expert_parallel.

`DimSharding` is their common configuration. `rewrite` replaces each subgraph that reads shards. A subgraph is rewritten
once for each way in which its arguments are sharded (sharding/propagation.py), and partitioned into segments at its
collectives (sharding/collective_partitions.py). Each collective becomes an op between two segments. Gradients of
parameters that are not sharded, and sums, are left as partial values: they are reduced together with those over the
batch axes (transforms/zero_pass.py).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.fx as fx

from fzero._utils.arguments import amount
from fzero._utils.units import size
from fzero.errors import FzeroValueError
from fzero.ir.attributes import JoinAttrs, Over, RankIndexAttrs, ReduceAttrs, RowsAttrs, ScatterAttrs, UpdateAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.ops import COLLECTIVES, STARTS
from fzero.ir.program import Instruction, Program, Value, moving, with_segments
from fzero.ir.value_names import Names, call_name, operation_name
from fzero.mesh import AbstractMesh
from fzero.sharding import expert_propagation, propagation
from fzero.sharding.collective_partitions import CallStep, ExchangeStep, Segments, segments
from fzero.sharding.graph_writer import all_gather, all_reduce, all_to_all, all_to_all_v, reduce_scatter
from fzero.sharding.layout import Leaf
from fzero.sharding.operations import Attention
from fzero.sharding.placements import (
    REPLICATE,
    SUM,
    VARYING,
    ExpertShard,
    Partial,
    Placement,
    Replicate,
    Routed,
    Shard,
    Varying,
    local_shape,
    varying,
)
from fzero.sharding.propagation import EndPlacements
from fzero.sharding.sharded_graph import Exchanged, MadeWhole, OutputPlacement, ShardedGraph, Wanted
from fzero.trace.guards.user_frames import Place, line
from fzero.transforms.transform import Transform

if TYPE_CHECKING:
    from fzero.transforms.zero import Zero

MAX_REPLICATED_BYTES = 1 << 20


@dataclass(frozen=True)
class DimSharding(Transform):
    """A mesh axis over which values are sharded along a dim; every rank computes on its shards.

    An operation that every rank would compute on unsharded values of more than `max_replicated_bytes` is an error.
    """

    axis: str = ""
    max_replicated_bytes: int = MAX_REPLICATED_BYTES
    order: ClassVar[int] = 45
    shards_batch: ClassVar[bool] = False
    """Whether ranks along the axis have different samples of the batch; otherwise they have the same batch."""
    way_out: ClassVar[str] = ""
    """What a user can do about an operation that would be computed unsharded, other than allowing it."""

    @property
    def flops_axes(self) -> tuple[str, ...]:
        # Ranks with different samples do different work; ranks with the same samples share it.
        return () if self.shards_batch else (self.axis,)

    @property
    def stream(self) -> Shard | None:
        """The dim along which values that pass between blocks are sharded; None if they are not."""
        return None

    @property
    def routed_rows(self) -> float | None:
        """The number of rows without a capacity that a rank has memory for, as a multiple of those that it sends; None
        if it has memory for all that it can receive."""
        return None

    @property
    def attention(self) -> Attention | None:
        """How attention computes if queries, keys and values are sharded by position; None if they are not."""
        return None

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, DimSharding) and type(other) is not type(self) and other.axis == self.axis:
            return f"{self.name} and {other.name} both shard along {self.axis!r}: let one of them name another axis"
        return super().conflict(other)

    def sharded_dim(self, leaf: Leaf) -> Shard | None:
        """The dim along which a parameter is sharded; None if it is not."""
        return None

    def dims(self, leaf: Leaf, mesh: AbstractMesh) -> Mapping[str, Shard]:
        dim = self.sharded_dim(leaf)
        return {} if dim is None else {self.axis: dim}

    def check_passing(self, shapes: Sequence[Sequence[int]], n: int) -> None:
        """Raises if values of these shapes, which pass between blocks, cannot be sharded over n ranks in this way."""

    def check(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Raises if the parameters cannot be sharded in this way."""

    def shown(self, *arguments: str) -> str:
        """The text of a configuration with these arguments, besides the axis and `max_replicated_bytes`."""
        most = self.max_replicated_bytes
        said = [] if most == MAX_REPLICATED_BYTES else [f"max_replicated_bytes={size(most)!r}"]
        return f"{self.name}({', '.join([f'axis={self.axis!r}', *arguments, *said])})"


def problems_of(axis: Any, max_replicated_bytes: Any) -> list[str]:
    """Returns what is wrong with the arguments that the three transforms have in common."""
    problems = [] if isinstance(axis, str) and axis else [f"axis={axis!r}: a name of a mesh axis"]
    return problems + amount("max_replicated_bytes", max_replicated_bytes)


# --- the rewrite ---


_STARTS = {
    all_reduce: "all_reduce_start",
    all_gather: "all_gather_start",
    reduce_scatter: "reduce_scatter_start",
    all_to_all: "all_to_all_start",
    all_to_all_v: "all_to_all_v_start",
}
_HANDLES = {
    all_reduce: "reduce",
    all_gather: "gather",
    reduce_scatter: "scatter",
    all_to_all: "exchange",
    all_to_all_v: "exchange",
}
_ARRIVED = {
    all_reduce: "sum",
    all_gather: "gathered",
    reduce_scatter: "scattered",
    all_to_all: "exchanged",
    all_to_all_v: "exchanged",
}
"""The endings of the names of handles and of received values."""


@dataclass(frozen=True)
class DimShardings:
    """The sharding that the parallel transforms request."""

    zero: Zero = field(compare=False)


def rewrite(program: Program, options: DimShardings) -> Program:
    """Returns the program whose subgraphs compute on shards along a dim.

    Precondition: every rank computes the same values, or those of its samples of the batch.

    The axes are processed one after the other; the second axis shards the segments that the first one produced.

    Raises:
        FzeroValueError: every rank would have to compute operations on unsharded values of more bytes than the spec
            allows.
    """
    for spec in options.zero.dim_shardings:
        program = _ToParts(program, spec, options.zero).run()
    return program


def calls_on_parts(
    program: Program, spec: DimSharding, zero: Zero, known: dict[Any, ShardedGraph]
) -> Iterator[tuple[Instruction, ShardedGraph | None]]:
    """Yields the calls of a program, each with its sharded subgraph; None if the axis does not affect the call.

    Args:
        program: the program.
        spec: the transform that shards over the axis.
        zero: the sharding of parameters by all parallel transforms.
        known: a cache of sharded subgraphs, which is extended.
    """
    return _Placements(program, spec, zero, known).calls()


def end_placements_of_blocks(program: Program, zero: Zero) -> dict[int, tuple[EndPlacements, ...]]:
    """Returns the shardings of the inputs and outputs of each block's call, along each axis that shards any of them.

    The keys are the numbers of the calls. Only what is known before subgraphs are sharded is included.

    Args:
        program: a base program.
        zero: the sharding of parameters by all parallel transforms.
    """
    found: dict[int, tuple[EndPlacements, ...]] = {}
    # A transform that shards the batch exchanges samples, of which a rank has as many as before.
    for spec in (spec for spec in zero.dim_shardings if not spec.shards_batch):
        parts = _Placements(program, spec, zero)
        places = parts.expected()
        for op in program.instructions:
            if (block := op.block) is not None and op.is_forward:
                inputs = block.inputs[: block.joint.num_inputs]
                ends = EndPlacements(
                    parts.n,
                    tuple(places[a] for a in inputs),
                    tuple(parts.wanted.get(v.name, OutputPlacement.FREE) for v in op.out),
                    frozenset(i for i, a in enumerate(inputs) if a in parts.leaves),
                    spec.stream,
                    spec.attention,
                )
                found[block.number] = (*found.get(block.number, ()), ends)
    return found


@dataclass(frozen=True)
class _Before:
    """The shardings of a program along the axes that were processed before this one.

    Attributes:
        own: for each value, the axes along which it differs between ranks.
        sent: for each handle, the values that the collective sends.
        rows: the values that a collective divides along dim 0.
        num_dim_shards: for each value, the number of axes that shard it along dims.
    """

    own: dict[str, tuple[str, ...]]
    sent: Mapping[str, tuple[str, ...]]
    rows: frozenset[str]
    num_dim_shards: Mapping[str, int]

    @classmethod
    def of(cls, program: Program) -> _Before:
        starts = [op for op in program.instructions if op.op in COLLECTIVES]
        rows = frozenset(a for op in starts if op.op != "all_reduce_start" for a in op.args)
        placed = {name: value.placement for name, value in program.values().items()}
        own = {a: at.varies_over for a, at in placed.items()}
        num_dim_shards = {a: len(at.dim_shards) for a, at in placed.items()}
        return cls(own, {op.out[0].name: STARTS[op.op].sent(op) for op in starts}, rows, num_dim_shards)


@dataclass(frozen=True)
class _Request:
    """The key of a sharded subgraph: its name, the places of its inputs and the places wanted of its outputs. The other
    fields are arguments of `propagation.propagate`."""

    fn: str
    places: tuple[Placement, ...]
    wanted: tuple[Wanted, ...]
    leaves: frozenset[int]
    given: tuple[tuple[Exchanged, ...], ...]
    handed_on: tuple[tuple[Exchanged, ...], ...]


class _Placements:
    """The placements of a program's values along one axis, and the sharded subgraphs of its calls.

    Attributes:
        places: for each value so far, its placement along the axis.
        wanted: the placement at which a value is wanted.
        exchanged: for each value, the exchanged copies of it that subgraphs return for other subgraphs.
    """

    def __init__(self, program: Program, spec: DimSharding, zero: Zero, known: dict[Any, ShardedGraph] | None = None):
        self.program, self.spec, self.zero, self.axis = program, spec, zero, spec.axis
        self.n = program.mesh.axes[spec.axis]
        self.places: dict[str, Placement] = {}
        update = program.update
        self.maxima = {*(update.attrs.maxima if update else ())}
        largest = (x for x in program.instructions if x.op == "add" and x.says(JoinAttrs).reduction == "max")
        self.maxima |= {a for x in largest for a in x.args}
        self.leaves: set[str] = set()  # names of parameters and of casts of them
        self.before = _Before.of(program)
        self.wanted: dict[str, Wanted] = {}
        self.known: dict[Any, ShardedGraph] = {} if known is None else known
        self.exchanged: dict[str, tuple[Exchanged, ...]] = {}
        self.inputs = [self._input(v) for v in program.inputs]
        self._want()

    def calls(self) -> Iterator[tuple[Instruction, ShardedGraph | None]]:
        """Yields the calls, each with its sharded subgraph; None if the axis does not affect the call. Places the
        results of all ops."""
        for op in self.program.instructions:
            if op.op != "call":
                self.placed(op)
                continue
            made = self.sharded(op)
            self.places.update((v.name, made.places[i] if made else REPLICATE) for i, v in enumerate(op.out))
            yield op, made

    def expected(self) -> dict[str, Placement]:
        """Returns the placement of each value that is a parameter or is wanted sharded; all others are replicated."""
        for op in self.program.instructions:
            if op.op == "cast":
                self.placed(op)
                continue
            for v in op.out:
                wanted = self.wanted.get(v.name)
                self.places[v.name] = wanted if isinstance(wanted, Shard) else REPLICATE
        return {name: place if isinstance(place, Shard) else REPLICATE for name, place in self.places.items()}

    def hand_on(self) -> None:
        """Finds the exchanged values that subgraphs return for others: those that another subgraph reads."""
        read = defaultdict[str, set[Exchanged]](set)
        for op, made in self.calls():
            if made is not None:
                # offered to the calls that follow
                self.exchanged.update((v.name, x) for v, x in zip(op.out, made.exchanged, strict=True) if x)
                for a, xs in zip(op.args, made.read, strict=True):
                    read[a] |= {*xs}
        found = {a: tuple(x for x in xs if x in read[a]) for a, xs in self.exchanged.items()}
        self.exchanged = {a: xs for a, xs in found.items() if xs}

    def _input(self, value: Value) -> Value:
        leaf = self.program.leaves.get(value.name)
        computed = leaf is not None and leaf.role in ("params", "compute")
        if computed:
            self.leaves.add(value.name)
        own = leaf is None and self.spec.shards_batch
        return self.put(value, self._shard(value.name) if computed else VARYING if own else REPLICATE)

    def _shard(self, name: str) -> Shard | Replicate:
        """The placement of a parameter along the axis."""
        layout = self.program.leaves[name].layout
        return dict(zip(layout.axes, layout.dims, strict=False)).get(self.axis, REPLICATE)

    def _want(self) -> None:
        """Determines the place at which each value that the step reduces or returns is wanted."""
        program, update = self.program, self.program.update
        summands = {*program.sums, *(update.attrs.sums if update else ())}
        whole = {*program.outputs, *(update.attrs.maxima if update else ())}
        self.wanted |= dict.fromkeys(whole, REPLICATE)
        self.wanted |= dict.fromkeys(summands, OutputPlacement.SUMMAND)
        if self.spec.shards_batch:
            added = {a for x in program.instructions if x.op == "add" for a in x.args}
            self.wanted |= dict.fromkeys(added | self.maxima, OutputPlacement.SUMMAND)
        for leaf, g in program.grads.items():
            shard = self._shard(leaf)
            self.wanted[g] = shard if isinstance(shard, Shard) else self._summand(leaf)
        if (stream := self.spec.stream) is not None:
            self.wanted |= {name: stream for name in self._passing() if name not in self.wanted}
        out: dict[str, tuple[Value, ...]] = {}
        for op in reversed(program.instructions):
            if op.op == "wait":
                out[op.args[0]] = op.out
            made = out[op.out[0].name] if op.op == "all_reduce_start" else op.out if op.op == "cast" else ()
            for source, v in zip(op.args, made, strict=False):
                if v.name in self.wanted and source not in whole:  # an output may also be copied for a sum
                    self.wanted[source] = self.wanted[v.name]

    def _summand(self, leaf: str) -> OutputPlacement:
        """The place wanted of a gradient whose parameter subgraphs read unsharded. It must be partial if the optimizer
        state is sharded over the axis, because the reduction then scatters it."""
        scattered = not self.spec.shards_batch and self.axis in self.zero.opt_state(self.program.leaves[leaf])
        return OutputPlacement.PARTIAL if scattered else OutputPlacement.SUMMAND

    def _passing(self) -> list[str]:
        """Returns the values that pass between blocks and are sharded by position: those with the shapes that blocks
        return."""
        values = {v.name: v for x in self.program.instructions for v in x.out}
        passing = self._between_blocks()
        shapes = [values[a].shape for a in values if passing.get(a, -1) >= 0 and len(values[a].shape) > 2]
        shapes = [shape for shape in dict.fromkeys(shapes) if shape[1] > 1]
        if shapes or self.program.update is not None:  # an evaluation may have none, e.g. one of parameters only
            self.spec.check_passing(shapes, self.n)
        shapes = [shape for shape in shapes if shape[1] % self.n == 0]
        return [name for name in values if name in passing and values[name].shape in shapes]

    def _between_blocks(self) -> dict[str, int]:
        """Returns the values that pass from one block to another, or to code outside blocks, with the number of the
        block that computes each; -1 outside blocks."""
        moves = lambda x: x.op in COLLECTIVES or x.op == "wait"  # noqa: E731
        block_of = lambda x: x.block.number if x.block else -1  # noqa: E731
        number: dict[str, int] = {}
        for x in self.program.instructions:
            moved = [number[a] for a in x.args if moves(x)]
            number.update(dict.fromkeys((v.name for v in x.out), moved[0] if moved else block_of(x)))
        readers = [(a, x) for x in self.program.instructions if not moves(x) for a in x.args if a in number]
        return {a: number[a] for a, x in readers if number[a] != block_of(x)}

    def put(self, value: Value, place: Placement) -> Value:
        """Records the placement of a value along the axis, and returns the value with it."""
        if isinstance(place, Partial) and value.name in self.maxima:
            place = Partial("max")
        self.places[value.name] = place
        if isinstance(place, (ExpertShard, Routed)):
            value, place = replace(value, shape=tuple(local_shape(value.shape, place, self.n))), VARYING
        return replace(value, placement=value.placement.along(self.axis, place))

    def whole(self, op: Instruction, value: Value) -> Value:
        """Returns a result of an op that does not compute on shards. If ranks have different samples, the result may
        vary between ranks."""
        if not self.spec.shards_batch or isinstance(op.attrs, UpdateAttrs):
            # A quotient of sums differs between ranks until these sums are reduced (transforms/zero_pass.py).
            summands = op.of_sums and any(isinstance(self.places[a], Partial) for a in op.args)
            return self.put(value, VARYING if summands else REPLICATE)
        if self.wanted.get(value.name) is OutputPlacement.SUMMAND:
            return self.put(value, SUM)
        read = [self.places[a] for a in op.args]
        own = any(not isinstance(place, (Replicate, Shard)) for place in read)
        placed = self.put(value, VARYING if own else REPLICATE)
        if op.op == "rank_index" and not op.axes:  # of the part of the batch
            self.places[value.name] = VARYING
        return placed

    def placed(self, op: Instruction) -> Instruction:
        """Returns an op, other than a call, with the placements of its results."""
        if op.op in COLLECTIVES:
            return op
        if op.op == "wait":
            sent = zip(self.before.sent[op.args[0]], op.out, strict=True)
            return replace(op, out=tuple(self._brought(a, v) for a, v in sent))
        if isinstance(op.attrs, UpdateAttrs) or op.op != "cast":
            return replace(op, out=tuple(self.whole(op, v) for v in op.out))
        self.leaves |= {v.name for a, v in zip(op.args, op.out, strict=False) if a in self.leaves}
        out = (self.put(v, self._cast_place(a, v)) for a, v in zip(op.args, op.out, strict=False))
        return replace(op, out=tuple(out))

    def _brought(self, source: str, value: Value) -> Value:
        """Returns a result of a collective along another axis. The values that it sends are sharded along this axis
        already, so this sharding comes before those that the collective creates, such as that of a reduce_scatter."""
        num, brought = self.before.num_dim_shards[source], self.put(value, self.places[source])
        if not isinstance(self.places[source], Shard):
            return brought
        *others, own = brought.placement.dim_shards
        unsharded = brought.placement.without(brought.placement.varies_over, Shard)
        axes = (*unsharded.axes, *others[:num], own, *others[num:])
        return replace(brought, placement=replace(unsharded, axes=axes))

    def _cast_place(self, source: str, value: Value) -> Placement:
        """The placement of a cast: that of its source. But a copy of a varying value, made for a sum, is partial."""
        place = self.places[source]
        return SUM if isinstance(place, Varying) and self.wanted.get(value.name) is OutputPlacement.SUMMAND else place

    def sharded(self, op: Instruction) -> ShardedGraph | None:
        """Returns the sharded subgraph of a call; None if the axis does not affect the call."""
        places = tuple(self.places[a] for a in op.args)
        wanted = tuple(self.wanted.get(v.name, OutputPlacement.FREE) for v in op.out)
        if not any(
            isinstance(place, (Shard, ExpertShard, Routed)) or place is OutputPlacement.PARTIAL
            for place in (*places, *wanted)
        ):
            return None
        if self.spec.shards_batch:
            of = op.fn, places, wanted
            if of not in self.known:
                self.known[of] = expert_propagation.propagate(
                    self.program.functions[op.fn].graph, self.n, places, wanted, self.spec.routed_rows
                )
            return self.known[of]
        request = _Request(
            op.fn,
            places,
            wanted,
            frozenset(i for i, a in enumerate(op.args) if a in self.leaves),
            tuple(self.exchanged.get(a, ()) for a in op.args),
            tuple(self.exchanged.get(v.name, ()) for v in op.out),
        )
        made = self._propagated(request)
        torn = {i for i, v in enumerate(op.out) if v.name in self.before.rows and _is_sharded_in_rows(made.places[i])}
        if torn:  # a value that another axis exchanges along dim 0 is not sharded along it
            made = self._propagated(
                replace(request, wanted=tuple(REPLICATE if i in torn else w for i, w in enumerate(wanted)))
            )
        return made

    def _propagated(self, request: _Request) -> ShardedGraph:
        if request not in self.known:
            self.known[request] = propagation.propagate(
                self.program.functions[request.fn].graph,
                self.n,
                request.places,
                request.wanted,
                leaves=request.leaves,
                stream=self.spec.stream,
                attention=self.spec.attention,
                given=request.given,
                handed_on=request.handed_on,
            )
        return self.known[request]


class _SegmentedCall:
    """A call that is replaced by segments.

    Attributes:
        op: the call.
        segments: its sharded subgraph, in segments.
        others: for each value, the previously processed axes along which it varies between ranks.
        names: the names of the values so far.
        final: the results of the call.
        sent: for each value that a collective sends, the collective.
    """

    def __init__(
        self, op: Instruction, segments: Segments, others: Mapping[fx.Node, tuple[str, ...]], args: Sequence[str]
    ):
        self.op, self.segments, self.others = op, segments, others
        self.names: dict[fx.Node, str] = dict(zip(segments.inputs, args, strict=True))
        self.final: dict[fx.Node, Value] = {}
        self.sent = {x: step for step in segments.steps if isinstance(step, ExchangeStep) for x in step.sent}


class _ToParts:
    """The rewrite of one program for one axis: replaces each call that reads shards by segments and collectives.

    Attributes:
        replicated: of each subgraph and line, the largest operation that is computed on unsharded values.
    """

    def __init__(self, program: Program, spec: DimSharding, zero: Zero):
        self.program, self.spec, self.axis, self.n = program, spec, spec.axis, program.mesh.axes[spec.axis]
        self.placements = _Placements(program, spec, zero)
        self.functions, self.names = Functions(taken=program.functions), Names(program.values())
        self.segments: dict[ShardedGraph, Segments] = {}
        self.index: Value | None = None
        self.replicated: dict[tuple[str, str, Place | None], MadeWhole] = {}
        self.name_of: dict[tuple[str, Exchanged], str] = {}  # of exchanged copies of values

    def run(self) -> Program:
        if self.spec.attention is not None:
            self.placements.hand_on()
        ops = with_segments((op, self._rewrite_op(op)) for op in self.program.instructions)
        self._check()
        if self.index is not None:
            attrs = RankIndexAttrs(axes=(self.axis,))
            index = Instruction("rank_index", (), (self.index,), attrs=attrs, by=self.spec.name)
            ops.insert(0, index)
        every = f"is computed unsharded on every rank of {self.axis}"
        notes = tuple(
            # Without the folder of the file: ranks compare their programs, and their folders may differ.
            f"{self.spec.name}: {x.op} of {fn} {every}: {size(x.nbytes)}{_at(x.place, os.path.basename)}"
            for (fn, *_), x in self.replicated.items()
        )
        functions = self.functions.by_name
        notes = (*self.program.notes, *notes)
        return replace(
            self.program,
            inputs=tuple(self.placements.inputs),
            instructions=tuple(ops),
            functions=functions,
            notes=notes,
        )

    def _rewrite_op(self, op: Instruction) -> list[Instruction]:
        if op.op == "call":
            return self._call(op)
        if op.fn:
            self.functions.by_name.setdefault(op.fn, self.program.functions[op.fn])
        return [self.placements.placed(op)]

    def _call(self, op: Instruction) -> list[Instruction]:
        """Returns the ops for a call: the unchanged call, or the segments of its sharded subgraph with the collectives
        between them."""
        made = self.placements.sharded(op)
        if made is None:
            function = self.program.functions[op.fn]
            fn = self.functions.add(op.fn, function.graph, function.writes)
            return [replace(op, fn=fn, out=tuple(self.placements.whole(op, v) for v in op.out))]
        if made not in self.segments:
            like = [x.meta["val"] for x in self.program.functions[op.fn].graph.outputs]
            self.segments[made] = segments(made, [*like, *(x.meta["val"] for x in made.graph.outputs[len(like) :])])
        for x in made.whole:
            of = op.fn, x.op, x.place
            self.replicated[of] = max(self.replicated.get(of, x), x, key=lambda x: x.nbytes)
        more = [self._handed_on(v, x) for v in op.out for x in self.placements.exchanged.get(v.name, ())]
        given = [self.name_of[a, x] for a in op.args for x in self.placements.exchanged.get(a, ())]
        op = replace(op, args=(*op.args, *given), out=(*op.out, *more))
        return self._emit(op, made, self.segments[made])

    def _handed_on(self, value: Value, exchanged: Exchanged) -> Value:
        name = self.name_of[value.name, exchanged] = self.names(f"{value.name}_exchanged")
        return Value(name, exchanged.shape, exchanged.dtype)

    def _emit(self, op: Instruction, made: ShardedGraph, segments: Segments) -> list[Instruction]:
        """Returns the ops of a subgraph that is partitioned into segments."""
        call = _SegmentedCall(op, segments, self._others(op, made, segments), self._args(op, made))
        for x, v in zip(segments.results, op.out, strict=True):
            if x.node not in call.names:
                call.final[x.node] = self.placements.put(self._owned(v, call.others[x.node]), x.place)
        ops, handles = list[Instruction](), dict[ExchangeStep, str]()
        for step in segments.steps:
            if isinstance(step, CallStep):
                ops.append(self._segment(call, step))
            elif isinstance(step, ExchangeStep):
                handle = moving(self.names(f"{call_name(op)}_{_HANDLES[step.kind]}"))
                handles[step] = handle.name
                sent = step.sent if step.counts is None else (*step.sent, step.counts)
                ops.append(self._start(step, tuple(call.names[x] for x in sent), handle))
            else:
                moved = zip(step.of.sent, step.of.markers, strict=True)
                out = tuple(call.final.get(m) or self._arrived(call.names[x], m, call.others[m]) for x, m in moved)
                call.names.update((m, v.name) for m, v in zip(step.of.markers, out, strict=True))
                ops.append(Instruction("wait", (handles[step.of],), out, by=self.spec.name))
        return ops

    def _args(self, op: Instruction, made: ShardedGraph) -> tuple[str, ...]:
        """Returns the arguments of a sharded subgraph: those of the call, and the rank's index if it reads that."""
        if not made.has_index:
            return op.args
        if self.index is None:
            self.index = Value(self.names(f"{self.axis}_index"), (), torch.int64, varying((self.axis,)))
        return *op.args, self.index.name

    def _segment(self, call: _SegmentedCall, step: CallStep) -> Instruction:
        """Returns the call of one segment."""
        out = tuple(call.final.get(x) or self._between(call, x) for x in step.outputs)
        call.names.update((x, v.name) for x, v in zip(step.outputs, out, strict=True))
        op = call.op
        if sum(isinstance(x, CallStep) for x in call.segments.steps) == 1:
            fn = self.functions.add(op.fn, step.graph)
        else:
            fn = self.functions.add_partition(op.block.joint.name if op.block else op.fn, step.graph)
        return replace(op, fn=fn, args=tuple(call.names[x] for x in step.inputs), out=out)

    def _others(self, op: Instruction, made: ShardedGraph, segments: Segments) -> dict[fx.Node, tuple[str, ...]]:
        """For each value of a subgraph, the previously processed axes along which it varies between ranks."""
        found: dict[fx.Node, tuple[str, ...]] = dict.fromkeys(made.graph.graph.nodes, ())
        found.update((x, self.placements.before.own[a]) for x, a in zip(segments.inputs, op.args, strict=False))
        for x in made.graph.graph.nodes:
            if x.op == "call_function":
                found[x] = tuple(dict.fromkeys(axis for a in x.all_input_nodes for axis in found[a]))
        return found

    def _owned(self, value: Value, axes: tuple[str, ...]) -> Value:
        """Returns a value that is passed to another subgraph, varying along the previously processed axes `axes`."""
        if value.name in self.placements.before.own:
            return value
        self.placements.before.own[value.name] = axes
        return replace(value, placement=varying(axes)) if axes else value

    def _between(self, call: _SegmentedCall, node: fx.Node) -> Value:
        """Returns a value that a segment computes for another segment, or for a collective."""
        value, axis, axes = node.meta["val"], self.axis, call.others[node]
        own = varying(axes)
        name, shape = self.names(f"{call_name(call.op)}_{operation_name(node)}"), tuple(value.shape)
        sent = call.sent.get(node)
        if sent is None or sent.kind in (all_to_all, all_to_all_v):
            varies = node in call.segments.own
            return Value(name, shape, value.dtype, own.along(axis, VARYING if varies else REPLICATE))
        if sent.kind is all_gather:
            return Value(name, (self.n, *shape[1:]), value.dtype, own.along(axis, Shard(0)))
        result = next((call.final[m] for m in sent.markers if m.args[0] is node and m in call.final), None)
        if result is not None:
            shape, own = result.shape, result.placement
        return Value(name, shape, value.dtype, own.along(axis, Partial(sent.reduction)))

    def _arrived(self, sent: str, marker: fx.Node, axes: tuple[str, ...]) -> Value:
        """Returns a value that a segment receives from a collective. `sent`: the name of the value that was sent."""
        value, own = marker.meta["val"], varying(axes)
        name, shape = self.names(f"{sent}_{_ARRIVED[marker.target]}"), tuple(value.shape)
        if marker.target is reduce_scatter:
            return Value(name, (self.n, *shape[1:]), value.dtype, own.along(self.axis, Shard(0)))
        own = own.along(self.axis, VARYING if marker.target in (all_to_all, all_to_all_v) else REPLICATE)
        return Value(name, shape, value.dtype, own)

    def _start(self, step: ExchangeStep, sent: tuple[str, ...], handle: Value) -> Instruction:
        op, axes = _STARTS[step.kind], (self.axis,)
        attrs = {
            "all_gather_start": lambda: Over(axes=axes),
            "all_to_all_start": lambda: Over(axes=axes),
            "all_to_all_v_start": lambda: RowsAttrs(axes=axes, rows=int(step.markers[0].args[2])),  # type: ignore
            "all_reduce_start": lambda: ReduceAttrs(axes=axes, reduction=step.reduction),
            "reduce_scatter_start": lambda: ScatterAttrs(axes=axes, reduction="sum", rows=True),
        }[op]()
        return Instruction(op, sent, (handle,), attrs=attrs, by=self.spec.name)

    def _check(self) -> None:
        """Raises if every rank would compute operations on unsharded values of more bytes than the spec allows, and
        names them."""
        large = {of: x for of, x in self.replicated.items() if x.nbytes > self.spec.max_replicated_bytes}
        if not large:
            return
        problems = [f"{x.op} of {fn}: {size(x.nbytes)}, {x.sizes}{_at(x.place)}" for (fn, *_), x in large.items()]
        most = size(self.spec.max_replicated_bytes)
        what = f"operations would be computed unsharded on every rank of {self.axis!r}, of more than {most}"
        allowed = f"fz.{self.spec.name}(..., max_replicated_bytes='{size(max(x.nbytes for x in large.values()))}')"
        fix = f"{self.spec.way_out}, or allow it: {allowed}"
        raise FzeroValueError(self.spec.name, what, problems, fix)


def _at(place: Place | None, shown: Callable[[str], str] = str) -> str:
    """A user's line as the end of a sentence. `shown` returns the file's path as it is shown."""
    return f", at {shown(place[0])}{line(place).removeprefix(place[0])}" if place else ""


def _is_sharded_in_rows(place: Placement) -> bool:
    return isinstance(place, Shard) and place.dim == 0
