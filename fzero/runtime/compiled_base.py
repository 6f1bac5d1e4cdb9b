"""The common part of compiled training steps and evaluations: it makes a program for each kind of batch, and keeps it.

It knows nothing of transforms beyond lowering. A run executes the program and nothing else, and the program can be
printed in full.

[Note: a call] What a call of a compiled step does, from the arguments to the first op of the program:

1. `CompiledStep.__call__` flattens the batch and compares the trees of the state with those of the last call. If they
   are others, it reads their leaf tables and checks them; before their first step it compares replicas between ranks.
2. `Compiled._program_for` looks up the program for this kind of call. If there is one, step 5 follows.
3. `Compiled._make_program` traces and lowers the step (program_build.py), and all ranks compare the program
   (program_agreement.py).
4. It builds the subgraphs (build/) and connects the program with the other ranks (execute.py).
5. `Compiled._program_for` checks at some calls that nothing the step reads has changed (read_values.py). During a
   warm-up it takes over compiled subgraphs (build/warm_up.py).
6. `CompiledStep.__call__` copies the batch to the device (batch_transfer.py).
7. `Executable.__call__` runs the program: the text that `fz.show(program, full=True)` prints.
8. `CompiledStep.__call__` watches the metrics (metrics_watch.py), and returns them with the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fzero._compat.inductor_folder import guard_inductor
from fzero._utils.progress import moving
from fzero.comm.control_group import unbroken
from fzero.comm.local_device import check_default
from fzero.compiler.lowered import Lowered
from fzero.errors import FzeroValueError, attribute_of
from fzero.ir.program import Program
from fzero.mesh import Mesh
from fzero.plan.plan import Plan
from fzero.runtime.batch_transfer import BatchTransfer, check_contiguous
from fzero.runtime.build.build import check_backend
from fzero.runtime.compress_formats import ChosenFormats
from fzero.runtime.cuda_graphs import check
from fzero.runtime.program_agreement import check_same_batch, check_same_program, on_all_ranks
from fzero.runtime.program_build import build_functions, connect, lower_for_batch, plan_as_built, title_of
from fzero.runtime.program_cache import (
    CachedProgram,
    ProgramCache,
    StepCall,
    batch_entries,
    check_modes,
    key_of_call,
)
from fzero.runtime.read_values import ReadValues
from fzero.runtime.retrace import TraceRecord, UnsavedTrace
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
        self,
        step: Any,
        mesh: Mesh,
        backend: str,
        limits: Limits,
        graphs: bool | None = False,
        batch: Any = None,
        warm_up: str = "wait",
    ):
        check_backend(backend, mesh.device)
        guard_inductor()
        self.graphs = graphs  # whether runs are captured
        self.warm_up = warm_up  # whether the first steps wait for compiled functions, or run eagerly
        self._step, self.mesh, self.backend, self.limits = step, mesh, backend, limits
        self._resolution = StepResolution(step, mesh, backend, limits, batch)
        self._formats = ChosenFormats()
        self._reads = ReadValues(step, self.owner)
        self._unsaved = UnsavedTrace(mesh, self._reads.noted_again)
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

    def _program_for(self, call: StepCall, before: Callable[[], None] = lambda: None) -> CachedProgram:
        """Returns the program for a call. If there is none yet, all ranks make it together.

        Args:
            before: called first if there is no such program yet.
        """
        self.mesh.check_open()
        check_modes(self.step.name, self.owner, self.backend, self.graphs)
        key = key_of_call(call, self._formats.formats)
        # Taken out and kept again below, which makes it the most recently used one.
        program = self._runs.pop(key, None)
        if program is None:
            before()
            program = self._make_program(call, key)
            key = key_of_call(call, self._formats.formats)  # lowering may have chosen formats
        else:
            check_bare(call.batch, call.flat)
            program.advance()
        self._runs.keep(key, program)
        check_contiguous(self.step.name, self.owner, call.batch, call.flat, program.strides)
        program.calls += 1
        self._reads.look(program, self.mesh)
        self._unsaved.ran(program.record, functools.partial(self._reads.changed, program.settings))
        self._lowered = program.lowered
        return program

    def _make_program(self, call: StepCall, key: tuple[Any, ...]) -> CachedProgram:
        """Makes the program for a kind of call: traces and lowers the step, compares the program between all ranks,
        builds its subgraphs, and connects it with the other ranks. An error on one rank is raised on all of them."""
        mesh, noted = self.mesh, self._reads.noted_again()
        why = f"makes a program of {self.step.name} ({type(self.step).__name__})" + self._runs.difference(key)
        with strides_noted() as strides:
            check_same_batch(mesh, batch_entries(call), why, self.owner)
            lowered = on_all_ranks(mesh, lambda: self._lower(call))
            check_same_program(mesh, lowered.programs, why)
            title = title_of(self.step)
            functions, warm_up = on_all_ranks(
                mesh, lambda: build_functions(lowered, self.backend, mesh, title, self.warm_up == "eager")
            )
            # No rank may start to connect before all are built: connecting is a collective, in which a rank that failed
            # to build would be missing.
            with unbroken(mesh):
                run = on_all_ranks(mesh, lambda: connect(lowered, functions, mesh, self.graphs))
        record = TraceRecord.of(self.resolved, mesh, lowered)
        lowered = replace(lowered, recorded=None)
        made = self._reads.watched(CachedProgram(lowered, run, self._reads.now(), record, strides, warm_up))
        noted()
        return made

    def _lower(self, call: StepCall) -> Lowered:
        """Traces the step and lowers it to a program."""
        check_bare(call.batch, call.flat)
        budget, formats = self._resolution.budget, self._formats.formats
        lowered = lower_for_batch(self.resolved, self.mesh, call.params, call.batch, budget, formats)
        if self.graphs is True:
            check(lowered.program, self.owner)
        # a run needs only its own rank's program, not those of the other stages
        return replace(lowered, chosen=self._resolution.decisions, stages=dict)
