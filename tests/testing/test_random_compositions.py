"""Models, optimizers and transforms composed at random against the plain step, by `check_equivalent`: it finds no
difference where nothing was planted."""

from __future__ import annotations

import os
from typing import Any

import composed
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import fzero as fz
from fzero.testing import check_equivalent

NUM_EXAMPLES = int(os.environ.get("FZERO_FUZZ", 8))


def differences(case: composed.Case, mesh: fz.Mesh, steps: int = 2) -> str:
    """What differs, as a report; nothing if nothing does."""
    batch = fz.tree.map(lambda x: x.chunk(mesh.size)[mesh.rank], case.batch)
    report = check_equivalent(case.step, case.params, batch, mesh, steps=steps, raises=False)
    return "" if report.equivalent else f"{case.text}\n{report}"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the loss scale is at its minimum:RuntimeWarning")
@pytest.mark.timeout(max(300, 30 * NUM_EXAMPLES))
@settings(
    max_examples=NUM_EXAMPLES, derandomize="FZERO_FUZZ" not in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.data())
def test_any_composition_is_equivalent(data: st.DataObject) -> None:
    """Searches longer, and from other seeds, with FZERO_FUZZ=<number of examples>."""
    case = composed.compose(lambda options: data.draw(st.sampled_from(options)))
    found = differences(case, fz.make_mesh(data=1))
    assert not found, found


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:the loss scale is at its minimum:RuntimeWarning")
def test_no_alarm_without_a_fault() -> None:
    """200 models x optimizers x precisions."""
    mesh = fz.make_mesh(data=1)
    found = {n: text for n in range(200) if (text := differences(composed.numbered(n), mesh, steps=3))}
    assert not found, "\n".join(f"case {n}: {text}" for n, text in found.items())


def on_ranks(numbers: list[int]) -> list[str]:
    mesh = fz.make_mesh()
    return [differences(composed.numbered(n, ranks=mesh.size), mesh) for n in numbers]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the loss scale is at its minimum:RuntimeWarning")
def test_compositions_on_ranks_are_equivalent(run_ranks: Any) -> None:
    """Their rows are cut over two ranks; a stage is among what is chosen."""
    for texts in run_ranks(2, on_ranks, list(range(5))):
        assert not any(texts), "\n".join(texts)


def test_the_noise_of_a_single_number_is_not_missed() -> None:
    """Found by a search: the gradient of one scalar cancels, and two runs that are moved at random happen not to move
    it."""
    layers = [composed._gated, True, composed._attention, True, *(composed._gated, True) * 3]
    choices = iter([10, 1, 2, 5, 5, *layers, True, True, True, True, True, 253, "lion", "none", "fp16", "layerwise"])
    case = composed.compose(lambda options: next(choices))
    found = differences(case, fz.make_mesh(data=1))
    assert not found, found
