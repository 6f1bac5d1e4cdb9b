"""One training step on GPUs: fzero beside the same model as an nn.Module under whole-model torch.compile, with fused
AdamW, in bf16.

    python benchmarks/gpu.py                                    # 356 M parameters on one CUDA device
    torchrun --nproc-per-node 8 benchmarks/gpu.py               # on several: ZeRO-3 beside FSDP2, each block compiled
    python benchmarks/gpu.py --small                            # a tiny model on the CPU, to see that it works

Masters, moments and reductions are float32, the arithmetic bfloat16. The module does so in two ways: every part casts
its own parameters, which is what fzero's mixed_precision means, and autocast, which keeps the residual stream in
float32. fzero is held against the faster, and against the smaller. All live in one process and take turns. Without a
CUDA device it says so and ends well.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

import torch
from common import (
    backend_flag,
    largest_difference,
    model_flags,
    number_flags,
    parsed,
    peak_mib,
    publish,
    reset_peak,
    rss_mib,
    script_parser,
    settings,
)
from model import GPT, Config, blocks, make_batches, make_init, make_loss
from training import FzeroStep, Step, clipped_adamw, fsdp2, shard, torch_adamw, torch_step

import fzero as fz

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""Dense bf16 products in FLOP/s by part of a device's name (datasheets, SXM where there are several)."""


# --- contestants ---


def fzero(config: Config, mesh: Any, args: argparse.Namespace) -> Step:
    step = fz.mixed_precision(fz.train_step(make_loss(config), clipped_adamw()), "bf16")
    step = fz.shard_params(step, axis="data") if mesh.size > 1 else step
    return FzeroStep(step, mesh, make_init(config), fz.random.key(0), backend=args.backend)


def module(config: Config, mesh: Any, args: argparse.Namespace, autocast: bool = False) -> Step:
    model = _module(config, mesh, None if autocast else torch.bfloat16)
    if args.backend == "inductor":
        model.compile(fullgraph=True)

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=autocast):
            return model(*batch)

    return torch_step(model, torch_adamw(model), forward)


def module_autocast(config: Config, mesh: Any, args: argparse.Namespace) -> Step:
    return module(config, mesh, args, autocast=True)


def module_sharded(config: Config, mesh: Any, args: argparse.Namespace) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = _module(config, mesh, None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fsdp2(model, blocks(model), mesh.device_mesh, args.backend == "inductor", mp_policy=policy)
    return torch_step(model, torch_adamw(model))


def _module(config: Config, mesh: Any, compute: torch.dtype | None) -> Any:
    return GPT(make_init(config)(fz.random.key(0).to(mesh.device)), config.heads, compute).to(mesh.device)


CAST, AUTOCAST = "nn.Module, compiled whole, parameters cast", "nn.Module, compiled whole, autocast"
ALONE = {"fzero": fzero, CAST: module, AUTOCAST: module_autocast}
TOGETHER = {"fzero ZeRO-3": fzero, "FSDP2 + compile per block": module_sharded}


# --- measuring ---


class Device:
    """Time and memory of this rank's device; of the process on a CPU."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.cuda else "CPU"

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def used(self) -> float:
        """MiB in use, without the workspaces of cuBLAS, which all contestants use."""
        gc.collect()
        if self.cuda:
            torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated() / 2**20 if self.cuda else rss_mib()

    def forget(self) -> None:
        torch.cuda.reset_peak_memory_stats() if self.cuda else reset_peak()

    def peak(self) -> float:
        """The most MiB in use since `forget`."""
        return torch.cuda.max_memory_allocated() / 2**20 if self.cuda else peak_mib()


def measure(args: argparse.Namespace, config: Config, mesh: Any) -> dict[str, dict[str, Any]]:
    device, live, found = Device(mesh.device), {}, {}
    parts = [shard(batch, mesh.rank, mesh.size) for batch in make_batches(config, 4)]
    batches = [tuple(t.to(mesh.device) for t in part) for part in parts]

    def steps(name: str, count: int) -> float:
        losses = found[name]["losses"]
        device.settle()
        start, new = time.perf_counter(), []
        for _ in range(count):
            new.append(live[name](batches[(len(losses) + len(new)) % len(batches)]))
        device.settle()
        seconds = time.perf_counter() - start
        losses += [_mean(x, mesh) for x in new]
        return seconds

    left_out = {"cast": [AUTOCAST], "autocast": [CAST], "both": []}[args.peer]
    for name, make in ((n, m) for n, m in (ALONE if mesh.size == 1 else TOGETHER).items() if n not in left_out):
        before, start = device.used(), time.perf_counter()
        found[name] = {"losses": [], "step_s": []}
        live[name] = make(config, mesh, args)
        steps(name, 1)
        found[name]["first_step_s"] = time.perf_counter() - start
        device.forget()  # a CUDA graph's memory is in use between its steps, and PyTorch does not count it
        steps(name, args.warmup)
        found[name]["peak_mib"] = device.peak() - before
        found[name]["resting_mib"] = device.used() - before
        _say(mesh, f"{name}: first step {found[name]['first_step_s']:.1f} s")
    for _ in range(args.rounds):
        for name, x in found.items():
            others = device.used() - x["resting_mib"]
            device.forget()
            x["step_s"].append(steps(name, args.steps) / args.steps)
            x["peak_mib"] = max(x["peak_mib"], device.peak() - others)
    return found


def _mean(loss: torch.Tensor, mesh: Any) -> float:
    """The loss of the whole batch: fzero's is that already."""
    loss = loss.float().clone()
    if mesh.size > 1:
        torch.distributed.all_reduce(loss)
    return float(loss) / mesh.size


# --- reporting ---


def flops_per_token(config: Config) -> float:
    """Products of a training step: six for each weight that multiplies, and causal attention."""
    weights = 12 * config.layers * config.width**2 + config.vocab * config.width
    return 6 * weights + 6 * config.layers * config.width * config.seq


def report(args: argparse.Namespace, config: Config, mesh: Any, found: dict[str, dict[str, Any]]) -> None:
    name = Device(mesh.device).name
    peak = args.peak_tflops * 1e12 if args.peak_tflops else next((v for k, v in PEAKS.items() if k in name), None)
    rows = []
    for who, x in found.items():
        x["tokens_per_s"] = config.batch * config.seq / statistics.median(x["step_s"])
        x["mfu"] = None if peak is None else x["tokens_per_s"] * flops_per_token(config) / peak / mesh.size
        share = "" if x["mfu"] is None else f"{x['mfu']:.1%}"
        speed = (f"{1e3 * statistics.median(x['step_s']):.1f}", f"{x['tokens_per_s']:,.0f}", share)
        memory = (f"{x['peak_mib']:.0f}", f"{x['resting_mib']:.0f}")
        rows.append((who, *speed, *memory, f"{x['first_step_s']:.1f}", f"{x['losses'][-1]:.4f}"))
    ours, *peers = found.values()
    speed = ours["tokens_per_s"] / max(x["tokens_per_s"] for x in peers)
    memory = ours["peak_mib"] / min(x["peak_mib"] for x in peers)
    spread, _ = largest_difference([x["losses"] for x in found.values()])
    notes = [
        f"{config.num_params / 1e6:.0f} M parameters ({config.layers} layers, width {config.width}, {config.heads} "
        f"heads, vocabulary {config.vocab}), sequence "
        f"{config.seq}, global batch {config.batch}; {mesh.size} x {name}, {args.backend}; medians of {args.rounds} "
        f"interleaved rounds of {args.steps} steps.",
        f"tokens/s, fzero / the fastest peer: {speed:.3f}",
        f"peak memory, fzero / the smallest peer: {memory:.3f}",
        f"losses agree, largest relative difference: {spread:.1e}",
        f"MFU: {flops_per_token(config) / 1e9:.2f} GFLOP a token of "
        + (f"{peak / 1e12:.0f} TFLOP/s a device." if peak else "an unknown peak: give --peak-tflops."),
    ]
    columns = ("", "step ms", "tokens/s", "MFU", "peak MiB", "at rest MiB", "first step s", "last loss")
    data = {"settings": settings(args), "device": name, "contestants": found}
    publish(args.name, "One step on a GPU", columns, rows, notes, data, args.out)


def _say(mesh: Any, text: str) -> None:
    if mesh.rank == 0:
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    args = _arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu.py measures CUDA devices, and there is none here: nothing measured. Its code runs with --device cpu "
            "and a small model, see --help."
        )
        return
    mesh = fz.make_mesh(device=args.device)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch, args.vocab)
    found = measure(args, config, mesh)
    if mesh.rank == 0:
        report(args, config, mesh, found)
    fz.close_mesh()


def _arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, "gpu", small="a tiny model on the CPU, eager")
    model_flags(parser, layers=20, width=1024, heads=16, seq=1024, batch=16, vocab=50304)
    number_flags(parser, warmup=5, rounds=5, steps=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--peer", choices=["cast", "autocast", "both"], default="both", help="of the two modules")
    parser.add_argument("--peak-tflops", type=float, help=f"bf16 products of one device; known for {', '.join(PEAKS)}")
    backend_flag(parser, whose="of all: eager compiles nothing")
    return parsed(
        parser, layers=2, width=64, heads=4, seq=32, batch=4, vocab=256, device="cpu", backend="eager", warmup=1,
        rounds=2, steps=2,
    )  # fmt: skip


if __name__ == "__main__":
    main()
