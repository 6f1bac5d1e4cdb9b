"""The recording of a terminal in README.md shows what the commands print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_the_recording_is_what_the_commands_print() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "docs/recording.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
