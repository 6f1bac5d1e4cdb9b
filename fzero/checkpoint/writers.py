"""Names the process that writes a checkpoint, in a note among the files of its draft: two jobs that save to one place
tell each other so."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from fzero.checkpoint.places import Place
from fzero.errors import CheckpointError
from fzero.read_json import Malformed, parsed

WRITER = "writer.json"

_FIX = "give each job a directory, or URL, of its own: one job at a time saves to one"


def note() -> bytes:
    """Who writes: this process, on this host."""
    pid = os.getpid()
    said = {"host": socket.gethostname(), "pid": pid, "here": _here(), "born": _born(pid), "since": int(time.time())}
    return json.dumps(said).encode()


def is_another(data: bytes) -> bool:
    """Whether a note is of a process of this host that lives and is not this one. Of another host's, and of a note that
    is damaged, nobody here can tell: False."""
    said = _parsed(data)
    pid = said.get("pid")
    if said.get("here") != _here() or not isinstance(pid, int) or pid == os.getpid():
        return False
    return said.get("born") == _born(pid) != ""


def another(root: Place, data: bytes | None) -> CheckpointError:
    """The error of a save to where another job saves. `data`: its note, None if it has left none."""
    said = _parsed(data or b"")
    problems = []
    if isinstance(since := said.get("since"), int):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        problems.append(f"process {said.get('pid')} on host {said.get('host')}, which saves since {when}")
    return CheckpointError("checkpoint.save", f"another job saves to {root}", problems, _FIX)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return parsed(data, dict[str, Any])
    except Malformed:
        return {}


def _here() -> str:
    """The kernel that runs, and the namespace of its processes' numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(pid: int) -> str:
    """When a process began, in ticks of its kernel; "" if there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
