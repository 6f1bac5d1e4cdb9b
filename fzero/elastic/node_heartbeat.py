"""Tells whether the other hosts of a run are still there, by life signs in the ranks' store.

torchrun starts ranks again when one of its own ends: of a host that is lost the others hear nothing. So the keeper of
each host's first rank has a process that writes a life sign every second and reads those of the others. Where torchrun
keeps no store (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which other numbers of hosts need), PyTorch would have rank 0
keep it, and all would be lost with that rank: the process of the first host keeps it then.

It imports PyTorch, which keepers do not. What it knows lies in the host's memory, for the keepers of all its ranks:

    hosts           which host has been silent longest, and since when
    absent-<rank>   a rank, of other hosts too, that has ended without a call of `fz.run`
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

from fzero._utils import bounded_json
from fzero._utils.bounded_json import Malformed, parsed
from fzero.elastic import host_directory as host

_MOST_RANKS = 1 << 20
_BEAT = 1.0  # seconds between two life signs
_LEAVE = 10.0  # seconds after the end of rank 0 in which the others let go of the store
_FRESH = 5.0  # seconds for which what was written is true
_AGAIN = 5.0  # seconds before a process that has ended is started again
_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
STORE = -1
"""The host of the store, which answers nobody."""


class Silent(NamedTuple):
    """The host that has been silent longest.

    Attributes:
        host: its number by torchrun, or `STORE`.
        since: when, in seconds of the clock that all processes of a host have.
        called: whether a rank of another host has called `fz.run`.
        now: when this was written.
    """

    host: int
    since: float
    called: bool
    now: float


def number(name: str, default: int) -> int:
    """A variable that torchrun sets."""
    return int(os.environ.get(name) or default)


def several() -> bool:
    """Whether torchrun has started this run on several hosts."""
    return number("GROUP_WORLD_SIZE", 1) > 1 and "TORCHELASTIC_RUN_ID" in os.environ


def environment() -> dict[str, str]:
    """The variables by which no rank keeps the store."""
    return {_AGENTS: "True"} if _without_store() else {}


def _without_store() -> bool:
    return os.environ.get(_AGENTS) == "False" and "TORCHELASTIC_RUN_ID" in os.environ


class Watch:
    """The process of a host, as its keeper has it. None is needed on one host whose torchrun keeps the store."""

    def __init__(self, memory: Path):
        self._keeps_store = _without_store() and number("RANK", 0) == 0 and number("WORLD_SIZE", 1) > 1
        self._memory, self._process, self._started = memory, None, 0.0
        self._is_wanted = (several() and number("LOCAL_RANK", 0) == 0) or self._keeps_store
        self._forget()
        self.look()

    def look(self) -> bool:
        """Starts the process, again if it has ended. False if the store has ended with it."""
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
                command, stdin=subprocess.PIPE, preexec_fn=host.die_with_parent, process_group=host.own_group()
            )
        return True

    def close(self, at_once: bool) -> None:
        """Ends it, when all have let go of the store or `at_once`."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(0.0 if at_once else 1.5 * _LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _forget(self) -> None:
        """Removes what an earlier start has left: each keeper of its own rank, the first one of other hosts too.
        Another rank of this host may have ended already."""
        mine, local = number("RANK", 0), number("LOCAL_RANK", 0)
        here = range(mine - local, mine - local + number("LOCAL_WORLD_SIZE", 1))
        left = {mine} | (set() if local else set(host.absent(self._memory)) - set(here))
        for path in (*(() if local else (self._memory / "hosts",)), *(self._memory / f"absent-{r}" for r in left)):
            path.unlink(missing_ok=True)


def silent(memory: Path) -> Silent | None:
    """The host that this host's process takes for silent longest; None if it has not written for a while."""
    try:
        found = bounded_json.read(memory / "hosts", Silent)
    except (OSError, Malformed):
        return None
    return found if time.monotonic() - found.now < _FRESH else None


# --- the process ---


class _Sign(NamedTuple):
    """A life sign: a number of its own, whether the host leaves in order, whether a rank of it has called `fz.run`, and
    those that do not come."""

    number: int
    left: bool
    called: bool
    absent: list[int]

    @classmethod
    def of(cls, text: bytes) -> _Sign | None:
        """None if it is no sign: everyone on the network can write to the store."""
        try:
            sign = parsed(text, cls)
        except Malformed:
            return None
        return sign._replace(absent=[r for r in sign.absent if 0 <= r < _MOST_RANKS])


class _Signs:
    """Life signs of this host and of the others. Until a rank of this host has done a step, one of which nothing was
    heard is not silent: it may still be importing PyTorch."""

    def __init__(self, store: Any, memory: Path):
        self._store, self._memory = store, memory
        self._me, self._count = number("GROUP_RANK", 0), number("GROUP_WORLD_SIZE", 1)
        first = number("RANK", 0) - number("LOCAL_RANK", 0)
        self._ranks = range(first, first + number("LOCAL_WORLD_SIZE", 1))
        self._heard: dict[int, tuple[int, float]] = {}  # the number of a host's last sign, and when it came
        self._first: dict[int, int] = {}
        self._left: set[int] = set()
        self._progress = [host.RankProgress(memory, rank) for rank in self._ranks]
        self._called, self.trip = False, time.monotonic()

    def say(self, left: bool = False) -> None:
        """Writes this host's sign."""
        here = [rank for rank in host.absent(self._memory) if rank in self._ranks]
        called = any(progress.read().phase != host.STARTING for progress in self._progress)
        self._store.set(_sign(self._me), json.dumps(_Sign(time.time_ns(), left, called, here)))

    def hear(self) -> None:
        """Reads those of the others."""
        for other in range(self._count):
            if other != self._me and self._store.check([_sign(other)]):
                self._heed(other, _Sign.of(self._store.get(_sign(other))))
        self.trip = time.monotonic()
        if any(progress.read().has_stepped for progress in self._progress):  # so the ranks of all hosts were there
            for other in {*range(self._count)} - {self._me} - self._left:
                self._heard.setdefault(other, (0, self.trip))

    def _heed(self, other: int, sign: _Sign | None) -> None:
        if sign is None or self._first.setdefault(other, sign.number) == sign.number:  # of an earlier start, it may be
            return
        if sign.left:
            self._left.add(other)
            self._heard.pop(other, None)
        elif sign.number != self._heard.get(other, (0, 0.0))[0]:
            self._heard[other] = sign.number, time.monotonic()
        self._called = self._called or sign.called
        for rank in sign.absent:
            host.is_absent(self._memory, rank)

    def oldest(self) -> Silent:
        since, other = min(((since, other) for other, (_, since) in self._heard.items()), default=(self.trip, STORE))
        if since > self.trip - 2 * _BEAT:  # all were heard when the store last answered
            since, other = self.trip, STORE
        return Silent(other, since, self._called, time.monotonic())


def main() -> None:
    """`python -c ... store|signs MEMORY`, until its standard input ends."""
    import signal

    import torch.distributed as dist

    for heard in (signal.SIGINT, signal.SIGTERM):  # by its keeper
        signal.signal(heard, signal.SIG_IGN)
    keeps_store, memory = sys.argv[1] == "store", Path(sys.argv[2])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False) if keeps_store else None
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
    os._exit(0)  # a thread may still wait for a store that answers nobody


def _sockets() -> int:
    """Sockets of this process."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the iteration itself
            found += os.readlink(entry).startswith("socket:")
    return found


def _sign(of: int) -> str:
    return f"fzero/hosts/{of}"
