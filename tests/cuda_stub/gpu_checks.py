"""Checks of gpu_hour.py, each a function that writes its numbers one by one into a file.

The GPU path was built to these targets without a GPU. A *told* step is one that the host launches line by line, a
*replayed* one is a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark_modules import BENCHMARKS  # isort: skip - before the modules of benchmarks/
from common import SOURCE, environment
from model import Config, make_batches, make_init, make_loss
from training import clipped_adamw

import fzero as fz
from fzero._compat import compat

CALLS = {
    1: "does it run, to the right numbers; what a step launches, waits for and allocates; the plan",
    2: "as fast as whole-model torch.compile, in as much memory",
    3: "offload: the same bits, the links, and a state larger than the memory that is given",
    4: "fp8, the other precisions, the tests that only a GPU runs, and 7B",
}


class Skipped(Exception):
    """Says why a check has nothing to show here."""


class Found:
    """Numbers that a check finds: each is a line of JSON in a file of all checks, as soon as it is known.

    Args:
        file: to which the lines are appended.
        head: fields of every line.
    """

    def __init__(self, file: Path, head: Mapping[str, Any]):
        self._file, self._head = file, head

    def line(self, kind: str, **fields: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({**self._head, "kind": kind, **fields}) + "\n")

    def value(self, what: str, value: Any) -> None:
        """A number, or words, to know."""
        self.line("value", what=what, value=value)
        print(f"{what}: {shown(value)}", flush=True)

    def target(self, what: str, value: float, least: float | None = None, most: float | None = None) -> None:
        """A number that has to be at least, or at most, another."""
        reached = (least is None or value >= least) and (most is None or value <= most)  # NaN reaches neither
        sides = [f"at least {least:g}"] if least is not None else []
        wanted = ", ".join(sides + ([f"at most {most:g}"] if most is not None else []))
        self.line("target", what=what, value=value, wanted=wanted, verdict="reached" if reached else "not reached")
        print(f"{what}: {shown(value)}, wanted {wanted}", flush=True)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


Run = Callable[[argparse.Namespace, Found], None]


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        call: the number of the call that runs it.
        seconds: about how long it takes on an H200.
        about: what it checks, for a person.
    """

    call: int
    name: str
    seconds: float
    about: str
    run: Run


CHECKS: dict[str, Check] = {}


def check(call: int, seconds: float, about: str) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        CHECKS[run.__name__] = Check(call, run.__name__, seconds, about, run)
        return run

    return register


# --- what checks are made of ---

SMALL = Config(2, 64, 2, 32, 4, 256)


def model(args: argparse.Namespace, layers: int) -> Config:
    """The GPT of most checks. They share its width, batch and sequence, and so its compiled functions: what is compiled
    does not depend on the number of layers."""
    return SMALL if args.small else Config(layers, 1024, 16, 1024, 4, 50304)


def wide(args: argparse.Namespace, layers: int) -> Config:
    """The GPT of offload and fp8, as offload_gpu.py has it."""
    return SMALL if args.small else Config(layers, 4096, 32, 2048, 8, 32000)


class Trained:
    """A GPT in training, on batches that take turns. On a CPU it runs eagerly: there only the code is checked."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: Config,
        *transforms: Any,
        batches: int = 1,
        mesh: Any = None,
        backend: str = "",
        **options: Any,
    ):
        self.mesh = mesh or fz.make_mesh(device=args.device)
        step = fz.train_step(make_loss(config), clipped_adamw())
        step = fz.compose(*transforms)(step) if transforms else step
        backend = backend or ("inductor" if args.device == "cuda" else "eager")
        self.train = fz.compile(step, self.mesh, backend=backend, **options)
        self.state = self.train.init(make_init(config), fz.random.key(0))
        self.batches = [on(self.mesh, batch) for batch in make_batches(config, batches)]
        self.metrics: Any = {}
        self._steps = 0

    def run(self, steps: int = 1) -> list[torch.Tensor]:
        """The losses of so many steps, without a wait for the device."""
        losses = []
        for _ in range(steps):
            self.state, self.metrics = self.train(self.state, self.batches[self._steps % len(self.batches)])
            self._steps += 1
            losses.append(self.metrics["loss"])
        return losses

    def seconds(self, steps: int = 10) -> float:
        """Seconds of a step: the median of three rounds of so many, after three steps to warm up."""
        rounds = []
        for k in range(4):
            settled(self.mesh.device)
            begin = time.perf_counter()
            self.run(steps if k else 3)
            settled(self.mesh.device)
            rounds.append((time.perf_counter() - begin) / steps)
        return statistics.median(rounds[1:])


def on(mesh: Any, batch: Any) -> Any:
    return tuple(x.to(mesh.device) for x in batch)


def floats(losses: Iterable[torch.Tensor]) -> list[float]:
    return [float(x) for x in losses]


def losses_of(args: argparse.Namespace, config: Config, steps: int, *transforms: Any, **options: Any) -> list[float]:
    return floats(Trained(args, config, *transforms, batches=steps, **options).run(steps))


def settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def freed(args: argparse.Namespace) -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


def farthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(one, other, strict=True))


def script(args: argparse.Namespace, name: str, *flags: str) -> dict[str, Any]:
    """Run a script of benchmarks/ and return its results."""
    result = args.work / f"{flags[flags.index('--name') + 1]}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *flags, "--out", str(args.work)]
    subprocess.run(command, check=True)
    return json.loads(result.read_text())


def cuda_only(args: argparse.Namespace, what: str) -> None:
    if args.device != "cuda":
        raise Skipped(f"{what} can only be seen on a CUDA device")


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


# --- 1: does it run ---


@check(1, 5, "versions and hardware")
def versions(args: argparse.Namespace, found: Found) -> None:
    values: dict[str, Any] = {k: v for k, v in environment().items() if isinstance(v, (str, int, float))}
    if args.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        values |= {
            "gpu": about.name,
            "capability": f"{about.major}.{about.minor}",
            "gpu_gib": about.total_memory / 2**30,
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, importlib.import_module("torch.cuda.nccl").version())),
        }
        try:
            values["triton"] = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            values["triton"] = "none"
    for name, value in values.items():
        found.value(name, value)


@check(1, 20, "collectives of one NCCL process, of several dtypes at once, under the names this release has")
def collectives(args: argparse.Namespace, found: Found) -> None:
    import torch.distributed as dist

    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    limit = datetime.timedelta(seconds=60)
    options = compat.nccl_ahead(limit) if backend == "nccl" else None
    wrong, group = 0, dist.new_group([0], limit, backend, options)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
    values = [torch.arange(64, device=device).to(dtype) for dtype in dtypes]
    gathered, scattered = [torch.zeros_like(x) for x in values], [torch.zeros_like(x) for x in values[:3]]
    reduced = [x.clone() for x in values[:4]]
    works = compat.all_gather_together(gathered, values, group)
    works += compat.reduce_scatter_together(scattered, values[:3], dist.ReduceOp.SUM, group)
    works += compat.all_reduce_together(reduced, dist.ReduceOp.SUM, group)
    for work in works:
        work.wait()
    settled(device)
    for got in (gathered, scattered, reduced):
        wrong += sum(not torch.equal(a, b) for a, b in zip(got, values, strict=False))
    if backend == "nccl":
        eights = [x.to(torch.float8_e4m3fn) for x in values[:1]]
        into = [torch.zeros_like(x) for x in eights]
        compat.all_gather_together(into, eights, group)[0].wait()
        wrong += not torch.equal(into[0].view(torch.uint8), eights[0].view(torch.uint8))
    dist.destroy_process_group()
    found.value("transfers", len(works))
    found.target("wrong results", wrong, most=0)


BF16 = fz.mixed_precision("bf16")
KINDS: dict[str, tuple[tuple[Any, ...], float]] = {
    "bf16": ((BF16,), 2e-3),
    "fp32": ((), 2e-5),
    "fp16": ((fz.mixed_precision("fp16"),), 2e-3),
    "bf16, params bf16": ((fz.mixed_precision("bf16", params="bf16"),), 5e-3),
    "bf16, reduce bf16": ((fz.mixed_precision("bf16", reduce="bf16"),), 2e-3),
    "bf16, accumulate": ((BF16, fz.accumulate(2)), 2e-3),
    "bf16, remat full": ((BF16, fz.remat("full")), 2e-3),
    "bf16, fp8": ((BF16, fz.fp8()), 1e-2),
    "bf16, fp8 by row": ((BF16, fz.fp8(scales="row")), 1e-2),
}
"""Transforms, and the largest relative difference of five steps' losses to those of a CPU in fp32."""


def beside_a_cpu(args: argparse.Namespace, found: Found, kinds: Sequence[str]) -> None:
    """Compares losses of five steps of one layer on one batch. The last of the CPU's has to be below the first, so
    that updates count."""
    config = model(args, 1)
    torch.backends.cuda.matmul.allow_tf32 = False

    def losses(device: str, transforms: Sequence[Any], backend: str) -> list[float]:
        where = argparse.Namespace(**{**vars(args), "device": device})
        return floats(Trained(where, config, *transforms, backend=backend).run(5))

    want = losses("cpu", (), "eager")
    found.target("a CPU in fp32: the last loss of the first", want[-1] / want[0], most=0.999)
    for name in kinds:
        transforms, limit = KINDS[name]
        if "fp8" in name and args.device == "cuda" and not has_fp8():
            found.value(name, "no fp8 on this device")
            continue
        for backend in ("eager", "inductor") if args.device == "cuda" else ("eager",):
            distance = farthest(losses(args.device, transforms, backend), want)
            found.target(f"{name}, {backend}: losses beside a CPU's in fp32", distance, most=limit)


@check(1, 110, "five steps in bf16, eager and compiled, beside a CPU in fp32")
def parity_bf16(args: argparse.Namespace, found: Found) -> None:
    beside_a_cpu(args, found, ["bf16"])


@check(1, 70, "a step that is told, and one that is replayed: synchronisations, allocations, bits, seconds")
def steady(args: argparse.Namespace, found: Found) -> None:
    cuda_only(args, "a synchronisation")
    config, losses = model(args, 8), {}
    for name, captured in (("told", False), ("replayed", True)):
        trained = Trained(args, config, BF16, batches=5, cuda_graphs=captured)
        kept, waits = trained.run(5), 0  # the fourth is captured
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kept += trained.run(5)
        except RuntimeError as error:
            waits = 1
            found.value(f"{name}: it waits", str(error).splitlines()[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        moved = sum(after.get(x, 0) - before.get(x, 0) for x in ("num_device_alloc", "num_alloc_retries"))
        found.target(f"{name}: waits of five steps, at the first of which they end", waits, most=0)
        found.target(f"{name}: allocations from the driver in five steps", moved, most=0)
        losses[name] = floats(kept)
        if not waits:
            found.value(f"{name}: step s", trained.seconds())
        del trained, kept
        freed(args)
    differ = sum(a != b for a, b in zip(losses["told"], losses["replayed"], strict=False))
    found.target("losses that differ when a step is replayed", differ, most=0)


@check(1, 45, "this machine's rates, by which steps are planned")
def rates(args: argparse.Namespace, found: Found) -> None:
    cuda_only(args, "rates of the device")
    from fzero.runtime.calibrate import calibrate

    device = calibrate(fz.make_mesh(device=args.device))
    found.value("bf16 TFLOP/s", device.rate(torch.bfloat16) / 1e12)
    found.value("memory GB/s", device.memory_bandwidth / 1e9)
    found.value("host copy GB/s", device.host_copy.bandwidth / 1e9)


@check(1, 60, "peak memory and seconds of a step beside its plan")
def planned(args: argparse.Namespace, found: Found) -> None:
    for name, transforms in {"bf16": (BF16,), "bf16, remat full": (BF16, fz.remat("full"))}.items():
        trained = Trained(args, model(args, 8), *transforms, cuda_graphs=False if args.device == "cuda" else None)
        trained.run(2)
        settled(trained.mesh.device)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, plan = trained.seconds(5), trained.train.plan
        found.value(f"{name}: step s", seconds)
        found.value(f"{name}: planned s", plan.step_seconds)
        found.value(f"{name}: planned bytes", plan.peak_bytes)
        if args.device == "cuda":
            peak = torch.cuda.max_memory_allocated() - workspaces()
            found.value(f"{name}: peak bytes", peak)
            found.target(f"{name}: peak / planned", peak / plan.peak_bytes, 0.95, 1.05)
            found.target(f"{name}: step / planned", seconds / plan.step_seconds, 0.85, 1.15)
        del trained
        freed(args)


def workspaces() -> int:
    """The bytes that cuBLAS keeps, for each stream that has had a product. It takes them again when it needs them."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "cudaGraphLaunch")


@check(1, 60, "64 layers: launches of a step that is told and of one that is replayed, and how long the GPU is idle")
def deep(args: argparse.Namespace, found: Found) -> None:
    config, seconds = model(args, 64), {}
    for name, captured in (("told", False), ("replayed", True)):
        if captured and args.device != "cuda":
            continue
        trained = Trained(args, config, BF16, cuda_graphs=captured if args.device == "cuda" else None)
        trained.run(5)  # the fourth is captured
        seconds[name] = trained.seconds(5)
        found.value(f"{name}: step s", seconds[name])
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if args.device == "cuda" else []
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            trained.run()
            settled(trained.mesh.device)
        events = list(profiler.events() or ())
        found.value(f"{name}: operations", sum(e.name.startswith("aten::") for e in events))
        if args.device == "cuda":
            profiler.export_chrome_trace(str(args.work / f"deep_{name}.json"))
            launches(found, name, events, config.layers)
        del trained
        freed(args)
    if "replayed" in seconds:
        ratio = seconds["replayed"] / seconds["told"]
        found.target("a replayed step's seconds of one that is told", ratio, most=1.0)


def launches(found: Found, name: str, events: Sequence[Any], layers: int) -> None:
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    )
    if not spans:
        found.value(f"{name}: launches", "the profiler saw no kernel")
        return
    busy, end = 0.0, spans[0][0]
    for a, b in spans:
        busy, end = busy + max(0.0, b - max(a, end)), max(end, b)
    told = sum(e.name in LAUNCHES for e in events)
    found.value(f"{name}: kernels", len(spans))
    found.value(f"{name}: share of the step in which the GPU is idle", 1 - busy / (spans[-1][1] - spans[0][0]))
    if name == "told":
        found.target("told: launches a layer", told / layers, most=60)
    else:
        found.target("replayed: launches", told, most=10)


# --- 2: beside torch.compile ---

GIVEN = ["--width", "1024", "--heads", "16", "--seq", "1024", "--batch", "4"]  # of `model`


def _beside(args: argparse.Namespace, found: Found, name: str, *flags: str, mfu: float | None = None) -> None:
    """gpu.py with a model: fzero beside whole-model torch.compile."""
    small = ["--layers", "2", "--width", "64", "--heads", "2", "--seq", "32", "--batch", "4", "--vocab", "256"]
    small += ["--rounds", "1", "--steps", "1", "--warmup", "1", "--backend", "eager"]
    given = small if args.small else ["--rounds", "3", *flags]
    got = script(args, "gpu", "--device", args.device, "--name", f"gpu_{name}", *given)
    ours, *peers = got["contestants"].values()
    speed = ours["tokens_per_s"] / max(x["tokens_per_s"] for x in peers)
    memory = ours["peak_mib"] / min(x["peak_mib"] for x in peers)
    for who, x in got["contestants"].items():
        for what in ("tokens_per_s", "peak_mib", "first_step_s", "mfu"):
            found.value(f"{who}: {what}", x[what])
    if args.small:
        found.value("speed", speed)
        return
    found.target("tokens/s of the fastest peer's", speed, least=1.0)
    found.target("peak memory of the smallest peer's", memory, most=1.0)
    if mfu is not None and ours["mfu"] is not None:
        found.target("share of the peak", ours["mfu"], least=mfu)


def faster(args: argparse.Namespace) -> list[str]:
    """The peer to be beside: the faster one, if `beside_036b` has shown it."""
    try:
        peers = json.loads((args.work / "gpu_036b.json").read_text())["contestants"]
    except (OSError, ValueError):
        return ["--peer", "cast"]
    best = max((who for who in peers if who != "fzero"), key=lambda who: peers[who]["tokens_per_s"])
    return ["--peer", "autocast" if "autocast" in best else "cast"]


@check(2, 150, "0.36 B parameters beside whole-model torch.compile and fused AdamW, cast and under autocast")
def beside_036b(args: argparse.Namespace, found: Found) -> None:
    _beside(args, found, "036b", "--layers", "20", *GIVEN)


@check(2, 150, "1.5 B parameters beside the faster of the two")
def beside_15b(args: argparse.Namespace, found: Found) -> None:
    if args.small:
        raise Skipped("the small form has one model: beside_036b")
    sizes = ["--layers", "26", "--width", "2048", "--heads", "16", "--batch", "8"]
    _beside(args, found, "15b", *sizes, *faster(args), mfu=0.45)


@check(2, 200, "64 layers of width 1,024 beside the faster of the two")
def beside_deep(args: argparse.Namespace, found: Found) -> None:
    if args.small:
        raise Skipped("the small form has one model: beside_036b")
    _beside(args, found, "deep", "--layers", "64", *GIVEN, *faster(args))


# --- 3: offload ---


def _two_memories(args: argparse.Namespace) -> Any:
    """A mesh whose host and device are two memories; on a CPU copies are late, in a thread."""
    return fz.make_mesh(device=args.device, unified_memory=False)


EVERYTHING = ("opt_state", "params", "activations")


@check(3, 20, "seconds to page-lock host memory, in huge pages and in small ones")
def pinning(args: argparse.Namespace, found: Found) -> None:
    from fzero._utils import host_memory as host

    mesh, nbytes = fz.make_mesh(device=args.device), 64 << 20 if args.small else 8 << 30
    rate = dict[str, float]()
    for name, huge in (("small pages", False), ("huge pages", True)):
        begin = time.perf_counter()
        memory = host._allocated(nbytes, mesh.device, huge)
        if args.device == "cpu":  # where nothing is locked pages come when they are written
            torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        rate[name] = nbytes / (time.perf_counter() - begin) / 1e9
        found.value(f"{name}: GB/s", rate[name])
        found.value(f"{name}: s for 84 GB", 84 / rate[name])
        del memory
        gc.collect()
    if args.device == "cuda":
        found.target("s to lock the state of 7B, huge pages", 84 / rate["huge pages"], most=60)


@check(3, 90, "2 layers of width 4,096: losses with everything on the host beside those with nothing there")
def offload_bits(args: argparse.Namespace, found: Found) -> None:
    config = wide(args, 2)
    precise, steps = (BF16, fz.remat("full")), 2 if args.small else 4
    want = losses_of(args, config, steps, *precise)
    found.value("last loss", want[-1])
    for name, more in {"updated on the host": {}, "updated on the device": {"update_on": "device"}}.items():
        freed(args)
        offload = fz.offload("cpu", EVERYTHING, **more)  # type: ignore[arg-type]
        got = losses_of(args, config, steps, *precise, offload, mesh=_two_memories(args))
        # the host's Adam and the device's round an operation otherwise: the first losses have seen no update
        found.value(f"{name}: farthest", farthest(got, want))
        differ = sum(a != b for a, b in zip(got, want, strict=True))
        found.target(f"{name}: losses of which bits differ", differ, most=0)


@check(3, 40, "the same with every launch waited for: a difference is a missing wait")
def offload_blocking(args: argparse.Namespace, found: Found) -> None:
    cuda_only(args, "a launch that nothing waits for")
    text = (
        "import sys, json, argparse; sys.path.insert(0, sys.argv[2]); import gpu_checks; "
        "args = argparse.Namespace(**json.loads(sys.argv[1])); "
        "print('LOSSES', json.dumps(gpu_checks.offloaded(args)))"
    )
    flags = json.dumps({"device": args.device, "small": args.small})
    losses = {}
    for blocking in ("0", "1"):
        env = {**os.environ, "CUDA_LAUNCH_BLOCKING": blocking}
        command = [sys.executable, "-c", text, flags, str(Path(__file__).parent)]
        said = subprocess.run(command, capture_output=True, text=True, env=env)
        if said.returncode:
            raise RuntimeError(said.stderr[-3000:])
        losses[blocking] = json.loads(said.stdout.split("LOSSES", 1)[1])
        found.value(f"CUDA_LAUNCH_BLOCKING={blocking}: last loss", losses[blocking][-1])
    differ = sum(a != b for a, b in zip(losses["0"], losses["1"], strict=True))
    found.target("losses that differ under CUDA_LAUNCH_BLOCKING=1", differ, most=0)


def offloaded(args: argparse.Namespace) -> list[float]:
    """Losses of a few steps with everything on the host."""
    transforms = (BF16, fz.remat("full"), fz.offload("cpu", EVERYTHING))
    return losses_of(args, wide(args, 2), 2 if args.small else 6, *transforms, mesh=_two_memories(args))


@check(3, 30, "evaluations with parameters on the host beside those with parameters on the device")
def evaluations(args: argparse.Namespace, found: Found) -> None:
    config = model(args, 8)
    batches, losses = make_batches(config, 3 if args.small else 50), {}
    for where, more in {"device": (), "host": (fz.offload("cpu", "params"),)}.items():
        trained = Trained(args, config, BF16, *more, mesh=_two_memories(args))
        step = fz.compose(BF16, *more)(fz.eval_step(make_loss(config)))
        evaluate = fz.compile(step, trained.mesh, backend=trained.train.backend)
        losses[where] = floats([evaluate(trained.state.params, on(trained.mesh, batch)) for batch in batches])
        found.value(f"parameters on the {where}: last loss", losses[where][-1])
    differ = sum(a != b for a, b in zip(losses["device"], losses["host"], strict=True))
    found.target("losses that differ", differ, most=0)


@check(3, 30, "GB/s between host and device while a step runs")
def links(args: argparse.Namespace, found: Found) -> None:
    transforms = (BF16, fz.remat("full"), fz.offload("cpu", EVERYTHING))
    trained = Trained(args, wide(args, 2), *transforms, mesh=_two_memories(args))
    _, events = trained.train.profile(trained.state, trained.batches[0])
    for name, channel in trained.train.plan.channels.items():
        if seconds := sum(event.seconds for event in events if event.queue == name):
            rate = channel.bytes / seconds / 1e9
            found.value(f"{name} GB/s", rate)
            if args.device == "cuda" and name in ("to_device", "to_host"):
                found.target(f"{name} GB/s", rate, least=45)


def _offload(args: argparse.Namespace, name: str, *flags: str) -> list[dict[str, Any]]:
    """offload_gpu.py: one point for each number of tokens."""
    dry = ["--dry", "--device", "h100", "--layers", "2", "--width", "256", "--heads", "4", "--seq", "64"]
    dry += ["--tokens", "256", "65536", "--parts", "curve", "--vocab", "512"]
    common = ["--parts", "curve", "--device-memory", "24GB", "--micro", "16384", "--steps", "3"]
    return script(args, "offload_gpu", "--name", name, *(dry if args.small else [*flags, *common]))["points"]


def _points(args: argparse.Namespace, found: Found, points: Sequence[Mapping[str, Any]]) -> None:
    for point in points:
        at = f"{point['tokens']:,} tokens"
        for what in ("step_s", "tokens_per_s", "of_peak", "of_own", "of_ceiling", "device_gb"):
            found.value(f"{at}: {what}", point[what])
        if args.small:
            continue
        found.target(f"{at}: share of the ceiling", point["of_ceiling"], least=0.85)
        found.target(f"{at}: device memory, GB", point["device_gb"], most=24)
        if point["tokens"] < 65536:
            continue
        found.target(f"{at}: share of the peak", point["of_peak"], least=0.5)
        if point["of_own"] is not None:
            found.target(f"{at}: FLOP/s of its own, resident", point["of_own"], least=0.9)


@check(3, 200, "3.5 B, everything on the host, in 24 GB of device memory: 8k and 64k tokens a step")
def offload_3b(args: argparse.Namespace, found: Found) -> None:
    if args.device != "cuda" and not args.small:
        raise Skipped("seconds can only be measured on a CUDA device; --small plans them")
    trace = str(args.work / "offload_trace.json")
    flags = ["--layers", "16", "--tokens", "8192", "65536", "--trace", trace]
    _points(args, found, _offload(args, "offload_3b", *flags))


# --- 4: fp8, the rest, 7B ---


@check(4, 100, "8 layers of width 4,096: fp8 beside bf16")
def fp8(args: argparse.Namespace, found: Found) -> None:
    cuda_only(args, "the speed of products in 8 bits")
    if not has_fp8():
        raise Skipped("this device has no products in 8 bits")
    config, seconds = wide(args, 8), {}
    for name, more in {"bf16": (), "fp8 by tensor": (fz.fp8(),), "fp8 by row": (fz.fp8(scales="row"),)}.items():
        trained = Trained(args, config, BF16, *more)
        trained.run(2)
        seconds[name] = trained.seconds(5)
        found.value(f"{name}: step s", seconds[name])
        del trained
        freed(args)
    best = seconds["bf16"] / min(seconds[x] for x in seconds if x != "bf16")
    found.target("fp8's speed of bf16's", best, least=1.25)


@check(4, 150, "five steps of each other precision, eager and compiled, beside a CPU in fp32")
def parity(args: argparse.Namespace, found: Found) -> None:
    beside_a_cpu(args, found, ["fp32", "bf16, accumulate"] if args.small else [x for x in KINDS if x != "bf16"])


@check(4, 60, "tests of what only a GPU runs")
def tests(args: argparse.Namespace, found: Found) -> None:
    cuda_only(args, "a test of this kind")
    for name in ("pytest", "xdist"):
        if importlib.util.find_spec(name) is None:
            raise Skipped(f"there is no {name} here: pip install -e '.[test]'")
    names = (
        "comm/test_host_memory",
        "transforms/test_fp8",
        "compat/test_private_torch_names",
        "transforms/test_micro_batch_sums",
    )
    files = [f"tests/{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
    said = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True)
    print(said.stdout[-8000:], said.stderr[-4000:])
    found.value("pytest", (said.stdout.strip().splitlines() or ["nothing was said"])[-1])
    found.target("exit status of pytest", said.returncode, most=0)


HOST_OF_7B = 160e9
"""Bytes of a host that holds 84 GB of state, 14 of copies and 17 of activations, locked, and lives."""


@check(4, 200, "7B, 64k tokens a step, everything on the host, in 24 GB of device memory")
def offload_7b(args: argparse.Namespace, found: Found) -> None:
    if args.device != "cuda" or args.small:
        raise Skipped("seconds can only be measured on a CUDA device; the small form plans one model: offload_3b")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < HOST_OF_7B:
        raise Skipped(f"it takes a host of {HOST_OF_7B / 1e9:.0f} GB, and this one has {memory / 1e9:.0f}")
    points = _offload(args, "offload_7b", "--layers", "32", "--tokens", "65536")
    _points(args, found, points)
    found.target("beside LLMQ's 14B on an H100, share of the peak", points[-1]["of_peak"], least=0.546)
