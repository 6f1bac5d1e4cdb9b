"""Runs `fzero plan`: the predicted cost of a step on one mesh, or on several."""

from __future__ import annotations

import fnmatch
import json as json_
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from tyro.conf import arg

from fzero import tree
from fzero._utils.progress import shown
from fzero.cli import printing
from fzero.cli.flags import FILE, FLAG, axes_of, check_files, usage_errors
from fzero.cli.hf_script import Script, as_flags, planned
from fzero.cli.plan_page import write_page
from fzero.cli.plan_summary import Answer, samples_of
from fzero.cli.step_command import LoweredTarget, StepCommand, unknown_keys_named
from fzero.cli.target import UsageError, load, users_code
from fzero.compiler.abstract_values import abstract
from fzero.compiler.auto_mesh import choose_mesh
from fzero.compiler.combined_transforms import zero_of
from fzero.errors import BudgetError, FzeroValueError
from fzero.mesh import AbstractMesh
from fzero.plan.calibration import calibration_path
from fzero.plan.device_lookup import get_devices
from fzero.plan.page.html_page import check_charts
from fzero.plan.picture import check_matplotlib
from fzero.plan.process_memory import parts
from fzero.step import Step


@dataclass(frozen=True)
class PlanCommand(StepCommand):
    """Predicts whether a step fits and how fast it is. Nothing is run or allocated."""

    details: Annotated[bool, FLAG] = False
    """also print tables: memory by role, transfers, the longest waits, what was chosen and why"""
    code: Annotated[Path | None, FILE] = None
    """for --hf: write the training script to this file instead of a file in the cache folder"""
    trace: Annotated[Path | None, FILE] = None
    """write the timeline, for ui.perfetto.dev or chrome://tracing"""
    picture: Annotated[Path | None, FILE] = None
    """draw the memory over the ops of the step, as .png or .svg"""
    html: Annotated[Path | None, FILE] = None
    """write the plan as one page that opens in any browser, offline; also plans alternatives"""
    html_seconds: Annotated[float, arg(metavar="SECONDS")] = 60.0
    """for --html: the time after which no further alternative is planned; 0 plans none"""
    experts: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="(default: none)")] = ()
    """when comparing meshes: the parameters of experts, such as 'layers.*.experts.*'; adds an axis for them"""

    def run(self) -> int:
        with usage_errors():
            check_files(trace=self.trace, picture=self.picture, html=self.html, code=self.code)
            if not self.html_seconds >= 0:
                fix = "e.g. --html-seconds 60; inf plans all of them"
                raise UsageError("plan", f"--html-seconds must be at least 0, not {self.html_seconds:g}", fix=fix)
            if self.html is not None:
                check_charts()
            if self.picture is not None:
                check_matplotlib()
            if self.code is not None and self.model.hf is None:
                raise UsageError("plan", "--code applies only to --hf", fix="the code of a target is its own file")
        if self.compares:
            return self._compare()
        if self.experts:
            fix = "give --mesh auto, or fz.expert_parallel in the target's code"
            raise UsageError("mesh", "--experts is about --mesh auto", fix=fix)
        try:
            found = self.lowered()
        except BudgetError as error:
            text = str(error)
            if self.model.hf:
                name = self.device or (self.devices or "").partition("x")[2] or "NAME"
                text = as_flags(text, self.model, name, self.budget_flags)
            if self.html is not None:
                self._write_page_over_budget(self.html, text)
            if self.json:
                print(json_.dumps({"budget": {"bytes": self.budget_bytes, "fits": False, "error": text}}, indent=1))
            raise BudgetError(text) from None
        answer = self._answer(found)
        lowered, plan = found.lowered, found.lowered.plan
        if self.html is not None:
            write_page(self, self.html, found, answer)
        if self.trace is not None:
            plan.save_trace(self.trace)
        if self.picture is not None:
            plan.save_picture(self.picture, self.budget_bytes)
        if self.json:
            # With a budget, a step that does not fit has raised an error already.
            left = plan.device.memory_bytes - plan.process_bytes
            memory = left if answer.known and self.budget_bytes is None and found.script is None else None
            data = json_.loads(plan.to_json()) | printing.plan_data(lowered, plan, memory)
            print(json_.dumps(data | (answer.data() if found.script is not None else {}), indent=1))
        else:
            printing.print_answer(answer, self.details)
        return 0 if answer.fits is not False else 1

    def _answer(self, found: LoweredTarget) -> Answer:
        """Returns the answer about a lowered target; writes the script of a transformers model."""
        lowered, plan, script = found.lowered, found.lowered.plan, found.script
        num_ranks = lowered.program.mesh.size
        if script is None:
            process, (samples, unit) = plan.process, samples_of(found.batch)
        else:
            process = parts(plan.device, plan.peak_bytes, self.interpreter, num_ranks > 1)
            samples, unit = script.samples, script.unit
        return Answer(
            lowered,
            plan,
            process,
            samples=samples,
            unit=unit,
            batch_ranks=lowered.program.mesh.axis_size(zero_of(found.step, lowered.program.mesh).batch_axes),
            known=self.device is not None or self.devices is not None or bool(plan.device.machine),
            includes_process=self.counts_process,
            of=self.model if script is not None else None,
            script=script,
            code="" if script is None or self.json else self._written(script),
            short=found.short if self.budget is None else "",
        )

    def _written(self, script: Script) -> str:
        """Writes a training script. Returns its path, and the command that starts it."""
        path = self.code
        if path is None:
            model = Path(script.path)
            model = model.parent.resolve() if model.name == "config.json" else model
            name = "_".join((model.stem, self.devices or "_".join(self.mesh[0])))
            path = calibration_path().parent / "plans" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.py"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{script}\n")
        except OSError as error:
            if self.code is not None:
                raise
            return f"not written: {error}; give a file: --code train.py"
        start = script.mesh.partition("\n")[0].removeprefix("# ").replace("train.py", path.name)
        return f"{_from_home(path)} (the script that was planned; {start})"

    def _write_page_over_budget(self, path: Path, error: str) -> None:
        """Writes the page of a step that does not fit its budgets: the step is planned without them."""
        try:
            found = self.lowered(limited=False)
        except FzeroValueError:  # offload("auto") cannot be planned without a budget
            print("no page: this step cannot be planned without a budget", file=sys.stderr)
        else:
            write_page(self, path, found, self._answer(found), error)

    def _compare(self) -> int:
        """Plans several meshes, with the parallel transforms for each. Returns the exit code: 1 if none fits."""
        if self.has_auto and self.mesh != (("auto",),):
            what = "--mesh auto already compares all meshes, so no other mesh can be given with it"
            fix = "give --mesh auto alone, or only meshes with their sizes: --mesh data=8 --mesh data=4 model=2"
            raise UsageError("mesh", what, fix=fix)
        problems = self._step_problems()
        problems += [] if self.devices else ["--devices NUMBERxNAME is missing, such as 64xh100"]
        given = {"device": self.device, "host-budget": self.host_budget, "disk-budget": self.disk_budget}
        given |= {"trace": self.trace, "picture": self.picture, "html": self.html, "code": self.code}
        problems += [f"--{name} is for one mesh" for name, value in given.items() if value is not None]
        if problems or self.devices is None:
            fix = "e.g. fzero plan FILE.py:FUNCTION --mesh auto --devices 64xh100"
            raise UsageError("mesh", "meshes are compared for a step and a number of devices", problems, fix)
        with usage_errors():
            number, device = get_devices(self.devices, "cuda" if torch.cuda.is_available() else "cpu")
            budget = self.budget_bytes
            meshes = [] if self.has_auto else [AbstractMesh(**axes_of(mesh)) for mesh in self.mesh]
            for mesh in meshes:
                if mesh.size != number:
                    raise UsageError("mesh", f"--devices {self.devices}: --mesh {mesh} has another number of devices")
        unknown = list[str]()
        with unknown_keys_named(unknown), shown("fzero.plan", lambda: "planning several meshes"):
            made = None
            if self.target is not None:
                step, params, batch = load(self.target)
            else:
                of = self.model.of_all(number)
                with usage_errors():
                    from fzero.hf.transformers_import import library

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
            print(json_.dumps(printing.meshes_data(found) | ({} if made is None else {"model": made.model}), indent=1))
        else:
            print(found if made is None else f"{made.model}\n{found}")
        return 0 if found.found[0].plan is not None else 1


def _from_home(path: Path) -> str:
    """Returns a path as text, with ~ for the user's home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and path.is_absolute() else str(path)


def _named(patterns: Sequence[str], params: Any) -> Callable[[str, torch.Tensor], bool] | None:
    """Returns a predicate for the parameters with these dotted names; None without patterns."""
    names = tree.names(abstract(params) if callable(params) else params) if patterns else []
    if unknown := [f"{p}: no parameter has such a name" for p in patterns if not fnmatch.filter(names, p)]:
        raise UsageError("mesh", "--experts names parameters", unknown, f"they are {', '.join(names[:8])}, …")
    known = {name for p in patterns for name in fnmatch.filter(names, p)}
    return (lambda path, leaf: tree.dotted(path) in known) if patterns else None
