"""Resolves offload("auto"): decides how much of each role leaves the device, and for which tier.

[Note: one ladder] Roles leave the device in a fixed order: the optimizer state in eighths, then the parameters in
quarters, or both together. A part of what is on disk may be on the host instead. Activations go to the host in halves,
and gradients are held on disk or not.

[Note: bounds] Making a program takes time, so only a few are made. A lower bound of the cost of each placement is known
beforehand (cost_bounds.py): the stored bytes, the held gradients, and the busy seconds of each queue. Placements are
made in the order of their estimated time. One is skipped if it would not fit when it exceeds its lower bound by as much
as similar ones exceeded theirs. The search ends when the bound of the next one is not better than the best program by
GAIN. The search within a memory budget (search.py) continues from its result.
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
from fzero.compiler.cost_bounds import LowerBound, Pair, TierPlacement, sizes_of, speculative_shares
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.options import FINEST, Options
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
from fzero.transforms.offload import GRADS, Offload, tiers_of
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.remat import Remat
from fzero.transforms.transform import find

MOST_TRIED = 32  # programs; twice as many, and three times as many ops, if none fits
NEARLY = 1.5  # times the budgets: up to this peak, fewer values in flight may be enough
MOST_OPS = 12_000  # of all programs that are made
UNTIL_FOUND = 8  # after so many that do not fit, the ones that leave the most room are tried


class Resolved(NamedTuple):
    """A step without open tiers, and the reasons for the choice. If the choice was made here, also the step's trace,
    and the options with which it fits."""

    step: Step
    chosen: tuple[PlanDecision, ...] = ()
    traced: Traced | None = None
    options: Options | None = None


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
    built: dict[TierPlacement, Traced] = {}

    def pass_cache_of(placement: TierPlacement) -> PassCache:
        if placement not in built:
            built[placement] = _resting(traced, _with_records(left, placement, auto), mesh, params, mirrored)
        return built[placement].pass_cache

    told = ["the first program"]
    with nullcontext() if getattr(mesh, "rank", 0) else shown("fzero.offload('auto')", lambda: told[-1]):
        least = initial_options(left, mesh, budget.nbytes is not None)
        narrow = traced.pass_cache.narrowed(least)
        tiers = functools.partial(
            _Tiers, pass_cache_of, auto=auto, budget=budget, unified=mesh.unified_memory, progress=told.append
        )
        try:
            options, why = tiers(least, narrow).best()
        except BudgetError:
            if narrow == least:
                raise
            options, why = tiers(narrow, narrow).best()
    placement, options = options.offloaded or TierPlacement(), replace(options, offloaded=None)
    chosen = PlanDecision("offload", str(placement) if any(map(any, placement)) else "nothing", why)
    return Resolved(_with_records(left, placement, auto), (chosen,), built[placement], options)


def _with_records(step: Step, placement: TierPlacement, auto: Offload) -> Step:
    """Returns the step with additional transforms for this placement, in the canonical order."""
    records = placement.records(auto)
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
    """The search for the placement of everything.

    Attributes:
        pass_cache_of: returns the programs of the step with this placement.
        least: the options that take as little memory as possible, wherever the update runs.
        narrow: the same with fewer values in flight, which is slower (`PassCache.narrowed`).
        auto: the configuration to resolve.
        budget: the budgets to fit.
        unified: whether host and device share one memory, so that nothing is sent to the host.
        progress: is called with a progress message after each try.
        found: the seconds of the steps that fit, by their options.
        besides: bytes of device and host that programs took in addition to their lower bound, by the options that such
            programs share.
    """

    pass_cache_of: Callable[[TierPlacement], PassCache]
    least: Options
    narrow: Options
    auto: Offload
    budget: Budget
    unified: bool
    progress: Callable[[str], object]
    found: dict[Options, float] = field(default_factory=dict)
    besides: dict[Any, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def build(options: Options) -> tuple[Program, ...]:
            return (self.pass_cache_of(options.offloaded or TierPlacement())(replace(options, offloaded=None)),)

        self.search, self.usual = Search(build, self.budget), (0.0, 0.0)

    def best(self) -> tuple[Options, str]:
        """Returns the options of the fastest step that fits, with its placement, and the reason."""
        if self._try(self.least):
            return self.least, "the step fits unchanged"
        if self.narrow != self.least and self.budget.filled(self.search.cost(self.least).peaks) < NEARLY:
            self._try(self.narrow)
        placements = self._placements()
        # Without gradients on disk, which a loop over micro-batches rejects.
        most = placements[-1]._replace(gradients=(0.0, 0.0))
        program = self.pass_cache_of(most).before("gradients", self.least)
        self.sizes = sizes_of(program, self.budget.device, self.budget.backend)
        # after a loop, there is no computation left to overlap with
        self.speculates = self.sizes.iterations == 1 and bool(speculate_pass.useful_tiers(program))
        bounds = {way: self._bound(way) for placement in placements for way in self._ways(placement)}
        # in the same order on every rank: among equal candidates, the one that moves least comes first
        bounds = dict(sorted(bounds.items(), key=lambda x: (x[1].likely, sum(map(sum, x[0].offloaded)))))
        for number in range(2 * MOST_TRIED):
            if (options := self._next(bounds, number)) is None:
                break
            self._try(options, bounds[options])
        if not self.found:
            raise self._unmet(bounds)
        best, *others = sorted(self.found, key=self.found.__getitem__)
        why = [f"{duration(self.found[best])} a step predicted, the fastest that fits"]
        if self.sizes.copies and any(best.offloaded.params):
            why.append("params are the compute copies: the others stay on the device")
        return best, "; ".join([*why, *(f"{o.offloaded}: {duration(self.found[o])}" for o in others[:2])])

    def _next(self, bounds: Mapping[Options, LowerBound], number: int) -> Options | None:
        """Returns the next candidate to try, in the order of the bounds; None if none could be faster, or enough were
        tried. `number`: how many were tried before."""
        left = [c for c in bounds if c not in self.search.tried]
        options = next((c for c in left if not self.budget.over(self._expected(c, bounds[c]))), None)
        if not self.found and (options is None or number >= UNTIL_FOUND):
            # the one that leaves the most room, because programs differ in what they take besides the bound
            options = min(left, key=lambda c: self.budget.filled(self._expected(c, bounds[c])), default=None)
        ops = sum(len(cost.program.instructions) for cost in {*self.search.tried.values()})
        enough = ops > MOST_OPS or number > MOST_TRIED if self.found else ops > 3 * MOST_OPS
        least = min(self.found.values(), default=math.inf)
        return None if options is None or enough or bounds[options].seconds > (1 - GAIN) * least else options

    def _placements(self) -> list[TierPlacement]:
        """Returns the rungs of the ladder; the last one moves everything."""
        of = self.auto.of

        def pairs(role: str, parts: int) -> list[Pair]:
            host = 0 if self.unified or role not in of else parts
            disk = parts if self.auto.path and role in of and role != "activations" else 0
            ways = ((h / parts, d / parts) for h in range(host + 1) for d in range(disk + 1) if h + d <= parts)
            return sorted(ways, key=sum)

        held = (0.0, 1.0) if "gradients" in of and self.auto.path and self.budget.host is not None else (0.0,)
        found: dict[TierPlacement, None] = {}
        for state in pairs("opt_state", FINEST):
            with_it = [(0.0, 0.0), *([state] if "params" in of else [])]
            is_off = sum(state) == 1 or "opt_state" not in of
            for params in pairs("params", FINEST // 2 if "opt_state" in of else FINEST) if is_off else with_it:
                for activations in pairs("activations", 2):
                    found |= dict.fromkeys(TierPlacement(state, params, activations, (0.0, n)) for n in held)
        found.pop(TierPlacement())
        return sorted(found, key=lambda placement: sum(map(sum, placement[:3]))) or [TierPlacement()]

    # --- the cost of a candidate ---

    def _ways(self, placement: TierPlacement) -> list[Options]:
        """Returns the open options for updates, held gradients and speculative updates. Either all updates run on the
        host or, if that is open, none; mixtures are tried afterwards."""
        if not self._is_possible(placement):
            return []
        open_side = any(placement.opt_state) and not self.unified and self.auto.update_on == "auto"
        grads = GRADS if self.sizes.iterations > 1 else ("update", "host") if self.sizes.grads else ("update",)
        return [
            replace(self.least, host_share=share, grads=waiting, speculative=tiers, offloaded=placement)
            for tiers in ((), *self._speculations(placement))
            for share in (ENDS if open_side else ENDS[:1])
            for waiting in (("update",) if self.unified or placement.gradients[1] else grads)
        ]

    def _is_possible(self, placement: TierPlacement) -> bool:
        """Whether the step has what is moved, and gradients that are moved can be held until the update."""
        held = any(placement.gradients)
        if held and (self.sizes.iterations > 1 or self.unified):
            return False
        return not (any(placement.activations) and not self.sizes.activations) and not (held and not self.sizes.grads)

    def _speculations(self, placement: TierPlacement) -> Iterator[tuple[str, ...]]:
        """The sets of tiers whose state may have speculative updates."""
        state, (host, disk) = any(placement.opt_state), (any(of[i] for of in placement[:2]) for i in range(2))
        # copies in host memory need a host budget
        able = (state and disk, state and host and self.budget.host is not None)
        for tiers, is_able in zip(speculate_pass.TIERS, able, strict=True):
            if is_able and self.speculates:
                yield tiers

    def _bound(self, options: Options) -> LowerBound:
        on_host = options.host_share > 0 and self.auto.update_on != "device"
        early = speculative_shares(options.speculative, options.offloaded, bool(self.sizes.copies))
        return self.sizes.lower_bound(options.offloaded, on_host, options.grads, self.budget.device, early)

    def _expected(self, options: Options, bound: LowerBound) -> tuple[int, int, int]:
        """Returns the peaks of a candidate that exceeds its lower bound as much as the last similar candidate did; if
        there was none, as the candidate did that exceeded it least."""
        device, host = next(filter(None, map(self.besides.get, _kinds(options))), self.usual)
        return int(bound.device + device), int(bound.host + host), int(bound.disk)

    def _try(self, options: Options, bound: LowerBound | None = None) -> bool:
        """Makes the program of a candidate, and returns whether it fits."""
        device, host, _ = self.search.cost(options).peaks
        if bound is not None:
            self.besides |= dict.fromkeys(_kinds(options), (device - bound.device, host - bound.host))
            device, host = (max(0.0, min(x)) for x in zip(*self.besides.values(), strict=True))
            self.usual = device, host
        if fits := self.search.fits(options):
            self.found[options] = self.search.seconds(options)
        best = min(self.found, key=self.found.__getitem__, default=None)
        told = (
            f"best {duration(self.found[best])} a step: {best.offloaded or 'nothing moved'}"
            if best
            else "none fits yet"
        )
        self.progress(f"{len(self.search.tried)} tried, {told}")
        return fits

    def _unmet(self, bounds: Mapping[Options, LowerBound]) -> BudgetError:
        """Returns the error if nothing fits. It lists, for each combination of tiers, the candidate that exceeds the
        budgets the least."""
        tiers = lambda options: any(disk for _, disk in options.offloaded or ())  # noqa: E731
        known = {*map(tiers, self.search.tried)}
        for options in sorted(bounds, key=lambda c: bounds[c].peaks):
            # the least device memory, on tiers not tried yet
            if tiers(options) not in known:
                known.add(tiers(options))
                self._try(options, bounds[options])
        peaks = {options: self.search.cost(options).peaks for options in self.search.tried}
        least: dict[bool, Options] = {}  # by whether the disk is used
        for options in sorted(peaks, key=lambda c: (self.budget.over(peaks[c]), peaks[c][0])):
            least.setdefault(tiers(options), options)
        problems = []
        for options in least.values():
            needs = [
                f"{use.tier} {size(use.peak)}" + (f" of {size(use.limit)}" if use.limit is not None else "")
                for use in self.budget.uses(peaks[options])
                if use.peak
            ]
            problems.append(f"{options.offloaded or TierPlacement()}: {', '.join(needs)}")
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


def _kinds(options: Options) -> tuple[Any, Any]:
    """Returns keys that are shared by options which take similar amounts in addition to their bounds, the most specific
    first: the same tiers with the same updates, and the same tiers."""
    tiers = tuple((host > 0, disk > 0, host + disk == 1) for host, disk in options.offloaded)
    return replace(options, offloaded=tiers), tiers
