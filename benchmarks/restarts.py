"""Whether processes that torchrun starts again find each other: some are killed, life after life, and those of every
life must join and train a step.

    python benchmarks/restarts.py          # 20 restarts: five to ten minutes on 2 cores

Killed is rank 0 and rank 1 in turn, right after it has joined or after a step: so the ranks of a life leave different
counts behind in the store that torchrun keeps.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import publish, script_flags, settings, verdict


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
    command = [*torchrun, __file__, "--worker", "--folder", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    said = [[folder / f"{life}-{rank}" for rank in (0, 1)] for life in range(restarts + 1)]
    return done, [[tuple(map(float, file.read_text().split())) for file in life if file.exists()] for life in said]  # type: ignore[misc]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--restarts", type=int, default=20)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    script_flags(p, "restarts")
    args = p.parse_args()
    if args.worker:
        worker(args.folder)
        return
    with tempfile.TemporaryDirectory(prefix="fzero-bench-") as folder:
        done, found = lives(args.restarts, Path(folder), 120.0 * (args.restarts + 1))
    joined = sum(len(life) == 2 for life in found[1:])
    longest = max((seconds for life in found for seconds, _ in life), default=float("nan"))
    rows = [
        ("restarts", args.restarts),
        ("of which joined", joined),
        ("longest until joined", f"{longest:.1f} s"),
        ("exit code of torchrun", done.returncode),
    ]
    notes = [
        "Two ranks under `torchrun --standalone --max-restarts`; in each life rank 0 or 1 in turn kills itself (-9), "
        "right after joining or after a step.",
        f"Wanted: all restarts join ({verdict(args.restarts - joined, 0)}), exit code 0 "
        f"({verdict(abs(done.returncode), 0)}).",
    ]
    publish(
        args.name,
        "Restarts under torchrun",
        ("", "2 ranks"),
        rows,
        notes,
        {"settings": settings(args, "folder"), "lives": found},
        args.out,
    )


if __name__ == "__main__":
    main()
