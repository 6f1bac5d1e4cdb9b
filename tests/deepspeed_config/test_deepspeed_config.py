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
from fzero.deepspeed.optimizer import PARAMS, REFUSED, SCHEDULES
from fzero.deepspeed.supported_keys import ALIASES, IGNORED, KEYS, REJECTED, SECTIONS, SUPPORTED
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
    """Or lies inside of a key that is answered as a whole."""
    known = {*KEYS, *SECTIONS}
    inside = lambda path: any(path.startswith(f"{p}.") for p in (*REJECTED, *IGNORED))  # noqa: E731
    assert not [path for path in schema["paths"] if path not in known and not inside(path)]
    assert {*schema["removed"]} <= {*REJECTED}


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
    stale = {*KEYS} - {*schema["paths"]} - older
    assert not [path for path in stale if not path.startswith(free)]
    assert not [x for x in older if x in schema["paths"]]


def test_every_argument_of_optimizers_and_schedules(schema: dict[str, Any]) -> None:
    own = {"Adam": {"adamw_mode", "decoupled_weight_decay"}, "AdamW": {"adamw_mode", "decoupled_weight_decay"}}
    for name, arguments in PARAMS.items():
        if name == "Muon":  # DeepSpeed reads these one by one
            continue
        assert {*arguments} - {"torch_adam"} == {*schema["optimizers"][name]} - own.get(name, set()), name
        assert {f"optimizer.params.{x}" for x in arguments} <= {*KEYS}
    assert {x.lower() for x in (*PARAMS, *REFUSED)} >= {*schema["known"]}
    for name, arguments in schema["schedules"].items():
        assert {f"scheduler.params.{x}" for x in arguments} <= {*KEYS}, name
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


# the tables


def test_a_key_is_in_one_table() -> None:
    assert len({*KEYS}) == len(KEYS)
    assert {*ALIASES.values()} <= {*SUPPORTED, *REJECTED}
    assert not {*KEYS} & SECTIONS


def test_the_documentation_has_every_key() -> None:
    """docs/migrate/deepspeed.md lists the keys that are supported and rejected."""
    page = (Path(__file__).parents[2] / "docs" / "migrate" / "deepspeed.md").read_text()
    for heading, table in (("### Supported keys", SUPPORTED), ("### Rejected keys", REJECTED)):
        section = page.partition(heading)[2].partition("\n#")[0]
        keys: set[str] = set()
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            first, *others = re.findall(r"`(.+?)`", row)
            keys |= {first, *(f"{first.rpartition('.')[0]}.{name}".lstrip(".") for name in others)}
        assert keys == {*table}


def test_ignored_keys_change_nothing() -> None:
    config, plain = SMALL, load(SMALL, world=2)
    for path in sorted(IGNORED):
        config = with_(path, "x", config)
    found = load(config, world=2)
    assert found.transforms == plain.transforms
    assert found.optimizer_text == plain.optimizer_text
    assert found.decisions == plain.decisions
    assert {*found.ignored} == IGNORED
    line = next(line for line in found.report(width=1 << 16).splitlines() if line.startswith("ignored here: "))
    assert line.removeprefix("ignored here: ").split(", ") == [*found.ignored]
    assert "ignored here" not in plain.report()


def test_ignored_arguments_of_an_optimizer_of_torch_change_nothing() -> None:
    plain = with_("optimizer", {"type": "RMSprop", "params": {"lr": 0.1}})
    given = with_("optimizer.params", {"lr": 0.1, "foreach": True, "differentiable": True, "capturable": True}, plain)
    assert load(given).optimizer_text == load(plain).optimizer_text
    assert "foreach: Lion has no such argument" in refused(with_("optimizer.type", "Lion", given))


@pytest.mark.parametrize("path", REJECTED)
def test_a_rejection_names_its_key(path: str) -> None:
    for value in (5, "x", {"x": 1}, {"enabled": True}, "auto"):
        if value not in REJECTED[path].neutral:
            text = refused(with_(path, value))
            assert f"  {path}={value!r}: {REJECTED[path].says}" in text, text
    for neutral in REJECTED[path].neutral:
        if path.startswith(("optimizer.params", "scheduler.params")):
            assert f"  {path}=" not in _text(with_(path, neutral))
        else:
            assert load(with_(path, neutral)).ignored == (path,)


def test_a_section_that_is_turned_off_asks_for_nothing() -> None:
    assert load(with_("eigenvalue", {"enabled": False, "verbose": True})).ignored == ("eigenvalue",)
    assert "eigenvalue={'enabled': True}" in refused(with_("eigenvalue", {"enabled": True}))
    assert "expert_parallel.enabled=0" in refused(with_("expert_parallel.enabled", 0)), "0 is not false in JSON"


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
    ("zero_optimization.stage3_param_persistence_threshold", "5e8", "without quotes"),
    ("bf16.check_grad_overflow", "true", "must be true or false without quotes"),
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
    ("optimizer.type", "OneBitAdam", "no longer supported by DeepSpeed"),
    ("scheduler.type", "WarmupDecay", "did you mean 'WarmupDecayLR'"),
    ("scheduler.type", "OneCycles", "did you mean 'OneCycle'"),
    ("scheduler", {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}, "cycle_max_lr: OneCycle needs it"),
    ("scheduler", {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}, "steps=0: must be at least 1"),
    ("optimizer", {"type": "rmsprop"}, "optimizer.type='rmsprop': unknown: did you mean 'RMSprop'"),
    ("optimizer", {"type": "LBFGS"}, "optimizer.type='LBFGS': not there"),
    ("optimizer", {"type": "Adam", "params": {"amsgrad": True}}, "amsgrad=True: DeepSpeed's own Adam rejects it too"),
    ("scheduler", {"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: WarmupDecayLR needs it"),
    ("scheduler", {"params": {"warmup_num_steps": 3}}, "scheduler.type: missing"),
    ("train_batch_size", 9, "train_batch_size=9: 4 rows x 1 micro-batches x 2 ranks are 8"),
    ("train_batch_size", 0, "must be a whole number of at least 1"),
    ("train_batch_size", True, "train_batch_size=True: must be a whole number of at least 1"),
    ("gradient_accumulation_steps", 3, "steps=3: 1 rows x 3 micro-batches x 2 ranks are 6"),
    ("gradient_clipping", -1.0, "must be at least 0"),
    ("optimizer", {"type": "AdamW", "params": {"lr": 1e-3, "betas": [2, 0.9]}}, "b1=2: must be at least 0"),
    ("communication_data_type", "fp8", "must be one of"),
    ("data_types.param_dtype", "bf16", "fp32 is computed in"),
    ("wandb.projects", "x", "did you mean 'project'"),
    ("zero_optimization.offload_param", {"device": "cpu"}, "offload_param.device='cpu': it needs stage 3"),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}, "it needs stage 1, this is stage 0"),
    ("zero_optimization", {"stage": 3, "offload_optimizer": {"device": "nvme"}}, "nvme_path: missing"),
    ("zero_optimization", {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                           "offload_param": {"device": "nvme", "nvme_path": "/b"}}, "the same directory"),
    ("zero_optimization", {"param_persistence_threshold": 1, "stage3_param_persistence_threshold": 2},
     "one key under two names"),
    ("fp16", {"enabled": True, "loss_scale_window": 0}, "loss_scale_window=0"),
    ("fp16", {"enabled": True, "initial_scale_power": 1e30}, "fp16.initial_scale_power=1e+30: a scale is a float32"),
    ("amp", {"enabled": True}, "no longer supported by DeepSpeed"),
    ("compile.passes", ["autotp"], "compile.passes=['autotp']"),
    ("zero_optimization.zenflow", {}, "stale gradients"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "says"), MUTILATED, ids=lambda x: str(x)[:40])
def test_mutilated(path: str, value: Any, says: str) -> None:
    text = refused(with_(path, value), world=2)
    assert says in text, text
    assert any(re.match(rf"  (\S+, )?{re.escape(path)}\b", line) for line in text.splitlines()), text
    assert text.startswith("fzero.deepspeed: a dict has ") and text.count("\nFix: ") == 1


ODD: list[Any] = [None, True, 0, -1, 2.5, 1e30, float("nan"), "x", "auto", "", [], [1], {}, {"a": 1}, 10**400]


@pytest.mark.parametrize("value", ODD, ids=lambda x: str(x)[:10])
def test_any_value_anywhere_is_read_or_refused(value: Any) -> None:
    for path in (*KEYS, *SECTIONS, "zzz", "zero_optimization.zzz"):
        base = SMALL if path.startswith("fp16") else with_("fp16.enabled", True)
        base = {k: v for k, v in base.items() if k != path.split(".")[0]} | {"optimizer": {"type": "AdamW"}}
        _text(with_(path, value, base))  # raises what is not an FzeroValueError


def test_all_problems_at_once() -> None:
    config = with_("zero_optimization.stage", 5, with_("gradient_cliping", 1, with_("fp16.enabled", "yes")))
    assert refused(config).startswith("fzero.deepspeed: a dict has 3 problems\n")


# traps: what DeepSpeed means that one would not think


def noted(config: dict[str, Any], path: str, **kwargs: Any) -> str:
    return "; ".join(d.says for d in load(config, **kwargs).decisions if d.path == path and d.status == "note")


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
        assert "does not exist" in refused(missing), missing
    for odd in (3, None):
        with pytest.raises(FzeroTypeError, match="a path or a dict"):
            load(odd)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FzeroTypeError, match="JSON does not have"):
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
    assert "optimizer: none is given" in refused({"train_batch_size": 8})


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


def test_sections_that_real_files_carry_and_deepspeed_does_not_read_are_ignored() -> None:
    carried = {
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
        "fp8": {"enabled": True, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "autotuning": {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}},
        "local_rank": -1,
        "cuda_visible_devices": "0,1",
        "activation_checkpointing": {"number_checkpoints": False, "partition_activations": False},
    }
    found, plain = load(SMALL | carried), load(SMALL)
    assert {path.partition(".")[0] for path in found.ignored} == {*carried}
    assert found.decisions == plain.decisions
    assert found.transforms == plain.transforms and found.optimizer_text == plain.optimizer_text
    assert "number_checkpoints=4: activations are checkpointed" in refused(
        with_("activation_checkpointing.number_checkpoints", 4)
    )


@pytest.mark.parametrize("name", ["stage3_param_persistence_threshold", "param_persistence_threshold"])
def test_a_threshold_that_is_auto_has_one_answer(name: str) -> None:
    found = load(SMALL | {"zero_optimization": {"stage": 3, name: "auto"}})
    rows = [(d.value, d.status, d.says) for d in found.decisions if d.path.endswith("param_persistence_threshold")]
    assert len(rows) == 1 and rows[0][:2] == ("'auto'", "note") and rows[0][2].startswith("all parameters are sharded")


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
        FzeroValueError, match=r"(?s)has 8 samples \(train_batch_size\).*batch\[0\]: 6 samples of each of 1 shards"
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


def test_a_rate_in_the_state_keeps_the_class_of_the_optimizer() -> None:
    """A step knows by the class that updates which are not finite are skipped."""
    pytest.importorskip("transformers")
    from fzero.hf.torch_optimizers import rate_in_state
    from fzero.optim.nonfinite import SkipsNonfinite

    schedule, at_rate = rate_in_state()
    assert isinstance(at_rate(fz.optim.skip_nonfinite(fz.optim.rprop(schedule))), SkipsNonfinite)
