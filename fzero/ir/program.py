"""Defines the program: a complete training step as a list of ops.

[Note: placements] The placement of a value (`MeshPlacement` in fzero/sharding/placements.py) says what the ranks along
each axis of the mesh hold. It is printed as:
  replicated     the same on every rank
  shard(axes)    each rank holds its flat shard (fzero/sharding/layout.py); an axis `along` a dim shards that dim
  permuted(axes) permuted shards: a shard over all these axes but the last, in the order of the shards that the last
                 axis makes along a dim, each padded as it is stored: the result of a gather over the last axis, or the
                 operand of a reduction over it
  varying(axes)  each rank has its own value: the batch, and everything that is computed from it
  moving         a transfer that has been started and not yet waited for

A `replicated` or `varying` value may also be `sharded(axes along dims)`: a rank has one of the equal shards that
these axes make of it, as a tensor with its natural shape. Any of them may also be `partial(axes)`: each rank has a
summand, and the value is the sum over those axes; `by` another reduction it is the maximum or the minimum. No partial
value is stored in a state, and only a `replicated` value, or a `varying` value that is not `sharded`, is returned.
Each value has its own axes: one program contains shards over `data` and, padded for the same `grid` of axes, the
shards over `data` and `node` that those are divided into (see [Note: several axes] in fzero/sharding/layout.py). A
transfer is over one axis: a gather over the last axis of its shards, a reduction over the next axis to shard.

[Note: instructions] An op (`Instruction`) calls a traced subgraph (`call`), moves data (a `..._start` and its `wait`),
or does one of a few small things that need no trace: `cast`, `buffer` (memory that is written before it is read),
`take_shard`, `take_part`, `reshape`, `rank_index`, `num_valid`, `draw_start`, `accumulate`, `add`, `assign`, `zeros`.
`update` is the complete optimizer before it is partitioned into subgraphs. `loop` runs its
body once per micro-batch; an `accumulate` inside it is the sum over its iterations, or the maximum (`op`), and is read
after it. Without a loop, the ops themselves are repeated (`repeats`), and `add` adds to totals in place: its results
are new names of its first arguments. Names are assigned once, except for the tensors of the state: their buffers are
donated, and `writes` lists those that an op overwrites. `zeros` makes a value of zeros. For `speculative` ops
see fzero/ir/ops/rollback.py.

A `cast` to 8 bits also reads a scale, and says `through` which dtype it goes (fzero/ops/scaled_matmul.py).

[Note: pool] The buffers of transfers lie in one arena that a program keeps for the complete run, its pool: gathered
parameters, the buffers that are reduced, shards of gradients, sums over micro-batches. `Instruction.into` lists buffers
in it (compiler/buffer_allocation.py):
  call, cast, buffer, accumulate   one per result (None: newly allocated); the op writes there
  all_gather_start         the flat, padded full tensor of each argument; a rank's shard is its part of that buffer
  reduce_scatter_start     the flat, padded full tensor of each argument, then the shard of each result
  all_reduce_start         the flattened tensor of each argument
  all_to_all_start         the flattened tensor of each argument, then of each result
  all_to_all_v_start       the tensor of each argument, nothing for the counts, then the tensor of each result
  wait                     each result, a view of a buffer that its transfer filled

If a few ops alone would make the arena large, their buffers lie outside it (compiler/separate_allocation.py). Such a
separate allocation, a room, is made by the first op that has a buffer in it. It is freed together with the last value
in it.

[Note: tiers] A value lies on a memory tier: in the device's memory, in the host's, or, only as a stored tensor of the
state, on disk. An op computes where its arguments lie. A `copy_start` moves values from one tier to another and makes
new values, which its `wait` returns. With `writes` it overwrites stored tensors instead, as a copy to disk always does:
its arguments are those tensors, then the values for them. A disk reads to and writes from host memory. Host values that
move lie in a separate arena. If host and device are one memory (`mesh.unified_memory`), copies between the two return
their arguments, and everything lies in one arena.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Generic

import torch
from typing_extensions import TypeVar

from fzero._utils.deprecation import attribute_alias, warn
from fzero.ir.attributes import (
    Attrs,
    BlockCall,
    BufferAttrs,
    CallAttrs,
    CopyAttrs,
    LoopAttrs,
    Over,
    PartAttrs,
    Segment,
    UpdateAttrs,
    WaitAttrs,
)
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Layout, Leaf, sharding_over
from fzero.sharding.placements import IN_FLIGHT, REPLICATED, MeshPlacement, flat_shard
from fzero.sharding.shard_regions import DimShard, part_shape
from fzero.trace.recorder import Recorded

A = TypeVar("A", bound=Attrs, default=Attrs, covariant=True)
K = TypeVar("K", bound=Attrs)
_ALL = Segment(-1, 0, 1)
_UNSAID: Any = None  # stands for the default attributes of the op


def stored_placement(layout: Layout) -> MeshPlacement:
    """Returns the placement of a stored tensor of this layout."""
    return flat_shard(layout.axes, layout.grid, layout.dims)


@dataclass(frozen=True)
class Value:
    """A result of an op: its name, shape when unsharded, dtype, placement on the mesh, and memory tier."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: MeshPlacement = REPLICATED
    tier: str = "device"

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded value."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded value."""
        return self.numel * self.dtype.itemsize

    def local_shape(self, mesh: AbstractMesh) -> tuple[int, ...]:
        """Returns the shape of the tensor that a rank holds."""
        at = self.placement
        if not at.flat_axes:
            along = [DimShard(*dim, mesh.axes[axis]) for axis, dim in at.dim_shards]
            return part_shape(self.shape, along) if along else self.shape
        parts = mesh.axis_size(at.flat_axes[-1:]) if at.is_permuted else 1
        return (parts * sharding_over(mesh, at.flat_axes, at.grid, at.dims).numel(self.shape),)

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"
        text = text if self.placement == REPLICATED else f"{text} {self.placement}"
        return text if self.tier == "device" else f"{text} on {self.tier}"


def moving(name: str) -> Value:
    """Returns the result of a start. Only its wait reads it."""
    return Value(name, (), torch.uint8, IN_FLIGHT)


@dataclass(frozen=True)
class Place:
    """A buffer in an arena, "device" or "host": its offset in bytes, its number of elements and its dtype. With
    `part`, it is this rank's shard, along those axes, of the flat tensor that begins there. In the arena "apart" it
    lies in the separate allocation with the number `room`, which is made by the first op that has a buffer there.
    """

    offset: int
    numel: int
    dtype: torch.dtype
    part: tuple[str, ...] = ()
    arena: str = "device"
    room: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Instruction(Generic[A]):
    """An op: `out = op(args)`. `attrs`: its attributes (fzero/ir/attributes.py). `by`: the transform that inserted
    it. `into`: the buffers of its results (see [Note: pool]).
    """

    op: str
    args: tuple[str, ...] = ()
    out: tuple[Value, ...] = ()
    fn: str = ""
    attrs: A = _UNSAID
    writes: tuple[str, ...] = ()
    by: str = ""
    body: tuple[Instruction, ...] = ()
    into: tuple[Place | None, ...] = ()

    def __post_init__(self) -> None:
        if self.attrs is _UNSAID:
            from fzero.ir.ops import unsaid

            object.__setattr__(self, "attrs", unsaid(self.op))

    @property
    def block(self) -> BlockCall | None:
        """The call of a block, if the op is one."""
        return self.attrs.block if isinstance(self.attrs, CallAttrs) else None

    @property
    def segment(self) -> Segment:
        """The partition of a subgraph that it calls; by default all of it."""
        said = self.attrs.segment if isinstance(self.attrs, CallAttrs) else None
        return said or _ALL

    @property
    def begins_block(self) -> bool:
        """Whether it is the call of a block, or the first partition of one."""
        return self.block is not None and self.segment.index == 0

    @property
    def ends_block(self) -> bool:
        """Whether it is the call of a block, or the last partition of one."""
        return self.block is not None and self.segment.index == self.segment.count - 1

    @property
    def is_forward(self) -> bool:
        """Whether it is only the forward of a block."""
        return self.block is not None and self.block.part == "forward"

    @property
    def is_backward(self) -> bool:
        """Whether it is only the vjp of a block."""
        return self.block is not None and self.block.part == "backward"

    @property
    def of_codes(self) -> bool:
        """Whether it computes or reads the quantized codes that are sent in place of values
        (transforms/compress.py), so that it belongs to a transfer.
        """
        return self.by == "compress" and bool(self.fn)

    @property
    def of_sums(self) -> bool:
        """Whether it reads totals over all ranks and micro-batches. Any other op reads this rank's own values."""
        return isinstance(self.attrs, CallAttrs) and self.attrs.of_sums

    @property
    def on_host(self) -> bool:
        """Whether its attributes say that it computes on the host. An op that computes where its arguments lie has no
        such attribute.
        """
        return isinstance(self.attrs, (CallAttrs, BufferAttrs)) and self.attrs.on == "host"

    @property
    def speculative(self) -> bool:
        """Whether it is speculative. In a step that does not speculate it runs in vain, or not at all."""
        return self.attrs.speculative

    @property
    def callee(self) -> str:
        """The name that its text calls: its subgraph or its op, through `speculative` if it is speculative."""
        name = self.fn or self.op
        return f"speculative({name})" if self.speculative else name

    @property
    def is_wait(self) -> bool:
        """Whether it waits for the transfer whose handle it takes."""
        return isinstance(self.attrs, WaitAttrs)

    @property
    def micro(self) -> tuple[int, int] | None:
        """The micro-batch that it is for, and their number, if ops are repeated per micro-batch without a loop."""
        return self.attrs.micro

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which it communicates, shards or counts."""
        return self.attrs.axes if isinstance(self.attrs, Over) else ()

    @property
    def tiers(self) -> tuple[str, ...]:
        """The source and the target tier of a copy between memory tiers; empty for any other op."""
        return (self.attrs.source, self.attrs.target) if isinstance(self.attrs, CopyAttrs) else ()

    @property
    def count(self) -> int:
        """The number of loop iterations or parts."""
        count = self.attrs.count if isinstance(self.attrs, (LoopAttrs, PartAttrs)) else None
        return 1 if count is None else count

    def with_body(self) -> Iterator[Instruction]:
        """Yields the op, and all ops in its body."""
        yield self
        for op in self.body:
            yield from op.with_body()

    def says(self, kind: type[K]) -> K:
        """Returns its attributes, which must be of this class."""
        assert isinstance(self.attrs, kind), f"{self.op} says {self.attrs}"
        return self.attrs

    def saying(self, **changes: Any) -> Instruction[A]:
        """Returns the op with changed attributes."""
        return replace(self, attrs=replace(self.attrs, **changes))

    def rename(self, names: Mapping[str, str]) -> Instruction[A]:
        new = replace(self, args=tuple(names.get(a, a) for a in self.args))
        if self.block is None:
            return new
        return new.saying(block=replace(self.block, inputs=tuple(names.get(a, a) for a in self.block.inputs)))


_DELETIONS = re.compile(r";  (\w+ = )+None$")
"""What torch.fx adds to a line: it deletes values that are not read again."""


@dataclass(frozen=True, eq=False)
class Function:
    """A traced pure function, a subgraph of the program. It is compiled once, however many ops call it. `writes`:
    indices of the inputs that it overwrites. `into`: indices of the outputs that it writes into given buffers instead
    of returning them. `on`: whether the device or the host runs it.
    """

    name: str
    graph: Recorded
    writes: tuple[int, ...] = ()
    into: tuple[int, ...] = ()
    on: str = "device"

    def __str__(self) -> str:
        """Its ATen operations as Python code, with the dtype and shape of each result."""
        code = self.graph.graph.python_code("self", verbose=True).src.strip()
        code = code.replace("def forward(self, ", f"def {self.name}(", 1)
        lines = [_DELETIONS.sub("", line) for line in code.split("\n") if not line.lstrip().startswith("#")]
        return "\n".join(line for line in lines if line.strip())


@dataclass(frozen=True)
class Program:
    """A step: inputs (the tensors of the state, then the batch), ops, and the names of the outputs.

    `leaves` is the table of the state: for each input that is part of a state, by name, how it is stored. `assigns`
    names those that get a new value in each step. `grads` maps the path of a parameter to the name of its gradient as
    an update reads it, reduced. `notes`: remarks of passes for the header.
    """

    name: str
    mesh: AbstractMesh
    inputs: tuple[Value, ...]
    leaves: Mapping[str, Leaf]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]
    functions: Mapping[str, Function]
    transforms: tuple[Any, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)  # input name -> number of the block that first uses it
    assigns: tuple[str, ...] = ()
    grads: Mapping[str, str] = field(default_factory=dict)
    sums: tuple[str, ...] = ()  # values that an evaluation sums over the mesh
    pool_bytes: int = 0
    host_pool_bytes: int = 0
    notes: tuple[str, ...] = ()

    lines = attribute_alias("program", "lines", "instructions")
    map_lines = attribute_alias("program", "map_lines", "map_instructions")

    def walk(self) -> Iterator[tuple[Instruction, int]]:
        """Yields every op with the number of times it runs in a step, including the bodies of loops."""
        return iter(self._walked)

    @functools.cached_property
    def _walked(self) -> list[tuple[Instruction, int]]:
        found: list[tuple[Instruction, int]] = []

        def visit(ops: tuple[Instruction, ...], times: int) -> None:
            for op in ops:
                found.append((op, times))
                if op.body:
                    visit(op.body, times * op.count)

        visit(self.instructions, 1)
        return found

    @property
    def update(self) -> Instruction[UpdateAttrs] | None:
        """The op that is the complete optimizer, until it is partitioned into subgraphs."""
        found = (op for op in self.instructions if isinstance(op.attrs, UpdateAttrs))
        return next(found, None)  # type: ignore[return-value]

    def values(self) -> dict[str, Value]:
        """Returns every value by name."""
        found = {v.name: v for v in self.inputs}
        for op, _ in self.walk():
            found.update((v.name, v) for v in op.out)
        return found

    @functools.cached_property
    def values_by_name(self) -> dict[str, Value]:
        return self.values()

    @functools.cached_property
    def pooled(self) -> list[Instruction]:
        """The ops with buffers in the arena, in the order of the text: `pool[i]` in the text is `pooled[i].into`."""
        return [op for op, _ in self.walk() if op.into]

    @functools.cached_property
    def pool_index(self) -> dict[int, int]:
        """The index of each op of `pooled`, by identity."""
        return {id(op): i for i, op in enumerate(self.pooled)}

    def map_instructions(self, fn: Callable[[Instruction], list[Instruction]]) -> Program:
        """Returns the program with each op replaced by the ops that `fn` returns for it, innermost first."""

        def visit(ops: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
            return tuple(new for op in ops for new in fn(replace(op, body=visit(op.body)) if op.body else op))

        return replace(self, instructions=visit(self.instructions))

    def __str__(self) -> str:
        from fzero.ir.printer import show

        return show(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def repeats(op: Instruction) -> bool:
    """Returns whether an op repeats an earlier op for another micro-batch, and so reads the same parameters."""
    return op.micro is not None and op.micro[0] > 0


def with_segments(replaced: Iterable[tuple[Instruction, Sequence[Instruction]]]) -> list[Instruction]:
    """Returns ops in which the calls that replace one call are segments of one subgraph.

    Args:
        replaced: each op of a program, with the ops that replace it.
    """
    ops, calls = list[Instruction](), dict[int | str, list[int]]()  # the indices of the ops that call each subgraph
    for op, new in replaced:
        if op.op == "call":
            of = op.segment.of if op.segment.count > 1 else op.out[0].name if op.out else ""
            at = calls.setdefault(of, [])
            at += (len(ops) + i for i, x in enumerate(new) if x.op == "call")
        ops += new
    for of, at in enumerate(calls.values()):
        for index, i in enumerate(at if len(at) > 1 else ()):
            ops[i] = ops[i].saying(segment=Segment(of, index, len(at)))
    return ops


def local_bytes(value: Value, mesh: AbstractMesh) -> int:
    """Returns the bytes of a value on one rank; for a shard, including its padding."""
    return math.prod(value.local_shape(mesh)) * value.dtype.itemsize


def __getattr__(name: str) -> Any:
    if name == "Line":  # the name of the class until 0.2
        warn("fzero.ir.program.Line", "fzero.ir.program.Instruction")
        return Instruction
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
