"""Loads Accelerate's configuration, with its plugins for DeepSpeed and FSDP, as transforms."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fzero.arguments import plain_numbers
from fzero.deepspeed.config import Config, load_config
from fzero.deepspeed.optimizer import Given
from fzero.deepspeed.reading import ConfigSettings, read_file, settings
from fzero.deepspeed.table import KeyTable, rows
from fzero.errors import FzeroValueError
from fzero.transforms.offload import offload
from fzero.transforms.remat import remat

_TABLE = """
meaning - | which of the plugins is meant
  ["DEEPSPEED","FSDP","MULTI_GPU","MULTI_CPU","NO"] distributed_type
meaning - | fz.mixed_precision
  ["no","bf16","fp16"] mixed_precision
note - | processes are torchrun's, and their devices fz.make_mesh's
  any compute_environment num_processes machine_rank num_machines gpu_ids main_process_ip main_process_port
    rdzv_backend same_network main_training_function enable_cpu_affinity use_cpu debug mpirun_config
    command_file commands tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env
note - | blocks are compiled by fz.compile
  any dynamo_config
refused - [null, {}] | not there
  any fp8_config parallelism_config megatron_lm_config
refused - [false, "no"] | of TPUs, which are not there
  any downcast_bf16
meaning deepspeed_config | DeepSpeed's own configuration, which has everything else
  text? deepspeed_config_file
meaning deepspeed_config | zero_optimization.stage; 2 if it is omitted
  [0,1,2,3] zero_stage
meaning deepspeed_config | as DeepSpeed's key of that name
  count gradient_accumulation_steps
  number? gradient_clipping
meaning deepspeed_config | zero_optimization.offload_optimizer and offload_param
  ["none","cpu","nvme",null] offload_optimizer_device offload_param_device
  text? offload_optimizer_nvme_path offload_param_nvme_path
note deepspeed_config | parameters are made as shards by train.init and train.load
  flag zero3_init_flag
note deepspeed_config | fz.checkpoint.export writes whole weights of any state
  flag zero3_save_16bit_model
note deepspeed_config | no hooks: every rank runs the same lines
  any deepspeed_moe_layer_cls_names transformer_moe_cls_names
note deepspeed_config | processes are torchrun's
  any deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter deepspeed_multinode_launcher
refused deepspeed_config [false] | 8 bits are fz.fp8's
  flag enable_msamp
note deepspeed_config | of MS-AMP, which is not there
  text? msamp_opt_level
note fsdp_config | 1 and 2 mean the same here
  [1,2] fsdp_version
meaning fsdp_config | FULL_SHARD: fz.shard_params; SHARD_GRAD_OP: fz.shard_grads; NO_SHARD: fz.data_parallel
  ["FULL_SHARD","SHARD_GRAD_OP","NO_SHARD","HYBRID_SHARD","HYBRID_SHARD_ZERO2",1,2,3,4,5,"1","2","3","4","5"]
    fsdp_sharding_strategy
meaning fsdp_config | true: fz.shard_params; false: fz.shard_grads
  [true,false,"FULL_SHARD","SHARD_GRAD_OP","NO_SHARD"] fsdp_reshard_after_forward
meaning fsdp_config | fz.offload('cpu', ('opt_state', 'params'))
  flag fsdp_offload_params
meaning fsdp_config | fz.remat('full')
  flag fsdp_activation_checkpointing
meaning fsdp_config | fz.offload('cpu', 'activations')
  flag fsdp_activation_checkpointing_offload
note fsdp_config | fz.functionalize(module, blocks=...): by default repeated layers are gathered one by one
  any fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
note fsdp_config | transfers are planned: print(train.program) shows them
  any fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_limit_all_gathers
note fsdp_config | parameters keep their names and shapes, and are made as shards, the same on every rank
  any fsdp_use_orig_params fsdp_sync_module_states fsdp_cpu_ram_efficient_loading
note fsdp_config | fz.checkpoint: any state restores on any mesh; export writes whole weights
  any fsdp_state_dict_type
refused fsdp_config [null] | which parameters are sharded is said by fz.shard_params(where=)
  any fsdp_ignored_modules
"""
_ROWS = rows(_TABLE)
_SHORT = {path.replace(".fsdp_", "."): path for path in _ROWS if path.startswith("fsdp_config.")}
ACCELERATE = KeyTable(_ROWS, _SHORT)
"""The answers to Accelerate's keys; those of FSDP may lack their prefix."""

_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, True: 3, False: 2, "1": 3, "2": 2, "3": 0}


@plain_numbers
def load_accelerate(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    micro_batch_size: int,
    optimizer: Given,
    gradient_clipping: float = 0.0,
    gradient_accumulation_steps: int = 1,
    auto: Mapping[str, Any] | None = None,
    world: int | None = None,
) -> Config:
    """Accelerate's configuration (what `accelerate config` writes) as what it means here.

    Its DeepSpeed plugin is read as the configuration of DeepSpeed that Accelerate makes of it, or that it names; FSDP's
    strategies are stages of ZeRO. Keys are answered, and errors collected, as `load_config` does.

    Args:
        config: the path of a file, YAML (where PyYAML is installed) or JSON, or a dict.
        micro_batch_size: rows of a rank and micro-batch: the loader's, in Accelerate.
        optimizer: as for `load_config`; the script's own, in Accelerate.
        gradient_clipping: what the script gives `clip_grad_norm_`; 0: none. DeepSpeed's plugin has its own.
        gradient_accumulation_steps: that of the script, unless DeepSpeed's plugin says it.
        auto: as for `load_config`, for a file of DeepSpeed's that the plugin names.
        world: ranks that divide the batch, by default the processes that torchrun started.

    Raises:
        FzeroValueError: listing keys that are unknown, of another kind or refused, by path.

    Example:
        >>> import fzero as fz
        >>> given = {"distributed_type": "FSDP", "mixed_precision": "bf16"}
        >>> given["fsdp_config"] = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True}
        >>> config = fz.deepspeed.load_accelerate(given, micro_batch_size=4, optimizer=fz.optim.adamw(1e-3))
        >>> print(*config.transforms[1:])
        shard_params(axis='data') offload('cpu', ('opt_state', 'params'))
    """
    given, source = _read(config)
    found = settings(given, {}, ACCELERATE)
    kind = found.get("distributed_type", "NO")
    base = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": gradient_clipping,
    }
    precision = found.get("mixed_precision", "no")
    # without DeepSpeed bf16 leaves no step out, and fp16 has PyTorch's GradScaler
    of_torch = {"bf16": {"check_grad_overflow": False}, "fp16": {"loss_scale_window": 2000, "hysteresis": 1}}
    if precision != "no":
        base[precision] = {"enabled": True, **(of_torch[precision] if kind != "DEEPSPEED" else {})}
    if kind == "DEEPSPEED":
        base = _deepspeed(found, base)
    elif kind == "FSDP":
        base["zero_optimization"] = _fsdp(found)
    unused = {"DEEPSPEED": "fsdp_config.", "FSDP": "deepspeed_config."}
    found.problems += [
        f"{path}: distributed_type is {kind}" for path in found.values if path.startswith(unused.get(kind, "\n"))
    ]
    if found.problems:
        what = f"{source} has {len(found.problems)} problem{'s' * (len(found.problems) > 1)}"
        raise FzeroValueError("deepspeed", what, found.problems, "correct these keys; every other is understood")
    if (named := found.get("deepspeed_config.deepspeed_config_file")) is not None:
        filled = {key: base[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
        filled |= {"bf16.enabled": precision == "bf16", "fp16.enabled": precision == "fp16"}
        loaded = load_config(_beside(config, named), auto=filled | dict(auto or {}), world=world, optimizer=optimizer)
    else:
        loaded = load_config(base, world=world, optimizer=optimizer)
    kept = {"train_batch_size", *base} if named is None else set()
    decisions = (*found.decisions, *(d for d in loaded.decisions if d.path.partition(".")[0] not in kept))
    return replace(loaded, source=source, transforms=(*loaded.transforms, *_activations(found)), decisions=decisions)


def _read(config: Any) -> tuple[dict[str, Any], str]:
    if isinstance(config, (str, os.PathLike)) and Path(config).suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise FzeroValueError("deepspeed", f"{config} needs PyYAML", fix="pip install pyyaml") from None
        if not Path(config).is_file():
            raise FzeroValueError("deepspeed", f"{config} is not there", fix="give the path of a file")
        return read_file(yaml.safe_load(Path(config).read_text()))[0], os.fspath(config)
    return read_file(config)


def _beside(config: Any, named: str) -> str:
    """A file that a configuration names: from the working directory, as in Accelerate, or from its own."""
    if Path(named).is_file() or not isinstance(config, (str, os.PathLike)):
        return named
    return str(Path(config).parent / named)


def _deepspeed(found: ConfigSettings, base: dict[str, Any]) -> dict[str, Any]:
    """The configuration that Accelerate makes of its plugin."""
    get = lambda key, default=None: found.get(f"deepspeed_config.{key}", default)  # noqa: E731
    if get("deepspeed_config_file") is not None:
        said = "zero_stage gradient_accumulation_steps gradient_clipping offload_optimizer_device offload_param_device"
        for key in said.split():
            if f"deepspeed_config.{key}" in found.values:
                found.refuse(f"deepspeed_config.{key}", "deepspeed_config_file says it; Accelerate refuses both, too")
        return base
    zero: dict[str, Any] = {"stage": get("zero_stage", 2)}
    for part in ("optimizer", "param"):
        device = get(f"offload_{part}_device", "none")
        path = get(f"offload_{part}_nvme_path")
        if device != "none":
            zero[f"offload_{part}"] = {"device": device, **({"nvme_path": path} if device == "nvme" and path else {})}
    base |= {"zero_optimization": zero, "gradient_clipping": get("gradient_clipping", 1.0)}
    base["gradient_accumulation_steps"] = get("gradient_accumulation_steps", base["gradient_accumulation_steps"])
    return base


def _fsdp(found: ConfigSettings) -> dict[str, Any]:
    """The section `zero_optimization` that a strategy of FSDP's is."""
    strategy = "fsdp_config.fsdp_sharding_strategy"
    if strategy not in found.values:
        strategy = "fsdp_config.fsdp_reshard_after_forward"
    asked = found.get(strategy, True)
    stage = _STRATEGIES.get(asked if isinstance(asked, bool) else str(asked))
    if stage is None:
        says = (
            "fz.make_mesh(replica=..., data=...) with fz.shard_params(axis='data') and fz.data_parallel(axis='replica')"
        )
        found.refuse(strategy, says)
        return {}
    if not found.get("fsdp_config.fsdp_offload_params", False):
        return {"stage": stage}
    if stage != 3:
        found.refuse(
            "fsdp_config.fsdp_offload_params", "parameters rest on the host where they are sharded, at FULL_SHARD"
        )
    return {"stage": stage, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def _activations(found: ConfigSettings) -> list[Any]:
    out = [remat(policy="full")] if found.get("fsdp_config.fsdp_activation_checkpointing", False) else []
    if found.get("fsdp_config.fsdp_activation_checkpointing_offload", False):
        out.append(offload(tier="cpu", of="activations"))
    return out
