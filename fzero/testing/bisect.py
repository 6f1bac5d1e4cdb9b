"""Searches for the cause of a difference: the transform that introduces it, and the first op of the program whose
value differs.

Transforms are added one by one, in the order of their rewrites. Then those that do not contribute are removed, one by
one. Without a parallel transform, a step runs on each rank by itself, on the complete batch. Every rank asks the same
questions and gets the same answers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fzero import random as fzrandom
from fzero.errors import FzeroError
from fzero.loss import Weighted
from fzero.step.checks import wants_key
from fzero.testing.comparison import compare
from fzero.testing.comparison_setting import Comparison
from fzero.testing.differing_op import batches_of, first_differing, mesh_of_one
from fzero.testing.first_difference import distance
from fzero.testing.report import Blame, Report
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.transform import Transform
from fzero.transforms.zero import Parallel


def blame(setting: Comparison, report: Report) -> Blame:
    """Finds where a report's difference begins. All ranks must call it."""
    step = min((d.step for d in report.differences if not d.ok), default=setting.steps)
    s = replace(setting, steps=step)  # later differences follow from the first one
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
    "the loss of a batch is not the mean of its micro-batches' losses: "
    "return a mean over dim 0, or fz.weighted(total, count)"
)
_OF_STATISTICS = (
    "the loss of a batch is not the mean of its micro-batches' losses, "
    "and there are tensors of `mutable`: a batch norm in "
    "training mode normalizes each part separately, as in PyTorch's DDP. Check with the norms in evaluation mode, "
    "and in training mode on one process "
    "without accumulate (docs/guides/verifying.md). "
    "For a loss without batch norm, return a mean over dim 0, or fz.weighted(total, count)"
)
_AUX = (
    "auxiliary values are averaged over the parts of a batch: return fz.weighted(total, count) for what is not a mean "
    "over dim 0"
)
_NO_LINE = (
    "no line differs when each is recorded: look for effects that depend "
    "on timing, such as a transfer that is not waited for"
)


def _first_transform(s: Comparison) -> tuple[Transform | None, tuple[Transform, ...]]:
    """Returns the first transform with which the step differs (None if it differs without any), and the other
    transforms that are necessary for the difference.
    """
    transforms = s.step.transforms
    if not _same(_with(s, ())):
        return None, ()
    # If no shorter prefix differs, the last transform is the culprit: all of them together are known to differ.
    number = next((n for n in range(1, len(transforms)) if not _same(_with(s, transforms[:n]))), len(transforms))
    if not transforms:
        return None, ()
    culprit, needed = transforms[number - 1], transforms[: number - 1]
    for other in needed:
        fewer = tuple(t for t in needed if t != other)
        # The step still differs without `other`, so `other` is not necessary.
        if not _same(_with(s, tuple(t for t in transforms if t in fewer or t == culprit))):
            needed = fewer
    return culprit, needed


def _with(setting: Comparison, transforms: tuple[Transform, ...]) -> Comparison:
    """Returns the same comparison with fewer transforms; on each rank by itself, if none of them is parallel."""
    s = replace(setting, step=replace(setting.step, transforms=transforms), backend="eager")
    if any(isinstance(t, Parallel) for t in transforms) or s.mesh.size == 1:
        return s
    # Without a parallel transform, ranks of a larger mesh would train on different parts and never exchange anything.
    return replace(s, mesh=mesh_of_one(s.mesh), batch=s.whole_batch)


def _same(setting: Comparison) -> bool:
    """Returns whether a step with fewer transforms is equivalent. A step that cannot be built counts as equivalent,
    because it says nothing.
    """
    try:
        found = compare(setting).equivalent
    except FzeroError:
        found = True
    return found


def _is_mean(s: Comparison) -> bool:
    """Returns whether the loss of the complete batch is what fzero assumes: the mean of the losses of its parts, or a
    weighted mean.
    """
    num, batches = batches_of(s)
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
