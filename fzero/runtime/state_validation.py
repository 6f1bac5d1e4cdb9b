"""Checks the state and the batch that a training step is called with: their values, their layout, and that replicas are
equal on all ranks."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from fzero import tree
from fzero.checkpoint import tensor_digests
from fzero.checkpoint.tensor_digests import Held, replicas_of
from fzero.comm import control_group
from fzero.compiler.abstract_values import abstract_params
from fzero.compiler.combined_transforms import zero_of
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.runtime.metrics_watch import check_finite
from fzero.state.state_comparison import check_memory, check_model, check_values, placed_inputs
from fzero.step import State, Step, lasting
from fzero.step.checks import check_params, check_state


def leaf_tables(state: State, step: Step, model: Any) -> tuple[Inputs, Inputs]:
    """Returns the leaf tables of a state's parameters and optimizer state. Raises if leaves have no values, share
    memory, or belong to another model."""
    check_params(state.params)
    check_values("step", params=state.params, opt_state=state.opt_state)
    check_memory(params=state.params, opt_state=state.opt_state)
    found, opt = placed_inputs(state.params, mutable=step.mutates), placed_inputs(state.opt_state, "opt_state")
    check_model("step", model, abstract_params(found))
    return found, opt


def check_first_step(
    state: State, params: Inputs, batch: Any, step: Step, mesh: Mesh, checked: MutableMapping[torch.Tensor, bool]
) -> None:
    """Checks a state before its first step, and the batch of that step. All ranks call it.

    Args:
        params: the leaf table of the parameters.
        checked: leaves that were in the state of an earlier step. A state that consists of such leaves is not checked
            again.
    """
    leaves = tree.leaves((state.params, state.opt_state))
    # A state that a step returned has the same tensors as the one that was given to it, so a loop that alternates
    # between two states checks each of them once.
    if all(x in checked for x in leaves):
        return
    trained = step.trains(abstract_params(params))
    # All ranks raise if the shard of one is not finite: the others would wait for it in the step.
    control_group.run_on_all_ranks(mesh.control, "step", lambda: check_finite(state.params, params, trained, mesh))
    compare_replicas(state, mesh)
    _compare_batch(batch, step, mesh)
    # The tensors are keys of a weak dictionary, so remembering them does not keep their memory.
    checked.update((x, True) for x in leaves)


def compare_replicas(state: State, mesh: Mesh) -> None:
    """Raises if ranks that hold the same shard of a state hold different values."""

    def held() -> Held:
        check_state(state, "give a state that train.init, train.restore or a step returned", "check_replicas")
        parts = {
            "params": state.params,
            "opt_state": state.opt_state,
            "extras": lasting(state).extras,
            "step": state.step,
            "key": state.key,
        }
        named = {p: x for role, part in parts.items() for p, x in tree.with_paths(part, role)}
        return replicas_of(named)

    tensor_digests.same(
        mesh,
        "step",
        held,
        "restore the last checkpoint; nothing may write to a state between steps, unless it does so alike on every "
        "rank",
    )


def _compare_batch(batch: Any, step: Step, mesh: Mesh) -> None:
    """Raises if ranks have different batches along an axis that does not shard the batch."""
    axes = zero_of(step, mesh).batch_axes
    others = [axis for axis, size in mesh.axes.items() if size > 1 and axis not in axes]
    if not others:
        return
    leaves = tree.with_paths(batch, "batch")
    held = {path: (x, axes) for path, x in leaves if isinstance(x, torch.Tensor)}
    fix = f"give all ranks along {', '.join(map(repr, others))} the same batch: "
    fix += f"choose it by mesh.index({axes!r}) of mesh.axis_size({axes!r})" if axes else "every rank has the full batch"
    tensor_digests.same(mesh, "step", lambda: held, fix)
