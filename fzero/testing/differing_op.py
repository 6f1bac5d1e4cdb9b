"""Finds the first op of a program whose value differs from the plain step's, by recording each op as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero.compiler.combined_transforms import zero_of
from fzero.compiler.traced_step import base_program
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh, Mesh
from fzero.runtime.compiled_step import CompiledStep
from fzero.state.tensor_storage import load
from fzero.step import State
from fzero.testing.comparison import all_gather_notes, compiled, most_skipped, overflowed
from fzero.testing.comparison_setting import Comparison
from fzero.testing.first_difference import Reference, first_line, part_values
from fzero.testing.global_batch import rows
from fzero.testing.recording import recording
from fzero.testing.reference_trajectory import leaves_of, trajectory
from fzero.testing.report import FirstLine
from fzero.testing.tolerance import PRECISIONS
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.transform import Transform, find


def first_differing(s: Comparison, culprit: Transform | None) -> tuple[FirstLine | None, int]:
    """Returns the first op that differs, in the first step in which one does, and the number of that step."""
    train = compiled(s)
    state, step, skipped = train.init(s.params, s.key), 0, 0
    while step < s.steps:
        # Each step is compared from the state that the transformed step has reached, so that small differences do not
        # accumulate.
        whole = train.gather(state)
        leaves = _leaves(state, s)
        run, program, names = _prepared(train, state, s)
        with recording(run, program) as ran:
            state, metrics = train(state, s.batch)
        if overflowed(metrics) and skipped < most_skipped(s.step):
            skipped += 1
            continue
        step += 1
        reference, axes = _reference(s, whole, leaves, culprit, program, names)
        # Compiled kernels fuse and reorder operations, so their results differ from those of the interpreter by
        # roundoff.
        loose = 0.0 if s.backend == "eager" else s.size.value * 4
        found = first_line(ran, program, s.mesh, leaves, reference, axes, loose)
        everyone = [line for one in all_gather_notes([found] if found else [], s.mesh, FirstLine) for line in one]
        if everyone:
            # The first op over all ranks: a rank may only see the consequence of what went wrong on another.
            return min(everyone, key=lambda line: (line.number, line.iteration, line.rank)), step
    return None, s.steps


def _prepared(train: CompiledStep, state: State, s: Comparison) -> tuple[Any, Program, Sequence[str]]:
    """Returns the executable of the next step, its program, and the paths of its metrics in the order of the
    program's outputs.
    """
    lowered, run = train.built(state, s.batch)
    metrics = tree.unflatten(lowered.structure, list(lowered.program.outputs))
    return run, lowered.program, tree.paths(metrics, "metrics")


def _leaves(state: State, s: Comparison) -> dict[str, torch.Tensor]:
    """Returns copies of what a program is given on this rank, by the names of its inputs."""
    roots = (("params", state.params), ("opt_state", state.opt_state), ("extras", state.extras), ("batch", s.batch))
    found = {"step": state.step, "key": state.key}
    for root, values in roots:
        found |= dict(tree.with_paths(values, root))
    return {name: load(x, s.mesh.device).clone() for name, x in found.items()}


def _reference(
    s: Comparison,
    whole: State,
    leaves: dict[str, torch.Tensor],
    culprit: Transform | None,
    program: Program,
    names: Sequence[str],
) -> tuple[Reference, tuple[str, ...]]:
    """Returns the expected values of the next step, computed from the state that the transformed step has
    reached.
    """
    axes = zero_of(s.step, s.mesh).batch_axes
    precise = isinstance(culprit, PRECISIONS)  # in that case the casts of the transform itself are in question
    same = () if precise else tuple(t for t in s.step.transforms if isinstance(t, PRECISIONS))
    num, batches = batches_of(s)
    one = AbstractMesh(device_type=s.mesh.device_type, data=1)
    base = base_program(replace(s.step, transforms=same), one, s.params, batches[0], num)
    first = s.plain.first  # the plain step continues in the dtypes of its first state
    whole = first._replace(
        **{
            f: tree.map(lambda x, y: y.to(x), getattr(first, f), getattr(whole, f))
            for f in ("step", "params", "opt_state", "key")
        }
    )
    # tensors that a plain state does not have, such as a loss scale, are replicated on every rank
    state = {**leaves, **leaves_of(whole, {})}
    wholes = {v.name: state[v.name].to(v.dtype) for v in base.inputs if v.name in state}
    named = [dict(tree.with_paths(x, "batch")) for x in batches]
    found = part_values(base, s.mesh.device, [wholes | x for x in named])
    parts = [{**x, **y} for x, y in zip(found, named, strict=True)]
    plain = trajectory(replace(s.step, transforms=()), whole, s.whole_batch, 1, s.size)
    after = {f"after {p}": x for p, x in plain.leaves[1].items() if not p.startswith("metrics")}
    tolerance = {f"after {p}": t for p, t in plain.tolerances[1].items() if not p.startswith("metrics")}
    for path, output in zip(names, program.outputs, strict=True):
        if path in plain.leaves[1]:
            after[f"after metrics {output}"] = plain.leaves[1][path]
            tolerance[f"after metrics {output}"] = plain.tolerances[1][path]
    given = {v.name for v in program.inputs} & leaves.keys()
    before = {name: wholes.get(name, leaves[name]) for name in given}
    coarse = 32 * max(s.size.value if precise else 0.0, *s.size.coded)
    return Reference(parts, before, after, tolerance, coarse), axes


def mesh_of_one(mesh: Mesh) -> Mesh:
    """Returns a mesh that contains only this rank."""
    return Mesh({"data": 1}, 0, mesh.device)


def batches_of(s: Comparison) -> tuple[int, list[Any]]:
    """Returns the number of parts (ranks x micro-batches) that the global batch is divided into, and the parts."""
    record, axes = find(s.step.transforms, Accumulate), zero_of(s.step, s.mesh).batch_axes
    num = s.mesh.axis_size(axes) * (record.num_micro_batches if record else 1)
    flat, structure = tree.flatten(s.whole_batch)
    split = rows(s.whole_batch, record)
    return num, [
        tree.unflatten(structure, [x.chunk(num)[i] if c else x for x, c in zip(flat, split, strict=True)])
        for i in range(num)
    ]
