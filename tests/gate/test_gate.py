"""Frozen programs keep their canonical form, their numbers to the bit, and their planned memory and time.

A commit that is meant to change one of them says why and freezes it again: `python tests/gate/freeze.py NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from gate_programs import PROGRAMS
from gate_record import FROZEN, differences, frozen_record, record_named, recording_processes


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    """The records of the selected programs, made by two processes while the tests wait for them in order."""
    selected = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    with recording_processes() as pool:
        yield {name: pool.submit(record_named, name) for name in selected}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_as_frozen(name: str, recorded: dict[str, Future[Any]]) -> None:
    was = frozen_record(name)
    assert was is not None, f"python tests/gate/freeze.py {name}"
    found = differences(was, recorded[name].result())
    lines = [line for kind, problems in found.items() for line in (f"{kind}:", *problems[:20]) if problems]
    again = f"If the change is meant: python tests/gate/freeze.py {name}, and say why in the commit."
    assert not lines, "\n".join([*lines, again])


def test_every_file_belongs_to_a_program() -> None:
    assert sorted(p.stem for p in FROZEN.glob("*.json")) == sorted(PROGRAMS)
