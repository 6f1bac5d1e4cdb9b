"""What Python costs: the part of a step spent outside blocks and transfers, in a deep and narrow model where little
else is left.

    python benchmarks/overhead.py                   # 64 layers of width 64, about 3 minutes on 2 cores

The program that trains runs with a clock around every function and every transfer it names; what is left of the step's
wall time is its own lines, the checks of state and batch before them, and the small operations that are neither (casts,
shards, copies of new parameters). The clocks' own time is in it. A second run has none, to say how long a step takes
without them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import MODEL, Group, model_flags, passed_on, publish, script_flags, serve, settings, verdict

LIMIT_MS = 5.0
STAGES = {"zero0": "data_parallel", "zero1": "shard_opt_state", "zero2": "shard_grads", "zero3": "shard_params"}
OTHER = ("cast", "take_shard", "take_part", "part_index", "num_valid", "draw_start", "accumulate", "assign")


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh(device="cpu")
    batch = tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in make_batches(config, 1)[0])

    def measure(stage: str) -> dict[str, Any]:
        step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
        train = fz.compile(getattr(fz, STAGES[stage])(step, axis="data"), mesh, backend=args.backend)
        state = train.init(make_init(config), fz.random.key(0))

        def one() -> float:
            nonlocal state
            start = time.perf_counter()
            state, metrics = train(state, batch)
            seconds = time.perf_counter() - start
            float(metrics["loss"])
            return seconds

        for _ in range(args.warmup):
            one()
        plain = [one() for _ in range(args.steps)]
        run = next(iter(train._runs.values())).run
        lines = [line for line, times in train.program.walk() for _ in range(times) if line.op != "loop"]
        spent: dict[str, list[float]] = {"blocks": [], "transfers": [], "other": []}
        for name in {line.fn or line.op for line in lines}:
            kind = "blocks" if name in train.program.functions else "other" if name in OTHER else "transfers"
            run.namespace[name] = _timed(run.namespace[name], spent[kind])
        one()
        points = []
        for _ in range(args.steps):
            for times in spent.values():
                times.clear()
            whole = one()
            inside = {kind: sum(times) for kind, times in spent.items()}
            points.append(
                {
                    "step_s": whole,
                    **{f"{k}_s": v for k, v in inside.items()},
                    "outside_s": whole - inside["blocks"] - inside["transfers"],
                }
            )
        calls = {kind: len(times) for kind, times in spent.items()}
        return {"plain_s": statistics.median(plain), "points": points, "lines": len(lines), "calls": calls}

    serve({"measure": measure})
    fz.close_mesh()


def _timed(fn: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    clock, add = time.perf_counter, spent.append

    def call(*args: Any, **keywords: Any) -> Any:
        start = clock()
        result = fn(*args, **keywords)
        add(clock() - start)
        return result

    return call


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    found: dict[str, dict[str, Any]] = {}
    for processes in args.processes:
        for stage in args.stages:
            with Group(
                __file__, processes, passed_on(args, *MODEL, "backend", "steps", "warmup"), timeout=1200
            ) as group:
                answers = group.ask("measure", stage=stage)
            middle = [{k: statistics.median(p[k] for p in x["points"]) for k in x["points"][0]} for x in answers]
            slower = max(range(len(answers)), key=lambda rank: middle[rank]["outside_s"])
            found[f"{stage}, {processes} process{'es' * (processes > 1)}"] = answers[slower] | middle[slower]
    report(args, found)


def report(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    rows, notes = [], []
    for name, x in found.items():
        milliseconds = [
            f"{1e3 * x[k]:.2f}" for k in ("plain_s", "step_s", "blocks_s", "transfers_s", "other_s", "outside_s")
        ]
        rows.append((name, x["lines"], *milliseconds))
        outside = 1e3 * x["outside_s"]
        notes.append(
            f"{name}: {outside:.2f} ms outside blocks and transfers, under {LIMIT_MS:g} wanted: "
            f"{verdict(outside, LIMIT_MS)}"
        )
    columns = ("", "lines", "step ms", "with clocks ms", "blocks ms", "transfers ms", "other lines ms", "outside ms")
    notes = [
        f"{args.layers} layers, width {args.width}, sequence {args.seq}, global batch {args.batch}, one thread a "
        f"process, {args.backend} backend; "
        f"medians of {args.steps} steps, the rank with more.",
        "Outside: the step with clocks, less blocks and transfers; the other lines are part of it.",
        *notes,
    ]
    publish(
        args.name,
        "Python's part of a step",
        columns,
        rows,
        notes,
        {"settings": settings(args), "points": found},
        args.out,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=64, width=64, heads=4, seq=8, batch=2)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=["zero3", "zero1"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    script_flags(parser, "overhead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
