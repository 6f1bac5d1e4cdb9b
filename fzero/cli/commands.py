"""Runs each command except `fzero plan`: it computes one value of the library (a `Program`, a `Device`) and prints
it.

Tables are printed by rich on a terminal and as plain text elsewhere; with `--json`, only JSON is written to stdout.
"""

from __future__ import annotations

import contextlib
import json as json_
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from fzero._utils.progress import shown
from fzero.cli import printing
from fzero.cli.flags import FLAG, TARGET, axes_of, check_files, usage_errors
from fzero.cli.step_command import StepCommand
from fzero.cli.target import UsageError, load, users_code, with_values
from fzero.compiler.combined_transforms import zero_of
from fzero.ir.printer import show
from fzero.memory.disk import check
from fzero.mesh import AbstractMesh, close_mesh, make_mesh
from fzero.plan.calibration import calibration_path
from fzero.plan.device_lookup import Device
from fzero.runtime.calibrate import calibrate
from fzero.runtime.probes import SCRATCH
from fzero.step import Step
from fzero.testing import check_equivalent, check_isolation


@dataclass(frozen=True)
class Show(StepCommand):
    """Prints the program that each rank will run: every call, and every transfer with its bytes."""

    flat: Annotated[bool, FLAG] = False
    """print every op, without folding repeated layers into loops"""
    full: Annotated[bool, FLAG] = False
    """print the code exactly as it runs, with buffers and `del`"""
    after: Annotated[str | None, arg(metavar="PASS", help_behavior_hint="(default: what runs)")] = None
    """the program after a pass, or "trace": as it was recorded; passes that ran are listed on stderr"""
    diff: Annotated[str | None, arg(metavar="PASS", help_behavior_hint="")] = None
    """the changes that a pass made, as a unified diff"""
    skip: Annotated[tuple[str, ...], arg(metavar="PASS ...", help_behavior_hint="")] = ()
    """leave passes out, to look for a fault; an error if the program would be wrong"""

    def run(self) -> int:
        if self.after and self.diff:
            raise UsageError("show", f"both --after {self.after} and --diff {self.diff}", fix="give one of them")
        lowered = self.lowered({"after": self.after, "diff": self.diff}, self.skip).lowered
        with usage_errors():
            program = lowered.after(self.after) if self.after else lowered.program
            form = {"fold": not self.flat, "full": self.full}
            text = lowered.diff(self.diff, **form) if self.diff else show(program, **form)
        if self.json:
            data = printing.program_data(program) | {"passes": [*lowered.stages()]}
            print(json_.dumps(data | {"diff" if self.diff else "program": text}, indent=1))
        else:
            printing.print_program(text)
            print(f"passes that ran: {', '.join(lowered.stages())}", file=sys.stderr)
        return 0


@dataclass(frozen=True)
class Calibrate:
    """Measures this machine's rates, in a few seconds, and stores them where every plan finds them."""

    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: in the cache folder)")] = None
    """write them to this file instead; plans take it as --device FILE"""
    path: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: that of temporary files)")] = None
    """directory on the disk to measure: the one that offload("nvme", path=DIR) is given"""
    seconds: float = 5.0
    """about how long to measure"""
    json: Annotated[bool, FLAG] = False
    """print JSON, as in the file"""

    def run(self) -> int:
        with usage_errors():
            check_files(out=self.out)
            if not 0 < self.seconds < math.inf:
                raise UsageError(
                    "calibrate", f"--seconds {self.seconds:g} is not enough time to measure", fix="e.g. --seconds 5"
                )
            if self.path is not None and not self.path.is_dir():
                raise UsageError(
                    "calibrate",
                    f"--path {self.path}: the directory does not exist",
                    fix="name a directory of the disk that is to be measured",
                )
            if self.path is not None:
                check(self.path, SCRATCH)
        device, path = _measured(self.seconds, self.out, self.path)
        if self.json:
            print(device.to_json())
        else:
            printing.print_device(device)
        print(f"written to {path}", file=sys.stderr)
        return 0


@dataclass(frozen=True)
class Check:
    """Compares a few steps with and without the step's transforms, and finds where a difference begins. Or proves
    that packed documents are isolated.
    """

    target: Annotated[Positional[str], TARGET]
    """returns (step, params, batch)"""
    mesh: Annotated[
        tuple[str, ...], arg(metavar="AXIS=SIZE ...", help_behavior_hint="(default: all processes along data)")
    ] = ()
    """axes and sizes, outermost first. local: the processes of a host; -1: all remaining processes"""
    steps: int = 3
    """number of steps to run"""
    backend: Literal["inductor", "eager"] = "eager"
    """inductor also checks the compiled code"""
    isolation: Annotated[bool, FLAG] = False
    """instead, prove that no packed document influences another one, on a simulated mesh (default: one device)"""
    json: Annotated[bool, FLAG] = False
    """print JSON"""

    def run(self) -> int:
        if self.isolation:
            return self._isolation()
        with usage_errors():
            axes: dict[str, Any] = axes_of(self.mesh, processes=True) if self.mesh else {}
            mesh = make_mesh(**axes)
            if self.steps < 1:
                raise UsageError("check", f"--steps {self.steps} compares nothing", fix="e.g. --steps 3")
        try:
            step, params, batch = load(self.target)
            if not isinstance(step, Step):
                raise UsageError(
                    "check", f"{self.target} returns an evaluation", fix="name a function that returns a training step"
                )
            # Only ranks with different samples draw different values; the others must have the same batch.
            part = mesh.index(zero_of(step, mesh).batch_axes)
            params, batch, num_drawn = with_values(params, batch, part)
            far = (
                shown("fzero.check", lambda: f"{self.steps} steps of both, tensor by tensor")
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
                print(
                    f"{num_drawn} leaves of {self.target} have no values: they are initialized at random",
                    file=sys.stderr,
                )
            if self.json:
                print(found.to_json())
            else:
                printing.print_report(found)
        return 0 if found.equivalent else 1

    def _isolation(self) -> int:
        with usage_errors():
            axes: dict[str, Any] = axes_of(self.mesh) if self.mesh else {"data": 1}
            mesh = AbstractMesh(**axes)
        step, params, batch = load(self.target)
        params, batch, _ = with_values(params, batch, 0)
        with users_code(self.target):
            largest = check_isolation(step, params, batch, mesh)
        text = f"no document influences another one (largest change {largest:.1e})"
        print(json_.dumps({"isolated": True, "largest_change": largest}) if self.json else text)
        return 0


def _measured(seconds: float, out: Path | None, directory: Path | None) -> tuple[Device, Path]:
    """Returns the rates of this machine, and the file that contains them."""
    console = Console(stderr=True)
    with console.status("measuring") if console.is_terminal else contextlib.nullcontext() as status:

        def progress(what: str) -> None:
            if status is None:
                print(f"measuring: {what}", file=sys.stderr, flush=True)
            else:
                status.update(f"measuring: {what}")

        device = calibrate(seconds=seconds, progress=progress, path=out, directory=directory)
    return device, out or calibration_path(device.machine["device_type"])
