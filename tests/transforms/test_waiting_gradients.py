"""Gradients that wait for the norm of all, or for the next micro-batch, wait on the host where that is another memory,
or on disk: the same bits, less of the device's memory, and of the host's."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import test_speculative_updates as test_guess
import torch
from offloads import BOTH, same

import fzero as fz
from fzero import optim
from fzero.compiler.search import Search
from fzero.errors import BudgetError, FzeroValueError, TransformError, VerifyError
from fzero.ir.program import Program
from fzero.ir.verifier import verify
from fzero.optim.loss_scale import LossScale
from fzero.sharding.layout import leaf_of
from fzero.transforms import offload

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
    "all on disk": lambda d: (fz.offload("nvme", (*BOTH, "gradients"), path=d, update_on="host"),),
    "all on disk, streamed": lambda d: (fz.offload("nvme", (*BOTH, "gradients"), path=d, update_on="device"),),
    "gradients on disk": lambda d: (fz.offload("nvme", "gradients", path=[d, d]),),
    "two thirds of them": lambda d: (
        fz.offload("cpu", BOTH, update_on="host"),
        fz.offload("nvme", "gradients", path=d, fraction=0.67),
    ),
}
ON_DISK = {"all on disk": LAYERS, "all on disk, streamed": LAYERS, "gradients on disk": LAYERS, "two thirds of them": 2}
ACCUMULATE: dict[str, Any] = {
    "once": (),
    "loop": (fz.accumulate(4),),
    "layerwise": (fz.accumulate(4, schedule="layerwise"),),
}
PRECISION: dict[str, Any] = {
    "fp32": (),
    "bf16": (fz.mixed_precision("bf16"),),
    "reduced in bf16": (fz.mixed_precision("bf16", reduce="bf16"),),
    # the first step overflows and is left out
    "fp16": (fz.mixed_precision("fp16", loss_scale=LossScale(initial=2.0**14)),),
}
CASES = [
    (
        "once",
        "fp32",
        (
            "host",
            "host, parameters stay",
            "host, streamed",
            "half",
            "all on disk",
            "gradients on disk",
            "two thirds of them",
        ),
    ),
    ("once", "reduced in bf16", ("host", "disk, streamed", "all on disk, streamed")),
    ("once", "fp16", ("host", "disk", "all on disk")),
    ("loop", "bf16", ("host", "disk", "host, streamed", "half")),
    ("loop", "fp32", ("host, parameters stay", "disk, streamed")),
    ("loop", "reduced in bf16", ("disk",)),
    ("layerwise", "bf16", ("disk", "host, streamed", "all on disk", "two thirds of them")),
    ("layerwise", "reduced in bf16", ("host", "disk, streamed", "all on disk")),
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
    moved = {a for op, _ in program.walk() if op.tiers == ("device", "host") and not op.writes for a in op.args}
    return {a for a in moved if a.startswith("d_") and program.values_by_name[a].numel >= 1000}


def on_disk(program: Program) -> set[str]:
    """Leaves that gradients of matrices are written to, each once and read once, with what else its update reads from
    disk."""
    ops = [op for op, _ in program.walk()]
    written = [w for op in ops for w in op.writes if w in program.leaves and program.leaves[w].role == "gradients"]
    read = [a for op in ops if op.tiers == ("disk", "host") for a in op.args if a in written]
    assert sorted(written) == sorted(read)
    return {w for w in written if program.leaves[w].numel >= 1000}


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Gradients wait on the host wherever their update runs, however small they are: as where the device has no room
    for them."""
    known = offload.waiting_on_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SMALL", 0)
        patch.setattr(offload, "waiting_on_host", lambda program, on_device, grads: known(program, on_device, "host"))
        yield


@pytest.fixture
def all_leave() -> Iterator[None]:
    with leaving():
        yield


@pytest.mark.full(keep=["loop, reduced in bf16"])
@pytest.mark.parametrize(("accumulate", "precision", "offloads"), CASES, ids=[f"{a}, {p}" for a, p, _ in CASES])
@pytest.mark.usefixtures("all_leave")
def test_the_same_bits_as_where_nothing_leaves(
    tmp_path: Path, accumulate: str, precision: str, offloads: tuple[str, ...]
) -> None:
    more = (*ACCUMULATE[accumulate], *PRECISION[precision])
    resident, _ = trained(fz.make_mesh(data=1), more)
    for name in offloads:
        found, program = trained(fz.make_mesh(data=1, unified_memory=False), (*more, *OFFLOADS[name](tmp_path)))
        assert same(found, resident), name
        assert len(waiting(program)) == LAYERS, name
        assert len(on_disk(program)) == ON_DISK.get(name, 0), name


@pytest.mark.full
@pytest.mark.usefixtures("all_leave")
def test_on_disk_from_one_memory(tmp_path: Path) -> None:
    """Where host and device are one memory they are written as soon as they are made."""
    resident, _ = trained(fz.make_mesh(data=1), ())
    for name in ("all on disk", "all on disk, streamed", "gradients on disk"):
        found, program = trained(fz.make_mesh(data=1, unified_memory=True), OFFLOADS[name](tmp_path))
        assert same(found, resident), name
        assert len(on_disk(program)) == LAYERS, name
        writes = {op.tiers for op, _ in program.walk() if op.tiers and op.writes and op.writes[0].startswith("extras")}
        assert writes == {("host", "disk")}


@pytest.mark.full
def test_memory_does_not_grow_with_the_layers() -> None:
    """Of host and device: a gradient on disk comes back for what reads it once all are made, and not before, wherever
    that runs and wherever the rest is."""
    apart, lamb = (
        fz.AbstractMesh(data=1, device_type="cuda"),
        optim.chain(optim.clip_by_global_norm(0.1), optim.lamb(1e-2)),
    )
    disk, host = (
        functools.partial(fz.offload, tier=tier, of=BOTH, path=path) for tier, path in (("nvme", "/s"), ("cpu", None))
    )
    for rest, rule in (
        (disk(update_on="host"), optimizer()),
        (host(update_on="device"), optimizer()),
        (disk(update_on="host"), lamb),
    ):
        found = []
        for layers in (6, 12):
            params = [
                {"w": torch.empty(512, 512, device="meta"), "bias": torch.empty(512, device="meta")}
                for _ in range(layers)
            ]
            step = fz.compose(rest, fz.offload("nvme", "gradients", path="/s"), fz.remat("full"))(
                fz.train_step(loss_fn, rule)
            )
            found.append(fz.lower(step, apart, params, torch.empty(8, 512, device="meta"), device="h100").plan)
        more = 6 * 4 * 512 * 512
        for tier in ("peak", "host_peak"):
            peaks, resting = (
                [getattr(p, f"{tier.removesuffix('peak')}{what}_bytes") for p in found] for what in ("peak", "resting")
            )
            assert peaks[1] - resting[1] - (peaks[0] - resting[0]) < 0.2 * more, (rest, tier)


def test_no_room_on_the_host_is_told_with_the_disk() -> None:
    params = [{"w": torch.empty(512, 512, device="meta"), "bias": torch.empty(512, device="meta")} for _ in range(8)]
    for more, fix in (
        ((), "path=DIR)"),
        ((fz.accumulate(2),), "path=DIR), with fz.accumulate(n, schedule='layerwise')"),
    ):
        step = fz.compose(fz.offload("nvme", BOTH, path="/s", update_on="host"), *more)(
            fz.train_step(loss_fn, optimizer())
        )
        with pytest.raises(
            BudgetError, match=re.escape(f"let gradients wait on disk (fz.offload('nvme', 'gradients', {fix})")
        ):
            fz.lower(
                step,
                fz.AbstractMesh(data=1, device_type="cuda"),
                params,
                torch.empty(8, 512, device="meta"),
                device="h100",
                host_budget="8MB",
            )


def test_an_update_that_does_not_wait_leaves_them_where_they_are(tmp_path: Path) -> None:
    """And one that reads little."""
    for optimizer_, width in ((optim.adamw(1e-2), 64), (optimizer(), WIDTH)):
        params = [
            {"w": torch.empty(width, width, device="meta"), "bias": torch.empty(width, device="meta")}
            for _ in range(LAYERS)
        ]
        step = OFFLOADS["all on disk"](tmp_path)[0](fz.train_step(loss_fn, optimizer_))
        found = fz.lower(
            step, fz.AbstractMesh(data=1, unified_memory=False), params, torch.empty(8, width, device="meta")
        )
        assert not on_disk(found.program)


@pytest.mark.full
@pytest.mark.usefixtures("all_leave")
def test_no_checkpoint_has_them_and_no_move_takes_them(tmp_path: Path) -> None:
    mesh = fz.make_mesh(data=1, unified_memory=False)
    step = fz.train_step(loss_fn, optimizer())
    train = fz.compile(OFFLOADS["all on disk"](tmp_path)[0](step), mesh, backend="eager")
    batches = [fz.random.normal(fz.random.key(7 + i), (8, WIDTH)) for i in range(3)]
    state, _ = train(train.init(init), batches[0])
    assert sum(leaf_of(x)[0].role == "gradients" for x in fz.tree.leaves(state.extras)) == 2 * LAYERS  # type: ignore[index]
    fz.checkpoint.save(tmp_path / "run", state)
    assert not [name for name in fz.checkpoint.describe(tmp_path / "run").leaves if "gradients" in name]
    away = fz.move(state, "device")
    assert all(x.is_meta == (leaf_of(x)[0].role == "gradients") for x in fz.tree.leaves(away))  # type: ignore[index]
    state, _ = train(fz.move(away, "home"), batches[1])
    state, _ = train(state, batches[2])
    want = train.gather(state)
    for other in (
        train,
        fz.compile(step, fz.make_mesh(data=1), backend="eager"),
        fz.compile(OFFLOADS["disk"](tmp_path)[0](step), mesh, backend="eager"),
    ):
        state = other.restore(tmp_path / "run")
        for batch in batches[1:]:
            state, _ = other(state, batch)
        assert same(other.gather(state), want)
    with pytest.raises(FzeroValueError, match=r"extras\['gradients'\]\[0\]\['bias'\]: not in the state"):
        train(state, batches[0])


def test_they_are_not_added_up_on_disk(tmp_path: Path) -> None:
    step = fz.compose(fz.accumulate(4), OFFLOADS["gradients on disk"](tmp_path)[0])(fz.train_step(loss_fn, optimizer()))
    with pytest.raises(
        TransformError,
        match=r"(?s)cannot be added up in a loop.*Fix: .*accumulate\(num_micro_batches=4, schedule='layerwise'\)",
    ):
        fz.compile(step, fz.make_mesh(data=1), backend="eager").init(init)


@pytest.mark.usefixtures("all_leave")
def test_a_gradient_that_is_read_before_it_is_written_is_refused(tmp_path: Path) -> None:
    step = OFFLOADS["all on disk"](tmp_path)[0](fz.train_step(loss_fn, optimizer()))
    batch = torch.empty(8, WIDTH, device="meta")
    program = fz.lower(step, fz.AbstractMesh(data=1, unified_memory=False), init, batch).program
    ops = list(program.instructions)
    write = next(op for op in ops if op.tiers == ("host", "disk") and program.leaves[op.writes[0]].role == "gradients")
    (wait,) = (op for op in ops if op.op == "wait" and op.args == (write.out[0].name,))
    (read,) = (op for op in ops if op.tiers == ("disk", "host") and write.writes[0] in op.args)
    assert ops.index(write) < ops.index(wait) < ops.index(read)
    for moved in ([write, wait], [wait]):  # to right behind the read
        left = [op for op in ops if op not in moved]
        at = left.index(read) + 1
        with pytest.raises(VerifyError, match=rf"{re.escape(write.writes[0])} is read before it is written"):
            verify(replace(program, instructions=(*left[:at], *moved, *left[at:])))


@pytest.mark.full
@pytest.mark.usefixtures("all_leave")
def test_guesses_and_their_redos_read_gradients_that_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of guesses that are right and of some that are wrong."""
    monkeypatch.setattr(Search, "best", lambda self, starts: starts[-1])
    want, apart = test_guess.waited(), fz.make_mesh(data=1, unified_memory=False)
    for name, options in (
        ("disk", {}),
        ("disk, streamed", {}),
        ("host", {"host_budget": "1GB"}),
        ("all on disk", {}),
        ("all on disk, streamed", {}),
    ):
        found, _, train = test_guess.run(apart, OFFLOADS[name](tmp_path), **options)
        assert same(found, want), name
        (rollback,) = (op for op in train.program.instructions if op.op == "rollback")
        again = {a for op in rollback.body if op.tiers == ("device", "host") and not op.writes for a in op.args}
        assert len(waiting(train.program)) == 3 and again.isdisjoint(waiting(train.program)), name
        assert len(on_disk(train.program)) == ON_DISK.get(name, 0), name


def on_ranks(path: str) -> list[bool]:
    found, mesh, apart = [], fz.make_mesh(data=2), fz.make_mesh(data=2, unified_memory=False)
    with leaving():
        layerwise = (fz.accumulate(2, schedule="layerwise"), fz.mixed_precision("bf16", reduce="bf16"))
        cases = [("host", (fz.accumulate(2),), fz.shard_params()), ("disk, streamed", layerwise, fz.shard_params())]
        cases += [("all on disk", layerwise, fz.shard_params()), ("gradients on disk", (), fz.shard_opt_state())]
        for name, more, stage in cases:
            resident, _ = trained(mesh, (stage, *more))
            off, program = trained(apart, (stage, *more, *OFFLOADS[name](path)))
            found += [
                same(off, resident),
                len(waiting(program)) == LAYERS,
                len(on_disk(program)) == ON_DISK.get(name, 0),
            ]
    return found


@pytest.mark.full
def test_shards_of_two_ranks_wait_too(run_ranks: Any, tmp_path: Path) -> None:
    assert all(all(found) for found in run_ranks(2, on_ranks, str(tmp_path)))
