"""Makes optimizers and schedules from the sections `optimizer` and `scheduler`, with DeepSpeed's defaults."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero import optim
from fzero.deepspeed.config_values import ConfigSettings
from fzero.deepspeed.supported_keys import SUPPORTED
from fzero.errors import FzeroError, parted
from fzero.optim import GradientTransformation, Schedule, schedules, torch_classes
from fzero.optim.gradient_transformation import is_transformation

_ADAM = "betas eps bias_correction amsgrad adam_w_mode torch_adam set_grad_none fp32_optimizer_states capturable"
_TORCH = "lr weight_decay maximize foreach fused differentiable"
TORCH = ("Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop", "SGD")
"""The optimizers that DeepSpeed takes from torch.optim. Their names must be spelled exactly like this, except
Adagrad's."""

PARAMS = {
    "Adam": f"{_ADAM} {_TORCH}".split(),
    "AdamW": f"{_ADAM} {_TORCH}".split(),
    "Lion": ["lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"],
    "Muon": ["lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "ns_method"],
    **{name: list(torch_classes.defaults(getattr(torch.optim, name))) for name in TORCH},
}
PARAMS["Adagrad"] += ["amsgrad", "fp32_optimizer_states"]  # arguments of DeepSpeed's own class, used with offload
"""The supported optimizers and their arguments."""

REFUSED = {
    "Lamb": "DeepSpeed's clips its ratios to 0.01 .. 10 and scales by its bias corrections: fz.optim.lamb does neither",
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), "µP's learning rates are not supported"),
    **dict.fromkeys(("OneBitAdam", "OneBitLamb", "ZeroOneAdam"), "no longer supported by DeepSpeed either"),
}
"""Optimizers that DeepSpeed has and fzero does not support, and why."""

SCHEDULES = {
    "WarmupLR": ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"],
    "WarmupDecayLR": ["total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"],
    "WarmupCosineLR": ["total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"],
    "OneCycle": [
        *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
        *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size"),
        *("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"),
    ],
    "LRRangeTest": [f"lr_range_test_{x}" for x in ("min_lr", "step_size", "step_rate", "staircase")],
}
"""The supported schedules and their arguments."""

_CLIENT = "write it with fz.optim, load_config(optimizer=...)"
Given = GradientTransformation | Callable[[Schedule | None], GradientTransformation] | None


class Made(NamedTuple):
    """An optimizer, the schedule that it uses (None for a constant learning rate), and its text for the report."""

    optimizer: GradientTransformation
    schedule: Schedule | None
    text: str


def make(settings: ConfigSettings, given: Given, own: Schedule | None, clip: float, skip: bool) -> Made | None:
    """Returns the optimizer of a configuration, or the `given` one instead, with clipping before it; None if there is
    none.

    Args:
        own: the caller's schedule.
        clip: the largest global norm of the gradients; 0 for no clipping.
        skip: whether an update whose gradients are not finite changes nothing.
    """
    lr = float(settings.get("optimizer.params.lr", default_rate(settings.get("optimizer.type", ""))))
    schedule, says = _schedule(settings, lr)
    if own is not None and schedule is not None:
        settings.refuse("scheduler.type", "the caller gives a schedule, too: load_config(schedule=)")
    elif own is not None:
        schedule, says = own, "the caller's"
    try:
        made = (
            _given(settings, given, schedule)
            if given is not None
            else _own(settings, schedule or lr, says or f"{lr:g}")
        )
    except FzeroError as error:
        settings.problems.append(f"optimizer: {parted(error)[0]}")
        return None
    if made is None:
        return None
    optimizer, text = made
    if clip:
        # Clipping comes first: it needs the gradients of all parameters, before the optimizer changes them.
        optimizer = optim.chain(optim.clip_by_global_norm(clip), optimizer)
        text = f"chain(clip_by_global_norm({clip:g}), {text})"
    if skip:
        # Outermost, so that a norm that is not finite does not reach the state either.
        optimizer, text = optim.skip_nonfinite(optimizer), f"skip_nonfinite({text})"
    return Made(optimizer, schedule, text)


def default_rate(kind: str) -> float:
    """Returns the learning rate of an optimizer if the configuration does not give one."""
    name = {name.lower(): name for name in TORCH}.get(kind.lower())
    return torch_classes.defaults(getattr(torch.optim, name))["lr"] if name else 1e-3


def _given(
    settings: ConfigSettings, given: Any, schedule: Schedule | None
) -> tuple[GradientTransformation, str] | None:
    """Returns the caller's own optimizer, which replaces the section `optimizer`, as in DeepSpeed."""
    if "optimizer.type" in settings.values:
        settings.note("optimizer.type", "the caller's optimizer takes its place")
    if schedule is not None and is_transformation(given):
        settings.refuse("scheduler.type", "the caller's optimizer has its own: load_config(optimizer=lambda lr: ...)")
        return None
    made: Any = given if is_transformation(given) or not callable(given) else given(schedule)
    if not is_transformation(made):
        settings.problems.append(f"optimizer: {type(made).__name__} is not an optimizer: {_CLIENT}")
        return None
    return made, "the caller's"


def _own(settings: ConfigSettings, lr: float | Schedule, shown: str) -> tuple[GradientTransformation, str] | None:
    """Returns the optimizer of the section `optimizer` and its text, or None, with a problem added, if it is not
    supported."""
    kind: str = settings.get("optimizer.type", "")
    if not kind:
        settings.problems.append(f"optimizer: none is given; add the section, or {_CLIENT}")
        return None
    names = {name.lower(): name for name in (*PARAMS, *REFUSED)}
    name = names.get(kind.lower(), kind)
    if name not in PARAMS or (name in TORCH and name not in (kind, "Adagrad")):
        near = [name] if name in PARAMS else difflib.get_close_matches(kind, PARAMS, n=1)
        torch_has = isinstance(getattr(torch.optim, kind, None), type)
        why = REFUSED.get(name) or ("not there" if torch_has else "unknown")
        settings.refuse(
            "optimizer.type", f"{why}: {f'did you mean {near[0]!r}, or ' if near and not torch_has else ''}{_CLIENT}"
        )
        return None
    given = {p.rpartition(".")[2] for p in settings.values if p.startswith("optimizer.params.")}
    odd = sorted(given - {*PARAMS[name]} - {"max_grad_norm"})
    settings.problems += [f"optimizer.params.{x}: {name} has no such argument" for x in odd]
    get = lambda key, default: settings.get(f"optimizer.params.{key}", default)  # noqa: E731
    cycled = _cycled_momentum(settings, name)
    if cycled is not None and name not in ("Adam", "AdamW"):
        settings.problems.append(f"scheduler.params.cycle_momentum: cycles the betas of {name}: set it to false")
    if name in TORCH:
        return _of_torch(settings, name, lr, shown)
    if name == "Muon":
        return _muon(settings, lr, shown)
    b1, b2 = get("betas", (0.9, 0.999))
    if name == "Lion":
        if "betas" not in given:
            settings.omitted("optimizer.params.betas", "DeepSpeed's own, 0.9 and 0.999 (fz.optim.lion: 0.9 and 0.99)")
        decay = get("weight_decay", 0.0)
        return optim.lion(lr, b1, b2, decay), f"lion({shown}, b1={b1:g}, b2={b2:g}, weight_decay={decay:g})"
    return _adam(settings, name, lr, shown, *(cycled or (b1, b2)))


def _of_torch(
    settings: ConfigSettings, name: str, lr: float | Schedule, shown: str
) -> tuple[GradientTransformation, str]:
    """Returns an optimizer of torch.optim with the configuration's arguments, and its text with those that are not
    defaults."""
    cls = getattr(torch.optim, name)
    default = torch_classes.defaults(cls)
    supported = {n: x for n, x in default.items() if n != "lr" and f"optimizer.params.{n}" in SUPPORTED}
    given = {n: settings.get(f"optimizer.params.{n}", x) for n, x in supported.items()}
    options = {n: tuple(x) if isinstance(x, list) else x for n, x in given.items()}
    changed = [f"{n}={x!r}" for n, x in options.items() if x != default[n]]
    return torch_classes.of_torch(cls, lr, options), f"{name.lower()}({', '.join([shown, *changed])})"


def _cycled_momentum(settings: ConfigSettings, name: str) -> tuple[Schedule, float] | None:
    """Returns the betas of Adam under `OneCycle`, or None if they are not cycled.

    `OneCycle` cycles the first beta opposite to the learning rate and sets the second to 0.99. As in DeepSpeed,
    `cycle_momentum` is true by default and has no effect on optimizers without betas.
    """
    get = lambda key, default: settings.get(f"scheduler.params.{key}", default)  # noqa: E731
    if settings.get("scheduler.type") != "OneCycle" or not get("cycle_momentum", True):
        return None
    has_betas = name != "Muon" and "betas" in PARAMS[name]
    says = "the first beta is cycled, the second is 0.99" if has_betas else f"without effect: {name} has no betas"
    if "scheduler.params.cycle_momentum" in settings.values:
        settings.note("scheduler.params.cycle_momentum", says)
    elif has_betas:
        settings.omitted("scheduler.params.cycle_momentum", f"{says}, as DeepSpeed has it; or say false")
    if not has_betas:
        return None
    low, high, decay = get("cycle_min_mom", 0.8), get("cycle_max_mom", 0.9), get("decay_mom_rate", 0.0)
    sizes, every = _cycle(settings), get("decay_step_size", 0)

    def momentum(step: torch.Tensor | int) -> torch.Tensor:
        x = torch.as_tensor(step).to(torch.float64)
        found = high - (high - low) * schedules.cycle_share(x, *sizes)
        if decay and every:
            found = found * (1 + decay * (x - sizes[0] - sizes[1]).clamp(min=0.0) / every)
        return torch.where(x < 1, low, found)  # DeepSpeed makes the first update with the lowest

    return momentum, 0.99


def _cycle(settings: ConfigSettings) -> tuple[int, int, int, int]:
    """Returns the number of steps of both halves of a `OneCycle`, and their numbers of stairs."""
    get = lambda key, default: settings.get(f"scheduler.params.cycle_{key}", default)  # noqa: E731
    first, stairs = get("first_step_size", 2000), get("first_stair_count", 0)
    return first, get("second_step_size", first), stairs, get("second_stair_count", stairs)


def _muon(settings: ConfigSettings, lr: float | Schedule, shown: str) -> tuple[GradientTransformation, str]:
    """Returns Muon for all matrices whose names do not contain "embed" or "lm_head", with AdamW for all other
    parameters."""
    get = lambda key, default: settings.get(f"optimizer.params.{key}", default)  # noqa: E731

    def rate(key: str, default: float) -> tuple[float | Schedule, str]:
        """Returns the learning rate of a group, and its text. Schedules set one rate for both groups, except
        WarmupCosineLR, which scales each."""
        own = float(get(key, get("lr", default)))
        schedule = lr
        if not callable(schedule):
            return own, f"{own:g}"
        if settings.get("scheduler.type") == "WarmupCosineLR":
            # DeepSpeed's WarmupCosineLR multiplies the initial rate of each parameter group, while its other schedules
            # set one rate for all.
            factor = own / float(get("lr", 1e-3))
            return (lambda step: schedule(step) * factor), f"{factor:g} * {shown}"
        if f"optimizer.params.{key}" in settings.values:
            settings.note(f"optimizer.params.{key}", "without effect, as in DeepSpeed: the schedule sets the rate")
        return schedule, shown

    (matrices, says), (others, also) = rate("muon_lr", 0.02), rate("adam_lr", 3e-4)
    (b1, b2), eps = get("betas", (0.9, 0.95)), get("eps", 1e-10)
    momentum, decay = get("momentum", 0.95), float(get("weight_decay", 0.0))
    if "optimizer.params.betas" not in settings.values:
        settings.omitted("optimizer.params.betas", f"DeepSpeed's own of Muon, {b1:g} and {b2:g}, with eps {eps:g}")

    if get("ns_method", "gram") == "gram":
        noted = settings.note if "optimizer.params.ns_method" in settings.values else settings.omitted
        noted("optimizer.params.ns_method", "the standard iteration in bf16, equal to gram but for rounding")

    def where(path: str, leaf: torch.Tensor) -> int:
        matrix = leaf.dim() >= 2 and not any(word in path.lower() for word in ("embed", "lm_head"))
        return (1 if leaf.dim() == 2 else leaf.shape[0]) if matrix else 0

    other = optim.adamw(others, b1, b2, eps, decay)
    made = optim.muon(matrices, momentum, weight_decay=decay, where=where, other=other)
    adamw = f"adamw({also}, b1={b1:g}, b2={b2:g}, eps={eps:g}, weight_decay={decay:g})"
    return made, f"muon({says}, momentum={momentum:g}, weight_decay={decay:g}, other={adamw})"


def _adam(
    settings: ConfigSettings, name: str, lr: Any, shown: str, b1: float | Schedule, b2: float
) -> tuple[GradientTransformation, str]:
    """Returns Adam or AdamW with DeepSpeed's defaults and meaning of the arguments, and its text."""
    get = lambda key, default: settings.get(f"optimizer.params.{key}", default)  # noqa: E731
    decoupled = name == "AdamW" or get("adam_w_mode", True)
    default = 0.01 if decoupled and get("torch_adam", False) else 0.0
    decay, eps = float(get("weight_decay", default)), get("eps", 1e-8)
    if "optimizer.params.weight_decay" not in settings.values:
        settings.omitted("optimizer.params.weight_decay", f"{default:g}, as DeepSpeed has it (fz.optim.adamw: 0.01)")
    if name == "Adam" and decoupled:
        settings.note("optimizer.type", "AdamW: decay is decoupled; for L2, adam_w_mode false")
    if name == "AdamW" and not get("adam_w_mode", True):
        settings.note("optimizer.params.adam_w_mode", "without effect, as in DeepSpeed: AdamW is decoupled")
    flags = {flag: get(flag, False) for flag in ("amsgrad", "maximize")}
    if not get("torch_adam", False):
        own = "DeepSpeed's own Adam rejects it too: use torch_adam"
        settings.problems += [f"optimizer.params.{flag}=True: {own}" for flag, x in flags.items() if x]
    numbers = f"{shown}, b1={'OneCycle' if callable(b1) else f'{b1:g}'}, b2={b2:g}, eps={eps:g}"
    options = {"betas": (b1, b2), "eps": eps, "weight_decay": decay, "decoupled_weight_decay": decoupled, **flags}
    made = torch_classes.of_torch(torch.optim.AdamW if decoupled else torch.optim.Adam, lr, options)
    numbers += "".join(f", {flag}=True" for flag, x in flags.items() if x)
    if decoupled:
        return made, f"adamw({numbers}, weight_decay={decay:g})"
    return made, f"chain(add_decayed_weights({decay:g}), adam({numbers}))" if decay else f"adam({numbers})"


def _schedule(settings: ConfigSettings, lr: float) -> tuple[Schedule | None, str]:
    """Returns the schedule, or None if there is none, and its text.

    DeepSpeed steps the schedule after the update, starting from -1, so warm-ups use the number of the step before.
    """
    kind = settings.get("scheduler.type")
    params = {p.rpartition(".")[2]: x for p, x in settings.values.items() if p.startswith("scheduler.params.")}
    if kind is None:
        settings.problems += ["scheduler.type: missing"] if params else []
        return None, ""
    if kind not in SCHEDULES:
        near = difflib.get_close_matches(kind, SCHEDULES, n=1)
        why = f"unknown{f': did you mean {near[0]!r}?' if near else ''}"
        settings.refuse("scheduler.type", f"{why}; or a function of the step, {_CLIENT}")
        return None, ""
    known = (*SCHEDULES[kind], "last_batch_iteration")
    odd = [f"scheduler.params.{x}: {kind} has no such argument" for x in params if x not in known]
    needed = [x for x in ("total_num_steps", "cycle_min_lr", "cycle_max_lr") if x in known and params.get(x) is None]
    odd += [f"scheduler.params.{x}: {kind} needs it" for x in needed]
    settings.problems += odd
    if odd:
        return None, ""
    if kind in ("OneCycle", "LRRangeTest"):
        return _one_cycle_or_range_test(settings, kind)
    if "warmup_type" not in params:
        settings.omitted(
            "scheduler.params.warmup_type", "the default is log, a logarithmic warm-up; use linear for a straight line"
        )
    get = lambda key, default: default if params.get(key) is None else params[key]  # noqa: E731
    low, steps = float(get("warmup_min_lr", 0.0)), int(get("warmup_num_steps", 1000))
    high, shape = float(get("warmup_max_lr", lr if kind == "WarmupLR" else 1e-3)), get("warmup_type", "log")
    try:
        if kind == "WarmupCosineLR":
            schedule = _cosine(
                lr,
                int(params["total_num_steps"]),
                steps,
                shape,
                get("warmup_min_ratio", 0.0),
                get("cos_min_ratio", 1e-4),
            )
        elif kind == "WarmupLR":
            schedule = optim.warmup_lr(low, high, steps, shape)
        else:
            schedule = optim.warmup_decay_lr(int(params["total_num_steps"]), low, high, steps, shape)
    except FzeroError as error:
        settings.problems.append(f"scheduler.params: {parted(error)[0]}")
        return None, ""
    # DeepSpeed advances a warm-up after each update and starts at -1, so its update number k uses the rate of step k -
    # 1 (`optim.warmup_lr`).
    return (lambda step: schedule(step - 1)), kind


def _one_cycle_or_range_test(settings: ConfigSettings, kind: str) -> tuple[Schedule | None, str]:
    """Returns the schedule of a `OneCycle` or `LRRangeTest`, and its text. Unlike warm-ups, these are not one update
    late."""
    get = lambda key, default=None: settings.get(f"scheduler.params.{key}", default)  # noqa: E731
    try:
        if kind == "OneCycle":
            decay = get("decay_lr_rate", 0.0), get("decay_step_size", 0)
            return optim.one_cycle(get("cycle_min_lr"), get("cycle_max_lr"), *_cycle(settings), *decay), kind
        names = {"min_lr": 1e-3, "step_size": 2000, "step_rate": 1.0, "staircase": False}
        return optim.lr_range_test(*(get(f"lr_range_test_{name}", x) for name, x in names.items())), kind
    except FzeroError as error:
        settings.problems.append(f"scheduler.params: {parted(error)[0]}")
        return None, ""


def _cosine(lr: float, total: int, steps: int, shape: str, low: float, end: float) -> Schedule:
    """Returns DeepSpeed's `WarmupCosineLR`: warm-up from `low` to 1 times `lr`, then half a cosine down to `end` times
    `lr`."""
    steps = max(2, steps)
    gamma = optim.warmup_lr(0.0, 1.0, steps, shape)  # pyright: ignore[reportArgumentType]  # checked by its row

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        x = torch.as_tensor(step).to(torch.float64)
        fraction = ((x - steps + 1) / max(1, total - steps)).clamp(0.0, 1.0)
        down = end + (1 - end) * (1 + torch.cos(math.pi * fraction)) / 2
        ratio = torch.where(x < steps, low + (1 - low) * gamma(step), down.clamp(min=0.0))
        # Before its first step, DeepSpeed's schedule has set a rate of 0.
        return (lr * torch.where(x < 0, 0.0, ratio)).to(torch.float32)

    return schedule
