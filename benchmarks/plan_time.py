"""Whether a step takes as long as the plan said: predicted and measured seconds, for combinations of transforms and
sizes.

    python benchmarks/plan_time.py                          # calibrates this machine first; about 10 minutes on 2 cores
    python benchmarks/plan_time.py --device cpu             # how far off the generic device is
    python benchmarks/plan_time.py --picture step.svg       # and the first case drawn, a step of rank 0 beside its plan

All configurations live in the same processes and take turns, so that drift of the machine meets all alike. The
prediction is made before the first step, from the program and the device's rates alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Group, passed_on, publish, serve, verdict

STAGES = {0: "data_parallel", 1: "shard_opt_state", 2: "shard_grads", 3: "shard_params"}
SIZES = {
    "small": {"layers": 4, "width": 512, "heads": 8, "seq": 128, "batch": 8},
    "large": {"layers": 8, "width": 768, "heads": 12, "seq": 256, "batch": 8},
}
CASES = [
    {"stage": 3, "size": "small"},
    {"stage": 0, "size": "small"},
    {"stage": 1, "size": "small"},
    {"stage": 3, "size": "small", "precision": "bf16"},
    {"stage": 3, "size": "small", "remat": "full"},
    {"stage": 3, "size": "large"},
    {"stage": 0, "size": "large"},
]
LIMIT = 0.25  # of the measured time


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim
    from fzero.measure.calibrate import calibrate
    from fzero.plan.devices import get_device
    from fzero.plan.plan import plan

    torch.set_num_threads(1)
    mesh = fz.make_mesh(device="cpu")
    live: list[Any] = []
    rates: list[Any] = []

    def learn() -> dict[str, Any]:
        """The device that plans are made for: named, or this machine, measured by these processes at once."""
        rates.append(get_device(args.device) if args.device else calibrate(mesh, args.seconds))
        return json.loads(rates[0].to_json())

    def build(stage: int, size: dict[str, int], precision: str = "fp32", remat: str = "min_cut") -> dict[str, Any]:
        """Adds a configuration; what its plan says."""
        config = Config(**size)
        step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
        step = fz.compose(getattr(fz, STAGES[stage])(axis="data"), fz.mixed_precision(precision), fz.remat(remat))(step)
        batch = tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in make_batches(config, 1)[0])
        params = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), make_init(config)(fz.random.key(0)))
        program = fz.lower(step, mesh, params, batch).program
        found = plan(program, rates[0], backend=args.backend)
        train = fz.compile(step, mesh, backend=args.backend)
        live.append([train, train.init(make_init(config), fz.random.key(0)), batch, found])
        steps(len(live) - 1, args.warmup)
        return {"step_s": found.step_seconds, "compute_s": found.compute_seconds, "exposed_s": found.exposed_seconds}

    def steps(which: int, count: int) -> float:
        """Seconds a step of one configuration."""
        train, state, batch, _ = live[which]
        start = time.perf_counter()
        for _ in range(count):
            state, metrics = train(state, batch)
        float(metrics["loss"])
        live[which][1] = state
        return (time.perf_counter() - start) / max(1, count)

    def exposed(which: int) -> float:
        """Seconds that one step spends at its transfers' starts and waits."""
        train, state, batch, found = live[which]
        live[which][1], events = train.profile(state, batch)
        if args.picture and not which and not mesh.rank:
            found.save_picture(args.picture, measured=events)
        transfers = {
            line for line, (x, _) in enumerate(train.program.walk()) if x.op == "wait" or x.op.endswith("_start")
        }
        return sum(e.seconds for e in events if e.queue == "compute" and e.line in transfers)

    serve({"learn": learn, "build": build, "steps": steps, "exposed": exposed})
    fz.close_mesh()


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    flags = passed_on(args, "backend", "warmup", "seconds")
    flags += [f"--{name}={given}" for name in ("device", "picture") if (given := getattr(args, name))]
    points: list[dict[str, Any]] = []
    with Group(__file__, args.processes, flags, timeout=1200) as group:
        device = group.ask("learn")[0]
        for number in args.cases:
            case = CASES[number]
            size = {k: v if getattr(args, k) is None else getattr(args, k) for k, v in SIZES[str(case["size"])].items()}
            planned = group.ask("build", **{**case, "size": size})[0]
            points.append({**case, **size, "size": case["size"], "planned": planned, "rounds": []})
            print(f"{_name(points[-1])}: {planned['step_s']:.3f} s planned", file=sys.stderr, flush=True)
        for _ in range(args.rounds):
            for which, point in enumerate(points):
                point["rounds"].append(max(group.ask("steps", which=which, count=args.steps)))
        for which, point in enumerate(points):
            point["measured_s"] = statistics.median(point["rounds"])
            point["measured_exposed_s"] = statistics.mean(group.ask("exposed", which=which))
    report(args, points, device)


def _name(point: dict[str, Any]) -> str:
    return ", ".join(
        [STAGES[point["stage"]], *(f"{k} {point[k]}" for k in ("precision", "remat") if k in point), point["size"]]
    )


def report(args: argparse.Namespace, points: list[dict[str, Any]], device: dict[str, Any]) -> None:
    rows = []
    for x in points:
        x["off"] = x["planned"]["step_s"] / x["measured_s"] - 1
        seconds = (x["planned"]["step_s"], x["measured_s"])
        transfers = (x["planned"]["exposed_s"], x["measured_exposed_s"])
        rows.append((_name(x), *(f"{s:.3f}" for s in seconds), f"{x['off']:+.1%}", *(f"{s:.3f}" for s in transfers)))
    worst = max(abs(x["off"]) for x in points)
    missed = sum(abs(x["off"]) > LIMIT for x in points)
    sizes = {
        x[
            "size"
        ]: f"{x['size']}: {x['layers']} layers, width {x['width']}, sequence {x['seq']}, global batch {x['batch']}"
        for x in points
    }
    notes = [
        f"{'; '.join(sizes.values())}. {args.processes} processes with one thread each, {args.backend} backend; "
        f"medians of {args.rounds} interleaved rounds "
        f"of {args.steps} steps, the slower rank.",
        f"Planned for {device['name']}: {device['source']}. Transfers: seconds that a step waits for them; measured "
        f"with a clock around every line.",
        f"step time within {LIMIT:.0%} of what was planned, {len(points) - missed} of {len(points)}: "
        f"{verdict(worst, LIMIT)}; the worst is off by {worst:.1%}",
    ]
    columns = ("", "planned s", "measured s", "planned - measured", "transfers planned s", "measured s")
    settings = {k: v for k, v in vars(args).items() if k not in ("worker", "out", "picture")}
    publish(
        args.name,
        "Step time, planned and measured",
        columns,
        rows,
        notes,
        {"settings": settings, "device": device, "points": points},
        args.out,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help=f"by number, of {CASES}")
    for name in SIZES["small"]:
        parser.add_argument(f"--{name}", type=int, help="of all cases, instead of their own")
    parser.add_argument("--device", help="name or calibration file to plan with; by default this machine is calibrated")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the calibration")
    parser.add_argument("--picture", help="FILE.svg or .png to draw the first case to: its plan, and a step of rank 0")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--name", default="plan_time", help="of the files in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
