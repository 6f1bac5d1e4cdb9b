"""Saves and restores a Trainer: the sharded state, and files that transformers' `from_pretrained` reads.

A `checkpoint-N` directory of transformers has the sharded state in its subdirectory `STATE`, and everything else as
transformers writes it. The state includes what transformers keeps in files of the optimizer and of the loss scale.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME  # pyright: ignore[reportMissingImports] - of the extra `hf`
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # pyright: ignore[reportMissingImports]

from fzero import State, checkpoint, random, tree
from fzero.errors import CheckpointError
from fzero.hf import pretrained_saving
from fzero.hf.gathered_module import whole
from fzero.hf.resume import unmark
from fzero.state.overwrite import overwrite
from fzero.train_state import check_computed

logger = logging.getLogger("fzero")
STATE = "fzero"
"""The directory of the sharded state in a checkpoint directory of transformers."""


def first_state(trainer: Any, resumed: str | None, carried: State | None) -> State:
    """Returns the state that a training starts with.

    It is restored from the checkpoint to resume from; or it is `carried`, the state of the training before, if
    the optimizer is the same; or it is a new state, with the weights of the module or directory, or with those
    trained before.
    """
    key, mesh = random.key(trainer.args.seed), trainer._mesh()
    params, pretrained = trainer.functional.params, trainer._pretrained
    if resumed is not None:
        return trainer.compiled.restore(os.path.join(resumed, STATE), params)
    if carried is not None:  # the optimizer was kept, so its state is kept as well
        trainer._sync.check_trained()
        if pretrained is None:
            overwrite(carried, trainer.functional.named_params, mesh)
        return carried
    if pretrained is None or pretrained.directory is None:
        state = trainer.compiled.init(params, key)
    else:
        state = trainer.compiled.load(pretrained.directory, key=key)
    if pretrained is not None and trainer.train_state is not None:  # no module holds the trained weights
        names, values = tree.names(trainer.train_state.params), tree.leaves(trainer.train_state.params)
        for name, x in zip(names, values, strict=True):
            overwrite(state, {name: whole(x, mesh)}, mesh)
    return state


def save(trainer: Any, output_dir: str, internal: bool) -> bool:
    """Writes the sharded state, if this is a checkpoint directory of transformers, and the weights of a model that
    exists only as shards.

    Args:
        internal: whether transformers itself saves, and not the user.

    Returns: whether that is all. Otherwise transformers has to save the module.
    """
    args, pretrained = trainer.args, trainer._pretrained
    if trainer.train_state is not None:
        check_computed(trainer.train_state, "hf.Trainer")
    inside = os.path.basename(output_dir).startswith(f"{PREFIX_CHECKPOINT_DIR}-")
    if internal and inside and not args.save_only_model:
        if args.should_save:
            unmark(output_dir)
        checkpoint.save(os.path.join(output_dir, STATE), trainer.train_state, keep=1)
        if not _saves_weights(trainer):
            if args.should_save and trainer.processing_class is not None:
                trainer.processing_class.save_pretrained(output_dir)
            return True
    if pretrained is None or trainer.train_state is None:
        return False
    tokenizer = trainer.processing_class
    tokenizer = getattr(trainer.data_collator, "tokenizer", None) if tokenizer is None else tokenizer
    pretrained_saving.replace_pretrained(output_dir, pretrained, trainer.train_state, tokenizer)
    if args.should_save:
        torch.save(args, os.path.join(output_dir, TRAINING_ARGS_NAME))
    if args.push_to_hub and not internal:
        trainer.push_to_hub(commit_message="Model save", revision=args.hub_revision)
    return True


def _saves_weights(trainer: Any) -> bool:
    """Whether checkpoints also have files of weights. Warns once if the model's weights cannot be written."""
    why = pretrained_saving.problem(trainer._pretrained or trainer.model) if trainer._save_weights else ""
    if why:
        trainer._save_weights = False
        if trainer.is_world_process_zero():
            text = "fzero.hf.Trainer: checkpoints have the state only, no files for from_pretrained: %s"
            logger.warning(text, why)
    return trainer._save_weights


def save_scheduler(trainer: Any, output_dir: str) -> None:
    """Saves the scheduler. The optimizer's state is saved with the parameters."""
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))


def load_scheduler(trainer: Any, directory: str) -> None:
    """Restores the scheduler from a checkpoint that has one, and the learning rates of the torch optimizer."""
    path = os.path.join(directory, "scheduler.pt")
    if os.path.isfile(path):
        trainer.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))
        for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def check_state(directory: str) -> None:
    """Raises an error if a checkpoint has no complete sharded state."""
    path = os.path.join(directory, STATE)
    if not os.path.isdir(directory):
        what = f"Can't find a valid checkpoint at {directory}: there is no such directory"  # as transformers says it
        raise CheckpointError("hf.Trainer", what, fix="give a directory checkpoint-N, or True for the newest one")
    if checkpoint.find(path) is None:
        why = "is not complete" if os.path.isdir(path) else "is not there"
        what = f"{directory} has no state of fzero: {STATE}/ {why}"
        fix = "begin with its weights instead: from_pretrained(dir)"
        raise CheckpointError("hf.Trainer", what, fix=fix)


def load_best(trainer: Any) -> None:
    """Restores the state of the best checkpoint, and copies its weights to the module."""
    best = os.path.join(trainer.state.best_model_checkpoint, STATE)
    trainer.train_state = trainer.compiled.restore(best, trainer.functional.params)
    trainer._sync.fill_module(outdated=True)
