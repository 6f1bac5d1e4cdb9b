"""Checkpoints that are written behind the steps: what they hold, what they fail with, and who waits for them."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import fzero as fz
from fzero import checkpoint
from fzero.checkpoint import async_save, directory, saving
from fzero.checkpoint.index import read_index as index_of
from fzero.comm.collective_sequence import leave_all
from fzero.errors import CheckpointError
from fzero.sharding.layout import Layout, Leaf

pytestmark = pytest.mark.forks

ROOT = Path(__file__).parents[2]


class State(NamedTuple):
    step: Any
    params: Any


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    async_save._finish_and_let_go()


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves write nothing until it is set."""
    go = threading.Event()
    write = saving.write_rank_file

    def waits(*args: Any) -> Any:
        assert go.wait(30)
        return write(*args)

    monkeypatch.setattr(saving, "write_rank_file", waits)
    return go


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w"]).square().mean() + params["tied"].sum() * 1e-3


def started(mesh: Any, *transforms: Any) -> tuple[Any, Any, torch.Tensor]:
    step = fz.compose(*transforms)(fz.train_step(loss_fn, fz.optim.adamw(1e-2)))
    train = fz.compile(step, mesh, backend="eager")
    w = torch.linspace(-1, 1, 35).reshape(7, 5)
    x = torch.arange(28.0).reshape(4, 7).chunk(mesh.size)[mesh.rank]
    return train, train.init({"w": w, "tied": torch.ones(3)}), x


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(fz.tree.leaves(a), fz.tree.leaves(b), strict=True))


def test_it_holds_the_state_as_it_was_when_save_was_called(tmp_path: Path, held_back: threading.Event) -> None:
    train, state, x = started(fz.make_mesh(data=1, device="cpu"))
    state, _ = train(state, x)
    then = fz.tree.map(torch.clone, (state.params, state.opt_state))
    found = checkpoint.save(tmp_path, state, meta={"a": 1}, wait=False)
    state, _ = train(state, x)
    assert not same(then[0], state.params)
    assert not found.done and not list(tmp_path.glob("step-*"))
    assert "under way" in repr(found)
    held_back.set()
    assert found.wait() == tmp_path / "step-00000001" == found.wait()
    assert found.done and checkpoint.verify(tmp_path).meta == {"a": 1}
    back = train.restore(tmp_path)
    assert same((back.params, back.opt_state), then)


def test_the_next_save_waits_for_it_and_memory_is_used_again(tmp_path: Path, held_back: threading.Event) -> None:
    state = State(1, {"w": torch.arange(6.0)[::2], "b": torch.tensor(2.0), "n": torch.empty(0)})
    first = checkpoint.save(tmp_path, state, wait=False)
    threading.Timer(0.2, held_back.set).start()
    memory = async_save._memory
    assert memory is not None and memory.untyped_storage().nbytes() == 128  # two tensors of a line each
    assert checkpoint.save(tmp_path, state._replace(step=2)).name == "step-00000002"
    assert first.done
    checkpoint.save(tmp_path, state._replace(step=3), wait=False).wait()
    assert async_save._memory is memory
    for step in (1, 2, 3):
        path = tmp_path / f"step-{step:08d}"
        leaf = Leaf("w", "params", (3,), Layout(torch.float32))
        found = checkpoint.read(path, {"params.w": leaf}, fz.make_mesh(data=1, device="cpu"))["params.w"]
        assert found.tolist() == [0.0, 2.0, 4.0]


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write_rank_file", fails)


def test_what_fails_is_logged_at_once_and_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = State(4, {"w": torch.ones(3)})
    checkpoint.save(tmp_path, state)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "fzero"):
        no_room(patch)
        found = checkpoint.save(tmp_path, state._replace(step=5), wait=False)
        found._ended.wait()
        assert "the checkpoint of step 5 was not saved" in caplog.text
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left"):
                found.wait()
        checkpoint.save(tmp_path, state._replace(step=6), wait=False)
        with pytest.raises(CheckpointError, match="No space left"):  # nobody has asked
            checkpoint.save(tmp_path, state._replace(step=7))
    assert checkpoint.save(tmp_path, state._replace(step=8)).name == "step-00000008"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_arguments_are_looked_at_before_it_returns(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="wait=0: must be True or False"):
        checkpoint.save(tmp_path, State(1, {"w": torch.ones(1)}), wait=0)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="keep=0"):
        checkpoint.save(tmp_path, State(1, {"w": torch.ones(1)}), wait=False, keep=0)
    with pytest.raises(CheckpointError, match=r"state\.step"):
        checkpoint.save(tmp_path, State(None, {"w": torch.ones(1)}), wait=False)
    (tmp_path / "disk").mkdir()
    train, state, _ = started(fz.make_mesh(data=1, device="cpu"), fz.offload("nvme", path=tmp_path / "disk"))
    with pytest.raises(CheckpointError, match=r"tensors are stored on disk.*wait=True"):
        checkpoint.save(tmp_path / "out", state, wait=False)
    assert checkpoint.find(tmp_path / "out") is None
    assert checkpoint.save(tmp_path / "out", state).name == "step-00000000"
    assert int(train.restore(tmp_path / "out").step) == 0


def test_ctrl_c_while_one_waits_leaves_it_under_way(tmp_path: Path, held_back: threading.Event) -> None:
    """`Thread.join` that is interrupted takes the thread for ended."""
    found = checkpoint.save(tmp_path, State(1, {"w": torch.ones(3)}), wait=False)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            found.wait()
    finally:
        signal.signal(signal.SIGINT, heard)
    assert not found.done
    threading.Timer(0.1, held_back.set).start()
    assert checkpoint.latest(tmp_path) == found.wait()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_meanwhile_says_whose_the_save_is(tmp_path: Path, held_back: threading.Event) -> None:
    state = State(1, {"w": torch.arange(3.0)})
    found = checkpoint.save(tmp_path, state, wait=False)

    def child() -> None:
        with pytest.raises(CheckpointError, match="another process saves step 1, and this one was forked"):
            found.wait()
        held_back.set()  # its own
        assert checkpoint.save(tmp_path / "child", state, wait=False).wait().name == "step-00000001"
        assert checkpoint.find(tmp_path / "child") == checkpoint.latest(tmp_path / "child")
        leave_all()

    if not (number := os.fork()):
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(number, 0)[1] == 0
    assert not found.done
    held_back.set()
    assert found.wait() == checkpoint.verify(tmp_path).directory


def test_memory_is_on_the_host_and_for_anyone(tmp_path: Path) -> None:
    state = State(1, {"w": torch.arange(3.0)})
    with torch.device("meta"), torch.inference_mode():
        checkpoint.save(tmp_path, state, wait=False).wait()
    checkpoint.save(tmp_path, state._replace(step=2), wait=False).wait()
    for tier in ("memory", "disk"):
        (tmp_path / tier / "scratch").mkdir(parents=True)
        places = (
            [fz.offload("nvme", ("params", "opt_state"), path=tmp_path / tier / "scratch")] if tier == "disk" else []
        )
        train, state, _ = started(fz.make_mesh(data=1, device="cpu"), *places)
        with torch.device("meta"):
            checkpoint.save(tmp_path / tier, state)
            back = train.restore(tmp_path / tier)
            checkpoint.export(tmp_path / tier, tmp_path / tier / "export")
        assert same(train.gather(back), train.gather(state))
        params = train.gather(state).params
        whole = dict(zip(fz.tree.names(params), fz.tree.leaves(params), strict=True))
        assert same(load_file(tmp_path / tier / "export" / "model.safetensors"), whole)


def test_who_reads_waits_for_the_save_that_deletes_older_ones(tmp_path: Path, held_back: threading.Event) -> None:
    train, state, x = started(fz.make_mesh(data=1, device="cpu"))
    held_back.set()
    old = checkpoint.save(tmp_path, state)
    state, _ = train(state, x)
    readers: tuple[Any, ...] = (checkpoint.find, checkpoint.latest, lambda p: checkpoint.verify(p).directory)
    for reader in (*readers, train.restore):
        held_back.clear()
        checkpoint.save(tmp_path, state, keep=1, wait=False)
        threading.Timer(0.1, held_back.set).start()
        got = reader(tmp_path)
        assert got == tmp_path / "step-00000001" or int(got.step) == 1
    assert not old.exists()


def test_a_checkpoint_that_goes_while_it_is_read_is_said_to_have_gone(tmp_path: Path) -> None:
    """Another process deletes what it does not commit, or replaces it."""
    state = State(1, {"w": torch.arange(3.0)})
    path = checkpoint.save(tmp_path, state)
    leaf = Leaf("w", "params", (3,), Layout(torch.float32))
    mesh = fz.make_mesh(data=1, device="cpu")
    index = checkpoint.describe(tmp_path)
    checkpoint.save(tmp_path, state._replace(params={"w": torch.arange(1.0, 4.0)}))
    with pytest.raises(CheckpointError, match="was deleted or replaced while it was read"):
        checkpoint.read(index, {"params.w": leaf}, mesh)
    index = checkpoint.describe(tmp_path)
    checkpoint.save(tmp_path, state._replace(step=2), keep=1)
    with pytest.raises(CheckpointError, match="was deleted or replaced while it was read"):
        checkpoint.read(index, {"params.w": leaf}, mesh)
    with pytest.raises(
        CheckpointError, match=r"it does not exist\nFix: read another"
    ):  # between finding and reading it
        index_of(path)


def test_latest_is_looked_for_again_where_a_save_was_at_its_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(1, {"w": torch.ones(3)})
    checkpoint.save(tmp_path, state)
    look, saves, saving = directory._pointer, iter(range(2, 4)), False

    def and_then(root: Path) -> str | None:
        nonlocal saving
        name = look(root)
        if not saving:  # a save looks, too
            saving = True
            for step in itertools.islice(saves, 1):
                checkpoint.save(tmp_path, state._replace(step=step), keep=1)
            saving = False
        return name

    monkeypatch.setattr(directory, "_pointer", and_then)
    assert checkpoint.latest(tmp_path).name == "step-00000003"


def test_threads_that_save_wait_for_each_other(tmp_path: Path, held_back: threading.Event) -> None:
    """One that begins clears what a save left that is not at its end."""
    held_back.set()
    savings: list[Any] = []

    def act(first: int) -> None:
        for step in range(first, first + 8):
            state = State(step, {"w": torch.full((1000,), float(step))})
            savings.append(checkpoint.save(tmp_path, state, wait=step % 3 == 0))

    threads = [threading.Thread(target=act, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(savings) == 32
    for found in savings:
        path = found if isinstance(found, Path) else found.wait()
        checkpoint.verify(path)


def on_two_ranks(root: Path) -> None:
    mesh = fz.make_mesh(data=2, device="cpu", timeout=60)
    train, state, x = started(mesh, fz.shard_params())
    state, _ = train(state, x)
    then = train.gather(state)
    found = checkpoint.save(root, state, wait=False)
    for _ in range(3):
        state, _ = train(state, x)
    assert found.wait().name == "step-00000001"
    assert same(train.gather(train.restore(root)).params, then.params)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            no_room(patch)
        found = checkpoint.save(root, state, wait=False)
        state, _ = train(state, x)
        with pytest.raises(CheckpointError, match=r"rank 1: OSError"):
            found.wait()
        found = checkpoint.save(root, state, wait=False)
        if mesh.rank == 0:
            with pytest.raises(CheckpointError, match=r"cannot save step 5 .*\n  rank 1: OSError"):
                found.wait()
        # rank 1 has not asked: the next save tells it, and the others that it did
        with pytest.raises(CheckpointError, match=r"rank 1: .*cannot save step 5 .*\n.*rank 1: OSError"):
            checkpoint.save(root, state)
    assert checkpoint.latest(root).name == "step-00000001"
    drifted = State(9, {"w": torch.full((3,), float(mesh.rank))})
    with pytest.raises(CheckpointError, match="different values"):
        checkpoint.save(root, drifted, wait=False).wait()
    with pytest.raises(CheckpointError, match="differs from that of rank 0"):
        checkpoint.save(root, State(9 + mesh.rank, {"w": torch.ones(3)}), wait=False)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            patch.setattr(async_save, "_copied", lambda tensors: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(CheckpointError, match="rank 1: MemoryError"):
            checkpoint.save(root, state, wait=False)
    checkpoint.save(root, state, wait=False)
    fz.close_mesh()  # waits
    if mesh.rank == 0:
        assert checkpoint.verify(root).step == 5


def test_on_two_ranks(tmp_path: Path, run_ranks: Any) -> None:
    run_ranks(2, on_two_ranks, tmp_path)


ENDS = """
    import sys
    import torch
    import fzero as fz
    from typing import NamedTuple

    class State(NamedTuple):
        step: int
        params: dict

    mesh = fz.make_mesh(device="cpu", timeout=60)
    fz.checkpoint.save(sys.argv[1], State(3, {"w": torch.arange(4e6)}), wait=False)
    print("went on", mesh.rank, flush=True)
    if "dies" in sys.argv and mesh.rank == 1:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(text: str, *args: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """A script on ranks under torchrun."""
    path = Path(args[0]) / "script.py"
    path.write_text(textwrap.dedent(text))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *launcher, str(path), *args], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.full
@pytest.mark.fresh
def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    done = run(ENDS, str(tmp_path), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 2
    assert checkpoint.verify(tmp_path).step == 3


LEFT = """
    import os, signal, sys, time
    import torch
    import fzero as fz
    from fzero.checkpoint import saving
    from typing import NamedTuple

    class State(NamedTuple):
        step: int
        params: dict

    mesh = fz.make_mesh(device="cpu", timeout=60)
    mesh.collective_sequence
    state = State(3, {"w": torch.arange(8.0)})
    fz.checkpoint.save(sys.argv[1], state)
    write = saving.write_rank_file
    def dies(*args):
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)
    saving.write_rank_file = dies
    try:
        fz.checkpoint.save(sys.argv[1], state._replace(step=4), wait=False).wait()
    except fz.errors.CheckpointError as error:
        print(error, flush=True)
"""


def test_a_rank_that_dies_while_it_writes_is_named(tmp_path: Path) -> None:
    """Ranks without torchrun, which would end the other before it could tell."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(LEFT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), str(tmp_path / "out")],
            env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    told = ranks[0].communicate(timeout=100)[0]
    ranks[1].communicate(timeout=100)
    assert ranks[1].returncode == -signal.SIGKILL
    assert "rank 1 has left" in told, told
    assert checkpoint.verify(tmp_path / "out").step == 3


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
