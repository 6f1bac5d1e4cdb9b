"""Tables of recovery.py: what failures and asynchronous saves cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import SOURCE

SCRIPT = str(SOURCE / "benchmarks" / "recovery.py")


class Table(NamedTuple):
    """What a table publishes: the name of its files, and the arguments of `common.publish`."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str]
    data: dict[str, Any]


def torchrun(
    table: str,
    processes: int,
    folder: Path,
    given: Sequence[str],
    flags: Sequence[str] = (),
    module: str | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run the worker of a table as ranks of torchrun, with compiler caches in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *flags]
    command += ["-m", module] if module else []
    command += [SCRIPT, "--worker", f"--table={table}", *given]
    caches = {"FZERO_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": "lo", "FZERO_PROGRESS": "off"}
    done = subprocess.run(
        command,
        env={**os.environ, **usual, **caches, **(env or {})},
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=folder,
    )
    if done.returncode:
        raise SystemExit(f"{table}, {' '.join(given)}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
