"""Asynchronous checkpoints: what they take from the thread that trains, compared with none, with a save that is waited
for, and with torch.distributed.checkpoint.

One state in the same processes; rounds of `--every` steps, before which the state is saved or not; the ways to save
take turns in random order. Torch writes the same tensors, each rank its own, with the copies in memory that it keeps
from save to save.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import MODEL, Group, Table, passed_on, rss_mib, serve, within_rounds

from recovery_tables import SCRIPT

NAME = "behind"
WAYS = {
    "none": "no save",
    "behind": "save(wait=False)",
    "blocking": "save",
    "torch_async": "torch's async_save",
    "torch_blocking": "torch's save",
}
MEASURES = ("held_s", "held_cpu_s", "thread_cpu_s", "cpu_s", "wall_s", "complete_s", "waited_s")


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from model import Config, make_batches, make_init, make_loss
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from training import FzeroStep, clipped_adamw, shard, timed

    import fzero as fz

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh(device="cpu", shared_memory=False)
    step = fz.shard_params(fz.train_step(make_loss(config), clipped_adamw()))
    train = FzeroStep(step, mesh, make_init(config), fz.random.key(0), backend=args.backend)
    batches = [shard(batch, mesh.rank, mesh.size) for batch in make_batches(config, 16)]
    group: Any = dist.new_group(backend="gloo")  # torch's save talks in a thread, beside the steps
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def steps(count: int) -> None:
        timed(train, batches, int(train.state.step), count)

    def save(way: str, path: Path) -> Callable[[], Any]:
        """Returns what waits for it."""
        if way == "behind":
            return fz.checkpoint.save(path, train.state, keep=1, wait=False).wait
        if way == "blocking":
            fz.checkpoint.save(path, train.state, keep=1)
        if way.startswith("torch"):
            named = zip(fz.tree.names(train.state), fz.tree.leaves(train.state), strict=True)
            given: Any = {f"{mesh.rank}.{name}": x for name, x in named}
            to = dcp.FileSystemWriter(path / f"step-{int(train.state.step)}")
            if way == "torch_async":
                saving: Any = dcp.async_save(given, storage_writer=to, process_group=group, async_stager=stager)
                return saving.result
            dcp.save(given, storage_writer=to, process_group=group)
        return lambda: None

    def turn(way: str, path: str) -> dict[str, float]:
        """A save and the steps behind it: seconds a step but for those of the save itself."""
        dist.barrier()
        clocks = (time.perf_counter, time.thread_time, time.process_time)
        begin, ends = [clock() for clock in clocks], list[float]()
        wait = save(way, Path(path, way))
        held = [clock() - since for clock, since in zip(clocks, begin, strict=True)]
        watch = threading.Thread(target=lambda: (wait(), ends.append(time.perf_counter())))
        watch.start()
        steps(args.every)
        after = time.perf_counter()
        watch.join()  # as the next save does
        wall, thread, process = (clock() - since for clock, since in zip(clocks, begin, strict=True))
        waited = begin[0] + wall - after
        clear(way, path)
        complete = ends[0] - begin[0] if way in ("behind", "torch_async") else held[0]
        each = (seconds / args.every for seconds in (thread, process, wall))
        return dict(zip(MEASURES, (held[0], held[1], *each, complete, waited), strict=True))

    def clear(way: str, path: str) -> None:
        """What torch's saves do not do themselves, as keep=1 does."""
        dist.barrier()
        if way.startswith("torch") and mesh.rank == 0:
            shutil.rmtree(Path(path, way))

    def grown(way: str, path: str) -> float:
        """MiB of resident memory that a first save leaves behind."""
        before = rss_mib()
        save(way, Path(path, way))()
        clear(way, path)
        return rss_mib() - before

    def nbytes() -> int:
        return sum(x.nbytes for x in fz.tree.leaves(train.state))

    def verify(path: str) -> int:
        return fz.checkpoint.verify(path).step

    serve({"steps": steps, "turn": turn, "grown": grown, "nbytes": nbytes, "verify": verify})
    fz.close_mesh()


DEFAULTS = {"layers": 8, "width": 768, "heads": 12, "seq": 256, "batch": 8, "processes": 2, "every": 10, "warmup": 2,
            "rounds": 3, "only": list(WAYS), "backend": "inductor"}  # fmt: skip
TINY = {"layers": 2, "width": 128, "heads": 2, "seq": 32, "rounds": 2, "every": 2, "backend": "eager"}


def measure(args: argparse.Namespace) -> Table:
    order, rounds = random.Random(0), list[dict[str, dict[str, float]]]()
    if args.path is not None:
        Path(args.path).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fzero-behind-", dir=args.path))
    try:
        given = ["--table=saves", *passed_on(args, *MODEL, "backend", "every", "processes")]
        with Group(SCRIPT, args.processes, given, timeout=1200) as group:
            group.ask("steps", count=args.warmup)
            grown = {way: max(group.ask("grown", way=way, path=str(folder))) for way in args.only}
            nbytes = group.ask("nbytes")
            for number in range(args.rounds):
                found: dict[str, dict[str, float]] = {}
                for way in order.sample(args.only, len(args.only)):
                    answers = group.ask("turn", way=way, path=str(folder))
                    found[way] = {k: max(x[k] for x in answers) for k in MEASURES}
                    print(f"round {number + 1}: {way}: {found[way]}", file=sys.stderr, flush=True)
                rounds.append(found)
            for way in {"behind", "blocking"} & {*args.only}:
                group.ask("verify", path=str(folder / way))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report(args, rounds, grown, nbytes)


def report(
    args: argparse.Namespace, rounds: list[dict[str, dict[str, float]]], grown: dict[str, float], nbytes: list[int]
) -> Table:
    from model import Config

    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    middle = {way: {k: statistics.median(r[way][k] for r in rounds) for k in MEASURES} for way in args.only}
    columns = ("held_s", "held_cpu_s", "thread_cpu_s", "cpu_s", "wall_s", "complete_s")
    rows = [(WAYS[way], *(f"{x[k]:.3f}" for k in columns), f"{grown[way]:.0f}") for way, x in middle.items()]
    ratios: dict[str, Any] = {}
    notes = [
        f"{config.num_params / 1e6:.1f} M parameters ({args.layers} layers of width {args.width}, sequence {args.seq}, "
        f"global batch {args.batch}), fp32, AdamW, clipping, ZeRO-3 over gloo, {args.processes} processes with one "
        f"thread each; {max(nbytes) / 2**20:.0f} MiB of state per rank. A save before every {args.every} steps; "
        f"medians of {args.rounds} interleaved rounds, of each the rank with more.",
        "Blocking: from the call to its return, wall and CPU seconds of the thread that trains. Per step: round and "
        f"its save, to the end of both, divided by {args.every}. Complete: from the call until it is on stable storage "
        "on all ranks. MiB: resident memory that the first save keeps.",
        "fzero writes checksums and compares replicas, torch does neither.",
    ]

    def compare(name: str, each: list[float]) -> None:
        ratios[name], note = within_rounds(name, each)
        notes.append(note)

    for way in args.only:
        if way == "none" or "none" not in args.only:
            continue
        for key, text in (("thread_cpu_s", "CPU seconds of the thread that steps"), ("wall_s", "wall seconds")):
            compare(f"{WAYS[way]} / {WAYS['none']}, {text}", [r[way][key] / r["none"][key] for r in rounds])
        parts = [1 + r[way]["held_cpu_s"] / (args.every * r["none"]["thread_cpu_s"]) for r in rounds]
        name = f"{WAYS[way]}: CPU seconds of the thread, those of {args.every} steps and of the call / of the steps"
        compare(name, parts)
    data = {"bytes": nbytes, "grown_mib": grown, "rounds": rounds, "ratios": ratios}
    per_step = ("per step: thread's CPU s", "process's CPU s", "wall s")
    columns = ("", "blocking s", "blocking CPU s", *per_step, "complete s", "MiB")
    return Table("Asynchronous checkpoints", columns, rows, notes, data)
