"""Importing the package loads nothing heavy and prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_import_loads_nothing_and_is_silent():
    """Names come when they are used, without a warning and without a line printed; libraries that are optional only
    with what is about them; a module imported by itself takes no name away."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = """
import sys
import fzero
assert not {"torch", "numpy", "rich"} & {*sys.modules}
assert dir(fzero) == sorted([*fzero.__all__, "__version__"]), dir(fzero)
import fzero.elastic.supervisor, fzero.elastic.node_heartbeat
assert "torch" not in sys.modules, "a process that watches a rank stays small"
import fzero.compiler, fzero.step, fzero.runtime.compile
assert callable(fzero.lower) and callable(fzero.compile) and fzero.random.key
assert not hasattr(fzero, "shard_param") and not hasattr(fzero, "__wrapped__")
assert fzero.train_step and fzero.deepspeed.load_config
assert not {"transformers", "deepspeed", "peft", "accelerate"} & {*sys.modules}
[getattr(fzero, name) for name in fzero.__all__]
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
