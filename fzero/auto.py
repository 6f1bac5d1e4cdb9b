"""offload("auto"): which roles rest off the device, on which tier and how much of each: of what is tried and fits the budgets the fastest step is taken.

[Note: ladders] A ladder is an order in which roles leave the device, each for its tier. What does not fit is moved rung by rung: the roles before in whole,
and of the last one as little as will do, in steps of 1/8, found by bisection. Of what is on disk, as much as there is room for comes back to the host. Each
ladder ends at its first rung that fits, taken with that share and with all of its roles: some updates are quicker when all that they read is in one place.
Of what the ladders come to, the plan says which is fastest.

[Note: bounds] Each program that is looked at takes time to make, so it is made only where it may matter: not if what rests on a tier is too much for it
already, and for its time not if the disk alone takes longer than the best step found so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fzero.budget import ENDS, Budget, Choice
from fzero.errors import BudgetError, FzeroValueError, message
from fzero.progress import Progress
from fzero.schedule.memory import resting_bytes
from fzero.schedule.plan import Decision, peak_bytes, step_seconds
from fzero.transforms.offload import ROLES, Offload
from fzero.units import duration
from fzero.variants import Variants

FINEST = 8  # shares are looked for in steps of 1/8

_STATE = ("opt_state", "params")  # of the same leaves
_ON_HOST = (
    ((("opt_state",), "cpu"), (("params",), "cpu"), (("activations",), "cpu")),
    ((("params",), "cpu"), (("opt_state",), "cpu"), (("activations",), "cpu")),
    ((_STATE, "cpu"), (("activations",), "cpu")),
    ((("activations",), "cpu"), (_STATE, "cpu")),
)
_ON_DISK = (
    ((("opt_state",), "nvme"), (("params",), "nvme"), (("activations",), "cpu")),
    ((_STATE, "nvme"), (("activations",), "cpu")),
    ((("opt_state",), "nvme"), (("params",), "cpu"), (("activations",), "cpu")),
    ((("activations",), "cpu"), (_STATE, "nvme")),
)

Ladder = tuple[tuple[tuple[str, ...], str], ...]
Records = tuple[Offload, ...]
Peaks = tuple[int, int, int]
Build = Callable[[Records], Variants]


@dataclass(frozen=True)
class _Share:
    """So many eighths of the bytes of some roles on a tier; `back`: as many of all their eighths that are on the host instead of on disk."""

    roles: tuple[str, ...]
    tier: str
    eighths: int
    back: int = 0

    def records(self, auto: Offload) -> Iterator[Offload]:
        """As transforms: the second of two takes its fraction of what the first one leaves."""
        ordered = tuple(role for role in ROLES if role in self.roles)
        asked = replace(auto, of=ordered, update_on=auto.update_on if "opt_state" in ordered else "auto")
        if self.back or self.tier == "cpu":
            yield replace(asked, tier="cpu", path=(), fraction=(self.back or self.eighths) / FINEST)
        if self.tier == "nvme" and self.eighths > self.back:
            yield replace(asked, tier="nvme", fraction=(self.eighths - self.back) / (FINEST - self.back))

    def __str__(self) -> str:
        parts = [(self.back, "on the host"), (self.eighths - self.back, "on disk")] if self.tier == "nvme" else [(self.eighths, "on the host")]
        what = " and ".join(self.roles)
        return " and ".join(f"{n / FINEST:.0%} of {what} {where}" if n < FINEST else f"{what} {where}" for n, where in parts if n)


Shares = tuple[_Share, ...]


def choose_tiers(build: Build, least: Choice, auto: Offload, budget: Budget, unified: bool, progress: Progress | None = None) -> tuple[Records, Decision]:
    """The records that take the place of an `offload("auto")`, and why.

    Args:
        build: the programs of a step with some records.
        least: of these the one that takes as little memory as it can, wherever the update is.
        auto: the record.
        budget: to fit.
        unified: whether host and device are one memory: then nothing is sent to the host.
        progress: is told how far the search is.

    Raises:
        BudgetError: nothing fits, with what the least of each ladder takes of every tier.
    """
    return _Search(build, least, auto, budget, unified, progress).run()


def check_auto(auto: Offload, limits: tuple[int | None, int | None, int | None], batch: bool = True) -> None:
    """Raises if a record cannot be resolved.

    Args:
        auto: the record.
        limits: of device, host and disk: without the first nothing needs to be moved.
        batch: whether an example is given: what a step takes besides its state depends on it.
    """
    problems = [] if limits[0] is not None else ["memory_budget: what may stay on the device is not given"]
    if limits[2] is not None and not auto.path:
        problems.append(f"disk_budget={limits[2]:,} bytes, and no path that they are on")
    if not batch:
        problems.append("batch: where the state rests is decided before the first batch is seen, and without one it is not known what the step takes")
    if problems:
        fix = 'e.g. fz.compile(step, mesh, memory_budget="80GB", batch=batch), and fz.offload("auto", path="/scratch") for a disk'
        raise FzeroValueError(message("offload", "'auto' chooses what fits into budgets", problems, fix))


class _Search:
    def __init__(self, build: Build, least: Choice, auto: Offload, budget: Budget, unified: bool, progress: Progress | None):
        self.build, self.least, self.auto, self.budget, self.unified, self.progress = build, least, auto, budget, unified, progress
        self.variants: dict[Shares, Variants] = {}
        self.peaks: dict[tuple[Shares, Choice], Peaks] = {}
        self.found: dict[Shares, float] = {}  # seconds of a step, of what fits

    def run(self) -> tuple[Records, Decision]:
        if self._fits(()):
            return (), Decision("offload", "nothing", "the step fits as it is")
        found = self.found
        for ladder in self._ladders():
            for shares in self._climb(ladder):
                if shares not in found and self._floor(shares) < min(found.values(), default=math.inf):
                    found[shares] = self._seconds(shares)
        if not found:
            raise self._unmet()
        best, *others = sorted(found, key=lambda shares: found[shares])
        why = "; ".join([f"{duration(found[best])} a step predicted, the fastest that fits", *(f"{_names(o)}: {duration(found[o])}" for o in others[:2])])
        return self._records(best), Decision("offload", _names(best), why)

    def _ladders(self) -> list[Ladder]:
        """Without the roles that may not be moved, and the tiers that are not there."""
        able = {"nvme"} if self.unified else {"cpu", "nvme"}
        found: dict[Ladder, None] = {}
        for ladder in (*_ON_HOST, *(_ON_DISK if self.auto.path else ())):
            asked = ((tuple(r for r in roles if r in self.auto.of), tier) for roles, tier in ladder)
            found[tuple((roles, tier) for roles, tier in asked if roles and tier in able)] = None
        return list(found)

    def _climb(self, ladder: Ladder) -> Iterator[Shares]:
        """The first rung of a ladder that fits, with as little of it as will do and with all, and with what the host has room for on the host."""
        below: Shares = ()
        for roles, tier in ladder:
            whole = (*below, _Share(roles, tier, FINEST))
            if self._over(0, whole):
                below = whole
                continue
            n = _least(FINEST, lambda n: not self._over(0, (*below, _Share(roles, tier, n))))  # noqa: B023
            for shares in dict.fromkeys([(*below, _Share(roles, tier, n)), whole]):
                yield from self._with_back(shares)
            return

    def _with_back(self, shares: Shares) -> Iterator[Shares]:
        if self._fits(shares):
            yield shares
        for i, share in enumerate(shares):
            if share.tier == "nvme" and not self.unified and self.budget.host is not None:
                with_ = lambda n, i=i, share=share: (*shares[:i], replace(share, back=n), *shares[i + 1 :])  # noqa: E731
                n = share.eighths - _least(share.eighths, lambda less: not self._over(1, with_(share.eighths - less)))  # noqa: B023
                if n and self._fits(with_(n)):
                    yield with_(n)

    # --- what a choice takes ---

    def _records(self, shares: Shares) -> Records:
        return tuple(record for share in shares for record in share.records(self.auto))

    def _variants(self, shares: Shares) -> Variants:
        if shares not in self.variants:
            self.variants[shares] = self.build(self._records(shares))
        return self.variants[shares]

    def _peaks(self, shares: Shares, way: Choice) -> Peaks:
        if (shares, way) not in self.peaks:
            self.peaks[shares, way] = peak_bytes(self._variants(shares)(way), self.budget.device, self.budget.backend)
            if self.progress is not None:
                best = min(self.found, key=lambda shares: self.found[shares], default=None)
                self.progress(f"{len(self.peaks)} tried, " + (f"best {duration(self.found[best])} a step: {_names(best)}" if best else "none fits yet"))
        return self.peaks[shares, way]

    def _ways(self, shares: Shares) -> list[Choice]:
        """Where updates may run and gradients wait, what takes least of the device first: all updates on the host, or, if that is open, none; what lies
        between is looked at afterwards."""
        variants = self._variants(shares)
        sides = ENDS if variants.open_side else ENDS[:1]
        return [replace(self.least, host_share=share, grads=grads) for share in sides for grads in reversed(variants.grads(self.least))]

    def _fitting(self, shares: Shares) -> list[Choice]:
        return [way for way in self._ways(shares) if not self.budget.over(self._peaks(shares, way))]

    def _fits(self, shares: Shares) -> bool:
        return not self.budget.over(self._resting(shares)) and any(not self.budget.over(self._peaks(shares, way)) for way in self._ways(shares))

    def _over(self, tier: int, shares: Shares) -> bool:
        """Whether it takes too much of the device (0) or the host (1)."""
        limit = self.budget.limits[tier]
        if limit is None or self._resting(shares)[tier] > limit:
            return limit is not None
        ways = self._ways(shares)
        return all(self._peaks(shares, way)[tier] > limit for way in (ways if tier else ways[:1]))

    def _seconds(self, shares: Shares) -> float:
        programs = [self._variants(shares)(way) for way in self._fitting(shares)]
        return min(step_seconds(program, self.budget.device, self.budget.backend) for program in programs)

    # --- what it takes at least, which no program is needed for ---

    def _resting(self, shares: Shares) -> Peaks:
        base = self._variants(shares).base
        device, host, disk = (resting_bytes(base, tier) for tier in ("device", "host", "disk"))
        return device, host, disk

    def _floor(self, shares: Shares) -> float:
        """Seconds for which the disk is busy: what is updated there is read and written."""
        base, device = self._variants(shares).base, self.budget.device
        written = {w for line in base.lines if line.op == "update" for w in line.writes}
        leaves = [leaf for name, leaf in base.leaves.items() if name in written and leaf.layout.tier == "disk"]
        nbytes = sum(leaf.shard_numel(base.mesh) * leaf.dtype.itemsize for leaf in leaves)
        return nbytes / device.disk_read.bandwidth + nbytes / device.disk_write.bandwidth

    def _unmet(self) -> BudgetError:
        over = {shares: (self.budget.over(peaks), peaks) for (shares, _), peaks in sorted(self.peaks.items(), key=lambda x: -self.budget.over(x[1]))}
        for shares in self.variants:  # of what was never made all that it takes is more
            over.setdefault(shares, (self.budget.over(self._resting(shares)), self._resting(shares)))
        least: dict[frozenset[str], Shares] = {}  # by the tiers that are used
        for shares in sorted(over, key=lambda shares: (over[shares][1][0], over[shares][0])):
            least.setdefault(frozenset(s.tier for s in shares), shares)
        problems = []
        for shares in least.values():
            peaks = min((self._peaks(shares, way) for way in self._ways(shares)), key=self.budget.over)
            limits = zip(("device", "host", "disk"), peaks, self.budget.limits, strict=True)
            needs = [f"{where} {need:,} bytes" + (f" of {limit:,}" if limit is not None else "") for where, need, limit in limits if need]
            problems.append(f"{_names(shares)}: {', '.join(needs)}")
        fix = "raise a budget" if self.auto.path else 'give it a disk, fz.offload("auto", path=DIR), or raise a budget'
        return BudgetError(message("offload", "nothing that 'auto' can move makes the step fit", problems, f"{fix}; or shard more, or use a smaller batch"))


def _least(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest number from 1 on that fits, by bisection, if `most` does: more takes less."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _names(shares: Shares) -> str:
    return ", ".join(map(str, shares)) or "nothing moved"
