"""The common part of compiled training steps and evaluations: it makes a program for each kind of batch, and keeps it.

It knows nothing of transforms beyond lowering. A run executes the program and nothing else, and the program can be
printed in full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fzero import tree
from fzero._compat.inductor_folder import guard_inductor
from fzero._utils.progress import moving
from fzero.comm.local_device import check_default
from fzero.compiler.lowered import Lowered
from fzero.errors import FzeroValueError, attribute_of
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.mesh import Mesh
from fzero.plan.plan import Plan
from fzero.runtime.batch_transfer import BatchTransfer, check_contiguous
from fzero.runtime.build.build import check_backend
from fzero.runtime.compress_formats import ChosenFormats
from fzero.runtime.cuda_graphs import check
from fzero.runtime.program_agreement import made_together
from fzero.runtime.program_build import build_executable, lower_for_batch, plan_as_built
from fzero.runtime.program_cache import CachedProgram, ProgramCache, batch_entries, check_modes, kind_of_call
from fzero.runtime.read_values import ReadValues
from fzero.runtime.step_resolution import Limits, StepResolution
from fzero.step.checks import check_bare
from fzero.trace.guards.tensor_queries import strides_noted

Method = TypeVar("Method", bound=Callable[..., Any])
_MAKING = ("init", "load", "step", "eval_step", "sync")
"""The methods that create tensors, which would be placed on PyTorch's default device."""


def alone(owner: str, doing: str | None = None) -> Callable[[Method], Method]:
    """Decorates a method so that it has exclusive use of the mesh while it runs (`Mesh.alone`).

    Args:
        doing: describes the method's work on the bytes of a state; its progress is then shown.
    """

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if owner in _MAKING:
                check_default(owner, self.mesh.device_type)
            # a state outlives an inference mode in which it is made
            ordinary = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            telling = moving(f"fzero.{owner}", doing, self.mesh.rank) if doing else nullcontext()
            with self.mesh.alone(owner), ordinary, telling:
                return method(self, *args, **kwargs)

        return run  # type: ignore[return-value]

    return wrap


class Compiled:
    """A step on a mesh. It is lowered once for each kind of batch, and remembers the program that ran last.

    Attributes:
        owner: the public call that errors name.
    """

    owner: str
    if not TYPE_CHECKING:
        __getattr__ = attribute_of

    def __init__(
        self, step: Any, mesh: Mesh, backend: str, limits: Limits, graphs: bool | None = False, batch: Any = None
    ):
        check_backend(backend, mesh.device)
        guard_inductor()
        self.graphs = graphs  # whether runs are captured
        self._step, self.mesh, self.backend, self.limits = step, mesh, backend, limits
        self._resolution = StepResolution(step, mesh, backend, limits, batch)
        self._formats = ChosenFormats()
        self._reads = ReadValues(step, self.owner)
        self._transfer = BatchTransfer(mesh.device, self.owner)
        self._runs = ProgramCache(step.name)
        self._lowered: Lowered | None = None  # the program that ran last
        self._planned: Any = (None, None)  # the last planned program and its plan

    def __repr__(self) -> str:
        transforms = "".join(f", {x}" for x in self.step.transforms)
        return f"<{type(self).__name__} on mesh {self.mesh} of {self.mesh.device.type}, {self.backend}{transforms}>"

    @property
    def step(self) -> Any:
        """The step as it was given to `compile`."""
        return self._step

    @property
    def resolved(self) -> Any:
        """The step that is executed: `step` with all open choices decided."""
        return self._resolution.step

    @property
    def program(self) -> Program:
        """The program that ran last. It exists after the first call; `fz.lower` makes one without running it."""
        if self._lowered is None:
            raise FzeroValueError(
                "compile",
                "no program has been made yet",
                fix="call the step once, or use fz.lower(step, mesh, params, batch).program",
            )
        return self._lowered.program

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks in `metrics["precision"]`, in its order; empty without
        `mixed_precision(watch=True)`."""
        _ = self.program
        assert self._lowered is not None
        return self._lowered.blocks

    @property
    def plan(self) -> Plan:
        """The planned cost of the program that ran last on each rank, as built for this machine's device."""
        if self.program is not self._planned[0]:
            assert self._lowered is not None
            self._planned = self.program, plan_as_built(self._lowered, self.backend, self.mesh)
        return self._planned[1]

    def _run_for(
        self,
        params: Inputs,
        batch: Any,
        flat_batch: list[Any],
        structure: tree.TreeSpec,
        before: Callable[[], None] = lambda: None,
    ) -> tuple[Lowered, Callable[..., Any]]:
        """Returns the program for a batch with such leaves, and the function that runs it.

        Args:
            before: called first if there is no such program yet.
        """
        self.mesh.check_open()
        check_modes(self.step.name, self.owner, self.backend, self.graphs)
        kind = kind_of_call(params, flat_batch, structure)
        key = (*kind, self._formats.formats)
        if key in self._runs:
            check_bare(batch, flat_batch)
        # Taken out and kept again below, which makes it the most recently used one.
        kept = self._runs.pop(key, None)
        if kept is None:
            before()

            def make() -> Any:
                check_bare(batch, flat_batch)
                return self._build(params, batch)

            why = f"makes a program of {self.step.name} ({type(self.step).__name__})" + self._runs.difference(key)
            read = self._reads.now()
            with strides_noted() as asked:
                entries = batch_entries(flat_batch, structure)
                lowered, run = made_together(self.mesh, make, why, self.owner, entries)
            key = (*kind, self._formats.formats)  # lowering may have chosen formats
            kept = CachedProgram(lowered, run, self._reads.now(), asked)
            # The trace itself may have changed a value that is read, such as a list that grew. For the other programs
            # this is not a change.
            for other in self._runs.values():
                other.settings = kept.settings if other.settings == read else other.settings
        self._runs.keep(key, kept)
        check_contiguous(self.step.name, self.owner, batch, flat_batch, kept.strides)
        kept.calls += 1
        self._reads.look(kept.settings, kept.calls, kept.lowered.program, self.mesh)
        self._lowered = kept.lowered
        return kept.lowered, kept.run

    def _build(self, params: Inputs, batch: Any) -> tuple[Lowered, Callable[[], Callable[[], Callable[..., Any]]]]:
        """Lowers the step to a program.

        Returns a function that builds the program's subgraphs after all ranks have agreed on the program. That function
        returns another one, which makes the program executable after all ranks have built their subgraphs.
        """
        lowered = lower_for_batch(
            self.resolved,
            self.mesh,
            params,
            batch,
            self._resolution.budget,
            self._formats.formats,
            self._reads,
            self.owner,
        )
        # a run needs only its own rank's program, not those of the other stages
        lowered = replace(lowered, chosen=self._resolution.decisions, stages=dict)
        if self.graphs is True:
            check(lowered.program, self.owner)
        return lowered, functools.partial(build_executable, lowered, self.backend, self.mesh, self.graphs)
