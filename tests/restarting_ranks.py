"""Ranks under torchrun that kill themselves, life after life; the ranks of every life must join and train a step.

Rank 0 and rank 1 are killed in turn, right after joining or after a step, so that the ranks of a life leave different
counts in the store that torchrun keeps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def worker(folder: Path) -> None:
    """One rank of one life: it says when it has joined and what loss its step had; then one rank of it dies and the
    others wait for torchrun."""
    import torch

    import fzero as fz

    rank, life, lives = (
        int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    )
    dies, early = life < lives and life % 2 == rank, life % 4 >= 2
    started = time.monotonic()
    mesh = fz.make_mesh(device="cpu", timeout=120)
    joined = time.monotonic() - started
    said, other = folder / f"{life}-{rank}", folder / f"{life}-{1 - rank}"
    said.write_text(f"{joined} nan")
    if dies and early:
        die_after(other)
    step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1)))
    train = fz.compile(step, mesh, backend="eager")
    try:
        _, metrics = train(train.init({"w": torch.ones(4, 4)}), torch.ones(2, 4) * (1 + rank))
        said.write_text(f"{joined} {float(metrics['loss'])}")
    except fz.errors.DivergenceError:  # the other rank died early
        assert life < lives and early
    if dies:
        die_after(other)
    if life < lives:
        time.sleep(300)
    fz.close_mesh()


def die_after(other: Path) -> None:
    """Kills this process, once the other rank has joined too."""
    while not other.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def lives(
    restarts: int, folder: Path, timeout: float
) -> tuple[subprocess.CompletedProcess[str], list[list[tuple[float, float]]]]:
    """How torchrun ended, and of every life what its ranks said: seconds to join, and a loss."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        f"--max-restarts={restarts}",
    ]
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    env = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [*torchrun, __file__, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    said = [[folder / f"{life}-{rank}" for rank in (0, 1)] for life in range(restarts + 1)]
    return done, [[tuple(map(float, file.read_text().split())) for file in life if file.exists()] for life in said]  # type: ignore[misc]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
