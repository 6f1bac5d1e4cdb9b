"""Suggests how a step that exceeds its budget would fit, in one or two lines: transforms that lower its peak memory,
with the new peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fzero._utils.units import size
from fzero.compiler.budget_report import FEW, WITH_BATCH, Budget, share_of
from fzero.compiler.combined_transforms import zero_of
from fzero.errors import FzeroError
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh
from fzero.plan.plan import Plan, peak_bytes
from fzero.step import Step
from fzero.transforms import accumulate, remat
from fzero.transforms import zero as shard
from fzero.transforms.offload import offload
from fzero.transforms.precision import mixed_precision
from fzero.transforms.transform import find

OPS_FOR_ADVICE = 4_000
"""The number of ops of lowered programs after which no further transform is tried: two or three programs of a 32-layer
model, which take some seconds."""


def advise(
    step: Step, mesh: AbstractMesh, params: Inputs, budget: Budget, least: Plan, lowered: Callable[[Step], Program]
) -> list[str]:
    """Returns suggestions, each with its peak: the first transform found with which the step fits; if there is none,
    the one that lowers the peak most, and all that lower it together.

    The transforms that affect the roles with the most memory are tried first; for a large model only a few are tried.

    Args:
        step, mesh, params: a step that does not fit, its mesh and its parameters.
        budget: the budget that it exceeds.
        least: the plan of its program with the least memory.
        lowered: lowers another step for the same batch to its program with the least memory.
    """
    num_ops, limit = 0, budget.nbytes or 0
    step = replace(step, transforms=tuple(_least(t) for t in step.transforms))

    def peak(more: Step) -> tuple[int, int]:
        """Returns the peak bytes on the device and on the host."""
        nonlocal num_ops
        try:
            program = lowered(more)
        except FzeroError:  # contradicts a transform of the step, or is not possible with this batch
            return least.peak_bytes, 0
        num_ops += sum(1 for _ in program.walk())
        return peak_bytes(program, budget.device, budget.backend)[:2]

    def line(what: str, peak: tuple[int, int]) -> str:
        device, host = peak
        fits = ", which fits" if device <= limit else ""
        return f"with {what}: {size(device)}{fits}" + (f", and {size(host)} on the host" if host else "")

    best: dict[
        type, tuple[tuple[int, int], Any]
    ] = {}  # by kind; all ZeRO stages are one, because only one can be added
    for transform in candidates(step, mesh, least):
        if num_ops > OPS_FOR_ADVICE:
            break
        more = with_transform(step, transform)
        # Lowering is expensive, and a stage that shards nothing more cannot lower the peak.
        zero = isinstance(transform, shard.Parallel)
        if more is None or (zero and _sharded(more, mesh, params) == _sharded(step, mesh, params)):
            continue
        if (n := peak(more))[0] >= least.peak_bytes:
            continue
        if n[0] <= limit:
            return [line(f"fz.{transform}", n)]
        kind = shard.Parallel if zero else type(transform)
        best[kind] = min(best.get(kind, (n, transform)), (n, transform), key=lambda x: x[0])
    ordered = sorted(best.values(), key=lambda x: x[0])
    advice = [line(f"fz.{transform}", n) for n, transform in ordered[:1]]
    all_ = step
    for _, transform in ordered:
        all_ = with_transform(all_, transform) or all_
    if len(ordered) > 1 and (n := peak(all_))[0] < ordered[0][0][0]:
        together = ", ".join(f"fz.{transform}" for _, transform in ordered if transform in all_.transforms)
        advice.append(line(f"{together} together", n))
    return advice


def _least(transform: Any) -> Any:
    """Returns the transform with the option that takes the least memory, if it leaves one open."""
    if not isinstance(transform, remat.Remat) or transform.policy != "auto":
        return transform
    return replace(transform, policy=0.0)


def with_transform(step: Step, transform: Any) -> Step | None:
    """Returns the step with an additional transform; None if it already has it, or cannot have it.

    A different `accumulate` or `remat`, and lower ZeRO stages that the transform covers, are replaced.
    """

    def replaced(t: Any) -> bool:
        if isinstance(transform, shard.Parallel) and isinstance(t, shard.Parallel):
            return transform.covers(t)
        return any(isinstance(transform, kind) and isinstance(t, kind) for kind in (accumulate.Accumulate, remat.Remat))

    try:
        more = transform(replace(step, transforms=tuple(t for t in step.transforms if not replaced(t))))
    except FzeroError:
        return None
    return None if more == step else more


def _sharded(step: Step, mesh: AbstractMesh, params: Inputs) -> list[tuple[tuple[str, ...], ...]]:
    """Returns, for each parameter, the axes over which its optimizer state, its gradient and the parameter itself are
    sharded."""
    zero = zero_of(step, mesh)
    return [(zero.opt_state(leaf), zero.grads(leaf), zero.params(leaf)) for leaf in params.leaves]


def candidates(step: Step, mesh: AbstractMesh, least: Plan) -> list[Any]:
    """Returns transforms that may lower the peak of a plan, sorted by the share of the peak that they affect."""
    found = list[tuple[float, Any]]()

    def about(roles: Sequence[str], *transforms: Any) -> None:
        found.extend((share, transform) for transform in transforms if (share := share_of(least, roles)) > FEW)

    state = ("opt_state", "params")
    # over the axes over which something is sharded already, or the fastest axis; and over all axes
    used = max((t.axes for t in step.transforms if isinstance(t, shard.Parallel) and t.stage), key=len, default=())
    several = tuple(a for a, n in reversed(mesh.axes.items()) if n > 1)
    every = (*used, *(a for a in several if a not in used))
    stages = (shard.shard_params, shard.shard_opt_state, shard.shard_grads)
    for axes in dict.fromkeys((used or several[:1], every)) if several else ():
        about((*state, "gradients"), *(make(axis=axes) for make in stages))
    about(state, *(offload(tier, of, **path) for tier, path in _tiers(mesh) for of in (state, "opt_state")))
    micro = find(step.transforms, accumulate.Accumulate)
    about(WITH_BATCH, remat.remat("full"), *(accumulate.accumulate(n) for n in (8, 2) if micro is None))
    if micro and not micro.layerwise:
        about(("gradients",), replace(micro, schedule="layerwise"))
    if not mesh.unified_memory:
        about(("saved",), offload("cpu", "activations"))
    return [transform for _, transform in sorted(found, key=lambda pair: -pair[0])] + [mixed_precision("bf16")]


def _tiers(mesh: AbstractMesh) -> list[tuple[str, dict[str, Any]]]:
    """The tiers to which state can be offloaded."""
    return [("nvme", {"path": "DIR"})] if mesh.unified_memory else [("cpu", {})]
