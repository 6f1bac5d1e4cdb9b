"""Runs a forward-only step on a mesh."""

from __future__ import annotations

from typing import Any

import torch

from fzero import tree
from fzero.compiler.abstract_values import abstract_params
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.lowered import Lowered
from fzero.errors import FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.runtime.build.artifact_cache import logger
from fzero.runtime.compiled_base import Compiled, alone
from fzero.runtime.error_translation import raise_out_of_memory
from fzero.runtime.program_cache import StepCall
from fzero.sharding.placements import Varying
from fzero.state.state_comparison import Last, check_model, check_values, differences, model_of, placed_inputs, unplaced
from fzero.step import EvalStep
from fzero.step.checks import check_params
from fzero.train_state import check_whole


class CompiledEval(Compiled):
    """A forward-only step on a mesh. Made by `compile`.

    Example:
        >>> import torch, fzero as fz
        >>> evaluate = fz.compile(fz.eval_step(lambda p, x: {"y": x @ p["w"]}), fz.make_mesh(data=1), backend="eager")
        >>> evaluate({"w": torch.eye(2)}, torch.ones(1, 2))
        {'y': tensor([[1., 1.]])}
    """

    owner = "eval_step"

    def __init__(
        self,
        step: EvalStep,
        mesh: Mesh,
        backend: str,
        limits: tuple[int | None, int | None, int | None],
        graphs: bool = False,
        warm_up: str = "wait",
    ):
        super().__init__(step, mesh, backend, limits, graphs, warm_up=warm_up)
        self._last = Last()

    @alone("eval_step")
    def __call__(self, params: Any, *batch: Any) -> Any:
        """Returns the outputs of `fn(params, *batch)`. `fz.weighted` outputs are means over the whole mesh; all others
        are of this rank's shard of the batch.

        Args:
            params: `state.params` of a training step with the same sharding; or unsharded tensors, for a step that
                shards none.
            *batch: this rank's shard of every argument.

        Returns:
            The outputs, on the mesh's device. If an output is a number that only describes this rank's shard, such as a
            mean over it, the logger `fzero` warns when the program is built.

        Raises:
            FzeroValueError: the parameters have the layout of another evaluation, or belong to a state whose step ended
                in the middle.
            OutOfMemory: the device or the host is out of memory. The state is unchanged.
            BusyError: another thread is using the mesh.
        """
        # A step that ended in the middle has updated some parameters and not others. An evaluation of them would look
        # plausible.
        check_whole(params, "eval_step")
        if not self._last.holds(params):
            self._last.keep(self._expect(params), params)
        call = StepCall(self._last.checked(), batch, *tree.flatten(batch))
        program = self._program_for(call)
        batch = tree.unflatten(call.structure, self._transfer(batch, call.flat))
        with torch.no_grad():
            try:
                outputs = program.run(params, batch)
            except (RuntimeError, MemoryError) as error:
                raise_out_of_memory(error, self.owner, list)
                raise
        return tree.unflatten(program.lowered.structure, outputs)

    def _lower(self, call: StepCall) -> Lowered:
        lowered = super()._lower(call)
        made = lowered.program.values()
        own = [
            x
            for name in lowered.program.outputs
            if (x := made[name]).placement.over(Varying) and not x.shape and x.dtype.is_floating_point
        ]
        if own and self.mesh.size > 1 and self.mesh.rank == 0:
            text = (
                "%s: %d of its results are numbers of each rank's part of the batch alone; fz.weighted(total, count) "
                "is the mean over all ranks"
            )
            logger.warning(text, self.step.name, len(own))
        return lowered

    def _expect(self, params: Any) -> Inputs:
        check_params(params, "eval_step")
        check_values("eval_step", params=params)
        found = placed_inputs(params)
        check_model("eval_step", model_of(self.step.fn), abstract_params(found))
        expected = params_inputs(self.step, self.mesh, abstract_params(found), found.leaves)
        if away := [f"{x}: {x.layout.only.axis}={x.layout.only.index} only" for x in found.leaves if x.layout.only]:
            what = "an evaluation reads all parameters, and these are only on one stage of a pipeline"
            fix = "lay the state out for a step without it: fz.reshard(state, train); or restore a checkpoint on one"
            raise FzeroValueError("eval_step", what, away, fix)
        bare = unplaced(params)
        wrong = differences(found, expected, bare)
        if wrong:
            fix = "apply to eval_step the transforms of the training step"
            if any(text.split(": ")[0] in bare for text in wrong):
                fix = (
                    "give the trees of the state as they are: what is computed from their leaves, such as an average, "
                    "compute in the evaluation's function"
                )
            raise FzeroValueError(
                "eval_step", "the layouts of the parameters differ from those that this evaluation expects", wrong, fix
            )
        return self._runs.known(found)
