"""Tensor, expert, sequence and pipeline parallelism and Muon, each compared with PyTorch's, DeepSpeed's, or one written
by hand.

    python benchmarks/parallel_axes.py                      # all five: about 40 minutes on 2 cores
    python benchmarks/parallel_axes.py tensor pipeline      # two of them
    python benchmarks/parallel_axes.py --small              # tiny models, two rounds, to see that it works

All contestants of an axis (axes/) train the same GPT from the same values on the same batches in fp32, with AdamW and
clipping, over gloo with one thread per process. With root's rights the bytes that all ranks send are counted: the
processes then have their own loopback device. Contestants that need DeepSpeed are left out without it.
"""

from __future__ import annotations

import argparse
from typing import Any

from axes import AXES
from common import (
    MODEL,
    backend_flag,
    chosen,
    model_flags,
    number_flags,
    parsed,
    publish,
    script_parser,
    serve,
    settings,
)
from contest import Axis, compared, contest, own_network, worker

COLUMNS = ("axis, processes: contestant", "CPU s", "wall s", "last loss", "planned MB", "sent MB")


def row(name: str, axis: Axis, who: str, x: dict[str, Any]) -> tuple[str, ...]:
    sent = [x.get(kind) if axis.counted else None for kind in ("planned_bytes", "sent_bytes")]
    nbytes = (f"{n / 1e6:.2f}" if n else "" for n in sent)
    seconds = (f"{x['cpu_s']:.3f}", f"{x['wall_s']:.3f}", f"{x['losses'][-1]:.6f}")
    return (f"{name}, {x['processes']}: {axis.titles[who]}", *seconds, *nbytes)


def preset(args: argparse.Namespace, axis: Axis) -> argparse.Namespace:
    """The flags for an axis: its sizes unless the command line has others."""
    sizes = {**axis.model, **(axis.small if args.small else {})}
    chosen = {name: getattr(args, name) or sizes[name] for name in MODEL}
    return argparse.Namespace(**{**vars(args), **chosen, "steps": args.steps or (4 if args.small else axis.steps)})


def main() -> None:
    args = arguments()
    if args.worker:
        serve(worker(AXES[args.axis], args))
        return
    own_network()
    data: dict[str, Any] = {"settings": settings(args, "axis", "contestant"), "found": {}}
    rows, notes = [], []
    for name in args.axes:
        axis = AXES[name]
        given = preset(args, axis)
        notes.append(
            f"{name}: {given.layers} layers, width {given.width}, {given.heads} heads, sequence {given.seq}, global "
            f"batch {given.batch}; {axis.note}; {given.rounds} rounds of {given.steps} steps"
        )
        for size in args.processes or axis.processes:
            found = data["found"][f"{name}, {size}"] = contest(name, axis, given, __file__, size)
            rows += [row(name, axis, who, x) for who, x in found.items()]
            notes += [f"{name}, {size}: {note}" for note in compared(axis, found)]
    notes = [
        "Seconds per step and process, medians of interleaved rounds. MB: sent by all ranks in a step, by the plan and "
        "by the counter of the loopback device, which includes headers.",
        *notes,
    ]
    publish(args.name, "Axes of parallelism", COLUMNS, rows, notes, data, args.out)


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, "parallel_axes", small="tiny models and two rounds")
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=", ".join(AXES))
    model_flags(parser)
    parser.add_argument("--processes", type=int, nargs="+", choices=[1, 2, 4], help="default: those of the axis")
    number_flags(parser, steps=None, rounds=5)
    parser.add_argument("--only", nargs="+", help="contestants, e.g. fzero deepspeed")
    backend_flag(parser)
    parser.add_argument("--axis", choices=list(AXES), help=argparse.SUPPRESS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parsed(parser, rounds=2)
    args.axes = chosen(parser, args.axes, AXES)
    if len(args.axes) < len(AXES) and args.name == parser.get_default("name"):
        args.name = "_".join([args.name, *args.axes])
    return args


if __name__ == "__main__":
    main()
