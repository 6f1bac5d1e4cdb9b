"""PyTorch's own operators train to the numbers that they have in PyTorch, in a block and outside of one, or are
refused.

A part of what torch.testing's `op_db` differentiates in float32; with --exhaustive all of it. `python
tests/ops/test_torch_operators.py [samples]` writes results/ops.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import supported_models_page
import torch
from torch_db import Found, databases, faults, in_process, operator_cases, table, told

PAGE = Path(__file__).parents[2] / "results" / "ops.md"
NUM_SAMPLES = 4


@pytest.mark.full
def test_some_operators():
    found = outcomes(
        [
            *sorted(databases().operators)[::18],
            "tensor_split",
            "fft_ifft",
            "linalg_inv",
            "nn_functional_binary_cross_entropy_with_logits",
        ],
        1,
    )
    assert not [fault for item in found.items() for fault in faults(*item)]
    assert (
        sum(all(o.kind == "equal" for os in ways.values() for o in os) for ways in found.values() if ways["plain"])
        >= 25
    )
    # its indices are a tensor
    assert all("needs the value of a tensor" in o.text for os in found["tensor_split"].values() for o in os)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(9))
def test_every_operator(part):
    found = outcomes(sorted(databases().operators)[part::9], NUM_SAMPLES)
    assert not [fault for item in found.items() for fault in faults(*item)]


def outcomes(names: list[str], first: int) -> dict[str, Found]:
    return {name: in_process(operator_cases, name, first) for name in names}


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = int(sys.argv[1]) if sys.argv[1:] else NUM_SAMPLES
    found = told(sorted(databases().operators), lambda names: outcomes(names, first))
    PAGE.write_text(table(["operator", "samples", "plain", "block", "refused because"], found, first))
    supported_models_page.write()
    sys.exit("\n".join(fault for item in found.items() for fault in faults(*item)) or 0)
