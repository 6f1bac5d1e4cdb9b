"""The example that averages the parameters of replicas: two jobs of two ranks each."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from scripts import EXAMPLES, fresh_modules

import fzero as fz
from fzero import optim

RATE, ROWS, JOBS = 0.5, 4, 2


def batches(step: int) -> torch.Tensor:
    """float32[jobs * ranks * rows, 6]"""
    return torch.randn(JOBS * 2 * ROWS, 6, generator=torch.Generator().manual_seed(step))


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["w"]) + params["b"]).square().mean()


def first() -> dict[str, torch.Tensor]:
    return {"b": torch.full((3,), 0.3), "w": torch.randn(6, 3, generator=torch.Generator().manual_seed(9))}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def begin(ranks: int) -> tuple[int, str]:
    """Makes this rank of the pool one of a smaller job, as if it had a launcher of its own.

    Returns: the number of the job, and where the store of the replicas is.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        for name in ("replicas", *range(world // ranks)):
            shared.set(f"port of {name}", str(free_port()))
    job, rank = divmod(rank, ranks)
    number, size = str(rank), str(ranks)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_PORT=shared.get(f"port of {job}").decode(), TORCHELASTIC_USE_AGENT_STORE="False")
    return job, f"127.0.0.1:{shared.get('port of replicas').decode()}"


def averaged() -> list[dict[str, torch.Tensor]]:
    """Whole parameters before and after an average, twice, and the batches that follow it."""
    job, store = begin(2)
    mesh, found = fz.make_mesh(data=2), []
    with fresh_modules():
        from average_parameters import average, join  # type: ignore[import-not-found]
    group = join(store, job, JOBS, mesh.rank)
    train = fz.compile(fz.shard_params(fz.train_step(loss_fn, optim.sgd(RATE))), mesh, backend="eager")
    state = train.init(first())
    for step in range(4):
        at = (job * mesh.size + mesh.rank) * ROWS
        state, _ = train(state, batches(step)[at : at + ROWS])
        if step % 2 == 1:
            found.append({n: x.clone() for n, x in train.gather(state).params.items()})
            average(state, group)
            found.append({n: x.clone() for n, x in train.gather(state).params.items()})
    train.check_replicas(state)
    return found


def test_averages_are_exact_and_training_goes_on(run_ranks: Any) -> None:
    ranks = run_ranks(4, averaged)
    for at in (0, 2):
        first_job, second_job = ranks[0][at], ranks[2][at]
        assert not torch.equal(first_job["w"], second_job["w"])
        for found in ranks:
            for name, x in found[at + 1].items():
                assert torch.equal(x, (first_job[name] + second_job[name]) / 2)
    states = [fz.tree.map(torch.clone, first()) for _ in range(JOBS)]
    for step in range(4):  # the same by plain autograd
        for job, params in enumerate(states):
            leaves = {n: x.requires_grad_() for n, x in params.items()}
            loss_fn(leaves, batches(step)[job * 2 * ROWS : (job + 1) * 2 * ROWS]).backward()
            states[job] = {n: (x - RATE * x.grad).detach() for n, x in leaves.items()}  # type: ignore[operator]
        if step % 2 == 1:
            states = [{n: (states[0][n] + states[1][n]) / 2 for n in states[0]} for _ in range(JOBS)]
    for name, x in states[0].items():
        torch.testing.assert_close(ranks[0][3][name], x, rtol=1e-5, atol=1e-6)


def script(out: str) -> None:
    job, store = begin(1)
    flags = ["--replica", str(job), "--store", store, "--every", "1", "--steps", "2", "--backend", "eager"]
    argv, sys.argv = sys.argv, ["average_parameters.py", *flags, "--out", out]
    try:
        with fresh_modules():
            runpy.run_path(str(EXAMPLES / "average_parameters.py"), run_name="__main__")
    finally:
        sys.argv = argv


def test_the_script_saves_equal_parameters_and_different_moments(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(2, script, str(tmp_path))
    equal = {}
    for prefix in ("params", "opt_state"):
        roots = [tmp_path / f"replica-{i}" for i in range(2)]
        files = [fz.checkpoint.export(root, tmp_path / f"{prefix}-{root.name}", prefix=prefix) for root in roots]
        one, other = (load_file(file) for (file,) in files)
        equal[prefix] = {name: torch.equal(x, other[name]) for name, x in one.items()}
    assert equal["params"] and all(equal["params"].values()) and not all(equal["opt_state"].values())
