"""Trains a byte-level GPT whose training state is several times larger than the memory it may use: parameters and
optimizer state are stored on disk.

python examples/train_big.py --memory 2GB                              # 500 M parameters, 6 GB of state
python examples/train_big.py --memory 1GB --params 500M                # the same in half the memory: narrower, deeper
torchrun --nproc-per-node 2 examples/train_big.py --memory 2GB         # two processes, each with half of the state
python examples/train_big.py --memory 2GB --plan                       # plans a step only
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from console import LARGE, WHOLE, WORLD, Help, below_one, exit_code, out_of_range, parsed, say, stops
from rich.table import Table
from train_gpt import VOCAB, gpt, init_gpt

import fzero as fz
from fzero import optim
from fzero._utils.units import parse_bytes
from fzero.sharding.layout import leaf_of

STATE = 12  # bytes a parameter: itself and Adam's two moments, fp32
# bytes that torch's tracer and compiler, and what the allocator keeps, take of a process, as measured; the rest is in
# the plan
TOOLS = 300_000_000
HEAD = 64  # features of an attention head
DEEPEST = 256  # layers that a model is given to become narrow enough

# --- The model: as large as it is asked to be, as wide as the memory allows ---


def layers_for(num_params: float, width: int) -> int:
    """How deep a model of a width is that has so many parameters: 12 width^2 + 2 width a layer, beside the embedding
    and the head."""
    return max(1, math.ceil((num_params - (2 * VOCAB + 1) * width) / (12 * width**2 + 2 * width)))


def training(args: argparse.Namespace, width: int) -> tuple[Any, Callable[..., Any]]:
    """The step of a model of a width, and the function that makes its parameters. There is no clipping: it takes all
    gradients at once to know their norm."""
    schedule = optim.warmup_cosine(args.lr, args.steps // 4, args.steps, init=args.lr / 10, end=args.lr / 10)
    adamw = optim.adamw(schedule, b2=0.95, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim >= 2)

    def init(key):
        return init_gpt(key, layers=layers_for(args.params, width), width=width)

    def loss_fn(params, batch):
        return gpt(params, *batch, heads=width // HEAD)[0]

    off = fz.offload("nvme", ("opt_state", "params"), path=args.path)
    return fz.compose(fz.shard_params(axis="data"), fz.remat("full"), off)(fz.train_step(loss_fn, adamw)), init


def sized(args: argparse.Namespace, mesh: fz.Mesh) -> tuple[Any, Callable[..., Any], fz.Lowered]:
    """The step, the function that makes its parameters, and its program.

    A wide model multiplies large matrices, but the buffers of the blocks under way are as large as these. It begins
    with a layer for every 64 of its width, and becomes narrower and deeper until what the plan says of its program
    fits.
    """
    tokens = torch.empty(args.batch // mesh.size, args.seq, dtype=torch.int64, device="meta")
    width = args.width or max(HEAD, round((args.params * HEAD / 12) ** (1 / 3) / HEAD) * HEAD)
    while True:
        step, init = training(args, width)
        lowered = fz.lower(step, mesh, init, (tokens, tokens), backend=args.backend)
        fits = lowered.plan.peak_bytes + TOOLS <= args.memory
        narrower = max(HEAD, int(0.8 * width / HEAD) * HEAD)
        if (
            fits
            or args.width
            or args.memory <= TOOLS
            or narrower == width
            or layers_for(args.params, narrower) > DEEPEST
        ):
            break
        say(f"{width} wide it would take {gb(lowered.plan.peak_bytes + TOOLS)}: trying {narrower}")
        width = narrower
    num_params = sum(leaf.numel for leaf in lowered.params.leaves)
    planned = f"{gb(lowered.plan.peak_bytes)} planned and {gb(TOOLS)} for the compiler, of {gb(args.memory)} allowed"
    say(f"a GPT of {num_params / 1e6:,.1f} M parameters: {layers_for(args.params, width)} layers, {width} wide")
    say(f"state on disk: {gb(STATE * num_params)}; peak memory of each process: {planned}")
    if not fits:
        raise fz.errors.BudgetError(
            f"this model does not fit: {planned}\nFix: a larger --memory, or less of --params, --batch or --seq"
        )
    return step, init, lowered


# --- The machine ---


def resident(device: torch.device, most: bool = False) -> int:
    """Bytes of this process in memory, on a GPU in the GPU's: now, or at the most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if most else torch.cuda.memory_allocated(device)
    which = "VmHWM" if most else "VmRSS"
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(which)
    )


def scratch() -> str:
    """The roomiest of the directories for temporary files and this one, but for those that the system keeps in
    memory."""
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    mount = lambda path: str(next(p for p in (path, *path.parents) if p.is_mount()))  # noqa: E731
    places = [p for p in (Path(tempfile.gettempdir()).resolve(), Path("/var/tmp"), Path.cwd()) if os.access(p, os.W_OK)]
    on_disk = [p for p in places if kinds.get(mount(p)) not in ("tmpfs", "ramfs")]
    return str(max(on_disk or [Path.cwd()], key=lambda p: shutil.disk_usage(p).free))


# --- What is seen of it ---


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def described(r: dict[str, Any]) -> str:
    return f"loss {r['loss']:.4f}  {r['tokens_per_s']:,.0f} tokens/s  resident {gb(r['resident_bytes'])}"


def tiers(state: fz.State, memory: int) -> Callable[[dict[str, Any]], Table]:
    """What a terminal shows below the progress: what is stored where, and how full the memory is."""
    stored = {"disk": 0, "device": 0}
    for x in fz.tree.leaves(state):
        found = leaf_of(x)
        stored[found[0].layout.tier if found else "device"] += x.nbytes

    def below(r: dict[str, Any]) -> Table:
        full = min(20, round(20 * r["resident_bytes"] / memory))
        table = Table("tier", "stored")
        table.caption = f"resident {'█' * full}{'░' * (20 - full)} {gb(r['resident_bytes'])} of {gb(memory)}"
        table.add_row("disk", gb(stored["disk"]))
        table.add_row("memory", gb(stored["device"]))
        return table

    return below


# --- The run ---


def run(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    mesh = fz.make_mesh()  # all processes along one axis, `data`
    empty = resident(mesh.device)
    step, init, lowered = sized(args, mesh)
    if args.print_program:
        say(str(lowered.program))
    if args.plan:
        say(str(lowered.plan))
        return
    text = fz.data.TokenDataset(fz.data.python_source(), seq=args.seq, batch=args.batch, seed=args.seed)
    here = {"rank": mesh.index("data"), "size": mesh.axis_size("data")}
    train = fz.compile(step, mesh, backend=args.backend)
    # none yet: the same command starts a run and goes on with it
    saved = fz.checkpoint.find(args.out) if args.resume else None
    state = train.restore(saved, params=init) if saved else train.init(init, fz.random.key(args.seed))
    start = text.resume(fz.checkpoint.describe(saved, mesh).meta.get("data")) if saved else 0
    below = tiers(state, args.memory)
    say(f"the state is in {args.path}: {f'resuming at step {start}' if start else 'training'}")

    with (
        fz.log(
            train,
            args.json,
            steps=args.steps,
            tokens=args.batch * args.seq,
            describe=described,
            below=below,
            print_fn=say,
        ) as report,
        fz.data.prefetch(text, start, args.steps, **here, device=mesh.device) as batches,
    ):
        for index, batch in batches:
            state, metrics = train(state, batch)
            done = index + 1
            report(done, metrics, resident_bytes=resident(mesh.device) - empty)
            stop = stops(mesh)
            if args.out and (stop or done == args.steps):
                fz.checkpoint.save(args.out, state, keep=1, meta=vars(args) | {"data": text.cursor(done)})
            if stop and done < args.steps:
                raise KeyboardInterrupt(f"stopped at step {done}{'; continue with --resume' if args.out else ''}")
    peak = resident(mesh.device, most=True) - empty
    say(
        f"at the most {gb(peak)} were resident over the empty process, "
        f"{'within' if peak <= args.memory else 'MORE THAN'} the {gb(args.memory)} allowed"
    )


def parse_args(description: str | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=description, formatter_class=Help)
    p.add_argument(
        "--memory",
        type=amount,
        default="2GB",
        help="memory of each process in addition to PyTorch itself, or of its GPU: 2GB (10^9), 1.5GiB (2^30)",
    )
    p.add_argument(
        "--params",
        type=number,
        metavar="N",
        help="such as 500M or 1.5B; by default, the state is three times as large as --memory",
    )
    p.add_argument("--width", **WHOLE, help="width of the model, a multiple of 64; by default the largest that fits")
    p.add_argument("--seq", **WHOLE, default=128, help="bytes per sequence")
    p.add_argument("--batch", **WHOLE, default=8, help="sequences per step, over all processes")
    p.add_argument("--steps", **WHOLE, default=20, help="number of steps")
    p.add_argument("--lr", type=float, default=2e-4, help="peak learning rate")
    p.add_argument("--seed", **WHOLE, default=0, help="seed of parameters and data")
    p.add_argument(
        "--path", metavar="DIR", help="directory for the state during the run; by default, one with enough free space"
    )
    p.add_argument("--threads", **WHOLE, help="threads per process")
    p.add_argument("--backend", choices=("inductor", "eager"), help="by default inductor, if it can run")
    p.add_argument(
        "--out", metavar="DIR", help="save a checkpoint here at the end or at Ctrl-C; by default, none is saved"
    )
    p.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, if any")
    p.add_argument("--json", metavar="FILE", help="write one line per step")
    p.add_argument("--print-program", action="store_true", help="print the program that every rank runs")
    p.add_argument("--plan", action="store_true", help="only print the plan of a step")

    def problems_of(args: argparse.Namespace) -> list[str]:
        largest = {"width": LARGE, "threads": 1024, "params": 1e15}  # what is not given is chosen
        problems = below_one(args, "steps", "seq", "batch")
        problems += out_of_range(
            args,
            lr=(0, LARGE),
            seed=(0, 2**64 - 1),
            **{n: (1, most) for n, most in largest.items() if getattr(args, n) is not None},
        )
        if not problems and (args.width or HEAD) % HEAD:
            problems.append(f"--width {args.width} is not a multiple of {HEAD}")
        if not problems and args.batch % WORLD:
            problems.append(f"--batch {args.batch} is not a multiple of {WORLD} processes")
        return problems + (["--resume needs --out"] if args.resume and not args.out else [])

    args = parsed(p, problems_of)
    args.params, args.path = args.params or 3 * args.memory // STATE, args.path or scratch()
    return args


def amount(text: str) -> int:
    try:
        return parse_bytes(text)
    except fz.errors.FzeroError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory, as 2GB and 512MiB are") from None


def number(text: str) -> int:
    try:
        return int(float(text.rstrip("KMB")) * {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, as 500M and 1.5B are") from None


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(parse_args(__doc__))))
