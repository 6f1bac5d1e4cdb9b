"""Caches the programs that one recorded program becomes under different options, and shares work among them. All passes
(fzero/compiler/passes.py) are run through this file.

A search within a memory budget makes many programs (fzero/compiler/search.py); only the selected one is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fzero.compiler.budget_report import Budget
from fzero.compiler.options import Options
from fzero.compiler.pass_options import PassContext, PassInput, update_placement
from fzero.compiler.passes import FIRST, Pass, check_after, passes_of
from fzero.compiler.search import ENDS
from fzero.errors import FzeroValueError, VerifyError
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh
from fzero.step import Step
from fzero.trace.graph_capture import without_gc
from fzero.transforms import offload, remat, speculate_pass
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.pipeline_pass import num_stages
from fzero.transforms.transform import find

RECENT = 4
"""The number of options for which the programs of the last passes are cached: a search selects one of the last it has
tried."""
Stage = tuple[Pass, Program]
"""A pass that ran, and the program that it returned."""


class PassCache:
    """The finished program for each combination of options.

    Attributes:
        recorded: the program from which all are made.
        context: what its step requires of the passes.
        passes: the passes of the step, in order.

    Args:
        recorded: the traced program.
        context: what its step requires of the passes.
        like: the variants of a program with the same ops whose state is stored on other tiers. Results that are the
            same for both are computed once.
    """

    def __init__(self, recorded: Program, context: PassContext, like: PassCache | None = None):
        self.recorded, self.context = recorded, context
        self.passes = passes_of(recorded.transforms, context.skip)
        numbers = {x.name: i for i, x in enumerate(self.passes)}
        # Passes before `gradients` return the same for the same ops, wherever state is stored; many options share the
        # result of `tiers`.
        self._at_base, self._at_gradients, self._at_order = numbers["remat"], numbers["gradients"], numbers["tiers"] + 1
        self._leaves = {**recorded.leaves, **{leaf.path: leaf for leaf in context.copies.values()}}
        # By pass, ops and option: the program before the pass (which keeps the ops alive), the one after, and the
        # variants whose state it has.
        self._shared: dict[Any, tuple[Program, Program, PassCache]] = {} if like is None else like._shared
        self._own: dict[Any, tuple[Program, Program]] = {}  # the same, with the state of these variants
        self._finished: dict[Any, Program] = {}
        self._recent: dict[Any, list[Stage]] = {}  # the last stages of the programs that were finished last
        self._idle = {*context.skip}  # passes to skip that had nothing to do so far

    def starts(self, least: Options, budget: Budget | None) -> list[list[Options]]:
        """Returns the options with which a search begins.

        These are the options of least memory, those with speculative updates, and each of these with other gradients
        held on the host. A second list contains options that take less memory, for a budget into which none of
        these fits.
        """
        if budget is None:
            return [[least]]
        tiers = speculate_pass.useful_tiers(self.before("speculate", least))
        # Old values in host memory are possible only with a host budget.
        tiers = [x for x in tiers if budget.host is not None or "host" not in x]
        starts = [least, *(replace(least, speculative=x) for x in tiers)]
        if budget.nbytes is None:
            return [starts]
        all_ = [replace(options, grads=grads) for options in starts for grads in self._grads(least)]
        narrow = [self.narrowed(options) for options in all_]
        return [all_] if narrow == all_ else [all_, narrow]

    def narrowed(self, least: Options) -> Options:
        """Returns the options with as few values in flight as possible, which take less memory than those of least
        memory and are slower; the same options if nothing is gathered or reduced."""
        return least.narrow() if self.context.zero.batch_axes else least

    def _grads(self, least: Options) -> list[str]:
        """Returns the settings for which gradients are held on the host, equal outcomes once. The last one takes the
        least device memory."""
        made, found = self._made(least, self._at_gradients + 1), dict[Any, str]()
        for grads in offload.GRADS:
            ways = (replace(least, host_share=share, grads=grads) for share in ENDS)
            waiting = tuple(update_placement(PassInput(made, self.context, way)).waiting for way in ways)
            if waiting not in found or grads == "update":
                found[waiting] = grads
        return list(found.values())

    def base(self) -> Program:
        """Returns the base program. It is verified, and so is every program that all options share."""
        made = {FIRST: self.recorded}
        self._check_each(self._through(made, Options(), 0, self._at_base))
        return made["fuse"]

    def before(self, name: str, options: Options) -> Program:
        """Returns the program that a pass would be given with these options."""
        at = next(i for i, passed in enumerate(self.passes) if passed.name == name)
        return next(reversed(self._made(options, at).values()))

    def __call__(self, options: Options) -> Program:
        """Returns the program with these options, not verified. Options that lead to the same program return the same
        object."""
        key = self._key(self._made(options, self._at_order), options)
        if key not in self._finished:
            *_, (_, self._finished[key]) = self.stages(options)
        return self._finished[key]

    def all_verified(self, options: Options) -> tuple[Program, ...]:
        """Returns the programs of all stages of a pipeline, or the one of a step without a pipeline, verified."""
        return tuple(self.verified(replace(options, stage=n)) for n in range(num_stages(self.recorded)))

    def verified(self, options: Options) -> Program:
        """Returns the finished program with these options, verified.

        Raises:
            FzeroValueError: a pass to skip has nothing to do.
            VerifyError: naming the first pass after which the program violates a rule.
        """
        with without_gc():
            program = self(options)
            try:
                check_after(self.passes, len(self.passes) - 1, program)
            except VerifyError:
                self._check_each(self.stages(options))
                raise
        if self._idle:
            ran = ", ".join(passed.name for passed, _ in self.stages(options))
            problems = [f"{name}: has nothing to do for this step" for name in sorted(self._idle)]
            raise FzeroValueError("lower", "passes cannot be skipped", problems, f"these run: {ran}")
        return program

    def stages(self, options: Options) -> Iterator[Stage]:
        """Yields the passes that run with these options, each with the program that it returns."""
        made = {FIRST: self.recorded}
        yield from self._through(made, options, 0, self._at_order)
        key = self._key(made, options)
        if key in self._recent:
            yield from self._recent[key]
            return
        last = list[Stage]()
        for stage in self._through(made, options, self._at_order, len(self.passes)):
            last.append(stage)
            yield stage
        self._recent[key] = last
        if len(self._recent) > RECENT * num_stages(self.recorded):
            del self._recent[next(iter(self._recent))]

    def _key(self, made: dict[str, Program], options: Options) -> Any:
        """Returns a key for the ops before the scheduling passes, and the options of these passes."""
        ops = next(reversed(made.values())).instructions
        at = PassInput(made, self.context, options)
        return id(ops), *(x.options(at) for x in self.passes[self._at_order :])

    def _made(self, options: Options, end: int) -> dict[str, Program]:
        made = {FIRST: self.recorded}
        for _ in self._through(made, options, 0, end):
            pass
        return made

    def _through(self, made: dict[str, Program], options: Options, begin: int, end: int) -> Iterator[Stage]:
        """Yields the passes with these indices that run, each with the program that it returns. `made` is extended by
        one program for each pass."""
        for number, passed in enumerate(self.passes[begin:end], begin):
            program, chosen = next(reversed(made.values())), passed.options(PassInput(made, self.context, options))
            if chosen is not None:
                if passed.name in self.context.skip:
                    self._idle.discard(passed.name)
                else:
                    try:
                        program = self._rewritten(number, program, chosen)
                    except Exception:
                        # An earlier program may violate the rules, which is then the error.
                        for at, earlier in enumerate(made.values(), -1):
                            check_after(self.passes, at, earlier)
                        raise
                    yield passed, program
            made[passed.name] = program

    def _rewritten(self, number: int, program: Program, options: Any) -> Program:
        """Returns the program after one pass, from the caches if possible. Early passes are shared with the caches of
        programs whose state is stored on other tiers, so the tensors of the state are replaced by this program's."""
        rewrite = lambda: self.passes[number](program, options)  # noqa: E731
        if number >= self._at_order:
            return rewrite()
        key = number, id(program.instructions), options
        if number < self._at_gradients:
            if key not in self._shared:
                self._shared[key] = program, rewrite(), self
            _, found, owner = self._shared[key]
            if owner is self:
                return found
            rewrite = lambda: replace(  # noqa: E731
                found,
                leaves={name: self._leaves.get(name, leaf) for name, leaf in found.leaves.items()},
                transforms=self.recorded.transforms,
            )
        if key not in self._own:
            self._own[key] = program, rewrite()
        return self._own[key][1]

    def _check_each(self, stages: Iterable[Stage]) -> None:
        """Checks the recorded program and those of these stages, each before the next pass runs."""
        before = self.recorded
        check_after(self.passes, -1, before)
        for passed, program in stages:
            check_after(self.passes, self.passes.index(passed), program, changed=program is not before)
            before = program


def initial_options(step: Step, mesh: AbstractMesh, limited: bool) -> Options:
    """Returns the options with the least memory.

    `limited`: there is a memory budget. Without one, on devices where each op is a kernel launch, it returns options
    with few launches instead.
    """
    policy = (find(step.transforms, remat.Remat) or remat.Remat()).policy
    once = find(step.transforms, Hierarchical)
    secondary_shard = 0.0 if once is None else once.least if limited else once.most
    options = Options(0.0 if policy == "auto" and limited else policy, secondary_shard=secondary_shard)
    return options if limited or mesh.device_type == "cpu" else few_launches(options)


def few_launches(options: Options) -> Options:
    """Returns options with fewer kernel launches over micro-batches, which take additional memory for shards in the
    compute dtype."""
    return replace(options, cast_once=True)
