"""Chooses the formats of `compress("auto")` once, before a state's first step.

For each axis, the choice is the least compression whose planned step time is within 1 % of the fastest. If the step
does not fit the memory budget with these formats or without any, it gets the least compression with which it fits. The
state records the formats (runtime/compress_formats.py).
"""

from __future__ import annotations

from dataclasses import replace

from fzero._utils.units import duration
from fzero.compiler.options import Options
from fzero.compiler.pass_cache import PassCache
from fzero.compiler.search import Search
from fzero.errors import FzeroValueError
from fzero.mesh import AbstractMesh, Mesh
from fzero.plan.device_lookup import Device
from fzero.step import EvalStep, Step
from fzero.transforms.compress import Compress, Formats, ladders
from fzero.transforms.transform import find

WORTH = 0.01  # of a step's seconds


def open_formats(step: Step | EvalStep) -> Compress | None:
    """The `compress("auto")` of a training step, if it has one."""
    found = find(step.transforms, Compress) if isinstance(step, Step) else None
    return found if found is not None and found.auto else None


def check_links_known(step: Step | EvalStep, mesh: AbstractMesh, device: Device) -> None:
    """Raises if formats are open and the links between these ranks have not been measured. `device` describes this
    machine's."""
    spec = open_formats(step)
    if spec is None or not isinstance(mesh, Mesh) or mesh.size == 1:
        return
    link = "intra" if mesh.size <= device.devices_per_host else "inter"
    if device.measured(link):
        return
    where = "within a host" if link == "intra" else f"between hosts, of {device.devices_per_host} ranks each"
    problems = [f"links {where}: those of {device.name} ({device.source})"]
    fix = "give formats: fz.compress(params='int8')"
    fix = f"measure them with fzero calibrate; or {fix}" if link == "intra" else fix
    raise FzeroValueError("compress", "'auto' chooses by the rates of links, which are not known", problems, fix)


def choose_formats(pass_cache: PassCache, search: Search, options: Options, recorded: Formats) -> Options:
    """Returns the options with formats for each axis, and the planned seconds of each alternative.

    The axes are decided one after the other. The first is the one for which the step waits longest: compressing another
    axis does not make the step shorter while it waits for that one. Formats in `recorded` are kept, so that a run that
    is resumed, or that has batches of several shapes, has the same formats.
    """
    ladder = {x[0].axis: x for x in ladders(pass_cache.before("compress", options), pass_cache.context.zero)}
    plain = options = replace(options, wire=tuple(formats[0] for formats in ladder.values()))
    because = dict.fromkeys(ladder, "recorded in the state")
    kept = {x.axis: x for x in recorded if x in ladder.get(x.axis, ())}
    options = replace(options, wire=tuple(kept.get(x.axis, x) for x in options.wire))
    for axis in sorted((x for x in ladder if x not in kept), key=lambda axis: -_exposed(search, plain, axis)):
        formats = ladder[axis]
        tried = [replace(options, wire=tuple(x if y.axis == axis else y for y in options.wire)) for x in formats]
        seconds = [search.seconds(x) for x in tried]
        # Compression costs accuracy, so among formats with nearly the same time, the least compression is taken.
        options = next(x for x, took in zip(tried, seconds, strict=True) if took <= (1 + WORTH) * min(seconds))
        because[axis] = "a step takes " + "; ".join(
            f"{duration(took)} with {x}" if x != formats[0] else f"{duration(took)} unchanged"
            for x, took in zip(formats, seconds, strict=True)
        )
    return replace(options, wire_because=tuple(because.values()))


def rungs(pass_cache: PassCache, options: Options) -> list[Formats]:
    """Returns formats for all axes, from no compression to the most: the n-th entry has the n-th format of each
    axis."""
    found = ladders(pass_cache.before("compress", options), pass_cache.context.zero)
    most = max(map(len, found), default=0)
    return [tuple(formats[min(n, len(formats) - 1)] for formats in found) for n in range(most)]


def _exposed(search: Search, options: Options, axis: str) -> float:
    """The seconds per step for which compute waits for transfers over an axis."""
    exposed = search.cost(options).exposed
    return sum(seconds for channel, seconds in exposed.items() if channel.partition(":")[2] == axis)
