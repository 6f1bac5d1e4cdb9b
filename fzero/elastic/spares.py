"""Keeps processes of a host ready to take the place of a rank that dies (`python -m fzero.run --spares 1`).

A spare runs the script up to `fz.run`, prepares there what it would run in any rank's place (elastic/rehearsal.py), and
waits on a socket in the run's memory. The keeper of the host's first rank starts spares and hears of their end; the
keeper of any rank takes one: who renames its note has it, and sends it the rank's environment and standard streams.
Imports no PyTorch.

    spare-<pid>.ready    which rank it can be, or any; .taken once it is one, to which its parent adds its exit code
    spare-<pid>.socket   where it waits

A script may read its rank before it calls `fz.run`. The environment of a spare sees that: such a spare takes the place
of that rank alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from fzero.elastic import host
from fzero.read_json import parsed, read

_STREAMS = (0, 1, 2)
_OF_A_RANK = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"}
_ANSWER = 5.0  # seconds in which a spare that is taken says so
_FAILURES = 2  # of spares that end before they are ready, after which there are no more
_STDLIB, _FZERO = str(Path(os.__file__).parent) + os.sep, str(Path(host.__file__).parent.parent) + os.sep
_READERS = ("<frozen os>", "<frozen _collections_abc>", os.__file__, _STDLIB + "_collections_abc.py")


class Spares:
    """Those of a host, as the keeper of its first rank has them.

    Args:
        memory: the run's, on this host.
        command: what starts one.
        count: how many wait.
        ranks: of this host.
        say: prints a line.
    """

    def __init__(
        self, memory: Path, command: Sequence[str], count: int, ranks: range, say: Callable[[str], None]
    ) -> None:
        self._memory, self._command, self._count, self._ranks, self._say = memory, command, count, ranks, say
        self._all: dict[int, subprocess.Popen[bytes]] = {}
        self._number: dict[int, int] = {}  # of those that wait, from 0
        self._taken: dict[int, int] = {}  # the notes of those that are ranks, open: they outlive their directory
        self._failed = 0

    def look(self, start: bool) -> None:
        """Notes who has ended, and with `start` starts as many as are missing."""
        for pid, process in list(self._all.items()):
            with contextlib.suppress(FileNotFoundError):
                if pid not in self._taken:
                    self._taken[pid] = os.open(
                        _note(self._memory, pid, "taken"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
                    )
                    self._number.pop(pid, None)
            if (code := process.poll()) is None:
                continue
            del self._all[pid]
            if taken := pid in self._taken:
                os.write(self._taken[pid], f"\n{code}".encode())
                os.close(self._taken.pop(pid))
            else:
                del self._number[pid]
            if not taken and code != -signal.SIGTERM and self._failed < _FAILURES:  # torchrun's is for all of a rank's
                self._failed += 1
                more = "; ranks that die are started anew from here on" if self._failed == _FAILURES else ""
                self._say(f"a spare ended with code {code} before it was needed{more}")
            for kind in ("ready", "taken", "socket"):
                _note(self._memory, pid, kind).unlink(missing_ok=True)
        while start and len(self._number) < self._count and self._failed < _FAILURES:
            number = next(i for i in range(self._count) if i not in self._number.values())
            local = (len(self._ranks) - 1 - number) % len(self._ranks)  # rank 0 is where scripts do more than elsewhere
            here = {"RANK": str(self._ranks[local]), "LOCAL_RANK": str(local), host.SPARE: "1"}
            process = subprocess.Popen(
                self._command,
                env={**os.environ, **here, host.MEMORY: str(self._memory), host.KEEPER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                preexec_fn=host.die_with_parent,
                process_group=host.own_group(),
            )
            self._all[process.pid], self._number[process.pid] = process, number

    def close(self, whole: bool) -> None:
        """Ends waiting spares and waits for the ones in use; ends these too, unless the run ends `whole`."""
        self._failed = _FAILURES + 1
        for pid, process in self._all.items():
            if not (whole and (pid in self._taken or _note(self._memory, pid, "taken").exists())):
                process.kill()
        while self._all:
            self.look(False)
            time.sleep(0.01)


class TakenSpare:
    """A spare that has taken a rank's place, as its keeper, which is not always its parent, has it: like a `Popen`."""

    def __init__(self, memory: Path, pid: int):
        self.pid, self.returncode = pid, None
        self._process = os.pidfd_open(pid)
        self._note = os.open(_note(memory, pid, "taken"), os.O_RDONLY | os.O_CLOEXEC)  # which outlives its directory
        self._ended: float | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._process], [], [], 0)[0]:
            self._ended = self._ended or time.monotonic()
            if codes := os.pread(self._note, 64, 0).split(b"\n")[1:]:
                self.returncode = int(codes[0])
            elif time.monotonic() - self._ended > _ANSWER:  # its parent is gone, and the run with it
                self.returncode = -signal.SIGKILL
            if self.returncode is not None:
                os.close(self._process)
                os.close(self._note)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def take(memory: Path, rank: int, environment: dict[str, str]) -> TakenSpare | None:
    """A spare of this host, which is this rank from here on; None if none is ready."""
    found = []
    for ready in memory.glob("spare-*.ready"):
        with contextlib.suppress(OSError, ValueError):
            bound = read(ready, int | None)
            if bound is None or bound == rank:
                found.append((bound is None, int(ready.stem.removeprefix("spare-"))))
    for _, pid in sorted(found):
        try:
            os.rename(_note(memory, pid, "ready"), _note(memory, pid, "taken"))
            taken = TakenSpare(memory, pid)
        except OSError:  # another rank's, or dead
            continue
        if _sent(memory, pid, environment):
            return taken
        taken.kill()
    return None


def _sent(memory: Path, pid: int, environment: dict[str, str]) -> bool:
    """Whether a spare has heard which rank it is."""
    streams = []
    for number in _STREAMS:
        with contextlib.suppress(OSError):
            os.fstat(number)
            streams.append(number)
    try:
        with socket.socket(socket.AF_UNIX) as connection, _short(memory) as directory:
            connection.settimeout(_ANSWER)
            connection.connect(f"{directory}/{_note(memory, pid, 'socket').name}")
            socket.send_fds(connection, [b"\0"], streams)
            connection.sendall(json.dumps({"streams": streams, "environment": environment}).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b"1"
    except OSError:
        return False


# --- the spare's side ---


def stand_by(memory: Path) -> None:
    """Returns when this process is a rank: with that rank's environment and standard streams."""
    bound = int(os.environ["RANK"]) if getattr(os.environ, "rank_was_read", False) else None
    with socket.socket(socket.AF_UNIX) as listener, _short(memory) as directory:
        listener.bind(f"{directory}/{_note(memory, os.getpid(), 'socket').name}")
        listener.listen()
        _write(_note(memory, os.getpid(), "ready"), json.dumps(bound))
        connection, _ = listener.accept()
    with connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
        data = b""
        while part := connection.recv(1 << 16):
            data += part
        told = parsed(data, dict[str, Any])
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for descriptor, number in zip(descriptors, told["streams"], strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if sys.stdout is not None and os.isatty(1):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(told["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.sendall(b"1")


class _Environment(type(os.environ)):
    """The environment of a spare, which sees whether the script reads of which rank it is."""

    rank_was_read = False

    def __getitem__(self, key: str) -> str:
        value = super().__getitem__(key)
        if key in _OF_A_RANK and _by_the_script(sys._getframe(1)):
            _Environment.rank_was_read = True
        return value


def _by_the_script(frame: FrameType | None) -> bool:
    """Whether a line asks for this one value, for the script or for a package of its: not for fzero, PyTorch or the
    standard library."""
    while frame is not None and frame.f_code.co_filename.startswith(_READERS):
        if frame.f_code.co_name not in ("get", "getenv", "pop"):  # of all values, or whether it is there
            return False
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    torch = getattr(sys.modules.get("torch"), "__file__", None) or os.devnull
    is_stdlib = file.startswith(_STDLIB) and "site-packages" not in file
    return not (is_stdlib or file.startswith((_FZERO, str(Path(torch).parent) + os.sep)))


def main() -> None:
    """`python -c "from fzero.elastic.spares import main; main()" [-m] script args`: the script, as `python` runs it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the ranks, and they the spares
    _, first, *rest = sys.argv
    os.environ.__class__ = _Environment  # in place: who holds it already, and os.environb, see what is set later
    if first == "-m":
        sys.argv = rest
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _note(memory: Path, pid: int, kind: str) -> Path:
    return memory / f"spare-{pid}.{kind}"


def _write(path: Path, text: str) -> None:
    """A note that is there whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A name of a directory that is short enough for a socket's."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
