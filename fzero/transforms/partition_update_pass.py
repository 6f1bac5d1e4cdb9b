"""Partitions the optimizer update into subgraphs: one per block of parameters, compiled once for all equal blocks, with
the scalar computations hoisted out.

The recorded update is one graph over all parameters. Its scalars (norms, bias corrections, learning rates) are few and
depend on all parameters. Its tensor arithmetic is large, and each part depends on one parameter and some scalars. So
the update is divided into levels. Each level has a subgraph of scalars, then subgraphs over parameters that reduce to
new scalars, then one all_reduce for all of these. After the last level come the subgraphs that write new parameters and
state in place. A tensor that two levels need is computed twice, because storing and reading it again would cost as
much. Tensors that the optimizer marks as needed unsharded (fzero/optim/unsharded.py) are gathered at the end of a
level, too: one subgraph computes the shards, and the subgraphs of the next level read the gathered tensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero.ir.attributes import Attrs, CastAttrs, DrawAttrs, ReduceAttrs, ShardOfAttrs, TakeShardAttrs
from fzero.ir.from_graph import Functions
from fzero.ir.program import Function, Instruction, Program, Value, moving
from fzero.ir.value_names import Names
from fzero.sharding.flat_propagation import Sharded, draw_start, gather, num_valid, propagate, take_shard
from fzero.sharding.graph_writer import all_reduce
from fzero.sharding.layout import TIERS, Sharding, sharding_over
from fzero.sharding.placements import REPLICATED, MeshPlacement, flat_shard, partial, varying
from fzero.sharding.update_scalars import MARKERS, is_leaf_value, mark_few, mark_one_element, reduces, slice_packed
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import Subgraph, ancestors, views_of
from fzero.transforms.zero_pass import gathered

aten = torch.ops.aten

Owner = tuple[int, int]
"""The number of a block, and the index of a memory tier in `TIERS`."""
NOBODY: Owner = (-1, 0)


def rewrite(program: Program, tiers: tuple[int, ...] = ()) -> Program:
    """Replaces the `update` op by ops that can be executed. Values are sharded as the placements of its arguments and
    targets say.

    Precondition: the program is sharded over the mesh, and its transfers are encoded.

    Args:
        program: the program.
        tiers: for each tensor of the state, the index of its tier among those in use. The result depends on nothing
            else of the tiers, so programs are cached by it.
    """
    update = program.update
    assert update is not None
    values, grads = program.values(), {g: leaf for leaf, g in program.grads.items()}
    attrs = update.attrs
    reads = {leaf for name in update.args for leaf in (grads.get(name, name), attrs.leaf.get(name, name))}
    key = (  # without the graph, which the cache refers to weakly
        (update.args, update.writes, update.out, attrs.sums, attrs.maxima, attrs.leaf),
        program.mesh,
        {name: values[name].placement for name in (*update.args, *update.writes)},
        {leaf: (program.owners.get(leaf), program.leaves[leaf].layout) for leaf in reads if leaf in program.leaves},
        program.grads,
    )
    known = _LAST.get(attrs.graph)
    if known is None or known.key != key or not known.goes_into(program, values):
        _LAST[attrs.graph] = known = _partitioned(key, program, values)
    at = program.instructions.index(update)
    return replace(
        program,
        instructions=(*program.instructions[:at], *known.ops, *program.instructions[at + 1 :]),
        functions={**program.functions, **known.functions},
    )


class _Partitioned(NamedTuple):
    """The last partition of an update. A search makes many programs with the same update, which is by far the largest
    graph of most steps.

    Attributes:
        key: what the partition was made from.
        names: the names of the values that it adds to a program.
        ops: what replaces the update.
        functions: the subgraphs that `ops` call.
    """

    key: Any
    names: frozenset[str]
    ops: tuple[Instruction, ...]
    functions: dict[str, Function]

    def goes_into(self, program: Program, values: Mapping[str, Value]) -> bool:
        """Whether its names are free in a program, or name the same subgraphs."""
        same = all(program.functions.get(name, fn) is fn for name, fn in self.functions.items())
        return same and self.names.isdisjoint(values)


_LAST: weakref.WeakKeyDictionary[Recorded, _Partitioned] = weakref.WeakKeyDictionary()


def _partitioned(key: Any, program: Program, values: Mapping[str, Value]) -> _Partitioned:
    made = _UpdatePartition(program)
    names = frozenset(v.name for op in made.ops for v in op.out) - values.keys()
    called = dict.fromkeys(op.fn for op in made.ops if op.fn)
    return _Partitioned(key, names, tuple(made.ops), {fn: made.functions.by_name[fn] for fn in called})


class _UpdatePartition:
    """The partition of one update: `ops` replace it and call subgraphs of `functions`.

    The graph is first rewritten for shards (`propagate`); then the scalars of each block and level are packed into one
    vector, and the ops are emitted level by level.
    """

    def __init__(self, program: Program):
        self.functions, self.names = Functions(program.functions), Names(program.values())
        self.values, self.values_named, self.num_scalars = program.values(), set[str](), 0
        # the shards that are gathered: unsharded shape and placement
        self.placed: dict[fx.Node, tuple[tuple[int, ...], MeshPlacement]] = {}
        self.gathered: dict[fx.Node, str] = {}
        update = program.update
        assert update is not None
        self.update = update
        source: Recorded = update.attrs.graph
        places = source.inputs
        named = {**update.attrs.leaf, **{g: f"the gradient of {leaf}" for leaf, g in program.grads.items()}}

        def sharding_of(name: str) -> Sharding | None:
            at = self.values[name].placement
            return sharding_over(program.mesh, at.flat_axes, at.grid, at.dims) if at.is_flat_shard else None

        sharded = {
            p: Sharded(named.get(a, a), c)
            for p, a in zip(places, update.args, strict=True)
            if (c := sharding_of(a)) is not None
        }
        self.graph = propagate(
            source, sharded, [*map(sharding_of, update.writes), *(None for _ in update.out)], "optimizer"
        )
        self.places = self.graph.inputs
        self.name = dict(zip(self.places, update.args, strict=True))
        grads = {g: leaf for leaf, g in program.grads.items()}
        only = {a: program.leaves[leaf].layout.only for a in update.args if (leaf := grads.get(a, a)) in program.leaves}
        mark_one_element(self.graph.graph, {p: at for p, a in self.name.items() if (at := only.get(a)) is not None})
        mark_few(self.graph.graph, {p for p, a in self.name.items() if a in update.attrs.maxima})
        self.place = {name: p for p, name in self.name.items()}
        self.known: dict[Any, str] = {}  # the subgraphs so far, by their signatures
        self._copy_moved()
        self.outputs = self.graph.outputs
        self.ops: list[Instruction] = []
        self.owner = self._owners(program)
        # The outputs are the new values of the targets, followed by the metrics.
        self.metric = dict(zip(reversed(self.outputs), reversed(update.out), strict=False))
        self._pack()
        self._emit()

    def _copy_moved(self) -> None:
        """Copies values that are only moved to another tensor, such as a gradient that is kept or two tensors that are
        exchanged, because targets are overwritten one by one."""
        graph, outputs = self.graph.graph, self.graph.outputs
        last, views = graph.output_node(), views_of(graph, set(self.places))
        with graph.inserting_before(last):
            for i, (target, node) in enumerate(zip(self.update.writes, outputs, strict=False)):
                made_here = node not in views and node.target not in (take_shard, gather)
                if not made_here or self.name.get(node, target) != target:
                    outputs[i] = graph.call_function(
                        aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                    )
                    value = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format, device="meta")
                    outputs[i].meta.update(node.meta, val=value)
        last.args = (tuple(outputs),)

    def _owners(self, program: Program) -> dict[fx.Node, Owner]:
        """Returns the block of every tensor, and its tier: tensors that an operation combines belong together, on the
        tier farthest from the device."""
        parent: dict[fx.Node, fx.Node] = {}

        def root(node: fx.Node) -> fx.Node:
            # union-find with path halving
            while parent.setdefault(node, node) is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        for node in self.graph.graph.nodes:
            if is_leaf_value(node):
                for arg in node.all_input_nodes:
                    if is_leaf_value(arg):
                        parent[root(arg)] = root(node)
        for target, node in zip(self.update.writes, self.outputs, strict=False):
            # a parameter belongs to the block of its new value, even if that does not read it
            place = self.place[target]
            if is_leaf_value(place) and is_leaf_value(node):
                parent[root(place)] = root(node)
        owner: dict[fx.Node, Owner] = {}
        grads = {g: leaf for leaf, g in program.grads.items()}
        aliases = self.update.attrs.leaf
        for place in self.places:
            name = self.name[place]
            leaf = aliases.get(name, grads.get(name, name))
            number, before = program.owners.get(leaf, NOBODY[0]), owner.get(root(place), NOBODY)
            tier = TIERS.index(program.leaves[leaf].layout.tier) if leaf in program.leaves and name not in grads else 0
            owner[root(place)] = min((n for n in (number, before[0]) if n >= 0), default=-1), max(tier, before[1])
        return {n: owner.get(root(n), NOBODY) for n in parent}

    def _levels(self) -> dict[fx.Node, int]:
        """Returns, for each node, the largest number of reductions and gathers on a path to it."""
        level: dict[fx.Node, int] = {}
        for node in _in_order(self.graph.graph):
            args = node.all_input_nodes
            level[node] = max((level[a] + (reduces(a) or a.target is gather) for a in args), default=0)
        return level

    def _pack(self) -> None:
        """Stacks the scalars that a block's parameters are reduced to at one level into one vector, so that only one
        value has to be named, sent and read."""
        level, graph = self._levels(), self.graph.graph
        groups: dict[tuple[int, Owner, torch.dtype, Across | None], list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if reduces(node):
                groups[
                    level[node], self.owner.get(node.all_input_nodes[0], NOBODY), node.meta["val"].dtype, _across(node)
                ].append(node)
        last = graph.output_node()
        for (_, owner, dtype, across), group in groups.items():
            if len(group) == 1:
                continue
            scalars = [n if not across else next(u for u in n.users if u.target is all_reduce) for n in group]
            with graph.inserting_before(last):
                flat = [self._shaped(n, (), owner) for n in group]
                packed = graph.call_function(aten.stack.default, (flat,))
                packed.meta.update(val=torch.empty(len(group), dtype=dtype, device="meta"), reduction=True)
                self.owner[packed] = owner
                whole = packed
                if across:
                    whole = graph.call_function(all_reduce, (packed, *across))
                    whole.meta["val"] = packed.meta["val"]
                for i, scalar in enumerate(scalars):
                    one = graph.call_function(aten.select.int, (whole, 0, i))
                    one.meta["val"] = scalar.meta["val"].reshape(())
                    one = self._shaped(one, tuple(scalar.meta["val"].shape))
                    # The packed vector itself reads these scalars, so replacing them there
                    # would form a cycle.
                    scalar.replace_all_uses_with(
                        one, delete_user_cb=lambda user, kept=(packed, *flat): user not in kept
                    )
            for node, scalar in zip(group, scalars, strict=True):
                node.meta.pop("reduction", None)
                node.meta["shard"] = True  # now part of the block's subgraph, not a scalar of its own
                if scalar is not node:
                    graph.erase_node(scalar)
        # The new nodes are at the end of the graph, after the nodes that read them: `_sort`
        # follows.
        slice_packed(graph)
        self.outputs = self.graph.outputs
        _sort(graph)

    def _shaped(self, node: fx.Node, shape: tuple[int, ...], owner: Owner | None = None) -> fx.Node:
        """Reshapes a value with one element to this shape, because some reductions keep dims. `owner` is the block to
        whose subgraph the reshape belongs, if it belongs to one."""
        if node.meta["val"].shape == shape:
            return node
        new = self.graph.graph.call_function(aten.reshape.default, (node, list(shape)))
        new.meta["val"] = node.meta["val"].reshape(shape)
        if owner is not None:
            new.meta["shard"], self.owner[new] = True, owner
        return new

    def _emit(self) -> None:
        """Adds the ops of every level, then those that write the state and compute the metrics."""
        nodes, level = list(self.graph.graph.nodes), self._levels()
        needed = ancestors(self.outputs, stop=set())
        stop = {
            n
            for n in nodes
            if n.op == "placeholder"
            or n.target in (take_shard, gather, all_reduce)
            or reduces(n)
            or not (n.op == "get_attr" or is_leaf_value(n))
        }
        for at in sorted({level[n] for n in nodes if n in needed and n.op != "output"}):
            self._level([n for n in nodes if n in needed and level[n] == at], at, stop)
        metrics = self.outputs[len(self.update.writes) :]
        arrays = [n for n in dict.fromkeys(metrics) if n not in self.name]
        # metrics that are not scalars come first: they may read views of parameters that are overwritten next
        if arrays:
            self._function("metrics", arrays, (), stop - set(arrays))
        self._write(stop)
        for node, value in zip(metrics, self.update.out, strict=True):
            if self.name[node] != value.name:
                attrs = CastAttrs(dtype=value.dtype)
                self.ops.append(Instruction("cast", (self.name[node],), (value,), attrs=attrs, by="optimizer"))

    def _level(self, here: Sequence[fx.Node], at: int, stop: set[fx.Node]) -> None:
        """Adds the ops of one level: its scalars, shards of unsharded tensors, and subgraphs that reduce to new
        scalars."""
        for node in here:
            args: Any = node.args
            if node.target is num_valid:
                shape, axes = args
                self._append("num_valid", (), node, ShardOfAttrs(shape=shape, axes=axes), varying(axes))
            elif node.target is draw_start:
                base, shape, axes = args
                self._append("draw_start", (), node, DrawAttrs(base=base, shape=shape, axes=axes), varying(axes))
        self._scalars([n for n in here if self._is_scalar(n)], at, stop)
        self._take_shards([n for n in here if n.target is take_shard], stop)
        reductions = [n for n in here if reduces(n)]
        for group in self._by_owner(reductions):
            # Subgraphs begin at the nodes of `stop`, to which the reductions belong too: those to
            # be computed here are removed from it.
            self._function("reduce", group, (), stop - set(group))
        self._all_reduce([u for n in reductions for u in n.users if u.target is all_reduce])
        for group in self._by_owner([n for n in here if n.target is gather]):
            self._gather(group, stop)

    def _write(self, stop: set[fx.Node]) -> None:
        """Adds the subgraphs of blocks that write the state in place, and the assignments of unchanged values."""
        targets: dict[fx.Node, list[str]] = defaultdict(list)
        for target, node in zip(self.update.writes, self.outputs, strict=False):
            if self.name.get(node) != target:
                targets[node].append(target)
        for group in self._by_owner([n for n in targets if is_leaf_value(n)]):
            written = [(n, target) for n in group for target in targets[n]]
            self._function("update", [n for n, _ in written], tuple(t for _, t in written), stop - set(group))
        for target, node in zip(self.update.writes, self.outputs, strict=False):
            if not is_leaf_value(node) and self.name[node] != target:
                self.ops.append(Instruction("assign", (target, self.name[node]), writes=(target,), by="optimizer"))

    def _scalar_name(self, node: fx.Node) -> str:
        """The name of the metric if the node is one, otherwise a new numbered name."""
        if node in self.metric and self.metric[node].name not in self.values_named:
            self.values_named.add(self.metric[node].name)
            return self.metric[node].name
        self.num_scalars += 1
        return self.names(f"s_{self.num_scalars - 1}")

    def _is_scalar(self, node: fx.Node) -> bool:
        return (
            node.op == "call_function" and not is_leaf_value(node) and not reduces(node) and node.target not in MARKERS
        )

    def _scalars(self, nodes: list[fx.Node], at: int, stop: set[fx.Node]) -> None:
        inside, returned = set(nodes), set(self.outputs)
        outputs = [n for n in nodes if n not in self.name and (n in returned or any(u not in inside for u in n.users))]
        if outputs:
            self._function(f"scalars_{at}", outputs, (), stop - inside)

    def _by_owner(self, nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
        """Groups nodes by block and tier, in the order of the blocks."""
        groups: dict[Owner, dict[fx.Node, None]] = defaultdict(dict)
        for node in nodes:
            owner = self.owner.get(node)
            if owner is None:
                owner = self.owner.get(node.all_input_nodes[0], NOBODY)
            groups[owner][node] = None
        return [list(groups[owner]) for owner in sorted(groups)]

    def _function(self, name: str, outputs: list[fx.Node], targets: tuple[str, ...], stop: set[fx.Node]) -> None:
        """Adds a call of the subgraph that computes `outputs` from known values. With targets, it writes them in place
        instead of returning them."""
        needed = ancestors(outputs, stop)
        # Gathered values come before the scalars that all parameters share, so that the first subgraph that reads such
        # a scalar has its inputs in the same order as the others.
        read = {n for n in needed if n in stop} | {self.place[t] for t in targets}
        inputs = sorted(read, key=lambda n: (n.target is not gather, n))
        part = Subgraph(self.graph, inputs, outputs)
        args = tuple(self.name[n] for n in inputs)
        writes = tuple(args.index(t) for t in targets)
        key = (name, part.signature, writes)
        if key not in self.known:
            self.known[key] = self.functions.add(name, written(part.extract(), writes), writes)
        fn = self.known[key]
        if not targets:
            out = []
            for node in outputs:
                across = _across(node)
                placement = REPLICATED if across is None else partial(across.axes, across.op)
                shape, placement = self.placed.get(node, (tuple(node.meta["val"].shape), placement))
                self.name[node] = self._scalar_name(node)
                out.append(Value(self.name[node], shape, node.meta["val"].dtype, placement))
            self.ops.append(Instruction("call", args, tuple(out), fn, by="optimizer"))
            return
        self.ops.append(Instruction("call", args, (), fn, writes=targets, by="optimizer"))

    def _gather(self, nodes: Sequence[fx.Node], stop: set[fx.Node]) -> None:
        """Adds the ops that gather tensors of one block."""
        shards: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            shards[node], axes, dims, shape = node.args  # type: ignore[assignment]
            self.placed[shards[node]] = shape, flat_shard(axes, dims=dims)  # type: ignore[arg-type]
        made = [n for n in dict.fromkeys(shards.values()) if n not in self.name]
        if made:
            self._function("shards", made, (), stop - {*made})
        values = {
            n: Value(self.name[x], self.placed[x][0], x.meta["val"].dtype, self.placed[x][1]) for n, x in shards.items()
        }
        handle = lambda: moving(self.names("gather_whole"))  # noqa: E731
        named = {n: f"whole_{len(self.gathered) + i}" for i, n in enumerate(nodes)}
        whole, ops = gathered(values, {}, lambda n: named[n], self.names, handle, "optimizer")
        self.gathered |= named
        self.name.update((n, v.name) for n, v in whole.items())
        self.ops += ops

    def _take_shards(self, nodes: Sequence[fx.Node], stop: set[fx.Node]) -> None:
        """Adds the ops that take shards of unsharded tensors. Tensors computed from the same gathered value share a
        subgraph."""
        groups: list[tuple[set[fx.Node], list[fx.Node]]] = []
        sources: list[fx.Node] = [n.args[0] for n in nodes]  # type: ignore[misc]
        for source in dict.fromkeys(x for x in sources if x not in self.name):
            of, group = {n for n in ancestors([source], stop - {source}) if n.target is gather}, [source]
            # merges all groups that read one of the same gathered values
            for met in [x for x in groups if not of.isdisjoint(x[0])]:
                groups.remove(met)
                of, group = of | met[0], [*met[1], *group]
            groups.append((of, group))
        for _, group in groups:
            self._function("whole", group, (), stop - {*group})
        for node, source in zip(nodes, sources, strict=True):
            axes, dims = node.args[1:]
            placement = flat_shard(axes, dims=dims)  # type: ignore[arg-type]
            attrs = TakeShardAttrs(axes=axes, dims=dims)  # type: ignore[arg-type]
            shape = tuple(source.meta["val"].shape)
            self._append("take_shard", (self.name[source],), node, attrs, placement, shape)

    def _append(
        self,
        op: str,
        args: tuple[str, ...],
        node: fx.Node,
        attrs: Attrs,
        placement: MeshPlacement = REPLICATED,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Adds an op that computes a node. `shape` is the unsharded shape if each rank has only a shard."""
        self.name[node] = self._scalar_name(node)
        shape = tuple(node.meta["val"].shape) if shape is None else shape
        self.ops.append(
            Instruction(
                op,
                args,
                (Value(self.name[node], shape, node.meta["val"].dtype, placement),),
                attrs=attrs,
                by="optimizer",
            )
        )

    def _all_reduce(self, nodes: list[fx.Node]) -> None:
        """Adds the reductions of one level's scalars: over each axis one transfer for each kind of reduction, because
        all are scalars and are sent together."""
        for op in ("sum", "max", "min"):
            # each value, with the axes over which it is still to be reduced
            group: dict[fx.Node, tuple[str, ...]] = {n: n.args[2] for n in nodes if n.args[1] == op}  # type: ignore[misc]
            while left := list(dict.fromkeys(a for axes in group.values() for a in axes)):
                here = [n for n, axes in group.items() if left[0] in axes]
                handle = moving(self.names("reduce_norms"))
                # Over the first axis, the argument is this rank's value; over each further axis, it
                # is the result of the axis before, which has the name of the node.
                args = tuple(self.name[n.args[0] if n not in self.name else n] for n in here)  # type: ignore[index]
                self.ops.append(
                    Instruction(
                        "all_reduce_start",
                        args,
                        (handle,),
                        attrs=ReduceAttrs(axes=(left[0],), reduction=op),
                        by="optimizer",
                    )
                )
                out = []
                for node in here:
                    group[node] = tuple(a for a in group[node] if a != left[0])
                    self.name[node] = self._scalar_name(node)
                    value, placement = node.meta["val"], partial(group[node], op)
                    out.append(Value(self.name[node], tuple(value.shape), value.dtype, placement))
                self.ops.append(Instruction("wait", (handle.name,), tuple(out), by="optimizer"))


class Across(NamedTuple):
    """A reduction over ranks: its kind and its axes."""

    op: str
    axes: tuple[str, ...]


def _across(node: fx.Node) -> Across | None:
    """Returns the reduction over ranks of a node's result, if there is one."""
    return next((Across(str(u.args[1]), tuple(u.args[2])) for u in node.users if u.target is all_reduce), None)  # type: ignore[arg-type]


def written(graph: Recorded, writes: tuple[int, ...]) -> Recorded:
    """Returns the subgraph with its results written to these inputs instead of returned."""
    if writes:
        places, result, new = graph.inputs, graph.graph.output_node(), graph.outputs
        with graph.graph.inserting_before(result):
            for i, value in zip(writes, new, strict=True):
                graph.graph.call_function(aten.copy_.default, (places[i], value)).meta["val"] = places[i].meta["val"]
        result.args = ((),)
    return graph


def _in_order(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes, each after its inputs, otherwise in their original order."""
    done: dict[fx.Node, None] = {}
    for node in graph.nodes:
        todo = [node]
        while todo:
            missing = [a for a in todo[-1].all_input_nodes if a not in done]
            if missing:
                todo += reversed(missing)
            else:
                done[todo.pop()] = None
    return list(done)


def _sort(graph: fx.Graph) -> None:
    """Sorts the nodes of a graph topologically again."""
    last = graph.output_node()
    for node in _in_order(graph):
        if node is not last:
            last.prepend(node)
