"""Defines which options of transformers' Trainer keep their meaning, which have no effect in fzero, and which are
rejected."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`
from transformers.trainer_utils import HubStrategy  # pyright: ignore[reportMissingImports]

from fzero._utils.arguments import shown
from fzero.errors import FzeroValueError
from fzero.hf import torch_optimizers
from fzero.hf.data_parallel_ranks import OtherArguments
from fzero.hf.models import Pretrained
from fzero.hf.weight_sync import problems
from fzero.transforms.transform import Transform

Base: Any = transformers.TrainingArguments

KEPT = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 tf32
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    use_cache logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
    include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_total_limit
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint seed data_seed use_cpu accelerator_config dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy
    length_column_name ddp_backend ddp_timeout deepspeed skip_memory_metrics do_train do_eval do_predict
    resume_from_checkpoint local_rank full_determinism
"""
"""Options that have the same meaning as in transformers."""

NOTES = {
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), "a step is one compiled program already"
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "there is no DDP: transfers are planned",
    ),
    "torch_empty_cache_steps": "a step's memory is planned",
    "fsdp_config": "only with fsdp, which is not supported",
    "liger_kernel_config": "only with use_liger_kernel, which is not supported",
    "optim_target_modules": "of optimizers that are not supported",
}
"""Options that are accepted but have no effect, and why."""

REFUSED = {
    "fsdp": "write it as transforms: Trainer(transforms=[fz.shard_params()]) (docs/migrate/fsdp.md)",
    "parallelism_config": "one axis of data parallelism: Trainer(mesh=fz.make_mesh(...), transforms=[...])",
    "use_liger_kernel": "its kernels are not operations that a step can record",
    "neftune_noise_alpha": "its noise is drawn in a hook, from torch's generator",
    "auto_find_batch_size": "`fzero plan`, and Trainer(memory_budget=), say what fits before anything runs",
    "bf16_full_eval": "it would cast the module in place; bf16=True evaluates in bf16, too",
    "fp16_full_eval": "it would cast the module in place; fp16=True evaluates in fp16, too",
    "save_on_each_node": (
        "a state consists of the shards of all ranks: its directory must be on a filesystem that they share"
    ),
    "debug": "mixed_precision(watch=True) and fz.testing.check find what overflows",
    "enable_jit_checkpoint": "it saves in the midst of a step",
}
"""Options that are rejected if they are set, and what to do instead."""

OF_OTHERS = {
    "predict_with_generate": "for Seq2SeqTrainer, which is not supported: generate with fz.hf.module(model, state)"
}
"""Options of other argument classes of transformers, and what to do instead."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
OVERRIDDEN = {
    "training_step": "a step is one compiled program: override compute_loss, or give compute_loss_func",
    "optimizer_step": "the update is part of the program: give optimizers=, or a callback",
    "autocast_smart_context_manager": "precision is a transform: fz.mixed_precision",
    "compute_loss_context_manager": "precision is a transform: fz.mixed_precision",
    "_prepare_for_training": "the step is made there",
    "_inner_training_loop": "the loop is the library's",
}
"""Methods that a subclass must not override, and what to do instead."""


class TrainingArguments(Base):
    """transformers' TrainingArguments, except that `deepspeed` is read by fzero and not by DeepSpeed.

    The original class initializes DeepSpeed as soon as it is constructed with a configuration, and needs the
    package. Everything else is unchanged; scripts without `--deepspeed` can use the original class.

    Attributes:
        deepspeed: the path of a ds_config.json, its JSON, or a dict.

    Example:
        >>> import tempfile
        >>> from fzero.hf import TrainingArguments
        >>> given = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
        >>> args = TrainingArguments(tempfile.mkdtemp(), deepspeed=given, use_cpu=True, report_to="none")
        >>> args.deepspeed["zero_optimization"]
        {'stage': 3}
    """

    def __post_init__(self) -> None:
        given, self.deepspeed = self.deepspeed, None
        super().__post_init__()
        if isinstance(given, str) and given.lstrip().startswith("{"):
            from fzero.deepspeed.config_values import read_text  # here, because the rest works without this folder

            given = read_text(given, "deepspeed=")
        self.deepspeed = given


def notes(args: Any, save_weights: bool = True) -> list[str]:
    """Returns a message for each option that is set and has no effect, or less than in transformers."""
    found = [f"{name}={shown(getattr(args, name))}: {NOTES[name]}" for name in _set(args) if name in NOTES]
    if args.push_to_hub and not save_weights and not args.save_only_model and args.hub_strategy != HubStrategy.END:
        said = str(getattr(args.hub_strategy, "value", args.hub_strategy))
        found.append(
            f"hub_strategy={said!r}: uploads in training have states, no weights: leave out save_weights=False"
        )
    if more := _of_other_libraries(args):
        found.append(f"{', '.join(more)}: fields of {type(args).__name__}, which fzero does not read")
    return found


def check(
    trainer: Any,
    model: Any,
    args: Any,
    optimizer: Any,
    pair: Any,
    transforms: Any,
    base: type,
    sync: Any,
    wrong: Sequence[str] = (),
) -> None:
    """Raises one error that lists everything that was asked for and is not supported, before anything is done.

    Args:
        optimizer: `optimizers[0]`; `pair`: `optimizer_cls_and_kwargs`.
        base: the Trainer class whose methods must not be overridden.
        wrong: problems that are already known.
    """
    found = [*problems(sync), *wrong]
    known = {*KEPT.split(), *NOTES}
    for name in _set(args):
        if why := {**REFUSED, **OF_OTHERS}.get(name):
            found.append(f"{name}={shown(getattr(args, name))}: {why}")
        elif name not in known:
            found.append(f"{name}={shown(getattr(args, name))}: is not known to this version of fzero")
    for name, why in OVERRIDDEN.items():
        if getattr(type(trainer), name, None) is not getattr(base, name, None):
            found.append(f"{type(trainer).__name__}.{name} is overridden: {why}")
    if isinstance(model, Pretrained) and args.load_best_model_at_end and args.save_only_model:
        text = (
            "with save_only_model no state of a model that exists only as "
            "shards is saved: save_total_limit=1 keeps the best"
        )
        found.append(f"load_best_model_at_end: {text}")
    if args.train_sampling_strategy == "batch_rebalance":
        found.append("train_sampling_strategy='batch_rebalance': its batches have different numbers of samples")
    config = None
    if getattr(args, "deepspeed_plugin", None) is not None:
        found.append("deepspeed: these arguments initialise DeepSpeed: from fzero.hf import TrainingArguments")
    elif args.deepspeed:
        from fzero.hf import deepspeed_recipe

        counted = OtherArguments(args, world_size=max(1, args.world_size // trainer._tensor_axis.size))
        config, wrong_keys = deepspeed_recipe.checked(counted)
        found += wrong_keys
        if transforms is not None:
            found.append("transforms: args.deepspeed sets them already")
    own = config is not None and "optimizer" in config
    if optimizer is not None:
        found += torch_optimizers.problems(optimizer, "optimizers")
    elif pair is not None and pair[0] not in torch_optimizers.CLASSES:
        found.append(f"optimizer_cls_and_kwargs: {torch_optimizers.not_translated(pair[0])}")
    elif pair is None and not own and type(trainer).create_optimizer is base.create_optimizer:  # pyright: ignore[reportAttributeAccessIssue]
        name = str(getattr(args.optim, "value", args.optim))
        found += [] if name in OPTIMIZERS else [f"optim={name!r}: is not supported; use one of {', '.join(OPTIMIZERS)}"]
    if own and (optimizer is not None or pair is not None):
        found.append("optimizers: the section `optimizer` of args.deepspeed sets one already")
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if own and "scheduler" not in (config or {}) and scheduler in ("reduce_lr_on_plateau", "greedy"):
        found.append(f"lr_scheduler_type={scheduler!r}: with the optimizer of args.deepspeed, rates depend on the step")
    kwargs = args.activation_checkpointing_kwargs or {}
    if args.activation_checkpointing and (kwargs.get("every_n_layers", 1) != 1 or kwargs.get("offload")):
        found.append("activation_checkpointing_kwargs: every_n_layers, offload: write fz.remat and fz.offload")
    for given in transforms or ():
        if not isinstance(given, Transform):
            found.append(f"transforms: {shown(given)} is not a transform, such as fz.shard_params()")
        elif given.name in ("accumulate", "train_batch_size"):
            found.append(f"transforms: {given}: it is set by TrainingArguments(gradient_accumulation_steps=)")
    if found:
        fix = "leave these out, or use transformers.Trainer; all other arguments work as there"
        raise FzeroValueError("hf.Trainer", "these arguments are not supported", found, fix)


def _set(args: Any) -> list[str]:
    """Returns the names of transformers' options that differ from their defaults.

    Fields that a user's subclass adds are left to the user's code.
    """
    library = next(c for c in type(args).__mro__ if c.__module__.partition(".")[0] in ("transformers", "fzero"))
    blank = {f.name: f.default for f in dataclasses.fields(library) if f.default is not dataclasses.MISSING}
    return [n for n, default in blank.items() if (x := getattr(args, n)) != default and x not in (None, False, [], {})]


def _of_other_libraries(args: Any) -> list[str]:
    """Returns the names of set fields that another installed library (trl) adds, which its own Trainer would read."""
    found = {}
    for cls in type(args).__mro__:
        file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
        if cls is Base:
            break
        if "site-packages" in file and cls.__module__.partition(".")[0] not in ("transformers", "fzero"):
            found |= {n: f for n, f in vars(cls).get("__dataclass_fields__", {}).items() if n not in _FIELDS}
    return [n for n, f in found.items() if f.default is not dataclasses.MISSING and getattr(args, n) != f.default]


_FIELDS = {f.name for f in dataclasses.fields(Base)}
