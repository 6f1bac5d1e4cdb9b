"""Restores a state from a checkpoint of any mesh, laid out as a step stores it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import checkpoint, tree
from fzero.checkpoint import Index
from fzero.comm import control_group
from fzero.compiler.abstract_values import abstract
from fzero.compiler.state_layouts import opt_state_inputs
from fzero.compiler.state_slots import Slots, slots_of
from fzero.errors import CheckpointError
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf, in_slot
from fzero.state import tensor_storage
from fzero.state.state_comparison import abstract_state, assembled, check_model, state_leaves
from fzero.step import State, Step
from fzero.step.checks import check_params

logger = logging.getLogger("fzero")


def describe(path: str | os.PathLike[str] | Index, mesh: Mesh, model: Any) -> Index:
    """Returns the index of the checkpoint that a state is restored from, the same on all ranks. Raises if `model` has
    changed."""
    index = checkpoint.describe(path, mesh)
    control_group.run_on_all_ranks(mesh.control, "restore", lambda: check_model("restore", model))
    return index


def expected_params(index: Index, params: Any, model: Any) -> Any:
    """Returns the structure of the unsharded parameters that a checkpoint is expected to have: the given one, else that
    of the model, else the checkpoint's own."""
    if params is None:
        whole = checkpoint.structure(index).params if model is None else model.params
    else:
        whole = abstract(params) if callable(params) else params
        check_params(whole, "restore")
        check_model(index.owner, model, whole, CheckpointError)
    return whole


@dataclass(frozen=True)
class RestorePlan:
    """What a checkpoint provides for a step, compared and found complete. Nothing large has been read yet.

    Attributes:
        index: the index of the checkpoint, without slots that the step does not have.
        inputs, opt_inputs, slots: the leaf tables of the state.
        names: by stored name, the leaves that are read from the checkpoint.
    """

    index: Index
    inputs: Inputs
    opt_inputs: Inputs
    slots: Slots
    names: dict[str, Leaf]

    def precision_counts(self, mesh: Mesh) -> Any | None:
        """The counters of `mixed_precision("auto")` in the checkpoint; None if it has none.

        They are read first, because the dtypes that they determine affect the layout of other leaves.
        """
        counted = {n: leaf for n, leaf in self.names.items() if leaf.role == "precision"}
        if not counted:
            return None
        found = checkpoint.read(self.index, counted, mesh)
        return self.slots.of({leaf.path: found[n] for n, leaf in counted.items()})["precision"]


def plan_restore(index: Index, step: Step, mesh: Mesh, inputs: Inputs) -> RestorePlan:
    """Compares a checkpoint with the state of a step; raises an error that lists every difference.

    Args:
        inputs: the leaf table of the parameters.
    """
    opt_inputs = opt_state_inputs(step, mesh, inputs)
    slots = slots_of(step, mesh, inputs)
    names = dict(
        zip(
            tree.names(abstract_state(inputs, opt_inputs, slots)),
            state_leaves(inputs, opt_inputs, slots),
            strict=True,
        )
    )
    # The name of a tensor in a slot is `extras.<slot>.<path in the slot>`.
    stored = {name: name.split(".")[1] for name in index.leaves if name.startswith("extras.")}
    anew = {
        n: leaf
        for n, leaf in names.items()
        if in_slot(leaf) and (leaf.role not in stored.values() or _of_other_ranks(index, n, leaf, slots))
    }
    names = {n: leaf for n, leaf in names.items() if n not in anew}
    # Not an error: slots are the state of transforms, and a run may continue with other transforms than it was saved
    # with.
    if anew and mesh.rank == 0:
        leaves = ", ".join(leaf.path for leaf in anew.values())
        logger.warning("%s has no values of these leaves for this mesh, so they begin anew: %s", index, leaves)
    # slots that this step does not have are not restored
    held = {n: x for n, x in index.leaves.items() if n not in anew and (n not in stored or stored[n] in slots.owners)}
    index = replace(index, leaves=held)
    checkpoint.check(index, {n: (leaf.shape, leaf.dtype) for n, leaf in names.items()})
    return RestorePlan(index, inputs, opt_inputs, slots, names)


def _of_other_ranks(index: Index, name: str, leaf: Leaf, slots: Slots) -> bool:
    """Whether a leaf has a separate value on each rank, and the checkpoint was saved by another number of ranks."""
    if leaf.path not in slots.local or name not in index.leaves:
        return False
    shape = index.leaves[name][0]
    # Such a slot has one row per rank, and rows of other ranks mean nothing on this mesh.
    return shape[0] != leaf.shape[0] and shape[1:] == leaf.shape[1:]


def restore_state(plan: RestorePlan, step: Step, mesh: Mesh, limits: Sequence[int | None]) -> State:
    """Reads the state.

    Args:
        limits: as in `tensor_storage.reserve`.
    """
    inputs, opt_inputs, names = plan.inputs, plan.opt_inputs, plan.names
    places = tensor_storage.reserve(step, mesh, limits, inputs, opt_inputs, "restore")
    read = checkpoint.read(plan.index, names, mesh, into=places)
    by_path: dict[str, torch.Tensor] = {leaf.path: read[n] for n, leaf in names.items()}
    made = {i: by_path[inputs.leaves[i].path] for i in inputs.distinct}
    opt = {i: by_path[opt_inputs.leaves[i].path] for i in opt_inputs.distinct}
    rest = {p: by_path[p] for p in plan.slots.leaves if p in by_path}
    return assembled(step, mesh, inputs, opt_inputs, made, opt, rest, places, "restore")
