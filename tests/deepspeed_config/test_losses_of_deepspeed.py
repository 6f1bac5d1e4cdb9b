"""One module and one ds_config.json in DeepSpeed and in fzero, on two ranks over gloo: losses step by step.

All cases with --exhaustive; they need DeepSpeed, which the extra `bench` brings. `python
tests/deepspeed_config/test_losses_of_deepspeed.py ["stage 3" ...]` writes results/deepspeed_same.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from common import Group, publish, serve

STEPS = 30
RANKS, ROWS, PARTS = 2, 8, 2
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
CONFIGURATIONS: dict[str, dict[str, Any]] = {
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


def network() -> Any:
    """A classifier of 16 numbers, with norms."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width: int = 64):
            super().__init__()
            self.first = nn.Linear(16, width)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
            self.last = nn.Linear(width, 8)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = x + torch.tanh(layer(norm(x)))
            return self.last(x)

    torch.manual_seed(0)
    return Net()


def rows_of(step: int) -> tuple[Any, Any]:
    """The rows of a step, of all ranks and micro-batches: the target is a function of the input."""
    import torch

    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * PARTS * ROWS, 16, generator=generator)
    return x, x[:, :8].argmax(1)


def train(library: str, name: str, _: str) -> list[float]:
    """The losses of all ranks."""
    import torch

    config, net, losses = CONFIGURATIONS[name], network(), []
    loss_of = lambda out, target: torch.nn.functional.cross_entropy(out.float(), target)  # noqa: E731
    if library == "fzero":
        import fzero as fz

        model, mesh = fz.functionalize(net), fz.make_mesh()
        given: Any = {"model": model, "config": config, "loss": lambda out, batch: loss_of(out, batch[1])}
        train = fz.deepspeed.initialize(**given, mesh=mesh, report=False, backend="eager")
        state = train.init(model.params)
        for step in range(STEPS):
            state, metrics = train(state, tuple(t.chunk(RANKS)[mesh.rank] for t in rows_of(step)))
            losses.append(float(metrics["loss"]))
        return losses
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    dtype, rank = next(net.parameters()).dtype, deepspeed.comm.get_rank()
    for step in range(STEPS):
        total = torch.zeros(())
        for x, y in zip(*(t.chunk(RANKS)[rank].chunk(PARTS) for t in rows_of(step)), strict=True):
            loss = loss_of(engine(x.to(dtype)), y)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / (PARTS * RANKS)
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    return losses


def worker(library: str, name: str) -> None:
    """A rank of a fresh process: it trains when it is asked to, and answers with its losses."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
    if os.environ["WORLD_SIZE"] == "1":  # as a script that no launcher starts
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[variable]
    with tempfile.TemporaryDirectory() as folder:
        serve({"train": lambda: train(library, name, folder)})


def losses(library: str, name: str, ranks: int) -> list[float]:
    with Group(__file__, ranks, [library, name]) as group:
        return group.ask("train")[0]


def limit(name: str) -> float:
    """The largest relative difference of a loss. In bf16 roundings differ."""
    return 3e-2 if "bf16" in name else 1e-4


def difference(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(theirs, ours, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_losses_are_those_of_deepspeed(name: str) -> None:
    pytest.importorskip("deepspeed")
    theirs, ours = (losses(library, name, RANKS) for library in ("deepspeed", "fzero"))
    assert len(ours) == STEPS and difference(theirs, ours) <= limit(name), (theirs, ours)


def main(names: Sequence[str]) -> None:
    rows, found = [], {}
    for name in names:
        theirs, ours = (losses(library, name, RANKS) for library in ("deepspeed", "fzero"))
        found[name] = {"config": CONFIGURATIONS[name], "deepspeed": theirs, "fzero": ours}
        numbers = [f"{x:.5f}" for x in (theirs[0], theirs[-1], ours[-1])]
        rows.append([name, *numbers, f"{difference(theirs, ours):.1e}", f"{limit(name):g}"])
        print(*rows[-1], flush=True)
    notes = [
        f"{STEPS} steps, {RANKS} ranks over gloo, of each {PARTS} micro-batches of {ROWS} rows; losses are of all.",
        "Unless it says so: fp32, Adam with decoupled decay, WarmupLR, clipped to 0.5.",
        f"DeepSpeed {metadata.version('deepspeed')}.",
    ]
    columns = ["", "first loss", "last, DeepSpeed", "last, fzero", "largest relative difference", "limit of the test"]
    publish("deepspeed_same", "One configuration, two libraries", columns, rows, notes, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main(sys.argv[1:] or list(CONFIGURATIONS))
