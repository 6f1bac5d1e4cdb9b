"""Makes leaf tables: the leaves of parameters, optimizer state and batch of a step on a mesh, each with its layout,
from abstract values alone.

Here the transforms that decide about layouts meet: sharding, precision, offload. What the leaves are for is lower.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero import compat, tree
from fzero.arguments import accepts_none
from fzero.boxes import Dim
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.layout import COMPUTE, GRADIENTS, Layout, Leaf, check_dims, over_axes, ties, torn_ties
from fzero.lowering.training_source import Precision
from fzero.mesh import AbstractMesh
from fzero.operators.quant_blocks import blocks_shape, has_blocks
from fzero.passes.zero import Zero
from fzero.precision.fp8 import InFp8
from fzero.program.lines import Inputs
from fzero.step import EvalStep, Step
from fzero.step.checks import check_batch, check_init, check_params
from fzero.trace.meta_cache import Remembering
from fzero.trace.record import record
from fzero.trace.recorder import Recorded
from fzero.transforms import shard
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.base import find
from fzero.transforms.compress import Compress
from fzero.transforms.cutting import Cutting
from fzero.transforms.fp8 import Fp8
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.offload import Offload, tiers_of
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.redundant import Redundant

Shape = tuple[int, ...]


def precision_of(step: Step | EvalStep) -> Precision:
    """The dtypes of a step, and its loss scale."""
    record, fp8 = find(step.transforms, MixedPrecision), find(step.transforms, Fp8)
    products = None if fp8 is None else InFp8(fp8.selects, fp8.scales == "row")
    compress = find(step.transforms, Compress)

    def changed(leaf: Leaf) -> list[str]:
        names = [record.name] if record is not None and record.selects(leaf) else []
        return [*names, compress.name] if compress is not None and compress.encodes(leaf) else names

    if record is None:
        return Precision(fp8=products, changed=changed)
    return Precision(
        compute=record.compute_dtype,
        reduce=record.reduce_dtype,
        outputs=record.output_dtype,
        casts=record.casts_in_blocks,
        loss_scale=record.scaling,
        stochastic=record.rounding == "stochastic",
        watch=record.watch,
        fp8=products,
        changed=changed,
    )


def zero_of(step: Step | EvalStep, mesh: AbstractMesh) -> Zero:
    """The parallel transforms of a step on a mesh, checked against it."""
    specs = tuple(t for t in step.transforms if isinstance(t, shard.Parallel))
    precision = find(step.transforms, MixedPrecision)
    cutting = tuple(t for t in step.transforms if isinstance(t, Cutting))
    pipeline = find(step.transforms, Pipeline)
    for spec in (*cutting, *((pipeline,) if pipeline else ())):
        if spec.axis not in mesh.axes:
            fix = f"name an axis of the mesh, or make one: make_mesh({spec.axis}=2)"
            raise FzeroValueError(spec.name, "unknown mesh axis", [f"{spec.axis!r}: the mesh has {mesh}"], fix)
    zero = Zero(
        specs,
        mesh,
        lambda leaf: precision is not None and precision.casts(leaf),
        find(step.transforms, Hierarchical),
        tuple(spec for spec in cutting if mesh.axes[spec.axis] > 1),
        pipeline and pipeline.axis,
    )
    zero.check()
    return zero


def params_inputs(step: Step | EvalStep, mesh: AbstractMesh, params: Any, known: Sequence[Leaf] = ()) -> Inputs:
    """The leaf table of parameters given whole: how each will rest.

    Args:
        step, mesh: whose they are.
        params: the tree, with whole leaves.
        known: for an evaluation, the leaves as they rest: a training step's own predicate says which leaves its loss
            function returns anew.
    """
    precision = find(step.transforms, MixedPrecision)
    zero = zero_of(step, mesh)
    flat, structure = tree.flatten(params)
    mutable = (
        step.mutates(params) if isinstance(step, Step) else [x.role == "mutable" for x in known] or [False] * len(flat)
    )
    leaves, frozen = [], _frozen(step, params, known)
    for i, (path, x) in enumerate(zip(tree.paths(params, "params"), flat, strict=True)):
        leaf = Leaf(path, "mutable" if mutable[i] else "params", tuple(x.shape), Layout(x.dtype))
        if precision is not None:
            leaf = leaf.with_layout(dtype=(precision.frozen_dtype if frozen[i] else precision.resting_dtype)(leaf))
        leaves.append(leaf if mutable[i] else _cut(leaf, step, mesh))
    tied = ties(flat)
    for spec in (t for t in step.transforms if isinstance(t, Cutting)):
        spec.check(leaves, tied)
    check_dims(leaves, mesh)
    zero.check_once(leaves)
    coded = _coded(step, params, leaves, zero, known)
    leaves = [zero.rests(leaf, of_codes) for leaf, of_codes in zip(leaves, coded, strict=True)]
    if (pipeline := find(step.transforms, Pipeline)) is not None and mesh.axes[pipeline.axis] > 1:
        leaves = [leaf.with_layout(only=pipeline.only(leaf)) for leaf in leaves]
    _check_where(step, leaves, tied)
    if (fp8 := find(step.transforms, Fp8)) is not None:
        fp8.check(leaves)
    tiers = tiers_of(offloads(step), leaves, tied, zero.casts)
    rest = [leaf.with_layout(tier=tier.param) for leaf, tier in zip(leaves, tiers, strict=True)]
    for i, leaf in enumerate(known):  # an average that a transform keeps rests as optimizer state does
        state = leaves[i].with_layout(axes=zero.opt_state(leaves[i]), tier=tiers[i].opt_state)
        rest[i] = state if leaf.layout == state.layout else rest[i]
    return Inputs(structure, tuple(rest), tuple(tied))


def _cut(leaf: Leaf, step: Step | EvalStep, mesh: AbstractMesh) -> Leaf:
    """A parameter cut along the dims that transforms say. Axes of one device are no axes."""
    dims: dict[str, Dim] = {}
    for transform in step.transforms:
        cuts = {a: dim for a, dim in transform.dims(leaf, mesh).items() if mesh.axes.get(a) != 1}
        if twice := [*dims.keys() & cuts.keys()]:
            what = f"{leaf} is cut along a dim over axis {twice[0]!r} already"
            raise TransformError(transform.name, what, fix="cut it over another axis, or by one transform")
        dims |= cuts
    return leaf.with_layout(axes=tuple(dims), dims=tuple(dims.values()))


def _frozen(step: Step | EvalStep, params: Any, known: Sequence[Leaf]) -> Sequence[bool]:
    """For each leaf whether it is a frozen weight, stored in the compute dtype. Only functions that name their exact
    leaves (buffers) have any. To an evaluation, of which they rest as they are computed."""
    precision = find(step.transforms, MixedPrecision)
    if precision is None or step.exact is None:
        return [False] * len(tree.leaves(params))
    if isinstance(step, Step):
        return [not trained for trained in step.trains(params)]
    return [x.dtype == precision.frozen_dtype(x) for x in known] or [False] * len(tree.leaves(params))


def _coded(
    step: Step | EvalStep, params: Any, leaves: Sequence[Leaf], zero: Zero, known: Sequence[Leaf]
) -> Sequence[bool]:
    """For each leaf whether codes are made of it in each step, so that its master is read by its owner alone."""
    spec = find(step.transforms, Compress)
    if spec is None or spec.params is None:
        return [False] * len(leaves)
    finest = [zero.opt_state(leaf) for leaf in leaves]
    if isinstance(step, Step):
        trained = step.trains(params)
    else:
        trained = (
            [x.layout.axes == axes for x, axes in zip(known, finest, strict=True)] if known else [True] * len(leaves)
        )
    travels = [
        leaf.dtype.is_floating_point and any(map(spec.of_params, axes))
        for leaf, axes in zip(leaves, finest, strict=True)
    ]
    return [a and b for a, b in zip(trained, travels, strict=True)]


def _check_where(step: Step | EvalStep, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
    """Raises naming the tied leaves of which a transform is about some paths alone, or the leaves of which it is about
    none. fp8 asks all paths (transforms/fp8.py)."""
    metas = [leaf.meta for leaf in leaves]
    for transform in step.transforms:
        if not isinstance(transform, (MixedPrecision, Offload, Compress, shard.Parallel)) or transform.where is None:
            continue
        accepted = [bool(transform.where(leaf.path, x)) for leaf, x in zip(leaves, metas, strict=True)]
        if not any(accepted) and (missed := accepts_none("where", transform.where, [leaf.path for leaf in leaves])):
            raise TransformError(
                transform.name, "does nothing", missed, "give a part of a path as it stands here, or leave `where` out"
            )
        if torn := torn_ties([leaf.path for leaf in leaves], tied, accepted, "where"):
            raise TransformError(
                transform.name,
                "`where` accepts some paths of tied leaves alone",
                torn,
                "accept all the paths of a leaf, or none",
            )


def opt_state_inputs(step: Step, mesh: AbstractMesh, params: Inputs) -> Inputs:
    """The leaf table of the optimizer's state. A leaf is a parameter's if its path ends in the parameter's, and mirrors
    it if it has its shape, too, or one number for each of its blocks. Such a leaf is sharded as the parameter's state;
    any other is whole. Its leaves are never tied: each is written in place."""
    mode = compat.FakeTensorMode()
    whole = faked(params, mode)
    with mode, Remembering():
        state = step.optimizer.init(step.optimized(whole))
    flat, structure = tree.flatten(state)
    wrong = [
        f"{p}: {type(x).__name__}"
        for p, x in zip(tree.paths(state, "opt_state"), flat, strict=True)
        if not isinstance(x, torch.Tensor)
    ]
    if wrong:
        raise FzeroTypeError(
            "optimizer",
            "init returned leaves that are not tensors",
            wrong,
            "keep numbers in the closure, tensors in the state",
        )
    leaves = [
        Leaf(p, "opt_state", tuple(x.shape), Layout(x.dtype))
        for p, x in zip(tree.paths(state, "opt_state"), flat, strict=True)
    ]
    leaves = as_opt_state(step, mesh, params, leaves, "optimizer")
    if (sends := find(step.transforms, Redundant)) is not None:
        sends.check([*(params.leaves[i] for i in params.distinct), *leaves], mesh)
    return Inputs(structure, tuple(leaves), tuple(range(len(leaves))))


def as_opt_state(step: Step, mesh: AbstractMesh, params: Inputs, leaves: Sequence[Leaf], owner: str) -> list[Leaf]:
    """Leaves laid out as optimizer state: those that mirror a parameter as its state, the others whole."""
    zero, leaves = zero_of(step, mesh), list(leaves)
    tiers, blocks = tiers_of(offloads(step), params.leaves, params.ties, zero.casts), list[str]()
    for i, of in enumerate(_parameters(leaves, params)):
        leaves[i] = leaves[i] if of is None else leaves[i].with_layout(only=params.leaves[of].layout.only)
    for i, mirrored in enumerate(mirrors(leaves, params)):
        if mirrored is not None:
            param = params.leaves[mirrored]
            if param.layout.dims and has_blocks(leaves[i].shape) and leaves[i].shape != param.shape:
                continue  # a matrix of another shape, which nothing cuts along dims
            layout = {"axes": zero.opt_state(param), "dims": param.layout.dims, "tier": tiers[mirrored].opt_state}
            leaves[i] = leaves[i].with_layout(**layout)
            if param.layout.dims and leaves[i].shape != param.shape:
                blocks.append(f"{leaves[i]}, of {param}, cut over {over_axes(param.layout.axes, param.layout.dims)}")
    if blocks:
        what = "blocks of 256 elements do not stay together in leaves that are cut along a dim"
        raise FzeroValueError(owner, what, blocks, "keep their state in 32 bits, or the leaves uncut")
    return leaves


def compute_leaves(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs) -> dict[int, Leaf]:
    """The copies to compute with of masters that rest off the device, by position: leaves of the state, sharded as
    their masters are."""
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


def gradient_leaves(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs) -> dict[int, Leaf]:
    """The leaves in which gradients wait on disk, by the position of their parameter: leaves of the state, laid out as
    updates read gradients.

    Raises:
        TransformError: micro-batches add up in a loop, each of which would read and write all of them.
    """
    if isinstance(step, EvalStep) or not any("gradients" in record.of for record in offloads(step)):
        return {}
    micro = find(step.transforms, Accumulate)
    if micro is not None and micro.num_micro_batches > 1 and not micro.layerwise:
        problems = [f"{micro}: each micro-batch would read and write all that were added up before"]
        fix = f"add them up block by block, and write the sum once: {replace(micro, schedule='layerwise')}"
        raise TransformError("offload", "gradients that wait on disk cannot be added up in a loop", problems, fix)
    zero, precision = zero_of(step, mesh), precision_of(step)
    tiers, trained = (
        tiers_of(offloads(step), params.leaves, params.ties, zero.casts),
        step.trains(abstract_params(params)),
    )
    out = {}
    for i in params.distinct:
        param = params.leaves[i]
        if trained[i] and tiers[i].gradient != "device":
            axes, dims = zero.opt_state(param), param.layout.dims
            layout = Layout(precision.reduce(param), axes, tiers[i].gradient, dims=dims)
            out[i] = Leaf(f"{GRADIENTS}{param.path.removeprefix('params')}", "gradients", param.shape, layout)
    return out


def leaves_made_anew(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs) -> dict[str, dict[int, Leaf]]:
    """The leaves of a state that no checkpoint has (`train_state.MADE_ANEW`), by their name in its extras and the
    position of their parameter."""
    found = {"compute": compute_leaves(step, mesh, params), "gradients": gradient_leaves(step, mesh, params)}
    return {name: leaves for name, leaves in found.items() if leaves}


def mirrors(leaves: Sequence[Leaf], params: Inputs) -> list[int | None]:
    """For each leaf of the optimizer's state the position of the parameter that it mirrors, if there is one."""
    return _parameters(leaves, params, _alike)


def _parameters(
    leaves: Sequence[Leaf], params: Inputs, fits: Callable[[Shape, Shape], bool] = lambda leaf, param: True
) -> list[int | None]:
    """For each leaf of the optimizer's state the position of the parameter whose path it ends in, if one's shape
    fits."""
    by_path = {leaf.path.removeprefix("params"): i for i, leaf in enumerate(params.leaves)}

    def found(leaf: Leaf) -> int | None:
        endings = (by_path.get(leaf.path[i:]) for i in range(len(leaf.path) + 1))  # the longest first
        return next((i for i in endings if i is not None and fits(leaf.shape, params.leaves[i].shape)), None)

    return [found(leaf) for leaf in leaves]


def _alike(shape: Shape, param: Shape) -> bool:
    """Whether a leaf of the optimizer's state has a number for each element of a parameter, or for each block; or is a
    large matrix beside a matrix, such as a preconditioner."""
    blocks = has_blocks(param) and shape == blocks_shape(param)
    return shape == param or blocks or (len(shape) == len(param) >= 2 and has_blocks(shape))


def offloads(step: Step | EvalStep) -> tuple[Offload, ...]:
    """The transforms that place leaves on tiers.

    Raises:
        TransformError: that is left open.
    """
    if auto_of(step) is not None:
        fix = (
            "give an evaluation, or a step to check, the transforms of the compiled step: "
            "fz.compose(*train.resolved.transforms)(fz.eval_step(fn))"
        )
        raise TransformError(
            "offload",
            f"{auto_of(step)} is resolved where a training step is compiled, with its batch and budgets",
            fix=fix,
        )
    return tuple(t for t in step.transforms if isinstance(t, Offload))


def auto_of(step: Step | EvalStep) -> Offload | None:
    """The transform that leaves the tiers open, if a step has it."""
    return next((t for t in step.transforms if isinstance(t, Offload) and t.tier == "auto"), None)


def batch_inputs(batch: Any) -> Inputs:
    """The leaf table of a batch. Leaves that are one tensor are one to the function, too; one on the meta device stands
    for as many as its places."""
    check_batch(batch)
    flat, structure = tree.flatten(batch)
    leaves = tuple(
        Leaf(p, "batch", tuple(x.shape), Layout(x.dtype)) for p, x in zip(tree.paths(batch, "batch"), flat, strict=True)
    )
    return Inputs(structure, leaves, tuple(ties([None if x.is_meta else x for x in flat])))


def abstract_params(params: Inputs) -> Any:
    """The tree of whole shapes, as meta tensors."""
    return params.rebuild({i: params.leaves[i].meta for i in params.distinct})


def faked(params: Inputs, mode: compat.FakeTensorMode) -> Any:
    """The tree of whole leaves, as fake tensors."""
    leaves = params.leaves
    return params.rebuild({i: compat.new_fake(mode, leaves[i].shape, leaves[i].dtype, "cpu") for i in params.distinct})


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
        graph = record(
            run, [torch.empty(3, dtype=torch.int64, device=device_type)], owner="init", names=["key"], source=init_fn
        )
    returned = graph.outputs
    metas = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="meta") for n in returned]
    return tree.unflatten(made["structure"], [metas[t] for t in made["ties"]]), graph
