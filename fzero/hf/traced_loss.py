"""Traces what a Trainer computes, its loss of a micro-batch and its outputs in an evaluation, through `compute_loss`,
either transformers' own or the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`

from fzero import weighted
from fzero._compat import compat
from fzero.hf.loss_guard import LossInputs
from fzero.modules.functionalize import Functional

Constants = Mapping[str, Any]
"""The values of a batch that are not tensors. They are the same in every batch of a program."""


def _computed(held: LossInputs, constants: Constants, forward: Any, batch: Any, **settings: Any) -> tuple[Any, Any]:
    """Returns the result of the trainer's `compute_loss`, and the object that counted the cross entropies in it."""
    items = batch.get("num_items")
    with held.tracing(forward) as counting:
        inputs = {**batch["inputs"], **constants}
        number = None if items is None else items[0]
        return held.trainer.compute_loss(forward, inputs, num_items_in_batch=number, **settings), counting


def loss(held: LossInputs, constants: Constants, forward: Any, batch: Any) -> Any:
    """Returns the loss of a micro-batch, for a step's mean over micro-batches and ranks.

    A micro-batch has one part for each kind of batches in the step (`batch_signatures.py`). One of the parts is its
    own; the others have weight 0 (`on`).
    """
    trainer = held.trainer
    parts = [(part, *_computed(held, constants, forward, part)) for part in batch["kinds"]]
    reads_num_items = "num_items" in batch["kinds"][0]
    adds_up = reads_num_items if trainer.loss_is_scaled_for_ga is None else trainer.loss_is_scaled_for_ga
    if adds_up:
        # The loss is divided by all items of the step already, so micro-batches are added and not averaged.
        total = sum(found * part["on"][0] for part, found, _ in parts) * trainer.args.gradient_accumulation_steps
        if not reads_num_items:
            return total
        # The count of a step without items is 0, so that its update is skipped.
        some = (batch["kinds"][0]["num_items"][0] > 0).to(torch.float32)
        return weighted(total * some, some)
    counted = all(_is_mean_of_targets(counting) for _, _, counting in parts)
    sums, weights = [], []
    for part, found, counting in parts:
        one = counting.counts[0] if counted else torch.ones((), device=found.device)
        weights.append(one * part["on"][0])
        sums.append(found * weights[-1])
    return weighted(sum(sums[1:], sums[0]), sum(weights[1:], weights[0]))


class Kind(NamedTuple):
    """One kind of evaluation.

    Attributes:
        losing: whether it computes a loss.
        loss_only: whether it returns nothing else.
        ignored: the outputs that are left out.
    """

    losing: bool
    loss_only: bool
    ignored: tuple[str, ...]


def outputs(held: LossInputs, constants: Constants, kind: Kind, forward: Any, batch: Any) -> Any:
    """Returns the loss of a batch, or None without one, and the outputs except for those that are ignored."""
    losing, loss_only, ignored = kind
    if losing:
        (found, out), _ = _computed(held, constants, forward, batch, return_outputs=True)
        found = found.mean().reshape(1)
    else:
        held.prepare(forward)
        found, out = None, forward(**batch["inputs"], **constants)
    if loss_only:
        return found, None
    if isinstance(out, dict):
        dropped = {*ignored, "loss"} if losing else {*ignored}
        return found, tuple(x for n, x in out.items() if n not in dropped and x is not None)
    return found, tuple(out[1:] if losing else out) if isinstance(out, (tuple, list)) else (out,)


class Losses(NamedTuple):
    """What is known about a loss before it is computed.

    Attributes:
        reads: whether it depends on the number of items in a step.
        ignores: whether it is known to leave out labels of the value `ignored`, and samples that have only such
            labels.
        ignored: the label that its one cross entropy leaves out; otherwise the default of transformers.
    """

    reads: bool = False
    ignores: bool = True
    ignored: int = -100


def probe(
    held: LossInputs, model: Functional, entries: Mapping[str, Any], constants: Constants, counted: bool
) -> Losses:
    """Returns what is known about the loss of such a batch.

    Args:
        counted: whether transformers counts these items.
    """
    trainer = held.trainer
    found = SimpleNamespace(reads=False, ignored=[])

    def fn(forward: Any, batch: Any) -> torch.Tensor:
        items = {"num_items": torch.ones(1, requires_grad=True)} if counted else {}
        with torch.enable_grad():
            value, counting = _computed(held, constants, forward, {"inputs": batch, **items})
        # Only the number of items requires a gradient, so the loss does if and only if it reads this number.
        found.reads, found.ignored = value.requires_grad, counting.ignored
        return value

    try:
        model.shapes(model.calling(fn, train=False), dict(entries))
    except compat.DATA_DEPENDENT:  # the trace rejects it later, with the user's own line
        return Losses()
    labels = [x for n in trainer.label_names if (x := entries.get(n)) is not None]
    whole = bool(labels) and not any(x.is_floating_point() for x in labels)
    config = getattr(trainer.model, "config", None)
    by_rows = model.mutable is None and not getattr(config, "output_router_logits", False)
    one = len(found.ignored) == 1
    ignores = whole and by_rows and (found.reads or one)
    return Losses(found.reads, ignores, found.ignored[0] if one else -100)


def _is_mean_of_targets(counting: Any) -> bool:
    """Whether a loss is one mean over targets whose number is known. Any other loss has weight 1 per micro-batch."""
    return len(counting.counts) == 1 and not counting.in_blocks


def other_scale(trainer: Any, losses: Losses, counted: bool) -> str:
    """Returns how the loss and gradient that transformers' Trainer logs differ from the mean over a step, or "" if they
    do not.

    transformers' Trainer adds up the losses of a step's micro-batches if the model's forward takes further keyword
    arguments or there is a `compute_loss_func`, whether or not these divide by `num_items_in_batch`. Otherwise it
    averages them. Its own `compute_loss` also multiplies by the number of processes, by which DDP divides.

    Args:
        counted: whether transformers counts the items of a step.
    """
    takes_items = trainer.model_accepts_loss_kwargs and counted
    adds_up = takes_items or trainer.compute_loss_func is not None
    if losses.reads or trainer.loss_is_scaled_for_ga is not None or not adds_up:
        return ""
    own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    averaged = counted and trainer.args.average_tokens_across_devices and not own
    times = trainer.args.gradient_accumulation_steps * (trainer.accelerator.num_processes if averaged else 1)
    if times == 1:
        return ""
    return (
        "the loss does not use num_items_in_batch. loss and grad_norm are those of the mean over the step's "
        f"micro-batches and ranks; transformers.Trainer would log {times} times as much, because it adds them up "
        "(loss_is_scaled_for_ga = True in your Trainer class does so here, too)"
    )
