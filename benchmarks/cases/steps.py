"""Times of steps: building them over depth, and as planned."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import peak_mib, rss_mib
from training import shard, torch_adamw

from cases import ZERO, Live, Table, cpu_seconds, model, processes, sizes

# --- building, over depth ---

BUILDERS = {"fzero": "fzero ZeRO-3", "compile": "DDP of torch.compile, whole model"}


def build_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    from model import GPT

    import fzero as fz

    live = Live(args)
    zero3 = fz.shard_params(axis="data")

    def trace() -> dict[str, float]:
        params, part = live.meta(), shard(live.batches[0], 0, args.processes)
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
        optimizer = torch_adamw(net)
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
    forms = {"trace_s": ".2f", "build_s": ".1f", "warm_start_s": ".1f", "growth_mib": ".0f"}
    forms |= {"lines": "", "functions": ""}
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
        f"build of {most} layers / build of {least}: {ratio:.2f}",
        "warm start: from the start of the processes to the end of the first step.",
    ]
    columns = ("", "layers", "trace s", "build s", "warm start s", "growth MiB", "lines", "functions")
    return Table("Tracing and building, by depth", columns, rows, notes, {"points": points, "build_ratio": ratio})


# --- the first steps, from empty caches ---

MODES = {"wait": "waits for compiled functions", "eager": "runs eagerly meanwhile"}


def first_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz

    live, running = Live(args, 16), list[Any]()

    def compiled() -> bool:
        return all(program.warm_up is None for program in running[0].train._runs.values())

    def run(mode: str) -> dict[str, Any]:
        running.append(live.start(fz.shard_params(axis="data"), warmup=mode))
        start, cpu = time.perf_counter(), cpu_seconds()
        losses, switched = [running[0].one()], 0
        found = {"first_s": time.perf_counter() - start, "start_s": _seconds_alive()}
        for i in range(1, args.steps):
            losses.append(running[0].one(live.batches[i % 16]))
            switched = switched or (i if compiled() else 0)
        found |= {"all_s": time.perf_counter() - start, "cpu_s": cpu_seconds() - cpu}
        while not compiled():
            running[0].one()
        return {**found, "switched": switched, "losses": losses}

    def steps() -> list[float]:
        return running[0].timed(5)

    return {"run": run, "steps": steps}


def first_loss(args: argparse.Namespace) -> Table:
    """The first steps from empty caches, if the first one waits for compiled functions and if steps run eagerly
    meanwhile.

    Each run is in fresh processes. First loss: from the first call to its loss. All steps: from the first call to the
    loss of the last of `--steps` steps. A step: after everything is compiled, both kinds in turns.
    """
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    timed: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(args.rounds):
        groups = {}
        with contextlib.ExitStack() as stack:
            for mode in list(MODES)[:: 1 if turn % 2 else -1]:
                groups[mode] = stack.enter_context(processes(args, args.processes, timeout=1200))
                answers = groups[mode].ask("run", mode=mode)
                runs[mode].append({k: max(a[k] for a in answers) for k in ("first_s", "start_s", "all_s", "switched")})
                runs[mode][-1] |= {"cpu_s": sum(a["cpu_s"] for a in answers), "losses": answers[0]["losses"]}
                print(mode, {k: v for k, v in runs[mode][-1].items() if k != "losses"}, flush=True)
            for i in range(10):
                for mode in list(MODES)[:: 1 if i % 2 else -1]:
                    timed[mode].append(statistics.median(max(x) for x in zip(*groups[mode].ask("steps"), strict=True)))
    middle = {mode: {k: statistics.median(x[k] for x in found) for k in found[0] if k != "losses"}
              for mode, found in runs.items()}  # fmt: skip
    ratios = {k: statistics.median(e[k] / w[k] for e, w in zip(runs["eager"], runs["wait"], strict=True))
              for k in ("first_s", "start_s", "all_s", "cpu_s")}  # fmt: skip
    ratios["step"] = statistics.median(e / w for e, w in zip(timed["eager"], timed["wait"], strict=True))
    rows = [
        (
            MODES[mode],
            f"{x['first_s']:.1f}",
            f"{x['start_s']:.1f}",
            f"{x['switched']:.0f}" if x["switched"] else "0" if mode == "wait" else f"after {args.steps}",
            f"{x['all_s']:.1f}",
            f"{x['cpu_s']:.1f}",
            f"{statistics.median(timed[mode]):.4f}",
        )
        for mode, x in middle.items()
    ]
    away = max(abs(a - b) / abs(b) for a, b in zip(runs["eager"][0]["losses"], runs["wait"][0]["losses"], strict=True))
    notes = [
        f"{sizes(args)}, ZeRO-3, {args.processes} processes with one thread each, empty compiler caches, the slower "
        f"rank; medians of {args.rounds} rounds in turns. CPU seconds: of all processes, compilers included.",
        f"eager / wait: first loss {ratios['first_s']:.2f}, with the start of the process {ratios['start_s']:.2f}, "
        f"{args.steps} steps {ratios['all_s']:.2f}, their CPU seconds {ratios['cpu_s']:.2f}, a step after the switch "
        f"{ratios['step']:.3f}",
        f"largest difference between the losses of the two in a step: {away:.1e} of the loss.",
    ]
    columns = (
        "the first step",
        "first loss s",
        "since start s",
        "eager steps",
        f"{args.steps} steps s",
        "CPU s",
        "step s",
    )
    return Table("The first steps from empty caches", columns, rows, notes, {"runs": runs, "ratios": ratios})


# --- the plan's forecast ---

PLAN_SIZES = {"small": model(4, 512, 8, 128, 8), "large": model(8, 768, 12, 256, 8)}
PLANNED: list[dict[str, Any]] = [
    {"stage": 3, "size": "small"},
    {"stage": 0, "size": "small"},
    {"stage": 1, "size": "small"},
    {"stage": 3, "size": "small", "precision": "bf16"},
    {"stage": 3, "size": "small", "remat": "full"},
    {"stage": 3, "size": "small", "accumulate": 2},
    {"stage": 2, "size": "small", "accumulate": 4, "precision": "bf16"},
    {"stage": 3, "size": "small", "disk": ("opt_state",)},
    {"stage": 3, "size": "small", "disk": ("opt_state", "params"), "remat": "full"},
    {"parallel": "tensor_parallel", "size": "small"},
    {"parallel": "sequence_parallel", "size": "small"},
    {"parallel": "pipeline", "size": "small", "accumulate": 4},
    {"stage": 3, "size": "large"},
    {"stage": 0, "size": "large"},
    {"stage": 3, "size": "large", "remat": "full", "accumulate": 2},
    {"parallel": "tensor_parallel", "size": "large"},
]


def plan_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import torch

    import fzero as fz
    from fzero.plan.device_lookup import get_device
    from fzero.plan.plan import plan
    from fzero.runtime.calibrate import calibrate
    from fzero.runtime.op_timers import allocated

    started: list[tuple[Any, Any]] = []
    mesh = fz.make_mesh(device="cpu")
    rates: list[Any] = []

    def learn() -> dict[str, Any]:
        """The device that plans are made for: a named one, or this machine as these processes calibrate it."""
        rates.append(get_device(args.device) if args.device else calibrate(mesh, args.seconds))
        return json.loads(rates[0].to_json())

    def build(
        size: dict[str, int],
        stage: int = 0,
        precision: str = "fp32",
        remat: str = "min_cut",
        accumulate: int = 1,
        disk: list[str] | None = None,
        parallel: str = "",
    ) -> dict[str, Any]:
        """Makes the configuration and returns its plan's seconds."""
        axis = {"tensor_parallel": "model", "sequence_parallel": "seq", "pipeline": "pipe"}.get(parallel)
        own = fz.make_mesh(device="cpu", **{axis: args.processes}) if axis else mesh
        live = Live(argparse.Namespace(**{**vars(args), **size}), mesh=own)
        transforms = [getattr(fz, parallel)()] if parallel else [getattr(fz, ZERO[stage])(axis="data")]
        transforms += [fz.mixed_precision(precision), fz.remat(remat)]
        transforms += [fz.offload("nvme", tuple(disk), path=args.path)] if disk else []
        schedule: Any = {"schedule": "layerwise"} if parallel == "pipeline" else {}
        transforms += [fz.accumulate(accumulate, **schedule)] if accumulate > 1 else []
        program = fz.lower(live.step(*transforms), own, live.init, live.batches[0]).program
        found = plan(program, rates[0], backend=args.backend)
        given = {"batch": live.batches[0]} if axis else {}
        started.append((live.start(*transforms, **given), found))
        steps(args.warmup)
        return {"step_s": found.step_seconds, "compute_s": found.compute_seconds, "exposed_s": found.exposed_seconds}

    def steps(count: int) -> float:
        """Seconds a step."""
        return sum(started[0][0].timed(count)) / max(1, count)

    def exposed() -> float:
        """Seconds that one step spends at its transfers' starts and waits."""
        running, found = started[0]
        running.state, events = running.train.profile(running.state, running.live.batches[0])
        if args.picture and not mesh.rank:
            found.save_picture(args.picture, measured=events)
        ops = (x for x, _ in running.train.program.walk())
        transfers = {i for i, x in enumerate(ops) if x.op == "wait" or x.op.endswith("_start")}
        return sum(e.seconds for e in events if e.queue == "compute" and e.line in transfers)

    def peak() -> dict[str, int]:
        """Bytes of tensors at the peak of a step, as `plan_memory` counts them."""
        running, found = started[0]
        state, (batch,) = running.state, running.live.batches
        tensors = [x for x in fz.tree.leaves((state, batch)) if isinstance(x, torch.Tensor)]
        inputs = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        results: list[Any] = []
        temporary = allocated(lambda: results.append(running.train(state, batch)), running.live.mesh.device)
        running.state = results[0][0]
        return {"planned": found.peak_bytes, "measured": sum(inputs.values()) + found.pool_bytes + temporary}

    return {"learn": learn, "build": build, "steps": steps, "exposed": exposed, "peak": peak}


def plan_time(args: argparse.Namespace) -> Table:
    """Planned and measured seconds of a step, for combinations of transforms and sizes.

    Each configuration has processes of its own, which first calibrate the machine, because its speed may change from
    minute to minute. The forecast is made before the first step, from the program and the device's rates alone.
    `--device cpu` plans with the generic device; `--picture FILE.svg` draws a step of the first case beside its plan.
    """
    points: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as cache:
        for case in (PLANNED[i] for i in args.numbers):
            own = PLAN_SIZES[case["size"]]
            size = {k: v if getattr(args, k) is None else getattr(args, k) for k, v in own.items()}
            if points:
                args.picture = None
            with processes(args, args.processes, timeout=1200, cache=cache) as group:
                device = group.ask("learn")[0]
                planned = group.ask("build", **{**case, "size": size})[0]
                rounds = [max(group.ask("steps", count=args.steps)) for _ in range(args.rounds)]
                exposed = statistics.mean(group.ask("exposed"))
                peak = max(group.ask("peak"), key=lambda x: x["measured"])
            found = {"planned": planned, "rounds": rounds, "measured_s": statistics.median(rounds), "peak": peak}
            points.append(
                {**case, **size, "size": case["size"], **found, "measured_exposed_s": exposed, "device": device}
            )
            seconds = f"{planned['step_s']:.3f} s planned, {points[-1]['measured_s']:.3f} s measured"
            print(f"{_planned(points[-1])}: {seconds}", file=sys.stderr, flush=True)
    rows = []
    for x in points:
        x["off"] = x["planned"]["step_s"] / x["measured_s"] - 1
        x["peak_off"] = x["peak"]["planned"] / x["peak"]["measured"] - 1
        numbers = [f"{s:.3f}" for s in (x["planned"]["step_s"], x["measured_s"], x["planned"]["exposed_s"])]
        seconds = (*numbers[:2], f"{x['off']:+.1%}", numbers[2], f"{x['measured_exposed_s']:.3f}")
        peaks = (f"{x['peak']['planned'] / 1e6:.1f}", f"{x['peak']['measured'] / 1e6:.1f}", f"{x['peak_off']:+.1%}")
        rows.append((_planned(x), *seconds, *peaks))
    worst, fullest = (max(abs(x[k]) for x in points) for k in ("off", "peak_off"))
    named = {x["size"]: f"{x['size']}: {sizes(argparse.Namespace(**x))}" for x in points}
    notes = [
        f"{'; '.join(named.values())}. {args.processes} processes with one thread each, {args.backend} backend; "
        f"medians of {args.rounds} rounds of {args.steps} steps, the slower rank.",
        f"Planned for {device['name']}: {device['source']}, before each row. Transfers: seconds that a step waits for "
        "them; measured with a clock around every line.",
        "Peak: bytes of tensors alive at once, of the fuller rank, as `plan_memory` measures them.",
        f"the largest difference between planned and measured step time is {worst:.1%}, of peaks {fullest:.1%}",
    ]
    columns = ("", "planned s", "measured s", "difference", "transfers planned s", "measured s",
               "peak planned MB", "measured MB", "difference")  # fmt: skip
    return Table("Steps, planned and measured", columns, rows, notes, {"points": points})


def _planned(x: dict[str, Any]) -> str:
    options = [f"{k} {x[k]}" for k in ("precision", "remat", "accumulate") if k in x]
    on_disk = [f"{' and '.join(x['disk'])} on disk"] if "disk" in x else []
    return ", ".join([x.get("parallel") or ZERO[x["stage"]], *options, *on_disk, x["size"]])
