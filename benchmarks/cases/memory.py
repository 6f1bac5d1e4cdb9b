"""Memory: as planned, and of a model that is larger than it."""

from __future__ import annotations

import argparse
import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import MODEL, peak_mib, reset_peak, rss_mib

from cases import ZERO, Live, Running, Table, number, processes


def _config(args: argparse.Namespace) -> Any:
    from model import Config

    return Config(*(getattr(args, k) for k in MODEL))


# --- the plan's forecast ---

PLANNED: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "remat": "full"},
    {"stage": 3, "remat": "none"},
    {"stage": 3, "accumulate": 2},
    {"stage": 3, "precision": "bf16", "remat": "full"},
    {"stage": 3, "precision": "bf16", "accumulate": 2},
    {"stage": 2, "accumulate": 2},
    {"stage": 2, "precision": "bf16"},
    {"stage": 1, "remat": "full"},
    {"stage": 0},
]
PLAN_SIZES = [{"layers": 4, "width": 256, "seq": 64}, {"layers": 6, "width": 128, "seq": 256}]


def plan_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz
    from fzero.runtime.op_timers import allocated

    mesh = fz.make_mesh(device="cpu")

    def peak(
        size: dict[str, int], stage: int, remat: str = "min_cut", accumulate: int = 1, precision: str = "fp32"
    ) -> dict[str, Any]:
        """Peak bytes of the second step on this rank, predicted and measured."""
        live = Live(argparse.Namespace(**{**vars(args), **size, "heads": 4}), mesh=mesh)
        spread = getattr(fz, ZERO[stage])(axis="data")
        running = live.start(spread, fz.remat(remat), fz.accumulate(accumulate), fz.mixed_precision(precision))
        running.one()
        plan, state, (batch,) = running.train.plan, running.state, live.batches
        inputs = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fz.tree.leaves((state, batch))}
        temporary = allocated(lambda: running.train(state, batch), live.mesh.device)
        return {
            "predicted": plan.peak_bytes,
            "measured": sum(inputs.values()) + plan.pool_bytes + temporary,
            "resting": plan.persistent_bytes,
            "pool": plan.pool_bytes,
            "line": plan.peak_line.text,
        }

    return {"peak": peak}


def plan_memory(args: argparse.Namespace) -> Table:
    """Planned and measured peak of a step, for combinations of transforms and sizes.

    Measured are the bytes of tensors alive at once: of the state and the batch, the pool, and every allocation of
    PyTorch's allocator during one step, as its profiler records them. Allocations of libraries are not in it.
    """
    points: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with processes(args, ranks) as group:
            for size in PLAN_SIZES[: args.sizes]:
                for case in PLANNED if ranks > 1 else [c for c in PLANNED if c["stage"] == 0 or len(c) > 2]:
                    answer = max(group.ask("peak", size=size, **case), key=lambda x: x["measured"])
                    points.append({"ranks": ranks, **size, **case, **answer})
    rows, off = [], []
    for x in points:
        error = x["predicted"] / x["measured"] - 1
        off.append(abs(error))
        name = ", ".join([ZERO[x["stage"]], *(f"{k} {x[k]}" for k in ("remat", "accumulate", "precision") if k in x)])
        numbers = (f"{x['predicted'] / 1e6:.3f}", f"{x['measured'] / 1e6:.3f}", f"{error:+.2%}")
        rows.append((name, x["ranks"], f"{x['layers']} x {x['width']}, {x['seq']}", *numbers))
    notes = [
        f"{args.backend} backend, global batch {args.batch}, AdamW with clipping; size: layers x width, sequence; MB "
        "of the fullest rank.",
        f"the largest difference between planned and measured peak is {max(off):.2%}",
    ]
    columns = ("transforms", "ranks", "size", "predicted", "measured", "predicted - measured")
    return Table("Peak memory, planned and measured", columns, rows, notes, {"points": points})


# --- a model larger than memory ---

WHERE = ["memory", "disk"]
INTERVAL_S = 0.01  # between two looks at resident memory


class _Private:
    """The most private and shared memory of this process, without the pages of mapped files, as a thread sees it.

    VmHWM, which is measured beside it, has those too.
    """

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


def offload_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    live: dict[str, Any] = {}

    def join() -> None:
        """Everything before the model exists: libraries, process group, batches."""
        for name in ("torch._dynamo", "torch._inductor.compile_fx", "functorch.compile"):
            importlib.import_module(name)
        live["model"] = Live(args, args.steps + 1)

    def build(where: str) -> dict[str, float]:
        import fzero as fz
        from fzero import optim

        mesh = live["model"].mesh
        transforms = [fz.remat("full"), *([fz.shard_params(axis="data")] if mesh.size > 1 else [])]
        transforms += [fz.offload("nvme", ("opt_state", "params"), path=args.path)] if where == "disk" else []
        live["watch"], live["empty"] = _Private(), rss_mib()
        live["empty_private"] = live["watch"].now()
        reset_peak()
        live["running"] = live["model"].start(*transforms, optimizer=optim.adamw(1e-4))
        return {"build_s": live["running"].init_s, **grown("build")}

    def steps() -> dict[str, Any]:
        running: Running = live["running"]
        files, out = _files(running.state), []
        for batch in live["model"].batches:
            before, begin = _moved(files), time.perf_counter()
            loss = running.one(batch)
            seconds = time.perf_counter() - begin
            out.append({"step_s": seconds, "loss": loss, **{k: v - before[k] for k, v in _moved(files).items()}})
        planned, resting = running.train.plan.peak_bytes / 1e9, _gb(rss_mib() - live["empty"])
        direct = all(f.direct for f in files)
        return {"steps": out, "planned_gb": planned, "resting_gb": resting, "direct": direct, **grown("steps")}

    def grown(when: str) -> dict[str, float]:
        """GB above the empty process at the peak since the last time."""
        peak, private = peak_mib() - live["empty"], live["watch"].most - live["empty_private"]
        reset_peak()
        live["watch"].most = live["watch"].now()
        return {f"{when}_peak_gb": _gb(peak), f"{when}_private_gb": _gb(private)}

    return {"join": join, "build": build, "steps": steps, "leave": live.clear}


def _files(state: Any) -> list[Any]:
    """The scratch files of a state."""
    import fzero as fz
    from fzero.sharding.layout import extent_of

    found = [extent.files for x in fz.tree.leaves(state) if (extent := extent_of(x)) is not None]
    return list({id(f): f for f in found}.values())


def _moved(files: list[Any]) -> dict[str, float]:
    moved = sum(f.bytes_read + f.bytes_written for f in files) / 1e9
    return {"disk_gb": moved, "disk_s": sum(f.busy_seconds for f in files)}


def _gb(mib: float) -> float:
    return mib * 2**20 / 1e9


def offload_memory(args: argparse.Namespace) -> Table:
    """A model larger than its memory: 504 M parameters and their Adam state, 6 GB, on disk, in 2 GB a process.

    Everything of a state rests on disk: fp32 masters and moments. The same step runs without offload first, in other
    processes, from the same key on the same batches; losses must be equal bit for bit. Two processes are under
    `shard_params`. Memory is resident memory above that with all libraries imported: the peak from the first leaf on,
    compilation included. The runs without offload take 10 GB of memory, those with it 6 GB of disk.
    """
    points = []
    for count in args.processes:
        for where in args.where:
            with processes(args, count, threads=max(1, args.threads // count), timeout=3000) as group:
                group.ask("join")
                built = group.ask("build", where=where)
                ranks = [a | b for a, b in zip(built, group.ask("steps"), strict=True)]
                group.ask("leave")
            each = zip(*(rank["steps"] for rank in ranks), strict=True)
            steps = [{k: max(x[k] for x in same) for k in same[0]} for same in each]
            most = {k: max(rank[k] for rank in ranks) for k in ranks[0] if k != "steps"}  # the rank with more
            most |= {"steps": steps, "direct": all(rank["direct"] for rank in ranks)}
            points.append({"processes": count, "where": where, **most})
            text = f"{_peak(points[-1]):.2f} GB, {steps[-1]['step_s']:.1f} s a step"
            print(f"{_title(points[-1])}: {text}", file=sys.stderr, flush=True)
    rows, comparisons = [], []
    for x in points:
        later = x["steps"][1:]
        seconds, moved, busy = (sum(step[k] for step in later) / len(later) for k in ("step_s", "disk_gb", "disk_s"))
        disk = (f"{moved:.2f}", f"{moved / seconds:.2f}", f"{moved / busy:.2f}") if moved else ("", "", "")
        private = max(x["build_private_gb"], x["steps_private_gb"])
        memory = (x["resting_gb"], x["build_peak_gb"], x["steps_peak_gb"], private, x["planned_gb"])
        rows.append((_title(x), *(f"{m:.2f}" for m in memory), f"{x['build_s']:.1f}", f"{seconds:.2f}", *disk))
        if x["where"] == "disk":
            comparisons.append(f"{_title(x)}: at most {_peak(x):.2f} GB above the empty process")
    by_case = {(x["processes"], x["where"]): [step["loss"] for step in x["steps"]] for x in points}
    for count in args.processes:
        plain, disk = (by_case.get((count, where)) for where in WHERE)
        if plain and disk:
            same = "equal" if plain == disk else f"not equal ({plain} in memory, {disk} on disk)"
            comparisons.append(f"{number(count)}: losses in memory and on disk are {same} bit for bit")
    params = _config(args).num_params
    direct = all(x["direct"] for x in points if x["where"] == "disk")
    notes = [
        f"{params / 1e6:.0f} M parameters ({args.layers} layers, width {args.width}), fp32 masters, AdamW: "
        f"{12 * params / 1e9:.2f} GB of state; sequence {args.seq}, global batch {args.batch}, remat full, "
        f"{args.threads} threads in all, {args.backend} backend; "
        f"{'O_DIRECT' if direct else 'through the page cache'}. The rank with more.",
        "GB of memory are resident, above what the process had with all libraries imported: between steps, at the "
        f"peak of init, at the peak of {args.steps + 1} steps with compilation; private at the peak of all, without "
        "pages of mapped files; as planned, without what libraries take.",
        f"Seconds and disk: means of {args.steps} steps after the first; GB a step read and written, over its time, "
        "and over the time the disk was busy.",
        *(f"{_title(x)}: losses {', '.join(format(step['loss'], '.6f') for step in x['steps'])}" for x in points),
        *comparisons,
    ]
    memory = ("at rest GB", "init GB", "steps GB", "private GB", "planned GB")
    columns = ("", *memory, "init s", "step s", "disk GB a step", "GB/s", "GB/s busy")
    return Table("A model larger than memory", columns, rows, notes, {"points": points})


def _title(point: dict[str, Any]) -> str:
    n = point["processes"]
    return f"{number(n)}{', ZeRO-3' * (n > 1)}, {'in memory' if point['where'] == 'memory' else 'on disk'}"


def _peak(point: dict[str, Any]) -> float:
    """GB above the empty process, over its whole life."""
    return max(point["build_peak_gb"], point["steps_peak_gb"])
