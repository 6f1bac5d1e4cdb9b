"""Searches for the fastest program within budgets, among the options that a step leaves open, by their plans.

Every candidate is the finished program with its plan, so a budget is compared with the peak of the program that would
run. Each program is made once, and its cost is computed once.

| option | values, in the order in which they are decided |
|---|---|
| held gradients, speculative updates | each combination, as the search begins (`PassCache.starts`) |
| accumulation | gradients of micro-batches are reduced after each one, a block later, or once per step |
| recomputation | the share of activations that `remat("auto")` keeps, in eighths |
| kept gathers | parameters that stay gathered: over the axis of `hierarchical`, and from a forward to its backward |
| side of the updates | the share of the updates that the host computes, in eighths: see [Note: both sides] |

A value is taken if it shortens the step by STEP: among nearly equal ones, the simplest. Options that only hide
transfers are skipped if compute hardly waits for them. Each option is decided once. Gathers start at most one block
ahead: for no step of docs/results/plan_search.md was more chosen.

[Note: both sides] The arithmetic of the host and the link work in parallel, so the fastest step may be one in which
host and device each update a part of the blocks. With a share s on the host, every queue is busy for a time linear in
s, which is known from the programs with everything and with nothing on the host; no step is shorter than its busiest
queue. So a mix is tried only if this bound leaves something to gain, and only near the share with the lowest bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fzero._utils.units import duration, size
from fzero.compiler.budget_report import Budget
from fzero.compiler.options import FINEST, Options
from fzero.compiler.overlap import sharable
from fzero.ir.program import Program
from fzero.plan.plan import exposed_seconds, peak_bytes, queue_seconds
from fzero.plan.timeline import COMPUTE
from fzero.transforms.offload import leaves_side_open
from fzero.transforms.remat import Remat
from fzero.transforms.transform import find
from fzero.transforms.zero import keeps_gathers

ENDS = (1.0, 0.0)  # shares of the updates on the host; the first takes less device memory
GAIN = 0.05  # transfers that take a smaller share of the step are hidden: predicted times are not more precise
STEP = 0.01  # a value is taken if it shortens the step by this share


@dataclass(eq=False)
class PredictedCost:
    """The predicted cost of a program on a budget's device; each part is computed when it is first needed. For a
    pipeline, the cost of the programs of all stages."""

    programs: tuple[Program, ...]
    budget: Budget

    @property
    def program(self) -> Program:
        """The program whose options are open; for a pipeline, that of the first stage."""
        return self.programs[0]

    @functools.cached_property
    def peaks(self) -> tuple[int, int, int]:
        """The largest number of bytes that a rank has on the device, the host and the disk."""
        found = [peak_bytes(program, self.budget.device, self.budget.backend) for program in self.programs]
        return max(x[0] for x in found), max(x[1] for x in found), max(x[2] for x in found)

    @functools.cached_property
    def queues(self) -> tuple[float, dict[str, float]]:
        """The seconds of a step, and of each queue (`queue_seconds`)."""
        return queue_seconds(self.programs, self.budget.device, self.budget.backend)

    @functools.cached_property
    def exposed(self) -> dict[str, float]:
        """The seconds per step for which compute waits for each channel; for a pipeline, in the first stage."""
        return exposed_seconds(self.programs, self.budget.device, self.budget.backend)


class Search:
    """The costs of options, and the search for the best ones.

    Args:
        build: returns the finished programs of all stages for these options; the same objects for options that lead to
            the same programs.
        budget: the budget to fit. Without a limit for the device, only the offload is searched.
    """

    def __init__(self, build: Callable[[Options], tuple[Program, ...]], budget: Budget, trains: bool = True):
        self.build, self.budget = build, budget
        self.limited = trains and budget.nbytes is not None
        self.tried: dict[Options, PredictedCost] = {}
        self._of: dict[tuple[int, ...], PredictedCost] = {}  # by programs

    def cost(self, options: Options) -> PredictedCost:
        if options not in self.tried:
            programs = self.build(options)
            self.tried[options] = self._of.setdefault(tuple(map(id, programs)), PredictedCost(programs, self.budget))
        return self.tried[options]

    def fits(self, options: Options) -> bool:
        return self.budget.limits == (None, None, None) or not self.budget.over(self.cost(options).peaks)

    def seconds(self, options: Options) -> float:
        return self.cost(options).queues[0]

    def waits(self, options: Options, share: float = GAIN) -> bool:
        """Whether compute waits for transfers for more than this share of the step."""
        taken, queues = self.cost(options).queues
        return taken - queues[COMPUTE] > share * taken

    def best(self, starts: Sequence[Options]) -> Options | None:
        """Returns the options of the fastest program that the search finds; None if no start fits.

        Args:
            starts: options of least memory, from `PassCache.starts`.
        """
        fitting = list[Options]()
        for start in starts:
            fitting += filter(self.fits, self._sides(start))
            if fitting and not self.waits(fitting[-1]):
                break
        if not fitting:
            return None
        best = self._fastest(fitting)
        if self.limited:
            others = self._accumulations(best) if self.waits(best, STEP) else ()
            # each with as much memory as then remains for the others
            best = self._fastest([self._grown(options) for options in (best, *filter(self.fits, others))])
            best = replace(best, because=self._why_accumulated(best))
        return self._with_side(best)

    def _fastest(self, options: Iterable[Options]) -> Options:
        """Returns the first of those that take about as long as the fastest: the simplest ones come first."""
        options = list(options)
        least = min(map(self.seconds, options))
        return next(x for x in options if self.seconds(x) <= (1 + STEP) * least)

    def _accumulations(self, options: Options) -> list[Options]:
        """Returns the options with other schedules for the reductions of micro-batches. A reduction that overlaps the
        computation of the next block gains nothing on synchronous devices."""
        if not loops(self.cost(options).program):
            return []
        later = [options.ordered(late_sums=True)] if self.budget.device.asynchronous else []
        return [*later, replace(options, full_grads=True)]

    def _why_accumulated(self, best: Options) -> str:
        """Returns the reason for the number of reductions of a step with micro-batches."""
        if not loops(self.cost(best).program):
            return ""
        others = [c for c in self.tried if c.full_grads != best.full_grads]
        if not others:
            return "compute hardly waits for reductions"
        if fitting := [c for c in others if self.fits(c)]:
            faster = max(0.0, min(map(self.seconds, fitting)) - self.seconds(best))
            return f"{duration(faster)} a step faster than {'shards' if best.full_grads else 'unsharded gradients'}"
        more = min(self.budget.over(self.cost(c).peaks) for c in others)
        return f"accumulated unsharded they would take {size(more)} more than the budget"

    # --- options whose values each take more memory than the one before, and are never slower ---

    def _grown(self, options: Options) -> Options:
        """Returns the options with as many kept activations, and then kept gathers, as fit."""
        program = self.cost(options).program
        spec, once = find(program.transforms, Remat), keeps_gathers(program.transforms)
        if spec is not None and spec.policy == "auto":
            options = self._most(options.shares("remat"))
        if once is not None and once.least < once.most and self.waits(options):
            options = self._most(options.shares("secondary_shard"))
        if (num := len(sharable(self.cost(options).program))) and self.waits(options):
            numbers = sorted({num * k // FINEST for k in range(FINEST + 1)})
            options = self._most([options.ordered(shared=n) for n in numbers])
        return options

    def _most(self, values: Sequence[Options]) -> Options:
        """Returns the last of the values that fits, by bisection. If not even the last value is faster, the first is
        returned."""
        low, high, at = 0, len(values), len(values) - 1
        if self.seconds(values[at]) >= self.seconds(values[0]):
            return values[0]
        while high - low > 1:
            low, high = (at, high) if self.fits(values[at]) else (low, at)
            at = (low + high) // 2
        return values[low]

    # --- the side of the updates ---

    def _sides(self, options: Options) -> list[Options]:
        """Returns the options with all updates on the host, and with none there, if that is open."""
        program = self.cost(options).program
        is_open = program.assigns and leaves_side_open(program)  # an evaluation updates nothing
        ends = sorted(ENDS, key=lambda share: share != options.host_share)
        return [replace(options, host_share=share) for share in ends] if is_open else [options]

    def _with_side(self, best: Options) -> Options:
        """Returns the options with the fastest share of updates on the host, and the reason: see [Note: both sides]."""
        ends = self._sides(best)
        if len(ends) == 1:
            return best
        if not self.waits(best) and not all(end in self.tried for end in ends):
            why = f"{duration(self.seconds(best))} a step, which hardly waits for transfers"
            return replace(best, share_because=best.share_because or why)
        tried = self._sides_tried(best, ends)
        # among nearly equal ones, the simplest
        least = min(tried.values())
        best = min(
            (c for c in tried if tried[c] <= (1 + STEP) * least),
            key=lambda c: (c.host_share not in ENDS, -c.host_share, tried[c]),
        )
        why = [f"{duration(tried[best])} a step"]
        for end in (end for end in ends if end.host_share != best.host_share):
            what = f"takes {duration(tried[end])}" if end in tried else "would not fit"
            why.append(f"all on the {'host' if end.host_share else 'device'} {what}")
        return replace(best, share_because="; ".join(why))

    def _sides_tried(self, best: Options, ends: Sequence[Options]) -> dict[Options, float]:
        """Returns the seconds of the options that fit: all updates on either side, the share of `best`, and shares near
        the one at which both sides finish at the same time."""
        tried = {c: self.seconds(c) for c in dict.fromkeys((*ends, best)) if self.fits(c)}
        # otherwise one thread computes and copies: what one side gains, the other loses
        if self.budget.device.asynchronous:
            share, bound = _meeting(*(self.cost(c).queues[1] for c in ends))
            for near in (share, share + 1 / FINEST, share - 1 / FINEST):
                mix = replace(best, host_share=near)
                if 0 < near < 1 and bound <= (1 - STEP) * min(tried.values()) and self.fits(mix):
                    tried[mix] = self.seconds(mix)
        return tried


def _meeting(host: Mapping[str, float], device: Mapping[str, float]) -> tuple[float, float]:
    """Returns the share of the updates on the host, in eighths, with the lowest bound of the seconds of a step, and
    this bound.

    `host` and `device` are the busy seconds of each queue (`queue_seconds`) if all updates run on that side.
    """

    def busiest(share: float) -> float:
        return max(share * host.get(q, 0.0) + (1 - share) * device.get(q, 0.0) for q in {*host, *device})

    bound, share = min((busiest(n / FINEST), n / FINEST) for n in range(1, FINEST))
    return share, bound


def loops(program: Program) -> bool:
    """Whether a program loops over micro-batches."""
    return any(op.op == "loop" for op in program.instructions)
