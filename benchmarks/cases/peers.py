"""A step of fzero beside its peers: one model, one batch, one optimizer, interleaved in one run."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import largest_difference, within_rounds

from cases import Table
from cases.contestants import CONTESTANTS, installed, start

COMPARED = (  # CPU seconds per step of the first over those of the second, within a round
    ("fzero_zero3", "fsdp2_compile"),
    ("fzero_zero3", "ddp"),
    ("fzero_zero3", "deepspeed_zero3"),
    ("fzero_zero2", "ddp"),
    ("fzero_zero1", "ddp"),
    ("fzero_zero3_bf16", "fzero_zero3"),
    ("fzero_zero0", "ddp"),
    ("fzero_zero3", "fsdp2"),
    ("fzero_zero3_chunked", "fzero_zero3"),
    ("fzero_zero3_chunked", "fsdp2"),
    ("fzero_zero3_chunked", "fsdp2_compile"),
    ("fzero_zero3_gloo", "fsdp2_compile"),
    ("fzero_zero2", "deepspeed_zero2"),
    ("fzero_zero1", "deepspeed_zero1"),
    ("fzero_zero3_offload", "fzero_zero3"),
    ("fzero_zero3_offload", "deepspeed_zero3_offload"),
)
OFFLOAD = ("fzero_zero3", "fzero_zero3_offload", "deepspeed_zero3_offload")
VOCABULARY = ("fzero_zero3", "fzero_zero3_chunked", "fsdp2", "fsdp2_compile")
FIELDS = ("growth_mib", "build_growth_mib", "resting_mib")


# --- measuring ---


class Contest:
    """The contestants of a run, started when their first turn comes, and what has been measured of each."""

    def __init__(self, args: argparse.Namespace, caches: str):
        self._args, self._caches = args, caches
        self._groups: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def turn(self, name: str, number: int) -> None:
        """One round of one contestant."""
        args = self._args
        if name not in self._groups:
            self._start(name)
        group, found = self._groups[name], self.found[name]
        answers = group.ask("steps", count=args.steps)
        share = args.processes if CONTESTANTS[name].alone == "whole" else 1  # one process that does the work of all
        wall = max(x["wall_s"] for x in answers) / args.steps
        cpu = statistics.mean(x["cpu_s"] for x in answers) / args.steps / share
        found["rounds"].append({"wall_s": wall, "cpu_s": cpu})
        if args.turns or number == args.rounds - 1:
            settled = group.ask("settle")
            found["growth_mib"].append(statistics.mean(x["growth_mib"] for x in settled))
            found["resting_mib"].append(statistics.mean(x["resting_mib"] for x in settled))
        if not args.turns or number == 0:  # started anew, it would see the same batches again
            found["losses"] += _mean_losses(answers)
        if CONTESTANTS[name].stage == 3 and CONTESTANTS[name].library == "fzero" and not CONTESTANTS[name].offload:
            found |= group.ask("planned")[0]
        if args.turns:
            self._groups.pop(name).close()

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def _start(self, name: str) -> None:
        again = name in self.found
        cache = Path(self._caches) / name
        cache.mkdir(exist_ok=True)
        group = self._groups[name] = start(name, self._args, self._args.processes, str(cache))
        setup = group.ask("build")
        first = group.ask("steps", count=1)
        warm = group.ask("steps", count=self._args.warmup) if self._args.warmup else []
        growth = statistics.mean(x["growth_mib"] for x in group.ask("settle"))
        seconds = max(a["setup_s"] + b["wall_s"] for a, b in zip(setup, first, strict=True))
        if not again:
            losses = _mean_losses(first) + (_mean_losses(warm) if warm else [])
            self.found[name] = {"first_step_s": seconds, "warm_first_step_s": [], "losses": losses, "rounds": []}
            self.found[name] |= {k: [] for k in FIELDS}
        else:
            self.found[name]["warm_first_step_s"].append(seconds)
        self.found[name]["build_growth_mib"].append(growth)
        print(f"{name}: ready, model and first step {seconds:.1f} s", file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, names: list[str]) -> dict[str, dict[str, Any]]:
    """What every contestant took: seconds by round, memory, losses."""
    with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as caches:
        # nothing is compiled before the first start
        contest = Contest(args, caches)
        try:
            for number in range(args.rounds):
                for name in random.Random(number).sample(names, len(names)) if number else names:
                    contest.turn(name, number)
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        finally:
            contest.close()
    for found in contest.found.values():
        found |= {k: statistics.median(r[k] for r in found["rounds"]) for k in ("wall_s", "cpu_s")}
        found |= {f"{k}_by_round": found[k] for k in FIELDS} | {k: statistics.median(found[k]) for k in FIELDS}
        # cold: later starts find what the first has compiled
        found["build_growth_mib"] = found["build_growth_mib_by_round"][0]
    return contest.found


def _mean_losses(answers: list[dict[str, Any]]) -> list[float]:
    """The loss of the whole batch, step by step: the mean of the ranks', which fzero has taken already."""
    return [statistics.mean(step) for step in zip(*(x["losses"] for x in answers), strict=True)]


# --- comparing ---


def compare(found: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Every ratio, as data and as notes."""
    data: dict[str, Any] = {}
    notes: list[str] = []

    def add(name: str, value: float, form: str = ".3f") -> None:
        data[name] = value
        notes.append(f"{name}: {value:{form}}")

    for top, bottom in COMPARED:
        kinds = []
        for kind, text in (("cpu_s", "CPU"), ("wall_s", "wall")) if {top, bottom} <= found.keys() else ():
            each = [a[kind] / b[kind] for a, b in zip(found[top]["rounds"], found[bottom]["rounds"], strict=True)]
            data[f"{top} / {bottom}, {kind}"], note = within_rounds(text, each)
            kinds.append(note.replace(": ", " ", 1))
        notes += [f"{top} / {bottom}: {', '.join(kinds)}"] if kinds else []
    if {"fzero_zero3", "ddp"} <= found.keys():
        ours, ddp = found["fzero_zero3"], found["ddp"]
        whole = [max(x["build_growth_mib"], x["growth_mib"]) for x in (ours, ddp)]
        add("fzero_zero3 / ddp, growth of the peak, whole run", whole[0] / whole[1])
        add("fzero_zero3 / ddp, growth of the peak, steps", ours["growth_mib"] / ddp["growth_mib"])
    chunked = "fzero_zero3_chunked"
    for peer in ("fzero_zero3", "fsdp2", "fsdp2_compile") if chunked in found else ():
        if peer in found:
            ratio = found[chunked]["growth_mib"] / found[peer]["growth_mib"]
            add(f"{chunked} / {peer}, growth of the peak, steps", ratio)
    for who, x in found.items():
        if "least_mib" in x:
            least, planned = x["least_mib"], x["planned_mib"]
            name = f"{who}, growth of the peak / closed form"
            data[name] = {"value": x["growth_mib"] / least, "least_mib": least}
            notes.append(
                f"{who}, compared with the closed form of {least:.0f} MiB: growth of the peak "
                f"{x['growth_mib'] / least:.3f}, planned peak {planned / least:.3f}"
            )
    fp32 = [x["losses"] for n, x in found.items() if not CONTESTANTS[n].bf16 and not CONTESTANTS[n].is_floor]
    if len(fp32) > 1:
        worst, step = largest_difference(fp32)
        data["fp32 losses agree"] = {"value": worst, "step": step}
        notes.append(f"Largest relative difference of fp32 losses: {worst:.1e}, at step {step}")
    return data, notes


def floors(found: dict[str, dict[str, Any]]) -> dict[bool, float]:
    """CPU seconds of a step without communication, by whether in bf16: the lower of those measured."""
    out: dict[bool, float] = {}
    for name, x in found.items():
        if CONTESTANTS[name].is_floor:
            out[CONTESTANTS[name].bf16] = min(x["cpu_s"], out.get(CONTESTANTS[name].bf16, float("inf")))
    return out


def peers(args: argparse.Namespace) -> Table:
    """A step of fzero beside its peers: seconds, memory, losses, the first step.

    All start from the same parameters, see the same batches, clip by global norm and update with AdamW
    (contestants.py). A contestant is a group of processes that step on command; the others wait. Rounds are short and
    many, each in an order of its own, so drift of the machine meets all alike; compared are ratios within a round.
    With `--turns` one contestant lives at a time, started anew in every round: memory is for the one that steps.
    """
    from model import Config

    names = present(args.only)
    found = measure(args, names)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch, getattr(args, "vocab", Config.vocab))
    ratios, comparisons = compare(found)
    floor = floors(found)
    rows = []
    for name in names:
        x, below = found[name], floor.get(CONTESTANTS[name].bf16)
        x["above_floor_s"] = None if below is None else x["cpu_s"] - below
        above = "" if below is None else f"{x['cpu_s'] - below:+.3f} ({x['cpu_s'] / below - 1:+.0%})"
        memory = (f"{x['build_growth_mib']:.0f}", f"{x['growth_mib']:.0f}")
        loss = "" if CONTESTANTS[name].is_floor else f"{x['losses'][-1]:.5f}"
        seconds = (f"{x['wall_s']:.3f}", f"{x['cpu_s']:.3f}", above, f"{x['first_step_s']:.1f}")
        rows.append((CONTESTANTS[name].title, *seconds, *memory, loss))
    notes = [
        f"{config.num_params / 1e6:.1f} M parameters ({config.layers} layers, width {config.width}, {config.heads} "
        f"heads), sequence {config.seq}, global batch {config.batch}, AdamW ({args.optimizer} in other "
        f"libraries), clipping; {args.processes} processes with one thread each, over gloo or, for fzero, shared "
        "memory.",
        f"Seconds per step: medians of {args.rounds} interleaved rounds of {args.steps} steps"
        + (", each in new processes." if args.turns else "."),
        f"CPU seconds: all threads, for 1/{args.processes} of the batch. The single process has {args.processes} "
        f"threads and the complete batch; its seconds are divided by {args.processes}.",
        f"Floor: one process with one thread and 1/{args.processes} of the batch; the lower of fzero and an eager "
        "module.",
        "First step: including the construction of the model and compilation with empty caches.",
        "MiB: growth of the peak resident memory of a rank since before the model was built, while it is built and "
        "warmed up (build) and in the measured steps.",
        "Ratios are medians over the rounds, with the lowest and the highest round.",
        *comparisons,
    ]
    columns = ("", "wall s", "CPU s", "above the floor", "first step s", "build MiB", "steps MiB", "last loss")
    low = {"bf16" if k else "fp32": v for k, v in floor.items()}
    data = {"contestants": found, "floors": low, "ratios": ratios}
    picture = lambda figure: draw(figure, names, found, floor)  # noqa: E731
    return Table("One step, compared with other libraries", columns, rows, notes, data, picture)


def default() -> list[str]:
    """The contestants that are not optional and can run here."""
    return [name for name, x in CONTESTANTS.items() if not x.optional and installed(name)]


def present(names: list[str]) -> list[str]:
    """The contestants that can run here; the others are named."""
    if missing := [name for name in names if not installed(name)]:
        print(f"not installed: {', '.join(missing)}; the extra `bench` brings DeepSpeed", file=sys.stderr)
    return [name for name in names if name not in missing]


def draw(figure: Any, names: list[str], found: dict[str, dict[str, Any]], floor: dict[bool, float]) -> None:
    shown = [n for n in reversed(names) if not CONTESTANTS[n].is_floor]
    titles = [CONTESTANTS[n].title for n in shown]
    colors = ["tab:blue" if CONTESTANTS[n].library == "fzero" else "tab:gray" for n in shown]
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh(titles, [found[n]["cpu_s"] for n in shown], color=colors)
    for bf16, seconds in floor.items():
        style, label = (":", "floor, bf16") if bf16 else ("--", "floor, fp32")
        left.axvline(seconds, color="black", linewidth=0.8, linestyle=style, label=label)
    if floor:
        left.legend(frameon=False, loc="lower right")
    left.set_xlabel("CPU seconds a step and rank")
    if (slow := max(found[n]["cpu_s"] for n in shown)) > 20 * min(found[n]["cpu_s"] for n in shown):
        left.set_xscale("log")
        left.set_xlim(right=1.5 * slow)
    building = [max(found[n]["growth_mib"], found[n]["build_growth_mib"]) for n in shown]
    right.barh(titles, building, color=colors, alpha=0.35, label="building too")
    right.barh(titles, [found[n]["growth_mib"] for n in shown], color=colors, label="steps")
    right.set_xlabel("growth of the peak, MiB a rank (pale: while building)")
