"""What tests/elastic/test_run.py has supervisors start: a run that faults strike at planned steps.

    survivor.py OUT STEPS [RANK.LIFE.STEP:FAULT ...]

Faults: `kill` before the step or `after` it, `stop` (SIGSTOP), `raise`, `flip` (a bit of what this rank kept last, and
then `kill`), `node` (its host is lost, with its memory), `gone` (its host's memory is removed), `goner` (and then
`kill`). OUT/log gets a line a step. With SURVIVOR_SENDS in the environment the step sends to another host what it
keeps; with SURVIVOR_SAVES every second state is saved behind the steps, to a
disk on which a rank's file takes half a second; with SURVIVOR_NOWHERE the run has no place for checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fzero as fz
from fzero._utils import procfs
from fzero.checkpoint import saving
from fzero.checkpoint.index import Index
from fzero.elastic import host_directory, memory_slots, recovery_source
from fzero.elastic.run_context import Run


def loss_fn(p: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(torch.tanh(x @ p["w"]) @ p["v"], y)


def init(key: torch.Tensor) -> Any:
    return {"w": fz.random.normal(fz.random.fold_in(key, 0), (16, 33)), "v": fz.random.normal(key, (33, 8))}


STEP = fz.shard_params(fz.train_step(loss_fn, fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-2))))


def batch_at(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = fz.random.normal(fz.random.fold_in(fz.random.key(1), step), (12, 16))
    return x.chunk(size)[rank], x[:, :8].argmax(1).chunk(size)[rank]


def strike(fault: str | None) -> None:
    if fault == "raise":
        raise ValueError("a user's own error")
    if fault == "flip":
        flip(Path(os.environ[host_directory.MEMORY]), int(os.environ["RANK"]))
    if fault == "node":
        for kept in Path(os.environ[host_directory.MEMORY]).glob("of-*"):
            shutil.rmtree(kept)
    if fault in ("gone", "goner"):
        shutil.rmtree(Path(os.environ[host_directory.MEMORY]).parent)
    if fault not in (None, "gone"):
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def held(memory: Path) -> dict[tuple[int, int], Index]:
    """What one host's memory holds: its states by step and number of ranks."""
    states = recovery_source.states_of(memory, [memory_slots.examine(memory).stored], 0)
    return {(step, size): index for (step, size, _), index in states.items()}


def flip(memory: Path, rank: int, leaf: str = "params.w") -> None:
    """Flips a bit of the newest state that a rank has kept, as the memory's cells or a stray write would."""
    (note,) = memory.glob(f"of-*/rank-{rank:05d}.json")
    content = json.loads(note.read_text())
    slots = [note.with_name(f"{note.stem}.{i}.safetensors") for i in range(content["slots"])]
    newest = max(slots, key=lambda p: int.from_bytes(p.read_bytes()[content["sealed"] :][:8], "little"))
    offset = content["leaves"][leaf]["parts"][0]["offset"] + 7
    with newest.open("r+b") as f:
        f.seek(offset)
        was = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([was ^ 16]))


def train(run: Run, out: Path, steps: int, faults: dict[str, str], life: int = 0) -> int:
    """Trains on from where the run is. The path of checkpoints is OUT/saved."""
    step_of_run = fz.redundant(STEP) if "SURVIVOR_SENDS" in os.environ else STEP
    compiled = fz.compile(step_of_run, run.mesh, backend="eager")
    state = run.state(
        compiled, init, fz.random.key(0), path=None if "SURVIVOR_NOWHERE" in os.environ else out / "saved"
    )
    with (out / f"sources-{run.mesh.rank}").open("a") as f:
        f.write(f"{run.source} {int(state.step)}\n")
    for step in run.steps(state, steps):
        strike(faults.get(f"{run.mesh.rank}.{life}.{step}"))
        state, metrics = compiled(state, batch_at(step, **run.data_shard))
        if (fault := faults.get(f"{run.mesh.rank}.{life}.{step}.after")) is not None:
            strike(fault)
        run.commit(state)
        if "SURVIVOR_SAVES" in os.environ and step % 2:
            run.save(state, wait=False)
        if run.mesh.rank == 0:
            with (out / "log").open("a") as f:
                f.write(json.dumps([int(state.step), float(metrics["loss"])]) + "\n")
    return int(state.step)


def slow_disk() -> None:
    write = saving.write_rank_file
    saving.write_rank_file = lambda *args: (time.sleep(0.5), write(*args))[1]


def main() -> None:
    if "SURVIVOR_SAVES" in os.environ:
        slow_disk()
    if (here := os.environ.get("SURVIVOR_HOST")) is not None:  # as if it knew no process of the other host
        procfs.host_id = lambda: (here, "")
    out, steps, faults = Path(sys.argv[1]), int(sys.argv[2]), dict(text.split(":") for text in sys.argv[3:])
    lives = out / f"lives-{os.environ.get('RANK', '0')}"
    with lives.open("a") as f:
        f.write("x")
    life = len(lives.read_text()) - 1
    print("returned", fz.run(lambda run: train(run, out, steps, faults, life), timeout=120))


if __name__ == "__main__":
    main()
