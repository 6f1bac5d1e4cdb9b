"""Assigns matrices to the ranks along an axis in turn: instead of gathering N matrices on every rank, each rank gets
one.

Partitioning an update gathers the tensors that the optimizer reads unsharded, and every rank computes all of them:

    whole_0, whole_1 = all_gather(a, b)      # on every rank
    s_0 = whole(whole_0); s_1 = whole(whole_1)
    x = take_shard(s_0); y = take_shard(s_1)

This pass groups calls of the same subgraph N at a time, whether or not they belong to the same block; if there is a
pipeline, only those of one stage. Rank r computes the r-th call of a group:

    mine = all_to_all(stack_shards([a, b]))  # one row on this rank: all shards of one matrix
    x, y = unstack_shards(all_to_all(whole_dealt(mine)))

Every rank sends only its shards, in both directions, and no call runs twice. If fewer than N calls are left over, some
ranks compute with zeros; a single one is left unchanged, which sends no more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.ir.attributes import DealAttrs, Over, TakeShardAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.program import Instruction, Program, Value, moving
from fzero.ir.value_names import Names
from fzero.sharding.placements import flat_shard, varying
from fzero.trace.recorder import Recorded

aten = torch.ops.aten
_GATHER = "all_gather_start"


def gathers(program: Program) -> bool:
    """Whether an update gathers anything."""
    return any(op.op == _GATHER and op.by == "optimizer" for op in program.instructions)


def rewrite(program: Program) -> Program:
    """Returns the program in which calls of the update on gathered values are assigned to the ranks in turn.

    Precondition: the update is partitioned, and nothing is copied between tiers yet.
    """
    return _Dealer(program).run()


@dataclass(frozen=True)
class _Dealt:
    """A call that can be assigned: its index, the shards of its gathered arguments, by name, and the ops that shard its
    results."""

    at: int
    shards: Mapping[str, Value]
    takes: Sequence[int]


class _Dealer:
    """The rewrite of one program: finds calls that can be assigned to single ranks, and replaces them group by
    group."""

    def __init__(self, program: Program):
        self.program, self.ops, self.values = program, [*program.instructions], program.values_by_name
        self.names, self.functions = Names(self.values), Functions(program.functions)
        self.leaf_of = {grad: leaf for leaf, grad in program.grads.items()}
        self.made = {v.name: i for i, op in enumerate(self.ops) for v in op.out}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            for a in (*op.args, *(a for x in op.body for a in x.args)):
                self.readers[a].append(i)

    def run(self) -> Program:
        alike: dict[Hashable, list[_Dealt]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            if op.by == "optimizer" and op.fn and not op.writes and (found := self._dealt(i, op)):
                alike[self._key(op, found)].append(found)
        new: dict[int, list[Instruction]] = {}  # the ops that replace an op
        gone: set[str] = set()  # values that are not gathered any more
        for calls in alike.values():
            axis = next(iter(calls[0].shards.values())).placement.flat_axes
            num = self.program.mesh.axis_size(axis)
            for group in (calls[i : i + num] for i in range(0, len(calls), num)):
                # The new ops replace the last call of the group, so no shard of any result may be
                # taken before it.
                if len(group) > 1 and min(c for x in group for c in x.takes) > group[-1].at:
                    new.update((i, []) for x in group for i in (x.at, *x.takes))
                    new[group[-1].at] = self._deal(group, axis)
                    gone.update(a for x in group for a in x.shards)
        ops = [x for i, op in enumerate(self.ops) for x in new.get(i, self._left(op, gone))]
        return replace(self.program, instructions=tuple(ops), functions=self.functions.by_name)

    def _dealt(self, at: int, op: Instruction) -> _Dealt | None:
        """Returns a call if it can be assigned to one rank: nothing else reads its gathered arguments, and its results
        are sharded flat."""
        found = {a: self._gathered_from(a) for a in op.args}
        shards = {a: shard for a, shard in found.items() if shard is not None}
        axes = {v.placement.flat_axes for v in shards.values()}
        flat = all(len(v.placement.flat_axes) == 1 and not v.placement.dims for v in shards.values())
        if len(axes) != 1 or not flat or any(len(self.readers[a]) > 1 for a in shards):
            return None
        if any(v.name in self.program.outputs for v in op.out):
            return None
        takes = [self._only_take(v.name, *axes) for v in op.out]
        return None if None in takes else _Dealt(at, shards, [i for i in takes if i is not None])

    def _gathered_from(self, name: str) -> Value | None:
        """Returns the shard that the optimizer gathers into a value; None if it is not gathered."""
        wait = self.ops[self.made[name]] if name in self.made else None
        if wait is None or wait.op != "wait":
            return None
        start = self.ops[self.made[wait.args[0]]]
        if (start.op, start.by) != (_GATHER, "optimizer"):
            return None
        return self.values[start.args[[v.name for v in wait.out].index(name)]]

    def _only_take(self, name: str, axes: tuple[str, ...]) -> int | None:
        """Returns the index of the op that shards a value over these axes first; None if other ops read it too."""
        if len(readers := self.readers[name]) != 1:
            return None
        take = self.ops[readers[0]]
        shards = take.op == "take_shard" and take.axes[:1] == axes and not take.says(TakeShardAttrs).dims
        return readers[0] if shards else None

    def _key(self, op: Instruction, call: _Dealt) -> Hashable:
        """Returns a key that is equal for calls of one subgraph, on one stage of a pipeline, that differ only in their
        shards."""
        shards = tuple((v.shape, v.dtype, v.placement) for v in call.shards.values())
        args = tuple("" if a in call.shards else a for a in op.args)
        return op.fn, args, shards, tuple(self.ops[c].axes for c in call.takes), self._stages(call.shards.values())

    def _stages(self, shards: Iterable[Value]) -> frozenset[int]:
        """Returns the stages of a pipeline that have the parameters from which these shards are computed."""
        names = {v.name for v in shards}
        names |= {a for x in names if x in self.made for a in self.ops[self.made[x]].args}
        leaves = (self.program.leaves.get(self.leaf_of.get(x, x)) for x in names)
        return frozenset(leaf.layout.only.index for leaf in leaves if leaf is not None and leaf.layout.only is not None)

    def _deal(self, group: Sequence[_Dealt], axis: tuple[str, ...]) -> list[Instruction]:
        """Returns the ops for one group of calls."""
        call, said = self.ops[group[0].at], DealAttrs(axes=axis, count=len(group))
        ops, sent = list[Instruction](), list[Value]()
        for shards in zip(*(x.shards.values() for x in group), strict=True):
            # [ranks, elements of a shard]: row r is this rank's shard of matrix r. After the
            # exchange, it is rank r's shard of this rank's matrix.
            sent.append(self._stack(shards[0], axis))
            ops.append(_op("stack_shards", [v.name for v in shards], sent[-1:], said))
        got = [replace(v, name=self.names("deal")) for v in sent]
        place = dict(zip(group[0].shards, got, strict=True))
        takes = [[self.ops[c] for c in column] for column in zip(*(x.takes for x in group), strict=True)]
        columns = [[(take, self._shard(take)) for take in column] for column in takes]
        made = [self._stack(column[0][1], axis) for column in columns]
        given = {i: place[a] for i, a in enumerate(call.args) if a in place}
        fn = self.functions.add(f"{call.fn}_dealt", _on_stacks(self.program.functions[call.fn].graph, given, made))
        args = tuple(place[a].name if a in place else a for a in call.args)
        back = [replace(v, name=self.names("deal")) for v in made]
        ops += [*self._exchange(sent, got, axis), replace(call, args=args, out=tuple(made), fn=fn)]
        ops += self._exchange(made, back, axis)
        for stack, column in zip(back, columns, strict=True):
            ops.append(_op("unstack_shards", [stack.name], [shard for _, shard in column], said))
            for take, shard in column:  # with several axes, it is sharded further
                if further := take.axes[1:]:
                    ops.append(replace(take, args=(shard.name,), attrs=TakeShardAttrs(axes=further)))
        return ops

    def _shard(self, take: Instruction) -> Value:
        """Returns the shard over the first axis that a `take_shard` makes or, if it shards over several axes, passes
        through."""
        value = take.out[0]
        if len(take.axes) == 1:
            return value
        placement = flat_shard(take.axes[:1], take.axes)
        return replace(value, name=self.names(f"{value.name}_part"), placement=placement)

    def _stack(self, shard: Value, axis: tuple[str, ...]) -> Value:
        mesh = self.program.mesh
        shape = (mesh.axis_size(axis), math.prod(shard.local_shape(mesh)))
        return Value(self.names("deal"), shape, shard.dtype, varying(axis))

    def _exchange(self, sent: Sequence[Value], got: Sequence[Value], axis: tuple[str, ...]) -> list[Instruction]:
        handle = moving(self.names("exchange_whole"))
        start = _op("all_to_all_start", [v.name for v in sent], [handle], Over(axes=axis))
        return [start, Instruction("wait", (handle.name,), tuple(got), by="optimizer")]

    def _left(self, op: Instruction, gone: set[str]) -> list[Instruction]:
        """Returns a gather, or its wait, without the values that are no longer gathered."""
        start = op if op.op == _GATHER else None
        if op.op == "wait" and op.args[0] in self.made:
            start = self.ops[self.made[op.args[0]]]
        if start is None or (start.op, start.by) != (_GATHER, "optimizer"):
            return [op]
        wait = self.ops[self.readers[start.out[0].name][0]]
        kept = [(a, v) for a, v in zip(start.args, wait.out, strict=True) if v.name not in gone]
        if op is start:
            return [replace(start, args=tuple(a for a, _ in kept))] if kept else []
        return [replace(wait, out=tuple(v for _, v in kept))] if kept else []


def _op(op: str, args: Sequence[str], out: Sequence[Value], attrs: Any) -> Instruction:
    return Instruction(op, tuple(args), tuple(out), attrs=attrs, by="optimizer")


def _on_stacks(graph: Recorded, given: Mapping[int, Value], made: Sequence[Value]) -> Recorded:
    """Returns the subgraph that takes stacks of all ranks' shards in place of these arguments, and returns its results
    as stacks."""
    new, env = compat.Graph(), dict[fx.Node, fx.Node]()

    def emit(target: Any, args: tuple[Any, ...], shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = new.call_function(target, args)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    places = [new.placeholder(node.name) for node in graph.inputs]
    for i, (node, place) in enumerate(zip(graph.inputs, places, strict=True)):
        env[node], place.meta["val"] = place, node.meta["val"]
        if i in given:
            whole, stack = node.meta["val"], given[i]
            place.meta["val"] = torch.empty(stack.shape, dtype=stack.dtype, device="meta")
            # The shards in the order of the ranks are the flattened matrix, followed by padding.
            flat = emit(aten.reshape.default, (place, [-1]), (stack.numel,), stack.dtype)
            part = emit(aten.slice.Tensor, (flat, 0, 0, whole.numel()), (whole.numel(),), stack.dtype)
            env[node] = emit(aten.reshape.default, (part, list(whole.shape)), whole.shape, stack.dtype)
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = new.node_copy(node, lambda n: env[n])
    results = []
    for node, stack in zip(graph.outputs, made, strict=True):
        numel = node.meta["val"].numel()
        flat = emit(aten.reshape.default, (env[node], [-1]), (numel,), stack.dtype)
        padded = emit(aten.constant_pad_nd.default, (flat, [0, stack.numel - numel]), (stack.numel,), stack.dtype)
        results.append(emit(aten.reshape.default, (padded, list(stack.shape)), stack.shape, stack.dtype))
    new.output(tuple(results))
    return Recorded(new, graph.constants)
