"""Determines the parts of a Trainer's step from a ds_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero import compose, optim, remat
from fzero.deepspeed.config import load_config
from fzero.deepspeed.config_values import read_file
from fzero.deepspeed.optimizer import default_rate
from fzero.deepspeed.training_arguments import from_arguments
from fzero.errors import FzeroValueError
from fzero.hf.step_recipe import Recipe
from fzero.hf.torch_optimizers import Translated, rate_in_state
from fzero.transforms.remat import Remat
from fzero.transforms.transform import Transform, find


def of_deepspeed(args: Any, num_steps: int, made: Translated | None, more: Sequence[Transform] = ()) -> Recipe:
    """Makes the recipe from a ds_config.json, with "auto" filled in from the arguments, plus the transforms in `more`.

    If the file defines no optimizer, the Trainer's own is used (`made`), and likewise its schedule.
    """
    own, scheduled = _sections(args.deepspeed)
    given: dict[str, Any] = {}
    schedule, at_rate = rate_in_state()
    if not own:
        given["optimizer"] = lambda schedule: made and made.optimizer
    elif not scheduled:
        given["schedule"] = schedule
    auto = from_arguments(args, num_steps)
    found = load_config(args.deepspeed, auto=auto, world=args.world_size, **given)
    optimizer, groups = found.optimizer, () if made is None else made.groups
    if own and not scheduled:
        optimizer, groups = at_rate(optimizer), (0,)
    more = [*more]
    more += [remat(policy="full")] if args.activation_checkpointing and find(found.transforms, Remat) is None else []
    return Recipe(optimizer, groups, compose(found, *more), found.schedule if scheduled else None, found.report())


def checked(args: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration, and a message for each of its problems.

    Args:
        args: the training arguments; `world_size` is the number of data shards, to which batch sizes refer.
    """
    config, _ = read_file(args.deepspeed)
    try:
        # The result is dropped, so the optimizer and the number of steps need not be the real ones.
        of_deepspeed(args, max(1, args.max_steps), Translated(optim.identity(), ()))
    except FzeroValueError as error:
        return config, [f"deepspeed: {line.strip()}" for line in str(error).splitlines() if line.startswith("  ")]
    return config, []


def base_rate(args: Any) -> float | None:
    """Returns the learning rate of a configuration's optimizer, 1 if the configuration has a schedule, which gives the
    rates; None if it has no optimizer.
    """
    own, scheduled = _sections(args.deepspeed)
    if not own or scheduled:
        return 1.0 if own else None
    section = read_file(args.deepspeed)[0]["optimizer"]
    lr = section.get("params", {}).get("lr", default_rate(str(section.get("type", ""))))
    return args.learning_rate if lr == "auto" else lr


def _sections(config: Any) -> tuple[bool, bool]:
    """Returns whether a configuration has an optimizer, and whether it has a schedule."""
    found = read_file(config)[0]
    return "optimizer" in found, "scheduler" in found
