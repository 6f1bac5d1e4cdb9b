"""Plans a training step on several meshes, with parallel transforms for the axes of each, and sorts them by time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._utils.arguments import count, keywords
from fzero._utils.progress import shown
from fzero._utils.units import as_argument, duration, parse_bytes, size
from fzero.compiler.abstract_values import abstract
from fzero.compiler.budget_report import Budget
from fzero.compiler.lower import resolve_and_lower
from fzero.compiler.mesh_candidates import meshes_of, transforms_for
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.mesh import AbstractMesh
from fzero.plan.cost import check_backend_name
from fzero.plan.device_lookup import Device, get_device
from fzero.plan.plan import Plan
from fzero.plan.process_memory import INTERPRETER, room
from fzero.plan.render import TextTable, plain
from fzero.step import Step, compose
from fzero.step.checks import check_params, no_step
from fzero.transforms.transform import on_device

MAX_MESHES = 16


class MeshPlan(NamedTuple):
    """A mesh, the code of the transforms for it, the transformed step, and its plan (None if it cannot be planned).
    `text` is the predicted cost, or the reason why there is no plan."""

    mesh: AbstractMesh
    code: tuple[str, ...]
    step: Step
    plan: Plan | None
    text: str


class MeshPlans(NamedTuple):
    """The planned meshes (`found`, the fastest first, those without a plan last), the meshes that were not planned
    because there are too many (`left_out`), and the memory budget of a rank in bytes."""

    found: tuple[MeshPlan, ...]
    left_out: tuple[str, ...]
    budget: int

    @property
    def best(self) -> MeshPlan:
        """The fastest mesh. Raises a `FzeroValueError` that lists the reasons if no mesh has a plan."""
        if self.found[0].plan is None:
            reasons = [f"{x.mesh}: {x.text}" for x in self.found]
            fix = "use more devices, or a batch size that they divide"
            raise FzeroValueError("choose_mesh", "no mesh fits the step", reasons, fix)
        return self.found[0]

    @property
    def code(self) -> str:
        """The code that uses the fastest mesh."""
        best, budget = self.best, as_argument(self.budget)
        return (
            f"mesh = fz.make_mesh({best.mesh})\n"
            f"step = fz.compose({', '.join(best.code)})(step)\n"
            f'train = fz.compile(step, mesh, batch=batch, memory_budget="{budget}")  # the batch of one rank\n'
        )

    def __str__(self) -> str:
        rows = [(str(x.mesh), ", ".join(x.code), x.text) for x in self.found]
        if self.left_out:
            why = f"left out: at most {MAX_MESHES} meshes are planned, those with the fewest axes first"
            rows.append(("; ".join(self.left_out), "", why))
        title, columns = f"meshes with {size(self.budget)} for each rank", ("mesh", "with", "step, peak of a rank")
        table = plain([TextTable(title, columns, rows, prose=True)])
        return table if self.found[0].plan is None else f"{table}\n{self.code}"


@keywords
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
    """Plans a training step on several meshes, with parallel transforms for the axes of each mesh, and sorts the meshes
    by predicted step time.

    The axes `data` and `node` get ZeRO, `pipe` gets `pipeline`, `seq` gets `sequence_parallel`, `model` gets
    `tensor_parallel`, and `expert` gets `expert_parallel(where=experts)`. Nothing runs on a device. Planning a mesh
    takes as long as one call of `lower`.

    Args:
        step: a training step without parallel transforms.
        params: a pytree of tensors (meta tensors suffice), or a function of a key that returns one.
        batch: the batch of all ranks together (meta tensors suffice).
        devices: the number of devices. All meshes of so many devices are candidates, at most 16 of them, those with
            the fewest axes first.
        meshes: the candidates, instead of all meshes of `devices`.
        device: as for `lower`; by default this machine's GPU, or else its CPU.
        memory_budget: bytes of each rank, or text ("80GB"); by default, the memory of the device without that of the
            process.
        experts: predicate `(path, leaf)` that selects the parameters of experts. Without it, no candidate has an axis
            `expert`.
        backend: as for `lower`.

    Returns:
        The plans. `.best` has the fastest mesh and its transformed step, `.code` is the code that uses it, and `str`
        gives a table. `.found` has all plans, and for a mesh that cannot be planned the reason.

    Raises:
        FzeroTypeError: `step` is not a training step, or `meshes` are not meshes.
        FzeroValueError: a device or a budget that cannot be read; from `.best`, if no mesh has a plan.

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
    if isinstance(meshes, Sequence):
        problems += [f"meshes: {type(x).__name__}, not a mesh" for x in meshes if not isinstance(x, AbstractMesh)]
    else:
        problems.append(f"meshes: {type(meshes).__name__}, not a list of meshes")
    if problems:
        fix = "devices=8; meshes=[fz.AbstractMesh(data=8)]"
        raise FzeroTypeError("choose_mesh", "invalid arguments", problems, fix)
    step = on_device(step, None)
    check_backend_name("choose_mesh", backend)
    params = abstract(params) if callable(params) else params
    check_params(params, "choose_mesh")
    if not isinstance(device, Device):
        device = get_device(device, "cuda" if torch.cuda.is_available() else "cpu")
    if memory_budget is None:
        memory_budget = room(device, True, device.process_bytes or INTERPRETER)
    nbytes = parse_bytes(memory_budget)
    budget = Budget(nbytes, device, backend)
    meshes = meshes or meshes_of(devices, device.devices_per_host, experts is not None)
    found = list[MeshPlan]()
    with shown("fzero.choose_mesh", lambda: f"{len(found)} of {len(meshes[:MAX_MESHES])} planned"):
        for mesh in meshes[:MAX_MESHES]:
            found.append(_plan_mesh(step, mesh.of_type(device.type), params, batch, budget, experts))
    found.sort(key=lambda x: math.inf if x.plan is None else x.plan.step_seconds)
    return MeshPlans(tuple(found), tuple(map(str, meshes[MAX_MESHES:])), nbytes)


def _plan_mesh(step: Step, mesh: AbstractMesh, params: Any, batch: Any, budget: Budget, experts: Any) -> MeshPlan:
    """Plans the step on one mesh. If it cannot be planned, the result has the reason."""
    tensors = [x for x in tree.leaves(batch) if isinstance(x, torch.Tensor) and x.ndim]
    num_samples = len(tensors[0]) if tensors else 1
    # Ranks along the other axes (model, pipe, seq) work on the same samples.
    num_shards = math.prod(mesh.axes.get(axis, 1) for axis in ("node", "data", "expert"))

    def shard(x: Any) -> Any:
        return x.to("meta")[: len(x) // num_shards] if isinstance(x, torch.Tensor) and x.ndim else x

    transforms = transforms_for(mesh, step, num_samples // num_shards, experts)
    step = compose(*transforms.values())(step)
    try:
        if num_samples % num_shards:
            what = f"{num_samples} samples cannot be divided among {num_shards} shards of the batch"
            raise FzeroValueError("choose_mesh", what)
        plan = resolve_and_lower(step, mesh, params, tree.map(shard, batch), budget, draft=True).plan
    except FzeroError as error:
        return MeshPlan(mesh, tuple(transforms), step, None, " ".join(str(error).split("\n")[:3]))
    peak = max(x.peak_bytes for x in (plan, *plan.stages))
    return MeshPlan(mesh, tuple(transforms), step, plan, f"{duration(plan.step_seconds)}, {size(peak)}")
