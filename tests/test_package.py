"""Promises of the package as a whole: what the README tells to type is what CI runs, and private PyTorch stays in one
file."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "fzero").rglob("*.py"))
ARROWS = ("program", "transforms", "schedule", "runtime")
COMMANDS = (
    "pip install -e . && torchrun --nproc-per-node 2 examples/train_gpt.py",
    "pip install -e '.[test]' && pytest",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_ci_runs_the_readmes_commands(command):
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    shown = [line.strip() for block in blocks for line in block.splitlines()]
    assert command in shown, "README.md shows it, alone on a line of a sh block"
    run = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.lstrip().startswith("#")]
    assert any(command in line for line in run), "and .ci/run runs it"


def test_ci_stops_at_a_failure():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


def test_supported_versions_of_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert project["requires-python"] == ">=3.11"


def test_changelog_says_what_an_upgrade_changes():
    """First, of the version that the package has; and no release takes longer to read than 150 lines."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## [")[1]
    assert newest.startswith(f"{version}]") and len(newest.splitlines()) <= 150
    headings = re.findall(r"^### (.*)$", newest, re.MULTILINE)
    assert headings[:5] == ["Numerics changed", "Printed program changed", "Added", "Changed", "Removed"]


def test_import_loads_nothing_and_is_silent():
    """Names come when they are used, without a warning and without a line printed; libraries that are optional only
    with what is about them; a module imported by itself takes no name away."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = """
import sys
import fzero
assert not {"torch", "numpy", "rich"} & {*sys.modules}
assert dir(fzero) == sorted([*fzero.__all__, "__version__"]), dir(fzero)
import fzero.elastic.keeper, fzero.elastic.hosts
assert "torch" not in sys.modules, "a process that watches a rank stays small"
import fzero.lowering, fzero.step, fzero.runtime.compile
assert callable(fzero.lower) and callable(fzero.compile) and fzero.random.key
assert not hasattr(fzero, "shard_param") and not hasattr(fzero, "__wrapped__")
assert fzero.train_step and fzero.deepspeed.load_config
assert not {"transformers", "deepspeed", "peft", "accelerate"} & {*sys.modules}
[getattr(fzero, name) for name in fzero.__all__]
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("folder", ["program", "transforms", "schedule"])
def test_folders_import_only_what_comes_before(folder):
    """docs/design.md: each arrow is a folder, and nothing is imported from one further down, at the top of a file or
    inside a function."""
    later = ARROWS[ARROWS.index(folder) + 1 :]
    for path in sorted((ROOT / "fzero" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            assert not [n for n in names if n.startswith(tuple(f"fzero.{x}" for x in later))], f"{path.name}: {names}"


def _private_torch_names(source: str) -> list[str]:
    """Names under `torch` with a part that starts with one underscore, as `line: name`."""
    # used: each longer name contains the shorter one
    imported, used = (r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*", r"(torch|dist)(\.\w+)*\._(?!_)\w+")
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: {alias.name}" for alias in node.names if re.fullmatch(imported, alias.name)]
        elif isinstance(node, ast.ImportFrom):
            found += [
                f"{node.lineno}: {node.module}.{alias.name}"
                for alias in node.names
                if re.fullmatch(imported, f"{node.module}.{alias.name}")
            ]
        elif isinstance(node, ast.Attribute) and re.fullmatch(used, name := ast.unparse(node)):
            found.append(f"{node.lineno}: {name}")
    return found


def test_private_names_are_found():
    source = """
import torch._dynamo.config
from torch.testing._internal import common
from torch.fx import _lazy, GraphModule
x = torch.ops._c10d_functional.wait_tensor(torch.__version__, torch.add_)
y = dist._world
"""
    assert [found.split(": ")[1] for found in sorted(_private_torch_names(source))] == [
        "torch._dynamo.config",
        "torch.testing._internal.common",
        "torch.fx._lazy",
        "torch.ops._c10d_functional",
        "dist._world",
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_torch_names_stay_in_compat(path):
    """A release of PyTorch may move them: one file has to follow."""
    relative = path.relative_to(ROOT / "fzero").as_posix()
    if relative == "compat.py":
        return
    found = _private_torch_names(path.read_text())
    assert not found, f"use fzero/compat.py for {found}"
