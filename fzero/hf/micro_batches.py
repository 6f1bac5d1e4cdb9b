"""Collects the micro-batches of an update, and joins them into the batch of one compiled step: every micro-batch is
padded to one of a few shapes, and gets a slot for each kind of batches (`batch_signatures.py`) in the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.errors import FzeroValueError
from fzero.hf import padding, traced_loss
from fzero.hf.batch_signatures import Kind, Kinds, check_constants, differences, kind_of, split, tensors_of
from fzero.hf.data_parallel_ranks import Exchange
from fzero.hf.loss_guard import LossInputs
from fzero.modules.functionalize import Functional

logger = logging.getLogger("fzero")

Compared = Callable[[Kind, bool, padding.Tensors, padding.Tensors], tuple[bool, str]]
"""Evaluates a batch of a kind and the same batch padded, like `Evaluation.compared`, with the current weights. The
second argument says whether the loss depends on the number of items in a step."""


class MicroBatches:
    """The micro-batches of one training.

    Args:
        held: the trainer, with the values that its loss reads.
        constants: the values in the batches that are not tensors. They are taken from the first batch.
        compared: compares a batch with the same batch padded.

    Attributes:
        programs: the shapes of the steps so far. Each is compiled separately.
    """

    def __init__(self, held: LossInputs, model: Functional, constants: dict[str, Any], compared: Compared):
        self._held, self._model, self._constants, self._compared = held, model, constants, compared
        self._collected: list[Any] = []
        self._last_left: int | None = None  # the step at which an epoch had micro-batches left over
        self._kinds = Kinds(Exchange(held.trainer))
        self._paddings: dict[Kind, tuple[traced_loss.Losses, padding.Padding]] = {}
        self.programs: set[Any] = set()

    def add(self, inputs: Any) -> None:
        self._collected.append(inputs)

    def take(self) -> list[Any]:
        """Returns the micro-batches that have been added since the last update."""
        parts, self._collected = self._collected, []
        return parts

    def drop_left_over(self) -> None:
        """Drops the micro-batches that an epoch of unknown length has left over."""
        if not self._collected:
            return
        trainer = self._held.trainer
        num, parts = len(self._collected), trainer.args.gradient_accumulation_steps
        if trainer.state.global_step == self._last_left:
            what = f"an epoch of {num} micro-batches makes no step of {parts}"
            fix = "more rows, smaller batches, or fewer gradient_accumulation_steps"
            raise FzeroValueError("hf.Trainer", what, fix=fix)
        if self._last_left is None:
            text = "%d micro-batches at an epoch's end make no step of %d; transformers adds theirs to the next"
            logger.warning("fzero.hf.Trainer: " + text, num, parts)
        self._collected, self._last_left = [], trainer.state.global_step

    def joined(self, parts: Sequence[Any], items: Any) -> dict[str, Any]:
        """Returns the batch of a step: for each kind of its micro-batches one micro-batch per slot, all of one shape.

        Slots whose micro-batch is of another kind, or is missing, hold copies with weight 0.

        Args:
            items: transformers' `num_items_in_batch`.
        """
        entries, constants = zip(*map(split, parts), strict=True)
        if not self._paddings:
            self._constants.update(constants[0])
        check_constants(self._constants, constants)
        args = self._held.trainer.args
        # With `loss_is_scaled_for_ga`, the library's own compute_loss gets it also for a loss that does not use it: it
        # then multiplies by the number of processes.
        as_library = items is not None and self._held.trainer.loss_is_scaled_for_ga is not None
        kinds, device = self._kinds.of_step(entries), args.device
        missing = args.gradient_accumulation_steps - len(parts)
        made, shapes, reads = [], [], set()
        for kind in kinds:
            stand_in = self._kinds.stand_in(kind, entries, device)
            if kind not in self._paddings:
                self._paddings[kind] = self._padding_of(kind, stand_in, items)
            losses, pad = self._paddings[kind]
            on = [kind_of(x) == kind for x in entries]
            slots = [x if is_own else stand_in for x, is_own in zip(entries, on, strict=True)]
            padded, shape = pad([tensors_of(x) for x in slots], self._comparing(kind, losses))
            padded += [padded[i % len(padded)] for i in range(missing)]
            inputs = {n: None if x is None else torch.cat([part[n] for part in padded]) for n, x in stand_in.items()}
            counts = torch.tensor([*map(float, on), *[0.0] * missing], device=device)
            made.append({"inputs": inputs, "on": counts.repeat_interleave(shape[""])})
            if losses.reads or as_library:
                made[-1]["num_items"] = torch.as_tensor(items, device=device).expand(shape[""] * len(padded)).clone()
            shapes.append(shape)
            reads.add(losses.reads)
        if len(kinds) > 1:
            self._check_kinds(kinds, entries, shapes, reads)
        self.programs.add(tuple((kind, *shape.items()) for kind, shape in zip(kinds, shapes, strict=True)))
        return {"kinds": made}

    def _padding_of(self, kind: Kind, entries: Any, items: Any) -> tuple[traced_loss.Losses, padding.Padding]:
        """Returns what is known about the loss of batches with these entries, and the padding for them."""
        trainer, model = self._held.trainer, self._model
        losses = traced_loss.probe(self._held, model, entries, self._constants, items is not None)
        found = padding.of(trainer, model, "training", losses, trainer._train_batch_size)
        if not self._paddings:
            found.check_rows(trainer, tensors_of(entries), self._comparing(kind, losses))
            if trainer.is_world_process_zero() and (
                text := traced_loss.other_scale(trainer, losses, items is not None)
            ):
                logger.warning("fzero.hf.Trainer: %s", text)
        return losses, found

    def _comparing(self, kind: Kind, losses: traced_loss.Losses) -> padding.Compare:
        return lambda one, two: self._compared(kind, losses.reads, one, two)

    def _check_kinds(self, kinds: list[Kind], entries: Any, shapes: list[Any], reads: set[bool]) -> None:
        """Raises an error if micro-batches with different entries cannot be computed in one step; otherwise warns of
        the cost."""
        what, problems = "micro-batches of one step have different entries", differences(kinds, entries)
        fix = "have the collator give every batch the same entries, such as a mask of ones"
        if self._model.mutable is not None:
            why = "the model's forward overwrites buffers, and would do so for each kind of entries"
            raise FzeroValueError("hf.Trainer", f"{what}: {why}", problems, fix)
        if len(reads) > 1:
            why = "only some of their losses are divided by num_items_in_batch"
            raise FzeroValueError("hf.Trainer", f"{what}, and {why}", problems, fix)
        if len({shape[""] for shape in shapes}) > 1:
            sizes = ", ".join(str(shape[""]) for shape in shapes)
            raise FzeroValueError("hf.Trainer", f"{what}, and different numbers of rows ({sizes})", problems, fix)
        if not any(len(known) > 1 for known in self.programs) and self._held.trainer.is_world_process_zero():
            text = "fzero.hf.Trainer: %s (%s): such a step computes each micro-batch once per kind of entries, %d times"
            logger.warning(text, what, "; ".join(problems), len(kinds))
