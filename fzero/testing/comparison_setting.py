"""Prepares the arguments of a comparison: the global batch, the plain step's trajectory and its tolerances."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero.comm.control_group import run_on_all_ranks
from fzero.compiler.abstract_values import batch_inputs
from fzero.compiler.auto_tensor_parallel import choose_rules
from fzero.compiler.combined_transforms import zero_of
from fzero.compiler.traced_step import base_program
from fzero.errors import FzeroValueError, TraceError
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh, Mesh
from fzero.runtime.program_agreement import describe, difference
from fzero.step import Step
from fzero.step.checks import check_batch, check_init, check_params
from fzero.testing.global_batch import check_rows, gathered, rows
from fzero.testing.reference_trajectory import Trajectory, trajectory
from fzero.testing.tolerance import (
    Roundoff,
    roundoff,
)
from fzero.trace.block import every_call_traced
from fzero.trace.subgraph import signature
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.transform import find, on_device


@dataclass(frozen=True)
class Comparison:
    """The setting of a comparison: the checked arguments of `check_equivalent`.

    Attributes:
        params: the tree of unsharded tensors, on the mesh's device.
        batch: this rank's part of the batch.
        whole_batch: the batch of all ranks.
        size: what the tolerances are derived from.
        plain: the trajectory of the plain step, and how far each tensor may be from it.
        simulated: the mesh, if all its ranks are threads of this process.
    """

    step: Step
    params: Any
    batch: Any
    whole_batch: Any
    mesh: Mesh
    steps: int
    key: torch.Tensor
    backend: str
    options: dict[str, Any]
    size: Roundoff
    plain: Trajectory
    simulated: AbstractMesh | None = None


def setting_of(
    step: Step,
    params: Any,
    batch: Any,
    mesh: Mesh,
    steps: int,
    key: torch.Tensor | None,
    backend: str,
    options: dict[str, Any],
    simulated: AbstractMesh | None = None,
) -> Comparison:
    """Checks the arguments and computes the plain step's side of the comparison. `simulated`: then the batch is the
    global one, and `mesh` is the mesh of its first rank.
    """
    key = (fzrandom.key(0) if key is None else key).to(mesh.device)
    check_batch(batch)
    if callable(params):
        check_init(params)
        params = params(key)
    check_params(params)
    absent = [f"{p}: {tree.describe(x)}" for p, x in tree.with_paths((params, batch), "") if x.is_meta]
    if absent:
        raise FzeroValueError(
            "check_equivalent", "these tensors have no values", absent, "give tensors in memory: the step is run"
        )
    step, params, batch = on_device(step, mesh.device), _on(params, mesh), _on(batch, mesh)
    axes = zero_of(step, mesh).batch_axes
    record = find(step.transforms, Accumulate)
    has_rows = rows(batch, record)
    if simulated:
        from fzero.testing.simulate import parts_of

        whole_batch, batch = batch, parts_of(step, simulated, batch)[0]
    else:
        if mesh.axis_size(axes) > 1:
            run_on_all_ranks(
                mesh.control, "check_equivalent", lambda: check_rows("check_equivalent", batch, has_rows, record)
            )
        # The plain step sees all samples at once, on every rank.
        whole_batch = gathered(batch, mesh, axes, has_rows)
    parts = mesh.axis_size(axes) * (record.num_micro_batches if record else 1)
    step, _ = choose_rules(step, mesh, params, batch_inputs(batch))
    with every_call_traced():
        # Traced twice: a loss that counts its calls, or draws from a global generator, gives two different programs.
        base, again = (base_program(step, mesh, params, batch) for _ in range(2))
    if differs := difference(_text(base), _text(again), "the first time", "the second"):
        fix = (
            "draw with fz.random from the step's key, and pass what changes from step to step in the batch, as a 0-dim "
            "tensor"
        )
        raise TraceError(
            "check_equivalent", f"{step.name} computes a different result each time it is called", differs, fix
        )
    size = roundoff(step, base, params, parts)
    plain = replace(step, transforms=())
    first = _on(plain.init(params, key), mesh)
    path = trajectory(plain, first, whole_batch, steps, size)
    finite = [all(x.isfinite().all() for x in leaves.values()) for leaves in path.leaves]
    steps = max(1, finite.index(False) - 1) if False in finite else steps  # a run that diverges has no tolerance
    return Comparison(step, params, batch, whole_batch, mesh, steps, key, backend, options, size, path, simulated)


def _text(base: Program) -> str:
    """Returns everything that a base program computes, as text."""
    update = base.update
    updates = [] if update is None else [f"{update.out}: {entry}" for entry in signature(update.attrs.graph)]
    return "\n".join([describe(base), *updates])


def _on(values: Any, mesh: Mesh) -> Any:
    """Moves tensors to the mesh's device; tied tensors stay tied."""
    done: dict[int, torch.Tensor] = {}
    return tree.map(lambda x: done.setdefault(id(x), x.detach().to(mesh.device)), values)
