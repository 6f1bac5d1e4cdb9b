"""Watches the values that the functions of a step read besides their arguments: a program contains their values at
trace time. If one has changed, a new trace decides whether that makes a difference (retrace.py)."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakSet

from fzero.comm import control_group
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
        """Compares the values with those at trace time, at some calls of a program. The step is traced again if one has
        changed, and at the program's second call. After a change that makes no difference, values are compared again
        when the program has been called twice as often, because a trace may take longer than a step.

        Raises:
            FzeroValueError: on every rank, if an operation is different on any rank.
        """
        calls = program.calls
        since, self._called = perf_counter() - self._called, perf_counter()
        if 1 < calls <= LOOKED_AT_EVERY or calls % LOOKED_AT_EVERY == 0:
            about = f"runs {name_of(program.lowered.program)} {program.lowered.program.name}"
            # every rank raises, even if a value changed on only one rank
            control_group.run_on_all_ranks(mesh.control, self._owner, lambda: self._check(program), about=about)
        elif calls > 1 and _SHARE * since >= self._looking:
            # Ranks do this at different calls, because it depends on their clocks. So only an error is exchanged.
            try:
                self._check(program)
            except Exception as error:

                def act(error: Exception = error) -> None:
                    raise error

                about = "computes something different than when it was traced"
                control_group.run_on_all_ranks(mesh.control, self._owner, act, about=about)

    def changed(self, traced: Settings) -> list[str]:
        """Returns the first value that differs from the one at trace time, with both."""
        return changes(traced, self.now())

    def _check(self, program: CachedProgram) -> None:
        """Raises if a value differs from the one at trace time, and the step computes something different with it."""
        if 2 < program.calls < program.compared_from:
            return
        now = self.now()
        for x in now.standing:
            x.check()
        changed = changes(program.settings, now)
        if changed or program.calls == 2:
            note = self.noted_again()
            program.record.check(self._owner, lambda: changed)
            note()
        if changed:
            program.settings, program.compared_from = self.now(), 2 * program.calls

    def _functions(self) -> tuple[Any, ...]:
        given = (self._step.fn,) if isinstance(self._step, EvalStep) else (self._step.loss_fn, self._step.optimizer)
        model = getattr(given[0], "model", None)  # made by fz.functionalize
        return given if model is None else (*given, *model.classes)
