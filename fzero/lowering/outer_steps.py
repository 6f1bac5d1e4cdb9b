"""Lowers the outer steps of `fz.local_sgd`, for a plan of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero.layout import ANCHOR
from fzero.lowering.layouts import batch_inputs, params_inputs
from fzero.lowering.lowered import Lowered
from fzero.lowering.slots import Slots
from fzero.mesh import AbstractMesh
from fzero.program.lines import Inputs
from fzero.step import Step
from fzero.transforms.base import find
from fzero.transforms.local_sgd import LocalSGD


def outer_steps(
    step: Step, mesh: AbstractMesh, slots: Slots, lower: Callable[[Step, AbstractMesh, Inputs, Inputs], Lowered]
) -> tuple[Lowered, ...]:
    """The outer step of each fragment that has parameters on this rank, lowered for the ranks along its axis."""
    spec = find(step.transforms, LocalSGD)
    if spec is None:
        return ()
    axes: dict[str, Any] = {spec.axis: mesh.axes[spec.axis]}
    memories = mesh.shared_memory, mesh.unified_memory
    line = AbstractMesh(device_type=mesh.device_type, shared_memory=memories[0], unified_memory=memories[1], **axes)
    leaves = slots.inputs.leaves
    metas = {i: torch.empty(leaf.shard_numel(mesh), dtype=leaf.dtype, device="meta") for i, leaf in enumerate(leaves)}
    found = []
    for anchor in slots.inputs.rebuild(metas)[ANCHOR]:
        if tree.leaves(anchor):
            outer = spec.outer_step(anchor, line.size)
            found.append(lower(outer, line, params_inputs(outer, line, anchor), batch_inputs(anchor)))
    return tuple(found)
