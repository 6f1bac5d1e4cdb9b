"""Watches the values that the functions of a step read besides their arguments: a program contains their values at
trace time."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from fzero.comm import control_group
from fzero.errors import FzeroValueError
from fzero.ir.printer import name_of
from fzero.ir.program import Program
from fzero.mesh import Mesh
from fzero.step import EvalStep, Step
from fzero.trace.guards.captured_settings import Settings, changes, counted, settings, timed

LOOKED_AT_EVERY = 16
"""Values that functions read besides their arguments are compared at the first calls, and then at every call whose
number is a multiple of this one. They are also compared if the comparison takes less than the fraction `_SHARE` of the
time since the last call."""
_SHARE = 0.002


class ReadValues:
    """The values that a step's functions read.

    Args:
        owner: the public call that errors name.
    """

    def __init__(self, step: Step | EvalStep, owner: str):
        self._step, self._owner = step, owner
        # the time of the last call of a program, and how long reading its settings takes
        self._called, self._looking = 0.0, 0.0

    def now(self) -> Settings:
        """Returns the values that the functions would read now."""
        start = perf_counter()
        found = settings(*self._functions(), strict=False)
        self._looking = perf_counter() - start
        return found

    def counted(self) -> dict[str, Any]:
        """Returns the values that a call of the functions may change (numbers, generators, iterators), by place."""
        return counted(*self._functions())

    def clocks(self) -> list[str]:
        """Returns the clocks that the functions may read."""
        return timed(*self._functions())

    def look(self, traced: Settings, calls: int, program: Program, mesh: Mesh) -> None:
        """Compares the values with those at trace time, at some calls of the program.

        Args:
            traced: the values when the program was traced.
            calls: the number of calls of the program, including this one.
            program: the program that runs, for the errors of other ranks.

        Raises:
            FzeroValueError: on every rank, if a value has changed on any rank.
        """
        since, self._called = perf_counter() - self._called, perf_counter()
        # This comparison depends on this rank's clock, so ranks make it at different calls. Only what follows is a
        # collective: at calls that all ranks count alike, or after a change, which is an error in any case.
        changed = changes(traced, self.now()) if calls > 1 and _SHARE * since >= self._looking else []
        if 1 < calls <= LOOKED_AT_EVERY or calls % LOOKED_AT_EVERY == 0 or changed:
            about = (
                f"reads a different value than before: {changed[0]}"
                if changed
                else f"runs {name_of(program)} {program.name}"
            )
            # every rank raises, even if a value changed on only one rank
            control_group.run_on_all_ranks(mesh.control, self._owner, lambda: self._check(traced), about=about)

    def _check(self, traced: Settings) -> None:
        """Raises if a value differs from the one at trace time."""
        now = self.now()
        for x in now.standing:
            x.check()
        if changed := changes(traced, now):
            fix = (
                "pass what changes from step to step in the batch, as a 0-dim tensor, or to the optimizer as a "
                "schedule of the step; "
                "compile the step again if it rarely changes"
            )
            raise FzeroValueError(
                self._owner,
                f"{self._step.name} reads a value that has changed since the step was traced",
                changed,
                fix,
            )

    def _functions(self) -> tuple[Any, ...]:
        given = (self._step.fn,) if isinstance(self._step, EvalStep) else (self._step.loss_fn, self._step.optimizer)
        model = getattr(given[0], "model", None)  # made by fz.functionalize
        return given if model is None else (*given, *model.classes)
