"""Trains one model by one ds_config.json in DeepSpeed and in fzero, and compares the losses step by step.

    python benchmarks/deepspeed_same.py                 # two ranks over gloo, CPU; writes docs/results/deepspeed_same.*

Needs `pip install 'fzero[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, publish

STEPS, RANKS, ROWS, PARTS = 30, 2, 8, 2
_ADAM = {"type": "Adam", "params": {"lr": 5e-3, "weight_decay": 0.1, "torch_adam": True}}
_BASE = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": PARTS,
    "gradient_clipping": 0.5,
    "optimizer": _ADAM,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_allow_untested_optimizer": True,
}


def _stage(stage: int, **changes: Any) -> dict[str, Any]:
    return {**_BASE, "zero_optimization": {"stage": stage}, **changes}


_L2 = {"type": "Adam", "params": {**_ADAM["params"], "adam_w_mode": False}}
_SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
_FAST = {"type": "SGD", "params": {"lr": 1.0}}  # its gradients are larger than 1
_COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_min_ratio": 0.1}}
_DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_max_lr": 0.1}}
_UNCLIPPED = {key: value for key, value in _BASE.items() if key != "gradient_clipping"}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": _stage(0),
    "stage 1": _stage(1),
    "stage 2": _stage(2),
    "stage 3": _stage(3),
    "stage 2, Adam with L2": _stage(2, optimizer=_L2),
    "stage 1, SGD, WarmupDecayLR": _stage(1, optimizer=_SGD, scheduler=_DECAY),
    "stage 3, WarmupCosineLR": _stage(3, scheduler=_COSINE),
    "stage 2, SGD, gradient_clipping omitted": {**_UNCLIPPED, "zero_optimization": {"stage": 2}, "optimizer": _FAST},
    "stage 2, bf16": _stage(2, bf16={"enabled": True}, communication_data_type="fp32"),
}


class Net(torch.nn.Module):
    """A classifier of 16 numbers, with norms."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.first = torch.nn.Linear(16, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3))
        self.last = torch.nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return self.last(x)


def make(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step, of all ranks and micro-batches: the target is a function of the input."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * PARTS * ROWS, 16, generator=generator)
    return x, x[:, :8].argmax(1)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out.float(), target)


def run_deepspeed(config: dict[str, Any]) -> list[float]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    net = Net()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    dtype, losses = next(net.parameters()).dtype, []
    for step in range(STEPS):
        total = torch.zeros(())
        rank = deepspeed.comm.get_rank()
        for x, y in zip(*(t.chunk(RANKS)[rank].chunk(PARTS) for t in make(step)), strict=True):
            loss = loss_of(engine(x.to(dtype)), y)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / (PARTS * RANKS)
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    return losses


def run_fzero(config: dict[str, Any]) -> list[float]:
    import fzero as fz

    torch.manual_seed(0)
    model = fz.functionalize(Net())
    mesh = fz.make_mesh()
    loss = lambda out, batch: loss_of(out, batch[1])  # noqa: E731
    train = fz.deepspeed.initialize(model=model, config=config, loss=loss, mesh=mesh, report=False, backend="eager")
    state, losses = train.init(model.params), []
    for step in range(STEPS):
        state, metrics = train(state, tuple(t.chunk(RANKS)[mesh.rank] for t in make(step)))
        losses.append(float(metrics["loss"]))
    return losses


def start(library: str, name: str) -> list[float]:
    """The losses of a case, of fresh processes."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "losses.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", "0"]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        done = subprocess.run(
            [*launch, __file__, "--library", library, "--case", name, "--out", str(out)],
            env=env, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{library}, {name}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=["deepspeed", "fzero"], help="what a started process runs")
    parser.add_argument("--case")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="the others as they were")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.library:
        losses = {"deepspeed": run_deepspeed, "fzero": run_fzero}[args.library](CASES[args.case])
        if int(os.environ["RANK"]) == 0:
            args.out.write_text(json.dumps(losses))
        return
    rows, found = [], {}
    before = {} if len(args.only) == len(CASES) else json.loads((RESULTS / "deepspeed_same.json").read_text())
    for name, config in CASES.items():
        known = before.get(name)
        theirs = start("deepspeed", name) if name in args.only else known["deepspeed"]
        ours = start("fzero", name) if name in args.only else known["fzero"]
        off = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(theirs, ours, strict=True))
        limit = 3e-2 if "bf16" in name else 1e-4
        met = "met" if off <= limit else "missed"
        found[name] = {"config": config, "deepspeed": theirs, "fzero": ours}
        rows.append([name, *(f"{x:.5f}" for x in (theirs[0], theirs[-1], ours[-1])), f"{off:.1e}", f"{limit:g}: {met}"])
        print(*rows[-1], flush=True)
    import deepspeed

    publish(
        "deepspeed_same",
        "One configuration, two libraries",
        ["", "first loss", "last, DeepSpeed", "last, fzero", "largest relative difference", "wanted"],
        rows,
        [
            f"{STEPS} steps, {RANKS} ranks over gloo, of each {PARTS} micro-batches of {ROWS} rows; losses are of all.",
            "Unless it says so: fp32, Adam with decoupled decay, WarmupLR, clipped to 0.5.",
            f"DeepSpeed {deepspeed.__version__}.",
        ],
        found,
    )


if __name__ == "__main__":
    main()
