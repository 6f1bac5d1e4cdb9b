"""Runs a transformed step and compares its tensors with the trajectory of the plain step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fzero import tree
from fzero.compiler.auto_stages import open_stages
from fzero.mesh import Mesh
from fzero.runtime.compile import compile
from fzero.runtime.compiled_step import CompiledStep
from fzero.step import Step
from fzero.testing.comparison_setting import Comparison
from fzero.testing.first_difference import distance, norm
from fzero.testing.reference_trajectory import leaves_of
from fzero.testing.report import Difference, Report
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.transform import find


def compare(setting: Comparison) -> Report:
    """Compares the transformed step with the plain one, without searching for where a difference begins."""
    s = setting
    worst: dict[str, tuple[float, Difference]] = {}
    skipped = 0
    for t, (found, again) in enumerate(_taken(s)):
        skipped += again
        for path, want in s.plain.leaves[t].items():
            got, size, tolerance = found.get(path), norm(want) or 1.0, s.plain.tolerances[t][path]
            off = math.inf if got is None or got.shape != want.shape else distance(got.cpu(), want.cpu())
            difference = Difference(
                path, tuple(want.shape), tree.dtype_name(want.dtype), t, off / size, tolerance / size
            )
            ratio = 0.0 if off == 0 else off / tolerance if tolerance else math.inf
            # The first step that exceeds the tolerance is kept, because later differences may follow from it.
            if path not in worst or (worst[path][1].ok and ratio >= worst[path][0]):
                worst[path] = ratio, difference
    mine = list(worst.items())
    everyone = [mine] if s.simulated else all_gather_notes(mine, s.mesh, tuple[str, tuple[float, Difference]])
    merged: dict[str, tuple[float, Difference]] = {}
    for path, entry in (item for one in everyone for item in one):
        if path not in merged or entry[0] > merged[path][0]:
            merged[path] = entry
    ordered = tuple(d for _, d in sorted(merged.values(), key=lambda entry: -entry[0]))
    return Report(
        s.step.name,
        str(s.mesh),
        tuple(map(str, s.step.transforms)),
        s.steps,
        "simulated" if s.simulated else s.backend,
        str(s.size),
        ordered,
        skipped=skipped,
    )


def _taken(s: Comparison) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """Yields the tensors of the first state and after each step, and how often that step was skipped before."""
    if s.simulated:
        from fzero.testing.simulate import simulated

        for state, metrics in simulated(s.step, s.simulated, s.params, s.whole_batch, s.steps, s.key):
            yield leaves_of(state, metrics), 0
        return
    train = compiled(s)
    state, left = train.init(s.params, s.key), most_skipped(s.step)
    yield leaves_of(train.gather(state), {}), 0
    for _ in range(s.steps):
        before = left
        state, metrics = train(state, s.batch)
        # The state is unchanged except for its loss scale, so repeating the step compares the same update.
        while overflowed(metrics) and left:
            state, metrics = train(state, s.batch)
            left -= 1
        yield leaves_of(train.gather(state), metrics), before - left


def compiled(s: Comparison) -> CompiledStep:
    """Returns the compiled step. If its stages depend on the batch, it is compiled for the batch."""
    given = {"batch": s.batch} if open_stages(s.step, s.mesh) else {}
    return compile(s.step, s.mesh, backend=s.backend, **{**given, **s.options})


def overflowed(metrics: dict[str, Any]) -> bool:
    """Returns whether a step was skipped."""
    return bool(metrics.get("skipped", False))


def most_skipped(step: Step) -> int:
    """Returns the number of steps that a loss scale may skip until it is low enough. 0 for a fixed scale, which would
    skip all.
    """
    scale = record.scaling if (record := find(step.transforms, MixedPrecision)) else None
    if scale is None or scale.backoff_factor == 1:
        return 0
    # The number of times that the scale can be multiplied by the factor before it reaches its minimum.
    return scale.hysteresis + math.ceil(math.log(scale.minimum / scale.initial) / math.log(scale.backoff_factor))


def all_gather_notes(mine: list[Any], mesh: Mesh, form: Any) -> list[list[Any]]:
    """Returns the messages of each rank, on every rank. `form`: the type of a message (bounded_json.py)."""
    return [mine] if mesh.size == 1 else mesh.control.all_gather(mine, list[form], "check_equivalent")
