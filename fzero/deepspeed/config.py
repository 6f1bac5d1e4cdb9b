"""Loads a DeepSpeed configuration as transforms, an optimizer and a schedule."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fzero._utils.arguments import count, plain_numbers
from fzero.deepspeed import optimizer as optimizers
from fzero.deepspeed.config_values import APPLIED, ConfigSettings, Decision, read_file, settings
from fzero.errors import FzeroError, FzeroValueError
from fzero.ir.program import Program
from fzero.optim import GradientTransformation, Schedule
from fzero.optim.loss_scale import LossScale
from fzero.step import EvalStep, Step, compose, train_step
from fzero.transforms.accumulate import accumulate
from fzero.transforms.offload import offload
from fzero.transforms.precision import DTYPE_NAMES, mixed_precision
from fzero.transforms.remat import remat
from fzero.transforms.transform import Transform
from fzero.transforms.zero import Parallel, data_parallel, shard_grads, shard_opt_state, shard_params

_ZERO = "zero_optimization"
_OFFLOADS = {f"{_ZERO}.offload_optimizer": ("opt_state", 1), f"{_ZERO}.offload_param": ("params", 3)}
"""The state that each section offloads, and the lowest stage at which DeepSpeed does so."""

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OMITTED = {"gradient_clipping": 1.0, "fp16.enabled": False, "bf16.enabled": False}
"""The values of keys that are omitted."""

_SCALE = {
    "initial": "initial_scale_power",
    "growth_interval": "loss_scale_window",
    "minimum": "min_loss_scale",
}
"""The arguments of `LossScale` that have another name in DeepSpeed."""


@dataclass(frozen=True)
class Larger:
    """A predicate that selects parameters with at least `numel` elements."""

    numel: int

    def __call__(self, path: str, leaf: torch.Tensor) -> bool:
        return leaf.numel() >= self.numel


@dataclass(frozen=True)
class Without:
    """A predicate that selects parameters whose path matches none of these patterns; `*` in a pattern stands for any
    characters."""

    patterns: tuple[str, ...]

    def __call__(self, path: str, leaf: torch.Tensor) -> bool:
        names = re.sub(r"\['?([^'\]]*)'?\]", r".\1", path)
        return not any(re.search(p.replace("*", ".*"), names) for p in self.patterns)


@dataclass(frozen=True)
class BatchSize(Transform):
    """Checks the number of samples of a step over all ranks. A batch with another number is rejected when its program
    is made.

    An entry of the batch has its samples in dim 0. At least one entry must have the given number of samples.
    """

    rows: int = 1
    order: ClassVar[int] = 90
    name: ClassVar[str] = "train_batch_size"

    def idle_in(self, program: Program) -> str:
        return "it checks the batch"

    def rewrite(self, program: Program) -> Program:
        found = {v.name: v.shape[0] for v in program.inputs if v.name not in program.leaves and v.shape}
        axes = {a for t in program.transforms if isinstance(t, Parallel) for a in t.axes if a in program.mesh.axes}
        parts = program.mesh.axis_size(tuple(axes))
        # One match is enough: other tensors of a batch, such as a mask that all samples share, may have another first
        # dim. An evaluation assigns nothing, and may have any batch.
        if program.assigns and found and self.rows not in {n * parts for n in found.values()}:
            problems = [f"{name}: {n} samples of each of {parts} shards of the batch" for name, n in found.items()]
            rows = self.rows / parts
            fix = f"give each rank {rows:g} rows, those of all its micro-batches; or say another train_batch_size"
            what = f"a step has {self.rows} samples (train_batch_size), this batch has a different number"
            raise FzeroValueError("deepspeed", what, problems, fix)
        return program


@dataclass(frozen=True)
class Config:
    """A DeepSpeed configuration, translated to fzero. Called with a step, it applies all of its transforms, and the
    check that batches have `batch_size` samples.

    Attributes:
        transforms: the transforms that it asks for, each as one would write it.
        optimizer: for `fz.train_step`, including gradient clipping.
        schedule: the learning rate by the number of the update, from 0; None for a constant rate.
        batch_size: the number of samples of a step, over all ranks.
        micro_batch_size: the number of samples of a micro-batch on one rank.
        num_micro_batches: the number of micro-batches of a step.
        decisions: every supported key with its effect, and the effects of keys that are omitted.
        ignored: the keys that have no effect in fzero.

    Example:
        >>> import fzero as fz
        >>> given = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
        >>> config = fz.deepspeed.load_config(given | {"optimizer": {"type": "AdamW"}}, world=2)
        >>> config.micro_batch_size, [str(t) for t in config.transforms]
        (2, ["shard_grads(axis='data')", 'accumulate(num_micro_batches=2)'])
    """

    source: str
    transforms: tuple[Transform, ...]
    optimizer: GradientTransformation
    schedule: Schedule | None
    batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    decisions: tuple[Decision, ...]
    ignored: tuple[str, ...]
    optimizer_text: str

    def __call__(self, step: Any) -> Any:
        """Returns a training or evaluation step with the transforms of the configuration applied.

        A training step also checks that its batches have `batch_size` samples.

        Raises:
            TransformError: if the step already has a transform that contradicts one of these.
        """
        rows = () if isinstance(step, EvalStep) else (BatchSize(self.batch_size),)
        return compose(*self.transforms, *rows)(step)

    def train_step(self, loss_fn: Callable[..., Any], **kwargs: Any) -> Step:
        """Returns `fz.train_step(loss_fn, config.optimizer, **kwargs)` with the transforms applied."""
        return self(train_step(loss_fn, self.optimizer, **kwargs))

    def report(self, width: int = 120) -> str:
        """Returns a table of every supported key: its value, its status (applied, or a note), and its effect.

        The last lines list the ignored keys and what all other keys amount to.
        """
        rows = [(d.path, d.value, d.status, d.says) for d in self.decisions]
        rows.sort(key=lambda row: row[2] != APPLIED)
        key, value, status = (
            max([len(row[i]) for row in rows] + [len(t)]) for i, t in enumerate(("key", "value", "status"))
        )
        value = min(value, 24)
        room, lines = max(24, width - key - value - status - 6), []
        for path, found, kind, says in [("key", "value", "status", "what it becomes"), *rows]:
            cells = [textwrap.wrap(found, value) or [""], textwrap.wrap(says, room)]
            for i in range(max(map(len, cells))):
                left, right = (cell[i] if i < len(cell) else "" for cell in cells)
                first = (path, kind) if i == 0 else ("", "")
                lines.append(f"{first[0]:{key}}  {left:{value}}  {first[1]:{status}}  {right}".rstrip())
        batch = f"{self.batch_size} samples; per rank {self.num_micro_batches} micro-batches of {self.micro_batch_size}"
        means = {"transforms": ", ".join(map(str, self.transforms)), "optimizer": self.optimizer_text, "batch": batch}
        if self.ignored:
            means = {"ignored here": ", ".join(self.ignored), **means}
        for name, text in means.items():
            lines += textwrap.wrap(f"{name}: {text}", width, subsequent_indent="  ", break_long_words=False)
        return "\n".join([f"{self.source}, DeepSpeed's configuration", *lines])


@plain_numbers
def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    world: int | None = None,
    optimizer: optimizers.Given = None,
    schedule: Schedule | None = None,
) -> Config:
    """Translates a DeepSpeed configuration, key by key, to fzero.

    Every key of DeepSpeed 0.19.8 is supported, rejected, or ignored because it has no effect in fzero:
    docs/migrate/deepspeed.md lists them, and `report()` shows how each key of this configuration is handled. Defaults
    are DeepSpeed's: gradients are clipped to a norm of 1.0 unless `gradient_clipping` says otherwise, "Adam" is AdamW,
    a warm-up is logarithmic. DeepSpeed itself is not needed.

    Args:
        config: the path of a JSON file, or of an HJSON file if hjson is installed; a dict; or the base64 text that
            DeepSpeed's launcher passes.
        auto: values for keys that are "auto", by path ("optimizer.params.lr"). `from_arguments` makes them from
            TrainingArguments. If a key has a value other than "auto", it must equal the value here.
        world: the number of ranks that divide the batch; by default, the number of processes that torchrun started.
        optimizer: replaces the section `optimizer`. It may be a function, which is called with the schedule, or None
            if there is none, and returns an optimizer.
        schedule: the learning rate by the number of the update, if there is no section `scheduler`.

    Raises:
        FzeroValueError: one error that lists by path all unknown keys, with the nearest names, all values of a wrong
            type, every "auto" that nothing fills in, and everything that is rejected.

    Example:
        >>> import fzero as fz
        >>> try:
        ...     fz.deepspeed.load_config({"train_batch_size": 8, "zero_optimisation": {}, "gradient_cliping": 1.0})
        ... except fz.errors.FzeroValueError as error:
        ...     print(error)
        fzero.deepspeed: a dict has 3 problems
          zero_optimisation: unknown: did you mean 'zero_optimization'?
          gradient_cliping: unknown: did you mean 'gradient_clipping'?
          optimizer: none is given; add the section, or write it with fz.optim, load_config(optimizer=...)
        Fix: correct these keys; all others are supported
    """
    given, source = read_file(config)
    found = settings(given, auto or {})
    world = int(os.environ.get("WORLD_SIZE", 1)) if world is None else world
    found.problems += count("world", world)
    total, micro, num = _batch(found, world)
    _agree(found, auto or {}, dict(zip(_BATCH, (total, micro, num), strict=True)))
    transforms = [*_precision(found), *_stage(found), *_offload(found), *_activations(found)]
    transforms += [accumulate(num_micro_batches=num)] if num > 1 else []
    made = optimizers.make(found, optimizer, schedule, _clipping(found), _skips(found))
    found.check(source)
    assert made is not None, "or there was a problem"
    return Config(
        source,
        tuple(transforms),
        made.optimizer,
        made.schedule,
        total,
        micro,
        num,
        tuple(found.decisions),
        tuple(found.ignored),
        made.text,
    )


def _batch(found: ConfigSettings, world: int) -> tuple[int, int, int]:
    """Returns the samples of a step, the samples of a rank's micro-batch, and the number of micro-batches. Any two of
    them determine the third.

    DeepSpeed rounds down, and fails if there is a remainder.
    """
    paths = _BATCH
    # The values may be of a wrong type, which has been reported already.
    if any(p.startswith((*paths, "world")) for p in found.problems):
        return 1, 1, 1
    total, micro, num = (None if (x := found.get(p)) is None else int(x) for p in paths)
    if total is None and micro is None:
        found.problems.append(f"{paths[0]}: give it, or {paths[1]}")
        return 1, 1, 1
    if micro is None:
        num = num or 1
        # Rounded down: if it does not divide, the check at the end reports the three numbers.
        micro = total // (world * num)  # pyright: ignore[reportOptionalOperand]  # one of the two is there
    elif num is None:
        num = 1 if total is None else max(1, total // (world * micro))
    if total is None:
        total = micro * num * world
    if micro * num * world != total:
        given = ", ".join(f"{path}={found.values[path]}" for path in paths if found.get(path) is not None)
        says = f"{micro} rows x {num} micro-batches x {world} ranks are {micro * num * world}"
        found.problems.append(f"{given}: {says}")
    return total, micro, num


def _agree(found: ConfigSettings, auto: Mapping[str, Any], batch: dict[str, int]) -> None:
    """Checks that the training arguments agree with the defaults of omitted keys, which DeepSpeed uses silently."""
    known = not any(p.startswith(("train_", "gradient_acc", "world")) for p in found.problems)
    for path, value in (_OMITTED | (batch if known else {})).items():
        if path not in found.values and path in auto and auto[path] != value:
            says = f"omitted, it is {value!r}; the arguments say {auto[path]!r}: give it, or 'auto'"
            found.problems.append(f"{path}: {says}")


def _clipping(found: ConfigSettings) -> float:
    """Returns the norm to which gradients are clipped; 0 for no clipping."""
    if found.values.get("gradient_clipping") is None:
        found.omitted("gradient_clipping", "the default is 1.0, as in DeepSpeed since 2026; 0 turns clipping off")
    norm = float(found.get("gradient_clipping", 1.0))
    if norm < 0:
        found.refuse("gradient_clipping", "must be at least 0")
    return max(0.0, norm)


def _skips(found: ConfigSettings) -> bool:
    """Whether updates with gradients that are not finite are skipped. Under fp16, the loss scale does that."""
    if not found.get("bf16.enabled", False):
        return False
    if "bf16.check_grad_overflow" not in found.values:
        found.omitted(
            "bf16.check_grad_overflow", "the default is true: a step whose gradients are not finite is skipped"
        )
    return found.get("bf16.check_grad_overflow", True)


def _precision(found: ConfigSettings) -> list[Transform]:
    """Returns the `mixed_precision` transform that the keys on precision ask for, if any."""
    computes = [text for text in ("fp16", "bf16") if found.get(f"{text}.enabled", False)]
    if found.get("torch_autocast.enabled", False):
        dtype = DTYPE_NAMES.get(found.get("torch_autocast.dtype", ""))
        if dtype != "bf16":
            found.problems.append("torch_autocast.dtype: bfloat16; of float16 there is fp16.enabled, with a loss scale")
        computes.append(dtype or "bf16")
    if len(computes) > 1:
        found.problems.append("fp16.enabled, bf16.enabled, torch_autocast.enabled: one of them")
        return []
    compute = computes[0] if computes else "fp32"
    params = DTYPE_NAMES.get(found.get("data_types.param_dtype", compute))
    if params != compute and not found.get("torch_autocast.enabled", False):
        found.refuse("data_types.param_dtype", f"{compute} is computed in; DeepSpeed rejects it too")
    wires = {
        p: DTYPE_NAMES[x] for p in ("communication_data_type", "data_types.grad_accum_dtype") if (x := found.get(p))
    }
    options: dict[str, Any] = {}
    if found.get("bf16.bf16_master_weights_and_grads", False) and compute == "bf16":
        options = {"params": "bf16", "reduce": "bf16", "rounding": "nearest"}
    if len({*wires.values()}) > 1:
        found.problems.append(f"{' and '.join(wires)}: gradients are reduced and added up in one dtype")
    elif wires:
        options["reduce"] = next(iter(wires.values()))
    elif compute != "fp32" and not options:
        says = (
            f"the default is fp32: sums are more accurate than in {compute}, DeepSpeed's default, with twice the bytes"
        )
        found.omitted("communication_data_type", says)
    kept = found.get("data_types.keep_in_fp32_modules", [])
    if kept:
        options["where"] = Without(tuple([kept] if isinstance(kept, str) else kept))
    if compute == "fp16" or options.get("reduce") == "fp16":
        options["loss_scale"] = _loss_scale(found)
        options["loss_scale_at_minimum"] = "raise" if isinstance(options["loss_scale"], LossScale) else "warn"
    if compute == "fp32" and options.get("reduce", "fp32") == "fp32":
        return []
    return _made(found, "fp16 and bf16", lambda: mixed_precision(compute=compute, **options))


def _loss_scale(found: ConfigSettings) -> LossScale | float | None:
    """Returns the loss scale of the section `fp16`: a constant, or a dynamic `LossScale`. None if it is invalid."""
    get = lambda key, default: found.get(f"fp16.{key}", default)  # noqa: E731
    if get("loss_scale", 0):
        return float(get("loss_scale", 0))
    if (power := get("initial_scale_power", 16)) > 127:
        found.refuse("fp16.initial_scale_power", "a scale is a float32, at most 2**127")
        return None
    found.omitted("fp16.loss_scale", "DeepSpeed counts one step more before the first growth after an overflow")
    scales = _made(
        found,
        "fp16",
        lambda: LossScale(
            2.0**power,
            int(get("loss_scale_window", 1000)),
            hysteresis=int(get("hysteresis", 2)),
            consecutive_hysteresis=get("consecutive_hysteresis", False),
            minimum=float(get("min_loss_scale", 1)),
        ),
    )
    return scales[0] if scales else None


def _stage(found: ConfigSettings) -> list[Transform]:
    """Returns the transforms of the ZeRO stage. With a threshold at stage 3, smaller parameters are not sharded."""
    stage, small = found.get(f"{_ZERO}.stage", 0), f"{_ZERO}.stage3_param_persistence_threshold"
    numel = found.get(small)
    if stage == 3 and numel:
        # DeepSpeed replicates the small parameters, but still shards their gradients and optimizer state, as ZeRO-2
        # does.
        return [shard_params(where=Larger(int(numel))), shard_grads()]
    if stage == 3 and numel is None:
        says = "all parameters are sharded, except those with fewer elements than ranks"
        if small in found.values:
            found.instead(small, f"{says}; with a number, smaller ones are replicated")
        else:
            found.omitted(small, f"the default is 0: {says}")
    return [(data_parallel, shard_opt_state, shard_grads, shard_params)[stage]()]


def _offload(found: ConfigSettings) -> list[Transform]:
    """Returns one `offload` transform for each combination of tier, path and fraction that the two sections ask for."""
    stage, wanted = found.get(f"{_ZERO}.stage", 0), {}
    old = dict(zip(_OFFLOADS, (f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_param"), strict=True))
    for section, (role, least) in _OFFLOADS.items():
        at = f"{section}.device" if f"{section}.device" in found.values else old[section]
        tier = found.get(f"{section}.device", "cpu" if found.get(old[section], False) else "none")
        path, share = found.get(f"{section}.nvme_path"), found.get(f"{section}.ratio", 1.0)
        if f"{section}.device" in found.values and found.get(old[section], False):
            found.refuse(old[section], f"{section} sets it already")
        if tier == "none" or share == 0:
            continue
        if stage < least:
            says = f"it needs stage {least}, this is stage {stage}; DeepSpeed accepts it and does nothing"
            found.refuse(at, says)
        if tier == "nvme" and path is None:
            found.problems.append(f"{section}.nvme_path: missing: device 'nvme' needs a directory")
            continue
        if tier == "nvme" and stage in (1, 2):
            found.note(
                at, f"state is stored on the disk, also at stage {stage}, where DeepSpeed leaves it in host memory"
            )
        if tier == "cpu" and path is not None:
            found.note(f"{section}.nvme_path", "not used: the device is 'cpu'")
        # Roles with the same tier, path and share become one transform, because two offloads need different roles.
        wanted.setdefault((tier, path if tier == "nvme" else None, float(share)), []).append(role)
    if len({path for tier, path, _ in wanted if tier == "nvme"}) > 1:
        paths = " and ".join(f"{section}.nvme_path" for section in _OFFLOADS)
        found.problems.append(f"{paths}: the files of a state lie in one directory: give both the same directory")
    return [
        t
        for (tier, path, share), roles in wanted.items()
        for t in _made(found, _ZERO, lambda t=tier, r=roles, p=path, f=share: offload(tier=t, of=r, path=p, fraction=f))
    ]


def _activations(found: ConfigSettings) -> list[Transform]:
    """Returns the transforms that recompute layers from inputs in host memory, as DeepSpeed's CPU checkpointing
    does."""
    if not found.get("activation_checkpointing.cpu_checkpointing", False):
        return []
    return [remat(policy="full"), offload(tier="cpu", of="activations")]


def _made(found: ConfigSettings, where: str, make: Callable[[], Any]) -> list[Any]:
    """Returns the result of `make` in a list, or an empty list if its arguments are wrong; the errors are added to the
    configuration's."""
    try:
        return [make()]
    except FzeroError as error:
        said = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
        text = "; ".join(said or [str(error)])
        for name, key in _SCALE.items():
            text = text.replace(f"{name}=", f"{key}=")
        found.problems.append(f"{where}: {text}")
        return []
