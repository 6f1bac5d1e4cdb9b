"""Gradients that wait for the norm of all, or for the next micro-batch, wait on the host where that is another memory: the same bits, less of the device's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import test_guess
import torch
from offloads import BOTH, same

import fzero as fz
from fzero import optim
from fzero.optim.loss_scale import LossScale
from fzero.program.ir import Program
from fzero.transforms import tiers

WIDTH, LAYERS = 32, 3


@fz.block
def dense(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["bias"])


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = dense(p, x)
    return (x - 1).square().sum(-1).mean()


def init(key: torch.Tensor) -> Any:
    keys = fz.random.split(key, LAYERS)
    return [{"w": fz.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, "bias": torch.zeros(WIDTH)} for k in keys]


def optimizer() -> Any:
    return optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))


OFFLOADS: dict[str, Any] = {
    "host": lambda d: (fz.offload("cpu", BOTH, update_on="host"),),
    "host, parameters stay": lambda d: (fz.offload("cpu", update_on="host"),),
    "host, streamed": lambda d: (fz.offload("cpu", BOTH, update_on="device"),),
    "disk": lambda d: (fz.offload("nvme", BOTH, path=d, update_on="host"),),
    "disk, streamed": lambda d: (fz.offload("nvme", BOTH, path=d, update_on="device"),),
    "half": lambda d: (fz.offload("cpu", BOTH, fraction=0.5),),
}
ACCUMULATE: dict[str, Any] = {"once": (), "loop": (fz.accumulate(4),), "vertical": (fz.accumulate(4, vertical=True),)}
PRECISION: dict[str, Any] = {
    "fp32": (),
    "bf16": (fz.mixed_precision("bf16"),),
    "reduced in bf16": (fz.mixed_precision("bf16", reduce="bf16"),),
    "fp16": (fz.mixed_precision("fp16", loss_scale=LossScale(initial=2.0**14)),),  # the first step overflows and is left out
}
CASES = [
    ("once", "fp32", ("host", "host, parameters stay", "host, streamed", "half")),
    ("once", "reduced in bf16", ("host", "disk, streamed")),
    ("once", "fp16", ("host", "disk")),
    ("loop", "bf16", ("host", "disk", "host, streamed", "half")),
    ("loop", "fp32", ("host, parameters stay", "disk, streamed")),
    ("loop", "reduced in bf16", ("disk",)),
    ("vertical", "bf16", ("disk", "host, streamed")),
    ("vertical", "reduced in bf16", ("host", "disk, streamed")),
]


def trained(mesh: fz.Mesh, transforms: Any) -> Any:
    """Metrics of two steps and the state after them; the program."""
    train = fz.compile(fz.compose(*transforms)(fz.train_step(loss_fn, optimizer())), mesh, backend="eager")
    state, metrics = train.init(init, fz.random.key(3)), []
    for i in range(2):
        batch = fz.random.normal(fz.random.key(7 + i), (8, WIDTH))
        state, found = train(state, models.part(batch, mesh))
        metrics.append([found[name].nan_to_num(-1) for name in sorted(found) if isinstance(found[name], torch.Tensor)])
    return (metrics, train.gather(state)), train.program


def waiting(program: Program) -> set[str]:
    """Gradients of matrices that a copy has taken to the host."""
    moved = {a for line, _ in program.walk() if line.op == "to_host_start" and not line.writes for a in line.args}
    return {a for a in moved if a.startswith("d_") and program.values_by_name[a].numel >= 1000}


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Gradients wait on the host wherever their update runs, however small they are: as where the device has no room for them."""
    known = tiers.waiting_on_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "SMALL", 0)
        patch.setattr(tiers, "waiting_on_host", lambda program, on_device, grads: known(program, on_device, "host"))
        yield


@pytest.fixture
def all_leave() -> Iterator[None]:
    with leaving():
        yield


@pytest.mark.parametrize(("accumulate", "precision", "offloads"), CASES, ids=[f"{a}, {p}" for a, p, _ in CASES])
@pytest.mark.usefixtures("all_leave")
def test_the_same_bits_as_where_nothing_leaves(tmp_path: Path, accumulate: str, precision: str, offloads: tuple[str, ...]) -> None:
    more = (*ACCUMULATE[accumulate], *PRECISION[precision])
    resident, _ = trained(fz.make_mesh(data=1), more)
    for name in offloads:
        found, program = trained(fz.make_mesh(data=1, unified_memory=False), (*more, *OFFLOADS[name](tmp_path)))
        assert same(found, resident), name
        assert len(waiting(program)) == LAYERS, name


@pytest.mark.usefixtures("all_leave")
def test_guesses_and_their_redos_read_gradients_that_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of guesses that are right and of some that are wrong."""
    monkeypatch.setattr(sys.modules["fzero.lowering"], "fastest", lambda build, choices, budget: choices[-1])
    want, apart = test_guess.waited(), fz.make_mesh(data=1, unified_memory=False)
    for name, options in (("disk", {}), ("disk, streamed", {}), ("host", {"host_budget": "1GB"})):
        found, _, train = test_guess.run(apart, OFFLOADS[name](tmp_path), **options)
        assert same(found, want), name
        (redo,) = (line for line in train.program.lines if line.op == "redo")
        again = {a for line in redo.body if line.op == "to_host_start" and not line.writes for a in line.args}
        assert len(waiting(train.program)) == 3 and again.isdisjoint(waiting(train.program)), name


def on_ranks(path: str) -> list[bool]:
    found, mesh, apart = [], fz.make_mesh(data=2), fz.make_mesh(data=2, unified_memory=False)
    with leaving():
        for name, more in (("host", (fz.accumulate(2),)), ("disk, streamed", (fz.accumulate(2, vertical=True), fz.mixed_precision("bf16", reduce="bf16")))):
            resident, _ = trained(mesh, (fz.shard_params(), *more))
            off, program = trained(apart, (fz.shard_params(), *more, *OFFLOADS[name](path)))
            found += [same(off, resident), len(waiting(program)) == LAYERS]
    return found


def test_shards_of_two_ranks_wait_too(run_ranks: Any, tmp_path: Path) -> None:
    assert all(all(found) for found in run_ranks(2, on_ranks, str(tmp_path)))
