"""Birth of a state: each leaf made where and as it rests, one at a time.

An init function is a recorded graph of draws and pointwise operations, so a shard of a leaf can be drawn without the leaf (see
program/propagate.py). What cannot be is made whole, cut and dropped before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.fx as fx

from fzero import compat, tree
from fzero.layout import Leaf, shard
from fzero.mesh import Mesh
from fzero.program.propagate import cut, propagate
from fzero.program.record import Recorded, record
from fzero.program.segment import ancestors, extract
from fzero.program.trace import Inputs
from fzero.step import Step


def from_function(init_fn: Callable[..., Any], key: torch.Tensor, inputs: Inputs, mesh: Mesh) -> dict[int, torch.Tensor]:
    """The distinct leaves of `init_fn(key)` as they rest on this rank, by position."""
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(3, dtype=torch.int64, device=mesh.device_type)
        graph = record(lambda k: tree.leaves(init_fn(k)), [fake], owner="init", names=["key"], source=init_fn)
    return _leaves(graph, [key], [], inputs, mesh)


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
    sharded = {k for k, i in enumerate(places) if params.leaves[i].layout.axes}
    return _leaves(graph, [made[i] for i in places], sharded, opt, mesh)


def _leaves(graph: Recorded, values: Sequence[torch.Tensor], sharded: Collection[int], inputs: Inputs, mesh: Mesh) -> dict[int, torch.Tensor]:
    places = graph.inputs
    outputs = graph.outputs
    axes = next((leaf.layout.axes for leaf in inputs.leaves if leaf.layout.axes), ())
    size, index = (mesh.axis_size(axes), mesh.index(axes)) if axes else (1, 0)
    out = {}
    for i in inputs.distinct:
        leaf = inputs.leaves[i]
        needed = ancestors([outputs[i]], stop=set(places))
        used = [k for k, p in enumerate(places) if p in needed]  # a graph of one leaf: with all inputs it would take time quadratic in the leaves
        one = extract(graph, [places[k] for k in used], [outputs[i]])
        arrives = {p: leaf.path for k, p in zip(used, one.inputs, strict=True) if k in sharded}
        local = propagate(one, arrives, [bool(leaf.layout.axes)], size, "init", index)
        given = [values[k] for k in used]
        (value,) = _Run(local, leaf, mesh).run(*given)
        value = value.to(device=mesh.device, dtype=leaf.dtype)
        shared = any(value.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() for v in given)
        out[i] = value.clone(memory_format=torch.contiguous_format) if shared or not value.is_contiguous() else value.detach()
    return out


class _Run(fx.Interpreter):
    """Runs a graph of one leaf, cutting where it could only be made whole."""

    def __init__(self, graph: Recorded, leaf: Leaf, mesh: Mesh):
        super().__init__(graph.module())
        self._leaf, self._mesh = leaf, mesh

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not cut:
            return super().call_function(target, args, kwargs)
        return shard(args[0], Leaf(self._leaf.path, "", tuple(args[0].shape), self._leaf.with_layout(dtype=args[0].dtype).layout), self._mesh)
