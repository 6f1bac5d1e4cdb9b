"""Times of steps: building them over depth, Python's part, precision in turns, rounding, and the plan's forecast."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import peak_mib, rss_mib, verdict

from cases import LR, ZERO, Live, Table, cpu_seconds, number, processes, sizes, wanted

# --- building, over depth ---

TRACE_LIMIT_S, BUILD_LIMIT, WARM_LIMIT_S = 5.0, 1.3, 5.0
BUILDERS = {"fzero": "fzero ZeRO-3", "compile": "DDP of torch.compile, whole model"}


def build_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import torch
    from model import GPT

    import fzero as fz

    live = Live(args)
    zero3 = fz.shard_params(axis="data")

    def trace() -> dict[str, float]:
        params, part = live.meta(), tuple(t.chunk(args.processes)[0] for t in live.batches[0])
        start = time.perf_counter()
        program = fz.lower(live.step(zero3), fz.AbstractMesh(data=args.processes), params, part).program
        seconds = time.perf_counter() - start
        return {"trace_s": seconds, "lines": sum(1 for _ in program.walk()), "functions": len(program.functions)}

    def ours() -> dict[str, float]:
        running, before = live.start(zero3), rss_mib()
        start = time.perf_counter()
        loss = running.one()
        found = {"init_s": running.init_s, "build_s": time.perf_counter() - start, "start_s": _seconds_alive()}
        start = time.perf_counter()
        running.one()
        return {**found, "step_s": time.perf_counter() - start, "growth_mib": peak_mib() - before, "loss": loss}

    def peer() -> dict[str, float]:
        from torch.nn.parallel import DistributedDataParallel

        net: Any = GPT(live.init(fz.random.key(0)), live.config.heads)
        net.compile(fullgraph=True)
        if live.mesh.size > 1:
            net = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
        before, start = rss_mib(), time.perf_counter()
        loss = net(*live.batches[0])
        loss.backward()
        optimizer.step()
        return {"build_s": time.perf_counter() - start, "growth_mib": peak_mib() - before, "loss": float(loss)}

    return {"trace": trace, "fzero": ours, "compile": peer}


def _seconds_alive() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def build_time(args: argparse.Namespace) -> Table:
    """How tracing and building grow with depth: a block is traced once and compiled once, whatever the depth.

    Every point is measured in fresh processes. Trace: `fz.lower`, in one process. Build: from the first call of the
    compiled step to its end, with empty caches. Warm start: the same job with what the first run left in the cache,
    from the start of the process to the end of the first step. `--peers 4 16` adds torch.compile of the whole model.
    """
    points: list[dict[str, Any]] = []
    for who, layers in [("fzero", n) for n in args.layers] + [("compile", n) for n in args.peers]:
        worst: dict[str, Any] = {}
        if who == "fzero":
            with processes(args, 1, env={"layers": layers}) as group:
                worst = group.ask("trace")[0]
        with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as cache:
            for start in ("cold", "warm") if who == "fzero" else ("cold",):
                with processes(args, args.processes, env={"layers": layers}, timeout=1200, cache=cache) as group:
                    answers = group.ask(who)
                found = {k: max(a[k] for a in answers) for k in answers[0]}
                worst |= found if start == "cold" else {f"warm_{k}": v for k, v in found.items()}
        points.append({"who": who, "layers": layers, **worst})
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in points[-1].items()}, flush=True)
    forms = {
        "trace_s": ".2f",
        "build_s": ".1f",
        "warm_start_s": ".1f",
        "growth_mib": ".0f",
        "lines": "",
        "functions": "",
    }
    rows = [
        (BUILDERS[p["who"]], p["layers"], *(format(p[k], form) if k in p else "" for k, form in forms.items()))
        for p in points
    ]
    ours = {p["layers"]: p for p in points if p["who"] == "fzero"}
    least, most = min(ours), max(ours)
    ratio = ours[most]["build_s"] / ours[least]["build_s"]
    notes = [
        f"width {args.width}, sequence {args.seq}, global batch {args.batch}, {args.processes} processes with one "
        "thread each, empty compiler caches, the slower rank.",
        wanted(f"tracing {most} layers", ours[most]["trace_s"], TRACE_LIMIT_S, unit=" s"),
        wanted(f"build of {most} layers / build of {least}", ratio, BUILD_LIMIT),
        wanted(
            f"warm start of {least} layers, from the start of the processes to the end of the first step",
            *(ours[least]["warm_start_s"], WARM_LIMIT_S, ".1f", " s"),
        ),
    ]
    columns = ("", "layers", "trace s", "build s", "warm start s", "growth MiB", "lines", "functions")
    return Table("Tracing and building, by depth", columns, rows, notes, {"points": points, "build_ratio": ratio})


# --- Python's part of a step ---

OUTSIDE_LIMIT_MS = 5.0
OTHER = ("cast", "take_shard", "take_part", "part_index", "num_valid", "draw_start", "accumulate", "assign")


def overhead_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz

    live = Live(args)

    def measure(stage: str) -> dict[str, Any]:
        running = live.start(getattr(fz, ZERO[int(stage[-1])])(axis="data"))
        running.timed(args.warmup)
        plain = running.timed(args.steps)
        spent: dict[str, list[float]] = {"blocks": [], "transfers": [], "other": []}
        functions = running.train.program.functions

        def clocked(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
            kind = "blocks" if name in functions else "other" if name in OTHER else "transfers"
            clock, add = time.perf_counter, spent[kind].append

            def call(*given: Any, **keywords: Any) -> Any:
                start = clock()
                result = fn(*given, **keywords)
                add(clock() - start)
                return result

            return call

        lines = running.replace_calls(clocked)
        running.timed()
        points = []
        for _ in range(args.steps):
            for times in spent.values():
                times.clear()
            (whole,) = running.timed()
            inside = {f"{kind}_s": sum(times) for kind, times in spent.items()}
            outside = whole - inside["blocks_s"] - inside["transfers_s"]
            points.append({"step_s": whole, **inside, "outside_s": outside})
        calls = {kind: len(times) for kind, times in spent.items()}
        return {"plain_s": statistics.median(plain), "points": points, "lines": len(lines), "calls": calls}

    return {"measure": measure}


def overhead(args: argparse.Namespace) -> Table:
    """Python's part of a step: the time outside blocks and transfers, in a deep and narrow model.

    The program runs with a clock around every function and transfer that it names. The rest of the step's wall time is
    the program's own lines, the checks before them, and small operations (casts, shards, copies of new parameters).
    The clocks' own time is in it; a second run has none.
    """
    found: dict[str, dict[str, Any]] = {}
    for count in args.processes:
        for stage in args.stages:
            with processes(args, count, timeout=1200) as group:
                answers = group.ask("measure", stage=stage)
            middle = [{k: statistics.median(p[k] for p in x["points"]) for k in x["points"][0]} for x in answers]
            slower = max(range(len(answers)), key=lambda rank: middle[rank]["outside_s"])
            found[f"{stage}, {number(count)}"] = answers[slower] | middle[slower]
    fields = ("plain_s", "step_s", "blocks_s", "transfers_s", "other_s", "outside_s")
    rows = [(name, x["lines"], *(f"{1e3 * x[k]:.2f}" for k in fields)) for name, x in found.items()]
    notes = [
        f"{sizes(args)}, one thread a process, {args.backend} backend; medians of {args.steps} steps, the rank with "
        "more.",
        "Outside: the step with clocks, less blocks and transfers; the other lines are part of it.",
    ]
    for name, x in found.items():
        outside = 1e3 * x["outside_s"]
        notes.append(
            f"{name}: {outside:.2f} ms outside blocks and transfers, under {OUTSIDE_LIMIT_MS:g} wanted: "
            f"{verdict(outside, OUTSIDE_LIMIT_MS)}"
        )
    columns = ("", "lines", "step ms", "with clocks ms", "blocks ms", "transfers ms", "other lines ms", "outside ms")
    return Table("Python's part of a step", columns, rows, notes, {"points": found})


# --- loss scaling and the precision watch: two steps in turns ---

TURN_LIMITS = {"scaled": 1.02, "watched": 1.01}


def precision_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz
    from fzero import optim
    from fzero.transforms.precision import MixedPrecision

    live = Live(args)

    def measure() -> dict[str, Any]:
        if args.watch is None:
            scaled = fz.mixed_precision("fp16", loss_scale=fz.LossScale(initial=2.0**10))
            pair = {"plain": MixedPrecision("fp16"), "scaled": scaled}
        else:
            pair = {"plain": fz.mixed_precision(args.watch), "watched": fz.mixed_precision(args.watch, watch=True)}
        optimizer = optim.adamw(LR) if args.unclipped else None
        runs = {name: live.start(fz.shard_params(), each, optimizer=optimizer) for name, each in pair.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(args.warmup + args.steps):
            for name in runs if i % 2 else reversed(runs):
                start = time.perf_counter()
                runs[name].one()
                seconds[name] += [time.perf_counter() - start] if i >= args.warmup else []
        extras = list(runs.values())[1].state.extras
        skipped = int(extras["loss_scale"].skipped) if "loss_scale" in extras else 0
        return {**{f"{name}_s": x for name, x in seconds.items()}, "skipped": skipped}

    return {"measure": measure}


def precision(args: argparse.Namespace) -> Table:
    """A step with dynamic loss scaling, or the precision watch (`--watch`), beside the same step without, in turns.

    Both clip by global norm, which needs the norm in which overflow is found. `--unclipped` measures the cost where
    the norm is a metric alone, and updates would otherwise run right behind each block's backward.
    """
    found, rows, notes = {}, [], []
    scaling = args.watch is None
    other = "scaled" if scaling else "watched"
    for count in args.processes:
        with processes(args, count, timeout=1800) as group:
            answers = group.ask("measure")
        slower = ([max(t) for t in zip(*(x[k] for x in answers), strict=True)] for k in ("plain_s", f"{other}_s"))
        pairs = list(zip(*slower, strict=True))
        plain, more = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio, limit = statistics.median(b / a for a, b in pairs), TURN_LIMITS[other]
        found[number(count)] = answers
        row = (number(count), f"{1e3 * plain:.1f}", f"{1e3 * more:.1f}", f"{ratio:.3f}")
        rows.append((*row, answers[0]["skipped"]) if scaling else row)
        notes.append(
            f"{number(count)}: {ratio:.3f} times the step without, at most {limit:g} wanted: {verdict(ratio, limit)}"
        )
    notes = [
        f"{sizes(args)}, ZeRO-3, AdamW{'' if args.unclipped else ' after clipping'}, one thread a process, "
        f"{args.backend} backend; medians of {args.steps} steps in turns, of the slower rank, and of their ratios.",
        *notes,
    ]
    if scaling:
        columns = ("", "fp16 ms", "with dynamic loss scaling ms", "ratio", "skipped")
    else:
        columns = ("", f"{args.watch} ms", "watched ms", "ratio")
    title = "Dynamic loss scaling" if scaling else "Precision watch"
    return Table(title, columns, rows, notes, {"points": found})


# --- stochastic rounding ---

ROUNDING_LIMIT = 2.0  # build with stochastic rounding / build without
ROUNDINGS = ("nearest", "stochastic")


def rounding_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz

    live = Live(args)
    low = fz.mixed_precision("bf16", params="bf16", rounding=args.rounding)
    running = live.start(low, fz.shard_params(axis="data"))

    def build() -> dict[str, Any]:
        before = cpu_seconds()
        loss = running.one()
        return {"build_s": cpu_seconds() - before, "loss": loss, "functions": len(running.train.program.functions)}

    def steps(count: int) -> dict[str, Any]:
        return {"step_s": statistics.median(running.timed(count, time.process_time))}

    return {"build": build, "steps": steps}


def rounding(args: argparse.Namespace) -> Table:
    """Stochastic rounding beside rounding to nearest: CPU seconds of the first build, and of a step.

    Parameters rest in bfloat16. Build: from the first call of the compiled step to its end, of the process and of the
    compilers that it starts, with empty caches. Each way of rounding is a process; their rounds of steps alternate.
    """
    groups = {r: processes(args, 1, env={"rounding": r}, timeout=3600) for r in ROUNDINGS}
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
        f"{sizes(args, batch=False)}, batch {args.batch}, bf16 parameters, AdamW, clipping; one process with one "
        f"thread, {args.backend} backend, empty caches; steps: medians of {args.rounds} alternating rounds of "
        f"{args.steps}.",
        wanted("build, stochastic / nearest", build, ROUNDING_LIMIT),
        f"step, stochastic / nearest: {step:.2f}",
    ]
    data = {"points": found, "rounds": rounds, "build_ratio": build, "step_ratio": step}
    return Table("Stochastic rounding", ("", "build CPU s", "step CPU ms", "functions"), rows, notes, data)


# --- the plan's forecast ---

PLAN_SIZES = {
    "small": {"layers": 4, "width": 512, "heads": 8, "seq": 128, "batch": 8},
    "large": {"layers": 8, "width": 768, "heads": 12, "seq": 256, "batch": 8},
}
PLANNED: list[dict[str, Any]] = [
    {"stage": 3, "size": "small"},
    {"stage": 0, "size": "small"},
    {"stage": 1, "size": "small"},
    {"stage": 3, "size": "small", "precision": "bf16"},
    {"stage": 3, "size": "small", "remat": "full"},
    {"stage": 3, "size": "large"},
    {"stage": 0, "size": "large"},
]
PLAN_LIMIT = 0.25  # of the measured time


def plan_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz
    from fzero.plan.device_lookup import get_device
    from fzero.plan.plan import plan
    from fzero.runtime.calibrate import calibrate

    started: list[tuple[Any, Any]] = []
    mesh = fz.make_mesh(device="cpu")
    rates: list[Any] = []

    def learn() -> dict[str, Any]:
        """The device that plans are made for: a named one, or this machine as these processes calibrate it."""
        rates.append(get_device(args.device) if args.device else calibrate(mesh, args.seconds))
        return json.loads(rates[0].to_json())

    def build(stage: int, size: dict[str, int], precision: str = "fp32", remat: str = "min_cut") -> dict[str, Any]:
        """Adds a configuration and returns its plan's seconds."""
        live = Live(argparse.Namespace(**{**vars(args), **size}), mesh=mesh)
        transforms = getattr(fz, ZERO[stage])(axis="data"), fz.mixed_precision(precision), fz.remat(remat)
        program = fz.lower(live.step(*transforms), live.mesh, live.meta(), live.batches[0]).program
        found = plan(program, rates[0], backend=args.backend)
        started.append((live.start(*transforms), found))
        steps(len(started) - 1, args.warmup)
        return {"step_s": found.step_seconds, "compute_s": found.compute_seconds, "exposed_s": found.exposed_seconds}

    def steps(which: int, count: int) -> float:
        """Seconds a step of one configuration."""
        return sum(started[which][0].timed(count)) / max(1, count)

    def exposed(which: int) -> float:
        """Seconds that one step spends at its transfers' starts and waits."""
        running, found = started[which]
        running.state, events = running.train.profile(running.state, running.live.batches[0])
        if args.picture and not which and not mesh.rank:
            found.save_picture(args.picture, measured=events)
        lines = (x for x, _ in running.train.program.walk())
        transfers = {i for i, x in enumerate(lines) if x.op == "wait" or x.op.endswith("_start")}
        return sum(e.seconds for e in events if e.queue == "compute" and e.line in transfers)

    return {"learn": learn, "build": build, "steps": steps, "exposed": exposed}


def plan_time(args: argparse.Namespace) -> Table:
    """Planned and measured seconds of a step, for combinations of transforms and sizes.

    All configurations live in the same processes and take turns, so that drift of the machine meets all alike. The
    forecast is made before the first step, from the program and the device's rates alone. `--device cpu` plans with
    the generic device; `--picture FILE.svg` draws a step of the first case beside its plan.
    """
    points: list[dict[str, Any]] = []
    with processes(args, args.processes, timeout=1200) as group:
        device = group.ask("learn")[0]
        for case in (PLANNED[i] for i in args.numbers):
            own = PLAN_SIZES[case["size"]]
            size = {k: v if getattr(args, k) is None else getattr(args, k) for k, v in own.items()}
            planned = group.ask("build", **{**case, "size": size})[0]
            points.append({**case, **size, "size": case["size"], "planned": planned, "rounds": []})
            print(f"{_planned(points[-1])}: {planned['step_s']:.3f} s planned", file=sys.stderr, flush=True)
        for _ in range(args.rounds):
            for which, point in enumerate(points):
                point["rounds"].append(max(group.ask("steps", which=which, count=args.steps)))
        for which, point in enumerate(points):
            point["measured_s"] = statistics.median(point["rounds"])
            point["measured_exposed_s"] = statistics.mean(group.ask("exposed", which=which))
    rows = []
    for x in points:
        x["off"] = x["planned"]["step_s"] / x["measured_s"] - 1
        numbers = [f"{s:.3f}" for s in (x["planned"]["step_s"], x["measured_s"], x["planned"]["exposed_s"])]
        rows.append((_planned(x), *numbers[:2], f"{x['off']:+.1%}", numbers[2], f"{x['measured_exposed_s']:.3f}"))
    worst, missed = max(abs(x["off"]) for x in points), sum(abs(x["off"]) > PLAN_LIMIT for x in points)
    named = {x["size"]: f"{x['size']}: {sizes(argparse.Namespace(**x))}" for x in points}
    notes = [
        f"{'; '.join(named.values())}. {args.processes} processes with one thread each, {args.backend} backend; "
        f"medians of {args.rounds} interleaved rounds of {args.steps} steps, the slower rank.",
        f"Planned for {device['name']}: {device['source']}. Transfers: seconds that a step waits for them; measured "
        "with a clock around every line.",
        f"step time within {PLAN_LIMIT:.0%} of what was planned, {len(points) - missed} of {len(points)}: "
        f"{verdict(worst, PLAN_LIMIT)}; the worst is off by {worst:.1%}",
    ]
    columns = ("", "planned s", "measured s", "planned - measured", "transfers planned s", "measured s")
    return Table("Step time, planned and measured", columns, rows, notes, {"device": device, "points": points})


def _planned(x: dict[str, Any]) -> str:
    return ", ".join([ZERO[x["stage"]], *(f"{k} {x[k]}" for k in ("precision", "remat") if k in x), x["size"]])
