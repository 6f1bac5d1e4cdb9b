"""Resolves offload("auto"): tries roles, tiers and shares, and takes the fastest step among those that fit the budgets.

[Note: ladders] A ladder is an order in which roles leave the device, each for one tier, in steps of 1/8: the first
roles completely, and a part of the last one. A part of the tensors on disk may be on the host instead. Gradients are
held on disk only if the host has no room for them.

[Note: bounds] Making a program takes time, so only a few are made. A lower bound of the cost of each is known
beforehand (cost_bounds.py): the stored bytes, the held gradients, and the busy seconds of each queue. Candidates are
lowered in order of their estimated time. A candidate is skipped if it would not fit when it exceeds its lower bound by
as much as similar candidates exceeded theirs. The search ends when no bound is better than the best candidate, or after
MOST_LINES ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fzero._utils.progress import shown
from fzero._utils.units import duration, size
from fzero.compiler.budget_report import FEW, WITH_BATCH, Budget, filling, filling_host, share_of
from fzero.compiler.combined_transforms import auto_of, offloads, precision_of, zero_of
from fzero.compiler.cost_bounds import LowerBound, TierShares, sizes_of
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.options import Options
from fzero.compiler.pass_cache import PassCache, initial_options
from fzero.compiler.search import ENDS, GAIN, Search
from fzero.compiler.state_layouts import mirrors
from fzero.compiler.traced_step import Traced, trace_step, with_leaves
from fzero.errors import BudgetError, FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh
from fzero.plan.plan import Plan, PlanDecision, plan
from fzero.step import Step
from fzero.transforms import speculate_pass
from fzero.transforms.offload import ROLES, Offload, tiers_of
from fzero.transforms.offload_analysis import GRADS
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.remat import Remat
from fzero.transforms.transform import find

FINEST = 8  # shares are multiples of 1/8
MOST_LINES = 12_000  # ops of all programs that are made, if one of them fits
UNTIL_FOUND = 36_000  # the same, if none fits
MOST_TRIED = 32  # programs
LAST_TRIED = 8  # afterwards: programs that are not expected to fit, if nothing else did

_STATE = ("opt_state", "params")  # the state of the same parameters
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


class _Share(NamedTuple):
    """A number of eighths of the bytes of some roles on the host, and a number of eighths on disk."""

    roles: tuple[str, ...]
    host: int
    disk: int

    def records(self, auto: Offload) -> Iterator[Offload]:
        """Returns the share as transforms. The second of two takes its fraction of what the first one leaves."""
        ordered = tuple(role for role in ROLES if role in self.roles)
        asked = replace(auto, of=ordered, update_on=auto.update_on if "opt_state" in ordered else "auto")
        if self.host:
            yield replace(asked, tier="cpu", path=(), fraction=self.host / FINEST)
        if self.disk:
            yield replace(asked, tier="nvme", fraction=self.disk / (FINEST - self.host))

    def __str__(self) -> str:
        what, parts = " and ".join(self.roles), ((self.host, "on the host"), (self.disk, "on disk"))
        return " and ".join(
            f"{n / FINEST:.0%} of {what} {where}" if n < FINEST else f"{what} {where}" for n, where in parts if n
        )


Shares = tuple[_Share, ...]


class Resolved(NamedTuple):
    """A step without open tiers, the reasons for the choice, and the step's trace if the choice was made here."""

    step: Step
    chosen: tuple[PlanDecision, ...] = ()
    traced: Traced | None = None


def resolve(
    step: Step, mesh: AbstractMesh, params: Any, batch: Inputs, budget: Budget, skip: frozenset[str] = frozenset()
) -> Resolved:
    """Returns the step in which the resolved offloads replace its `offload("auto")`, and the reasons; the unchanged
    step if it has none.

    Args:
        step, mesh: as for `lower`.
        params: the tree of unsharded parameters.
        batch: the batch for which it is resolved.
        budget: the budget that it must fit.
        skip: passes to leave out.

    Raises:
        BudgetError: nothing fits; the message lists how much of every tier the smallest candidate of each ladder takes.
    """
    auto = auto_of(step)
    if auto is None:
        return Resolved(step)
    check_auto(auto, budget.limits)
    left = replace(step, transforms=tuple(t for t in step.transforms if t != auto))
    inputs = params_inputs(left, mesh, params)
    # traced with everything that may be offloaded
    traced = trace_step(left, mesh, inputs, batch, precision_of(left), skip=skip)
    mirrored = mirrors(traced.opt_state.leaves, inputs)
    built: dict[Shares, Traced] = {}

    def pass_cache_of(shares: Shares) -> PassCache:
        if shares not in built:
            built[shares] = _resting(traced, _with_records(left, shares, auto), mesh, params, mirrored)
        return built[shares].pass_cache

    told = ["the first program"]
    with nullcontext() if getattr(mesh, "rank", 0) else shown("fzero.offload('auto')", lambda: told[-1]):
        least = initial_options(left, mesh, budget.nbytes is not None)
        tiers = lambda least: _Tiers(pass_cache_of, least, auto, budget, mesh.unified_memory, told.append)  # noqa: E731
        try:
            shares, why = tiers(least).best()
        except BudgetError:
            narrow = traced.pass_cache.narrowed(least)
            if narrow == least:
                raise
            shares, why = tiers(narrow).best()
    chosen = PlanDecision("offload", _names(shares) if shares else "nothing", why)
    return Resolved(_with_records(left, shares, auto), (chosen,), built[shares])


def _with_records(step: Step, shares: Shares, auto: Offload) -> Step:
    """Returns the step with additional transforms for these shares, in the canonical order."""
    records = (record for share in shares for record in share.records(auto))
    return replace(step, transforms=tuple(sorted((*step.transforms, *records), key=lambda t: (t.order, str(t)))))


def _resting(traced: Traced, step: Step, mesh: AbstractMesh, params: Any, mirrored: Sequence[int | None]) -> Traced:
    """Returns the trace of a step with its state on the tiers of another step. `mirrored`: for each tensor of the
    optimizer state, the index of its parameter."""
    inputs = params_inputs(step, mesh, params)
    tiers = tiers_of(offloads(step), inputs.leaves, inputs.ties, zero_of(step, mesh).casts)
    on = {leaf.path: leaf.layout.tier for leaf in inputs.leaves}
    of = zip(traced.opt_state.leaves, mirrored, strict=True)
    on |= {leaf.path: tiers[i].opt_state for leaf, i in of if i is not None}
    rest = lambda leaf: leaf.with_layout(tier=on.get(leaf.path, leaf.layout.tier))  # noqa: E731
    like, (copies, gradients) = traced.pass_cache, with_leaves(step, mesh, inputs)
    leaves = {name: rest(leaf) for name, leaf in like.recorded.leaves.items()}
    recorded = replace(like.recorded, leaves=leaves, transforms=step.transforms)
    pass_cache = PassCache(recorded, replace(like.context, copies=copies, gradients=gradients), like)
    opt_state = replace(traced.opt_state, leaves=tuple(map(rest, traced.opt_state.leaves)))
    return replace(traced, pass_cache=pass_cache, opt_state=opt_state)


def check_auto(auto: Offload, limits: tuple[int | None, int | None, int | None], batch: bool = True) -> None:
    """Raises if an `offload("auto")` cannot be resolved.

    Args:
        auto: its configuration.
        limits: the budgets of device, host and disk; without the first one nothing needs to be moved.
        batch: whether an example batch is given: the memory of a step in addition to its state depends on it.
    """
    problems = [] if limits[0] is not None else ["memory_budget: the memory that the device may use is not given"]
    if limits[2] is not None and not auto.path:
        problems.append(f"disk_budget of {size(limits[2])}, and no path on that disk")
    if not batch:
        problems.append(
            "batch: where the state is stored is decided before the first batch is seen, and without an example batch "
            "the memory of a step is not known"
        )
    if problems:
        fix = (
            'e.g. fz.compile(step, mesh, memory_budget="80GB", batch=batch) (fzero plan: --budget 80GB), and '
            'fz.offload("auto", path="/scratch") for a disk'
        )
        raise FzeroValueError("offload", "'auto' needs budgets to choose from", problems, fix)


@dataclass
class _Tiers:
    """The search for the tiers of everything.

    Attributes:
        pass_cache_of: returns the programs of the step with state on these tiers.
        least: the options that take as little memory as possible, wherever the update runs.
        auto: the configuration to resolve.
        budget: the budgets to fit.
        unified: whether host and device share one memory, so that nothing is sent to the host.
        progress: is called with a progress message after each try.
        found: the seconds of the steps that fit, by their shares.
        besides: bytes of device and host that programs took in addition to their lower bound.
    """

    pass_cache_of: Callable[[Shares], PassCache]
    least: Options
    auto: Offload
    budget: Budget
    unified: bool
    progress: Callable[[str], object]
    found: dict[Shares, float] = field(default_factory=dict)
    besides: dict[Options, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.search = Search(lambda c: (self.pass_cache_of(c.offloaded)(replace(c, offloaded=())),), (), self.budget)
        self.likes = functools.cache(_likes)  # evaluated for every candidate, after every try

    def best(self) -> tuple[Shares, str]:
        """Returns the shares of the fastest step that fits, and the reason."""
        if self._try(self.least):
            return (), "the step fits unchanged"
        layouts = self._layouts()
        most = max(layouts, key=lambda shares: sum(share.host + share.disk for share in shares), default=())
        program = self.pass_cache_of(most).before("gradients", self.least)
        self.sizes = sizes_of(program, self.budget.device, self.budget.backend)
        # after a loop, there is no computation left to overlap with
        self.speculates = self.sizes.iterations == 1 and speculate_pass.is_possible(program)
        bounds = {way: self._bound(way) for shares in layouts for way in self._ways(shares)}
        bounds |= self._with_gradients_on_disk(bounds)
        # in the same order on every rank: among equal candidates, the one that moves least comes first
        bounds = dict(sorted(bounds.items(), key=lambda x: (x[1].likely, sum(s.host + s.disk for s in x[0].offloaded))))
        for options, bound in bounds.items():
            ops = sum(len(cost.program.instructions) for cost in {*self.search.tried.values()})
            enough = ops > (MOST_LINES if self.found else UNTIL_FOUND) or len(self.search.tried) > MOST_TRIED
            if enough or bound.seconds > (1 - GAIN) * min(self.found.values(), default=math.inf):
                break
            if not self._expected(options, bound):
                self._try(options, bound)
        if not self.found:  # programs differ in the memory that they take in addition to the bound
            self._try_others(bounds)
        best, *others = sorted(self.found, key=lambda shares: self.found[shares])
        why = [f"{duration(self.found[best])} a step predicted, the fastest that fits"]
        if self.sizes.copies and any("params" in share.roles for share in best):
            why.append("params are the compute copies: the others stay on the device")
        return best, "; ".join([*why, *(f"{_names(o)}: {duration(self.found[o])}" for o in others[:2])])

    def _try_others(self, bounds: Mapping[Options, LowerBound]) -> None:
        able = [c for c in bounds if c not in self.search.tried and not self.budget.over(bounds[c].peaks)]
        for left in reversed(range(min(LAST_TRIED, len(able)))):
            # each result improves the predictions for the others; the last try has the most room left
            expected = self._expected if left else lambda _, bound: self.budget.filled(bound.peaks)
            able.remove(options := min(able, key=lambda c: (expected(c, bounds[c]), bounds[c].likely)))
            if self._try(options, bounds[options]):
                return
        raise self._unmet(bounds)

    def _ladders(self) -> list[Ladder]:
        """Returns the ladders without roles that may not be moved, and without tiers that do not exist."""
        able = {"nvme"} if self.unified else {"cpu", "nvme"}
        found: dict[Ladder, None] = {}
        for ladder in (*_ON_HOST, *(_ON_DISK if self.auto.path else ())):
            asked = ((tuple(r for r in roles if r in self.auto.of), tier) for roles, tier in ladder)
            found[tuple((roles, tier) for roles, tier in asked if roles and tier in able)] = None
        return list(found)

    def _layouts(self) -> list[Shares]:
        """Returns the rungs of all ladders, and variants in which more and more of the bytes on disk are on the host
        instead. If several ladders lead to the same shares, the shortest is kept."""
        found: dict[Shares, None] = {}
        for ladder in self._ladders():
            rung: Shares = ()
            for roles, tier in ladder:
                below = rung
                for n in range(1, FINEST + 1):
                    rung = (*below, _Share(roles, *((n, 0) if tier == "cpu" else (0, n))))
                    found[rung] = None
                    for i, (of, _, disk) in enumerate(rung if self.budget.host is not None else ()):
                        back = (_Share(of, k, disk - k) for k in range(1, disk + 1) if not self.unified)
                        found |= dict.fromkeys((*rung[:i], share, *rung[i + 1 :]) for share in back)
        distinct: dict[frozenset[_Share], Shares] = {}
        for shares in sorted(found, key=len):
            distinct.setdefault(_meaning(shares), shares)
        return [shares for shares in found if shares in {*distinct.values()}]

    def _with_gradients_on_disk(self, bounds: Mapping[Options, LowerBound]) -> dict[Options, LowerBound]:
        """Returns the candidates whose gradients are held on the host, with gradients on disk instead."""
        if (
            self.budget.host is None
            or "gradients" not in self.auto.of
            or not self.auto.path
            or self.sizes.iterations > 1
        ):
            return {}
        stored = _Share(("gradients",), 0, FINEST)
        asked = {replace(c, offloaded=(*c.offloaded, stored)): c for c in bounds if c.grads == self.least.grads}
        found = {options: self._bound(options) for options in asked}
        return {options: bound for options, bound in found.items() if bound.host < bounds[asked[options]].host}

    # --- the cost of a candidate ---

    def _ways(self, shares: Shares) -> list[Options]:
        """Returns the open options for updates, held gradients and speculative updates. Either all updates run on the
        host or, if that is open, none; mixtures are tried afterwards."""
        state = any("opt_state" in share.roles for share in shares)
        open_side = state and not self.unified and self.auto.update_on == "auto"
        grads = GRADS if self.sizes.iterations > 1 else ("update", "host") if self.sizes.grads else ("update",)
        held = [s for s in shares if not {*_STATE}.isdisjoint(s.roles)]
        host, disk = any(s.host for s in held), any(s.disk for s in held)
        # copies in host memory need a host budget
        able = (state and disk, state and host and self.budget.host is not None)
        speculations = (
            tiers for tiers, is_able in zip(speculate_pass.TIERS, able, strict=True) if is_able and self.speculates
        )
        return [
            replace(self.least, host_share=share, grads=waiting, speculative=tiers, offloaded=shares)
            for tiers in ((), *speculations)
            for share in (ENDS if open_side else ENDS[:1])
            for waiting in (("update",) if self.unified else grads)
        ]

    def _bound(self, options: Options) -> LowerBound:
        of = dict.fromkeys(ROLES, (0.0, 0.0))
        for share in options.offloaded:
            of |= dict.fromkeys(share.roles, (share.host / FINEST, share.disk / FINEST))
        on_host = options.host_share > 0 and self.auto.update_on != "device"
        shares = TierShares(of["opt_state"], of["params"], of["activations"][0], of["gradients"][1])
        early = speculate_pass.shares(options.speculative, shares, bool(self.sizes.copies))
        return self.sizes.lower_bound(shares, on_host, options.grads, self.budget.device, early)

    def _expected(self, options: Options, bound: LowerBound) -> float:
        """Returns by how many bytes a candidate exceeds the budgets, if it exceeds its lower bound as the last similar
        candidate did. Updates on the device are assumed to take no less than those on the host."""
        device, host = next(filter(None, map(self.besides.get, self.likes(options))), (0.0, 0.0))
        return self.budget.over(bound._replace(device=bound.device + device, host=bound.host + host).peaks)

    def _try(self, options: Options, bound: LowerBound | None = None) -> bool:
        """Makes the program of a candidate, and returns whether it fits."""
        device, host, _ = self.search.cost(options).peaks
        if bound is not None:
            kind, _, way, _ = self.likes(options)
            self.besides[kind] = self.besides[way] = device - bound.device, host - bound.host
        if fits := self.search.fits(options):
            self.found[options.offloaded] = min(
                self.found.get(options.offloaded, math.inf), self.search.seconds(options)
            )
        best = min(self.found, key=self.found.__getitem__, default=None)
        told = f"best {duration(self.found[best])} a step: {_names(best)}" if best else "none fits yet"
        self.progress(f"{len(self.search.tried)} tried, {told}")
        return fits

    def _unmet(self, bounds: Mapping[Options, LowerBound]) -> BudgetError:
        """Returns the error if nothing fits. It lists, for each combination of tiers, the candidate that exceeds the
        budgets the least."""
        tiers = lambda options: frozenset(share.disk > 0 for share in options.offloaded)  # noqa: E731
        known = {*map(tiers, self.search.tried)}
        for options in sorted(bounds, key=lambda c: bounds[c].peaks):
            # the least device memory, on tiers not tried yet
            if tiers(options) not in known:
                known.add(tiers(options))
                self._try(options, bounds[options])
        peaks = {options: self.search.cost(options).peaks for options in self.search.tried}
        least: dict[frozenset[str], Options] = {}  # by the tiers that are used
        for options in sorted(peaks, key=lambda c: (self.budget.over(peaks[c]), peaks[c][0])):
            least.setdefault(tiers(options), options)
        problems = []
        for options in least.values():
            needs = [
                f"{use.tier} {size(use.peak)}" + (f" of {size(use.limit)}" if use.limit is not None else "")
                for use in self.budget.uses(peaks[options])
                if use.peak
            ]
            problems.append(f"{_names(options.offloaded)}: {', '.join(needs)}")
        program = self.search.cost(next(iter(least.values()))).program  # the closest
        found = plan(program, self.budget.device, backend=self.budget.backend)
        device, host = self._lacking(found)
        filled = [*(filling(program, found) if device else ()), *(filling_host(found) if host else ())]
        problems[1:1] = [f"  {line}" for line in filled]
        fixes = [*([] if self.auto.path else ['give it a disk, fz.offload("auto", path=DIR)']), "raise a budget"]
        advice = self._advice(program, found)
        fixes += [f"apply changes that may lower it: {'; '.join(advice)}"] if advice else []
        what = "nothing that 'auto' can move makes the step fit"
        return BudgetError("offload", what, problems, ", or ".join(fixes))

    def _advice(self, program: Program, found: Plan) -> list[str]:
        """Returns missing transforms that would take fewer bytes of a full tier. They are not tried."""
        device, host = self._lacking(found)
        on_device = lambda *roles: device and share_of(found, roles) > FEW  # noqa: E731
        grads = on_device("gradients") or (host and found.host_breakdown["gradients"] > FEW * found.host_peak_bytes)
        precision, policy = find(program.transforms, MixedPrecision), find(program.transforms, Remat)
        able = {
            "more shards": device and program.mesh.size > 1,
            'fz.remat("full")': on_device("saved") and (policy is None or policy.policy not in ("full", 0.0, "auto")),
            "a smaller batch": on_device(*WITH_BATCH),
            'gradients among what "auto" may move': grads and "gradients" not in self.auto.of,
            "fz.accumulate(n, schedule='layerwise'), so that gradients can wait on disk": grads
            and self.sizes.iterations > 1,
            'fz.mixed_precision("bf16", reduce="bf16"), for gradients of half the bytes': grads
            and precision is not None
            and (precision.compute, precision.reduce) == ("bf16", "fp32"),
        }
        return [what for what, helps in able.items() if helps]

    def _lacking(self, found: Plan) -> tuple[bool, bool]:
        """Whether the device and the host have too little memory."""
        device, host, _ = self.budget.limits
        return device is not None and found.peak_bytes > device, host is not None and found.host_peak_bytes > host


def _likes(options: Options) -> tuple[Options, Options, Options, Options]:
    """Returns keys that are shared by options which take similar amounts in addition to their bounds, the most specific
    first."""
    kind = replace(
        options, offloaded=tuple((share.roles, share.host > 0, share.disk > 0) for share in options.offloaded)
    )
    way = replace(options, offloaded=())
    return kind, replace(kind, host_share=ENDS[0]), way, replace(way, speculative=())


def _meaning(shares: Shares) -> frozenset[_Share]:
    """Returns the shares as a set; those that are completely on one tier are split into one per role."""
    whole = {share: FINEST in (share.host, share.disk) for share in shares}
    alone = (share._replace(roles=(role,)) for share in shares if whole[share] for role in share.roles)
    return frozenset((*alone, *(share for share in shares if not whole[share])))


def _names(shares: Shares) -> str:
    return ", ".join(map(str, shares)) or "nothing moved"
