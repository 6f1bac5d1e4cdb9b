"""A module of transformers that `fz.functionalize` makes a step of, beside the same model written as functions, and
under FSDP2 and DeepSpeed; and how building it grows with depth.

    python benchmarks/modules_speed.py              # a Llama of 8 layers of width 512: about 12 minutes on 2 cores
    python benchmarks/modules_speed.py --rounds 0 --name modules_build    # building alone: about 4 minutes
    python benchmarks/modules_speed.py --first 3 --layers 4               # the first step alone: about 6 minutes

Steps are measured as peers.py measures them: all contestants alive, short rounds in an order of their own, ratios
within a round. Building: CPU seconds, those of the compiler's processes included, from `fz.compile` to the end of the
first step, in a fresh process with an empty cache; and from functions to the finished program, `fz.lower`.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time
from typing import Any

from common import Group, model_flags, publish, script_flags, serve, settings, verdict
from contestants import CONTESTANTS, contest_flags, installed, start
from peers import measure

NAMES = ("llama_module", "llama_functions", "llama_fsdp2", "llama_deepspeed")
LIMITS = {"llama_functions": 1.03, "llama_fsdp2": 0.95, "llama_deepspeed": 0.9}  # of the module's CPU seconds
LOSS_LIMIT = 1e-4  # relative
BUILD_LIMIT = 1.3  # of the deepest over the shallowest
FIRST_LIMIT = 0.8  # of the module's first step over that of torch.compile


# --- building ---


def worker(args: argparse.Namespace) -> None:
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
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
        if kind == "functions":
            init = llama.make_init(config)
            params = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), init(fz.random.key(0)))
            return fz.train_step(llama.make_loss(config), optimizer), init, params, (tokens, tokens)
        model, init = llama.functionalized(config)
        return model.train_step(optimizer), init, model.params, {"input_ids": tokens, "labels": tokens}

    def build(kind: str) -> dict[str, float]:
        step, init, _, batch = made(kind)
        begin = _cpu_s()
        train = fz.compile(fz.shard_params(step), fz.make_mesh(), backend=args.backend)
        state = train.init(init, fz.random.key(0))
        since = _cpu_s()
        state, metrics = train(state, batch)
        loss, seconds, first = float(metrics["loss"]), _cpu_s() - begin, _cpu_s() - since
        since = time.process_time()
        train(state, batch)
        return {"build_cpu_s": seconds, "first_cpu_s": first, "step_cpu_s": time.process_time() - since, "loss": loss}

    def trace(kind: str) -> dict[str, float]:
        step, _, params, batch = made(kind)
        begin = _cpu_s()
        program = fz.lower(fz.shard_params(step), fz.AbstractMesh(data=2), params, batch).program
        return {"trace_cpu_s": _cpu_s() - begin, "functions": len(program.functions)}

    serve({"build": build, "trace": trace})
    fz.close_mesh()


def _cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def builds(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What building takes, by kind and depth: medians, each in fresh processes, depths in turns."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(args.builds):
        for kind in ("module", "functions"):
            for depth in args.depths:
                flags = [
                    f"--{k}={v}" for k, v in {"layers": depth, "width": 64, "heads": 4, "seq": 32, "batch": 4}.items()
                ]
                one: dict[str, float] = {}
                for what in ("trace", "build"):
                    with Group(__file__, 1, [*flags, f"--backend={args.backend}"], timeout=600) as group:
                        one |= group.ask(what, kind=kind)[0]
                found.setdefault((kind, depth), []).append(one)
                print(f"build {turn + 1}: {kind}, {depth} layers: {one}", file=sys.stderr, flush=True)
    return [
        {"kind": kind, "depth": depth, **{k: statistics.median(x[k] for x in each) for k in each[0]}, "each": each}
        for (kind, depth), each in found.items()
    ]


# --- the first step ---


def first_steps(args: argparse.Namespace, names: list[str]) -> dict[str, list[dict[str, float]]]:
    """Seconds from the libraries' import to the end of the first step, by contestant: each alone on the machine, from
    an empty cache, in turns. CPU seconds are of all its processes, imports and compilers included."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(args.first):
        for name in random.Random(turn).sample(names, len(names)):
            since = _cpu_s()
            with start(name, args, args.processes) as group:
                built, first = group.ask("build"), group.ask("steps", count=1)
            wall = max(a["setup_s"] + b["wall_s"] for a, b in zip(built, first, strict=True))
            found[name].append({"wall_s": wall, "cpu_s": _cpu_s() - since})
            print(f"first step {turn + 1}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def report_first(args: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> None:
    middle = {n: {k: statistics.median(x[k] for x in each) for k in each[0]} for n, each in found.items()}
    rows = [(CONTESTANTS[n].title, f"{x['wall_s']:.1f}", f"{x['cpu_s']:.1f}") for n, x in middle.items()]
    notes = [
        f"Llama of {args.layers} layers of width {args.width}, sequence {args.seq}, global batch {args.batch}, fp32; "
        f"{args.processes} processes with one thread each. Each alone on the machine, from empty caches; medians of "
        f"{args.first} turns. CPU seconds: of all processes, imports and compilers included."
    ]
    data: dict[str, Any] = {"settings": settings(args), "contestants": found}
    if {"llama_module", "llama_fsdp2"} <= middle.keys():
        ratio = middle["llama_module"]["wall_s"] / middle["llama_fsdp2"]["wall_s"]
        data["ratio"] = {"value": ratio, "limit": FIRST_LIMIT}
        notes.append(
            f"first step, functionalized / {CONTESTANTS['llama_fsdp2'].title}: {ratio:.2f}, at most {FIRST_LIMIT:g} "
            f"wanted: {verdict(ratio, FIRST_LIMIT)}"
        )
    columns = ("", "first step s", "CPU s")
    publish(f"{args.name}_first", "The first step from empty caches", columns, rows, notes, data, args.out)


# --- comparing ---


def compare(found: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Ratios within rounds, with their limits, as data and as notes."""
    data: dict[str, Any] = {}
    notes = []
    for other, limit in LIMITS.items():
        if other not in found:
            continue
        for kind in ("cpu_s", "wall_s"):
            rounds = zip(found["llama_module"]["rounds"], found[other]["rounds"], strict=True)
            each = [a[kind] / b[kind] for a, b in rounds]
            wanted, middle = limit if kind == "cpu_s" else None, statistics.median(each)
            name = f"functionalized / {CONTESTANTS[other].title}, {'CPU' if kind == 'cpu_s' else 'wall'} seconds"
            data[name] = {"median": middle, "min": min(each), "max": max(each), "limit": wanted}
            says = "" if wanted is None else f", at most {wanted:g} wanted: {verdict(middle, wanted)}"
            notes.append(f"{name}: {middle:.3f} (rounds {min(each):.3f} to {max(each):.3f}){says}")
    losses = [found[name]["losses"] for name in found]
    spread = max((max(step) - min(step)) / abs(min(step)) for step in zip(*losses, strict=True))
    data["losses differ by"] = {"value": spread, "limit": LOSS_LIMIT}
    notes.append(
        f"losses of {len(losses[0])} steps differ by {spread:.1e} at most (relative), {LOSS_LIMIT:g} allowed: "
        f"{verdict(spread, LOSS_LIMIT)}"
    )
    return data, notes


def report(args: argparse.Namespace, found: dict[str, dict[str, Any]], built: list[dict[str, Any]]) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            CONTESTANTS[name].title,
            f"{x['cpu_s']:.3f}",
            f"{x['wall_s']:.3f}",
            f"{x['growth_mib']:.0f}",
            f"{x['resting_mib']:.0f}",
            f"{x['first_step_s']:.1f}",
            f"{x['losses'][-1]:.5f}",
        )
        for name, x in found.items()
    ]
    data, notes = compare(found) if found else ({}, [])
    if found:
        notes = [
            f"Llama of {args.layers} layers of width {args.width}, {args.heads} heads, sequence {args.seq}, global "
            f"batch {args.batch}, fp32, AdamW, clipping; {args.processes} processes with one thread each; medians of "
            f"{args.rounds} interleaved rounds of {args.steps} steps. MiB: of a rank, at the peak of a step and "
            "between steps, above what it had before the model was built.",
            *notes,
        ]
    for kind in dict.fromkeys(x["kind"] for x in built):
        points = {x["depth"]: x for x in built if x["kind"] == kind}
        least, most = points[min(points)], points[max(points)]
        texts = []
        for what, text in (("build_cpu_s", "building and the first step"), ("trace_cpu_s", "tracing and lowering")):
            ratio = most[what] / least[what]
            wanted = BUILD_LIMIT if (kind, what) == ("module", "build_cpu_s") else None
            data[f"{kind}, {what}, {most['depth']} layers / {least['depth']}"] = {"value": ratio, "limit": wanted}
            says = "" if wanted is None else f", at most {wanted:g} wanted: {verdict(ratio, wanted)}"
            texts.append(f"{text} {least[what]:.2f} and {most[what]:.2f} CPU s, {ratio:.2f} times{says}")
        notes.append(f"{kind} of {least['depth']} and of {most['depth']} layers: {'; '.join(texts)}")
    if built:
        notes.append(
            "Building: width 64, one process, empty cache, the compiler's processes included; functionalizing is not "
            f"in it. Medians of {args.builds}."
        )
    columns = ("", "CPU s", "wall s", "peak MiB", "resting MiB", "first step s", "last loss")
    if not found:
        columns = ("", "layers", "building, CPU s", "tracing and lowering, CPU s", "functions")
        rows = [
            (x["kind"], x["depth"], f"{x['build_cpu_s']:.1f}", f"{x['trace_cpu_s']:.1f}", int(x["functions"]))
            for x in built
        ]
    data = {"settings": settings(args), "contestants": found, "builds": built, "ratios": data}
    publish(args.name, "A module of transformers, beside its peers", columns, rows, notes, data, args.out)


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    names = [n for n in args.only if installed(n)]
    if missing := [n for n in args.only if n not in names]:
        print(f"not installed: {', '.join(missing)}; the extra `bench` brings DeepSpeed", file=sys.stderr)
    if args.first:
        report_first(args, first_steps(args, names))
        return
    report(args, measure(args, names) if args.rounds else {}, builds(args) if args.builds else [])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=8, width=512, heads=8, seq=128, batch=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2, help="steps after the first that are not measured")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="a round")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--builds", type=int, default=2, help="how often each depth is built")
    parser.add_argument("--first", type=int, default=0, metavar="TURNS", help="measure the first step alone")
    parser.set_defaults(turns=False)
    contest_flags(parser)
    script_flags(parser, "modules_speed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
