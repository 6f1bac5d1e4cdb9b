"""Plans a step on several meshes, each with parallel transforms for its axes, and sorts the meshes by time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._utils.arguments import count, plain_numbers
from fzero._utils.progress import shown
from fzero._utils.units import as_argument, duration, parse_bytes, size
from fzero.compiler.abstract_values import abstract
from fzero.compiler.budget_report import Budget
from fzero.compiler.lower import resolve_and_lower
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.mesh import AbstractMesh
from fzero.plan.device_lookup import Device, get_device
from fzero.plan.plan import Plan
from fzero.plan.process_memory import INTERPRETER, room
from fzero.plan.render import TextTable, plain
from fzero.step import Step, compose
from fzero.step.checks import no_step
from fzero.transforms import accumulate, expert, pipeline, remat, sequence, tensor
from fzero.transforms import zero as shard
from fzero.transforms.transform import find, on_device

AXES, MOST = ("node", "data", "pipe", "seq", "expert", "model"), 16  # the axes of meshes; how many meshes are planned


class MeshPlan(NamedTuple):
    """A mesh, the transforms for it as code, the step with them and its plan; `text`: its cost, or why there is no
    plan."""

    mesh: AbstractMesh
    code: tuple[str, ...]
    step: Step
    plan: Plan | None
    text: str


class MeshPlans(NamedTuple):
    """The planned meshes, with the fastest first and those without a plan last; and the names of the meshes that were
    not planned."""

    found: tuple[MeshPlan, ...]
    left_out: tuple[str, ...]
    budget: int

    @property
    def best(self) -> MeshPlan:
        """The fastest mesh. Raises a `FzeroValueError` with all reasons if no mesh has a plan."""
        if self.found[0].plan is None:
            why = [f"{x.mesh}: {x.text}" for x in self.found]
            raise FzeroValueError("choose_mesh", "no mesh fits the step", why, "more devices, a batch that they divide")
        return self.found[0]

    @property
    def code(self) -> str:
        """The fastest mesh, as code to paste."""
        made = f"mesh = fz.make_mesh({self.best.mesh})\nstep = fz.compose({', '.join(self.best.code)})(step)\n"
        budget = as_argument(self.budget)
        return f'{made}train = fz.compile(step, mesh, batch=batch, memory_budget="{budget}")  # a rank\'s batch\n'

    def __str__(self) -> str:
        rows = [(str(x.mesh), ", ".join(x.code), x.text) for x in self.found]
        why = f"left out: at most {MOST} meshes are planned, those with the fewest axes first"
        rows += [("; ".join(self.left_out), "", why)] * bool(self.left_out)
        title, columns = f"meshes with {size(self.budget)} for each rank", ("mesh", "with", "step, peak of a rank")
        return plain([TextTable(title, columns, rows, True)]) + (f"\n{self.code}" if self.found[0].plan else "")


@plain_numbers
def choose_mesh(
    step: Step,
    params: Any,
    batch: Any,
    *,
    devices: int = 1,
    meshes: Sequence[AbstractMesh] = (),
    device: Device | str | None = None,
    memory_budget: str | int | None = None,
    experts: Callable[[str, torch.Tensor], bool] | None = None,
    backend: str = "inductor",
) -> MeshPlans:
    """Plans a training step without parallel transforms on the meshes of some devices (at most 16), or on `meshes`.

    The axes `data` and `node` get ZeRO, `pipe` gets `pipeline`, `seq` gets `sequence_parallel`, `model` gets
    `tensor_parallel`, and `expert` gets `expert_parallel(where=experts)`. `batch` is the batch of all ranks; other
    arguments are as for `lower`. In the result, `.best` is the fastest mesh with its step, `.code` is the code to
    paste, and `str` gives a table. Each mesh takes as long as `lower`.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda w, x: (x @ w).mean(), fz.optim.sgd(0.1))
        >>> w, x = torch.empty(4, 4, device="meta"), torch.empty(8, 4, device="meta")
        >>> print(choose_mesh(step, w, x, meshes=[fz.AbstractMesh(data=2)], device="h100").best.mesh)
        data=2
    """
    if not isinstance(step, Step):
        raise no_step("choose_mesh", "plans training with", step)
    problems = count("devices", devices)
    problems += [f"meshes: {type(x).__name__}, not a mesh" for x in meshes if not isinstance(x, AbstractMesh)]
    if problems:
        fix = "devices=8; meshes=[fz.AbstractMesh(data=8)]"
        raise FzeroTypeError("choose_mesh", "invalid arguments", problems, fix)
    step, params = on_device(step, None), abstract(params) if callable(params) else params
    rates = device if isinstance(device, Device) else get_device(device, "cuda" if torch.cuda.is_available() else "cpu")
    own = room(rates, True, rates.process_bytes or INTERPRETER)
    nbytes = parse_bytes(own if memory_budget is None else memory_budget)
    wanted, found = meshes or _meshes(devices, rates.devices_per_host, experts is not None), list[MeshPlan]()
    leaves, structure = tree.flatten(batch)
    rows = next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.ndim), 1)
    with shown("fzero.choose_mesh", lambda: f"{len(found)} of {len(wanted[:MOST])} planned"):
        for mesh in (x.of_type(rates.type) for x in wanted[:MOST]):
            parts = math.prod(mesh.axes.get(axis, 1) for axis in ("node", "data", "expert"))
            meta = [x.to("meta")[: len(x) // parts] if isinstance(x, torch.Tensor) and x.ndim else x for x in leaves]
            added = dict(_transforms(step, mesh.axes, rows // parts, experts))
            full = compose(*added.values())(step)
            try:
                if rows % parts:
                    raise FzeroValueError("choose_mesh", f"{rows} rows do not divide into {parts} parts")
                part = tree.unflatten(structure, meta)
                plan = resolve_and_lower(full, mesh, params, part, Budget(nbytes, rates, backend), draft=True).plan
                peak = size(max(x.peak_bytes for x in (plan, *plan.stages)))
                found.append(MeshPlan(mesh, tuple(added), full, plan, f"{duration(plan.step_seconds)}, {peak}"))
            except FzeroError as error:
                found.append(MeshPlan(mesh, tuple(added), full, None, " ".join(str(error).split("\n")[:3])))
    found.sort(key=lambda x: math.inf if x.plan is None else x.plan.step_seconds)
    return MeshPlans(tuple(found), tuple(map(str, wanted[MOST:])), nbytes)


def _meshes(devices: int, per_host: int, experts: bool) -> list[AbstractMesh]:
    """Returns all meshes of some devices. `seq`, `expert` and `model` stay within a host, and `node` is combined only
    with `data`."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    sizes = {1, devices // per_host or 1}, divisors, divisors, divisors, divisors if experts else [1], divisors
    able = (n for n in itertools.product(*sizes) if math.prod(n) == devices and per_host % math.prod(n[3:]) == 0)
    meshes = (dict[str, Any](x for x in zip(AXES, n, strict=True) if x[1] > 1) or {"data": 1} for n in able)
    found = [AbstractMesh(**axes) for axes in meshes if "node" not in axes or {*axes} == {"node", "data"}]
    return sorted(found, key=lambda x: (len({*x.axes} - {"node", "data"}), devices // x.axes.get("data", 1)))


def _transforms(step: Step, axes: Mapping[str, int], rows: int, experts: Any) -> Iterator[tuple[str, Any]]:
    """Yields the transforms for the axes of a mesh, with the code of each. `rows` is the number of samples per rank."""
    over = [axis for axis in ("expert", "data", "seq", "node") if axis in axes]  # the fastest links first
    if axis := tuple(over) if len(over) > 1 else "".join(over):
        zero = shard.shard_opt_state if "pipe" in axes else shard.shard_params
        yield f"fz.{zero.__name__}(axis={axis!r})", zero(axis=axis)
    if "pipe" in axes:
        yield "fz.pipeline()", pipeline.pipeline()
        if find(step.transforms, accumulate.Accumulate) is None:
            micro = max(n for n in range(1, 4 * axes["pipe"] + 1) if max(rows, 1) % n == 0)
            made = accumulate.accumulate(micro, schedule="layerwise")
            yield f"fz.accumulate({micro}, schedule='layerwise')", made
    if "seq" in axes:
        yield "fz.sequence_parallel()", sequence.sequence_parallel()
    if "expert" in axes and experts is not None:
        yield "fz.expert_parallel(where=experts)", expert.expert_parallel(where=experts)
    if "model" in axes:
        yield "fz.tensor_parallel()", tensor.tensor_parallel()
    if find(step.transforms, remat.Remat) is None:
        yield 'fz.remat("auto")', remat.remat("auto")
