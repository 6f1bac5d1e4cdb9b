"""What is alive: gathered parameters during a real ZeRO-3 step, and the state at rest.

    python benchmarks/memory.py                     # about a minute

Gathered: every buffer that an all_gather of the step fills is watched by a weak reference to its storage, and what is still alive is added up
whenever another is allocated (it can only grow there), after a short rest in which threads of gloo let go of what they have finished. At rest:
the bytes of the storages behind the state's tensors, read off the tensors, against what the stage's definition says.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Group, publish, serve

STAGES = {0: "data_parallel", 1: "shard_opt_state", 2: "shard_grads", 3: "shard_params"}
REST_LIMIT = 1.01  # of 12 P / N


def worker(args: argparse.Namespace) -> None:
    import torch
    from model import Config, make_batches, make_init, make_loss
    from torch.multiprocessing.reductions import StorageWeakRef

    import fzero as fz
    from fzero import optim
    from fzero.comm import collectives

    torch.set_num_threads(1)
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    mesh = fz.make_mesh()

    def step_for(stage: int, *more: Any) -> Any:
        step = fz.train_step(make_loss(config), optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)))
        return fz.compose(getattr(fz, STAGES[stage])(axis="data"), *more)(step)

    def resting() -> list[dict[str, int]]:
        """For each stage: bytes of the state on this rank, and what its definition says."""
        shapes = fz.tree.leaves(make_init(config)(fz.random.key(0)))
        whole = sum(4 * x.numel() for x in shapes)
        shard = sum(4 * -(-x.numel() // mesh.size) for x in shapes)
        scalars = 8 + 3 * 8  # the step and the key; what the optimizer counts is counted below
        out = []
        for stage in STAGES:
            train = fz.compile(step_for(stage), mesh, backend="eager")
            state = train.init(make_init(config), fz.random.key(0))
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fz.tree.leaves(state)}
            counts = sum(x.nbytes for x in fz.tree.leaves(state.opt_state) if x.numel() == 1)
            expected = (shard if stage == 3 else whole) + 2 * (shard if stage else whole) + scalars + counts
            out.append({"stage": stage, "bytes": sum(storages.values()), "expected": expected, "params": whole // 4})
        return out

    def gathered(accumulate: int, policy: str) -> dict[str, Any]:
        """The most bytes of gathered parameters alive at once in two steps, the sizes of the gathers, and how many there were."""
        alive: list[tuple[Any, int, int]] = []  # storage, bytes, number of its gather
        seen: dict[str, Any] = {"most_bytes": 0, "most_gathers": 0, "sizes": [], "left": 0}
        start = collectives.all_gather_start
        number = 0

        def watched(*arguments: Any, **keywords: Any) -> Any:
            nonlocal number
            moving = start(*arguments, **keywords)
            number += 1
            time.sleep(args.settle_ms / 1000)  # a thread of gloo may hold a finished transfer until it is scheduled again
            storages = [buffer.untyped_storage() for buffer in moving.tensors]
            seen["sizes"].append(sum(s.nbytes() for s in storages))
            alive[:] = [entry for entry in alive if not entry[0].expired()]
            alive.extend((StorageWeakRef(s), s.nbytes(), number) for s in storages)
            seen["most_bytes"] = max(seen["most_bytes"], sum(size for _, size, _ in alive))
            seen["most_gathers"] = max(seen["most_gathers"], len({of for _, _, of in alive}))
            return moving

        collectives.all_gather_start = watched
        try:
            train = fz.compile(step_for(3, fz.accumulate(accumulate), fz.remat(policy)), mesh, backend=args.backend)
            state = train.init(make_init(config), fz.random.key(0))
            for batch in make_batches(config, 2):
                state, metrics = train(state, tuple(t.chunk(mesh.size)[mesh.rank].contiguous() for t in batch))
                float(metrics["loss"])
        finally:
            collectives.all_gather_start = start
        seen["left"] = sum(not ref.expired() for ref, _, _ in alive)
        return seen

    serve({"resting": resting, "gathered": gathered})
    fz.close_mesh()


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    shared = [f"--{k}={getattr(args, k)}" for k in ("layers", "width", "heads", "seq", "batch", "backend")] + [f"--settle-ms={args.settle_ms}"]
    rest: list[dict[str, Any]] = []
    live: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with Group(__file__, ranks, shared) as group:
            for per_stage in zip(*group.ask("resting"), strict=True):
                rest.append({"ranks": ranks, **max(per_stage, key=lambda x: x["bytes"])})
            if ranks == 2:
                for accumulate in (1, 2):
                    for policy in ("min_cut", "full", "none"):
                        answer = max(group.ask("gathered", accumulate=accumulate, policy=policy), key=lambda x: x["most_bytes"])
                        sizes = {"sizes": sorted(set(answer["sizes"])), "gathers": len(answer["sizes"]) // 2}  # two steps
                        live.append({"accumulate": accumulate, "remat": policy, **answer, **sizes})
    report(args, rest, live)


def report(args: argparse.Namespace, rest: list[dict[str, Any]], live: list[dict[str, Any]]) -> None:
    from model import Config

    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    settings = {k: v for k, v in vars(args).items() if k not in ("worker", "out")}
    size = f"{config.num_params:,} parameters ({config.layers} layers, width {config.width}), fp32, AdamW"
    rows = []
    for x in rest:
        rows.append((f"stage {x['stage']}", x["ranks"], f"{x['bytes']:,}", f"{x['expected']:,}", f"{x['bytes'] / x['params']:.3f}"))
    wrong = [x for x in rest if x["bytes"] != x["expected"]]
    over = [x for x in rest if x["stage"] == 3 and x["bytes"] > REST_LIMIT * 12 * x["params"] / x["ranks"]]
    notes = [
        f"{size}; bytes of the storages behind the state's tensors on the fullest rank.",
        f"equal to the closed form, to the byte: {'met' if not wrong else f'MISSED by {len(wrong)}'}",
        f"stage 3 at most 12 P / N + 1 %: {'met' if not over else f'MISSED by {len(over)}'}",
    ]
    columns = ("", "ranks", "bytes per rank", "closed form", "bytes per parameter")
    publish("memory_at_rest", "The state at rest", columns, rows, notes, {"settings": settings, "points": rest}, args.out)
    if not live:
        return
    rows = []
    for x in live:
        block = max(x["sizes"])
        name = f"accumulate {x['accumulate']}, remat {x['remat']}"
        rows.append((name, x["gathers"], f"{block:,}", f"{x['most_bytes']:,}", f"{x['most_bytes'] / block:.2f}", x["most_gathers"]))
    bad = [x for x in live if x["most_bytes"] > 2 * max(x["sizes"]) or x["left"]]
    notes = [
        f"{size}, ZeRO-3 on 2 ranks, {args.backend} backend, global batch {config.batch}; two real steps, the fullest rank.",
        f"at most two blocks' worth alive at any time, and nothing after the step: {'met' if not bad else f'MISSED by {len(bad)}'}",
    ]
    columns = ("", "gathers a step", "largest block, bytes", "most alive at once, bytes", "in blocks", "gathers alive at once")
    publish("memory_gathered", "Gathered parameters alive", columns, rows, notes, {"settings": settings, "points": live}, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="global")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--backend", choices=["inductor", "eager"], default="eager", help="of the step whose gathers are watched")
    parser.add_argument("--settle-ms", type=float, default=5.0, help="rest before counting what is alive")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
