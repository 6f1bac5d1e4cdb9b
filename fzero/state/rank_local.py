"""Restores slots that differ between ranks (`fzero.transforms.transform_state.Local`) on another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fzero.checkpoint import Index, read
from fzero.compiler.state_slots import Slots
from fzero.errors import CheckpointError
from fzero.mesh import Mesh
from fzero.sharding.layout import Layout, Leaf


def of_other_ranks(index: Index, wanted: Mapping[str, Leaf], slots: Slots) -> dict[str, Leaf]:
    """Returns the local slots that a checkpoint has from another number of ranks, by name, with the shapes in the
    checkpoint.

    Raises:
        CheckpointError: a slot is not declared as a sum, so its values cannot be combined for another number of ranks.
    """
    stored = {n: index.leaves[n][0] for n, leaf in wanted.items() if leaf.path in slots.local and n in index.leaves}
    stored = {n: shape for n, shape in stored.items() if shape[1:] == wanted[n].shape[1:] and shape != wanted[n].shape}
    if wrong := [
        f"{n}: of {shape[0]} ranks in the checkpoint, of {wanted[n].shape[0]} here"
        for n, shape in stored.items()
        if not slots.local[wanted[n].path].adds
    ]:
        what = "each rank has its own of these leaves, and they do not add up"
        fix = "restore on as many ranks; or declare them as summands, Local(..., adds=True)"
        raise CheckpointError(index.owner, what, wrong, fix)
    return {n: replace(wanted[n], shape=shape) for n, shape in stored.items()}


def read_added(
    index: Index, stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Reads this rank's tensors of local slots, by name.

    Row i of the n stored rows goes to rank i * ranks // n, which adds up its rows in their order. Each slot is read
    completely.
    """
    out = {}
    for name, leaf in stored.items():
        (rows,) = read(index, {name: replace(leaf, layout=Layout(leaf.dtype))}, mesh).values()
        ranks, axes = wanted[name].shape[0], wanted[name].layout.axes
        here = [row for i, row in enumerate(rows) if i * ranks // len(rows) == mesh.index(axes)]
        total = sum(here[1:], here[0].clone()) if here else torch.zeros_like(rows[0])
        out[name] = total.reshape(wanted[name].resting_shape(mesh))
    return out
