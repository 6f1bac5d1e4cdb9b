"""From a step to a program: every arrow of the design's picture, in order.

    step + example batch -- trace --> base program -- one rewrite a transform --> -- cut the update --> -- order --> -- place in the pool -->

After every arrow the program is verified. Under a memory budget the arrows after the trace are gone through for several choices (fzero/variants.py);
the best is taken (fzero/budget.py) and verified. Nothing here needs devices: `lower` works for any mesh on abstract tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fzero import compat, tree
from fzero.auto import check_auto, choose_tiers
from fzero.blocks import blocks_shape, has_blocks
from fzero.budget import Budget, Choice, choose, choose_side, decided, unmet
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError, TransformError, message
from fzero.layout import COMPUTE, Layout, Leaf, ties
from fzero.mesh import AbstractMesh
from fzero.program import fuse
from fzero.program.base import Training, lower_eval, lower_train
from fzero.program.ir import Program
from fzero.program.record import Recorded, record, uncollected
from fzero.program.results import Remembering
from fzero.program.trace import Inputs
from fzero.program.verify import verify
from fzero.schedule.check import check
from fzero.schedule.devices import Device, get_device
from fzero.schedule.order import Order
from fzero.schedule.plan import Decision, Plan, parse_bytes, plan
from fzero.step import EvalStep, Step, check_batch, check_init, check_params, wants_key
from fzero.transforms import accumulate, compute, remat, shard, spread
from fzero.transforms.base import find
from fzero.transforms.offload import Offload, tiers_of
from fzero.transforms.precision import MixedPrecision, mixed_precision
from fzero.variants import Variants, finished


@dataclass(frozen=True)
class Lowered:
    """A step lowered for a mesh: its program, and the structures of what goes in and comes out."""

    program: Program
    params: Inputs
    opt_state: Inputs | None
    batch: Inputs
    structure: tree.TreeSpec  # of the metrics, or of what an evaluation returns
    budget: Budget | None = None  # with nothing but rates where there is none
    choice: Choice = field(default_factory=Choice)  # what the budget chose
    device: Device | None = None  # that `plan` is for, and its backend
    backend: str = "inductor"
    chosen: tuple[Decision, ...] = ()  # before it was lowered

    def __str__(self) -> str:
        return str(self.program)

    @functools.cached_property
    def plan(self) -> Plan:
        """What a step costs each rank: memory, bytes on every channel, time; on the device and for the backend that it was lowered for."""
        return self.plan_on(self.device, self.backend)

    def plan_on(self, device: Device | str | None = None, backend: str = "inductor") -> Plan:
        """As `plan`, of the same program with other rates: those of a `Device`, of a known one by name ("h100", …), or of a calibration file."""
        return plan(self.program, device, backend=backend, decisions=(*self.chosen, *decided(self.program, self.choice, self.budget)))


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
        params: a pytree of tensors with the shapes of the whole leaves (meta tensors will do), or a function of a key that returns one.
        batch: one rank's batch: a pytree of tensors (meta tensors will do). For an evaluation the tuple of its arguments.
        memory_budget: bytes of each rank, or text ("80GB"): the program that is predicted to be fastest within it. By default the one that keeps at
            most two blocks' parameters whole.
        host_budget, disk_budget: likewise, of the host's memory, where it is another than the device's, and of scratch files. What they are is
            `Plan.host_peak_bytes` and `disk_bytes`.
        device: that the plan and the budget are for, a `Device`, the name of a known one ("h100", …), or the path of a calibration file: an abstract mesh
            is one of such devices. By default this machine's, or the mesh's.
        backend: likewise.

    Raises: everything that can be wrong with a step, a transform or a batch, before anything runs; a `BudgetError` if it does not fit.

    A step with `offload("auto")` is resolved first, for this batch and these budgets: `plan.decisions` says to what, and why.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1)))
        >>> params, batch = {"w": torch.empty(4, 3, device="meta")}, torch.empty(2, 4, device="meta")
        >>> lowered = lower(step, fz.AbstractMesh(data=2), params, batch)
        >>> [line.op for line in lowered.program.lines if line.op.endswith("start")]
        ['all_gather_start', 'all_reduce_start', 'reduce_scatter_start', 'all_reduce_start']
    """
    if not isinstance(step, (Step, EvalStep)):
        raise FzeroTypeError(message("lower", f"lowers a step, not {type(step).__name__}", fix="wrap the loss: fz.train_step(loss_fn, optimizer)"))
    if not isinstance(mesh, AbstractMesh):
        raise FzeroTypeError(message("lower", f"a mesh is made by make_mesh or AbstractMesh, not {type(mesh).__name__}", fix="e.g. fz.AbstractMesh(data=8)"))
    if isinstance(step, EvalStep) and not isinstance(batch, tuple):
        raise FzeroTypeError(message("lower", f"the batch of an evaluation is the tuple of its arguments, not {type(batch).__name__}", fix="pass (batch,)"))
    if callable(params):
        params = abstract(params)
    check_params(params)
    rates = device if isinstance(device, Device) else get_device(device, mesh.device_type)
    kind = "cuda" if rates.asynchronous else "cpu"
    if device is not None and type(mesh) is AbstractMesh and mesh.device_type != kind:
        axes: dict[str, Any] = mesh.axes
        mesh = AbstractMesh(device_type=kind, **axes)
    nbytes, host, disk = (None if size is None else parse_bytes(size) for size in (memory_budget, host_budget, disk_budget))
    budget, chosen = Budget(nbytes, rates, backend, host, disk), ()
    if isinstance(step, Step):
        step, chosen = resolve(step, mesh, params, batch_inputs(batch), budget)
    lowered = lower_inputs(step, mesh, params_inputs(step, mesh, params), batch_inputs(batch), budget)
    return replace(lowered, device=rates, backend=backend, chosen=chosen)


def lower_inputs(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs, batch: Inputs, budget: Budget | None = None) -> Lowered:
    """As `lower`, from leaf tables."""
    if isinstance(step, EvalStep):
        program, structure = lower_eval(step.name, step.fn, params, batch, mesh, _dtypes(step)[0])
        program = verify(spread.rewrite(replace(program, transforms=step.transforms), zero_of(step, mesh)))
        program = check(verify(finished(program, Order())))
        return _fitting(Lowered(program, params, None, batch, structure, budget))
    traced = _traced(step, mesh, params, batch)
    variants, opt_state, structure = traced.variants, traced.opt_state, traced.structure
    least, auto = _least(step, budget)
    if budget is None:
        return Lowered(variants.verified(least), params, opt_state, batch, structure)
    if budget.nbytes is None:
        choice = choose_side(variants, least, budget, variants.sides)
        return _fitting(Lowered(variants.verified(choice), params, opt_state, batch, structure, budget, choice))
    choice = choose(variants, least, budget, auto=auto, loops=traced.loops, sides=variants.sides)
    if choice is None:
        found = plan(variants.verified(least), budget.device, backend=budget.backend)
        more = found.peak_bytes > budget.nbytes
        raise unmet(found, budget, _advice(step, mesh, params, batch, budget, found.peak_bytes) if more else ())
    return Lowered(variants.verified(choice), params, opt_state, batch, structure, budget, choice)


@dataclass(frozen=True)
class _Traced:
    """The programs that a step can become, `base` before it is known what rests where, and the rest of what its trace told."""

    base: Program
    variants: Variants
    opt_state: Inputs
    structure: tree.TreeSpec
    loops: bool


def _traced(step: Step, mesh: AbstractMesh, params: Inputs, batch: Inputs) -> _Traced:
    zero, (compute_dtype, reduce_dtype) = zero_of(step, mesh), _dtypes(step)
    precision = find(step.transforms, MixedPrecision)
    record_ = find(step.transforms, accumulate.Accumulate)
    num_micro = record_.num_micro_batches if record_ else 1
    problems: list[str] = []
    micro = replace(batch, leaves=tuple(replace(x, shape=accumulate.micro_shape(x.path, x.shape, num_micro, problems)) for x in batch.leaves))
    if problems:
        raise FzeroValueError(
            message(
                "accumulate",
                f"the batch of a rank does not divide into {num_micro} micro-batches",
                problems,
                "choose a batch that is a multiple of ranks x micro-batches",
            )
        )
    trains = step.trains(abstract_params(params))
    if not any(trains):
        raise FzeroValueError(message("train_step", "no leaf is trained", fix="check `trainable`, and that parameters are floating point"))
    opt_state = opt_state_inputs(step, mesh, params)
    with uncollected():
        program, structure = lower_train(
            Training(
                name=step.name,
                loss_fn=step.loss_fn,
                optimizer=step.optimizer,
                has_aux=step.has_aux,
                wants_key=wants_key(step.loss_fn),
                params=params,
                trains=trains,
                opt_state=opt_state,
                batch=micro,
                extras=extra_leaves(),
                mesh=mesh,
                compute_dtype=compute_dtype,
                reduce_dtype=reduce_dtype,
                num_parts=num_micro * math.prod(mesh.axes[a] for a in zero.batch_axes),
                stochastic=precision is not None and precision.rounding == "stochastic",
            )
        )
    base = verify(fuse.rewrite(replace(program, transforms=step.transforms)))
    shapes = {batch.leaves[i].path: batch.leaves[i].shape for i in batch.distinct}
    loops = num_micro > 1 and not (record_ and record_.vertical)
    return _Traced(base, Variants(_with_copies(base, step, mesh, params), zero, num_micro, shapes), opt_state, structure, loops)


def _with_copies(base: Program, step: Step, mesh: AbstractMesh, params: Inputs) -> Program:
    """The program with what is computed with beside the masters that rest off the device."""
    return verify(compute.rewrite(base, {params.leaves[i].path: leaf for i, leaf in compute_leaves(step, mesh, params).items()}))


def _dtypes(step: Step | EvalStep) -> tuple[Callable[[Leaf], torch.dtype], Callable[[Leaf], torch.dtype]]:
    """Those that a parameter is computed in, and its gradient reduced in."""
    precision = find(step.transforms, MixedPrecision)
    return (precision.compute_dtype, precision.reduce_dtype) if precision else (lambda leaf: leaf.dtype, lambda leaf: leaf.dtype)


def _least(step: Step, budget: Budget | None) -> tuple[Choice, bool]:
    """The choice that takes least memory, and whether what blocks keep is open."""
    policy = (find(step.transforms, remat.Remat) or remat.Remat()).policy
    auto = policy == "auto"
    return Choice(0.0 if auto and budget is not None and budget.nbytes is not None else policy), auto


def auto_of(step: Step | EvalStep) -> Offload | None:
    """The transform that leaves open what rests where, if a step has it."""
    return next((t for t in step.transforms if isinstance(t, Offload) and t.tier == "auto"), None)


def resolve(step: Step, mesh: AbstractMesh, params: Any, batch: Inputs, budget: Budget) -> tuple[Step, tuple[Decision, ...]]:
    """The step with what its `offload("auto")` comes to in its place, and why; the step itself if it has none.

    Args:
        step, mesh: as for `lower`.
        params: the tree, with whole leaves.
        batch: that it is resolved for.
        budget: to fit.
    """
    auto = auto_of(step)
    if auto is None:
        return step, ()
    check_auto(auto, budget.limits)
    left = replace(step, transforms=tuple(t for t in step.transforms if t != auto))
    inputs = params_inputs(left, mesh, params)
    traced = _traced(left, mesh, inputs, batch)
    mirrored = mirrors(traced.opt_state.leaves, inputs)

    def with_(records: Sequence[Offload]) -> Step:
        return replace(left, transforms=tuple(sorted((*left.transforms, *records), key=lambda t: (t.order, str(t)))))

    def build(records: Sequence[Offload]) -> Variants:
        asked = with_(records)
        rests = params_inputs(asked, mesh, params)
        tiers = tiers_of(offloads(asked), rests.leaves, rests.ties, zero_of(asked, mesh).casts)
        on = {leaf.path: leaf.layout.tier for leaf in rests.leaves}
        on |= {leaf.path: tiers[i].opt_state for leaf, i in zip(traced.opt_state.leaves, mirrored, strict=True) if i is not None}
        leaves = {name: leaf.with_layout(tier=on.get(leaf.path, leaf.layout.tier)) for name, leaf in traced.base.leaves.items()}
        base = replace(traced.base, leaves=leaves, transforms=asked.transforms)
        return traced.variants.like(_with_copies(base, asked, mesh, rests))

    records, decision = choose_tiers(build, _least(left, budget)[0], auto, budget, mesh.unified_memory)
    return with_(records), (decision,)


def _fitting(lowered: Lowered) -> Lowered:
    """Raises if a program that leaves nothing open is over its budgets."""
    budget = lowered.budget
    if budget is not None and budget.limits != (None, None, None):
        found = lowered.plan_on(budget.device, budget.backend)
        if budget.over((found.peak_bytes, found.host_peak_bytes, found.disk_bytes)):
            raise unmet(found, budget)
    return lowered


def _advice(step: Step, mesh: AbstractMesh, params: Inputs, batch: Inputs, budget: Budget, peak: int) -> list[str]:
    """What the peak would be at least with one transform more, the lowest first, of those that lower it."""
    peaks: dict[str, int] = {}
    step = replace(step, transforms=tuple(remat.Remat(0.0) if t == remat.Remat("auto") else t for t in step.transforms))
    for transform in _candidates(step, mesh):
        try:
            more = transform(step)
            if more == step or (isinstance(transform, shard.Parallel) and _sharded(more, mesh, params) == _sharded(step, mesh, params)):
                continue
            found = lower_inputs(more, mesh, params_inputs(more, mesh, abstract_params(params)), batch)
        except FzeroError:  # one that contradicts what is there, or cannot be had with this batch
            continue
        peaks[str(transform)] = found.plan_on(budget.device, budget.backend).peak_bytes
    return [f"with fz.{name}: {n:,} bytes" for name, n in sorted(peaks.items(), key=lambda item: item[1])[:3] if n < peak]


def _sharded(step: Step, mesh: AbstractMesh, params: Inputs) -> list[tuple[bool, ...]]:
    """Of each parameter whether its state, its gradient and itself are sharded."""
    zero = zero_of(step, mesh)
    return [(zero.opt_state(leaf), zero.grads(leaf), zero.params(leaf)) for leaf in params.leaves]


def _candidates(step: Step, mesh: AbstractMesh) -> Iterator[Any]:
    axis = next((a for a, n in mesh.axes.items() if n > 1), None)
    if axis:
        yield from (make(axis=axis) for make in (shard.shard_opt_state, shard.shard_grads, shard.shard_params))
    yield from (remat.remat("full"), accumulate.accumulate(2), accumulate.accumulate(8), mixed_precision("bf16"))


# --- leaf tables ---


def zero_of(step: Step | EvalStep, mesh: AbstractMesh) -> shard.Zero:
    """The parallel transforms of a step on a mesh, checked against it."""
    records = tuple(t for t in step.transforms if isinstance(t, shard.Parallel))
    precision = find(step.transforms, MixedPrecision)
    zero = shard.Zero(records, mesh, lambda leaf: precision is not None and precision.compute_dtype(leaf) != leaf.dtype)
    zero.check()
    return zero


def params_inputs(step: Step | EvalStep, mesh: AbstractMesh, params: Any) -> Inputs:
    """The leaf table of parameters given whole: how each will rest."""
    precision = find(step.transforms, MixedPrecision)
    zero = zero_of(step, mesh)
    flat, structure = tree.flatten(params)
    leaves = []
    for path, x in zip(tree.paths(params, "params"), flat, strict=True):
        leaf = Leaf(path, "params", tuple(x.shape), Layout(precision.resting_dtype(x.dtype) if precision else x.dtype))
        leaves.append(leaf.with_layout(axes=(zero.axis,)) if zero.rests_sharded(leaf) else leaf)
    tied = ties(flat)
    tiers = tiers_of(offloads(step), leaves, tied, zero.casts)
    return Inputs(structure, tuple(leaf.with_layout(tier=tier.param) for leaf, tier in zip(leaves, tiers, strict=True)), tuple(tied))


def opt_state_inputs(step: Step, mesh: AbstractMesh, params: Inputs) -> Inputs:
    """The leaf table of the optimizer's state: a leaf that mirrors a parameter (its path ends in the parameter's, its shape is the same, or that
    of one number for each of its blocks) rests as the parameter's state does, any other is whole. Its leaves are never tied: each is written in place."""
    zero = zero_of(step, mesh)
    mode = compat.FakeTensorMode()
    whole = params.rebuild({i: compat.new_fake(mode, params.leaves[i].shape, params.leaves[i].dtype, "cpu") for i in params.distinct})
    with mode, Remembering():
        state = step.optimizer.init(step.optimized(whole))
    flat, structure = tree.flatten(state)
    wrong = [f"{p}: {type(x).__name__}" for p, x in zip(tree.paths(state, "opt_state"), flat, strict=True) if not isinstance(x, torch.Tensor)]
    if wrong:
        raise FzeroTypeError(message("optimizer", "init returned leaves that are not tensors", wrong, "keep numbers in the closure, tensors in the state"))
    leaves = [Leaf(p, "opt_state", tuple(x.shape), Layout(x.dtype)) for p, x in zip(tree.paths(state, "opt_state"), flat, strict=True)]
    tiers = tiers_of(offloads(step), params.leaves, params.ties, zero.casts)
    for i, mirrored in enumerate(mirrors(leaves, params)):
        if mirrored is not None:
            axes = (zero.axis,) if zero.axis and zero.opt_state(params.leaves[mirrored]) else ()
            leaves[i] = leaves[i].with_layout(axes=axes, tier=tiers[mirrored].opt_state)
    return Inputs(structure, tuple(leaves), tuple(range(len(leaves))))


def compute_leaves(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs) -> dict[int, Leaf]:
    """What is computed with of the masters that rest off the device, by position: leaves of the state, sharded as their masters are."""
    precision = find(step.transforms, MixedPrecision)
    if precision is None or isinstance(step, EvalStep):
        return {}
    tiers = tiers_of(offloads(step), params.leaves, params.ties, zero_of(step, mesh).casts)
    out = {}
    for i in params.distinct:
        master, dtype = params.leaves[i], precision.compute_dtype(params.leaves[i])
        if master.layout.tier != "device" and dtype != master.dtype:
            path = f"{COMPUTE}{master.path.removeprefix('params')}"
            out[i] = replace(master, path=path, role="compute").with_layout(dtype=dtype, tier=tiers[i].copy)
    return out


def mirrors(leaves: Sequence[Leaf], params: Inputs) -> list[int | None]:
    """Of each leaf of the optimizer's state the position of the parameter that it mirrors, if there is one."""
    by_path = {leaf.path.removeprefix("params"): i for i, leaf in enumerate(params.leaves)}

    def mirrored(leaf: Leaf) -> int | None:
        endings = (by_path.get(leaf.path[i:]) for i in range(len(leaf.path) + 1))  # the longest first
        return next((i for i in endings if i is not None and _alike(leaf.shape, params.leaves[i].shape)), None)

    return [mirrored(leaf) for leaf in leaves]


def _alike(shape: tuple[int, ...], param: tuple[int, ...]) -> bool:
    """Whether a leaf of the optimizer's state has a number for each element of a parameter, or for each block."""
    return shape == param or (has_blocks(param) and shape == blocks_shape(param))


def offloads(step: Step | EvalStep) -> tuple[Offload, ...]:
    """The transforms that say what rests where.

    Raises:
        TransformError: that is left open.
    """
    if auto_of(step) is not None:
        fix = "give an evaluation the transforms of the training step that was resolved: fz.compose(*train.step.transforms)(fz.eval_step(fn))"
        raise TransformError(message("offload", f"{auto_of(step)} is resolved for a training step, with its batch", fix=fix))
    return tuple(t for t in step.transforms if isinstance(t, Offload))


def batch_inputs(batch: Any) -> Inputs:
    check_batch(batch)
    flat, structure = tree.flatten(batch)
    leaves = tuple(Leaf(p, "batch", tuple(x.shape), Layout(x.dtype)) for p, x in zip(tree.paths(batch, "batch"), flat, strict=True))
    return Inputs(structure, leaves, tuple(range(len(leaves))))


def extra_leaves() -> dict[str, Leaf]:
    """The leaves of a state besides parameters and optimizer state."""
    return {"step": Leaf("step", "step", (), Layout(torch.int64)), "key": Leaf("key", "key", (3,), Layout(torch.int64))}


def abstract_params(params: Inputs) -> Any:
    """The tree of whole shapes, as meta tensors."""
    return params.rebuild({i: torch.empty(params.leaves[i].shape, dtype=params.leaves[i].dtype, device="meta") for i in params.distinct})


def abstract(init_fn: Any) -> Any:
    """The tree that an init function returns, as meta tensors: nothing is computed. Ties stay ties."""
    return recorded(init_fn)[0]


def recorded(init_fn: Any, device_type: str = "cpu") -> tuple[Any, Recorded]:
    """As `abstract`, and the function itself, recorded: it returns the leaves of that tree."""
    check_init(init_fn)
    made: dict[str, Any] = {}

    def run(key: torch.Tensor) -> list[torch.Tensor]:
        result = init_fn(key)
        check_params(result)
        flat, made["structure"] = tree.flatten(result)
        made["ties"] = ties(flat)
        return flat

    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        graph = record(run, [torch.empty(3, dtype=torch.int64, device=device_type)], owner="init", names=["key"], source=init_fn)
    returned = graph.outputs
    metas = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="meta") for n in returned]
    return tree.unflatten(made["structure"], [metas[t] for t in made["ties"]]), graph
