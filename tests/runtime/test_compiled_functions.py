"""Compiled functions: made once, kept on disk, divided among ranks; and what happens when a file, a rank or a compiler
fails."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from pool import ending

import fzero as fz
from fzero import random
from fzero._compat import compat
from fzero.errors import FzeroError, FzeroValueError
from fzero.ir.program import Function
from fzero.runtime.build import artifact_cache as caching
from fzero.runtime.build import build as building
from fzero.runtime.build import inductor
from fzero.runtime.build.artifact_cache import Cache, CacheEntry, open_cache
from fzero.runtime.build.cpu import compile_worker, cpp_kernels, graph_pickle
from fzero.trace.device_decompositions import on_host, substituted
from fzero.trace.graph_capture import record
from fzero.trace.recorder import Recorded

CPU = torch.device("cpu")
N = 48  # more than 1024 elements in a square: a function worth compiling


def function(
    name: str, fn: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Function:
    """A function of tensors of these shapes, as a program holds it."""
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(s, dtype=dtype) for s in shapes]
        return Function(name, record(fn, inputs, owner=name, names=[f"x{i}" for i in range(len(shapes))]), **kwargs)


def several(x, y):
    return [(x + y).sin(), (x @ y).cos() * 2]


def literal(x):
    return [(x * torch.tensor([2.0, 3.0]).repeat(N // 2)).exp()]


def functions() -> dict[str, Function]:
    """One with two results, the same with a buffer for the second, one that reads a literal."""
    made = [
        function("several", several, (N, N), (N, N)),
        function("into", several, (N, N), (N, N), into=(1,)),
        function("literal", literal, (N, N)),
    ]
    return {f.name: f for f in made}


def check(built: dict[str, Any]) -> None:
    """They compute what their definitions say."""
    x, y = torch.randn(N, N), torch.randn(N, N)
    first, second = several(x, y)
    got = built["several"](x, y)
    torch.testing.assert_close(tuple(got), (first, second))
    buffer = torch.zeros(N, N)
    got = built["into"](x, y, into=[None, buffer])
    assert got[1] is buffer
    torch.testing.assert_close(tuple(got), (first, second))
    torch.testing.assert_close(built["literal"](x), literal(x)[0])


def halves(x):
    both = (x * 2).exp()
    return [both[: N // 2], both[N // 2 :], x.t() + 1]


def saying(seen: list[tuple[str, str]], compile_jobs: Any) -> Any:
    """A `compile_jobs` that keeps the name of each function, and the progress line behind it."""

    def compiled(jobs: Any, cache: Cache, cores: int, done: Any) -> dict[str, str]:
        def told(name: str, ready: bool = True) -> None:
            done(name, ready)
            seen.append((name, str(done)))

        return compile_jobs(jobs, cache, cores, told)

    return compiled


@pytest.fixture(scope="module")
def cold(tmp_path_factory) -> tuple[Path, list[tuple[str, str]]]:
    """A cache in which all functions of this file were really compiled, and what was said meanwhile."""
    seen: list[tuple[str, str]] = []
    cache = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FZERO_CACHE", str(cache))
        made = functions() | {"halves": function("halves", halves, (N, N), into=(0, 1, 2))}
        patch.setattr(compile_worker, "compile_jobs", saying(seen, compile_worker.compile_jobs))
        check(building.build(made, "inductor", fz.make_mesh(data=1)))
    return cache, seen


@pytest.fixture
def warm(cold, folder) -> Path:
    """A copy of that cache, in use."""
    shutil.copytree(cold[0], folder.parent, dirs_exist_ok=True)
    return folder


def ready_compile_jobs(source: Path, jobs: Any, cache: Cache, cores: int, done: Any) -> dict[str, str]:
    """Takes no time: what the real one once made."""
    for job in jobs:
        entry = Cache(source / "functions").read(job.key)
        assert entry is not None
        cache.write(job.key, entry)
        done(job.name)
    cache.trim()
    return {}


def test_results_that_lie_in_other_memory_are_copied_to_their_buffers(warm):
    """Two that are parts of one tensor, and one that is made in another order than its buffer's."""
    made = function("halves", halves, (N, N), into=(0, 1, 2))
    built = building.build({"halves": made}, "inductor", fz.make_mesh(data=1))["halves"]
    buffers = [torch.zeros(N // 2, N), torch.zeros(N // 2, N), torch.zeros(N, N)]
    x = torch.randn(N, N)
    got = built(x, into=buffers)
    assert all(a is b for a, b in zip(got, buffers, strict=True))
    torch.testing.assert_close(tuple(buffers), tuple(halves(x)))
    entry = Cache(warm).read(key_of(made))
    assert entry is not None and entry.text.count(".copy_(") == 3


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    return tmp_path / "functions"


def test_a_gradient_that_the_backward_lays_out_transposed(cold):
    """The functions that read a gradient are compiled for a contiguous one."""

    def loss_fn(p, x):
        return (x @ p["w"].t().contiguous().pow(2)).square().mean()

    adamw = fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(0.1))
    w, x = torch.randn(48, 32), torch.randn(8, 32)
    found = []
    for backend in ("eager", "inductor"):
        train = fz.compile(fz.train_step(loss_fn, adamw), fz.make_mesh(data=1), backend=backend)
        state = train.init({"w": w})
        for _ in range(2):
            state, _ = train(state, x)
        found.append(state.params["w"])
    torch.testing.assert_close(*found)


def test_what_is_compiled_is_kept_for_its_owner(cold):
    cache, seen = cold
    generated, ready = seen[:4], seen[4:]
    assert {name for name, _ in generated} == {name for name, _ in ready} == {*functions(), "halves"}
    said = [f"generated code of {n} of 4 functions" for n in (1, 2, 3)] + ["compiling the code of 4 functions"]
    said += [*(f"compiled {n} of 4 functions" for n in (1, 2, 3)), "loading compiled functions"]
    assert [text for _, text in seen] == said
    entries = sorted((cache / "functions").iterdir())
    assert (
        len(entries) == 4
        and {p.suffix for p in entries} == {".so"}
        and {stat.S_IMODE(p.stat().st_mode) for p in entries} == {0o600}
    )
    assert stat.S_IMODE((cache / "functions").stat().st_mode) == 0o700


def test_a_second_build_compiles_nothing_and_a_damaged_entry_is_compiled_again(cold, warm, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(compile_worker, "compile_jobs", lambda *args: pytest.fail("something is compiled"))
        check(building.build(functions(), "inductor", fz.make_mesh()))

    code = f"""
import sys, torch
from pathlib import Path
from fzero.runtime.build.cpu import cpp_kernels
from fzero.runtime.build.artifact_cache import Cache
cache = Cache(Path({str(warm)!r}))
for path in cache.folder.iterdir():
    cpp_kernels.function_of("any", cache.read(path.stem).text, cpp_kernels.load_library(path), [])
print(sorted({{"torch._dynamo", "torch._inductor", "torch._inductor.compile_fx", "sympy"}} & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"  # what makes a start fast and small: loading needs nothing of the compiler

    entry = Cache(warm).path(key_of(functions()["literal"]))
    entry.write_bytes(entry.read_bytes()[:-100])
    monkeypatch.setattr(compile_worker, "compile_jobs", functools.partial(ready_compile_jobs, cold[0]))
    with caplog.at_level(logging.INFO, "fzero"):
        check(building.build(functions(), "inductor", fz.make_mesh()))
    assert "compiled 1 of 1: literal" in caplog.text and any(f"{entry} is damaged" in r.message for r in caplog.records)
    assert all(r.levelno <= logging.INFO for r in caplog.records)
    assert len(list(warm.glob("*.so"))) == 4


MEETING = """
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
extern "C" void kernel(int64_t* mine, const int64_t* theirs, const int64_t patience_s) {
    using clock = std::chrono::steady_clock;
    reinterpret_cast<std::atomic<int64_t>*>(mine)->store(1);
    for (auto end = clock::now() + std::chrono::seconds(patience_s); clock::now() < end; std::this_thread::yield())
        if (reinterpret_cast<const std::atomic<int64_t>*>(theirs)->load()) return;
    throw std::runtime_error("the other kernel did not come");
}
"""
"""Returns once the same kernel has begun in another thread."""


def library(path: Path, *made: cpp_kernels.CppKernel) -> Path:
    path.write_bytes(
        compile_worker._compile_cpp(cpp_kernels.library_source(made), compat.inductor_cpp_command(trust_cpu=True))
    )
    return path


@pytest.fixture(scope="module")
def meeting(tmp_path_factory) -> Path:
    return library(
        tmp_path_factory.mktemp("kernels") / "kernels.so",
        cpp_kernels.CppKernel(MEETING, ("int64_t*", "const int64_t*", "const int64_t")),
    )


@pytest.fixture
def meet(meeting) -> Any:
    return cpp_kernels.load_library(meeting).kernel_0  # type: ignore[attr-defined]


def test_libraries_loaded_again_keep_their_own_kernels(meeting, tmp_path):
    """A second step in one process loads what the first has loaded; Python takes an extension of a known name and file
    for the module loaded last."""
    kernel = 'extern "C" void kernel(int64_t* x) { *x += %d; }'
    paths = (
        meeting,
        library(tmp_path / "kernels.so", *(cpp_kernels.CppKernel(kernel % n, ("int64_t*",)) for n in (1, 10))),
    )
    first = [cpp_kernels.load_library(p) for p in paths]
    again = [cpp_kernels.load_library(p) for p in paths]
    assert len({id(m) for m in first + again}) == 4
    for before, after in zip(first, again, strict=True):
        assert [n for n in vars(before) if n.startswith("kernel_")] == [
            n for n in vars(after) if n.startswith("kernel_")
        ]
    x = torch.zeros(1, dtype=torch.int64)
    for module in (first[1], again[1]):
        module.kernel_0(x), module.kernel_1(x)  # type: ignore[attr-defined]
    assert x.item() == 22


def test_kernels_of_two_threads_run_at_once(meet):
    """With the interpreter's lock held the second would not begin before the first had given up."""
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(meet, one, two, 60), threads.submit(meet, two, one, 60)]:
            done.result()
    assert one.item() == two.item() == 1


def test_what_fails_in_a_kernel_or_before_it_is_an_exception(meet):
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="the other kernel did not come"):
        meet(one, two, 0)
    one.zero_()
    with pytest.raises(TypeError):
        meet(one, two, 0.5)
    with pytest.raises(TypeError, match="takes 3 arguments"):
        meet(one, two)
    assert one.item() == 0  # it did not begin


def test_without_a_cache_every_build_compiles_and_says_so(cold, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FZERO_CACHE", "off")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(compile_worker, "compile_jobs", functools.partial(ready_compile_jobs, cold[0]))
    one = {"literal": functions()["literal"]}
    for _ in range(2):
        with caplog.at_level(logging.INFO, "fzero"):
            run = building.build(one, "inductor", fz.make_mesh())["literal"]
        torch.testing.assert_close(run(torch.ones(N, N)), literal(torch.ones(N, N))[0])
    assert sum(r.message.startswith("compiled 1 of 1: literal, ") for r in caplog.records) == 2
    assert not list(tmp_path.iterdir())


def fake_compile_jobs(jobs: Any, cache: Cache, cores: int, done: Any) -> dict[str, str]:
    """Takes no time: functions that return their first argument."""
    for job in jobs:
        cache.write(job.key, CacheEntry("def call(x, *rest, **into): return x", b""))
        done(job.name)
    cache.trim()
    return {}


def compile_failing(*args: Any) -> Any:
    raise FzeroError("fzero.compile: no such luck")


def build_on_rank(
    folder: Path, compile_by: Sequence[Any], absent: bool = False, wanted: Sequence[Sequence[str]] = ()
) -> list[str]:
    os.environ["FZERO_CACHE"] = str(folder)
    compiled: list[tuple[str, str]] = []
    mesh = fz.make_mesh(data=-1, timeout=2 if absent else 240)
    kept, compile_worker.compile_jobs = compile_worker.compile_jobs, saying(compiled, compile_by[mesh.rank])
    try:
        with ending(folder, last=absent and mesh.rank == 1):
            if not absent or mesh.rank == 0:
                of = {name: f for name, f in functions().items() if not wanted or name in wanted[mesh.rank]}
                run = building.build(of, "inductor", mesh)
                assert [*run] == [*of]
                if not wanted:
                    check(run)
    finally:
        compile_worker.compile_jobs = kept
    assert not compiled or compiled[-1][1] == "waiting for functions that other ranks compile"
    return [name for name, _ in compiled]


def test_two_ranks_compile_each_function_once_between_them(run_ranks, cold, tmp_path):
    compile_by = [functools.partial(ready_compile_jobs, cold[0])] * 2
    first, second = run_ranks(2, build_on_rank, tmp_path, compile_by)
    assert sorted(first + second) == ["into", "literal", "several"] and first and second
    assert len(list((tmp_path / "functions").glob("*.so"))) == 3
    assert run_ranks(2, build_on_rank, tmp_path, [compile_failing] * 2) == [[], []]


def test_ranks_that_need_others_compile_what_they_share_once(run_ranks, cold, tmp_path):
    """As the stages of a pipeline, which have equal blocks."""
    compile_by = [functools.partial(ready_compile_jobs, cold[0])] * 3
    wanted = [["several", "into"], ["several", "literal"], ["several"]]
    compiled = run_ranks(3, build_on_rank, tmp_path, compile_by, False, wanted)
    assert compiled == [["into"], ["literal"], ["several"]]


def test_a_rank_that_cannot_compile_is_named_on_the_others(run_ranks, tmp_path):
    waiting, failed = run_ranks(2, build_on_rank, tmp_path, [fake_compile_jobs, compile_failing], expect_error=True)
    assert failed.type == "FzeroError"
    assert (
        waiting.type == "DivergenceError"
        and "rank 1: fzero.compile: no such luck" in waiting.message
        and "FZERO_CACHE=off" in waiting.message
    )


def test_a_rank_that_does_not_come_is_named(run_ranks, tmp_path):
    waiting, _ = run_ranks(2, build_on_rank, tmp_path, [fake_compile_jobs] * 2, absent=True, expect_error=True)
    assert waiting.type == "DivergenceError" and "rank 1 timed out after 2 s" in waiting.message


def test_the_compilers_words_are_shown(folder, monkeypatch):
    """Those of the second try, which leaves it to Inductor what the CPU has."""
    import torch._inductor.config as config

    ask, tries = compile_worker._ask, []

    def second(*args: Any, trust_cpu: bool) -> dict[str, Any]:
        tries.append(trust_cpu)
        return (
            {"failed": "an instruction that the assembler does not know"} if trust_cpu else ask(*args, trust_cpu=False)
        )

    monkeypatch.setattr(compile_worker, "_ask", second)
    one = {"literal": functions()["literal"]}
    with config.patch({"cpp.cxx": (sys.executable,)}), pytest.raises(FzeroError) as error:  # which is no C++ compiler
        building.build(one, "inductor", fz.make_mesh())
    assert (
        tries == [True, False]
        and "functions cannot be compiled" in str(error.value)
        and "backend='eager'" in str(error.value)
    )


def test_a_torch_with_another_inductor_inside_compiles_in_its_public_way(folder, monkeypatch, caplog):
    """A release that renames what `compat.inductor_lower` patches: slower, and not an error."""
    import torch._inductor.config as config

    def renamed(*args: Any) -> Any:
        raise AttributeError("module 'torch._inductor.async_compile' has no attribute 'AsyncCompile'")

    def ask(jobs: Any, cache: Cache, cores: int, done: Any, trust_cpu: bool) -> dict[str, Any]:
        try:
            return {"skipped": compile_worker._work(jobs, cache, cores, trust_cpu, done)}
        except Exception as error:
            return {"failed": f"Traceback\n{type(error).__name__}: {error}"}

    monkeypatch.setattr(compile_worker, "_ask", ask)  # in this process, where a name can be made to be missing
    monkeypatch.setattr(compat, "inductor_lower", renamed)
    with caplog.at_level(logging.INFO, "fzero"), config.patch({"cpp.vec_isa_ok": True}):  # no probes
        run = building.build({"literal": functions()["literal"]}, "inductor", fz.make_mesh())["literal"]
    torch.testing.assert_close(run(torch.ones(N, N)), literal(torch.ones(N, N))[0])
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "does not compile as expected: AttributeError: " in warning


def test_a_function_that_is_not_plain_is_compiled_by_inductor_itself(folder, monkeypatch, caplog):
    import torch._inductor.config as config

    monkeypatch.setattr(compile_worker, "compile_jobs", lambda jobs, *args: {job.name: "a surprise" for job in jobs})
    one = {"literal": functions()["literal"]}
    with caplog.at_level(logging.INFO, "fzero"), config.patch({"cpp.vec_isa_ok": True}):  # no probes
        run = building.build(one, "inductor", fz.make_mesh())["literal"]
    torch.testing.assert_close(run(torch.ones(N, N)), literal(torch.ones(N, N))[0])
    assert any(
        "literal is compiled at every start, because its code contains a surprise" in r.message for r in caplog.records
    )


# --- the key ---


def key_of(f: Function, device: torch.device = CPU) -> str:
    return caching.key(f.graph, f, device)


def test_the_key_is_of_the_function_not_of_its_name():
    assert key_of(function("one", several, (N, N), (N, N))) == key_of(function("other", several, (N, N), (N, N)))


@pytest.mark.parametrize(
    "other",
    [
        function("f", literal, (N + 0, N), dtype=torch.float64),
        function("f", literal, (N + 1, N)),
        function("f", lambda x: [(x * torch.tensor([2.0, 4.0]).repeat(N // 2)).exp()], (N, N)),
        function("f", lambda x: [(x * torch.tensor([2.0, 3.0]).repeat(N // 2)).sin()], (N, N)),
        function("f", lambda x: [literal(x)[0], x], (N, N)),
        replace(functions()["literal"], into=(0,)),
        replace(functions()["literal"], writes=(0,)),
    ],
    ids=["dtype", "shape", "literal", "operation", "results", "into", "writes"],
)
def test_the_key_changes_with_the_function(other):
    assert key_of(other) != key_of(functions()["literal"])


def test_the_key_changes_with_the_strides_of_an_input():
    f = functions()["literal"]
    before = key_of(f)
    node = f.graph.inputs[0]
    node.meta["val"] = node.meta["val"].t()
    assert key_of(f) != before


def test_the_key_changes_with_where_and_how_it_is_compiled(monkeypatch):
    import torch._inductor.config as config

    f = functions()["literal"]
    keys = [key_of(f)]
    for change in (
        lambda patch: patch.setattr(torch, "__version__", "2.99"),
        lambda patch: patch.setattr(caching, "FORMAT", caching.FORMAT + 1),
        lambda patch: patch.setattr(caching, "_hardware", lambda device: ("cpu", "another")),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 7),
        lambda patch: patch.setattr(compat, "native_bf16", lambda device: None),
        lambda patch: patch.setattr(sys.implementation, "cache_tag", "cpython-399"),
        lambda patch: patch.setenv("CXX", "another"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            keys.append(key_of(f))
    with config.patch({"cpp.min_chunk_size": 17}):
        keys.append(key_of(f))
    assert len(set(keys)) == len(keys)
    assert key_of(f) == keys[0]


# --- the files ---


ENTRY = CacheEntry("def call(): pass", b"a library" * 100)


def test_an_entry_comes_back_as_it_was(tmp_path):
    cache = Cache(tmp_path)
    assert cache.read("key") is None
    cache.write("key", ENTRY)
    cache.write("key", ENTRY)
    assert cache.read("key") == ENTRY and [p.name for p in tmp_path.iterdir()] == ["key.so"]


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:500], lambda d: d[:-1], lambda d: d + b"x", lambda d: b"x" + d[1:]]
)
def test_a_damaged_entry_is_no_entry(tmp_path, damage):
    cache = Cache(tmp_path)
    cache.write("key", ENTRY)
    path = cache.path("key")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read("key") is None and not path.exists()


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Cache(tmp_path).write("key", ENTRY)
    assert not list(tmp_path.iterdir())


def test_what_was_used_longest_ago_leaves_first(tmp_path):
    size = len(ENTRY.library) + len(ENTRY.text) + caching._FOOTER.size
    cache = Cache(tmp_path, limit=2 * size)
    for age, name in enumerate("abc"):
        cache.write(name, ENTRY)
        os.utime(cache.path(name), (1000 + age, 1000 + age))
    (tmp_path / ".x.tmp").write_text("of a writer that died")
    os.utime(tmp_path / ".x.tmp", (1000, 1000))
    (tmp_path / ".y.tmp").write_text("of one that is writing")
    assert cache.read("a") == ENTRY  # used now
    cache.trim()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".y.tmp", "a.so", "c.so"]
    Cache(tmp_path, limit=0).trim()
    assert not list(tmp_path.glob("*.so"))


def test_an_artifact_is_loaded_with_its_literals():
    f = functions()["literal"]
    saved = compat.artifact_bytes(inductor._artifact(f, f.graph, CPU))
    x = torch.randn(N, N)
    torch.testing.assert_close(inductor._called(f, f.graph, compat.load_artifact(saved))(x), literal(x)[0])


def test_a_cache_that_keeps_nothing_still_builds(folder, monkeypatch):
    monkeypatch.setenv("FZERO_CACHE_LIMIT", "0")
    monkeypatch.setattr(compile_worker, "compile_jobs", fake_compile_jobs)
    seen: list[str] = []
    monkeypatch.setattr("fzero.runtime.build.inductor.shown", lambda what, text: seen.append(text()) or nullcontext())
    built = building.build(functions(), "inductor", fz.make_mesh())
    assert set(built) == {"several", "into", "literal"} and built["literal"](5) == 5
    assert not list(folder.glob("*.so"))
    assert seen == ["loading compiled functions (backend='eager' starts without compiling)"]


@pytest.mark.parametrize(("text", "size"), [("", 10 * 2**30), ("1000", 1000), ("2GiB", 2**31), ("1.5 MB", 1_500_000)])
def test_the_limit_is_a_size(folder, monkeypatch, text, size):
    monkeypatch.setenv("FZERO_CACHE_LIMIT", text)
    assert open_cache() == Cache(folder, size)


def test_a_limit_that_is_no_size_is_an_error(folder, monkeypatch):
    monkeypatch.setenv("FZERO_CACHE_LIMIT", "plenty")
    with pytest.raises(FzeroValueError) as error:
        open_cache()
    assert "FZERO_CACHE_LIMIT='plenty'" in str(error.value) and "10GiB" in str(error.value)


def test_a_folder_that_others_can_write_to_is_not_used(folder, caplog):
    folder.mkdir()
    folder.chmod(0o777)
    assert open_cache() is None and "can be written to by other users" in caplog.text


def test_a_folder_that_cannot_be_made_is_not_used(folder, caplog):
    folder.write_text("a file in its place")
    assert open_cache() is None and "is not used" in caplog.text


# --- Inductor's code ---


def lowered(body: str, head: str = "", writes: tuple[int, ...] = ()) -> compat.InductorOutput:
    lines = [
        "    def call(self, args):",
        "        arg0_1, arg1_1 = args",
        "        args.clear()",
        *(f"        {line}" for line in body.splitlines()),
    ]
    return compat.InductorOutput("\n".join([head, "class Runner:", *lines]), 2, writes)


KERNEL = (
    "cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''\n#include <x.h>\nextern \"C\" void "
    "kernel(const float* a, float* b) {}\n''')"
)


def test_a_plain_function_is_cut_out():
    code = (
        "buf0 = empty_strided_cpu((2, ), (1, ), torch.float32)\ncpp_fused_0(arg0_1, buf0)\ndel arg0_1\nreturn (buf0, )"
    )
    plain = cpp_kernels.parse(lowered(code, KERNEL), 2, 1, ())
    (kernel,) = plain.kernels.values()
    text = cpp_kernels.text_of(plain, {kernel: 5}, 2, (), 1)
    assert (
        text.splitlines()[0] == "def call(arg0_1, arg1_1):"
        and "kernel_5(arg0_1, buf0)" in text
        and text.splitlines()[-1] == "    return buf0"
    )
    source = cpp_kernels.library_source([kernel])
    assert (
        source.count("#include <x.h>") == 1
        and "void kernel_0(const float* a" in source
        and "argument<float*>(args[1])" in source
    )


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lowered("return (arg0_1, arg1_1, )"), "inputs, outputs and writes (2, 2, ())"),
        (lowered("return (arg0_1, )", writes=(1,)), "writes (2, 1, (1,))"),
        (lowered("return (mystery(arg0_1), )"), "names that are not torch's: mystery"),
        (lowered("return (extern_kernels.bias_addmm(arg0_1), )"), "extern_kernels.bias_addmm"),
        (lowered("return (arg0_1, )", "k = async_compile.triton('k', 'source')"), "kernels of the kind triton"),
        (lowered("return (arg0_1, )", KERNEL.replace("{}", "{ kernel(a, b); }")), "several functions"),
        (lowered("if arg0_1:\n    return (arg0_1, )\nreturn (arg0_1, )"), "results of an unexpected form"),
        (compat.InductorOutput("x = 1", 2, ()), "0 functions"),
    ],
)
def test_code_that_is_more_than_a_function_over_kernels_is_refused(made, why):
    with pytest.raises(cpp_kernels.NotPlain) as error:
        cpp_kernels.parse(made, 2, 1, ())
    assert why in str(error.value)


def test_a_function_arrives_in_another_process_as_it_was():
    """Also what makes a tensor of nothing: a pickled GraphModule would have run it, and arrive with a literal."""

    def made(x, index):
        rows = torch.arange(4, dtype=torch.float32)[:, None] + torch.zeros(4, 3)
        whole = torch.cat([x, rows])[index, 1:].clone(memory_format=torch.contiguous_format)
        return [whole, x.sum([0, 1], keepdim=True).to(torch.bfloat16)]

    x, index = torch.randn(2, 3), torch.tensor([0, 5])
    with compat.FakeTensorMode() as mode:
        graph = record(made, [mode.from_tensor(x), mode.from_tensor(index)], owner="made", names=["x", "index"])
    plain = graph_pickle.plain(graph.graph)
    assert graph_pickle.Constant("contiguous_format") in [n[4].get("memory_format") for n in plain]
    arrived = graph_pickle.restored(pickle.loads(pickle.dumps(plain)))
    ops = lambda g: [str(n.target) for n in g.nodes]  # noqa: E731
    assert ops(arrived.graph) == ops(graph.graph) and any("arange" in op for op in ops(arrived.graph))
    assert all(torch.equal(a, b) for a, b in zip(arrived(x, index), made(x, index), strict=True))


def test_operators_of_ours_are_known_where_functions_are_compiled(tmp_path):
    """A process that compiles imports little: the modules that define them come with the graph."""
    from fzero.ops import block_quantization as quant_blocks
    from fzero.ops import ctc, index_sums, recurrent, scaled_matmul

    ours = [random.DRAW, random.DERIVE, index_sums.ADD_AT, quant_blocks.BLOCK_MAX, scaled_matmul.scaled_mm]
    ours += [recurrent.layer, recurrent.network_backward, *ctc.CTC.values(), torch.ops.aten.neg.default]
    graph = fx.Graph()
    for op in ours:
        graph.call_function(op)
    graph.output(())
    path = tmp_path / "graph"
    path.write_bytes(pickle.dumps(graph_pickle.plain(graph)))
    code = "import pickle, sys; from pathlib import Path\n"
    code += "from fzero.runtime.build.cpu import compile_worker, graph_pickle\n"
    code += "nodes = graph_pickle.restored(pickle.loads(Path(sys.argv[1]).read_bytes())).graph.nodes\n"
    code += "print(*[n.target for n in nodes if n.op == 'call_function'])"
    end = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert end.stdout.split() == [str(op) for op in ours], end.stderr


def test_large_work_is_compiled_in_several_units():
    jobs = [compile_worker.CompileJob(str(i), str(i), None, (), 0, 0, (), ()) for i in range(5)]  # type: ignore[arg-type]
    plain = {
        str(i): cpp_kernels.Plain(None, {"k": cpp_kernels.CppKernel("x" * 60_000 * (i + 1), ())}) for i in range(5)
    }  # type: ignore[arg-type]
    assert [len(unit) for unit in compile_worker._units(jobs, plain, 1)] == [5]
    units = compile_worker._units(jobs, plain, 4)
    assert len(units) == 4 and sorted(job.key for unit in units for job in unit) == list("01234")
    assert [len(unit) for unit in compile_worker._units(jobs[:1], plain, 4)] == [1]


def drawn(key, start, x):
    first, second = fz.random.split(key)
    third = fz.random.fold_in(second, 1 << 40)
    return [
        fz.random.bits(first, (N, N)),
        fz.random.dropout(second, x, 0.3),
        fz.random.split(first, 700),
        random.DRAW_FROM(third, start, [5, N], 1 << 33, "normal"),
    ]


@pytest.mark.usefixtures("compiled_here", "folder")
def test_draws_are_compiled_as_they_are():
    """To the bit what eager draws are, up to `log` and `cos`: not as hundreds of operations each, which Inductor would
    write out once for every path that leads to them."""
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(3, dtype=torch.int64), torch.empty((), dtype=torch.int64), torch.empty(N, N)]
        made = Function("drawn", record(drawn, fakes, owner="drawn", names=["key", "start", "x"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "DECOMPOSITIONS", {})
        run = building.build({"drawn": made}, "inductor", fz.make_mesh())["drawn"]
    args = random.with_part(random.key(5), 3), torch.tensor((1 << 33) - 7), torch.randn(N, N)
    *exact, normal = zip(run(*args), drawn(*args), strict=True)
    for got, want in exact:
        assert torch.equal(got, want)
    torch.testing.assert_close(*normal)


def test_what_the_host_runs_is_made_on_the_host():
    """A function recorded for another device: its literals and what it makes anew follow the host's tensors."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    ones = graph.call_function(
        torch.ops.aten.full.default, ([4], 2.0), {"dtype": torch.float32, "device": torch.device("cuda")}
    )
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, ones)),))
    (out,) = on_host(Recorded(graph)).module()(torch.ones(4))
    assert torch.equal(out, torch.full((4,), 2.0))
    assert [n.kwargs["device"].type for n in graph.nodes if "device" in n.kwargs] == ["cuda"], (
        "the recorded one stays as it is"
    )


def test_what_is_substituted_for_the_host_is_on_the_host():
    """An update that draws, recorded on a GPU's tensors: what an operator of our own stands for is recorded again, on
    the tensors of the host."""
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(5, 3, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")]
        graph = record(
            lambda p, key: [p + fz.random.normal(key, p.shape), p.square().sum((0, 1)).expand(2)],
            given,
            owner="optimizer",
            names=["p", "key"],
        )
    assert {n.meta["val"].device.type for n in graph.inputs} == {"cuda"}
    here = substituted(on_host(graph), random.DECOMPOSITIONS)
    values = [n.meta["val"] for n in here.graph.nodes if "val" in n.meta]
    assert len(values) > 10 and {v.device.type for v in values} <= {"cpu", "meta"}
    assert {n.kwargs["device"].type for n in here.graph.nodes if n.kwargs.get("device")} == {"cpu"}
    p, key = torch.randn(5, 3), fz.random.key(1)
    torch.testing.assert_close(here.module()(p, key)[0], p + fz.random.normal(key, (5, 3)))
    assert {n.meta["val"].device.type for n in graph.inputs} == {"cuda"}, "the recorded one stays as it is"
