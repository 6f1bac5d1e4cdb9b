"""Chooses the mesh of a step with its parallel transforms: plans candidates, and takes the fastest that fits.

A candidate (mesh_candidates.py) is lowered as if the user had written it, so what is chosen is what runs.

[Note: best first] Planning a candidate takes seconds to minutes, and a lower bound of its seconds and bytes
(mesh_bounds.py) one trace for all candidates with the same cut of values. Candidates are looked at in order of their
bounds, ZeRO alone before all others. One whose bound is no more than 2 % below the fastest plan is left out: so the
first of the table takes at most 2 % longer than the best of all. A search that ends early has a plan, and a bound on
the untried candidates.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero.arguments import keywords, number
from fzero.errors import BudgetError, FzeroError, FzeroTypeError, FzeroValueError, TransformError
from fzero.lowering.at_rest import shortage
from fzero.lowering.budget import Budget
from fzero.lowering.layouts import abstract
from fzero.lowering.lower import resolve_and_lower
from fzero.lowering.mesh_bounds import MeshBounds, brief
from fzero.lowering.mesh_candidates import ROWS, MeshCandidate, MeshRequest, Where, candidates, meshes, with_all
from fzero.lowering.mesh_plans import MeshPlan, MeshPlans
from fzero.lowering.search import GAIN
from fzero.plan.cost import check_backend_name
from fzero.plan.devices import Device, get_device
from fzero.plan.process import INTERPRETER, room
from fzero.progress import within
from fzero.step import Step
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.base import find
from fzero.transforms.cutting import Cutting
from fzero.transforms.local_sgd import LocalSGD
from fzero.transforms.once_a_step import OnceAStep
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.precision import with_first_dtype
from fzero.transforms.redundant import Redundant
from fzero.transforms.shard import Parallel
from fzero.transforms.tensor import Rules
from fzero.units import duration, parse_bytes

_SEARCHED = (Parallel, Cutting, Pipeline, Accumulate, OnceAStep, Redundant)
_OF_A_REPLICA = "leave it out, and choose a mesh for the devices of one replica"


@keywords
def choose_mesh(
    step: Step,
    params: Any,
    batch: Any,
    *,
    devices: int,
    device: Device | str | None = None,
    memory_budget: str | int | None = None,
    rules: Rules | None = None,
    experts: Where | None = None,
    backend: str = "inductor",
    seconds: float | None = None,
) -> MeshPlans:
    """Plans a step on the meshes of a number of devices, with the parallel transforms for each. No device is touched.

    Candidates have a data axis with ZeRO-1 or ZeRO-3, also over the axes node and data, `pipeline` with 1F1B or "zb",
    and within a host `tensor_parallel` (with `sequence=True` and without), `sequence_parallel` and `expert_parallel`:
    all factorisations of `devices`. Without `remat` of its own the step gets `remat("auto")`, which keeps as many
    activations as fit. Where one micro-batch does not fit, more are tried. Not planned is a candidate whose state and
    waiting activations do not fit, or whose least seconds are no more than 2 % below the fastest.

    Args:
        step: a training step with its precision and optimizer, and none of these transforms.
        params: a pytree of tensors with whole leaves (meta tensors will do), or a function of a key that returns one.
        batch: the whole batch of a step: a pytree of tensors (meta tensors will do) with as many rows in dim 0.
        devices: their number.
        device: that the plans are for, as for `lower`; by default this machine's.
        memory_budget: bytes of each rank, or text ("80GB"); by default the device's memory without what the process
            takes.
        rules: of `tensor_parallel`; by default they are chosen for each size.
        experts: `where` of `expert_parallel`: which parameters are of experts; without it there is no axis of experts.
        backend: as for `lower`.
        seconds: wall-clock time after which no other candidate is begun. The answer then says how much faster the
            untried may be. It depends on the speed of this machine: choose once, not on every rank. By default no
            candidate stays untried.

    Returns:
        The candidates, the fastest first, then those left out: `.best.step` and `.best.axes` to go on with, `.code` to
        paste, `str` for a table, `.sentence` for whether ZeRO alone is as fast.

    Raises:
        FzeroTypeError: no training step; `devices` that are no whole number.
        FzeroValueError: a batch whose leaves have different numbers of rows; `seconds` that is not a number above 0.
        TransformError: a step that has parallel transforms of its own.
        FzeroError: whatever is wrong with the step on one device.

    Example:
        >>> import torch, fzero as fz
        >>> layer = fz.block(lambda w, x: torch.tanh(x @ w))
        >>> def loss(params, x):
        ...     for w in params:
        ...         x = layer(w, x)
        ...     return x.square().mean()
        >>> params, x = [torch.empty(256, 256, device="meta")] * 4, torch.empty(64, 256, device="meta")
        >>> step = fz.train_step(loss, fz.optim.adamw(1e-3))
        >>> found = choose_mesh(step, [w.clone() for w in params], x, devices=4, device="h100")
        >>> found.best.mesh, found.best.title
        ('data=4', 'ZeRO-3')
    """
    if not isinstance(step, Step):
        fix = "make one with fz.train_step"
        raise FzeroTypeError("choose_mesh", f"chooses for a training step, not {type(step).__name__}", fix=fix)
    if type(devices) is not int or devices < 1:
        raise FzeroTypeError("choose_mesh", f"devices={devices!r}: their number, at least 1", fix="e.g. devices=8")
    if there := [str(t) for t in step.transforms if isinstance(t, _SEARCHED)]:
        fix = "leave them out: they are what is searched for"
        raise TransformError("choose_mesh", "the step is parallel already", there, fix)
    if (spec := find(step.transforms, LocalSGD)) is not None:
        raise TransformError("choose_mesh", "replicas are not searched for", [str(spec)], fix=_OF_A_REPLICA)
    check_backend_name("choose_mesh", backend)
    begun = time.monotonic()
    if problems := [] if seconds is None else number("seconds", seconds, above=0):
        raise FzeroValueError("choose_mesh", "invalid arguments", problems, "e.g. seconds=300; None looks at all")
    params = abstract(params) if callable(params) else params
    rows = _rows(batch)
    rates = device if isinstance(device, Device) else get_device(device, "cuda" if torch.cuda.is_available() else "cpu")
    interpreter = rates.process_bytes or INTERPRETER
    budget = room(rates, devices > 1, interpreter) if memory_budget is None else parse_bytes(memory_budget)
    asked = MeshRequest(
        with_first_dtype(step, None), params, batch, rows, rates, budget, rules, experts, backend, devices
    )
    search = _Search(asked)
    found = search.run(math.inf if seconds is None else begun + seconds)
    untried = search.untried
    return MeshPlans(
        devices,
        rates,
        budget,
        rows,
        tuple(sorted(found, key=_order)),
        num_planned=search.num_planned,
        stopped=seconds if untried else None,
        num_untried=len(untried),
        least_untried=min(untried, default=0.0),
    )


def _rows(batch: Any) -> int:
    found = {path: x.shape[0] for path, x in _tensors(batch).items() if x.ndim}
    if len({*found.values()}) != 1:
        problems = [f"batch{path}: {n} rows" for path, n in found.items()] or ["no tensor has rows"]
        raise FzeroValueError("choose_mesh", "the batch has no one number of rows", problems, "give the whole batch")
    return next(iter(found.values()))


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    pairs = zip(tree.paths(batch), tree.leaves(batch), strict=True)
    return {path: x for path, x in pairs if isinstance(x, torch.Tensor)}


class _Search:
    """See [Note: best first].

    Attributes:
        num_planned: how many candidates were planned.
        untried: for each candidate that may be faster and that there was no time for, the least seconds of its step.
    """

    def __init__(self, asked: MeshRequest):
        self.asked, self.bounds = asked, MeshBounds(asked)
        self.num_planned, self.untried = 0, list[float]()

    def run(self, until: float = math.inf) -> list[MeshPlan]:
        """The candidates, of each family one: see [Note: best first].

        Args:
            until: time of `time.monotonic` after which none is begun that takes a trace or a plan.
        """
        self.bounds.check()
        asked, found, fastest = self.asked, dict[Any, list[MeshPlan]](), math.inf
        left: list[tuple[bool, float, int, bool, MeshCandidate]] = []
        order = itertools.count()

        def push(candidate: MeshCandidate, least: float, bounded: bool) -> None:
            heapq.heappush(left, (not {*candidate.axes} <= {*ROWS}, least, next(order), bounded, candidate))

        def leave(made: MeshPlan, candidate: MeshCandidate) -> None:
            found.setdefault(candidate.family, []).append(made)
            if made.too_large and candidate.later:
                next_one = candidate._replace(micro=candidate.later[0], later=candidate.later[1:])
                push(next_one, self.bounds.first(next_one), False)

        for axes in meshes(asked.devices, asked.device.devices_per_host, asked.experts is not None):
            for candidate in candidates(axes, asked.rows):
                if isinstance(candidate, MeshCandidate):
                    push(candidate, self.bounds.first(candidate), False)
                else:
                    found[candidate, *axes.items()] = [MeshPlan(axes, (), "", asked.step, None, refused=candidate)]
        while left:
            _, seconds, _, bounded, candidate = heapq.heappop(left)
            if seconds > (1 - GAIN) * fastest:
                leave(self._without_plan(candidate, f"it takes at least {duration(seconds)}", seconds), candidate)
                continue
            if time.monotonic() >= until and (bounded or self.bounds.traces(candidate)):
                self.untried.append(seconds)
                leave(self._without_plan(candidate, f"no time; at least {duration(seconds)}", seconds), candidate)
                continue
            with within("planning", f"{self.num_planned} planned, {len(left) + 1} left"):
                least = self.bounds.least(candidate)
                if least.refused:
                    leave(self._without_plan(candidate, least.refused, too_large=least.too_large), candidate)
                    continue
                if not bounded:
                    push(candidate, max(seconds, least.seconds), True)
                    continue
                made = self._planned(candidate)
            self.num_planned += 1
            if made.plan is None:
                leave(made, candidate)
            else:
                found.setdefault(candidate.family, []).append(made)
                fastest = min(fastest, made.plan.step_seconds)
        return [min(reversed(of), key=_order) for of in found.values()]

    def _planned(self, candidate: MeshCandidate) -> MeshPlan:
        asked = self.asked
        found = replace(self._without_plan(candidate), batch=asked.part(asked.rows // candidate.parts))
        try:
            step, mesh = with_all(asked.step, asked.added(candidate)), asked.mesh(candidate.axes)
            found = replace(found, step=step)
            budget = Budget(asked.budget, asked.device, asked.backend)
            # nothing is traced where the state alone is too large
            if candidate.pipe == 1 and (short := shortage(step, mesh, asked.params, budget)) is not None:
                return replace(found, refused=short[0][0], too_large=True)
            lowered = resolve_and_lower(step, mesh, asked.params, found.batch, budget, draft=True)
            return replace(found, plan=lowered.plan)
        except FzeroError as error:
            if too_large := isinstance(error, BudgetError):
                self.bounds.short.append(candidate)
            return replace(found, refused=brief(error), too_large=too_large)

    def _without_plan(
        self, candidate: MeshCandidate, why: str = "", seconds: float | None = None, too_large: bool = False
    ) -> MeshPlan:
        added = self.asked.added(candidate)
        title, codes = ", ".join(x.title for x in added if x.title), tuple(x.code for x in added)
        return MeshPlan(candidate.axes, codes, title, self.asked.step, None, None, why, seconds, too_large)


def _order(x: MeshPlan) -> tuple[bool, bool, float]:
    """Plans, the fastest first; then what was left out by its seconds; then what cannot be had."""
    return x.plan is None, x.seconds is None, x.seconds or 0.0
