"""Compiles subgraphs with Inductor: loads them from the cache, compiles them in a worker process or in this process, or
lets another rank compile them and shares its result.

`Compilation.wait` returns when all subgraphs are compiled. `Compilation.start` and `advance` do the same in the
background of a step that is already running (runtime/warm_up.py).
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fzero import random
from fzero._compat import compat
from fzero._utils.procfs import boot_id
from fzero._utils.progress import shown
from fzero.comm.local_device import idle
from fzero.errors import FzeroError
from fzero.ir.program import Function
from fzero.mesh import Mesh
from fzero.runtime.build.artifact_cache import Cache, CacheEntry, key, logger, open_cache
from fzero.runtime.build.calling_convention import as_called
from fzero.runtime.build.cpu import compile_worker, cpp_kernels, graph_pickle
from fzero.runtime.build.shared_compilation import Share
from fzero.trace.device_decompositions import substituted
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import into_buffers

Functions = Mapping[str, tuple[Function, Recorded]]
"""By name: subgraphs, and their graphs as they are compiled."""


class Compilation:
    """Subgraphs that are compiled for a device. All ranks of the mesh construct it together.

    Args:
        functions: the subgraphs.
        mesh: the ranks, which divide the work.
        device: the device that the subgraphs run on: that of the mesh, or its host.
        title: what they are compiled for, for the progress line.

    Attributes:
        built: the subgraphs that this rank can call so far, as `build.build` returns them.
    """

    def __init__(self, functions: Functions, mesh: Mesh, device: torch.device, title: str = ""):
        self._functions, self._mesh, self._device, self._title = functions, mesh, device, title
        self._start, self._num_compiled = time.perf_counter(), 0
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_last_try = False
        self._worker: Future[_Answer] | None = None  # in the background
        self._keys = {name: key(graph, function, device) for name, (function, graph) in functions.items()}
        found = open_cache()
        # Without a cache, the rank takes the place of the cache's identity, so that no two ranks seem to share one and
        # each compiles everything.
        identity = found.identity() if found is not None else mesh.rank
        self._keeps, self._cache = found is not None and found.limit > 0, found or self._cache_of_its_own()
        self._libraries: dict[str, Any] = {}
        self.built: dict[str, Callable[..., Any]] = {}
        self._load()
        # The time to compile a subgraph grows roughly with its number of nodes. Only ratios matter: they divide the
        # work. The division is computed from the keys of all subgraphs, including those that are cached, so that ranks
        # which find different entries in the cache still agree on it.
        costs = {self._keys[name]: float(len(graph.graph.nodes)) for name, (_, graph) in functions.items()}
        self._share = Share(mesh, boot_id(), identity, costs)
        self._progress = _Progress(mesh.size > 1)
        if device != mesh.device and mesh.rank == 0 and (text := idle(torch.get_num_threads(), self._share.cores)):
            logger.warning("fzero.compile: %s", text)

    @property
    def missing(self) -> list[str]:
        """The names of the subgraphs that this rank cannot call yet."""
        return [name for name in self._functions if name not in self.built]

    def wait(self) -> dict[str, Callable[..., Any]]:
        """Returns all subgraphs, after all ranks have compiled their shares. All ranks call it."""
        then = "; then cached" if self._keeps else ""
        with self._shown(f"{then} (backend='eager' starts without compiling)"):
            self._share.deliver(lambda: self._compile(self._mine()))
            self._load()  # the cache now also holds what other ranks have compiled
            while self.missing:
                self._compile(self._left_over())
                self._load()
        self._end()
        return self.built

    # --- in the background ---

    def start(self) -> None:
        """Begins to compile this rank's share in the background. Only for the CPU, for which another process compiles:
        Inductor in this process would hold up the steps that run meanwhile."""
        self._ask(self._mine())

    @property
    def is_working(self) -> bool:
        """Whether this rank compiles in the background."""
        return self._worker is not None

    def advance(self, all_delivered: bool) -> None:
        """Loads the subgraphs that have become ready since the last call.

        Args:
            all_delivered: whether no rank is compiling any more. What is still missing then is compiled by this rank.

        Raises:
            FzeroError: a subgraph cannot be compiled.
        """
        if self._worker is not None and self._worker.done():
            worker, self._worker = self._worker, None
            self._compile_here(worker.result())
        self._load()
        if not self.missing:
            self._end()
        elif all_delivered and self._worker is None:
            self._ask(self._left_over())

    def join(self) -> None:
        """Waits until this rank has compiled what it is compiling in the background."""
        if self._worker is not None:
            with self._shown():
                wait([self._worker])

    def _ask(self, names: list[str]) -> None:
        if jobs := self._jobs(names):
            self._worker = _in_background(lambda: _answer(jobs, self._cache, self._share.cores, self._progress))

    # --- the steps of both ---

    def _shown(self, more: str = "") -> AbstractContextManager[None]:
        """Shows the progress on the first rank."""
        of = f"{self._title}: " if self._title else ""
        text = lambda: f"{of}{self._progress}{more}"  # noqa: E731
        return shown("fzero.compile", text) if self._mesh.rank == 0 else nullcontext()

    def _mine(self) -> list[str]:
        return [n for n in self.missing if self._keys[n] in self._share.mine]

    def _left_over(self) -> list[str]:
        """Returns the subgraphs that are missing although all ranks have delivered theirs: the cache is too small, or
        another process clears it. They are compiled into a folder of this rank's own."""
        if self._is_last_try:
            fix = "look at the log `fzero` at level INFO; backend='eager' needs no compiler"
            raise FzeroError("compile", "functions were compiled and cannot be loaded", self.missing, fix)
        self._is_last_try = True
        if self._own_folder is None:
            self._cache = self._cache_of_its_own()
        return self.missing

    def _cache_of_its_own(self) -> Cache:
        self._own_folder = tempfile.TemporaryDirectory(prefix="fzero-functions-")
        return Cache(Path(self._own_folder.name))

    def _load(self) -> None:
        """Adds to `built` the missing subgraphs that the cache holds."""
        for name in self.missing:
            if (run := self._loaded(name)) is not None:
                self.built[name] = run

    def _compile(self, names: list[str]) -> None:
        """Compiles subgraphs into the cache. Those that are returned as callables (all of them on a GPU, on a CPU only
        those that a cache cannot hold) are added to `built`."""
        if self._device.type == "cpu":
            if jobs := self._jobs(names):
                self._compile_here(_answer(jobs, self._cache, self._share.cores, self._progress))
        else:
            self._compile_artifacts(self._distinct(names))

    def _distinct(self, names: list[str]) -> list[str]:
        """Returns one name for each key, and begins to count the progress of these subgraphs."""
        distinct = list({self._keys[name]: name for name in names}.values())
        self._num_compiled += len(distinct)
        self._progress = _Progress(self._mesh.size > 1, len(distinct), self._start)
        return distinct

    def _jobs(self, names: list[str]) -> list[compile_worker.CompileJob]:
        return [_job(self._keys[name], name, *self._functions[name]) for name in self._distinct(names)]

    def _compile_here(self, answer: _Answer) -> None:
        """Compiles in this process, through Inductor's public API, what the worker process could not compile."""
        reasons = {self._keys[name]: why for name, why in answer.skipped.items()}
        for name in [n for n in self.missing if self._keys[n] in reasons]:
            why, (function, graph) = reasons[self._keys[name]], self._functions[name]
            logger.info("%s is compiled at every start, because its code contains %s", name, why)
            try:
                self.built[name] = _called(function, graph, _artifact(function, graph, self._device))
            except Exception as error:
                said = [*answer.words, *str(error).strip().splitlines()[-20:]]
                fix = "look at the compiler's output above; backend='eager' needs no compiler"
                raise FzeroError("compile", "functions cannot be compiled", said, fix) from error
            self._progress(name)

    def _compile_artifacts(self, names: list[str]) -> None:
        """Compiles subgraphs in this process, into the cache, for devices whose compiled kernels are part of an
        Inductor artifact."""
        for name in names:
            function, graph = self._functions[name]
            artifact = _artifact(function, graph, self._device, self._share.cores)
            try:
                self._cache.write(self._keys[name], CacheEntry("", compat.artifact_bytes(artifact)))
            except (RuntimeError, AssertionError, OSError) as error:
                logger.info("%s is compiled at every start: %s", name, error)
            self.built[name] = _called(function, graph, artifact)
            self._progress(name)
        if names:
            self._cache.trim()

    def _loaded(self, name: str) -> Callable[..., Any] | None:
        path = self._cache.path(self._keys[name])
        if (entry := self._cache.read(self._keys[name])) is None:
            return None
        try:
            return self._callable(name, entry, path)
        except Exception as error:
            # an intact entry of another build of PyTorch or of its compiler; loading it can raise any kind of error
            logger.info(
                "the cached function %s cannot be loaded and will be compiled again: %s: %s",
                path,
                type(error).__name__,
                error,
            )
            # Removed, because otherwise every start would try to load it again, and the new entry is written under the
            # same key.
            path.unlink(missing_ok=True)
            return None

    def _callable(self, name: str, entry: CacheEntry, path: Path) -> Callable[..., Any]:
        """Makes a cache entry callable. Entries that were compiled together share a library, which is loaded once."""
        function, graph = self._functions[name]
        if not entry.text:
            return _called(function, graph, compat.load_artifact(entry.library))
        library = None
        if entry.library:
            library = self._libraries.get(entry.digest) or cpp_kernels.load_library(path)
            self._libraries[entry.digest] = library
        return cpp_kernels.function_of(name, entry.text, library, [graph.constants[n] for n in _literals(graph)])

    def _end(self) -> None:
        if self._own_folder is not None:
            self._own_folder.cleanup()
        taken = time.perf_counter() - self._start
        text = "built %d functions in %.1f s, of which rank %d compiled %d"
        logger.info(text, len(self._functions), taken, self._mesh.rank, self._num_compiled)


class _Answer(NamedTuple):
    """The outcome of a worker process.

    Attributes:
        skipped: the names of subgraphs that it could not compile, with the reasons.
        words: the last lines of its error message.
    """

    skipped: Mapping[str, str]
    words: Sequence[str] = ()


def _answer(jobs: Sequence[compile_worker.CompileJob], cache: Cache, cores: int, done: compile_worker.Done) -> _Answer:
    """Compiles subgraphs for the CPU in a separate process, into a cache.

    If that fails because this torch contains another Inductor than is known here, all subgraphs are skipped: they are
    then compiled through Inductor's public API, which is slower.
    """
    try:
        return _Answer(compile_worker.compile_jobs(jobs, cache, cores, done))
    except compile_worker.Failed as failed:
        words = str(failed).strip().splitlines()[-20:]
        logger.warning(
            (
                "fzero.compile: every start compiles all functions again, because "
                "this version of torch does not compile as expected: %s"
            ),
            words[-1],
        )
        why = f"what torch {torch.__version__} cannot put in a cache: {words[-1]}"
        return _Answer(dict.fromkeys((job.name for job in jobs), why), words)


def _in_background(act: Callable[[], _Answer]) -> Future[_Answer]:
    """Runs `act` in a thread that does not keep the process from ending."""
    future = Future[_Answer]()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fzero-compile", daemon=True).start()
    return future


@dataclass
class _Progress:
    """The text that shows how many subgraphs this rank has compiled. It is called as `compile_worker.Done`.

    Attributes:
        others: whether other ranks compile too.
        num: number of subgraphs that this rank compiles.
        start: the time when compilation began.
        generated: names of the subgraphs whose code has been generated, by the first attempt or the second.
        ready: number of subgraphs that have been compiled.
    """

    others: bool
    num: int = 0
    start: float = 0.0
    generated: set[str] = field(default_factory=set)
    ready: int = 0

    def __call__(self, name: str, ready: bool = True) -> None:
        self.generated.add(name)
        if ready:
            self.ready += 1
            logger.info("compiled %d of %d: %s, %.1f s", self.ready, self.num, name, time.perf_counter() - self.start)

    def __str__(self) -> str:
        if self.ready == self.num:
            return "waiting for functions that other ranks compile" if self.others else "loading compiled functions"
        functions = f"{self.num} function{'s' * (self.num > 1)}"
        if not self.generated:
            return f"starting Inductor to compile {functions}"
        if not self.ready and len(self.generated) < self.num:
            return f"generated code of {len(self.generated)} of {functions}"
        if not self.ready:  # the C++ compiler takes most of the time, and compiles all subgraphs together
            return f"compiling the code of {functions}"
        return f"compiled {self.ready} of {functions}"


def _called(function: Function, graph: Recorded, artifact: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an artifact as the program's ops call it, with the literals that it takes as its last arguments."""
    literals = [graph.constants[n] for n in _literals(graph)]
    return as_called(function, (lambda *args: artifact(*args, *literals)) if literals else artifact)


def _artifact(
    function: Function, graph: Recorded, device: torch.device, cores: int | None = None
) -> Callable[..., Any]:
    graph = into_buffers(substituted(graph, random.DECOMPOSITIONS), function.into)
    module, values = fx.GraphModule({}, _of_arguments(graph)), [n.meta["val"] for n in graph.inputs]
    literals = [graph.constants[n] for n in _literals(graph)]
    return compat.inductor_compile(module, [(v.shape, v.stride(), v.dtype) for v in values], device, cores, literals)


def _job(key: str, name: str, function: Function, graph: Recorded) -> compile_worker.CompileJob:
    """Returns the job for a worker: everything that it needs to know about a subgraph."""
    values = [n.meta["val"] for n in graph.inputs] + [graph.constants[target] for target in _literals(graph)]
    return compile_worker.CompileJob(
        key=key,
        name=name,
        graph=graph_pickle.plain(_of_arguments(graph)),
        inputs=tuple((tuple(v.shape), tuple(v.stride()), v.dtype) for v in values),
        num_args=len(function.graph.inputs),
        num_outputs=len(function.graph.outputs),
        writes=function.writes,
        into=tuple(function.into),
    )


def _of_arguments(graph: Recorded) -> fx.Graph:
    """Returns a graph's operations with its literals as its last arguments: the generated code does not depend on their
    values."""
    module = fx.Graph()
    env = {node: module.placeholder(node.name) for node in graph.inputs}
    literals = {target: module.placeholder(f"literal_{i}") for i, target in enumerate(_literals(graph))}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            env[node] = literals[node.target]
        elif node not in env:
            env[node] = module.node_copy(node, lambda n: env[n])
            # The metadata has fake tensors of the tracing process and the user's stack traces. Inductor computes its
            # own from the examples.
            env[node].meta.clear()
    return module


def _literals(graph: Recorded) -> list[str]:
    """Returns the names of a graph's literals, in the order in which it reads them."""
    return list(dict.fromkeys(n.target for n in graph.graph.nodes if n.op == "get_attr"))
