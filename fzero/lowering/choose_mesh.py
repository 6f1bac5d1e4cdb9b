"""Chooses the mesh of a step with its parallel transforms: plans every candidate, and takes the fastest that fits.

A candidate is a factorisation of the devices over (data, model, pipe) with a ZeRO stage and a number of micro-batches.
Each is lowered and planned as if the user had written it, so that what is chosen is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.arguments import keywords
from fzero.errors import BudgetError, FzeroError, FzeroTypeError, FzeroValueError, TransformError
from fzero.lowering.at_rest import shortage
from fzero.lowering.budget import Budget
from fzero.lowering.layouts import abstract
from fzero.lowering.lower import lower
from fzero.mesh import AbstractMesh
from fzero.plan.devices import Device, get_device
from fzero.plan.plan import Plan
from fzero.plan.render import TextTable, plain
from fzero.progress import within
from fzero.step import Step
from fzero.transforms.accumulate import Accumulate, accumulate
from fzero.transforms.base import find
from fzero.transforms.cutting import Cutting
from fzero.transforms.once_a_step import OnceAStep
from fzero.transforms.pipeline import Pipeline, pipeline
from fzero.transforms.precision import DTYPES, MixedPrecision
from fzero.transforms.redundant import Redundant
from fzero.transforms.remat import Remat, remat
from fzero.transforms.shard import Parallel, data_parallel, shard_opt_state, shard_params
from fzero.transforms.tensor import Rules, tensor_parallel
from fzero.units import as_argument, duration, parse_bytes, size

_SEARCHED = (Parallel, Cutting, Pipeline, Accumulate, OnceAStep, Redundant)
MICRO_A_STAGE = (2, 4, 8)
"""Micro-batches for each stage of a pipeline, at most: with more a step waits less, and each is smaller."""
ROWS = ("data",)


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
        plan: of the step; None if it does not fit or cannot be had.
        refused: why not.
    """

    axes: Mapping[str, int]
    code: tuple[str, ...]
    title: str
    step: Step
    batch: Any
    plan: Plan | None = None
    refused: str = ""

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
        found: the candidates.
    """

    devices: int
    device: Device
    budget: int
    rows: int
    found: tuple[MeshPlan, ...]

    @property
    def best(self) -> MeshPlan:
        """The fastest.

        Raises:
            BudgetError: none fits.
        """
        if self.found and self.found[0].plan is not None:
            return self.found[0]
        problems = [f"{x.mesh}{', ' * bool(x.title)}{x.title}: {x.refused}" for x in self.found[:8]]
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
        zero = next((x for x in self.found if x.plan is not None and {*x.axes} <= {*ROWS}), None)
        if zero is None:
            return f"ZeRO alone does not fit; {best.mesh} is fastest of what does"
        if best is zero:
            others = [x for x in self.found if x.plan is not None and not {*x.axes} <= {*ROWS}]
            longer = [x.planned.step_seconds / best.planned.step_seconds for x in others[:1]]
            return "ZeRO alone is fastest" + "".join(f"; {others[0].mesh} takes {n:.2f} times as long" for n in longer)
        ratio = zero.planned.step_seconds / best.planned.step_seconds
        return f"{best.mesh} is fastest; ZeRO alone takes {ratio:.2f} times as long"

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
                row["refused"] = x.refused
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
    backend: str = "inductor",
) -> MeshPlans:
    """Plans a step on every mesh of a number of devices, with the parallel transforms for each. No device is touched.

    Candidates have a data axis with ZeRO-1 or ZeRO-3, `tensor_parallel` within a host, `pipeline` with 1F1B, and every
    two or three of them whose sizes multiply to `devices`. Without `remat` of its own the step gets `remat("auto")`,
    which keeps as many activations as fit. Where one micro-batch does not fit, more are tried. Not planned is a
    candidate whose parameters alone do not fit, or whose products and bubble take longer than the fastest one.

    Args:
        step: a training step with its precision and optimizer, and none of these transforms.
        params: a pytree of tensors with whole leaves (meta tensors will do), or a function of a key that returns one.
        batch: the whole batch of a step: a pytree of tensors (meta tensors will do) with as many rows in dim 0.
        devices: their number.
        device: that the plans are for, as for `lower`; by default this machine's.
        memory_budget: bytes of each rank, or text ("80GB"); by default the device's memory.
        rules: of `tensor_parallel`; by default it chooses them.
        backend: as for `lower`.

    Returns:
        All candidates, the fastest first: `.best.step` and `.best.axes` to go on with, `.code` to paste, `str` for a
        table, `.sentence` for whether ZeRO alone is as fast.

    Raises:
        FzeroTypeError: no training step; `devices` that are no whole number.
        FzeroValueError: a batch whose leaves have different numbers of rows.
        TransformError: a step that has parallel transforms of its own.

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
    params = abstract(params) if callable(params) else params
    rows = _rows(batch)
    rates = device if isinstance(device, Device) else get_device(device, "cuda" if torch.cuda.is_available() else "cpu")
    budget = rates.memory_bytes if memory_budget is None else parse_bytes(memory_budget)
    planner = _Planner(step, params, batch, rows, rates, budget, rules, backend)
    every, found = [*_factors(devices, rates.devices_per_host)], list[MeshPlan]()
    for number, axes in enumerate(every):
        with within("planning", f"mesh {number + 1} of {len(every)}"):
            plans = [x.planned for x in found if x.plan is not None]
            found += planner.candidates(axes, min(plans, key=lambda x: x.step_seconds, default=None))
    found.sort(key=lambda x: math.inf if x.plan is None else x.plan.step_seconds)
    return MeshPlans(devices, rates, budget, rows, tuple(found))


def _factors(devices: int, per_host: int) -> Iterator[dict[str, int]]:
    """The axes of each mesh; `model` is within a host. Those of one rank are left out."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for pipe in divisors:
        for model in divisors:
            if devices % (pipe * model) == 0 and per_host % model == 0:
                axes = {"data": devices // (pipe * model), "pipe": pipe, "model": model}
                yield {axis: n for axis, n in axes.items() if n > 1} or {"data": 1}


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


@dataclass(frozen=True)
class _Planner:
    step: Step
    params: Any
    batch: Any
    rows: int
    device: Device
    budget: int
    rules: Rules | None
    backend: str

    def candidates(self, axes: dict[str, int], fastest: Plan | None) -> Iterator[MeshPlan]:
        """The plans of a mesh, one for each ZeRO stage: with the fewest micro-batches that fit, of a pipeline with the
        fastest number of them. `fastest`: of the meshes before."""
        data, pipe = axes.get("data", 1), axes.get("pipe", 1)
        if self.rows % data:
            yield MeshPlan(axes, (), "", self.step, None, refused=f"{self.rows} rows do not divide into {data} parts")
            return
        here = self.rows // data
        for zero in self._stages(axes):
            plans = list[MeshPlan]()
            for micro in self._micro(here, pipe):
                added = self._added(axes, zero, micro)
                if (why := self._hopeless(axes, zero, micro, fastest)) is not None:
                    code, title = tuple(x.code for x in added), ", ".join(x.title for x in added if x.title)
                    plans.append(MeshPlan(axes, code, title, self.step, None, refused=why))
                    continue
                plans.append(self._planned(axes, added, here))
                if plans[-1].plan is not None and pipe == 1:
                    break
                if plans[-1].plan is not None:
                    fastest = min([plans[-1].planned, *([fastest] if fastest else [])], key=lambda x: x.step_seconds)
            if not plans:
                what = f"{here} rows of a rank are too few for micro-batches of {pipe} stages"
                plans = [MeshPlan(axes, (), "", self.step, None, refused=what)]
            fit = [x for x in plans if x.plan is not None]
            yield min(fit, key=lambda x: x.planned.step_seconds) if fit else plans[-1]

    def _hopeless(self, axes: Mapping[str, int], zero: _Added | None, micro: int, fastest: Plan | None) -> str | None:
        """Why a candidate need not be planned, if it need not. Its largest stage has the whole parameters that it
        computes with. Its stages multiply as much as those of any other mesh, and wait for each other besides."""
        pipe, parts = axes.get("pipe", 1), axes.get("pipe", 1) * axes.get("model", 1)
        if zero is None or zero.title != "ZeRO-3":
            leaves = [x for x in tree.leaves(self.params) if isinstance(x, torch.Tensor)]
            precision = find(self.step.transforms, MixedPrecision)
            most = torch.float32.itemsize if precision is None else DTYPES[precision.compute].itemsize
            least = sum(x.numel() * min(x.dtype.itemsize, most) for x in leaves) // parts
            if least > self.budget:
                return f"parameters alone take {size(least)}, more than the {size(self.budget)} that it may have"
        if fastest is not None and not fastest.stages and pipe > 1:
            # its ranks do equal shares of the products, of as many ranks; stages do not
            seconds = fastest.speed_of_light * fastest.step_seconds * (micro + pipe - 1) / micro
            if seconds > fastest.step_seconds:
                return f"it takes at least {duration(seconds)}, for its products and its bubble"
        return None

    def _stages(self, axes: Mapping[str, int]) -> list[_Added | None]:
        if axes.get("data", 1) == 1:
            return [_Added(data_parallel(), "fz.data_parallel()", "replicated")] if axes == {"data": 1} else [None]
        first = _Added(shard_opt_state(), "fz.shard_opt_state()", "ZeRO-1")
        return [first] if "pipe" in axes else [first, _Added(shard_params(), "fz.shard_params()", "ZeRO-3")]

    def _micro(self, here: int, pipe: int) -> list[int]:
        """Numbers of micro-batches to try."""
        able = [n for n in range(1, here + 1) if here % n == 0]
        if pipe == 1:
            return [*dict.fromkeys((1, able[-1], able[len(able) // 2]))]
        most = ([n for n in able if 2 <= n <= each * pipe][-1:] for each in MICRO_A_STAGE)
        return sorted({n for found in most for n in found})

    def _added(self, axes: Mapping[str, int], zero: _Added | None, micro: int) -> list[_Added]:
        added = [] if zero is None else [zero]
        if "model" in axes:
            given = "" if self.rules is None else "rules=rules"
            added.append(_Added(tensor_parallel(rules=self.rules), f"fz.tensor_parallel({given})"))
        if micro > 1:
            code = f"fz.accumulate({micro}, vertical=True)"
            added.append(_Added(accumulate(micro, vertical=True), code, f"{micro} micro-batches"))
        if "pipe" in axes:
            added.append(_Added(pipeline(), "fz.pipeline()"))
        if find(self.step.transforms, Remat) is None:
            added.append(_Added(remat("auto"), 'fz.remat("auto")'))
        return added

    def _planned(self, axes: Mapping[str, int], added: Sequence[_Added], here: int) -> MeshPlan:
        code = tuple(x.code for x in added)
        part = tree.map(lambda x: _rows_of(x, here), self.batch)
        found = MeshPlan(axes, code, ", ".join(x.title for x in added if x.title), self.step, part)
        try:
            step = self.step
            for x in added:
                step = x.transform(step)
            found = replace(found, step=step)
            mesh = AbstractMesh(**axes).of_type("cuda" if self.device.asynchronous else "cpu")  # type: ignore[arg-type]
            if "pipe" not in axes:  # nothing is traced where the state alone is too large
                budget = Budget(self.budget, self.device, self.backend)
                if (short := shortage(step, mesh, self.params, budget)) is not None:
                    return replace(found, refused=short[0][0])
            lowered = lower(
                step, mesh, self.params, part, memory_budget=self.budget, device=self.device, backend=self.backend
            )
            return replace(found, plan=lowered.plan)
        except FzeroError as error:
            lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Fix:")]
            return replace(found, refused=": ".join(lines[1:2] if isinstance(error, BudgetError) else lines[:2]))
