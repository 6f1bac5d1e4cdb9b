"""What dynamic loss scaling costs, or the precision watch: a step with it beside the same step without, in turns.

    python benchmarks/precision_overhead.py                  # loss scaling, of the GPT of peers.py on one and two
    processes: about 4 minutes on 2 cores python benchmarks/precision_overhead.py --watch fp32     # the watch, of the
    same model in fp32 (or bf16)

Both clip by global norm, so that the norm in which overflow is found is needed either way; `--unclipped` measures what
it costs where it is a metric alone, and updates would otherwise run right behind each block's backward. The steps of
the two alternate, so that they share whatever the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import MODEL, Group, model_flags, passed_on, publish, script_flags, serve, settings, verdict

LIMITS = {"scaling": 1.02, "watch": 1.01}


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim
    from fzero.transforms.precision import MixedPrecision

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh(device="cpu" if args.cpu else None)
    batch = tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in make_batches(config, 1)[0])
    optimizer = optim.adamw(3e-4) if args.unclipped else optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))

    def measure() -> dict[str, Any]:
        runs: dict[str, Any] = {}
        if args.watch is None:
            pair = {
                "plain": MixedPrecision("fp16"),
                "scaled": fz.mixed_precision("fp16", loss_scale=fz.LossScale(initial=2.0**10)),
            }
        else:
            pair = {"plain": fz.mixed_precision(args.watch), "watched": fz.mixed_precision(args.watch, watch=True)}
        for name, transform in pair.items():
            train = fz.compile(
                fz.shard_params(transform(fz.train_step(make_loss(config), optimizer))), mesh, backend=args.backend
            )
            runs[name] = [train, train.init(make_init(config), fz.random.key(0)), []]

        def one(name: str) -> float:
            train, state, _ = runs[name]
            start = time.perf_counter()
            runs[name][1], metrics = train(state, batch)
            float(metrics["loss"])
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        for i in range(args.warmup + args.steps):
            for name in runs if i % 2 else reversed(runs):
                seconds = one(name)
                if i >= args.warmup:
                    runs[name][2].append(seconds)
        (_, (_, state, _)) = runs.values()
        skipped = int(state.extras["loss_scale"].skipped) if "loss_scale" in state.extras else 0
        return {**{f"{name}_s": seconds for name, (_, _, seconds) in runs.items()}, "skipped": skipped}

    serve({"measure": measure})
    fz.close_mesh()


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    found, rows, notes = {}, [], []
    flags = [flag for flag, given in (("--unclipped", args.unclipped), ("--cpu", args.cpu)) if given]
    flags += [] if args.watch is None else ["--watch", args.watch]
    limit, other = LIMITS["scaling" if args.watch is None else "watch"], "scaled" if args.watch is None else "watched"
    for processes in args.processes:
        with Group(
            __file__, processes, [*passed_on(args, *MODEL, "backend", "steps", "warmup"), *flags], timeout=1800
        ) as group:
            answers = group.ask("measure")
        name = f"{processes} process{'es' * (processes > 1)}"
        slower = (
            [max(times) for times in zip(*(x[k] for x in answers), strict=True)] for k in ("plain_s", f"{other}_s")
        )
        pairs = list(zip(*slower, strict=True))
        plain, more = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        found[name] = answers
        rows.append(
            (
                name,
                f"{1e3 * plain:.1f}",
                f"{1e3 * more:.1f}",
                f"{ratio:.3f}",
                *([answers[0]["skipped"]] if args.watch is None else []),
            )
        )
        notes.append(f"{name}: {ratio:.3f} times the step without, at most {limit:g} wanted: {verdict(ratio, limit)}")
    notes = [
        f"{args.layers} layers, width {args.width}, sequence {args.seq}, global batch {args.batch}, ZeRO-3, "
        f"AdamW{'' if args.unclipped else ' after clipping'}, one thread a process, {args.backend} backend; "
        f"medians of {args.steps} steps in turns, of the slower rank, and of their ratios.",
        *notes,
    ]
    columns = (
        ("", "fp16 ms", "with dynamic loss scaling ms", "ratio", "skipped")
        if args.watch is None
        else ("", f"{args.watch} ms", "watched ms", "ratio")
    )
    title = "Dynamic loss scaling" if args.watch is None else "Precision watch"
    publish(args.name, title, columns, rows, notes, {"settings": settings(args), "points": found}, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=4, width=512, heads=8, seq=128, batch=8)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--unclipped", action="store_true", help="without clipping")
    parser.add_argument(
        "--watch", choices=["fp32", "bf16"], help="measures the precision watch, of a step in this dtype"
    )
    parser.add_argument("--cpu", action="store_true", help="also where there is a CUDA device")
    script_flags(parser, "")
    args = parser.parse_args()
    args.name = args.name or ("precision_overhead" if args.watch is None else "precision_watch")
    return args


if __name__ == "__main__":
    main()
