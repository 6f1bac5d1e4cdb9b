"""What is alive: the state at rest, gathered parameters during a real ZeRO-3 step, and the memory of processes over the
number of ranks.

    python benchmarks/memory.py                     # about 20 minutes on 2 cores
    python benchmarks/memory.py --parts rest gathered    # about a minute

At rest: the bytes of the storages behind the state's tensors, read off the tensors, against what the stage's definition
says. Gathered: what an all_gather fills counts as alive from its start to the last line that is given an address in it,
watched while a step runs. Ranks: what the operating system says of each process, between steps and at the peak, beside
DDP and FSDP2; every rank has the same part of the batch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common import MODEL, RESULTS, Group, model_flags, passed_on, publish, serve
from contestants import CONTESTANTS, contest_flags, start

PARTS = {
    "rest": {"layers": 4, "width": 512, "heads": 8, "seq": 32, "batch": 8},
    "gathered": {"layers": 4, "width": 512, "heads": 8, "seq": 32, "batch": 8},
    "ranks": {"layers": 8, "width": 768, "heads": 12, "seq": 128, "batch": 4},
}
STAGES = {0: "data_parallel", 1: "shard_opt_state", 2: "shard_grads", 3: "shard_params"}
REST_LIMIT = 1.01  # of 12 P / N
OVER_RANKS = ("fzero_zero0", "fzero_zero1", "fzero_zero2", "fzero_zero3", "ddp", "fsdp2")


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh(device="cpu")

    def step_for(stage: int, *more: Any) -> Any:
        step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
        return fz.compose(getattr(fz, STAGES[stage])(axis="data"), *more)(step)

    def resting() -> list[dict[str, int]]:
        """For each stage: bytes of the state on this rank, and what its definition says."""
        shapes = fz.tree.leaves(make_init(config)(fz.random.key(0)))
        whole = sum(4 * x.numel() for x in shapes)
        shard = sum(4 * -(-x.numel() // mesh.size) for x in shapes)
        scalars = 8 + 3 * 8  # the step and the key; what the optimizer counts is counted below
        out = []
        for stage in STAGES:
            train = fz.compile(step_for(stage), mesh, backend="eager")
            state = train.init(make_init(config), fz.random.key(0))
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fz.tree.leaves(state)}
            counts = sum(x.nbytes for x in fz.tree.leaves(state.opt_state) if x.numel() == 1)
            expected = (shard if stage == 3 else whole) + 2 * (shard if stage else whole) + scalars + counts
            out.append({"stage": stage, "bytes": sum(storages.values()), "expected": expected, "params": whole // 4})
        return out

    def gathered(accumulate: int, policy: str) -> dict[str, Any]:
        """The most bytes of gathered parameters alive at once in a step, the sizes of its gathers, and the whole
        pool."""
        train = fz.compile(step_for(3, fz.accumulate(accumulate), fz.remat(policy)), mesh, backend=args.backend)
        state = train.init(make_init(config), fz.random.key(0))
        first, second = (
            tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in batch) for batch in make_batches(config, 2)
        )
        state, _ = train(state, first)
        run = next(iter(train._runs.values())).run
        names = {line.fn or line.op for line, _ in train.program.walk() if line.op != "loop"}
        watch = _Watch()
        run.namespace.update({name: watch.around(name, run.namespace[name]) for name in names})
        state, metrics = train(state, second)
        float(metrics["loss"])
        return {**watch.most_alive(), "pool_bytes": train.program.pool_bytes}

    serve({"resting": resting, "gathered": gathered})
    fz.close_mesh()


class _Watch:
    """Notes at which call of a step each gather starts, and at which one last reads what it has filled."""

    def __init__(self) -> None:
        self.calls = 0
        self.gathers: list[dict[str, Any]] = []

    def around(self, name: str, fn: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            self.calls += 1
            filled = [] if name == "wait" else _ranges(keywords.get("into", ()))
            for gather in self.gathers:
                if _meet(gather["filled"], _ranges(args)):
                    gather["last"] = self.calls
            for gather in self.gathers:
                if _meet(gather["filled"], filled):  # written again: what is read there from now on is something else
                    gather["filled"] = []
            if name == "all_gather_start":
                self.gathers.append(
                    {"first": self.calls, "last": self.calls, "filled": filled, "bytes": sum(b - a for a, b in filled)}
                )
            return fn(*args, **keywords)

        return call

    def most_alive(self) -> dict[str, Any]:
        alive = [[g for g in self.gathers if g["first"] <= at <= g["last"]] for at in range(1, self.calls + 1)]
        most = max(alive, key=lambda now: sum(g["bytes"] for g in now))
        return {
            "most_bytes": sum(g["bytes"] for g in most),
            "most_gathers": len(most),
            "sizes": [g["bytes"] for g in self.gathers],
        }


def _ranges(values: Any) -> list[tuple[int, int]]:
    """First and last address of every tensor in an argument, lists of them included."""
    import torch

    if isinstance(values, torch.Tensor):
        return [(values.data_ptr(), values.data_ptr() + values.nbytes)] if values.numel() else []
    return [r for x in values for r in _ranges(x)] if isinstance(values, (list, tuple)) else []


def _meet(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


# --- measuring ---


def at_rest(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for ranks in args.ranks:
        with Group(__file__, ranks, passed_on(args, *MODEL, "backend")) as group:
            found += [
                {"ranks": ranks, **max(stage, key=lambda x: x["bytes"])}
                for stage in zip(*group.ask("resting"), strict=True)
            ]
    return found


def gathers(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    with Group(__file__, 2, passed_on(args, *MODEL, "backend")) as group:
        for accumulate in (1, 2):
            for policy in ("min_cut", "full", "none"):
                answer = max(group.ask("gathered", accumulate=accumulate, policy=policy), key=lambda x: x["most_bytes"])
                sizes = {"sizes": sorted(set(answer["sizes"])), "gathers": len(answer["sizes"])}
                found.append({"accumulate": accumulate, "remat": policy, **answer, **sizes})
    return found


def over_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Memory of a process above what it had before the model was built, the mean of the ranks; every rank has
    `args.batch` sequences."""
    found = []
    for ranks in args.ranks:
        for name in OVER_RANKS:
            whole = argparse.Namespace(**{**vars(args), "batch": args.batch * ranks})
            with start(name, whole, ranks) as group:
                group.ask("build")
                group.ask("steps", count=2)
                building = group.ask("settle")
                group.ask("steps", count=2)
                steps = group.ask("settle")
            mean = {k: sum(x[k] for x in steps) / ranks for k in ("growth_mib", "resting_mib")}
            found.append(
                {"who": name, "ranks": ranks, "building_mib": sum(x["growth_mib"] for x in building) / ranks, **mean}
            )
            print(
                f"{CONTESTANTS[name].title}, {ranks} ranks: {mean['resting_mib']:.0f} MiB, peak "
                f"{mean['growth_mib']:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
    return found


# --- reporting ---


def report_rest(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    rows = [
        (f"stage {x['stage']}", x["ranks"], f"{x['bytes']:,}", f"{x['expected']:,}", f"{x['bytes'] / x['params']:.3f}")
        for x in found
    ]
    wrong = [x for x in found if x["bytes"] != x["expected"]]
    over = [x for x in found if x["stage"] == 3 and x["bytes"] > REST_LIMIT * 12 * x["params"] / x["ranks"]]
    notes = [
        f"{_size(args)}; bytes of the storages behind the state's tensors on the fullest rank.",
        f"equal to the closed form, to the byte: {'met' if not wrong else f'MISSED by {len(wrong)}'}",
        f"stage 3 at most 12 P / N + 1 %: {'met' if not over else f'MISSED by {len(over)}'}",
    ]
    columns = ("", "ranks", "bytes per rank", "closed form", "bytes per parameter")
    publish(
        "memory_at_rest",
        "The state at rest",
        columns,
        rows,
        notes,
        {"settings": _settings(args), "points": found},
        args.out,
    )


def report_gathered(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    rows = []
    for x in found:
        block, name = max(x["sizes"]), f"accumulate {x['accumulate']}, remat {x['remat']}"
        rows.append(
            (
                name,
                x["gathers"],
                f"{block:,}",
                f"{x['most_bytes']:,}",
                f"{x['most_bytes'] / block:.2f}",
                x["most_gathers"],
                f"{x['pool_bytes']:,}",
            )
        )
    bad = [x for x in found if x["most_bytes"] > 2 * max(x["sizes"])]
    notes = [
        f"{_size(args)}, ZeRO-3 on 2 ranks, {args.backend} backend, global batch {args.batch}; a real step, the "
        f"fullest rank.",
        f"at most two blocks' worth alive at any time: {'met' if not bad else f'MISSED by {len(bad)}'}",
    ]
    columns = (
        "",
        "gathers a step",
        "largest block, bytes",
        "most alive at once, bytes",
        "in blocks",
        "gathers alive",
        "pool, bytes",
    )
    publish(
        "memory_gathered",
        "Gathered parameters alive",
        columns,
        rows,
        notes,
        {"settings": _settings(args), "points": found},
        args.out,
    )


def report_ranks(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    from model import Config

    at = {(x["who"], x["ranks"]): x for x in found}
    names = list(dict.fromkeys(x["who"] for x in found))
    rows = []
    for name in names:
        each = [at[name, n] for n in args.ranks]
        rows.append(
            (
                CONTESTANTS[name].title,
                *(f"{x['resting_mib']:.0f}" for x in each),
                *(f"{x['growth_mib']:.0f}" for x in each),
            )
        )
    per_parameter = 12 * Config(*(getattr(args, k) for k in MODEL)).num_params / 2**20
    state = ", ".join(f"{per_parameter / n:.0f}" for n in args.ranks)
    notes = [
        f"{_size(args)}, sequence {args.seq}, {args.batch} sequences a rank, {args.backend} backend; resident memory "
        f"of a process above what it had before "
        "the model was built, mean of the ranks, MiB. Peak: of two steps, after two others.",
        f"The state of ZeRO-3 alone, 12 P / N: {state} MiB on {', '.join(map(str, args.ranks))} ranks.",
    ]
    columns = ("", *(f"at rest, N = {n}" for n in args.ranks), *(f"peak, N = {n}" for n in args.ranks))

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for plot, field, title in zip(
            axes, ("resting_mib", "growth_mib"), ("between steps", "peak of a step"), strict=True
        ):
            for name in names:
                style = "-" if CONTESTANTS[name].library == "fzero" else "--"
                plot.plot(
                    args.ranks,
                    [at[name, n][field] for n in args.ranks],
                    style,
                    marker="o",
                    markersize=4,
                    label=CONTESTANTS[name].title,
                )
            plot.plot(args.ranks, [per_parameter / n for n in args.ranks], ":", color="black", label="12 P / N")
            plot.set_xticks(args.ranks)
            plot.set_xlabel("ranks")
            plot.set_title(title)
        axes[0].set_ylabel("MiB a rank")
        axes[0].set_ylim(bottom=0)
        axes[1].legend(frameon=False)

    data = {"settings": _settings(args), "points": found}
    publish("memory_over_ranks", "Memory of a rank, by number of ranks", columns, rows, notes, data, args.out, draw)


def _size(args: argparse.Namespace) -> str:
    from model import Config

    config = Config(*(getattr(args, k) for k in MODEL))
    return f"{config.num_params:,} parameters ({config.layers} layers, width {config.width}), fp32, AdamW"


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k not in ("worker", "out")}


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    does = {
        "rest": (at_rest, report_rest, [1, 2, 3]),
        "gathered": (gathers, report_gathered, [2]),
        "ranks": (over_ranks, report_ranks, [1, 2, 4]),
    }
    for part in args.parts:
        measure, report, ranks = does[part]
        sizes = {k: v if getattr(args, k) is None else getattr(args, k) for k, v in PARTS[part].items()}
        backend = args.backend or ("inductor" if part == "ranks" else "eager")
        here = argparse.Namespace(**{**vars(args), **sizes, "backend": backend, "ranks": args.ranks or ranks})
        report(here, measure(here))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        help="each has sizes of its own unless they are given: " + str(PARTS),
    )
    model_flags(parser)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 1 2 3 at rest, 1 2 4 of processes")
    contest_flags(parser, backend=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
