"""Tables of recovery.py: what failures and asynchronous saves cost."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import SOURCE, torchrun_command

SCRIPT = str(SOURCE / "benchmarks" / "recovery.py")


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
    script = [*(["-m", module] if module else []), SCRIPT, "--worker", f"--table={table}", *given]
    caches = {"FZERO_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command, usual = torchrun_command(script, ["--standalone", f"--nproc-per-node={processes}", *flags])
    given_env = {**usual, **caches, "FZERO_PROGRESS": "off", **(env or {})}
    done = subprocess.run(command, env=given_env, capture_output=True, text=True, timeout=1200, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{table}, {' '.join(given)}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
