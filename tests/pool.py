"""A pool of real processes that run a test's function on every rank of a gloo process group.

Importing torch takes seconds and a test takes milliseconds, so the processes are started once, when a test first needs
them, and stay: a *job* is one function run on the first n of them. Each is a fork of a *seed*, a process that has
imported what every step needs and waits, so that a new one costs no import. Ranks of even and of odd numbers have
seeds with other hash seeds: nothing that all ranks agree on, such as the order of a set, comes from a common parent.
Each job sees what torchrun would have set (RANK, WORLD_SIZE, MASTER_ADDR, …), joins its own process group if it calls
`fzero.make_mesh`, and leaves it afterwards. The rendezvous store lives in the parent, as torchrun's does, and is a new
one for every job: the kernel picks its port, so no two sessions meet on one, and no key of an earlier job is left over.

A rank that raises reports its traceback; a rank that hangs is asked for the stacks of all its threads (SIGUSR1,
faulthandler) and killed. Only then is the pool started anew. Workers die with the parent: they read its end of a pipe.

This file is the parent's side and, run as a script, the workers'; a worker imports nothing from pytest
but what the test's own module imports.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import forks
import torch

MAX_RANKS = 4
THRESHOLDS = 20_000, 20, 50
"""Of Python's garbage collector, in tests and ranks: with its own a tenth of their CPU time is spent in going through
what stays."""
GRACE = 10.0  # seconds that the other ranks get to finish or fail once one rank has failed
_NUM_LOG_BYTES = 4000  # of what a rank printed, shown with an error


class RaisedOnRank(NamedTuple):
    """What one rank raised, as `run_ranks(..., expect_error=True)` returns it; the rank's result is in `result` if it
    raised nothing."""

    type: str | None  # the exception's class name; None if nothing was raised
    message: str
    traceback: str
    result: Any = None


class RankError(AssertionError):
    """A rank raised, died or hung; the text holds every rank's traceback or stacks. `ranks` has them one by one."""

    def __init__(self, text: str, ranks: Sequence[RaisedOnRank]):
        super().__init__(text)
        self.ranks = list(ranks)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path  # stdout and stderr
    stacks: Path  # what faulthandler writes on SIGUSR1


class Pool:
    """Up to `MAX_RANKS` worker processes, started when first needed. See the module's docstring.

    Args:
        folder: where the workers' logs and stacks go.
        warning_filters: pytest's `filterwarnings` lines, in force while a job runs.
    """

    def __init__(self, folder: Path, warning_filters: Sequence[str] = ()):
        self._folder = folder
        self._filters = tuple(warning_filters)
        self._workers: list[_Worker] = []
        self._store: Any = None  # the rendezvous server of the job that runs
        self._num_started = 0

    def run(
        self,
        num_ranks: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        expect_error: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; results in rank order. `fn` must be importable by name: a module-level
        function.

        Args:
            timeout: seconds for the job itself; starting the workers is not counted.
            expect_error: return a `RaisedOnRank` for every rank instead of raising. A rank that hangs still raises.

        Raises:
            RankError: a rank raised (unless `expect_error`), died, or did not finish in time.
        """
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"num_ranks is {num_ranks}: the pool has 1 to {MAX_RANKS}")
        job = _dumps((fn, args, kwargs))
        self._start(num_ranks)
        team = self._workers[:num_ranks]
        offsets = [w.log.stat().st_size for w in team]
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, worker in enumerate(team):
            with contextlib.suppress(BrokenPipeError):  # it died since its last job: found again while waiting
                worker.connection.send_bytes(pickle.dumps((self._environment(rank, num_ranks), job)))
        outcomes = self._collect(team, timeout)
        finished = all(o is not None for o in outcomes)
        if not finished:
            missing = [rank for rank, o in enumerate(outcomes) if o is None]
            failed = any(o is not None and o.type is not None for o in outcomes)
            why = (
                f"did not finish within {GRACE:g} s of another rank's failure"
                if failed
                else f"did not finish within {timeout:g} s"
            )
            stacks = _ask_for_stacks([team[rank] for rank in missing])
            for rank, stack in zip(missing, stacks, strict=True):
                outcomes[rank] = RaisedOnRank("Timeout", why, stack)
        ended = [o for o in outcomes if o is not None]
        if not finished or any(o.type == "WorkerDied" for o in ended):
            self._end()  # a rank in an unknown state: the next job gets new processes
        if finished and expect_error:
            return ended
        if any(o.type is not None for o in ended):
            raise RankError(_report(fn, ended, [_tail(w.log, n) for w, n in zip(team, offsets, strict=True)]), ended)
        return [o.result for o in ended]

    def pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [w.process.pid for w in self._workers]

    def close(self) -> None:
        """Ends all processes. The next job starts new ones."""
        self._end()

    def _end(self) -> None:
        workers, self._workers = self._workers, []
        self._store = None
        for worker in workers:
            worker.connection.close()
            worker.process.kill()
        for worker in workers:
            worker.process.wait()

    def _collect(self, team: list[_Worker], timeout: float) -> list[RaisedOnRank | None]:
        """What each rank came to, None for those that did not finish in time."""
        outcomes: list[RaisedOnRank | None] = [None] * len(team)
        ranks = {worker.connection: rank for rank, worker in enumerate(team)}
        deadline = time.monotonic() + timeout
        while ranks and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(ranks), timeout=left):
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    code = team[rank].process.wait()
                    outcomes[rank] = RaisedOnRank(
                        "WorkerDied", f"the process ended with exit code {code}", _read(team[rank].stacks)
                    )
                if outcomes[rank].type is not None:  # the others may wait for it forever
                    deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes

    def _environment(self, rank: int, num_ranks: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _start(self, num_ranks: int) -> None:
        """Starts the workers that are missing and waits until they serve."""
        if any(w.connection.poll() for w in self._workers):  # between jobs: it has ended
            self._end()
        new = []
        environments = [{**_worker_environment(), "RANK": str(rank)} for rank in range(num_ranks)]
        for environment in environments[len(self._workers) :]:
            forks.prepare(environment)
        while len(self._workers) < num_ranks:
            ours, theirs = Pipe(duplex=True)
            name = f"worker-{self._num_started}"
            self._num_started += 1
            log, stacks = self._folder / f"{name}.log", self._folder / f"{name}.stacks"
            with theirs, log.open("ab") as out, forks.installed():
                process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), str(stacks)],
                    env=environments[len(self._workers)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            worker = _Worker(process, ours, log, stacks)
            self._workers.append(worker)
            new.append(worker)
        for worker in new:
            worker.connection.send_bytes(pickle.dumps((sys.path, self._filters)))
        for worker in new:
            try:
                if not worker.connection.poll(120):
                    raise EOFError
                worker.connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                self.close()
                raise RankError(f"a worker of the test pool did not start:\n{_tail(worker.log, 0)}", []) from None


@contextlib.contextmanager
def ending(folder: str | Path, last: bool = False, others: int = 1, patience: float = 60.0) -> Iterator[None]:
    """On ranks: a block that ends last on some of them, when so many others have ended it, by an exception or not. For
    a rank that lives and does not come."""
    try:
        yield
        deadline = time.monotonic() + patience
        while last and len(list(Path(folder).glob("ended-*"))) < others and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        Path(folder, f"ended-{os.getpid()}").touch()


def _worker_environment() -> dict[str, str]:
    env = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    env |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if "lo" in {name for _, name in socket.if_nameindex()}:
        # else gloo looks this host's name up, which a container need not know
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def _ask_for_stacks(workers: list[_Worker]) -> list[str]:
    """The Python stacks of all threads of the workers, which may be stuck in C."""
    for worker in workers:
        worker.process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 5.0
    texts = [""] * len(workers)
    while time.monotonic() < deadline:
        before, texts = texts, [_read(w.stacks) for w in workers]
        if all(texts) and before == texts:  # written, and still the same a moment later
            break
        time.sleep(0.1)
    return [text or "(no stacks: the process does not answer)" for text in texts]


def _report(fn: Callable[..., Any], outcomes: list[RaisedOnRank], logs: list[str]) -> str:
    bad = [rank for rank, o in enumerate(outcomes) if o.type is not None]
    lines = [
        f"{fn.__module__}.{fn.__qualname__} failed on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))} of "
        f"{len(outcomes)}"
    ]
    for rank, (o, log) in enumerate(zip(outcomes, logs, strict=True)):
        lines.append(f"--- rank {rank}: {'finished' if o.type is None else f'{o.type}: {o.message}'}")
        lines += [text.rstrip() for text in (o.traceback, log and f"(printed)\n{log}") if text]
    return "\n".join(lines)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as f:
        f.seek(max(start, log.stat().st_size - _NUM_LOG_BYTES))
        return f.read().decode(errors="replace")


class _Pickler(pickle.Pickler):
    """Tensors travel by value, as bytes: sharing memory would need the sender to outlive the receiver's use."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            file = io.BytesIO()
            torch.save(obj.detach().clone(), file)
            return _load_tensor, (file.getvalue(), obj.requires_grad)
        return NotImplemented


def _load_tensor(data: bytes, requires_grad: bool) -> torch.Tensor:
    return torch.load(io.BytesIO(data), weights_only=True).requires_grad_(requires_grad)


def _dumps(obj: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()


# The workers' side.


def _serve(connection: Connection, stacks: Path) -> None:
    with stacks.open("w") as stack_file:
        faulthandler.enable(stack_file, all_threads=True)  # a crash in C is explained too
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; its death is ours
        search_path, filters = pickle.loads(connection.recv_bytes())
        sys.path[:] = search_path
        connection.send_bytes(b"ready")
        jobs: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_read_jobs, args=(connection, jobs), daemon=True).start()
        while True:
            environment, job = pickle.loads(jobs.get())
            before = dict(os.environ)
            os.environ.update(environment)
            outcome = _run_job(job, filters)
            # not the next job's: a folder of calibrations, for example, decides how its steps are planned
            for name in {*os.environ} - {*before}:
                del os.environ[name]
            os.environ.update(before)
            gc.collect()  # what the job left in cycles keeps files and connections
            try:
                data = _dumps(outcome)
            except Exception as e:
                data = _dumps(_raised(TypeError(f"the rank's result cannot be sent: {type(e).__name__}: {e}")))
            del outcome
            connection.send_bytes(data)


def _read_jobs(connection: Connection, jobs: queue.Queue[bytes]) -> None:
    """Ends this process as soon as the parent is gone, whatever the main thread is stuck in."""
    try:
        while True:
            jobs.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


def _run_job(job: bytes, filters: Sequence[str]) -> RaisedOnRank:
    try:
        # imports the test's module, outside of its warning filters as pytest's collection has been through it
        fn, args, kwargs = pickle.loads(job)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            for line in filters:
                _filter_warnings(line)
            return RaisedOnRank(None, "", "", fn(*args, **kwargs))
    except BaseException as e:
        return _raised(e)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _raised(e: BaseException) -> RaisedOnRank:
    outcome = RaisedOnRank(type(e).__name__, str(e), "".join(traceback.format_exception(e)))
    traceback.clear_frames(e.__traceback__)  # frees what the frames hold, connections to other ranks among it
    return outcome


def _filter_warnings(line: str) -> None:
    """One line of pytest's `filterwarnings`: action:message:category:module, message and module being regular
    expressions."""
    action, text, category, module, *_ = (*(part.strip() for part in line.split(":")), "", "", "")
    owner, _, name = category.rpartition(".")
    kind = getattr(importlib.import_module(owner) if owner else builtins, name) if name else Warning
    warnings.filterwarnings(action, text, kind, module)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.modules["pool"] = sys.modules["__main__"]  # what the parent pickles by name is this very module
    RaisedOnRank.__module__ = _load_tensor.__module__ = "pool"
    torch.set_num_threads(1)
    gc.set_threshold(*THRESHOLDS)
    _serve(Connection(int(sys.argv[1])), Path(sys.argv[2]))
