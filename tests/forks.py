"""Starts Python scripts as forks of a process that has imported PyTorch and fzero, in place of fresh interpreters.

A fresh interpreter pays seconds of imports before its first line. A *seed* is a child that has paid them and forks
itself for each start. The fork is then handed to the process that asked: the seed forks twice, the one in between ends,
and who asked is at that moment the subreaper of its descendants. So the fork is a true child: signals, exit codes, its
parent's id and the kernel's signal at a parent's death are as usual, and `subprocess.Popen` only starts it in another
way (`execute`). Each fork brings a seed of its own, forked before its script begins, for the processes that it starts:
under torchrun supervisors, ranks and compiling workers are forks too.

A fork gets arguments (also in /proc), environment, directory, streams, `pass_fds`, session, process group, ignored
signals, `preexec_fn`, `sys.path` and `__main__`. It ends without the destructors of what modules hold. A fresh
interpreter starts instead for what cannot be handed over: options but -u and -P, a shell, inherited descriptors, and
variables that are read by imports (`EARLY`) with other values than the seed's; and where a seed has ended.

Tests ask with the mark `forks`; under the mark `fresh` all of a test's starts are fresh.

Run as a script this file is a seed.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import inspect
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

IMPORTED = (
    "fzero.compiler.lower",
    "fzero.elastic.restarts",
    "fzero.modules.functionalize",
    "fzero.runtime.build.cpu.compile_worker",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
)
"""Modules that seeds import: those of a first step, of a build and of torchrun. None starts a thread."""
EARLY = ("PYTHON", "OMP_", "MKL_", "KMP_", "MALLOC_", "GLIBC_", "LD_", "LC_", "LANG", "PYTORCH_", "ATEN_")
EARLY += ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_", "CUDA_", "HF_")
"""Beginnings of the names of variables that an import may read."""
_LATE = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_CACHE_DIR")
_ONE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")
"""Variables with which seeds begin. A fork has one thread as well if they are not set for it."""
_NUM_HASHES = 2  # seeds of the test process differ in their hash seed: ranks must not agree by luck
_BUILD = "from fzero.runtime.build.cpu.compile_worker import main; main()"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_ROOM = 2048, 16_384  # bytes for the arguments of a fork, and for its environment, that other processes see
_HIGH = 400  # descriptors from here on are no script's
_FRESH: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_SIGNATURE = inspect.signature(_FRESH)


class Command(NamedTuple):
    """A Python command line, taken apart.

    Attributes:
        kind: "-c", "-m" or "" for a file.
        what: the code, the module or the file.
        args: behind it.
        unbuffered: -u.
        safe: -P.
    """

    kind: str
    what: str
    args: list[str]
    unbuffered: bool
    safe: bool


class Start(NamedTuple):
    """All that a fork is told. `fds` are the numbers that the descriptors which come along have in it."""

    parent: int
    command: Command
    line: list[str]
    environment: dict[str, str]
    directory: str
    fds: list[int]
    session: bool
    group: int
    ignored: list[int]
    umask: int
    before: bytes  # the pickled `preexec_fn`


class Seed:
    """A child of this process that forks what is asked for.

    Args:
        process: the seed, or its id in a fork, which never waits for it.
        control: the socket to it.
        early: its variables of `EARLY`.
    """

    def __init__(self, process: subprocess.Popen | int, control: socket.socket, early: Mapping[str, str]):
        self._process, self._control, self.early = process, control, dict(early)
        self._owner, self._lock = os.getpid(), threading.Lock()

    @property
    def is_mine(self) -> bool:
        """Whether this process, and not the one that it was forked from, is the seed's parent."""
        return self._owner == os.getpid()

    def start(self, start: Start, fds: Sequence[int]) -> int | None:
        """The id of a new child of this process; None if the seed has ended."""
        with self._lock, _adopting():
            try:
                socket.send_fds(self._control, [pickle.dumps(start)], fds)
                pid = self._control.recv(64)
            except ConnectionError:
                pid = b""
            if not pid:
                return None
            done = self._control.recv(64)
        if done != b"done":
            raise RuntimeError("a fork of tests/forks.py has not come to its script")
        return int(pid)

    def close(self) -> None:
        if self.is_mine and not isinstance(self._process, int):
            self._control.close()
            self._process.wait()


class _Seeds:
    """Those of this process: in the test process started when first needed, one for each hash seed and each `early`; in
    a fork its own one."""

    def __init__(self) -> None:
        self._all: dict[tuple[int, frozenset[tuple[str, str]]], Seed] = {}
        self._own: Seed | None = None

    def own(self, seed: Seed) -> None:
        self._own = seed

    def find(self, environment: Mapping[str, str]) -> Seed | None:
        early = _early(environment)
        if self._own is not None:
            return self._own if self._own.is_mine and self._own.early == early else None
        if early.keys() & {"PYTHONHASHSEED", *_ONE}:  # with more threads an import starts them
            return None
        rank = environment.get("RANK", "")
        number = int(rank) % _NUM_HASHES if rank.isdecimal() else 0
        key = number, frozenset(early.items())
        if key not in self._all:
            self._all[key] = _new(number, early, environment)
        return self._all[key] if self._all[key].is_mine else None

    def close(self) -> None:
        while self._all:
            self._all.popitem()[1].close()


_seeds = _Seeds()
_all = True  # whether not only workers that compile are forks


def execute(popen: Any, *given: Any, **named: Any) -> None:
    """`subprocess.Popen._execute_child`, which forks a seed where it can."""
    asked = _SIGNATURE.bind(popen, *given, **named).arguments
    found = _understood(asked) if _all or _BUILD in asked["args"] else None
    seed = found and _seeds.find(found[0].environment)
    pid = seed.start(*found) if found and seed else None
    if pid is None:
        _FRESH(popen, *given, **named)
        return
    popen.pid, popen._child_created = pid, True
    ours = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(asked[name] for name in ours))


@contextlib.contextmanager
def installed(only_builds: bool = False) -> Iterator[None]:
    """Starts of Python inside are forks, or those of workers that compile alone."""
    global _all
    before = subprocess.Popen._execute_child, _all  # type: ignore[attr-defined]
    subprocess.Popen._execute_child, _all = execute, not only_builds  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child, _all = before  # type: ignore[attr-defined]


def prepare(environment: Mapping[str, str]) -> None:
    """Starts the seed for an environment, unless it is there, and does not wait for it."""
    _seeds.find(environment)


def children(pid: int) -> list[int]:
    """The ids of a process's children, but for its seed."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if __file__.encode() not in _command(child)]


def _command(pid: int) -> bytes:
    """What a process was started with; nothing of one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def close() -> None:
    """Ends the seeds of the test process."""
    _seeds.close()


def parsed(line: Sequence[str], directory: str) -> Command | None:
    """A command line as `Command`; None for those with other options, and those that no fork can run."""
    i, options = 1, set()
    while i < len(line) and line[i] in ("-u", "-P"):
        options.add(line[i])
        i += 1
    if not line or line[0] != sys.executable or i == len(line):
        return None
    kind = line[i] if line[i] in ("-c", "-m") else ""
    what = line[i : i + 1 + bool(kind)][-1]
    if (kind and len(line) == i + 1) or (not kind and (what[0] == "-" or not os.path.isfile(Path(directory, what)))):
        return None
    return Command(kind, what, list(line[i + 1 + bool(kind) :]), "-u" in options, "-P" in options)


def _understood(asked: Mapping[str, Any]) -> tuple[Start, list[int]] | None:
    """What a fork is told, and the descriptors that go along; None if only a fresh interpreter will do."""
    line, cwd = asked["args"], os.fspath(asked["cwd"] or os.getcwd())
    if isinstance(line, str | bytes | os.PathLike) or not os.path.isdir(cwd) or isinstance(cwd, bytes):
        return None
    line = [os.fspath(word) for word in line]
    command = parsed(line, cwd) if all(isinstance(word, str) for word in line) else None
    usual = asked["restore_signals"] and asked["close_fds"] and asked["umask"] < 0 and not asked["shell"]
    usual &= asked["executable"] in (None, sys.executable) and not (asked["uid"] or asked["gid"] or asked["gids"])
    if command is None or not usual:
        return None
    try:
        before = pickle.dumps(asked["preexec_fn"])
    except (pickle.PicklingError, AttributeError):
        return None
    streams = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    fds = [number if fd == -1 else fd for number, fd in enumerate(streams)] + [*map(int, asked["pass_fds"])]
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    umask = os.umask(0)
    os.umask(umask)
    mine = os.getpgrp() if asked["process_group"] == -1 else asked["process_group"]
    handled = (signal.SIGPIPE, signal.SIGXFSZ)
    ignored = [n for n in signal.valid_signals() if n not in handled and signal.getsignal(n) is signal.SIG_IGN]
    start = Start(
        os.getpid(), command, line, environment, cwd, [0, 1, 2, *fds[3:]], asked["start_new_session"], mine,
        [*map(int, ignored)], umask, before,
    )  # fmt: skip
    return start, fds


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    asked = {name: text for name, text in environment.items() if name.startswith(EARLY) and name not in _LATE}
    return {name: text for name, text in asked.items() if _ONE.get(name) != text}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans below this process are its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _new(number: int, early: Mapping[str, str], environment: Mapping[str, str]) -> Seed:
    """A seed of the test process, whose path to the package is this one's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others = {name: text for name, text in environment.items() if name not in (*_LATE, "RANK", "WORLD_SIZE")}
    own = {"PYTHONHASHSEED": str(number + 1), "FORKS_ROOM": " " * _ROOM[1]}
    with theirs:
        process = _Fresh(
            [sys.executable, __file__, str(theirs.fileno()), " " * _ROOM[0]],
            env=_ONE | others | own,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
    return Seed(process, ours, early)


class _Fresh(subprocess.Popen):
    """A process that is no fork, whatever `subprocess.Popen` does now."""

    _execute_child = _FRESH


# The seed's side.


def _main() -> None:
    sys.modules["forks"] = sys.modules["__main__"]
    Start.__module__ = Command.__module__ = "forks"  # as who asks pickles them
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    base, sys.path[0] = sys.path[1:], str(Path(__file__).parent.parent)
    for name in IMPORTED:
        importlib.import_module(name)
    sys.path[:] = base
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a seed of tests/forks.py has threads, which no fork has")
    gc.collect()
    gc.freeze()
    early = _early(os.environ)
    del early["PYTHONHASHSEED"]
    _run(_become(*_serve(control), early))


def _serve(control: socket.socket) -> tuple[Start, list[int], socket.socket]:
    """Forks for each request. Returns in the forks, which tell when they are about to run their script."""
    while True:
        data, fds, *_ = socket.recv_fds(control, 1 << 20, 64)
        if not data:  # who asked is gone
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
        elif pid := os.fork():
            control.send(b"%d" % pid)
            os._exit(0)
        else:
            try:
                return pickle.loads(data), fds, control
            except BaseException:
                control.send(b"failed")
                raise


def _become(start: Start, fds: list[int], control: socket.socket, early: Mapping[str, str]) -> Start:
    """Makes this process a child of the one that asked, as asked for."""
    deadline = time.monotonic() + 10
    while os.getppid() != start.parent:
        if time.monotonic() > deadline:  # it is dead
            os._exit(1)
        time.sleep(0.0005)
    importlib.import_module("fzero.comm.launcher")._forked()  # its parent is another than at the fork
    if start.session:
        os.setsid()
    else:
        os.setpgid(0, start.group)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in (*fds, control.fileno())]
    for fd in (*fds, control.detach()):
        os.close(fd)
    forked = _seed_of_a_fork(early, high)
    if isinstance(forked, tuple):
        return _become(*forked, early)
    _seeds.own(forked)
    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    for fd, number in zip(high, start.fds, strict=False):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(start.directory)
    os.umask(start.umask)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in start.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(start.environment)
    _show(start)
    if before := pickle.loads(start.before):
        before()
    with socket.socket(fileno=high[-1]) as control:
        control.send(b"done")
    return start


def _seed_of_a_fork(early: Mapping[str, str], fds: Sequence[int]) -> Seed | tuple[Start, list[int], socket.socket]:
    """A seed of this process, itself its fork; in forks of that one, what they are told."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if pid := os.fork():
        theirs.close()
        high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
        ours.close()
        return Seed(pid, socket.socket(fileno=high), early)
    ours.close()
    for fd in fds:
        os.close(fd)
    os.setpgid(0, 0)  # a signal to the group is not for it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    return _serve(theirs)


def _show(start: Start) -> None:
    """Has /proc tell the arguments and the environment of this process."""
    with contextlib.suppress(OSError, IndexError):
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        places = [int(numbers[i - 3]) for i in (48, 49, 50, 51)]  # proc(5): of arguments, of the environment
        texts = start.line, [f"{name}={text}" for name, text in start.environment.items()]
        for text, begin, end in zip(texts, places[::2], places[1::2], strict=True):
            data = "".join(f"{x}\0" for x in text).encode(errors="surrogateescape")[: end - begin - 1]
            ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _run(start: Start) -> None:
    """Runs the script as `python` does, and ends this process."""
    command, main = start.command, types.ModuleType("__main__")
    unbuffered = command.unbuffered or bool(start.environment.get("PYTHONUNBUFFERED"))
    _streams(unbuffered)
    sys.dont_write_bytecode = bool(start.environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv[:] = start.line
    sys.argv[:] = [command.kind or command.what, *command.args]
    first = (
        {"-c": "", "-m": os.getcwd()}.get(command.kind) if command.kind else str(Path(command.what).resolve().parent)
    )
    paths = start.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [*([] if command.safe else [first]), *(os.path.abspath(path) for path in paths if path)]
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    importlib.invalidate_caches()
    gc.enable()
    try:
        if command.kind == "-m":
            sys.modules.pop(command.what, None)  # else it would be run beside itself
            runpy._run_module_as_main(command.what)  # type: ignore[attr-defined]
        elif command.kind == "-c":
            exec(compile(command.what, "<string>", "exec"), main.__dict__)
        else:
            path = os.path.abspath(command.what)
            main.__dict__.update(
                __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
            )
            exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        _end(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    _end(0)


def _end(code: int) -> None:
    """Ends as an interpreter does, but for the destructors of what modules hold: they take longer than all before."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _streams(unbuffered: bool) -> None:
    """The standard streams, as they are opened at the start of an interpreter."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        old: Any = getattr(sys, name)
        raw: Any = io.FileIO(number, "wb", closefd=False)
        raw = raw if unbuffered else io.BufferedWriter(raw)
        new = io.TextIOWrapper(
            raw, old.encoding, old.errors, "\n", line_buffering=number == 2 or os.isatty(number),
            write_through=unbuffered,
        )  # fmt: skip
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    reader: Any = io.BufferedReader(io.FileIO(0, "rb", closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(reader, sys.stdin.encoding, sys.stdin.errors)


if __name__ == "__main__":
    _main()
