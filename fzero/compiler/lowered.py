"""The result of lowering a step: its programs, its plan, and the tree structures of its arguments and results."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fzero import tree
from fzero._utils.deprecation import attribute_alias
from fzero.compiler.budget_report import Budget, decided
from fzero.compiler.options import Options
from fzero.compiler.passes import passes_of
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.ir.printer import show
from fzero.ir.program import Program
from fzero.plan.device_lookup import Device
from fzero.plan.plan import Plan, PlanDecision, plan
from fzero.trace.graph_capture import without_gc
from fzero.transforms.precision import Watched
from fzero.transforms.transform import current_pass_name


@dataclass(frozen=True)
class Lowered:
    """A step lowered for a mesh: its programs, and the structures of its arguments and results.

    `programs` contains one program per stage: every rank lowers all of them, all ranks compare all of them, and each
    rank runs its own, `program`. Without `pipeline` there is one stage, with all ranks; on an abstract mesh, `program`
    is that of the first stage.

    Attributes:
        programs: the program of each pipeline stage; one program without `pipeline`.
        params, opt_state, batch: the layouts and the pytree structures of the arguments; `opt_state` is None for an
            evaluation.
        structure: the pytree structure of the metrics, or of the results of an evaluation.
        budget: the budgets that the program was chosen for; without budgets, only the rates of the device.
        options: the options of the passes that were chosen for the budget.
        device, backend: what `plan` is computed for.
        chosen: the decisions that were made before lowering, such as those of `offload("auto")`.
        raises: the source lines of the conditions under which a training step raises.
        stage: the pipeline stage of this rank.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(fz.shard_params(step), fz.AbstractMesh(data=8), params, batch, device="h100")
        >>> fz.fits(lowered.plan, "80GB"), len(lowered.program.instructions) > 10
        (True, True)
    """

    programs: tuple[Program, ...]
    params: Inputs
    opt_state: Inputs | None
    batch: Inputs
    structure: tree.TreeSpec
    budget: Budget | None = None
    options: Options = field(default_factory=Options)
    device: Device | None = None
    backend: str = "inductor"
    chosen: tuple[PlanDecision, ...] = ()
    watched: Watched | None = None  # the blocks that `mixed_precision(watch=True)` watches
    raises: tuple[str, ...] = ()
    stage: int = 0
    # the traced program before any pass; a compiled step keeps only its text
    recorded: Program | None = field(default=None, repr=False, compare=False)
    # the intermediate programs, by the pass that made each
    stages: Callable[[], Mapping[str, Program]] = field(default=dict, repr=False, compare=False)

    choice = attribute_alias("Lowered", "choice", "options")

    def __str__(self) -> str:
        return str(self.program)

    def _repr_html_(self) -> str:
        return self.program._repr_html_()

    @property
    def program(self) -> Program:
        """The program that this rank runs."""
        return self.programs[self.stage]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks in `metrics["precision"]`, in order."""
        return () if self.watched is None else self.watched.names

    def after(self, name: str) -> Program:
        """Returns the program after a pass: one of fzero/compiler/passes.py, or a transform's own rewrite.

        Raises:
            FzeroValueError: there is no such pass, or it has nothing to do here.
        """
        return self._around(name)[1]

    def diff(self, name: str, *, fold: bool = True, full: bool = False) -> str:
        """Returns the changes that a pass made to the printed program, as a unified diff; "" if it made none. `fold`
        and `full`: as of `fz.show`.

        Raises:
            FzeroValueError: as for `after`.
        """
        before, after = (
            show(program, fold=fold, full=full).splitlines(keepends=True) for program in self._around(name)
        )
        return "".join(difflib.unified_diff(before, after, f"before {name}", f"after {name}"))

    def _around(self, name: str) -> tuple[Program, Program]:
        """Returns the programs before a pass and after it; for the recorded program, which has none before it, twice
        the same."""
        if not isinstance(name, str):
            raise FzeroTypeError("lower", f"a pass is named by a str, not {type(name).__name__}", fix='e.g. "overlap"')
        stages, name = self.stages(), current_pass_name(name, self.program.transforms, 5)
        if name not in stages:
            there = name in (x.name for x in passes_of(self.program.transforms))
            what = (
                f"the pass {name!r} does not run for this step: it has nothing to do" if there else f"no pass {name!r}"
            )
            raise FzeroValueError("lower", what, fix=f"one of {', '.join(stages)}")
        programs, at = [*stages.values()], [*stages].index(name)
        return programs[max(at - 1, 0)], programs[at]

    @functools.cached_property
    def plan(self) -> Plan:
        """The cost of a step on each rank: memory, bytes on every channel, and time; for the device and backend that it
        was lowered for."""
        return self.plan_on(self.device, self.backend)

    def plan_on(self, device: Device | str | None = None, backend: str = "inductor") -> Plan:
        """Like `plan`, for the same program with other rates: those of a `Device`, of a known one by name ("h100", …),
        or of a calibration file."""
        decisions = (*self.chosen, *decided(self.program, self.options, self.budget))
        with without_gc():
            return plan(self.program, device, backend=backend, decisions=decisions, stages=self.programs)
