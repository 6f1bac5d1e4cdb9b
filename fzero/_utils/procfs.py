"""Reads facts about processes from Linux's `/proc`: whether one is alive, when it started, and on which host it runs.

This file does not import PyTorch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _stat(pid: int) -> list[str]:
    """Returns the fields of proc_pid_stat(5) from the third one on, or an empty list if there is no such process."""
    try:
        # The second field is the name of the process in parentheses, which may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process of this host exists and has not ended. A process that its parent has not waited for yet (a
    zombie) has ended."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def start_time(pid: int) -> str:
    """Returns the start time of a process in clock ticks of its kernel, or "" if there is no such process.

    Together with the process id, which is used again, it identifies a process.
    """
    return "".join(_stat(pid)[19:20])


def boot_id() -> str:
    """Returns an identifier that is the same in all processes of one running kernel, including those in containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def pid_namespace() -> str:
    """Returns an identifier of the namespace of process ids: containers of one host may have several."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return str(os.getpid())


def host_id() -> tuple[str, str]:
    """Returns an identifier of the host within which process ids are comparable."""
    return boot_id(), pid_namespace()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
