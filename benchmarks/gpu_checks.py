"""The checks of gpu_hour.py: each a function of its arguments that returns what it found, and targets.

Names, numbers and targets are those to which the GPU path was built without a GPU; `about` says what each is for.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import SOURCE, environment
from model import Config, make_batches, make_init, make_loss

import fzero as fz
from fzero import compat, optim

STEPS = {
    1: "does it run, and to the right numbers",
    2: "a steady step waits for nothing and allocates nothing; memory and time are as planned; launches",
    3: "as fast as whole-model torch.compile, in as much memory",
    4: "offload gives the same bits; links and page-locked memory",
    5: "7B with everything on the host, in 24 GB of device memory",
    6: "CUDA graphs; fp8",
}


class Skipped(Exception):
    """Says why a check has nothing to show here."""


@dataclass(frozen=True)
class Target:
    """A number that has to be at least, or at most, another."""

    what: str
    value: float
    least: float | None = None
    most: float | None = None

    def told(self) -> dict[str, Any]:
        met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        sides = [f"at least {self.least:g}"] if self.least is not None else []
        sides += [f"at most {self.most:g}"] if self.most is not None else []
        verdict = "met" if met else "MISSED"  # of what is no number too
        return {"what": self.what, "value": self.value, "wanted": ", ".join(sides), "verdict": verdict}


Found = tuple[Mapping[str, Any], list[Target]]


@dataclass(frozen=True)
class Check:
    """A check of a step, about how many seconds it takes on an H200, and what it is about."""

    step: int
    name: str
    seconds: float
    about: str
    run: Callable[[argparse.Namespace], Found]


CHECKS: dict[str, Check] = {}


def check(step: int, seconds: float, about: str) -> Callable[[Callable[[argparse.Namespace], Found]], Any]:
    def register(run: Callable[[argparse.Namespace], Found]) -> Any:
        CHECKS[run.__name__] = Check(step, run.__name__, seconds, about, run)
        return run

    return register


# --- what checks are made of ---


def config_of(args: argparse.Namespace, layers: int, width: int, tokens: int, seq: int = 1024) -> Config:
    """A GPT with heads of 64; in the small form one of two layers."""
    if args.small:
        return Config(2, 64, 2, 32, 4, 256)
    return Config(layers, width, width // 64, seq, max(1, tokens // seq), 50304)


def compiled(
    args: argparse.Namespace, config: Config, *transforms: Any, mesh: Any = None, backend: str = "", **options: Any
) -> Any:
    """A training step of a GPT, and its first state. On a CPU nothing is compiled: this is to see the code run."""
    mesh = mesh or fz.make_mesh(device=args.device)
    step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
    step = fz.compose(*transforms)(step) if transforms else step
    train = fz.compile(step, mesh, backend=backend or ("inductor" if args.device == "cuda" else "eager"), **options)
    return train, train.init(make_init(config), fz.random.key(0)), mesh


def losses_of(args: argparse.Namespace, config: Config, steps: int, *transforms: Any, **options: Any) -> list[float]:
    train, state, mesh = compiled(args, config, *transforms, **options)
    out = []
    for batch in make_batches(config, steps):
        state, metrics = train(state, tuple(x.to(mesh.device) for x in batch))
        out.append(metrics["loss"])
    return [float(x) for x in out]


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def seconds_a_step(
    args: argparse.Namespace, config: Config, *transforms: Any, steps: int = 10, **options: Any
) -> float:
    """The median of three rounds, after three steps."""
    train, state, mesh = compiled(args, config, *transforms, **options)
    batch = tuple(x.to(mesh.device) for x in make_batches(config, 1)[0])
    rounds = []
    for k in range(4):
        synchronize(args)
        begin = time.perf_counter()
        for _ in range(steps if k else 3):
            state, _ = train(state, batch)
        synchronize(args)
        rounds.append((time.perf_counter() - begin) / steps)
    return statistics.median(rounds[1:])


def farthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(one, other, strict=True))


def script(args: argparse.Namespace, name: str, *flags: str) -> dict[str, Any]:
    """Runs a script of this folder, whose results go to the same one, and returns them."""
    result = args.out / f"{flags[flags.index('--name') + 1]}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *flags, "--out", str(args.out)]
    subprocess.run(command, check=True)
    return json.loads(result.read_text())


def cuda_only(args: argparse.Namespace, what: str) -> None:
    if args.device != "cuda":
        raise Skipped(f"{what} can only be seen on a CUDA device")


# --- 1: does it run ---


@check(1, 5, "versions and hardware")
def versions(args: argparse.Namespace) -> Found:
    found: dict[str, Any] = {k: v for k, v in environment().items() if isinstance(v, (str, int, float))}
    if args.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": about.name,
            "capability": f"{about.major}.{about.minor}",
            "gpu_gib": about.total_memory / 2**30,
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, importlib.import_module("torch.cuda.nccl").version())),
        }
        try:
            found["triton"] = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            found["triton"] = "none"
    return found, []


@check(1, 60, "tests of what only a GPU runs")
def tests(args: argparse.Namespace) -> Found:
    cuda_only(args, "a test of this kind")
    files = [f"tests/test_{name}.py" for name in ("host", "fp8", "compat", "batch")]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
    said = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True)
    print(said.stdout[-8000:], said.stderr[-4000:])
    last = (said.stdout.strip().splitlines() or ["nothing was said"])[-1]
    return {"pytest": last}, [Target("exit status of pytest", said.returncode, most=0)]


KINDS: dict[str, tuple[tuple[Any, ...], float]] = {
    "fp32": ((), 1e-5),
    "bf16": ((fz.mixed_precision("bf16"),), 1e-2),
    "fp16": ((fz.mixed_precision("fp16"),), 1e-2),
    "params bf16": ((fz.mixed_precision("bf16", params="bf16"),), 1e-2),
    "bf16, reduce bf16": ((fz.mixed_precision("bf16", reduce="bf16"),), 1e-2),
    "bf16, accumulate": ((fz.mixed_precision("bf16"), fz.accumulate(2)), 1e-2),
    "bf16, remat full": ((fz.mixed_precision("bf16"), fz.remat("full")), 1e-2),
    "bf16, fp8": ((fz.mixed_precision("bf16"), fz.fp8()), 3e-2),
}
"""Transforms, and how far losses of five steps may be from those of one CPU, relative."""


@check(1, 90, "five steps of each kind, eager and compiled, beside the same steps on a CPU")
def parity(args: argparse.Namespace) -> Found:
    config, found, targets = Config(1, 256, 4, 64, 4, 512), dict[str, Any](), list[Target]()
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu = argparse.Namespace(**{**vars(args), "device": "cpu"})
    for name, (transforms, limit) in KINDS.items():
        if args.small and name not in ("fp32", "bf16, accumulate"):
            continue
        if name.endswith("fp8") and args.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            found[name] = "no fp8 on this device"
            continue
        want = losses_of(on_cpu, config, 5, *transforms, backend="eager")
        for backend in ("eager", "inductor") if args.device == "cuda" else ("eager",):
            got = losses_of(args, config, 5, *transforms, backend=backend)
            targets.append(Target(f"{name}, {backend}: losses beside a CPU's", farthest(got, want), most=limit))
        found[name] = want[-1]
    return found, targets


@check(1, 30, "collectives of one NCCL process, of several dtypes at once, under the names this release has")
def collectives(args: argparse.Namespace) -> Found:
    import torch.distributed as dist

    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    options = compat.nccl_ahead() if backend == "nccl" else None
    wrong, group = 0, dist.new_group([0], backend=backend, pg_options=options)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
    values = [torch.arange(64, device=device).to(dtype) for dtype in dtypes]
    gathered, scattered = [torch.zeros_like(x) for x in values], [torch.zeros_like(x) for x in values[:3]]
    reduced = [x.clone() for x in values[:4]]
    works = compat.all_gather_together(gathered, values, group)
    works += compat.reduce_scatter_together(scattered, values[:3], dist.ReduceOp.SUM, group)
    works += compat.all_reduce_together(reduced, dist.ReduceOp.SUM, group)
    for work in works:
        work.wait()
    synchronize(args)
    for got in (gathered, scattered, reduced):
        wrong += sum(not torch.equal(a, b) for a, b in zip(got, values, strict=False))
    if backend == "nccl":
        eights = [x.to(torch.float8_e4m3fn) for x in values[:1]]
        into = [torch.zeros_like(x) for x in eights]
        compat.all_gather_together(into, eights, group)[0].wait()
        wrong += not torch.equal(into[0].view(torch.uint8), eights[0].view(torch.uint8))
    dist.destroy_process_group()
    return {"works": len(works)}, [Target("wrong results", wrong, most=0)]


# --- 2: steady steps ---


@check(2, 45, "this machine's rates, by which steps are planned")
def rates(args: argparse.Namespace) -> Found:
    cuda_only(args, "rates of the device")
    from fzero.measure.calibrate import calibrate

    device = calibrate(fz.make_mesh(device=args.device))
    return {
        "bf16_tflops": device.rate(torch.bfloat16) / 1e12,
        "memory_gbs": device.memory_bandwidth / 1e9,
        "host_copy_gbs": device.host_copy.bandwidth / 1e9,
    }, []


@check(2, 60, "five steps under PyTorch's error for synchronisation; what they allocate")
def steady(args: argparse.Namespace) -> Found:
    cuda_only(args, "a synchronisation")
    config = config_of(args, 8, 1024, 8192)
    train, state, mesh = compiled(args, config, fz.mixed_precision("bf16"))
    batches = [tuple(x.to(mesh.device) for x in b) for b in make_batches(config, 5)]
    for batch in batches[:3]:
        state, _ = train(state, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()  # compiling is over
    before, kept = torch.cuda.memory_stats(), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            state, metrics = train(state, batch)
            kept.append(metrics["loss"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    moved = {name: after.get(name, 0) - before.get(name, 0) for name in ("num_device_alloc", "num_alloc_retries")}
    return moved, [
        Target("synchronisations of five steps (else an error)", 0, most=0),
        Target("allocations from the driver in five steps", sum(moved.values()), most=0),
    ]


@check(2, 80, "peak memory and seconds of a step beside its plan")
def planned(args: argparse.Namespace) -> Found:
    found, targets = dict[str, Any](), list[Target]()
    for name, transforms in {
        "bf16": (fz.mixed_precision("bf16"),),
        "bf16, remat full": (fz.mixed_precision("bf16"), fz.remat("full")),
    }.items():
        config = config_of(args, 8, 2048, 16384)
        train, state, mesh = compiled(args, config, *transforms)
        batch = tuple(x.to(mesh.device) for x in make_batches(config, 1)[0])
        for _ in range(2):
            state, _ = train(state, batch)
        synchronize(args)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(5):
            state, _ = train(state, batch)
        synchronize(args)
        seconds, plan = (time.perf_counter() - begin) / 5, train.plan
        found |= {f"{name}: step s": seconds, f"{name}: planned s": plan.step_seconds}
        found[f"{name}: planned bytes"] = plan.peak_bytes
        if args.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
            found[f"{name}: peak bytes"] = peak
            targets.append(Target(f"{name}: peak / planned", peak / plan.peak_bytes, 0.9, 1.1))
            targets.append(Target(f"{name}: step / planned", seconds / plan.step_seconds, 0.85, 1.15))
        del train, state
        gc.collect()
    return found, targets


@check(2, 45, "launches of one step of 64 layers, and how long the GPU has nothing to do")
def launches(args: argparse.Namespace) -> Found:
    config = config_of(args, 64, 1024, 4096)
    train, state, mesh = compiled(args, config, fz.mixed_precision("bf16"))
    batch = tuple(x.to(mesh.device) for x in make_batches(config, 1)[0])
    for _ in range(3):
        state, _ = train(state, batch)
    synchronize(args)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if args.device == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profiler:
        state, _ = train(state, batch)
        synchronize(args)
    events = list(profiler.events() or ())
    found: dict[str, Any] = {"operations": sum(e.name.startswith("aten::") for e in events)}
    if args.device != "cuda":
        return found, []
    profiler.export_chrome_trace(str(args.out / "launches_trace.json"))
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    )
    busy, end = 0.0, spans[0][0]
    for a, b in spans:
        busy, end = busy + max(0.0, b - max(a, end)), max(end, b)
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "cudaGraphLaunch")
    found |= {"launches": sum(e.name in names for e in events), "kernels": len(spans)}
    found["idle_share"] = 1 - busy / (spans[-1][1] - spans[0][0])
    return found, [Target("launches a layer and step", found["launches"] / config.layers, most=60)]


# --- 3: beside torch.compile ---


def _beside(args: argparse.Namespace, name: str, *flags: str, mfu: float | None = None) -> Found:
    """gpu.py with a model: fzero beside whole-model torch.compile."""
    small = ["--layers", "2", "--width", "64", "--heads", "2", "--seq", "32", "--batch", "4", "--vocab", "256"]
    small += ["--rounds", "1", "--steps", "1", "--warmup", "1", "--backend", "eager"]
    given = small if args.small else ["--rounds", "3", *flags]
    found = script(args, "gpu", "--device", args.device, "--name", f"gpu_{name}", *given)
    ours, *peers = found["contestants"].values()
    speed = ours["tokens_per_s"] / max(x["tokens_per_s"] for x in peers)
    memory = ours["peak_mib"] / min(x["peak_mib"] for x in peers)
    values = {"tokens_per_s": ours["tokens_per_s"], "peak_mib": ours["peak_mib"], "speed": speed, "memory": memory}
    values |= {"first_step_s": ours["first_step_s"], "mfu": ours["mfu"]}
    if args.small:
        return values, []
    targets = [
        Target(f"{name}: tokens/s of the fastest peer's", speed, least=1.0),
        Target(f"{name}: peak memory of the smallest peer's", memory, most=1.0),
    ]
    if mfu is not None and ours["mfu"] is not None:
        targets.append(Target(f"{name}: share of the peak", ours["mfu"], least=mfu))
    return values, targets


@check(3, 120, "0.36 B parameters beside whole-model torch.compile and fused AdamW")
def beside_036b(args: argparse.Namespace) -> Found:
    return _beside(args, "036b")


@check(3, 150, "1.5 B parameters beside the same")
def beside_15b(args: argparse.Namespace) -> Found:
    if args.small:
        raise Skipped("the small form has one model: beside_036b")
    return _beside(args, "15b", "--layers", "26", "--width", "2048", "--heads", "16", "--batch", "16", mfu=0.45)


@check(3, 150, "64 layers of width 1,024 with few tokens, where the CPU binds, beside the same")
def beside_deep(args: argparse.Namespace) -> Found:
    if args.small:
        raise Skipped("the small form has one model: beside_036b")
    return _beside(args, "deep", "--layers", "64", "--width", "1024", "--batch", "4")


# --- 4: offload is exact ---


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _two_memories(args: argparse.Namespace) -> Any:
    """A mesh whose host and device are two memories; on a CPU copies are late, in a thread."""
    return fz.make_mesh(device=args.device, unified_memory=False)


EVERYTHING = ("opt_state", "params", "activations")


@check(4, 100, "8 layers of width 4,096: losses with everything on the host beside those with nothing there")
def offload_bits(args: argparse.Namespace) -> Found:
    config = config_of(args, 8, 4096, 8192)
    precise, steps = (fz.mixed_precision("bf16"), fz.remat("full")), 2 if args.small else 4
    want = losses_of(args, config, steps, *precise)
    found, targets = {"last loss": want[-1]}, list[Target]()
    for name, more in {
        "updated on the host": {},
        "updated on the device": {"update_on": "device"},
    }.items():
        torch.cuda.empty_cache() if args.device == "cuda" else None
        offload = fz.offload("cpu", EVERYTHING, **more)  # type: ignore[arg-type]
        got = losses_of(args, config, steps, *precise, offload, mesh=_two_memories(args))
        bits = sum(a != b for a, b in zip(got, want, strict=True))
        # the host's Adam and the device's round an operation otherwise: the first losses have seen no update
        found |= {f"{name}: losses that differ": bits, f"{name}: farthest": farthest(got, want)}
        targets.append(Target(f"{name}: losses of which bits differ", bits, most=0))
    return found, targets


@check(4, 60, "the same with every launch waited for: a difference is a missing wait")
def offload_blocking(args: argparse.Namespace) -> Found:
    cuda_only(args, "a launch that nothing waits for")
    text = (
        "import sys, json, argparse; sys.path.insert(0, sys.argv[2]); import gpu_checks; "
        "args = argparse.Namespace(**json.loads(sys.argv[1])); "
        "print('LOSSES', json.dumps(gpu_checks.offloaded(args)))"
    )
    flags = json.dumps({"device": args.device, "small": args.small})
    found = {}
    for blocking in ("0", "1"):
        with _environment(CUDA_LAUNCH_BLOCKING=blocking):
            said = subprocess.run(
                [sys.executable, "-c", text, flags, str(Path(__file__).parent)], capture_output=True, text=True
            )
        if said.returncode:
            raise RuntimeError(said.stderr[-3000:])
        found[blocking] = json.loads(said.stdout.split("LOSSES", 1)[1])
    differ = sum(a != b for a, b in zip(found["0"], found["1"], strict=True))
    return {"last loss": found["0"][-1]}, [Target("losses that differ under CUDA_LAUNCH_BLOCKING=1", differ, most=0)]


def offloaded(args: argparse.Namespace) -> list[float]:
    """Losses of a few steps with everything on the host."""
    config = config_of(args, 2, 2048, 4096)
    transforms = (fz.mixed_precision("bf16"), fz.remat("full"), fz.offload("cpu", EVERYTHING))
    return losses_of(args, config, 2 if args.small else 6, *transforms, mesh=_two_memories(args))


@check(4, 50, "evaluations with parameters on the host beside those with parameters on the device")
def evaluations(args: argparse.Namespace) -> Found:
    config, transforms = config_of(args, 12, 1024, 2048), (fz.mixed_precision("bf16"),)
    batches = make_batches(config, 3 if args.small else 100)
    losses = {}
    for where, more in {"device": (), "host": (fz.offload("cpu", "params"),)}.items():
        train, state, mesh = compiled(args, config, *transforms, *more, mesh=_two_memories(args))
        step = fz.compose(*transforms, *more)(fz.eval_step(make_loss(config)))
        evaluate = fz.compile(step, mesh, backend=train.backend)
        found = [evaluate(state.params, tuple(x.to(mesh.device) for x in batch)) for batch in batches]
        losses[where] = [float(x) for x in found]
    differ = sum(a != b for a, b in zip(losses["device"], losses["host"], strict=True))
    return {"evaluations": len(batches)}, [Target("losses that differ", differ, most=0)]


@check(4, 40, "GB/s between host and device while a step runs")
def links(args: argparse.Namespace) -> Found:
    config = config_of(args, 4, 4096, 16384)
    transforms = (fz.mixed_precision("bf16"), fz.remat("full"), fz.offload("cpu", EVERYTHING))
    train, state, mesh = compiled(args, config, *transforms, mesh=_two_memories(args))
    batch = tuple(x.to(mesh.device) for x in make_batches(config, 1)[0])
    metrics: Any = {}
    for _ in range(4):
        state, metrics = train(state, batch)
        synchronize(args)
    found = {f"{name} GB/s": link["bytes_per_second"] / 1e9 for name, link in metrics["links"].items()}
    if args.device != "cuda":
        return found, []
    return found, [
        Target(f"{name} GB/s", link["bytes_per_second"] / 1e9, least=45) for name, link in metrics["links"].items()
    ]


@check(4, 30, "seconds to page-lock host memory, in huge pages and in small ones")
def pinning(args: argparse.Namespace) -> Found:
    from fzero.comm import host

    mesh, nbytes = fz.make_mesh(device=args.device), 64 << 20 if args.small else 8 << 30
    found, rate = dict[str, Any](), dict[str, float]()
    for name, huge in (("small pages", False), ("huge pages", True)):
        begin = time.perf_counter()
        memory = host._allocated(nbytes, mesh.device, huge)
        if args.device == "cpu":  # where nothing is locked pages come when they are written
            torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        rate[name] = nbytes / (time.perf_counter() - begin) / 1e9
        found[f"{name}: GB/s"] = rate[name]
        found[f"{name}: s for 84 GB"] = 84 / rate[name]
        del memory
        gc.collect()
    if args.device != "cuda":
        return found, []
    return found, [Target("s to lock the state of 7B, huge pages", 84 / rate["huge pages"], most=60)]


# --- 5: offload is fast ---


def _offload(args: argparse.Namespace, name: str, *flags: str) -> dict[str, Any]:
    dry = ["--dry", "--device", "h100", "--layers", "2", "--width", "256", "--heads", "4", "--seq", "64"]
    dry += ["--tokens", "256", "65536", "--parts", "curve", "--vocab", "512"]
    return script(args, "offload_gpu", "--name", name, *(dry if args.small else flags))


@check(5, 240, "7B, 64k tokens a step, everything on the host, in 24 GB of device memory")
def offload_7b(args: argparse.Namespace) -> Found:
    if args.device != "cuda" and not args.small:
        raise Skipped("seconds can only be measured on a CUDA device; --small plans them")
    flags = ["--layers", "32", "--tokens", "65536", "--parts", "curve", "--device-memory", "24GB", "--micro", "16384"]
    found = _offload(args, "offload_7b", *flags, "--steps", "3", "--trace", str(args.out / "offload_trace.json"))
    point = found["points"][-1]
    keys = ("tokens", "step_s", "tokens_per_s", "of_peak", "of_own", "of_ceiling", "device_gb")
    values = {k: point[k] for k in keys}
    if args.small:
        return values, []
    targets = [
        Target("7B offloaded: share of the ceiling", point["of_ceiling"], least=0.85),
        Target("7B offloaded: share of the peak at 64k tokens", point["of_peak"], least=0.5),
        Target("7B offloaded: beside LLMQ's 14B on an H100, share of the peak", point["of_peak"], least=0.546),
        Target("7B offloaded: device memory, GB", point["device_gb"], most=24),
    ]
    if point["of_own"] is not None:
        targets.append(Target("7B offloaded: FLOP/s of its own, resident", point["of_own"], least=0.9))
    return values, targets


@check(5, 120, "the same at 8k tokens a step, where the link and the host bind")
def offload_7b_few(args: argparse.Namespace) -> Found:
    if args.small or args.device != "cuda":
        raise Skipped("seconds can only be measured on a CUDA device; the small form plans one curve: offload_7b")
    flags = ["--layers", "32", "--tokens", "8192", "--parts", "curve", "--device-memory", "24GB", "--steps", "3"]
    point = _offload(args, "offload_7b_few", *flags)["points"][0]
    values = {k: point[k] for k in ("tokens", "step_s", "tokens_per_s", "of_peak", "of_ceiling", "device_gb")}
    return values, [Target("7B offloaded, 8k tokens: share of the ceiling", point["of_ceiling"], least=0.85)]


# --- 6: CUDA graphs, fp8 ---


@check(6, 80, "64 layers of width 1,024 with few tokens: a step replayed as a CUDA graph beside one that is told anew")
def graphs(args: argparse.Namespace) -> Found:
    cuda_only(args, "a CUDA graph")
    if "cuda_graphs" not in inspect.signature(fz.compile).parameters:
        raise Skipped("this release captures no graphs")
    config, bf16 = config_of(args, 64, 1024, 4096), fz.mixed_precision("bf16")
    seconds, losses = {}, {}
    for captured in (False, True):
        seconds[captured] = seconds_a_step(args, config, bf16, cuda_graphs=captured)
        losses[captured] = losses_of(args, config, 6, bf16, cuda_graphs=captured)
        torch.cuda.empty_cache()
    differ = sum(a != b for a, b in zip(losses[False], losses[True], strict=True))
    return {"told s": seconds[False], "replayed s": seconds[True]}, [
        Target("losses that differ when a step is replayed", differ, most=0),
        Target("a replayed step's seconds of one that is told", seconds[True] / seconds[False], most=1.0),
    ]


@check(6, 90, "8 layers of width 4,096: fp8 beside bf16")
def fp8(args: argparse.Namespace) -> Found:
    cuda_only(args, "the speed of products in 8 bits")
    if torch.cuda.get_device_capability() < (8, 9):
        raise Skipped("this device has no products in 8 bits")
    config = config_of(args, 8, 4096, 16384, 2048)
    bf16 = fz.mixed_precision("bf16")
    found = {"bf16 s": seconds_a_step(args, config, bf16)}
    for name, transform in {
        "tensor": fz.fp8(),
        "row": fz.fp8(scales="row"),
    }.items():
        torch.cuda.empty_cache()
        found[f"fp8 {name} s"] = seconds_a_step(args, config, bf16, transform)
    best = found["bf16 s"] / min(s for name, s in found.items() if name.startswith("fp8"))
    return found, [Target("fp8's speed of bf16's", best, least=1.25)]
