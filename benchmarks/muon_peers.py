"""Muon over ranks beside one process: `fz.optim.muon` under ZeRO-3 and with offload, and torch.optim.Muon.

    python benchmarks/muon_peers.py                      # one and two processes: about 4 minutes on 2 cores
    python benchmarks/muon_peers.py --steps 3 --small    # to see that it works

One GPT; the same values, batches, Muon of the layers' matrices and AdamW of the rest for all, in fp32; Muon iterates in
bf16, as torch's does. Its bytes are those of the program's transfers for matrices.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import MODEL, Group, model_flags, passed_on, publish, script_flags, serve, settings, verdict
from model import Config, make_batches, make_init, make_loss

LR, OTHER_LR, WEIGHT_DECAY, NUM_BATCHES = 2e-3, 3e-4, 0.01, 16
LOSS_LIMIT = 1e-5
SMALL = {"layers": 2, "width": 64, "heads": 4, "seq": 16, "rounds": 2}
TITLES = {
    "torch": "torch.optim.Muon and AdamW, one process",
    "fzero": "fzero, one process",
    "sharded": "fzero, shard_params, 2 processes",
    "offloaded": "fzero, shard_params and offload, 2 processes",
}
ONE = ("torch", "fzero")

Step = Callable[[Any], Any]


def of_muon(path: str, leaf: torch.Tensor) -> bool:
    return "layers" in path and leaf.ndim == 2


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    batches = [tuple(x.chunk(size)[rank] for x in both) for both in make_batches(config, NUM_BATCHES)]
    live: dict[str, Any] = {"done": 0}

    def build() -> float:
        live["step"], sent = (_torch if args.contestant == "torch" else _fzero)(args, config, size)
        return sent

    def steps(count: int) -> dict[str, Any]:
        losses, wall, cpu = [], time.perf_counter(), time.process_time()
        for _ in range(count):
            losses.append(float(live["step"](batches[live["done"] % NUM_BATCHES])))
            live["done"] += 1
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "losses": losses}

    return {"build": build, "steps": steps}


def _fzero(args: argparse.Namespace, config: Config, size: int) -> tuple[Step, float]:
    import fzero as fz
    from fzero import optim
    from fzero.program.ops import COLLECTIVES, transfer_bytes

    other = optim.adamw(OTHER_LR, weight_decay=WEIGHT_DECAY)
    step = fz.train_step(make_loss(config), optim.muon(LR, weight_decay=WEIGHT_DECAY, where=of_muon, other=other))
    step = fz.shard_params(step) if size > 1 else step
    step = fz.offload(step, "cpu", "opt_state") if args.contestant == "offloaded" else step
    params, batch = make_init(config)(fz.random.key(0)), tuple(x.chunk(size)[0] for x in make_batches(config, 1)[0])
    program = fz.lower(step, fz.AbstractMesh(data=size), params, batch).program
    matrices = [x for x, _ in program.walk() if x.by == "optimizer" and x.op in COLLECTIVES]
    train = fz.compile(step, fz.make_mesh(device="cpu", data=size), backend=args.backend)
    state = train.init(params)

    def run(batch: Any) -> Any:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"]

    return run, float(sum(transfer_bytes(x, program.values_by_name, program.mesh) for x in matrices))


def _torch(args: argparse.Namespace, config: Config, size: int) -> tuple[Step, float]:
    import fzero as fz

    params, loss_fn = make_init(config)(fz.random.key(0)), make_loss(config)
    leaves = fz.tree.with_paths(params, "params")
    for _, leaf in leaves:
        leaf.requires_grad_()
    muon = torch.optim.Muon([x for path, x in leaves if of_muon(path, x)], lr=LR, weight_decay=WEIGHT_DECAY)
    rest = [x for path, x in leaves if not of_muon(path, x)]
    adamw = torch.optim.AdamW(rest, lr=OTHER_LR, weight_decay=WEIGHT_DECAY, fused=True)

    def run(batch: Any) -> Any:
        loss = loss_fn(params, batch)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return run, 0.0


def contest(args: argparse.Namespace) -> dict[str, Any]:
    found, groups = dict[str, Any](), dict[str, Group]()
    with contextlib.ExitStack() as stack:

        def measured(name: str) -> None:
            answers = groups[name].ask("steps", count=args.steps)
            found[name]["losses"] += [statistics.mean(at) for at in zip(*(a["losses"] for a in answers), strict=True)]
            each = {kind: sum(a[kind] for a in answers) / args.steps for kind in ("cpu_s", "wall_s")}
            found[name]["rounds"].append({**each, "wall_s": each["wall_s"] / len(answers)})

        for name in args.only:
            given = [f"--contestant={name}", *passed_on(args, *MODEL, "backend")]
            groups[name] = stack.enter_context(Group(__file__, 1 if name in ONE else 2, given, timeout=300))
            found[name] = {"losses": [], "rounds": [], "sent": groups[name].ask("build")[0]}
            measured(name)  # compiles
            found[name]["rounds"].clear()
            print(f"{name}: ready", file=sys.stderr, flush=True)
        for number in range(args.rounds):
            for name in random.Random(number).sample(args.only, len(args.only)):
                measured(name)
    for x in found.values():
        x |= {kind: statistics.median(r[kind] for r in x["rounds"]) for kind in ("cpu_s", "wall_s")}
    return found


def compared(found: dict[str, Any]) -> str:
    losses = [x["losses"] for x in found.values()]
    apart = max((max(at) - min(at)) / min(at) for at in zip(*losses, strict=True))
    return f"Losses of {len(losses[0])} steps agree to {apart:.1e} ({LOSS_LIMIT:g}: {verdict(apart, LOSS_LIMIT)})"


def main() -> None:
    args = _arguments()
    if args.worker:
        serve(worker(args))
        return
    found = contest(args)
    rows = [
        (TITLES[n], f"{x['cpu_s']:.3f}", f"{x['wall_s']:.3f}", f"{x['sent'] / 1e6:.2f}", f"{x['losses'][-1]:.6f}")
        for n, x in found.items()
    ]
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    notes = [
        f"A GPT of {config.layers} layers, width {config.width}, sequence {config.seq}, global batch {config.batch}; "
        "fp32, a thread a process.",
        f"CPU seconds a step of all processes: medians of {args.rounds} interleaved rounds of {args.steps} steps.",
        "MB sent: a rank and step, of Muon alone, by plan.",
        compared(found),
    ]
    columns = ("who", "CPU s", "wall s", "MB sent", "last loss")
    data = {"settings": settings(args, "contestant"), "found": found}
    publish(args.name, "Muon over ranks", columns, rows, notes, data, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    model_flags(parser, layers=4, width=256, heads=8, seq=128, batch=8)
    parser.add_argument("--steps", type=int, default=20, help="a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="fzero's")
    parser.add_argument("--contestant", choices=list(TITLES), help=argparse.SUPPRESS)
    script_flags(parser, "muon_peers")
    args = parser.parse_args()
    for name, value in SMALL.items() if args.small else ():
        setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
