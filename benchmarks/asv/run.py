"""A training process: Python per step, checkpoints, and the restart from a state in memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import fzero as fz

from .common import DEEP, SAVED, Started, environment, params_of

RUN = Path(__file__).with_name("failing_run.py")


class Python:
    """A step of 64 narrow layers with the eager backend: mostly the time of Python."""

    timeout = 120

    def setup(self) -> None:
        self.started = Started(**DEEP)

    def time_step(self) -> None:
        self.started.step()


class Checkpoint:
    """A checkpoint of 2 M parameters with Adam's state, on the disk of temporary files."""

    timeout, number = 120, 1

    def setup(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.started = Started(**SAVED)
        self.path = Path(self.folder.name, "saved")
        fz.checkpoint.save(self.path, self.started.state)

    def teardown(self) -> None:
        self.folder.cleanup()

    def time_save(self) -> None:
        path = Path(tempfile.mkdtemp(dir=self.folder.name))
        fz.checkpoint.save(path, self.started.state)

    def time_restore(self) -> None:
        self.started.train.restore(self.path, params=params_of(**SAVED))


class Recovery:
    """A run of two ranks of which one is killed: seconds from the failure to the next step."""

    timeout, repeat = 300, 1

    def track_recovery(self) -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            command += ["-m", "fzero.run", str(RUN), folder]
            env = environment(FZERO_CACHE=f"{folder}/cache")
            subprocess.run(command, env=env, check=True, capture_output=True)
            return float(Path(folder, "seconds").read_text())

    track_recovery.unit = "s"  # type: ignore[attr-defined]
