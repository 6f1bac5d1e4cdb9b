"""The disk: a step whose optimizer state or parameters are stored there."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cases import Live, Running, Table, processes

if TYPE_CHECKING:
    pass

DEPTH = 3  # transfers under way: a block read, one updated, one written


def in_turn(transfers: Sequence[Callable[[int], Any]]) -> None:
    """Starts transfers, each with the number of its buffer, with at most `DEPTH` under way."""
    under_way: list[Any] = []
    for k, begin in enumerate(transfers):
        if len(under_way) == DEPTH:
            under_way.pop(0).wait()
        under_way.append(begin(k % DEPTH))
    for transfer in under_way:
        transfer.wait()


# --- a step over leaves on disk ---

OFFLOADED = {"opt_state": ("opt_state",), "both": ("opt_state", "params"), "waiting": ("opt_state", "params")}
TITLES = {
    "opt_state": "optimizer state on disk",
    "both": "parameters too",
    "waiting": "parameters too, updates that wait",
}


def _offloaded(args: argparse.Namespace) -> list[str]:
    """The measured steps with leaves on disk."""
    return [name for name in OFFLOADED if name != "waiting" or args.max_norm is not None]


def time_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz
    from fzero import optim

    turns: dict[str, Callable[[], float | None]] = {}
    live = Live(args)

    def build() -> dict[str, Any]:
        moved, direct, params = {}, True, live.config.num_params
        optimizer = optim.adamw(1e-4)
        if args.max_norm is not None:
            optimizer = optim.chain(optim.clip_by_global_norm(args.max_norm), optimizer)
        for name in ("compute", *_offloaded(args)):
            transforms = [fz.offload("nvme", OFFLOADED[name], path=args.path)] if name in OFFLOADED else []
            # 12 bytes a parameter, and some to fill sectors
            budget = {"disk_budget": 13 * params} if name == "waiting" else {}
            running = live.start(*transforms, optimizer=optimizer, **budget)
            turns[name] = running.one
            if name in OFFLOADED:
                running.one()
                turns[f"{name}, disk alone"], moved[name], files = _disk_alone(running, args.path)
                direct = direct and files.direct
        return {"moved": moved, "direct": direct, "parameters": params}

    def turn(name: str) -> dict[str, Any]:
        begin = time.perf_counter()
        loss = turns[name]()
        return {"seconds": time.perf_counter() - begin, "loss": loss}

    return {"build": build, "turn": turn}


def _disk_alone(running: Running, path: list[str]) -> tuple[Callable[[], None], float, Any]:
    """A function that moves the bytes of a step and does nothing else; their number, in GB; the files."""
    from fzero.memory import disk

    program = running.train.program
    # of every leaf on disk: where its bytes begin here, and how many whole blocks they are
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, leaf in program.leaves.items():
        if leaf.layout.tier == "disk":
            offsets[name] = end, disk.padded(math.prod(leaf.stored_shape(program.mesh)) * leaf.dtype.itemsize)
            end += offsets[name][1]
    # not those of a wrong guess
    copies = [op for op, times in program.walk() if times and "disk" in op.tiers]
    spans = [[offsets[a] for a in op.writes or op.args] for op in copies]
    moved = [sum(size for _, size in each) for each in spans]
    largest = max(moved)
    files, ring = disk.ScratchFiles(path, end), [disk.aligned(largest).fill_(7) for _ in range(DEPTH)]

    def transfer(reads: bool, each: list[tuple[int, int]]) -> Callable[[int], Any]:
        def begin(buffer: int) -> Any:
            runs, at = [], 0
            for offset, size in each:
                runs.append((offset, ring[buffer][at : at + size]))
                at += size
            return (files.read if reads else files.write)(runs)

        return begin

    transfers = [transfer(op.tiers[0] == "disk", each) for op, each in zip(copies, spans, strict=True)]
    # the first write to a block costs more
    files.write([(at, ring[0][: min(largest, end - at)]) for at in range(0, end, largest)]).wait()
    return lambda: in_turn(transfers), sum(moved) / 1e9, files


def offload_time(args: argparse.Namespace) -> Table:
    """A step over leaves on disk: the longer of compute and disk, and not their sum.

    In one process, in every round in random order: the step without offload, which is the compute; the step with its
    optimizer state on disk, and with its parameters there too; and, for either, the disk alone: every read and write of
    the step's program, in its order and sizes, on other bytes of the same disk. Losses must be equal bit for bit.

    With `--max-norm` an update must know all gradients. The updates run on the guess that nothing is clipped; beside
    it runs the same step with a disk that has no room for a guess: its updates wait. 5 GB of disk, clipped 8.
    """
    points = []
    steps = ["compute", *_offloaded(args)]
    names = [*steps, *(f"{name}, disk alone" for name in _offloaded(args))]
    with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as cache:
        for batch in args.batches:
            given: dict[str, Any] = {"threads": args.threads, "timeout": 3000, "cache": cache}
            with processes(args, 1, env={"batch": batch}, **given) as group:
                (built,) = group.ask("build")
                rounds, losses = [], {name: [] for name in names}
                for number in range(args.rounds + 1):
                    seconds = {}
                    for name in random.Random(number).sample(names, len(names)):
                        (answer,) = group.ask("turn", name=name)
                        seconds[name] = answer["seconds"]
                        losses[name].append(answer["loss"])
                    rounds += [seconds] if number else []  # the first warms up
            points.append({"batch": batch, **built, "rounds": rounds, "losses": {name: losses[name] for name in steps}})
            print(f"batch {batch}: done", file=sys.stderr, flush=True)
    rows, comparisons = [], []
    for x in points:
        for name in _offloaded(args):
            rounds = [(r["compute"], r[f"{name}, disk alone"], r[name]) for r in x["rounds"]]
            compute, disk, step = (statistics.median(r[i] for r in rounds) for i in range(3))
            ratios = [step / max(compute, disk) for compute, disk, step in rounds]
            ratio, moved, who = statistics.median(ratios), x["moved"][name], f"batch {x['batch']}, {TITLES[name]}"
            spread = {"median": ratio, "min": min(ratios), "max": max(ratios)}
            x[f"{name} / max(compute, disk)"] = spread
            of_sum = statistics.median(s / (c + d) for c, d, s in rounds)
            shares = (f"{ratio:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", f"{of_sum:.2f}")
            rows.append(
                (who, f"{compute:.2f}", f"{disk:.2f}", f"{step:.2f}", *shares, f"{moved:.2f}", f"{moved / disk:.2f}")
            )
            if name != "waiting":
                comparisons.append(f"{who}: {ratio:.2f} x max(compute, disk)")
    # steps over leaves on disk have taken one step more, before the first turn
    same = all(x["losses"][name][:-1] == x["losses"]["compute"][1:] for x in points for name in _offloaded(args))
    equal = "equal" if same else "not equal"
    comparisons.append(f"losses of every step are {equal} bit for bit to the losses without offload")
    clip = "" if args.max_norm is None else f", clipped at a norm of {args.max_norm:g}"
    notes = [
        f"{points[0]['parameters'] / 1e6:.0f} M parameters ({args.layers} layers, width {args.width}), fp32, "
        f"AdamW{clip}, sequence {args.seq}, one process, {args.threads} threads, {args.backend} backend; "
        f"{'O_DIRECT' if all(x['direct'] for x in points) else 'through the page cache'}.",
        f"Medians of {args.rounds} interleaved rounds, ratios within a round. Compute: the step without offload. Disk: "
        f"the step's reads and writes alone, {DEPTH} under way.",
        *comparisons,
    ]
    columns = ("", "compute s", "disk s", "step s", "x max", "over the rounds", "x sum", "disk GB", "GB/s alone")
    return Table("A step over leaves on disk", columns, rows, notes, {"points": points})
