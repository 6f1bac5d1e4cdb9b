"""Whose directories are trusted: those that other accounts can neither write to nor replace; and what happens when
another account was there first."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero._compat.inductor_folder import guard_inductor
from fzero._utils.path_permissions import exposed
from fzero.elastic import host_directory
from fzero.errors import CheckpointError, FzeroValueError
from fzero.runtime.build.artifact_cache import CacheEntry, open_cache

OTHER = 12345  # no user of this machine
root_alone = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory below which nothing is another user's."""
    if (why := exposed(tmp_path)) is not None:
        pytest.skip(why)
    return tmp_path


def test_whatever_lies_on_the_way_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = home / "a" / "b"
    inner.mkdir(parents=True)
    real = os.lstat

    def seen(place: Path, mode: int | None = None, user: int | None = None) -> str | None:
        """With other permissions, or another owner, of one place."""

        def lstat(path: str) -> Any:
            found = real(path)
            if path != str(place):
                return found
            kind = stat.S_IFMT(found.st_mode) | (stat.S_IMODE(found.st_mode) if mode is None else mode)
            uid = found.st_uid if user is None else user
            return types.SimpleNamespace(st_mode=kind, st_uid=uid, st_gid=54321)

        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", lstat)
            return exposed(inner)

    assert seen(inner) is seen(inner, 0o755) is seen(home / "a", 0o755) is seen(home / "a", user=0) is None
    assert seen(home / "a", 0o1777) is seen(home / "a", 0o1770) is None, "nobody replaces what is another's in /tmp"
    assert seen(inner, user=OTHER) == f"{inner} belongs to the user {OTHER}"
    assert seen(home / "a", user=OTHER) == f"{home / 'a'} belongs to the user {OTHER}"
    for mode in (0o777, 0o775, 0o757):
        assert seen(inner, mode) == f"{inner} can be written to by other users"
        assert seen(home / "a", mode) == f"{home / 'a'} can be written to by other users"
    assert seen(inner, 0o1777) == f"{inner} can be written to by other users", "the end itself is no place for others"
    assert exposed(home / "missing") is not None and exposed(inner, 0o077) == f"{inner} is open to other users"


def test_links_on_the_way_are_followed_as_the_system_does(home: Path) -> None:
    for name in ("mine", "theirs"):
        (home / name / "deep").mkdir(parents=True)
    (home / "theirs").chmod(0o777)
    for name, target in {"right": "mine", "wrong": "theirs", "long": "mine/../theirs", "round": "round"}.items():
        (home / name).symlink_to(target)
    (home / "absolute").symlink_to(home / "theirs")
    (home / "mine" / "link").symlink_to("../theirs/deep")
    assert exposed(home / "right" / "deep") is None
    for path in ("wrong/deep", "long/deep", "absolute/deep", "mine/link", "right/link"):
        assert exposed(home / path) == f"{home / 'theirs'} can be written to by other users"
    assert exposed(home / "round") == f"the links of {home / 'round'} form a cycle"


@root_alone
def test_a_cache_below_another_users_directory_is_not_used(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """She could rename it, and put her own in its place."""
    hers = home / "hers"
    (hers / "mine").mkdir(parents=True)
    monkeypatch.setenv("FZERO_CACHE", str(hers / "mine"))
    opened = open_cache()
    assert opened is not None
    opened.write("a", CacheEntry("text", b"library"))
    os.chown(hers, OTHER, OTHER)
    assert open_cache() is None
    assert f"{hers} belongs to the user {OTHER}, and the contents of a cache are executed" in caplog.text


@root_alone
def test_inductor_does_not_use_a_folder_that_another_user_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = home / "torchinductor_root", home / "cache"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    monkeypatch.setenv("FZERO_CACHE", str(mine))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is put back
    guard_inductor()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(mine / "inductor") and exposed(mine / "inductor") is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    with pytest.raises(FzeroValueError, match=f"{theirs} belongs to the user {OTHER}, and the files") as error:
        guard_inductor()
    assert "set TORCHINDUCTOR_CACHE_DIR" in str(error.value)


STEP = """
import logging
logging.basicConfig(level=logging.WARNING, format="%(message)s")
import torch, fzero as fz
step = fz.shard_params(fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(0.1)))
fz.lower(step, fz.AbstractMesh(data=2), {"w": torch.ones(64, 64)}, torch.ones(32, 64))
train = fz.compile(step, fz.make_mesh(), backend=BACKEND)
state, metrics = train(train.init({"w": torch.ones(64, 64)}), torch.ones(32, 64))
print(int(state.step))
"""
NOWHERE = "/sys/kernel"  # not even root can write there


@pytest.mark.parametrize("backend", ["inductor", "eager"])
@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "FZERO_CACHE", ""])
def test_folders_that_cannot_be_written_to(home: Path, backend: str, name: str) -> None:
    """In a fresh interpreter: to import Dynamo makes the folder."""
    if os.access(NOWHERE, os.W_OK) and os.geteuid() != 0:
        pytest.skip(f"{NOWHERE} can be written to")
    env = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "FZERO_CACHE", "XDG_CACHE_HOME")}
    env |= {"HOME": str(home), **({name: NOWHERE} if name else {})}
    script = STEP.replace("BACKEND", repr(backend))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=240)
    if name == "TORCHINDUCTOR_CACHE_DIR":
        assert done.returncode and f"fzero.compile: Inductor cannot keep its files in {NOWHERE}" in done.stderr
    elif name:
        assert done.stdout == "1\n" and "Inductor's files go to" in done.stderr, done.stderr
    else:
        assert done.stdout == "1\n" and (home / ".cache" / "fzero" / "inductor").is_dir(), done.stderr


@root_alone
def test_a_directory_of_another_user_is_not_used_for_states(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host_directory.MEMORY, raising=False)
    (first := home / "fzero-0").mkdir(mode=0o700)
    os.chown(first, OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"fzero-0 belongs to the user {OTHER}"):
        host_directory.memory(home)


def test_the_ranks_of_a_run_find_its_directory_and_a_later_run_removes_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(host_directory.MEMORY, raising=False)
    found = host_directory.memory(home)
    code = f"from fzero.elastic import host_directory as host; print(host.memory({str(home)!r}))"
    env = {k: v for k, v in os.environ.items() if k != host_directory.MEMORY}
    for more, of in (({"TORCHELASTIC_RUN_ID": "1"}, found), ({}, None)):  # a rank of this run, and another run
        ran = subprocess.run([sys.executable, "-c", code], env=env | more, capture_output=True, text=True, check=True)
        where = Path(ran.stdout.strip())
        assert where == of if of else where.parent == found.parent
    assert where.exists() and host_directory.memory(home) == found and not where.exists(), (
        "what a run that is gone left is removed"
    )


@root_alone
def test_another_account_really_cannot_pass(home: Path) -> None:
    """The predicate as that account sees it, in a process of its own."""
    (home / "mine").mkdir(mode=0o755)
    home.chmod(0o755)
    code = (
        "import os, sys; from fzero._utils.path_permissions import exposed; "
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "print(exposed('/tmp'), exposed('/usr'), sep='|')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "/tmp can be written to by other users|None"


OPENS = """
import os, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
for path in sys.stdin.read().splitlines():
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, flags))
        except OSError:
            continue
        print(path)
"""


@root_alone
def test_another_account_opens_nothing_of_a_run() -> None:
    """Neither the states in memory and the progress of a rank, nor a private checkpoint; what is beside them, it
    does."""
    # Not in pytest's directory, which every start of pytest closes to other accounts.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        home = Path(directory)
        home.chmod(0o755)  # as /dev/shm and a directory of a project are
        paths, opened = opened_by_another_account(home)
    names = {path.name for path in paths}
    assert {"rank-00000.json", "rank-00000.0.safetensors", "progress-00000", "index.json", "latest"} <= names, names
    assert opened == [str(home / "beside")], opened


def opened_by_another_account(home: Path) -> tuple[list[Path], list[str]]:
    """All paths of a run whose memory and private checkpoints are in `home`, and those that another account can open;
    among them one beside these directories."""
    memory, saved, beside = home / "memory", home / "saved", home / "beside"
    memory.mkdir(mode=0o755)
    beside.write_text("for all")
    step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.adam(0.1))

    def main(run: Any) -> tuple[list[Path], list[str]]:
        train = fz.compile(step, run.mesh, backend="eager")
        state = run.state(train, {"w": torch.ones(8)}, path=saved, private=True)
        for _ in run.steps(state, 3):
            state, _ = train(state, torch.ones(8))
            run.commit(state)
            run.save(state)
        paths = [path for root in (memory, saved) for path in root.rglob("*")]
        given = "\n".join(map(str, [*paths, beside]))
        ran = subprocess.run([sys.executable, "-c", OPENS], input=given, capture_output=True, text=True, check=True)
        return paths, ran.stdout.split()

    return fz.run(main, memory=memory, device="cpu")


# --- checkpoints ---


def modes(root: Path) -> dict[str, int]:
    """The permissions of a root and of everything in it, by name."""
    return {str(p.relative_to(root)): stat.S_IMODE(p.stat().st_mode) for p in (root, *root.rglob("*"))}


def saves(root: Path, umask: int) -> dict[str, dict[str, int]]:
    before = os.umask(umask)
    try:
        mesh = fz.make_mesh(data=2)
        step = fz.shard_params(fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.adam(0.1)))
        train = fz.compile(step, mesh, backend="eager")
        state = train.init({"w": torch.ones(8)})
        for name, more in {"open": {}, "mine": {"private": True}, "behind": {"private": True, "wait": False}}.items():
            saved = fz.checkpoint.save(root / name / "run", state, **more)  # type: ignore[call-overload]
            if name == "behind":
                saved.wait()
        fz.checkpoint.save(root / "mine" / "run", state, keep=1, private=True)  # in place of the one before
        fz.checkpoint.save(root / "open" / "run", state, private=True)  # in a directory that is there
        restored = train.restore(root / "mine" / "run", {"w": torch.zeros(8)})
        assert torch.equal(train.gather(restored).params["w"], torch.ones(8))
        fz.close_mesh()

        def main(run: Any) -> None:
            train = fz.compile(step, run.mesh, backend="eager")
            state = run.state(train, {"w": torch.ones(8)}, path=root / "kept", private=True)
            for index in run.steps(state, 2):
                state, _ = train(state, torch.ones(8))
                run.commit(state)
                run.save(state, wait=index == 0)

        fz.run(main, device="cpu")
    finally:
        os.umask(before)
    found = {name: modes(root / name) for name in ("mine", "behind", "kept")}  # with the directory above "run"
    return found | {"open": modes(root / "open" / "run")}


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_private_checkpoints_are_of_one_user(tmp_path: Path, run_ranks: Any, umask: int) -> None:
    found = run_ranks(2, saves, tmp_path, umask)[0]
    for name in ("mine", "behind", "kept"):
        of = found[name]
        files = {n: mode for n, mode in of.items() if n.endswith((".json", ".safetensors", "latest"))}
        assert len(files) >= 4 and set(files.values()) == {0o600}, of
        assert {mode for n, mode in of.items() if n not in files} == {0o700}, of
    of = found["open"]
    assert of["."] == 0o777 & ~umask, "a directory that is there stays as it is"
    inside = {n: mode for n, mode in of.items() if n.startswith("step-")}
    assert len(inside) == 4 and all(mode & 0o077 == 0 for mode in inside.values())


def test_the_umask_is_honoured(tmp_path: Path) -> None:
    state = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1)).init({"w": torch.ones(2)})
    for umask in (0o022, 0o027, 0o077):
        before = os.umask(umask)
        try:
            fz.checkpoint.save(tmp_path / f"{umask:o}", state)
        finally:
            os.umask(before)
        root = tmp_path / f"{umask:o}"
        for name, mode in modes(root).items():
            assert mode == (0o777 if (root / name).is_dir() else 0o666) & ~umask, name


def test_what_cannot_be_private_is_refused(tmp_path: Path) -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
    state = step.init({"w": torch.ones(2)})
    pytest.importorskip("fsspec")
    with pytest.raises(CheckpointError, match="objects of a store have no permissions"):
        fz.checkpoint.save("memory://bucket/run", state, private=True)
    with pytest.raises(CheckpointError, match="private='yes': must be True or False"):
        fz.checkpoint.save(tmp_path, state, private="yes")  # type: ignore[call-overload]

    def main(run: Any) -> None:
        run.state(
            fz.compile(step, run.mesh, backend="eager"), {"w": torch.ones(2)}, path="memory://b/run", private=True
        )

    with pytest.raises(FzeroValueError, match="objects of a store have no permissions"):
        fz.run(main, device="cpu")
