"""The micro-benchmarks of benchmarks/asv: each of the short ones runs once, without asv."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "asv"
SHORT = {"Lower": "build", "Python": "run", "Checkpoint": "run", "Recovery": "run"}


@pytest.fixture(scope="module")
def package() -> Iterator[str]:
    """The folder as a package under another name than that of asv itself."""
    name = "asv_benchmarks"
    spec = importlib.util.spec_from_file_location(
        name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    yield name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.full
@pytest.mark.parametrize("name", SHORT)
def test_a_micro_benchmark_runs(name: str, package: str) -> None:
    case: Any = getattr(importlib.import_module(f"{package}.{SHORT[name]}"), name)()
    if hasattr(case, "setup"):
        case.setup()
    methods = [x for x in dir(case) if x.startswith(("time_", "track_"))]
    assert methods
    for method in methods:
        value = getattr(case, method)()
        assert value is None or value > 0
    if hasattr(case, "teardown"):
        case.teardown()
