"""What tests/test_resize.py has keepers start: a run whose step and memory live on over other numbers of ranks.

    resizer.py OUT STEPS

OUT/log gets a line a step, OUT/programs-N the program of N ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import survivor
import torch

import fzero as fz
from fzero import turns
from fzero.elastic.loop import Run

ROWS = 12


def loss_fn(p: object, batch: tuple[torch.Tensor, torch.Tensor], *, key: torch.Tensor) -> torch.Tensor:
    x, y = batch
    return survivor.loss_fn(p, (fz.random.dropout(key, x, 0.1), y))


def train(run: Run, out: Path, steps: int) -> int:
    """Trains on, two rows at a time on each rank, with sends to the next host where there are several."""
    optimizer = fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(fz.optim.warmup_cosine(1e-2, 3, 40)))
    transforms = [fz.shard_params(), fz.accumulate(run.micro_batches(ROWS, rows=2))]
    if run.mesh.size > 1:
        transforms.append(fz.redundant())
    step = fz.compose(*transforms)(fz.train_step(loss_fn, optimizer))
    compiled = fz.compile(step, run.mesh, backend="eager")
    state = run.state(compiled, survivor.init, fz.random.key(0))
    if run.mesh.rank == 0:
        with (out / "sources").open("a") as f:
            f.write(f"{run.source} {int(state.step)} {run.mesh.size}\n")
    for index in run.steps(state, steps):
        state, metrics = compiled(state, survivor.batch_at(index, **run.place))
        if run.mesh.rank == 0:
            (out / f"programs-{run.mesh.size}").write_text(str(compiled.program))
            with (out / "log").open("a") as f:  # before it is kept: what is killed in between does it again
                f.write(json.dumps([int(state.step), float(metrics["loss"])]) + "\n")
        run.keep(state)
    return int(state.step)


def main() -> None:
    if (here := os.environ.get("SURVIVOR_HOST")) is not None:  # as if it knew no process of the other hosts
        turns._host = lambda: (here, "")
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    print("returned", fz.run(lambda run: train(run, out, steps), timeout=120))


if __name__ == "__main__":
    main()
