"""Compares two commits: step time, memory, warm start, lowering, Python per step, planned peak and planned time.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_commits.py --before /tmp/before                 # about 8 minutes on 2 cores
    python benchmarks/compare_commits.py --before /tmp/before --rounds 3 --only lower python
    python benchmarks/compare_commits.py --before /tmp/before --small         # a minute, to see that it works

Both source trees run this script in fresh processes, in turns and in random order. Each tree has its own caches, which
a first round fills that is not counted, so that all starts are warm. Seconds are CPU seconds of all threads, on which
other load on the machine has little influence. Ratios are of one round. Plans are computed once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    SOURCE,
    Group,
    commit_of,
    number_flags,
    parsed,
    peak_mib,
    publish,
    reset_peak,
    rss_mib,
    script_parser,
    serve,
    settings,
)

TREES = ("before", "after")
SMALL = {"layers": 4, "width": 512, "heads": 8, "seq": 64, "batch": 8}
DEEP = {"layers": 64, "width": 64, "heads": 4, "seq": 32, "batch": 8}
PARTS = {  # processes, and what is measured in them: the text of a row, its unit
    "step": (2, {"step_s": ("ZeRO-3, a step", "s"), "peak_mib": ("ZeRO-3, peak", "MiB")}),
    "host": (2, {"step_s": ("optimizer on the host, a step", "s")}),
    "disk": (1, {"step_s": ("everything on disk, a step", "s")}),
    "warm": (2, {"start_s": ("warm start of 64 layers", "s")}),
    "lower": (1, {"whole_s": ("fz.lower of 64 layers", "s"), "trace_s": ("of it the trace", "s"),
                  "passes_s": ("of it the passes", "s")}),
    "python": (1, {"call_us": ("Python a step of 64 layers, before the program", "µs"),
                   "python_us": ("Python a step of 64 layers, with the program's lines", "µs")}),
}  # fmt: skip
PLANS = {
    "ZeRO-3": {"shard_params": {}},
    "ZeRO-3 in bf16": {"mixed_precision": {"compute": "bf16"}, "shard_params": {}},
    "ZeRO-2, 4 micro-batches": {"shard_grads": {}, "accumulate": {"num_micro_batches": 4}},
}


# --- in a process of either tree ---


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss
    from training import FzeroStep, clipped_adamw, shard

    import fzero as fz

    torch.set_num_threads(1)
    if not Path(fz.__file__).is_relative_to(args.tree):
        raise RuntimeError(f"{fz.__file__} is not in {args.tree}")

    def plain(config: Config) -> Any:
        return fz.train_step(make_loss(config), clipped_adamw())

    def started(
        config: Config, *transforms: Callable[[Any], Any], backend: str = "inductor"
    ) -> tuple[Any, Callable[[], float]]:
        """A compiled step, and what takes one and returns its loss."""
        mesh, step = fz.make_mesh(device="cpu"), fz.shard_params(plain(config), axis="data")
        for transform in transforms:
            step = transform(step)
        batch = shard(make_batches(config, 1)[0], mesh.rank, mesh.size)
        run = FzeroStep(step, mesh, make_init(config), fz.random.key(0), backend=backend)
        return run.train, lambda: float(run(batch))

    def step(part: str, count: int, path: str) -> dict[str, float]:
        before = rss_mib()
        off = {"host": [fz.offload("cpu", "opt_state")], "disk": [fz.offload("nvme", path=path)], "step": []}[part]
        _, one = started(Config(**SMALL), *off)
        one()
        one()
        reset_peak()
        times = [_seconds(one) for _ in range(count)]
        return {"step_s": statistics.median(times), "peak_mib": peak_mib() - before, "loss": one()}

    def warm(**_: Any) -> dict[str, float]:
        loss = started(Config(**DEEP))[1]()
        return {"start_s": time.process_time(), "loss": loss}

    def lower(**_: Any) -> dict[str, float]:
        from asv.build import Lower  # benchmarks/asv

        case = Lower()
        case.setup()
        trace = case.track_trace()
        whole = min(_seconds(case.time_lower) for _ in range(3))
        return {"whole_s": whole, "trace_s": trace, "passes_s": whole - trace}

    def python(**_: Any) -> dict[str, float]:
        train, one = started(Config(**DEEP), backend="eager")  # no function of it runs in what is timed
        one()
        key, kept = next(iter(train._runs.items()))
        tuple_ = isinstance(kept, tuple)  # as 0.1 keeps a program
        lowered, run = kept if tuple_ else (kept.lowered, kept.run)
        names = {op.fn or op.op for op, _ in lowered.program.walk() if op.op != "loop"}

        def put(ran: Any) -> Any:
            train._runs[key] = (lowered, ran) if tuple_ else dataclasses.replace(kept, run=ran)
            return ran

        run.namespace.update({name: _noted(run.namespace[name]) for name in names})
        outputs = put(_noted(run))
        one()
        run.namespace.update({name: _again(run.namespace[name]) for name in names})
        put(run)
        lines = _a_call(one)
        put(_again(outputs))
        return {"python_us": 1e6 * lines, "call_us": 1e6 * _a_call(one)}

    def plans(**_: Any) -> dict[str, Any]:
        config = Config(layers=8, width=1024, heads=16, seq=1024, batch=8)
        params, batch, found = make_init(config), make_batches(config, 1)[0], {}
        for name, transforms in PLANS.items():
            made = plain(config)
            for transform, given in transforms.items():
                made = getattr(fz, transform)(made, **given)
            plan = fz.lower(made, fz.AbstractMesh(data=8), params, batch, device="h100").plan
            found[name] = {"peak_bytes": plan.peak_bytes, "step_s": plan.step_seconds}
        return found

    commands = {"step": step, "host": step, "disk": step, "warm": warm, "lower": lower, "python": python}
    serve(commands | {"plans": plans})
    fz.close_mesh()


def _seconds(call: Callable[[], Any]) -> float:
    """Of the CPU, in all threads."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _a_call(call: Callable[[], Any], count: int = 160) -> float:
    """Seconds of one in the best of five rows, of which some calls look at what the first and every 16th look at."""
    return min(_seconds(lambda: [call() for _ in range(count)]) for _ in range(5)) / count


def _noted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that keeps what it returns."""
    results: list[Any] = []

    def call(*args: Any, **keywords: Any) -> Any:
        results.append(fn(*args, **keywords))
        return results[-1]

    call.__dict__.update(getattr(fn, "__dict__", {}), results=results)
    return call


def _again(noted: Any) -> Callable[..., Any]:
    """A function that returns what another did, call by call, and does nothing."""
    found = itertools.cycle(noted.results)
    call = lambda *_, **__: next(found)  # noqa: E731
    call.__dict__.update(vars(noted))
    return call


# --- both trees, in turns ---


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    trees = {"before": args.before.resolve(), "after": args.after.resolve()}
    found: dict[str, list[dict[str, dict[str, float]]]] = {part: [] for part in args.only if part != "plans"}
    with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as caches:

        def measured(part: str, tree: str) -> dict[str, float]:
            """What one tree takes: of several ranks the mean."""
            with (
                tempfile.TemporaryDirectory(dir=args.path) as disk,
                Group(__file__, PARTS[part][0] if part in PARTS else 1, [f"--tree={trees[tree]}"],
                      cache=str(Path(caches) / tree), tree=trees[tree]) as group,
            ):  # fmt: skip
                answers = group.ask(
                    part, **({"part": part, "count": args.steps, "path": disk} if part in PARTS else {})
                )
            print(f"{part}, {tree}: {answers[0]}", file=sys.stderr, flush=True)
            return answers[0] if part == "plans" else {k: statistics.mean(a[k] for a in answers) for k in answers[0]}

        for tree in TREES:
            (Path(caches) / tree).mkdir()
        plans = {tree: measured("plans", tree) for tree in TREES} if "plans" in args.only else {}
        for number in range(-1, args.rounds):
            for part, rounds in found.items():
                if number < 0 and part in ("lower", "python"):  # nothing is compiled
                    continue
                both = {t: measured(part, t) for t in random.Random(f"{number} {part}").sample(TREES, 2)}
                if number >= 0:
                    rounds.append(both)
    report(args, trees, found, plans)


def report(args: argparse.Namespace, trees: dict[str, Path], found: dict[str, Any], plans: dict[str, Any]) -> None:
    rows, data = [], {}

    def row(text: str, unit: str, before: list[float], after: list[float]) -> None:
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        middle, spread = statistics.median(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}" if len(ratios) > 1 else ""
        values = [f"{statistics.median(x):.4g} {unit}" for x in (before, after)]
        rows.append((text, *values, f"{middle:.3f}", spread))
        data[text] = {"before": before, "after": after, "ratio": middle}

    for part, rounds in found.items():
        for key, (text, unit) in PARTS[part][1].items():
            row(text, unit, *([both[tree][key] for both in rounds] for tree in TREES))
        for both in rounds:
            if "loss" in both["before"] and both["before"]["loss"] != both["after"]["loss"]:
                print(f"{part}: losses differ: {both}", file=sys.stderr)
    for name in plans.get("after", ()):
        before, after = plans["before"][name], plans["after"][name]
        row(f"planned peak, {name}", "MB", [before["peak_bytes"] / 1e6], [after["peak_bytes"] / 1e6])
        row(f"planned step, {name}", "ms", [1e3 * before["step_s"]], [1e3 * after["step_s"]])
    commits = {tree: commit_of(path) for tree, path in trees.items()}
    notes = [
        f"before: {commits['before']}, after: {commits['after']}; one thread a process, "
        f"{args.rounds} rounds of fresh processes in turns after one that fills the caches, {args.steps} steps in "
        "each; medians, and the median and range of the ratios within a round.",
        "Seconds are CPU seconds of all threads, the mean of the ranks; GPT of "
        f"{_sizes(SMALL)}; with 64 layers {_sizes(DEEP)}. Peak: resident memory in the steps above the resident "
        "memory before the model was built. Lowering: the model of the micro-benchmarks. Python: functions and "
        "transfers of the program return earlier results.",
    ]
    columns = ("", "before", "after", "after / before", "rounds")
    title = "Two commits compared"
    kept = settings(args, "before", "after", "path", "tree")
    publish(args.name, title, columns, rows, notes, {"settings": kept, "commits": commits, "rows": data}, args.out)


def _sizes(config: dict[str, int]) -> str:
    return f"{config['layers']} layers of width {config['width']}, sequence {config['seq']}, batch {config['batch']}"


def _arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, "compare_commits", small="one round of the cheapest parts")
    parser.add_argument("--before", type=Path, help="a source tree, e.g. a git worktree of an earlier commit")
    parser.add_argument("--after", type=Path, default=SOURCE)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "plans"], default=[*PARTS, "plans"])
    number_flags(parser, rounds=3, steps=6)
    parser.add_argument("--path", type=Path, help="folder on the disk to use; default: the one of temporary files")
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    args = parsed(parser, only=["lower", "python"], rounds=1, steps=1)
    if not args.worker and args.before is None:
        parser.error("--before: the tree to compare with")
    return args


if __name__ == "__main__":
    main()
