"""The cases of benchmarks/measure.py: their flags parse, benchmarks/README.md lists them, and one of them runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def measure() -> Iterator[Any]:
    pytest.importorskip("rich")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("measure")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_flags_parse_and_the_small_form_sets_only_flags(measure: Any) -> None:
    for name, case in measure.CASES.items():
        usual, small = measure.parsed(name, []), measure.parsed(name, ["--small"])
        assert case.small and case.small.keys() <= case.flags.keys(), name
        assert usual.out is None and small.out is not None, "the small form writes elsewhere"
        assert all(not isinstance(value, type) for value in vars(usual).values()), name
        assert all(getattr(small, flag) == value for flag, value in case.small.items()), name
    given = measure.parsed("offload_time", ["--small", "--batches", "1", "4", "--max-norm", "2"])
    assert (given.batches, given.max_norm, given.rounds) == ([1, 4], 2.0, 2)


def test_the_readme_lists_every_case_with_its_minutes(
    measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--help` prints them."""
    monkeypatch.setattr(sys, "argv", ["measure.py", "--help"])
    with pytest.raises(SystemExit):
        measure.main()
    listed = capsys.readouterr().out.partition("cases:\n")[2]
    assert listed.count("\n") == len(measure.CASES)
    assert f"```text\n{listed}```\n" in (ROOT / "benchmarks" / "README.md").read_text()


def test_a_case_writes_its_table(measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["sequence_plans", "--small", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["measure.py", *given])
    measure.main()
    assert (tmp_path / "sequence_plans.md").read_text().startswith("| positions | rows | mesh | remat |")
    found = json.loads((tmp_path / "sequence_plans.json").read_text())
    assert found["settings"]["shorter"] == 64 and len(found["cases"]) == 11
