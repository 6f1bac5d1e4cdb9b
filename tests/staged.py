"""What tests/elastic/test_lost_stages.py has supervisors start: a run of a pipeline, on as many ranks as there are.

    staged.py OUT STEPS [RANK.LIFE.STEP:N ...]

A rank is killed at its N-th hand, take or reduction of a step. OUT/log gets a line a step; OUT/sources-R what rank R
goes on from, and its mesh. STAGED_ALONE: no state is sent, every other one is saved. STAGED_NAP: seconds after each
step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fzero as fz
from fzero._utils import procfs
from fzero.comm.transport import transport
from fzero.elastic.run_context import Run

ROWS, WIDTH = 48, 16
AXES: Any = {"data": -1, "pipe": (2, 1)}


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    for p in params["layers"]:
        x = layer(p, x)
    return torch.nn.functional.cross_entropy(x @ params["head"], y)


def init(key: torch.Tensor) -> Any:
    draw = lambda i, *shape: fz.random.normal(fz.random.fold_in(key, i), shape)  # noqa: E731
    layers = [{"w": draw(i, WIDTH, WIDTH), "b": draw(9 + i, WIDTH)} for i in range(4)]
    return {"layers": layers, "head": draw(20, WIDTH, 8)}


def batch_at(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = fz.random.normal(fz.random.fold_in(fz.random.key(1), step), (ROWS, WIDTH))
    return x.chunk(size)[rank], x[:, :8].argmax(1).chunk(size)[rank]


def step_on(mesh: fz.Mesh) -> Any:
    alone = "STAGED_ALONE" in os.environ
    optimizer = fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-2))
    transforms = [fz.shard_params(), fz.accumulate(4, schedule="layerwise"), fz.pipeline()]
    transforms += [fz.redundant()] if not alone and mesh.axes["data"] > 1 else []
    return fz.compose(*transforms)(fz.train_step(loss_fn, optimizer))


def killed_at(mesh: fz.Mesh) -> list[int]:
    """A number that is set before a step: the process is killed at so many transfers from there."""
    left, carrier = [0], transport(mesh)

    def counted(start: Any) -> Any:
        def wrapped(*args: Any, **how: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return start(*args, **how)

        return wrapped

    for name in ("send_start", "recv_start", "reduce_scatter_start"):
        setattr(carrier, name, counted(getattr(carrier, name)))
    return left


def train(run: Run, out: Path, steps: int, faults: dict[str, str] | None = None, life: int = 0) -> int:
    mesh, alone = run.mesh, "STAGED_ALONE" in os.environ
    compiled = fz.compile(
        step_on(mesh), mesh, backend="eager", batch=batch_at(0, mesh.index("data"), mesh.axes["data"])
    )
    state = run.state(compiled, init, fz.random.key(0), path=out / "saved" if alone else None)
    with (out / f"sources-{mesh.rank}").open("a") as f:
        f.write(f"{run.source} {int(state.step)} {mesh}\n")
    left = killed_at(mesh) if faults else [0]
    for index in run.steps(state, steps):
        left[0] = int((faults or {}).get(f"{mesh.rank}.{life}.{index}", "0"))
        state, metrics = compiled(state, batch_at(index, **run.data_shard))
        run.commit(state)
        if mesh.rank == 0:
            with (out / "log").open("a") as f:
                f.write(json.dumps([int(state.step), float(metrics["loss"]), float(metrics["grad_norm"])]) + "\n")
        if alone and index % 2:
            run.save(state)
        time.sleep(float(os.environ.get("STAGED_NAP", "0")))
    return int(state.step)


def main() -> None:
    if (here := os.environ.get("SURVIVOR_HOST")) is not None:  # as if it knew no process of the other hosts
        procfs.host_id = lambda: (here, "")
    out, steps, faults = Path(sys.argv[1]), int(sys.argv[2]), dict(text.split(":") for text in sys.argv[3:])
    lives = out / f"lives-{os.environ.get('RANK', '0')}"
    with lives.open("a") as f:
        f.write("x")
    life = len(lives.read_text()) - 1
    apart: dict[str, Any] = {"shared_memory": False} if "SURVIVOR_HOST" in os.environ else {}
    print(
        "returned",
        fz.run(lambda run: train(run, out, steps, faults, life), timeout=120, **AXES, **apart),
    )


if __name__ == "__main__":
    main()
