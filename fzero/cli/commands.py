"""Runs each command: it works out one value of the library (a `Plan`, a `Program`, a `Device`) and prints it.

Tables are rich's on a terminal and plain text elsewhere; with `--json` nothing but JSON goes to stdout.
"""

from __future__ import annotations

import contextlib
import json as json_
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import torch
from rich.console import Console
from tyro.conf import Positional, arg

from fzero.cli import report
from fzero.cli.target import UsageError, load, users_code, with_values
from fzero.comm.disk import check
from fzero.errors import BudgetError, FzeroError, FzeroValueError, message
from fzero.lowering.lower import lower
from fzero.lowering.lowered import Lowered
from fzero.measure.calibrate import calibrate
from fzero.measure.probes import SCRATCH
from fzero.mesh import AbstractMesh, close_mesh, make_mesh
from fzero.passes.pipeline import Name
from fzero.plan.calibration import calibration_path, elsewhere
from fzero.plan.devices import Device, get_device
from fzero.plan.plan import fits
from fzero.processes import LOCAL
from fzero.program.show import show
from fzero.progress import shown
from fzero.step import Step
from fzero.testing import check_equivalent
from fzero.units import parse_budgets, parse_bytes

_TARGET = arg(metavar="MODULE:FUNCTION", help_behavior_hint="")
_MESH = arg(metavar="AXIS=SIZE ...", help_behavior_hint="(required)")
_DEVICE = arg(metavar="NAME", help_behavior_hint="(default: this machine's)")
_BUDGET = arg(metavar="SIZE", help_behavior_hint="(default: none)")
_FILE = arg(metavar="FILE", help_behavior_hint="")
_FLAG = arg(help_behavior_hint="")
_PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class _OfTarget:
    """The flags of both commands about a step. Fields without a default come first."""

    target: Annotated[Positional[str], _TARGET]
    """returns (step, params, batch)"""
    mesh: Annotated[tuple[str, ...], _MESH]
    """axes and their sizes, outermost first: data=8, or replica=2 data=4"""
    device: Annotated[str | None, _DEVICE] = None
    """whose rates predict: h100, a100, rtx4090, … or a calibration file, with other numbers behind:
    a100,memory_bytes=40GB,disk_read=3GB"""
    budget: Annotated[str | None, _BUDGET] = None
    """memory a rank may use, e.g. 80GB or 24GiB (a number alone is bytes): the fastest program that fits is chosen"""
    host_budget: Annotated[str | None, _BUDGET] = None
    """host memory a rank may use, where the host's is another than the device's"""
    disk_budget: Annotated[str | None, _BUDGET] = None
    """disk a rank may use"""
    backend: Literal["inductor", "eager"] = "inductor"
    """that the program is for"""
    json: Annotated[bool, _FLAG] = False
    """print JSON"""

    @property
    def budget_bytes(self) -> int | None:
        return _bytes(self.budget)

    def lowered(self) -> Lowered:
        """The target lowered for the mesh and the device that predicts."""
        with _usage():
            axes: dict[str, Any] = _axes(self.mesh)
            mesh = AbstractMesh(**axes)
            budget, host, disk = parse_budgets(self.budget_bytes, _bytes(self.host_budget), _bytes(self.disk_budget))
            device = get_device(self.device, "cuda" if torch.cuda.is_available() else "cpu")
        if self.device and Path(self.device).exists() and (found := elsewhere(device.machine)):
            print(f"{self.device} is not of this machine, and taken as it is: {'; '.join(found)}", file=sys.stderr)
        step, params, batch = load(self.target)
        with users_code(self.target), shown("fzero.plan", lambda: "tracing and planning"):
            return lower(
                step,
                mesh,
                params,
                batch,
                memory_budget=budget,
                host_budget=host,
                disk_budget=disk,
                device=device,
                backend=self.backend,
            )


@dataclass(frozen=True)
class Plan(_OfTarget):
    """Predicts the cost of a step on each rank: memory, bytes on every wire, time. Nothing is run or allocated."""

    trace: Annotated[Path | None, _FILE] = None
    """write the timeline, for ui.perfetto.dev or chrome://tracing"""
    picture: Annotated[Path | None, _FILE] = None
    """draw memory over the lines of the step, as .png or .svg"""

    def run(self) -> int:
        with _usage():
            _check_files(trace=self.trace, picture=self.picture)
        try:
            lowered = self.lowered()
        except BudgetError as error:
            if self.json:
                print(
                    json_.dumps({"budget": {"bytes": self.budget_bytes, "fits": False, "error": str(error)}}, indent=1)
                )
            raise
        plan = lowered.plan
        if self.trace is not None:
            plan.save_trace(self.trace)
        if self.picture is not None:
            plan.save_picture(self.picture, self.budget_bytes)
        known = self.device is not None or plan.device.machine  # else it is any device of the kind
        memory = plan.device.memory_bytes if known and self.budget_bytes is None else None
        if self.json:
            print(json_.dumps(json_.loads(plan.to_json()) | report.plan_data(lowered, plan, memory), indent=1))
        else:
            report.print_plan(lowered, plan, memory)
        return 0 if memory is None or fits(plan, memory) else 1


@dataclass(frozen=True)
class Show(_OfTarget):
    """The program that each rank will run: every call, every transfer with its bytes."""

    flat: Annotated[bool, _FLAG] = False
    """every line, repeated layers not folded into loops"""
    after: Annotated[str | None, arg(metavar="PASS", help_behavior_hint="(default: what runs)")] = None
    """the program as a pass left it: trace, fuse, copies, remat, accumulate, shard, cut_update, speculate,
    hoist_updates, tiers, overlap, rename or pool"""

    def run(self) -> int:
        if self.after not in (None, *get_args(Name)):
            raise UsageError(
                message(
                    "show",
                    f"--after {self.after}: there is no such pass",
                    fix=f"name one of them, in order: {', '.join(get_args(Name))}",
                )
            )
        lowered = self.lowered()
        program = lowered.program if self.after is None else lowered.after(cast(Name, self.after))
        text = show(program, fold=not self.flat)
        if self.json:
            print(json_.dumps(report.program_data(program) | {"program": text}, indent=1))
        else:
            report.print_program(text)
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
                    message(
                        "calibrate", f"--seconds {self.seconds:g} is not enough time to measure", fix="e.g. --seconds 5"
                    )
                )
            if self.path is not None and not self.path.is_dir():
                raise UsageError(
                    message(
                        "calibrate",
                        f"--path {self.path}: there is no such directory",
                        fix="name a directory of the disk that is to be measured",
                    )
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
                raise UsageError(message("check", f"--steps {self.steps} compares nothing", fix="e.g. --steps 3"))
        try:
            step, params, batch = load(self.target)
            if not isinstance(step, Step):
                raise UsageError(
                    message(
                        "check",
                        f"{self.target} returns an evaluation",
                        fix="name a function that returns a training step",
                    )
                )
            params, batch, num_drawn = with_values(params, batch, mesh.rank)
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
            message(
                "plan",
                f"{size} is a number of bytes, in which nothing fits",
                fix=f"did you mean {size}GB? Bytes are {size}B",
            )
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
        raise UsageError(message("flags", str(error))) from None


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
        raise UsageError(message("mesh", "--mesh wants axes with their sizes", problems, fix))
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
            message("files", "cannot be written", problems, "name files in folders that exist, pictures .png or .svg")
        )
