"""Finds the memory in which a host keeps the states of a run, and says there how far each rank is. Imports no PyTorch:
the process that watches a rank stays small.

The memory belongs to the process that owns the run: torchrun or, without it, the keeper. It lasts as long as that
process, over restarts of all the others. The next run that finds its owner gone removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fzero._utils.path_permissions import exposed

MEMORY, KEEPER = "FZERO_RUN_MEMORY", "FZERO_RUN_KEEPER"
"""Names in the environment of a keeper's process: the place of states, and the mark of a kept process."""

_NAMES = 100  # of a directory, that are tried
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAST_SYSTEM_USER = 999
_LOGINCTL = 5.0  # seconds in which it answers


def memory(given: str | os.PathLike[str] | None = None) -> Path:
    """The directory of this run on this host, readable by its user alone. Removes those whose owners are gone.

    Args:
        given: in place of `/dev/shm`, or of the directory for temporary files where there is none.

    Raises:
        OSError: it cannot be made.
    """
    if given is None and (kept := os.environ.get(MEMORY)):
        return Path(kept)
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    here = str(os.stat("/proc/self/ns/pid").st_ino)  # containers may share this memory, and not their processes
    name = f"{here}-{owner}-{started(owner)}"
    roots = _roots(base if given is None else Path(given).absolute())
    root = _root(roots, name)
    for other in (x for one in roots if one.is_dir() and exposed(one, 0o077) is None for x in one.iterdir()):
        names, _, process = other.name.partition("-")
        pid, _, born = process.partition("-")
        if names == here and pid.isdigit() and born != started(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    found = root / name
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def _roots(base: Path) -> list[Path]:
    """The names of a directory of this user for all runs, in order: others can take some, where everybody may write."""
    first = base / f"fzero-{os.getuid()}"
    return [first, *(base / f"{first.name}-{i}" for i in range(1, _NAMES))]


def _root(roots: Sequence[Path], name: str) -> Path:
    """The one of these in which a process of this run has made the run's directory; else the first that is this user's,
    or can be.

    Raises:
        OSError: there is none.
    """
    roots[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for root in roots:
        if (root / name).is_dir() and exposed(root, 0o077) is None:
            return root
    problems = []
    for root in roots:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        if (why := exposed(root, 0o077)) is None:
            if problems and os.environ.get("LOCAL_RANK", "0") == "0":
                logging.getLogger("fzero").warning("fzero.run: keeps states in %s: %s", root, problems[0])
            return root
        problems.append(why)
        if root.lstat().st_uid == os.getuid():  # no other account's doing
            break
    raise PermissionError(problems[-1])


def make_directory(directory: Path) -> None:
    """Makes a directory of a run's memory if it is not there: whoever has removed it is not its owner.

    Raises:
        OSError: it cannot be made.
    """
    missing = [d for d in (directory, *directory.parents) if not d.is_dir()]
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was faster
            one.mkdir(mode=0o700)
    for root in (d for d in missing if d.name.startswith(f"fzero-{os.getuid()}")):
        if (why := exposed(root, 0o077)) is not None:
            raise PermissionError(why)


def logout_removes(memory: Path) -> bool:
    """Whether systemd-logind removes files of this user in /dev/shm when the user's last session ends (RemoveIPC=yes).
    It leaves alone system users, and users who linger."""
    if not memory.is_relative_to("/dev/shm") or os.getuid() <= _LAST_SYSTEM_USER:
        return False

    def shown(*what: str) -> str:
        command = ["loginctl", *what]
        return subprocess.run(command, capture_output=True, text=True, timeout=_LOGINCTL, check=False).stdout.strip()

    try:  # without a session, show-session has the properties of logind itself
        removes = shown("show-session", "--property=RemoveIPC") == "RemoveIPC=yes"
        return removes and shown("show-user", str(os.getuid()), "--property=Linger") != "Linger=yes"
    except (OSError, subprocess.TimeoutExpired):
        return False


LOGOUT = (
    "systemd-logind removes this user's files in /dev/shm when the last session ends (RemoveIPC=yes), and with them "
    "the states in memory: run `loginctl enable-linger` once to prevent it"
)


def of_run(memory: Path, ended: int) -> Path:
    """The place of the states of the run that follows so many others, which have ended, in one script."""
    return memory / f"after-{ended}" if ended else memory


def forget(memory: Path, ended: int) -> None:
    """Removes the states of the runs that have ended."""
    for number in range(ended):
        for directory in of_run(memory, number).glob("of-*"):
            shutil.rmtree(directory, ignore_errors=True)


def not_a_directory(given: str) -> list[str]:
    """A line if a text cannot be where a host keeps states."""
    if not given:
        return ["memory='': names no directory"]
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", given):
        return [f"memory={given!r}: must be a directory of this host, not a URL"]
    return []


def started(pid: int) -> str:
    """When a process began, in ticks of its kernel; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def is_absent(memory: Path, rank: int) -> None:
    """A rank, of this host or another, has ended without a call of `fz.run`: nobody needs to wait for it."""
    (memory / f"absent-{rank}").touch()


def absent(memory: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in memory.glob("absent-*"))


def elastic() -> bool:
    """Whether torchrun may start the ranks again on more or fewer hosts: `--nnodes 1:3`."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    told = f"--nnodes={os.environ.get('PET_NNODES', '')} " + " ".join(words).partition(" fzero.run")[0]
    least, _, most = re.findall(r"--nnodes[= ](\S*)", told)[-1].partition(":")
    return bool(most) and least != most


def elsewhere() -> str:
    """The way to keep states in another directory: under a keeper a rank cannot choose it."""
    return "python -m fzero.run --memory DIR" if KEEPER in os.environ else "fz.run(memory=DIR)"


def own_group() -> int | None:
    """The process group of what a keeper starts, as `Popen` takes it: a new one under torchrun, whose SIGTERM is for
    the whole group of a rank. It would end the processes that load a script's data before the rank itself has stopped.
    """
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else None


def remove(directory: Path) -> None:
    """Removes the memory of a run, and what held it if that was all."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()


class Seen(NamedTuple):
    """A rank as its keeper sees it.

    Attributes:
        step: the one that has begun.
        first: the first since all came together.
        beats: a number that grows whenever the rank does something together with others.
        waited: when it last waited for another rank, in seconds of the clock that all processes of a host have.
        phase: of `STARTING`, `COMING`, `JOINING`, `BUILDING`, `STEPPING` and `FINISHED`.
    """

    step: int
    first: int
    beats: int
    waited: float
    phase: int

    @property
    def has_stepped(self) -> bool:
        """Whether it has done a step since all came together."""
        return self.phase == STEPPING and self.first < self.step


STARTING, COMING, JOINING, BUILDING, STEPPING, FINISHED = range(6)
"""The phases of a rank: until it calls `fz.run`; until its first step on a mesh (joining, or building a program); from
a step on; and after all have returned from `main`."""


class RankProgress:
    """The progress of a rank, in memory that it shares with its keeper."""

    _FORM = struct.Struct("<qqqdq")

    def __init__(self, directory: Path, rank: int):
        self._path = directory / f"progress-{rank:05d}"
        self._map = self._opened()
        self._seen = self.read()

    def _opened(self) -> mmap.mmap:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            return mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)

    def leave(self) -> bool:
        """Removes the file when its keeper ends. Whether it was the last of its host."""
        self._path.unlink(missing_ok=True)
        return not any(self._path.parent.glob("progress-*"))

    @property
    def reached(self) -> int:
        """The number of batches that were seen before the step that this rank, in this life or the one before, has
        begun last."""
        return self._seen.step

    def read(self) -> Seen:
        return Seen(*self._FORM.unpack_from(self._map))

    def say(self, phase: int, step: int | None = None) -> None:
        """Tells the keeper which phase begins, and with `step` which step."""
        step = self._seen.step if step is None else step
        first = step if self._seen.phase in (STARTING, COMING, JOINING) else self._seen.first
        self._write(phase=phase, step=step, first=first, beats=self._seen.beats + 1)

    def begin(self) -> None:
        """A process begins that is this rank, and has taken no step yet. If the file was removed, it gets another one
        with the same content."""
        if not self._path.exists():
            make_directory(self._path.parent)
            content, self._map = self._map[:], self._opened()
            self._map[:] = content
        self._seen = self.read()
        self.say(STARTING)

    def absent(self) -> list[int]:
        """The ranks that have ended without a call of `fz.run`."""
        return absent(self._path.parent)

    def met(self) -> None:
        """All ranks have come."""
        self.say(JOINING)

    def builds(self) -> None:
        """A program is made, which may take long."""
        self.say(BUILDING)

    def beat(self) -> None:
        self._write(beats=self._seen.beats + 1)

    def wait(self) -> None:
        """This rank waits for others."""
        self._write(waited=time.monotonic())

    def _write(self, **changes: Any) -> None:
        self._seen = self._seen._replace(**changes)
        self._FORM.pack_into(self._map, 0, *self._seen)
