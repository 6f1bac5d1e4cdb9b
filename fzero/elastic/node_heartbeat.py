"""Detects lost hosts of a run by heartbeats in the ranks' store.

torchrun restarts ranks when one of its own ranks ends, but the other hosts hear nothing of a host that is lost. So
the supervisor of each host's first rank starts a process that writes a heartbeat every second and reads the heartbeats
of the other hosts. If a host is silent for too long and the ranks of this host make no progress, the process writes the
reason into the host's memory directory. The supervisors of the host then end their ranks, and torchrun restarts all
ranks on the remaining hosts.

If torchrun keeps no store (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which a changing number of hosts requires), PyTorch
would have rank 0 keep it, and all ranks would be lost with that rank. In that case the process of the first host keeps
the store.

The process imports PyTorch; supervisors do not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fzero._utils import procfs
from fzero.elastic import host_directory as host

_BEAT = 1.0  # seconds between two heartbeats
_IDLE = 5.0  # seconds without progress after which a rank is assumed to wait for other ranks
_LINGER = 2.0  # seconds for which the store outlives rank 0, while the other ranks end
_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
_LOST = "lost-host"


def number(name: str, default: int) -> int:
    """Returns the value of an environment variable that torchrun sets."""
    return int(os.environ.get(name) or default)


def environment() -> dict[str, str]:
    """Returns the environment variables with which no rank keeps the store, if a heartbeat process keeps it."""
    return {_AGENTS: "True"} if _without_store() else {}


def _without_store() -> bool:
    return os.environ.get(_AGENTS) == "False" and "TORCHELASTIC_RUN_ID" in os.environ


def start(memory: Path, timeout: float) -> subprocess.Popen[bytes] | None:
    """Starts the heartbeat process of this host, which ends when its standard input is closed.

    Returns None if another supervisor of the host starts it, or if there is one host and torchrun keeps the store.

    Args:
        memory: the run's directory on this host.
        timeout: seconds after which a silent host counts as lost.
    """
    keeps_store = _without_store() and number("RANK", 0) == 0 and number("WORLD_SIZE", 1) > 1
    several = number("GROUP_WORLD_SIZE", 1) > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if not keeps_store and not (several and number("LOCAL_RANK", 0) == 0):
        return None
    code = "from fzero.elastic.node_heartbeat import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "store" if keeps_store else "", str(memory), str(timeout)],
        stdin=subprocess.PIPE,
        preexec_fn=procfs.die_with_parent,
        process_group=host.own_group(),
    )


def end(process: subprocess.Popen[bytes] | None) -> None:
    """Ends a heartbeat process; a store that it keeps stays for two seconds."""
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def lost_host(memory: Path, since: float) -> str:
    """Returns the reason why the ranks of this host wait in vain, or "" if they do not.

    Args:
        since: when this start of the run began (`time.time()`); what an earlier start has written is ignored.
    """
    with contextlib.suppress(FileNotFoundError):
        if (memory / _LOST).stat().st_mtime > since:
            return (memory / _LOST).read_text()
    return ""


# --- the process ---


class Heartbeats:
    """The heartbeats of this host, `me`, and of the other ones of `count` hosts. A host is alive if its heartbeat
    changes: the first one that is read may be left from an earlier start."""

    def __init__(self, store: Any, me: int, count: int):
        self._store, self._me = store, me
        # By host: its last heartbeat, and when that has changed.
        self._heard: dict[int, tuple[bytes | None, float | None]] = {o: (None, None) for o in range(count) if o != me}
        self._answered = time.monotonic()

    def exchange(self) -> None:
        """Writes the heartbeat of this host and reads those of the others."""
        self._store.set(_key(self._me), str(time.time_ns()))
        for other, (last, _) in self._heard.items():
            if self._store.check([_key(other)]) and (now := self._store.get(_key(other))) != last:
                self._heard[other] = now, None if last is None else time.monotonic()
        self._answered = time.monotonic()

    def lost(self, timeout: float, first_step: float | None) -> str:
        """Returns who has been silent for `timeout` seconds, a host or the store itself, or "".

        A host that was never heard counts from the first step on: before it, it may still be importing PyTorch.
        """
        if (silence := time.monotonic() - self._answered) > timeout:
            return f"the store of the ranks has not answered for {silence:.0f} s"
        # Compared with the last answer of the store: until it answers again, nothing is known of the hosts.
        for other, (_, heard) in self._heard.items():
            since = first_step if heard is None else heard
            if since is not None and (silence := self._answered - since) > timeout:
                return f"host {other} (GROUP_RANK) has sent no heartbeat for {silence:.0f} s"
        return ""


def main() -> None:
    """Runs `python -c ... store|"" MEMORY TIMEOUT` until its standard input is closed."""
    import signal

    import torch.distributed as dist

    for heard in (signal.SIGINT, signal.SIGTERM):  # its supervisor handles these
        signal.signal(heard, signal.SIG_IGN)
    keeps_store, memory, timeout = sys.argv[1] == "store", Path(sys.argv[2]), float(sys.argv[3])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("localhost" if keeps_store else address, port, is_master=keeps_store, wait_for_workers=False)
    heartbeats = Heartbeats(store, number("GROUP_RANK", 0), number("GROUP_WORLD_SIZE", 1))

    def beat() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone
            while True:
                heartbeats.exchange()
                time.sleep(_BEAT)

    # A thread, because a store whose host is lost never answers.
    threading.Thread(target=beat, daemon=True).start()
    threading.Thread(target=_watch, args=(heartbeats, memory, timeout), daemon=True).start()
    sys.stdin.buffer.read()
    time.sleep(_LINGER if keeps_store else 0.0)
    os._exit(0)  # a thread may still wait for a store that does not answer


def _watch(heartbeats: Heartbeats, memory: Path, timeout: float) -> None:
    """Waits until a host is lost while the ranks of this host make no progress, and writes the reason to the directory
    of the run."""
    first = number("RANK", 0) - number("LOCAL_RANK", 0)
    ranks = [host.RankProgress(memory, rank) for rank in range(first, first + number("LOCAL_WORLD_SIZE", 1))]
    first_step: float | None = None
    beats, moved = [0], 0.0
    while True:
        time.sleep(_BEAT)
        seen, now = [rank.read() for rank in ranks], time.monotonic()
        if first_step is None and any(one.has_stepped for one in seen):  # so all hosts have started
            first_step = now
        if beats != [one.beats for one in seen]:
            beats, moved = [one.beats for one in seen], now
        if now - moved > _IDLE and (why := heartbeats.lost(timeout, first_step)):
            # Renamed when it is complete, so that no supervisor reads half a file.
            (memory / f"{_LOST}.new").write_text(f"{why} (--heartbeat-timeout)")
            os.replace(memory / f"{_LOST}.new", memory / _LOST)
            return


def _key(of: int) -> str:
    return f"fzero/hosts/{of}"
