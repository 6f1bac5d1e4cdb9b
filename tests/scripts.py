"""The examples as a user runs them: a script, its flags, what it prints and leaves behind.

A process costs an import of torch, under torchrun one more than there are ranks. So where a process is not the point a
script runs on the test pool's: they see the environment that torchrun makes, and what is run is the file, as
`__main__`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


class Done(NamedTuple):
    """How a run ended, and what all its ranks printed."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Script:
    """A file of examples/, and flags that make it tiny, which later ones may override."""

    name: str
    tiny: tuple[str, ...]

    def command(self, *flags: object, ranks: int = 0) -> list[str]:
        """As it is typed; under torchrun when `ranks` is given."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        return [sys.executable, *launcher, str(EXAMPLES / self.name), *self.tiny, *map(str, flags)]

    def process(self, *flags: object, ranks: int = 0) -> Done:
        """A run to its good end, as a process."""
        done = subprocess.run(
            self.command(*flags, ranks=ranks), capture_output=True, text=True, timeout=240, env=environment()
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return Done(0, done.stdout, done.stderr)

    def interrupted(self, log: Path, *flags: object, ranks: int = 0) -> Done:
        """A run that gets SIGINT once three steps are in its log: the whole process group does, as from a terminal.
        Nobody is left of the group."""
        command = self.command(*flags, "--json", log, ranks=ranks)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while (not log.exists() or log.read_text().count("\n") < 3) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        return Done(process.returncode, printed, errors)

    def on(self, run_ranks: Callable[..., Any], *flags: object, ranks: int = 1, code: int = 0, **env: str) -> Done:
        """A run on processes of the pool that ends with this code on every rank. An exception that the script lets pass
        fails the test."""
        ended = run_ranks(ranks, as_main, self.name, [*self.tiny, *map(str, flags)], env, timeout=240)
        codes, printed, errors = zip(*ended, strict=True)
        assert set(codes) == {code}, f"exit codes {codes}\n{printed}\n{errors}"
        return Done(code, "".join(printed), "".join(errors))


def environment() -> dict[str, str]:
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def as_main(name: str, flags: list[str], env: dict[str, str]) -> Done:
    """On this rank, what `ENV python examples/NAME FLAGS` does."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv, environ, out, err = sys.argv, dict(os.environ), io.StringIO(), io.StringIO()
    sys.argv = [name, *flags]
    os.environ.update(env)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), fresh_modules():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as end:
        return Done(end.code if isinstance(end.code, int) else 1, out.getvalue(), err.getvalue())
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environ)
        torch.use_deterministic_algorithms(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gc.collect()  # what goes with a process goes with what the script held
    raise AssertionError(f"{name} does not end with an exit code")


@contextlib.contextmanager
def fresh_modules() -> Iterator[None]:
    """What an example imports of its neighbours is imported anew, as in a new process: they ask for the rank when they
    are."""
    names = {p.stem for p in EXAMPLES.glob("*.py")}
    kept: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: Path) -> list[float]:
    return [r["loss"] for r in records(path)]
