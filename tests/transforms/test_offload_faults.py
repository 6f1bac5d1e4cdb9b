"""Disks that fail while a step runs, and runs that end badly: one error on every rank, no hang, and a checkpoint to go
on from."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
from models import MODELS, OPTIMIZERS
from offloads import BOTH, same

import fzero as fz
from fzero.errors import DivergenceError, TierError

pytestmark = pytest.mark.forks

Call = Callable[..., int]
MODEL = MODELS["mixed"]


def open_files() -> list[str]:
    return [link for link in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{link}")]


def scratch(fd: int | str) -> bool:
    """Whether a file is one of a state; the others are pools that ranks read of each other."""
    target = os.readlink(f"/proc/self/fd/{fd}")
    return target.endswith(" (deleted)") and not target.startswith(("/memfd:", "/dev/shm/"))


def fails(code: int, after: int) -> Callable[[Call], Call]:
    """A system call that works `after` times, then once not."""
    left, lock = [after], threading.Lock()

    def make(real: Call) -> Call:
        def call(fd: int, views: list[memoryview], at: int) -> int:
            with lock:
                left[0] -= scratch(fd)
                bad = left[0] == -1 and scratch(fd)
            if bad:
                raise OSError(code, os.strerror(code))
            return real(fd, views, at)

        return call

    return make


def stops(after: int) -> Callable[[Call], Call]:
    """A file that ends: reads of it give nothing, after `after` of them."""
    left, lock = [after], threading.Lock()

    def make(real: Call) -> Call:
        def call(fd: int, views: list[memoryview], at: int) -> int:
            with lock:
                left[0] -= scratch(fd)
            return real(fd, views, at) if left[0] >= 0 or not scratch(fd) else 0

        return call

    return make


FAULTS: dict[str, tuple[str, Callable[[int], Callable[[Call], Call]], str]] = {
    "a read error": (
        "preadv",
        lambda after: fails(errno.EIO, after),
        f"a read of scratch files failed: {os.strerror(errno.EIO)}",
    ),
    "a full disk": (
        "pwritev",
        lambda after: fails(errno.ENOSPC, after),
        f"a write of scratch files failed: {os.strerror(errno.ENOSPC)}",
    ),
    "a short read": ("preadv", stops, "a read of scratch files failed: it stopped after 0 of "),
}


def compiled(mesh: fz.Mesh, path: str) -> Any:
    step = fz.train_step(MODEL.loss, OPTIMIZERS["adamw"]())
    transforms = (fz.shard_params(), fz.offload("nvme", BOTH, path=path))
    return fz.compile(fz.compose(*transforms)(step), mesh, backend="eager")


def faulty_run(
    path: str, fault: str, rank: int, after: int, mesh_options: dict[str, Any]
) -> tuple[list[str], bool, int]:
    """Trains two steps and saves, fails in the third on one rank, goes on from the checkpoint to the fourth: errors,
    whether all is well, files left."""
    mesh = fz.make_mesh(data=-1, **mesh_options)
    data = [models.part(b, mesh) for b in models.batches(4)]
    train = compiled(mesh, path)
    state = train.init(MODEL.init, fz.random.key(1))
    for batch in data[:2]:
        state, _ = train(state, batch)
    fz.checkpoint.save(f"{path}/saved", state)
    name, make, _ = FAULTS[fault]
    real: Call = getattr(os, name)
    if mesh.rank == rank:
        setattr(os, name, make(after)(real))
    try:
        with pytest.raises(TierError) as caught:
            train(state, data[2])
    finally:
        setattr(os, name, real)
    texts = [str(caught.value)]
    assert (caught.value.__cause__ is not None) == (mesh.rank == rank)
    del state, caught
    gc.collect()
    state = train.restore(f"{path}/saved", MODEL.init)
    left = sum(os.readlink(f"/proc/self/fd/{fd}").startswith(f"{path}/") for fd in open_files())
    for batch in data[2:]:
        state, _ = train(state, batch)
    want = compiled(mesh, path)
    straight = want.init(MODEL.init, fz.random.key(1))
    for batch in data:
        straight, _ = want(straight, batch)
    return texts, same(train.gather(state), want.gather(straight)), left


def check_errors(results: list[Any], fault: str, rank: int, path: Path) -> None:
    texts = {tuple(texts) for texts, _, _ in results}
    assert len(texts) == 1, "the same error on every rank"
    ((text,),) = texts
    lines = text.splitlines()
    assert lines[0] == "fzero.step: a disk failed while the step ran" and len(lines) == 3, text
    assert (
        FAULTS[fault][2] in text
        and str(path) in text
        and lines[-1].startswith("Fix: ")
        and "last checkpoint" in lines[-1]
    )
    assert len(results) == 1 or (f"rank {rank}: " in text and f"rank {1 - rank}: " not in text)
    assert all(equal for _, equal, _ in results), "restored, it goes on as if nothing had been"


@pytest.mark.full(keep=["a full disk-7"])
@pytest.mark.parametrize(("fault", "after"), list(zip(FAULTS, (0, 7, 3), strict=True)))
def test_a_fault_on_one_process(tmp_path: Path, fault: str, after: int) -> None:
    num = len(os.listdir("/proc/self/fd"))
    found = faulty_run(str(tmp_path), fault, 0, after, {})
    check_errors([found], fault, 0, tmp_path)
    assert found[2] == 1, "the files of a state that is let go of make room for the restored one's"
    gc.collect()
    assert [p.name for p in tmp_path.iterdir()] == ["saved"] and len(os.listdir("/proc/self/fd")) <= num


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "rank", "shared"), [("a read error", 1, True), ("a full disk", 0, False), ("a short read", 1, True)]
)
def test_a_fault_on_one_of_two_ranks(run_ranks: Any, tmp_path: Path, fault: str, rank: int, shared: bool) -> None:
    results = run_ranks(
        2, faulty_run, str(tmp_path), fault, rank, 5, {"shared_memory": shared, "timeout": 20}, timeout=60
    )
    check_errors(results, fault, rank, tmp_path)


def both_fail(path: str) -> str:
    mesh = fz.make_mesh(data=-1, timeout=20)
    train = compiled(mesh, path)
    state = train.init(MODEL.init, fz.random.key(1))
    real = os.preadv
    os.preadv = fails(errno.EIO, 0)(real)
    try:
        train(state, models.part(models.batches(1)[0], mesh))
    except TierError as error:
        return str(error)
    finally:
        os.preadv = real
    return ""


def test_ranks_that_fail_together_are_all_named(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(2, both_fail, str(tmp_path), timeout=60)
    assert first == second and "rank 0: " in first and "rank 1: " in first


def killed(path: str, shared: bool) -> None:
    mesh = fz.make_mesh(data=-1, timeout=5, shared_memory=shared)
    train = compiled(mesh, path)
    state = train.init(MODEL.init, fz.random.key(1))
    batch = models.part(models.batches(1)[0], mesh)
    state, _ = train(state, batch)
    if mesh.rank == 1:
        real = os.pwritev

        def last(fd: int, views: list[memoryview], at: int) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return real(fd, views, at)

        os.pwritev = last
    started = time.monotonic()
    with pytest.raises(DivergenceError, match="another rank has left") as caught:
        while True:
            state, _ = train(state, batch)
    assert time.monotonic() - started < 25 and str(caught.value).splitlines()[-1].startswith("Fix: ")


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
def test_a_rank_killed_while_it_writes(run_ranks: Any, tmp_path: Path, shared: bool) -> None:
    """The other does not hang, and nothing is left of the dead rank's files."""
    ranks = run_ranks(2, killed, str(tmp_path), shared, expect_error=True, timeout=60)
    assert [r.type for r in ranks] == [None, "WorkerDied"], ranks
    train = compiled(fz.make_mesh(data=1), str(tmp_path))
    state = train.init(MODEL.init)
    assert not list(tmp_path.iterdir())
    del state


RUN = """
    import os, sys, torch
    sys.path.insert(0, sys.argv[2])
    import models, fzero as fz
    step = fz.train_step(models.mixed_loss, models.OPTIMIZERS["adamw"]())
    step = fz.offload("nvme", ("opt_state", "params"), path=sys.argv[1])(step)
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state = train.init(models.mixed_init)
    print("ready", flush=True)
    sys.stdin.read()
    state, metrics = train(state, models.batches(1)[0])
    print(bool(torch.isfinite(metrics["loss"])))
"""


def run(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(path), str(Path(__file__).parents[1])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_files_of_a_run(tmp_path: Path) -> None:
    """They have no names, and a run that is killed leaves a live one's alone."""
    live, dies = run(tmp_path), run(tmp_path)
    for process in (live, dies):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert not list(tmp_path.iterdir())
    dies.send_signal(signal.SIGKILL)
    dies.communicate()
    out, _ = live.communicate(timeout=120)
    assert live.returncode == 0 and out == "True\n"


def test_a_path_is_checked_before_anything_is_made(tmp_path: Path) -> None:
    mesh = fz.make_mesh(data=1)
    with pytest.raises(fz.errors.FzeroValueError, match="the directory does not exist"):
        compiled(mesh, str(tmp_path / "none")).init(MODEL.init)
    train = compiled(mesh, str(tmp_path))
    fz.checkpoint.save(tmp_path / "saved", train.init(MODEL.init))
    with pytest.raises(fz.errors.FzeroValueError, match="the directory does not exist"):
        compiled(mesh, str(tmp_path / "none")).restore(tmp_path / "saved", MODEL.init)
