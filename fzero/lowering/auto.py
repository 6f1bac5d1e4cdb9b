"""Resolves offload("auto"): roles, tiers and shares are tried, and of those that fit the budgets the fastest step is
taken.

[Note: ladders] A ladder is an order in which roles leave the device, each for its tier, in steps of 1/8: the roles
before in whole, and a part of the last one. Of what is on disk a part may be on the host instead. Gradients wait on
disk only where the host has no room for them.

[Note: bounds] A program takes time to make, so few of these are made. What each takes at least is known beforehand
(bounds.py): the bytes that rest, the gradients that wait, and for how long each queue is busy. Candidates are lowered
in order of estimated time. One is skipped if similar candidates exceeded their lower bound by more than it has room
for. The search ends when no bound beats the best, or after MOST_LINES lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fzero.errors import BudgetError, FzeroValueError, message
from fzero.lowering.bounds import Least, Rests, sizes_of
from fzero.lowering.budget import ENDS, FEW, GAIN, WITH_BATCH, Budget, filling, filling_host, share_of
from fzero.lowering.variants import Variants
from fzero.passes.choice import Choice
from fzero.passes.off_device import GRADS
from fzero.passes.speculate import TIERS, num_guessable
from fzero.plan.plan import Plan, PlanDecision, peak_bytes, plan, step_seconds
from fzero.program.ir import Program
from fzero.transforms.base import find
from fzero.transforms.offload import ROLES, Offload
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.remat import Remat
from fzero.units import duration, size

FINEST = 8  # shares are looked for in steps of 1/8
MOST_LINES = 12_000  # of all programs that are made, if one of them fits
UNTIL_FOUND = 36_000  # if none does
MOST_TRIED = 32  # programs
LAST_TRIED = 8  # and of those that are not expected to fit, but might, if nothing did

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
    """So many eighths of the bytes of some roles on a tier; `back`: as many of all their eighths that are on the host
    instead of on disk."""

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
        parts = (
            [(self.back, "on the host"), (self.eighths - self.back, "on disk")]
            if self.tier == "nvme"
            else [(self.eighths, "on the host")]
        )
        what = " and ".join(self.roles)
        return " and ".join(
            f"{n / FINEST:.0%} of {what} {where}" if n < FINEST else f"{what} {where}" for n, where in parts if n
        )


Shares = tuple[_Share, ...]


def choose_tiers(
    build: Build, least: Choice, auto: Offload, budget: Budget, unified: bool, progress: Callable[[str], object]
) -> tuple[Records, PlanDecision]:
    """The records that take the place of an `offload("auto")`, and why.

    Args:
        build: the programs of a step with some records.
        least: of these the one that takes as little memory as it can, wherever the update is.
        auto: the record.
        budget: to fit.
        unified: whether host and device are one memory: then nothing is sent to the host.
        progress: is told how far the search is, after each try.

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
        problems.append(f"disk_budget of {size(limits[2])}, and no path that they are on")
    if not batch:
        problems.append(
            "batch: where the state rests is decided before the first batch is seen, and without one it is not known "
            "what the step takes"
        )
    if problems:
        fix = (
            'e.g. fz.compile(step, mesh, memory_budget="80GB", batch=batch) (fzero plan: --budget 80GB), and '
            'fz.offload("auto", path="/scratch") for a disk'
        )
        raise FzeroValueError(message("offload", "'auto' chooses what fits into budgets", problems, fix))


class _Search:
    def __init__(
        self,
        build: Build,
        least: Choice,
        auto: Offload,
        budget: Budget,
        unified: bool,
        progress: Callable[[str], object],
    ):
        self.build, self.least, self.auto, self.budget, self.unified, self.progress = (
            build,
            least,
            auto,
            budget,
            unified,
            progress,
        )
        self.variants: dict[Shares, Variants] = {}
        self.peaks: dict[tuple[Shares, Choice], Peaks] = {}
        self.found: dict[Shares, float] = {}  # seconds of a step, of what fits
        # bytes of device and host that programs took besides the least
        self.besides: dict[Any, tuple[float, float]] = {}
        self.made: dict[int, Program] = {}  # by identity: choices may come to the same

    def run(self) -> tuple[Records, PlanDecision]:
        if self._try((), self.least):
            return (), PlanDecision("offload", "nothing", "the step fits as it is")
        asked = self._everything()
        program = self._variants(asked).cut(self.least)
        self.sizes = sizes_of(program, self.budget.device, self.budget.backend)
        # after a loop there is nothing left to run beside
        self.guessable = self.sizes.turns == 1 and bool(num_guessable(program, TIERS[-1]))
        bounds = {(shares, way): self._bound(shares, way) for shares in self._layouts() for way in self._ways(shares)}
        bounds |= self._with_gradients_on_disk(bounds)
        tried = set[tuple[Shares, Choice]]()
        # in one order on every rank: of those alike what moves least comes first
        bounds = dict(sorted(bounds.items(), key=lambda x: (x[1].likely, sum(s.eighths for s in x[0][0]))))
        for candidate in bounds:
            lines = sum(len(program.lines) for program in self.made.values())
            enough = lines > (MOST_LINES if self.found else UNTIL_FOUND) or len(self.peaks) > MOST_TRIED
            if enough or bounds[candidate].seconds > (1 - GAIN) * min(self.found.values(), default=math.inf):
                break
            if not self._expected(candidate, bounds[candidate]):
                tried.add(candidate)
                self._try(*candidate, bounds[candidate])
        if not self.found:  # programs differ in what they take besides the least
            able = [c for c in bounds if c not in tried and not self.budget.over(bounds[c].peaks)]
            for left in reversed(range(min(LAST_TRIED, len(able)))):
                # each tells what to expect of the others; the last is what leaves most room
                expected = (
                    (lambda c: self._expected(c, bounds[c]))
                    if left
                    else (lambda c: self.budget.filled(bounds[c].peaks))
                )
                able.remove(candidate := min(able, key=lambda c: (expected(c), bounds[c].likely)))
                if self._try(*candidate, bounds[candidate]):
                    break
            else:
                raise self._unmet(bounds)
        best, *others = sorted(self.found, key=lambda shares: self.found[shares])
        why = [
            f"{duration(self.found[best])} a step predicted, the fastest that fits",
            *(f"{_names(o)}: {duration(self.found[o])}" for o in others[:2]),
        ]
        return self._records(best), PlanDecision("offload", _names(best), "; ".join(why))

    def _ladders(self) -> list[Ladder]:
        """Without the roles that may not be moved, and the tiers that are not there."""
        able = {"nvme"} if self.unified else {"cpu", "nvme"}
        found: dict[Ladder, None] = {}
        for ladder in (*_ON_HOST, *(_ON_DISK if self.auto.path else ())):
            asked = ((tuple(r for r in roles if r in self.auto.of), tier) for roles, tier in ladder)
            found[tuple((roles, tier) for roles, tier in asked if roles and tier in able)] = None
        return list(found)

    def _layouts(self) -> list[Shares]:
        """The rungs of all ladders, and of what is on disk more and more on the host instead."""
        found: dict[Shares, None] = {}
        for ladder in self._ladders():
            below: Shares = ()
            for roles, tier in ladder:
                for n in range(1, FINEST + 1):
                    shares = (*below, _Share(roles, tier, n))
                    found[shares] = None
                    for i, share in enumerate(shares):
                        if share.tier == "nvme" and not self.unified and self.budget.host is not None:
                            found.update(
                                ((*shares[:i], replace(share, back=k), *shares[i + 1 :]), None)
                                for k in range(1, share.eighths + 1)
                            )
                below = shares
        return list(found)

    def _with_gradients_on_disk(
        self, bounds: Mapping[tuple[Shares, Choice], Least]
    ) -> dict[tuple[Shares, Choice], Least]:
        """Those whose gradients wait on the host, with gradients on disk instead."""
        if self.budget.host is None or "gradients" not in self.auto.of or not self.auto.path or self.sizes.turns > 1:
            return {}
        asked = (
            ((*shares, _Share(("gradients",), "nvme", FINEST)), way)
            for shares, way in bounds
            if way.grads == self.least.grads
        )
        found = {candidate: self._bound(*candidate) for candidate in asked}
        return {
            (shares, way): bound for (shares, way), bound in found.items() if bound.host < bounds[shares[:-1], way].host
        }

    def _everything(self) -> Shares:
        """All that may leave the device."""
        state = tuple(role for role in _STATE if role in self.auto.of)
        tier = "nvme" if self.unified else "cpu"
        activations = (
            (_Share(("activations",), "cpu", FINEST),) if "activations" in self.auto.of and not self.unified else ()
        )
        return (*((_Share(state, tier, FINEST),) if state else ()), *activations)

    # --- what a choice takes ---

    def _records(self, shares: Shares) -> Records:
        return tuple(record for share in shares for record in share.records(self.auto))

    def _variants(self, shares: Shares) -> Variants:
        if shares not in self.variants:
            self.variants[shares] = self.build(self._records(shares))
        return self.variants[shares]

    def _ways(self, shares: Shares) -> list[Choice]:
        """The open places of updates and waiting gradients, and updates on a guess: all updates on the host or, if
        open, none. Mixtures are tried afterwards."""
        state = any("opt_state" in share.roles for share in shares)
        open_side = state and not self.unified and self.auto.update_on == "auto"
        kinds = (
            ("update",)
            if self.unified
            else GRADS
            if self.sizes.turns > 1
            else ("update", "host")
            if self.sizes.grads
            else ("update",)
        )
        held = [s for s in shares if not {*_STATE}.isdisjoint(s.roles)]
        disk, host = (
            any(s.tier == "nvme" and s.eighths > s.back for s in held),
            any(s.tier == "cpu" or s.back for s in held),
        )
        # copies in host memory take room that must be given
        there = (state and disk, state and host and self.budget.host is not None)
        guesses = ((), *(tiers for tiers, able in zip(TIERS, there, strict=True) if able and self.guessable))
        ends = ENDS if open_side else ENDS[:1]
        return [
            replace(self.least, host_share=share, grads=grads, guess=guess)
            for guess in guesses
            for share in ends
            for grads in kinds
        ]

    def _bound(self, shares: Shares, way: Choice) -> Least:
        of = dict.fromkeys(ROLES, (0.0, 0.0))
        for share in shares:
            on_host = share.back if share.tier == "nvme" else share.eighths
            of |= dict.fromkeys(share.roles, (on_host / FINEST, (share.eighths - on_host) / FINEST))
        on_host = way.host_share > 0 and self.auto.update_on != "device"
        rests = Rests(of["opt_state"], of["params"], of["activations"][0], of["gradients"][1])
        return self.sizes.least(rests, on_host, way.grads, self.budget.device, way.guess)

    def _expected(self, candidate: tuple[Shares, Choice], bound: Least) -> float:
        """By how many bytes a candidate is over the budgets, if it exceeds its lower bound as the last similar
        candidate did. Updates on the device take no less than on the host."""
        shares, way = candidate
        on_host = replace(way, host_share=ENDS[0])
        known = (
            self.besides.get(like) for like in (_kind(shares, way), _kind(shares, on_host), way, replace(way, guess=()))
        )
        device, host = next(filter(None, known), (0.0, 0.0))
        return self.budget.over(bound._replace(device=bound.device + device, host=bound.host + host).peaks)

    def _try(self, shares: Shares, way: Choice, bound: Least | None = None) -> bool:
        """Whether a program fits, which is made for it; the seconds of one that does."""
        program, device, backend = self._variants(shares)(way), self.budget.device, self.budget.backend
        peaks = self.peaks[shares, way] = peak_bytes(program, device, backend)
        self.made[id(program)] = program
        if bound is not None:
            self.besides[way] = self.besides[_kind(shares, way)] = peaks[0] - bound.device, peaks[1] - bound.host
        if fits := not self.budget.over(peaks):
            self.found[shares] = min(self.found.get(shares, math.inf), step_seconds(program, device, backend))
        best = min(self.found, key=lambda shares: self.found[shares], default=None)
        told = f"best {duration(self.found[best])} a step: {_names(best)}" if best else "none fits yet"
        self.progress(f"{len(self.peaks)} tried, {told}")
        return fits

    def _unmet(self, bounds: Mapping[tuple[Shares, Choice], Least]) -> BudgetError:
        known = {frozenset(s.tier for s in shares) for shares, _ in self.peaks}
        for candidate in sorted(bounds, key=lambda c: bounds[c].peaks):
            # what takes least of the device, on tiers that nothing was tried on
            if (used := frozenset(s.tier for s in candidate[0])) not in known:
                known.add(used)
                self._try(*candidate, bounds[candidate])
        over: dict[Shares, tuple[float, Peaks]] = {}  # of the closest of each
        for (shares, _), peaks in self.peaks.items():
            short = (self.budget.over(peaks), peaks)
            over[shares] = min(over.get(shares, short), short)
        least: dict[frozenset[str], Shares] = {}  # by the tiers that are used
        for shares in sorted(over, key=lambda shares: (over[shares][0], over[shares][1][0])):
            least.setdefault(frozenset(s.tier for s in shares), shares)
        problems, advice = [], list[str]()
        for shares in least.values():
            limits = zip(("device", "host", "disk"), over[shares][1], self.budget.limits, strict=True)
            needs = [
                f"{where} {size(need)}" + (f" of {size(limit)}" if limit is not None else "")
                for where, need, limit in limits
                if need
            ]
            problems.append(f"{_names(shares)}: {', '.join(needs)}")
            if len(problems) == 1:  # the closest
                way = min(
                    (way for tried, way in self.peaks if tried == shares),
                    key=lambda way: self.budget.over(self.peaks[shares, way]),
                )
                program = self._variants(shares)(way)
                found = plan(program, self.budget.device, backend=self.budget.backend)
                problems += [f"  {line}" for line in filling(program, found)] if self._lacking(found)[0] else []
                problems += [f"  {line}" for line in filling_host(found)] if self._lacking(found)[1] else []
                advice = self._advice(program, found)
        fixes = [*([] if self.auto.path else ['give it a disk, fz.offload("auto", path=DIR)']), "raise a budget"]
        fixes += [f"apply what may lower it: {'; '.join(advice)}"] if advice else []
        return BudgetError(
            message("offload", "nothing that 'auto' can move makes the step fit", problems, ", or ".join(fixes))
        )

    def _advice(self, program: Program, found: Plan) -> list[str]:
        """Missing transforms that would lessen the bytes of a full tier. It is not tried."""
        device, host = self._lacking(found)
        on_device = lambda *roles: device and share_of(found, roles) > FEW  # noqa: E731
        grads = on_device("gradients") or (host and found.host_breakdown["gradients"] > FEW * found.host_peak_bytes)
        precision, policy = find(program.transforms, MixedPrecision), find(program.transforms, Remat)
        able = {
            "more shards": device and program.mesh.size > 1,
            'fz.remat("full")': on_device("saved") and policy not in (Remat("full"), Remat(0.0), Remat("auto")),
            "a smaller batch": on_device(*WITH_BATCH),
            'gradients among what "auto" may move': grads and "gradients" not in self.auto.of,
            "fz.accumulate(n, vertical=True), so that gradients can wait on disk": grads and self.sizes.turns > 1,
            'fz.mixed_precision("bf16", reduce="bf16"), for gradients of half the bytes': grads
            and precision is not None
            and (precision.compute, precision.reduce) == ("bf16", "fp32"),
        }
        return [what for what, helps in able.items() if helps]

    def _lacking(self, found: Plan) -> tuple[bool, bool]:
        """Whether device and host have too little."""
        device, host, _ = self.budget.limits
        return device is not None and found.peak_bytes > device, host is not None and found.host_peak_bytes > host


def _kind(shares: Shares, way: Choice) -> Any:
    """The key that is common to choices which take as much besides the least."""
    return way, tuple((share.roles, share.tier, 0 < share.back) for share in shares)


def _names(shares: Shares) -> str:
    return ", ".join(map(str, shares)) or "nothing moved"
