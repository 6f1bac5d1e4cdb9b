"""Defines the program: a whole training step as a list of lines.

[Note: placements] How a value of a program relates to the mesh:
  whole          the same on every rank
  shard(axes)    each rank holds its flat part of it (fzero/sharding/layout.py); an axis `along` a dim cuts that instead
  parts(axes)    a shard over all these axes but the last, in the order of the parts that this one cuts along a dim,
                 each padded as it rests: results of a gather over it, operands of a reduction over it
  local(axes)    each rank has its own: the batch, and whatever is computed from it
  moving         a transfer has been started and not yet waited for

A whole or a local may also be `cut(axes along dims)`: a rank has one of the equal parts that these axes cut it in, as a
tensor of its own. Any of them may also be `partial(axes)`: each rank has a summand, and the value is the sum over those
axes; `by` another reduction it is the largest or smallest. No partial value rests in a state, and only a `whole` or an
uncut `local` is returned. Each value has axes of its own: one program has shards over `data`, and, padded for the same
`grid` of axes, the shards over `data` and `node` that those are cut in (see [Note: several axes] in
fzero/sharding/layout.py). A transfer is over one axis: a gather over the last axis of its shards' cut, a reduction over
the next axis to cut.

[Note: lines] A line calls a traced function (`call`), moves data (a `..._start` and its `wait`), or does one of a few
small things that need no trace: `cast`, `buffer` (memory for what is written before it is read), `take_shard`,
`take_part`, `unflatten`, `flatten`, `part_index`, `cut_index`, `num_valid`, `draw_start`, `accumulate`, `add`,
`assign`, `zeros`; `update` is the whole optimizer before it is cut into functions. `loop` repeats a body once a
micro-batch; an `accumulate` inside it is the sum over its turns, or the largest (`op`), and is read after it. Without a
loop lines are repeated themselves (`repeats`), and `add` adds to totals in place: its first arguments, whose new names
are its results. Names are assigned once, but for the leaves of the state: their buffers are donated, and `writes` says
which a line overwrites. `zeros` makes a value of zeros. For lines on a `guess` see fzero/ir/ops/redo.py.

A `cast` to 8 bits reads a scale besides, and says `through` which dtype it goes (fzero/ops/scaled_matmul.py).

[Note: pool] What moves lies in one arena a program keeps for the whole run, its pool: gathered leaves, the buffers that
are reduced, shards of gradients, sums over micro-batches. `Line.into` holds places in it
(compiler/buffer_allocation.py):
  call, cast, buffer, accumulate   one for each result (None: allocated anew); the line writes there
  all_gather_start         the flat, padded whole of each argument; a rank's shard is its part of it
  reduce_scatter_start     the flat, padded whole of each argument, then the shard of each result
  all_reduce_start         the flat of each argument
  all_to_all_start         the flat of each argument, then of each result
  wait                     each result, a view of what its transfer filled

Where the arena would be large for a few lines' sake, places lie apart from it (compiler/separate_allocation.py). Their
memory, a room, is allocated by the first line that has a place in it. It is given back when the last value that lies
there is.

[Note: tiers] A value lies on a tier: in the device's memory, in the host's, or, only as a leaf at rest, on disk. A line
computes where its arguments lie. Copies move values: `to_host_start`, `to_device_start` and `disk_read_start` each make
new values, handed out by their `wait`; with `writes` a copy goes over leaves at rest instead, as `disk_write_start`
always does: its arguments are those leaves, then the values for them. A disk reads to and writes from host memory. Host
values that move lie in a pool of their own. If host and device are one memory (`mesh.unified_memory`), copies between
the two hand out their arguments, and everything lies in one pool.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Generic

import torch
from typing_extensions import TypeVar

from fzero.ir.attributes import (
    Attrs,
    BlockCall,
    CallAttrs,
    Counted,
    Guessed,
    Over,
    Repeated,
    Segment,
    Side,
    UpdateAttrs,
)
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Layout, Leaf, cut_over, grid_of, over_axes
from fzero.sharding.shard_regions import Along, Dim, part_shape
from fzero.trace.recorder import Recorded

A = TypeVar("A", bound=Attrs, default=Attrs, covariant=True)
K = TypeVar("K", bound=Attrs)
_ALL = Segment(-1, 0, 1)
_UNSAID: Any = None  # the attributes of a line's op, with nothing said


@dataclass(frozen=True)
class Placement:
    """See [Note: placements]. `partial`: the axes over which the value is still to be reduced, and `by` what: "sum",
    "max" or "min". `grid`: of a shard, the axes that it is padded for, where they are more than its own. `dims`: how
    the first of its axes cut it along dims. `cuts`: of what is no shard, the axes that cut it along dims."""

    kind: str = "whole"
    axes: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    by: str = "sum"
    grid: tuple[str, ...] = ()
    dims: tuple[Dim, ...] = ()
    cuts: tuple[tuple[str, Dim], ...] = ()

    def __post_init__(self) -> None:
        if self.grid:
            object.__setattr__(self, "grid", grid_of(self.axes, self.grid) if self.is_cut else ())
        if self.dims:
            object.__setattr__(self, "dims", self.dims[: len(self.axes)])

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The axes along which each rank has its own: a part, or a summand."""
        return (*self.axes, *(axis for axis, _ in self.cuts), *self.partial)

    def cut(self, axes: tuple[str, ...], grid: tuple[str, ...] = (), dims: tuple[Dim, ...] = ()) -> Placement:
        """Cut over these axes, what is a shard already further; `grid`: the axes that a whole is padded for; `dims`:
        along which the first of the axes cut a whole."""
        return replace(self, kind="shard", axes=(*self.axes, *axes), grid=self.grid or grid, dims=self.dims or dims)

    @property
    def is_cut(self) -> bool:
        """Whether a rank has it 1-D: a shard, or gathered parts of shards."""
        return self.kind in ("shard", "parts")

    @property
    def joined(self) -> Placement:
        """The placement of the value that the last axis cuts into these shards or parts: one axis less."""
        left = self.axes[:-1]
        return replace(self, kind="shard" if left else "whole", axes=left, grid=self.grid or self.axes)

    @property
    def is_nested(self) -> bool:
        """Whether its axes are the first of its grid, so that it consists of the parts of a finer cut."""
        return not self.grid or self.grid[: len(self.axes)] == self.axes

    def left(self, partial: Iterable[str]) -> Placement:
        """With these axes left to be reduced over."""
        partial = tuple(partial)
        return replace(self, partial=partial, by=self.by if partial else "sum")

    def __str__(self) -> str:
        finer = f" of {', '.join(self.grid)}" if self.grid else ""
        text = f"{self.kind}({over_axes(self.axes, self.dims)}{finer})" if self.axes else self.kind
        if self.cuts:
            parts = f"cut({over_axes(*zip(*self.cuts, strict=True))})"
            text = parts if self.kind == "whole" else f"{text} {parts}"
        partial = f"partial({', '.join(self.partial)}{'' if self.by == 'sum' else f' by {self.by}'})"
        return text if not self.partial else partial if text == "whole" else f"{text} {partial}"


def resting(layout: Layout) -> Placement:
    """The placement of a leaf of this layout."""
    return Placement("shard", layout.axes, grid=layout.grid, dims=layout.dims) if layout.axes else WHOLE


WHOLE = Placement()
MOVING = Placement("moving")


@dataclass(frozen=True)
class Value:
    """A result of a line: name, shape of the whole, dtype, how it relates to the mesh, and the tier it lies on."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement = WHOLE
    tier: str = "device"

    @property
    def numel(self) -> int:
        """Elements of the whole value."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return self.numel * self.dtype.itemsize

    def held(self, mesh: AbstractMesh) -> tuple[int, ...]:
        """The shape of a rank's part of it."""
        at = self.placement
        if not at.is_cut:
            along = [Along(*dim, mesh.axes[axis]) for axis, dim in at.cuts]
            return part_shape(self.shape, along) if along else self.shape
        parts = mesh.axis_size(at.axes[-1:]) if at.kind == "parts" else 1
        return (parts * cut_over(mesh, at.axes, at.grid, at.dims).numel(self.shape),)

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"
        text = text if self.placement == WHOLE else f"{text} {self.placement}"
        return text if self.tier == "device" else f"{text} on {self.tier}"


def moving(name: str) -> Value:
    """The result of a start, which only its wait reads."""
    return Value(name, (), torch.uint8, MOVING)


@dataclass(frozen=True)
class Place:
    """A tensor in the pool of an arena, "device" or "host": bytes from its start, elements, dtype; with `part`, this
    rank's part along those axes of the flat that begins there. In the arena "apart" it lies in the `room` with this
    number, which is allocated by the first line that has a place there."""

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
class Line(Generic[A]):
    """`out = op(args)`; `attrs` is what it says besides (fzero/ir/attributes.py), `by` names the transform that placed
    it, `into` where its results lie (see [Note: pool])."""

    op: str
    args: tuple[str, ...] = ()
    out: tuple[Value, ...] = ()
    fn: str = ""
    attrs: A = _UNSAID
    writes: tuple[str, ...] = ()
    by: str = ""
    body: tuple[Line, ...] = ()
    into: tuple[Place | None, ...] = ()

    def __post_init__(self) -> None:
        if self.attrs is _UNSAID:
            from fzero.ir.ops import unsaid

            object.__setattr__(self, "attrs", unsaid(self.op))

    @property
    def block(self) -> BlockCall | None:
        """The block's call that it is."""
        return self.attrs.block if isinstance(self.attrs, CallAttrs) else None

    @property
    def segment(self) -> Segment:
        """The part of a function that it calls: by default all of it."""
        said = self.attrs.segment if isinstance(self.attrs, CallAttrs) else None
        return said or _ALL

    @property
    def begins_block(self) -> bool:
        """Whether it is a block's call, or the first segment of one."""
        return self.block is not None and self.segment.index == 0

    @property
    def ends_block(self) -> bool:
        """Whether it is a block's call, or the last segment of one."""
        return self.block is not None and self.segment.index == self.segment.count - 1

    @property
    def is_forward(self) -> bool:
        """Whether it is a block's forward, alone."""
        return self.block is not None and self.block.part == "forward"

    @property
    def is_backward(self) -> bool:
        """Whether it is a block's vjp, alone."""
        return self.block is not None and self.block.part == "backward"

    @property
    def of_codes(self) -> bool:
        """Whether it makes or reads the codes in which values travel (transforms/compress_pass.py): it belongs to a
        transfer."""
        return self.by == "compress" and bool(self.fn)

    @property
    def of_sums(self) -> bool:
        """Whether it reads totals over all ranks and micro-batches; any other line reads this rank's own values."""
        return isinstance(self.attrs, CallAttrs) and self.attrs.of_sums

    @property
    def on_host(self) -> bool:
        """Whether it says that it computes on the host. A line that computes where its arguments lie says nothing."""
        return isinstance(self.attrs, Side) and self.attrs.on == "host"

    @property
    def guess(self) -> bool:
        """Whether it is carried out on a guess; if the step does not guess, in vain or not at all."""
        return isinstance(self.attrs, Guessed) and self.attrs.guess

    @property
    def callee(self) -> str:
        """What its text calls: its function or its op, by way of `guess` if it is on one."""
        name = self.fn or self.op
        return f"guess({name})" if self.guess else name

    @property
    def micro(self) -> tuple[int, int] | None:
        """The micro-batch that it is for, and how many there are, where lines are repeated themselves."""
        return self.attrs.micro if isinstance(self.attrs, Repeated) else None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is about."""
        return self.attrs.axes if isinstance(self.attrs, Over) else ()

    @property
    def count(self) -> int:
        """The number of turns or parts."""
        count = self.attrs.count if isinstance(self.attrs, Counted) else None
        return 1 if count is None else count

    def with_body(self) -> Iterator[Line]:
        """The line, and all lines that it repeats."""
        yield self
        for line in self.body:
            yield from line.with_body()

    def says(self, kind: type[K]) -> K:
        """Its attributes, which must be of this class."""
        assert isinstance(self.attrs, kind), f"{self.op} says {self.attrs}"
        return self.attrs

    def saying(self, **changes: Any) -> Line[A]:
        """The line with other attributes."""
        return replace(self, attrs=replace(self.attrs, **changes))

    def rename(self, names: Mapping[str, str]) -> Line[A]:
        new = replace(self, args=tuple(names.get(a, a) for a in self.args))
        if self.block is None:
            return new
        return new.saying(block=replace(self.block, inputs=tuple(names.get(a, a) for a in self.block.inputs)))


@dataclass(frozen=True, eq=False)
class Function:
    """A traced pure function, compiled once however many lines call it. `writes`: indices of the inputs it overwrites;
    `into`: indices of the outputs that it writes into buffers it is given, instead of returning them; `on`: whether the
    device runs it, or the host."""

    name: str
    graph: Recorded
    writes: tuple[int, ...] = ()
    into: tuple[int, ...] = ()
    on: str = "device"


@dataclass(frozen=True)
class Program:
    """A step: inputs (the leaves of the state, then the batch), lines, and the names of the outputs.

    `leaves` is the leaf table: how every input that is part of a state rests, by name. `assigns` names those of them
    that get a new value in each step. `grads` has, by the path of a parameter, the name of its gradient as an update
    reads it, reduced. `notes`: remarks of passes for its header.
    """

    name: str
    mesh: AbstractMesh
    inputs: tuple[Value, ...]
    leaves: Mapping[str, Leaf]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    functions: Mapping[str, Function]
    transforms: tuple[Any, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)  # input name -> number of the block that first uses it
    assigns: tuple[str, ...] = ()
    grads: Mapping[str, str] = field(default_factory=dict)
    sums: tuple[str, ...] = ()  # values an evaluation sums over the mesh
    pool_bytes: int = 0
    host_pool_bytes: int = 0
    notes: tuple[str, ...] = ()

    def walk(self) -> Iterator[tuple[Line, int]]:
        """Every line with the number of times it runs in a step, bodies of loops included."""
        return iter(self._walked)

    @functools.cached_property
    def _walked(self) -> list[tuple[Line, int]]:
        found: list[tuple[Line, int]] = []

        def visit(lines: tuple[Line, ...], times: int) -> None:
            for line in lines:
                found.append((line, times))
                if line.body:
                    visit(line.body, times * line.count)

        visit(self.lines, 1)
        return found

    @property
    def update(self) -> Line[UpdateAttrs] | None:
        """The line that is the whole optimizer, until it is cut into functions."""
        found = (line for line in self.lines if isinstance(line.attrs, UpdateAttrs))
        return next(found, None)  # type: ignore[return-value]

    def values(self) -> dict[str, Value]:
        """Every value by name."""
        found = {v.name: v for v in self.inputs}
        for line, _ in self.walk():
            found.update((v.name, v) for v in line.out)
        return found

    @functools.cached_property
    def values_by_name(self) -> dict[str, Value]:
        return self.values()

    @functools.cached_property
    def pooled(self) -> list[Line]:
        """The lines with places in the pool, in the order of the text: `pool[i]` there is `pooled[i].into`."""
        return [line for line, _ in self.walk() if line.into]

    @functools.cached_property
    def pool_index(self) -> dict[int, int]:
        """The number of each line of `pooled`, by identity."""
        return {id(line): i for i, line in enumerate(self.pooled)}

    def map_lines(self, fn: Callable[[Line], list[Line]]) -> Program:
        """Each line replaced by the lines that `fn` returns for it, innermost first."""

        def visit(lines: tuple[Line, ...]) -> tuple[Line, ...]:
            return tuple(
                new for line in lines for new in fn(replace(line, body=visit(line.body)) if line.body else line)
            )

        return replace(self, lines=visit(self.lines))

    def __str__(self) -> str:
        from fzero.ir.printer import show

        return show(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def repeats(line: Line) -> bool:
    """Whether a line is one before it again, for another micro-batch: it reads the same parameters."""
    return line.micro is not None and line.micro[0] > 0


def local_bytes(value: Value, mesh: AbstractMesh) -> int:
    """Bytes of a value on one rank: of a shard its padded part."""
    return math.prod(value.held(mesh)) * value.dtype.itemsize
