"""What test_resize.py and test_changing_hosts.py have supervisors start: a run whose step and memory live on over other
numbers of ranks.

    resizer.py OUT STEPS

OUT/log gets a line a step, OUT/sizes too with its number of ranks and its time, OUT/programs-N the program of N ranks.
It ends before STEPS where OUT/last says so, and rank 0 is killed where there is OUT/rank-0. RESIZER_NAP: seconds after
each step; RESIZER_SHARED: ranks share no memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import survivor
import torch

import fzero as fz
from fzero._utils import procfs
from fzero.elastic.run_context import Run

ROWS = 12


def loss_fn(p: object, batch: tuple[torch.Tensor, torch.Tensor], *, key: torch.Tensor) -> torch.Tensor:
    x, y = batch
    return survivor.loss_fn(p, (fz.random.dropout(key, x, 0.1), y))


def train(run: Run, out: Path, steps: int, path: Path | None = None) -> int:
    """Trains on, two rows at a time on each rank, with sends to the next host where there are several. With a `path`
    the last state is saved there."""
    optimizer = fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(fz.optim.warmup_cosine(1e-2, 3, 40)))
    transforms = [fz.shard_params(), fz.accumulate(run.num_micro_batches(ROWS, max_samples=2))]
    if run.mesh.size > 1:
        transforms.append(fz.redundant())
    step = fz.compose(*transforms)(fz.train_step(loss_fn, optimizer))
    compiled = fz.compile(step, run.mesh, backend="eager")
    state = run.state(compiled, survivor.init, fz.random.key(0), path=path)
    if run.mesh.rank == 0:
        with (out / "sources").open("a") as f:
            f.write(f"{run.source} {int(state.step)} {run.mesh.size}\n")
    for index in run.steps(state, steps):
        if (out / "last").exists() and index == int((out / "last").read_text()):
            break
        if run.mesh.rank == 0 and (out / "rank-0").exists():
            (out / "rank-0").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = compiled(state, survivor.batch_at(index, **run.data_shard))
        if run.mesh.rank == 0:
            (out / f"programs-{run.mesh.size}").write_text(str(compiled.program))
            with (out / "log").open("a") as f:  # before it is kept: what is killed in between does it again
                f.write(json.dumps([int(state.step), float(metrics["loss"])]) + "\n")
            with (out / "sizes").open("a") as f:
                f.write(json.dumps([run.mesh.size, int(state.step), float(metrics["loss"]), time.time()]) + "\n")
        run.commit(state)
        time.sleep(float(os.environ.get("RESIZER_NAP", "0")))
    if path is not None:
        run.save(state)
    return int(state.step)


def main() -> None:
    if (here := os.environ.get("SURVIVOR_HOST")) is not None:  # as if it knew no process of the other hosts
        procfs.host_id = lambda: (here, "")
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    apart: dict[str, Any] = {"shared_memory": False} if "RESIZER_SHARED" in os.environ else {}
    print("returned", fz.run(lambda run: train(run, out, steps), timeout=120, **apart))


if __name__ == "__main__":
    main()
