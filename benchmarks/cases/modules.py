"""A module of transformers that `fz.functionalize` makes a step of, beside the model as functions and its peers."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import verdict

from cases import LR, Table, at_most, cpu_seconds, processes, within_rounds
from cases.contestants import CONTESTANTS, start
from cases.peers import measure, present

NAMES = ("llama_module", "llama_functions", "llama_fsdp2", "llama_deepspeed")
LIMITS = {"llama_functions": 1.03, "llama_fsdp2": 0.95, "llama_deepspeed": 0.9}  # of the module's CPU seconds
LOSS_LIMIT = 1e-4  # relative
BUILD_LIMIT = 1.3  # of the deepest over the shallowest
FIRST_LIMIT = 0.8  # of the module's first step over that of torch.compile


def speed(args: argparse.Namespace) -> Table:
    """A Llama of transformers under `fz.functionalize`, as functions, under FSDP2 and DeepSpeed, as in `peers`."""
    found = measure(args, present(args.only))
    ratios: dict[str, Any] = {}
    notes = [
        f"Llama of {args.layers} layers of width {args.width}, {args.heads} heads, sequence {args.seq}, global "
        f"batch {args.batch}, fp32, AdamW, clipping; {args.processes} processes with one thread each; medians of "
        f"{args.rounds} interleaved rounds of {args.steps} steps. MiB: of a rank, at the peak of a step and "
        "between steps, above what it had before the model was built."
    ]
    for other, limit in LIMITS.items():
        for kind, text in (("cpu_s", "CPU"), ("wall_s", "wall")) if other in found else ():
            rounds = zip(found["llama_module"]["rounds"], found[other]["rounds"], strict=True)
            each = [a[kind] / b[kind] for a, b in rounds]
            name = f"functionalized / {CONTESTANTS[other].title}, {text} seconds"
            ratios[name], note = within_rounds(name, each, limit if kind == "cpu_s" else None)
            notes.append(note)
    losses = [x["losses"] for x in found.values()]
    spread = max((max(step) - min(step)) / abs(min(step)) for step in zip(*losses, strict=True))
    ratios["losses differ by"] = {"value": spread, "limit": LOSS_LIMIT}
    notes.append(
        f"losses of {len(losses[0])} steps differ by {spread:.1e} at most (relative), {LOSS_LIMIT:g} allowed: "
        f"{verdict(spread, LOSS_LIMIT)}"
    )
    forms = {"cpu_s": ".3f", "wall_s": ".3f", "growth_mib": ".0f", "resting_mib": ".0f", "first_step_s": ".1f"}
    rows = [
        (CONTESTANTS[name].title, *(format(x[k], form) for k, form in forms.items()), f"{x['losses'][-1]:.5f}")
        for name, x in found.items()
    ]
    columns = ("", "CPU s", "wall s", "peak MiB", "resting MiB", "first step s", "last loss")
    data = {"contestants": found, "ratios": ratios}
    return Table("A module of transformers, beside its peers", columns, rows, notes, data)


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
        data["ratio"] = {"value": ratio, "limit": FIRST_LIMIT}
        name = f"first step, functionalized / {CONTESTANTS['llama_fsdp2'].title}"
        notes.append(f"{name}: {ratio:.2f}{at_most(ratio, FIRST_LIMIT)}")
    return Table("The first step from empty caches", ("", "first step s", "CPU s"), rows, notes, data)


def build_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """Builds a model of so many layers, once."""
    import llama
    import torch

    import fzero as fz
    from fzero import optim

    torch.set_num_threads(1)
    config = llama.Config(args.layers, args.width, args.heads, args.seq, args.batch)
    tokens = llama.make_batches(config, 1)[0][0]

    def made(kind: str) -> tuple[Any, Any, Any, Any]:
        """A step, its init function, its parameters on the meta device, and a batch."""
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(LR))
        if kind == "functions":
            init = llama.make_init(config)
            params = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), init(fz.random.key(0)))
            return fz.train_step(llama.make_loss(config), optimizer), init, params, (tokens, tokens)
        model, init = llama.functionalized(config)
        return model.train_step(optimizer), init, model.params, {"input_ids": tokens, "labels": tokens}

    def build(kind: str) -> dict[str, float]:
        step, init, _, batch = made(kind)
        begin = cpu_seconds()
        train = fz.compile(fz.shard_params(step), fz.make_mesh(), backend=args.backend)
        state = train.init(init, fz.random.key(0))
        since = cpu_seconds()
        state, metrics = train(state, batch)
        loss, seconds, first = float(metrics["loss"]), cpu_seconds() - begin, cpu_seconds() - since
        since = time.process_time()
        train(state, batch)
        return {"build_cpu_s": seconds, "first_cpu_s": first, "step_cpu_s": time.process_time() - since, "loss": loss}

    def trace(kind: str) -> dict[str, float]:
        step, _, params, batch = made(kind)
        begin = cpu_seconds()
        program = fz.lower(fz.shard_params(step), fz.AbstractMesh(data=2), params, batch).program
        return {"trace_cpu_s": cpu_seconds() - begin, "functions": len(program.functions)}

    return {"build": build, "trace": trace}


def build(args: argparse.Namespace) -> Table:
    """How building a functionalized Llama grows with depth, beside the same model as functions.

    CPU seconds, the compiler's processes included, from `fz.compile` to the end of the first step, in a fresh process
    with an empty cache; and from functions to the finished program, `fz.lower`. Depths take turns.
    """
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(args.rounds):
        for kind in ("module", "functions"):
            for depth in args.depths:
                one: dict[str, float] = {}
                for what in ("trace", "build"):
                    with processes(args, 1, env={"layers": depth}) as group:
                        one |= group.ask(what, kind=kind)[0]
                found.setdefault((kind, depth), []).append(one)
                print(f"build {turn + 1}: {kind}, {depth} layers: {one}", file=sys.stderr, flush=True)
    points = [
        {"kind": kind, "depth": depth, **{k: statistics.median(x[k] for x in each) for k in each[0]}, "each": each}
        for (kind, depth), each in found.items()
    ]
    ratios: dict[str, Any] = {}
    notes = []
    for kind in ("module", "functions"):
        of_kind = sorted((x for x in points if x["kind"] == kind), key=lambda x: x["depth"])
        least, most, texts = of_kind[0], of_kind[-1], []
        for what, text in (("build_cpu_s", "building and the first step"), ("trace_cpu_s", "tracing and lowering")):
            ratio = most[what] / least[what]
            limit = BUILD_LIMIT if (kind, what) == ("module", "build_cpu_s") else None
            ratios[f"{kind}, {what}, {most['depth']} layers / {least['depth']}"] = {"value": ratio, "limit": limit}
            seconds = f"{text} {least[what]:.2f} and {most[what]:.2f} CPU s, {ratio:.2f} times"
            texts.append(f"{seconds}{at_most(ratio, limit)}")
        notes.append(f"{kind} of {least['depth']} and of {most['depth']} layers: {'; '.join(texts)}")
    notes.append(
        f"Building: width {args.width}, one process, empty cache, the compiler's processes included; functionalizing "
        f"is not in it. Medians of {args.rounds}."
    )
    rows = [
        (x["kind"], x["depth"], f"{x['build_cpu_s']:.1f}", f"{x['trace_cpu_s']:.1f}", int(x["functions"]))
        for x in points
    ]
    columns = ("", "layers", "building, CPU s", "tracing and lowering, CPU s", "functions")
    data = {"builds": points, "ratios": ratios}
    return Table("A module of transformers, beside its peers", columns, rows, notes, data)
