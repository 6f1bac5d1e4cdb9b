"""Finds the directory in which a host keeps the in-memory checkpoints of a run, and shares the progress of each rank
there.

This file does not import PyTorch, so that the supervisor process of a rank stays small.

The directory belongs to the process that owns the run: torchrun or, without it, the supervisor. It lasts as long as
that process, while all other processes may restart. If its owner is gone, the next run on the host removes it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from fzero._utils import procfs
from fzero._utils.path_permissions import exposed, make_private_directory

MEMORY, SUPERVISOR = "FZERO_RUN_MEMORY", "FZERO_RUN_SUPERVISOR"
"""Environment variables that the supervisor sets for its rank: the directory of the in-memory checkpoints, and the mark
that the process has a supervisor."""

_LAST_SYSTEM_USER = 999
_LOGINCTL = 5.0  # seconds to wait for an answer of loginctl


def memory(given: str | os.PathLike[str] | None = None) -> Path:
    """Returns the directory of this run on this host, which only its user can read, and removes those whose owners are
    gone.

    Args:
        given: the base directory to use instead of `/dev/shm`, or of the directory for temporary files if there is
            no `/dev/shm`.

    Raises:
        OSError: the directory cannot be made, or another user could read it.
    """
    if given is None and (kept := os.environ.get(MEMORY)):
        return Path(kept)
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    # torchrun's agent outlives the ranks and supervisors that it restarts, so all of them find the same directory.
    owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    here = procfs.pid_namespace()  # containers may share this memory but not process ids
    name = f"{here}-{owner}-{procfs.start_time(owner)}"  # with the start time, because process ids are used again
    found = (base if given is None else Path(given).absolute()) / f"fzero-{os.getuid()}" / name
    make_directory(found)
    for other in found.parent.iterdir():
        names, _, process = other.name.partition("-")
        pid, _, born = process.partition("-")
        if names == here and pid.isdigit() and born != procfs.start_time(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    return found


def make_directory(directory: Path) -> None:
    """Makes the directory of a run on this host if it does not exist.

    It may have been removed by somebody other than its owner, such as a cleaner of temporary files.

    Raises:
        OSError: the directory cannot be made, or another user could read it.
    """
    make_private_directory(directory.parent)
    if (why := exposed(directory.parent, 0o077)) is not None:
        raise PermissionError(why)
    directory.mkdir(mode=0o700, exist_ok=True)


def logout_removes(memory: Path) -> bool:
    """Whether systemd-logind removes this user's files in /dev/shm when the user's last session ends (RemoveIPC=yes).

    It does not do so for system users, nor for users with lingering enabled.
    """
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


def forget(memory: Path) -> None:
    """Removes the in-memory checkpoints of a run that has ended, so that later runs of the script have the memory."""
    for directory in memory.glob("of-*"):
        shutil.rmtree(directory, ignore_errors=True)


def not_a_directory(given: str) -> list[str]:
    """Returns a message if a text cannot name a directory for in-memory checkpoints."""
    if not given:
        return ["memory='': is not a directory"]
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", given):
        return [f"memory={given!r}: must be a directory of this host, not a URL"]
    return []


def elastic() -> bool:
    """Whether torchrun may restart the ranks on more or fewer hosts, as with `--nnodes 1:3`."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    # PET_NNODES is torchrun's variable for --nnodes; the command line comes after it, because it takes precedence. What
    # follows `fzero.run` belongs to the script.
    told = f"--nnodes={os.environ.get('PET_NNODES', '')} " + " ".join(words).partition(" fzero.run")[0]
    least, _, most = re.findall(r"--nnodes[= ](\S*)", told)[-1].partition(":")
    return bool(most) and least != most


def elsewhere() -> str:
    """Returns how to keep the in-memory checkpoints in another directory: a rank with a supervisor cannot choose it
    itself."""
    return "python -m fzero.run --memory DIR" if SUPERVISOR in os.environ else "fz.run(memory=DIR)"


def own_group() -> int | None:
    """Returns the process group for a process that the supervisor starts, as the `process_group` argument of `Popen`.

    Under torchrun it is a new group, because torchrun sends SIGTERM to the whole group of a rank. In the same group,
    that signal would end a script's data-loading processes before the rank itself has stopped.
    """
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else None


def remove(directory: Path) -> None:
    """Removes the directory of a run, and the directory that contains it if that is empty then."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()


class Seen(NamedTuple):
    """The progress of a rank as its supervisor sees it.

    Attributes:
        step: the step that has begun.
        beats: a counter that grows whenever the rank does something together with others.
        waited: when the rank last waited for another rank, in seconds of the clock that all processes of a host
            share.
        phase: one of `STARTING`, `PREPARING`, `JOINING`, `STEPPING` and `FINISHED`.
        has_stepped: whether it has finished a step since the last other phase.
    """

    step: int
    beats: int
    waited: float
    phase: int
    has_stepped: bool


STARTING, PREPARING, JOINING, STEPPING, FINISHED = range(5)
"""The phases of a rank.

- `STARTING`: until the rank calls `fz.run`.
- `PREPARING`: it waits for the other ranks, initializes or restores the state, or builds a program, however long that
  takes.
- `JOINING`: all ranks have come, and make a mesh.
- `STEPPING`: from the start of a step on.
- `FINISHED`: after all ranks have returned from `main`.
"""


class RankProgress:
    """The progress of a rank, in memory that it shares with its supervisor."""

    # the fields of Seen
    _FORM = struct.Struct("<qqdq?")

    def __init__(self, directory: Path, rank: int):
        self._path = directory / f"progress-{rank:05d}"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._seen = self.read()

    def leave(self) -> bool:
        """Removes the file when its supervisor ends, and returns whether it was the last such file of the host."""
        self._path.unlink(missing_ok=True)
        return not any(self._path.parent.glob("progress-*"))

    @property
    def reached(self) -> int:
        """The number of batches seen before the step that this rank began last, in this process or in the one that it
        replaces."""
        return self._seen.step

    def read(self) -> Seen:
        return Seen(*self._FORM.unpack_from(self._map))

    def say(self, phase: int, step: int | None = None) -> None:
        """Tells the supervisor which phase begins and, if `step` is given, which step."""
        step = self._seen.step if step is None else step
        self._write(step=step, phase=phase, has_stepped=phase == self._seen.phase == STEPPING)
        self.beat()

    def begin(self) -> None:
        """Records that a new process of this rank begins, which has taken no step yet."""
        self._seen = self.read()
        self.say(STARTING)

    def begins_step(self, step: int) -> None:
        """Records that a step begins."""
        self.say(STEPPING, step)

    def met(self) -> None:
        """Records that all ranks have come together."""
        self.say(JOINING)

    def builds(self) -> None:
        """Records that a program is being built."""
        self.say(PREPARING)

    def beat(self) -> None:
        self._write(beats=self._seen.beats + 1)

    def wait(self) -> None:
        """Records that this rank waits for other ranks."""
        self._write(waited=time.monotonic())

    def _write(self, **changes: Any) -> None:
        self._seen = self._seen._replace(**changes)
        # Not atomic. A supervisor that reads half of an update sees a wrong value once, and the right one at its next
        # look.
        self._FORM.pack_into(self._map, 0, *self._seen)
