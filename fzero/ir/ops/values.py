"""Defines the ops that make values: calls of subgraphs, casts, buffers, and this rank's shard of a tensor, of the
batch or of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.ir.attributes import (
    BufferAttrs,
    CallAttrs,
    CastAttrs,
    DrawAttrs,
    PartAttrs,
    RankIndexAttrs,
    ShardOfAttrs,
    TakeShardAttrs,
)
from fzero.ir.ops.op import A, Op, Rules, Running, Text, into, micro_text, over
from fzero.ir.program import Function, Instruction, Program, Value, local_bytes
from fzero.mesh import AbstractMesh
from fzero.sharding.placements import REPLICATED, Partial, Shard, Varying, varying
from fzero.trace.subgraph import ancestors
from fzero.tree import dtype_name


class Call(Op[CallAttrs]):
    """Calls a traced subgraph. With `writes` the subgraph works in place on tensors of the state."""

    name = "call"
    writes = True
    attrs = CallAttrs
    computes = "said"
    settles = True
    pool = "results"

    def check(self, op: Instruction[CallAttrs], args: list[Value], rules: Rules) -> None:
        function = rules.program.functions.get(op.fn)
        if function is None:
            rules.bad(op, f"no function {op.fn}")
            return
        places = function.graph.inputs
        if len(places) != len(args):
            rules.bad(op, f"{op.fn} takes {len(places)} arguments, gets {len(args)}")
            return
        self._check_arguments(op, places, args, rules)
        if op.writes != tuple(op.args[i] for i in function.writes):
            rules.bad(op, f"{op.fn} writes its arguments {list(function.writes)}, not {', '.join(op.writes) or 'none'}")
        returned = function.graph.outputs
        if len(returned) != len(op.out):
            rules.bad(op, f"{op.fn} returns {len(returned)} values, {len(op.out)} are named")
            return
        for node, out in zip(returned, op.out, strict=True):
            self._matches(op, out, node.meta["val"], "returns", rules)
        self._check_varying(op, function, args, rules)

    def _check_arguments(
        self, op: Instruction[CallAttrs], places: Sequence[fx.Node], args: list[Value], rules: Rules
    ) -> None:
        for place, arg in zip(places, args, strict=True):
            self._matches(op, arg, place.meta["val"], "takes", rules)
            if arg.placement.flat_axes and op.block is not None:
                rules.bad(op, f"{arg.name} is {arg.placement}, a block takes replicated or varying values")
            summed = {*arg.placement.partial}
            # A subgraph outside blocks may read this rank's own summands of totals over the batch, and the codes of a
            # compressed transfer may be computed from any summands. A quotient may read the summands of its sums
            # before transforms/zero_pass.py reduces them.
            reads = summed <= rules.batch_axes or op.of_sums
            if summed and not op.of_codes and (op.block is not None or not reads):
                rules.bad(op, f"{arg.name} is {arg.placement}, and no function reads a summand")

    def _check_varying(self, op: Instruction[CallAttrs], function: Function, args: list[Value], rules: Rules) -> None:
        """A result varies over each axis over which a value that it depends on varies."""
        places = function.graph.inputs
        own = {place: a for place, a in zip(places, args, strict=True) if a.placement.varies_over}
        axes = {axis for a in own.values() for axis in a.placement.varies_over}
        for node, out in zip(function.graph.outputs, op.out, strict=True):
            over = out.placement.varies_over
            read = set() if axes.issubset(over) else ancestors([node], stop=set(places))
            for a in (a for place, a in own.items() if place in read):
                if lost := [axis for axis in a.placement.varies_over if axis not in over]:
                    said = f"{out.name} is {out.placement}, but reads {a.name}"
                    rules.bad(op, f"{said}, of which each rank along {', '.join(lost)} has its own")

    def _matches(
        self, op: Instruction[CallAttrs], value: Value, expected: torch.Tensor, verb: str, rules: Rules
    ) -> None:
        if tuple(expected.shape) != value.local_shape(rules.program.mesh) or expected.dtype != value.dtype:
            rules.bad(op, f"{op.fn} {verb} {dtype_name(expected.dtype)}{list(expected.shape)}, {value.name} is {value}")

    def text(self, op: Instruction[CallAttrs], program: Program) -> Text:
        written = sorted({w.split("['")[0] for w in op.writes if w in program.leaves})
        in_place = [f"in place: {', '.join(written)}" if written else "in place"] if op.writes else []
        return (
            super().text(op, program)._replace(remark=", ".join([*(["on the host"] if op.on_host else []), *in_place]))
        )


class Cast(Op[CastAttrs]):
    """Converts one value or several to another dtype, or copies them in the same dtype."""

    name = "cast"
    attrs = CastAttrs
    computes = "there"
    settles = True
    pool = "results"
    makes_own = True
    batched = True

    def check(self, op: Instruction[CastAttrs], args: list[Value], rules: Rules) -> None:
        if not args or len(args) != len(op.out):
            rules.bad(op, f"casts {len(args)} values to {len(op.out)}")
            return
        for source, out in zip(args, op.out, strict=True):
            here, there = source.placement, out.placement
            # A varying value may become a summand, or a summand may become one along more axes than before.
            summed, now = ({x for x in at.axes if isinstance(x[1], Partial)} for at in (here, there))
            summand = summed < now and not here.is_flat_shard
            if out.dtype != op.attrs.dtype or out.shape != source.shape or not (here == there or summand):
                rules.bad(op, f"{source} becomes {out}")
            if source.dtype != args[0].dtype:
                rules.bad(op, f"casts {args[0]} and {source} at once")

    def touched(self, op: Instruction[CastAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return sum(local_bytes(values[a], mesh) for a in op.args) + sum(local_bytes(v, mesh) for v in op.out)

    def text(self, op: Instruction[CastAttrs], program: Program) -> Text:
        source = op.args[0] if len(op.args) == 1 else f"[{', '.join(op.args)}]"
        return Text(f"{op.callee}({', '.join([source, repr(dtype_name(op.attrs.dtype)), *into(op, program)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return on.tiers.settled(_cast, lambda *args: args[-1])


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

    def check(self, op: Instruction[BufferAttrs], args: list[Value], rules: Rules) -> None:
        leaves = op.attrs.leaves
        if len(leaves) != len(op.out) or not all(leaf in rules.program.leaves for leaf in leaves):
            rules.bad(op, f"makes {len(op.out)} buffers for {len(leaves)} leaves")
            return
        rules.aliases.update((v.name, leaf) for v, leaf in zip(op.out, leaves, strict=True))
        rules.pairs(op, [rules.known[leaf] for leaf in leaves], op.out, "a buffer for")

    def text(self, op: Instruction[BufferAttrs], program: Program) -> Text:
        return Text(f"buffer({', '.join(into(op, program))})", listed=True)

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda into: into


class Zeros(Op):
    """A value of zeros."""

    name = "zeros"
    args = 0
    out = 1
    makes_own = True
    settles = True

    def check(self, op: Instruction, args: list[Value], rules: Rules) -> None:
        at = op.out[0].placement
        if at.flat_axes or at.dim_shards or at.in_flight:
            rules.bad(op, f"makes {op.out[0]}")

    def text(self, op: Instruction, program: Program) -> Text:
        value = op.out[0]
        return Text(f"zeros({', '.join([str([*value.shape]), repr(dtype_name(value.dtype)), *into(op, program)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def zeros(shape: Sequence[int], dtype: str, into: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
            if into is not None:
                return into[0].zero_()
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=on.mesh.device)

        return on.tiers.settled(zeros, lambda *args: args[-1])


class TakeShard(Op[TakeShardAttrs]):
    """Takes this rank's flat shard of a full value: a view, or a padded copy on a rank whose shard is not full. Of a
    shard it takes this rank's shard over further axes.
    """

    name = "take_shard"
    args = 1
    out = 1
    attrs = TakeShardAttrs
    computes = "there"

    def check(self, op: Instruction[TakeShardAttrs], args: list[Value], rules: Rules) -> None:
        rules.aliases[op.out[0].name] = rules.root(op.args[0])
        here = args[0].placement
        shard = replace(args[0], name=op.out[0].name, placement=here.sharded(op.attrs.axes, dims=op.attrs.dims))
        full = here == REPLICATED or (here.is_flat_shard and not here.over(Varying))
        if not full or here.partial or op.out[0] != shard:
            rules.bad(op, f"takes a shard of {args[0]}, which is {op.out[0]}")

    def shares(self, op: Instruction[TakeShardAttrs]) -> Iterable[tuple[str, str]]:
        return [(op.out[0].name, op.args[0])]

    def is_view(self, op: Instruction[TakeShardAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> bool:
        whole = local_bytes(values[op.args[0]], mesh)
        return not op.attrs.dims and local_bytes(op.out[0], mesh) * mesh.axis_size(op.attrs.axes) == whole

    def touched(self, op: Instruction[TakeShardAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return 0.0 if self.is_view(op, values, mesh) else 2 * local_bytes(op.out[0], mesh)

    def text(self, op: Instruction[TakeShardAttrs], program: Program) -> Text:
        shard = ["of_shard=True"] if program.values_by_name[op.args[0]].placement.is_flat_shard else []
        dims = [f"dims={[[*d] for d in op.attrs.dims]}"] if op.attrs.dims else []
        return Text(f"take_shard({', '.join([op.args[0], over(op), *shard, *dims])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def take_shard(
            whole: torch.Tensor, axis: str | tuple[str, ...], of_shard: bool = False, dims: Sequence[Sequence[int]] = ()
        ) -> torch.Tensor:
            if of_shard:
                # A shard is already padded for these axes, so it divides evenly ([Note: several
                # axes] in fzero/sharding/layout.py).
                return whole.chunk(on.mesh.axis_size(axis))[on.mesh.index(axis)]
            boxes, size = on.part_of(tuple(whole.shape), axis, tuple(Shard(*d) for d in dims))
            part, num = boxes.take(whole), boxes.numel
            return part if num == size else torch.nn.functional.pad(part, (0, size - num))

        return take_shard


class TakePart(Op[PartAttrs]):
    """Takes the samples of one micro-batch."""

    name = "take_part"
    args = 1
    out = 1
    attrs = PartAttrs

    def check(self, op: Instruction[PartAttrs], args: list[Value], rules: Rules) -> None:
        whole, part = args[0], op.out[0]
        _, count = rules.micro(op)
        rest = (whole.shape[1:], whole.dtype, whole.placement)
        if whole.shape[:1] != tuple(n * count for n in part.shape[:1]) or rest != (
            part.shape[1:],
            part.dtype,
            part.placement,
        ):
            rules.bad(op, f"takes one of {count} parts of {whole}, which is {part}")

    def shares(self, op: Instruction[PartAttrs]) -> Iterable[tuple[str, str]]:
        return [(op.out[0].name, op.args[0])]

    def text(self, op: Instruction[PartAttrs], program: Program) -> Text:
        return Text(f"take_part({', '.join([op.args[0], *micro_text(op)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda whole, index, count: whole[index * (size := whole.shape[0] // count) : (index + 1) * size]


class Number(Op[A]):
    """An integer that varies along the axes of the op."""

    args = 0
    out = 1

    def check(self, op: Instruction[A], args: list[Value], rules: Rules) -> None:
        axes = op.axes
        wanted = Value(op.out[0].name, (), torch.int64, varying(axes))
        if op.out[0] != wanted:
            rules.bad(op, f"makes {op.out[0]}, not {wanted}")


class RankIndex(Number[RankIndexAttrs]):
    """The index of this rank along axes. With micro-batches, the index of the micro-batch among those of all these
    ranks: the micro-batches of one rank are consecutive parts of the global batch. Until the axes that shard the batch
    are known (fzero/transforms/zero_pass.py), the index of the part of the batch has no axes.
    """

    name = "rank_index"
    attrs = RankIndexAttrs

    def check(self, op: Instruction[RankIndexAttrs], args: list[Value], rules: Rules) -> None:
        rules.micro(op)
        super().check(op, args, rules)

    def text(self, op: Instruction[RankIndexAttrs], program: Program) -> Text:
        return Text(f"rank_index({', '.join([*micro_text(op), *([over(op)] if op.axes else [])])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def rank_index(micro: int = 0, count: int = 1, axis: str | tuple[str, ...] = ()) -> torch.Tensor:
            return torch.full((), on.mesh.index(axis) * count + micro, dtype=torch.int64, device=on.mesh.device)

        return rank_index


class NumValid(Number[ShardOfAttrs]):
    """The number of elements of this rank's shard that are not padding."""

    name = "num_valid"
    attrs = ShardOfAttrs

    def text(self, op: Instruction[ShardOfAttrs], program: Program) -> Text:
        return Text(f"num_valid({list(op.attrs.shape)}, {over(op)})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda shape, axis: torch.full(
            (), on.part_of(tuple(shape), axis)[0].numel, dtype=torch.int64, device=on.mesh.device
        )


class DrawStart(Number[DrawAttrs]):
    """The offset of this rank's random words among those of the full tensor."""

    name = "draw_start"
    attrs = DrawAttrs

    def text(self, op: Instruction[DrawAttrs], program: Program) -> Text:
        base = op.attrs.base
        return Text(
            f"draw_start({base}, {list(op.attrs.shape)}, {over(op)})" if op.attrs.axes else f"draw_start({base})"
        )

    def runs(self, on: Running) -> Callable[..., Any]:
        def draw_start(base: int, shape: Sequence[int] = (), axis: str | tuple[str, ...] = "") -> torch.Tensor:
            begins = on.part_of(tuple(shape), axis)[0].start if axis else 0
            return torch.full((), base + begins, dtype=torch.int64, device=on.mesh.device)

        return draw_start


ROWS: Sequence[Op[Any]] = (
    Call(),
    Cast(),
    Buffer(),
    Zeros(),
    TakeShard(),
    TakePart(),
    RankIndex(),
    NumValid(),
    DrawStart(),
)
