"""Explains the decisions about a program that a budget has forced, and the memory of a program that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fzero._utils.units import exact_size, size
from fzero.compiler.options import Options
from fzero.compiler.overlap import ScheduleOptions
from fzero.errors import BudgetError
from fzero.ir.ops.transfers import AllReduce, AllToAll, ReduceScatter
from fzero.ir.program import Instruction, Program
from fzero.plan.device_lookup import Device
from fzero.plan.memory import ROLE_NAMES
from fzero.plan.plan import Plan, PlanDecision
from fzero.plan.render import brief
from fzero.transforms.compress import Compress
from fzero.transforms.offload import blocks_updated_on_host
from fzero.transforms.remat import Remat
from fzero.transforms.transform import find
from fzero.transforms.zero import keeps_gathers


class TierUse(NamedTuple):
    """The bytes that a step takes of a tier at its peak, and the limit; None: unlimited."""

    tier: str
    peak: int
    limit: int | None

    @property
    def over(self) -> int:
        """The bytes beyond the limit."""
        return 0 if self.limit is None else max(0, self.peak - self.limit)


@dataclass(frozen=True)
class Budget:
    """The bytes that each rank may use on the device (`nbytes`), on the host and on disk; None: unlimited.

    It also has the device whose transfer and compute rates predict the step, and the backend that the program is for.
    On a mesh whose host and device share one memory, the host's bytes count for the device.
    """

    nbytes: int | None
    device: Device
    backend: str = "inductor"
    host: int | None = None
    disk: int | None = None

    @property
    def limits(self) -> tuple[int | None, int | None, int | None]:
        """The limits of device, host and disk."""
        return self.nbytes, self.host, self.disk

    def uses(self, peaks: tuple[int, int, int]) -> list[TierUse]:
        """The peaks of device, host and disk together with their limits."""
        return [TierUse(t, peaks[i], self.limits[i]) for i, t in enumerate(("device", "host", "disk"))]

    def over(self, peaks: tuple[int, int, int]) -> int:
        """The bytes beyond the limits of all tiers; 0 if the step fits."""
        return sum(use.over for use in self.uses(peaks))

    def filled(self, peaks: tuple[int, int, int]) -> float:
        """The largest share of a tier's limit that is used."""
        shares = (use.peak / max(1, use.limit) for use in self.uses(peaks) if use.limit is not None)
        return max(shares, default=0.0)


def decided(program: Program, options: Options, budget: Budget | None) -> tuple[PlanDecision, ...]:
    """Returns the decisions about a program that has been chosen. Without a budget, they only concern the gradients of
    micro-batches."""
    limited = budget is not None and budget.nbytes is not None
    found = [*_gathered_once(program, options, limited), *_of_micro_batches(program, options)]
    formats = zip(options.wire, options.wire_because, strict=True)
    found += [PlanDecision(f"compress over {x.axis}", str(x), why) for x, why in formats]
    if limited:
        spec = find(program.transforms, Remat)
        auto = spec is not None and spec.policy == "auto"
        why = "the share of activation memory that fits and is fastest" if auto else "the step says so"
        kept = options.remat if isinstance(options.remat, str) else f"{options.remat:.3g}"
        found = [PlanDecision("remat", kept, why), *found, *_of_order(options.order)]
    if options.grads != "update":
        host = options.grads == "host"
        why = "wherever their update runs: the device has no room for them"
        why = why if host else "sums over micro-batches: it is faster"
        found.append(PlanDecision("gradients wait", f"on the {'host' if host else 'device'}", why))
    if options.speculative:
        why = "updates of state that is not stored on the device do not wait for the norm of all gradients; they are "
        found.append(PlanDecision("update", "speculative", f"{why}rolled back and repeated if the norm changes them"))
    if options.share_because:
        on_host, num = blocks_updated_on_host(program)
        sides = {num: f"all {num} blocks on the host", 0: f"all {num} blocks on the device"}
        where = sides.get(on_host, f"{on_host} of {num} blocks on the host")
        found.append(PlanDecision("update_on", where, options.share_because))
    return tuple(found)


def _gathered_once(program: Program, options: Options, limited: bool) -> Iterator[PlanDecision]:
    if (once := keeps_gathers(program.transforms)) is not None:
        why = "as many blocks as fit and are fastest" if limited else "of all blocks: there is no budget"
        why = why if once.least < once.most else "the step says so"
        why = f"the share of blocks whose shards stay gathered over {once.axis}: {why}"
        yield PlanDecision("gathered once a step", f"{options.secondary_shard:.3g}", why)


def _of_micro_batches(program: Program, options: Options) -> Iterator[PlanDecision]:
    for loop in (op for op in program.instructions if op.op == "loop"):
        within = _axes_reduced(loop.body, {ReduceScatter.name})
        later = [a for a in _axes_reduced(program.instructions, _REDUCES) if a not in within]
        why = options.because if within or options.full_grads else "the stage accumulates them unsharded"
        how = "reduced after every micro-batch" if within else "reduced once a step"
        if within and later:
            how = f"reduced over {', '.join(within)} after every micro-batch, over {', '.join(later)} once a step"
        why = f"{how}: {why or 'it takes least, and there is no budget'}"
        yield PlanDecision("gradients", "shards" if within else "whole", why)


def _axes_reduced(ops: Sequence[Instruction], kinds: Collection[str]) -> list[str]:
    """Returns the axes over which ops of these kinds reduce, or exchange encoded summands of a reduction."""
    reduces = (x for x in ops if x.op in kinds or (x.op == AllToAll.name and x.by == Compress.name))
    return list(dict.fromkeys(a for x in reduces for a in x.axes))


def _of_order(order: ScheduleOptions) -> Iterator[PlanDecision]:
    why = "serve the forward and the backward of a block: as many as fit and save time"
    yield PlanDecision("shared gathers", str(order.shared), why)
    if order.narrow:
        why = "gathers start when they are needed, and gradients are reduced one by one: nothing else fits"
        yield PlanDecision("values in flight", "as few as possible", why)
    if order.late_sums:
        why = "a micro-batch's gradients are reduced while the next block computes: faster"
        yield PlanDecision("sums", "a block later", why)


def unmet(program: Program, found: Plan, budget: Budget, advice: Sequence[str], rows: int) -> BudgetError:
    """Returns the error of a step whose smallest plan does not fit its budgets.

    Args:
        program: the program that takes the least memory.
        found: its plan.
        budget: the budget that it does not fit.
        advice: ways to lower the peak of the device.
        rows: the number of samples that a rank computes with at once.
    """
    problems, named = [], {"device": "", "host": " of host memory", "disk": " on disk"}
    for use in budget.uses((found.peak_bytes, found.host_peak_bytes, found.disk_bytes)):
        if use.limit is not None and use.over:
            needs = f"a rank needs {size(use.peak)}{named[use.tier]}"
            problems.append(f"{needs}, {exact_size(use.over)} more than the {size(use.limit)} it may have")
            if use.tier == "device":
                problems += [f"of a pipeline: {program.notes[-1]}"] if found.stages else []
                problems += [f"at: {brief(found.peak_line.text.strip(), 100)}", *filling(program, found)]
    over = budget.nbytes is not None and found.peak_bytes > budget.nbytes
    fixes = ["apply the transform that lowers it most"] if advice else []
    host = budget.host is not None and found.host_peak_bytes > budget.host
    if host and found.host_breakdown["gradients"] > FEW * found.host_peak_bytes:
        layerwise = (
            ", with fz.accumulate(n, schedule='layerwise')"
            if any(op.op == "loop" for op in program.instructions)
            else ""
        )
        fixes += [f"let gradients wait on disk (fz.offload('nvme', 'gradients', path=DIR){layerwise})"]
    fixes += ["use a smaller batch"] if over and rows > 1 and share_of(found, WITH_BATCH) > FEW else []
    return BudgetError(
        "memory_budget",
        "the step does not fit",
        [*problems, *advice],
        ", ".join([*fixes, "or raise the budget"]).removeprefix("or "),
    )


WITH_BATCH = ("batch", "saved", "activations", "temporaries")
"""Roles of bytes that grow with the batch."""
FEW = 0.05  # share of the peak: smaller roles are not worth advice


def share_of(found: Plan, roles: Sequence[str]) -> float:
    """The share of the peak that some roles take."""
    return sum(found.breakdown[role] for role in roles) / max(1, found.peak_bytes)


def filling(program: Program, found: Plan) -> list[str]:
    """Returns the roles that fill the device's memory at the peak, the largest first, and the reason why many gradients
    are held, if they are."""
    why = waiting(program) if share_of(found, ("gradients", "idle_pool")) > FEW else None
    return [f"there: {_listed(found.breakdown)}", *([f"gradients: {why}"] if why else [])]


def filling_host(found: Plan) -> list[str]:
    """Returns the roles that fill the host's memory, the largest first."""
    return [f"on the host: {_listed(found.host_breakdown)}"]


def _listed(breakdown: Mapping[str, int]) -> str:
    return ", ".join(
        f"{ROLE_NAMES[role]} {size(n)}" for role, n in sorted(breakdown.items(), key=lambda item: -item[1]) if n
    )


_REDUCES = (ReduceScatter.name, AllReduce.name)


def waiting(program: Program) -> str | None:
    """Returns the reason why gradients are held until the backward is over, if they are."""
    if any(op.op == "loop" for op in program.instructions):
        return "gradients of all blocks are accumulated over the micro-batches of a loop"
    backward = [i for i, op in enumerate(program.instructions) if op.is_backward]
    updates = [i for i, op in enumerate(program.instructions) if op.by == "optimizer" and op.writes and op.fn]
    # An update between two backwards shows that gradients are used as soon as they are made.
    if len(backward) < 2 or len(updates) < 2 or min(updates) < max(backward):
        return None
    return (
        "all updates wait for a value computed from all gradients, such as "
        "the norm of clip_by_global_norm; without it each is "
        "used as it is made"
    )
