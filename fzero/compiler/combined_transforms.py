"""Combines the transforms of a step into the settings that lowering needs: dtypes, parallel axes and memory tiers."""

from __future__ import annotations

from fzero.compiler.training_spec import Precision
from fzero.errors import FzeroValueError, TransformError
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import Leaf
from fzero.step import EvalStep, Step
from fzero.transforms import zero as shard
from fzero.transforms.compress import Compress
from fzero.transforms.dim_sharding import DimSharding
from fzero.transforms.fp8 import Fp8, InFp8
from fzero.transforms.hierarchical import Hierarchical
from fzero.transforms.offload import Offload
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.transform import find
from fzero.transforms.zero import Zero


def precision_of(step: Step | EvalStep) -> Precision:
    """Returns the dtypes of a step, and its loss scale."""
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
    """Returns the parallel transforms of a step on a mesh, after checking them against it."""
    specs = tuple(t for t in step.transforms if isinstance(t, shard.Parallel))
    precision = find(step.transforms, MixedPrecision)
    dim_shardings = tuple(t for t in step.transforms if isinstance(t, DimSharding))
    pipeline = find(step.transforms, Pipeline)
    for spec in (*dim_shardings, *((pipeline,) if pipeline else ())):
        if spec.axis not in mesh.axes:
            fix = f"name an axis of the mesh, or make one: make_mesh({spec.axis}=2)"
            raise FzeroValueError(spec.name, "unknown mesh axis", [f"{spec.axis!r}: the mesh has {mesh}"], fix)
    zero = Zero(
        specs,
        mesh,
        lambda leaf: precision is not None and precision.casts(leaf),
        find(step.transforms, Hierarchical),
        # An axis with one rank shards nothing. Leaving it out keeps the program free of collectives that move nothing.
        tuple(spec for spec in dim_shardings if mesh.axes[spec.axis] > 1),
        pipeline and pipeline.axis,
    )
    zero.check()
    return zero


def offloads(step: Step | EvalStep) -> tuple[Offload, ...]:
    """Returns the transforms that offload state.

    Raises:
        TransformError: the tiers are still open.
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
    """Returns the transform that leaves the tiers open, if a step has it."""
    return next((t for t in step.transforms if isinstance(t, Offload) and t.tier == "auto"), None)
