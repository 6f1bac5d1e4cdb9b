"""Runs the first steps of a program eagerly while its subgraphs are compiled in the background (`warmup="eager"`).

[Note: warm-up] A subgraph that runs eagerly rounds differently from its compiled version, and replicas must not differ
between ranks. Therefore all ranks use the compiled version of a subgraph from the same step on: before each step they
tell each other which subgraphs they cannot call yet, and each rank starts to use those that no rank is missing. When
none is missing anywhere, the exchange ends, and steps cost what they cost without a warm-up. A failed compilation is
raised by the same exchange, so all ranks raise before the same step, and none of them runs eagerly for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fzero._utils.progress import announce
from fzero.comm import control_group
from fzero.errors import DivergenceError
from fzero.mesh import Mesh
from fzero.runtime.build.inductor import Compilation
from fzero.runtime.build.shared_compilation import NOT_COMPILED


class WarmUp:
    """The compilation of a program in the background of its first steps. All ranks of the mesh construct it together.

    Args:
        compilation: the subgraphs to compile, for the CPU.
        mesh: the ranks.
        title: the program, for the messages of the first rank.

    Attributes:
        done: whether every rank runs only compiled subgraphs.
    """

    def __init__(self, compilation: Compilation, mesh: Mesh, title: str):
        self._compilation, self._mesh, self._title = compilation, mesh, title
        self._used = set[str]()
        self._steps, self._start, self._all_delivered = -1, time.perf_counter(), False
        self.done = False
        compilation.start()

    def advance(self) -> dict[str, Callable[..., object]]:
        """Returns the compiled subgraphs that all ranks call from now on and did not before. All ranks call it before
        each step, until the warm-up is `done`.

        Communication: 512 bytes from each rank, or the names of the missing subgraphs if that is more.

        Raises:
            FzeroError: this rank could not compile a subgraph.
            DivergenceError: another rank could not, or makes another call; names the rank.
        """
        found = control_group.all_gather_values(
            self._mesh.control,
            "compile",
            self._status,
            form=tuple[list[str], bool],
            what=NOT_COMPILED,
            failure=DivergenceError,
        )
        missing = {name for names, _ in found for name in names}
        self._all_delivered = not any(works for _, works in found)
        ready = {n: f for n, f in self._compilation.built.items() if n not in missing and n not in self._used}
        self._used |= ready.keys()
        self._steps += 1
        self.done = not missing
        if self._mesh.rank == 0:
            self._tell(len(missing))
        return ready

    def finish(self) -> dict[str, Callable[..., object]]:
        """Returns all compiled subgraphs that are not used yet, after all ranks have compiled theirs. All ranks call
        it."""
        ready: dict[str, Callable[..., object]] = {}
        while not self.done:
            self._compilation.join()
            ready |= self.advance()
        return ready

    def _status(self) -> tuple[list[str], bool]:
        """Returns the subgraphs that this rank cannot call yet, and whether it is compiling some."""
        self._compilation.advance(self._all_delivered)
        return self._compilation.missing, self._compilation.is_working

    def _tell(self, missing: int) -> None:
        if self._steps == 0 and missing:
            functions = f"{missing} function{'s' * (missing > 1)}"
            announce("fzero.compile", f"{self._title} runs eagerly while {functions} compile in the background")
        elif self._steps and self.done:
            seconds = time.perf_counter() - self._start
            announce("fzero.compile", f"{self._title} runs compiled after {self._steps - 1} steps, {seconds:.0f} s")
