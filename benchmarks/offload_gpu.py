"""Everything offloaded on one GPU, over tokens per step: share of the device's peak, of fzero without offload, and of
what the machine's links allow.

    # a 7B-shaped GPT in bf16, 2k to 128k tokens a step: about 20 minutes; 81 GB of host memory
    python benchmarks/offload_gpu.py
    python benchmarks/offload_gpu.py --layers 16                # half the model
    # a model whose Adam state is twice the device's memory
    python benchmarks/offload_gpu.py --parts twice --device-memory 24GB --path DIR
    python benchmarks/offload_gpu.py --dry                      # only the plan for an H100: no GPU, about a minute
    python benchmarks/offload_gpu.py --small                    # the plan of a tiny model, to see that it works

The ceiling: compute takes the model's FLOPs, with full recomputation a third more, at the rate that products attain;
bf16 parameters come in for the forward and for the backward, 2P bytes each, once a step, and bf16 gradients go out, 2P;
Adam on the host moves 28P bytes through host memory, on the device 12P each way over the link. No step is faster than
the longest of these; the side that updates is the better of the two. Rates are measured as `fzero calibrate` does.
Without a GPU it measures nothing and fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import backend_flag, model_flags, number_flags, parsed, publish, script_parser, settings
from gpu import PEAKS, flops_per_token
from model import Config, make_batches, make_init, make_loss
from training import FzeroStep, clipped_adamw

import fzero as fz
from fzero._utils.units import parse_bytes
from fzero.plan.device_lookup import Device, get_device
from fzero.runtime.calibrate import calibrate

ROLES = ("opt_state", "params", "activations")
PEAK_TOKENS = 65536  # from so many tokens per step on the share of the peak counts
ADAM = 12  # bytes of state a parameter
DRY_HOST = 150e9  # bytes/s of host memory beside a current device, for --dry
HOST_SHARE = 0.85  # of the host's memory: what may rest there
LIBRARIES_SHARE = 0.92  # of the device's memory: what libraries leave


# --- what is measured, and what it is held against ---


def step_of(args: argparse.Namespace, config: Config, *transforms: Any) -> Any:
    step = fz.train_step(make_loss(config), clipped_adamw())
    return fz.compose(fz.mixed_precision("bf16"), fz.remat(args.remat), *transforms)(step)


def sized(args: argparse.Namespace, tokens: int, layers: int | None = None) -> tuple[Config, int]:
    """The model with the batch of a step, and how many micro-batches that is."""
    batch = max(1, tokens // args.seq)
    num_micro = max(1, batch * args.seq // args.micro)
    return Config(layers or args.layers, args.width, args.heads, args.seq, batch, args.vocab), num_micro


def ceiling_s(args: argparse.Namespace, config: Config, device: Device, host_bandwidth: float) -> dict[str, float]:
    """The least seconds of a step with everything offloaded, by what takes them."""
    params, tokens, link = config.num_params, config.batch * config.seq, device.host_copy.bandwidth
    compute = flops_per_token(config) * (8 / 6 if args.remat == "full" else 1) * tokens / device.rate(torch.bfloat16)
    on_host = {
        "to_device": 4 * params / link,
        "to_host": 2 * params / link,
        "host memory": 28 * params / host_bandwidth,
    }
    on_device = {"to_device": (4 + ADAM) * params / link, "to_host": ADAM * params / link}
    return {"compute": compute, **min(on_host, on_device, key=lambda side: max(side.values()))}


def planned(args: argparse.Namespace, config: Config, device: Device, *transforms: Any) -> Any:
    tokens = torch.empty(config.batch, config.seq, dtype=torch.int64, device="meta")
    step = step_of(args, config, *transforms)
    given: dict[str, Any] = {"device": device, "backend": args.backend}
    return fz.lower(step, fz.AbstractMesh(data=1), make_init(config), (tokens, tokens), **given).plan


def micro_batches(num_micro: int) -> list[Any]:
    return [fz.accumulate(num_micro)] if num_micro > 1 else []


def deepest(args: argparse.Namespace, device: Device) -> int:
    """The most layers, at most those asked for, whose largest step without offload is planned to fit the device."""
    low, high = 0, args.layers
    while low < high:
        middle = (low + high + 1) // 2
        config, num_micro = sized(args, max(args.tokens), middle)
        peak = planned(args, config, device, *micro_batches(num_micro)).peak_bytes
        fits = peak <= LIBRARIES_SHARE * device.memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


# --- running ---


def trained(
    args: argparse.Namespace, config: Config, mesh: Any, *transforms: Any
) -> tuple[Callable[[int], list[float]], Any]:
    """What trains so many steps and returns their losses, and the compiled step."""
    step = step_of(args, config, *transforms)
    train = FzeroStep(step, mesh, make_init(config), fz.random.key(0), backend=args.backend)
    batch = tuple(t.to(mesh.device) for t in make_batches(config, 1)[0])

    def run(count: int) -> list[float]:
        losses = [train(batch) for _ in range(count)]
        losses = [float(x) for x in losses]
        torch.cuda.synchronize()
        return losses

    return run, train.train


def timed(
    args: argparse.Namespace, config: Config, mesh: Any, *transforms: Any, trace: str | None = None
) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    run, train = trained(args, config, mesh, *transforms)
    losses, seconds = run(2), []
    torch.cuda.reset_peak_memory_stats()  # of steps: not of compiling, which tunes kernels on tensors of its own
    for _ in range(args.steps):
        begin = time.perf_counter()
        losses += run(1)
        seconds.append(time.perf_counter() - begin)
    if trace:
        with torch.profiler.profile(acc_events=True) as profiler:
            run(1)
        profiler.export_chrome_trace(trace)
    peak = torch.cuda.max_memory_allocated() / 1e9
    found = {"step_s": statistics.median(seconds), "steps_s": seconds, "losses": losses, "device_gb": peak}
    return found | {"planned_s": train.plan.step_seconds}


def host_bandwidth() -> float:
    """Bytes/s that this host's memory moves, read and written, with all threads."""
    source, target, seconds = torch.ones(1 << 28), torch.empty(1 << 28), []
    for _ in range(5):
        begin = time.perf_counter()
        torch.add(source, 1.0, out=target)
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / min(seconds)


# --- the curve ---


def curve(args: argparse.Namespace, device: Device, bandwidth: float, mesh: Any) -> list[dict[str, Any]]:
    """One point for each number of tokens a step. Without a mesh all seconds are planned."""
    points, layers = [], deepest(args, device)
    for tokens in args.tokens:
        config, num_micro = sized(args, tokens)
        small, plain = sized(args, tokens, layers)[0], micro_batches(num_micro)
        everything = [*plain, fz.offload("cpu", args.of)]
        if mesh is None:
            plan = planned(args, config, device, *everything)
            found = {"step_s": plan.step_seconds, "device_gb": plan.peak_bytes / 1e9, "losses": []}
            own = {"step_s": planned(args, small, device, *plain).step_seconds} if layers else None
        else:
            found = timed(args, config, mesh, *everything, trace=args.trace if tokens == max(args.tokens) else None)
            own = timed(args, small, mesh, *plain) if layers else None
        limits = ceiling_s(args, config, device, bandwidth)
        flops = flops_per_token(config) * config.batch * config.seq
        rate = flops / found["step_s"]
        own_rate = flops_per_token(small) * small.batch * small.seq / own["step_s"] if own else None
        points.append(
            {
                "tokens": config.batch * config.seq,
                "micro_batches": num_micro,
                **found,
                "tokens_per_s": config.batch * config.seq / found["step_s"],
                "of_peak": rate / args.peak,
                "own_layers": layers,
                "own": own,
                "of_own": rate / own_rate if own_rate else None,
                "ceiling_s": limits,
                "of_ceiling": max(limits.values()) / found["step_s"],
            }
        )
        print(f"{tokens} tokens a step: {found['step_s']:.2f} s", file=sys.stderr, flush=True)
    return points


def report(args: argparse.Namespace, points: list[dict[str, Any]], device: Device, bandwidth: float, name: str) -> None:
    rows = []
    for x in points:
        binding = max(x["ceiling_s"], key=x["ceiling_s"].__getitem__)
        own = "" if x["of_own"] is None else f"{x['of_own']:.1%} ({x['own_layers']} layers)"
        speed = (f"{x['step_s']:.3f}", f"{x['tokens_per_s']:,.0f}", f"{x['of_peak']:.1%}", own)
        ceiling = (f"{x['of_ceiling']:.1%}", binding, f"{x['device_gb']:.1f}")
        rows.append((f"{x['tokens']:,}", x["micro_batches"], *speed, *ceiling))
    least = min(x["of_ceiling"] for x in points)
    large = [x["of_peak"] for x in points if x["tokens"] >= PEAK_TOKENS]
    config, dry = sized(args, args.tokens[0])[0], "planned, nothing was run" if args.dry else "measured"
    notes = [
        f"{config.num_params / 1e9:.2f} G parameters ({args.layers} layers, width {args.width}, {args.heads} heads, "
        f"vocabulary {args.vocab}), sequence "
        f"{args.seq}, bf16, remat {args.remat}, AdamW with clipping; {', '.join(args.of)} on the host; {name}; seconds "
        f"are {dry}.",
        f"Ceiling: the longest of compute at {device.rate(torch.bfloat16) / 1e12:.0f} TFLOP/s, the link at "
        f"{device.host_copy.bandwidth / 1e9:.1f} GB/s each "
        f"way and host memory at {bandwidth / 1e9:.0f} GB/s; micro-batches of at most {args.micro} tokens. Peak: "
        f"{args.peak / 1e12:.0f} TFLOP/s.",
        "Of own: FLOP/s over those without offload, of as many layers as fit the device then.",
        f"share of the ceiling, the least: {least:.3f}",
    ]
    if large:
        notes.append(f"share of the peak from {PEAK_TOKENS} tokens on, the least: {min(large):.3f}")
    shares = ("of peak", "of own", "of ceiling", "it is bound by", "device GB")
    columns = ("tokens a step", "micro-batches", "step s", "tokens/s", *shares)
    data = {"settings": settings(args, "path", "trace"), "device": name, "rates": device.source}
    data |= {"host_bandwidth": bandwidth, "points": points}
    publish(args.name, "Everything offloaded", columns, rows, notes, data, args.out)


# --- a state twice as large as the device ---


def twice(args: argparse.Namespace, capacity: int, mesh: Any, name: str) -> None:
    """Trains a model whose Adam state is at least twice `capacity`, on the host, or where that is too small with its
    optimizer state on disk."""
    config = sized(args, args.micro)[0]
    per_layer = (
        Config(2, args.width, args.heads, args.seq, 1, args.vocab).num_params
        - Config(1, args.width, args.heads, args.seq, 1, args.vocab).num_params
    )
    beside = config.num_params - args.layers * per_layer
    layers = -(-(2 * capacity // ADAM - beside) // per_layer)
    config = sized(args, args.micro, layers)[0]
    memory = HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    where = [fz.offload("cpu", ROLES)]
    if ADAM * config.num_params > memory:
        if not args.path:
            raise SystemExit(
                f"{ADAM * config.num_params / 1e9:.0f} GB of state, {memory / 1e9:.0f} GB of host memory: give --path "
                f"on a disk, or --device-memory"
            )
        where = [fz.offload("cpu", "activations"), fz.offload("nvme", ("opt_state", "params"), path=args.path)]
    found = timed(args, config, mesh, *where)
    state, used = ADAM * config.num_params / 1e9, found["device_gb"]
    falls = found["losses"][-1] < found["losses"][0]
    memory = (f"{state:.1f}", f"{capacity / 1e9:.1f}", f"{used:.1f}")
    rows = [(f"{config.num_params / 1e9:.2f} G", layers, *memory, f"{found['step_s']:.2f}")]
    notes = [
        f"Width {args.width}, sequence {args.seq}, {config.batch * config.seq} tokens a step, bf16, {name}; "
        f"{'; '.join(map(str, where))}.",
        f"losses: {', '.join(f'{x:.4f}' for x in found['losses'])}; they {'fall' if falls else 'do not fall'}",
        f"state over device memory: {state * 1e9 / capacity:.2f}",
        f"device memory in use at most {used:.1f} GB of {capacity / 1e9:.1f}",
    ]
    columns = ("parameters", "layers", "state GB", "device GB", "used GB", "step s")
    data = {"settings": settings(args, "path"), **found}
    publish(f"{args.name}_twice", "A state twice as large as the device", columns, rows, notes, data, args.out)


def main() -> None:
    args = _arguments()
    if args.dry:
        device, bandwidth = get_device(args.device or "h100"), args.host_gbps * 1e9 if args.host_gbps else DRY_HOST
        args.peak = (
            args.peak_tflops * 1e12
            if args.peak_tflops
            else next((v for k, v in PEAKS.items() if k in device.name.upper()), PEAKS["H100"])
        )
        report(args, curve(args, device, bandwidth, None), device, bandwidth, f"the rates of {device.name}")
        return
    if not torch.cuda.is_available():
        raise SystemExit(
            "offload_gpu.py measures a CUDA device, and there is none here: nothing measured. What is planned for one, "
            "--dry says."
        )
    mesh, name = fz.make_mesh(data=1), torch.cuda.get_device_name()
    args.peak = args.peak_tflops * 1e12 if args.peak_tflops else next((v for k, v in PEAKS.items() if k in name), 0.0)
    if not args.peak:
        raise SystemExit(f"the peak of {name} is not known: give --peak-tflops")
    capacity = torch.cuda.get_device_properties(0).total_memory
    if args.device_memory:
        limited = parse_bytes(args.device_memory)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limited / capacity))
        capacity = min(limited, capacity)
    if "curve" in args.parts:
        device = get_device(args.device) if args.device else calibrate(mesh)
        bandwidth = args.host_gbps * 1e9 if args.host_gbps else host_bandwidth()
        report(args, curve(args, replace(device, memory_bytes=capacity), bandwidth, mesh), device, bandwidth, name)
    if "twice" in args.parts:
        twice(args, capacity, mesh, name)
    fz.close_mesh()


def _arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, "offload_gpu", small="the plan of a tiny model")
    model_flags(parser, layers=32, width=4096, heads=32, seq=2048, vocab=32000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**k for k in range(11, 18)], help="per step")
    number_flags(parser, steps=5)
    parser.add_argument("--micro", type=int, default=65536, help="tokens per micro-batch, at most")
    parser.add_argument("--of", nargs="+", choices=ROLES, default=list(ROLES), help="what the curve offloads")
    parser.add_argument("--remat", choices=["full", "min_cut", "none"], default="full")
    parser.add_argument("--parts", nargs="+", choices=["curve", "twice"], default=["curve", "twice"])
    parser.add_argument("--dry", action="store_true", help="the curve as planned, without a GPU")
    parser.add_argument("--device", help="whose rates to use, as in `fzero plan`; default: measured, with --dry h100")
    parser.add_argument(
        "--host-gbps", type=float, help=f"GB/s of host memory; default: measured, with --dry {DRY_HOST / 1e9:g}"
    )
    parser.add_argument("--peak-tflops", type=float, help=f"bf16 products of the device; known for {', '.join(PEAKS)}")
    parser.add_argument("--device-memory", help='as if the device had no more: "24GB"')
    parser.add_argument("--path", nargs="+", help="directories on a disk, for a state larger than the host's memory")
    parser.add_argument("--trace", help="a file for Perfetto: one step with the most tokens")
    backend_flag(parser)
    tiny: dict[str, Any] = {"layers": 2, "width": 256, "heads": 4, "seq": 64, "vocab": 512}
    args = parsed(parser, **tiny, dry=True, tokens=[256], parts=["curve"])
    if args.dry and args.name == parser.get_default("name"):
        args.name = "offload_gpu_planned"
    return args


if __name__ == "__main__":
    main()
