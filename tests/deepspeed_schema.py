"""Prints the schema of the installed DeepSpeed's configuration, its defaults and learning rates, as JSON.

A script of its own: importing DeepSpeed changes a process. Keys are those of its pydantic models, and, where it reads
plain dicts, those that it asks a dict for which writes down what it is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import os
import sys
import typing
from typing import Any

asked: set[str] = set()


class Asked(dict):
    """A section that writes down the keys it is asked for."""

    def __init__(self, given: dict[str, Any], under: str = ""):
        super().__init__({k: Asked(v, f"{under}{k}.") if isinstance(v, dict) else v for k, v in given.items()})
        self.under = under

    def _note(self, key: Any) -> Any:
        asked.add(f"{self.under}{key}")
        return key

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._note(key), default)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._note(key))

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._note(key))

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Asked:
        return self

    def __deepcopy__(self, memo: Any) -> Asked:
        return self


def fields(model: Any, under: str) -> set[str]:
    """The paths of a model's fields, under both names of those that have two, and of the models within it."""
    found = set()
    for name, field in model.model_fields.items():
        names = {name, field.alias or name}
        inner = [a for a in (field.annotation, *typing.get_args(field.annotation)) if hasattr(a, "model_fields")]
        for each in names:
            at = f"{under}.{each}"
            found |= fields(inner[0], at) if inner else {at}
    return found


def main() -> None:
    import torch
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import config, constants, lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "hybrid_engine": config.HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "weight_quantization": WeightQuantConfig,
    }
    plain = ["activation_checkpointing", "aio", "torch_autocast", "flops_profiler", "autotuning", "expert_parallel"]
    plain += ["data_efficiency", "data_types", "pipeline", "tensorboard", "wandb", "csv_monitor", "comet"]
    given = {name: {} for name in plain} | {"train_batch_size": 1, "timers": {"throughput": {}}}
    given["checkpoint"] = {"writer": {}, "parallel_write": {}}
    given["optimizer"] = {"type": "Adam", "params": {}}
    given["scheduler"] = {"type": "WarmupLR", "params": {}}
    config.DeepSpeedConfig(Asked(given))
    paths = set(asked).union(*(fields(model, at) for at, model in models.items()))
    for name, field in DeepSpeedMonitorConfig.model_fields.items():
        paths |= fields(field.annotation, name)
    paths |= {f"expert_parallel.{f.name}" for f in dataclasses.fields(AutoEPConfig) if f.name[0] != "_"}

    def arguments(*kinds: Any) -> list[str]:
        every = [list(inspect.signature(kind).parameters)[1:] for kind in kinds]  # not the parameters
        return sorted({name for names in every for name in names})

    adam = [FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW, torch.optim.Adam]
    optimizers = {"Adam": adam, "AdamW": adam, "Lion": [FusedLion, DeepSpeedCPULion]}
    of_torch = ("RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop", "SGD")
    optimizers |= {name: [getattr(torch.optim, name)] for name in of_torch}
    optimizers["Adagrad"] = [torch.optim.Adagrad, DeepSpeedCPUAdagrad]
    defaults = {kind.__name__: {n: p.default for n, p in inspect.signature(kind).parameters.items()} for kind in
                (FusedAdam, FusedLion, FusedLamb, torch.optim.AdamW)}  # fmt: skip
    schedules = [getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES]
    print(
        json.dumps(
            {
                "paths": sorted(paths),
                "removed": [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS],
                "known": [*config.DEEPSPEED_OPTIMIZERS],
                "optimizers": {name: arguments(*kinds) for name, kinds in optimizers.items()},
                "defaults": {
                    k: {n: v for n, v in d.items() if n in ("lr", "betas", "eps", "weight_decay", "max_coeff")}
                    for k, d in defaults.items()
                },
                "clipping": constants.GRADIENT_CLIPPING_DEFAULT,
                "fp16": DeepSpeedFP16Config().model_dump(),
                "bf16": DeepSpeedBF16Config().model_dump(),
                "schedules": {kind.__name__: arguments(kind) for kind in schedules},
                "rates": [rates(lr_schedules, *case) for case in json.loads(sys.argv[1])],
            }
        )
    )


def rates(module: Any, name: str, params: dict[str, Any], lr: float, num: int) -> list[float]:
    """The learning rates of the first updates, as DeepSpeed's engine goes through them."""
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = getattr(module, name)(optimizer, **params)
    found = []
    for _ in range(num):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # DeepSpeed logs there
        real, sys.stdout = sys.stdout, said
        main()
    print(said.getvalue().strip().splitlines()[-1], file=sys.__stdout__)
