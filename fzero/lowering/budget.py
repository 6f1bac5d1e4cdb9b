"""Searches for the fastest program within a memory budget, among the choices that a step leaves open, by the plan.

The choices are: activations kept for the backward (`remat("auto")`), gradients accumulated whole or reduced per
micro-batch, reductions overlapped or not, gathers shared by forward and backward, the distance of gathers, merged
transfers, and the share of updates on the host. Every candidate is the finished program with its plan, so the peak that
is compared with the budget is that of what runs.

[Note: both sides] The host's arithmetic and the link work side by side, so the fastest step may be one in which each
has a part of the blocks. With a share s on the host every queue is busy for a time linear in s, known from the programs
of all and of nothing on the host; no step is shorter than the busiest. So a mix is looked for only where that leaves
something to gain: first where the two sides take as long, then half way from there to either end.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fzero.errors import BudgetError, message
from fzero.passes.choice import Choice
from fzero.passes.off_device import blocks_updated_on_host
from fzero.passes.overlap import Order, coalescable, sharable
from fzero.passes.zero import keeps_gathers
from fzero.plan.devices import Device
from fzero.plan.plan import Plan, PlanDecision, peak_bytes, queue_seconds
from fzero.plan.render import brief
from fzero.plan.timeline import COMPUTE
from fzero.program.ir import Program
from fzero.program.ops.transfers import AllReduce, ReduceScatter
from fzero.transforms.base import find
from fzero.transforms.remat import Remat
from fzero.units import duration, exact_size, size

FINEST = 16  # `remat("auto")` looks for a fraction in steps of 1/16
FARTHEST = 3  # blocks ahead that a gather is tried to start
ENDS = (1.0, 0.0)  # shares of the updates on the host; the first takes less of the device's memory
SHARES = 16  # a mix of both sides is looked for in steps of 1/16
GAIN = 0.02  # and only if it may make the step shorter by this share
SAME = 1e-3  # predictions that differ by less are the same


@dataclass(frozen=True)
class Budget:
    """Bytes that each rank may have on the device, `nbytes`, on the host and on disk, as many as it takes where that is
    None; the device whose rates predict the step, the backend the program is for. On a mesh of one memory for both,
    what the host has counts for the device."""

    nbytes: int | None
    device: Device
    backend: str = "inductor"
    host: int | None = None
    disk: int | None = None

    @property
    def limits(self) -> tuple[int | None, int | None, int | None]:
        """The limits of device, host and disk."""
        return self.nbytes, self.host, self.disk

    def over(self, peaks: tuple[int, int, int]) -> int:
        """By how many bytes what it takes of device, host and disk is more than it may be; 0 if it fits."""
        return sum(max(0, peak - limit) for peak, limit in zip(peaks, self.limits, strict=True) if limit is not None)

    def filled(self, peaks: tuple[int, int, int]) -> float:
        """The largest share of what may be had of any tier that is taken."""
        return max(
            (peak / max(1, limit) for peak, limit in zip(peaks, self.limits, strict=True) if limit is not None),
            default=0.0,
        )


def choose(
    build: Callable[[Choice], Program],
    starts: Sequence[Choice],
    budget: Budget,
    *,
    auto: bool,
    loops: bool,
    open_side: bool = False,
    open_stay: bool = False,
) -> Choice | None:
    """The choice whose program is predicted to be fastest within a budget, of those within 1 % the one whose start
    comes first; None if none fits.

    Args:
        build: the finished program of a choice, the same object for choices that come to the same.
        starts: choices that take least memory but for where gradients wait and what is updated on a guess.
        budget: to fit.
        auto: whether what blocks keep is open.
        loops: whether there are micro-batches.
        open_side: whether it is open on which side what rests off the device is updated.
        open_stay: whether it is open how many blocks' parameters stay gathered over the axis of `once_a_step`.
    """
    known = _Known(build, budget)
    ends = ENDS if open_side else ENDS[:1]
    grown = [found for start in starts if (found := _grown(known, start, auto, loops, open_stay, ends)) is not None]
    refined: dict[Choice, Choice] = {}
    for choice in sorted(grown, key=known.seconds):
        best = min(map(known.seconds, refined.values()), default=math.inf)
        able = not refined or known.least_seconds(choice, open_side) <= (1 - GAIN) * best
        refined[choice] = _refined(known, choice, open_side) if able else choice
    return _first_of_fastest({refined[choice]: known.seconds(refined[choice]) for choice in grown})


class _Known:
    """Caches what was found out about the programs of choices, once for each program."""

    def __init__(self, build: Callable[[Choice], Program], budget: Budget):
        device, backend = budget.device, budget.backend
        self.build, self.budget = build, budget
        self.peaks = _of(build, lambda program: peak_bytes(program, device, backend))
        self.queues = _of(build, lambda program: queue_seconds(program, device, backend))

    def fits(self, choice: Choice) -> bool:
        return not self.budget.over(self.peaks(choice))

    def seconds(self, choice: Choice) -> float:
        return self.queues(choice)[0]

    def least_seconds(self, choice: Choice, open_side: bool) -> float:
        """The least seconds of a step, wherever the updates of a choice run and however far ahead a transfer starts: as
        long as its busiest queue."""
        if not open_side:
            return max(self.queues(choice)[1].values())
        return next(_mixes(*(self.queues(replace(choice, host_share=share))[1] for share in ENDS)))[1]


def _grown(
    known: _Known, least: Choice, auto: bool, loops: bool, open_stay: bool, ends: Sequence[float]
) -> Choice | None:
    """The choice with as much kept for the backward, and as many gathers that serve twice, as fit, and gradients added
    up as is faster; None if it does not fit itself."""
    start = next((c for c in (replace(least, host_share=share) for share in ends) if known.fits(c)), None)
    if start is None:
        return None
    found, because = [], ""
    bases = [start]
    if loops:
        asynchronous = known.budget.device.asynchronous  # else nothing is gained by what travels longer
        late = [replace(start, order=replace(start.order, late_sums=True))] if asynchronous else []
        bases += [c for c in late if known.fits(c)] + [replace(start, whole_grads=True)]
    for base in bases:
        if not known.fits(base):
            because = (
                f"added up whole they would take {size(known.budget.over(known.peaks(base)))} more than the budget"
            )
        else:
            keep = [lambda c: _keeps_most(c, known.fits)] if auto else []
            share = [lambda c: _shares_most(c, len(sharable(known.build(c))), known.fits)]
            stay = [lambda c: _stays_most(c, known.fits)] if open_stay else []
            orders = [*(keep + share, share + keep)[: 1 + auto]]  # memory goes to what comes first
            orders = [stay + grows for grows in orders] + [grows + stay for grows in orders if stay]
            found += [functools.reduce(lambda c, grow: grow(c), grows, base) for grows in orders]
    best = min(found, key=lambda c: (known.seconds(c), known.peaks(c)))
    others = [c for c in found if c.whole_grads != best.whole_grads]
    if others:
        faster = min(map(known.seconds, others)) - known.seconds(best)
        because = f"{duration(faster)} a step faster than {'shards' if best.whole_grads else 'whole'}"
    return replace(best, because=because)


def _refined(known: _Known, best: Choice, open_side: bool) -> Choice:
    """The choice with gathers that start as far ahead, and updates on the side, that are fastest."""
    link = known.budget.device.links["intra"]
    small = int(link.latency * link.bandwidth)  # bytes: below that a transfer is mostly latency
    orders = [best.order, *([replace(best.order, coalesced=small)] if coalescable(known.build(best), small) else [])]
    fitting = []
    for share in ENDS if open_side else (best.host_share,):
        group = list[Choice]()
        for order in orders:  # farther ahead takes no less
            ahead = (replace(best, order=replace(order, ahead=n), host_share=share) for n in range(1, FARTHEST + 1))
            group += itertools.takewhile(known.fits, ahead)
        fitting += [min(group, key=lambda c: (known.seconds(c), known.peaks(c)))] if group else []
    return _with_share(known, fitting) if open_side else fitting[0]


def choose_share(build: Callable[[Choice], Program], ends: Sequence[Choice], budget: Budget) -> Choice:
    """The choice with as much of the update on the host as is predicted to be fastest of what is tried, and why: see
    [Note: both sides].

    Args:
        build: as for `choose`.
        ends: choices that have all of it on the host, and nothing.
        budget: whose device predicts.
    """
    return _with_share(_Known(build, replace(budget, nbytes=None, host=None, disk=None)), ends)


def _with_share(known: _Known, ends: Sequence[Choice]) -> Choice:
    tried = {c: known.seconds(c) for c in ends}
    with_ = lambda share: replace(min(ends, key=lambda c: tried[c]), host_share=share)  # noqa: E731
    if known.budget.device.asynchronous:  # else one thread computes and copies: what one side gains the other loses
        for share, bound in _mixes(*(known.queues(with_(share))[1] for share in ENDS)):
            if bound > (1 - GAIN) * min(tried.values()):
                break
            if known.fits(with_(share)):
                tried[with_(share)] = known.seconds(with_(share))
    # of those that take as long the simpler
    best = min(
        tried,
        key=lambda c: (tried[c] > (1 + SAME) * min(tried.values()), c.host_share not in ENDS, -c.host_share, tried[c]),
    )
    seconds = {
        share: min((t for c, t in tried.items() if c.host_share == share), default=None)
        for share in ENDS
        if share != best.host_share
    }
    others = [
        f"all on the {'host' if share else 'device'} {'would not fit' if t is None else f'takes {duration(t)}'}"
        for share, t in seconds.items()
    ]
    return replace(best, share_because="; ".join([f"{duration(tried[best])} a step", *others]))


def fastest(build: Callable[[Choice], Program], choices: Sequence[Choice], budget: Budget) -> Choice | None:
    """Among the choices that fit the one whose program is predicted to be fastest, the first of those that are within 1
    % of it; None if none fits."""
    if len(choices) == 1:
        return choices[0]
    known = _Known(build, budget)
    return _first_of_fastest({c: known.seconds(c) for c in choices if known.fits(c)})


def _first_of_fastest(seconds: Mapping[Choice, float]) -> Choice | None:
    return next((c for c, time in seconds.items() if time <= 1.01 * min(seconds.values())), None)


def _mixes(host: Mapping[str, float], device: Mapping[str, float]) -> Iterator[tuple[float, float]]:
    """Shares of the update on the host to try, and what no step with any of them takes less than. `host`, `device`:
    what a step with all of it on that side takes at least, for each queue (`queue_seconds`)."""

    def busiest(share: float, queues: set[str]) -> float:
        return max((share * host.get(q, 0.0) + (1 - share) * device.get(q, 0.0) for q in queues), default=0.0)

    queues, shares = {*host, *device}, [n / SHARES for n in range(1, SHARES)]
    bound = min(busiest(share, queues) for share in shares)
    meet = min(shares, key=lambda share: busiest(share, queues - {COMPUTE}))
    for share in (meet, (1 + meet) / 2, meet / 2):
        yield share, bound


def _of(build: Callable[[Choice], Program], find: Callable[[Program], Any]) -> Callable[[Choice], Any]:
    """The findings about the program of a choice, once for each program."""
    known: dict[int, tuple[Program, Any]] = {}

    def of(choice: Choice) -> Any:
        program = build(choice)
        if id(program) not in known:
            known[id(program)] = program, find(program)
        return known[id(program)][1]

    return of


def decided(program: Program, choice: Choice, budget: Budget | None) -> tuple[PlanDecision, ...]:
    """The decisions behind a program that has been chosen: without a budget only what becomes of the gradients of
    micro-batches."""
    limited = budget is not None and budget.nbytes is not None
    found = [*_gathered_once(program, choice, limited), *_of_micro_batches(program, choice)]
    if limited:
        auto = find(program.transforms, Remat) == Remat("auto")
        why = "the share of activation memory that fits and is fastest" if auto else "the step says so"
        kept = choice.remat if isinstance(choice.remat, str) else f"{choice.remat:.3g}"
        found = [PlanDecision("remat", kept, why), *found, *_of_order(choice.order)]
    if choice.grads != "update":
        host = choice.grads == "host"
        why = "wherever their update runs: the device has no room for them"
        why = why if host else "sums over micro-batches: it is faster"
        found.append(PlanDecision("gradients wait", f"on the {'host' if host else 'device'}", why))
    if choice.guess:
        why = "the update of what rests off the device does not wait for the norm of all gradients, and is done again "
        found.append(PlanDecision("update", "on a guess", f"{why}if that changes it"))
    if choice.share_because:
        on_host, num = blocks_updated_on_host(program)
        sides = {num: f"all {num} blocks on the host", 0: f"all {num} blocks on the device"}
        where = sides.get(on_host, f"{on_host} of {num} blocks on the host")
        found.append(PlanDecision("update_on", where, choice.share_because))
    return tuple(found)


def _gathered_once(program: Program, choice: Choice, limited: bool) -> Iterator[PlanDecision]:
    if (once := keeps_gathers(program.transforms)) is not None:
        why = "as many blocks as fit and are fastest" if limited else "of all blocks: there is no budget"
        why = why if once.least < once.most else "the step says so"
        why = f"the share of blocks whose parts stay gathered over {once.axis}: {why}"
        yield PlanDecision("gathered once a step", f"{choice.stay:.3g}", why)


def _of_micro_batches(program: Program, choice: Choice) -> Iterator[PlanDecision]:
    for loop in (line for line in program.lines if line.op == "loop"):
        within = {a: None for line in loop.body if line.op == ReduceScatter.name for a in line.axes}
        later = {a: None for line in program.lines if line.op in _REDUCES for a in line.axes if a not in within}
        why = choice.because if within or choice.whole_grads else "the stage adds them up whole"
        how = "reduced after every micro-batch" if within else "reduced once a step"
        if within and later:
            how = f"reduced over {', '.join(within)} after every micro-batch, over {', '.join(later)} once a step"
        why = f"{how}: {why or 'it takes least, and there is no budget'}"
        yield PlanDecision("gradients", "shards" if within else "whole", why)


def _of_order(order: Order) -> Iterator[PlanDecision]:
    why = "serve the forward and the backward of a block: as many as fit"
    yield PlanDecision("shared gathers", str(order.shared), why)
    yield PlanDecision("ahead", str(order.ahead), "blocks that a gather starts before it is needed: the fastest")
    if order.late_sums:
        why = "a micro-batch's gradients are reduced while the next block computes: faster"
        yield PlanDecision("sums", "a block later", why)
    yield PlanDecision("coalesced", size(order.coalesced), "transfers that send less than this travel together")


def unmet(program: Program, found: Plan, budget: Budget, advice: Sequence[str] = (), rows: int = 1) -> BudgetError:
    """The error of a step whose least plan does not fit its budgets.

    Args:
        program: that takes least.
        found: its plan.
        budget: what it does not fit.
        advice: what would lower the peak of the device.
        rows: of the batch that a rank computes with at once, in its first dimension.
    """
    problems = []
    for where, need, limit in zip(
        ("", " of host memory", " on disk"),
        (found.peak_bytes, found.host_peak_bytes, found.disk_bytes),
        budget.limits,
        strict=True,
    ):
        if limit is not None and (more := need - limit) > 0:
            problems.append(
                f"a rank needs {size(need)}{where}, {exact_size(more)} more than the {size(limit)} it may have"
            )
            if not where:
                problems += [f"at: {brief(found.peak_line.text.strip(), 100)}", *filling(program, found)]
    over = budget.nbytes is not None and found.peak_bytes > budget.nbytes
    fixes = ["apply what lowers it most"] if advice else []
    host = budget.host is not None and found.host_peak_bytes > budget.host
    if host and found.host_breakdown["gradients"] > FEW * found.host_peak_bytes:
        vertical = ", with fz.accumulate(n, vertical=True)" if any(line.op == "loop" for line in program.lines) else ""
        fixes += [f"let gradients wait on disk (fz.offload('nvme', 'gradients', path=DIR){vertical})"]
    fixes += ["use a smaller batch"] if over and rows > 1 and share_of(found, WITH_BATCH) > FEW else []
    return BudgetError(
        message(
            "memory_budget",
            "the step does not fit",
            [*problems, *advice],
            ", ".join([*fixes, "or raise the budget"]).removeprefix("or "),
        )
    )


WITH_BATCH = ("batch", "saved", "activations", "temporaries")
"""Roles of bytes that grow with the batch."""
FEW = 0.05  # of the peak: what takes less is not worth advice


def share_of(found: Plan, roles: Sequence[str]) -> float:
    """The share of the peak that some roles take."""
    return sum(found.breakdown[role] for role in roles) / max(1, found.peak_bytes)


def filling(program: Program, found: Plan) -> list[str]:
    """The roles that fill the device's memory at the peak, the most first, and what the gradients wait for where there
    are many."""
    why = waiting(program) if share_of(found, ("gradients", "idle_pool")) > FEW else None
    return [f"there: {_listed(found.breakdown)}", *([f"gradients: {why}"] if why else [])]


def filling_host(found: Plan) -> list[str]:
    """The roles that fill the host's memory, the most first."""
    return [f"on the host: {_listed(found.host_breakdown)}"]


def _listed(breakdown: Mapping[str, int]) -> str:
    return ", ".join(
        f"{_ROLES.get(role, role)} {size(n)}" for role, n in sorted(breakdown.items(), key=lambda item: -item[1]) if n
    )


_REDUCES = (ReduceScatter.name, AllReduce.name)

_ROLES = {"saved": "saved for the backward", "idle_pool": "idle places of transfers"}


def waiting(program: Program) -> str | None:
    """Why gradients pile up until the backward is over, if they do."""
    if any(line.op == "loop" for line in program.lines):
        return "those of all blocks add up over the micro-batches of a loop"
    backward = [i for i, line in enumerate(program.lines) if line.is_backward]
    updates = [
        i
        for i, line in enumerate(program.lines)
        if line.by == "optimizer" and line.writes and line.fn and not line.guess
    ]
    if len(backward) < 2 or len(updates) < 2 or min(updates) < max(backward):
        return None
    return (
        "all updates wait for a number of all gradients, such as the norm of clip_by_global_norm; without it each is "
        "used as it is made"
    )


def _keeps_most(choice: Choice, fits: Callable[[Choice], bool]) -> Choice:
    return replace(choice, remat=_largest(FINEST, lambda n: fits(replace(choice, remat=n / FINEST))) / FINEST)


def _stays_most(choice: Choice, fits: Callable[[Choice], bool]) -> Choice:
    return replace(choice, stay=_largest(FINEST, lambda n: fits(replace(choice, stay=n / FINEST))) / FINEST)


def _shares_most(choice: Choice, most: int, fits: Callable[[Choice], bool]) -> Choice:
    sharing = lambda n: replace(choice, order=replace(choice.order, shared=n))  # noqa: E731
    return sharing(_largest(most, lambda n: fits(sharing(n))))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, by bisection: more takes more memory. 0 is known to fit."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
