"""Bounds the seconds and bytes of a candidate mesh from below, by the costs of its cut (cut_cost.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.errors import BudgetError, FzeroError
from fzero.lowering.at_rest import AtRest, at_rest
from fzero.lowering.cut_cost import CutCost, cut_cost, hand_seconds, link_seconds
from fzero.lowering.layouts import params_inputs
from fzero.lowering.mesh_candidates import MeshCandidate, MeshRequest, ValueCut, with_all
from fzero.transforms.base import find
from fzero.transforms.compress import Compress
from fzero.transforms.fp8 import Fp8
from fzero.transforms.offload import Offload
from fzero.transforms.precision import DTYPES, MixedPrecision
from fzero.transforms.remat import Remat, remat
from fzero.transforms.shard import data_parallel
from fzero.units import size


class LeastOfMesh(NamedTuple):
    """The least seconds of a candidate; why it cannot be had, if it cannot, and whether that is for its size."""

    seconds: float
    refused: str = ""
    too_large: bool = False


@dataclass(frozen=True)
class MeshBounds:
    """The bounds of candidates. `short`: those whose plans did not fit."""

    asked: MeshRequest
    short: list[MeshCandidate] = field(default_factory=list)
    _costs: dict[ValueCut, CutCost | str] = field(default_factory=dict)  # or the reason why there is none
    _resting: dict[Any, AtRest] = field(default_factory=dict)  # by mesh and stage

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether all that a rank has is on its device, and travels as it is."""
        return not any(isinstance(t, (Offload, Compress, Fp8)) for t in self.asked.step.transforms)

    def check(self) -> None:
        """Raises what is wrong with the step on one device."""
        self._costs[ValueCut()] = self._traced(ValueCut())

    def first(self, candidate: MeshCandidate) -> float:
        """The least seconds by the products of the step on one device, divided evenly."""
        whole = self._cost(ValueCut())
        if isinstance(whole, str) or self._too_many_stages(candidate):
            return 0.0
        return self._seconds(candidate, whole.divided(candidate.cut.ranks))

    def traces(self, candidate: MeshCandidate) -> bool:
        """Whether `least` takes a trace."""
        return candidate.cut not in self._costs and not self._too_many_stages(candidate)

    def _too_many_stages(self, candidate: MeshCandidate) -> str:
        """Why a candidate has no stage for each rank of its pipeline; "" if it has."""
        whole = self._cost(ValueCut())
        if isinstance(whole, str) or candidate.pipe <= len(whole.blocks):
            return ""
        return f"more stages than blocks: {candidate.pipe} stages, {len(whole.blocks)} blocks"

    def least(self, candidate: MeshCandidate) -> LeastOfMesh:
        if many := self._too_many_stages(candidate):
            return LeastOfMesh(0.0, many)
        cost = self._cost(candidate.cut)
        if isinstance(cost, str):
            return LeastOfMesh(0.0, cost)
        if any(candidate.takes_more(other) for other in self.short):
            return LeastOfMesh(0.0, "it takes more memory than with more micro-batches, which did not fit", True)
        pipe, rest = candidate.pipe, self._rest(candidate)
        waiting, share = cost.waiting(self.asked.rows // candidate.parts, candidate.micro, pipe)
        held = rest.total + (cost.numel * self._compute if candidate.zero == "ZeRO-1" and self._casts else 0)
        # a stage adds its gradients up whole; the second backward begins with as many micro-batches waiting
        grads = cost.numel * self._reduced if pipe > 1 and self._trains_all else 0
        peak = (
            share * (held + grads) + waiting if candidate.micro > pipe else share * held + max(waiting, share * grads)
        )
        least = max(rest.total / pipe, peak) if self._plain else 0.0
        if least > self.asked.budget:
            what = f"its state, parameters and waiting activations take at least {size(int(least))}"
            return LeastOfMesh(0.0, f"{what}, more than the {size(self.asked.budget)} that it may have", True)
        update = 2 * rest.opt_state / pipe / self.asked.device.memory_bandwidth if self._plain else 0.0
        return LeastOfMesh(self._seconds(candidate, cost, update))

    def _seconds(self, candidate: MeshCandidate, cost: CutCost, update: float = 0.0) -> float:
        here, micro, pipe = self.asked.rows // candidate.parts, candidate.micro, candidate.pipe
        if candidate.zero and self._plain:
            gathers, reduces = self._sends(candidate, cost)
        else:
            gathers = reduces = 0.0
        if pipe > 1:
            mesh, nbytes = self.asked.mesh(candidate.axes), (here / micro * n * self._plain for n in cost.handed)
            forward, backward = (hand_seconds(n, mesh, "pipe", self.asked.device) for n in nbytes)
            least = cost.staged_seconds(here, micro, pipe, candidate.schedule == "zb", reduces, (forward, backward))
        else:
            least = cost.step_seconds(here, micro)
        return max(least + update, gathers + reduces)

    def _sends(self, candidate: MeshCandidate, cost: CutCost) -> tuple[float, float]:
        """The least seconds in which a rank's parameters are gathered, and its gradients reduced."""
        per_element = self._compute, self._reduced if self._trains_all else 0
        if candidate.zero == "replicated":
            per_element = 0, 2 * per_element[1]
        # parameters of experts are cut over their axis as they are
        numel = cost.numel / candidate.pipe / candidate.axes.get("expert", 1)
        axes, mesh = [axis for axis in candidate.zero_axes if axis != "expert"], self.asked.mesh(candidate.axes)
        gathers, reduces = (link_seconds(n * numel, mesh, axes, self.asked.device) for n in per_element)
        return gathers, reduces

    @functools.cached_property
    def _trains_all(self) -> bool:
        return all(self.asked.step.trains(self.asked.params))

    @functools.cached_property
    def _precision(self) -> MixedPrecision | None:
        return find(self.asked.step.transforms, MixedPrecision)

    @functools.cached_property
    def _itemsize(self) -> int:
        """Bytes of an element of the parameters, at least."""
        leaves = [x for x in tree.leaves(self.asked.params) if isinstance(x, torch.Tensor)]
        return min((x.dtype.itemsize for x in leaves), default=4)

    @functools.cached_property
    def _compute(self) -> int:
        """Bytes of an element of a parameter that is gathered."""
        spec = self._precision
        return self._itemsize if spec is None else min(self._itemsize, DTYPES[spec.compute].itemsize)

    @functools.cached_property
    def _reduced(self) -> int:
        """Bytes of an element of a gradient that is reduced."""
        spec = self._precision
        return self._itemsize if spec is None else min(self._itemsize, DTYPES[spec.reduce].itemsize)

    @functools.cached_property
    def _casts(self) -> bool:
        """Whether parameters are computed with in a dtype of fewer bytes."""
        return self._compute < self._itemsize

    def _cost(self, cut: ValueCut) -> CutCost | str:
        if cut not in self._costs:
            try:
                self._costs[cut] = self._traced(cut)
            except FzeroError as error:
                self._costs[cut] = brief(error)
        return self._costs[cut]

    def _traced(self, cut: ValueCut) -> CutCost:
        asked = self.asked
        # of more rows a row takes less: of no candidate has a micro-batch more
        rows = asked.rows // cut.expert if cut.ranks == 1 else max(1, asked.rows * cut.ranks // asked.devices)
        asked.choose_rules(cut.model, rows)
        # a mesh of one rank sends nothing in codes
        step = replace(asked.step, transforms=tuple(t for t in asked.step.transforms if not isinstance(t, Compress)))
        step = with_all(step, asked.cutting(cut)) if cut.ranks > 1 else data_parallel()(step)
        if find(step.transforms, Remat) is None:
            step = remat("auto")(step)
        return cut_cost(step, asked.mesh(cut.axes), asked.params, asked.part(rows), rows, asked.device, asked.backend)

    def _rest(self, candidate: MeshCandidate) -> AtRest:
        asked = self.asked
        axes = {axis: n for axis, n in candidate.axes.items() if axis != "pipe"}
        key = *axes.items(), candidate.zero
        if key not in self._resting:
            step, mesh = with_all(asked.step, asked.added(candidate._replace(axes=axes, micro=1))), asked.mesh(axes)
            step = step if candidate.zero or candidate.cut.ranks > 1 else data_parallel()(step)
            self._resting[key] = at_rest(step, mesh, params_inputs(step, mesh, asked.params))
        return self._resting[key]


def brief(error: FzeroError) -> str:
    """The problem, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Fix:")]
    return ": ".join(lines[1:2] if isinstance(error, BudgetError) else lines[:2])


__all__ = ["LeastOfMesh", "MeshBounds", "brief"]
