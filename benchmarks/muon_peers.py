"""Muon over ranks beside one process: `fz.optim.muon` under ZeRO-3 and with offload, torch.optim.Muon, and DeepSpeed's.

    python benchmarks/muon_peers.py                      # one to four processes: about 15 minutes on 2 cores
    python benchmarks/muon_peers.py --steps 3 --small    # to see that it works

One GPT; the same values, batches, Muon of the layers' matrices and AdamW of the rest for all, in fp32; Muon iterates in
bf16, as torch's does. DeepSpeed's has a formula of its own: what counts is its sharded run beside its own on one
process. Without DeepSpeed in the environment it is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from common import publish, serve, settings, verdict
from contest import LOSS_LIMIT, Step, arguments, contest, how, of_rank, row, stepped
from model import Config, make_batches, make_init, make_loss
from torch import nn

LR, OTHER_LR, WEIGHT_DECAY, NUM_BATCHES = 2e-3, 3e-4, 0.01, 16
PROCESSES = {
    "torch": 1, "fzero": 1, "fzero_2": 2, "fzero_3": 3, "fzero_4": 4, "fzero_offloaded": 2, "deepspeed": 1,
    "deepspeed_2": 2, "deepspeed_offloaded": 2,
}  # fmt: skip
TITLES = {
    "torch": "torch.optim.Muon and AdamW",
    "fzero": "fzero",
    "fzero_2": "fzero, shard_params",
    "fzero_3": "fzero, shard_params",
    "fzero_4": "fzero, shard_params",
    "fzero_offloaded": "fzero, shard_params and offload",
    "deepspeed": "DeepSpeed's Muon, ZeRO-1",
    "deepspeed_2": "DeepSpeed's Muon, ZeRO-1",
    "deepspeed_offloaded": "DeepSpeed's Muon, ZeRO-2 and offload",
}
THERE = [name for name in TITLES if not name.startswith("deepspeed") or importlib.util.find_spec("deepspeed")]


def of_muon(path: str, leaf: torch.Tensor) -> bool:
    return "layers" in path and leaf.ndim == 2


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = Config(args.layers, args.width, args.heads, args.seq, args.batch)
    batches = [tuple(x.chunk(size)[rank] for x in both) for both in make_batches(config, NUM_BATCHES)]
    make = _torch if args.contestant == "torch" else _fzero if args.contestant.startswith("fzero") else _deepspeed
    return of_rank(lambda: make(args, config, size), batches)


def _fzero(args: argparse.Namespace, config: Config, size: int) -> Step:
    import fzero as fz
    from fzero import optim

    other = optim.adamw(OTHER_LR, weight_decay=WEIGHT_DECAY)
    step = fz.train_step(make_loss(config), optim.muon(LR, weight_decay=WEIGHT_DECAY, where=of_muon, other=other))
    step = fz.shard_params(step) if size > 1 else step
    step = fz.offload(step, "cpu", "opt_state") if args.contestant == "fzero_offloaded" else step
    train = fz.compile(step, fz.make_mesh(device="cpu", data=size), backend=args.backend)
    return stepped(train, train.init(make_init(config)(fz.random.key(0))))


def _torch(args: argparse.Namespace, config: Config, size: int) -> Step:
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

    return run


class _Module(nn.Module):
    """The tree of parameters as a module."""

    def __init__(self, config: Config):
        super().__init__()
        import fzero as fz

        params: Any = make_init(config)(fz.random.key(0))
        self.loss_fn, self.params = make_loss(config), params
        for number, (path, leaf) in enumerate(fz.tree.with_paths(params, "params")):
            parameter = nn.Parameter(leaf)
            parameter.use_muon = of_muon(path, leaf)  # type: ignore[attr-defined]
            self.register_parameter(f"p{number}", parameter)
        self.params = fz.tree.unflatten(fz.tree.flatten(params)[1], list(self.parameters()))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(self.params, batch)


def _deepspeed(args: argparse.Namespace, config: Config, size: int) -> Step:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    module = _Module(config)
    offloaded = args.contestant == "deepspeed_offloaded"
    rates = {"muon_lr": LR, "adam_lr": OTHER_LR, "lr": LR, "weight_decay": WEIGHT_DECAY}
    given = {
        "train_micro_batch_size_per_gpu": config.batch // size,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Muon", "params": rates},
        "zero_optimization": {
            "stage": 2 if offloaded else 1, **({"offload_optimizer": {"device": "cpu"}} if offloaded else {})
        },
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }  # fmt: skip
    engine: Any = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=given)[0]

    def run(batch: Any) -> Any:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / size

    return run


def apart(found: dict[str, Any], first: str, names: list[str]) -> float:
    """The largest relative difference of the losses of all steps from those of the first."""
    pairs = [(a, b) for name in names for a, b in zip(found[name]["losses"], found[first]["losses"], strict=True)]
    return max(abs(a - b) / b for a, b in pairs)


def main() -> None:
    small = {"layers": 2, "width": 64, "heads": 4, "seq": 16, "rounds": 2}
    model = {"layers": 4, "width": 256, "heads": 8, "seq": 128, "batch": 12}
    args = arguments(__doc__, "muon_peers", TITLES, THERE, small, steps=20, **model)
    if args.worker:
        serve(worker(args))
        return
    found = contest(args, __file__, 1, PROCESSES)
    ours, theirs = ([n for n in found if n.startswith(k)] for k in ("fzero", "deepspeed"))
    notes = [
        f"A GPT of {args.layers} layers, width {args.width}, sequence {args.seq}, global batch {args.batch}; fp32, a "
        "thread a process.",
        how(args),
    ]
    if "torch" in found:
        off, steps = apart(found, "torch", ours), len(found["torch"]["losses"])
        notes.append(f"fzero's losses of {steps} steps are torch's to {off:.1e} ({LOSS_LIMIT:g}: "
                     f"{verdict(off, LOSS_LIMIT)})")  # fmt: skip
    notes += [
        f"{TITLES[n]}, {PROCESSES[n]} processes: losses {apart(found, theirs[0], [n]):.1e} off its own on one process"
        for n in theirs[1:]
    ]
    rows = [row(f"{PROCESSES[name]}: {TITLES[name]}", x) for name, x in found.items()]
    columns = ("processes: who", "CPU s", "wall s", "last loss")
    data = {"settings": settings(args, "contestant"), "found": found}
    publish(args.name, "Muon over ranks", columns, rows, notes, data, args.out)


if __name__ == "__main__":
    main()
