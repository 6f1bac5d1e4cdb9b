"""Decides what a step leaves open: tensor-parallel rules, memory tiers, pipeline stages, and the dtypes of promoted
blocks.

The decisions are made when the first state is laid out, for the parameters and the example batch. Promoted blocks also
depend on the counters in a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fzero.comm import control_group
from fzero.compiler.abstract_values import abstract_params, batch_inputs
from fzero.compiler.auto_compress import check_links_known, open_formats
from fzero.compiler.auto_offload import check_auto, resolve
from fzero.compiler.auto_stages import choose_stages, open_stages
from fzero.compiler.auto_tensor_parallel import check_batch_given, choose_rules, open_rules
from fzero.compiler.budget_report import Budget
from fzero.compiler.combined_transforms import auto_of
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.lowered import Lowered
from fzero.compiler.state_layouts import leaves_made_anew
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.plan.device_lookup import Device, get_device
from fzero.plan.plan import PlanDecision
from fzero.step import EvalStep, Step
from fzero.transforms.offload import Offload
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.precision import Promotion

Limits = tuple[int | None, int | None, int | None]
"""Bytes of each rank's device memory, of its host memory, and on disk."""


class StepResolution:
    """The step that is executed: the compiled step with its open choices decided. An evaluation leaves nothing open.

    Attributes:
        step: the step with the choices that have been decided so far.
        decisions: these choices, with the reasons, for the plan.
    """

    def __init__(self, step: Step | EvalStep, mesh: Mesh, backend: str, limits: Limits, batch: Any = None):
        if isinstance(step, Step):
            if (auto := auto_of(step)) is not None:
                check_auto(auto, limits, batch is not None)
            if open_rules(step, mesh):
                check_batch_given(batch is not None)
        self.step: Any = step
        self.decisions: tuple[PlanDecision, ...] = ()
        self._mesh, self._backend, self._limits = mesh, backend, limits
        self._batch = None if batch is None else batch_inputs(batch)
        self._budget: Budget | None = None
        self._promotion = Promotion(mesh)

    @property
    def awaits_batch(self) -> bool:
        """Whether the stages of a `pipeline` are laid out at the first step, because `compile` was given no batch."""
        return self._batch is None and open_stages(self.step, self._mesh) is not None

    def laid_out(self, params: Any) -> Inputs:
        """Returns the leaf table of a tree of unsharded parameters, after deciding the open choices for them."""
        self.decide(params)
        return params_inputs(self.step, self._mesh, params)

    def laid_out_in_stages(self, params: Inputs, batch: Any) -> Inputs:
        """Returns the new leaf table of parameters, for the first batch of a step whose stages depend on it."""
        self._batch = batch_inputs(batch)
        try:
            return self.laid_out(abstract_params(params))
        except BaseException:
            # A later call may then decide with another batch.
            self._batch = None
            raise

    def decide(self, params: Any) -> None:
        """Decides the open choices, for a tree of unsharded parameters or for their leaf table."""
        if isinstance(params, Inputs):
            params = abstract_params(params)
        # The order matters: each decision is planned for the step with the decisions before it.
        if open_rules(self.step, self._mesh):
            assert self._batch is not None
            self.step, self.decisions = choose_rules(self.step, self._mesh, params, self._batch)
        if auto_of(self.step) is not None:
            budget = self.budget()
            assert budget is not None and self._batch is not None
            self.step, more, *_ = resolve(self.step, self._mesh, params, self._batch, budget)
            self.decisions = (*self.decisions, *more)
        if self._batch is not None and open_stages(self.step, self._mesh):
            budget = self.budget()
            assert budget is not None
            self.step, more = choose_stages(self.step, self._mesh, params, self._batch, budget.device, budget.backend)
            self.decisions = (*self.decisions, *more)

    def budget(self) -> Budget | None:
        """Returns the memory limits and this machine's rates, on which choices between tiers and formats are based;
        None if there are neither limits nor such choices.

        The ranks of several hosts plan with the rates of the first host.
        """
        asked = any(isinstance(t, Offload | Pipeline) for t in self.step.transforms)
        asked = asked or open_formats(self.step) is not None
        if self._budget is None and (asked or self._limits != (None, None, None)):
            # Hosts may have been calibrated differently, and with different rates the ranks would choose different
            # programs.
            device = control_group.broadcast_from_rank0(
                self._mesh.control, "compile", lambda: get_device(None, self._mesh.device_type).to_json()
            )
            nbytes, host, disk = self._limits
            self._budget = Budget(nbytes, Device.from_json(device), self._backend, host, disk)
            check_links_known(self.step, self._mesh, self._budget.device)
        return self._budget

    def promote_restored(self, params: Inputs, counts: Any) -> None:
        """Promotes blocks according to the counters of a checkpoint, before the state is laid out."""
        self.step = self._promotion.resolved(self.step, params.leaves, counts)

    def promote(self, params: Inputs, extras: Mapping[str, Any]) -> None:
        """Promotes blocks according to the counters of the current state, before a program is built."""
        layout_of = lambda step: leaves_made_anew(step, self._mesh, params)  # noqa: E731
        self.step = self._promotion.before_build(self.step, params.leaves, extras, layout_of)

    def promoted(self, params: Inputs, lowered: Lowered) -> tuple[PlanDecision, ...]:
        """Returns the promoted blocks of a program, with the reasons."""
        found = self._promotion.explained(self.step, params.leaves, lowered.watched)
        return tuple(PlanDecision(*x) for x in found)
