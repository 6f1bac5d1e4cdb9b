"""Watches the values that the functions of a step read besides their arguments: a program contains their values at
trace time."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakSet

from fzero.comm import control_group
from fzero.errors import FzeroValueError
from fzero.ir.printer import name_of
from fzero.mesh import Mesh
from fzero.runtime.program_cache import CachedProgram
from fzero.step import EvalStep, Step
from fzero.trace.guards.captured_settings import Settings, changes, settings

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
        self._programs = WeakSet[CachedProgram]()

    def now(self) -> Settings:
        """Returns the values that the functions would read now."""
        start = perf_counter()
        found = settings(*self._functions(), strict=False)
        self._looking = perf_counter() - start
        return found

    def watched(self, program: CachedProgram) -> CachedProgram:
        """Returns a new program, whose settings `noted_again` renews from now on."""
        self._programs.add(program)
        return program

    def noted_again(self) -> Callable[[], None]:
        """To be called before the step is traced. The trace itself may change a value that is read, such as a list that
        grows: the function that is returned, to be called afterwards, notes the new values for the programs that
        have been made, for which this is not a change.
        """
        before = self.now()

        def note() -> None:
            now = self.now()
            for program in self._programs:
                program.settings = now if program.settings == before else program.settings

        return note

    def look(self, program: CachedProgram, mesh: Mesh) -> None:
        """Compares the values with those at trace time, at some calls of a program. At its second call, the step is
        also traced again (retrace.py).

        Raises:
            FzeroValueError: on every rank, if a value has changed on any rank.
        """
        calls, traced = program.calls, program.settings
        since, self._called = perf_counter() - self._called, perf_counter()
        # This comparison depends on this rank's clock, so ranks make it at different calls. Only what follows is a
        # collective: at calls that all ranks count alike, or after a change, which is an error in any case.
        changed = self.changed(traced) if calls > 1 and _SHARE * since >= self._looking else []
        if 1 < calls <= LOOKED_AT_EVERY or calls % LOOKED_AT_EVERY == 0 or changed:
            named = f"{name_of(program.lowered.program)} {program.lowered.program.name}"
            about = f"reads a different value than before: {changed[0]}" if changed else f"runs {named}"
            # every rank raises, even if a value changed on only one rank
            control_group.run_on_all_ranks(mesh.control, self._owner, lambda: self._check(program), about=about)

    def changed(self, traced: Settings) -> list[str]:
        """Returns the first value that differs from the one at trace time, with both."""
        return changes(traced, self.now())

    def _check(self, program: CachedProgram) -> None:
        """Raises if a value differs from the one at trace time."""
        now = self.now()
        for x in now.standing:
            x.check()
        if changed := changes(program.settings, now):
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
        if program.calls == 2:
            note = self.noted_again()
            program.record.check(self._owner, list)
            note()

    def _functions(self) -> tuple[Any, ...]:
        given = (self._step.fn,) if isinstance(self._step, EvalStep) else (self._step.loss_fn, self._step.optimizer)
        model = getattr(given[0], "model", None)  # made by fz.functionalize
        return given if model is None else (*given, *model.classes)
