"""A run on GPUs that loses a rank: no_gpu.py starts it, under supervisors, on the device that computes nothing.

Rank 1 kills itself before a step. Collectives that rank 0 then begins do not end until they are aborted, and rank 0
waits for one. Prints how long that took, and how long until all ranks were in the run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmark_modules  # noqa: F401
from model import Config, make_batches, make_init, make_loss
from stub_device import no_values

import fzero as fz
from fzero import optim
from fzero.elastic import restarts

GONE = Path(os.environ["FAKE_GONE"])
STEPS, LOST = 24, 19  # at a step's first 16 calls ranks look at each other


def main(run: Any) -> int:
    config = Config(2, 256, 4, 64, 4, 512)
    step = fz.shard_params(fz.train_step(make_loss(config), optim.adamw(3e-4)))
    train = fz.compile(step, run.mesh, backend="eager")
    state = run.state(train, make_init(config), fz.random.key(0))
    batches = [tuple(x.chunk(2)[run.mesh.rank].contiguous().cuda() for x in b) for b in make_batches(config, 2)]
    if run.source != "init" and run.mesh.rank == 0:
        lost["again"] = time.time() - lost["at"]
    for index in run.steps(state, STEPS):
        if index == LOST and run.source == "init":
            if run.mesh.rank == 1:
                GONE.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while not GONE.exists():
                time.sleep(0.01)
            lost["at"] = time.time()
        try:
            state, metrics = train(state, batches[index % 2])
            float(metrics["loss"])  # the host waits for the device
        finally:
            if "at" in lost and "freed" not in lost:
                lost["freed"] = time.time() - lost["at"]
        run.commit(state)
    return int(state.step)


if __name__ == "__main__":
    no_values.install()
    if os.environ["KEEPS_WAITING"]:
        restarts.freed = lambda mesh: contextlib.nullcontext()
    lost: dict[str, float] = {}
    if os.environ["RANK"] == "1":  # started again
        GONE.unlink(missing_ok=True)
    taken = fz.run(main, device="cuda")
    if os.environ["RANK"] == "0":
        print(json.dumps({"steps": taken, "freed": lost.get("freed"), "again": lost.get("again")}), flush=True)
