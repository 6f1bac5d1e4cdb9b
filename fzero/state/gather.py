"""Gathers the unsharded state on every rank: for small models, tests and inspection."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fzero import tree
from fzero.comm import control_group
from fzero.comm.collectives import gather
from fzero.comm.groups import ranks_along
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf, leaf_of
from fzero.sharding.shard_regions import parts_of
from fzero.state.tensor_storage import load
from fzero.step import State
from fzero.train_state import lasting

_HOST = torch.device("cpu")


def gathered(state: State, mesh: Mesh) -> State:
    """Gathers the unsharded state, as by `whole`. All ranks call it; a rank that does not come is named in the
    error."""
    # This exchange names a rank that does not come; in a gather, the others would only time out.
    if any((of := leaf_of(x)) is not None and of[0].layout.apart for x in tree.leaves(state)):
        control_group.run_on_all_ranks(mesh.control, "gather", lambda: None)
    with control_group.unbroken(mesh):
        return whole(state, mesh)


def whole(state: Any, mesh: Mesh, device: torch.device = _HOST) -> Any:
    """Returns a tree of plain tensors with the unsharded value of every leaf, by default in host memory. Tied leaves
    stay tied."""
    done: dict[int, torch.Tensor] = {}

    def read(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in done:
            known = leaf_of(x)
            sharded = known is not None and bool(known[0].layout.apart)
            loaded = load(x, mesh.device if sharded else device)
            value = _whole(loaded, known[0], mesh) if known is not None and sharded else loaded
            # `load` may return the state's own memory, which the next step overwrites.
            is_own = value.untyped_storage().data_ptr() == loaded.untyped_storage().data_ptr()
            done[id(x)] = value.to(device, copy=is_own)
        return done[id(x)]

    return tree.map(read, lasting(state))


def _whole(value: torch.Tensor, leaf: Leaf, mesh: Mesh) -> torch.Tensor:
    """Returns the unsharded value of a sharded leaf, gathered over one axis after the other, the last axis first. A
    leaf that only some ranks have (a stage of a pipeline) is then broadcast to the others."""
    found = _joined(value, leaf, mesh) if leaf.is_on(mesh) else value.new_empty(leaf.shape)
    if (only := leaf.layout.only) is not None:
        found = found.contiguous()
        dist.broadcast(found, ranks_along(mesh.axes, mesh.rank, only.axis)[only.index], mesh.group(only.axis))
    return found


def _joined(value: torch.Tensor, leaf: Leaf, mesh: Mesh) -> torch.Tensor:
    sharding = leaf.sharding(mesh)
    # The last axis splits the shards of the axes before it, so gathering over it first restores their order.
    for axis in reversed(leaf.layout.axes):
        value = gather(mesh, value, axis)
    # [num_parts, elements of a shard with its padding]
    parts = value.view(sharding.num_parts, -1)
    if not sharding.along:
        return parts[0, : leaf.numel].view(leaf.shape)
    out = value.new_empty(leaf.shape)
    for part, boxes in zip(parts, parts_of(leaf.shape, sharding.along), strict=True):
        boxes.put(part[: boxes.numel], out)
    return out
