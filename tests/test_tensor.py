"""tensor_parallel: functions compute with parts of parameters, and train as the plain step does."""

from __future__ import annotations

from typing import Any

import pytest
import tensor
import torch

import fzero as fz
from fzero.mesh import AbstractMesh

STAGES = {
    "replicated": fz.data_parallel(),
    "opt_state": fz.shard_opt_state(),
    "grads": fz.shard_grads(),
    "params": fz.shard_params(),
}
TURNS = {"once": [], "loop": [fz.accumulate(2)], "vertical": [fz.accumulate(2, vertical=True)]}


def simulated(mesh: AbstractMesh, *transforms: Any, **more: Any) -> Any:
    return fz.testing.check_equivalent(tensor.step(*transforms, **more), tensor.params(), tensor.batch(), mesh)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_as_the_plain_step(stage, turns):
    mesh = AbstractMesh(data=2, model=2)
    simulated(mesh, STAGES[stage], *TURNS[turns], fz.remat(policy={"once": "none", "loop": "full"}.get(turns, "min_cut")))


def test_without_a_batch_axis_and_over_three_axes():
    simulated(AbstractMesh(model=2))
    simulated(AbstractMesh(model=4), fz.accumulate(2))
    axes = ("data", "node")
    simulated(AbstractMesh(node=2, data=2, model=2), fz.shard_params(axis=axes), fz.once_a_step(axis="node"))


def on_ranks(mesh_axes: dict[str, int], ways: dict[str, list[Any]], backend: str, **options: Any) -> list[Any]:
    mesh = fz.make_mesh(**mesh_axes, **options)
    others = tuple(axis for axis in mesh_axes if axis != "model")
    parts = mesh.axis_size(others)
    batch = tensor.batch(8, mesh.index(others) if others else 0, parts)
    found = []
    for name, transforms in ways.items():
        report = fz.testing.check_equivalent(tensor.step(*transforms), tensor.params(), batch, mesh, backend=backend)
        found.append((name, str(report)))
    return found


ON_RANKS = {
    "plain": [fz.data_parallel()],
    "loop": [fz.shard_params(), fz.accumulate(2)],
    "vertical": [fz.shard_grads(), fz.accumulate(2, vertical=True)],
    "state on the host": [fz.shard_opt_state(), fz.offload("cpu", of=("opt_state",))],
    "all on the host": [fz.shard_params(), fz.offload("cpu")],
    "bf16": [fz.shard_params(), fz.mixed_precision("bf16")],
}


@pytest.mark.parametrize("shared", [True, False])
def test_on_ranks(run_ranks, shared):
    run_ranks(2, on_ranks, {"model": 2}, {"alone": [], "loop": [fz.accumulate(2)]}, "eager", shared_memory=shared)
    ways = ON_RANKS if shared else {"plain": ON_RANKS["plain"]}
    run_ranks(4, on_ranks, {"data": 2, "model": 2}, ways, "eager", shared_memory=shared)


def places(mesh_axes: dict[str, int], axis: str) -> list[dict[str, int]]:
    """The part of the data that each rank of a run takes, before it has a step and after."""

    def main(run: Any) -> list[dict[str, int]]:
        train = fz.compile(tensor.step(fz.data_parallel(), axis=axis), run.mesh, backend="eager")
        before = run.place
        run.state(train, params=tensor.params())
        return [before, run.place]

    return fz.run(main, device="cpu", **mesh_axes)


def test_runs_take_parts_by_the_axes_of_the_batch(run_ranks):
    assert run_ranks(2, places, {"data": 1, "replica": 2}, "replica") == [
        [{"rank": rank, "size": 2}, {"rank": 0, "size": 1}] for rank in range(2)
    ]
