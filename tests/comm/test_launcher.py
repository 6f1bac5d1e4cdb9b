"""Ranks under torchrun, as processes: they start again, die with it, and tell an error once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import restarting_ranks
from forks import children
from scripts import ROOT, environment

import fzero as fz
from fzero.comm import launcher
from fzero.errors import DivergenceError, FzeroError, FzeroValueError, VerifyError

pytestmark = pytest.mark.forks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.exhaustive  # tests/examples/test_train_gpt.py restarts ranks too
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("restarts", [1, 20])
def test_ranks_that_start_again_join_and_train(restarts: int, tmp_path: Path) -> None:
    done, found = restarting_ranks.lives(restarts, tmp_path, 200.0 + 60.0 * restarts)
    assert done.returncode == 0, done.stderr
    assert [len(life) for life in found] == [2] * (restarts + 1), found
    assert [loss for _, loss in found[-1]] == [40.0, 40.0], found
    assert "wait timeout" not in done.stderr, "c10d warns of every wait in vain"


def script(folder: Path, *lines: str) -> Path:
    path = folder / "train.py"
    path.write_text(
        "\n".join(["import os, signal, time, torch, fzero as fz", "RANK = int(os.environ['RANK'])", *lines, ""])
    )
    return path


MODEL = (
    "def loss_fn(p, x):",
    "    return (x @ p['w']).square().mean()",
    "def started():",
    "    mesh = fz.make_mesh(timeout=60)",
    "    train = fz.compile(fz.shard_params(fz.train_step(loss_fn, fz.optim.sgd(0.0))), mesh, backend='eager')",
    "    return mesh, train, train.init({'w': torch.ones(4, 4)})",
)


def run(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *flags, str(path)], capture_output=True, text=True, timeout=120, env=environment()
    )


@pytest.mark.full
@pytest.mark.fresh
def test_an_error_of_every_rank_is_told_once_and_last(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        *MODEL,
        "mesh, train, state = started()",
        "def main():",
        "    train(state, torch.ones(2, 4, device='meta'))",
        "main()",
    )
    done = run(path)
    assert done.returncode == 1 and done.stdout == ""
    lines = [line.strip() for line in done.stderr.splitlines()]
    text = done.stderr
    assert (
        text.count("Fix: ") == 1
        and text.count(f'{path}", line 12, in <module>') == 1
        and text.count(f'{path}", line 11, in main') == 1
    ), text
    assert str(ROOT / "fzero") not in text, "no frames of ours"
    (fix,) = (i for i, line in enumerate(lines) if line.startswith("Fix: "))
    assert set(lines[fix + 1]) == {"="} and not "".join(lines[fix + 2 :]), (
        "nothing but torchrun's last rule stands below it"
    )


def test_only_the_users_lines_stand_above_an_error() -> None:
    @contextlib.contextmanager
    def passing() -> Iterator[None]:
        yield

    with pytest.raises(FzeroError) as caught, passing():
        fz.optim.chain(3)
    text = launcher.error_text(caught.value, caught.value.__traceback__)
    assert "fz.optim.chain(3)" in text and "contextlib" not in text and str(ROOT / "fzero") not in text


def test_ranks_die_with_torchrun(tmp_path: Path) -> None:
    path = script(
        tmp_path, *MODEL, "mesh, train, state = started()", "while True:", "    state, _ = train(state, torch.ones(2, "
                                                                           "4))",
        f"    open(r'{tmp_path}/' + str(RANK), 'w').write(str(int(state.step)))",
    )  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        torchrun = subprocess.Popen(
            [*TORCHRUN, str(path)], stdout=log, stderr=log, env=environment(), start_new_session=True
        )
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + 100
        while not all((tmp_path / str(r)).exists() for r in (0, 1)):
            assert time.monotonic() < deadline and torchrun.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        ranks = children(torchrun.pid)
        assert len(ranks) == 2
        torchrun.send_signal(signal.SIGKILL)
        torchrun.wait()
        deadline = time.monotonic() + 20
        while left := [pid for pid in ranks if alive(pid)]:
            assert time.monotonic() < deadline, f"{left} train on"
            time.sleep(0.05)
    finally:
        for pid in [torchrun.pid, *ranks]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_an_error_after_torchruns_signal_is_told_at_once(tmp_path: Path) -> None:
    """The disk is full when the run is told to stop: torchrun, which ends by a signal, prints no summary."""
    path = script(
        tmp_path,
        "import errno",
        "from pathlib import Path",
        "from fzero.checkpoint import storage as files",
        "FULL, write_all = Path('full'), files.write_all",
        "def full(fd, data):",
        "    if FULL.exists(): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))",
        "    write_all(fd, data)",
        "files.write_all = full",
        "step = fz.shard_params(fz.train_step(lambda p, x: (x @ p['w']).square().mean(), fz.optim.sgd(0.0)))",
        "def main(run):",
        "    train = fz.compile(step, run.mesh, backend='eager')",
        "    state = run.state(train, {'w': torch.ones(4, 4)}, path='saved')",
        "    for index in run.steps(state, 10**6):",
        "        state, _ = train(state, torch.ones(2, 4))",
        "        run.commit(state)",
        "        if index == 2: run.save(state)",
        "        if index == 4 and RANK == 0: FULL.touch()",
        "        if FULL.exists(): time.sleep(0.1)",
        "fz.run(main, timeout=60)",
    )
    command = [*TORCHRUN, "-m", "fzero.run", str(path)]
    with (tmp_path / "log").open("w") as log:
        torchrun = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=tmp_path)
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "full").exists():
            assert time.monotonic() < deadline and torchrun.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        began = time.monotonic()
        torchrun.send_signal(signal.SIGTERM)
        assert torchrun.wait(60) != 0
        took, text = time.monotonic() - began, (tmp_path / "log").read_text()
    finally:
        torchrun.kill()
    told = [line for line in text.splitlines() if line.startswith("[rank") and "cannot save step" in line]
    assert len(told) == text.count("Fix: ") == 1 and "is saved:" not in text, text
    assert "rank 0: OSError: [Errno 28] No space left on device" in text, text
    assert took < 25 and "forcefully exiting" not in text, f"{took} s: nobody waits for torchrun's SIGKILL\n{text}"


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def orphaned() -> None:
    launcher._parent, parent = -1, launcher._parent
    try:
        launcher.die_with_parent()
    finally:
        launcher._parent = parent


def test_a_rank_whose_launcher_died_first_does_not_begin(run_ranks: Any) -> None:
    (found,) = run_ranks(1, orphaned, expect_error=True)
    assert found.type == "DivergenceError" and "torchrun, which started this process, has exited" in found.message


# --- who tells, and how ---


def tells(error: Exception, order: int, env: dict[str, str]) -> str:
    """What this rank prints of an error, rank `order` before the others."""
    mesh, kept = fz.make_mesh(data=2, timeout=20), dict(os.environ)
    os.environ.update(env)
    out, stderr = io.StringIO(), sys.stderr
    sys.stderr, patience, launcher._PATIENCE = out, launcher._PATIENCE, 0.0
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if mesh.rank != order:
            mesh.store.wait(["told"])
        launcher.tell(error)  # type: ignore[arg-type]
        mesh.store.set("told", "")
        mesh.store.wait(["told"])
    finally:
        sys.stderr, launcher._PATIENCE = stderr, patience
        signal.signal(signal.SIGTERM, handler)
        os.environ.clear()
        os.environ.update(kept)
    return out.getvalue()


@pytest.mark.parametrize(
    "error",
    [FzeroValueError("a value\nFix: it"), DivergenceError("a rank has left\nFix: it")],
    ids=["a value", "a rank"],
)
@pytest.mark.parametrize("order", [0, 1])
def test_one_rank_tells(run_ranks: Any, error: Exception, order: int) -> None:
    said = run_ranks(2, tells, error, order, {})
    assert said == [f"{error}\n" if r == order else "" for r in (0, 1)]


def follows(_: None) -> list[str]:
    return [
        tells(
            FzeroValueError("the cause") if os.environ["RANK"] == "1" else DivergenceError("rank 1 failed"), order, {}
        )
        for order in (1, 0)
    ]


def test_what_follows_from_an_error_is_not_told_after_it(run_ranks: Any) -> None:
    assert run_ranks(2, follows, None) == [["", "rank 1 failed\n"], ["the cause\n", "the cause\n"]], (
        "a cause that comes later is told nevertheless"
    )


def test_torchrun_is_given_the_error_only_if_it_ends_with_it(run_ranks: Any, tmp_path: Path) -> None:
    error, file = FzeroValueError("a value"), tmp_path / "error.json"
    env = {
        "TORCHELASTIC_ERROR_FILE": str(file),
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "GROUP_RANK": "0",
    }
    assert run_ranks(2, tells, error, 0, env) == ["a value\n", ""] and not file.exists(), (
        "there is one more life, of whose end torchrun will tell"
    )
    assert (
        run_ranks(2, tells, DivergenceError("left"), 0, env | {"TORCHELASTIC_RESTART_COUNT": "2"}) == ["left\n", ""]
        and not file.exists()
    )
    assert run_ranks(2, tells, error, 0, env | {"TORCHELASTIC_RESTART_COUNT": "2"}) == ["", ""]
    assert json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] == "a value"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What an uncaught error does in a script whose own hook is `before`."""

    def hook(error: BaseException, before: Any) -> None:
        monkeypatch.setattr(sys, "excepthook", before)
        monkeypatch.setattr(launcher, "_installed", None)
        monkeypatch.setattr(launcher, "_store", None)
        launcher.install_excepthook()
        launcher.install_excepthook()
        sys.excepthook(type(error), error, None)

    return hook


def test_a_hook_of_the_users_own_is_called_as_before(hook: Any, capsys: Any) -> None:
    seen: list[Any] = []
    for error in (FzeroValueError("ours"), ValueError("theirs"), VerifyError("a bug of ours")):
        hook(error, lambda *args: seen.append(args))
        assert seen.pop() == (type(error), error, None) and not seen and capsys.readouterr().err == ""


def test_only_our_errors_are_shortened(hook: Any, capsys: Any) -> None:
    hook(FzeroValueError("ours\nFix: it"), sys.__excepthook__)
    assert capsys.readouterr().err == "ours\nFix: it\n"
    for error in (ValueError("theirs"), VerifyError("a bug of ours")):
        hook(error, sys.__excepthook__)
        assert re.match(r"(\w+\.)*\w+Error: (theirs|a bug of ours)\n", capsys.readouterr().err)
