"""Holds the programs and functions of a compiled step, made once for each kind of batch: the common part of training
and evaluation.

It knows nothing of transforms beyond lowering; what it runs is the program, and the program is all there is to see.
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
from fzero.runtime.program_cache import CachedProgram, ProgramCache, check_modes, kind_of_call
from fzero.runtime.read_values import ReadValues
from fzero.runtime.step_resolution import Limits, StepResolution
from fzero.step.checks import check_bare
from fzero.trace.guards.tensor_queries import strides_noted

Method = TypeVar("Method", bound=Callable[..., Any])
_MAKING = ("init", "load", "step", "eval_step", "sync")
"""The methods whose new tensors would be on PyTorch's default device."""


def alone(owner: str, doing: str | None = None) -> Callable[[Method], Method]:
    """A method that has the mesh to itself while it runs (`Mesh.alone`). `doing`: its work on bytes of a state, whose
    progress it shows."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if owner in _MAKING:
                check_default(owner, self.mesh.device_type)
            # a state outlives the mode that it is made in
            ordinary = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            telling = moving(f"fzero.{owner}", doing, self.mesh.rank) if doing else nullcontext()
            with self.mesh.alone(owner), ordinary, telling:
                return method(self, *args, **kwargs)

        return run  # type: ignore[return-value]

    return wrap


class Compiled:
    """A step on a mesh: lowered once per kind of batch; and the last program that ran. `owner`: whose its errors
    are."""

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
        self._lowered: Lowered | None = None  # of the program that ran last
        self._planned: Any = (None, None)  # a program and its plan

    def __repr__(self) -> str:
        transforms = "".join(f", {x}" for x in self.step.transforms)
        return f"<{type(self).__name__} on mesh {self.mesh} of {self.mesh.device.type}, {self.backend}{transforms}>"

    @property
    def step(self) -> Any:
        """The step as it was compiled."""
        return self._step

    @property
    def resolved(self) -> Any:
        """The step that is carried out: `step`, which leaves nothing open."""
        return self._resolution.step

    @property
    def program(self) -> Program:
        """The program that ran last. It exists from the first call on; `fz.lower` makes one without running."""
        if self._lowered is None:
            raise FzeroValueError(
                "compile",
                "there is no program yet",
                fix="call the step once, or use fz.lower(step, mesh, params, batch).program",
            )
        return self._lowered.program

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks that `metrics["precision"]` is about, in its order; none without
        `mixed_precision(watch=True)`."""
        _ = self.program
        assert self._lowered is not None
        return self._lowered.blocks

    @property
    def plan(self) -> Plan:
        """The cost of the program that ran last on each rank, as built for this machine's device."""
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
        """The program for a batch of such leaves, with its runner. `before`: done if there is none yet."""
        self.mesh.check_open()
        check_modes(self.step.name, self.owner, self.backend, self.graphs)
        check_bare(batch, flat_batch)
        kind = kind_of_call(params, flat_batch, structure)
        key = (*kind, self._formats.formats)
        kept = self._runs.pop(key, None)
        if kept is None:
            before()
            why = f"makes a program of {self.step.name} ({type(self.step).__name__})" + self._runs.difference(key)
            read = self._reads.now()
            with strides_noted() as asked:
                lowered, run = made_together(self.mesh, lambda: self._build(params, batch), why)
            key = (*kind, self._formats.formats)  # lowering may have chosen some
            kept = CachedProgram(lowered, run, self._reads.now(), asked)
            for other in self._runs.values():  # functions do not read a list that the trace itself has grown
                other.settings = kept.settings if other.settings == read else other.settings
        self._runs.keep(key, kept)
        check_contiguous(self.step.name, self.owner, batch, flat_batch, kept.strides)
        kept.calls += 1
        self._reads.look(kept.settings, kept.calls, kept.lowered.program, self.mesh)
        self._lowered = kept.lowered
        return kept.lowered, kept.run

    def _build(self, params: Inputs, batch: Any) -> tuple[Lowered, Callable[[], Callable[[], Callable[..., Any]]]]:
        """The program; how to build its functions once all ranks agree on it,
        and then how to make it executable, once all have built theirs."""
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
        # a run keeps its program alone
        lowered = replace(lowered, chosen=self._resolution.decisions, stages=dict)
        if self.graphs is True:
            check(lowered.program, self.owner)
        return lowered, functools.partial(build_executable, lowered, self.backend, self.mesh, self.graphs)
