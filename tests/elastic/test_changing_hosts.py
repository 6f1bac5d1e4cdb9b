"""Runs on hosts that come and go, under stock torchrun: each host is a launcher of its own on this machine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resizer
import torch
from launchers import Launchers, launchers
from scripts import ROOT, environment
from test_run import ended, supervisors

import fzero as fz
from fzero.elastic import node_heartbeat

pytestmark = pytest.mark.forks

LIMIT = 240.0  # seconds from one number of ranks to another on a loaded machine
NAP = "0.1"  # seconds between two steps: time for all ranks to see OUT/last
AHEAD = 30  # steps


def sizes(out: Path) -> list[tuple[int, int, float, float]]:
    """Of each step that was done: the number of ranks, the state's step, the loss, the time."""
    path = out / "sizes"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def until(started: Launchers, what: str, holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not in {LIMIT:g} s\n{started.text()}"
        time.sleep(0.05)


def segments(out: Path) -> list[list[tuple[int, int, float, float]]]:
    """The steps of `sizes`, apart by numbers of ranks."""
    return [list(steps) for _, steps in itertools.groupby(sizes(out), lambda step: step[0])]


def calmly(out: str, steps: int) -> int:
    """Goes on to a step from the checkpoint that another number of ranks has left."""
    Path(out).mkdir(exist_ok=True)
    train: Callable[[Any], int] = lambda run: resizer.train(run, Path(out), steps, Path(out) / "saved")  # noqa: E731
    return fz.run(train, shared_memory=False)


@pytest.mark.full
def test_hosts_come_and_one_is_lost_and_another_comes(run_ranks: Any, tmp_path: Path) -> None:
    """From one rank to three, to two as a launcher is killed with its rank, and back to three: from memory alone, at
    most two steps done again, each loss to the bit that of a calm run on these numbers of ranks. Then rank 0, beside
    whose supervisor the store lies, is killed: its supervisor alone starts it again. The run ends by itself."""
    out, calm = tmp_path / "hosts", tmp_path / "calm"
    out.mkdir()
    script = [str(ROOT / "tests" / "resizer.py"), str(out), "100000"]
    conf, flags = "last_call_timeout=3", ("--heartbeat-timeout=10", "--hang-timeout=120")
    if os.environ.get("FZERO_TEST_DEFAULT_TIMES"):  # tests/chaos.py --checks
        conf, flags = "", ()
    env = {"RESIZER_NAP": NAP, "RESIZER_SHARED": ""}
    with launchers(out, "1:3", script, conf, env) as started:

        def on(ranks: int, more: int = 3) -> None:
            since = len(sizes(out))
            there: Callable[[], bool] = lambda: [s[0] for s in sizes(out)[since:]].count(ranks) >= more  # noqa: E731
            until(started, f"{more} steps on {ranks} ranks", there)

        started.start(flags)
        on(1)
        started.start(flags)
        lost = started.start(flags)
        on(3)
        started.lose(lost)
        on(2)
        started.start(flags)
        on(3)
        (out / "rank-0").write_text("")
        until(started, "rank 0 is killed", lambda: not (out / "rank-0").exists())
        on(3)
        (out / "last").write_text(str(sizes(out)[-1][1] + AHEAD))
        until(started, "the end", lambda: all(x.poll() is not None for x in started.all))
        text = started.text()
        assert [x.returncode for i, x in enumerate(started.all) if i != lost] == [0, 0, 0], text
        assert "(--heartbeat-timeout); torchrun restarts the ranks on the remaining hosts" in text, text
        assert "rank 0 died of SIGKILL" in text and "the store is gone" not in text, text
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in text, "it is set"
    done = segments(out)
    assert [steps[0][0] for steps in done] == [1, 3, 2, 3]
    from_memory = [line.split()[0] for line in (out / "sources").read_text().splitlines()]
    # On a loaded machine a heartbeat may come too late, and the ranks are restarted once more: from memory, too.
    assert from_memory[0] == "init" and {*from_memory[1:]} == {"memory"} and len(from_memory) >= 5, (from_memory, text)
    for before, after in itertools.pairwise(done):
        assert -2 <= after[0][1] - before[-1][1] - 1 <= 0, "steps done again"
    for i, steps in enumerate(done):
        stop = done[i + 1][0][1] - 1 if i + 1 < len(done) else steps[-1][1]
        run_ranks(steps[0][0], calmly, str(calm), stop)
    expected = {step: loss for _, step, loss, _ in sizes(calm)}
    assert {step for _, step, _, _ in sizes(out)} == set(expected), "no step is left out"
    for i, steps in enumerate(done):  # what was done again: on other ranks, in another order
        stop = done[i + 1][0][1] if i + 1 < len(done) else steps[-1][1] + 1
        for _, step, loss, _ in steps:
            assert loss == expected[step] if step < stop else abs(loss - expected[step]) < 1e-5, step


@pytest.mark.fresh
def test_whether_torchrun_may_start_on_another_number_of_hosts() -> None:
    """By its own command, and its variable; not by a flag of the script."""
    asks = "from fzero.elastic import host_directory as host; print(host.elastic())"
    parent = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {asks!r}]))"
    commands = {
        ("--nnodes=1:3", "-m", "fzero.run"): True,
        ("--nnodes", "2:3", "-m", "fzero.run", "x.py", "--nnodes=1"): True,
        ("--nnodes=3:3", "-m", "fzero.run"): False,
        ("--nnodes=2", "-m", "fzero.run", "x.py", "--nnodes=1:3"): False,
        ("--standalone", "-m", "fzero.run"): False,
    }
    for words, expected in commands.items():
        done = subprocess.run([sys.executable, "-c", parent, *words], env=environment(), capture_output=True, text=True)
        assert done.stdout.startswith(str(expected)), (words, done.stdout + done.stderr)


@pytest.mark.parametrize("nnodes", ["1:3", "1"])
def test_a_supervisor_that_may_start_again_on_other_hosts(tmp_path: Path, nnodes: str) -> None:
    """It says which variable torchrun lacks, and leaves what is in memory when it is told to stop: torchrun does not
    say whether that is the end, and counts no restart."""
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('waits', flush=True)\ntime.sleep(1000)\n")
    with supervisors(tmp_path, "", script=script, ranks=1, env={"PET_NNODES": nnodes}) as (one,):
        assert one.stdout is not None
        said = ""
        for line in one.stdout:
            said += line
            if line == "waits\n":
                break
        one.send_signal(signal.SIGTERM)
        code, _ = ended(one)
    assert code == 128 + signal.SIGTERM
    assert ("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun" in said) == (nnodes == "1:3"), said
    assert bool([*tmp_path.glob("memory-0/*/*")]) == (nnodes == "1:3")


def test_a_host_that_was_never_heard_counts_as_lost_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, its process may still be importing PyTorch. The content of a heartbeat does not matter: everyone on
    the network can write to the store."""
    now = 100.0
    monkeypatch.setattr(node_heartbeat.time, "monotonic", lambda: now)
    store = torch.distributed.HashStore()
    store.set(node_heartbeat._key(2), "\x80\x04K\x03.")  # of an earlier start, it may be
    beats = node_heartbeat.Heartbeats(store, me=0, count=3)
    beats.exchange()
    now = 130.0
    assert beats.lost(10.0, None) == "the store of the ranks has not answered for 30 s"
    beats.exchange()
    assert beats.lost(10.0, None) == "" == beats.lost(20.0, first_step=115.0)
    store.set(node_heartbeat._key(2), "{")
    beats.exchange()
    assert beats.lost(10.0, first_step=115.0) == "host 1 (GROUP_RANK) has sent no heartbeat for 15 s"
    now = 145.0
    beats.exchange()
    assert beats.lost(10.0, None) == "host 2 (GROUP_RANK) has sent no heartbeat for 15 s"
    store.set(node_heartbeat._key(2), "[")
    beats.exchange()
    assert beats.lost(10.0, None) == ""
