"""Whether memory is what the plan said: predicted and measured peak of a step, for combinations of transforms and
sizes.

    python benchmarks/plan_memory.py                        # about two minutes
    python benchmarks/plan_memory.py --backend inductor     # with compilation, about ten

Measured are the bytes of tensors alive at once: those of the state and the batch, the pool, and every allocation of
PyTorch's allocator during one step, as its profiler writes them down. What libraries allocate by themselves is not in
it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import RESULTS, Group, publish, serve

STAGES = {0: "data_parallel", 1: "shard_opt_state", 2: "shard_grads", 3: "shard_params"}
CASES: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "remat": "full"},
    {"stage": 3, "remat": "none"},
    {"stage": 3, "accumulate": 2},
    {"stage": 3, "precision": "bf16", "remat": "full"},
    {"stage": 3, "precision": "bf16", "accumulate": 2},
    {"stage": 2, "accumulate": 2},
    {"stage": 2, "precision": "bf16"},
    {"stage": 1, "remat": "full"},
    {"stage": 0},
]
SIZES: list[dict[str, int]] = [{"layers": 4, "width": 256, "seq": 64}, {"layers": 6, "width": 128, "seq": 256}]
LIMIT = 0.05  # of the measured peak


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss

    import fzero as fz
    from fzero import optim
    from fzero.measure.profile import allocated

    torch.set_num_threads(1)
    mesh = fz.make_mesh()

    def peak(
        size: dict[str, int], stage: int, remat: str = "min_cut", accumulate: int = 1, precision: str = "fp32"
    ) -> dict[str, Any]:
        """Peak bytes of the second step on this rank, predicted and measured."""
        config = Config(**size, heads=4, batch=args.batch)
        step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
        step = fz.compose(
            getattr(fz, STAGES[stage])(axis="data"),
            fz.remat(remat),
            fz.accumulate(accumulate),
            fz.mixed_precision(precision),
        )(step)
        train = fz.compile(step, mesh, backend=args.backend)
        state = train.init(make_init(config), fz.random.key(0))
        batch = tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in make_batches(config, 1)[0])
        state, _ = train(state, batch)
        plan = train.plan
        inputs = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fz.tree.leaves((state, batch))}
        measured = sum(inputs.values()) + plan.pool_bytes + allocated(lambda: train(state, batch), mesh.device)
        return {
            "predicted": plan.peak_bytes,
            "measured": measured,
            "resting": plan.resting_bytes,
            "pool": plan.pool_bytes,
            "line": plan.peak_line.text,
        }

    serve({"peak": peak})
    fz.close_mesh()


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    points: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with Group(__file__, ranks, [f"--backend={args.backend}", f"--batch={args.batch}"]) as group:
            for size in SIZES:
                for case in CASES if ranks > 1 else [c for c in CASES if c["stage"] == 0 or len(c) > 2]:
                    answer = max(group.ask("peak", size=size, **case), key=lambda x: x["measured"])
                    points.append({"ranks": ranks, **size, **case, **answer})
    rows: list[tuple[Any, ...]] = []
    off: list[float] = []
    for x in points:
        error = x["predicted"] / x["measured"] - 1
        off.append(abs(error))
        name = ", ".join([STAGES[x["stage"]], *(f"{k} {x[k]}" for k in ("remat", "accumulate", "precision") if k in x)])
        size = f"{x['layers']} x {x['width']}, {x['seq']}"
        rows.append(
            (name, x["ranks"], size, f"{x['predicted'] / 1e6:.3f}", f"{x['measured'] / 1e6:.3f}", f"{error:+.2%}")
        )
    missed = sum(e > LIMIT for e in off)
    notes = [
        f"{args.backend} backend, global batch {args.batch}, AdamW with clipping; size: layers x width, sequence; MB "
        f"of the fullest rank.",
        f"within {LIMIT:.0%} of what was planned, all {len(points)}: {f'MISSED by {missed}' if missed else 'met'}; the "
        f"worst is off by {max(off):.2%}",
    ]
    columns = ("transforms", "ranks", "size", "predicted", "measured", "predicted - measured")
    data = {"settings": {"backend": args.backend, "batch": args.batch, "ranks": args.ranks}, "points": points}
    name = "plan_memory" if args.backend == "eager" else f"plan_memory_{args.backend}"
    publish(name, "Peak memory, planned and measured", columns, rows, notes, data, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=8, help="global")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="eager")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
