"""A model larger than the memory it is given: 504 M parameters and their Adam state, 6 GB, on disk, with 2 GB of memory
for the process.

    python benchmarks/offload_memory.py --path DIR                 # about 12 minutes on 2 cores; 10 GB of memory for
    the runs without offload, 6 GB of disk python benchmarks/offload_memory.py --path DIR --processes 1   # half of it
    python benchmarks/offload_memory.py --path DIR --layers 6 --width 256 --heads 4 --seq 64    # to see that it runs

Everything of a state rests on disk: fp32 masters and moments. The same step is run without offload first, in processes
of its own, from the same key on the same batches; losses must be equal bit for bit. On two processes both are under
`shard_params`. Memory is what the operating system says of a process above what it had when all libraries were imported
and nothing was built: the peak of everything from the first leaf's birth on, compilation among it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import (
    MODEL,
    Group,
    model_flags,
    passed_on,
    peak_mib,
    publish,
    reset_peak,
    rss_mib,
    script_flags,
    serve,
    settings,
    verdict,
)

LIMIT_GB = 2.0  # above the empty process
LR = 1e-4
WHERE = ("memory", "disk")
INTERVAL_S = 0.01  # between two looks at what is resident


class Watch:
    """The most private and shared memory of this process, without the pages of files that it maps, as a thread sees it.
    VmHWM, beside it, has those too."""

    def __init__(self) -> None:
        self.most = self.now()
        threading.Thread(target=self._look, daemon=True).start()

    def now(self) -> float:
        """MiB."""
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(fields[k].split()[0]) for k in ("RssAnon", "RssShmem")) / 1024

    def _look(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            time.sleep(INTERVAL_S)


def worker(args: argparse.Namespace) -> None:
    live: dict[str, Any] = {}

    def join() -> None:
        """Everything before the model exists: libraries, process group, batches."""
        import torch
        from model import Config, make_batches

        import fzero as fz

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        for name in ("torch._dynamo", "torch._inductor.compile_fx", "functorch.compile"):
            importlib.import_module(name)
        live["config"] = Config(args.layers, args.width, args.heads, args.seq, args.batch)
        live["mesh"] = mesh = fz.make_mesh(device="cpu")
        live["batches"] = [
            tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in batch)
            for batch in make_batches(live["config"], args.steps + 1)
        ]

    def build(where: str) -> dict[str, float]:
        from model import make_init, make_loss

        import fzero as fz
        from fzero import optim

        transforms = [fz.remat("full"), *([fz.shard_params(axis="data")] if live["mesh"].size > 1 else [])]
        transforms += [fz.offload("nvme", ("opt_state", "params"), path=args.path)] if where == "disk" else []
        step = fz.compose(*transforms)(fz.train_step(make_loss(live["config"]), optim.adamw(LR)))
        train = fz.compile(step, live["mesh"], backend=args.backend)
        live["watch"], live["empty"] = Watch(), rss_mib()
        live["empty_private"] = live["watch"].now()
        reset_peak()
        begin = time.perf_counter()
        live["train"], live["state"] = train, train.init(make_init(live["config"]), fz.random.key(0))
        return {"build_s": time.perf_counter() - begin, **grown("build")}

    def steps() -> dict[str, Any]:
        train, state, files, out = live["train"], live["state"], _files(live["state"]), []
        for batch in live["batches"]:
            before, begin = _moved(files), time.perf_counter()
            state, metrics = train(state, batch)
            loss = float(metrics["loss"])
            seconds = time.perf_counter() - begin
            out.append({"step_s": seconds, "loss": loss, **{k: v - before[k] for k, v in _moved(files).items()}})
        planned = train.plan.peak_bytes / 1e9
        return {
            "steps": out,
            "planned_gb": planned,
            "resting_gb": _gb(rss_mib() - live["empty"]),
            "direct": all(f.direct for f in files),
            **grown("steps"),
        }

    def grown(when: str) -> dict[str, float]:
        """GB above the empty process at the peak since the last time."""
        out = {
            f"{when}_peak_gb": _gb(peak_mib() - live["empty"]),
            f"{when}_private_gb": _gb(live["watch"].most - live["empty_private"]),
        }
        reset_peak()
        live["watch"].most = live["watch"].now()
        return out

    def leave() -> None:
        import fzero as fz

        live.clear()
        fz.close_mesh()

    serve({"join": join, "build": build, "steps": steps, "leave": leave})


def _files(state: Any) -> list[Any]:
    """The scratch files that a state rests in."""
    import fzero as fz
    from fzero.layout import extent_of

    found = [extent.files for x in fz.tree.leaves(state) if (extent := extent_of(x)) is not None]
    return list({id(f): f for f in found}.values())


def _moved(files: list[Any]) -> dict[str, float]:
    return {
        "disk_gb": sum(f.bytes_read + f.bytes_written for f in files) / 1e9,
        "disk_s": sum(f.busy_seconds for f in files),
    }


def _gb(mib: float) -> float:
    return mib * 2**20 / 1e9


# --- measuring ---


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    points = []
    for processes in args.processes:
        for where in args.where:
            flags = [*passed_on(args, *MODEL, "steps", "backend"), "--path", *args.path]
            with Group(__file__, processes, flags, threads=max(1, args.threads // processes), timeout=3000) as group:
                group.ask("join")
                built = group.ask("build", where=where)
                ranks = [a | b for a, b in zip(built, group.ask("steps"), strict=True)]
                group.ask("leave")
            steps = [
                {k: max(rank["steps"][i][k] for rank in ranks) for k in ranks[0]["steps"][i]}
                for i in range(args.steps + 1)
            ]
            # of the ranks the one with more
            point = {k: max(rank[k] for rank in ranks) for k in ranks[0] if k != "steps"} | {"steps": steps}
            points.append(
                {"processes": processes, "where": where, **point, "direct": all(rank["direct"] for rank in ranks)}
            )
            print(
                f"{_title(points[-1])}: {_peak(points[-1]):.2f} GB, {steps[-1]['step_s']:.1f} s a step",
                file=sys.stderr,
                flush=True,
            )
    return points


def _title(point: dict[str, Any]) -> str:
    n = point["processes"]
    return f"{n} process{'es, ZeRO-3' if n > 1 else ''}, {'in memory' if point['where'] == 'memory' else 'on disk'}"


def _peak(point: dict[str, Any]) -> float:
    """GB above the empty process, over its whole life."""
    return max(point["build_peak_gb"], point["steps_peak_gb"])


# --- what it comes to ---


def report(args: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    from model import Config

    config = Config(*(getattr(args, k) for k in MODEL))
    rows, verdicts = [], []
    for x in points:
        later = x["steps"][1:]
        seconds, moved, busy = (sum(step[k] for step in later) / len(later) for k in ("step_s", "disk_gb", "disk_s"))
        disk = (f"{moved:.2f}", f"{moved / seconds:.2f}", f"{moved / busy:.2f}") if moved else ("", "", "")
        private = max(x["build_private_gb"], x["steps_private_gb"])
        memory = (f"{x[k]:.2f}" for k in ("resting_gb", "build_peak_gb", "steps_peak_gb"))
        rows.append(
            (
                _title(x),
                *memory,
                f"{private:.2f}",
                f"{x['planned_gb']:.2f}",
                f"{x['build_s']:.1f}",
                f"{seconds:.2f}",
                *disk,
            )
        )
        if x["where"] == "disk":
            verdicts.append(
                f"{_title(x)}: at most {_peak(x):.2f} GB above the empty process, {LIMIT_GB:g} wanted: "
                f"{verdict(_peak(x), LIMIT_GB)}"
            )
    by_case = {(x["processes"], x["where"]): [step["loss"] for step in x["steps"]] for x in points}
    for processes in args.processes:
        plain, disk = (by_case.get((processes, where)) for where in WHERE)
        if plain and disk:
            same = "met" if plain == disk else f"MISSED: {plain} in memory, {disk} on disk"
            verdicts.append(
                f"{processes} process{'es' if processes > 1 else ''}: losses of {len(disk)} steps equal bit for bit to "
                f"those in memory: {same}"
            )
    direct = all(x["direct"] for x in points if x["where"] == "disk")
    notes = [
        f"{config.num_params / 1e6:.0f} M parameters ({config.layers} layers, width {config.width}), fp32 masters, "
        f"AdamW: "
        f"{12 * config.num_params / 1e9:.2f} GB of state; sequence {config.seq}, global batch {config.batch}, remat "
        f"full, {args.threads} threads in all, "
        f"{args.backend} backend; {'O_DIRECT' if direct else 'through the page cache'}. The rank with more.",
        f"GB of memory are resident, above what the process had with all libraries imported: between steps, at the "
        f"peak of init, at the peak of "
        f"{args.steps + 1} steps with compilation; private at the peak of all, without pages of mapped files; as "
        f"planned, without what libraries take.",
        f"Seconds and disk: means of {args.steps} steps after the first; GB a step read and written, over its time, "
        f"and over the time the disk was busy.",
        *(f"{_title(x)}: losses {', '.join(format(step['loss'], '.6f') for step in x['steps'])}" for x in points),
        *verdicts,
    ]
    columns = (
        "",
        "at rest GB",
        "init GB",
        "steps GB",
        "private GB",
        "planned GB",
        "init s",
        "step s",
        "disk GB a step",
        "GB/s",
        "GB/s busy",
    )
    publish(
        args.name,
        "A model larger than memory",
        columns,
        rows,
        notes,
        {"settings": settings(args, "path"), "points": points},
        args.out,
    )


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
    else:
        report(args, measure(args))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=40, width=1024, heads=16, seq=256, batch=2)
    parser.add_argument(
        "--path", nargs="+", default=[tempfile.gettempdir()], help="directories on the disk that holds the state"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--where", nargs="+", choices=WHERE, default=list(WHERE), help="in memory is what losses are compared with"
    )
    parser.add_argument("--threads", type=int, default=2, help="of all processes")
    parser.add_argument("--steps", type=int, default=2, help="after the first")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    script_flags(parser, "offload_memory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
