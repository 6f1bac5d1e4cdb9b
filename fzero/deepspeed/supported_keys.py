"""Defines how fzero handles each key of a DeepSpeed configuration.

The keys are those of DeepSpeed 0.19.8; tests/deepspeed_config compares them with the installed package. A key is in
one of three tables:

- `SUPPORTED`: the key takes effect.
- `REJECTED`: the key would change results or memory in a way that fzero does not offer. It is an error, except with
  a value that requests nothing.
- `IGNORED`: the key has no effect in fzero, because it tunes something that fzero plans itself, or only affects
  reports.

Every other key is unknown, and an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fzero._utils.bounded_json import parsed
from fzero.transforms.precision import DTYPE_NAMES


@dataclass(frozen=True)
class ValueKind:
    """The values that a key may have.

    Attributes:
        must: completes "must be ..." in an error.
        test: whether a value is one of them.
        null: whether null is accepted too, with the meaning of an omitted key.
        auto: whether "auto" is a value of the key itself, instead of one that the training arguments fill in.
    """

    must: str
    test: Callable[[Any], bool]
    null: bool = False
    auto: bool = False

    def problem(self, value: Any) -> str | None:
        """Returns what a value must be, if it is invalid; otherwise None."""
        if (self.null and value is None) or self.test(value):
            return None
        return f"must be {self.must}{' without quotes' if self._is_quoted(value) else ''}"

    def _is_quoted(self, value: Any) -> bool:
        try:
            return isinstance(value, str) and self.test(parsed(value.lower()))
        except ValueError:
            return False


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def _is_whole(x: Any) -> bool:
    return _is_number(x) and x == int(x)


def _is_texts(x: Any) -> bool:
    return isinstance(x, str) or (isinstance(x, list) and all(isinstance(y, str) for y in x))


def same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal. In Python 1 == True, in JSON they differ."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _one_of(*values: Any) -> ValueKind:
    return ValueKind(f"one of {', '.join(map(json.dumps, values))}", lambda x: any(same(x, value) for value in values))


_FLAG = ValueKind("true or false", lambda x: isinstance(x, bool))
_FLAG_OR_NULL = ValueKind(_FLAG.must, _FLAG.test, null=True)
_COUNT = ValueKind("a whole number of at least 0", lambda x: _is_whole(x) and x >= 0)
_COUNT_OR_NULL = ValueKind(_COUNT.must, _COUNT.test, null=True)
_COUNT_OR_AUTO = ValueKind(_COUNT.must, _COUNT.test, auto=True)
_SAMPLES = ValueKind("a whole number of at least 1", lambda x: _is_whole(x) and x >= 1, null=True)
_NUMBER = ValueKind("a number", _is_number)
_NUMBER_OR_NULL = ValueKind(_NUMBER.must, _NUMBER.test, null=True)
_FRACTION = ValueKind("a number from 0 to 1", lambda x: _is_number(x) and 0 <= x <= 1)
_PAIR = ValueKind("two numbers", lambda x: isinstance(x, list) and len(x) == 2 and all(map(_is_number, x)))
_TEXT = ValueKind("a text", lambda x: isinstance(x, str))
_TEXT_OR_NULL = ValueKind(_TEXT.must, _TEXT.test, null=True)
_TEXTS_OR_AUTO = ValueKind("a list of texts", _is_texts, auto=True)
_DTYPE = ValueKind(f"one of {', '.join(DTYPE_NAMES)}", lambda x: isinstance(x, str) and x in DTYPE_NAMES)
_DTYPE_OR_NULL = ValueKind(_DTYPE.must, _DTYPE.test, null=True)
_TIER = _one_of("none", "cpu", "nvme")


class Supported(NamedTuple):
    """The values of a key that is supported, and its effect."""

    kind: ValueKind
    says: str


class Rejected(NamedTuple):
    """Why a key is not supported, and its values that request nothing."""

    says: str
    neutral: tuple[Any, ...] = ()


def _each(section: str, names: str, answer: Any) -> dict[str, Any]:
    """Returns the same entry for several keys of a section."""
    return {f"{section}.{name}": answer for name in names.split()}


_OPTIMIZER, _SCHEDULE = "an argument of the optimizer", "an argument of the schedule"
_MOMENTUM = "beta1 changes inversely to the learning rate, beta2 is 0.99; only for optimizers with betas"

SUPPORTED: dict[str, Supported] = {
    "train_batch_size": Supported(_SAMPLES, "the samples of one step over all ranks"),
    "train_micro_batch_size_per_gpu": Supported(_SAMPLES, "the samples of one micro-batch on one rank"),
    "gradient_accumulation_steps": Supported(_SAMPLES, "fz.accumulate"),
    "gradient_clipping": Supported(_NUMBER, "optim.clip_by_global_norm; if omitted, 1.0; 0 turns clipping off"),
    "communication_data_type": Supported(_one_of("fp32", "bf16", "fp16", None), "fz.mixed_precision(reduce=)"),
    # the optimizer
    "optimizer.type": Supported(_TEXT, "an optimizer of fz.optim"),
    **_each(
        "optimizer.params", "lr eps weight_decay momentum dampening alpha rho lr_decay", Supported(_NUMBER, _OPTIMIZER)
    ),
    **_each("optimizer.params", "initial_accumulator_value momentum_decay lambd t0", Supported(_NUMBER, _OPTIMIZER)),
    **_each("optimizer.params", "betas etas step_sizes", Supported(_PAIR, _OPTIMIZER)),
    **_each(
        "optimizer.params", "nesterov maximize amsgrad centered decoupled_weight_decay", Supported(_FLAG, _OPTIMIZER)
    ),
    "optimizer.params.adam_w_mode": Supported(
        _FLAG, "whether weight decay is decoupled; true by default, also for Adam"
    ),
    "optimizer.params.torch_adam": Supported(_FLAG, "PyTorch's optimizer, with its default weight_decay"),
    "optimizer.params.muon_lr": Supported(_NUMBER, "the learning rate of the matrices that Muon updates"),
    "optimizer.params.adam_lr": Supported(_NUMBER, "the learning rate of the parameters that Muon leaves to AdamW"),
    "optimizer.params.ns_method": Supported(_one_of("gram", "standard"), "the iteration of Muon"),
    # the schedule
    "scheduler.type": Supported(
        _TEXT, "a schedule; as in DeepSpeed, warm-up starts one update late: the first two updates have the same rate"
    ),
    **_each("scheduler.params", "warmup_min_lr warmup_min_ratio cos_min_ratio", Supported(_NUMBER, _SCHEDULE)),
    "scheduler.params.warmup_max_lr": Supported(_NUMBER_OR_NULL, _SCHEDULE),
    **_each("scheduler.params", "total_num_steps warmup_num_steps", Supported(_COUNT, _SCHEDULE)),
    "scheduler.params.warmup_type": Supported(_one_of("log", "linear"), _SCHEDULE),
    **_each("scheduler.params", "lr_range_test_min_lr lr_range_test_step_rate", Supported(_NUMBER, _SCHEDULE)),
    "scheduler.params.lr_range_test_step_size": Supported(_COUNT, _SCHEDULE),
    "scheduler.params.lr_range_test_staircase": Supported(_FLAG, _SCHEDULE),
    **_each("scheduler.params", "cycle_min_lr cycle_max_lr decay_lr_rate", Supported(_NUMBER, _SCHEDULE)),
    **_each("scheduler.params", "cycle_first_step_size decay_step_size", Supported(_COUNT, _SCHEDULE)),
    **_each("scheduler.params", "cycle_first_stair_count cycle_second_step_size", Supported(_COUNT_OR_NULL, _SCHEDULE)),
    "scheduler.params.cycle_second_stair_count": Supported(_COUNT_OR_NULL, _SCHEDULE),
    **_each("scheduler.params", "cycle_min_mom cycle_max_mom decay_mom_rate", Supported(_NUMBER, _MOMENTUM)),
    "scheduler.params.cycle_momentum": Supported(_FLAG, _MOMENTUM),
    # precision
    "fp16.enabled": Supported(_FLAG, "fz.mixed_precision('fp16')"),
    "fp16.loss_scale": Supported(_NUMBER, "0: a dynamic fz.LossScale; another number: a constant scale"),
    **_each(
        "fp16", "initial_scale_power loss_scale_window hysteresis min_loss_scale", Supported(_COUNT, "fz.LossScale")
    ),
    "fp16.consecutive_hysteresis": Supported(_FLAG, "fz.LossScale"),
    "bf16.enabled": Supported(_FLAG, "fz.mixed_precision('bf16')"),
    "bf16.check_grad_overflow": Supported(
        _FLAG, "optim.skip_nonfinite: a step whose gradients are not finite is skipped"
    ),
    "bf16.bf16_master_weights_and_grads": Supported(
        _FLAG, "fz.mixed_precision(params='bf16', reduce='bf16', rounding='nearest')"
    ),
    "torch_autocast.enabled": Supported(_FLAG, "fz.mixed_precision: every parameter is cast, including those of norms"),
    "torch_autocast.dtype": Supported(_DTYPE, "fz.mixed_precision"),
    "data_types.grad_accum_dtype": Supported(_DTYPE_OR_NULL, "fz.mixed_precision(reduce=)"),
    "data_types.param_dtype": Supported(_DTYPE_OR_NULL, "must equal the compute dtype, as in DeepSpeed"),
    "data_types.keep_in_fp32_modules": Supported(
        _TEXTS_OR_AUTO, "fz.mixed_precision(where=): parameters with these names keep their dtype"
    ),
    # ZeRO and offloading
    "zero_optimization.stage": Supported(
        _one_of(0, 1, 2, 3), "0: fz.data_parallel; 1: fz.shard_opt_state; 2: fz.shard_grads; 3: fz.shard_params"
    ),
    "zero_optimization.stage3_param_persistence_threshold": Supported(
        _COUNT_OR_AUTO, "fz.shard_params(where=): smaller parameters are replicated, their optimizer state is sharded"
    ),
    "zero_optimization.offload_optimizer.device": Supported(_TIER, "fz.offload(..., 'opt_state')"),
    "zero_optimization.offload_optimizer.nvme_path": Supported(_TEXT_OR_NULL, "fz.offload(path=)"),
    "zero_optimization.offload_optimizer.ratio": Supported(_FRACTION, "fz.offload(fraction=)"),
    "zero_optimization.offload_param.device": Supported(_TIER, "fz.offload(..., 'params')"),
    "zero_optimization.offload_param.nvme_path": Supported(_TEXT_OR_NULL, "fz.offload(path=)"),
    "zero_optimization.cpu_offload": Supported(_FLAG_OR_NULL, "deprecated: offload_optimizer.device is cpu"),
    "zero_optimization.cpu_offload_param": Supported(_FLAG_OR_NULL, "deprecated: offload_param.device is cpu"),
    "activation_checkpointing.cpu_checkpointing": Supported(
        _FLAG, "fz.remat('full') and fz.offload('cpu', 'activations')"
    ),
}

_REMOVED = Rejected("no longer supported by DeepSpeed either", (False, None))
_TENSOR = "use fz.tensor_parallel(rules=...), or fz.hf.Trainer(tensor_parallel=N)"
_FP32_STATE = "optimizer state is fp32; to save memory, pass optimizer=fz.optim.adamw(..., state_dtype='int8')"

REJECTED: dict[str, Rejected] = {
    "managed_gradient_accumulation": Rejected("a step is one program, which contains its micro-batches", (True,)),
    "gradient_allreduce_op": Rejected("the gradient is that of the mean loss", ("mean",)),
    "sequence_parallel_size": Rejected("use fz.sequence_parallel()", (1,)),
    "weight_quantization": Rejected("quantized weights are not supported", (None,)),
    "datastates_ckpt": Rejected(
        "use fz.checkpoint.save(wait=False), which writes while training continues", (False, None)
    ),
    **dict.fromkeys(("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients"), _REMOVED),
    **dict.fromkeys(("eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"), _REMOVED),
    **dict.fromkeys(("curriculum_learning", "progressive_layer_drop"), _REMOVED),
    "optimizer.params.bias_correction": Rejected("bias correction is always applied", (True,)),
    "optimizer.params.eps_inside_sqrt": Rejected("eps is added outside of the square root", (False,)),
    **_each("optimizer.params", "max_coeff min_coeff", Rejected("fz.optim.lamb does not clip its trust ratios")),
    "optimizer.params.max_grad_norm": Rejected("DeepSpeed rejects it too: use gradient_clipping", (0,)),
    "optimizer.params.fp32_optimizer_states": Rejected(_FP32_STATE, (True,)),
    "scheduler.params.last_batch_iteration": Rejected("a schedule depends on the number of updates", (-1,)),
    "fp16.fp16_master_weights_and_grads": Rejected("master weights in fp16 are not supported", (False,)),
    "bf16.bf16_optimizer_states": Rejected(_FP32_STATE, (False,)),
    "torch_autocast.lower_precision_safe_modules": Rejected("use fz.mixed_precision(where=)"),
    "data_types.buffer_dtype": Rejected("buffers keep their dtype", (None,)),
    "zero_optimization.zero_hpz_partition_size": Rejected(
        "use fz.hierarchical(axis='node') on a mesh with the axis node", (0, 1)
    ),
    **_each(
        "zero_optimization",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
        Rejected("use fz.compress for transfers in 8 bits", (False,)),
    ),
    "zero_optimization.zenflow": Rejected("updates with stale gradients are not supported", (None,)),
    **_each(
        "zero_optimization",
        "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param",
        Rejected("no longer supported by DeepSpeed either"),
    ),
    "activation_checkpointing.number_checkpoints": Rejected("activations are checkpointed per block", (None, False)),
    "tensor_parallel.autotp_size": Rejected(_TENSOR, (0, 1)),
    "tensor_parallel.tensor_parallel.tp_size": Rejected(_TENSOR, (1,)),
    "expert_parallel.enabled": Rejected("use fz.expert_parallel(where=...)", (False,)),
    "pipeline.stages": Rejected("wrap the step with fz.pipeline()", ("auto", None, 0, 1)),
    "hybrid_engine.enabled": Rejected("generation during training is not supported", (False,)),
    "data_efficiency.enabled": Rejected("sampling by difficulty and dropping of tokens are not supported", (False,)),
    **_each(
        "compile",
        "offload_activation offload_opt_states offload_parameters",
        Rejected("use zero_optimization.offload_optimizer and offload_param", (False,)),
    ),
    "compile.passes": Rejected("the passes are fzero's own", ([], ["z1"], ["z3"], None)),
    "checkpoint.use_node_local_storage": Rejected(
        "all ranks write one directory, which must be on a shared filesystem", (False,)
    ),
}

_IGNORED = {
    "": """dataloader_drop_last zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients
        gradient_predivide_factor seq_parallel_communication_data_type use_data_before_expert_parallelism
        disable_allgather allgather_size vocabulary_size steps_per_print wall_clock_breakdown memory_breakdown
        dump_state log_level disable_python_gc comms_config monitor_config local_rank cuda_visible_devices fp8""",
    "optimizer": "legacy_fusion",
    "optimizer.params": "foreach fused set_grad_none capturable differentiable",
    "fp16": "auto_cast",
    "bf16": "immediate_grad_update",
    "zero_optimization": """contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
        round_robin_gradients parameter_alignment memory_efficient_linear override_module_apply
        log_trace_cache_warnings enable_sanity_checks legacy_stage1 compute_grad_norm overlap_comm
        cpu_offload_use_pin_memory reduce_bucket_size allgather_bucket_size sub_group_size load_from_fp32_weights
        elastic_checkpoint pipeline_loading_checkpoint ignore_unused_parameters save_muon_momentum_buffer_in_memory
        stage3_gather_fp16_weights_on_model_save
        stage3_prefetch_bucket_size stage3_model_persistence_threshold stage3_max_live_parameters
        stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        prefetch_bucket_size model_persistence_threshold max_live_parameters max_reuse_distance
        gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
        allgather_sequential""",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_optimizer": """pin_memory pipeline_read pipeline_write fast_init super_offload
        buffer_count cpuadam_cores_perc""",
    "zero_optimization.offload_param": "pin_memory buffer_count buffer_size max_in_cpu",
    "zero_optimization.aio": """single_submit overlap_events use_gds block_size queue_depth intra_op_parallelism
        thread_count""",
    "aio": "single_submit overlap_events use_gds block_size queue_depth intra_op_parallelism thread_count",
    "activation_checkpointing": """partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary
        profile""",
    "tensor_parallel.tensor_parallel": "tp_grain_size mpu tp_group",
    "tensor_parallel": """dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend
        injection_policy_tuple partition_config preset_model keep_module_on_host replace_with_kernel_inject
        kernel_inject""",
    "expert_parallel": """autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model
        moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm route_scale
        score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin
        comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k load_balance_coeff
        routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts
        shared_experts_pattern shared_experts_gate_pattern expert_activation""",
    "pipeline": """partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned
        use_reentrant""",
    "hybrid_engine": """max_out_tokens inference_tp_size release_inference_cache pin_parameters
        tp_gather_partition_size enable_cuda_graph""",
    "data_efficiency": "seed data_sampling data_routing",
    "compile": """deepcompile autoep_non_moe free_activation offload_activation_pin_memory double_buffer
        symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather
        keep_int_input_tensors keep_all_input_tensors free_activation_threshold""",
    "checkpoint": "tag_validation load_universal checkpoint_serialization",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier",
    "flops_profiler": """enabled detailed recompute_fwd_factor profile_step module_depth top_modules output_file""",
    "comms_logger": "enabled prof_all verbose debug prof_ops",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled project group team",
    "comet": """enabled online samples_log_interval project workspace api_key experiment_name experiment_key mode""",
    "timers.throughput": "enabled synchronized",
    "autotuning": """enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step start_step end_step
        metric metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path
        mp_size max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu
        min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes""",
}
_NAMES = {section: names.split() for section, names in _IGNORED.items()}
_NAMES |= {"bfloat16": _NAMES["bf16"], "tensor_parallel.tp": _NAMES["tensor_parallel.tensor_parallel"]}
IGNORED = frozenset(f"{section}.{name}".lstrip(".") for section, names in _NAMES.items() for name in names)

ALIASES: dict[str, str] = {
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    **{f"bfloat16{path[4:]}": path for path in (*SUPPORTED, *REJECTED) if path.startswith("bf16.")},
    "tensor_parallel.tp.tp_size": "tensor_parallel.tensor_parallel.tp_size",
}
"""Keys that DeepSpeed reads under a second name: maps the second name to the name in the tables above."""

KEYS = (*SUPPORTED, *REJECTED, *sorted(IGNORED), *ALIASES)
SECTIONS = frozenset(path.rsplit(".", n)[0] for path in KEYS for n in range(1, path.count(".") + 1))
"""The paths of the sections that contain keys."""
