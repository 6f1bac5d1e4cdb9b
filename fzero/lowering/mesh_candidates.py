"""Lists the candidates of a number of devices: meshes, each with parallel transforms, a schedule and micro-batches.

A candidate is a factorisation of the devices over (node, data, pipe, seq, expert, model) with a ZeRO stage, a schedule
and a number of micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.lowering.choose_rules import choose_rules
from fzero.lowering.layouts import batch_inputs
from fzero.mesh import AbstractMesh
from fzero.plan.devices import Device
from fzero.step import Step
from fzero.transforms.accumulate import accumulate
from fzero.transforms.base import find
from fzero.transforms.expert import expert_parallel
from fzero.transforms.pipeline import pipeline
from fzero.transforms.remat import Remat, remat
from fzero.transforms.sequence import sequence_parallel
from fzero.transforms.shard import data_parallel, shard_opt_state, shard_params
from fzero.transforms.tensor import Rules, TensorParallel, tensor_parallel

MICRO_A_STAGE = (2, 4, 8)
"""Micro-batches for each stage of a pipeline, at most: with more a step waits less, and each is smaller."""
ROWS = ("node", "data")
"""Axes along which ZeRO alone is."""
Where = Callable[[str, torch.Tensor], bool]


def meshes(devices: int, per_host: int, experts: bool) -> Iterator[dict[str, int]]:
    """The axes of each mesh; what cuts values is within a host. Those of one rank are left out."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for pipe, seq, expert, model in itertools.product(divisors, repeat=4):
        inside = seq * expert * model
        if devices % (pipe * inside) or per_host % inside or (expert > 1 and (model > 1 or not experts)):
            continue
        axes = {"data": devices // (pipe * inside), "pipe": pipe, "seq": seq, "expert": expert, "model": model}
        yield {axis: n for axis, n in axes.items() if n > 1} or {"data": 1}
    if devices > per_host > 1 and devices % per_host == 0:
        yield {"node": devices // per_host, "data": per_host}


class ValueCut(NamedTuple):
    """The sizes of the axes that cut values, and whether `tensor_parallel` cuts what passes between blocks, too."""

    seq: int = 1
    expert: int = 1
    model: int = 1
    sequence: bool = False

    @property
    def axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in ("seq", "expert", "model") if getattr(self, axis) > 1}

    @property
    def ranks(self) -> int:
        return self.seq * self.expert * self.model


class MeshCandidate(NamedTuple):
    """A mesh with what is open besides. `later`: numbers of micro-batches to try where these do not fit;
    `inside_first`: whether the axis within a host is the first that ZeRO shards over."""

    axes: Mapping[str, int]
    zero: str
    cut: ValueCut
    schedule: str = ""
    micro: int = 1
    later: tuple[int, ...] = ()
    inside_first: bool = False

    @property
    def family(self) -> tuple[Any, ...]:
        """Equal for candidates of which the table has one."""
        return *self.axes.items(), self.zero, self.cut

    def takes_more(self, other: MeshCandidate) -> bool:
        """Whether its stages keep as many micro-batches as another's, of no fewer rows."""
        alike = self.family == other.family and self.pipe > 1
        return alike and self.micro <= other.micro and other.schedule in (self.schedule, "1f1b")

    @property
    def pipe(self) -> int:
        return self.axes.get("pipe", 1)

    @property
    def parts(self) -> int:
        """Parts that the batch is cut in."""
        return math.prod(self.axes.get(axis, 1) for axis in (*ROWS, "expert"))

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes that ZeRO shards over, the first of which cuts first."""
        order = ("seq", "data") if self.inside_first else ("expert", "data", "seq", "node")
        return tuple(axis for axis in order if axis in self.axes)


def candidates(axes: Mapping[str, int], whole: int) -> Iterator[MeshCandidate | str]:
    """The candidates of a mesh, each with its first number of micro-batches, of a pipeline one for each number; or why
    there are none. `whole`: rows of the whole batch."""
    seq, expert, model = (axes.get(axis, 1) for axis in ("seq", "expert", "model"))
    parts, pipe = MeshCandidate(axes, "", ValueCut()).parts, axes.get("pipe", 1)
    if whole % parts:
        rows = "1 row does" if whole == 1 else f"{whole} rows do"
        yield f"{rows} not divide into {parts} parts"
        return
    here = whole // parts
    able = [n for n in range(1, here + 1) if here % n == 0]
    most = ([n for n in able if 2 <= n <= each * pipe][-1:] for each in MICRO_A_STAGE)
    staged = sorted({n for found in most for n in found})
    if pipe > 1 and not staged:
        what = f"{here} rows of a rank are too few for micro-batches of {pipe} stages"
        yield what
        return
    for zero in _zero_stages(axes):
        for sequence in (False, True) if model > 1 and seq == 1 else (False,):
            first = MeshCandidate(axes, zero, ValueCut(seq, expert, model, sequence))
            if pipe > 1:
                ways = itertools.product(("1f1b", "zb"), staged)
                yield from (first._replace(schedule=how, micro=n) for how, n in ways)
            else:
                later = tuple(dict.fromkeys((able[-1], able[len(able) // 2])))
                first = first._replace(later=tuple(n for n in later if n > 1))
                yield first
                if {"data", "seq"} <= {*axes}:  # faster where the network between hosts is slow
                    yield first._replace(inside_first=True)


def _zero_stages(axes: Mapping[str, int]) -> list[str]:
    if axes == {"data": 1}:
        return ["replicated"]
    if "node" in axes:
        return ["ZeRO-3"]
    if not {"data", "seq", "expert"}.intersection(axes):
        return [""]
    return ["ZeRO-1"] if "pipe" in axes else ["ZeRO-1", "ZeRO-3"]


class AddedTransform(NamedTuple):
    """A transform that a candidate puts on the step, and its code."""

    transform: Any
    code: str
    title: str = ""


@dataclass(frozen=True)
class MeshRequest:
    """A step, with what it is to be planned for.

    Attributes:
        step, params, batch: its precision is known; the batch is the whole one, of `rows`.
        device, devices, budget: the rates, number and bytes of each device.
        rules: of `tensor_parallel`; None: chosen for each size, and kept.
        experts: `where` of `expert_parallel`.
        backend: as for `lower`.
    """

    step: Step
    params: Any
    batch: Any
    rows: int
    device: Device
    budget: int
    rules: Rules | None
    experts: Where | None
    backend: str
    devices: int
    _chosen: dict[int, TensorParallel] = field(default_factory=dict)

    def mesh(self, axes: Mapping[str, int]) -> AbstractMesh:
        sizes: Any = axes or {"data": 1}
        return AbstractMesh(**sizes).of_type(self.device.type)

    def part(self, rows: int) -> Any:
        """The batch with so many rows, without values."""

        def leaf(x: Any) -> Any:
            has = isinstance(x, torch.Tensor) and x.ndim
            return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta") if has else x

        return tree.map(leaf, self.batch)

    def added(self, candidate: MeshCandidate) -> list[AddedTransform]:
        """The transforms of a candidate whose cut is known."""
        added, axes, micro = list[AddedTransform](), candidate.axes, candidate.micro
        over = candidate.zero_axes
        said = "" if over == ("data",) else f"axis={over[0]!r}" if len(over) == 1 else f"axis={over!r}"
        axis = over[0] if len(over) == 1 else over
        if candidate.zero == "replicated":
            added.append(AddedTransform(data_parallel(), "fz.data_parallel()", "replicated"))
        elif candidate.zero == "ZeRO-1":
            added.append(AddedTransform(shard_opt_state(axis=axis), f"fz.shard_opt_state({said})", "ZeRO-1"))
        elif candidate.zero == "ZeRO-3":
            added.append(AddedTransform(shard_params(axis=axis), f"fz.shard_params({said})", "ZeRO-3"))
        added += self.cutting(candidate.cut)
        if micro > 1:
            code = f"fz.accumulate({micro}, vertical=True)"
            added.append(AddedTransform(accumulate(micro, vertical=True), code, f"{micro} micro-batches"))
        if "pipe" in axes:
            how = "" if candidate.schedule == "1f1b" else f"schedule={candidate.schedule!r}"
            title = "" if candidate.schedule == "1f1b" else candidate.schedule
            added.append(AddedTransform(pipeline(schedule=candidate.schedule), f"fz.pipeline({how})", title))
        if find(self.step.transforms, Remat) is None:
            added.append(AddedTransform(remat("auto"), 'fz.remat("auto")'))
        return added

    def cutting(self, cut: ValueCut) -> list[AddedTransform]:
        added = list[AddedTransform]()
        if cut.seq > 1:
            added.append(AddedTransform(sequence_parallel(), "fz.sequence_parallel()"))
        if cut.expert > 1 and self.experts is not None:
            added.append(AddedTransform(expert_parallel(where=self.experts), "fz.expert_parallel(where=experts)"))
        if cut.model > 1:
            spec = self._chosen.get(cut.model) or tensor_parallel(rules=self.rules)
            spec = replace(spec, sequence=cut.sequence)
            rules = (
                "" if spec.rules is None else "rules=rules" if self.rules is not None else f"rules={spec.shown_rules}"
            )
            said = ", ".join(x for x in (rules, "sequence=True" * cut.sequence) if x)
            added.append(AddedTransform(spec, f"fz.tensor_parallel({said})", "sequence" * cut.sequence))
        return added

    def choose_rules(self, model: int, rows: int) -> None:
        """Chooses the rules of `tensor_parallel` for that many ranks, once, unless they are given."""
        if model > 1 and model not in self._chosen and self.rules is None:
            open_step, mesh = tensor_parallel(self.step), self.mesh({"model": model})
            spec = find(
                choose_rules(open_step, mesh, self.params, batch_inputs(self.part(rows))).step.transforms,
                TensorParallel,
            )
            assert spec is not None
            self._chosen[model] = spec


def with_all(step: Step, added: Sequence[AddedTransform]) -> Step:
    for x in added:
        step = x.transform(step)
    return step


__all__ = [
    "ROWS",
    "AddedTransform",
    "MeshCandidate",
    "MeshRequest",
    "ValueCut",
    "Where",
    "candidates",
    "meshes",
    "with_all",
]
