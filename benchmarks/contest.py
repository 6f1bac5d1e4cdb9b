"""A contest of step functions: one group of processes for each contestant. All live throughout and step in rounds.

The contestants of a round come in an order of their own, and ratios are of one round."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import MODEL, Group, model_flags, passed_on, script_flags, verdict

Step = Callable[[tuple[torch.Tensor, torch.Tensor]], Any]
LOSS_LIMIT, CPU_LIMIT = 1e-5, 0.9
COLUMNS = ("who", "CPU s", "wall s", "last loss")


def arguments(
    doc: str | None,
    name: str,
    titles: Iterable[str],
    there: Sequence[str],
    small: Mapping[str, int],
    steps: int = 4,
    **model: int,
) -> argparse.Namespace:
    """The flags of a contest. `titles`: the contestants; `there`: those that can run here; `small`: a tiny model."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    model_flags(parser, **model)
    parser.add_argument("--processes", type=int, nargs="+", choices=[2, 4], default=[2, 4])
    parser.add_argument("--steps", type=int, default=steps, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--only", nargs="+", choices=list(titles), default=there)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="fzero's")
    parser.add_argument("--contestant", choices=list(titles), help=argparse.SUPPRESS)
    script_flags(parser, name)
    args = parser.parse_args()
    for key, value in small.items() if args.small else ():
        setattr(args, key, value)
    return args


def of_rank(make: Callable[[], Step], batches: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """The commands of a contestant's rank. `planned` gives the bytes that it sends in a step by fzero's plan."""
    live: dict[str, Any] = {"done": 0}

    def build() -> None:
        live["step"] = make()

    def steps(count: int) -> dict[str, Any]:
        losses, before = [], _sent()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            losses.append(float(live["step"](batches[live["done"] % len(batches)])))
            live["done"] += 1
        took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        return {**took, "losses": losses, "sent": [before, _sent()]}

    def planned() -> float:
        from fzero.ir.ops import COLLECTIVES, transfer_bytes

        program = live["step"].train.program
        lines = [(x, times) for x, times in program.walk() if x.op in COLLECTIVES and x.op != "recv_start"]
        return sum(times * transfer_bytes(x, program.values_by_name, program.mesh) for x, times in lines)

    def bubbles() -> tuple[float, float]:
        """The share of the last round's steps in which this stage waited, and in which it waits by plan."""
        train, measured = live["step"].train, live["step"].bubbles
        axis = next(t.axis for t in train.resolved.transforms if t.name == "pipeline")
        return statistics.mean(measured[len(measured) // 2 :]), train.plan.stages[train.mesh.index(axis)].bubble

    return {"build": build, "steps": steps, "planned": planned, "bubbles": bubbles}


def stepped(train: Any, state: Any) -> Step:
    """fzero's step as a contestant takes it: a batch in, its loss out."""

    def run(batch: Any) -> Any:
        nonlocal state
        state, metrics = train(state, batch)
        run.bubbles.append(metrics.get("bubble"))  # type: ignore[attr-defined]
        return metrics["loss"]

    run.train, run.bubbles = train, []  # type: ignore[attr-defined]
    return run


def contest(
    args: argparse.Namespace, script: str, size: int, others: Mapping[str, int] | None = None, stages: bool = False
) -> dict[str, dict[str, Any]]:
    """By contestant its losses and, for each round, seconds a step and process and bytes that all ranks sent a step.

    Args:
        script: the file whose `worker` is a rank's.
        size: processes of a contestant; of some, `others` has another number.
        stages: whether fzero's processes are stages, whose bubbles are asked for.
    """
    found, groups = dict[str, dict[str, Any]](), dict[str, Group]()
    with contextlib.ExitStack() as stack:

        def measured(name: str) -> None:
            answers, count = groups[name].ask("steps", count=args.steps), args.steps
            found[name]["losses"] += [statistics.mean(at) for at in zip(*(a["losses"] for a in answers), strict=True)]
            seconds = {kind: sum(a[kind] for a in answers) / len(answers) / count for kind in ("cpu_s", "wall_s")}
            first, last = min(a["sent"][0] for a in answers), max(a["sent"][1] for a in answers)
            found[name]["rounds"].append({**seconds, "sent_bytes": (last - first) / count})

        for name in args.only:
            given = [f"--contestant={name}", *passed_on(args, *MODEL, "backend")]
            groups[name] = stack.enter_context(Group(script, (others or {}).get(name, size), given, timeout=300))
            groups[name].ask("build")
            found[name] = {"losses": [], "rounds": []}
            measured(name)  # compiles
            found[name]["rounds"].clear()
            print(f"{size} processes, {name}: ready", file=sys.stderr, flush=True)
        for number in range(args.rounds):
            for name in random.Random(number).sample(args.only, len(args.only)):
                measured(name)
        for name in args.only:
            if name.startswith("fzero"):
                found[name]["planned_bytes"] = sum(groups[name].ask("planned"))
            if name.startswith("fzero") and stages:
                found[name]["bubbles"] = [*zip(*groups[name].ask("bubbles"), strict=True)]
    for x in found.values():
        x |= {kind: statistics.median(r[kind] for r in x["rounds"]) for kind in ("cpu_s", "wall_s", "sent_bytes")}
    return found


def compared(
    size: int, found: dict[str, dict[str, Any]], pairs: Iterable[tuple[str, str]], sent_limit: float = 0.1
) -> list[str]:
    """Losses, the CPU seconds of each pair, and bytes sent beside those planned, with what is wanted of them."""
    losses = [x["losses"][:20] for x in found.values()]
    apart = max((max(at) - min(at)) / min(at) for at in zip(*losses, strict=True))
    notes = [f"losses of {len(losses[0])} steps agree to {apart:.1e} ({LOSS_LIMIT:g}: {verdict(apart, LOSS_LIMIT)})"]
    for ours, theirs in pairs:
        if {ours, theirs} <= found.keys():
            rounds = zip(found[ours]["rounds"], found[theirs]["rounds"], strict=True)
            ratio = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in rounds)
            notes.append(f"CPU seconds of {ours} / {theirs}: {ratio:.2f} ({CPU_LIMIT}: {verdict(ratio, CPU_LIMIT)})")
    for name, x in found.items():
        if _counted() and "planned_bytes" in x:
            off = x["sent_bytes"] / x["planned_bytes"] - 1
            met = verdict(abs(off), sent_limit)
            notes.append(f"{name} sends {off:+.1%} beside the plan (within {sent_limit:.0%}: {met})")
    return [f"{size} processes: {note}" for note in notes]


def row(title: str, x: Mapping[str, Any]) -> tuple[str, ...]:
    """A contestant's row under `COLUMNS`."""
    return title, f"{x['cpu_s']:.3f}", f"{x['wall_s']:.3f}", f"{x['losses'][-1]:.6f}"


def how(args: argparse.Namespace) -> str:
    return f"Seconds a step and process: medians of {args.rounds} interleaved rounds of {args.steps} steps."


# --- bytes sent ---


def own_network() -> None:
    """Gives this process, and those that it starts, a loopback device of their own, if the system lets it: nothing but
    the ranks is on it then."""
    clone_newuser, clone_newnet = 0x10000000, 0x40000000
    if os.environ.get("FZERO_OWN_NETWORK"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    flags = clone_newnet if os.geteuid() == 0 else clone_newuser | clone_newnet
    done = shutil.which("ip") is not None and libc.unshare(flags) == 0
    if done:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ["FZERO_OWN_NETWORK"] = str(int(done))


def _sent() -> int:
    """Bytes that the loopback device has sent."""
    if not _counted():
        return 0
    lines = Path("/proc/self/net/dev").read_text().splitlines()  # of this process's network, as /sys is not
    return next(int(x.split(":")[1].split()[8]) for x in lines if x.strip().startswith("lo:"))


def _counted() -> bool:
    return os.environ.get("FZERO_OWN_NETWORK") == "1"
