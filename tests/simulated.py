"""Steps on simulated ranks, which keep their shards from one step to the next as real ranks do.

Unlike with `fz.testing.simulate`, states may hold everything: slots of transforms, leaves of every memory tier,
parameters in the dtype the model computes in. Evaluations run too. The gate freezes what `run` yields; the matrix of
pairs and the changed numbers compare it with the plain step (`differences`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero.compiler.abstract_values import batch_inputs
from fzero.compiler.auto_tensor_parallel import choose_rules
from fzero.compiler.combined_transforms import zero_of
from fzero.compiler.lower import lower
from fzero.compiler.lowered import Lowered
from fzero.compiler.state_slots import declared
from fzero.compiler.traced_step import base_program
from fzero.mesh import AbstractMesh
from fzero.sharding.layout import COMPUTE, Leaf
from fzero.step import Step
from fzero.testing.comparison import most_skipped, overflowed
from fzero.testing.first_difference import distance
from fzero.testing.reference_trajectory import Trajectory, trajectory
from fzero.testing.simulate import Simulation, parts_of, ranks_of, unequal, whole_leaf
from fzero.testing.tolerance import Roundoff, roundoff
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.transform import find
from fzero.transforms.transform_state import Local


def batch_parts(step: Any, mesh: AbstractMesh, batch: Any) -> list[Any]:
    """Each rank's rows of the global batch. Those of an evaluation are divided among the ranks along `data` only."""
    if isinstance(step, Step):
        return parts_of(step, mesh, batch)
    data = mesh.axes.get("data", 1)
    index = [rank.index("data") if data > 1 else 0 for rank in ranks_of(mesh)]
    return [(tree.map(lambda x, i=i: x.chunk(data)[i], batch),) for i in index]


def run(
    lowered: Lowered, step: Any, mesh: AbstractMesh, params: Any, parts: list[Any], steps: int
) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
    """The whole leaves of the state by name, and the metrics, after each of some steps on the same batch.

    Checks that ranks which should hold the same elements do, and that all ranks return the same metrics.
    """
    simulation = Simulation(lowered, ranks_of(mesh))
    table = {name: leaf for program in lowered.programs for name, leaf in program.leaves.items()}
    first = first_values(step, params)
    held = simulation.shards({name: first(leaf) for name, leaf in table.items()})
    for _ in range(steps):
        ran = simulation.run(held, parts)
        held = [{name: rank.values[name] for name in rank.program.leaves} for rank in ran]
        outputs = [[rank.values[name] for name in rank.program.outputs] for rank in ran]
        metrics = [tree.unflatten(lowered.structure, values) for values in outputs]
        whole = {name: whole_leaf(leaf, ran, torch.zeros(leaf.shape, dtype=leaf.dtype)) for name, leaf in table.items()}
        differing = [*unequal(metrics), *(problem for _, found in whole.values() for problem in found)]
        assert not differing, differing
        yield {name: value for name, (value, _) in whole.items()}, metrics[0]


def first_values(step: Any, params: Any) -> Callable[[Leaf], torch.Tensor]:
    """A function that gives the whole value of a leaf before the first step."""
    if not isinstance(step, Step):
        known = dict(tree.with_paths(params, "params"))
        return lambda leaf: known[leaf.path].to(leaf.dtype)
    state = step.init(params)
    roots = {"step": state.step, "params": state.params, "opt_state": state.opt_state, "key": state.key}
    known = {path: x for name, value in roots.items() for path, x in tree.with_paths(value, name)}
    for transform in step.transforms:
        for slot, value in declared(step, transform, params).items():
            known |= dict(tree.with_paths(value, f"extras['{slot}']"))

    def first(leaf: Leaf) -> torch.Tensor:
        if leaf.path.startswith(COMPUTE):  # what the model computes with: a cast copy of the parameter
            return known[leaf.master].to(leaf.dtype)
        value = known.get(leaf.path)
        if value is None or isinstance(value, Local):
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return value.to(leaf.dtype)

    return first


def plain_run(step: Step, params: Any, batch: Any, steps: int, size: Roundoff) -> Trajectory:
    """The leaves of the plain step after each of some steps, with the tolerances of `check_equivalent`."""
    plain = replace(step, transforms=())
    return trajectory(plain, plain.init(params), batch, steps, size)


def differences(
    step: Step,
    mesh: AbstractMesh,
    params: Any,
    batch: Any,
    steps: int,
    plain: Callable[[Roundoff], Trajectory] | None = None,
) -> list[str]:
    """The parameters, optimizer state and metrics that differ from the plain step's by more than round-off.

    Steps that are skipped because their scaled gradients overflow do not count.

    Args:
        plain: gives `plain_run`, if several cases share it.
    """
    here, parts = ranks_of(mesh)[0], batch_parts(step, mesh, batch)
    step, _ = choose_rules(step, here, params, batch_inputs(parts[0]))
    lowered = lower(step, mesh, params, parts[0])
    record = find(step.transforms, Accumulate)
    num_parts = mesh.axis_size(zero_of(step, here).batch_axes) * (record.num_micro_batches if record else 1)
    size = roundoff(step, base_program(step, here, params, parts[0]), params, num_parts)
    want = plain(size) if plain else plain_run(step, params, batch, steps, size)
    finite = [all(x.isfinite().all() for x in leaves.values()) for leaves in want.leaves]
    steps = max(1, finite.index(False) - 1) if False in finite else steps  # a run that diverges has no tolerance
    found, taken = [], 0
    for leaves, metrics in run(lowered, step, mesh, params, parts, steps + most_skipped(step)):
        if overflowed(metrics):
            continue
        taken += 1
        got = leaves | dict(tree.with_paths(metrics, "metrics"))
        for path, value in want.leaves[taken].items():
            off, most = distance(got[path], value), want.tolerances[taken][path]
            if not (off == 0 or off <= most):
                found.append(f"step {taken}: {path} is {off:.2e} off, of {most:.2e} that round-off explains")
        if taken == steps:
            return found
    return [*found, f"only {taken} of {steps} steps were not skipped"]
