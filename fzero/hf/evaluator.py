"""Evaluates and predicts with a Trainer's model: chooses the weights, and keeps one compiled evaluation
(`evaluation_step.py`) for each kind of request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fzero import data_parallel, mixed_precision, random, tree
from fzero.errors import FzeroValueError
from fzero.hf import padding, traced_loss
from fzero.hf.batch_signatures import Kind, split
from fzero.hf.evaluation_step import Evaluation
from fzero.hf.loss_guard import LossInputs
from fzero.trace.guards.value_keys import exact

_EVALUATION = 1 << 40
"""Folded into the key of an evaluation. No training step folds in a number this large, so their random numbers
differ."""


class Evaluator:
    """The evaluations of a Trainer.

    Args:
        base: the class whose methods are not the user's own.

    Attributes:
        evaluations: those that have been made, by their kind, weights and constants.
    """

    def __init__(self, trainer: Any, base: type):
        self._trainer, self._base = trainer, base
        self.evaluations: dict[Any, Evaluation] = {}
        self._weights: tuple[bool, Any] | None = None  # during an evaluation, the weights that it uses
        self._num_predictions = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for one evaluation, all of whose batches use the same weights."""
        self._weights, self._num_predictions = self._current_weights(), 0  # each draws the same random numbers
        try:
            yield
        finally:
            self._weights = None

    def predict(
        self, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Returns the loss, outputs and labels of a batch, computed from the sharded state."""
        trainer = self._trainer
        config = getattr(trainer.model, "config", None)
        if ignore_keys is None:
            none = [] if config is None else ["past_key_values"]
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", none))
        given, label_names = inputs.get("return_loss"), trainer.label_names
        labelled = bool(label_names) and all(inputs.get(n) is not None for n in label_names)
        losing = labelled or (not label_names and bool(trainer.can_return_loss if given is None else given))
        labels = tuple(inputs.get(n) for n in label_names) if losing else None
        labels = labels[0] if labels is not None and len(labels) == 1 else labels
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device) if losing else None
        kind = traced_loss.Kind(losing, prediction_loss_only, tuple(ignore_keys))
        trained, params = self._weights or self._current_weights()
        entries, constants = split(inputs)
        loss, outputs = self._evaluation(kind, constants, trained)(params, entries, items, self._next_key())
        if prediction_loss_only:
            return loss, None, None
        return loss, outputs[0] if len(outputs) == 1 else outputs, labels

    def compared(
        self, constants: dict[str, Any], kind: Kind, reads: bool, one: padding.Tensors, two: padding.Tensors
    ) -> tuple[bool, str]:
        """Calls `Evaluation.compared` for a batch of the training and the same batch padded, with the current
        weights."""
        trainer = self._trainer
        evaluation = self._evaluation(traced_loss.Kind(losing=True, loss_only=True, ignored=()), constants, True)
        key = random.key(trainer.args.seed, trainer._mesh().device)
        return evaluation.compared(trainer.train_state.params, kind, reads, key, one, two)

    def _next_key(self) -> torch.Tensor:
        """Returns the key of the next batch of an evaluation, for this rank's shard of the global batch."""
        trainer = self._trainer
        key = random.fold_in(random.key(trainer.args.seed, trainer._mesh().device), _EVALUATION)
        self._num_predictions += 1
        return random.with_part(random.fold_in(key, self._num_predictions), trainer.accelerator.process_index)

    def _evaluation(self, kind: traced_loss.Kind, constants: dict[str, Any], trained: bool) -> Evaluation:
        """Returns the evaluation of a kind, for batches with these constants.

        Args:
            trained: whether it uses the weights of the trained state, which are sharded.
        """
        known = kind, trained, frozenset((n, exact(x)) for n, x in constants.items())
        if known not in self.evaluations or self.evaluations[known].held.changed():
            trainer = self._trainer
            if trained:
                transforms = trainer.compiled.resolved.transforms
            else:
                transforms = [data_parallel(axis=axis) for axis in trainer._mesh().axes]  # each rank has all weights
                transforms += [mixed_precision(compute=x) for x in ("bf16", "fp16") if getattr(trainer.args, x)]
            held = LossInputs(trainer, self._base)
            self.evaluations[known] = Evaluation(
                held, trainer.functional, kind, constants, transforms, trainer._mesh(), trainer._compiling
            )
        return self.evaluations[known]

    def _current_weights(self) -> tuple[bool, Any]:
        """Returns whether to evaluate with the parameters of the trained state, and the parameters.

        If the module has weights, they are copied to the state first, because they may have been changed.
        """
        trainer = self._trainer
        if trainer.train_state is not None:
            trainer._sync.copy_to_state()
            return True, trainer.train_state.params
        if trainer.functional is None:
            trainer.functional = trainer._functional()
        if any(x.is_meta for x in tree.leaves(trainer.functional.params)):
            what = "a model of fz.hf.from_pretrained has no weights before train() has read them"
            fix = "eval_on_start=True evaluates before the first step; or give the module itself"
            raise FzeroValueError("hf.Trainer", what, fix=fix)
        return False, tree.map(lambda x: x.to(trainer._mesh().device), trainer.functional.params)
