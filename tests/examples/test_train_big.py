"""The example that trains from disk, as a user runs it, on a model that takes seconds."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from scripts import Script, fresh_modules, losses, records

import fzero as fz

pytestmark = pytest.mark.forks

EXAMPLE = Script(
    "train_big.py",
    ("--memory", "600MB", "--params", "200K", "--width", "64", "--seq", "32", "--batch", "2", "--backend", "eager"),
)
KEYS = {"step", "loss", "grad_norm", "finite", "tokens_per_s", "step_s", "resident_bytes", "peak_bytes"}
P = 4 * (12 * 64**2 + 2 * 64) + 513 * 64  # parameters: 4 layers


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps without a pause, on one process."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "disk").mkdir()
    return folder, EXAMPLE.process("--steps", 4, "--path", folder / "disk", "--json", folder / "log").stdout


@pytest.mark.full
def test_what_a_run_prints_and_leaves_behind(straight):
    folder, printed = straight
    log = records(folder / "log")
    assert [r["step"] for r in log] == [1, 2, 3, 4] and all(set(r) == KEYS for r in log)
    assert all(5 < r["loss"] < 7 and 0 < r["resident_bytes"] < 600e6 for r in log), "log(256) is 5.545"
    assert f"a GPT of {P / 1e6:.1f} M parameters: 4 layers, 64 wide" in printed
    assert re.search(
        r"^state on disk: 0.00 GB; peak memory of each process: 0.0\d GB planned and 0.30 GB for the compiler, of 0.60 "
        r"GB allowed$",
        printed,
        re.M,
    )
    steps = re.findall(
        r"^step (\d)/4  loss ([\d.]+)  [\d,]+ tokens/s  resident 0\.\d\d GB$",
        printed,
        re.M,
    )
    assert [(int(step), loss) for step, loss in steps] == [(r["step"], f"{r['loss']:.4f}") for r in log]
    assert re.search(
        r"^at the most 0\.\d\d GB were resident over the empty process, within the 0.60 GB allowed$", printed, re.M
    )
    assert not list((folder / "disk").iterdir()) and "\x1b[" not in printed


@pytest.mark.full
def test_two_processes_share_the_state(run_ranks, straight, tmp_path):
    done = EXAMPLE.on(run_ranks, "--steps", 4, "--path", tmp_path, "--json", tmp_path / "log", ranks=2)
    assert losses(tmp_path / "log") == pytest.approx(losses(straight[0] / "log"), rel=1e-4)
    assert done.stdout.count("state on disk") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


@pytest.mark.full
def test_ctrl_c_saves_and_resumes_exactly(run_ranks, tmp_path):
    flags = ("--path", tmp_path, "--out", tmp_path / "out")
    done = EXAMPLE.interrupted(tmp_path / "log", "--steps", 3000, *flags)
    stopped = re.search(r"^stopped at step (\d+); continue with --resume$", done.stdout, re.M)
    assert stopped and done.code == 130 and done.stderr == "", done.stdout + done.stderr
    step = int(stopped[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "out"], "the scratch files are gone"
    done = EXAMPLE.on(run_ranks, "--steps", step + 2, *flags, "--json", tmp_path / "log", "--resume")
    assert f"resuming at step {step}" in done.stdout
    assert [r["step"] for r in records(tmp_path / "log")] == list(range(1, step + 3))


@pytest.mark.full
def test_what_does_not_fit_is_refused_before_anything_is_written(run_ranks, tmp_path):
    done = EXAMPLE.on(run_ranks, "--memory", "200MB", "--path", tmp_path, code=2)
    assert re.search(
        r"this model does not fit: 0.0\d GB planned and 0.30 GB for the compiler, of 0.20 GB allowed\nFix: a larger "
        r"--memory",
        done.stderr,
    )
    done = EXAMPLE.on(run_ranks, "--path", tmp_path / "never", code=2)
    assert "never: the directory does not exist" in done.stderr and "Fix: " in done.stderr
    done = EXAMPLE.on(
        run_ranks, "--params", "5000B", "--width", 1 << 18, "--memory", "99000GB", "--path", tmp_path, code=2
    )
    assert re.search(r"\d{2}\.\d+ TiB needed, .* free", done.stderr), "it would take all disks of this machine"
    assert not list(tmp_path.iterdir())


def test_the_plan_alone_runs_nothing(run_ranks, tmp_path):
    done = EXAMPLE.on(run_ranks, "--plan", "--path", tmp_path)
    assert "predicted" in done.stdout and "peak memory" in done.stdout and "step 1" not in done.stdout


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with fresh_modules():
        yield importlib.import_module("train_big")


def flags(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *given: object):
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--backend", "eager", *map(str, given)])
    return script.parse_args(None)


def test_less_memory_makes_it_narrower_and_deeper_and_no_smaller(script, monkeypatch):
    found = []
    for memory in ("2GB", "345MB"):
        args = flags(script, monkeypatch, "--memory", memory, "--params", "10M", "--batch", 1, "--seq", 16)
        _, _, lowered = script.sized(args, fz.make_mesh(data=1))
        assert lowered.plan.peak_bytes + script.TOOLS <= args.memory
        qkv = next(leaf for leaf in lowered.params.leaves if leaf.path.endswith("['qkv']"))
        found.append((qkv.shape[0], sum(leaf.path.endswith("['qkv']") for leaf in lowered.params.leaves)))
        assert sum(leaf.numel for leaf in lowered.params.leaves) >= 10e6
    assert found[0][0] > found[1][0] and found[0][1] < found[1][1]


def test_by_default_the_state_is_three_times_the_memory(script, monkeypatch):
    args = flags(script, monkeypatch)
    assert args.memory == 2e9 and 12 * args.params == 3 * args.memory
    assert Path(args.path).is_dir()
    assert flags(script, monkeypatch, "--params", "1.5B").params == 1.5e9


BAD_FLAGS = {
    "--width 65 is not a multiple of 64": ("--width", 65),
    "--steps 0 is less than 1; --batch -1 is less than 1": ("--steps", 0, "--batch", -1),
    "'two' is not an amount of memory": ("--memory", "two"),
    "'many' is not a number": ("--params", "many"),
    "--params 0 is not from 1 to 1e+15": ("--params", "0.4"),
    "--threads 100000 is not from 1 to 1024; --params 1e+99 is not": ("--threads", 100000, "--params", "1e99"),
    "--resume needs --out": ("--resume",),
}


@pytest.mark.parametrize("says", BAD_FLAGS)
def test_bad_flags(says, script, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        flags(script, monkeypatch, *BAD_FLAGS[says])
    assert stop.value.code == 2 and says in capsys.readouterr().err
