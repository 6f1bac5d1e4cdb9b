"""Compiles subgraphs with Inductor: loads them from the cache, compiles them in a worker process or in this process, or
lets another rank compile them and shares its result."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from fzero.runtime.build import compile_worker, cpp_kernels, graph_pickle
from fzero.runtime.build.artifact_cache import Cache, CacheEntry, key, logger, open_cache
from fzero.runtime.build.calling_convention import as_called
from fzero.runtime.build.shared_compilation import Share
from fzero.runtime.build.wrapper_shortening import shortened
from fzero.trace.device_decompositions import substituted
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import into_buffers

Functions = Mapping[str, tuple[Function, Recorded]]
"""By name: subgraphs, and their graphs as they are compiled."""


def compiled(functions: Functions, mesh: Mesh, device: torch.device) -> dict[str, Callable[..., Any]]:
    """See `build.build`.

    Args:
        device: the device that the subgraphs run on: that of the mesh, or its host.
    """
    start = time.perf_counter()
    cache = open_cache()
    keys = {name: key(graph, function, device) for name, (function, graph) in functions.items()}
    load = _Loader(functions, keys, device)
    built = load(cache) if cache is not None else {}
    # The time to compile a subgraph grows roughly with its number of nodes. Only ratios matter: they divide the work.
    costs = {keys[name]: float(len(graph.graph.nodes)) for name, (_, graph) in functions.items()}
    # Without a cache, the rank takes the place of the cache's identity, so that no two ranks seem to share one and each
    # compiles everything.
    share = Share(mesh, boot_id(), cache.identity() if cache is not None else mesh.rank, costs)
    if device != mesh.device and mesh.rank == 0 and (text := idle(torch.get_num_threads(), share.cores)):
        logger.warning("fzero.compile: %s", text)
    num_compiled, progress = 0, _Progress(mesh.size > 1)

    def make(cache: Cache, names: set[str]) -> None:
        """Compiles subgraphs into a cache, each key once. The ones that are returned as callables (all of them on a
        GPU, on a CPU only those that a cache cannot hold) are added to `built`."""
        nonlocal num_compiled, progress
        jobs = {load.keys[n]: n for n in functions if n in names}
        progress = _Progress(mesh.size > 1, len(jobs), start)
        if jobs:
            num_compiled += len(jobs)
            compile_ = _compile_apart if device.type == "cpu" else _compile_here
            these = {n: functions[n] for n in jobs.values()}
            built.update(compile_(these, load.keys, device, cache, share.cores, progress))

    then = "; then cached" if cache is not None and cache.limit else ""
    far = shown("fzero.compile", lambda: f"{progress}{then} (backend='eager' starts without compiling)")
    with far if mesh.rank == 0 else contextlib.nullcontext():

        def mine() -> None:
            if cache is not None:
                # The division is computed from the keys of all subgraphs, including those that are cached, so that
                # ranks which find different entries in the cache still agree on it.
                make(cache, {n for n in functions if n not in built and load.keys[n] in share.mine})

        share.deliver(mine)
        if cache is not None:
            # The cache now also holds what other ranks have compiled.
            built |= load(cache, built)
            # `_Loader` has changed these keys, because an artifact of another GPU does not work on this one. No other
            # rank compiles them.
            if alone := {n for n in functions if n not in built and load.keys[n] != keys[n]}:
                make(cache, alone)
                built |= load(cache, built)
        if len(built) < len(functions):  # the cache is off or too small, or another process clears it
            with tempfile.TemporaryDirectory(prefix="fzero-functions-") as folder:
                own = Cache(Path(folder))
                make(own, set(functions) - set(built))
                built |= load(own, built)
    logger.info(
        "built %d functions in %.1f s, of which rank %d compiled %d",
        len(functions),
        time.perf_counter() - start,
        mesh.rank,
        num_compiled,
    )
    return built


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


class _Loader:
    """Makes cache entries callable. Entries that were compiled together share a library, which is loaded once.

    Attributes:
        keys: the key of each subgraph. If another rank compiled a subgraph for its GPU, and the result cannot be
            converted for this rank's GPU, the subgraph gets a key of this rank only and is not shared.
    """

    def __init__(self, functions: Functions, keys: Mapping[str, str], device: torch.device):
        self.keys = dict(keys)
        self._functions, self._device = functions, device
        self._libraries: dict[str, Any] = {}

    def __call__(self, cache: Cache, built: Mapping[str, Any] = {}) -> dict[str, Callable[..., Any]]:
        """Loads those of the subgraphs that the cache holds and that are not built yet."""
        found = {name: self._loaded(name, cache) for name in self._functions if name not in built}
        return {name: run for name, run in found.items() if run is not None}

    def _loaded(self, name: str, cache: Cache) -> Callable[..., Any] | None:
        path = cache.path(self.keys[name])
        if (entry := cache.read(self.keys[name])) is None:
            return None
        try:
            return self._callable(name, entry, path)
        except compat.NotMovedError as error:
            logger.info("the cached function %s is compiled again for %s: %s", path, self._device, error)
            # An entry for any device with this index follows under a separate key.
            self.keys[name] += f"-{self._device.type}{self._device.index}"
            return self._loaded(name, cache)
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
        function, graph = self._functions[name]
        if not entry.text:
            return _called(function, graph, shortened(name, compat.load_artifact(entry.library, self._device)))
        library = None
        if entry.library:
            library = self._libraries.get(entry.digest) or cpp_kernels.load_library(path)
            self._libraries[entry.digest] = library
        return cpp_kernels.function_of(name, entry.text, library, [graph.constants[n] for n in _literals(graph)])


def _compile_apart(
    functions: Functions,
    keys: Mapping[str, str],
    device: torch.device,
    cache: Cache,
    cores: int,
    done: compile_worker.Done,
) -> dict[str, Callable[..., Any]]:
    """Compiles subgraphs for the CPU in a separate process, into a cache. Returns those that a cache cannot hold.

    If that fails because this torch contains another Inductor than is known here, all subgraphs are compiled through
    Inductor's public API, which is slower.
    """
    jobs = [_job(keys[name], name, function, graph) for name, (function, graph) in functions.items()]
    words: list[str] = []
    try:
        skipped = compile_worker.compile_jobs(jobs, cache, cores, done)
    except compile_worker.Failed as failed:
        words = str(failed).strip().splitlines()[-20:]
        skipped = dict.fromkeys(functions, f"what torch {torch.__version__} cannot put in a cache: {words[-1]}")
        logger.warning(
            (
                "fzero.compile: every start compiles all functions again, because "
                "this version of torch does not compile as expected: %s"
            ),
            words[-1],
        )
    made = {}
    for name, why in skipped.items():
        logger.info("%s is compiled at every start, because its code contains %s", name, why)
        try:
            made[name] = _called(*functions[name], _artifact(*functions[name], device))
        except Exception as error:
            said = [*words, *str(error).strip().splitlines()[-20:]]
            fix = "look at the compiler's output above; backend='eager' needs no compiler"
            raise FzeroError("compile", "functions cannot be compiled", said, fix) from error
        done(name)
    return made


def _compile_here(
    functions: Functions,
    keys: Mapping[str, str],
    device: torch.device,
    cache: Cache,
    cores: int,
    done: compile_worker.Done,
) -> dict[str, Callable[..., Any]]:
    """Compiles subgraphs in this process, into a cache, for devices whose compiled kernels are part of an Inductor
    artifact. Returns them all."""
    made = {}
    for name, (function, graph) in functions.items():
        artifact = _artifact(function, graph, device, cores)
        try:
            cache.write(keys[name], CacheEntry("", compat.artifact_bytes(artifact)))
        except (RuntimeError, AssertionError, OSError) as error:
            logger.info("%s is compiled at every start: %s", name, error)
        made[name] = _called(function, graph, shortened(name, artifact))
        done(name)
    cache.trim()
    return made


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
