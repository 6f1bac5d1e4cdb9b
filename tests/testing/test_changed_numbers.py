"""Tiny models with one number changed train as the plain step does, or are rejected by name (changed_numbers.py)."""

from __future__ import annotations

import changed_numbers
import pytest


def check(numbers: range) -> None:
    found = {number: changed_numbers.outcome(number) for number in numbers}
    faults = [f"python tests/changed_numbers.py {n}: {text}" for n, (kind, text) in found.items() if kind == "fault"]
    assert not faults, "\n".join(faults)
    kinds = [kind for kind, _ in found.values()]
    assert kinds.count("equal") >= len(kinds) / 10, f"too few cases train at all to show anything: {kinds}"


@pytest.mark.parametrize("first", range(0, 150, 15))
def test_a_changed_number_trains_as_the_plain_step(first: int) -> None:
    check(range(first, first + 15))


def test_tensor_parallel_of_a_fused_projection_of_width_zero_says_that_it_cuts_nothing() -> None:
    numbers = {**changed_numbers.MODELS["gpt"].numbers, "rows": 4, "width": 0}
    case = changed_numbers.build_case("gpt", numbers, ["tensor"], "adamw", {"model": 2}, 200, "width")
    found, text = changed_numbers.outcome_of(case)  # ended in a ZeroDivisionError
    assert found == "rejected" and "width=0" in text and "no parameter is sharded" in text, text


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * 3600)
def test_five_thousand_changed_numbers() -> None:
    check(range(150, 5150))
