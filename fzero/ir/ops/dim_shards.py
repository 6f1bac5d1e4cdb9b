"""Defines ops for values that a mesh axis shards along a dimension, and ops for round-robin ownership.

A gather over such an axis produces the shards one after another, and a reduction over it takes them in this form.
Subgraphs read and return a shard as a tensor with its natural shape. The stack ops serve shards that the ranks along
an axis assign in round-robin order, so that each rank gets one full value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero.ir.attributes import DealAttrs, Over
from fzero.ir.ops.op import Op, Rules, Running, Text, into, over
from fzero.ir.program import Instruction, Program, Value, local_bytes
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import sharding_over
from fzero.sharding.placements import Flat, Shard, varying
from fzero.sharding.shard_regions import DimShard, part_shape, parts_of


class Rearranged(Op[Over]):
    """Converts between a value that an axis shards along a dimension, joined into one tensor, and its consecutive
    padded shards.
    """

    args = 1
    out = 1
    attrs = Over
    settles = True
    pool = "results"
    makes_own = True

    def parts(self, op: Instruction[Over], arg: Value) -> tuple[Value, Value]:
        """Returns the value as shards, and the joined value."""
        raise NotImplementedError(self.name)

    def rearrange(self, x: torch.Tensor, out: torch.Tensor, shape: Sequence[int], along: DimShard) -> torch.Tensor:
        """Fills and returns `out`. `shape` is the shape of the joined value, without padding."""
        raise NotImplementedError(self.name)

    def check(self, op: Instruction[Over], args: list[Value], rules: Rules) -> None:
        parts, joined = self.parts(op, args[0])
        at = parts.placement
        right = at.is_permuted and at.flat_axes[-1:] == op.attrs.axes and len(at.flat_axes) == len(at.dims)
        if not right or replace(parts, name=joined.name, placement=at.gathered) != joined:
            rules.bad(op, f"{args[0]} becomes {op.out[0]}")

    def touched(self, op: Instruction[Over], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return local_bytes(values[op.args[0]], mesh) + local_bytes(op.out[0], mesh)

    def last_sharding(self, op: Instruction[Over], arg: Value, mesh: AbstractMesh) -> tuple[tuple[int, ...], Shard]:
        """Returns the sharding along a dim by the last axis, and the shape of the value that it shards."""
        parts, _ = self.parts(op, arg)
        at = parts.placement
        return part_shape(parts.shape, sharding_over(mesh, at.flat_axes[:-1], dims=at.dims[:-1]).along), at.dims[-1]

    def text(self, op: Instruction[Over], program: Program) -> Text:
        shape, (dim, groups) = self.last_sharding(op, program.values_by_name[op.args[0]], program.mesh)
        local = [*op.out[0].local_shape(program.mesh)]
        said = [f"dim={dim}", *([f"groups={groups}"] if groups > 1 else []), f"shape={[*shape]}"]
        said += [f"size={local}"] if local != [*shape] else []
        return Text(f"{self.name}({', '.join([op.args[0], over(op), *said, *into(op, program)])})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def rearranged(
            x: torch.Tensor,
            axis: str,
            dim: int,
            shape: Sequence[int],
            groups: int = 1,
            size: Sequence[int] | None = None,
            into: Sequence[torch.Tensor] | None = None,
        ) -> torch.Tensor:
            out = x.new_empty(shape if size is None else size) if into is None else into[0]
            return self.rearrange(x, out, shape, DimShard(dim, groups, on.mesh.axis_size(axis)))

        return on.tiers.settled(rearranged, lambda *args: args[-1])


class JoinParts(Rearranged):
    """Joins the shards that a gather has brought into the value that they are shards of."""

    name = "join_parts"

    def parts(self, op: Instruction[Over], arg: Value) -> tuple[Value, Value]:
        return arg, op.out[0]

    def rearrange(self, x: torch.Tensor, out: torch.Tensor, shape: Sequence[int], along: DimShard) -> torch.Tensor:
        numel, rows = math.prod(shape), x.view(along.size, -1)
        for row, boxes in zip(rows, parts_of(shape, (along,)), strict=True):
            boxes.put(row[: boxes.numel], out.view(-1)[:numel].view(*shape))
        # The padding is part of what a later reduction sends, and buffers of the arena contain leftovers.
        out.view(-1)[numel:].zero_()
        return out


class SplitParts(Rearranged):
    """Splits a value into the shards that a reduction takes."""

    name = "split_parts"

    def parts(self, op: Instruction[Over], arg: Value) -> tuple[Value, Value]:
        return op.out[0], arg

    def rearrange(self, x: torch.Tensor, out: torch.Tensor, shape: Sequence[int], along: DimShard) -> torch.Tensor:
        whole = x.reshape(-1)[: math.prod(shape)].view(*shape)
        for row, boxes in zip(out.view(along.size, -1), parts_of(shape, (along,)), strict=True):
            row[: boxes.numel].copy_(boxes.take(whole))
            # As above: the padding of each shard is reduced together with its elements.
            row[boxes.numel :].zero_()
        return out


class Reshape(Op):
    """Converts between the stored form of a shard along dimensions, which is flat and padded, and the tensor with its
    natural shape that subgraphs read: a view, except for a copy if padding is added.
    """

    name = "reshape"
    args = 1
    out = 1
    computes = "there"

    def check(self, op: Instruction, args: list[Value], rules: Rules) -> None:
        shard, tensor = sorted((args[0], op.out[0]), key=lambda v: not v.placement.is_flat_shard)
        at = shard.placement
        right = at.is_flat_shard and len(at.flat_axes) == len(at.dims)
        if not right or replace(shard, name=tensor.name, placement=at.unflattened) != tensor:
            rules.bad(op, f"{args[0]} becomes {op.out[0]}")
        rules.aliases |= {op.out[0].name: root} if (root := rules.root(args[0].name)) in rules.program.leaves else {}

    def shares(self, op: Instruction) -> Iterable[tuple[str, str]]:
        return [(op.out[0].name, op.args[0])]

    def is_view(self, op: Instruction, values: Mapping[str, Value], mesh: AbstractMesh) -> bool:
        return local_bytes(op.out[0], mesh) <= local_bytes(values[op.args[0]], mesh)

    def touched(self, op: Instruction, values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return 0.0 if self.is_view(op, values, mesh) else 2 * local_bytes(op.out[0], mesh)

    def text(self, op: Instruction, program: Program) -> Text:
        return Text(f"reshape({op.args[0]}, {[*op.out[0].local_shape(program.mesh)]})")

    def runs(self, on: Running) -> Callable[..., Any]:
        return _reshaped


def _reshaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor's elements in another shape: without the padding at its end, or padded with zeros."""
    flat, numel = x.reshape(-1), math.prod(shape)
    missing = numel - flat.numel()  # negative if padding is dropped, positive if it is added
    return (torch.nn.functional.pad(flat, (0, missing)) if missing > 0 else flat[:numel]).view(*shape)


class Deal(Op[DealAttrs]):
    """Converts between shards of at most as many values as there are ranks along an axis, and their stack. Row r of
    the stack goes to rank r, or comes from it.
    """

    attrs = DealAttrs

    def ends(self, op: Instruction[DealAttrs], args: Sequence[Value]) -> tuple[Sequence[Value], Value]:
        """Returns the shards, and the stack."""
        raise NotImplementedError(self.name)

    def check(self, op: Instruction[DealAttrs], args: list[Value], rules: Rules) -> None:
        if len(op.attrs.axes) != 1 or not args or not op.out:
            rules.bad(op, f"distributes {len(args)} values over {len(op.attrs.axes)} axes")
            return
        shards, stack = self.ends(op, args)
        size, first = rules.program.mesh.axis_size(op.attrs.axes), shards[0]
        if not {*first.placement.grid} <= {*rules.program.mesh.axes}:
            rules.bad(op, f"distributes {first}")
            return
        alike = all(replace(v, name=first.name) == first for v in shards)
        wanted = replace(
            stack,
            shape=(size, math.prod(first.local_shape(rules.program.mesh))),
            dtype=first.dtype,
            placement=varying(op.attrs.axes),
        )
        at = first.placement
        # Rows of the stack are exchanged by an all-to-all, after which rank r has all shards of value r. That works
        # only for flat shards over exactly this axis.
        flat = at.axes == tuple((axis, Flat()) for axis in op.attrs.axes)
        if not (alike and flat and stack == wanted and len(shards) == op.attrs.count <= size):
            rules.bad(op, f"{', '.join(map(str, args))} become {', '.join(map(str, op.out))}")


class StackShards(Deal):
    """Stacks the shards. Rows that are left over are zero."""

    name = "stack_shards"
    out = 1
    pool = "results"
    settles = True
    makes_own = True

    def ends(self, op: Instruction[DealAttrs], args: Sequence[Value]) -> tuple[Sequence[Value], Value]:
        return args, op.out[0]

    def touched(self, op: Instruction[DealAttrs], values: Mapping[str, Value], mesh: AbstractMesh) -> float:
        return 2 * local_bytes(op.out[0], mesh)

    def text(self, op: Instruction[DealAttrs], program: Program) -> Text:
        arguments = [f"[{', '.join(op.args)}]", over(op), *into(op, program)]
        return Text(f"{self.name}({', '.join(arguments)})")

    def runs(self, on: Running) -> Callable[..., Any]:
        def stack_shards(
            shards: Sequence[torch.Tensor], axis: str, into: Sequence[torch.Tensor] | None = None
        ) -> torch.Tensor:
            size = on.mesh.axis_size(axis)
            return _stacked(shards, shards[0].new_empty(size, shards[0].numel()) if into is None else into[0])

        return on.tiers.settled(stack_shards, lambda *args: args[-1])


def _stacked(shards: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    torch.stack([x.reshape(-1) for x in shards], out=out[: len(shards)])
    # Ranks that get no value still take part in the exchange of rows.
    out[len(shards) :].zero_()
    return out


class UnstackShards(Deal):
    """Returns the rows of the stack, as views."""

    name = "unstack_shards"
    args = 1

    def ends(self, op: Instruction[DealAttrs], args: Sequence[Value]) -> tuple[Sequence[Value], Value]:
        return op.out, args[0]

    def shares(self, op: Instruction[DealAttrs]) -> Iterable[tuple[str, str]]:
        return [(v.name, op.args[0]) for v in op.out]

    def text(self, op: Instruction[DealAttrs], program: Program) -> Text:
        return Text(f"{self.name}({op.args[0]}, {len(op.out)})", listed=True)

    def runs(self, on: Running) -> Callable[..., Any]:
        return lambda stack, count: stack[:count].unbind()


ROWS: Sequence[Op[Any]] = (JoinParts(), SplitParts(), Reshape(), StackShards(), UnstackShards())
