"""Makes the programs that a step can become: it is traced once, and each combination of its open options gives a
program."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fzero import tree
from fzero.compiler.base_program import lower_eval
from fzero.compiler.budget_report import Budget
from fzero.compiler.combined_transforms import precision_of, zero_of
from fzero.compiler.lowered import Lowered
from fzero.compiler.options import Options
from fzero.compiler.pass_cache import PassCache, initial_options
from fzero.compiler.pass_options import PassContext
from fzero.compiler.passes import FIRST
from fzero.compiler.state_slots import Slots, check_used
from fzero.compiler.traced_step import Traced, trace_step
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.ir.stage_verifier import meeting
from fzero.mesh import AbstractMesh, Mesh
from fzero.plan.inductor.temporaries import temporaries_on
from fzero.step import EvalStep, Step
from fzero.step.checks import check_arguments
from fzero.transforms.precision import Watched


@dataclass(frozen=True)
class CandidatePrograms:
    """The programs of a step on a mesh, by options.

    Attributes:
        pass_cache: the programs of one stage.
        starts: the options with which a search begins (`PassCache.starts`).
        params, opt_state, batch: the tables of tensors.
        structure: the tree structure of the outputs.
        budget: the budget for which options are chosen.
        axis: the axis of the stages of a pipeline.
        stages: their indices; and `here`, that of this rank.
        slots, watched, raises: further results of tracing a training step (`Traced`).
    """

    pass_cache: PassCache
    starts: list[list[Options]]
    params: Inputs
    opt_state: Inputs | None
    batch: Inputs
    structure: tree.TreeSpec
    budget: Budget | None
    axis: str | None
    stages: range
    here: int
    slots: Slots | None = None
    watched: Watched | None = None
    raises: tuple[str, ...] = ()

    def programs(self, options: Options) -> tuple[Program, ...]:
        """Returns the programs of all stages with these options, not verified."""
        return tuple(self.pass_cache(replace(options, stage=n)) for n in self.stages)

    def finished(self, options: Options, draft: bool) -> tuple[Program, ...]:
        """Returns the programs of all stages with these options; verified unless they are a `draft`."""
        return self.programs(options) if draft else self.pass_cache.all_verified(options)

    def lowered(self, options: Options, draft: bool) -> Lowered:
        """Returns the result of lowering with these options. `draft`: its programs are not verified."""
        programs = self.finished(options, draft)
        if self.slots is not None:
            check_used(programs[0], self.slots)
        return Lowered(
            # Only here are the programs of all stages known: checks that their sends and receives match.
            meeting(programs) if self.axis else programs,
            self.params,
            self.opt_state,
            self.batch,
            self.structure,
            self.budget,
            options,
            watched=self.watched,
            raises=self.raises,
            stage=self.here,
            recorded=self.pass_cache.recorded,
            stages=lambda: _stages(self.pass_cache, replace(options, stage=self.here)),
        )


def candidates(
    step: Step | EvalStep,
    mesh: AbstractMesh,
    params: Inputs,
    batch: Inputs,
    budget: Budget | None,
    traced: Traced | None,
    limited: bool,
    skip: frozenset[str],
) -> CandidatePrograms:
    """Traces a step, unless it has been `traced` already, and lists the options with which a search begins.

    `limited` means that the options with the least memory are requested even without a budget; other arguments are
    those of `lower_inputs`.
    """
    axis = zero_of(step, mesh).stages
    here = mesh.index(axis) if axis and isinstance(mesh, Mesh) else 0
    stages = range(mesh.axes[axis] if axis else 1)
    if isinstance(step, EvalStep):
        check_arguments(step.fn, batch.structure.num_children)
        recorded, structure, *_ = lower_eval(step.name, step.fn, params, batch, mesh, precision_of(step))
        pass_cache = PassCache(
            replace(recorded, transforms=step.transforms),
            PassContext(zero_of(step, mesh), skip=skip, temporaries=temporaries_on(mesh)),
        )
        # no options are open
        return CandidatePrograms(pass_cache, [[Options()]], params, None, batch, structure, budget, axis, stages, here)
    traced = traced or trace_step(step, mesh, params, batch, skip=skip)
    limited = limited or (budget is not None and budget.nbytes is not None)
    return CandidatePrograms(
        traced.pass_cache,
        traced.pass_cache.starts(initial_options(step, mesh, limited), budget),
        params,
        traced.opt_state,
        batch,
        traced.structure,
        budget,
        axis,
        stages,
        here,
        traced.slots,
        traced.watched,
        traced.raises,
    )


def _stages(pass_cache: PassCache, options: Options) -> dict[str, Program]:
    """Returns the recorded program, and the program after each pass that runs."""
    return {FIRST: pass_cache.recorded, **{passed.name: made for passed, made in pass_cache.stages(options)}}
