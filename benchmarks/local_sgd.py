"""What replicas that train by themselves cost and save (fz.local_sgd): the held-out loss over three seeds, and bytes as
the kernel counts them, beside a step that sums gradients each time and beside replicas that never meet.

    sudo python benchmarks/local_sgd.py            # fifteen minutes; Linux, root: ranks are in a network namespace
    sudo python benchmarks/local_sgd.py --small    # few steps, to see that it works

All replicas see the batches that the ranks of the step with one gradient see. A replica's batch is half of that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import compressed
from common import publish, script_flags, settings

CASES: dict[str, dict[str, Any] | None] = {
    "data_parallel": None,
    "every 20 steps, fp32": {"every": 20, "wire": None},
    "every 20 steps, int8": {"every": 20, "wire": "int8"},
    "every 20 steps, int4": {"every": 20, "wire": "int4"},
    "every 100 steps, int4": {"every": 100, "wire": "int4"},
    "every 100 steps, 4 fragments, int4": {"every": 100, "fragments": 4, "wire": "int4"},
    "every 20 steps, their mean, int8": {"every": 20, "outer": (1.0, 0.0), "wire": "int8"},
    "every 100 steps, their mean, int8": {"every": 100, "outer": (1.0, 0.0), "wire": "int8"},
    "every 20 steps, momentum 0.5, int8": {"every": 20, "outer": (0.7, 0.5), "wire": "int8"},
    "never": {"every": 10**9},
}


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """One rank: the held-out loss of the first replica after the last step and a sync, and bytes a step of both."""
    import torch
    import torch.distributed as dist
    import train_gpt

    import fzero as fz
    from fzero import optim

    given = CASES[args.what]
    name = "data" if given is None else "replica"
    mesh = fz.make_mesh(device="cpu", shared_memory=False, **{name: 2})
    rate = optim.warmup_cosine(args.rate, args.steps // 10 + 1, args.steps, init=args.rate / 10, end=args.rate / 10)
    decayed = lambda path, leaf: leaf.ndim >= 2  # noqa: E731
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=decayed))
    given = given and dict(given)
    if given and "outer" in given:
        given["outer"] = optim.sgd(given["outer"][0], momentum=given["outer"][1], nesterov=given["outer"][1] > 0)
    spec = fz.data_parallel() if given is None else fz.local_sgd(**given)
    step = spec(fz.train_step(lambda p, b: train_gpt.gpt(p, *b, heads=compressed.HEADS)[0], optimizer))
    train = fz.compile(step, mesh, backend="eager")
    init = lambda key: train_gpt.init_gpt(key, layers=compressed.LAYERS, width=compressed.WIDTH)  # noqa: E731
    state = train.init(init, fz.random.key(args.seed))
    data = fz.data.TokenDataset(fz.data.python_source(), seq=compressed.SEQ, batch=compressed.BATCH, seed=args.seed)
    text, held_out = data.split(0.02)
    before = 0
    for i in range(args.steps):
        if i == compressed.WARM_UP:
            dist.barrier()
            before = compressed.sent()
        state, _ = train(state, text.batch_at(i, rank=mesh.rank, size=mesh.size))
    dist.barrier()
    nbytes = (compressed.sent() - before) / (args.steps - compressed.WARM_UP)
    params = train.gather(state).params if args.what in ("data_parallel", "never") else train.sync(state).params
    with torch.no_grad():
        batches = (held_out.batch_at(i) for i in range(args.held_out))
        held = [float(train_gpt.gpt(params, *batch, heads=compressed.HEADS)[0]) for batch in batches]
    return {
        "held_out": statistics.mean(held),
        "bytes": nbytes,
        "params": sum(x.numel() for x in fz.tree.leaves(params)),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--held-out", type=int, default=64, help="batches")
    p.add_argument("--rate", type=float, default=compressed.RATE, help="the inner learning rate")
    p.add_argument("--small", action="store_true")
    for name in ("--what", "--seed", "--folder", "--job", "--timed"):
        p.add_argument(name, type=int if name == "--seed" else str, default=0, help=argparse.SUPPRESS)
    script_flags(p, "local_sgd")
    args = p.parse_args()
    if args.worker:
        result = worker(args)
        if int(os.environ["RANK"]) == 0:
            (Path(args.folder) / "found.json").write_text(json.dumps(result))
        os._exit(0)  # a thread of gloo's that comes back from C++ when the interpreter has ended would abort it
    if args.small:
        args.steps, args.seeds, args.held_out = 22, 1, 2
    found = {
        what: [compressed.inside(args, "local", what, 2, seed=s, script=__file__) for s in range(args.seeds)]
        for what in CASES
    }
    base, rows = found["data_parallel"], list[list[str]]()
    for what, runs in found.items():
        more = statistics.mean(r["held_out"] / b["held_out"] - 1 for r, b in zip(runs, base, strict=True))
        share = runs[0]["bytes"] / base[0]["bytes"]
        held = ", ".join(f"{r['held_out']:.4f}" for r in runs)
        rows.append([what, held, f"{100 * more:+.2f} %", f"{runs[0]['bytes']:,.0f}", f"{share:.4f}"])
    columns = ["replicas meet", "held-out loss, by seed", "beside data_parallel", "bytes a step, both ranks", "of its"]
    notes = [
        f"{base[0]['params']:,} parameters, {args.steps} steps: GPT of 2 layers, width 64, 2 ranks (gloo over a "
        f"loopback of their own). Loss on {args.held_out} held-out batches, after a last sync.",
        "The outer optimizer is the default one, SGD(0.7) with Nesterov's momentum of 0.9. The inner one is as for "
        "data_parallel, with the same schedule.",
        "Bytes are those of the steps, notes between ranks among them, without the last sync.",
    ]
    kept = settings(args, "folder", "job", "what", "seed", "timed")
    publish(
        args.name,
        "Replicas that train by themselves",
        columns,
        rows,
        notes,
        {"settings": kept, "found": found},
        args.out,
    )


if __name__ == "__main__":
    sys.exit(main())
