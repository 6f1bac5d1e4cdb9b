"""Traces a training step to its base program, together with the tensors and subgraphs that open options may need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import tree
from fzero.compiler.abstract_values import abstract_params, batch_inputs
from fzero.compiler.base_program import lower_eval, lower_train
from fzero.compiler.combined_transforms import precision_of, zero_of
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.pass_cache import PassCache
from fzero.compiler.pass_options import PassContext
from fzero.compiler.state_layouts import compute_leaves, gradient_leaves, opt_state_inputs
from fzero.compiler.state_slots import Slots, slots_of
from fzero.compiler.training_spec import Precision, Training
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh, Mesh
from fzero.plan.inductor.temporaries import temporaries_on
from fzero.sharding.layout import Leaf
from fzero.step import EvalStep, Step
from fzero.step.checks import no_trainable, wants_key
from fzero.trace.graph_capture import without_gc
from fzero.transforms import accumulate
from fzero.transforms.precision import Watched
from fzero.transforms.transform import find, on_device


@dataclass(frozen=True)
class Traced:
    """The programs of a step (`base` is the one before tiers are known) and the other results of its trace."""

    base: Program
    pass_cache: PassCache
    opt_state: Inputs
    structure: tree.TreeSpec
    watched: Watched | None
    raises: tuple[str, ...]
    slots: Slots


def trace_step(
    step: Step,
    mesh: AbstractMesh,
    params: Inputs,
    batch: Inputs,
    precision: Precision | None = None,
    num_parts: int | None = None,
    skip: frozenset[str] = frozenset(),
) -> Traced:
    """Traces a step, from tables of tensors.

    Args:
        step, mesh, params, batch: the step, its mesh, and the tables of its parameters and of one rank's batch.
        precision: by default that of the step's transforms.
        num_parts: the number of parts into which the global batch is divided; by default that of the step's transforms.
        skip: passes to leave out.
    """
    zero = zero_of(step, mesh)
    accumulation = find(step.transforms, accumulate.Accumulate)
    if accumulation is not None:
        accumulation.check_replicated(batch.leaves, batch.ties)
    num_micro = accumulation.num_micro_batches if accumulation else 1
    shapes = accumulation.micro_shapes(batch.leaves) if accumulation else [x.shape for x in batch.leaves]
    # The loss is traced once, for one micro-batch; the pass `accumulate` repeats it.
    micro = replace(batch, leaves=tuple(replace(x, shape=shape) for x, shape in zip(batch.leaves, shapes, strict=True)))
    trains = step.trains(abstract_params(params))
    if not any(trains):
        raise no_trainable(abstract_params(params), step.loss_fn)
    opt_state, slots = opt_state_inputs(step, mesh, params), slots_of(step, mesh, params)
    with without_gc(), torch.inference_mode(False), torch.enable_grad():  # a step trains in whatever mode it is called
        program, structure, watched, raises = lower_train(
            Training(
                name=step.name,
                loss_fn=step.loss_fn,
                optimizer=step.optimizer,
                has_aux=step.has_aux,
                wants_key=wants_key(step.loss_fn),
                params=params,
                trains=trains,
                mutates=None if step.mutable is None else step.mutates(abstract_params(params)),
                opt_state=opt_state,
                batch=micro,
                slots=slots,
                mesh=mesh,
                precision=precision or precision_of(step),
                # Ranks along other axes compute with the same samples, so they are not separate parts of the batch.
                num_parts=num_parts or num_micro * math.prod(mesh.axes[a] for a in zero.batch_axes),
            )
        )
    split = {
        x.path: x.shape
        for x in (batch.leaves[i] for i in batch.distinct)
        if num_micro > 1 and accumulation and accumulation.splits(x)
    }
    context = PassContext(
        zero, num_micro, split, *with_leaves(step, mesh, params), skip, slots.owners, temporaries=temporaries_on(mesh)
    )
    pass_cache = PassCache(replace(program, transforms=step.transforms), context)
    return Traced(pass_cache.base(), pass_cache, opt_state, structure, watched, raises, slots)


def recorded_program(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs, batch: Inputs) -> Program:
    """Returns the traced program of a step before any pass, with the arguments of `trace_step`."""
    if isinstance(step, EvalStep):
        program = lower_eval(step.name, step.fn, params, batch, mesh, precision_of(step)).program
        return replace(program, transforms=step.transforms)
    return trace_step(step, mesh, params, batch).pass_cache.recorded


def with_leaves(step: Step, mesh: AbstractMesh, params: Inputs) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """Returns further tensors of the state, by the path of the parameter: compute copies of offloaded masters, and
    tensors that store gradients on disk."""
    copies, gradients = compute_leaves(step, mesh, params), gradient_leaves(step, mesh, params)
    of = lambda leaves: {params.leaves[i].path: leaf for i, leaf in leaves.items()}  # noqa: E731
    return of(copies), of(gradients)


def base_program(step: Step, mesh: AbstractMesh, params: Any, batch: Any, num_parts: int | None = None) -> Program:
    """Returns the base program of a step (see compiler/base_program.py), from which every other program is made.

    Args:
        step, mesh: as for `lower`.
        params: the tree of unsharded parameters.
        batch: one rank's batch.
        num_parts: the number of parts into which the global batch is divided, if it differs from the step's.
    """
    step = on_device(step, mesh.device if isinstance(mesh, Mesh) else None)
    inputs = params_inputs(step, mesh, params), batch_inputs(batch)
    return trace_step(step, mesh, *inputs, num_parts=num_parts).base
