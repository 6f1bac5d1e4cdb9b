"""From a step function to a program, a plan, and a process that trains."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fzero as fz

from .common import DEEP, environment, params_of, train_step

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Lower:
    """`fz.lower` of 64 layers under ZeRO-3, and the part of it that traces."""

    timeout = 120

    def setup(self) -> None:
        self.params = params_of(**DEEP, device="meta")
        self.batch = torch.empty(2, 4, DEEP["width"], device="meta")

    def time_lower(self) -> None:
        fz.lower(train_step(), fz.AbstractMesh(data=2), self.params, self.batch)

    def track_trace(self) -> float:
        self.time_lower()  # imports
        modules = [
            m for m in list(sys.modules.values()) if m.__name__.startswith("fzero.") and "lower_train" in vars(m)
        ]
        home = next(m for m in modules if m.lower_train.__module__ != m.__name__)
        trace, seconds = home.lower_train, list[float]()

        def clocked(*given: Any) -> Any:
            begin = time.process_time()
            found = trace(*given)
            seconds.append(time.process_time() - begin)
            return found

        home.lower_train = clocked
        try:
            for _ in range(3):
                self.time_lower()
        finally:
            home.lower_train = trace
        return min(seconds)

    track_trace.unit = "s"  # type: ignore[attr-defined]


class Plan:
    """The plan of a trillion parameters on 1,024 devices: CPU seconds from the functions to the plan, and its peak."""

    timeout = 900

    def setup_cache(self) -> dict[str, float]:
        sys.path.insert(0, str(EXAMPLES))
        import plan_gpt

        step, params, batch = plan_gpt.trillion()
        mesh = fz.AbstractMesh(data=1024, device_type="cuda")
        begin = time.process_time()
        plan = fz.lower(step, mesh, params, batch, device="h200", memory_budget="141GB").plan
        return {"seconds": time.process_time() - begin, "peak": plan.peak_bytes / 2**30}

    setup_cache.timeout = 900  # type: ignore[attr-defined]

    def track_seconds(self, found: dict[str, float]) -> float:
        return found["seconds"]

    def track_peak(self, found: dict[str, float]) -> float:
        return found["peak"]

    track_seconds.unit, track_peak.unit = "s", "GiB"  # type: ignore[attr-defined]


WARM = """
import sys
sys.path.insert(0, sys.argv[1])
from asv_benchmarks.common import DEEP, params_of, train_step
import fzero as fz, torch
train = fz.compile(train_step(), fz.make_mesh(device="cpu"))
state, metrics = train(train.init(params_of(**DEEP)), torch.ones(2, 4, DEEP["width"]))
print(float(metrics["loss"]))
"""


class WarmStart:
    """A fresh process whose compiled functions are in the cache, until the end of its first step."""

    timeout, repeat, number, warmup_time = 600, 3, 1, 0

    def setup(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        links = Path(self.folder.name)
        (links / "asv_benchmarks").symlink_to(Path(__file__).resolve().parent)
        inductor = str(links / "inductor")
        self.env = environment(FZERO_CACHE=str(links / "fzero"), TORCHINDUCTOR_CACHE_DIR=inductor)
        self.time_warm_start()

    def teardown(self) -> None:
        self.folder.cleanup()

    def time_warm_start(self) -> None:
        command = [sys.executable, "-c", WARM, self.folder.name]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
