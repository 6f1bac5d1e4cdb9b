"""Compiles subgraphs in a separate process, so that neither Inductor nor its garbage nor the output of the C++ compiler
enters the process that trains.

`compile_jobs` is the rank's side: it starts one worker, sends it jobs, and reports as they are done. The worker writes
entries to a cache and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fzero import random
from fzero._compat import compat
from fzero._utils.bounded_json import parsed
from fzero.runtime.build.artifact_cache import Cache, CacheEntry
from fzero.runtime.build.cpu import cpp_kernels, graph_pickle
from fzero.trace.guards import deterministic_mode

_UNIT_CHARS = 100_000
"""Characters of C++ source in one translation unit: its own code then takes about as long to compile as the headers, 2
s."""


@dataclass(frozen=True)
class CompileJob:
    """A subgraph to compile: a graph without literals, the layouts of its inputs, and how it is called (see
    `cpp_kernels.text_of`)."""

    key: str
    name: str
    graph: graph_pickle.Sent
    inputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # shape, stride, dtype
    num_args: int
    num_outputs: int
    writes: tuple[int, ...]
    into: tuple[int, ...]


class Failed(Exception):
    """Subgraphs cannot be compiled this way: there is no compiler, or the Inductor of this torch release differs from
    what is known here. The text is the error message of the compiler or of torch."""


class Done(Protocol):
    """Called for each subgraph when its code has been generated (`ready=False`), and again when it has been
    compiled."""

    def __call__(self, name: str, ready: bool = True) -> None: ...


def compile_jobs(jobs: Sequence[CompileJob], cache: Cache, cores: int, done: Done) -> dict[str, str]:
    """Compiles subgraphs into a cache.

    Args:
        jobs: the subgraphs.
        cache: the cache for their entries.
        cores: the number of C++ compilers that may run at the same time.
        done: called as subgraphs are done.

    Returns: the names of subgraphs whose code is not plain (see `cpp_kernels.NotPlain`), with the reasons. They are not
    in the cache.

    Raises:
        Failed: one cannot be compiled.
    """
    answer = _ask(jobs, cache, cores, done, trust_cpu=True)
    if "failed" in answer:
        # The compiler or torch may lack support for an instruction set of the CPU. Let Inductor test what all of them
        # support.
        answer = _ask(jobs, cache, cores, done, trust_cpu=False)
    if "failed" in answer:
        raise Failed(answer["failed"])
    return answer["skipped"]


def _ask(jobs: Sequence[CompileJob], cache: Cache, cores: int, done: Done, trust_cpu: bool) -> dict[str, Any]:
    request = pickle.dumps(
        (
            tuple(jobs),
            cache,
            cores,
            trust_cpu,
            torch.get_num_threads(),
            compat.inductor_settings(),
            deterministic_mode.setting(),
        )
    )
    answer: dict[str, Any] = {"failed": "the compiling process ended without output"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            # -P: without it, a file in the current directory could replace a module. The module path is that of this
            # process.
            [sys.executable, "-P", "-c", "from fzero.runtime.build.cpu.compile_worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            start_new_session=True,  # so that the worker can end its C++ compilers together with itself
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            try:
                # Not closed before the worker has ended: if its input ends, so has this process, and the worker ends.
                process.stdin.write(request)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it failed to start; its error output is read below
            # The loop ends when the worker closes its output, so it also ends if the worker dies without an answer.
            for line in process.stdout:
                word = parsed(line)
                if "done" in word:
                    done(word["done"], word["ready"])
                else:
                    answer = word
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its C++ compilers
            process.kill()
            raise
        finally:
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        if process.returncode != 0:
            said.seek(0)
            answer = {"failed": f"{said.read()[-4000:]}\nthe compiling process ended with status {process.returncode}"}
    return answer


# --- the worker's side ---


def main() -> None:
    # Unpickling is safe here: the other end of the pipe is the rank that started this process.
    jobs, cache, cores, trust_cpu, threads, settings, algorithms = pickle.load(sys.stdin.buffer)
    # The processes that Inductor starts must not wait for input from this pipe.
    pipe, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    threading.Thread(target=_end_with_rank, args=[pipe], daemon=True).start()
    # Inductor and the C++ compiler may print to stdout, which is the pipe to the rank.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect stdout to stderr, so that other output is not taken for an answer

    def say(word: dict[str, Any]) -> None:
        answers.write(json.dumps(word) + "\n")
        answers.flush()

    torch.set_num_threads(threads)
    compat.use_inductor_settings(settings)
    deterministic_mode.use(algorithms)
    try:
        skipped = _work(jobs, cache, cores, trust_cpu, lambda name, ready=True: say({"done": name, "ready": ready}))
    except Exception:
        say({"failed": traceback.format_exc()})
    else:
        say({"skipped": skipped})


_folders: set[str] = set()  # of C++ compilers that are running


def _end_with_rank(pipe: int) -> None:
    """Ends this process and its C++ compilers when the rank that started it has ended: its end of the pipe is then
    closed."""
    # Not through `sys.stdin`, whose lock a thread must not hold when the interpreter ends.
    os.read(pipe, 1)
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():  # as `_ask` starts it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _work(jobs: Sequence[CompileJob], cache: Cache, cores: int, trust_cpu: bool, done: Done) -> dict[str, str]:
    plain: dict[str, cpp_kernels.Plain] = {}
    skipped: dict[str, str] = {}
    for job in jobs:
        # only their layouts matter: the values are never read
        examples = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in job.inputs]
        try:
            lowered = compat.inductor_lower(graph_pickle.restored(job.graph), examples, trust_cpu, random.RULES)
            plain[job.key] = cpp_kernels.parse(lowered, len(job.inputs), job.num_outputs, job.writes)
        except cpp_kernels.NotPlain as reason:
            skipped[job.name] = str(reason)
        except Exception as error:
            error.add_note(f"while compiling {job.name}")
            raise
        done(job.name, ready=False)
    units = _units([job for job in jobs if job.key in plain], plain, cores)
    command = compat.inductor_cpp_command(trust_cpu)
    with ThreadPoolExecutor(max(1, cores)) as pool:
        running = [pool.submit(_compile_unit, unit, plain, cache, command) for unit in units]
        for future in as_completed(running):
            for name in future.result():
                done(name)
    cache.trim()
    return skipped


def _units(jobs: Sequence[CompileJob], plain: dict[str, cpp_kernels.Plain], cores: int) -> list[list[CompileJob]]:
    """Groups subgraphs into translation units: as few as keep all cores busy, because each unit parses the headers
    again."""
    sizes = {job.key: sum(len(k.source) for k in plain[job.key].kernels.values()) for job in jobs}
    number = max(1, min(cores, -(-sum(sizes.values()) // _UNIT_CHARS)))
    units: list[list[CompileJob]] = [[] for _ in range(number)]
    # The largest first, each into the unit with the least code so far, which keeps the units about equal.
    for job in sorted(jobs, key=lambda job: sizes[job.key], reverse=True):
        min(units, key=lambda unit: sum(sizes[x.key] for x in unit)).append(job)
    return [unit for unit in units if unit]


def _compile_unit(
    jobs: Sequence[CompileJob], plain: dict[str, cpp_kernels.Plain], cache: Cache, command: Sequence[str]
) -> list[str]:
    numbers: dict[cpp_kernels.CppKernel, int] = {}
    for job in jobs:
        for kernel in plain[job.key].kernels.values():
            numbers.setdefault(kernel, len(numbers))
    library = _compile_cpp(cpp_kernels.library_source(list(numbers)), command) if numbers else b""
    for job in jobs:
        text = cpp_kernels.text_of(plain[job.key], numbers, job.num_args, job.into, job.num_outputs)
        cache.write(job.key, CacheEntry(text, library if plain[job.key].kernels else b""))
    return [job.name for job in jobs]


def _compile_cpp(source: str, command: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fzero-") as folder:
        Path(folder, "kernels.cpp").write_text(source)
        _folders.add(folder)
        try:
            # The compiler's own temporary files are in the folder, too.
            env = {**os.environ, "TMPDIR": folder}
            result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
        finally:
            _folders.discard(folder)
        if result.returncode != 0:
            raise RuntimeError(result.stderr[-4000:])
        library = Path(folder, "kernels.so")
        cpp_kernels.load_library(library)  # loaded here, so that a symbol missing in torch is an error now
        return library.read_bytes()
