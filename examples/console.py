"""What a script needs around its training loop: flags and a clean stop."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fzero as fz
from fzero.comm.launcher import tell

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun

# --- What is seen of it: on rank 0 only ---


def say(line: str) -> None:
    """Where nobody reads on (`| head`) the run stops after the running step, in silence."""
    if RANK == 0:
        try:
            print(line, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            INTERRUPT["signal"] = signal.SIGPIPE


# --- The same bits every time ---


def use_deterministic_algorithms() -> None:
    """Before CUDA is first used: cuBLAS asks for workspaces of a fixed size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of their bytes."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# --- Stopping ---

INTERRUPT = {"signal": 0, "stepped": False}


def on_interrupt(*_: object) -> None:
    """Ctrl-C (torchrun passes it on, so it may come twice): after the running step, or at once if there was none
    yet."""
    INTERRUPT["signal"] = signal.SIGINT
    if not INTERRUPT["stepped"]:
        raise KeyboardInterrupt("stopped before the first step")


def on_terminate(*_: object) -> None:
    """What schedulers send before they take the machine away, and torchrun to the ranks that are left when one has
    failed."""
    INTERRUPT["signal"] = signal.SIGTERM


def stops(mesh: fz.Mesh) -> int:
    """After a step: the signal that has come to any rank, 0 if none has. Ranks must stop after the same step."""
    if not INTERRUPT["stepped"]:
        INTERRUPT["stepped"] = True
        signal.signal(signal.SIGTERM, on_terminate)  # until now there was nothing to save
    found = torch.tensor(int(INTERRUPT["signal"]))
    if mesh.size > 1:
        try:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        except RuntimeError as error:  # what the process group says of a connection that is gone
            raise fz.errors.left("step", mesh.rank, mesh.size) from error
    INTERRUPT["signal"] = int(found) or INTERRUPT["signal"]  # which may have come meanwhile
    return int(found)


def exit_code(run: Callable[[], None]) -> int:
    """Runs a script to its end, to a signal, or to an error that is the user's to mend, which is told once and without
    a traceback."""
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        run()
    except KeyboardInterrupt as stop:
        say(str(stop))
        return 128 + (INTERRUPT["signal"] or signal.SIGINT)
    except Exception as error:
        if INTERRUPT["signal"] == signal.SIGINT:
            return 130  # another rank left first
        if not isinstance(error, fz.errors.FzeroError):
            raise
        tell(error)
        return 2
    fz.close_mesh()
    return 0


# --- Flags ---

WHOLE: dict[str, Any] = {"type": int, "metavar": "N"}
LARGE = 1e39  # more than float32 holds


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that says what a flag is where it is not given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        given = not isinstance(action.default, (bool, type(None))) and action.default != argparse.SUPPRESS
        return f"{action.help} (default: %(default)s)" if given else action.help


def parsed(p: argparse.ArgumentParser, problems_of: Callable[[argparse.Namespace], list[str]]) -> argparse.Namespace:
    """The flags of this process; help, and what is wrong with them, are printed by rank 0.

    Raises:
        FzeroValueError: under torchrun, which prints forty lines of its own when a rank fails: this error is the last
            thing on the screen.
        SystemExit: without torchrun; and after `--help`.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            args = p.parse_args()
            if problems := problems_of(args) or unwritable(args):
                p.error("; ".join(problems))
    except SystemExit as stop:
        if stop.code and "TORCHELASTIC_RUN_ID" in os.environ:
            what = err.getvalue().partition(f"{p.prog}: error: ")[2].strip()
            text = f"{p.prog}: {what}\nFix: python {shlex.quote(sys.argv[0])} --help lists the flags"
            raise fz.errors.FzeroValueError(text) from None
        if RANK == 0:
            sys.stdout.write(out.getvalue())
            sys.stderr.write(err.getvalue())
        raise
    if args.backend is None:
        args.backend = default_backend()
        if args.backend == "eager":
            say("note: there is no C++ compiler, so nothing is compiled (--backend eager)")
    return args


def default_backend() -> str:
    """What can run here."""
    return "inductor" if torch.cuda.is_available() or fz.has_compiler() else "eager"


def below_one(args: argparse.Namespace, *names: str) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1" for name in names if getattr(args, name) < 1
    ]


def missing(**packages: str) -> list[str]:
    """The problem of each package, given by its module, that is not installed."""
    absent = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    return [f"this needs {package}: pip install {package}" for package in absent]


def out_of_range(args: argparse.Namespace, **ranges: tuple[float, float]) -> list[str]:
    """Flags that are not within their least and their most, as NaN is not."""
    values = {name: getattr(args, name) for name in ranges}
    return [
        f"--{n.replace('_', '-')} {values[n]:g} is not from {low:g} to {high:g}"
        for n, (low, high) in ranges.items()
        if not low <= values[n] <= high
    ]


def unusable_text(args: argparse.Namespace) -> list[str]:
    """The problem of the file of --text, if one is given: unreadable, or too short for validation on 2 % of it."""
    if args.text is None:
        return []
    if not os.path.isfile(args.text) or not os.access(args.text, os.R_OK):
        return [f"--text {args.text} is not a file that can be read"]
    size, least = os.path.getsize(args.text), 100 * (args.seq + 1)
    what = f"--text {args.text} has {size:,} bytes, and --seq {args.seq} takes at least {least:,}"
    return [what] if size < least else []


def unwritable(args: argparse.Namespace) -> list[str]:
    """Flags that name what could not be written later."""
    problems = []
    if args.json and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        problems.append(f"--json {args.json} is not a file in a folder that exists")
    if "://" in (args.out or ""):  # an object store, of which the first look for a checkpoint hears
        return problems
    out = Path(args.out or ".").absolute()
    there = next(folder for folder in (out, *out.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        problems.append(f"--out {args.out}: {there} is not a folder that can be written")
    return problems


OF_THE_RUN = ("steps", "resume", "zero", "tensor", "json", "print_program")
"""Flags that need not be given again to go on from a checkpoint."""
OF_THE_PLACE = (
    "text",
    "lr",
    "seed",
    "deterministic",
    "out",
    "save_every",
    "timeout",
    "stop_on_nan",
    "backend",
    "warmup",
)
"""Other flags that do not change what a step costs."""


def to_try_next(args: argparse.Namespace) -> str:
    """Commands that go on with this run of train_gpt.py, with the flags that were given."""
    defaults = vars(flags(None).parse_args([])) | {"backend": default_backend()}
    given = {name: value for name, value in vars(args).items() if value != defaults[name]}
    again = []
    for name, value in given.items():
        if name not in OF_THE_RUN:
            again += [f"--{name.replace('_', '-')}"] + ([] if value is True else [shlex.quote(str(value))])
    script, start, where = shlex.quote(sys.argv[0]), "python", "on one process"
    if WORLD == 1 and args.batch % (2 * args.accumulate) == 0:
        start, where = "torchrun --nproc-per-node 2", "on two processes"
    more = ["--resume", "--steps", str(args.steps + 50), "--zero", "3" if args.zero == 1 else "1"]
    lines = [f"  {start} {' '.join([script, *again, *more])}  # {where}"]
    if not given.keys() - {*OF_THE_PLACE, "steps", "resume", "json", "print_program"}:  # plan_target has no flags
        lines += [
            f"  fzero plan {script}:plan_target --mesh data=8  # memory, time",
            f"  fzero show {script}:plan_target --mesh data=8  # the program",
        ]
    return "\n".join(lines)


def flags(description: str | None) -> argparse.ArgumentParser:
    """The flags of train_gpt.py."""
    p = argparse.ArgumentParser(description=description, formatter_class=Help)
    p.add_argument("--steps", **WHOLE, default=150, help="number of steps")
    p.add_argument("--text", metavar="FILE", help="training text, instead of the source of Python's library")
    p.add_argument("--layers", **WHOLE, default=4, help="number of layers")
    p.add_argument("--width", **WHOLE, default=192, help="width of the model")
    p.add_argument("--heads", **WHOLE, default=4, help="number of attention heads")
    p.add_argument("--seq", **WHOLE, default=128, help="bytes per sequence")
    p.add_argument("--batch", **WHOLE, default=12, help="sequences per step, over all processes and micro-batches")
    p.add_argument("--accumulate", **WHOLE, default=2, help="micro-batches per step")
    p.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=3,
        help="the ZeRO stage: 1 shards the optimizer state, 2 also gradients, 3 also parameters",
    )
    p.add_argument("--tensor", **WHOLE, default=1, help="processes that share each layer (tensor parallelism)")
    p.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16", "auto"),
        default="bf16",
        help="dtype of the computation; auto: chosen for each block. Reductions are in fp32",
    )
    p.add_argument(
        "--fp8",
        choices=("tensor", "row"),
        help="compute matrix products in fp8, with one scale per tensor or row",
    )
    p.add_argument(
        "--params",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the stored parameters; bf16: no fp32 master weights",
    )
    p.add_argument(
        "--rounding",
        choices=("stochastic", "nearest"),
        help="rounding of updates with --params bf16 (default: stochastic)",
    )
    p.add_argument("--state-dtype", choices=("fp32", "int8"), default="fp32", help="dtype of Adam's moments")
    p.add_argument("--label-smoothing", type=float, default=0.0, help="label smoothing of the cross entropy")
    p.add_argument("--z-loss", type=float, default=0.0, help="weight of the z-loss, e.g. 1e-4")
    p.add_argument("--backend", choices=("inductor", "eager"), help="by default inductor, if it can run")
    p.add_argument(
        "--warmup",
        choices=("wait", "eager"),
        default="wait",
        help="eager: train operation by operation while functions are compiled; results then vary by rounding",
    )
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    p.add_argument("--seed", **WHOLE, default=0, help="seed of parameters and data")
    p.add_argument(
        "--deterministic",
        action="store_true",
        help="bitwise identical in every run; prints a digest of the parameters at the end",
    )
    p.add_argument("--out", metavar="DIR", default="runs/gpt", help="directory for checkpoints")
    p.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint in --out, if any, on any number of processes and --zero stage",
    )
    p.add_argument("--save-every", **WHOLE, default=50, help="steps between checkpoints")
    p.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=600.0,
        help="how long a rank waits for others before it gives up",
    )
    p.add_argument("--json", metavar="FILE", help="write one line per step")
    p.add_argument("--print-program", action="store_true", help="print the program that every rank runs")
    p.add_argument("--stop-on-nan", action="store_true", help="fail at the first loss that is not finite")
    return p


def parse_args(description: str | None) -> argparse.Namespace:
    """The flags that were given to train_gpt.py."""

    def problems_of(args: argparse.Namespace) -> list[str]:
        names = ("steps", "layers", "width", "heads", "seq", "batch", "accumulate", "save_every", "tensor")
        problems = below_one(args, *names)
        problems += out_of_range(
            args, lr=(0, LARGE), seed=(0, 2**64 - 1), label_smoothing=(0, 1), z_loss=(0, LARGE), timeout=(1, LARGE)
        )
        problems += unusable_text(args)
        if not problems and args.width % args.heads:
            problems.append(f"--width {args.width} is not a multiple of --heads {args.heads}")
        elif not problems and args.width // args.heads % 2:
            problems.append(
                f"--width {args.width} / --heads {args.heads} is odd: rotary positions turn pairs of features"
            )
        if not problems:
            each = (("heads", args.heads), ("the number of processes", WORLD))
            problems += [f"--tensor {args.tensor} does not divide {what}, {n}" for what, n in each if n % args.tensor]
        if not problems and args.batch % (parts := WORLD // args.tensor * args.accumulate):
            processes = f"{WORLD} processes" + (f" / --tensor {args.tensor}" if args.tensor > 1 else "")
            problems.append(
                f"--batch {args.batch} is not a multiple of {parts}: {processes} x --accumulate {args.accumulate}"
            )
        return problems

    return parsed(flags(description), problems_of)
