"""tensor_parallel on meshes x stages x turns x what is recomputed: losses, norms and gradients as of the plain step.

Without --exhaustive a few cases. `python tests/transforms/test_tensor_parallel_grid.py` writes
results/tensor_grid.md.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensor
import torch

import fzero as fz
from fzero.mesh import AbstractMesh
from fzero.testing.simulate import simulated

PAGE = Path(__file__).parents[2] / "results" / "tensor_grid.md"
MESHES = {
    "model=2": {"data": 1, "model": 2},
    "model=4": {"data": 1, "model": 4},
    "data=2 x model=2": {"data": 2, "model": 2},
    "node=2 x data=2 x model=2": {"node": 2, "data": 2, "model": 2},
}
STAGES = ("plain", "data_parallel", "shard_opt_state", "shard_grads", "shard_params")
TURNS = {"once": [], "accumulate(2)": [fz.accumulate(2)], "layerwise": [fz.accumulate(2, schedule="layerwise")]}
REMATS = ("min_cut", "none", "full")
STEPS = 4  # of which the first has the same parameters in each


@dataclass(frozen=True)
class Case:
    mesh: str
    stage: str
    turns: str
    remat: str

    def step(self, precision: str) -> tuple[Any, AbstractMesh]:
        axes: dict[str, Any] = dict(MESHES[self.mesh])
        if self.stage == "plain":  # no axis that cuts the batch
            axes = {"model": axes["model"]}
        others = tuple(axis for axis in axes if axis != "model")
        if self.stage == "data_parallel":  # of one axis
            stage = [fz.data_parallel(axis=axis) for axis in others]
        else:
            stage = [getattr(fz, self.stage)(axis=others)] if others else []
        made = tensor.step(*stage, *TURNS[self.turns], fz.remat(self.remat), *PRECISIONS[precision])
        return made, AbstractMesh(**axes)


PRECISIONS: dict[str, list[Any]] = {"fp32": [], "bf16": [fz.mixed_precision("bf16")]}


@dataclass(frozen=True)
class Found:
    """Losses and norms of the steps, and the gradients of the first, after clipping, by name."""

    losses: torch.Tensor
    norms: torch.Tensor
    grads: dict[str, torch.Tensor]


def ran(step: Any, mesh: AbstractMesh) -> Found:
    metrics, grads = [], {}
    for state, said in simulated(step, mesh, tensor.params(), tensor.batch(), STEPS, None):
        if said:
            metrics.append([said["loss"].double(), said["grad_norm"].double()])
        if len(metrics) == 1:
            moments = state.opt_state[1].mu  # a tenth of the gradient, after one step from zero
            grads = dict(zip(fz.tree.paths(moments), (10 * x.double() for x in fz.tree.leaves(moments)), strict=True))
    losses, norms = torch.tensor(metrics, dtype=torch.float64).T
    return Found(losses, norms, grads)


@functools.cache
def plain(precision: str) -> Found:
    step = fz.compose(*PRECISIONS[precision])(fz.train_step(tensor.loss_fn, tensor.OPTIMIZER))
    return ran(step, AbstractMesh(data=1))


def distances(precision: str, case: Case) -> dict[str, float]:
    """What differs from the plain step. In fp32: of losses, norms and each leaf's gradient the largest difference over
    the largest value. In bf16: the distance from the plain step in fp32, over that of the plain step in bf16."""
    found, fp32 = ran(*case.step(precision)), plain("fp32")
    if precision == "fp32":
        pairs = {"loss": [(found.losses, fp32.losses)], "norm": [(found.norms, fp32.norms)]}
        pairs["gradients"] = [(found.grads[name], fp32.grads[name]) for name in fp32.grads]
        return {name: max(_largest(a - b) / _largest(b) for a, b in of) for name, of in pairs.items()}
    bf16 = plain("bf16")
    apart = {
        "loss": (_largest(found.losses - fp32.losses), _largest(bf16.losses - fp32.losses)),
        "norm": (_largest(found.norms - fp32.norms), _largest(bf16.norms - fp32.norms)),
        "gradients": (_apart(found, fp32, fp32.grads), _apart(bf16, fp32, fp32.grads)),
    }
    leaves = [_apart(found, fp32, [name]) / _apart(bf16, fp32, [name]) for name in fp32.grads]
    return {**{name: a / b for name, (a, b) in apart.items()}, "one gradient": max(leaves)}


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())


def _apart(one: Found, other: Found, names: Iterable[str]) -> float:
    return math.sqrt(sum(float((one.grads[name] - other.grads[name]).square().sum()) for name in names))


LIMITS = {"fp32": 1e-5, "bf16": 2.0}


def faults(precision: str, cases: Iterable[Case]) -> list[str]:
    found = {case: distances(precision, case) for case in cases}
    return [f"{case}: {of}" for case, of in found.items() if not max(of.values()) <= LIMITS[precision]]


def grid(mesh: str) -> list[Case]:
    """Without a stage no axis cuts the batch; with one, an axis of size 1 beside `model` does."""
    stages = STAGES if len(MESHES[mesh]) == 2 and MESHES[mesh]["data"] == 1 else STAGES[1:]
    return [Case(mesh, *rest) for rest in itertools.product(stages, TURNS, REMATS)]


def test_the_loss_is_clipped():
    assert float(plain("fp32").norms.min()) > 0.5


@pytest.mark.full
def test_some_cases():
    cases = [
        Case("model=2", "plain", "layerwise", "full"),
        Case("model=4", "shard_grads", "once", "none"),
        Case("node=2 x data=2 x model=2", "shard_params", "accumulate(2)", "min_cut"),
    ]
    assert not faults("fp32", cases)


@pytest.mark.full
def test_some_cases_in_bf16():
    cases = [
        Case("model=4", "plain", "once", "min_cut"),
        Case("data=2 x model=2", "shard_params", "layerwise", "none"),
    ]
    assert not faults("bf16", cases)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_case(precision, mesh):
    assert not faults(precision, grid(mesh))


def table(found: Mapping[str, Mapping[Case, Mapping[str, float]]], minutes: float) -> str:
    """A line for each mesh and stage: the largest of its cases."""
    names = [(precision, name) for precision, of in found.items() for name in next(iter(of.values()))]
    head = ["mesh", "stage", "cases", *(f"{name}, {precision}" for precision, name in names)]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(head) - 2)}"]
    for mesh, stage in dict.fromkeys((case.mesh, case.stage) for case in found["fp32"]):
        cases = [case for case in found["fp32"] if (case.mesh, case.stage) == (mesh, stage)]
        largest = [max(found[precision][case][name] for case in cases) for precision, name in names]
        lines.append(f"| {' | '.join([mesh, stage, str(len(cases)), *(f'{x:.2g}' for x in largest)])} |")
    lines += [
        "",
        "- A GPT of 2 layers and width 16 (tests/tensor.py), simulated. The cases of a line: "
        f"{', '.join(TURNS)} x remat {', '.join(REMATS)}; {STEPS} steps of AdamW each, clipped at half of the first "
        "norm or less.",
        "- fp32: the largest difference from the plain step, over the largest value. Wanted: 1e-5 at most.",
        "- bf16: the distance from the plain step in fp32, over the distance of the plain step in bf16. Wanted: 2 at "
        "most. `one gradient` is that of the worst leaf.",
        "- A stage on `model` alone shards over an axis of size 1 beside it; `plain` is without one.",
        f"- torch {torch.__version__}, {minutes:.0f} minutes of one core.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    begin = time.process_time()
    found = {p: {case: distances(p, case) for mesh in MESHES for case in grid(mesh)} for p in PRECISIONS}
    PAGE.write_text(table(found, (time.process_time() - begin) / 60))
    wrong = [f"{p}, {case}: {of}" for p in found for case, of in found[p].items() if not max(of.values()) <= LIMITS[p]]
    sys.exit("\n".join(wrong) or 0)
