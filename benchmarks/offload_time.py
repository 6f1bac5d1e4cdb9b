"""Whether a step over leaves on disk takes as long as the slower of compute and disk, and not their sum.

    python benchmarks/offload_time.py --path DIR        # 12 layers of width 768, three batch sizes: about 5 minutes on
    2 cores; 5 GB of disk python benchmarks/offload_time.py --path DIR --max-norm 1000 --name offload_time_clipped    #
    8 GB of disk

In one process, in every round in random order: the step without offload, which is the compute; the step with its
optimizer state on disk, and with its parameters there too; and, for either, the disk alone: every read and write of the
step's program, in its order and in its sizes, on other bytes of the same disk, with as many under way as keep the disk
busy. Batch sizes decide which of the two is longer. Losses of all steps must be equal bit for bit.

With `--max-norm` gradients are clipped by their global norm, so that an update must know all of them. By default one
that is never reached: the updates run on the guess that nothing is clipped. Beside it the same step with a disk that
has no room for a guess: its updates wait.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from common import MODEL, Group, model_flags, passed_on, publish, script_flags, serve, settings, verdict

LIMIT = 1.15  # of max(compute, disk)
LR = 1e-4
OFFLOADED = {"opt_state": ("opt_state",), "both": ("opt_state", "params"), "waiting": ("opt_state", "params")}
TITLES = {
    "opt_state": "optimizer state on disk",
    "both": "parameters too",
    "waiting": "parameters too, updates that wait",
}
DEPTH = 3  # transfers under way when the disk is alone: a block read, one updated, one written


def worker(args: argparse.Namespace) -> None:
    live: dict[str, Callable[[], float | None]] = {}
    moved: dict[str, float] = {}

    def build() -> dict[str, Any]:
        import torch
        from model import Config, make_batches, make_init, make_loss

        import fzero as fz
        from fzero import optim

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        config, mesh = (
            Config(args.layers, args.width, args.heads, args.seq, args.batch),
            fz.make_mesh(data=1, device="cpu"),
        )
        (batch,) = make_batches(config, 1)
        direct = True
        optimizer = (
            optim.adamw(LR)
            if args.max_norm is None
            else optim.chain(optim.clip_by_global_norm(args.max_norm), optim.adamw(LR))
        )
        for name in ("compute", *offloaded(args)):
            transforms = [fz.offload("nvme", OFFLOADED[name], path=args.path)] if name in OFFLOADED else []
            step = fz.compose(*transforms)(fz.train_step(make_loss(config), optimizer))
            # 12 bytes a parameter, and some to fill sectors
            budget = {"disk_budget": 13 * config.num_params} if name == "waiting" else {}
            train = fz.compile(step, mesh, backend=args.backend, **budget)
            live[name] = _stepper(train, train.init(make_init(config), fz.random.key(0)), batch)
            if name in OFFLOADED:
                live[name]()
                live[f"{name}, disk alone"], moved[name], files = _disk_alone(train, args.path)
                direct = direct and files.direct
        return {"moved": moved, "direct": direct, "parameters": config.num_params}

    def turn(name: str) -> dict[str, Any]:
        begin = time.perf_counter()
        loss = live[name]()
        return {"seconds": time.perf_counter() - begin, "loss": loss}

    serve({"build": build, "turn": turn})


def offloaded(args: argparse.Namespace) -> list[str]:
    """Which steps with leaves on disk are measured."""
    return [name for name in OFFLOADED if name != "waiting" or args.max_norm is not None]


def _stepper(train: Any, state: Any, batch: Any) -> Callable[[], float]:
    def run() -> float:
        nonlocal state
        state, metrics = train(state, batch)
        return float(metrics["loss"])

    return run


def _disk_alone(train: Any, path: list[str]) -> tuple[Callable[[], None], float, Any]:
    """What moves the bytes of a step and does nothing else; their number, in GB; the files."""
    from fzero.comm import disk

    program = train.program
    # of every leaf on disk: where its bytes begin here, and how many whole blocks they are
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, leaf in program.leaves.items():
        if leaf.layout.tier == "disk":
            offsets[name] = end, disk.padded(math.prod(leaf.resting_shape(program.mesh)) * leaf.dtype.itemsize)
            end += offsets[name][1]
    # not those of a wrong guess
    copies = [line for line, times in program.walk() if times and line.op in ("disk_read_start", "disk_write_start")]
    transfers = [(line.op, [offsets[a] for a in line.writes or line.args]) for line in copies]
    largest = max(sum(size for _, size in spans) for _, spans in transfers)
    files, ring = disk.Files(path, end), [disk.aligned(largest).fill_(7) for _ in range(DEPTH)]

    def run() -> None:
        under_way: list[Any] = []
        for k, (op, spans) in enumerate(transfers):
            if len(under_way) == DEPTH:
                under_way.pop(0).wait()
            runs, at = [], 0
            for offset, size in spans:
                runs.append((offset, ring[k % DEPTH][at : at + size]))
                at += size
            under_way.append((files.read if op == "disk_read_start" else files.write)(runs))
        for transfer in under_way:
            transfer.wait()

    # the first write to a block costs more
    files.write([(at, ring[0][: min(largest, end - at)]) for at in range(0, end, largest)]).wait()
    return run, sum(size for _, spans in transfers for _, size in spans) / 1e9, files


# --- measuring ---


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    points = []
    names = ["compute", *offloaded(args), *(f"{name}, disk alone" for name in offloaded(args))]
    with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as cache:
        for batch in args.batches:
            sizes = passed_on(
                argparse.Namespace(**{**vars(args), "batch": batch}),
                *MODEL,
                "backend",
                *(["max_norm"] if args.max_norm is not None else []),
            )
            with Group(
                __file__, 1, [*sizes, "--path", *args.path], threads=args.threads, timeout=3000, cache=cache
            ) as group:
                (built,) = group.ask("build")
                rounds, losses = [], {name: [] for name in names}
                for number in range(args.rounds + 1):
                    seconds = {}
                    for name in random.Random(number).sample(names, len(names)):
                        (answer,) = group.ask("turn", name=name)
                        seconds[name] = answer["seconds"]
                        losses[name].append(answer["loss"])
                    if number:  # the first warms up
                        rounds.append(seconds)
            points.append(
                {
                    "batch": batch,
                    **built,
                    "rounds": rounds,
                    "losses": {name: losses[name] for name in ("compute", *offloaded(args))},
                }
            )
            print(f"batch {batch}: done", file=sys.stderr, flush=True)
    return points


# --- what it comes to ---


def report(args: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    rows, verdicts = [], []
    for x in points:
        for name in offloaded(args):
            title = TITLES[name]
            rounds = [(r["compute"], r[f"{name}, disk alone"], r[name]) for r in x["rounds"]]
            compute, disk, step = (statistics.median(r[i] for r in rounds) for i in range(3))
            ratios = [step / max(compute, disk) for compute, disk, step in rounds]
            ratio, moved, who = statistics.median(ratios), x["moved"][name], f"batch {x['batch']}, {title}"
            x[f"{name} / max(compute, disk)"] = {
                "median": ratio,
                "min": min(ratios),
                "max": max(ratios),
                "limit": LIMIT,
            }
            of_sum = statistics.median(s / (c + d) for c, d, s in rounds)
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append(
                (
                    who,
                    *(f"{s:.2f}" for s in (compute, disk, step)),
                    f"{ratio:.2f}",
                    span,
                    f"{of_sum:.2f}",
                    f"{moved:.2f}",
                    f"{moved / disk:.2f}",
                )
            )
            if name != "waiting":
                verdicts.append(
                    f"{who}: {ratio:.2f} x max(compute, disk), at most {LIMIT:g} wanted: {verdict(ratio, LIMIT)}"
                )
    same = all(_agree(x["losses"]) for x in points)
    verdicts.append(f"losses equal bit for bit to those without offload, in every step: {'met' if same else 'MISSED'}")
    clip = "" if args.max_norm is None else f", clipped at a norm of {args.max_norm:g}"
    notes = [
        f"{points[0]['parameters'] / 1e6:.0f} M parameters ({args.layers} layers, width {args.width}), fp32, "
        f"AdamW{clip}, sequence {args.seq}, one process, "
        f"{args.threads} threads, {args.backend} backend; "
        f"{'O_DIRECT' if all(x['direct'] for x in points) else 'through the page cache'}.",
        f"Medians of {args.rounds} interleaved rounds, ratios within a round. Compute: the step without offload. Disk: "
        f"the step's reads and writes alone, "
        f"{DEPTH} under way.",
        *verdicts,
    ]
    columns = ("", "compute s", "disk s", "step s", "x max", "over the rounds", "x sum", "disk GB", "GB/s alone")
    publish(
        args.name,
        "A step over leaves on disk",
        columns,
        rows,
        notes,
        {"settings": settings(args, "path", "batch"), "points": points},
        args.out,
    )


def _agree(losses: dict[str, list[float]]) -> bool:
    """All train on one batch; those on disk have taken one step more, before the first turn."""
    return all(losses[name][:-1] == losses["compute"][1:] for name in losses if name != "compute")


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
    else:
        report(args, measure(args))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=12, width=768, heads=12, seq=256, batch=None)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4], help="sequences a step; each is measured by itself"
    )
    parser.add_argument(
        "--path", nargs="+", default=[tempfile.gettempdir()], help="directories on the disk that holds the leaves"
    )
    parser.add_argument("--max-norm", type=float, help="clip gradients by their global norm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    script_flags(parser, "offload_time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
