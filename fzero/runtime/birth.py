"""Birth of a state: each leaf made where and as it rests, one at a time.

An init function is a recorded graph of draws and pointwise operations, so a shard of a leaf can be drawn without the leaf (see
program/propagate.py). What cannot be is made whole, cut and dropped before the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.fx as fx

from fzero import compat, tree
from fzero.layout import Leaf, shard
from fzero.mesh import Mesh
from fzero.program.propagate import cut, propagate
from fzero.program.record import Recorded, record
from fzero.program.segment import Part, ancestors
from fzero.program.trace import Inputs
from fzero.random import DERIVE
from fzero.step import Step


def from_function(graph: Recorded, key: torch.Tensor, inputs: Inputs, mesh: Mesh) -> dict[int, torch.Tensor]:
    """The distinct leaves of a recorded init function of `key` as they rest on this rank, by position."""
    (place,) = graph.inputs
    keys = list(graph.graph.find_nodes(op="call_function", target=DERIVE))  # one split makes the keys of many leaves: it is done once
    derived = _Run(Part(graph, [place], keys).extract()).run(key)
    return _leaves(graph, {place: key, **dict(zip(keys, derived, strict=True))}, [], inputs, mesh)


def opt_state(step: Step, params: Inputs, opt: Inputs, made: dict[int, torch.Tensor], mesh: Mesh) -> dict[int, torch.Tensor]:
    """The leaves of `optimizer.init(params)` as they rest on this rank, by position."""
    places = params.distinct
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [compat.new_fake(mode, params.leaves[i].shape, params.leaves[i].dtype, mesh.device_type) for i in places]
    with mode:

        def run(*xs: torch.Tensor) -> list[torch.Tensor]:
            whole = params.rebuild(dict(zip(places, xs, strict=True)))
            return tree.leaves(step.optimizer.init(step.optimized(whole)))

        graph = record(run, fakes, owner="optimizer", names=[f"p_{i}" for i in range(len(places))], source=step.optimizer.init)
    given = {p: made[i] for p, i in zip(graph.inputs, places, strict=True)}
    sharded = {p for p, i in zip(graph.inputs, places, strict=True) if params.leaves[i].layout.axes}
    return _leaves(graph, given, sharded, opt, mesh)


def _leaves(graph: Recorded, values: Mapping[fx.Node, torch.Tensor], sharded: Collection[fx.Node], inputs: Inputs, mesh: Mesh) -> dict[int, torch.Tensor]:
    """What the graph returns, from the values of its inputs and of other nodes of it."""
    outputs, stop = graph.outputs, set(values)
    known: dict[Any, Recorded] = {}  # the moments of an optimizer are made alike, leaf after leaf
    axes = next((leaf.layout.axes for leaf in inputs.leaves if leaf.layout.axes), ())
    size, index = (mesh.axis_size(axes), mesh.index(axes)) if axes else (1, 0)
    out = {}
    for i in inputs.distinct:
        leaf = inputs.leaves[i]
        # a graph of one leaf: with all inputs it would take time quadratic in the leaves
        read = sorted(ancestors([outputs[i]], stop) & stop)
        part = Part(graph, read, [outputs[i]])
        key = (part.signature, tuple(p in sharded for p in read), bool(leaf.layout.axes))
        if key not in known:
            one = part.extract()
            arrives = {new: leaf.path for p, new in zip(read, one.inputs, strict=True) if p in sharded}
            known[key] = propagate(one, arrives, [bool(leaf.layout.axes)], size, "init", index)
        given = [values[p] for p in read]
        (value,) = _Cutting(known[key], leaf, mesh).run(*given)
        value = value.to(device=mesh.device, dtype=leaf.dtype)
        shared = any(value.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() for v in given)
        out[i] = value.clone(memory_format=torch.contiguous_format) if shared or not value.is_contiguous() else value.detach()
    return out


class _Run(fx.Interpreter):
    """Runs a graph as it is: as a module it would first be made into code."""

    def __init__(self, graph: Recorded):
        constants = torch.nn.Module()
        for name, value in graph.constants.items():
            setattr(constants, name, value)
        super().__init__(constants, graph=graph.graph)


class _Cutting(_Run):
    """Runs a graph of one leaf, cutting where it could only be made whole."""

    def __init__(self, graph: Recorded, leaf: Leaf, mesh: Mesh):
        super().__init__(graph)
        self._leaf, self._mesh = leaf, mesh

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not cut:
            return super().call_function(target, args, kwargs)
        return shard(args[0], Leaf(self._leaf.path, "", tuple(args[0].shape), self._leaf.with_layout(dtype=args[0].dtype).layout), self._mesh)
