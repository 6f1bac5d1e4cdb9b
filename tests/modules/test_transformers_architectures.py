"""Models of `transformers`, their layers as blocks, have the loss and gradients that they have in PyTorch.

Those that differ most; with --exhaustive all of tests/architectures.py.
`python tests/modules/test_transformers_architectures.py` writes results/architectures.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import supported_models_page
import torch
from architectures import NAMES, Result, compare, transformers

import fzero as fz

PAGE = Path(__file__).parents[2] / "results" / "architectures.md"
SOME = ["llama, tied", "bert", "t5", "resnet", "mixtral"]
LIMIT = 1e-6  # of the largest gradient


@pytest.mark.full
def test_architectures_that_differ_most():
    check(SOME)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
def test_every_architecture(part):
    check(NAMES[part::4])


def check(names: Sequence[str]) -> None:
    found = results(names)
    assert not [(name, r) for name, r in found.items() if r.loss > LIMIT or r.gradient > LIMIT]
    assert not [(name, r) for name, r in found.items() if r.layers != r.blocks]


def results(names: Sequence[str]) -> dict[str, Result]:
    transformers()
    mesh = fz.make_mesh()
    with warnings.catch_warnings(action="ignore"):
        return {name: compare(name, mesh) for name in names}


def table(found: dict[str, Result]) -> str:
    equal = sum(r.loss <= LIMIT and r.gradient <= LIMIT for r in found.values())
    lines = [
        "| model | layers as blocks | functions | loss differs by | gradients differ by |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {r.blocks} | {r.functions} | {r.loss:.1g} | {r.gradient:.1g} |" for name, r in found.items()]
    lines += [
        "",
        f"- torch {torch.__version__}, transformers {transformers().__version__}; {equal} of {len(found)} are equal to "
        f"{LIMIT:g}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(table(results(NAMES)))
    supported_models_page.write()
