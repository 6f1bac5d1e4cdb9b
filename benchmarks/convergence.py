"""Whether training converges in other precisions as it does in fp32: the GPT of examples/train_gpt.py on the source of
Python's standard library, with the same parameters and batches.

    python benchmarks/convergence.py                                   # 300 steps in every precision: half an hour
    python benchmarks/convergence.py --only fp32 bf16 bf16-stochastic  # some of them
    python benchmarks/convergence.py --small                           # few steps of a tiny model, to see that it works

The precisions run one after the other on all cores. Compared are the loss on held-out text after the last step, and
the training loss over the last steps; only rounding differs. A precision that this version of fzero does not support
is left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from pathlib import Path
from typing import Any

from common import backend_flag, number_flags, parsed, publish, script_parser, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

PRECISIONS: dict[str, dict[str, str]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "bf16, products in fp8": {"dtype": "bf16", "fp8": "tensor"},
    "bf16, int8 moments": {"dtype": "bf16", "state_dtype": "int8"},
    "bf16-stochastic": {"dtype": "bf16", "params": "bf16"},
    "bf16-stochastic, int8 moments": {"dtype": "bf16", "params": "bf16", "state_dtype": "int8"},
    "bf16-nearest": {"dtype": "bf16", "params": "bf16", "rounding": "nearest"},
}
"""Flags of the example."""
LAST = 30  # steps whose training loss is averaged


def train(flags: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """The training loss of every step, the held-out loss after the last, and bytes at rest a parameter."""
    import console
    import torch
    import train_gpt

    import fzero as fz

    given = (
        {name: getattr(args, name) for name in ("steps", "layers", "width", "heads", "seq", "batch", "lr", "seed")}
        | {"accumulate": 1, "zero": 0}
        | flags
    )
    sys.argv = ["train_gpt.py", *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]
    with contextlib.redirect_stderr(None):
        options = console.parse_args(None)
    step, _, init, _ = train_gpt.training(options)
    compiled = fz.compile(step, fz.make_mesh(), backend=args.backend)
    text, held_out = fz.data.TokenDataset(
        fz.data.python_source(), seq=args.seq, batch=args.batch, seed=args.seed
    ).split(0.02)
    state, losses = compiled.init(init, fz.random.key(args.seed)), []
    for i in range(args.steps):
        state, metrics = compiled(state, text.batch_at(i))
        losses.append(float(metrics["loss"]))
    params = fz.tree.map(lambda x: x.float(), state.params)
    with torch.no_grad():
        held = [float(train_gpt.gpt(params, *held_out.batch_at(i), heads=args.heads)[0]) for i in range(args.held_out)]
    resting = sum(x.nbytes for x in fz.tree.leaves((state.params, state.opt_state)))
    return {
        "losses": losses,
        "held_out": statistics.mean(held),
        "bytes": resting / sum(x.numel() for x in fz.tree.leaves(params)),
    }


def run(args: argparse.Namespace) -> None:
    from fzero.errors import FzeroValueError

    found: dict[str, dict[str, Any]] = {}
    refused: list[str] = []
    for name in args.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found[name] = train(PRECISIONS[name], args)
        except FzeroValueError as error:
            refused.append(f"{name}: left out ({str(error).splitlines()[0]})")
        except SystemExit:  # from argparse
            refused.append(f"{name}: left out, the example has no such flag")
    base = found.get("fp32")
    rows = []
    for name, r in found.items():
        more = None if base is None else r["held_out"] / base["held_out"] - 1
        r["more"] = more
        last = statistics.mean(r["losses"][-LAST:])
        compared = "" if more is None else f"{100 * more:+.2f} %"
        rows.append([name, f"{r['held_out']:.4f}", compared, f"{last:.4f}", f"{r['bytes']:.2f}"])
    size = (
        f"{args.layers} layers, width {args.width}, sequence {args.seq}, batch {args.batch}, AdamW at {args.lr:g} with "
        f"warmup and cosine"
    )
    notes = [
        f"{args.steps} steps; {size}; held-out loss: of {args.held_out} batches after the last step, computed in fp32.",
        *refused,
    ]
    columns = ["", "held-out loss", "beside fp32", f"training loss, last {LAST}", "bytes a parameter"]
    data = {"settings": settings(args), "found": found}
    picture = lambda figure: draw(figure, found)  # noqa: E731
    publish(args.name, "Convergence in other precisions", columns, rows, notes, data, args.out, picture)


def draw(figure: Any, found: dict[str, dict[str, Any]]) -> None:
    """Training loss, smoothed, beside what it is above fp32's."""
    left, right = figure.subplots(1, 2)
    smooth = {
        name: [statistics.mean(r["losses"][max(0, i - 9) : i + 1]) for i in range(len(r["losses"]))]
        for name, r in found.items()
    }
    for name, losses in smooth.items():
        left.plot(losses, label=name, linewidth=1)
        if "fp32" in smooth and name != "fp32":
            right.plot(
                [100 * (a / b - 1) for a, b in zip(losses, smooth["fp32"], strict=True)], label=name, linewidth=1
            )
    left.set(xlabel="step", ylabel="training loss, mean of 10 steps")
    right.set(xlabel="step", ylabel="% above fp32")
    right.axhline(0, color="gray", linewidth=0.5)
    left.legend(frameon=False)


def main() -> None:
    p = script_parser(__doc__, "convergence", small="few steps of a tiny model")
    number_flags(p, steps=300, layers=4, width=128, heads=4, seq=128, batch=12, seed=0, held_out=16)
    p.add_argument("--lr", type=float, default=2e-3)
    backend_flag(p)
    names = list(PRECISIONS)
    p.add_argument("--only", nargs="+", choices=names, default=names, metavar="PRECISION", help=", ".join(names))
    run(parsed(p, steps=4, layers=1, width=32, seq=32, held_out=2, only=["fp32", "bf16"], backend="eager"))


if __name__ == "__main__":
    main()
