"""Chooses the formats of `compress("auto")`: for each axis the least compression after which the plan exposes little
there.

[Note: rungs] Formats of an axis are a ladder, from as it is to the most compression (passes/compress.py). All axes
begin as they are. The one that exposes most is first. While it exposes more than `FEW` of the step it goes up a rung.
Of its rungs so far the one with the fastest program is kept, the first of equals. It is the last one, unless codes cost
more than they save. Then the next axis follows. If all this does not make the step shorter by `WORTH`, everything
travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fzero.errors import FzeroValueError
from fzero.lowering.budget import Decided
from fzero.lowering.search import SAME, Search
from fzero.lowering.variants import Variants
from fzero.mesh import AbstractMesh, Mesh
from fzero.passes.choice import Choice
from fzero.passes.compress import ladders
from fzero.plan.devices import Device
from fzero.step import EvalStep, Step
from fzero.transforms.base import find
from fzero.transforms.compress import AxisFormats, Compress
from fzero.units import duration

FEW = 0.02  # of a step's seconds
WORTH = 0.01


def open_formats(step: Step | EvalStep) -> Compress | None:
    """The `compress("auto")` of a training step, if it has one."""
    found = find(step.transforms, Compress) if isinstance(step, Step) else None
    return found if found is not None and found.auto else None


def check_links_known(step: Step | EvalStep, mesh: AbstractMesh, device: Device) -> None:
    """Raises where formats are open and the links between these ranks were not measured. `device`: this machine's."""
    spec = open_formats(step)
    if spec is None or spec.every is not None or not isinstance(mesh, Mesh) or mesh.size == 1:
        return
    link = "intra" if mesh.size <= device.devices_per_host else "inter"
    if device.measured(link):
        return
    where = "within a host" if link == "intra" else f"between hosts, of {device.devices_per_host} ranks each"
    problems = [f"links {where}: those of {device.name} ({device.source})"]
    fix = "let the run measure them, fz.compress('auto', every=200); or give formats: fz.compress(params='int8')"
    fix = f"measure them with fzero calibrate; or {fix}" if link == "intra" else fix
    raise FzeroValueError("compress", "'auto' chooses by the rates of links, which are not known here", problems, fix)


def choose_formats(variants: Variants, search: Search, choice: Choice) -> Choice:
    """The choice with formats for each axis, and why: see [Note: rungs]."""
    known = {rungs[0].axis: rungs for rungs in ladders(variants.before("compress", choice), variants.asked.zero)}
    plain = best = replace(choice, wire=tuple(rungs[0] for rungs in known.values()))
    tried: dict[str, list[Choice]] = {}
    for axis in sorted(known, key=lambda axis: -_exposed(search, plain, axis)):
        tried[axis] = [best]
        for rung in known[axis][1:]:
            if _share(search, tried[axis][-1], axis) <= FEW:
                break
            tried[axis].append(replace(best, wire=tuple(rung if x.axis == axis else x for x in best.wire)))
        least = min(map(search.seconds, tried[axis]))
        best = next(c for c in tried[axis] if search.seconds(c) <= (1 + SAME) * least)
    if search.seconds(best) > (1 - WORTH) * search.seconds(plain):
        best = plain
    return replace(best, wire_because=tuple(_why(search, plain, best, axis, tried[axis]) for axis in known))


def with_decided(variants: Variants, choice: Choice, decided: Decided) -> Choice:
    """The choice with the formats that were decided, of those that it can have; other axes as they are."""
    reasons = [decided.why] * len(decided.formats) if isinstance(decided.why, str) else decided.why
    known = {x.axis: (x, why) for x, why in zip(decided.formats, reasons, strict=True)}
    wire, because = list[AxisFormats](), list[str]()
    for rungs in ladders(variants.before("compress", choice), variants.asked.zero):
        given, why = known.get(rungs[0].axis, (rungs[0], "not decided"))
        wire.append(given if given in rungs else rungs[0])
        because.append(why if given in rungs else f"{given} cannot be had here")
    return replace(choice, wire=tuple(wire), wire_because=tuple(because))


def _why(search: Search, plain: Choice, best: Choice, axis: str, tried: Sequence[Choice]) -> str:
    """The reason for the formats of an axis."""
    now = next(x for x in best.wire if x.axis == axis)
    said = f"exposed there: {_waits(search, plain, axis)}"
    if now not in plain.wire:
        said += f" as it is, {_waits(search, best, axis)} so"
    others = [(c, x) for c in tried for x in c.wire if x.axis == axis and x != now]
    if _share(search, best, axis) <= FEW:
        return f"{said}: under {FEW:.0%}"
    if now == tried[-1].wire[[x.axis for x in best.wire].index(axis)]:
        return f"{said}: the most compression for it"
    other, formats = min(others, key=lambda x: search.seconds(x[0]))
    little = f", less than {WORTH:.0%} less" if search.seconds(other) < search.seconds(best) else ""
    return f"{said}; {formats} would take {duration(search.seconds(other))}{little}"


def _waits(search: Search, choice: Choice, axis: str) -> str:
    return f"{duration(_exposed(search, choice, axis))} of {duration(search.seconds(choice))} a step"


def _share(search: Search, choice: Choice, axis: str) -> float:
    return _exposed(search, choice, axis) / search.seconds(choice)


def _exposed(search: Search, choice: Choice, axis: str) -> float:
    """Seconds of a step that compute waits for transfers over an axis."""
    exposed = search.cost(choice).exposed
    return sum(seconds for channel, seconds in exposed.items() if channel.partition(":")[2] == axis)
