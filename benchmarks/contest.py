"""Contests of step functions on several processes: the contestants of an axis (axes/) take turns, step by step.

All processes live throughout and step in rounds. The order of the contestants in a round is random, and ratios are of
one round.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import MODEL, Group, largest_difference, passed_on, sent_bytes
from model import Config, make_batches
from training import NUM_BATCHES, Step, shard, timed


@dataclass(frozen=True)
class Axis:
    """An axis of parallelism and its contestants.

    Attributes:
        make: From a contestant, the model, the rank, the number of ranks, fzero's backend and this rank's first batch
            to its step.
        shard: From a contestant, the rank and the number of ranks to the number of this rank's shard of the batch, and
            how many shards there are.
        titles: The contestants.
        pairs: Contestants whose CPU seconds are compared.
        model: Sizes of the model and the batch; `small` replaces some with --small.
        processes: Numbers of processes; `fixed` has those of contestants with another number.
        stages: Whether the ranks of fzero are stages, whose planned bubbles are noted.
        steps: Steps per round.
        counted: Whether the bytes that are sent are counted: a counter is of all processes of a network.
        formulas: Contestants whose names begin so compute another formula: only their losses are compared with each
            other.
        note: About the table.
    """

    make: Callable[[str, Config, int, int, str, Any], Step]
    shard: Callable[[str, int, int], tuple[int, int]]
    titles: Mapping[str, str]
    pairs: Sequence[tuple[str, str]]
    model: Mapping[str, int]
    small: Mapping[str, int]
    note: str
    processes: Sequence[int] = (2, 4)
    fixed: Mapping[str, int] = field(default_factory=dict)
    stages: bool = False
    steps: int = 4
    counted: bool = True
    formulas: Mapping[str, str] = field(default_factory=dict)

    def installed(self) -> list[str]:
        """The contestants that can run here: DeepSpeed comes with the extra `bench`."""
        there = importlib.util.find_spec("deepspeed") is not None
        return [name for name in self.titles if there or not name.startswith(("deepspeed", "autotp"))]


# --- one rank ---


def worker(axis: Axis, args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """The commands of a contestant's rank. `planned` returns the bytes that it sends per step by fzero's plan."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config(*(getattr(args, name) for name in MODEL))
    index, count = axis.shard(args.contestant, rank, size)
    batches = [shard(batch, index, count) for batch in make_batches(config, NUM_BATCHES)]
    live: dict[str, Any] = {"done": 0}

    def build() -> None:
        live["step"] = axis.make(args.contestant, config, rank, size, args.backend, batches[0])

    def steps(count: int) -> dict[str, Any]:
        before, done = _sent(), live["done"]
        live["done"] += count
        return {**timed(live["step"], batches, done, count), "sent": [before, _sent()]}

    def planned() -> float:
        from fzero.ir.ops import COLLECTIVES, transfer_bytes

        program = live["step"].train.program
        sends = [(x, times) for x, times in program.walk() if x.op in COLLECTIVES and x.op != "recv_start"]
        return sum(times * transfer_bytes(x, program.values_by_name, program.mesh) for x, times in sends)

    def bubble() -> float:
        """The share of a step in which this stage waits for other stages, by plan."""
        train = live["step"].train
        axis = next(t.axis for t in train.resolved.transforms if t.name == "pipeline")
        return train.plan.stages[train.mesh.index(axis)].bubble

    return {"build": build, "steps": steps, "planned": planned, "bubble": bubble}


# --- all of them ---


def contest(name: str, axis: Axis, args: argparse.Namespace, script: str, size: int) -> dict[str, dict[str, Any]]:
    """For each contestant its losses and, for each round, seconds per step and process and bytes that all ranks sent
    per step. `script` runs `worker` as a rank."""
    found, groups = dict[str, dict[str, Any]](), dict[str, Group]()
    only = [who for who in axis.installed() if args.only is None or who in args.only]
    with contextlib.ExitStack() as stack:

        def measure(who: str) -> None:
            answers, count = groups[who].ask("steps", count=args.steps), args.steps
            found[who]["losses"] += [statistics.mean(at) for at in zip(*(a["losses"] for a in answers), strict=True)]
            seconds = {kind: sum(a[kind] for a in answers) / len(answers) / count for kind in ("cpu_s", "wall_s")}
            first, last = min(a["sent"][0] for a in answers), max(a["sent"][1] for a in answers)
            found[who]["rounds"].append({**seconds, "sent_bytes": (last - first) / count})

        for who in only:
            given = [f"--axis={name}", f"--contestant={who}", *passed_on(args, *MODEL, "backend")]
            processes = axis.fixed.get(who, size)
            groups[who] = stack.enter_context(Group(script, processes, given, timeout=300))
            groups[who].ask("build")
            found[who] = {"processes": processes, "losses": [], "rounds": []}
            measure(who)  # compiles
            found[who]["rounds"].clear()
            print(f"{name}, {processes} processes, {who}: ready", file=sys.stderr, flush=True)
        for number in range(args.rounds):
            for who in random.Random(number).sample(only, len(only)):
                measure(who)
        for who in (who for who in only if who.startswith("fzero")):
            if axis.counted:
                found[who]["planned_bytes"] = sum(groups[who].ask("planned"))
            if axis.stages:
                found[who]["bubble"] = statistics.mean(groups[who].ask("bubble"))
    for x in found.values():
        x |= {kind: statistics.median(r[kind] for r in x["rounds"]) for kind in ("cpu_s", "wall_s", "sent_bytes")}
    return found


def compared(axis: Axis, found: dict[str, dict[str, Any]]) -> list[str]:
    """Differences of losses, CPU seconds of each pair, bytes sent compared with the plan, and bubbles."""
    groups: dict[str, list[list[float]]] = {}
    for who, x in found.items():
        formula = next((text for start, text in axis.formulas.items() if who.startswith(start)), "")
        groups.setdefault(formula, []).append(x["losses"])
    notes = []
    for formula, losses in groups.items():
        differ, _ = largest_difference(losses)
        whose = f"losses of {formula}'s contestants" if formula else "losses"
        notes.append(f"{whose} agree to {differ:.1e} in {len(losses[0])} steps")
    ratios, sent, bubbles = [], [], []
    for ours, theirs in axis.pairs:
        if {ours, theirs} <= found.keys():
            rounds = zip(found[ours]["rounds"], found[theirs]["rounds"], strict=True)
            ratio = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in rounds)
            ratios.append(f"{ours} / {theirs} {ratio:.2f}")
    for who, x in found.items():
        if is_counted() and "planned_bytes" in x:
            sent.append(f"{who} {x['sent_bytes'] / x['planned_bytes'] - 1:+.1%}")
        if "bubble" in x:
            bubbles.append(f"{who} {x['bubble']:.1%}")
    for title, values in (
        ("ratios of CPU seconds", ratios),
        ("bytes sent, compared with the plan", sent),
        ("time that a stage waits for other stages, by plan", bubbles),
    ):
        notes += [f"{title}: {', '.join(values)}"] if values else []
    return notes


# --- bytes sent ---


def own_network() -> None:
    """Give this process and its children their own loopback device, if the system allows it. Only the ranks use it."""
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
    if not is_counted():
        return 0
    return sent_bytes("lo")


def is_counted() -> bool:
    return os.environ.get("FZERO_OWN_NETWORK") == "1"
