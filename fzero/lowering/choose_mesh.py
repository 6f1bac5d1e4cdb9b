"""Chooses the mesh of a step with its parallel transforms: plans candidates, and takes the fastest that fits.

A candidate is a factorisation of the devices over (node, data, pipe, seq, expert, model) with a ZeRO stage, a schedule
and a number of micro-batches. What is planned is lowered as if the user had written it, so what is chosen is what runs.

[Note: best first] Planning a candidate takes seconds to minutes, and a lower bound of its seconds and bytes
(mesh_bounds.py) one trace for all candidates with the same cut of values. Candidates are looked at in order of their
bounds, ZeRO alone before all others. One whose bound is no more than 2 % below the fastest plan is left out: so the
first of the table takes at most 2 % longer than the best of all.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.arguments import keywords
from fzero.errors import BudgetError, FzeroError, FzeroTypeError, FzeroValueError, TransformError
from fzero.lowering.at_rest import AtRest, at_rest, shortage
from fzero.lowering.budget import Budget
from fzero.lowering.choose_rules import choose_rules
from fzero.lowering.layouts import abstract, batch_inputs, params_inputs
from fzero.lowering.lower import resolve_and_lower
from fzero.lowering.mesh_bounds import CutCost, cut_cost, link_seconds
from fzero.lowering.search import GAIN
from fzero.mesh import AbstractMesh
from fzero.plan.cost import check_backend_name
from fzero.plan.devices import Device, get_device
from fzero.plan.plan import Plan
from fzero.plan.render import TextTable, plain
from fzero.progress import within
from fzero.step import Step
from fzero.transforms.accumulate import Accumulate, accumulate
from fzero.transforms.base import find
from fzero.transforms.compress import Compress
from fzero.transforms.cutting import Cutting
from fzero.transforms.expert import expert_parallel
from fzero.transforms.fp8 import Fp8
from fzero.transforms.local_sgd import LocalSGD
from fzero.transforms.offload import Offload
from fzero.transforms.once_a_step import OnceAStep
from fzero.transforms.pipeline import Pipeline, pipeline
from fzero.transforms.precision import DTYPES, MixedPrecision, with_first_dtype
from fzero.transforms.redundant import Redundant
from fzero.transforms.remat import Remat, remat
from fzero.transforms.sequence import sequence_parallel
from fzero.transforms.shard import Parallel, data_parallel, shard_opt_state, shard_params
from fzero.transforms.tensor import Rules, TensorParallel, tensor_parallel
from fzero.units import as_argument, duration, parse_bytes, size

_SEARCHED = (Parallel, Cutting, Pipeline, Accumulate, OnceAStep, Redundant)
_OF_A_REPLICA = "leave it out, and choose a mesh for the devices of one replica"
MICRO_A_STAGE = (2, 4, 8)
"""Micro-batches for each stage of a pipeline, at most: with more a step waits less, and each is smaller."""
ROWS = ("node", "data")
"""Axes along which ZeRO alone is."""
Where = Callable[[str, torch.Tensor], bool]


class _Added(NamedTuple):
    """A transform that a candidate puts on the step, and its code."""

    transform: Any
    code: str
    title: str = ""


@dataclass(frozen=True)
class MeshPlan:
    """A mesh with the transforms for it, as planned.

    Attributes:
        axes: of the mesh, outermost first.
        code: the transforms that were put on the step, as they are written; `title`: the open ones among them.
        step: with them.
        batch: a rank's part of the batch, of meta tensors.
        plan: of the step; None if it does not fit, cannot be had or cannot be fastest.
        refused: why not.
        least_seconds: that it takes at least, of one that cannot be fastest.
        too_large: whether it does not fit.
    """

    axes: Mapping[str, int]
    code: tuple[str, ...]
    title: str
    step: Step
    batch: Any
    plan: Plan | None = None
    refused: str = ""
    least_seconds: float | None = None
    too_large: bool = False

    @property
    def seconds(self) -> float | None:
        """The seconds of a step, or the least that it takes; None if it cannot be had."""
        return self.least_seconds if self.plan is None else self.plan.step_seconds

    @property
    def mesh(self) -> str:
        return " x ".join(f"{axis}={n}" for axis, n in self.axes.items())

    @property
    def planned(self) -> Plan:
        """The plan of a candidate that has one."""
        assert self.plan is not None, self.refused
        return self.plan

    @property
    def peak_bytes(self) -> int:
        """The most memory of a rank, on any stage."""
        return max([self.planned.peak_bytes, *(stage.peak_bytes for stage in self.planned.stages)])


@dataclass(frozen=True)
class MeshPlans:
    """The candidates, the fastest first; behind them those that do not fit or are refused.

    Attributes:
        devices, device, budget: that they are for: their number, rates, and bytes of each.
        rows: of the whole batch.
        found: the candidates, of each mesh with a ZeRO stage the best.
        num_planned: how many were planned.
    """

    devices: int
    device: Device
    budget: int
    rows: int
    found: tuple[MeshPlan, ...]
    num_planned: int = 0

    @property
    def best(self) -> MeshPlan:
        """The fastest.

        Raises:
            BudgetError: none fits.
            FzeroValueError: none can be had, with any memory.
        """
        if self.found and self.found[0].plan is not None:
            return self.found[0]
        problems = [f"{x.mesh}{', ' * bool(x.title)}{x.title}: {x.refused}" for x in self.found[:8]]
        if not any(x.too_large for x in self.found):
            what = f"no mesh of {self.devices} devices divides the step"
            fix = "another number of devices; or a batch whose rows, or blocks (fz.block), they divide"
            raise FzeroValueError("choose_mesh", what, problems, fix)
        what = f"no mesh of {self.devices} devices has room for the step"
        raise BudgetError("choose_mesh", what, problems, "more devices, a smaller batch, mixed_precision or offload")

    @property
    def code(self) -> str:
        """The fastest, as code."""
        best, lines = self.best, list[str]()
        axes = ", ".join(f"{axis}={n}" for axis, n in best.axes.items())
        lines.append(f"mesh = fz.make_mesh({axes})")
        if best.code:
            lines.append(f"step = fz.compose({', '.join(best.code)})(step)")
        lines.append(f'train = fz.compile(step, mesh, batch=batch, memory_budget="{as_argument(self.budget)}")')
        return "\n".join(lines) + "\n"

    @property
    def sentence(self) -> str:
        """The fastest beside ZeRO alone, in plain words."""
        best = self.best
        alone = [x for x in self.found if {*x.axes} <= {*ROWS}]
        zero = next((x for x in alone if x.plan is not None), None)
        if zero is None:
            why = f" ({alone[0].refused})" if alone else ""
            return f"ZeRO alone cannot be{why}; {best.mesh} is fastest of what can"
        if best is not zero:
            ratio = zero.planned.step_seconds / best.planned.step_seconds
            return f"{best.mesh} is fastest; ZeRO alone takes {ratio:.2f} times as long"
        others = [x for x in self.found if x not in alone and x.seconds is not None]
        other = next((x for x in others if x.plan is not None), min(others, key=lambda x: x.seconds or 0, default=None))
        if other is None or other.seconds is None:
            return "ZeRO alone is fastest"
        ratio, at_least = other.seconds / best.planned.step_seconds, "" if other.plan is not None else "at least "
        return f"ZeRO alone is fastest; {other.mesh} takes {at_least}{ratio:.2f} times as long"

    def tables(self) -> list[TextTable]:
        """The candidates that fit, and those that do not."""
        fit, rows = [x for x in self.found if x.plan is not None], []
        for x in fit:
            plan = x.planned
            a_second = self.rows / plan.step_seconds / self.devices if plan.step_seconds else math.inf
            used = f"{plan.mfu:.1%}" if plan.mfu is not None else f"{plan.speed_of_light:.1%}"
            bubble = f"{plan.bubble:.1%}" if plan.stages else ""
            rows.append(
                (x.mesh, x.title, duration(plan.step_seconds), f"{a_second:.3g}", used, size(x.peak_bytes), bubble)
                + (_sent(plan),)
            )
        known = any(x.planned.mfu is not None for x in fit)
        columns = ("mesh", "with", "a step", "rows/s", "MFU" if known else "of light", "peak", "bubble", "sent")
        title = f"meshes of {self.devices} {self.device.name}, {size(self.budget)} each, {self.rows} rows a step"
        out = [TextTable(title, columns, rows)] if rows else []
        if others := [(x.mesh, x.title, x.refused) for x in self.found if x.plan is None]:
            out.append(TextTable("left out", ("mesh", "with", "because"), others, prose=True))
        return out

    def __str__(self) -> str:
        text = plain(self.tables())
        return f"{text}{self.sentence}\n\n{self.code}" if self.found and self.found[0].plan is not None else text

    def data(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        fields = ("step_seconds", "mfu", "speed_of_light", "bubble", "resting_bytes")
        rows = []
        for x in self.found:
            row: dict[str, Any] = {"axes": dict(x.axes), "transforms": list(x.code)}
            if x.plan is None:
                row |= {"refused": x.refused, "least_seconds": x.least_seconds}
            else:
                sent = {name: c.bytes for name, c in x.plan.channels.items()}
                row |= {name: getattr(x.plan, name) for name in fields} | {"peak_bytes": x.peak_bytes, "sent": sent}
            rows.append(row)
        about = {"devices": self.devices, "device": self.device.name, "budget": self.budget, "rows": self.rows}
        return {**about, "candidates": rows}


def _sent(plan: Plan) -> str:
    """Bytes a step over each axis."""
    found: dict[str, int] = {}
    for name, channel in plan.channels.items():
        if axis := name.partition(":")[2]:
            found[axis] = found.get(axis, 0) + channel.bytes
    return ", ".join(f"{axis} {size(n)}" for axis, n in found.items())


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
        memory_budget: bytes of each rank, or text ("80GB"); by default the device's memory.
        rules: of `tensor_parallel`; by default they are chosen for each size.
        experts: `where` of `expert_parallel`: which parameters are of experts; without it there is no axis of experts.
        backend: as for `lower`.

    Returns:
        The candidates, the fastest first, then those left out: `.best.step` and `.best.axes` to go on with, `.code` to
        paste, `str` for a table, `.sentence` for whether ZeRO alone is as fast.

    Raises:
        FzeroTypeError: no training step; `devices` that are no whole number.
        FzeroValueError: a batch whose leaves have different numbers of rows.
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
    params = abstract(params) if callable(params) else params
    rows = _rows(batch)
    rates = device if isinstance(device, Device) else get_device(device, "cuda" if torch.cuda.is_available() else "cpu")
    budget = rates.memory_bytes if memory_budget is None else parse_bytes(memory_budget)
    planner = _Planner(
        with_first_dtype(step, None), params, batch, rows, rates, budget, rules, experts, backend, devices
    )
    found, planned = planner.search()
    return MeshPlans(devices, rates, budget, rows, tuple(sorted(found, key=_order)), planned)


def _factors(devices: int, per_host: int, experts: bool) -> Iterator[dict[str, int]]:
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


def _rows(batch: Any) -> int:
    found = {path: x.shape[0] for path, x in _tensors(batch).items() if x.ndim}
    if len({*found.values()}) != 1:
        problems = [f"batch{path}: {n} rows" for path, n in found.items()] or ["no tensor has rows"]
        raise FzeroValueError("choose_mesh", "the batch has no one number of rows", problems, "give the whole batch")
    return next(iter(found.values()))


def _rows_of(x: Any, num: int) -> Any:
    """A leaf of a batch with so many rows, without values."""
    has = isinstance(x, torch.Tensor) and x.ndim
    return torch.empty((num, *x.shape[1:]), dtype=x.dtype, device="meta") if has else x


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    pairs = zip(tree.paths(batch), tree.leaves(batch), strict=True)
    return {path: x for path, x in pairs if isinstance(x, torch.Tensor)}


class _Cut(NamedTuple):
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


class _Candidate(NamedTuple):
    """A mesh with what is open besides. `later`: numbers of micro-batches to try where these do not fit;
    `inside_first`: whether the axis within a host is the first that ZeRO shards over."""

    axes: Mapping[str, int]
    zero: str
    cut: _Cut
    schedule: str = ""
    micro: int = 1
    later: tuple[int, ...] = ()
    inside_first: bool = False

    @property
    def family(self) -> tuple[Any, ...]:
        """Equal for candidates of which the table has one."""
        return *self.axes.items(), self.zero, self.cut

    def takes_more(self, other: _Candidate) -> bool:
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


class _Least(NamedTuple):
    """The least seconds of a candidate; why it cannot be had, if it cannot, and whether that is for its size."""

    seconds: float
    refused: str = ""
    too_large: bool = False


@dataclass(frozen=True)
class _Planner:
    """`costs`: of the cuts so far, or the reason why there is none; `resting`: states at rest, by mesh and stage;
    `short`: candidates whose plans did not fit."""

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
    costs: dict[_Cut, CutCost | str] = field(default_factory=dict)
    chosen: dict[int, TensorParallel] = field(default_factory=dict)
    resting: dict[Any, AtRest] = field(default_factory=dict)
    short: list[_Candidate] = field(default_factory=list)

    def search(self) -> tuple[list[MeshPlan], int]:
        """The candidates, of each family one, and the number of those planned: see [Note: best first]."""
        self.costs[_Cut()] = self._traced(_Cut())  # raises what is wrong with the step itself
        found, fastest = dict[Any, list[MeshPlan]](), math.inf
        left: list[tuple[bool, float, int, bool, _Candidate]] = []
        number = itertools.count()

        def push(candidate: _Candidate, least: float, bounded: bool) -> None:
            heapq.heappush(left, (not {*candidate.axes} <= {*ROWS}, least, next(number), bounded, candidate))

        def leave(made: MeshPlan, candidate: _Candidate) -> None:
            found.setdefault(candidate.family, []).append(made)
            if made.too_large and candidate.later:
                next_one = candidate._replace(micro=candidate.later[0], later=candidate.later[1:])
                push(next_one, self._first_bound(next_one), False)

        for axes in _factors(self.devices, self.device.devices_per_host, self.experts is not None):
            for candidate in self._candidates(axes):
                if isinstance(candidate, _Candidate):
                    push(candidate, self._first_bound(candidate), False)
                else:
                    found[id(candidate),] = [candidate]
        planned = 0
        while left:
            _, seconds, _, bounded, candidate = heapq.heappop(left)
            if seconds > (1 - GAIN) * fastest:
                leave(self._left(candidate, f"it takes at least {duration(seconds)}", seconds), candidate)
                continue
            with within("planning", f"{planned} planned, {len(left) + 1} left"):
                least = self._bound(candidate)
                if least.refused:
                    leave(self._left(candidate, least.refused, too_large=least.too_large), candidate)
                    continue
                if not bounded:
                    push(candidate, max(seconds, least.seconds), True)
                    continue
                made = self._planned(candidate)
            planned += 1
            if made.plan is None:
                leave(made, candidate)
            else:
                found.setdefault(candidate.family, []).append(made)
                fastest = min(fastest, made.plan.step_seconds)
        return [min(reversed(of), key=_order) for of in found.values()], planned

    # --- candidates ---

    def _candidates(self, axes: Mapping[str, int]) -> Iterator[_Candidate | MeshPlan]:
        """Those of a mesh, each with its first number of micro-batches, of a pipeline one for each number."""
        seq, expert, model = (axes.get(axis, 1) for axis in ("seq", "expert", "model"))
        parts, pipe = _Candidate(axes, "", _Cut()).parts, axes.get("pipe", 1)
        if self.rows % parts:
            rows = "1 row does" if self.rows == 1 else f"{self.rows} rows do"
            yield MeshPlan(axes, (), "", self.step, None, refused=f"{rows} not divide into {parts} parts")
            return
        here = self.rows // parts
        able = [n for n in range(1, here + 1) if here % n == 0]
        most = ([n for n in able if 2 <= n <= each * pipe][-1:] for each in MICRO_A_STAGE)
        staged = sorted({n for found in most for n in found})
        if pipe > 1 and not staged:
            what = f"{here} rows of a rank are too few for micro-batches of {pipe} stages"
            yield MeshPlan(axes, (), "", self.step, None, refused=what)
            return
        for zero in self._stages(axes):
            for sequence in (False, True) if model > 1 and seq == 1 else (False,):
                first = _Candidate(axes, zero, _Cut(seq, expert, model, sequence))
                if pipe > 1:
                    ways = itertools.product(("1f1b", "zb"), staged)
                    yield from (first._replace(schedule=how, micro=n) for how, n in ways)
                else:
                    later = tuple(dict.fromkeys((able[-1], able[len(able) // 2])))
                    first = first._replace(later=tuple(n for n in later if n > 1))
                    yield first
                    if {"data", "seq"} <= {*axes}:  # faster where the network between hosts is slow
                        yield first._replace(inside_first=True)

    def _stages(self, axes: Mapping[str, int]) -> list[str]:
        if axes == {"data": 1}:
            return ["replicated"]
        if "node" in axes:
            return ["ZeRO-3"]
        if not {"data", "seq", "expert"}.intersection(axes):
            return [""]
        return ["ZeRO-1"] if "pipe" in axes else ["ZeRO-1", "ZeRO-3"]

    def _added(self, candidate: _Candidate) -> list[_Added]:
        """The transforms of a candidate whose cut is known."""
        added, axes, micro = list[_Added](), candidate.axes, candidate.micro
        over = candidate.zero_axes
        said = "" if over == ("data",) else f"axis={over[0]!r}" if len(over) == 1 else f"axis={over!r}"
        axis = over[0] if len(over) == 1 else over
        if candidate.zero == "replicated":
            added.append(_Added(data_parallel(), "fz.data_parallel()", "replicated"))
        elif candidate.zero == "ZeRO-1":
            added.append(_Added(shard_opt_state(axis=axis), f"fz.shard_opt_state({said})", "ZeRO-1"))
        elif candidate.zero == "ZeRO-3":
            added.append(_Added(shard_params(axis=axis), f"fz.shard_params({said})", "ZeRO-3"))
        added += self._cutting(candidate.cut)
        if micro > 1:
            code = f"fz.accumulate({micro}, vertical=True)"
            added.append(_Added(accumulate(micro, vertical=True), code, f"{micro} micro-batches"))
        if "pipe" in axes:
            how = "" if candidate.schedule == "1f1b" else f"schedule={candidate.schedule!r}"
            title = "" if candidate.schedule == "1f1b" else candidate.schedule
            added.append(_Added(pipeline(schedule=candidate.schedule), f"fz.pipeline({how})", title))
        if find(self.step.transforms, Remat) is None:
            added.append(_Added(remat("auto"), 'fz.remat("auto")'))
        return added

    def _cutting(self, cut: _Cut) -> list[_Added]:
        added = list[_Added]()
        if cut.seq > 1:
            added.append(_Added(sequence_parallel(), "fz.sequence_parallel()"))
        if cut.expert > 1 and self.experts is not None:
            added.append(_Added(expert_parallel(where=self.experts), "fz.expert_parallel(where=experts)"))
        if cut.model > 1:
            spec = replace(self.chosen[cut.model], sequence=cut.sequence) if cut.model in self.chosen else None
            spec = spec or tensor_parallel(rules=self.rules, sequence=cut.sequence)
            rules = (
                "" if spec.rules is None else "rules=rules" if self.rules is not None else f"rules={spec.shown_rules}"
            )
            said = ", ".join(x for x in (rules, "sequence=True" * cut.sequence) if x)
            added.append(_Added(spec, f"fz.tensor_parallel({said})", "sequence" * cut.sequence))
        return added

    def _left(self, candidate: _Candidate, why: str, seconds: float | None = None, too_large: bool = False) -> MeshPlan:
        added = self._added(candidate)
        title, code = ", ".join(x.title for x in added if x.title), tuple(x.code for x in added)
        return MeshPlan(candidate.axes, code, title, self.step, None, None, why, seconds, too_large)

    # --- bounds ---

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether all that a rank has is on its device, and travels as it is."""
        return not any(isinstance(t, (Offload, Compress, Fp8)) for t in self.step.transforms)

    @functools.cached_property
    def _uncompressed(self) -> tuple[Any, ...]:
        return tuple(t for t in self.step.transforms if not isinstance(t, Compress))

    def _first_bound(self, candidate: _Candidate) -> float:
        """The least seconds by the products of the step on one device, divided evenly."""
        whole = self._cost(_Cut())
        if isinstance(whole, str) or candidate.pipe > len(whole.blocks):
            return 0.0
        return self._seconds(candidate, whole.divided(candidate.cut.ranks))

    def _bound(self, candidate: _Candidate) -> _Least:
        cost = self._cost(candidate.cut)
        if isinstance(cost, str):
            return _Least(0.0, cost)
        if any(candidate.takes_more(other) for other in self.short):
            return _Least(0.0, "it takes more memory than with more micro-batches, which did not fit", True)
        if candidate.pipe > len(cost.blocks):
            return _Least(0.0, f"more stages than blocks: {candidate.pipe} stages, {len(cost.blocks)} blocks")
        pipe, rest = candidate.pipe, self._rest(candidate)
        waiting, share = cost.waiting(self.rows // candidate.parts, candidate.micro, pipe)
        held = rest.total + (cost.numel * self._compute if candidate.zero == "ZeRO-1" and self._casts else 0)
        # a stage adds its gradients up whole; the second backward begins with as many micro-batches waiting
        grads = cost.numel * self._reduced if pipe > 1 and self._trains_all else 0
        peak = (
            share * (held + grads) + waiting if candidate.micro > pipe else share * held + max(waiting, share * grads)
        )
        least = max(rest.total / pipe, peak) if self._plain else 0.0
        if least > self.budget:
            what = f"its state, parameters and waiting activations take at least {size(int(least))}"
            return _Least(0.0, f"{what}, more than the {size(self.budget)} that it may have", True)
        update = 2 * rest.opt_state / pipe / self.device.memory_bandwidth if self._plain else 0.0
        return _Least(self._seconds(candidate, cost, update))

    def _seconds(self, candidate: _Candidate, cost: CutCost, update: float = 0.0) -> float:
        here, micro, pipe = self.rows // candidate.parts, candidate.micro, candidate.pipe
        if candidate.zero and self._plain:
            gathers, reduces = self._sends(candidate, cost)
        else:
            gathers = reduces = 0.0
        if pipe > 1:
            least = cost.staged_seconds(here, micro, pipe, candidate.schedule == "zb", reduces)
        else:
            least = cost.step_seconds(here, micro)
        return max(least + update, gathers + reduces)

    def _sends(self, candidate: _Candidate, cost: CutCost) -> tuple[float, float]:
        """The least seconds in which a rank's parameters are gathered, and its gradients reduced."""
        per_element = self._compute, self._reduced if self._trains_all else 0
        if candidate.zero == "replicated":
            per_element = 0, 2 * per_element[1]
        # parameters of experts are cut over their axis as they are
        numel = cost.numel / candidate.pipe / candidate.axes.get("expert", 1)
        axes, mesh = [axis for axis in candidate.zero_axes if axis != "expert"], self._mesh(candidate.axes)
        gathers, reduces = (link_seconds(n * numel, mesh, axes, self.device) for n in per_element)
        return gathers, reduces

    @functools.cached_property
    def _trains_all(self) -> bool:
        return all(self.step.trains(self.params))

    @functools.cached_property
    def _precision(self) -> MixedPrecision | None:
        return find(self.step.transforms, MixedPrecision)

    @functools.cached_property
    def _itemsize(self) -> int:
        """Bytes of an element of the parameters, at least."""
        leaves = [x for x in tree.leaves(self.params) if isinstance(x, torch.Tensor)]
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

    def _cost(self, cut: _Cut) -> CutCost | str:
        if cut not in self.costs:
            try:
                self.costs[cut] = self._traced(cut)
            except FzeroError as error:
                self.costs[cut] = _brief(error)
        return self.costs[cut]

    def _traced(self, cut: _Cut) -> CutCost:
        # of more rows a row takes less: of no candidate has a micro-batch more
        rows = self.rows // cut.expert if cut.ranks == 1 else max(1, self.rows * cut.ranks // self.devices)
        axes: Any = cut.axes or {"data": 1}
        mesh, part = self._mesh(axes), tree.map(lambda x: _rows_of(x, rows), self.batch)
        if cut.model > 1 and cut.model not in self.chosen and self.rules is None:
            where = self._mesh({"model": cut.model})
            step = choose_rules(tensor_parallel(self.step), where, self.params, batch_inputs(part)).step
            spec = find(step.transforms, TensorParallel)
            assert spec is not None
            self.chosen[cut.model] = spec
        step = replace(self.step, transforms=self._uncompressed)  # a mesh of one rank sends nothing in codes
        for x in self._cutting(cut) or [_Added(data_parallel(), "")]:
            step = x.transform(step)
        if find(step.transforms, Remat) is None:
            step = remat("auto")(step)
        return cut_cost(step, mesh, self.params, part, rows, self.device, self.backend)

    def _rest(self, candidate: _Candidate) -> AtRest:
        axes = {axis: n for axis, n in candidate.axes.items() if axis != "pipe"} or {"data": 1}
        key = *axes.items(), candidate.zero
        if key not in self.resting:
            step = self.step
            for x in self._added(candidate._replace(axes=axes, micro=1)):
                step = x.transform(step)
            step, mesh = (step if candidate.zero or candidate.cut.ranks > 1 else data_parallel(step)), self._mesh(axes)
            self.resting[key] = at_rest(step, mesh, params_inputs(step, mesh, self.params))
        return self.resting[key]

    def _mesh(self, axes: Mapping[str, int]) -> AbstractMesh:
        sizes: Any = axes
        return AbstractMesh(**sizes).of_type("cuda" if self.device.asynchronous else "cpu")

    # --- plans ---

    def _planned(self, candidate: _Candidate) -> MeshPlan:
        added, axes = self._added(candidate), candidate.axes
        part = tree.map(lambda x: _rows_of(x, self.rows // candidate.parts), self.batch)
        title = ", ".join(x.title for x in added if x.title)
        found = MeshPlan(axes, tuple(x.code for x in added), title, self.step, part)
        try:
            step = self.step
            for x in added:
                step = x.transform(step)
            found, mesh = replace(found, step=step), self._mesh(axes)
            budget = Budget(self.budget, self.device, self.backend)
            # nothing is traced where the state alone is too large
            if "pipe" not in axes and (short := shortage(step, mesh, self.params, budget)) is not None:
                return replace(found, refused=short[0][0], too_large=True)
            lowered = resolve_and_lower(step, mesh, self.params, part, budget, draft=True)
            return replace(found, plan=lowered.plan)
        except FzeroError as error:
            if too_large := isinstance(error, BudgetError):
                self.short.append(candidate)
            return replace(found, refused=_brief(error), too_large=too_large)


def _order(x: MeshPlan) -> tuple[bool, bool, float]:
    """Plans, the fastest first; then what was left out by its seconds; then what cannot be had."""
    return x.plan is None, x.seconds is None, x.seconds or 0.0


def _brief(error: FzeroError) -> str:
    """The problem, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Fix:")]
    return ": ".join(lines[1:2] if isinstance(error, BudgetError) else lines[:2])
