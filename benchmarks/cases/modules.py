"""A module of transformers that `fz.functionalize` makes a step of, beside the model as functions and its peers."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from common import largest_difference, within_rounds

from cases import Table, cpu_seconds
from cases.contestants import CONTESTANTS, start
from cases.peers import measure, present

QLORA = ("qlora_module", "qlora_whole", "qlora_ddp")
NAMES = ("llama_module", "llama_functions", "llama_fsdp2", "llama_deepspeed")


def speed(args: argparse.Namespace) -> Table:
    """A Llama of transformers under `fz.functionalize`, as functions, under FSDP2 and DeepSpeed, as in `peers`."""
    return _compared(args, NAMES, "Llama", "A module of transformers, beside its peers")


def qlora(args: argparse.Namespace) -> Table:
    """LoRA of a Llama whose frozen weights are stored in NF4: `fz.quantize_frozen`, beside bitsandbytes."""
    about = "LoRA of rank 16 on all linear layers, whose frozen weights are in NF4, of a Llama"
    return _compared(args, QLORA, about, "Adapters on frozen 4-bit weights, beside bitsandbytes")


def _compared(args: argparse.Namespace, names: Sequence[str], about: str, title: str) -> Table:
    found = measure(args, present(args.only))
    ratios: dict[str, Any] = {}
    notes = [
        f"{about} of {args.layers} layers of width {args.width}, {args.heads} heads, sequence {args.seq}, global "
        f"batch {args.batch}, fp32, AdamW, clipping; {args.processes} processes with one thread each; medians of "
        f"{args.rounds} interleaved rounds of {args.steps} steps. MiB: of a rank, at the peak of a step and "
        "between steps, above what it had before the model was built."
    ]
    for other in names[1:]:
        for kind, text in (("cpu_s", "CPU"), ("wall_s", "wall")) if {names[0], other} <= found.keys() else ():
            rounds = zip(found[names[0]]["rounds"], found[other]["rounds"], strict=True)
            each = [a[kind] / b[kind] for a, b in rounds]
            name = f"{CONTESTANTS[names[0]].title} / {CONTESTANTS[other].title}, {text} seconds"
            ratios[name], note = within_rounds(name, each)
            notes.append(note)
    losses = [x["losses"] for x in found.values()]
    spread, _ = largest_difference(losses)
    ratios["losses differ by"] = spread
    notes.append(f"losses of {len(losses[0])} steps differ by {spread:.1e} at most (relative)")
    forms = {"cpu_s": ".3f", "wall_s": ".3f", "growth_mib": ".0f", "resting_mib": ".0f", "first_step_s": ".1f"}
    rows = [
        (CONTESTANTS[name].title, *(format(x[k], form) for k, form in forms.items()), f"{x['losses'][-1]:.5f}")
        for name, x in found.items()
    ]
    columns = ("", "CPU s", "wall s", "peak MiB", "resting MiB", "first step s", "last loss")
    data = {"contestants": found, "ratios": ratios}
    return Table(title, columns, rows, notes, data)


def first(args: argparse.Namespace) -> Table:
    """Seconds from the libraries' import to the end of the first step, each contestant alone, from an empty cache.

    CPU seconds are of all its processes, imports and compilers included.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in present(args.only)}
    for turn in range(args.rounds):
        for name in random.Random(turn).sample(list(found), len(found)):
            since = cpu_seconds()
            with start(name, args, args.processes) as group:
                built, stepped = group.ask("build"), group.ask("steps", count=1)
            wall = max(a["setup_s"] + b["wall_s"] for a, b in zip(built, stepped, strict=True))
            found[name].append({"wall_s": wall, "cpu_s": cpu_seconds() - since})
            print(f"first step {turn + 1}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    middle = {n: {k: statistics.median(x[k] for x in each) for k in each[0]} for n, each in found.items()}
    rows = [(CONTESTANTS[n].title, f"{x['wall_s']:.1f}", f"{x['cpu_s']:.1f}") for n, x in middle.items()]
    notes = [
        f"Llama of {args.layers} layers of width {args.width}, sequence {args.seq}, global batch {args.batch}, fp32; "
        f"{args.processes} processes with one thread each. Each alone on the machine, from empty caches; medians of "
        f"{args.rounds} turns. CPU seconds: of all processes, imports and compilers included."
    ]
    data: dict[str, Any] = {"contestants": found}
    if {"llama_module", "llama_fsdp2"} <= middle.keys():
        ratio = middle["llama_module"]["wall_s"] / middle["llama_fsdp2"]["wall_s"]
        data["ratio"] = ratio
        name = f"first step, functionalized / {CONTESTANTS['llama_fsdp2'].title}"
        notes.append(f"{name}: {ratio:.2f}")
    return Table("The first step from empty caches", ("", "first step s", "CPU s"), rows, notes, data)
