"""The first steps run eagerly while functions are compiled in the background (`warmup="eager"`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import ending

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, FzeroValueError
from fzero.runtime.build.artifact_cache import Cache
from fzero.runtime.build.cpu import compile_worker

N = 48
STEPS = 5


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"]).exp()


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["layers"]:
        x = layer(p, x)
    return torch.log1p((x * params["scale"]).square()).mean()


def parts() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    layers = [{"w": torch.randn(N, N, generator=generator) / N} for _ in range(2)]
    params = {"layers": layers, "scale": torch.ones(N)}
    step = fz.shard_params(fz.train_step(loss_fn, optim.adamw(1e-2)))
    return step, params


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(4, N, generator=torch.Generator().manual_seed(100 * step + rank))


class Compiler:
    """A `compile_jobs` that waits until it is let go, and then takes what was really compiled before."""

    def __init__(self, source: Path):
        self.source, self.go, self.jobs = source, threading.Event(), list[str]()

    def __call__(self, jobs: Any, cache: Cache, cores: int, done: Any) -> dict[str, str]:
        self.jobs += [job.name for job in jobs]
        assert self.go.wait(120)
        for job in jobs:
            entry = Cache(self.source / "functions").read(job.key)
            assert entry is not None, job.name
            cache.write(job.key, entry)
            done(job.name)
        return {}


def fails(*args: Any) -> Any:
    time.sleep(0.2)
    raise compile_worker.Failed("g++: no such instruction")


def losses(train: Any, state: Any, steps: range, rank: int = 0) -> tuple[Any, list[float]]:
    found = []
    for i in steps:
        state, metrics = train(state, batch(i, rank))
        found.append(float(metrics["loss"]))
    return state, found


def _really(folder: Path, size: int) -> None:
    os.environ["FZERO_CACHE"] = str(folder)
    step, params = parts()
    train = fz.compile(step, fz.make_mesh(data=size))
    losses(train, train.init(params), range(1))


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the functions of one rank are."""
    folder = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FZERO_CACHE", str(folder))
        _really(folder, 1)
    return folder


@pytest.fixture
def compiler(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Empty caches, and the compiler of this process."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    found = Compiler(cold)
    monkeypatch.setattr(compile_worker, "compile_jobs", found)
    return found


def warmed(train: Any) -> Any:
    (program,) = train._runs.values()
    return program.warm_up


def until_done(train: Any) -> None:
    """Waits until the background has compiled everything, so that the next step runs compiled."""
    warmed(train)._compilation._worker.result(60)


def test_steps_run_eagerly_and_then_compiled(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the switch each step is that of the eager backend, behind it that of compiled functions, to the bit."""
    os.environ["FZERO_PROGRESS"] = "on"
    try:
        step, params = parts()
        mesh = fz.make_mesh(data=1)
        train = fz.compile(step, mesh, warmup="eager")
        state, first = losses(train, train.init(params), range(3))
        eager = fz.compile(step, mesh, backend="eager")
        same, expected = losses(eager, eager.init(params), range(3))
        assert first == expected and warmed(train) is not None and compiler.jobs
        compiler.go.set()
        until_done(train)
        middle = {name: x.clone() for name, x in fz.tree.with_paths(state.params)}
        state, then = losses(train, state, range(3, 3 + STEPS))
        assert warmed(train) is None
        waits = fz.compile(step, mesh)  # from the cache that the background has filled
        for (path, x), y in zip(middle.items(), fz.tree.leaves(same.params), strict=True):
            assert torch.equal(x, y), path
        assert then == losses(waits, same, range(3, 3 + STEPS))[1]
        assert len(compiler.jobs) == len(set(compiler.jobs)), "nothing is compiled twice"
    finally:
        os.environ["FZERO_PROGRESS"] = "off"
    said = capsys.readouterr().err
    assert "loss_fn runs eagerly while" in said and "loss_fn runs compiled after" in said


def test_from_a_full_cache_no_step_runs_eagerly(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FZERO_CACHE", str(cold))
    monkeypatch.setattr(compile_worker, "compile_jobs", fails)
    step, params = parts()
    found = []
    for warmup in ("wait", "eager"):
        train = fz.compile(step, fz.make_mesh(data=1), warmup=warmup)
        found.append(losses(train, train.init(params), range(3))[1])
        assert warmed(train) is None
    assert found[0] == found[1]


def test_an_evaluation_runs_eagerly_too(compiler: Compiler) -> None:
    """Its functions are others than those that were compiled before: it never switches here."""
    _, params = parts()
    evaluate = fz.compile(fz.eval_step(loss_fn), fz.make_mesh(data=1), warmup="eager")
    assert float(evaluate(params, batch(0))) == float(loss_fn(params, batch(0)))
    assert warmed(evaluate) is not None
    compiler.go.set()


def test_what_needs_the_program_waits_for_it(compiler: Compiler) -> None:
    step, params = parts()
    train = fz.compile(step, fz.make_mesh(data=1), warmup="eager")
    state, _ = losses(train, train.init(params), range(1))
    threading.Timer(0.5, compiler.go.set).start()
    state, events = train.profile(state, batch(1), steps=1)
    assert warmed(train) is None and events


@pytest.mark.parametrize("limit", ["10GiB", "0"], ids=["cache", "a cache that keeps nothing"])
def test_functions_that_the_cache_does_not_keep(compiler: Compiler, limit: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("FZERO_CACHE_LIMIT", limit)

    def trimmed(jobs: Any, cache: Cache, cores: int, done: Any) -> dict[str, str]:
        compiler(jobs, cache, cores, done)
        cache.trim()
        return {}

    monkeypatch.setattr(compile_worker, "compile_jobs", trimmed)
    compiler.go.set()
    step, params = parts()
    train = fz.compile(step, fz.make_mesh(data=1), warmup="eager")
    state = train.init(params)
    end = time.monotonic() + 60
    for i in range(1000):
        state, _ = losses(train, state, range(i, i + 1))
        if warmed(train) is None or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert warmed(train) is None
    # Without a cache, they are compiled again when they are needed, except those that are needed before it is emptied.
    functions = len(set(compiler.jobs))
    again = len(compiler.jobs) - functions
    assert 0 < again <= functions if limit == "0" else not again


def test_a_failed_compilation_is_the_error_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the text that a step that waits raises, before the step has changed anything."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_worker, "compile_jobs", fails)
    monkeypatch.setattr("fzero.runtime.build.inductor._artifact", fails)
    step, params = parts()
    texts = []
    for warmup in ("wait", "eager"):
        train = fz.compile(step, fz.make_mesh(data=1), warmup=warmup)
        state = train.init(params)
        with pytest.raises(FzeroError, match="functions cannot be compiled") as error:
            for i in range(1000):
                state, _ = losses(train, state, range(i, i + 1))
                time.sleep(0.01)
        texts.append(str(error.value))
        before = int(state.step)
        assert not train._runs and [*train.gather(state).params] == [*params]
    assert before > 0 and texts[0] == texts[1] and "no such instruction" in texts[0]


def test_arguments() -> None:
    step, _ = parts()
    with pytest.raises(FzeroValueError, match="warmup='later': must be 'wait' or 'eager'"):
        fz.compile(step, fz.make_mesh(data=1), warmup="later")


def test_eager_steps_that_do_not_fit_the_budget_wait(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FZERO_PROGRESS", "on")
    compiler.go.set()
    step, params = parts()
    given = [{k: torch.empty_like(x, device="meta") for k, x in p.items()} for p in params["layers"]]
    shapes = {"layers": given, "scale": torch.empty(N, device="meta")}
    big = torch.empty(4096, N, device="meta")
    peaks = {b: fz.lower(step, fz.AbstractMesh(data=1), shapes, big, backend=b).plan.peak_bytes for b in BACKENDS}
    assert peaks["eager"] > peaks["inductor"]
    train = fz.compile(step, fz.make_mesh(data=1), warmup="eager", memory_budget=sum(peaks.values()) // 2)
    monkeypatch.setattr(compile_worker, "compile_jobs", fails)
    monkeypatch.setattr("fzero.runtime.build.inductor._artifact", fails)
    with pytest.raises(FzeroError, match="functions cannot be compiled"):
        train(train.init(params), torch.randn(4096, N))
    assert "the first step waits" in capsys.readouterr().err


BACKENDS = ("inductor", "eager")


# --- several ranks ---


def _on_rank(source: Path, folder: Path, slow: int) -> tuple[int, list[float], list[torch.Tensor]]:
    """Returns the step from which on this rank ran compiled, its losses, and all parameters."""
    os.environ["FZERO_CACHE"] = str(folder)
    mesh = fz.make_mesh(data=2)
    compiler = Compiler(source)
    kept, compile_worker.compile_jobs = compile_worker.compile_jobs, compiler
    try:
        step, params = parts()
        train = fz.compile(step, mesh, warmup="eager")
        state, found = train.init(params), []
        if mesh.rank != slow:
            compiler.go.set()
        switched, i = -1, 0
        while switched < 0 or i < switched + 3:
            if i == 4:
                compiler.go.set()
            if i >= 4 and switched < 0:
                time.sleep(0.05)
            state, loss = losses(train, state, range(i, i + 1), mesh.rank)
            found += loss
            switched = i if switched < 0 and warmed(train) is None else switched
            i += 1
        whole = train.gather(state)
    finally:
        compile_worker.compile_jobs = kept
    return switched, found, fz.tree.leaves(whole.params)


@pytest.fixture(scope="module")
def cold_pair(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cold pair")
    pool.run(2, _really, folder, 2)
    return folder


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_switch_at_the_same_step(run_ranks: Any, cold_pair: Path, tmp_path: Path, slow: int) -> None:
    (first, one, params), (second, other, same) = run_ranks(2, _on_rank, cold_pair, tmp_path, slow)
    assert first == second >= 4 and one == other
    assert all(torch.equal(a, b) for a, b in zip(params, same, strict=True))


def _fails_on(source: Path, folder: Path, failing: int) -> None:
    os.environ["FZERO_CACHE"] = str(folder)
    mesh = fz.make_mesh(data=2)
    compiler = Compiler(source)
    compiler.go.set()
    kept, inside = compile_worker.compile_jobs, None
    from fzero.runtime.build import inductor

    inside = inductor._artifact
    if mesh.rank == failing:
        inductor._artifact = fails
    compile_worker.compile_jobs = fails if mesh.rank == failing else compiler
    try:
        step, params = parts()
        train = fz.compile(step, mesh, warmup="eager")
        state = train.init(params)
        with ending(folder):
            for i in range(1000):
                state, _ = losses(train, state, range(i, i + 1), mesh.rank)
                time.sleep(0.01)
    finally:
        compile_worker.compile_jobs, inductor._artifact = kept, inside


def test_a_rank_that_cannot_compile_is_named_on_all(run_ranks: Any, cold_pair: Path, tmp_path: Path) -> None:
    one, other = run_ranks(2, _fails_on, cold_pair, tmp_path, 1, expect_error=True)
    assert other.type == "FzeroError" and "functions cannot be compiled" in other.message
    assert one.type == "DivergenceError" and "rank 1: fzero.compile: functions cannot be compiled" in one.message
    assert "not every rank has compiled its share" in one.message


ENDS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import fzero as fz
from test_warm_up import batch, losses, parts, warmed
step, params = parts()
train = fz.compile(step, fz.make_mesh(data=1), warmup="eager")
losses(train, train.init(params), range(2))
assert warmed(train) is not None
print("steps done", flush=True)
if sys.argv[2] == "killed":
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
@pytest.mark.fresh
@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_process_that_ends_while_compiling_ends_its_compiler(tmp_path: Path, how: str) -> None:
    """At once, without a message, and with what compiles for it."""
    folder = str(Path(__file__).parent)
    env = {**os.environ, "FZERO_CACHE": str(tmp_path), "FZERO_PROGRESS": "off"}
    env["PYTHONPATH"] = os.pathsep.join([*sys.path, folder, str(Path(folder).parent)])
    start = time.monotonic()
    command = [sys.executable, "-c", ENDS, folder, how]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.stdout == "steps done\n" and run.returncode == (-9 if how == "killed" else 0), run.stderr
    assert not run.stderr
    end = time.monotonic() + 60  # it may still be importing torch
    while running(str(tmp_path)):
        assert time.monotonic() < end, "its compiler outlives it"
        time.sleep(0.1)
    assert time.monotonic() - start < 180


def running(cache: str) -> list[int]:
    """The processes that have this cache in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"FZERO_CACHE={cache}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
