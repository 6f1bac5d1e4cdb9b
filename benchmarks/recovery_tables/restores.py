"""A save and a restore of a state on two ranks, compared with torch.distributed.checkpoint.

Both write the same tensors, each rank its own flat shards, over gloo and to the same disk. torch reads them back into
tensors that exist, fzero into new ones. Contestants take turns in random order, and every round writes anew. The files
are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Group, Table, passed_on, serve, within_rounds

from recovery_tables import SCRIPT

NAME = "restores"
WAYS = {"fzero": "fzero", "unchecked": "fzero, check_replicas=False", "dcp": "torch.distributed.checkpoint"}
MEASURES = ("save_s", "save_cpu_s", "restore_s", "restore_cpu_s")
LEAVES = 64
DEFAULTS = {"width": 2048, "processes": 2, "rounds": 5, "only": list(WAYS), "backend": "eager"}
TINY = {"width": 64, "rounds": 2}


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import fzero as fz

    torch.set_num_threads(1)
    mesh = fz.make_mesh(device="cpu", shared_memory=False)
    group: Any = dist.new_group(backend="gloo")

    def init(key: torch.Tensor) -> dict[str, torch.Tensor]:
        keys = fz.random.split(key, LEAVES)
        return {f"w{i}": fz.random.normal(keys[i], (args.width, args.width)) for i in range(LEAVES)}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return sum((x @ w).square().mean() for w in params.values())  # type: ignore[return-value]

    train = fz.compile(fz.shard_params(fz.train_step(loss, fz.optim.sgd(0.1))), mesh, backend="eager")
    state = train.init(init, fz.random.key(0))
    named = dict(zip(fz.tree.names(state), fz.tree.leaves(state), strict=True))
    given: Any = {f"{mesh.rank}.{name}": x for name, x in named.items()}

    def clocked(act: Callable[[], Any]) -> tuple[float, float]:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        act()
        return time.perf_counter() - wall, time.process_time() - cpu

    def turn(way: str, path: str) -> dict[str, float]:
        root = Path(path, way)

        def save() -> None:
            if way == "dcp":
                dcp.save(given, storage_writer=dcp.FileSystemWriter(root), process_group=group)
            else:
                fz.checkpoint.save(root, state, check_replicas=way == "fzero")

        read: list[Any] = []
        into: Any = {name: torch.zeros_like(x) for name, x in given.items()} if way == "dcp" else {}

        def restore() -> None:
            if way == "dcp":
                dcp.load(into, storage_reader=dcp.FileSystemReader(root), process_group=group)
                read.append(list(into.values()))
            else:
                read.append(fz.tree.leaves(train.restore(root)))

        saved, restored = clocked(save), clocked(restore)
        assert all(torch.equal(a, b) for a, b in zip(read[0], named.values(), strict=True))
        dist.barrier()
        if mesh.rank == 0:
            shutil.rmtree(root)
        return dict(zip(MEASURES, (*saved, *restored), strict=True))

    serve({"turn": turn, "nbytes": lambda: sum(x.nbytes for x in named.values())})
    fz.close_mesh()


def measure(args: argparse.Namespace) -> Table:
    order, rounds = random.Random(0), list[dict[str, dict[str, float]]]()
    if args.path is not None:
        Path(args.path).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fzero-restores-", dir=args.path))
    try:
        with Group(SCRIPT, args.processes, ["--table=restores", *passed_on(args, "width", "processes")]) as group:
            nbytes = group.ask("nbytes")
            for number in range(args.rounds + 1):
                found: dict[str, dict[str, float]] = {}
                for way in order.sample(args.only, len(args.only)):
                    answers = group.ask("turn", way=way, path=str(folder))
                    # seconds of the slower rank, CPU seconds of both
                    found[way] = {k: (sum if "cpu" in k else max)(x[k] for x in answers) for k in MEASURES}
                    print(f"round {number}: {way}: {found[way]}", file=sys.stderr, flush=True)
                if number:  # the first round warms up
                    rounds.append(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    middle = {way: {k: statistics.median(r[way][k] for r in rounds) for k in MEASURES} for way in args.only}
    rows = [(WAYS[way], *(f"{x[k]:.2f}" for k in MEASURES)) for way, x in middle.items()]
    notes = [
        f"{sum(nbytes) / 1e9:.2f} GB of fp32 parameters in {LEAVES} tensors, flat shards on {args.processes} ranks "
        f"with one thread each. Medians of {args.rounds} interleaved rounds, after one that warms up; seconds of the "
        "slower rank, CPU seconds of all. The files are in the page cache when they are read.",
        "fzero writes a sha256 of each file and a crc32 of each MiB, and checks the crc32 when it reads; "
        "torch.distributed.checkpoint has no checksums. Both sync their files.",
    ]
    ratios: dict[str, Any] = {}
    for way in args.only:
        for key in MEASURES:
            if way != "dcp" and "dcp" in args.only:
                name = f"{WAYS[way]} / {WAYS['dcp']}, {key}"
                ratios[name], note = within_rounds(name, [r[way][key] / r["dcp"][key] for r in rounds])
                notes.append(note)
    columns = ("", "save, s", "save, CPU s", "restore, s", "restore, CPU s")
    return Table("A save and a restore", columns, rows, notes, {"bytes": nbytes, "rounds": rounds, "ratios": ratios})
