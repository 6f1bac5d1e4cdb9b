"""Shows the meshes that were planned: as tables, a sentence, code to paste and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from fzero.errors import BudgetError, FzeroValueError
from fzero.lowering.mesh_candidates import ROWS
from fzero.plan.devices import Device
from fzero.plan.plan import Plan
from fzero.plan.render import TextTable, html, plain
from fzero.step import Step
from fzero.units import as_argument, duration, size


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
        stopped: seconds after which the search ended early; None if nothing that is left out can be fastest.
        num_untried: the number of candidates that may be faster, and that there was no time for.
        least_untried: the least seconds of a step of any of them.
    """

    devices: int
    device: Device
    budget: int
    rows: int
    found: tuple[MeshPlan, ...]
    num_planned: int = 0
    stopped: float | None = None
    num_untried: int = 0
    least_untried: float = 0.0

    @property
    def best(self) -> MeshPlan:
        """The fastest that was planned.

        Raises:
            BudgetError: none fits.
            FzeroValueError: none divides the step, with any memory; or none that fits was planned in time.
        """
        if self.found and self.found[0].plan is not None:
            return self.found[0]
        problems = [f"{x.mesh}{', ' * bool(x.title)}{x.title}: {x.refused}" for x in self.found[:8]]
        if self.stopped is not None:
            what = f"no mesh of {self.devices} devices that has room was planned within {self.stopped:g} s"
            fix = "more seconds; or plan one mesh at a time: fz.lower(step, fz.AbstractMesh(data=..., model=...), ...)"
            raise FzeroValueError("choose_mesh", what, problems, fix)
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
        budget = as_argument(self.budget)
        lines.append(f'train = fz.compile(step, mesh, batch=batch, memory_budget="{budget}")  # a rank\'s batch')
        return "\n".join(lines) + "\n"

    @property
    def sentence(self) -> str:
        """The fastest beside ZeRO alone, in plain words."""
        best, fastest = self.best, "fastest" if self.stopped is None else "the fastest of those planned"
        alone = [x for x in self.found if {*x.axes} <= {*ROWS}]
        zero = next((x for x in alone if x.plan is not None), None)
        if zero is None:
            why = f" ({alone[0].refused})" if alone else ""
            return f"ZeRO alone cannot be{why}; {best.mesh} is {fastest} of what can{self._unproven}"
        if best is not zero:
            ratio = zero.planned.step_seconds / best.planned.step_seconds
            return f"{best.mesh} is {fastest}; ZeRO alone takes {ratio:.2f} times as long{self._unproven}"
        others = [x for x in self.found if x not in alone and x.seconds is not None]
        other = next((x for x in others if x.plan is not None), None)
        if other is None and self.stopped is None:
            other = min(others, key=lambda x: x.seconds or 0, default=None)
        if other is None or other.seconds is None:
            return f"ZeRO alone is {fastest}{self._unproven}"
        ratio, at_least = other.seconds / best.planned.step_seconds, "" if other.plan is not None else "at least "
        return f"ZeRO alone is {fastest}; {other.mesh} takes {at_least}{ratio:.2f} times as long{self._unproven}"

    @property
    def _unproven(self) -> str:
        """A line with the bound on the untried candidates, if the search ended early."""
        if self.stopped is None:
            return ""
        share = self.least_untried / self.best.planned.step_seconds
        left = f"{self.num_untried} candidates" if self.num_untried > 1 else "1 candidate"
        said = f"ended after {self.stopped:g} s, {self.num_planned} planned; {left} untried"
        return (
            f"\nnot proven best: {said} cannot take less than {duration(self.least_untried)}, {share:.2f} of its step"
        )

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
        return f"{self.sentence}\n\n{self.code}\n{text}" if self.found and self.found[0].plan is not None else text

    def _repr_html_(self) -> str:
        if not self.found or self.found[0].plan is None:
            return html(self.tables())
        return f"<p>{escape(self.sentence)}</p><pre>{escape(self.code)}</pre>{html(self.tables())}"

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
        proof = {"stopped_after_seconds": self.stopped, "untried": self.num_untried}
        proof |= {"untried_least_seconds": self.least_untried if self.num_untried else None}
        return {**about, **proof, "candidates": rows}


def _sent(plan: Plan) -> str:
    """Bytes a step over each axis."""
    found: dict[str, int] = {}
    for name, channel in plan.channels.items():
        if axis := name.partition(":")[2]:
            found[axis] = found.get(axis, 0) + channel.bytes
    return ", ".join(f"{axis} {size(n)}" for axis, n in found.items())


__all__ = ["MeshPlan", "MeshPlans"]
