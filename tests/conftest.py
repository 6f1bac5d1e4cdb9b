"""What every test can ask for: `run_ranks`, and a compiler cache that starts empty."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

# Tests may import each other's helpers, whatever folder they lie in; ranks of the pool get this path too.
sys.path += [str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir()]

import forks
import hypothesis
import pytest
import torch
from pool import THRESHOLDS, Pool

from fzero.ir.ops import OPS, OWNERS, Op
from fzero.runtime.build.cpu import compile_worker

# The same examples every time: a property that fails for one in a thousand inputs must not fail someone else's commit.
# No deadline: the machine is shared.
hypothesis.settings.register_profile("fzero", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("fzero")

_inductor_cache: tempfile.TemporaryDirectory | None = None


ROOT = Path(__file__).parents[1]

collect_ignore_glob = ["cuda_stub/stub_device/*", "cuda_stub/[!t]*.py"]
"""Importing the scripts and the stub device of these tests replaces parts of PyTorch."""
DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds by file, written by `pytest --full --write-durations`. Only their order matters, so a machine with other work
on it will do."""


def file_name(path: Path) -> str:
    """The name of a file in `DURATIONS`: `step/test_steps.py` for one in tests/, `fzero/_utils/units.py` for
    doctests."""
    return os.path.relpath(path, ROOT).removeprefix("tests/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which take longer")
    parser.addoption(
        "--exhaustive", action="store_true", help="also run whole grids, of which other tests take a part: hours"
    )
    parser.addoption("--write-durations", action="store_true", help=f"write the seconds of each file to {DURATIONS}")


def is_default(item: pytest.Item) -> bool:
    """Whether a test runs without --full: it is not marked `full`, or is one of the cases that the mark keeps."""
    mark = item.get_closest_marker("full")
    return mark is None or case_id(item) in mark.kwargs.get("keep", ())


def case_id(item: pytest.Item) -> str | None:
    """The id of a case of a parametrized test, as the brackets of its name show it."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.id


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Iterator[None]:
    """Reject `full(keep=[...])` if one of the ids is no case of the test: a case that was renamed would otherwise leave
    the default tier without notice. All cases of a function are made here, whichever of them pytest then selects."""
    made = yield
    cases = [x for x in made if isinstance(x, pytest.Function)] if isinstance(made, list) else []
    marks = [mark for case in cases for mark in case.iter_markers("full")]
    kept = {id for mark in marks for id in mark.kwargs.get("keep", ())}
    if unknown := sorted(kept - {case_id(case) for case in cases}):
        ids = ", ".join(str(case_id(case)) for case in cases)
        raise pytest.Collector.CollectError(
            f"{name}: full(keep=...) names {', '.join(unknown)}, which is no case of this test; its cases are {ids}"
        )
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    known = {item.path: seconds.get(file_name(item.path), 0) for item in items}
    items.sort(key=lambda item: -known[item.path])  # the longest first: else one process waits for the other at the end
    exhaustive = config.getoption("--exhaustive")
    full = exhaustive or config.getoption("--full")
    selected = [x for x in items if ("exhaustive" not in x.keywords or exhaustive) and (is_default(x) or full)]
    if len(selected) < len(items):
        config.hook.pytest_deselected(items=[x for x in items if x not in {*selected}])
        items[:] = selected


_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[file_name(ROOT / report.nodeid.partition("::")[0])] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In the process that collects the reports of all others."""
    if session.config.getoption("--write-durations") and not hasattr(session.config, "workerinput"):
        measured = {name: round(seconds, 1) for name, seconds in sorted(_seconds.items()) if seconds >= 0.1}
        DURATIONS.write_text(json.dumps(measured, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """The doctests of `fzero/hf` all need transformers, and are left out without it. Compiled kernels go to a folder of
    this session, shared by all ranks; set TORCHINDUCTOR_CACHE_DIR and FZERO_CACHE to keep them from run to run."""
    global _inductor_cache
    if importlib.util.find_spec("transformers") is None:
        config.option.ignore = [*(config.option.ignore or []), str(ROOT / "fzero" / "hf")]
    torch.set_num_threads(1)  # as on every rank: with more, a matrix product sums in another order
    gc.set_threshold(*THRESHOLDS)
    os.environ["FZERO_PROGRESS"] = "off"  # what says how long it takes depends on how long it takes
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        _inductor_cache = tempfile.TemporaryDirectory(prefix="fzero-inductor-", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name
        os.environ.setdefault("FZERO_CACHE", os.path.join(_inductor_cache.name, "fzero"))


def pytest_unconfigure() -> None:
    forks.close()
    if _inductor_cache is not None:
        _inductor_cache.cleanup()
        for name in ("TORCHINDUCTOR_CACHE_DIR", "FZERO_CACHE"):
            if os.environ.get(name, "").startswith(_inductor_cache.name):
                del os.environ[name]


@pytest.fixture(scope="module", autouse=True)
def old_objects_outside_gc() -> Iterator[None]:
    """What a file of tests leaves is not gone through again by each later garbage collection: transformers' Trainer
    asks for one a run, of 2 s in a process that has imported and traced much."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers that compile, and under the mark `forks` all that a test starts with Python, are forks (tests/forks.py);
    none is under the mark `fresh`."""
    every, fresh = (request.node.get_closest_marker(name) for name in ("forks", "fresh"))
    with contextlib.nullcontext() if fresh else forks.installed(only_builds=not every):
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Pool]:
    """The session's worker processes (none until a test runs something on them)."""
    pool = Pool(tmp_path_factory.mktemp("pool"), pytestconfig.getini("filterwarnings"))
    yield pool
    pool.close()


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are compiled by this process, which imports Inductor once, and not by a worker that does for each
    build. tests/runtime/test_compiled_functions.py has the worker."""

    def ask(jobs: Any, cache: Any, cores: int, done: Callable[[str], None], trust_cpu: bool) -> dict[str, Any]:
        return {"skipped": compile_worker._work(jobs, cache, cores, trust_cpu, done)}

    monkeypatch.setattr(compile_worker, "_ask", ask)


@pytest.fixture
def run_ranks(pool: Pool) -> Callable[..., list[Any]]:
    """`run_ranks(n, fn, *args, timeout=120, expect_error=False, **kwargs)`: `fn` on n real ranks, results in rank
    order.

    `fn` is a module-level function; inside, `fzero.make_mesh(data=n)` works as under torchrun. Arguments and results
    are pickled, tensors by value. A rank that raises fails the test with every rank's traceback, or with
    `expect_error=True` is returned as a `pool.RaisedOnRank`.
    """
    return pool.run


@pytest.fixture
def run_or_call(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """As `run_ranks`, but one rank needs no process: the function is called."""
    return lambda n, fn, *args, **kwargs: [fn(*args, **kwargs)] if n == 1 else run_ranks(n, fn, *args, **kwargs)


@pytest.fixture
def ops() -> Iterator[None]:
    """The op table, as it was before."""
    table = cast("dict[str, Op]", OPS)
    before, owners = dict(table), dict(OWNERS)
    yield
    for now, then in ((table, before), (OWNERS, owners)):
        now.clear()
        now.update(then)  # type: ignore[arg-type]
