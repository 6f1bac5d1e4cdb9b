"""Chooses the stages of a `pipeline`: the blocks of each, and the parameters that these read first.

By default, the partition is the one whose slowest stage takes the least planned time. Code outside of blocks is counted
with the block on whose stage it runs. Among equal partitions, the one with fewer blocks on the last stages is taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fzero import tree
from fzero.compiler.auto_tensor_parallel import Chosen
from fzero.compiler.combined_transforms import zero_of
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.traced_step import trace_step
from fzero.errors import FzeroValueError
from fzero.ir.from_graph import Inputs
from fzero.ir.program import Program
from fzero.mesh import AbstractMesh
from fzero.plan.cost import on_mesh, seconds
from fzero.plan.device_lookup import Device
from fzero.plan.plan import PlanDecision
from fzero.step import Step
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.pipeline_pass import block_numbers, leaf_stages, stages_of_ops
from fzero.transforms.transform import find
from fzero.transforms.zero import Parallel


def open_stages(step: Step, mesh: AbstractMesh) -> Pipeline | None:
    """Returns the `pipeline` of a step if the stages of its parameters have not been chosen yet."""
    found = find(step.transforms, Pipeline)
    if found is None or found.leaves is not None:
        return None
    zero_of(step, mesh)  # which checks the axis
    return found


def choose_stages(step: Step, mesh: AbstractMesh, params: Any, batch: Inputs, device: Device, backend: str) -> Chosen:
    """Returns the step with the stages of its `pipeline`; the unchanged step if it has none. On one rank, the pipeline
    is removed.

    Args:
        step, mesh: as for `lower`.
        params: the tree of unsharded parameters.
        batch: the batch for which the blocks are counted.
        device, backend: those whose planned times count; all ranks must pass the same.

    Raises:
        FzeroValueError: the step cannot be divided into these stages.
    """
    spec = open_stages(step, mesh)
    if spec is None:
        return Chosen(step)
    others, n = tuple(t for t in step.transforms if t != spec), mesh.axes[spec.axis]
    if n == 1:
        return Chosen(replace(step, transforms=others))
    _check(step, params)
    # Stages alternate by micro-batch, so there is no loop over micro-batches.
    others = tuple(replace(t, schedule="layerwise") if isinstance(t, Accumulate) else t for t in others)
    step = replace(step, transforms=(*others, spec))
    inputs = params_inputs(step, mesh, params)
    program = trace_step(step, mesh, inputs, batch).base
    numbers = block_numbers(program)
    _check_enough(spec, n * spec.chunks, len(numbers))
    times = seconds_of_blocks(program, numbers, on_mesh(device, mesh), backend)
    counts = _counts(spec, n * spec.chunks, times)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    first = leaf_stages(program, dict(zip(numbers, stages, strict=True)))
    leaves = {x.path: first[inputs.leaves[t].path] for x, t in zip(inputs.leaves, inputs.ties, strict=True)}
    chosen = replace(spec, stages=counts, leaves=leaves)
    of = [sum(x for x, s in zip(times, stages, strict=True) if s % n == rank) for rank in range(n)]
    most, who = max(of) / (sum(of) or 1), "rank" if spec.chunks > 1 else "stage"
    why = f"of {len(numbers)} blocks; the slowest {who} takes {most:.0%} of the planned compute"
    transforms = tuple(sorted((*others, chosen), key=lambda t: (t.order, str(t))))
    return Chosen(replace(step, transforms=transforms), (PlanDecision(spec.name, f"stages={[*counts]}", why),))


def _check(step: Step, params: Any) -> None:
    """Raises if a step has no micro-batches that stages could send on, or has mutable tensors, which stages cannot send
    on."""
    found = find(step.transforms, Accumulate)
    if found is None or found.num_micro_batches < 2:
        what = "stages pass on micro-batches, and this step has one" if found else "stages pass on micro-batches"
        fix = "add fz.accumulate(8), best with several micro-batches for each stage"
        raise FzeroValueError("pipeline", what, [str(found)] if found else [], fix)
    if step.mutable is not None:
        named = zip(tree.with_paths(params, "params"), step.mutates(params), strict=True)
        written = [f"{path}: {tree.describe(x)}" for (path, x), mutable in named if mutable]
        problems = written if len(written) <= 6 else [*written[:5], f"... {len(written) - 5} more"]
        what = (
            f"the step writes {len(written)} tensors outside of its update, whose new values other stages do not know"
        )
        fix = (
            "leave pipeline out (fz.shard_params divides them); or take norms without running statistics "
            "(torch.nn.GroupNorm), or freeze them: norm.eval() before fz.functionalize(module)"
        )
        raise FzeroValueError("pipeline", what, problems, fix)
    spec = find(step.transforms, Pipeline)
    if spec is not None and spec.gather == "micro" and not any(_shards_params(t) for t in step.transforms):
        fix = "add fz.shard_params(), or leave gather out"
        raise FzeroValueError("pipeline", "gather='micro' does nothing: parameters are not sharded", fix=fix)


def _shards_params(spec: Any) -> bool:
    return isinstance(spec, Parallel) and spec.stage == 3


def _check_enough(spec: Pipeline, num_stages: int, num_blocks: int) -> None:
    """Raises if there are fewer blocks than stages."""
    if num_blocks < num_stages:
        fewer = max(num_blocks // spec.chunks, 1)
        fix = (
            "mark the function of a layer with fz.block, or name a module's layers: "
            f"fz.functionalize(module, blocks=['layers.*']); or a mesh with {spec.axis}={fewer} or fewer"
        )
        raise FzeroValueError("pipeline", "more stages than blocks", [f"{num_stages} stages, {num_blocks} blocks"], fix)


def _counts(spec: Pipeline, n: int, work: Sequence[float]) -> tuple[int, ...]:
    if spec.stages is None:
        return even(work, n)
    if len(spec.stages) != n or sum(spec.stages) != len(work):
        ranks = f"{spec.axis}={n // spec.chunks}{f' of {spec.chunks} chunks' if spec.chunks > 1 else ''}"
        problems = [f"stages={[*spec.stages]}: the mesh has {ranks}, and the step {len(work)} blocks"]
        fix = f"give {n} numbers that add up to {len(work)}, e.g. {[*even(work, n)]}"
        raise FzeroValueError("pipeline", "blocks per stage do not add up", problems, fix)
    return spec.stages


def seconds_of_blocks(program: Program, numbers: Sequence[int], device: Device, backend: str) -> list[float]:
    """Returns the planned seconds of each block's calls, in forward and backward, including the code outside of blocks
    that would be on its stage if each block were one."""
    found = [0.0] * len(numbers)
    stages = stages_of_ops(program, {number: i for i, number in enumerate(numbers)})
    for op, stage in zip(program.instructions, stages, strict=True):
        if op.op == "call":
            found[max(0, stage or 0)] += seconds(op, program, device, backend)
    return found


def even(work: Sequence[float], n: int) -> tuple[int, ...]:
    """Returns the numbers of consecutive blocks per stage for which the slowest stage has the least work.

    Example:
        >>> even([1.0, 1.0, 1.0, 1.0, 4.0], 2)
        (4, 1)
    """
    before = [0.0, *itertools.accumulate(work)]

    @functools.cache
    def best(stages: int, end: int) -> tuple[float, tuple[int, ...]]:
        """Returns the work of the slowest of these stages of the blocks before `end`, and their block counts."""
        if stages == 1:
            return before[end], (end,)
        # Among equal partitions, the one with the fewest blocks on the last stage.
        splits = ((max(best(stages - 1, i)[0], before[end] - before[i]), -i) for i in range(stages - 1, end))
        slowest, i = min(splits)
        return slowest, (*best(stages - 1, -i)[1], end + i)

    return best(n, len(work))[1]
