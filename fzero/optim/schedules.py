"""Defines learning rates as pure functions of the step.

A schedule takes a step, a 0-dim integer tensor or a Python int, and returns a 0-dim float32 tensor on the step's
device. Steps count from 0: the first update of an optimizer uses `schedule(0)`, as in optax and as in
`torch.optim.lr_scheduler` if its `step()` is called after the optimizer's. Values are computed in float64 with tensor
operations only, so that a schedule can be traced; any function that does the same is a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

from fzero._utils.arguments import flag, number, plain_numbers
from fzero.optim.tree_updates import reject

Schedule = Callable[[torch.Tensor | int], torch.Tensor]
"""Maps the index of an update, from 0, to a learning rate.

Example:
    >>> rate: Schedule = lambda count: 0.1 / (1 + count)
    >>> rate(0), rate(4)
    (0.1, 0.02)
"""


@plain_numbers
def constant(value: float) -> Schedule:
    """Returns `value` at every step.

    Args:
        value: a finite number.

    Raises:
        FzeroValueError: if `value` is not a finite number.

    Example:
        >>> constant(0.5)(7)
        tensor(0.5000)
    """
    _check("constant", {"value": value})
    return lambda step: torch.full_like(_float(step), value, dtype=torch.float32)


@plain_numbers
def linear(init: float, end: float, steps: int) -> Schedule:
    """Goes from `init` at step 0 to `end` at step `steps`, in a straight line, and stays at `end` from there on.

    Args:
        init: value at step 0.
        end: value at step `steps` and after.
        steps: at least 1.

    Raises:
        FzeroValueError: if a number is not finite, or `steps` is below 1.

    Example:
        >>> linear(1.0, 0.0, 10)(torch.tensor(4))
        tensor(0.6000)
    """
    _check("linear", {"init": init, "end": end}, steps=steps)
    return lambda step: (init + (end - init) * _fraction(_float(step), steps)).to(torch.float32)


@plain_numbers
def cosine(init: float, end: float, steps: int) -> Schedule:
    """Goes from `init` at step 0 to `end` at step `steps`, along half a cosine, and stays at `end` from there on.

    Args:
        init: value at step 0.
        end: value at step `steps` and after.
        steps: at least 1.

    Raises:
        FzeroValueError: if a number is not finite, or `steps` is below 1.

    Paper: Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR 2017.

    Example:
        >>> cosine(1.0, 0.0, 10)(torch.tensor(5))
        tensor(0.5000)
    """
    _check("cosine", {"init": init, "end": end}, steps=steps)
    return lambda step: _half_cosine(init, end, _fraction(_float(step), steps)).to(torch.float32)


@plain_numbers
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0, init: float = 0.0) -> Schedule:
    """Goes in a straight line from `init` at step 0 to `peak` at step `warmup_steps`, then along half a cosine to
    `end` at step `total_steps`.

    Args:
        peak: the highest value.
        warmup_steps: at least 0.
        total_steps: greater than `warmup_steps`, which it includes.
        end: value at `total_steps` and after.
        init: value at step 0. With 0, the first update changes nothing.

    Raises:
        FzeroValueError: step counts that do not fit together.

    Example:
        >>> [round(warmup_cosine(1.0, 10, 110)(step).item(), 3) for step in (0, 5, 10, 60, 110)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check(
        "warmup_cosine",
        {"peak": peak, "end": end, "init": init},
        warmup_steps,
        ("total_steps", lambda: total_steps),
        total_steps=total_steps,
    )

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        x = _float(step)
        down = _half_cosine(peak, end, _fraction(x - warmup_steps, total_steps - warmup_steps))
        return torch.where(x < warmup_steps, _warmup(init, peak, x, warmup_steps), down).to(torch.float32)

    return schedule


@plain_numbers
def warmup_stable_decay(
    peak: float, warmup_steps: int, decay_steps: int, total_steps: int, end: float = 0.0, init: float = 0.0
) -> Schedule:
    """Goes up in a straight line, stays at `peak` for most of the run, and goes down in a straight line over the last
    `decay_steps`.

    Paper: Hu et al. 2024, arXiv:2404.06395.

    Args:
        peak: value from step `warmup_steps` to step `total_steps - decay_steps`.
        warmup_steps: at least 0.
        decay_steps: at least 1.
        total_steps: at least `warmup_steps + decay_steps`.
        end: value at `total_steps` and after.
        init: value at step 0.

    Raises:
        FzeroValueError: step counts that do not fit together.

    Example:
        >>> [round(warmup_stable_decay(1.0, 10, 20, 100)(step).item(), 3) for step in (0, 5, 10, 80, 90, 100)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    fits = "total_steps - decay_steps + 1", lambda: total_steps - decay_steps + 1
    _check(
        "warmup_stable_decay",
        {"peak": peak, "end": end, "init": init},
        warmup_steps,
        fits,
        decay_steps=decay_steps,
        total_steps=total_steps,
    )

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        x = _float(step)
        down = peak + (end - peak) * _fraction(x - (total_steps - decay_steps), decay_steps)
        return torch.where(x < warmup_steps, _warmup(init, peak, x, warmup_steps), down).to(torch.float32)

    return schedule


@plain_numbers
def warmup_lr(
    min_lr: float = 0.0, max_lr: float = 1e-3, warmup_steps: int = 1000, warmup_type: Literal["log", "linear"] = "log"
) -> Schedule:
    """DeepSpeed's `WarmupLR`: `min_lr + (max_lr - min_lr) * gamma`, where gamma rises from 0 to 1 and then stays
    there.

    gamma is `log(step + 1) / log(warmup_steps)` or `step / warmup_steps` while `step < warmup_steps`; fewer than 2
    warm-up steps count as 2. `step` is DeepSpeed's `last_batch_iteration`. Its engine advances that after each
    update, from -1, so its update number k (from 0) uses step k - 1, whereas fzero's uses step k. A negative step
    gives `min_lr`, so `lambda step: schedule(step - 1)` reproduces DeepSpeed's run step by step.

    Args:
        min_lr: value at step 0.
        max_lr: value from step `warmup_steps` on (with "log", from one step earlier).
        warmup_steps: DeepSpeed's `warmup_num_steps`, at least 1.
        warmup_type: "log" or "linear".

    Raises:
        FzeroValueError: `warmup_steps` less than 1, or another `warmup_type`.

    Example:
        >>> [round(warmup_lr(0.0, 1.0, 100)(step).item(), 3) for step in (0, 9, 99, 500)]
        [0.0, 0.5, 1.0, 1.0]
    """
    _check_warmup("warmup_lr", {"min_lr": min_lr, "max_lr": max_lr}, warmup_steps, warmup_type)

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        # At least 2, as in DeepSpeed: log(1) is 0, and the warm-up divides by it.
        x, steps = _float(step), max(2, warmup_steps)
        gamma = torch.where(x < steps, _gamma(x, steps, warmup_type), 1.0)
        return (min_lr + (max_lr - min_lr) * gamma).to(torch.float32)

    return schedule


@plain_numbers
def warmup_decay_lr(
    total_steps: int,
    min_lr: float = 0.0,
    max_lr: float = 1e-3,
    warmup_steps: int = 1000,
    warmup_type: Literal["log", "linear"] = "log",
) -> Schedule:
    """DeepSpeed's `WarmupDecayLR`: the warm-up of `warmup_lr`, then a straight line back to `min_lr` at step
    `total_steps`.

    gamma is `max(0, (total_steps - step) / (total_steps - warmup_steps))` from step `warmup_steps` on. Steps are
    counted as in `warmup_lr`.

    Args:
        total_steps: DeepSpeed's `total_num_steps`, at least `warmup_steps`.
        min_lr: value at step 0, and from step `total_steps` on.
        max_lr: value at step `warmup_steps`.
        warmup_steps: DeepSpeed's `warmup_num_steps`, at least 1; 1 counts as 2.
        warmup_type: "log" or "linear".

    Raises:
        FzeroValueError: step counts that do not fit together (DeepSpeed warns and drops to `min_lr` after the warm-up),
            or another `warmup_type`.

    Example:
        >>> [round(warmup_decay_lr(300, 0.0, 1.0, 100)(step).item(), 3) for step in (0, 9, 100, 200, 300)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_warmup(
        "warmup_decay_lr", {"min_lr": min_lr, "max_lr": max_lr}, warmup_steps, warmup_type, total_steps=total_steps
    )

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        x, steps = _float(step), max(2, warmup_steps)
        down = ((total_steps - x) / max(1, total_steps - steps)).clamp(min=0.0)
        gamma = torch.where(x < steps, _gamma(x, steps, warmup_type), down)
        return (min_lr + (max_lr - min_lr) * gamma).to(torch.float32)

    return schedule


@plain_numbers
def one_cycle(
    min_lr: float,
    max_lr: float,
    first_steps: int = 2000,
    second_steps: int | None = None,
    first_stairs: int = 0,
    second_stairs: int | None = None,
    decay_rate: float = 0.0,
    decay_steps: int = 0,
) -> Schedule:
    """DeepSpeed's `OneCycle` (Smith 2018, arXiv:1803.09820): a straight line from `min_lr` to `max_lr` and back, then
    `min_lr / (1 + decay_rate * n / decay_steps)` at n steps after the cycle.

    Without stairs and decay the cycle is the first one of `torch.optim.lr_scheduler.CyclicLR`.

    Args:
        min_lr: value at step 0 and at the end of the cycle.
        max_lr: value at step `first_steps`.
        first_steps: DeepSpeed's `cycle_first_step_size`, at least 1.
        second_steps: `cycle_second_step_size`, at least 0; None: as many as `first_steps`.
        first_stairs: `cycle_first_stair_count`: number of stairs of the line up; 0: it is continuous.
        second_stairs: `cycle_second_stair_count`: the same for the line down; None: as `first_stairs`.
        decay_rate: `decay_lr_rate`, at least 0; 0: no decay.
        decay_steps: `decay_step_size`, at least 0; 0: no decay.

    Raises:
        FzeroValueError: if a number is out of range.

    Example:
        >>> rates = one_cycle(0.1, 0.5, 4, 2, decay_rate=1.0, decay_steps=2)
        >>> [round(rates(step).item(), 3) for step in (0, 2, 4, 5, 6, 8)]
        [0.1, 0.3, 0.5, 0.3, 0.1, 0.05]
    """
    numbers = {"min_lr": min_lr, "max_lr": max_lr}
    second_steps = first_steps if second_steps is None else second_steps
    second_stairs = first_stairs if second_stairs is None else second_stairs
    counts = {"second_steps": second_steps, "first_stairs": first_stairs, "second_stairs": second_stairs}
    counts |= {"decay_rate": decay_rate, "decay_steps": decay_steps}
    _check("one_cycle", numbers, at_least_0=counts, first_steps=first_steps)

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        x = _float(step)
        share = cycle_share(x, first_steps, second_steps, first_stairs, second_stairs)
        after = (x - (first_steps + second_steps)).clamp(min=0.0)
        decay = 1 + decay_rate * after / decay_steps if decay_rate and decay_steps else 1.0
        return ((min_lr + (max_lr - min_lr) * share) / decay).to(torch.float32)

    return schedule


@plain_numbers
def lr_range_test(min_lr: float = 1e-3, steps: int = 2000, rate: float = 1.0, staircase: bool = False) -> Schedule:
    """DeepSpeed's `LRRangeTest` (Smith 2018, arXiv:1803.09820): `min_lr * (1 + rate * step / steps)`, to find the
    largest learning rate with which a model trains.

    Args:
        min_lr: value at step 0, DeepSpeed's `lr_range_test_min_lr`.
        steps: `lr_range_test_step_size`, at least 1.
        rate: `lr_range_test_step_rate`, the increase in each `steps` steps, as a fraction of `min_lr`.
        staircase: whether the rate rises only every `steps` steps.

    Raises:
        FzeroValueError: if a number is out of range.

    Example:
        >>> [round(lr_range_test(0.1, 10, 2.0)(step).item(), 3) for step in (0, 5, 10, 20)]
        [0.1, 0.2, 0.3, 0.5]
    """
    reject("optim.lr_range_test", flag("staircase", staircase))
    _check("lr_range_test", {"min_lr": min_lr, "rate": rate}, steps=steps)

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        intervals = _float(step) / steps
        return (min_lr * (1 + rate * (torch.floor(intervals) if staircase else intervals))).to(torch.float32)

    return schedule


def cycle_share(x: torch.Tensor, first: float, second: float, first_stairs: int, second_stairs: int) -> torch.Tensor:
    """Returns how far a cycle of DeepSpeed's `OneCycle` is from its first value (0) to its extreme (1); 0 after the
    cycle.
    """

    def share(part: torch.Tensor, whole: float, stairs: int) -> torch.Tensor:
        return torch.floor(part * stairs / whole) / stairs if stairs else part / whole

    # The way down is the way up in mirror image. It may have no steps at all, but is still computed.
    up, down = share(x, first, first_stairs), share(first + second - x, max(1, second), second_stairs)
    return torch.where(x <= first, up, down) * (x < first + second)


def _float(step: torch.Tensor | int) -> torch.Tensor:
    # float32 counts without gaps only up to 2**24 steps. The schedules round to it once, at the end.
    return torch.as_tensor(step).to(torch.float64)


def _fraction(x: torch.Tensor, steps: int) -> torch.Tensor:
    return (x / steps).clamp(0.0, 1.0)


def _half_cosine(init: float, end: float, fraction: torch.Tensor) -> torch.Tensor:
    return end + (init - end) * 0.5 * (1 + torch.cos(math.pi * fraction))


def _warmup(init: float, peak: float, x: torch.Tensor, steps: int) -> torch.Tensor:
    # `torch.where` computes both its sides: this one too if there is no warm-up, and then it would divide by 0.
    return init + (peak - init) * _fraction(x, max(1, steps))


def _gamma(x: torch.Tensor, steps: int, kind: str) -> torch.Tensor:
    x = x.clamp(min=0.0)
    return torch.log(x + 1) / math.log(steps) if kind == "log" else x / steps


def _check(
    where: str,
    numbers: dict[str, float],
    warmup_steps: float = 0,
    fits: tuple[str, Callable[[], float]] | None = None,
    at_least_0: dict[str, float] | None = None,
    **steps: float,
) -> None:
    """Checks that values are finite numbers, that `warmup_steps` is at least 0 and less than the value that `fits`
    names, and that other numbers of steps are at least 1.
    """
    problems = [p for name, x in numbers.items() for p in number(name, x, below=math.inf)]
    problems += [p for name, x in (at_least_0 or {}).items() for p in number(name, x, at_least=0, below=math.inf)]
    problems += [p for name, n in steps.items() for p in number(name, n, at_least=1, below=math.inf)]
    problems += number("warmup_steps", warmup_steps, at_least=0, below=math.inf)
    if (
        fits is not None
        and all(isinstance(n, (int, float)) for n in (warmup_steps, *steps.values()))
        and not warmup_steps < fits[1]()
    ):
        problems.append(f"warmup_steps={warmup_steps}: must be at least 0 and less than {fits[0]}={fits[1]()}")
    reject(f"optim.{where}", problems)


def _check_warmup(where: str, numbers: dict[str, float], warmup_steps: float, kind: str, **total: float) -> None:
    problems = [p for name, x in numbers.items() for p in number(name, x, below=math.inf)]
    problems += [
        p
        for name, n in {"warmup_steps": warmup_steps, **total}.items()
        for p in number(name, n, at_least=1, below=math.inf)
    ]
    if not problems and any(n < warmup_steps for n in total.values()):
        problems.append(f"total_steps={total['total_steps']}: must be at least warmup_steps={warmup_steps}")
    problems += [f"warmup_type={kind!r}: must be 'log' or 'linear'"] if kind not in ("log", "linear") else []
    reject(f"optim.{where}", problems)
