"""Tells for every key of DeepSpeed's configuration what becomes of it: a meaning, a note or a refusal.

The keys are those of DeepSpeed 0.19.8; tests/deepspeed_config compares them with the installed package.
[Note: answers] A key with a *meaning* is carried out. One with a *note* is accepted and does nothing, for a reason: it
tunes what is planned here, or reports. One that is *refused* would change numbers or memory in a way that is not there;
its neutral values, which ask for nothing, are accepted.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MEANING, NOTE, REFUSED = "meaning", "note", "refused"


@dataclass(frozen=True)
class Row:
    """A key: the answer to it, in which words, the kind of its values (fzero/deepspeed/reading.py), and those of them
    that ask for nothing."""

    answer: str
    says: str
    kind: str | tuple[Any, ...]
    neutral: tuple[Any, ...] = ()


# A paragraph: an answer, the section ("-": the top), neutral values, and the words; then by kind the names of the keys.
# "flag?" takes null too, "count~" is "auto" of its own right, and a list is of the values that there are.
_TABLE = """
meaning - | rows of a step over all ranks
  rows? train_batch_size
meaning - | rows of a rank and micro-batch
  rows? train_micro_batch_size_per_gpu
meaning - | fz.accumulate
  rows? gradient_accumulation_steps
refused - [true] | a step is one program: its micro-batches are its own
  flag managed_gradient_accumulation
note - | batches are the caller's; one that does not divide is an error
  flag dataloader_drop_last
meaning optimizer | an optimizer of fz.optim
  text type
note optimizer | updates are fused by the compiler
  flag legacy_fusion
meaning optimizer.params | an argument of the optimizer
  number lr eps weight_decay momentum dampening alpha rho lr_decay initial_accumulator_value momentum_decay lambd t0
  pair betas etas step_sizes
  flag nesterov maximize amsgrad centered decoupled_weight_decay
meaning optimizer.params | whether decay is decoupled; by default it is, of Adam too
  flag adam_w_mode
meaning optimizer.params | PyTorch's optimizer, and so its default weight_decay
  flag torch_adam
refused optimizer.params [true] | the bias correction is always made
  flag bias_correction
refused optimizer.params [false] | not there
  flag eps_inside_sqrt
refused optimizer.params | it clips the ratios of LAMB, which fz.optim.lamb does not
  number max_coeff min_coeff
refused optimizer.params [0] | DeepSpeed refuses it too: say gradient_clipping
  number max_grad_norm
refused optimizer.params [true] | state is fp32; less memory: optimizer=fz.optim.adamw(..., state_dtype='int8')
  flag fp32_optimizer_states
note optimizer.params | the update is compiled
  flag? foreach fused
  flag set_grad_none capturable differentiable
meaning optimizer.params | the learning rate of Muon's matrices, and of its other leaves
  number muon_lr adam_lr
meaning optimizer.params | the iteration of Muon
  ["gram","standard"] ns_method
note - | any optimizer shards, on any tier
  flag zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
meaning scheduler | a schedule; a warm-up is one update late as DeepSpeed's: its first two updates have the same rate
  text type
meaning scheduler.params | an argument of the schedule
  number warmup_min_lr warmup_min_ratio cos_min_ratio
  number? warmup_max_lr
  count total_num_steps warmup_num_steps
  ["log","linear"] warmup_type
refused scheduler.params [-1] | a schedule goes by the updates that a state counts
  [-1] last_batch_iteration
meaning scheduler.params | an argument of the schedule
  number lr_range_test_min_lr lr_range_test_step_rate cycle_min_lr cycle_max_lr decay_lr_rate
  flag lr_range_test_staircase
  count lr_range_test_step_size cycle_first_step_size decay_step_size
  count? cycle_first_stair_count cycle_second_step_size cycle_second_stair_count
meaning scheduler.params | the first beta of Adam against the learning rate, the second is 0.99; others have no betas
  number cycle_min_mom cycle_max_mom decay_mom_rate
  flag cycle_momentum
meaning - | optim.clip_by_global_norm; omitted it is 1.0, and 0 is none
  number gradient_clipping
meaning fp16 | fz.mixed_precision('fp16')
  flag enabled
meaning fp16 | 0: a dynamic fz.LossScale; a number: one that never moves
  number loss_scale
meaning fp16 | fz.LossScale
  count initial_scale_power loss_scale_window hysteresis min_loss_scale
  flag consecutive_hysteresis
note fp16 | a batch is cast to the dtype that is computed in
  flag auto_cast
refused fp16 [false] | masters in fp16 are not there
  flag fp16_master_weights_and_grads
meaning bf16 | fz.mixed_precision('bf16')
  flag enabled
meaning bf16 | optim.skip_nonfinite: a step whose gradients are not finite changes nothing
  flag check_grad_overflow
note bf16 | gradients are added up where they arise
  flag immediate_grad_update
meaning bf16 | fz.mixed_precision(params='bf16', reduce='bf16', rounding='nearest')
  flag bf16_master_weights_and_grads
refused bf16 [false] | state is fp32; less memory: optimizer=fz.optim.adamw(..., state_dtype='int8')
  flag bf16_optimizer_states
meaning torch_autocast | fz.mixed_precision: every parameter is cast, those of norms too
  flag enabled
meaning torch_autocast | fz.mixed_precision
  dtype dtype
refused torch_autocast | which leaves are cast is said by fz.mixed_precision(where=)
  texts lower_precision_safe_modules
meaning - | fz.mixed_precision(reduce=)
  ["fp32","bf16","fp16",null] communication_data_type
meaning data_types | fz.mixed_precision(reduce=)
  dtype? grad_accum_dtype
meaning data_types | must be the dtype that is computed in, as with DeepSpeed
  dtype? param_dtype
refused data_types [null] | buffers keep their dtype
  dtype? buffer_dtype
meaning data_types | fz.mixed_precision(where=): leaves of these names keep their dtype
  texts~ keep_in_fp32_modules
note - | sums over ranks are made exact means, in the dtype of communication_data_type
  flag prescale_gradients
  number gradient_predivide_factor
refused - ["mean"] | the gradient is that of the mean loss
  ["mean","sum"] gradient_allreduce_op
meaning zero_optimization | 0: fz.data_parallel; 1: fz.shard_opt_state; 2: fz.shard_grads; 3: fz.shard_params
  [0,1,2,3] stage
note zero_optimization | transfers are planned: print(train.program) shows them
  flag contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions round_robin_gradients
    parameter_alignment stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential memory_efficient_linear
    override_module_apply log_trace_cache_warnings enable_sanity_checks legacy_stage1 compute_grad_norm
  flag? overlap_comm cpu_offload_use_pin_memory
  count reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
    stage3_model_persistence_threshold stage3_max_reuse_distance stage3_module_granularity_threshold
note zero_optimization | at most two blocks' parameters are whole; more with fz.compile(memory_budget=)
  count stage3_max_live_parameters
meaning zero_optimization | fz.shard_params(where=): smaller parameters stay whole, their state is sharded
  count~ stage3_param_persistence_threshold
note zero_optimization | fz.checkpoint.export writes whole weights of any state
  flag stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
note zero_optimization | masters start from the values given, and any state restores on any mesh
  flag load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint
note zero_optimization | a parameter that the loss does not read has a zero gradient
  flag ignore_unused_parameters
note zero_optimization | the momenta of Muon rest where fz.offload says
  flag save_muon_momentum_buffer_in_memory
note zero_optimization.leaf_module | no hooks: every rank runs the same lines
  texts classes names name_suffixes
refused zero_optimization [0, 1] | a second group of shards is not there
  count zero_hpz_partition_size
refused zero_optimization [false] | transfers in 8 bits are fz.compress's
  flag zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
refused zero_optimization [null] | it updates by stale gradients
  any zenflow
refused zero_optimization | DeepSpeed has removed it, and refuses it too
  any mics_shard_size mics_hierarchical_params_gather zeropp_loco_param
meaning zero_optimization.offload_optimizer | fz.offload(..., 'opt_state')
  ["none","cpu","nvme"] device
meaning zero_optimization.offload_param | fz.offload(..., 'params')
  ["none","cpu","nvme"] device
meaning zero_optimization.offload_optimizer | fz.offload(path=)
  text? nvme_path
meaning zero_optimization.offload_param | fz.offload(path=)
  text? nvme_path
meaning zero_optimization.offload_optimizer | fz.offload(fraction=)
  fraction ratio
note zero_optimization.offload_optimizer | transfers are planned: print(train.program) shows them
  flag pin_memory pipeline_read pipeline_write fast_init super_offload
  count buffer_count
  fraction cpuadam_cores_perc
note zero_optimization.offload_param | transfers are planned: print(train.program) shows them
  flag pin_memory
  count buffer_count buffer_size
note zero_optimization.offload_param | host memory is bounded by fz.compile(host_budget=)
  count max_in_cpu
meaning zero_optimization | deprecated: offload_optimizer.device is cpu
  flag? cpu_offload
meaning zero_optimization | deprecated: offload_param.device is cpu
  flag? cpu_offload_param
note zero_optimization.aio | DeepSpeed refuses it here: aio belongs at the top; transfers with the disk are planned
  flag single_submit overlap_events use_gds
  count block_size queue_depth intra_op_parallelism thread_count
note aio | transfers with the disk are planned
  flag single_submit overlap_events use_gds
  count block_size queue_depth intra_op_parallelism thread_count
meaning activation_checkpointing | fz.remat('full') and fz.offload('cpu', 'activations')
  flag cpu_checkpointing
refused activation_checkpointing [null, false] | the checkpoints are the blocks
  any number_checkpoints
note activation_checkpointing | what a block keeps for its backward is said by fz.remat
  flag partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile
refused - [1] | compose fz.sequence_parallel()
  count sequence_parallel_size
note - | of sequence parallelism, which sends what attention computes
  ["fp32","bf16","fp16",null] seq_parallel_communication_data_type
refused tensor_parallel [0, 1] | compose fz.tensor_parallel(rules=...); or fz.hf.Trainer(tensor_parallel=N)
  count autotp_size
refused tensor_parallel.tensor_parallel [1] | compose fz.tensor_parallel(rules=...); or fz.hf.Trainer(tensor_parallel=N)
  count tp_size
note tensor_parallel.tensor_parallel | read only where the section is enabled, which is refused
  any tp_grain_size mpu tp_group
note tensor_parallel | read only where the section is enabled, which is refused
  any dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend injection_policy_tuple partition_config
    preset_model keep_module_on_host replace_with_kernel_inject
refused expert_parallel [false] | compose fz.expert_parallel(where=...)
  flag enabled
note expert_parallel | read only where the section is enabled, which is refused
  any autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model moe_layer_pattern
    expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm route_scale score_apply
    combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank
    num_expert_groups num_limited_groups score_func top_k load_balance_coeff routed_scaling_factor expert_w1 expert_w2
    expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern
    expert_activation
note - | of its layers of experts: fz.expert_parallel(where=...) cuts those of any model
  flag use_data_before_expert_parallelism
refused pipeline ["auto", null, 0, 1] | stages are no key here: wrap the step with fz.pipeline()
  ["auto",null,0,1] stages
note pipeline | of PipelineModule: fz.pipeline() divides the blocks of any model
  any partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant
refused hybrid_engine [false] | generation in training is not there
  flag enabled
note hybrid_engine | read only where the section is enabled, which is refused
  any max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size
    enable_cuda_graph
refused data_efficiency [false] | sampling by difficulty and dropping of tokens are not there
  flag enabled
note data_efficiency | read only where the section is enabled, which is refused
  any seed data_sampling data_routing
refused - [null] | quantised weights are not there
  any weight_quantization
refused - [false, null] | DeepSpeed has removed it, and refuses it too
  any nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity
    graph_harvesting curriculum_learning progressive_layer_drop
note compile | a step is one compiled program
  flag deepcompile autoep_non_moe free_activation offload_activation_pin_memory double_buffer symmetric_memory
    debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors
    keep_all_input_tensors
  count free_activation_threshold
refused compile [false] | what rests where is said by zero_optimization.offload_optimizer and offload_param
  flag offload_activation offload_opt_states offload_parameters
refused compile [[], ["z1"], ["z3"], null] | the passes are fzero's own
  texts? passes
note - | transfers are planned: print(train.program) shows them
  flag disable_allgather
  count allgather_size
note - | nothing is done by it, by DeepSpeed neither
  count? vocabulary_size
note checkpoint | a checkpoint of fzero's is complete or an error, and restores on any mesh
  text tag_validation
  flag load_universal checkpoint_serialization
refused checkpoint [false] | ranks write one directory that all of them see
  flag use_node_local_storage
note checkpoint.parallel_write | every rank writes its own file
  flag pipeline_stage
note checkpoint.writer | files are fz.checkpoint's
  any type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier
refused - [false, null] | fz.checkpoint.save(wait=False) writes while training goes on
  any datastates_ckpt
note - | what is shown of a run is the caller's: metrics are values that a step returns
  count? steps_per_print
  flag wall_clock_breakdown memory_breakdown dump_state
  text? log_level
note - | Python's garbage collector is the caller's
  flag disable_python_gc
note flops_profiler | fz.fits and `fzero plan` count operations, train.profile measures
  flag enabled detailed
  number recompute_fwd_factor
  integer profile_step module_depth top_modules
  text? output_file
note comms_logger | print(train.program) shows every transfer
  flag enabled prof_all verbose debug
  texts prof_ops
note tensorboard | what is shown of a run is the caller's: metrics are values that a step returns
  flag enabled
  text output_path job_name
note csv_monitor | what is shown of a run is the caller's: metrics are values that a step returns
  flag enabled
  text output_path job_name
note wandb | what is shown of a run is the caller's: metrics are values that a step returns
  flag enabled
  text project
  text? group team
note comet | what is shown of a run is the caller's: metrics are values that a step returns
  flag enabled
  flag? online
  count samples_log_interval
  text? project workspace api_key experiment_name experiment_key mode
note - | DeepSpeed does not read it: of these, it reads comms_logger, tensorboard, csv_monitor, wandb and comet
  any comms_config monitor_config
note - | DeepSpeed does not read it: a rank's device is said by torchrun, or fz.make_mesh
  any local_rank cuda_visible_devices
note - | DeepSpeed does not read it, so nothing is computed in 8 bits: fz.fp8() on the step does
  any fp8
note timers.throughput | what is shown of a run is the caller's: metrics are values that a step returns
  flag enabled synchronized
note autotuning | nothing is tried out: `fzero plan` tells what fits and how long it takes, without a run
  flag enabled
  any fast results_dir exps_dir overwrite start_profile_step end_profile_step start_step end_step metric metric_path
    tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size
    max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu
    num_tuning_micro_batch_sizes
"""


@dataclass(frozen=True)
class KeyTable:
    """The rows of a configuration by the paths of its keys, and the other names of some."""

    rows: dict[str, Row]
    aliases: dict[str, str]

    @cached_property
    def sections(self) -> set[str]:
        """The paths that hold keys."""
        paths = (*self.rows, *self.aliases)
        return {path.rsplit(".", n)[0] for path in paths for n in range(1, path.count(".") + 1)}


def rows(text: str) -> dict[str, Row]:
    """Reads rows, by path, off a text as those above and below."""
    found = {}
    for paragraph in re.split(r"\n(?=\w)", text.strip()):
        head, *lines = re.sub(r"\n {4}", " ", paragraph).split("\n")
        heading = re.fullmatch(r"(\w+) (\S+)(?: (\[.*\]))? \| (.*)", head)
        assert heading is not None, head
        answer, under, neutral, says = heading.groups()
        for line in lines:
            kind, *names = line.split()
            values = tuple(json.loads(kind)) if kind.startswith("[") else kind
            row = Row(answer, says, values, tuple(json.loads(neutral or "[]")))
            found |= {name if under == "-" else f"{under}.{name}": row for name in names}
    return found


ROWS = rows(_TABLE)
"""The answer to each key, by its path."""

_STAGE_3 = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
    allgather_sequential"""

ALIASES: dict[str, str] = {
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _STAGE_3.split()},
    **{f"bfloat16{path[4:]}": path for path in ROWS if path.startswith("bf16.")},
    **{f"tensor_parallel.tp{path[31:]}": path for path in ROWS if path.startswith("tensor_parallel.tensor_parallel.")},
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
}
"""Keys that DeepSpeed reads under two names: the path under the one, and the path of the row."""

DEEPSPEED = KeyTable(ROWS, ALIASES)
