"""How tracing and building grow with depth: a block is traced once and compiled once, however many layers call it.

    python benchmarks/build_time.py                 # 4, 16, 64 layers, about 3 minutes on 2 cores
    python benchmarks/build_time.py --peers 4 16    # and torch.compile of the whole model: a minute and more a point

Every point is measured in fresh processes. Trace: `fz.lower`, from functions to the finished program, in one process.
Build: from calling the compiled step for the first time to the end of that step, tracing and one step included, with
empty caches. Warm start: the same job started again with what the first run left in the cache: from the start of the
process, Python's and torch's own included, to the end of the first step. Both are what a user waits for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Group, peak_mib, publish, rss_mib, serve

TRACE_LIMIT_S, BUILD_LIMIT, WARM_LIMIT_S = 5.0, 1.3, 5.0


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import GPT, Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim

    torch.set_num_threads(1)
    config = Config(args.layers[0], args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh()
    batch = tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in make_batches(config, 1)[0])

    step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
    step = fz.shard_params(step, axis="data")

    def trace() -> dict[str, float]:
        params = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), make_init(config)(fz.random.key(0)))
        part = tuple(t.chunk(args.processes)[0] for t in batch)
        start = time.perf_counter()
        program = fz.lower(step, fz.AbstractMesh(data=args.processes), params, part).program
        seconds = time.perf_counter() - start
        return {"trace_s": seconds, "lines": sum(1 for _ in program.walk()), "functions": len(program.functions)}

    def ours() -> dict[str, float]:
        train = fz.compile(step, mesh, backend=args.backend)
        start = time.perf_counter()
        state = train.init(make_init(config), fz.random.key(0))
        init = time.perf_counter() - start
        before = rss_mib()
        start = time.perf_counter()
        state, metrics = train(state, batch)
        loss = float(metrics["loss"])
        build, alive = time.perf_counter() - start, seconds_alive()
        start = time.perf_counter()
        state, metrics = train(state, batch)
        float(metrics["loss"])
        return {
            "init_s": init,
            "build_s": build,
            "start_s": alive,
            "step_s": time.perf_counter() - start,
            "growth_mib": peak_mib() - before,
            "loss": loss,
        }

    def peer() -> dict[str, float]:
        from torch.nn.parallel import DistributedDataParallel

        model: Any = GPT(make_init(config)(fz.random.key(0)), config.heads)
        model.compile(fullgraph=True)
        if mesh.size > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        before, start = rss_mib(), time.perf_counter()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return {"build_s": time.perf_counter() - start, "growth_mib": peak_mib() - before, "loss": float(loss)}

    serve({"trace": trace, "fzero": ours, "compile": peer})
    fz.close_mesh()


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    points: list[dict[str, Any]] = []
    for who, layers in [("fzero", n) for n in args.layers] + [("compile", n) for n in args.peers]:
        shared = [
            "--layers",
            str(layers),
            *(f"--{k}={getattr(args, k)}" for k in ("width", "heads", "seq", "batch", "backend", "processes")),
        ]
        worst: dict[str, Any] = {}
        if who == "fzero":
            with Group(__file__, 1, shared) as group:
                worst = group.ask("trace")[0]
        with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as cache:
            for start in ("cold", "warm") if who == "fzero" else ("cold",):
                with Group(__file__, args.processes, shared, timeout=1200, cache=cache) as group:
                    answers = group.ask(who)
                found = {k: max(a[k] for a in answers) for k in answers[0]}
                worst |= found if start == "cold" else {f"warm_{k}": v for k, v in found.items()}
        points.append({"who": who, "layers": layers, **worst})
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in points[-1].items()}, flush=True)
    report(args, points)


def seconds_alive() -> float:
    """Since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def report(args: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    ours = {p["layers"]: p for p in points if p["who"] == "fzero"}
    least, most = min(ours), max(ours)
    ratio = ours[most]["build_s"] / ours[least]["build_s"]
    title = {"fzero": "fzero ZeRO-3", "compile": "DDP of torch.compile, whole model"}
    rows = [
        (
            title[p["who"]],
            p["layers"],
            f"{p['trace_s']:.2f}" if "trace_s" in p else "",
            f"{p['build_s']:.1f}",
            f"{p['warm_start_s']:.1f}" if "warm_start_s" in p else "",
            f"{p['growth_mib']:.0f}",
            p.get("lines", ""),
            p.get("functions", ""),
        )
        for p in points
    ]
    trace, warm = ours[most]["trace_s"], ours[least]["warm_start_s"]
    notes = [
        f"width {args.width}, sequence {args.seq}, global batch {args.batch}, {args.processes} processes with one "
        f"thread each, empty compiler caches, "
        "the slower rank.",
        f"tracing {most} layers: {trace:.2f} s, at most {TRACE_LIMIT_S:g} s wanted: "
        f"{'met' if trace <= TRACE_LIMIT_S else 'MISSED'}",
        f"build of {most} layers / build of {least}: {ratio:.2f}, at most {BUILD_LIMIT:g} wanted: "
        f"{'met' if ratio <= BUILD_LIMIT else 'MISSED'}",
        f"warm start of {least} layers, from the start of the processes to the end of the first step: {warm:.1f} s, at "
        f"most {WARM_LIMIT_S:g} s wanted: " + ("met" if warm <= WARM_LIMIT_S else "MISSED"),
    ]
    columns = ("", "layers", "trace s", "build s", "warm start s", "growth MiB", "lines", "functions")
    settings = {k: v for k, v in vars(args).items() if k not in ("worker", "out")}
    publish(
        args.name,
        "Tracing and building, by depth",
        columns,
        rows,
        notes,
        {"settings": settings, "points": points, "build_ratio": ratio},
        args.out,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument(
        "--peers",
        type=int,
        nargs="*",
        default=[],
        help="depths at which to time torch.compile of the whole model as well",
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="global")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--name", default="build_time", help="of the files in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
