"""Searches for the fastest program within budgets, among the options that the passes of a step leave open, by their
plans.

Every candidate is the finished program with its plan, so a budget is compared with the peak of the program that would
run. Each program is made once, and its cost is computed once.

1. For each start, the updates of offloaded state run on the first side, host or device, with which the program fits.
From there, each open value of `Pass.tried` is tried, and each option of `Pass.grows` gets the largest value that fits,
in every order of these options: the first option gets the memory first.
2. The fastest program of each start gets the best order of its transfers and the best share of updates on the host. A
start whose bound is not better than the best program found so far is not refined, unless it is selected.
3. The first start within 1 % of the fastest is selected.

[Note: both sides] The arithmetic of the host and the link work in parallel, so the fastest step may be one in which
host and device each update a part of the blocks. With a share s on the host, every queue is busy for a time linear in
s, which is known from the programs with everything and with nothing on the host; no step is shorter than its busiest
queue. So a mix is tried only if this bound leaves something to gain: first where both sides take equally long, then
half way from there to either end.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fzero._utils.units import duration, size
from fzero.compiler.budget_report import Budget
from fzero.compiler.options import Options
from fzero.compiler.passes import OpenValues, Pass
from fzero.ir.program import Program
from fzero.plan.plan import exposed_seconds, peak_bytes, queue_seconds
from fzero.plan.timeline import COMPUTE
from fzero.transforms.offload_analysis import leaves_side_open

ENDS = (1.0, 0.0)  # shares of the updates on the host; the first takes less device memory
SHARES = 16  # mixes of both sides are multiples of 1/16
GAIN = 0.02  # a mix is tried only if it may make the step shorter by this share
SAME = 1e-3  # predictions that differ by less are considered equal


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
        passes: the passes whose options are open, if there is a memory budget.
        budget: the budget to fit.
    """

    def __init__(self, build: Callable[[Options], tuple[Program, ...]], passes: Sequence[Pass], budget: Budget):
        self.build, self.budget = build, budget
        self.passes = passes if budget.nbytes is not None else ()
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

    def best(self, starts: Sequence[Options]) -> Options | None:
        """Returns the options of the fastest program that fits; None if none does.

        Args:
            starts: options of least memory, from `PassCache.starts`.
        """
        grown = [found for start in starts if (found := self._grown(start)) is not None]
        if len(grown) == 1:
            return self._refined(*grown)
        refined: dict[Options, Options] = {}
        least = math.inf
        for options in sorted(grown, key=self.seconds):
            if not refined or self._least_seconds(options) <= (1 - GAIN) * least:
                refined[options] = self._refined(options)
                least = min(least, self.seconds(refined[options]))
        first = next((c for c in grown if self.seconds(refined.get(c, c)) <= 1.01 * least), None)
        return first and (refined.get(first) or self._refined(first))

    def _sides(self, options: Options) -> list[Options]:
        """Returns the options with all updates on the host, and with none there, if that is open."""
        program = self.cost(options).program
        is_open = program.assigns and leaves_side_open(program)  # an evaluation updates nothing
        return [replace(options, host_share=share) for share in ENDS] if is_open else [options]

    def _values(self, of: Callable[[Pass], Any], options: Options) -> list[Any]:
        """Returns all values of the passes' options, starting from these options."""
        program, device = self.cost(options).program, self.budget.device
        return [value for passed in self.passes for value in of(passed)(options, program, device)]

    def _grown(self, least: Options) -> Options | None:
        """Returns the options with the largest growing values that fit, and the fastest of the values that are tried;
        None if the given options do not fit."""
        start = next(filter(self.fits, self._sides(least)), None)
        if start is None:
            return None
        bases = [start, *self._values(lambda passed: passed.tried, start)]
        grows = [p.grows for p in self.passes if p.grows(start, self.cost(start).program, self.budget.device)]
        found = [
            functools.reduce(self._most, order, base)
            for base in filter(self.fits, bases)
            for order in itertools.permutations(grows)
        ]
        best, because = self._fastest(found), ""
        if others := [c for c in found if c.full_grads != best.full_grads]:
            faster = min(map(self.seconds, others)) - self.seconds(best)
            because = f"{duration(faster)} a step faster than {'shards' if best.full_grads else 'unsharded gradients'}"
        elif whole := [c for c in bases if c.full_grads]:
            over = self.budget.over(self.cost(*whole).peaks)
            because = f"accumulated unsharded they would take {size(over)} more than the budget"
        return replace(best, because=because)

    def _most(self, options: Options, grows: OpenValues) -> Options:
        """Returns the last of an option's values that fits, by bisection: later values take more memory, and the first
        is known to fit."""
        values = grows(options, self.cost(options).program, self.budget.device)
        low, high = 0, len(values)
        # The largest value first, because it often fits.
        at = high - 1
        while high - low > 1:
            low, high = (at, high) if self.fits(values[at]) else (low, at)
            at = (low + high) // 2
        return values[low]

    def _fastest(self, candidates: Sequence[Options]) -> Options:
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=lambda c: (self.seconds(c), self.cost(c).peaks))

    def _refined(self, best: Options) -> Options:
        """Returns the options with the fastest distance at which gathers start ahead, and the fastest side of the
        updates."""
        groups, fitting = self._values(lambda passed: passed.ahead, best) or [[best]], list[Options]()
        for side in (sides := self._sides(best)):
            here = ((replace(c, host_share=side.host_share) for c in group) for group in groups)
            able = [c for group in here for c in itertools.takewhile(self.fits, group)]
            fitting += [self._fastest(able)] if able else []
        return self._with_share(fitting) if len(sides) > 1 else fitting[0]

    def _least_seconds(self, options: Options) -> float:
        """Returns a lower bound of the seconds of a step, wherever its updates run and however far ahead its transfers
        start: the time of its busiest queue."""
        queues = [self.cost(side).queues[1] for side in self._sides(options)]
        return next(_mixes(*queues))[1] if len(queues) > 1 else max(queues[0].values())

    def _with_share(self, ends: Sequence[Options]) -> Options:
        """Returns the options with the fastest share of updates on the host, and the reason: see [Note: both sides]."""
        first = min(ends, key=self.seconds)
        with_ = lambda share: replace(first, host_share=share)  # noqa: E731
        tried = {c: self.seconds(c) for c in ends}
        # otherwise one thread computes and copies: what one side gains, the other loses
        if self.budget.device.asynchronous:
            for share, bound in _mixes(*(self.cost(with_(share)).queues[1] for share in ENDS)):
                if bound > (1 - GAIN) * min(tried.values()):
                    break
                if self.fits(with_(share)):
                    tried[with_(share)] = self.seconds(with_(share))
        # among equal ones, the simplest
        least = min(tried.values())
        best = min(
            tried, key=lambda c: (tried[c] > (1 + SAME) * least, c.host_share not in ENDS, -c.host_share, tried[c])
        )
        why = [f"{duration(tried[best])} a step"]
        for share in (share for share in ENDS if share != best.host_share):
            taken = min((t for c, t in tried.items() if c.host_share == share), default=None)
            what = "would not fit" if taken is None else f"takes {duration(taken)}"
            why.append(f"all on the {'host' if share else 'device'} {what}")
        return replace(best, share_because="; ".join(why))


def _mixes(host: Mapping[str, float], device: Mapping[str, float]) -> Iterator[tuple[float, float]]:
    """Yields shares of the update on the host to try, each with a lower bound for the seconds of a step with any of
    them.

    `host` and `device` are the busy seconds of each queue (`queue_seconds`) if all updates run on that side.
    """

    def busiest(share: float, queues: set[str]) -> float:
        return max((share * host.get(q, 0.0) + (1 - share) * device.get(q, 0.0) for q in queues), default=0.0)

    queues, shares = {*host, *device}, [n / SHARES for n in range(1, SHARES)]
    bound = min(busiest(share, queues) for share in shares)
    meet = min(shares, key=lambda share: busiest(share, queues - {COMPUTE}))
    for share in (meet, (1 + meet) / 2, meet / 2):
        yield share, bound
