"""Initializes a state leaf by leaf: each leaf is made in its stored layout, put into storage, and dropped before the
next one.

An init function is a recorded graph of random draws and pointwise operations, so a shard of a leaf can be drawn without
the whole leaf (see sharding/flat_propagation.py). A leaf for which this is not possible is made unsharded, sharded and
dropped before the next one. A tensor of which only the shape is used, as most optimizers do with parameters, is never
made. Zeros are recorded and not made. A large leaf off the device is made in pieces, each like the shard of a larger
mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fzero import tree
from fzero._compat import compat
from fzero.compiler.state_slots import Slots, declared
from fzero.errors import FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.ops.block_quantization import granule
from fzero.random import DERIVE
from fzero.sharding.flat_propagation import Sharded, aten, propagate, take_shard
from fzero.sharding.layout import Leaf, Sharding, shard
from fzero.sharding.shape_constants import constants_for_shapes
from fzero.sharding.shard_regions import part_shape
from fzero.step import Step
from fzero.trace.functionalization import AGAIN
from fzero.trace.graph_capture import record
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import Subgraph, ancestors
from fzero.transforms.transform_state import Local

PART = 32 << 20
"""A leaf is made in pieces of at most this many bytes."""

Put = Callable[[torch.Tensor | Iterator[torch.Tensor] | None, Leaf], torch.Tensor]
"""Puts the value of a leaf (or its consecutive pieces, or None for zeros) into its storage, and returns the tensor that
represents it in a state."""

Load = Callable[[], torch.Tensor]


def from_function(
    graph: Recorded,
    key: torch.Tensor,
    inputs: Inputs,
    mesh: Mesh,
    put: Put,
    only: Collection[int] | None = None,
) -> dict[int, torch.Tensor]:
    """Makes the distinct leaves of a recorded init function of `key` in their layout on this rank, by position.

    Args:
        only: positions of the leaves to make; by default all.
    """
    (place,) = graph.inputs
    # one split makes the keys of many leaves, so it is done only once
    keys = list(graph.graph.find_nodes(op="call_function", target=DERIVE))
    derived = _Run(Subgraph(graph, [place], keys).extract()).run(key)
    # `x=x` binds the value of this iteration.
    values: dict[fx.Node, Load] = {n: (lambda x=x: x) for n, x in zip((place, *keys), (key, *derived), strict=True)}
    wanted = [i for i in inputs.distinct if only is None or i in only]
    return _leaves(graph, values, {}, inputs, wanted, mesh, put)


def opt_state(
    step: Step, params: Inputs, opt: Inputs, load: Callable[[int], torch.Tensor], mesh: Mesh, put: Put
) -> dict[int, torch.Tensor]:
    """Makes the leaves of `optimizer.init(params)` in their layout on this rank, by position.

    Args:
        load: `load(i)` returns the value of a distinct parameter on the device.
    """
    init = lambda whole: step.optimizer.init(step.optimized(whole))  # noqa: E731
    return _of_params(init, step.optimizer.init, "optimizer", params, opt, opt.distinct, load, mesh, put)


def slots(
    step: Step,
    params: Inputs,
    slots: Slots,
    wanted: Sequence[int],
    load: Callable[[int], torch.Tensor],
    mesh: Mesh,
    put: Put,
) -> dict[int, torch.Tensor]:
    """Makes the initial values of the slots at these positions, in their layout on this rank.

    Args:
        load: as in `opt_state`.
    """
    leaves, made = slots.inputs.leaves, dict[int, torch.Tensor]()
    for transform in slots.transforms:
        own = [i for i, leaf in enumerate(leaves) if slots.owners[leaf.role] == transform]
        here = [i for i in wanted if i in own]
        init = lambda whole, t=transform: declared(step, t, whole)  # noqa: E731
        inputs = Inputs(slots.inputs.structure, tuple(leaves[i] for i in own), tuple(range(len(own))))
        places = [own.index(i) for i in here if leaves[i].path not in slots.local]
        if places:
            found = _of_params(init, transform.slots, transform.name, params, inputs, places, load, mesh, put)
            made |= {own[i]: x for i, x in found.items()}
        made |= {i: put(None, leaves[i]) for i in here if leaves[i].path in slots.local}
    return made


def _of_params(
    init: Callable[[Any], Any],
    source: Any,
    owner: str,
    params: Inputs,
    inputs: Inputs,
    wanted: Sequence[int],
    load: Callable[[int], torch.Tensor],
    mesh: Mesh,
    put: Put,
) -> dict[int, torch.Tensor]:
    """Makes the leaves at these positions of the tree that `init` computes from unsharded parameters."""
    places = params.distinct
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [compat.new_fake(mode, params.leaves[i].shape, params.leaves[i].dtype, mesh.device_type) for i in places]
    with mode:

        def run(*xs: torch.Tensor) -> list[torch.Tensor]:
            whole = params.rebuild(dict(zip(places, xs, strict=True)))
            return [x.like if isinstance(x, Local) else x for x in tree.leaves(init(whole))]

        graph = record(run, fakes, owner=owner, names=[f"p_{i}" for i in range(len(places))], source=source)
    given: dict[fx.Node, Load] = {p: functools.partial(load, i) for p, i in zip(graph.inputs, places, strict=True)}
    sharded = {p: params.leaves[i] for p, i in zip(graph.inputs, places, strict=True) if params.leaves[i].layout.axes}
    alone = {p: params.leaves[i] for p, i in zip(graph.inputs, places, strict=True) if params.leaves[i].layout.only}
    return _leaves(graph, given, sharded, inputs, wanted, mesh, put, owner, alone)


def _leaves(
    graph: Recorded,
    values: Mapping[fx.Node, Load],
    sharded: Mapping[fx.Node, Leaf],
    inputs: Inputs,
    wanted: Sequence[int],
    mesh: Mesh,
    put: Put,
    owner: str = "init",
    alone: Mapping[fx.Node, Leaf] | None = None,
) -> dict[int, torch.Tensor]:
    """Computes the results of a graph at these positions.

    Args:
        values: the values of the graph's inputs, and of other nodes.
        sharded: the inputs that are given as shards, with their leaves.
        alone: the inputs that only some ranks have. Leaves on other ranks cannot be computed from their values.
    """
    outputs, stop = graph.outputs, set(values)
    # A cache: the moments of an optimizer, for example, are made in the same way for every leaf.
    known: dict[Any, tuple[Recorded, Recorded]] = {}
    out = {}
    for i in wanted:
        leaf = inputs.leaves[i]
        # extract the graph of one leaf: with all inputs the time would be quadratic in the number of leaves
        read = sorted(ancestors([outputs[i]], stop) & stop)
        part = Subgraph(graph, read, [outputs[i]])
        made_as, index = leaf.sharding(mesh) if leaf.layout.axes else None, mesh.index(leaf.layout.axes)
        comes = [_comes(sharded[p], leaf) if p in sharded else () for p in read]  # the axes that shard each input
        rest = [sharded[p].with_layout(axes=axes) if axes else None for p, axes in zip(read, comes, strict=True)]
        # Everything that the propagated graph depends on, so that the leaves of equal layers are analysed once.
        key = (part.signature, tuple(x and x.layout for x in rest), leaf.layout)
        if key not in known:
            one = part.extract()
            arrives = {new: Sharded(leaf.path, x.sharding(mesh)) for x, new in zip(rest, one.inputs, strict=True) if x}
            known[key] = one, constants_for_shapes(propagate(one, arrives, [made_as], "init", index))
        source, made = known[key]
        # Storage is zero-filled when it is allocated, so zeros cost nothing, whatever the size of the leaf.
        if _is_zeros(made):
            out[i] = put(None, leaf)
            continue
        loads = [
            functools.partial(_finer, values[p], sharded[p], axes, mesh) if axes else values[p]
            for p, axes in zip(read, comes, strict=True)
        ]
        away = [alone[p] for p, node in zip(read, made.inputs, strict=True) if alone and p in alone and node.users]
        if problems := [f"{leaf}, of {x}" for x in away if x.layout.only != leaf.layout.only]:
            what, fix = (
                "a tensor is initialized from values that not every rank has",
                "initialize it from shapes only; or leave pipeline out",
            )
            raise FzeroValueError(owner, what, problems, fix)
        if not leaf.is_on(mesh):
            out[i] = put(None, leaf)
            continue
        reads_shards = any(node.users for p, node in zip(read, made.inputs, strict=True) if p in sharded)
        # A leaf on the device is not copied anywhere, so pieces would save no memory. Values that are read as shards
        # cannot be divided further.
        num = 1 if leaf.layout.tier == "device" or reads_shards else _num_parts(leaf, mesh)
        # Each shard is divided into `num` consecutive smaller ones; those of this rank begin with number `first`.
        finer, first = made_as or Sharding((), 1), index * num
        finer = finer._replace(size=finer.size * num, grid=finer.grid * num)
        # An op that can only be computed unsharded (`take_shard`) would be computed again for every piece.
        if num > 1 and not any(node.target is take_shard for node in _shard_of(source, finer, first).graph.nodes):
            out[i] = put(_parts(source, loads, leaf, mesh, finer, range(first, first + num)), leaf)
        else:
            out[i] = put(_value(made, loads, leaf, mesh), leaf)
    return out


def _num_parts(leaf: Leaf, mesh: Mesh) -> int:
    """Returns the number of equal pieces in which a leaf is made, each of at most `PART` bytes; 1 if it cannot be
    divided in this way."""
    sharding = leaf.sharding(mesh)
    numel, unit = (
        sharding.numel(leaf.shape),
        granule(part_shape(leaf.shape, sharding.along)) * max(1, sharding.grid // sharding.size),
    )
    least = -(-numel * leaf.dtype.itemsize // PART)
    return next((num for num in range(max(least, 1), 8 * least + 1) if numel % (num * unit) == 0), 1)


def _comes(param: Leaf, leaf: Leaf) -> tuple[str, ...]:
    """Returns the axes over which a parameter is sharded when a leaf is made from it: those of the leaf, if they extend
    the parameter's own axes, else the parameter's own."""
    axes = param.layout.axes
    return leaf.layout.axes if leaf.layout.axes[: len(axes)] == axes else axes


def _finer(load: Load, param: Leaf, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
    """Returns this rank's shard over `axes` of a parameter that is stored as a shard over the first of these axes."""
    further = axes[len(param.layout.axes) :]
    # Shards are padded to equal sizes, so the chunks of a coarse shard are exactly the finer shards.
    return load().chunk(mesh.axis_size(further))[mesh.index(further)]


def _parts(
    source: Recorded, loads: Sequence[Load], leaf: Leaf, mesh: Mesh, shards: Sharding, indices: range
) -> Iterator[torch.Tensor]:
    for index in indices:
        (part,) = _Run(_shard_of(source, shards, index)).run(*(load() for load in loads))
        yield part.to(device=mesh.device, dtype=leaf.dtype)
        del part  # do not keep the piece alive while the next one is made


def _shard_of(source: Recorded, shards: Sharding, index: int) -> Recorded:
    """Returns the graph that makes one shard of the result that `source` makes from unsharded inputs."""
    return constants_for_shapes(propagate(source, {}, [shards], "init", index))


def _value(graph: Recorded, loads: Sequence[Load], leaf: Leaf, mesh: Mesh) -> torch.Tensor:
    """Computes the leaf that a graph returns, in memory that no input shares."""
    given = [load() if node.users else None for node, load in zip(graph.inputs, loads, strict=True)]
    (value,) = _ShardingRun(graph, leaf, mesh).run(*given)
    value = value.to(device=mesh.device, dtype=leaf.dtype)
    # An optimizer may return a parameter itself as a part of its state. The step writes both in place, so they must not
    # share memory.
    shared = any(x is not None and value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in given)
    return value.clone(memory_format=torch.contiguous_format) if shared or not value.is_contiguous() else value.detach()


def _is_zeros(graph: Recorded) -> bool:
    (made,) = graph.outputs
    # compared as text, because -0.0 equals 0.0
    return made.target is aten.zeros.default or (
        made.target is aten.full.default and str(made.args[1]) in ("0", "0.0", "False")
    )


class _Run(fx.Interpreter):
    """Interprets a graph. Making a module of it would first generate code."""

    def __init__(self, graph: Recorded):
        constants = torch.nn.Module()
        for name, value in graph.constants.items():
            setattr(constants, name, value)
        super().__init__(constants, graph=graph.graph)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(AGAIN.get(target, target), args, kwargs)


class _ShardingRun(_Run):
    """Runs the graph of one leaf, and shards values that could only be computed unsharded."""

    def __init__(self, graph: Recorded, leaf: Leaf, mesh: Mesh):
        super().__init__(graph)
        self._leaf, self._mesh = leaf, mesh

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not take_shard:
            return super().call_function(target, args, kwargs)
        return shard(
            args[0],
            Leaf(self._leaf.path, "", tuple(args[0].shape), self._leaf.with_layout(dtype=args[0].dtype).layout),
            self._mesh,
        )
