"""Which runs are the same to the bit, and how far apart the others are: pairs of runs, trained from one start."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import verdict

from cases import Table, processes, sizes

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


# --- a process ---


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import torch

    import fzero as fz

    runs = {repr(run): run for pair in pairs() for run in (pair.first, pair.second)}

    def train(name: str, folder: str, out: str) -> None:
        """Losses and, of the first and the last step, the whole state: in a file, which rank 0 writes."""
        run = runs[name]
        mesh = fz.make_mesh(device="cpu", shared_memory=run.shared_memory, **dict(run.axes))
        step, init, batches = MODELS[run.model](args)
        transforms = [transform_of(text, run, folder) for text in run.transforms]
        compiled = [
            fz.compile(fz.compose(*reversed(transforms))(step), mesh, backend=run.backend)
            for _ in range(1 + run.restored)
        ]
        axes = [name for name, _ in run.axes]
        size, place = mesh.size, mesh.index(tuple(axes))
        state, losses, states = compiled[0].init(init, fz.random.key(args.seed)), [], []
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
        if mesh.rank == 0:
            torch.save({"losses": losses, "states": states}, out)

    return {"train": train}


def gpt(args: argparse.Namespace) -> tuple[Any, Any, list[Any]]:
    """The GPT of model.py with dropout on what enters each layer: a step, its parameters, its batches."""
    from model import Config, embed, head, layer, make_batches, make_init

    import fzero as fz
    from fzero import optim

    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)

    def loss_fn(params: Any, batch: Any, *, key: Any) -> Any:
        tokens, targets = batch
        x = embed(params["embed"], tokens)
        for p, k in zip(params["layers"], fz.random.split(key, config.layers), strict=True):
            x = layer(p, fz.random.dropout(k, x, 0.1), config.heads)
        return head(params["head"], x, targets)

    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    return step, make_init(config), make_batches(config, args.steps)


def exact(args: argparse.Namespace) -> tuple[Any, Any, list[Any]]:
    """A linear function of few bits, so that every sum is exact, in every order: what can differ is what dropout and
    stochastic rounding draw."""
    import torch

    import fzero as fz
    from fzero import optim

    @fz.block
    def layer(p: Any, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (fz.random.dropout(key, x, 0.5) * p["w"]).sum()

    def loss_fn(params: Any, x: torch.Tensor, *, key: torch.Tensor) -> torch.Tensor:
        return sum(layer(p, x, k) for p, k in zip(params, fz.random.split(key, 2), strict=True)) / x.shape[0]  # type: ignore[return-value]

    def init(key: torch.Tensor) -> Any:
        return [{"w": torch.ones(512)} for _ in range(2)]

    generator = torch.Generator().manual_seed(args.seed)
    batches = [torch.randint(-2, 3, (8, 512), generator=generator).float() for _ in range(args.steps)]
    return fz.train_step(loss_fn, optim.sgd(2.0**-10)), init, batches


MODELS: dict[str, Callable[[argparse.Namespace], tuple[Any, Any, list[Any]]]] = {"gpt": gpt, "exact": exact}


def transform_of(text: str, run: Run, folder: str) -> Any:
    """A transform by its name, and what it is given: `accumulate 2 layerwise`."""
    import fzero as fz

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


def trained(runs: list[Run], args: argparse.Namespace, folder: str) -> dict[Run, Any]:
    """Losses and states of each run. Processes are started once for all runs on as many, with as many threads."""
    import torch

    found: dict[Run, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as cache:
        for count, threads in sorted({run.needs for run in runs}):
            with processes(args, count, threads=threads, cache=cache) as group:
                for run in (run for run in runs if run.needs == (count, threads)):
                    print(f"{run} ...", file=sys.stderr, flush=True)
                    out = str(Path(folder, f"{len(found)}.pt"))
                    group.ask("train", name=repr(run), folder=folder, out=out)
                    found[run] = torch.load(out, weights_only=True)
    return found


def compared(pair: Pair, found: dict[Run, Any]) -> dict[str, Any]:
    """How far apart two runs are."""
    import torch

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


def determinism(args: argparse.Namespace) -> Table:
    """Which runs are the same to the bit, and how far apart the others are: a small GPT with dropout, trained twice.

    Compared are the losses of all steps, and all leaves of parameters and optimizer state after the first step and
    the last. No time is measured: other work may go on beside it. `--only TEXT`: the pairs whose names contain it.
    """
    chosen = [pair for pair in pairs() if not args.only or any(text in pair.name for text in args.only)]
    runs = list(dict.fromkeys(run for pair in chosen for run in (pair.first, pair.second)))
    with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder:
        found = trained(runs, args, folder)
    results = {pair: compared(pair, found) for pair in chosen}
    rows = []
    for pair, r in results.items():
        distances = ("0" if x == 0 else f"{x:.0e}" for x in (r["losses"], *r["leaves"]))
        rows.append((pair.name, "yes" if r["equal"] else "no", *distances, _kept(pair, r)))
    notes = [
        f"{sizes(args)}, dropout 0.1, AdamW after clipping by global norm, fp32, eager backend and one thread a "
        f"process unless said otherwise; {args.steps} steps.",
        "Losses: the largest relative difference of any step. Leaves, of parameters and optimizer state: the largest "
        "difference of an element, relative to the largest element of its leaf.",
        "Draws: dropout and stochastic rounding in a linear function whose sums are exact in every order, so that only "
        "what is drawn can differ.",
        f"Wanted: the same bits where they are promised; losses within {LIMIT:g} elsewhere, in bf16 within "
        f"{LIMIT_LOW:g}.",
    ]
    columns = ("", "same bits", "losses", "leaves after 1 step", f"after {args.steps}", "wanted")
    data = {"pairs": [{"name": pair.name, "promised": pair.same, **r} for pair, r in results.items()]}
    return Table("Which runs are the same to the bit", columns, rows, notes, data)


def _kept(pair: Pair, result: dict[str, Any]) -> str:
    if pair.same:
        return f"same bits: {verdict(0 if result['equal'] else 1, 0)}"
    return f"{pair.limit:g}: {verdict(result['losses'], pair.limit)}"
