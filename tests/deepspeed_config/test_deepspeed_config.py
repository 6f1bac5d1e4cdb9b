"""DeepSpeed's configuration: every key of the installed package's schema, every trap, and numbers as with transforms
written by hand."""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import STAGES, batches, gpt_init, gpt_loss, part

import fzero as fz
from fzero import optim, tree
from fzero.deepspeed.accelerate import ACCELERATE
from fzero.deepspeed.optimizer import PARAMS, REFUSED, SCHEDULES
from fzero.deepspeed.reading import wrong
from fzero.deepspeed.table import ALIASES, DEEPSPEED, ROWS
from fzero.errors import FzeroTypeError, FzeroValueError

load = fz.deepspeed.load_config
SMALL: dict[str, Any] = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
CASES: list[Any] = [
    ("WarmupLR", {"warmup_num_steps": 5}, 0.1),
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_min_lr": 0.01, "warmup_max_lr": 0.3, "warmup_type": "linear"}, 0.1),
    ("WarmupDecayLR", {"total_num_steps": 14, "warmup_num_steps": 5}, 0.1),
    ("WarmupDecayLR", {"total_num_steps": 14, "warmup_num_steps": 1, "warmup_max_lr": 0.2}, 0.1),
    ("WarmupCosineLR", {"total_num_steps": 14, "warmup_num_steps": 4}, 0.1),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}, 1),
    ("WarmupCosineLR", {"total_num_steps": 14, "warmup_num_steps": 4, "warmup_type": "linear"}, 0.3),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5}, 0.1),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 7, "cycle_second_step_size": 4,
                  "decay_lr_rate": 0.5, "decay_step_size": 3}, 0.1),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 9, "cycle_second_step_size": 6,
                  "cycle_first_stair_count": 3, "cycle_second_stair_count": 2}, 0.1),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10, "cycle_second_step_size": 0,
                  "cycle_first_stair_count": 4, "decay_lr_rate": 1.0, "decay_step_size": 1}, 0.1),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 3.0}, 0.1),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}, 0.1),
]  # fmt: skip
NUM_RATES = 20


def with_(path: str, value: Any, base: dict[str, Any] = SMALL) -> dict[str, Any]:
    """A configuration with one key more."""
    found = copy.deepcopy(base)
    at = found
    *sections, name = path.split(".")
    for section in sections:
        at = at.setdefault(section, {})
    at[name] = value
    return found


def refused(config: Any, **kwargs: Any) -> str:
    with pytest.raises(FzeroValueError) as error:
        load(config, **kwargs)
    return str(error.value)


# the installed package


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    cases = json.dumps([[*case, NUM_RATES] for case in CASES])
    script = [sys.executable, str(Path(__file__).parents[1] / "deepspeed_schema.py"), cases]
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=280, env={**os.environ, "DS_ACCELERATOR": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_key_of_the_schema_has_an_answer(schema: dict[str, Any]) -> None:
    whole = {path for path, row in ROWS.items() if row.kind == "any"}
    known = {*ROWS, *ALIASES, *DEEPSPEED.sections}
    inside = lambda path: any(path.startswith(f"{p}.") for p in whole)  # noqa: E731
    assert not [path for path in schema["paths"] if path not in known and not inside(path)]
    assert {*schema["removed"]} <= {*ROWS}


def test_every_answer_is_to_a_key_of_the_schema(schema: dict[str, Any]) -> None:
    """But for sections that DeepSpeed does not look into before it trains, and those that it refuses."""
    free = (
        "optimizer.params.",
        "scheduler.params.",
        "pipeline.",
        "zero_optimization.aio.",
        "zero_optimization.zenflow",
    )
    older = {
        "allgather_size",
        "sequence_parallel_size",
        "aio.thread_count",
        "autotuning.start_step",
        "autotuning.end_step",
    }
    older |= {
        f"zero_optimization.{x}" for x in ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
    }
    older |= {"comms_config", "monitor_config", "local_rank", "cuda_visible_devices", "fp8"}  # not read, but written
    stale = {*ROWS, *ALIASES} - {*schema["paths"]} - older
    assert not [path for path in stale if not path.startswith(free)]
    assert not [x for x in older if x in schema["paths"]]


def test_every_argument_of_optimizers_and_schedules(schema: dict[str, Any]) -> None:
    own = {"Adam": {"adamw_mode", "decoupled_weight_decay"}, "AdamW": {"adamw_mode", "decoupled_weight_decay"}}
    for name, arguments in PARAMS.items():
        if name == "Muon":  # DeepSpeed reads these one by one
            continue
        assert {*arguments} - {"torch_adam"} == {*schema["optimizers"][name]} - own.get(name, set()), name
        assert {f"optimizer.params.{x}" for x in arguments} <= {*ROWS}
    assert {x.lower() for x in (*PARAMS, *REFUSED)} >= {*schema["known"]}
    for name, arguments in schema["schedules"].items():
        assert {f"scheduler.params.{x}" for x in arguments} <= {*ROWS}, name
        assert name not in SCHEDULES or {*SCHEDULES[name], "last_batch_iteration"} == {*arguments}


def test_defaults_are_deepspeeds(schema: dict[str, Any]) -> None:
    assert schema["clipping"] == 1.0
    assert schema["defaults"]["FusedAdam"] == {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}
    assert schema["defaults"]["AdamW"]["weight_decay"] == 0.01
    assert schema["defaults"]["FusedLion"] == {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0}
    assert schema["defaults"]["FusedLamb"]["max_coeff"] == 10, "why Lamb is refused"
    scale = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
    assert [schema["fp16"][x] for x in (*scale, "min_loss_scale")] == [0, 16, 1000, 2, False, 1]
    assert schema["bf16"]["check_grad_overflow"] is True
    plain = load(with_("fp16.enabled", True))
    written = load(with_("fp16", schema["fp16"] | {"enabled": True}))
    assert plain.transforms == written.transforms


def test_learning_rates_are_deepspeeds(schema: dict[str, Any]) -> None:
    for (name, params, lr), wanted in zip(CASES, schema["rates"], strict=True):
        given = {"type": "SGD", "params": {"lr": lr}}
        config = load({"train_batch_size": 8, "optimizer": given, "scheduler": {"type": name, "params": params}})
        assert config.schedule is not None
        found = [float(config.schedule(torch.tensor(k))) for k in range(NUM_RATES)]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9, msg=f"{name} {params}: {found} {wanted}")


# the table


def test_the_table_is_sound() -> None:
    kinds = {"flag": True, "count": 3, "rows": 3, "integer": -1, "number": 0.5, "fraction": 0.5, "pair": [0.9, 0.9],
             "text": "x", "texts": ["x"], "dtype": "bf16", "any": {}}  # fmt: skip
    for path, row in ROWS.items():
        assert row.answer in ("meaning", "note", "refused")
        assert row.says and row.says[-1] != ".", path
        assert isinstance(row.kind, tuple) or row.kind.rstrip("?~") in kinds, path
        assert row.answer == "refused" or not row.neutral, path
        assert not [x for x in row.neutral if wrong(row.kind, x) and x is not None], path
        value = row.kind[0] if isinstance(row.kind, tuple) else kinds[row.kind.rstrip("?~")]
        assert wrong(row.kind, value) is None, path
    assert not {*ROWS} & {*ALIASES}
    assert {*ALIASES.values()} <= {*ROWS}


@pytest.mark.parametrize("path", [p for p, row in ROWS.items() if row.answer == "note" and p.count(".") < 3])
def test_a_note_changes_nothing(path: str) -> None:
    row = ROWS[path]
    values = {
        "flag": True,
        "count": 3,
        "rows": 3,
        "number": 0.5,
        "integer": 1,
        "text": "x",
        "texts": ["x"],
        "any": 1,
        "fraction": 0.5,
    }
    value = row.kind[0] if isinstance(row.kind, tuple) else values[row.kind.rstrip("?~")]
    found, plain = load(with_(path, value), world=2), load(SMALL, world=2)
    assert found.transforms == plain.transforms
    assert found.optimizer_text == plain.optimizer_text
    assert [d.answer for d in found.decisions if d.path == path] == ["note"]
    assert path in found.report()


@pytest.mark.parametrize("path", [p for p, row in ROWS.items() if row.answer == "refused"])
def test_a_refusal_names_its_key(path: str) -> None:
    row = ROWS[path]
    values = {
        "flag": True not in row.neutral,
        "count": 7,
        "rows": 7,
        "number": 0.5,
        "texts": ["x"],
        "dtype": "bf16",
        "any": {"x": 1},
    }
    value = row.kind[-1] if isinstance(row.kind, tuple) else values[row.kind.rstrip("?~")]
    if path in ("scheduler.params.last_batch_iteration", "pipeline.stages"):
        value = 5  # outside of what is accepted
    text = refused(with_(path, value))
    assert f"  {path}={value!r}" in text, text
    for neutral in row.neutral:
        if path.startswith(("optimizer.params", "scheduler.params")):
            assert f"  {path}=" not in _text(with_(path, neutral))
        else:
            load(with_(path, neutral))


def _text(config: Any) -> str:
    try:
        load(config)
    except FzeroValueError as error:
        return str(error)
    return ""


MUTILATED: list[tuple[str, Any, str]] = [
    # the key, its value, what the error says beside the key's path
    ("gradient_cliping", 1.0, "did you mean 'gradient_clipping'"),
    ("zero_optimisation", {"stage": 3}, "did you mean 'zero_optimization'"),
    ("train_micro_batch_size", 4, "did you mean 'train_micro_batch_size_per_gpu'"),
    ("stage", 3, "it belongs at zero_optimization.stage"),
    ("offload_optimizer", {"device": "cpu"}, "it belongs at zero_optimization.offload_optimizer"),
    ("zero_optimization.gradient_clipping", 1.0, "it belongs at gradient_clipping"),
    ("zero_optimization.stge", 2, "did you mean 'stage'"),
    ("zero_optimization.offload_optimizer.devcie", "cpu", "did you mean 'device'"),
    ("zero_optimization.offload_optimizer.path", "/scratch", "did you mean 'nvme_path'"),
    ("zero_optimization.stage", 4, "must be one of 0, 1, 2, 3"),
    ("zero_optimization.stage", "3", "must be one of 0, 1, 2, 3"),
    ("zero_optimization.stage", "auto", "nothing fills it in"),
    ("zero_optimization.reduce_bucket_size", "5e8", "without quotes"),
    ("zero_optimization.overlap_comm", "true", "must be true or false without quotes"),
    ("zero_optimization.offload_param", "cpu", "a section, e.g. {'device': ...}"),
    ("activation_checkpointing.partitioned_activations", True, "did you mean 'partition_activations'"),
    ("fp16.initial_scale", 16, "did you mean 'initial_scale_power'"),
    ("fp16.enabled", "True", "without quotes"),
    ("fp16.loss_scale", "dynamic", "must be a number"),
    ("bf16.enable", True, "did you mean 'enabled'"),
    ("bf16", True, "a section"),
    ("optimizer.params.betas", 0.9, "must be two numbers"),
    ("optimizer.params.learning_rate", 1e-3, "unknown"),
    ("optimizer.params.momentum", 0.9, "AdamW has no such argument"),
    ("optimizer.params.max_grad_norm", 1.0, "gradient_clipping"),
    ("optimizer.params.lr", "auto", "nothing fills it in"),
    ("optimizer.type", "AdmaW", "did you mean 'AdamW'"),
    ("optimizer.type", "OneBitAdam", "has removed it"),
    ("scheduler.type", "WarmupDecay", "did you mean 'WarmupDecayLR'"),
    ("scheduler.type", "OneCycles", "did you mean 'OneCycle'"),
    ("scheduler", {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}, "cycle_max_lr: OneCycle needs it"),
    ("scheduler", {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}, "steps=0: must be at least 1"),
    ("optimizer", {"type": "rmsprop"}, "optimizer.type='rmsprop': unknown: did you mean 'RMSprop'"),
    ("optimizer", {"type": "LBFGS"}, "optimizer.type='LBFGS': not there"),
    ("optimizer", {"type": "Adam", "params": {"amsgrad": True}}, "amsgrad=True: DeepSpeed's own Adam refuses it too"),
    ("scheduler", {"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: WarmupDecayLR needs it"),
    ("scheduler", {"params": {"warmup_num_steps": 3}}, "scheduler.type: missing"),
    ("train_batch_size", 9, "train_batch_size=9: 4 rows x 1 micro-batches x 2 ranks are 8"),
    ("train_batch_size", 0, "must be a whole number of at least 1"),
    ("train_batch_size", True, "train_batch_size=True: must be a whole number of at least 1"),
    ("gradient_accumulation_steps", 3, "steps=3: 1 rows x 3 micro-batches x 2 ranks are 6"),
    ("gradient_clipping", -1.0, "must be at least 0"),
    ("communication_data_type", "fp8", "must be one of"),
    ("data_types.param_dtype", "bf16", "fp32 is computed in"),
    ("wandb.projects", "x", "did you mean 'project'"),
    ("zero_optimization.offload_param", {"device": "cpu"}, "offload_param.device='cpu': it needs stage 3"),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}, "it needs stage 1, this is stage 0"),
    ("zero_optimization", {"stage": 3, "offload_optimizer": {"device": "nvme"}}, "nvme_path: missing"),
    ("zero_optimization", {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                           "offload_param": {"device": "nvme", "nvme_path": "/b"}}, "the same directory"),
    ("zero_optimization", {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}, "one key under two names"),
    ("fp16", {"enabled": True, "loss_scale_window": 0}, "loss_scale_window=0"),
    ("fp16", {"enabled": True, "initial_scale_power": 1e30}, "fp16.initial_scale_power=1e+30: a scale is a float32"),
    ("amp", {"enabled": True}, "has removed it"),
    ("compile.passes", ["autotp"], "compile.passes=['autotp']"),
    ("zero_optimization.zenflow", {}, "stale gradients"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "says"), MUTILATED, ids=lambda x: str(x)[:40])
def test_mutilated(path: str, value: Any, says: str) -> None:
    text = refused(with_(path, value), world=2)
    assert says in text, text
    assert any(re.match(rf"  (\S+, )?{re.escape(path)}\b", line) for line in text.splitlines()), text
    assert text.startswith("fzero.deepspeed: a dict has ") and "\nFix: " in text


ODD: list[Any] = [None, True, 0, -1, 2.5, 1e30, float("nan"), "x", "auto", "", [], [1], {}, {"a": 1}, 10**400]


@pytest.mark.parametrize("value", ODD, ids=lambda x: str(x)[:10])
def test_any_value_anywhere_is_read_or_refused(value: Any) -> None:
    for path in (*ROWS, *ALIASES, *DEEPSPEED.sections, "zzz", "zero_optimization.zzz"):
        base = SMALL if path.startswith("fp16") else with_("fp16.enabled", True)
        base = {k: v for k, v in base.items() if k != path.split(".")[0]} | {"optimizer": {"type": "AdamW"}}
        _text(with_(path, value, base))  # raises what is not an FzeroValueError


def test_all_problems_at_once() -> None:
    config = with_("zero_optimization.stage", 5, with_("gradient_cliping", 1, with_("fp16.enabled", "yes")))
    assert refused(config).startswith("fzero.deepspeed: a dict has 3 problems\n")


# traps: what DeepSpeed means that one would not think


def noted(config: dict[str, Any], path: str, **kwargs: Any) -> str:
    return "; ".join(d.says for d in load(config, **kwargs).decisions if d.path == path and d.answer == "note")


def test_adam_is_adamw() -> None:
    config = with_("optimizer", {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.1}})
    assert "adamw(0.1, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.1)" in load(config).optimizer_text
    assert "AdamW: decay is decoupled" in noted(config, "optimizer.type")
    plain = load(with_("optimizer.params.adam_w_mode", False, config)).optimizer_text
    assert "chain(add_decayed_weights(0.1), adam(0.1, b1=0.9, b2=0.999, eps=1e-08))" in plain
    named = with_("optimizer", {"type": "AdamW", "params": {"adam_w_mode": False}})
    assert "without effect" in noted(named, "optimizer.params.adam_w_mode")


OF_TORCH: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "adagrad": {},
    "RMSprop": {"alpha": 0.9, "momentum": 0.5, "centered": True},
    "NAdam": {"betas": [0.8, 0.9], "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"weight_decay": 0.1, "eps": 1e-6},
    "Adamax": {"maximize": True},
    "Adadelta": {"rho": 0.8},
    "ASGD": {"lambd": 0.1, "t0": 1},
    "Rprop": {"etas": [0.4, 1.5]},
    "SGD": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
    "Adam": {"torch_adam": True, "amsgrad": True, "adam_w_mode": False, "maximize": True, "weight_decay": 0.1},
    "AdamW": {"torch_adam": True, "amsgrad": True},
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch(name: str) -> None:
    """DeepSpeed takes them from torch.optim with these arguments, and torch's defaults."""
    options = {n: x for n, x in OF_TORCH[name].items() if n not in ("torch_adam", "adam_w_mode")}
    cls = getattr(torch.optim, {"adagrad": "Adagrad"}.get(name, name))
    optimizer = load(
        with_("optimizer", {"type": name, "params": OF_TORCH[name]}, with_("gradient_clipping", 0))
    ).optimizer
    params = torch.linspace(-1, 2, 7, dtype=torch.float64)
    theirs = torch.nn.Parameter(params.clone())
    torchs, state = cls([theirs], **options), optimizer.init(params)
    for k in range(5):
        theirs.grad = torch.cos(3 * k + torch.arange(7.0, dtype=torch.float64))
        torchs.step()
        updates, state = optimizer.update(theirs.grad, state, params)
        params = params + updates
    torch.testing.assert_close(params, theirs.detach(), rtol=1e-7, atol=1e-7)  # torch's eta and momenta are float32
    assert (params - torch.linspace(-1, 2, 7)).abs().max() > 1e-3


def test_one_cycle_cycles_adams_betas() -> None:
    """Against torch.optim.AdamW with the learning rates and betas that DeepSpeed writes into its groups."""
    cycle = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 2, "cycle_second_step_size": 2}
    cycle |= {"decay_mom_rate": 0.1, "decay_lr_rate": 1.0, "decay_step_size": 2}
    # of updates 0, 1, ...: the first one is made with the lowest momentum
    rates = [0.01, 0.03, 0.05, 0.03, 0.01, 0.01 / 1.5, 0.01 / 2]
    momenta = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1]
    given = {"type": "OneCycle", "params": cycle}
    config = with_("scheduler", given, with_("gradient_clipping", 0, with_("optimizer", {"type": "AdamW"})))
    optimizer = load(config).optimizer
    params = torch.linspace(-1, 2, 7, dtype=torch.float64)
    theirs = torch.nn.Parameter(params.clone())
    torchs, state = torch.optim.AdamW([theirs], weight_decay=0.0), optimizer.init(params)
    for k, (lr, momentum) in enumerate(zip(rates, momenta, strict=True)):
        torchs.param_groups[0].update({"lr": lr, "betas": (momentum, 0.99)})
        theirs.grad = torch.cos(3 * k + torch.arange(7.0, dtype=torch.float64))
        torchs.step()
        updates, state = optimizer.update(theirs.grad, state, params)
        params = params + updates
    torch.testing.assert_close(params, theirs.detach(), rtol=1e-6, atol=1e-7)  # a schedule's values are float32
    for name in ("Lion", "NAdam"):
        assert "cycle_momentum: cycles the betas" in refused(with_("optimizer", {"type": name}, config))
        load(with_("scheduler.params.cycle_momentum", False, with_("optimizer", {"type": name}, config)))
    load(with_("optimizer", {"type": "SGD"}, config))  # has no betas


def test_muon_is_of_matrices_that_are_no_embeddings() -> None:
    given = {"lr": 0.01, "muon_lr": 0.02, "weight_decay": 0.1, "ns_method": "standard"}
    made = load({**SMALL, "gradient_clipping": 0, "optimizer": {"type": "Muon", "params": given}})
    params = {"embed": torch.ones(4, 3), "lm_head": torch.ones(3, 4), "bias": torch.ones(3)}
    params |= {"w": torch.eye(3), "experts": torch.eye(3).expand(2, 3, 3).clone()}
    optimizer = made.optimizer
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    theirs = torch.nn.Parameter(torch.eye(3))
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    theirs.grad = torch.eye(3)
    torchs.step()
    for got in (updates["w"], *updates["experts"]):
        torch.testing.assert_close(torch.eye(3) + got, theirs.detach())
    adamw = fz.optim.adamw(0.01, 0.9, 0.95, 1e-10, 0.1)
    want, _ = adamw.update(params, adamw.init(params), params)
    assert all(torch.equal(updates[name], want[name]) for name in ("embed", "lm_head", "bias"))


def test_muons_schedules() -> None:
    """A schedule sets the rate of both groups; WarmupCosineLR scales each."""
    config = with_("optimizer", {"type": "Muon", "params": {"lr": 0.01, "muon_lr": 0.02}})
    warm = with_("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}, config)
    assert "muon(WarmupLR, " in load(warm).optimizer_text and "adamw(WarmupLR, " in load(warm).optimizer_text
    assert "without effect" in noted(warm, "optimizer.params.muon_lr")
    cosine = with_("scheduler", {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, config)
    assert "muon(2 * WarmupCosineLR, " in load(cosine).optimizer_text


def test_defaults_that_differ() -> None:
    assert "weight_decay=0)" in load(SMALL).optimizer_text
    assert "weight_decay=0.01)" in load(with_("optimizer.params.torch_adam", True)).optimizer_text
    assert "clip_by_global_norm(1)" in load(SMALL).optimizer_text
    assert "clip" not in load(with_("gradient_clipping", 0)).optimizer_text
    assert "0.9 and 0.999" in noted(with_("optimizer", {"type": "Lion"}), "optimizer.params.betas")
    warm = with_("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 9}})
    assert "log" in noted(warm, "scheduler.params.warmup_type")


def test_bf16_skips_and_fp16_raises_at_its_minimum() -> None:
    assert load(with_("bf16.enabled", True)).optimizer_text.startswith("skip_nonfinite(")
    assert "skip" not in load(with_("bf16", {"enabled": True, "check_grad_overflow": False})).optimizer_text
    assert "skip" not in load(SMALL).optimizer_text
    text = str(load(with_("fp16.enabled", True)).transforms[0])
    assert "hysteresis=2" in text and "growth_interval=1000" in text and "at_minimum='raise'" in text
    assert "loss_scale=128" in str(load(with_("fp16", {"enabled": True, "loss_scale": 128})).transforms[0])
    assert "one of them" in refused(with_("fp16.enabled", True, with_("bf16.enabled", True)))


def test_names_of_old() -> None:
    assert load(with_("bfloat16.enabled", True)).transforms == load(with_("bf16.enabled", True)).transforms
    assert str(load(with_("zero_optimization", True)).transforms[0]) == "shard_opt_state(axis='data')"
    old = with_("zero_optimization", {"stage": 2, "cpu_offload": True})
    new = with_("zero_optimization", {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert load(old).transforms == load(new).transforms
    assert "one key under two names" in refused(with_("bfloat16.enabled", True, with_("bf16.enabled", True)))


def test_offload() -> None:
    def of(zero: dict[str, Any]) -> list[str]:
        return [str(t) for t in load(with_("zero_optimization", zero)).transforms]

    cpu = {"device": "cpu", "pin_memory": True}
    both = of({"stage": 3, "offload_optimizer": cpu, "offload_param": cpu})
    assert both == ["shard_params(axis='data')", "offload('cpu', ('opt_state', 'params'))"]
    part = of({"stage": 3, "offload_optimizer": {**cpu, "ratio": 0.3}, "offload_param": cpu})
    assert part[1:] == ["offload('cpu', 'opt_state', fraction=0.3)", "offload('cpu', 'params')"]
    assert of({"stage": 3, "offload_optimizer": {**cpu, "ratio": 0.0}}) == ["shard_params(axis='data')"]
    assert of({"stage": 3, "offload_optimizer": {"device": "none"}}) == ["shard_params(axis='data')"]
    disk = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    assert of(disk)[1] == "offload('nvme', 'opt_state', path='/tmp')"
    says = noted(with_("zero_optimization", disk), "zero_optimization.offload_optimizer.device")
    assert "where DeepSpeed leaves it in host memory" in says
    kept = of({"stage": 3, "stage3_param_persistence_threshold": 1e4})
    assert kept == ["shard_params(axis='data', where=Larger(numel=10000))", "shard_grads(axis='data')"]
    found = load(with_("activation_checkpointing.cpu_checkpointing", True)).transforms
    assert [str(t) for t in found][1:] == ["remat(policy='full')", "offload('cpu', 'activations')"]


def test_precision() -> None:
    def of(*settings: tuple[str, Any]) -> str:
        config = SMALL
        for path, value in settings:
            config = with_(path, value, config)
        return str(load(config).transforms[0])

    assert of(("communication_data_type", "bf16")) == "mixed_precision(compute='fp32', params='fp32', reduce='bf16')"
    masters = of(("bf16", {"enabled": True, "bf16_master_weights_and_grads": True}))
    assert masters == "mixed_precision(compute='bf16', params='bf16', reduce='bf16', rounding='nearest')"
    kept = of(("bf16.enabled", True), ("data_types.keep_in_fp32_modules", ["norm", "layers.*.scale"]))
    assert "where=Without(patterns=('norm', 'layers.*.scale'))" in kept
    accept = fz.deepspeed.load_config(
        with_("data_types.keep_in_fp32_modules", ["norm", "layers.*.scale"], with_("bf16.enabled", True))
    ).transforms[0]
    leaf = torch.empty(2, device="meta")
    asked = {"params['norm']['w']": False, "params['layers'][3]['scale']": False, "params['head']": True}
    assert {path: accept.where(path, leaf) for path in asked} == asked  # pyright: ignore[reportAttributeAccessIssue]
    differ = with_("data_types.grad_accum_dtype", "fp32", with_("communication_data_type", "bf16"))
    assert "in one dtype" in refused(differ)
    assert "mixed_precision(compute='bf16'" in of(("torch_autocast", {"enabled": True, "dtype": "bfloat16"}))
    assert "torch_autocast.dtype" in refused(with_("torch_autocast", {"enabled": True, "dtype": "float16"}))


def test_batch() -> None:
    def of(world: int, **keys: int) -> tuple[int, int, int]:
        found = load({"optimizer": {"type": "SGD"}, **keys}, world=world)
        return found.batch_size, found.micro_batch_size, found.num_micro_batches

    assert of(2, train_batch_size=16) == (16, 8, 1)
    assert of(2, train_batch_size=16, train_micro_batch_size_per_gpu=2) == (16, 2, 4)
    assert of(2, train_batch_size=16, gradient_accumulation_steps=2) == (16, 4, 2)
    assert of(3, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=5) == (30, 2, 5)
    assert of(3, train_micro_batch_size_per_gpu=2) == (6, 2, 1)
    assert "train_batch_size: give it" in refused({"optimizer": {"type": "SGD"}, "gradient_accumulation_steps": 2})
    assert "world=0" in refused(SMALL, world=0)


# where a configuration comes from


def test_sources(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(SMALL))
    assert load(path).source == str(path)
    encoded = base64.urlsafe_b64encode(json.dumps(SMALL).encode()).decode()
    assert load(encoded).batch_size == load(str(path)).batch_size == load(SMALL).batch_size
    path.write_text('{"train_batch_size": 8, "train_batch_size": 16}')
    assert "'train_batch_size' twice" in refused(path)
    path.write_text('{"train_batch_size": 8,,}')
    assert "is n" in refused(path)
    path.write_text("[1]")
    assert "not a section" in refused(path)
    for missing in (str(tmp_path / "nowhere.json"), "/tmp/some/where/a/config", "conf", "nowhere.json"):
        assert "is not there" in refused(missing), missing
    for odd in (3, None):
        with pytest.raises(FzeroTypeError, match="a path or a dict"):
            load(odd)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FzeroTypeError, match="JSON has not"):
        load({"train_batch_size": torch.ones(2)})


def test_a_caller_s_own_optimizer() -> None:
    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    assert load({"train_batch_size": 8}, optimizer=optim.sgd(0.1)).optimizer_text.endswith("the caller's)")
    assert "takes its place" in noted(SMALL, "optimizer.type", optimizer=optim.sgd(0.1))
    assert "has its own" in refused({"train_batch_size": 8, **warm}, optimizer=optim.sgd(0.1))
    given = []

    def make(schedule: Any) -> Any:
        given.append(schedule)
        return optim.lamb(schedule)

    found = load({"train_batch_size": 8, **warm}, optimizer=make)
    assert given == [found.schedule]
    assert "optimizer: none is said" in refused({"train_batch_size": 8})


AUTO: dict[str, Any] = {  # as Hugging Face's documentation has them
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(
        ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip
ZERO = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
              "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
              "contiguous_gradients": True},
    "zero3": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
              "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
              "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
              "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
              "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
              "stage3_gather_16bit_weights_on_model_save": True},
    "nvme": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True,
                                               "buffer_count": 4, "fast_init": False},
             "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5,
                               "buffer_size": 1e8, "max_in_cpu": 1e9},
             "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
                     "overlap_events": True}},
}  # fmt: skip


def arguments(**changes: Any) -> Any:
    found = SimpleNamespace(
        world_size=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5, bf16=True,
        learning_rate=3e-5, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.1, fp16=False,
        get_warmup_steps=lambda n: n // 10,
    )  # fmt: skip
    vars(found).update(changes)
    return found


@pytest.mark.parametrize("name", ZERO)
def test_hugging_faces_samples(name: str) -> None:
    auto = fz.deepspeed.from_arguments(arguments(), num_steps=100)
    # which is no argument of the Trainer's: filled in, and compared with nothing
    load(with_("scheduler.params.warmup_min_lr", 1e-5, AUTO), auto=auto, world=2)
    found = load(AUTO | {"zero_optimization": ZERO[name]}, auto=auto, world=2)
    assert (found.batch_size, found.num_micro_batches) == (16, 2)
    text = (
        "skip_nonfinite(chain(clip_by_global_norm(0.5), adamw(WarmupDecayLR, b1=0.9, b2=0.95, eps=1e-08, weight_decay"
    )
    assert found.optimizer_text.startswith(text)
    assert str(found.transforms[0]).startswith("mixed_precision(compute='bf16'")
    assert all(len(line) <= 140 for line in found.report().splitlines())


def test_sections_that_real_files_carry_and_deepspeed_does_not_read_are_notes() -> None:
    carried = {
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
        "fp8": {"enabled": True, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "autotuning": {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}},
        "local_rank": -1,
        "cuda_visible_devices": "0,1",
        "activation_checkpointing": {"number_checkpoints": False, "partition_activations": False},
    }
    found = load(SMALL | carried)
    answers = {d.path: d.answer for d in found.decisions}
    assert {answers[path] for path in answers if path.startswith(tuple(carried))} == {"note"}
    assert found.transforms == load(SMALL).transforms and found.optimizer_text == load(SMALL).optimizer_text
    assert "number_checkpoints=4: the checkpoints are" in refused(
        with_("activation_checkpointing.number_checkpoints", 4)
    )


@pytest.mark.parametrize("name", ["stage3_param_persistence_threshold", "param_persistence_threshold"])
def test_a_threshold_that_is_auto_has_one_answer(name: str) -> None:
    found = load(SMALL | {"zero_optimization": {"stage": 3, name: "auto"}})
    rows = [(d.value, d.answer, d.says) for d in found.decisions if d.path.endswith("param_persistence_threshold")]
    assert len(rows) == 1 and rows[0][:2] == ("'auto'", "note") and rows[0][2].startswith("every parameter is sharded")


def test_auto_and_arguments_must_agree() -> None:
    auto = fz.deepspeed.from_arguments(arguments())
    text = refused(with_("train_batch_size", 32, with_("bf16.enabled", False)), auto=auto, world=2)
    assert "train_batch_size=32: the arguments say 16" in text and "bf16.enabled=False: the arguments say True" in text
    assert "optimizer.params.lr=0.001: the arguments say 3e-05" in text
    assert "gradient_clipping: omitted, it is 1.0; the arguments say 0.5" in text
    assert "auto={'lr': ...}: unknown" in refused(SMALL, auto={"lr": 1e-3})
    with pytest.raises(FzeroTypeError, match="learning_rate"):
        fz.deepspeed.from_arguments(SimpleNamespace(world_size=1))


# numbers


def skipped(stage: int) -> list[Any]:
    """Three steps in bf16, the second with a batch that is not finite on the last rank: whether it changed anything."""
    mesh = fz.make_mesh()
    zero = {"stage": stage}
    config = load(with_("zero_optimization", zero, with_("bf16.enabled", True)), world=mesh.size)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ params["w"]).square().mean() + (x.sum() * params["b"]).mean()

    train = fz.compile(config.train_step(loss_fn), mesh, backend="eager")
    state = train.init({"w": torch.eye(16), "b": torch.ones(9)}, fz.random.key(0))
    out: list[Any] = []
    for bad in (False, True, False):
        before = [x.clone() for x in tree.leaves((state.params, state.opt_state))]
        x = torch.full((4, 16), 0.5)
        x[0, 0] = torch.inf if bad and mesh.rank == mesh.size - 1 else 0.5
        state, metrics = train(state, x)
        after = tree.leaves((state.params, state.opt_state))
        out.append((all(map(torch.equal, before, after)), bool(metrics["finite"]), int(state.step)))
    return out


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_that_is_not_finite_changes_nothing(run_ranks: Any, stage: int) -> None:
    expected = [(False, True, 1), (True, False, 2), (False, True, 3)]
    assert run_ranks(2, skipped, stage) == [expected] * 2


def numbers(stage: int, precision: str, offloads: bool) -> bool:
    """Whether three steps by a configuration give the bits of those with transforms written by hand."""
    mesh = fz.make_mesh()
    zero: dict[str, Any] = {"stage": stage}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
    given = {
        "train_batch_size": 12, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
        precision: {"enabled": precision != "fp32"},
    }  # fmt: skip
    if precision == "fp32":
        del given[precision]
    config = load(given, world=mesh.size)
    plain = optim.warmup_lr(1e-3, 1e-2, 3)
    adam = optim.adamw(lambda step: plain(step - 1), 0.8, 0.95, weight_decay=0.1)
    chain = optim.chain(optim.clip_by_global_norm(0.5), adam)
    hand: list[Any] = [STAGES[stage](), fz.accumulate(2), *([fz.offload("cpu", "opt_state")] if offloads else [])]
    if precision == "bf16":
        hand.append(fz.mixed_precision("bf16"))
        chain = optim.skip_nonfinite(chain)
    if precision == "fp16":
        scale = fz.LossScale(growth_interval=1000, hysteresis=2)
        hand.append(fz.mixed_precision("fp16", loss_scale=scale, loss_scale_at_minimum="raise"))
    out = []
    for step in (config.train_step(gpt_loss), fz.compose(*hand)(fz.train_step(gpt_loss, chain))):
        train = fz.compile(step, mesh, backend="eager")
        state = train.init(gpt_init(fz.random.key(0)), fz.random.key(1))
        for batch in batches(3, size=config.batch_size):
            state, metrics = train(state, part(batch, mesh))
        out.append([*tree.leaves(train.gather(state).params), metrics["loss"]])
    return all(torch.equal(a, b) for a, b in zip(*out, strict=True))


@pytest.mark.full(keep=["1-fp32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_as_by_hand(stage: int, precision: str) -> None:
    assert numbers(stage, precision, offloads=stage == 2)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_as_by_hand_on_two_ranks(run_ranks: Any, stage: int) -> None:
    assert run_ranks(2, numbers, stage, "bf16", stage > 1) == [True, True]


def test_initialize(capsys: Any) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    config = with_("zero_optimization.stage", 3, with_("gradient_accumulation_steps", 2))
    x = torch.randn(8, 4)
    model = fz.functionalize(net)
    out = []
    for given in (net, model, None):
        loss = (lambda out, batch: out.square().mean()) if given is not None else _plain(model)
        train = fz.deepspeed.initialize(model=given, config=config, loss=loss, backend="eager")
        assert capsys.readouterr().err.startswith("a dict, DeepSpeed's configuration\nkey ")
        state = train.init(model.params, fz.random.key(0))
        state, _ = train(state, (x,) if given is not None else x)
        out.append(train.gather(state).params)
    assert all(map(torch.equal, tree.leaves(out[0]), tree.leaves(out[1])))
    assert all(map(torch.equal, tree.leaves(out[0]), tree.leaves(out[2])))
    loaded = load(config)
    fz.deepspeed.initialize(model=net, config=loaded, loss=lambda out, batch: out.mean(), report=False, backend="eager")
    assert capsys.readouterr().err == ""
    for wrong_model in ({"model": 3}, {}):
        with pytest.raises(FzeroTypeError, match=r"deepspeed\.initialize"):
            fz.deepspeed.initialize(config=config, **wrong_model)


def test_batches_of_other_rows() -> None:
    net = torch.nn.Linear(4, 1)

    def loss(out: Any, batch: Any) -> torch.Tensor:
        return out.square().mean() * (batch["classes"].mean() if isinstance(batch, dict) else 1)

    settings: dict[str, Any] = {"loss": loss, "report": False, "backend": "eager"}
    train = fz.deepspeed.initialize(model=net, config=SMALL, **settings)
    state = train.init(fz.functionalize(net).params)
    state, _ = train(state, (torch.ones(8, 4),))
    with pytest.raises(
        FzeroValueError, match=r"(?s)of 8 rows \(train_batch_size\).*batch\[0\]: 6 rows of each of 1 parts"
    ):
        train(state, (torch.ones(6, 4),))
    state, _ = train(state, {"input": torch.ones(8, 4), "classes": torch.ones(3)})  # one leaf has the rows
    step = fz.functionalize(net).train_step(fz.optim.sgd(0.1), settings["loss"])
    with pytest.raises(FzeroValueError, match="give each rank 4 rows"):
        fz.lower(load(SMALL, world=2)(step), fz.AbstractMesh(data=2), fz.functionalize(net).params, (torch.ones(8, 4),))
    cut = fz.tensor_parallel(load(SMALL, world=2)(step), rules={"weight": 1})
    fz.lower(cut, fz.AbstractMesh(data=2, model=2), fz.functionalize(net).params, (torch.ones(4, 4),))
    evaluate = fz.compose(*train.resolved.transforms)(fz.functionalize(net).eval_step())
    assert fz.compile(evaluate, fz.make_mesh(), backend="eager")(state.params, (torch.ones(3, 4),)).shape == (3, 1)


def _plain(model: Any) -> Any:
    return lambda params, x: model.apply(params, x).square().mean()


# Accelerate's configuration

YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: bf16
num_processes: 2
use_cpu: false
"""
DS_PLUGIN = (
    YAML.format(kind="DEEPSPEED")
    + """
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
"""
)
FSDP_PLUGIN = (
    YAML.format(kind="FSDP")
    + """
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
  activation_checkpointing: true
"""
)


def accelerated(given: Any, **kwargs: Any) -> Any:
    settings = {"micro_batch_size": 4, "optimizer": optim.adamw(1e-3), "world": 2} | kwargs
    return fz.deepspeed.load_accelerate(given, **settings)


def test_accelerates_plugins(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "accelerate.yaml"
    path.write_text(DS_PLUGIN)
    found = accelerated(path)
    assert [str(t) for t in found.transforms] == [
        "mixed_precision(compute='bf16', params='fp32', reduce='fp32')",
        "shard_params(axis='data')",
        "offload('cpu', ('opt_state', 'params'))",
        "accumulate(num_micro_batches=2)",
    ]
    assert found.optimizer_text == "skip_nonfinite(chain(clip_by_global_norm(0.5), the caller's))"
    assert (found.batch_size, found.source) == (16, str(path))
    path.write_text(FSDP_PLUGIN)
    found = accelerated(path, gradient_accumulation_steps=3)
    assert [str(t) for t in found.transforms[1:]] == [
        "shard_grads(axis='data')", "accumulate(num_micro_batches=3)", "remat(policy='full')"
    ]  # fmt: skip
    assert found.optimizer_text == "the caller's", "nothing is clipped or left out that the script does not"
    assert "fsdp_config.fsdp_backward_prefetch" in found.report()
    assert fz.train_step(lambda p, x: x.sum(), optim.sgd(0.1)) != found.train_step(lambda p, x: x.sum())


def test_a_file_that_accelerate_names(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO | {"zero_optimization": ZERO["zero2"]}))
    given = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}
    given["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    names = ("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_min_lr")
    auto = dict(zip(names, (1e-3, 1e-3, 0), strict=True)) | {"gradient_clipping": 1.0, "train_batch_size": 8}
    auto |= {"optimizer.params.betas": [0.9, 0.95], "optimizer.params.eps": 1e-8, "optimizer.params.weight_decay": 0.1}
    auto |= {"scheduler.params.total_num_steps": 100, "scheduler.params.warmup_num_steps": 10}
    found = accelerated(given, auto=auto, optimizer=None)
    assert found.batch_size == 8 and "shard_grads(axis='data')" in map(str, found.transforms)
    given["deepspeed_config"]["zero_stage"] = 3
    with pytest.raises(FzeroValueError, match="Accelerate refuses both"):
        accelerated(given, auto=auto)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"distributed_type": "TPU"}, "distributed_type='TPU': must be one of"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8': must be one of"),
        ({"fsdp_conf": {}}, "did you mean 'fsdp_config'"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "axis='replica'"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_stategy": 1}}, "fsdp_sharding_strategy"),
        ({"distributed_type": "FSDP", "deepspeed_config": {"zero_stage": 2}}, "distributed_type is FSDP"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"enable_msamp": True}}, "8 bits are fz.fp8's"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_param_device": "cpu"}}, "needs stage 3"),
        ({"megatron_lm_config": {"tp_degree": 2}}, "megatron_lm_config"),
    ],
)
def test_accelerates_mistakes(given: dict[str, Any], says: str) -> None:
    with pytest.raises(FzeroValueError) as error:
        accelerated(given)
    assert says in str(error.value)


@pytest.mark.full
def test_every_key_of_accelerate_has_an_answer() -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("Accelerate is not installed")
    code = """
import dataclasses, json
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DeepSpeedPlugin
flags = [a.dest for a in launch_command_parser()._actions]
print(json.dumps([[f.name for f in dataclasses.fields(ClusterConfig)], flags,
                  [f.name for f in dataclasses.fields(DeepSpeedPlugin)]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    top, flags, plugin = json.loads(done.stdout.splitlines()[-1])
    known = {*ACCELERATE.rows, *ACCELERATE.sections}
    assert not [name for name in top if name not in known]
    assert not [name for name in flags if name[:5] == "fsdp_" and f"fsdp_config.{name}" not in known]
    assert not [name for name in flags if name[:10] == "deepspeed_" and f"deepspeed_config.{name}" not in known]
    assert not [name for name in plugin if name not in ("hf_ds_config", "is_train_batch_min")
                and f"deepspeed_config.{name}" not in known]  # fmt: skip


def test_a_rate_in_the_state_keeps_the_class_of_the_optimizer() -> None:
    """A step knows by the class that updates which are not finite are skipped."""
    pytest.importorskip("transformers")
    from fzero.hf.optimizers import rate_in_state
    from fzero.optim.nonfinite import SkipsNonfinite

    schedule, at_rate = rate_in_state()
    assert isinstance(at_rate(fz.optim.skip_nonfinite(fz.optim.rprop(schedule))), SkipsNonfinite)
