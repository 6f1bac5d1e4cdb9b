"""The CUDA path on a stub device, which computes nothing: `no_gpu.py` and its modes.

They run PyTorch's CUDA build, a wheel of 527 MB. If it was not fetched yet, `python tests/cuda_stub/no_gpu.py` fetches
it and builds the stub; until then these tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("no_gpu.py")
LIBRARY = Path.home() / ".cache" / "fzero-no-gpu" / "2.13.0" / "libfake.so"
MODES = {
    "eager": [],
    "compiled": ["--backend=inductor", "--ranks", "1", "2"],
    "sizes": ["--shapes", "--ranks", "1"],
    "memory compared with FSDP2": ["--peers"],
    "injected faults": ["--plant"],
    "a failed rank": ["--lost"],
}
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not LIBRARY.exists(), reason=f"no stub device: python tests/cuda_stub/{SCRIPT.name} builds it"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
def test_the_cuda_path_on_the_stub_device(flags: list[str], tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), *flags, f"--out={tmp_path}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_check_of_the_gpu_hour_runs_on_the_stub_device(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--hour", f"--out={tmp_path}"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
