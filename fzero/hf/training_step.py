"""Compiles the step of a Trainer, and runs it with the learning rates of the torch optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from fzero import CompiledStep, State, compile, train_step
from fzero.comm import collective_sequence
from fzero.errors import FzeroValueError
from fzero.hf import torch_optimizers, traced_loss
from fzero.hf.loss_guard import LossInputs
from fzero.hf.step_recipe import Recipe
from fzero.modules.functionalize import Functional


def compiled(
    held: LossInputs, model: Functional, recipe: Recipe, constants: traced_loss.Constants, mesh: Any, compiling: Any
) -> CompiledStep:
    """Returns the compiled step of a training.

    Args:
        held: the trainer, with the values that its loss reads.
        constants: the values in its batches that are not tensors. They may be filled in before the first step.
        compiling: arguments of `fz.compile`.
    """
    loss = partial(traced_loss.loss, held, constants)
    # A save or gather in a callback traces the step again, when the module has no weights.
    loss_fn = held.trainer._sync.internal()(model.calling(loss, train=True))
    step = train_step(loss_fn, recipe.optimizer, trainable=model.trainable, mutable=model.mutable)
    return compile(recipe.apply(step), mesh, **compiling)


class TrainingStep:
    """Runs a Trainer's compiled step.

    Args:
        held: the trainer, with the values that its loss reads.
        state: the first state, which tells where the state has its learning rates.

    Attributes:
        optimizer: the torch optimizer that the step was made with, whose learning rates it uses.
        metrics: the results of the last step.
        step_was_skipped: whether the last step changed nothing, which accelerate asks of an optimizer.
    """

    def __init__(self, held: LossInputs, recipe: Recipe, state: State):
        self._held = held
        self._rates = torch_optimizers.rates(state.opt_state), recipe.groups
        self._values = recipe.values
        self.optimizer = held.trainer.optimizer
        self.metrics: dict[str, Any] = {}
        self.step_was_skipped = False

    def __call__(self, state: State, batch: dict[str, Any]) -> State:
        """Returns the state after one update.

        Raises:
            FzeroValueError: the optimizer, the trainable parameters or values that the step was made of have changed.
        """
        trainer = self._held.trainer
        trainer._sync.stepping()
        self._held.check()
        if trainer.optimizer is not self.optimizer:
            what, fix = "self.optimizer is not the optimizer that the step was made with", "give another before train()"
            raise FzeroValueError("hf.Trainer", what, fix=fix)
        torch_optimizers.check(self._values, self.optimizer)
        torch_optimizers.write(*self._rates, self.optimizer)
        if collective_sequence.watcher is not None:  # within fz.run: its supervisor counts failures between two steps
            collective_sequence.watcher.begins_step(trainer.state.global_step)
        state, self.metrics = trainer.compiled(state, batch)
        self.step_was_skipped = bool(self.metrics.get("skipped", False))
        return state
