"""Determines the parts of a Trainer's step from its arguments or a ds_config.json: optimizer, transforms and learning
rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from fzero import accumulate, compose, mixed_precision, optim, remat, shard_params
from fzero.hf import torch_optimizers
from fzero.hf.data_parallel_ranks import OtherArguments
from fzero.hf.torch_optimizers import Translated, translated
from fzero.optim import GradientTransformation, Schedule
from fzero.transforms.remat import Remat
from fzero.transforms.transform import Transform, find


@dataclass(frozen=True)
class Recipe:
    """The parts of a step.

    Attributes:
        optimizer: for `fz.train_step`.
        groups: for each learning rate in the optimizer's state, the index of the torch parameter group that has it.
        apply: applies the transforms to a training step.
        schedule: the learning rate by the number of the update, if a ds_config.json defines it.
        report: the table that says how each of its keys was handled.
        values: the settings of torch's parameter groups that the step was made with, without learning rates.
    """

    optimizer: GradientTransformation
    groups: tuple[int, ...]
    apply: Callable[[Any], Any]
    schedule: Schedule | None = None
    report: str = ""
    values: Sequence[dict[str, Any]] = ()


def of_arguments(args: Any, made: Translated, transforms: Any, more: Sequence[Transform]) -> Recipe:
    """Makes the recipe from the Trainer's arguments, with the caller's `transforms` instead of ZeRO-3 if given, plus
    `more`."""
    clipped = bool(args.max_grad_norm and args.max_grad_norm > 0)
    optimizer = (
        optim.chain(optim.clip_by_global_norm(args.max_grad_norm), made.optimizer) if clipped else made.optimizer
    )
    specs = [shard_params()] if transforms is None else list(transforms)
    specs += more
    specs += [mixed_precision(compute=dtype) for dtype in ("bf16", "fp16") if getattr(args, dtype)]
    specs += [remat(policy="full")] if args.activation_checkpointing and find(tuple(specs), Remat) is None else []
    specs += [accumulate(args.gradient_accumulation_steps)] if args.gradient_accumulation_steps > 1 else []
    return Recipe(optimizer, made.groups, compose(*specs))


def of(trainer: Any, model: Any, num_steps: int, transforms: Any, more: Sequence[Transform] = ()) -> Recipe:
    """Makes the recipe of a Trainer, and creates its torch optimizer and scheduler, which hold the learning rates.

    Raises:
        FzeroValueError: the optimizer cannot be translated, or something in a ds_config.json is not supported.
    """
    args, module = OtherArguments(trainer.args, world_size=trainer.accelerator.num_processes), trainer.model
    if trainer._created_lr_scheduler:
        trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
    made, rate = None, None
    if args.deepspeed:
        from fzero.hf import deepspeed_recipe  # here, because everything else works without fzero.deepspeed

        rate = deepspeed_recipe.base_rate(args)
    if rate is not None:  # a schedule writes its rates to the group of this optimizer
        trainer.optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=rate)
    else:
        trainer.create_optimizer()
        made = translated(trainer.optimizer, dict(module.named_parameters(remove_duplicate=False)), model)
    trainer.optimizer.state = torch_optimizers.Elsewhere()
    values = torch_optimizers.values(trainer.optimizer)  # before a schedule changes them
    if args.deepspeed:
        from fzero.hf import deepspeed_recipe

        found = deepspeed_recipe.of_deepspeed(args, num_steps, made, more)
    else:
        assert made is not None, "or there was a section"
        found = of_arguments(args, made, transforms, more)
    if (schedule := found.schedule) is not None:
        base = 1.0 if rate is not None else args.learning_rate
        # LambdaLR multiplies the rate of the parameter group, `base`, by this factor.
        trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda t: float(schedule(torch.tensor(t))) / base)
        trainer._created_lr_scheduler = True
    trainer.create_scheduler(num_training_steps=num_steps)
    return replace(found, values=values)
