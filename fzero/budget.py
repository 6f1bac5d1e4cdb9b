"""A memory budget: which of the choices that a step leaves open make it fit, and of those that fit which are fastest, by the plan.

Open are: what blocks keep for their backward (`remat("auto")`), whether gradients are added up whole over micro-batches and reduced once,
which gathers serve forward and backward, how far ahead a gather starts, which transfers travel together. Every candidate is the finished program with
its plan, so the peak that is compared with the budget is that of what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fzero.errors import BudgetError, message
from fzero.program.ir import Program
from fzero.schedule.devices import Device
from fzero.schedule.order import Order, coalescable, sharable
from fzero.schedule.plan import Decision, Plan, peak_bytes, step_seconds
from fzero.transforms.base import find
from fzero.transforms.remat import Remat

FINEST = 16  # `remat("auto")` looks for a fraction in steps of 1/16
FARTHEST = 3  # blocks ahead that a gather is tried to start


@dataclass(frozen=True)
class Choice:
    """What a step leaves open. `remat`: a policy of the transform; `whole_grads`: gradients of micro-batches add up whole and are reduced once a step, or not,
    `because`."""

    remat: str | float = "min_cut"
    whole_grads: bool = False
    order: Order = field(default_factory=Order)
    because: str = field(default="", compare=False)


@dataclass(frozen=True)
class Budget:
    """Bytes of each rank, the device whose rates predict the step, the backend the program is for."""

    nbytes: int
    device: Device
    backend: str = "inductor"


def choose(build: Callable[[Choice], Program], least: Choice, budget: Budget, *, auto: bool, loops: bool) -> Choice | None:
    """The choice whose program is predicted to be fastest within a budget; None if none fits.

    Args:
        build: the finished program of a choice, the same object for choices that come to the same.
        least: the choice that takes least memory.
        budget: to fit.
        auto: whether what blocks keep is open.
        loops: whether there are micro-batches.
    """
    peak = _of(build, lambda program: peak_bytes(program, budget.device, budget.backend)[0])
    time = _of(build, lambda program: step_seconds(program, budget.device, budget.backend))
    fits = lambda choice: peak(choice) <= budget.nbytes  # noqa: E731
    if not fits(least):
        return None
    found, because = [], ""
    for base in (replace(least, whole_grads=whole) for whole in (False, True)[: 1 + loops]):
        if not fits(base):
            because = f"added up whole they would take {_size(peak(base) - budget.nbytes)} more than the budget"
        else:
            keep = [lambda c: _keeps_most(c, fits)] if auto else []
            share = [lambda c: _shares_most(c, len(sharable(build(c))), fits)]
            orders = (keep + share, share + keep)[: 1 + auto]  # memory goes to what comes first
            found += [functools.reduce(lambda c, grow: grow(c), grows, base) for grows in orders]
    cost = lambda choice: (time(choice), peak(choice))  # noqa: E731
    best = min(found, key=cost)
    others = [c for c in found if c.whole_grads != best.whole_grads]
    if others:
        because = f"{1e3 * (min(map(time, others)) - time(best)):.3g} ms a step faster than {'shards' if best.whole_grads else 'whole'}"
    best = replace(best, because=because)
    link = budget.device.links["intra"]
    small = int(link.latency * link.bandwidth)  # bytes: below that a transfer is mostly latency
    orders = [best.order, *([replace(best.order, coalesced=small)] if coalescable(build(best), small) else [])]
    refined = [replace(best, order=replace(o, ahead=n)) for o in orders for n in range(1, FARTHEST + 1)]
    return min((c for c in refined if fits(c)), key=cost)


def _of(build: Callable[[Choice], Program], find: Callable[[Program], Any]) -> Callable[[Choice], Any]:
    """What is found out about the program of a choice, once for each program."""
    known: dict[int, tuple[Program, Any]] = {}

    def of(choice: Choice) -> Any:
        program = build(choice)
        if id(program) not in known:
            known[id(program)] = program, find(program)
        return known[id(program)][1]

    return of


def decided(program: Program, choice: Choice, budget: Budget | None) -> tuple[Decision, ...]:
    """What was open of a program that has been chosen: without a budget only what becomes of the gradients of micro-batches."""
    out = []
    if budget is not None:
        auto = find(program.transforms, Remat) == Remat("auto")
        kept = choice.remat if isinstance(choice.remat, str) else f"{choice.remat:.3g}"
        out.append(Decision("remat", kept, "the share of activation memory that fits and is fastest" if auto else "the step says so"))
    for loop in (line for line in program.lines if line.op == "loop"):
        shards = any(line.op == "reduce_scatter_start" for line in loop.body)
        why = choice.because if shards or choice.whole_grads else "the stage adds them up whole"
        how = "reduced after every micro-batch" if shards else "reduced once a step"
        out.append(Decision("gradients", "shards" if shards else "whole", f"{how}: {why or 'it takes least, and there is no budget'}"))
    if budget is not None:
        out.append(Decision("shared gathers", str(choice.order.shared), "serve the forward and the backward of a block: as many as fit"))
        out.append(Decision("ahead", str(choice.order.ahead), "blocks that a gather starts before it is needed: the fastest"))
        out.append(Decision("coalesced", f"{choice.order.coalesced:,} B", "transfers that send less than this travel together"))
    return tuple(out)


def unmet(found: Plan, nbytes: int, advice: Sequence[str] = ()) -> BudgetError:
    """The error of a step whose least plan does not fit a budget of bytes."""
    roles = ", ".join(f"{role} {_size(n)}" for role, n in sorted(found.breakdown.items(), key=lambda item: -item[1]) if n)
    more = found.peak_bytes - nbytes
    problems = [
        f"a rank needs {_size(found.peak_bytes)}, {_size(more)} ({more:,} bytes) more than the {_size(nbytes)} it may have",
        f"at: {found.peak_line.text.strip()}",
        f"there: {roles}",
        *advice,
    ]
    fix = f"{'apply what lowers it most, ' if advice else ''}use a smaller batch, or raise the budget"
    return BudgetError(message("memory_budget", "the step does not fit", problems, fix))


def _keeps_most(choice: Choice, fits: Callable[[Choice], bool]) -> Choice:
    return replace(choice, remat=_largest(FINEST, lambda n: fits(replace(choice, remat=n / FINEST))) / FINEST)


def _shares_most(choice: Choice, most: int, fits: Callable[[Choice], bool]) -> Choice:
    return replace(choice, order=replace(choice.order, shared=_largest(most, lambda n: fits(replace(choice, order=replace(choice.order, shared=n))))))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, by bisection: more takes more memory. 0 is known to fit."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**33 else f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**18 else f"{nbytes:,} bytes"
