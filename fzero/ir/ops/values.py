"""Defines the ops that make values: calls of subgraphs, casts, buffers, and this rank's shard of a tensor, of the
batch or of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero._compat import compat
from fzero.ir.attributes import (
    BufferAttrs,
    CallAttrs,
    CastAttrs,
    CutAttrs,
    DrawAttrs,
    Over,
    PartAttrs,
    PartIndexAttrs,
    ShardOfAttrs,
)
from fzero.ir.ops.op import A, Op, Rules, Running, Standing, Text, Told, into, micro_of, micro_text, over
from fzero.ir.program import WHOLE, Line, Placement, Program, Value, local_bytes
from fzero.mesh import AbstractMesh
from fzero.sharding.shard_regions import Dim
from fzero.trace.subgraph import ancestors
from fzero.tree import dtype_name


class Call(Op[CallAttrs]):
    """Calls a traced subgraph. With `writes` the subgraph works in place on tensors of the state."""

    name = "call"
    in_text = False
    writes = True
    attrs = CallAttrs
    computes = "said"
    settles = True
    pool = "results"

    def check(self, line: Line[CallAttrs], args: list[Value], rules: Rules) -> None:
        function = rules.program.functions.get(line.fn)
        if function is None:
            rules.bad(line, f"no function {line.fn}")
            return
        places = function.graph.inputs
        if len(places) != len(args):
            rules.bad(line, f"{line.fn} takes {len(places)} arguments, gets {len(args)}")
            return
        for place, arg in zip(places, args, strict=True):
            self._matches(line, arg, place.meta["val"], "takes", rules)
            if arg.placement.is_cut and line.block is not None:
                rules.bad(line, f"{arg.name} is {arg.placement}, a block takes whole values")
            summed = {*arg.placement.partial}
            # A subgraph outside blocks may read this rank's own summands of totals over the batch, and the codes of a
            # compressed transfer may be computed from any summands. A quotient may read the summands of its sums
            # before transforms/zero_pass.py reduces them.
            reads = summed <= rules.batch_axes or line.of_sums
            if summed and not line.of_codes and (line.block is not None or not reads):
                rules.bad(line, f"{arg.name} is {arg.placement}, and no function reads a summand")
        if line.writes != tuple(line.args[i] for i in function.writes):
            rules.bad(
                line, f"{line.fn} writes its arguments {list(function.writes)}, not {', '.join(line.writes) or 'none'}"
            )
        returned = function.graph.outputs
        if len(returned) != len(line.out):
            rules.bad(line, f"{line.fn} returns {len(returned)} values, {len(line.out)} are named")
            return
        own = {place: a for place, a in zip(places, args, strict=True) if a.placement.own}
        axes = {axis for a in own.values() for axis in a.placement.own}
        for node, out in zip(returned, line.out, strict=True):
            self._matches(line, out, node.meta["val"], "returns", rules)
            if not axes.issubset(out.placement.own):
                read = ancestors([node], stop=set(places))
                for place, a in own.items():
                    lost = [axis for axis in a.placement.own if axis not in out.placement.own and place in read]
                    if lost:
                        said = f"{out.name} is {out.placement}, but reads {a.name}"
                        rules.bad(line, f"{said}, of which each rank along {', '.join(lost)} has its own")

    def _matches(self, line: Line[CallAttrs], value: Value, expected: torch.Tensor, verb: str, rules: Rules) -> None:
        if tuple(expected.shape) != value.held(rules.program.mesh) or expected.dtype != value.dtype:
            rules.bad(
                line, f"{line.fn} {verb} {dtype_name(expected.dtype)}{list(expected.shape)}, {value.name} is {value}"
            )

    def text(self, line: Line[CallAttrs], program: Program) -> Text:
        written = sorted({w.split("['")[0] for w in line.writes if w in program.leaves})
        in_place = [f"in place: {', '.join(written)}" if written else "in place"] if line.writes else []
        return (
            super()
            .text(line, program)
            ._replace(remark=", ".join([*(["on the host"] if line.on_host else []), *in_place]))
        )

    def means(self, line: Line[CallAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        made = told.function(line.fn)(*args)
        return [x.clone() if any(x is a for a in args) else x for x in made] if line.out else ()

    def stands(self, line: Line[CallAttrs], of: Standing, micro: int, turn: int) -> None:
        of.made(line.out, micro)
        of.written(line.writes)


class Cast(Op[CastAttrs]):
    """Converts one value or several to another dtype, or copies them in the same dtype."""

    name = "cast"
    attrs = CastAttrs
    computes = "there"
    settles = True
    pool = "results"
    makes_own = True
    batched = True

    def check(self, line: Line[CastAttrs], args: list[Value], rules: Rules) -> None:
        if not args or len(args) != len(line.out):
            rules.bad(line, f"casts {len(args)} values to {len(line.out)}")
            return
        for source, out in zip(args, line.out, strict=True):
            here, there = source.placement, out.placement
            # A varying value may become a summand, or a summand may become one along more axes than before.
            more = {*here.partial} < {*there.partial} and (here.by == there.by or not here.partial)
            summand = more and here.kind != "shard"
            if out.dtype != line.attrs.dtype or out.shape != source.shape or not (here == there or summand):
                rules.bad(line, f"{source} becomes {out}")
            if source.dtype != args[0].dtype:
                rules.bad(line, f"casts {args[0]} and {source} at once")

    def touched(self, line: Line[CastAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(local_bytes(values[a], mesh) for a in line.args) + sum(local_bytes(v, mesh) for v in line.out)

    def text(self, line: Line[CastAttrs], program: Program) -> Text:
        source = line.args[0] if len(line.args) == 1 else f"[{', '.join(line.args)}]"
        return Text(f"{line.callee}({', '.join([source, repr(dtype_name(line.attrs.dtype)), *into(line, program)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return on.tiers.settled(_cast, lambda *args: args[-1])

    def means(self, line: Line[CastAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        return [x.to(line.attrs.dtype, copy=True) for x in args]

    def stands(self, line: Line[CastAttrs], of: Standing, micro: int, turn: int) -> None:
        for value, source in zip(line.out, line.args, strict=True):
            of.made([value], micro, source)


def _cast(
    x: torch.Tensor | Sequence[torch.Tensor],
    dtype: str,
    into: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor | Sequence[torch.Tensor]:
    """Returns a copy in another dtype, or in the same one: a result must not alias the state."""
    if not isinstance(x, torch.Tensor):
        out = [torch.empty_like(one, dtype=getattr(torch, dtype)) for one in x] if into is None else into
        compat.copy_alike(out, x)
        return out
    return x.to(getattr(torch, dtype), copy=True) if into is None else into[0].copy_(x)


class Buffer(Op[BufferAttrs]):
    """Memory for new values of these tensors of the state. It is written before it is read."""

    name = "buffer"
    args = 0
    attrs = BufferAttrs
    computes = "said"
    settles = True  # it writes nothing
    pool = "leaves"

    def check(self, line: Line[BufferAttrs], args: list[Value], rules: Rules) -> None:
        leaves = line.attrs.leaves
        if len(leaves) != len(line.out) or not all(leaf in rules.program.leaves for leaf in leaves):
            rules.bad(line, f"makes {len(line.out)} buffers for {len(leaves)} leaves")
            return
        rules.aliases.update((v.name, leaf) for v, leaf in zip(line.out, leaves, strict=True))
        rules.pairs(line, [rules.known[leaf] for leaf in leaves], line.out, "a buffer for")

    def text(self, line: Line[BufferAttrs], program: Program) -> Text:
        return Text(f"buffer({', '.join(into(line, program))})", listed=True)

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda into: into

    def means(self, line: Line[BufferAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        return [torch.zeros(v.held(told.mesh), dtype=v.dtype, device=told.mesh.device) for v in line.out]


class Zeros(Op):
    """A value of zeros."""

    name = "zeros"
    args = 0
    out = 1
    makes_own = True
    settles = True

    def check(self, line: Line, args: list[Value], rules: Rules) -> None:
        if line.out[0].placement.kind not in ("whole", "local") or line.out[0].placement.cuts:
            rules.bad(line, f"makes {line.out[0]}")

    def text(self, line: Line, program: Program) -> Text:
        value = line.out[0]
        return Text(f"zeros({', '.join([str([*value.shape]), repr(dtype_name(value.dtype)), *into(line, program)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def zeros(shape: Sequence[int], dtype: str, into: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
            if into is not None:
                return into[0].zero_()
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=on.mesh.device)

        return on.tiers.settled(zeros, lambda *args: args[-1])

    def means(self, line: Line, args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        return [torch.zeros(v.shape, dtype=v.dtype, device=told.mesh.device) for v in line.out]


class TakeShard(Op[CutAttrs]):
    """Takes this rank's flat shard of a full value: a view, or a padded copy on a rank whose shard is not full. Of a
    shard it takes this rank's shard over further axes.
    """

    name = "take_shard"
    args = 1
    out = 1
    attrs = CutAttrs
    computes = "there"

    def check(self, line: Line[CutAttrs], args: list[Value], rules: Rules) -> None:
        rules.aliases[line.out[0].name] = rules.root(line.args[0])
        here = args[0].placement
        shard = replace(args[0], name=line.out[0].name, placement=here.cut(line.attrs.axes, dims=line.attrs.dims))
        if here.kind not in ("whole", "shard") or here.partial or line.out[0] != shard:
            rules.bad(line, f"takes a shard of {args[0]}, which is {line.out[0]}")

    def shares(self, line: Line[CutAttrs]) -> Iterable[tuple[str, str]]:
        return [(line.out[0].name, line.args[0])]

    def is_view(self, line: Line[CutAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> bool:
        whole = local_bytes(values[line.args[0]], mesh)
        return not line.attrs.dims and local_bytes(line.out[0], mesh) * mesh.axis_size(line.attrs.axes) == whole

    def touched(self, line: Line[CutAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return 0.0 if self.is_view(line, values, mesh) else 2 * local_bytes(line.out[0], mesh)

    def text(self, line: Line[CutAttrs], program: Program) -> Text:
        shard = ["of_shard=True"] if program.values_by_name[line.args[0]].placement.kind == "shard" else []
        dims = [f"dims={[[*d] for d in line.attrs.dims]}"] if line.attrs.dims else []
        return Text(f"take_shard({', '.join([line.args[0], over(line), *shard, *dims])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def take_shard(
            whole: torch.Tensor, axis: str | tuple[str, ...], of_shard: bool = False, dims: Sequence[Sequence[int]] = ()
        ) -> torch.Tensor:
            if of_shard:
                return whole.chunk(on.mesh.axis_size(axis))[on.mesh.index(axis)]
            boxes, size = on.part_of(tuple(whole.shape), axis, tuple(Dim(*d) for d in dims))
            part, num = boxes.take(whole), boxes.numel
            return part if num == size else torch.nn.functional.pad(part, (0, size - num))

        return take_shard

    def means(self, line: Line[CutAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        return [told.cut(args[0], told.program.values_by_name[line.args[0]], line.out[0])]

    def stands(self, line: Line[CutAttrs], of: Standing, micro: int, turn: int) -> None:
        of.same(line.out[0].name, line.args[0])


class TakePart(Op[PartAttrs]):
    """Takes the samples of one micro-batch."""

    name = "take_part"
    args = 1
    out = 1
    attrs = PartAttrs

    def check(self, line: Line[PartAttrs], args: list[Value], rules: Rules) -> None:
        whole, part = args[0], line.out[0]
        _, count = rules.micro(line)
        rest = (whole.shape[1:], whole.dtype, whole.placement)
        if whole.shape[:1] != tuple(n * count for n in part.shape[:1]) or rest != (
            part.shape[1:],
            part.dtype,
            part.placement,
        ):
            rules.bad(line, f"takes one of {count} parts of {whole}, which is {part}")

    def shares(self, line: Line[PartAttrs]) -> Iterable[tuple[str, str]]:
        return [(line.out[0].name, line.args[0])]

    def text(self, line: Line[PartAttrs], program: Program) -> Text:
        return Text(f"take_part({', '.join([line.args[0], *micro_text(line)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda whole, index, count: whole[index * (size := whole.shape[0] // count) : (index + 1) * size]

    def means(self, line: Line[PartAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        micro, count = micro_of(line, turn)
        size = args[0].shape[0] // count
        return [args[0][micro * size : (micro + 1) * size].clone()]

    def stands(self, line: Line[PartAttrs], of: Standing, micro: int, turn: int) -> None:
        of.part(line.out[0].name, line.args[0], micro)


class Number(Op[A]):
    """An integer that varies along the axes of the op."""

    args = 0
    out = 1

    def check(self, line: Line[A], args: list[Value], rules: Rules) -> None:
        axes = line.axes
        wanted = Value(line.out[0].name, (), torch.int64, Placement("local", axes) if axes else WHOLE)
        if line.out[0] != wanted:
            rules.bad(line, f"makes {line.out[0]}, not {wanted}")


class PartIndex(Number[PartIndexAttrs]):
    """The index of this part of the global batch, among the parts of all ranks and micro-batches."""

    name = "part_index"
    attrs = PartIndexAttrs

    def check(self, line: Line[PartIndexAttrs], args: list[Value], rules: Rules) -> None:
        rules.micro(line)
        super().check(line, args, rules)

    def text(self, line: Line[PartIndexAttrs], program: Program) -> Text:
        return Text(f"part_index({', '.join(micro_text(line))})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def part_index(micro: int = 0, count: int = 1) -> torch.Tensor:
            index = on.mesh.index(on.batch_axes) if on.batch_axes else 0
            return torch.full((), index * count + micro, dtype=torch.int64, device=on.mesh.device)

        return part_index

    def means(
        self, line: Line[PartIndexAttrs], args: list[torch.Tensor], told: Told, turn: int
    ) -> Sequence[torch.Tensor]:
        micro, count = micro_of(line, turn)
        return [torch.tensor(told.part_index(count, micro), device=told.mesh.device)]


class CutIndex(Op[Over]):
    """The index of this rank along an axis, as int64[1]."""

    name = "cut_index"
    args = 0
    out = 1
    attrs = Over

    def check(self, line: Line[Over], args: list[Value], rules: Rules) -> None:
        wanted = Value(line.out[0].name, (1,), torch.int64, Placement("local", line.attrs.axes))
        if line.out[0] != wanted or len(line.attrs.axes) != 1:
            rules.bad(line, f"makes {line.out[0]}, not {wanted}")

    def text(self, line: Line[Over], program: Program) -> Text:
        return Text(f"cut_index({over(line)})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda axis: torch.full((1,), on.mesh.index(axis), dtype=torch.int64, device=on.mesh.device)

    def means(self, line: Line[Over], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        return [torch.full((1,), told.mesh.index(line.axes), dtype=torch.int64, device=told.mesh.device)]


class NumValid(Number[ShardOfAttrs]):
    """The number of elements of this rank's shard that are not padding."""

    name = "num_valid"
    attrs = ShardOfAttrs

    def text(self, line: Line[ShardOfAttrs], program: Program) -> Text:
        return Text(f"num_valid({list(line.attrs.shape)}, {over(line)})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda shape, axis: torch.full(
            (), on.part_of(tuple(shape), axis)[0].numel, dtype=torch.int64, device=on.mesh.device
        )

    def means(
        self, line: Line[ShardOfAttrs], args: list[torch.Tensor], told: Told, turn: int
    ) -> Sequence[torch.Tensor]:
        start, stop = told.valid_range(line)
        return [torch.tensor(stop - start, device=told.mesh.device)]


class DrawStart(Number[DrawAttrs]):
    """The offset of this rank's random words among those of the full tensor."""

    name = "draw_start"
    attrs = DrawAttrs

    def text(self, line: Line[DrawAttrs], program: Program) -> Text:
        base = line.attrs.base
        return Text(
            f"draw_start({base}, {list(line.attrs.shape)}, {over(line)})" if line.attrs.axes else f"draw_start({base})"
        )

    def runs(self, on: Running) -> Callable[..., Any]:
        def draw_start(base: int, shape: Sequence[int] = (), axis: str | tuple[str, ...] = "") -> torch.Tensor:
            begins = on.part_of(tuple(shape), axis)[0].start if axis else 0
            return torch.full((), base + begins, dtype=torch.int64, device=on.mesh.device)

        return draw_start

    def means(self, line: Line[DrawAttrs], args: list[torch.Tensor], told: Told, turn: int) -> Sequence[torch.Tensor]:
        return [
            torch.tensor(
                line.attrs.base + (told.valid_range(line)[0] if line.attrs.axes else 0), device=told.mesh.device
            )
        ]


ROWS: Sequence[Op[Any]] = (
    Call(),
    Cast(),
    Buffer(),
    Zeros(),
    TakeShard(),
    TakePart(),
    PartIndex(),
    CutIndex(),
    NumValid(),
    DrawStart(),
)
