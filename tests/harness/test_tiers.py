"""The default tier: which cases the mark `full` keeps in it, and how long each file takes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import conftest
import pytest

pytest_plugins = ["pytester"]

CASES = """
import pytest

@pytest.mark.full(keep={keep})
@pytest.mark.parametrize("name", ["first", "second"])
def test_of_cases(name):
    assert name
"""


@pytest.mark.parametrize(
    ("keep", "selected"), [(["second"], ["second"]), ([], []), (["second", "third"], None), (["name0"], None)], ids=str
)
def test_a_kept_case_that_does_not_exist_is_an_error(
    pytester: pytest.Pytester, keep: list[str], selected: list[str] | None
) -> None:
    """Whichever case is run: a case that was renamed would leave the default tier without notice."""
    path = pytester.makepyfile(CASES.format(keep=keep))
    pytester.makeini("[pytest]\nmarkers = full(keep)")
    found: list[pytest.Item] = []

    def finished(items: list[pytest.Item]) -> None:
        found.extend(items)

    tiers = SimpleNamespace(
        pytest_pycollect_makeitem=conftest.pytest_pycollect_makeitem, pytest_collection_modifyitems=finished
    )
    for select in ([path], [f"{path}::test_of_cases[first]"]):
        found.clear()
        result: Any = pytester.inline_run("-p", "no:cacheprovider", *select, plugins=[tiers])
        if selected is None:
            (failed,) = (x for x in result.getreports("pytest_collectreport") if x.failed)
            unknown = {*keep} - {"first", "second"}
            text = f"test_of_cases: full(keep=...) names {', '.join(unknown)}, which is no case of this test"
            assert text in failed.longreprtext and "its cases are first, second" in failed.longreprtext
        else:
            assert result.ret == pytest.ExitCode.OK
            if select == [path]:
                assert [conftest.case_id(x) for x in found if conftest.is_default(x)] == selected


def test_files_have_one_name_when_their_seconds_are_written_and_when_they_are_read() -> None:
    measured = json.loads(conftest.DURATIONS.read_text())
    for name in ("tests/step/test_steps.py", "fzero/_utils/units.py"):
        assert conftest.file_name(conftest.ROOT / name) in measured
