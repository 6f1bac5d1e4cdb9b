"""Where a difference begins: which transform brings it in, and which line of the program is the first whose value differs.

Transforms are added one by one in the order in which they are rewritten; those that turn out to do no harm are then dropped from what is left, one by one.
Without a parallel transform a step runs on each rank by itself, on the whole batch. Every rank asks the same questions and gets the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroError
from fzero.layout import COMPUTE
from fzero.lower import base_program, zero_of
from fzero.mesh import AbstractMesh, Mesh
from fzero.program.ir import Program
from fzero.runtime.compile import CompiledStep, compile
from fzero.runtime.resting import load
from fzero.step import State
from fzero.testing.check import Setting, compare, everyones, leaves_of, trajectory
from fzero.testing.lines import Reference, first_line, part_values
from fzero.testing.record import recording
from fzero.testing.report import Blame, FirstLine, Report
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.base import Transform, find
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.shard import Parallel


def blame(setting: Setting, report: Report) -> Blame:
    """Where the difference of a report begins; all ranks call it together."""
    s = setting
    if s.backend != "eager" and _same(replace(s, backend="eager")):
        line, step = _first_line(s, report, None)
        return Blame(None, (), line, step, f"the program is right, and differs only as backend {s.backend!r} builds it")
    transforms = s.step.transforms
    culprit, before = None, transforms
    for number in range(len(transforms) + 1):
        if not _same(_with(s, transforms[:number])):
            culprit, before = (transforms[number - 1], transforms[: number - 1]) if number else (None, ())
            break
    needed = before if culprit is not None else ()
    for other in needed:
        fewer = tuple(t for t in needed if t != other)
        if not _same(_with(s, tuple(t for t in transforms if t in fewer or t == culprit))):
            needed = fewer
    step = report_step(report)
    if step == 0:
        return Blame(culprit and str(culprit), tuple(map(str, needed)), None, 0, "the first state differs: look at `init`, before any line runs")
    line, step = _first_line(s, report, culprit)
    note = "" if line is not None else "no line differs from the plain step's parts: " + (_NOT_A_MEAN if isinstance(culprit, _CUTS) else _WHOLE)
    return Blame(culprit and str(culprit), tuple(map(str, needed)), line, step, note)


_CUTS = (Accumulate, Parallel)
_NOT_A_MEAN = "the loss of the batch may not be the mean of its parts' losses; return fz.weighted(total, count)"
_WHOLE = "look at what the step does between lines"


def report_step(report: Report) -> int:
    """The first step after which a leaf differs, as far as a report knows."""
    return min((d.step for d in report.differences if not d.ok), default=1)


def _with(setting: Setting, transforms: tuple[Transform, ...]) -> Setting:
    """The same comparison with fewer transforms: on each rank by itself, if none of them is parallel."""
    s = replace(setting, step=replace(setting.step, transforms=transforms), backend="eager")
    if any(isinstance(t, Parallel) for t in transforms) or s.mesh.size == 1:
        return s
    return replace(s, mesh=_alone(s.mesh), batch=s.whole_batch)


def _same(setting: Setting) -> bool:
    """Whether a step with fewer transforms is equivalent; one that cannot be built says nothing, and counts as such."""
    try:
        found = compare(setting).equivalent
    except FzeroError:
        found = True
    return found


def _alone(mesh: Mesh) -> Mesh:
    return Mesh({"data": 1}, 0, mesh.device)


def _first_line(setting: Setting, report: Report, culprit: Transform | None) -> tuple[FirstLine | None, int]:
    """The first line that differs, in the first step in which a leaf does, and that step."""
    s = setting
    train: CompiledStep = compile(s.step, s.mesh, backend=s.backend, **s.options)
    state = train.init(s.params, s.key)
    for step in range(1, s.steps + 1):
        whole = train.gather(state)
        leaves = _leaves(state, s)
        run, program, names = _prepared(train, state, s)
        with recording(run, program) as ran:
            state, _ = train(state, s.batch)
        reference, axes = _reference(s, whole, leaves, culprit, program, names)
        loose = 0.0 if s.backend == "eager" else s.size.value * 4
        found = first_line(ran, program, s.mesh, leaves, reference, axes, loose)
        everyone = [line for one in everyones([found] if found else [], s.mesh) for line in one]
        if everyone:
            return min(everyone, key=lambda line: (line.number, line.turn, line.rank)), step
    return None, report_step(report)


def _prepared(train: CompiledStep, state: State, s: Setting) -> tuple[Any, Program, Sequence[str]]:
    """The executable of the coming step, its program, and the paths of its metrics in the order of the program's outputs."""
    lowered, run = train.built(state, s.batch)
    metrics = tree.unflatten(lowered.structure, list(lowered.program.outputs))
    return run, lowered.program, tree.paths(metrics, "metrics")


def _leaves(state: State, s: Setting) -> dict[str, torch.Tensor]:
    """Copies of what a program is given on this rank, by the names of its inputs."""
    roots = (("params", state.params), ("opt_state", state.opt_state), (COMPUTE, state.extras.get("compute")), ("batch", s.batch))
    found = {"step": state.step, "key": state.key}
    for root, values in roots:
        found |= dict(zip(tree.paths(values, root), tree.leaves(values), strict=True))
    return {name: load(x, s.mesh.device).clone() for name, x in found.items()}


def _reference(
    s: Setting, whole: State, leaves: dict[str, torch.Tensor], culprit: Transform | None, program: Program, names: Sequence[str]
) -> tuple[Reference, tuple[str, ...]]:
    """What the coming step means, from the state that the transformed step has come to."""
    axes = zero_of(s.step, s.mesh).batch_axes
    record = find(s.step.transforms, Accumulate)
    num = s.mesh.axis_size(axes) * (record.num_micro_batches if record else 1)
    precise = isinstance(culprit, MixedPrecision)  # then its own casts are what is in question
    same = () if precise else tuple(t for t in s.step.transforms if isinstance(t, MixedPrecision))
    alone, part = _alone(s.mesh), tree.map(lambda x: x[: x.shape[0] // num] if x.dim() else x, s.whole_batch)
    base = base_program(replace(s.step, transforms=same), AbstractMesh(device_type=s.mesh.device_type, data=1), s.params, part)
    whole = tree.map(lambda x: x.to(s.mesh.device), whole)
    state = leaves_of(whole, {})
    wholes = {v.name: state[v.name] for v in base.inputs if v.name in state}
    named = dict(zip(tree.paths(s.whole_batch, "batch"), tree.leaves(s.whole_batch), strict=True))
    batches = [{name: x.chunk(num)[i] if x.dim() else x for name, x in named.items()} for i in range(num)]
    parts = [{**part_values(base, alone, {**wholes, **batch}, i), **batch} for i, batch in enumerate(batches)]
    plain = trajectory(replace(s.step, transforms=()), whole, s.whole_batch, 1, s.size)
    after = {f"after {p}": x for p, x in plain.leaves[1].items() if not p.startswith("metrics")}
    tolerance = {f"after {p}": t for p, t in plain.tolerances[1].items() if not p.startswith("metrics")}
    for path, output in zip(names, program.outputs, strict=True):
        if path in plain.leaves[1]:
            after[f"after metrics {output}"] = plain.leaves[1][path]
            tolerance[f"after metrics {output}"] = plain.tolerances[1][path]
    given = {v.name for v in program.inputs} & leaves.keys()
    before = {name: wholes.get(name, leaves[name]) for name in given}
    return Reference(parts, before, after, tolerance, 32 * s.size.value if precise else 0.0), axes
