"""Which runs are equal to the bit, and how far apart the others are: a small GPT with dropout, trained twice.

Compared are the losses of all steps, and all tensors of parameters and optimizer state after the first step and the
last. All pairs with --exhaustive; without it a few. `PYTHONPATH=tests python tests/runtime/test_bitwise_equal_runs.py`
writes results/determinism.md.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

import fzero as fz
from fzero import optim

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from common import publish
from model import Config, embed, head, layer, make_batches, make_init

LAYERS, WIDTH, HEADS, SEQ, BATCH, STEPS, SEED = 2, 128, 4, 64, 12, 20, 0
LIMIT = 1e-5
"""How far the losses of a run in fp32 may be from those of one that sums in another order, of themselves."""
LIMIT_LOW = 2e-2
"""In bf16."""


@dataclass(frozen=True)
class Run:
    """How the model is trained: on which processes, under which transforms, in the order in which they are applied."""

    transforms: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...] = (("data", 1),)
    threads: int = 1
    backend: str = "eager"
    shared_memory: bool = True
    model: str = "gpt"
    restored: bool = False  # stopped in the middle, and gone on from a checkpoint in a step that was compiled anew
    number: int = 1  # to run the same twice

    @property
    def needs(self) -> tuple[int, int]:
        return math.prod(size for _, size in self.axes), self.threads


@dataclass(frozen=True)
class Pair:
    """Two runs, and what is promised of them: the same bits, or another order of summation."""

    name: str
    first: Run
    second: Run
    same: bool
    limit: float = LIMIT


def on(ranks: int, *transforms: str, **more: Any) -> Run:
    return Run(transforms, (("data", ranks),), **more)


def pairs() -> list[Pair]:
    z2, z3, twice, whole = "shard_grads", "shard_params", "accumulate 2", "remat full"
    low, lowest, drawn = "mixed_precision bf16", "mixed_precision bf16 params", "mixed_precision fp32 params"
    one, two, fast = on(1), on(2, z3), on(1, backend="inductor")
    spread = {ranks: on(ranks, z3) for ranks in (2, 3, 4)}
    threads = replace(fast, threads=2)
    nodes, swapped = (Run((z3,), axes) for axes in ((("replica", 2), ("data", 2)), (("data", 2), ("replica", 2))))
    exact = on(1, drawn, model="exact")

    def same(name: str, first: Run, second: Run) -> Pair:
        return Pair(name, first, second, True)

    def near(name: str, first: Run, second: Run, limit: float = LIMIT) -> Pair:
        return Pair(name, first, second, False, limit)

    found = [
        same("the same twice, 1 process", one, replace(one, number=2)),
        same("the same twice, 2 processes", two, replace(two, number=2)),
        same("the same twice, 2 threads, inductor", threads, replace(threads, number=2)),
        same("restored and uninterrupted", two, replace(two, restored=True)),
        same("orders of transforms", on(2, z3, low, twice, whole), on(2, whole, twice, low, z3)),
        same("gloo and shared memory, 2 processes", two, replace(two, shared_memory=False)),
        near("gloo and shared memory, 3 processes", spread[3], replace(spread[3], shared_memory=False)),
        same("axis of size 1, and no axis", one, on(1, z3)),
    ]
    for n in (2, 3):
        z1 = on(n, "shard_opt_state")
        found += [
            near(f"data_parallel and shard_opt_state, {n} processes", on(n, "data_parallel"), z1),
            same(f"shard_opt_state and shard_grads, {n} processes", z1, on(n, z2)),
            same(f"shard_grads and shard_params, {n} processes", on(n, z2), spread[n]),
        ]
    z1_twice, z2_twice, z3_twice = (on(2, name, twice) for name in ("shard_opt_state", z2, z3))
    found += [
        same("shard_grads and shard_params, accumulate(2)", z2_twice, z3_twice),
        near("shard_opt_state and shard_grads, accumulate(2)", z1_twice, z2_twice),
        *(near(f"1 and {n} processes", one, spread[n]) for n in (2, 3, 4)),
        near("2 and 4 processes", two, spread[4]),
        near("data=4, and replica=2, data=2", spread[4], nodes),
        near("replica=2, data=2, and data=2, replica=2", nodes, swapped),
        near("accumulate(1) and (2)", one, on(1, twice)),
        near("accumulate(1) and (4)", one, on(1, "accumulate 4")),
        same("accumulate(2), in a loop and vertical", on(1, twice), on(1, "accumulate 2 layerwise")),
        near("the same with shard_params, 2 processes", z3_twice, on(2, z3, "accumulate 2 layerwise")),
        near("2 processes, and accumulate(2)", two, on(1, twice)),
        *(same(f"remat {kind} and min_cut", on(1, f"remat {kind}"), one) for kind in ("none", "full")),
        near("remat full and min_cut, inductor", on(1, whole, backend="inductor"), fast),
        *(same(f"offload({tier}), and without", on(2, z3, f"offload {tier}"), two) for tier in ("cpu", "nvme")),
        near("eager and inductor", one, fast),
        near("1 and 2 threads, eager", one, on(1, threads=2)),
        near("1 and 2 threads, inductor", fast, threads),
        near("bf16, 1 and 2 processes", on(1, low), on(2, z3, low), LIMIT_LOW),
        same("bf16, shard_grads and shard_params", on(2, z2, low), on(2, z3, low)),
        near("bf16 without masters, 1 and 2 processes", on(1, lowest), on(2, z3, lowest), LIMIT_LOW),
    ]

    def draws(*transforms: str, ranks: int = 1) -> Run:
        given = (z3, drawn, *transforms) if ranks > 1 else (drawn, *transforms)
        return on(ranks, *given, model="exact")

    return [
        *found,
        same("draws: 1 and 2 processes", exact, draws(ranks=2)),
        same("draws: 1 and 4 processes", exact, draws(ranks=4)),
        same("draws: accumulate(1) and (2)", exact, draws(twice)),
        same("draws: remat none and full", draws("remat none"), draws(whole)),
        same("draws: offload(cpu) on 2, and 1 process", draws("offload cpu", ranks=2), exact),
        same("draws: eager and inductor", exact, replace(exact, backend="inductor")),
    ]


# --- one run ---


def train(run: Run, folder: str) -> dict[str, Any] | None:
    """Losses, and the whole state after the first and the last step, from rank 0."""
    torch.set_num_threads(run.threads)
    try:
        return trained(run, folder)
    finally:
        torch.set_num_threads(1)


def trained(run: Run, folder: str) -> dict[str, Any] | None:
    mesh = fz.make_mesh(device="cpu", shared_memory=run.shared_memory, **dict(run.axes))
    step, init, batches = MODELS[run.model]()
    transforms = [transform_of(text, run, folder) for text in run.transforms]
    whole_step = fz.compose(*reversed(transforms))(step)
    compiled = [fz.compile(whole_step, mesh, backend=run.backend) for _ in range(1 + run.restored)]
    size, place = mesh.size, mesh.index(tuple(name for name, _ in run.axes))
    state, losses, states = compiled[0].init(init, fz.random.key(SEED)), [], []
    for i, batch in enumerate(batches):
        if i == len(batches) // 2 and run.restored:
            fz.checkpoint.save(Path(folder, "checkpoint"), state)
            state = compiled[1].restore(Path(folder, "checkpoint"), params=init)
        here = fz.tree.map(lambda x: x.chunk(size)[place].contiguous(), batch)
        state, metrics = compiled[-1 if i >= len(batches) // 2 else 0](state, here)
        losses.append(float(metrics["loss"]))
        if i in (0, len(batches) - 1):
            whole = compiled[0].gather(state)
            states.append([x.clone() for x in fz.tree.leaves((whole.params, whole.opt_state))])
    return {"losses": losses, "states": states} if mesh.rank == 0 else None


def gpt() -> tuple[Any, Any, list[Any]]:
    """The GPT of model.py with dropout on the input of each layer: a step, its parameters, its batches."""
    config = Config(LAYERS, WIDTH, HEADS, SEQ, BATCH)

    def loss_fn(params: Any, batch: Any, *, key: Any) -> Any:
        tokens, targets = batch
        x = embed(params["embed"], tokens)
        for p, k in zip(params["layers"], fz.random.split(key, config.layers), strict=True):
            x = layer(p, fz.random.dropout(k, x, 0.1), config.heads)
        return head(params["head"], x, targets)

    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    return step, make_init(config), make_batches(config, STEPS)


def exact() -> tuple[Any, Any, list[Any]]:
    """A linear function of few bits, so that every sum is exact, in every order: what can differ is what dropout and
    stochastic rounding draw."""

    @fz.block
    def layer(p: Any, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (fz.random.dropout(key, x, 0.5) * p["w"]).sum()

    def loss_fn(params: Any, x: torch.Tensor, *, key: torch.Tensor) -> torch.Tensor:
        return sum(layer(p, x, k) for p, k in zip(params, fz.random.split(key, 2), strict=True)) / x.shape[0]  # type: ignore[return-value]

    def init(key: torch.Tensor) -> Any:
        return [{"w": torch.ones(512)} for _ in range(2)]

    generator = torch.Generator().manual_seed(SEED)
    batches = [torch.randint(-2, 3, (8, 512), generator=generator).float() for _ in range(STEPS)]
    return fz.train_step(loss_fn, optim.sgd(2.0**-10)), init, batches


MODELS: dict[str, Callable[[], tuple[Any, Any, list[Any]]]] = {"gpt": gpt, "exact": exact}


def transform_of(text: str, run: Run, folder: str) -> Any:
    """A transform by its name, and what it is given: `accumulate 2 layerwise`."""
    name, *given = text.split()
    if name == "accumulate":
        return fz.accumulate(int(given[0]), schedule="layerwise" if "layerwise" in given else "sequential")
    if name == "remat":
        return fz.remat(given[0])
    if name == "offload":
        place = {"path": Path(folder)} if given[0] == "nvme" else {}
        return fz.offload(given[0], ("opt_state", "params"), **place)
    if name == "mixed_precision":
        return fz.mixed_precision(given[0], params="bf16" if "params" in given else "fp32")
    spread = getattr(fz, name)(axis="data")
    return fz.compose(spread, fz.data_parallel(axis="replica")) if "replica" in dict(run.axes) else spread


# --- comparing ---


def compared(pair: Pair, found: dict[Run, Any]) -> dict[str, Any]:
    """How far apart two runs are."""
    first, second = found[pair.first], found[pair.second]
    losses = max(abs(a - b) / abs(a) for a, b in zip(first["losses"], second["losses"], strict=True))
    states = list(zip(first["states"], second["states"], strict=True))
    equal = first["losses"] == second["losses"] and all(
        torch.equal(a, b) for xs, ys in states for a, b in zip(xs, ys, strict=True)
    )
    return {"equal": equal, "losses": losses, "leaves": [max(distances(xs, ys), default=0.0) for xs, ys in states]}


def distances(first: list[Any], second: list[Any]) -> Iterator[float]:
    """Of every leaf of floating point the largest difference, in units of its largest element."""
    for a, b in zip(first, second, strict=True):
        if a.is_floating_point() and (largest := float(a.double().abs().max())):
            yield float((a.double() - b.double()).abs().max()) / largest


RunRanks = Callable[..., list[Any]]
known: dict[Run, dict[str, Any]] = {}
"""Runs that several pairs need are trained once per process."""


def result_of(run: Run, run_ranks: RunRanks) -> dict[str, Any]:
    if run not in known:
        with tempfile.TemporaryDirectory(prefix="fzero-same-") as folder:
            known[run] = run_ranks(run.needs[0], train, run, folder, timeout=280)[0]
    return known[run]


FEW = ("the same twice, 1 process", "restored and uninterrupted", "shard_grads and shard_params, 2 processes",
       "draws: 1 and 2 processes")  # fmt: skip
CASES = [pytest.param(pair, id=pair.name, marks=[] if pair.name in FEW else pytest.mark.exhaustive) for pair in pairs()]


@pytest.mark.full
@pytest.mark.parametrize("pair", CASES)
def test_runs_have_the_same_bits_or_another_order_of_summation(pair: Pair, run_ranks: RunRanks) -> None:
    found = compared(pair, {run: result_of(run, run_ranks) for run in (pair.first, pair.second)})
    assert found["equal"] if pair.same else found["losses"] <= pair.limit, found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fzero-same-") as folder:
        pool = Pool(Path(folder), [])
        try:
            found = {
                pair: compared(pair, {run: result_of(run, pool.run) for run in (pair.first, pair.second)})
                for pair in pairs()
            }
        finally:
            pool.close()
    rows = []
    for pair, r in found.items():
        numbers = ("0" if x == 0 else f"{x:.0e}" for x in (r["losses"], *r["leaves"]))
        rows.append((pair.name, "yes" if r["equal"] else "no", *numbers))
    notes = [
        f"{LAYERS} layers, width {WIDTH}, sequence {SEQ}, global batch {BATCH}, dropout 0.1, AdamW after clipping by "
        f"global norm, fp32, eager backend and one thread per process unless said otherwise; {STEPS} steps.",
        "Losses: the largest relative difference of any step. Tensors, of parameters and optimizer state: the largest "
        "difference of an element, relative to the largest element of its tensor.",
        "Draws: dropout and stochastic rounding in a linear function whose sums are exact in every order, so that only "
        "random numbers can differ.",
    ]
    columns = ("", "same bits", "losses", "tensors after 1 step", f"after {STEPS}")
    data = {"pairs": [{"name": pair.name, "promised": pair.same, **r} for pair, r in found.items()]}
    publish("determinism", "Which runs are the same to the bit", columns, rows, notes, data)


if __name__ == "__main__":
    from test_bitwise_equal_runs import main  # by this name ranks find the functions

    main()
