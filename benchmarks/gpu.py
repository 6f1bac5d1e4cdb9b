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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import OUT_HELP, model_flags, peak_mib, publish, reset_peak, rss_mib
from model import GPT, Config, make_batches, make_init, make_loss

import fzero as fz
from fzero import optim

LR, WEIGHT_DECAY, MAX_NORM = 3e-4, 0.01, 1.0
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""Dense bf16 products in FLOP/s by part of a device's name (datasheets, SXM where there are several)."""


# --- contestants ---


def fzero(config: Config, mesh: Any, args: argparse.Namespace) -> Callable[[Any], Any]:
    step = fz.train_step(
        make_loss(config), optim.chain(optim.clip_by_global_norm(MAX_NORM), optim.adamw(LR, weight_decay=WEIGHT_DECAY))
    )
    step = fz.mixed_precision(step, "bf16")
    train = fz.compile(fz.shard_params(step, axis="data") if mesh.size > 1 else step, mesh, backend=args.backend)
    state = train.init(make_init(config), fz.random.key(0))

    def run(batch: Any) -> Any:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"]

    return run


def module(config: Config, mesh: Any, args: argparse.Namespace, autocast: bool = False) -> Callable[[Any], Any]:
    model = _module(config, mesh, None if autocast else torch.bfloat16)
    if args.backend == "inductor":
        model.compile(fullgraph=True)

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=autocast):
            return model(*batch)

    return _trained(forward, model)


def module_autocast(config: Config, mesh: Any, args: argparse.Namespace) -> Callable[[Any], Any]:
    return module(config, mesh, args, autocast=True)


def fsdp2(config: Config, mesh: Any, args: argparse.Namespace) -> Callable[[Any], Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _module(config, mesh, None)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (model.embed, *model.layers, model.head):
        if args.backend == "inductor":
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh.device_mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh.device_mesh, mp_policy=policy)
    return _trained(model, model)


def _module(config: Config, mesh: Any, compute: torch.dtype | None) -> Any:
    return GPT(make_init(config)(fz.random.key(0).to(mesh.device)), config.heads, compute).to(mesh.device)


def _trained(forward: Callable[..., torch.Tensor], model: torch.nn.Module) -> Callable[[Any], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def run(batch: Any) -> Any:
        loss = forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


CAST, AUTOCAST = "nn.Module, compiled whole, parameters cast", "nn.Module, compiled whole, autocast"
ALONE = {"fzero": fzero, CAST: module, AUTOCAST: module_autocast}
TOGETHER = {"fzero ZeRO-3": fzero, "FSDP2 + compile per block": fsdp2}


# --- measuring ---


class Device:
    """Time and memory of this rank's device; of the process on a CPU."""

    def __init__(self, device: torch.device):
        self.cuda, self.name = (
            device.type == "cuda",
            torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        )

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
    batches = [
        tuple(t.chunk(mesh.size)[mesh.rank].to(mesh.device).contiguous() for t in batch)
        for batch in make_batches(config, 4)
    ]

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
        numbers = (
            f"{1e3 * statistics.median(x['step_s']):.1f}",
            f"{x['tokens_per_s']:,.0f}",
            share,
            f"{x['peak_mib']:.0f}",
            f"{x['resting_mib']:.0f}",
        )
        rows.append((who, *numbers, f"{x['first_step_s']:.1f}", f"{x['losses'][-1]:.4f}"))
    ours, *peers = found.values()
    speed = ours["tokens_per_s"] / max(x["tokens_per_s"] for x in peers)
    memory = ours["peak_mib"] / min(x["peak_mib"] for x in peers)
    spread = max(
        (max(at) - min(at)) / max(min(at), 1e-9) for at in zip(*(x["losses"] for x in found.values()), strict=True)
    )
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
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    publish(
        args.name,
        "One step on a GPU",
        columns,
        rows,
        notes,
        {"settings": settings, "device": name, "contestants": found},
        args.out,
    )


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=20, width=1024, heads=16, seq=1024, batch=16)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--peer", choices=["cast", "autocast", "both"], default="both", help="of the two modules")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="a round")
    parser.add_argument(
        "--peak-tflops", type=float, help="bf16 products of one device, for the MFU; known for " + ", ".join(PEAKS)
    )
    parser.add_argument(
        "--backend", choices=["inductor", "eager"], default="inductor", help="of all: eager compiles nothing"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU, eager")
    parser.add_argument("--name", default="gpu", help="of the files in --out")
    parser.add_argument("--out", type=Path, help=OUT_HELP)
    args = parser.parse_args()
    if args.small:
        args.layers, args.width, args.heads, args.seq, args.batch, args.vocab = 2, 64, 4, 32, 4, 256
        args.device, args.backend, args.warmup, args.rounds, args.steps = "cpu", "eager", 1, 2, 2
        args.out = args.out or Path(tempfile.gettempdir()) / "fzero-small"
    return args


if __name__ == "__main__":
    main()
