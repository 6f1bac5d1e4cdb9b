"""Runs each command: it works out one value of the library (a `Plan`, a `Program`, a `Device`) and prints it.

Tables are rich's on a terminal and plain text elsewhere; with `--json` nothing but JSON goes to stdout.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json as json_
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from rich.console import Console
from tyro.conf import Positional, UseAppendAction, arg

from fzero import tree
from fzero.cli import report
from fzero.cli.answer import Answer
from fzero.cli.hf import OfModel, Script, as_flags, planned
from fzero.cli.target import UsageError, load, users_code, with_values
from fzero.comm.disk import check
from fzero.errors import BudgetError, FzeroError, FzeroValueError
from fzero.hf.library import library
from fzero.lowering.at_rest import check_at_rest, shortage
from fzero.lowering.budget import Budget
from fzero.lowering.choose_mesh import choose_mesh
from fzero.lowering.layouts import abstract, zero_of
from fzero.lowering.lower import lower
from fzero.lowering.lowered import Lowered
from fzero.measure.calibrate import calibrate
from fzero.measure.probes import SCRATCH
from fzero.mesh import AbstractMesh, close_mesh, make_mesh
from fzero.passes.pipeline import FIRST, passes_of
from fzero.plan.calibration import calibration_path, elsewhere
from fzero.plan.devices import Device, get_device, get_devices
from fzero.plan.plan import fits
from fzero.plan.process import INTERPRETER, left, parts, resident, room
from fzero.processes import LOCAL
from fzero.program.show import show
from fzero.progress import shown
from fzero.step import Step
from fzero.testing import check_equivalent
from fzero.units import parse_budgets, parse_bytes

_TARGET = arg(metavar="MODULE:FUNCTION", help_behavior_hint="")
_MESH = arg(metavar="AXIS=SIZE ...", help_behavior_hint="(required, or --devices)")
_DEVICE = arg(metavar="NAME", help_behavior_hint="(default: this machine's)")
_BUDGET = arg(metavar="SIZE", help_behavior_hint="(default: none)")
_FILE = arg(metavar="FILE", help_behavior_hint="")
_FLAG = arg(help_behavior_hint="")
_PICTURES = (".png", ".svg")


class _Lowered(NamedTuple):
    """A target, lowered.

    Attributes:
        script, interpreter: of a model of transformers: its script, and the bytes of the process that made it.
        short: without a budget, the need of a state that alone is larger than the device's memory.
    """

    lowered: Lowered
    script: Script | None = None
    interpreter: int = 0
    short: str = ""


@dataclass(frozen=True)
class _OfTarget:
    """The flags of both commands about a step."""

    target: Annotated[Positional[str | None], _TARGET] = None
    """returns (step, params, batch); or give --hf"""
    mesh: Annotated[tuple[tuple[str, ...], ...], UseAppendAction, _MESH] = ()
    """axes and their sizes, outermost first: data=8, or replica=2 data=4. To compare meshes, plan takes --mesh several
    times, or "auto" with --devices, for a step without parallel transforms and the batch of all ranks together"""
    device: Annotated[str | None, _DEVICE] = None
    """whose rates predict: h100, a100, rtx4090, … or a calibration file, with other numbers behind:
    a100,memory_bytes=40GB,disk_read=3GB"""
    devices: Annotated[str | None, arg(metavar="NUMBERxNAME", help_behavior_hint="")] = None
    """both at once: 8xh100 is --mesh data=8 --device h100; 64xa100-40gb"""
    budget: Annotated[str | None, _BUDGET] = None
    """memory a rank may use, e.g. 80GB or 24GiB (a number alone is bytes): the fastest program that fits is chosen"""
    include_process: Annotated[bool, _FLAG] = False
    """--budget is the memory of a whole device or container: the memory of the process itself is subtracted from it"""
    host_budget: Annotated[str | None, _BUDGET] = None
    """host memory a rank may use, where the host's is another than the device's"""
    disk_budget: Annotated[str | None, _BUDGET] = None
    """disk a rank may use"""
    backend: Literal["inductor", "eager"] = "inductor"
    """backend of the program"""
    json: Annotated[bool, _FLAG] = False
    """print JSON"""
    model: OfModel = field(default_factory=OfModel)

    @property
    def compares(self) -> bool:
        """Whether several meshes are to be planned."""
        return len(self.mesh) > 1 or self.mesh == (("auto",),)

    @property
    def budget_bytes(self) -> int | None:
        """The budget of the program, without the process."""
        found = _bytes(self.budget)
        if found is None or not self.include_process:
            return found
        axes, device = self._devices()
        return left(device, found, math.prod(axes.values()) > 1, device.process_bytes or INTERPRETER)

    def lowered(self, asked: Mapping[str, str | None] = {}, skip: Sequence[str] = ()) -> _Lowered:
        """The target lowered for the mesh and the device that predicts, without the passes to skip. `asked`: by flag
        the passes that are asked for."""
        with _usage():
            self._check()
            axes, device = self._devices()
            mesh = AbstractMesh(**axes).of_type(device.type)
            given = [self.budget_bytes, _bytes(self.host_budget), _bytes(self.disk_budget)]
            limits = parse_budgets(*(n and f"{n}B" for n in given))  # a unit was said, or many bytes
        if self.device and Path(self.device).exists() and (found := elsewhere(device.machine)):
            print(f"{self.device} is not of this machine, and taken as it is: {'; '.join(found)}", file=sys.stderr)
        made, interpreter, likely = None, 0, 0.0
        begun = time.monotonic()

        def about() -> float:
            """The estimated total in wall-clock seconds, 0 if there is none or if it turned out too low."""
            wall, cpu = time.monotonic() - begun, time.process_time()
            left = likely - cpu
            return wall + left * max(1.0, wall / max(cpu, 1.0)) if left > 0 else 0.0

        short, stage = "", "making the model" if self.model.hf else "tracing and planning"
        unknown = list[str]()
        with _told_at_the_end(unknown), shown("fzero.plan", lambda: stage, about=about):
            if self.target is not None:
                step, params, batch = load(self.target)
            else:
                budgets: dict[str, str | None] = dict(
                    zip(_BUDGETS, (_as_text(self), self.host_budget, self.disk_budget), strict=True)
                )
                with _usage():
                    library("plan --hf")  # now, so that what is resident has it
                if self.budget is None:
                    budgets["memory_budget"] = _rounded(room(device, mesh.size > 1, resident()))
                made, (step, params, batch, blocks) = planned(self.model, axes, device.devices_per_host, budgets)
                unknown += made.unknown
                limits = parse_budgets(*(n and f"{n}B" for n in map(_bytes, budgets.values())))
                stage, interpreter = "tracing and planning", resident()
                likely = _likely(blocks, self.model.offload == "auto")
            _check_passes(step, asked, skip)
            with users_code(self.target or ""):
                if isinstance(step, Step) and not callable(params):
                    budget = Budget(limits[0], device, self.backend, *limits[1:])
                    check_at_rest(step, mesh, params, budget)
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
        return _Lowered(lowered, made, interpreter, short)

    def _devices(self) -> tuple[dict[str, Any], Device]:
        """The axes of the mesh, and its devices. Without one mesh all devices are along one axis."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        if self.devices is not None:
            number, device = get_devices(self.devices, kind)
            return _axes(self.mesh[0]) if self.mesh and not self.compares else self.model.axes(number), device
        return _axes(self.mesh[0]), get_device(self.device, kind)

    def _step_problems(self) -> list[str]:
        """Problems of the flags that name a step and its budget."""
        problems = list[str]()
        if self.target is None and self.model.hf is None:
            problems.append("neither MODULE:FUNCTION nor --hf DIR")
        if self.target is not None and self.model.hf is not None:
            problems.append(f"both {self.target} and --hf {self.model.hf}")
        elif self.target is not None:
            problems += [f"--{name}: is about --hf, and {self.target} has it in its code" for name in self.model.given]
        if self.include_process and self.budget is None:
            problems.append("--include-process: is about --budget SIZE")
        return problems

    def _check(self) -> None:
        """Raises for flags that contradict each other."""
        problems = self._step_problems()
        problems += ["--mesh several times, or auto: is for fzero plan"] if self.compares else []
        if self.devices is None and not self.mesh:
            problems.append("--mesh wants axes with their sizes, --mesh AXIS=SIZE ...; or give --devices NUMBERxNAME")
        if self.devices is not None and self.device is not None:
            problems.append(f"both --devices {self.devices} and --device {self.device}")
        elif self.devices is not None and self.mesh and not self.compares:
            number, _ = get_devices(self.devices)
            if math.prod(_axes(self.mesh[0]).values()) != number:
                mesh = " ".join(self.mesh[0])
                problems.append(f"--devices {self.devices} and --mesh {mesh}: another number of devices")
        if problems:
            fix = "e.g. fzero plan --hf DIR --devices 8xh100, or fzero plan FILE.py:FUNCTION --mesh data=8"
            raise UsageError("target", "a step and its devices are wanted", problems, fix)


def _check_passes(step: Any, asked: Mapping[str, str | None], skip: Sequence[str]) -> None:
    """Raises for passes that a step does not have, or needs."""
    with _usage():
        names = [FIRST, *(x.name for x in passes_of(step.transforms, skip))]
    problems = [f"--{flag} {name}: there is no such pass" for flag, name in asked.items() if name and name not in names]
    if problems:
        fix = f"name one of them, in order: {', '.join(names)}"
        raise UsageError("show", "unknown passes", problems, fix)


@contextlib.contextmanager
def _told_at_the_end(unknown: Sequence[str]) -> Iterator[None]:
    """Names unknown keys of a configuration on stderr, also before an error: they may be why a model does not fit."""
    try:
        yield
    finally:
        for line in unknown:
            print(f"config.json: {line}", file=sys.stderr)


_BUDGETS = ("memory_budget", "host_budget", "disk_budget")


def _rounded(nbytes: int) -> str:
    """As text, no more than it is."""
    return f"{int(nbytes / 1e8) / 10:g}GB" if nbytes >= 1e8 else f"{nbytes}B"


def _as_text(command: _OfTarget) -> str | None:
    """The budget of the program, as a flag has it."""
    if command.include_process and (found := command.budget_bytes) is not None:
        return _rounded(found)
    return command.budget


def _likely(blocks: int, search: bool) -> float:
    """CPU seconds that a plan takes, as Llamas of 32 to 80 layers took: a few for the imports, then 0.15 to 0.25 a
    layer; where tiers are searched, about 1."""
    return 5 + blocks * (1.0 if search else 0.2)


@dataclass(frozen=True)
class PlanCommand(_OfTarget):
    """Predicts the cost of a step on each rank: memory, bytes on every wire, time. Nothing is run or allocated."""

    trace: Annotated[Path | None, _FILE] = None
    """write the timeline, for ui.perfetto.dev or chrome://tracing"""
    picture: Annotated[Path | None, _FILE] = None
    """draw memory over the lines of the step, as .png or .svg"""
    experts: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="(default: none)")] = ()
    """when comparing meshes: the parameters of experts, such as 'layers.*.experts.*', so that meshes have their axis"""

    def run(self) -> int:
        with _usage():
            _check_files(trace=self.trace, picture=self.picture)
        if self.compares:
            return self._compare()
        if self.experts:
            fix = "give --mesh auto, or fz.expert_parallel in the target's code"
            raise UsageError("mesh", "--experts is about --mesh auto", fix=fix)
        try:
            lowered, made, interpreter, short = self.lowered()
        except BudgetError as error:
            text = as_flags(str(error)) if self.model.hf else str(error)
            if self.json:
                print(json_.dumps({"budget": {"bytes": self.budget_bytes, "fits": False, "error": text}}, indent=1))
            raise BudgetError(text) from None
        plan = lowered.plan
        if self.trace is not None:
            plan.save_trace(self.trace)
        if self.picture is not None:
            plan.save_picture(self.picture, self.budget_bytes)
        if made is not None:
            found = Answer(
                lowered,
                plan,
                self.model,
                made,
                parts(plan.device, plan.peak_bytes, interpreter, lowered.program.mesh.size > 1),
            )
            if self.json:
                data = json_.loads(plan.to_json()) | report.plan_data(lowered, plan) | found.data()
                print(json_.dumps(data, indent=1))
            else:
                report.print_answer(found)
            return 0
        known = self.device is not None or self.devices is not None or plan.device.machine  # else any of the kind
        left = plan.device.memory_bytes - plan.process_bytes
        memory = left if known and self.budget_bytes is None else None
        if self.json:
            print(json_.dumps(json_.loads(plan.to_json()) | report.plan_data(lowered, plan, memory), indent=1))
        else:
            report.print_plan(lowered, plan, memory, short)
        return 0 if memory is None or fits(plan, memory) else 1

    def _compare(self) -> int:
        """Plans several meshes, with the parallel transforms for each. Returns the exit status: 1 if none fits."""
        problems = self._step_problems()
        problems += [] if self.devices else ["--devices NUMBERxNAME is wanted, such as 64xh100"]
        given = {"device": self.device, "host-budget": self.host_budget, "disk-budget": self.disk_budget}
        given |= {"trace": self.trace, "picture": self.picture}
        problems += [f"--{name} is for one mesh" for name, value in given.items() if value is not None]
        if problems or self.devices is None:
            fix = "e.g. fzero plan FILE.py:FUNCTION --mesh auto --devices 64xh100"
            raise UsageError("mesh", "several meshes of a number of devices are planned", problems, fix)
        with _usage():
            number, device = get_devices(self.devices, "cuda" if torch.cuda.is_available() else "cpu")
            budget = self.budget_bytes
            meshes = [] if self.mesh == (("auto",),) else [AbstractMesh(**_axes(mesh)) for mesh in self.mesh]
            for mesh in meshes:
                if mesh.size != number:
                    raise UsageError("mesh", f"--devices {self.devices}: --mesh {mesh} has another number of devices")
        unknown = list[str]()
        with _told_at_the_end(unknown), shown("fzero.plan", lambda: "planning several meshes"):
            made = None
            if self.target is not None:
                step, params, batch = load(self.target)
            else:
                of = self.model.of_all(number)
                with _usage():
                    library("plan --hf")
                made, (step, params, batch, _) = planned(of, {"data": 1}, device.devices_per_host, {})
                unknown += made.unknown
            if not isinstance(step, Step):
                fix = "give one --mesh"
                raise UsageError("mesh", f"{self.target} returns an evaluation; meshes are for training steps", fix=fix)
            with users_code(self.target or ""):
                found = choose_mesh(
                    step,
                    params,
                    batch,
                    devices=number,
                    meshes=meshes,
                    device=device,
                    memory_budget=budget,
                    experts=_named(self.experts, params),
                    backend=self.backend,
                )
        if self.json:
            print(json_.dumps(report.meshes_data(found) | ({} if made is None else {"model": made.model}), indent=1))
        else:
            print(found if made is None else f"{made.model}\n{found}")
        return 0 if found.found[0].plan is not None else 1


def _named(patterns: Sequence[str], params: Any) -> Callable[[str, torch.Tensor], bool] | None:
    """A predicate of the parameters with such dotted names; None without patterns."""
    names = tree.names(abstract(params) if callable(params) else params) if patterns else []
    if unknown := [f"{p}: no parameter has such a name" for p in patterns if not fnmatch.filter(names, p)]:
        raise UsageError("mesh", "--experts names parameters", unknown, f"they are {', '.join(names[:8])}, …")
    known = {name for p in patterns for name in fnmatch.filter(names, p)}
    return (lambda path, leaf: tree.dotted(path) in known) if patterns else None


@dataclass(frozen=True)
class Show(_OfTarget):
    """The program that each rank will run: every call, every transfer with its bytes."""

    flat: Annotated[bool, _FLAG] = False
    """every line, repeated layers not folded into loops"""
    after: Annotated[str | None, arg(metavar="PASS", help_behavior_hint="(default: what runs)")] = None
    """the program as a pass left it, or "trace", as it was recorded; passes that ran are listed on stderr"""
    diff: Annotated[str | None, arg(metavar="PASS", help_behavior_hint="")] = None
    """what a pass changed, as a unified diff"""
    skip: Annotated[tuple[str, ...], arg(metavar="PASS ...", help_behavior_hint="")] = ()
    """leave passes out, to look for a fault; refused where the program would be wrong"""

    def run(self) -> int:
        if self.after and self.diff:
            raise UsageError("show", f"both --after {self.after} and --diff {self.diff}", fix="give one of them")
        lowered = self.lowered({"after": self.after, "diff": self.diff}, self.skip).lowered
        with _usage():
            program = lowered.after(self.after) if self.after else lowered.program
            text = lowered.diff(self.diff, fold=not self.flat) if self.diff else show(program, fold=not self.flat)
        if self.json:
            data = report.program_data(program) | {"passes": [*lowered.stages()]}
            print(json_.dumps(data | {"diff" if self.diff else "program": text}, indent=1))
        else:
            report.print_program(text)
            print(f"passes that ran: {', '.join(lowered.stages())}", file=sys.stderr)
        return 0


@dataclass(frozen=True)
class Calibrate:
    """Measures this machine's rates, in a few seconds, and keeps them where every plan finds them."""

    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: in the cache folder)")] = None
    """write them here instead; plans take it as --device FILE"""
    path: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: that of temporary files)")] = None
    """directory whose disk is measured: the one that offload("nvme", path=DIR) is given"""
    seconds: float = 5.0
    """about how long to measure"""
    json: Annotated[bool, _FLAG] = False
    """print JSON, as in the file"""

    def run(self) -> int:
        with _usage():
            _check_files(out=self.out)
            if not 0 < self.seconds < math.inf:
                raise UsageError(
                    "calibrate", f"--seconds {self.seconds:g} is not enough time to measure", fix="e.g. --seconds 5"
                )
            if self.path is not None and not self.path.is_dir():
                raise UsageError(
                    "calibrate",
                    f"--path {self.path}: there is no such directory",
                    fix="name a directory of the disk that is to be measured",
                )
            if self.path is not None:
                check(self.path, SCRATCH)
        device, path = _measured(self.seconds, self.out, self.path)
        if self.json:
            print(device.to_json())
        else:
            report.print_device(device)
        print(f"written to {path}", file=sys.stderr)
        return 0


@dataclass(frozen=True)
class Check:
    """Whether a step with its transforms does what it does without them: a few steps of both, leaf by leaf. If not,
    where that begins."""

    target: Annotated[Positional[str], _TARGET]
    """returns (step, params, batch)"""
    mesh: Annotated[
        tuple[str, ...], arg(metavar="AXIS=SIZE ...", help_behavior_hint="(default: all processes along data)")
    ] = ()
    """axes and their sizes, outermost first; their product is the number of processes. local: the processes of a host,
    -1: what is left"""
    steps: int = 3
    """to take"""
    backend: Literal["inductor", "eager"] = "eager"
    """inductor also checks what is compiled"""
    json: Annotated[bool, _FLAG] = False
    """print JSON"""

    def run(self) -> int:
        with _usage():
            axes: dict[str, Any] = _axes(self.mesh, processes=True) if self.mesh else {}
            mesh = make_mesh(**axes)
            if self.steps < 1:
                raise UsageError("check", f"--steps {self.steps} compares nothing", fix="e.g. --steps 3")
        try:
            step, params, batch = load(self.target)
            if not isinstance(step, Step):
                raise UsageError(
                    "check", f"{self.target} returns an evaluation", fix="name a function that returns a training step"
                )
            part = mesh.index(zero_of(step, mesh).batch_axes)
            params, batch, num_drawn = with_values(params, batch, part)
            far = (
                shown("fzero.check", lambda: f"{self.steps} steps of both, leaf by leaf")
                if mesh.rank == 0
                else contextlib.nullcontext()
            )
            with users_code(self.target), far:
                found = check_equivalent(
                    step, params, batch, mesh, steps=self.steps, backend=self.backend, raises=False
                )
        finally:
            close_mesh()
        if mesh.rank == 0:
            if num_drawn:
                print(f"{num_drawn} leaves of {self.target} have no values: drawn at random", file=sys.stderr)
            if self.json:
                print(found.to_json())
            else:
                report.print_report(found)
        return 0 if found.equivalent else 1


def _measured(seconds: float, out: Path | None, directory: Path | None) -> tuple[Device, Path]:
    """The rates of this machine, and the file they are in."""
    console = Console(stderr=True)
    with console.status("measuring") if console.is_terminal else contextlib.nullcontext() as status:

        def progress(what: str) -> None:
            if status is None:
                print(f"measuring: {what}", file=sys.stderr, flush=True)
            else:
                status.update(f"measuring: {what}")

        device = calibrate(seconds=seconds, progress=progress, path=out, directory=directory)
    return device, out or calibration_path(device.machine["device_type"])


# --- flags ---


def _bytes(size: str | None) -> int | None:
    if size is None or not size.isdecimal():
        return None if size is None else parse_bytes(size)
    if 0 < int(size) < 1 << 20:
        raise FzeroValueError(
            "plan",
            f"{size} is a number of bytes, in which nothing fits",
            fix=f"did you mean {size}GB? Bytes are {size}B",
        )
    return int(size)


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """Raises problems of flags as a `UsageError`."""
    try:
        yield
    except FzeroError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError("flags", str(error)) from None


def _axes(mesh: tuple[str, ...], processes: bool = False) -> dict[str, Any]:
    """Names and sizes from `AXIS=SIZE ...`, with commas or spaces between. `processes`: there are some, so a size may
    be left to them: -1 or local."""
    pairs = [a.partition("=") for text in mesh for a in text.split(",") if a]
    names, problems = [axis for axis, _, _ in pairs], []
    for axis, equals, size in pairs:
        if not equals and (apart := re.fullmatch(r"([a-z]+)[:x]?(\d+)", axis)):
            problems.append(f"{axis}: did you mean {apart[1]}={apart[2]}?")
        elif not equals and axis.isdecimal():
            problems.append(f"{axis}: which axis has this size? e.g. data={axis}")
        elif size in ("-1", LOCAL) and not processes:
            problems.append(f"{axis}={size}: {size} is said of processes, and here there are none: give a number")
        elif not axis or not (size in ("-1", LOCAL) or (size.isdecimal() and int(size))):
            problems.append(f"{axis}{equals}{size}: a size is a whole number of at least 1")
    problems += [f"{axis}: given twice" for axis in dict.fromkeys(names) if names.count(axis) > 1]
    if problems or not pairs:
        fix = "e.g. --mesh data=8, or --mesh replica=2 data=4"
        raise UsageError("mesh", "--mesh wants axes with their sizes", problems, fix)
    return {axis: size if size == LOCAL else int(size) for axis, _, size in pairs}


def _check_files(**files: Path | None) -> None:
    """Whether what a command is to write can be written, asked before the work is done."""
    given = {flag: path for flag, path in files.items() if path is not None}
    problems = [
        f"--{flag} {path}: there is no folder {path.parent}" for flag, path in given.items() if not path.parent.is_dir()
    ]
    problems += [f"--{flag} {path}: is a folder" for flag, path in given.items() if path.is_dir()]
    problems += [
        f"--picture {path}: a picture is a .png or .svg"
        for flag, path in given.items()
        if flag == "picture" and path.suffix not in _PICTURES
    ]
    if problems:
        raise UsageError(
            "files", "cannot be written", problems, "name files in folders that exist, pictures .png or .svg"
        )
