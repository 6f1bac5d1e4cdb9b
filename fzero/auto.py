"""offload("auto"): which roles rest off the device, on which tier and how much of each: of what is tried and fits the budgets the fastest step is taken.

[Note: ladders] A ladder is an order in which roles leave the device, each for its tier. What does not fit is moved rung by rung: the roles before in whole,
and of the last one as little as will do, in steps of 1/8, found by bisection. Of what is on disk, as much as there is room for comes back to the host. Each
ladder ends at its first rung that fits, taken with that share and with all of its roles: some updates are quicker when all that they read is in one place.
Of what the ladders come to, the plan says which is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fzero.budget import ENDS, FEW, Budget, Choice, filling, share_of
from fzero.errors import BudgetError, FzeroValueError, message
from fzero.program.ir import Program
from fzero.schedule.plan import Decision, Plan, peak_bytes, plan, step_seconds
from fzero.transforms.offload import ROLES, Offload
from fzero.units import duration, size
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


def choose_tiers(build: Build, least: Choice, auto: Offload, budget: Budget, unified: bool) -> tuple[Records, Decision]:
    """The records that take the place of an `offload("auto")`, and why.

    Args:
        build: the programs of a step with some records.
        least: of these the one that takes as little memory as it can, wherever the update is.
        auto: the record.
        budget: to fit.
        unified: whether host and device are one memory: then nothing is sent to the host.

    Raises:
        BudgetError: nothing fits, with what the least of each ladder takes of every tier.
    """
    return _Search(build, least, auto, budget, unified).run()


def check_auto(auto: Offload, limits: tuple[int | None, int | None, int | None], batch: bool = True) -> None:
    """Raises if a record cannot be resolved.

    Args:
        auto: the record.
        limits: of device, host and disk: without the first nothing needs to be moved.
        batch: whether an example is given: what a step takes besides its state depends on it.
    """
    problems = [] if limits[0] is not None else ["memory_budget: what may stay on the device is not given"]
    if limits[2] is not None and not auto.path:
        problems.append(f"disk_budget of {size(limits[2])}, and no path that they are on")
    if not batch:
        problems.append("batch: where the state rests is decided before the first batch is seen, and without one it is not known what the step takes")
    if problems:
        fix = 'e.g. fz.compile(step, mesh, memory_budget="80GB", batch=batch), and fz.offload("auto", path="/scratch") for a disk'
        raise FzeroValueError(message("offload", "'auto' chooses what fits into budgets", problems, fix))


class _Search:
    def __init__(self, build: Build, least: Choice, auto: Offload, budget: Budget, unified: bool):
        self.build, self.least, self.auto, self.budget, self.unified = build, least, auto, budget, unified
        self.variants: dict[Shares, Variants] = {}
        self.peaks: dict[tuple[Shares, float], Peaks] = {}

    def run(self) -> tuple[Records, Decision]:
        if self._fits(()):
            return (), Decision("offload", "nothing", "the step fits as it is")
        found: dict[Shares, float] = {}
        for ladder in self._ladders():
            for shares in self._climb(ladder):
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

    def _program(self, shares: Shares, on_host: float) -> Program:
        return self._variants(shares)(replace(self.least, host_share=on_host))

    def _variants(self, shares: Shares) -> Variants:
        if shares not in self.variants:
            self.variants[shares] = self.build(self._records(shares))
        return self.variants[shares]

    def _peaks(self, shares: Shares, on_host: float) -> Peaks:
        if (shares, on_host) not in self.peaks:
            self.peaks[shares, on_host] = peak_bytes(self._program(shares, on_host), self.budget.device, self.budget.backend)
        return self.peaks[shares, on_host]

    def _ends(self, shares: Shares) -> tuple[float, ...]:
        """How much of the updates may run on the host: all, or, if that is open, nothing. What lies between is looked at afterwards."""
        return ENDS if self._variants(shares).open_side else ENDS[:1]

    def _fitting(self, shares: Shares) -> list[float]:
        return [on_host for on_host in self._ends(shares) if not self.budget.over(self._peaks(shares, on_host))]

    def _fits(self, shares: Shares) -> bool:
        return bool(self._fitting(shares))

    def _over(self, tier: int, shares: Shares) -> bool:
        """Whether it takes too much of the device (0) or the host (1). On the host an update takes less of the device."""
        limit, ends = self.budget.limits[tier], self._ends(shares)
        return limit is not None and all(self._peaks(shares, on_host)[tier] > limit for on_host in (ends if tier else ends[:1]))

    def _seconds(self, shares: Shares) -> float:
        programs = [self._program(shares, on_host) for on_host in self._fitting(shares)]
        return min(step_seconds(program, self.budget.device, self.budget.backend) for program in programs)

    def _unmet(self) -> BudgetError:
        over = {shares: (self.budget.over(peaks), peaks) for (shares, _), peaks in sorted(self.peaks.items(), key=lambda x: -self.budget.over(x[1]))}
        least: dict[frozenset[str], Shares] = {}  # by the tiers that are used
        for shares in sorted(over, key=lambda shares: (over[shares][1][0], over[shares][0])):
            least.setdefault(frozenset(s.tier for s in shares), shares)
        problems, plans = [], list[tuple[Program, Plan]]()
        for shares in least.values():
            limits = zip(("device", "host", "disk"), over[shares][1], self.budget.limits, strict=True)
            needs = [f"{where} {size(need)}" + (f" of {size(limit)}" if limit is not None else "") for where, need, limit in limits if need]
            problems.append(f"{_names(shares)}: {', '.join(needs)}")
            if over[shares][1][0] > (self.budget.nbytes or 0):
                program = self._program(shares, ENDS[0])
                plans.append((program, plan(program, self.budget.device, backend=self.budget.backend)))
                problems += [f"  {line}" for line in filling(*plans[-1])]
        fixes = ["raise a budget"] if self.auto.path else ['give it a disk, fz.offload("auto", path=DIR)', "raise a budget"]
        for program, found in plans[:1]:
            fixes += ["shard more"] if program.mesh.size > 1 else []
            fixes += ['keep less for the backward: fz.remat("full")'] if share_of(found, ("saved",)) > FEW else []
        return BudgetError(message("offload", "nothing that 'auto' can move makes the step fit", problems, ", or ".join(fixes)))


def _least(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest number from 1 on that fits, by bisection, if `most` does: more takes less."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _names(shares: Shares) -> str:
    return ", ".join(map(str, shares)) or "nothing moved"
