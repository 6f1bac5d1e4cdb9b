"""Searches for the cause of a difference: the transform that brings it in, and the first line of the program whose
value differs.

Transforms are added one by one, in the order of their rewrites. Then harmless ones are dropped, one by one. Without a
parallel transform a step runs on each rank by itself, on the whole batch. Every rank asks the same questions and gets
the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero.errors import FzeroError
from fzero.loss import Weighted
from fzero.lowering.layouts import zero_of
from fzero.lowering.traced import base_program
from fzero.mesh import AbstractMesh, Mesh
from fzero.program.ir import Program
from fzero.runtime.training import CompiledStep
from fzero.state.storage import load
from fzero.step import State
from fzero.step.checks import wants_key
from fzero.testing.check import (
    Comparison,
    compare,
    compiled,
    everyones,
    leaves_of,
    most_skipped,
    overflowed,
    rows,
    trajectory,
)
from fzero.testing.lines import Reference, distance, first_line, part_values
from fzero.testing.recording import recording
from fzero.testing.report import Blame, FirstLine, Report
from fzero.testing.tolerance import PRECISIONS
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.base import Transform, find
from fzero.transforms.shard import Parallel


def blame(setting: Comparison, report: Report) -> Blame:
    """Finds the beginning of a report's difference; all ranks call it together."""
    step = min((d.step for d in report.differences if not d.ok), default=setting.steps)
    s = replace(setting, steps=step)  # what differs after it follows from that
    if s.backend != "eager" and _same(replace(s, backend="eager")):
        line, step = first_differing(s, None)
        return Blame(None, (), line, step, f"the program is right: it differs only as backend {s.backend!r} builds it")
    culprit, needed = _first_transform(s)
    found = Blame(culprit and str(culprit), tuple(map(str, needed)), None, step)
    if step == 0:
        return replace(found, note="the first state differs: look at `init`, before any line runs")
    if isinstance(culprit, (Accumulate, Parallel)):
        if not _is_mean(s):
            return replace(found, note=_NOT_A_MEAN if s.step.mutable is None else _OF_STATISTICS)
        if all(d.ok or d.path.startswith("metrics['aux']") for d in report.differences):
            return replace(found, note=_AUX)
    line, step = first_differing(s, culprit)
    return replace(found, line=line, step=step, note="" if line is not None else _NO_LINE)


_NOT_A_MEAN = (
    "the loss of a batch is not the mean of its parts' losses: return a mean over dim 0, or fz.weighted(total, count)"
)
_OF_STATISTICS = (
    "the loss of a batch is not the mean of its parts' losses, and there are leaves of `mutable`: a batch norm in "
    "training mode normalises each part "
    "by itself, here as in PyTorch. Check with its norms in evaluation mode, and in training mode on one process "
    "without accumulate (docs/checking.md). "
    "Of a loss without such norms: return a mean over dim 0, or fz.weighted(total, count)"
)
_AUX = (
    "auxiliary values are averaged over the parts of a batch: return fz.weighted(total, count) for what is not a mean "
    "over dim 0"
)
_NO_LINE = (
    "no line differs when each is recorded: look for what depends on time, such as a transfer that is not waited for"
)


def _first_transform(s: Comparison) -> tuple[Transform | None, tuple[Transform, ...]]:
    """The first transform with which the step differs, None if it does without any, and those that it needs to do
    so."""
    transforms = s.step.transforms
    if not _same(_with(s, ())):
        return None, ()
    number = next((n for n in range(1, len(transforms)) if not _same(_with(s, transforms[:n]))), len(transforms))
    if not transforms:
        return None, ()
    culprit, needed = transforms[number - 1], transforms[: number - 1]
    for other in needed:
        fewer = tuple(t for t in needed if t != other)
        if not _same(_with(s, tuple(t for t in transforms if t in fewer or t == culprit))):
            needed = fewer
    return culprit, needed


def _with(setting: Comparison, transforms: tuple[Transform, ...]) -> Comparison:
    """The same comparison with fewer transforms: on each rank by itself, if none of them is parallel."""
    s = replace(setting, step=replace(setting.step, transforms=transforms), backend="eager")
    if any(isinstance(t, Parallel) for t in transforms) or s.mesh.size == 1:
        return s
    return replace(s, mesh=_alone(s.mesh), batch=s.whole_batch)


def _same(setting: Comparison) -> bool:
    """Whether a step with fewer transforms is equivalent; one that cannot be built says nothing, and counts as such."""
    try:
        found = compare(setting).equivalent
    except FzeroError:
        found = True
    return found


def _alone(mesh: Mesh) -> Mesh:
    return Mesh({"data": 1}, 0, mesh.device)


def _is_mean(s: Comparison) -> bool:
    """Whether the loss of the whole batch is what fzero takes it for: the mean of its parts' losses, or of what is
    weighted."""
    num, batches = _batches(s)
    state, losses = s.plain.first, []
    for i, batch in enumerate(batches):
        kwargs = (
            {"key": fzrandom.with_part(fzrandom.fold_in(state.key, state.step), i)} if wants_key(s.step.loss_fn) else {}
        )
        with torch.no_grad():
            result = s.step.loss_fn(state.params, batch, **kwargs)
        losses.append(result[0] if s.step.has_aux or s.step.mutable is not None else result)
    if isinstance(losses[0], Weighted):
        mean = sum(x.total for x in losses) / sum(x.count for x in losses)
    else:
        mean = sum(losses) / num
    return (
        distance(torch.as_tensor(mean), s.plain.leaves[1]["metrics['loss']"])
        <= s.plain.tolerances[1]["metrics['loss']"]
    )


def _batches(s: Comparison) -> tuple[int, list[Any]]:
    """The number of parts, ranks x micro-batches, that the global batch is cut in, and the parts."""
    record, axes = find(s.step.transforms, Accumulate), zero_of(s.step, s.mesh).batch_axes
    num = s.mesh.axis_size(axes) * (record.num_micro_batches if record else 1)
    flat, structure = tree.flatten(s.whole_batch)
    cut = rows(s.whole_batch, record)
    return num, [
        tree.unflatten(structure, [x.chunk(num)[i] if c else x for x, c in zip(flat, cut, strict=True)])
        for i in range(num)
    ]


def first_differing(s: Comparison, culprit: Transform | None) -> tuple[FirstLine | None, int]:
    """The first line that differs, in the first step in which one does, and that step."""
    train = compiled(s)
    state, step, skipped = train.init(s.params, s.key), 0, 0
    while step < s.steps:
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
        loose = 0.0 if s.backend == "eager" else s.size.value * 4
        found = first_line(ran, program, s.mesh, leaves, reference, axes, loose)
        everyone = [line for one in everyones([found] if found else [], s.mesh, FirstLine) for line in one]
        if everyone:
            return min(everyone, key=lambda line: (line.number, line.turn, line.rank)), step
    return None, s.steps


def _prepared(train: CompiledStep, state: State, s: Comparison) -> tuple[Any, Program, Sequence[str]]:
    """The executable of the coming step, its program, and the paths of its metrics in the order of the program's
    outputs."""
    lowered, run = train.built(state, s.batch)
    metrics = tree.unflatten(lowered.structure, list(lowered.program.outputs))
    return run, lowered.program, tree.paths(metrics, "metrics")


def _leaves(state: State, s: Comparison) -> dict[str, torch.Tensor]:
    """Copies of what a program is given on this rank, by the names of its inputs."""
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
    """The meaning of the coming step, from the state that the transformed step has come to."""
    axes = zero_of(s.step, s.mesh).batch_axes
    precise = isinstance(culprit, PRECISIONS)  # then its own casts are what is in question
    same = () if precise else tuple(t for t in s.step.transforms if isinstance(t, PRECISIONS))
    alone, (num, batches) = _alone(s.mesh), _batches(s)
    one = AbstractMesh(device_type=s.mesh.device_type, data=1)
    base = base_program(replace(s.step, transforms=same), one, s.params, batches[0], num)
    first = s.plain.first  # in whose dtypes the plain step goes on
    whole = first._replace(
        **{
            f: tree.map(lambda x, y: y.to(x), getattr(first, f), getattr(whole, f))
            for f in ("step", "params", "opt_state", "key")
        }
    )
    # what is not in a plain state, such as a loss scale, is whole on every rank
    state = {**leaves, **leaves_of(whole, {})}
    wholes = {v.name: state[v.name].to(v.dtype) for v in base.inputs if v.name in state}
    named = [dict(tree.with_paths(x, "batch")) for x in batches]
    parts = [{**x, **y} for x, y in zip(part_values(base, alone, [wholes | x for x in named]), named, strict=True)]
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
