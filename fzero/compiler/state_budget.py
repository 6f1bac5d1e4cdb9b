"""Checks whether the state of a step alone fits its budgets, before anything is traced, and suggests what would make it
fit: more ranks, a higher ZeRO stage, another tier.

[Note: state at rest] The state is stored during the whole step, so the peak is never lower than its bytes, whatever the
order of ops and whatever is recomputed. The bytes are a sum over the tables of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fzero._utils.units import exact_size, size
from fzero.compiler.budget_report import Budget
from fzero.compiler.combined_transforms import auto_of
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.state_layouts import opt_state_inputs
from fzero.compiler.state_slots import slots_of
from fzero.errors import BudgetError, FzeroError
from fzero.ir.from_graph import Inputs
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.step import Step
from fzero.transforms import zero


@dataclass(frozen=True)
class AtRest:
    """The bytes of the state on one rank's device between steps.

    Attributes:
        params, opt_state: the bytes of each; slots count as optimizer state.
        whole: the bytes of tensors that no axis shards.
        axes: the axes that shard the rest.
        ranks: the number of ranks along these.
    """

    params: int
    opt_state: int
    whole: int
    axes: tuple[str, ...]
    ranks: int

    @property
    def total(self) -> int:
        return self.params + self.opt_state

    def least_ranks(self, limit: int) -> int | None:
        """The number of ranks along `axes` with which the state would take no more than `limit` bytes; None if there is
        none."""
        if not self.axes or self.whole >= limit:
            return None
        # The smallest n with whole + (total - whole) * ranks / n <= limit.
        return math.ceil((self.total - self.whole) * self.ranks / (limit - self.whole))

    def __str__(self) -> str:
        return f"parameters {size(self.params)}, optimizer state {size(self.opt_state)}"


def at_rest(step: Step, mesh: AbstractMesh, params: Inputs) -> AtRest:
    """Returns the bytes of a step's state on one rank's device, from its tables of tensors."""
    slots = slots_of(step, mesh, params).inputs
    opt_state = (*opt_state_inputs(step, mesh, params).leaves, *slots.leaves)
    # With one memory, a leaf on the host takes it from the device.
    here = ("device", "host") if mesh.unified_memory else ("device",)

    def held(leaves: Sequence[Leaf]) -> list[tuple[Leaf, int]]:
        return [(x, x.shard_bytes(mesh)) for x in leaves if x.layout.tier in here]

    ours, theirs = held([params.leaves[i] for i in params.distinct]), held(opt_state)
    axes = max((x.layout.axes for x, _ in (*ours, *theirs)), key=len, default=())
    return AtRest(
        params=sum(n for _, n in ours),
        opt_state=sum(n for _, n in theirs),
        whole=sum(n for x, n in (*ours, *theirs) if not x.layout.axes),
        axes=tuple(axes),
        ranks=mesh.axis_size(tuple(axes)),
    )


def check_at_rest(step: Step, mesh: AbstractMesh, params: Any, budget: Budget) -> None:
    """Raises if the state alone does not fit. Nothing is traced.

    Args:
        step, mesh, params, budget: as for `shortage`.

    Raises:
        BudgetError: with the bytes, and ways to make it fit.
    """
    if (short := shortage(step, mesh, params, budget)) is not None:
        raise BudgetError("memory_budget", "the state alone does not fit", *short)


def shortage(step: Step, mesh: AbstractMesh, params: Any, budget: Budget) -> tuple[list[str], str] | None:
    """Returns problems and a fix if the state alone exceeds the budgets; None if it does not.

    Args:
        step: the step with its transforms; with `offload("auto")`, all of the state may leave the device.
        mesh: the devices that the budget is for.
        params: the tree of parameters.
        budget: the budget to fit. A tier without a limit holds everything.
    """
    auto = auto_of(step)
    step = replace(step, transforms=tuple(t for t in step.transforms if t != auto))
    limits = {"device": budget.nbytes}
    if auto is not None:
        limits |= {} if mesh.unified_memory else {"host": budget.host}
        limits |= {"disk": budget.disk} if auto.path else {}
    if None in limits.values():
        return None
    limit = sum(n for n in limits.values() if n is not None)
    found = at_rest(step, mesh, params_inputs(step, mesh, params))
    if found.total <= limit:
        return None
    has = f"the {size(limit)} it may have"
    if auto is not None:
        has += f" on all tiers ({', '.join(f'{tier} {size(n or 0)}' for tier, n in limits.items())})"
    problems = [f"between steps a rank stores {size(found.total)}, {exact_size(found.total - limit)} more than {has}"]
    problems += [f"there: {found}", *would_hold(step, mesh, params, found, limit)]
    if auto is None:
        return [*problems, *off_device(mesh, found)], "use more ranks, or move state off the device"
    disk = "" if auto.path else ', or give it a disk: fz.offload("auto", path=DIR)'
    return problems, f"use more ranks, or raise a budget{disk}"


def would_hold(step: Step, mesh: AbstractMesh, params: Any, found: AtRest, limit: int) -> list[str]:
    """Returns suggestions for less state on each rank: a higher ZeRO stage, or more ranks."""
    out = list[str]()
    axes = found.axes or tuple(a for a, n in mesh.axes.items() if n > 1)
    if axes and (more := _sharded(step, mesh, params, axes)) is not None and more.total < found.total:
        enough = "" if more.total <= limit else f", or less with {_ranks(more, limit)}"
        out.append(f"with fz.shard_params(axis={axes[0] if len(axes) == 1 else axes!r}): {size(more.total)}{enough}")
    elif (ranks := _ranks(found, limit)) is not None:
        out.append(f"with {ranks}: there are {found.ranks}")
    elif not axes:
        out.append(f"with fz.shard_params() over at least {math.ceil(found.total / limit)} ranks")
    return out


def off_device(mesh: AbstractMesh, found: AtRest) -> list[str]:
    """Returns suggestions of tiers that could take the state from the device. Gradients that are held on the host take
    additional memory."""
    if mesh.unified_memory:
        return [f"with fz.offload('nvme', ('opt_state', 'params'), path=DIR): {size(found.total)} of disk a rank"]
    more = "and room for gradients there"
    return [
        f"with fz.offload('cpu', ('opt_state', 'params')): at least {size(found.total)} of host memory a rank, {more}",
        f"with fz.offload('auto', path=DIR): at least {size(found.total)} of host memory and disk a rank, {more}",
    ]


def _sharded(step: Step, mesh: AbstractMesh, params: Any, axes: tuple[str, ...]) -> AtRest | None:
    # Replaces all other stages, with which this one might conflict.
    others = tuple(t for t in step.transforms if not isinstance(t, zero.Parallel))
    try:
        more = zero.shard_params(replace(step, transforms=others), axis=axes)
        return at_rest(more, mesh, params_inputs(more, mesh, params))
    except FzeroError:
        return None


def _ranks(found: AtRest, limit: int) -> str | None:
    ranks = found.least_ranks(limit)
    return None if ranks is None else f"at least {ranks} ranks along {' and '.join(map(repr, found.axes))}"
