"""Lowers a step to a program: every arrow of the design's picture, in order.

    step + example batch -- trace --> base program -- passes (fzero/passes/pipeline.py) --> finished program

After every pass the program is verified. Under a memory budget the arrows after the trace are gone through for several
choices (fzero/lowering/variants.py); the best is taken (fzero/lowering/budget.py) and verified. Nothing here needs
devices: `lower` works for any mesh on abstract tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.arguments import accepts_none
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError, message
from fzero.layout import Leaf, torn_ties
from fzero.lowering.auto import check_auto, choose_tiers
from fzero.lowering.base_program import lower_eval, lower_train
from fzero.lowering.budget import ENDS, FEW, WITH_BATCH, Budget, choose, choose_share, decided, fastest, share_of, unmet
from fzero.lowering.layouts import (
    abstract,
    abstract_params,
    auto_of,
    batch_inputs,
    compute_leaves,
    extra_leaves,
    gradient_leaves,
    mirrors,
    offloads,
    opt_state_inputs,
    params_inputs,
    precision_of,
    zero_of,
)
from fzero.lowering.training import Precision, Training
from fzero.lowering.variants import Variants, closed, verified
from fzero.mesh import AbstractMesh, Mesh
from fzero.passes.choice import Choice
from fzero.passes.pipeline import FUSE, added, copying, sharding
from fzero.passes.zero import keeps_gathers
from fzero.plan.devices import Device, get_device
from fzero.plan.plan import Decision, Plan, peak_bytes, plan
from fzero.precision.statistics import Watched
from fzero.program.ir import Program
from fzero.program.lines import Inputs
from fzero.progress import Progress
from fzero.step import EvalStep, Step
from fzero.step.checks import check_arguments, check_params, wants_key
from fzero.trace.record import uncollected
from fzero.transforms import accumulate, remat, shard
from fzero.transforms.base import find
from fzero.transforms.offload import Offload, offload, tiers_of
from fzero.transforms.once_a_step import OnceAStep
from fzero.transforms.precision import begun, mixed_precision
from fzero.units import parse_budgets, size

LINES_FOR_ADVICE = 4_000
"""Of the programs that are lowered to say what would make a step fit: for a model of 32 layers, two or three programs
and some seconds."""


@dataclass(frozen=True)
class Lowered:
    """A step lowered for a mesh: its programs, and the structures of what goes in and comes out.

    `programs` is the set of them, by stage: every rank lowers all, all ranks compare all, each runs its own, `program`.
    There is one stage, of all ranks.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> lowered = fz.lower(fz.shard_params(step), fz.AbstractMesh(data=8), params, batch, device="h100")
        >>> fz.fits(lowered.plan, "80GB"), len(lowered.program.lines) > 10
        (True, True)
    """

    programs: tuple[Program, ...]
    params: Inputs
    opt_state: Inputs | None
    batch: Inputs
    structure: tree.TreeSpec  # of the metrics, or of what an evaluation returns
    budget: Budget | None = None  # with nothing but rates where there is none
    choice: Choice = field(default_factory=Choice)  # what the budget chose
    device: Device | None = None  # that `plan` is for, and its backend
    backend: str = "inductor"
    chosen: tuple[Decision, ...] = ()  # before it was lowered
    watched: Watched | None = None  # the blocks that `mixed_precision(watch=True)` watches
    # the programs on the way, by the pass that made each
    stages: Callable[[], Mapping[str, Program]] = field(default=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return str(self.program)

    @property
    def program(self) -> Program:
        """The program that this rank runs."""
        (program,) = self.programs
        return program

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks that `metrics["precision"]` is about, in its order."""
        return () if self.watched is None else self.watched.names

    def after(self, name: str) -> Program:
        """The program that a pass made on the way: one of fzero/passes/pipeline.py, or a transform's own.

        Raises:
            FzeroValueError: no such pass, or none that a step of this kind goes through.
        """
        stages = self.stages()
        if name not in stages:
            raise FzeroValueError(message("lower", f"no pass {name!r}", fix=f"one of {', '.join(stages)}"))
        return stages[name]

    @functools.cached_property
    def plan(self) -> Plan:
        """The cost of a step on each rank: memory, bytes on every channel, time; on the device and for the backend that
        it was lowered for."""
        return self.plan_on(self.device, self.backend)

    def plan_on(self, device: Device | str | None = None, backend: str = "inductor") -> Plan:
        """As `plan`, of the same program with other rates: those of a `Device`, of a known one by name ("h100", …), or
        of a calibration file."""
        return plan(
            self.program,
            device,
            backend=backend,
            decisions=(*self.chosen, *decided(self.program, self.choice, self.budget)),
        )


def lower(
    step: Step | EvalStep,
    mesh: AbstractMesh,
    params: Any,
    batch: Any,
    *,
    memory_budget: int | str | None = None,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    device: Device | str | None = None,
    backend: str = "inductor",
) -> Lowered:
    """The program of a step on a mesh, from abstract values: no process group, no memory.

    Args:
        step: a training or evaluation step with its transforms.
        mesh: a `Mesh`, or an `AbstractMesh` of devices one does not have.
        params: a pytree of tensors with the shapes of the whole leaves (meta tensors will do), or a function of a key
            that returns one.
        batch: one rank's batch: a pytree of tensors (meta tensors will do). For an evaluation the tuple of its
            arguments.
        memory_budget: bytes of each rank, or text ("80GB"): the program that is predicted to be fastest within it. By
            default the one that keeps at most two blocks' parameters whole.
        host_budget, disk_budget: likewise, of the host's memory, where it is another than the device's, and of scratch
            files. What they are is `Plan.host_peak_bytes` and `disk_bytes`. With a host budget its room is used: what
            rests there may then be updated on a guess.
        device: that the plan and the budget are for, a `Device`, the name of a known one ("h100", …), or the path of a
            calibration file: an abstract mesh is one of such devices. By default this machine's, or the mesh's.
        backend: likewise.

    Raises: everything that can be wrong with a step, a transform or a batch, before anything runs; a `BudgetError` if
        it does not fit.

    A step with `offload("auto")` is resolved first, for this batch and these budgets: `plan.decisions` says to what,
    and why.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1)))
        >>> params, batch = {"w": torch.empty(4, 3, device="meta")}, torch.empty(2, 4, device="meta")
        >>> lowered = lower(step, fz.AbstractMesh(data=2), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start")]
        ['all_gather_start', 'all_reduce_start', 'reduce_scatter_start', 'all_reduce_start']
    """
    if not isinstance(step, (Step, EvalStep)):
        raise FzeroTypeError(
            message(
                "lower",
                f"lowers a step, not {type(step).__name__}",
                fix="wrap the loss: fz.train_step(loss_fn, optimizer)",
            )
        )
    if not isinstance(mesh, AbstractMesh):
        raise FzeroTypeError(
            message(
                "lower",
                f"a mesh is made by make_mesh or AbstractMesh, not {type(mesh).__name__}",
                fix="e.g. fz.AbstractMesh(data=8)",
            )
        )
    if isinstance(step, EvalStep) and not isinstance(batch, tuple):
        raise FzeroTypeError(
            message(
                "lower",
                f"the batch of an evaluation is the tuple of its arguments, not {type(batch).__name__}",
                fix="pass (batch,)",
            )
        )
    if callable(params):
        params = abstract(params)
    check_params(params)
    rates = device if isinstance(device, Device) else get_device(device, mesh.device_type)
    kind = "cuda" if rates.asynchronous else "cpu"
    if device is not None and type(mesh) is AbstractMesh and mesh.device_type != kind:
        mesh = mesh.of_type(kind)
    step = begun(step, mesh.device if isinstance(mesh, Mesh) else None)
    nbytes, host, disk = parse_budgets(memory_budget, host_budget, disk_budget)
    budget, chosen, traced = Budget(nbytes, rates, backend, host, disk), (), None
    with uncollected():
        if isinstance(step, Step):
            step, chosen, traced = resolve(step, mesh, params, batch_inputs(batch), budget)
        lowered = lower_inputs(step, mesh, params_inputs(step, mesh, params), batch_inputs(batch), budget, traced)
    return replace(lowered, device=rates, backend=backend, chosen=chosen)


def lower_inputs(
    step: Step | EvalStep,
    mesh: AbstractMesh,
    params: Inputs,
    batch: Inputs,
    budget: Budget | None = None,
    traced: Traced | None = None,
) -> Lowered:
    """As `lower`, from leaf tables. `traced`: what `resolve` has made of the step already."""
    if isinstance(step, EvalStep):
        check_arguments(step.fn, batch.structure.num_children)
        recorded, structure, _ = lower_eval(step.name, step.fn, params, batch, mesh, precision_of(step))
        cut = sharding(zero_of(step, mesh)).made(replace(recorded, transforms=step.transforms))
        before = {"trace": recorded, "shard": cut}
        for passed in added(cut):
            cut = before[passed.name] = passed.made(cut)
        stages = lambda: before | {passed.name: made for passed, made in closed(cut)}  # noqa: E731
        program = verified(cut, closed(cut))
        return _fitting(Lowered((program,), params, None, batch, structure, budget, stages=stages))
    traced = traced or _traced(step, mesh, params, batch)
    variants = traced.variants

    def lowered(choice: Choice) -> Lowered:
        program = variants.verified(choice)
        stages = lambda: traced.on_the_way | {passed.name: made for passed, made in variants.stages(choice)}  # noqa: E731
        return Lowered(
            (program,),
            params,
            traced.opt_state,
            batch,
            traced.structure,
            budget,
            choice,
            watched=traced.watched,
            stages=stages,
        )

    least, auto = _least(step, budget)
    if budget is None:
        return lowered(least)
    # copies there take room that must be given
    starts = [least, *(c for c in variants.guesses(least) if "host" not in c.guess or budget.host is not None)]
    if budget.nbytes is None:
        shared = [
            choose_share(variants, [replace(c, host_share=share) for share in ENDS], budget)
            if variants.open_side
            else c
            for c in starts
        ]
        choice = fastest(variants, shared, budget) or least
        return _fitting(lowered(choice))

    def best(grads: Sequence[str]) -> Choice | None:
        asked = [replace(start, grads=where) for start in starts for where in grads]
        once = keeps_gathers(step.transforms)
        open_stay = once is not None and once.least < once.most
        return choose(
            variants, asked, budget, auto=auto, loops=traced.loops, open_side=variants.open_side, open_stay=open_stay
        )

    *sooner, last = variants.grads(least)
    choice = (best(sooner) if sooner else None) or best([last])
    if choice is None:
        program = variants.verified(replace(least, grads=last))
        found = plan(program, budget.device, backend=budget.backend)
        advice = _advice(step, mesh, params, batch, budget, found) if found.peak_bytes > budget.nbytes else ()
        raise unmet(program, found, budget, advice, _rows(step, batch))
    return lowered(choice)


def base_program(step: Step, mesh: AbstractMesh, params: Any, batch: Any) -> Program:
    """The base program of a step (see lowering/base_program.py): what every other is made from.

    Args:
        step, mesh: as for `lower`.
        params: the tree, with whole leaves.
        batch: one rank's batch.
    """
    step = begun(step, mesh.device if isinstance(mesh, Mesh) else None)
    return _traced(step, mesh, params_inputs(step, mesh, params), batch_inputs(batch)).base


@dataclass(frozen=True)
class Traced:
    """The programs that a step can become, `base` before it is known what rests where, and the rest of what its trace
    told."""

    recorded: Program
    base: Program
    variants: Variants
    opt_state: Inputs
    structure: tree.TreeSpec
    loops: bool
    watched: Watched | None

    @property
    def on_the_way(self) -> dict[str, Program]:
        """The programs before those of the variants."""
        return {"trace": self.recorded, "fuse": self.base, "copies": self.variants.base}


def _traced(
    step: Step, mesh: AbstractMesh, params: Inputs, batch: Inputs, precision: Precision | None = None
) -> Traced:
    zero = zero_of(step, mesh)
    record_ = find(step.transforms, accumulate.Accumulate)
    num_micro = record_.num_micro_batches if record_ else 1
    shapes = record_.micro_shapes(batch.leaves) if record_ else [x.shape for x in batch.leaves]
    micro = replace(batch, leaves=tuple(replace(x, shape=shape) for x, shape in zip(batch.leaves, shapes, strict=True)))
    trains = step.trains(abstract_params(params))
    if not any(trains):
        raise FzeroValueError(
            message(
                "train_step", "no trainable parameters", fix="check `trainable`, and that parameters are floating point"
            )
        )
    opt_state = opt_state_inputs(step, mesh, params)
    with uncollected(), torch.inference_mode(False), torch.enable_grad():  # a step trains, wherever it is called
        program, structure, watched = lower_train(
            Training(
                name=step.name,
                loss_fn=step.loss_fn,
                optimizer=step.optimizer,
                has_aux=step.has_aux,
                wants_key=wants_key(step.loss_fn),
                params=params,
                trains=trains,
                mutates=None if step.mutable is None else step.mutates(abstract_params(params)),
                opt_state=opt_state,
                batch=micro,
                extras=extra_leaves(step, params),
                mesh=mesh,
                precision=precision or precision_of(step),
                num_parts=num_micro * math.prod(mesh.axes[a] for a in zero.batch_axes),
            )
        )
    base = FUSE.made(replace(program, transforms=step.transforms))
    paths = [x.path for x in batch.leaves]
    if (
        record_
        and record_.whole is not None
        and all(map(record_.cuts, batch.leaves))
        and (missed := accepts_none("whole", record_.whole, paths))
    ):
        raise FzeroValueError(
            message(
                "accumulate",
                "all leaves of the batch are cut",
                missed,
                "give a path as it stands here, or leave `whole` out",
            )
        )
    if record_ and (torn := torn_ties(paths, batch.ties, [record_.cuts(x) for x in batch.leaves], "whole")):
        fix = "give x.clone() for those that are to be whole"
        raise FzeroValueError(
            message(
                "accumulate", "leaves of the batch are one tensor, and `whole` accepts some of its paths", torn, fix
            )
        )
    cut = {
        x.path: x.shape
        for x in (batch.leaves[i] for i in batch.distinct)
        if num_micro > 1 and record_ and record_.cuts(x)
    }
    loops = num_micro > 1 and not (record_ and record_.vertical)
    variants = Variants(_with_copies(base, step, mesh, params), zero, num_micro, cut, _gradients(step, mesh, params))
    return Traced(program, base, variants, opt_state, structure, loops, watched)


def _gradients(step: Step, mesh: AbstractMesh, params: Inputs) -> dict[str, Leaf]:
    """The leaves that gradients wait in that wait on disk, by the path of their parameter."""
    return {params.leaves[i].path: leaf for i, leaf in gradient_leaves(step, mesh, params).items()}


def _with_copies(base: Program, step: Step, mesh: AbstractMesh, params: Inputs) -> Program:
    """The program with what is computed with beside the masters that rest off the device."""
    copies = {params.leaves[i].path: leaf for i, leaf in compute_leaves(step, mesh, params).items()}
    return copying(copies).made(base)


def _least(step: Step, budget: Budget | None) -> tuple[Choice, bool]:
    """The choice that takes least memory, and whether what blocks keep is open."""
    policy = (find(step.transforms, remat.Remat) or remat.Remat()).policy
    auto = policy == "auto"
    limited, once = budget is not None and budget.nbytes is not None, find(step.transforms, OnceAStep)
    stay = 0.0 if once is None else once.least if limited else once.most
    return Choice(0.0 if auto and limited else policy, stay=stay), auto


class Resolved(NamedTuple):
    """A step that leaves open no more what rests where, why it is so, and, if it was decided here, what it was traced
    to."""

    step: Step
    chosen: tuple[Decision, ...] = ()
    traced: Traced | None = None


def resolve(step: Step, mesh: AbstractMesh, params: Any, batch: Inputs, budget: Budget) -> Resolved:
    """The step with what its `offload("auto")` comes to in its place, and why; the step itself if it has none.

    Args:
        step, mesh: as for `lower`.
        params: the tree, with whole leaves.
        batch: that it is resolved for.
        budget: to fit.
    """
    auto = auto_of(step)
    if auto is None:
        return Resolved(step)
    check_auto(auto, budget.limits)
    left = replace(step, transforms=tuple(t for t in step.transforms if t != auto))
    inputs = params_inputs(left, mesh, params)
    traced = _traced(left, mesh, inputs, batch, precision_of(left))  # with whatever may rest elsewhere
    mirrored = mirrors(traced.opt_state.leaves, inputs)
    with_copies: dict[tuple[str, ...], Program] = {}
    built: dict[tuple[Offload, ...], Traced] = {}

    def with_(records: Sequence[Offload]) -> Step:
        return replace(left, transforms=tuple(sorted((*left.transforms, *records), key=lambda t: (t.order, str(t)))))

    def build(records: tuple[Offload, ...]) -> Variants:
        asked = with_(records)
        rests = params_inputs(asked, mesh, params)
        tiers = tiers_of(offloads(asked), rests.leaves, rests.ties, zero_of(asked, mesh).casts)
        on = {leaf.path: leaf.layout.tier for leaf in rests.leaves}
        on |= {
            leaf.path: tiers[i].opt_state
            for leaf, i in zip(traced.opt_state.leaves, mirrored, strict=True)
            if i is not None
        }
        copies = {rests.leaves[i].path: leaf for i, leaf in compute_leaves(asked, mesh, rests).items()}
        on |= {leaf.path: leaf.layout.tier for leaf in copies.values()}
        if tuple(copies) not in with_copies:
            with_copies[tuple(copies)] = copying(copies).made(traced.base)
        program, rest = (
            with_copies[tuple(copies)],
            lambda leaf: leaf.with_layout(tier=on.get(leaf.path, leaf.layout.tier)),
        )
        laid_out = replace(
            program, leaves={name: rest(leaf) for name, leaf in program.leaves.items()}, transforms=asked.transforms
        )
        variants = traced.variants.like(laid_out, _gradients(asked, mesh, rests))
        opt_state = replace(traced.opt_state, leaves=tuple(map(rest, traced.opt_state.leaves)))
        built[records] = replace(traced, variants=variants, opt_state=opt_state)
        return variants

    progress = Progress("fzero.offload('auto')") if not isinstance(mesh, Mesh) or mesh.rank == 0 else None
    try:
        records, decision = choose_tiers(build, _least(left, budget)[0], auto, budget, mesh.unified_memory, progress)
    finally:
        if progress is not None:
            progress.close()
    return Resolved(with_(records), (decision,), built[records])


def _fitting(lowered: Lowered) -> Lowered:
    """Raises if a program that leaves nothing open is over its budgets."""
    budget = lowered.budget
    if budget is not None and budget.limits != (None, None, None):
        found = lowered.plan_on(budget.device, budget.backend)
        if budget.over((found.peak_bytes, found.host_peak_bytes, found.disk_bytes)):
            raise unmet(lowered.program, found, budget, rows=_rows(None, lowered.batch))
    return lowered


def _rows(step: Step | None, batch: Inputs) -> int:
    """The rows of a rank's batch that are computed with at once."""
    found = find(step.transforms, accumulate.Accumulate) if step is not None else None
    return max((leaf.shape[0] for leaf in batch.leaves if leaf.shape), default=1) // (
        found.num_micro_batches if found else 1
    )


def _advice(step: Step, mesh: AbstractMesh, params: Inputs, batch: Inputs, budget: Budget, least: Plan) -> list[str]:
    """The least peaks with one transform more, the lowest first, of those that lower it; if none is enough, with those
    together. Of a large model few are tried: those that are about what takes the most."""
    num_lines = 0
    step = replace(step, transforms=tuple(remat.Remat(0.0) if t == remat.Remat("auto") else t for t in step.transforms))

    def peak(more: Step) -> int | None:
        nonlocal num_lines
        try:
            found = lower_inputs(more, mesh, params_inputs(more, mesh, abstract_params(params)), batch)
        except FzeroError:  # contradicts what is there, or cannot be had with this batch
            return None
        num_lines += len(found.program.lines)
        return peak_bytes(found.program, budget.device, budget.backend)[0]

    peaks: dict[Any, int] = {}
    for transform in _candidates(step, mesh, least):
        if num_lines > LINES_FOR_ADVICE:
            break
        more = _with(step, transform)
        if more is None or (
            isinstance(transform, shard.Parallel) and _sharded(more, mesh, params) == _sharded(step, mesh, params)
        ):
            continue
        if (n := peak(more)) is not None and n < least.peak_bytes:
            peaks[transform] = n
    best: dict[type, Any] = {}  # of each kind
    for transform in sorted(peaks, key=lambda transform: peaks[transform]):
        best.setdefault(shard.Parallel if isinstance(transform, shard.Parallel) else type(transform), transform)
    ordered = list(best.values())
    limit = budget.nbytes or 0
    fits = lambda n: f"{size(n)}{', which fits' if n <= limit else ''}"  # noqa: E731
    advice = [f"with fz.{transform}: {fits(peaks[transform])}" for transform in ordered]
    if len(ordered) > 1 and peaks[ordered[0]] > limit:
        together, all_ = [], step
        for transform in ordered:
            more = _with(all_, transform)
            together, all_ = ([*together, transform], more) if more is not None else (together, all_)
        if len(together) > 1 and (n := peak(all_)) is not None and n < peaks[ordered[0]]:
            names = ", ".join(f"fz.{transform}" for transform in together)
            advice.append(f"with {names} together: {fits(n)}")
    return advice


def _with(step: Step, transform: Any) -> Step | None:
    """The step with a transform more, in place of one of its kind that adds up micro-batches; None if it has it, or it
    cannot be had."""
    others = tuple(
        t
        for t in step.transforms
        if not (isinstance(transform, accumulate.Accumulate) and isinstance(t, accumulate.Accumulate))
    )
    try:
        more = transform(replace(step, transforms=others))
    except FzeroError:
        return None
    return None if more == step else more


def _sharded(step: Step, mesh: AbstractMesh, params: Inputs) -> list[tuple[tuple[str, ...], ...]]:
    """For each parameter the axes that its state, its gradient and itself are sharded over."""
    zero = zero_of(step, mesh)
    return [(zero.opt_state(leaf), zero.grads(leaf), zero.params(leaf)) for leaf in params.leaves]


def _candidates(step: Step, mesh: AbstractMesh, least: Plan) -> list[Any]:
    """Transforms that may lower the peak of a plan, those first that are about what takes the most of it."""
    found = list[tuple[float, Any]]()

    def about(roles: Sequence[str], *transforms: Any) -> None:
        found.extend((share, transform) for transform in transforms if (share := share_of(least, roles)) > FEW)

    state = ("opt_state", "params")
    # over the axes that something is sharded over already, or the fastest; and over all of them
    used = max((t.axes for t in step.transforms if isinstance(t, shard.Parallel) and t.stage), key=len, default=())
    several = tuple(a for a, n in reversed(mesh.axes.items()) if n > 1)
    every = (*used, *(a for a in several if a not in used))
    stages = (shard.shard_params, shard.shard_opt_state, shard.shard_grads)
    for axes in dict.fromkeys((used or several[:1], every)) if several else ():
        about((*state, "gradients"), *(make(axis=axes) for make in stages))
    about(state, *(offload(tier, of, **path) for tier, path in _tiers(mesh) for of in (state, "opt_state")))
    micro = find(step.transforms, accumulate.Accumulate)
    about(WITH_BATCH, remat.remat("full"), *(accumulate.accumulate(n) for n in (8, 2) if micro is None))
    if micro and not micro.vertical:
        about(("gradients",), replace(micro, vertical=True))
    if not mesh.unified_memory:
        about(("saved",), offload("cpu", "activations"))
    return [transform for _, transform in sorted(found, key=lambda pair: -pair[0])] + [mixed_precision("bf16")]


def _tiers(mesh: AbstractMesh) -> list[tuple[str, dict[str, Any]]]:
    """The tiers on which state may rest off the device."""
    return [("nvme", {"path": "DIR"})] if mesh.unified_memory else [("cpu", {})]
