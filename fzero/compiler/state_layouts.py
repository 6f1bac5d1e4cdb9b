"""Makes the tables of the state in addition to parameters: optimizer state, compute copies, and gradients on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fzero import tree
from fzero._compat import compat
from fzero.compiler.abstract_values import abstract_params, faked
from fzero.compiler.combined_transforms import offloads, precision_of, zero_of
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.ir.from_graph import Inputs
from fzero.mesh import AbstractMesh
from fzero.ops.block_quantization import blocks_shape, has_blocks
from fzero.sharding.layout import COMPUTE, GRADIENTS, Layout, Leaf
from fzero.sharding.placements import over_axes
from fzero.step import EvalStep, Step
from fzero.trace.meta_cache import Remembering
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.offload import tiers_of
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.redundant import Redundant
from fzero.transforms.transform import find

Shape = tuple[int, ...]


def opt_state_inputs(step: Step, mesh: AbstractMesh, params: Inputs) -> Inputs:
    """Returns the table of the optimizer state.

    A tensor belongs to a parameter if its path ends in the parameter's path. It mirrors the parameter if it also has
    its shape, or one number for each of its quantization blocks. A tensor that mirrors a parameter is sharded as that
    parameter's state; any other is replicated. Tensors of the optimizer state are never tied, because each is written
    in place.
    """
    mode = compat.FakeTensorMode()
    whole = faked(params, mode)
    # Fake tensors: the optimizer's `init` shows only structure, shapes and dtypes here.
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
            "init returned a state with leaves that are not tensors",
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
    """Lays out tensors as optimizer state: those that mirror a parameter like its state, the others replicated."""
    zero, leaves = zero_of(step, mesh), list(leaves)
    tiers, blocks = tiers_of(offloads(step), params.leaves, params.ties, zero.casts), list[str]()
    for i, of in enumerate(_parameters(leaves, params)):
        leaves[i] = leaves[i] if of is None else leaves[i].with_layout(only=params.leaves[of].layout.only)
    for i, mirrored in enumerate(mirrors(leaves, params)):
        if mirrored is not None:
            param = params.leaves[mirrored]
            if param.layout.dims and has_blocks(leaves[i].shape) and leaves[i].shape != param.shape:
                continue  # a matrix of another shape, which is not sharded along dims
            layout = {"axes": zero.opt_state(param), "dims": param.layout.dims, "tier": tiers[mirrored].opt_state}
            leaves[i] = leaves[i].with_layout(**layout)
            if param.layout.dims and leaves[i].shape != param.shape:
                blocks.append(
                    f"{leaves[i]}, of {param}, sharded over {over_axes(param.layout.axes, param.layout.dims)}"
                )
    if blocks:
        what = "8-bit moments have scales of 256 consecutive elements, which shards along a dim do not keep together"
        fix = (
            "keep the state of these parameters in 32 bits: fz.optim.partition with adamw(..., state_dtype='fp32') for "
            "them; or keep the parameters unsharded"
        )
        raise FzeroValueError(owner, what, blocks, fix)
    return leaves


def compute_leaves(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs) -> dict[int, Leaf]:
    """Returns the compute copies of offloaded masters, by the position of the master. They are tensors of the state,
    sharded like their masters."""
    precision = find(step.transforms, MixedPrecision)
    if precision is None or isinstance(step, EvalStep):
        return {}
    tiers = tiers_of(offloads(step), params.leaves, params.ties, zero_of(step, mesh).casts)
    out = {}
    for i in params.distinct:
        master, dtype = params.leaves[i], precision.compute_dtype(params.leaves[i])
        # A master on the device is cast when it is read. One off the device would have to be copied in full first, so
        # the state has a copy in the compute dtype, with half the bytes.
        if master.layout.tier != "device" and dtype != master.dtype:
            path = f"{COMPUTE}{master.path.removeprefix('params')}"
            out[i] = replace(master, path=path, role="compute").with_layout(dtype=dtype, tier=tiers[i].copy)
    return out


def gradient_leaves(step: Step | EvalStep, mesh: AbstractMesh, params: Inputs) -> dict[int, Leaf]:
    """Returns the tensors that store gradients on disk, by the position of their parameter. They are tensors of the
    state, in the layout in which updates read gradients.

    Raises:
        TransformError: a loop accumulates micro-batches, each of which would read and write all of them.
    """
    if isinstance(step, EvalStep) or not any("gradients" in record.of for record in offloads(step)):
        return {}
    micro = find(step.transforms, Accumulate)
    if micro is not None and micro.num_micro_batches > 1 and not micro.layerwise:
        problems = [f"{micro}: each micro-batch would read and write all gradients that were added up before"]
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
    """Returns the tensors of a state that no checkpoint contains (`train_state.MADE_ANEW`), by their name in its extras
    and the position of their parameter."""
    found = {"compute": compute_leaves(step, mesh, params), "gradients": gradient_leaves(step, mesh, params)}
    return {name: leaves for name, leaves in found.items() if leaves}


def mirrors(leaves: Sequence[Leaf], params: Inputs) -> list[int | None]:
    """Returns, for each tensor of the optimizer state, the position of the parameter that it mirrors, if there is
    one."""
    return _parameters(leaves, params, _alike)


def _parameters(
    leaves: Sequence[Leaf], params: Inputs, fits: Callable[[Shape, Shape], bool] = lambda leaf, param: True
) -> list[int | None]:
    """Returns, for each tensor of the optimizer state, the position of the parameter whose path its own path ends in,
    provided that the shape fits."""
    by_path = {leaf.path.removeprefix("params"): i for i, leaf in enumerate(params.leaves)}

    def found(leaf: Leaf) -> int | None:
        endings = (by_path.get(leaf.path[i:]) for i in range(len(leaf.path) + 1))  # the longest ending first
        return next((i for i in endings if i is not None and fits(leaf.shape, params.leaves[i].shape)), None)

    return [found(leaf) for leaf in leaves]


def _alike(shape: Shape, param: Shape) -> bool:
    """Whether a tensor of the optimizer state has one number for each element of a parameter, or for each of its
    quantization blocks; or is a large matrix that belongs to a matrix, such as a preconditioner."""
    blocks = has_blocks(param) and shape == blocks_shape(param)
    return shape == param or blocks or (len(shape) == len(param) >= 2 and has_blocks(shape))
