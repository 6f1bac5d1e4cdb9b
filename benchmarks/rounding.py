"""What stochastic rounding costs: the first build of its functions, and a step, beside rounding to nearest.

    python benchmarks/rounding.py                   # 4 layers of width 128, about 2 minutes on 2 cores

Parameters rest in bfloat16. Build: CPU seconds from calling the compiled step for the first time to the end of that
step, of the process and of the compilers that it starts, with empty caches. Step: CPU seconds, one thread. Each way of
rounding is a process of its own; their rounds of steps alternate.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

from common import MODEL, Group, model_flags, passed_on, publish, script_flags, serve, settings, verdict

LIMIT = 2.0  # build with stochastic rounding / build without
ROUNDINGS = ("nearest", "stochastic")


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh(device="cpu")
    batch = make_batches(config, 1)[0]
    step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
    step = fz.mixed_precision("bf16", params="bf16", rounding=args.rounding)(fz.shard_params(step, axis="data"))
    train: Any = fz.compile(step, mesh, backend=args.backend)
    state: Any = None

    def build() -> dict[str, Any]:
        nonlocal state
        state = train.init(make_init(config), fz.random.key(0))
        before = _cpu_seconds()
        state, metrics = train(state, batch)
        return {
            "build_s": _cpu_seconds() - before,
            "loss": float(metrics["loss"]),
            "functions": len(train.program.functions),
        }

    def steps(count: int) -> dict[str, Any]:
        nonlocal state
        times = []
        for _ in range(count):
            start = time.process_time()
            state, _ = train(state, batch)
            times.append(time.process_time() - start)
        return {"step_s": statistics.median(times)}

    serve({"build": build, "steps": steps})
    fz.close_mesh()


def _cpu_seconds() -> float:
    """Of this process and of those it has started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    groups = {
        r: Group(__file__, 1, [*passed_on(args, *MODEL, "backend"), f"--rounding={r}"], timeout=3600) for r in ROUNDINGS
    }
    try:
        found = {r: group.ask("build")[0] for r, group in groups.items()}
        for group in groups.values():
            group.ask("steps", count=2)
        rounds = [
            {r: group.ask("steps", count=args.steps)[0]["step_s"] for r, group in groups.items()}
            for _ in range(args.rounds)
        ]
    finally:
        for group in groups.values():
            group.close()
    for r in ROUNDINGS:
        found[r]["step_s"] = statistics.median(x[r] for x in rounds)
    build, step = (found["stochastic"][k] / found["nearest"][k] for k in ("build_s", "step_s"))
    rows = [(r, f"{x['build_s']:.1f}", f"{1e3 * x['step_s']:.1f}", x["functions"]) for r, x in found.items()]
    notes = [
        f"{args.layers} layers, width {args.width}, sequence {args.seq}, batch {args.batch}, bf16 parameters, AdamW, "
        "clipping; one process with one thread, "
        f"{args.backend} backend, empty caches; steps: medians of {args.rounds} alternating rounds of {args.steps}.",
        f"build, stochastic / nearest: {build:.2f}, at most {LIMIT:g} wanted: {verdict(build, LIMIT)}",
        f"step, stochastic / nearest: {step:.2f}",
    ]
    columns = ("", "build CPU s", "step CPU ms", "functions")
    data = {
        "settings": settings(args, "rounding"),
        "points": found,
        "rounds": rounds,
        "build_ratio": build,
        "step_ratio": step,
    }
    publish(args.name, "Stochastic rounding", columns, rows, notes, data, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=4, width=128, heads=4, seq=32, batch=8)
    parser.add_argument("--rounding", choices=ROUNDINGS, default="nearest", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    script_flags(parser, "rounding")
    return parser.parse_args()


if __name__ == "__main__":
    main()
