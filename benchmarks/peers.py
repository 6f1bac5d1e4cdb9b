"""The step of fzero beside its peers: one model, one batch, the same processes, interleaved in one run.

    python benchmarks/peers.py                      # all contestants, about 5 minutes on 2 cores
    python benchmarks/peers.py --only fzero_zero3 fsdp2_compile

Every contestant is a pair of processes that lives through the whole run and steps when it is told to; the others wait. So drift of the
machine meets all alike, and what is compared are ratios within a round. All start from the same parameters, see the same batches,
clip by global norm and update with AdamW. Peers use torch's fused AdamW unless told otherwise: the fastest it has on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS, Group, peak_mib, publish, reset_peak, rss_mib, serve

CONTESTANTS = {
    "fzero_zero3": "fzero ZeRO-3",
    "fzero_zero2": "fzero ZeRO-2",
    "fzero_zero1": "fzero ZeRO-1",
    "fzero_zero0": "fzero data parallel",
    "fzero_zero3_bf16": "fzero ZeRO-3, bf16",
    "fsdp2_compile": "FSDP2 + compile per block",
    "fsdp2": "FSDP2",
    "ddp": "DDP",
    "fsdp2_bf16": "FSDP2, bf16",
}
OPTIONAL = {"fsdp2_bf16"}  # minutes a step on a CPU without native bf16
LR, WEIGHT_DECAY, MAX_NORM = 3e-4, 0.01, 1.0


# --- one process of a contestant ---


def worker(args: argparse.Namespace) -> None:
    import os

    import torch
    from model import Config, make_batches

    import fzero as fz

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh()
    rank, size = mesh.rank, mesh.size
    batches = [tuple(t.chunk(size)[rank].contiguous() for t in batch) for batch in make_batches(config, 16)]
    live: dict[str, Any] = {"done": 0}

    def build() -> dict[str, float]:
        live["rss"] = rss_mib()
        reset_peak()
        start = time.perf_counter()
        make = _fzero if args.contestant.startswith("fzero") else _peer
        live["step"] = make(args, config, mesh)
        return {"setup_s": time.perf_counter() - start}

    def steps(count: int) -> dict[str, Any]:
        losses = []
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            losses.append(live["step"](batches[live["done"] % len(batches)]))
            live["done"] += 1
        losses = [float(x) for x in losses]
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "losses": losses}

    def settle() -> dict[str, float]:
        """Memory: the peak so far, and from here on a peak of its own."""
        peak = peak_mib() - live["rss"]
        reset_peak()
        return {"growth_mib": peak}

    serve({"build": build, "steps": steps, "settle": settle, "ready": lambda: {"pid": os.getpid()}})
    fz.close_mesh()


def _fzero(args: argparse.Namespace, config: Any, mesh: Any) -> Callable[[Any], Any]:
    from model import make_init, make_loss

    import fzero as fz
    from fzero import optim

    _, stage, *precision = args.contestant.split("_")
    zero = {"zero0": fz.data_parallel, "zero1": fz.shard_opt_state, "zero2": fz.shard_grads, "zero3": fz.shard_params}[stage]
    step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY)))
    step = fz.compose(zero(axis="data"), *(fz.mixed_precision(p) for p in precision))(step)
    train = fz.compile(step, mesh, backend=args.backend)
    state = train.init(make_init(config), fz.random.key(0))

    def run(batch: Any) -> Any:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"]

    return run


def _peer(args: argparse.Namespace, config: Any, mesh: Any) -> Callable[[Any], Any]:
    import torch
    from model import GPT, make_init
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import fzero as fz

    name = args.contestant
    model: Any = GPT(make_init(config)(fz.random.key(0)), config.heads)
    if name == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if name.endswith("bf16") else MixedPrecisionPolicy()
        for block in (model.embed, *model.layers, model.head):
            if name == "fsdp2_compile":
                block.compile(fullgraph=True)
            fully_shard(block, mesh=mesh.device_mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh.device_mesh, mp_policy=policy)
    options: Any = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[args.optimizer]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **options)

    def run(batch: Any) -> Any:
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


# --- the coordinator ---


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    names = args.only or [n for n in CONTESTANTS if n not in OPTIONAL]
    shared = [f"--{k}={getattr(args, k)}" for k in ("layers", "width", "heads", "seq", "batch", "optimizer", "backend")]
    groups: dict[str, Group] = {}
    found: dict[str, dict[str, Any]] = {}
    try:
        for name in names:
            groups[name] = Group(__file__, args.processes, ["--contestant", name, *shared])
            groups[name].ask("ready")
            setup = groups[name].ask("build")
            first = groups[name].ask("steps", count=1)
            second = groups[name].ask("steps", count=args.warmup)
            growth = groups[name].ask("settle")
            found[name] = {
                "setup_s": max(x["setup_s"] for x in setup),
                "first_step_s": max(x["wall_s"] for x in first),
                "build_growth_mib": statistics.mean(x["growth_mib"] for x in growth),
                "losses": _mean_losses(first) + _mean_losses(second),
                "rounds": [],
            }
            print(f"{name}: ready, first step {found[name]['first_step_s']:.1f} s", file=sys.stderr, flush=True)
        for number in range(args.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                answers = groups[name].ask("steps", count=args.steps)
                wall = max(x["wall_s"] for x in answers) / args.steps
                cpu = statistics.mean(x["cpu_s"] for x in answers) / args.steps
                found[name]["rounds"].append({"wall_s": wall, "cpu_s": cpu})
                found[name]["losses"] += _mean_losses(answers)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for name in names:
            found[name]["growth_mib"] = statistics.mean(x["growth_mib"] for x in groups[name].ask("settle"))
    finally:
        for group in groups.values():
            group.close()
    report(args, names, found)


def _mean_losses(answers: list[dict[str, Any]]) -> list[float]:
    """The loss of the whole batch, step by step: the mean of the ranks', which fzero has taken already."""
    return [statistics.mean(step) for step in zip(*(x["losses"] for x in answers), strict=True)]


def report(args: argparse.Namespace, names: list[str], found: dict[str, dict[str, Any]]) -> None:
    for name in names:
        for kind in ("wall_s", "cpu_s"):
            found[name][kind] = statistics.median(r[kind] for r in found[name]["rounds"])
    ratios = {}
    for top, bottom, kind, limit in (
        ("fzero_zero3", "fsdp2_compile", "cpu_s", 1.0),
        ("fzero_zero3", "fsdp2_compile", "wall_s", None),
        ("fzero_zero3", "ddp", "cpu_s", None),
        ("fzero_zero0", "ddp", "cpu_s", None),
        ("fzero_zero3_bf16", "fzero_zero3", "cpu_s", 1.2),
        ("fzero_zero3_bf16", "fzero_zero3", "wall_s", 1.2),
    ):
        if top in found and bottom in found:
            each = [a[kind] / b[kind] for a, b in zip(found[top]["rounds"], found[bottom]["rounds"], strict=True)]
            ratios[f"{top} / {bottom}, {kind}"] = {"median": statistics.median(each), "min": min(each), "max": max(each), "limit": limit}
    fp32 = [n for n in names if not n.endswith("bf16")]
    checks: dict[str, Any] = {}
    if fp32:
        curves = [found[n]["losses"] for n in fp32]
        spread = [(max(at) - min(at)) / min(at) for at in zip(*curves, strict=True)]
        checks["fp32 losses agree (largest relative difference)"] = {"value": max(spread), "limit": 1e-4, "step": spread.index(max(spread))}
    rows = [
        (
            CONTESTANTS[n],
            f"{found[n]['wall_s']:.3f}",
            f"{found[n]['cpu_s']:.3f}",
            f"{found[n]['first_step_s']:.1f}",
            f"{found[n]['build_growth_mib']:.0f}",
            f"{found[n]['growth_mib']:.0f}",
            f"{found[n]['losses'][-1]:.5f}",
        )
        for n in names
    ]
    from model import Config

    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    notes = [
        f"{config.num_params / 1e6:.1f} M parameters ({config.layers} layers, width {config.width}, {config.heads} heads), sequence {config.seq}, "
        f"global batch {config.batch}, {args.processes} processes with one thread each over gloo, AdamW ({args.optimizer} for the peers), clipping; "
        f"medians of {args.rounds} interleaved rounds of {args.steps} steps."
    ]
    notes += [
        f"{k}: {v['median']:.3f} (rounds {v['min']:.3f} to {v['max']:.3f})"
        + (f", at most {v['limit']:g} wanted: {_verdict(v['median'], v['limit'])}" if v["limit"] else "")
        for k, v in ratios.items()
    ]
    notes += [f"{k}: {v['value']:.1e} at step {v['step']}, at most {v['limit']:g} wanted: {_verdict(v['value'], v['limit'])}" for k, v in checks.items()]
    columns = ("", "wall s/step", "CPU s/step and rank", "first step s", "growth MiB, build", "growth MiB, steps", "last loss")
    settings = {k: v for k, v in vars(args).items() if k not in ("worker", "contestant", "out")}
    data = {"settings": settings, "contestants": found, "ratios": ratios, "checks": checks}
    publish(args.name, "One step, beside its peers", columns, rows, notes, data, args.out)


def _verdict(value: float, limit: float) -> str:
    return "met" if value <= limit else "MISSED"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="global")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2, help="steps after the first that are not measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help=f"default: all but {', '.join(OPTIONAL)}")
    parser.add_argument("--optimizer", choices=["fused", "foreach", "loop"], default="fused", help="the peers' AdamW")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="fzero's")
    parser.add_argument("--name", default="peers", help="of the files in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
