"""Detects lost hosts of a run by heartbeats in the ranks' store.

torchrun restarts ranks when one of its own ranks ends, but the other hosts hear nothing of a host that is lost. So
the supervisor of each host's first rank runs a process that writes a heartbeat every second and reads the heartbeats of
the other hosts. If torchrun keeps no store (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which a changing number of hosts
requires), PyTorch would have rank 0 keep it, and all would be lost with that rank. In that case the process of the
first host keeps the store.

The process imports PyTorch; supervisors do not. It writes what it knows into the host's memory directory, for the
supervisors of all ranks of the host, to the file `hosts`: which host has been silent longest, and since when.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from fzero._utils import bounded_json, procfs
from fzero._utils.bounded_json import Malformed, parsed
from fzero.elastic import host_directory as host

_BEAT = 1.0  # seconds between two heartbeats
_LEAVE = 10.0  # seconds after the end of rank 0 in which the others disconnect from the store
_FRESH = 5.0  # seconds for which what was written counts as current
_AGAIN = 5.0  # seconds before a process that has ended is started again
_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
STORE = -1
"""Stands for the host of the store, when the store does not answer."""


class Silent(NamedTuple):
    """The host that has been silent longest.

    Attributes:
        host: its number as torchrun counts (GROUP_RANK), or `STORE`.
        since: since when, in seconds of the clock that all processes of a host share.
        now: when this was written.
    """

    host: int
    since: float
    now: float


def number(name: str, default: int) -> int:
    """Returns the value of an environment variable that torchrun sets."""
    return int(os.environ.get(name) or default)


def several() -> bool:
    """Whether torchrun has started this run on several hosts."""
    return number("GROUP_WORLD_SIZE", 1) > 1 and "TORCHELASTIC_RUN_ID" in os.environ


def environment() -> dict[str, str]:
    """Returns the environment variables with which no rank keeps the store, if the heartbeat process keeps it."""
    return {_AGENTS: "True"} if _without_store() else {}


def _without_store() -> bool:
    return os.environ.get(_AGENTS) == "False" and "TORCHELASTIC_RUN_ID" in os.environ


class Watch:
    """The heartbeat process of a host, as its supervisor sees it. On one host whose torchrun keeps the store no such
    process is needed."""

    def __init__(self, memory: Path):
        self._keeps_store = _without_store() and number("RANK", 0) == 0 and number("WORLD_SIZE", 1) > 1
        self._memory, self._process, self._started = memory, None, 0.0
        self._is_wanted = (several() and number("LOCAL_RANK", 0) == 0) or self._keeps_store
        if number("LOCAL_RANK", 0) == 0:
            (memory / "hosts").unlink(missing_ok=True)  # of an earlier start
        self.look()

    def look(self) -> bool:
        """Starts the process, or restarts it if it has ended. Returns False if the store has ended with it."""
        if not self._is_wanted or (self._process is not None and self._process.poll() is None):
            return True
        if self._process is not None and self._keeps_store:
            return False
        if self._process is None or time.monotonic() - self._started > _AGAIN:
            role = "store" if self._keeps_store else "signs"
            command = [
                sys.executable,
                "-c",
                "from fzero.elastic.node_heartbeat import main; main()",
                role,
                str(self._memory),
            ]
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, preexec_fn=procfs.die_with_parent, process_group=host.own_group()
            )
        return True

    def close(self, at_once: bool) -> None:
        """Ends the process: after all others have disconnected from the store, or immediately if `at_once`."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(0.0 if at_once else 1.5 * _LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def silent(memory: Path) -> Silent | None:
    """Returns the host that this host's heartbeat process takes to be silent longest, or None if that process has not
    written for a while."""
    try:
        found = bounded_json.read(memory / "hosts", Silent)
    except (OSError, Malformed):
        return None
    return found if time.monotonic() - found.now < _FRESH else None


# --- the process ---


class _Sign(NamedTuple):
    """A heartbeat: a unique number, and whether the host leaves in an orderly way."""

    number: int
    left: bool

    @classmethod
    def of(cls, text: bytes) -> _Sign | None:
        """Parses a heartbeat. Returns None if the text is not one: everyone on the network can write to the store."""
        try:
            return parsed(text, cls)
        except Malformed:
            return None


class _Signs:
    """The heartbeats of this host and of the others.

    Until a rank of this host has finished a step, a host that has sent no heartbeat yet does not count as silent,
    because it may still be importing PyTorch.
    """

    def __init__(self, store: Any, memory: Path):
        self._store = store
        self._me, self._count = number("GROUP_RANK", 0), number("GROUP_WORLD_SIZE", 1)
        first = number("RANK", 0) - number("LOCAL_RANK", 0)
        ranks = range(first, first + number("LOCAL_WORLD_SIZE", 1))
        self._heard: dict[int, tuple[int, float]] = {}  # the number of a host's last heartbeat, and when it arrived
        self._first: dict[int, int] = {}
        self._left: set[int] = set()
        self._progress = [host.RankProgress(memory, rank) for rank in ranks]
        self.trip = time.monotonic()

    def say(self, left: bool = False) -> None:
        """Writes this host's heartbeat."""
        self._store.set(_sign(self._me), json.dumps(_Sign(time.time_ns(), left)))

    def hear(self) -> None:
        """Reads the heartbeats of the other hosts."""
        for other in range(self._count):
            if other != self._me and self._store.check([_sign(other)]):
                self._heed(other, _Sign.of(self._store.get(_sign(other))))
        self.trip = time.monotonic()
        if any(progress.read().has_stepped for progress in self._progress):  # so all hosts have started
            for other in {*range(self._count)} - {self._me} - self._left:
                self._heard.setdefault(other, (0, self.trip))

    def _heed(self, other: int, sign: _Sign | None) -> None:
        """Processes a heartbeat of another host.

        The first heartbeat that is read may be left from an earlier start. So a host only counts as heard once the
        number of its heartbeat changes.
        """
        if sign is None or self._first.setdefault(other, sign.number) == sign.number:
            return
        if sign.left:
            self._left.add(other)
            self._heard.pop(other, None)
        elif sign.number != self._heard.get(other, (0, 0.0))[0]:
            self._heard[other] = sign.number, time.monotonic()

    def oldest(self) -> Silent:
        """Returns the host that has been silent longest, or the store if that does not answer."""
        since, other = min(((since, other) for other, (_, since) in self._heard.items()), default=(self.trip, STORE))
        if since > self.trip - 2 * _BEAT:  # all hosts were heard when the store last answered
            since, other = self.trip, STORE
        return Silent(other, since, time.monotonic())


def main() -> None:
    """Runs `python -c ... store|signs MEMORY` until its standard input is closed."""
    import signal

    import torch.distributed as dist

    for heard in (signal.SIGINT, signal.SIGTERM):  # its supervisor handles these
        signal.signal(heard, signal.SIG_IGN)
    keeps_store, memory = sys.argv[1] == "store", Path(sys.argv[2])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False) if keeps_store else None
    # The sockets of this process while no other process is connected to its store.
    alone = _sockets()
    signs = _Signs(kept or dist.TCPStore(address, port, wait_for_workers=False), memory)
    told = threading.Event()

    def beat() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            while not told.wait(_BEAT):
                signs.say()
                signs.hear()
            signs.say(left=True)

    def write() -> None:
        while not told.wait(_BEAT):
            # Replaced in one operation, so that no supervisor reads half a file.
            new = memory / "hosts.new"
            with contextlib.suppress(OSError):
                new.write_text(json.dumps(signs.oldest()))
                os.replace(new, memory / "hosts")

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    threading.Thread(target=write, daemon=True).start()
    sys.stdin.buffer.read()
    told.set()
    beating.join(_BEAT)
    deadline = time.monotonic() + _LEAVE
    while kept is not None and _sockets() > alone and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)  # a thread may still wait for a store that does not answer


def _sockets() -> int:
    """Returns the number of open sockets of this process."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this iteration itself is closed by now
            found += os.readlink(entry).startswith("socket:")
    return found


def _sign(of: int) -> str:
    return f"fzero/hosts/{of}"
