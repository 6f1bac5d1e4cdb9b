"""Starts stock torchrun launchers on this machine, each as if on a host of its own, and kills whole ones.

Each has a directory for the memory of its host, and its ranks take no process of the others for one of their host's
(SURVIVOR_HOST). The store in which launchers meet is this process's: it outlives any of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from scripts import ROOT, environment

FLAGS = ("--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d")


class Launchers:
    """Those of one run, in the order in which they were started.

    Args:
        out: a directory, in which their logs and the hosts' memories lie.
        nnodes: of torchrun.
        command: the script with its arguments, or `-m` and a module.
        conf: `--rdzv-conf`.
        env: of the launchers.
    """

    def __init__(
        self, out: Path, nnodes: str, command: Sequence[str], conf: str = "", env: dict[str, str] | None = None
    ):
        self._out, self._command, self._env = out, command, env or {}
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(60))
        self._flags = [*FLAGS, f"--nnodes={nnodes}", f"--rdzv-endpoint=localhost:{self._store.port}"]
        self._flags += [f"--rdzv-id={out.name}", *([f"--rdzv-conf={conf}"] if conf else [])]
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, supervisor: Sequence[str] = ()) -> int:
        """One more, with flags of its supervisors; its number."""
        number = len(self.all)
        env = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SURVIVOR_HOST": str(number), **self._env}
        supervisors = ["-m", "fzero.run", *supervisor, f"--memory={self._out / f'memory-{number}'}"]
        command = [sys.executable, "-m", "torch.distributed.run", *self._flags, *supervisors, *self._command]
        with self.log(number).open("wb") as log:
            self.all.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=ROOT))
        return number

    def lose(self, number: int, by: int = signal.SIGKILL) -> None:
        """As its host: the launcher and all its processes, at once."""
        for pid in self._tree(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, by)

    def log(self, number: int) -> Path:
        return self._out / f"launcher-{number}"

    def text(self) -> str:
        """All that was printed."""
        return "\n".join(f"--- {i} ---\n{self.log(i).read_text()}" for i in range(len(self.all)))

    def _tree(self, number: int) -> list[int]:
        """A launcher's processes, itself first."""
        found = [self.all[number].pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, task.read_text().split())
        return found

    def close(self) -> None:
        for number, launcher in enumerate(self.all):
            if launcher.poll() is None:
                self.lose(number)
            launcher.wait()


@contextlib.contextmanager
def launchers(
    out: Path, nnodes: str, command: Sequence[str], conf: str = "", env: dict[str, str] | None = None
) -> Iterator[Launchers]:
    found = Launchers(out, nnodes, command, conf, env)
    try:
        yield found
    finally:
        found.close()
