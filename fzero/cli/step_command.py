"""Lowers the step that a command is about. Defines the flags that `fzero plan` and `fzero show` share."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from tyro.conf import Positional, UseAppendAction, arg

from fzero._utils.progress import shown
from fzero._utils.units import parse_budgets, size
from fzero.cli.flags import BUDGET, DEVICE, FLAG, MESH, TARGET, axes_of, bytes_of, usage_errors
from fzero.cli.hf_script import OfModel, Script, planned
from fzero.cli.target import UsageError, load, users_code
from fzero.compiler.budget_report import Budget
from fzero.compiler.lower import lower
from fzero.compiler.lowered import Lowered
from fzero.compiler.passes import FIRST, passes_of
from fzero.compiler.state_budget import check_at_rest, shortage
from fzero.mesh import AbstractMesh
from fzero.plan.calibration import elsewhere
from fzero.plan.device_lookup import Device, get_device, get_devices
from fzero.plan.process_memory import INTERPRETER, left, left_on_host, resident, room
from fzero.step import Step
from fzero.transforms.transform import current_pass_name


class LoweredTarget(NamedTuple):
    """A lowered target.

    Attributes:
        script: for a transformers model, its script.
        short: without a budget, what a state needs that alone is larger than the device's memory.
        step, params, batch: those that were lowered.
    """

    lowered: Lowered
    script: Script | None = None
    short: str = ""
    step: Any = None
    params: Any = None
    batch: Any = None


@dataclass(frozen=True)
class StepCommand:
    """The flags of both commands about a step."""

    target: Annotated[Positional[str | None], TARGET] = None
    """returns (step, params, batch); or give --hf"""
    mesh: Annotated[tuple[tuple[str, ...], ...], UseAppendAction, MESH] = ()
    """axes and sizes, outermost first: data=8, or replica=2 data=4. Plan compares several --mesh, or those of auto"""
    device: Annotated[str | None, DEVICE] = None
    """the device whose rates are used: h100, a100, … or a calibration file; with changes: a100,memory_bytes=40GB"""
    devices: Annotated[str | None, arg(metavar="NUMBERxNAME", help_behavior_hint="")] = None
    """both at once: 8xh100 is --mesh data=8 --device h100; 64xa100-40gb"""
    budget: Annotated[str | None, BUDGET] = None
    """memory a rank may use, e.g. 80GB or 24GiB (a number alone is bytes): the fastest program that fits is chosen"""
    include_process: Annotated[bool, FLAG] = False
    """budgets are the memory of an entire device, container or host: subtract the process. Always so with --hf"""
    host_budget: Annotated[str | None, BUDGET] = None
    """host memory a rank may use, if the host's memory is not the device's"""
    disk_budget: Annotated[str | None, BUDGET] = None
    """disk a rank may use"""
    backend: Literal["inductor", "eager"] = "inductor"
    """backend of the program"""
    json: Annotated[bool, FLAG] = False
    """print JSON"""
    model: OfModel = field(default_factory=OfModel)

    @property
    def compares(self) -> bool:
        """Whether several meshes are to be planned."""
        return len(self.mesh) > 1 or self.has_auto

    @property
    def has_auto(self) -> bool:
        """Whether the meshes to compare are to be listed by `choose_mesh`."""
        return any("auto" in text.split(",") for mesh in self.mesh for text in mesh)

    @property
    def counts_process(self) -> bool:
        """Whether the budgets include the process."""
        return self.include_process or self.model.hf is not None

    @property
    def budget_bytes(self) -> int | None:
        """The budget of the program, without the process."""
        return self.budgets[0]

    @property
    def budget_flags(self) -> list[str]:
        """The flags of the budgets that are given."""
        given = {"--budget": self.budget, "--host-budget": self.host_budget, "--disk-budget": self.disk_budget}
        return [flag for flag, size in given.items() if size is not None]

    @functools.cached_property
    def interpreter(self) -> int:
        """The bytes that are resident before there is a state. For a transformers model they are measured here."""
        if self.model.hf is None:
            return self._devices()[1].process_bytes or INTERPRETER
        from fzero.hf.transformers_import import library

        library("plan --hf")  # imported now, so that the resident memory includes it
        return resident()

    @functools.cached_property
    def budgets(self) -> tuple[int | None, int | None, int | None]:
        """The budgets of the program on the device, on the host and on disk, without the process if the given ones
        include it.

        Raises:
            UsageError: if the process alone needs more.
        """
        device_bytes, host_bytes, disk_bytes = map(bytes_of, (self.budget, self.host_budget, self.disk_budget))
        if self.counts_process:
            axes, device = self._devices()
            if device_bytes:
                rest = left(device, device_bytes, math.prod(axes.values()) > 1, self.interpreter)
                device_bytes = _for_program("--budget", device_bytes, rest)
            if host_bytes:
                rest = left_on_host(device, host_bytes, self.interpreter)
                host_bytes = _for_program("--host-budget", host_bytes, rest)
        return device_bytes, host_bytes, disk_bytes

    def lowered(
        self, asked: Mapping[str, str | None] = {}, skip: Sequence[str] = (), limited: bool = True
    ) -> LoweredTarget:
        """Lowers the target for the mesh and the device whose rates are used, without the passes to skip. `asked`: by
        flag, the passes whose results are requested. `limited`: whether the result must fit its budgets.
        """
        with usage_errors():
            self._check()
            axes, device = self._devices()
            mesh = AbstractMesh(**axes).of_type(device.type)
        if self.device and Path(self.device).exists() and (found := elsewhere(device.machine)):
            print(
                f"{self.device} was not measured on this machine, and is used unchanged: {'; '.join(found)}",
                file=sys.stderr,
            )
        made, likely = None, 0.0
        begun = time.monotonic()

        def about() -> float:
            """The estimated total in wall-clock seconds, 0 if there is none or if it turned out too low."""
            # The estimate is in CPU seconds. On a busy machine the process gets less than one core, and the rest takes
            # longer in proportion.
            wall, cpu = time.monotonic() - begun, time.process_time()
            left = likely - cpu
            return wall + left * max(1.0, wall / max(cpu, 1.0)) if left > 0 else 0.0

        short, stage = "", "making the model" if self.model.hf else "tracing and planning"
        unknown = list[str]()
        with unknown_keys_named(unknown), shown("fzero.plan", lambda: stage, about=about):
            with usage_errors():
                limits = _parsed(nbytes := self.budgets)
                if self.target is None:
                    nbytes = (nbytes[0] or room(device, mesh.size > 1, self.interpreter), *nbytes[1:])
            if self.target is not None:
                step, params, batch = load(self.target)
            else:
                budgets = dict(zip(_BUDGETS, (None if n is None else _rounded(n) for n in nbytes), strict=True))
                made, (step, params, batch, blocks) = planned(self.model, axes, device.devices_per_host, budgets)
                unknown += made.unknown
                # The budgets of the program become part of the script, so the plan must use them as well.
                limits = _parsed([*map(bytes_of, budgets.values())])
                stage = "tracing and planning"
                likely = _likely(blocks, self.model.offload == "auto")
            limits = limits if limited else (None, None, None)
            skip = [current_pass_name(name, step.transforms) for name in skip]
            _check_passes(step, asked, skip)
            with users_code(self.target or ""):
                if isinstance(step, Step) and not callable(params):
                    budget = Budget(limits[0], device, self.backend, *limits[1:])
                    check_at_rest(step, mesh, params, budget)
                    # Only for the message: without a budget the plan is made anyway, and this says what would help.
                    found = shortage(step, mesh, params, replace(budget, nbytes=device.memory_bytes))
                    short = "; ".join(found[0][2:]) if found else ""
                lowered = lower(
                    step,
                    mesh,
                    params,
                    batch,
                    memory_budget=limits[0],
                    host_budget=limits[1],
                    disk_budget=limits[2],
                    device=device,
                    backend=self.backend,
                    skip=skip,
                )
        return LoweredTarget(lowered, made, short, step, params, batch)

    def _devices(self) -> tuple[dict[str, Any], Device]:
        """Returns the axes of the mesh, and its device. Without a mesh, all devices are along one axis."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        if self.devices is not None:
            number, device = get_devices(self.devices, kind)
            return axes_of(self.mesh[0]) if self.mesh and not self.compares else self.model.axes(number), device
        return axes_of(self.mesh[0]), get_device(self.device, kind)

    def _step_problems(self) -> list[str]:
        """Returns the problems of the flags that name a step and its budget."""
        problems = list[str]()
        if self.target is None and self.model.hf is None:
            problems.append("neither MODULE:FUNCTION nor --hf DIR")
        if self.target is not None and self.model.hf is not None:
            problems.append(f"both {self.target} and --hf {self.model.hf}")
        elif self.target is not None:
            problems += [
                f"--{name}: applies only to --hf; {self.target} sets it in its code" for name in self.model.given
            ]
        if self.include_process and self.budget is None and self.host_budget is None:
            problems.append("--include-process: applies only with --budget SIZE or --host-budget SIZE")
        return problems

    def _check(self) -> None:
        """Raises an error for flags that contradict each other."""
        problems = self._step_problems()
        problems += ["--mesh several times, or auto: only fzero plan accepts it"] if self.compares else []
        if self.devices is None and not self.mesh:
            problems.append(
                "--mesh requires axes with their sizes, --mesh AXIS=SIZE ...; or give --devices NUMBERxNAME"
            )
        if self.devices is not None and self.device is not None:
            problems.append(f"both --devices {self.devices} and --device {self.device}")
        elif self.devices is not None and self.mesh and not self.compares:
            number, _ = get_devices(self.devices)
            if math.prod(axes_of(self.mesh[0]).values()) != number:
                mesh = " ".join(self.mesh[0])
                problems.append(f"--devices {self.devices} and --mesh {mesh}: they differ in the number of devices")
        if problems:
            fix = "e.g. fzero plan --hf DIR --devices 8xh100, or fzero plan FILE.py:FUNCTION --mesh data=8"
            raise UsageError("target", "a step and its devices are required", problems, fix)


def _check_passes(step: Any, asked: Mapping[str, str | None], skip: Sequence[str]) -> None:
    """Raises an error for passes that a step does not have, or that it needs."""
    with usage_errors():
        names = [FIRST, *(x.name for x in passes_of(step.transforms, skip))]
    problems = [
        f"--{flag} {name}: unknown pass"
        for flag, name in asked.items()
        if name and current_pass_name(name, step.transforms) not in names
    ]
    if problems:
        fix = f"name one of them, in order: {', '.join(names)}"
        raise UsageError("show", "unknown passes", problems, fix)


@contextlib.contextmanager
def unknown_keys_named(unknown: Sequence[str]) -> Iterator[None]:
    """Reports unknown keys of a configuration on stderr, also before an error: they may be why a model does not
    fit.
    """
    try:
        yield
    finally:
        for line in unknown:
            print(f"config.json: {line}", file=sys.stderr)


def _parsed(nbytes: Sequence[int | None]) -> tuple[int | None, int | None, int | None]:
    """Returns budgets of the program after the checks of `lower`. Each was given with a unit, or has many bytes."""
    return parse_budgets(*(n and f"{n}B" for n in nbytes))


_BUDGETS = ("memory_budget", "host_budget", "disk_budget")


def _rounded(nbytes: int) -> str:
    """Returns a number of bytes as text, rounded down."""
    return f"{int(nbytes / 1e8) / 10:g}GB" if nbytes >= 1e8 else f"{nbytes}B"


def _for_program(flag: str, given: int, rest: int) -> int:
    """Returns the rest of a budget that the process leaves, or raises an error that says what the process takes."""
    if rest > 0:
        return rest
    what = f"{flag} {size(given)}: the process itself, without the program, takes {size(given - rest)}"
    raise UsageError("memory_budget", what, fix=f"give {flag} more than that")


def _likely(blocks: int, search: bool) -> float:
    """Returns the CPU seconds that a plan probably takes, measured with Llamas of 32 to 80 layers: a few seconds for
    the imports, then 0.15 to 0.25 per layer, or about 1 per layer if memory tiers are searched.
    """
    return 5 + blocks * (1.0 if search else 0.2)
