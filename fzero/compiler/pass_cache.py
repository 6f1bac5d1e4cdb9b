"""Keeps the programs that one recorded program becomes under the choices that a step leaves open, and shares work among
them: the one door to the passes (fzero/compiler/passes.py).

A memory budget looks at many programs (fzero/compiler/search.py); only the one that is taken is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fzero.compiler.budget_report import Budget
from fzero.compiler.options import Choice
from fzero.compiler.passes import FIRST, Asked, Pass, check_after, passes_of, sides
from fzero.compiler.search import ENDS
from fzero.errors import FzeroValueError, VerifyError
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh
from fzero.step import Step
from fzero.trace.graph_capture import without_gc
from fzero.transforms import offload_analysis, remat
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.pipeline_pass import num_stages
from fzero.transforms.transform import find

RECENT = 4
"""Choices whose programs of the last passes are kept: a search takes one of the last that it looks at."""
Stage = tuple[Pass, Program]
"""A pass that ran, and the program that it made."""


class Variants:
    """The finished program of each choice.

    Attributes:
        recorded: the program that all are made from.
        asked: the demands of its step on passes.
        passes: of the step, in order.

    Args:
        recorded: a program that was recorded.
        asked: the demands of its step on passes.
        like: variants of a program with the same lines whose leaves rest elsewhere. Programs that come to the same are
            made once for both.
    """

    def __init__(self, recorded: Program, asked: Asked, like: Variants | None = None):
        self.recorded, self.asked = recorded, asked
        self.passes = passes_of(recorded.transforms, asked.skip)
        numbers = {x.name: i for i, x in enumerate(self.passes)}
        # passes before `gradients` make the same of the same lines, wherever leaves rest; many choices share `tiers`
        self._at_base, self._at_cut, self._at_order = numbers["remat"], numbers["gradients"], numbers["tiers"] + 1
        self._leaves = {**recorded.leaves, **{leaf.path: leaf for leaf in asked.copies.values()}}
        # by pass, lines and option: the program before, which has the lines, the one after, and whose leaves that has
        self._shared: dict[Any, tuple[Program, Program, Variants]] = {} if like is None else like._shared
        self._own: dict[Any, tuple[Program, Program]] = {}  # likewise, with the leaves of these variants
        self._finished: dict[Any, Program] = {}
        self._recent: dict[Any, list[Stage]] = {}  # the last stages of the program finished last
        self._sound: dict[tuple[int, int], Program] = {}  # verified programs that are kept, by pass and identity
        self._idle = {*asked.skip}  # passes to skip that have had nothing to do

    def starts(self, least: Choice, budget: Budget | None) -> list[list[Choice]]:
        """The choices that a search begins with: the least one, those that passes add to it (`Pass.starts`), and each
        with other gradients that wait on the host. Further lists have choices for a budget that no other fits."""
        if budget is None:
            return [[least]]
        added = ((self.before(x.name, least), x.starts) for x in self.passes if x.starts is not None)
        starts = [least, *(choice for program, add in added for choice in add(least, program, budget))]
        if budget.nbytes is None:
            return [starts]
        *sooner, last = self._grads(least)
        found = [[replace(c, grads=where) for c in starts for where in grads] for grads in (sooner, [last]) if grads]
        narrow = [self.narrowed(c) for c in found[-1]]
        return found if narrow == found[-1] else [*found, narrow]

    def narrowed(self, least: Choice) -> Choice:
        """The choice with as little on the way at a time as can be, which takes less memory than the least one and is
        slower; the same one if nothing is gathered or reduced."""
        return least.narrow() if self.asked.zero.batch_axes else least

    def _grads(self, least: Choice) -> list[str]:
        """The gradients that may wait on the host, equal outcomes once: the last one takes least of the device's
        memory."""
        made, found = self._made(least, self._at_cut + 1), dict[Any, str]()
        for grads in offload_analysis.GRADS:
            ways = (replace(least, host_share=share, grads=grads) for share in ENDS)
            waiting = tuple(sides(made, self.asked, way).waiting for way in ways)
            if waiting not in found or grads == "update":
                found[waiting] = grads
        return list(found.values())

    def base(self) -> Program:
        """The base program. It is verified, and so is every program that all choices share."""
        made = {FIRST: self.recorded}
        for _ in self._verified(self._through(made, Choice(), 0, self._at_base)):
            pass
        return made["fuse"]

    def before(self, name: str, choice: Choice) -> Program:
        """The program of a choice that a pass would be given."""
        at = next(i for i, passed in enumerate(self.passes) if passed.name == name)
        return next(reversed(self._made(choice, at).values()))

    def __call__(self, choice: Choice) -> Program:
        """The program of a choice, not verified: the same object for choices that come to the same."""
        key = self._key(self._made(choice, self._at_order), choice)
        if key not in self._finished:
            *_, (_, self._finished[key]) = self.stages(choice)
        return self._finished[key]

    def all_verified(self, choice: Choice) -> tuple[Program, ...]:
        """The programs of all stages of a pipeline, or the one of a step without. Those of the first and of the last
        stage are verified after every pass. The others have the same passes behind them: they are verified when they
        are finished, and after every pass if that finds a violation."""
        num = num_stages(self.recorded)
        return tuple(self.verified(replace(choice, stage=n), each=n in (0, num - 1)) for n in range(num))

    def verified(self, choice: Choice, each: bool = True) -> Program:
        """The program of a choice, verified after every pass; without `each`, when it is finished.

        Raises:
            FzeroValueError: a pass to skip has nothing to do.
        """
        with without_gc():
            if each:
                *_, program = self._verified(self.stages(choice))
            else:
                program = self(choice)
                try:
                    check_after(self.passes, len(self.passes) - 1, program)
                except VerifyError:
                    return self.verified(choice)
        if self._idle:
            ran = ", ".join(passed.name for passed, _ in self.stages(choice))
            problems = [f"{name}: has nothing to do here" for name in sorted(self._idle)]
            raise FzeroValueError("lower", "passes cannot be skipped", problems, f"these run: {ran}")
        return program

    def stages(self, choice: Choice) -> Iterator[Stage]:
        """The passes that run under a choice, each with the program that it makes."""
        made = {FIRST: self.recorded}
        yield from self._through(made, choice, 0, self._at_order)
        key = self._key(made, choice)
        if key in self._recent:
            yield from self._recent[key]
            return
        last = list[Stage]()
        for stage in self._through(made, choice, self._at_order, len(self.passes)):
            last.append(stage)
            yield stage
        self._recent[key] = last
        if len(self._recent) > RECENT * num_stages(self.recorded):
            del self._recent[next(iter(self._recent))]

    def _key(self, made: dict[str, Program], choice: Choice) -> Any:
        """The lines of a choice before the passes that order them, and the options of these passes."""
        lines = next(reversed(made.values())).lines
        return id(lines), *(x.option(made, self.asked, choice) for x in self.passes[self._at_order :])

    def _made(self, choice: Choice, end: int) -> dict[str, Program]:
        made = {FIRST: self.recorded}
        for _ in self._through(made, choice, 0, end):
            pass
        return made

    def _through(self, made: dict[str, Program], choice: Choice, begin: int, end: int) -> Iterator[Stage]:
        """The passes with these numbers that run, each with the program that it makes. `made` gets one for each of
        them."""
        for number, passed in enumerate(self.passes[begin:end], begin):
            program, option = next(reversed(made.values())), passed.option(made, self.asked, choice)
            if passed.wanted(program, self.asked, option):
                if passed.name in self.asked.skip:
                    self._idle.discard(passed.name)
                else:
                    try:
                        program = self._rewritten(number, program, option)
                    except (LookupError, AttributeError, AssertionError):
                        for at, earlier in enumerate(made.values(), -1):  # one may break the rules of programs
                            check_after(self.passes, at, earlier)
                        raise
                    yield passed, program
            made[passed.name] = program

    def _rewritten(self, number: int, program: Program, option: Any) -> Program:
        rewrite = lambda: self.passes[number].rewrite(program, self.asked, option)  # noqa: E731
        if number >= self._at_order:
            return rewrite()
        key = number, id(program.lines), option
        if number < self._at_cut:
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

    def _verified(self, stages: Iterable[Stage]) -> Iterator[Program]:
        """The recorded program and those of these stages, each verified."""
        before = self.recorded
        self._check_after(-1, before)
        yield before
        for passed, program in stages:
            self._check_after(self.passes.index(passed), program, changed=program is not before)
            yield program
            before = program

    def _check_after(self, number: int, program: Program, changed: bool = True) -> None:
        """Checks the program that a pass made: one that several choices or stages share, once."""
        if (number, id(program)) not in self._sound:
            check_after(self.passes, number, program, changed)
            if number < self._at_order:
                self._sound[number, id(program)] = program


def first_choice(step: Step, mesh: AbstractMesh, limited: bool) -> Choice:
    """The choice that takes least memory. `limited`: there is a budget of it; without one, where a line is a launch,
    a choice with few of them instead."""
    policy = (find(step.transforms, remat.Remat) or remat.Remat()).policy
    once = find(step.transforms, Hierarchical)
    stay = 0.0 if once is None else once.least if limited else once.most
    choice = Choice(0.0 if policy == "auto" and limited else policy, stay=stay)
    return choice if limited or mesh.device_type == "cpu" else few_launches(choice)


def few_launches(choice: Choice) -> Choice:
    """The choice with fewer launches over micro-batches, which takes the memory of shards in the dtype of compute, and
    of one block's gradients."""
    return replace(choice, cast_once=True, order=replace(choice.order, joined_sums=2))
