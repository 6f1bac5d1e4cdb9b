"""Memory: the state at rest, gathered parameters, processes over ranks, the plan's forecast, a model larger than it."""

from __future__ import annotations

import argparse
import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import MODEL, peak_mib, reset_peak, rss_mib, verdict

from cases import ZERO, Live, Running, Table, kept, number, processes
from cases.contestants import CONTESTANTS, start

# --- the state at rest ---

REST_LIMIT = 1.01  # of 12 P / N


def rest_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz

    live = Live(args)

    def resting() -> list[dict[str, int]]:
        """For each stage: bytes of the state on this rank, and those of its definition."""
        leaves = fz.tree.leaves(live.meta())
        whole = sum(4 * x.numel() for x in leaves)
        shard = sum(4 * -(-x.numel() // live.mesh.size) for x in leaves)
        scalars = 8 + 3 * 8  # the step and the key; the optimizer's counts are added below
        out = []
        for stage, name in enumerate(ZERO):
            state = live.start(getattr(fz, name)(axis="data")).state
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fz.tree.leaves(state)}
            counts = sum(x.nbytes for x in fz.tree.leaves(state.opt_state) if x.numel() == 1)
            expected = (shard if stage == 3 else whole) + 2 * (shard if stage else whole) + scalars + counts
            out.append({"stage": stage, "bytes": sum(storages.values()), "expected": expected, "params": whole // 4})
        return out

    return {"resting": resting}


def at_rest(args: argparse.Namespace) -> Table:
    """The state at rest: bytes of the storages behind its tensors, beside the closed form of each ZeRO stage."""
    found = []
    for ranks in args.ranks:
        with processes(args, ranks) as group:
            stages = zip(*group.ask("resting"), strict=True)
            found += [{"ranks": ranks, **max(stage, key=lambda x: x["bytes"])} for stage in stages]
    rows = [
        (f"stage {x['stage']}", x["ranks"], f"{x['bytes']:,}", f"{x['expected']:,}", f"{x['bytes'] / x['params']:.3f}")
        for x in found
    ]
    over = [x for x in found if x["stage"] == 3 and x["bytes"] > REST_LIMIT * 12 * x["params"] / x["ranks"]]
    notes = [
        f"{_size(args)}; bytes of the storages behind the state's tensors on the fullest rank.",
        kept("equal to the closed form, to the byte", sum(x["bytes"] != x["expected"] for x in found)),
        kept("stage 3 at most 12 P / N + 1 %", len(over)),
    ]
    columns = ("", "ranks", "bytes per rank", "closed form", "bytes per parameter")
    return Table("The state at rest", columns, rows, notes, {"points": found})


def _config(args: argparse.Namespace) -> Any:
    from model import Config

    return Config(*(getattr(args, k) for k in MODEL))


def _size(args: argparse.Namespace) -> str:
    return f"{_config(args).num_params:,} parameters ({args.layers} layers, width {args.width}), fp32, AdamW"


# --- gathered parameters ---


def gathered_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz

    live = Live(args, 2)

    def gathered(accumulate: int, policy: str) -> dict[str, Any]:
        """The most bytes of gathered parameters alive at once in a step, the sizes of its gathers, the whole pool."""
        running = live.start(fz.shard_params(axis="data"), fz.accumulate(accumulate), fz.remat(policy))
        running.one(live.batches[0])
        watch = _Watch()
        running.replace_calls(watch.around)
        running.one(live.batches[1])
        return {**watch.most_alive(), "pool_bytes": running.train.program.pool_bytes}

    return {"gathered": gathered}


class _Watch:
    """Records for each gather the call of a step at which it starts, and the call that last reads its result."""

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
                if _meet(gather["filled"], filled):  # written again: later reads are of another value
                    gather["filled"] = []
            if name == "all_gather_start":
                size = sum(b - a for a, b in filled)
                self.gathers.append({"first": self.calls, "last": self.calls, "filled": filled, "bytes": size})
            return fn(*args, **keywords)

        return call

    def most_alive(self) -> dict[str, Any]:
        alive = [[g for g in self.gathers if g["first"] <= at <= g["last"]] for at in range(1, self.calls + 1)]
        most = max(alive, key=lambda now: sum(g["bytes"] for g in now))
        found = {"most_bytes": sum(g["bytes"] for g in most), "most_gathers": len(most)}
        return {**found, "sizes": [g["bytes"] for g in self.gathers]}


def _ranges(values: Any) -> list[tuple[int, int]]:
    """First and last address of every tensor in an argument, lists of them included."""
    import torch

    if isinstance(values, torch.Tensor):
        return [(values.data_ptr(), values.data_ptr() + values.nbytes)] if values.numel() else []
    return [r for x in values for r in _ranges(x)] if isinstance(values, (list, tuple)) else []


def _meet(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def gathers(args: argparse.Namespace) -> Table:
    """Gathered parameters alive at once in a real ZeRO-3 step.

    The output of an all_gather counts as alive from its start to the last line that is given an address in it.
    """
    found = []
    with processes(args, 2) as group:
        for accumulate in (1, 2):
            for policy in ("min_cut", "full", "none"):
                answer = max(group.ask("gathered", accumulate=accumulate, policy=policy), key=lambda x: x["most_bytes"])
                answer |= {"sizes": sorted(set(answer["sizes"])), "gathers": len(answer["sizes"])}
                found.append({"accumulate": accumulate, "remat": policy, **answer})
    rows = []
    for x in found:
        block, most = max(x["sizes"]), x["most_bytes"]
        name, numbers = f"accumulate {x['accumulate']}, remat {x['remat']}", (f"{block:,}", f"{most:,}")
        rows.append((name, x["gathers"], *numbers, f"{most / block:.2f}", x["most_gathers"], f"{x['pool_bytes']:,}"))
    bad = sum(x["most_bytes"] > 2 * max(x["sizes"]) for x in found)
    notes = [
        f"{_size(args)}, ZeRO-3 on 2 ranks, {args.backend} backend, global batch {args.batch}; a real step, the "
        "fullest rank.",
        kept("at most two blocks' worth alive at any time", bad),
    ]
    most = ("most alive at once, bytes", "in blocks", "gathers alive")
    columns = ("", "gathers a step", "largest block, bytes", *most, "pool, bytes")
    return Table("Gathered parameters alive", columns, rows, notes, {"points": found})


# --- processes over ranks ---

OVER_RANKS = ["fzero_zero0", "fzero_zero1", "fzero_zero2", "fzero_zero3", "ddp", "fsdp2"]


def over_ranks(args: argparse.Namespace) -> Table:
    """Resident memory of a process over the number of ranks, between steps and at the peak, beside DDP and FSDP2.

    Every rank has `--batch` sequences. Memory is the mean of the ranks, above that before the model was built.
    """
    at: dict[tuple[str, int], dict[str, Any]] = {}
    for ranks in args.ranks:
        for name in args.only:
            whole = argparse.Namespace(**{**vars(args), "batch": args.batch * ranks})
            with start(name, whole, ranks) as group:
                group.ask("build")
                group.ask("steps", count=2)
                building = group.ask("settle")
                group.ask("steps", count=2)
                steps = group.ask("settle")
            mean = {k: sum(x[k] for x in steps) / ranks for k in ("growth_mib", "resting_mib")}
            built = sum(x["growth_mib"] for x in building) / ranks
            at[name, ranks] = {"who": name, "ranks": ranks, "building_mib": built, **mean}
            text = f"{mean['resting_mib']:.0f} MiB, peak {mean['growth_mib']:.0f} MiB"
            print(f"{CONTESTANTS[name].title}, {ranks} ranks: {text}", file=sys.stderr, flush=True)
    fields = ("resting_mib", "growth_mib")
    rows = [
        (CONTESTANTS[name].title, *(f"{at[name, n][field]:.0f}" for field in fields for n in args.ranks))
        for name in args.only
    ]
    state = [12 * _config(args).num_params / 2**20 / n for n in args.ranks]
    notes = [
        f"{_size(args)}, sequence {args.seq}, {args.batch} sequences a rank, {args.backend} backend; resident memory "
        "of a process above what it had before the model was built, mean of the ranks, MiB. Peak: of two steps, after "
        "two others.",
        f"The state of ZeRO-3 alone, 12 P / N: {', '.join(f'{x:.0f}' for x in state)} MiB on "
        f"{', '.join(map(str, args.ranks))} ranks.",
    ]
    columns = ("", *(f"at rest, N = {n}" for n in args.ranks), *(f"peak, N = {n}" for n in args.ranks))

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for plot, field, title in zip(axes, fields, ("between steps", "peak of a step"), strict=True):
            for name in args.only:
                style, values = "-" if CONTESTANTS[name].library == "fzero" else "--", [at[name, n] for n in args.ranks]
                label = CONTESTANTS[name].title
                plot.plot(args.ranks, [x[field] for x in values], style, marker="o", markersize=4, label=label)
            plot.plot(args.ranks, state, ":", color="black", label="12 P / N")
            plot.set_xticks(args.ranks)
            plot.set_xlabel("ranks")
            plot.set_title(title)
        axes[0].set_ylabel("MiB a rank")
        axes[0].set_ylim(bottom=0)
        axes[1].legend(frameon=False)

    return Table("Memory of a rank, by number of ranks", columns, rows, notes, {"points": list(at.values())}, draw)


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
PLAN_LIMIT = 0.05  # of the measured peak


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
    text = kept(f"within {PLAN_LIMIT:.0%} of what was planned, all {len(points)}", sum(e > PLAN_LIMIT for e in off))
    notes = [
        f"{args.backend} backend, global batch {args.batch}, AdamW with clipping; size: layers x width, sequence; MB "
        "of the fullest rank.",
        f"{text}; the worst is off by {max(off):.2%}",
    ]
    columns = ("transforms", "ranks", "size", "predicted", "measured", "predicted - measured")
    return Table("Peak memory, planned and measured", columns, rows, notes, {"points": points})


# --- a model larger than memory ---

OFFLOAD_LIMIT_GB = 2.0  # above the empty process
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
    rows, verdicts = [], []
    for x in points:
        later = x["steps"][1:]
        seconds, moved, busy = (sum(step[k] for step in later) / len(later) for k in ("step_s", "disk_gb", "disk_s"))
        disk = (f"{moved:.2f}", f"{moved / seconds:.2f}", f"{moved / busy:.2f}") if moved else ("", "", "")
        private = max(x["build_private_gb"], x["steps_private_gb"])
        memory = (x["resting_gb"], x["build_peak_gb"], x["steps_peak_gb"], private, x["planned_gb"])
        rows.append((_title(x), *(f"{m:.2f}" for m in memory), f"{x['build_s']:.1f}", f"{seconds:.2f}", *disk))
        if x["where"] == "disk":
            verdicts.append(
                f"{_title(x)}: at most {_peak(x):.2f} GB above the empty process, {OFFLOAD_LIMIT_GB:g} wanted: "
                f"{verdict(_peak(x), OFFLOAD_LIMIT_GB)}"
            )
    by_case = {(x["processes"], x["where"]): [step["loss"] for step in x["steps"]] for x in points}
    for count in args.processes:
        plain, disk = (by_case.get((count, where)) for where in WHERE)
        if plain and disk:
            same = "met" if plain == disk else f"MISSED: {plain} in memory, {disk} on disk"
            verdicts.append(
                f"{number(count)}: losses of {len(disk)} steps equal bit for bit to those in memory: {same}"
            )
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
        *verdicts,
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
