"""Makes the table of the parameters of a step on a mesh: each parameter with its layout, from abstract values.

This file combines the transforms that determine layouts: sharding, precision and offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero import tree
from fzero._utils.arguments import accepts_none
from fzero.compiler.combined_transforms import offloads, zero_of
from fzero.errors import TransformError
from fzero.ir.from_graph import Inputs
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Layout, Leaf, check_dims, ties, torn_ties
from fzero.sharding.placements import Shard
from fzero.step import EvalStep, Step
from fzero.transforms import zero as shard
from fzero.transforms.compress import Compress
from fzero.transforms.dim_sharding import DimSharding
from fzero.transforms.fp8 import Fp8
from fzero.transforms.offload import Offload, tiers_of
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.transform import find
from fzero.transforms.zero import Zero


def params_inputs(step: Step | EvalStep, mesh: AbstractMesh, params: Any, known: Sequence[Leaf] = ()) -> Inputs:
    """Returns the table of unsharded parameters, with the layout in which each will be stored.

    Args:
        step, mesh: the step and mesh they belong to.
        params: the tree of unsharded parameters.
        known: for an evaluation, the parameters as they are stored: a training step's own predicate says for which of
            them its loss function returns new values.
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
        leaves.append(leaf if mutable[i] else _with_dims(leaf, step, mesh))
    tied = ties(flat)
    for spec in (t for t in step.transforms if isinstance(t, DimSharding)):
        spec.check(leaves, tied)
    check_dims(leaves, mesh)
    zero.check_once(leaves)
    coded = _coded(step, params, leaves, zero, known)
    # The order of these steps matters: dims come first, because ZeRO shards what is left of them; pipeline stages and
    # tiers come last, because they do not change shapes.
    leaves = [zero.stored(leaf, of_codes) for leaf, of_codes in zip(leaves, coded, strict=True)]
    if (pipeline := find(step.transforms, Pipeline)) is not None and mesh.axes[pipeline.axis] > 1:
        leaves = [leaf.with_layout(only=pipeline.only(leaf)) for leaf in leaves]
    _check_where(step, leaves, tied)
    if (fp8 := find(step.transforms, Fp8)) is not None:
        fp8.check(leaves)
    tiers = tiers_of(offloads(step), leaves, tied, zero.casts)
    rest = [leaf.with_layout(tier=tier.param) for leaf, tier in zip(leaves, tiers, strict=True)]
    for i, leaf in enumerate(known):  # an average that a transform keeps is stored like optimizer state
        state = leaves[i].with_layout(axes=zero.opt_state(leaves[i]), tier=tiers[i].opt_state)
        rest[i] = state if leaf.layout == state.layout else rest[i]
    return Inputs(structure, tuple(rest), tuple(tied))


def _with_dims(leaf: Leaf, step: Step | EvalStep, mesh: AbstractMesh) -> Leaf:
    """Returns a parameter sharded along the dims that transforms request. Axes with one device are ignored."""
    dims: dict[str, Shard] = {}
    for transform in step.transforms:
        wanted = {a: dim for a, dim in transform.dims(leaf, mesh).items() if mesh.axes.get(a) != 1}
        if twice := [*dims.keys() & wanted.keys()]:
            what = f"{leaf} is sharded along a dim over axis {twice[0]!r} already"
            raise TransformError(transform.name, what, fix="shard it over another axis, or by one transform")
        dims |= wanted
    return leaf.with_layout(axes=tuple(dims), dims=tuple(dims.values()))


def _frozen(step: Step | EvalStep, params: Any, known: Sequence[Leaf]) -> Sequence[bool]:
    """Returns, for each tensor, whether it is a frozen weight, which is stored in the compute dtype. Only functions
    that name the tensors that they need uncast (buffers) have any. In an evaluation, these are the tensors that are
    stored in the dtype they are computed in."""
    precision = find(step.transforms, MixedPrecision)
    if precision is None or step.exact is None:
        return [False] * len(tree.leaves(params))
    if isinstance(step, Step):
        return [not trained for trained in step.trains(params)]
    # An evaluation does not know which tensors are trained, but the state that it is called with shows how they are
    # stored.
    return [x.dtype == precision.frozen_dtype(x) for x in known] or [False] * len(tree.leaves(params))


def _coded(
    step: Step | EvalStep, params: Any, leaves: Sequence[Leaf], zero: Zero, known: Sequence[Leaf]
) -> Sequence[bool]:
    """Returns, for each parameter, whether it is encoded in each step, so that only its owner reads its master."""
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
    """Raises if a transform's `where` accepts some paths of a tied parameter but not all, or no parameter at all, and
    names them. fp8 requires all paths (transforms/fp8.py)."""
    metas = [leaf.meta for leaf in leaves]
    for transform in step.transforms:
        if not isinstance(transform, (MixedPrecision, Offload, Compress, shard.Parallel)) or transform.where is None:
            continue
        accepted = [bool(transform.where(leaf.path, x)) for leaf, x in zip(leaves, metas, strict=True)]
        if not any(accepted) and (missed := accepts_none("where", transform.where, [leaf.path for leaf in leaves])):
            raise TransformError(
                transform.name,
                "does nothing",
                missed,
                "give part of a path as it is printed here, or leave `where` out",
            )
        if torn := torn_ties([leaf.path for leaf in leaves], tied, accepted, "where"):
            raise TransformError(
                transform.name,
                "`where` matches only some paths of tied tensors",
                torn,
                "match all the paths of a tensor, or none",
            )
