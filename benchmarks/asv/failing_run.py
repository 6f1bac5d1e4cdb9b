"""A run whose rank 1 is killed once: rank 0 writes the seconds from the kill to its next step."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fzero as fz
from fzero import optim

STEPS, FAILS = 8, 4


def main(run: Any) -> None:
    folder = Path(sys.argv[1])
    step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), optim.adamw(1e-3)))
    train = fz.compile(step, run.mesh, backend="eager")
    state = run.state(train, {"w": torch.ones(64, 64)})
    killed = folder / "killed"
    for index in run.steps(state, STEPS):
        if index == FAILS and run.mesh.rank == 1 and not killed.exists():
            killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = train(state, torch.ones(4, 64))
        float(metrics["loss"])
        run.commit(state)
        if run.mesh.rank == 0 and index >= FAILS and not (folder / "seconds").exists():
            (folder / "seconds").write_text(str(time.monotonic() - float(killed.read_text())))


if __name__ == "__main__":
    fz.run(main)
