"""PyTorch's own modules train to the numbers that they have in PyTorch: outside of blocks, as a recomputed block, and
with sharded parameters.

A part of the samples of torch.testing's `module_db`; with --exhaustive all of them. `python
tests/modules/test_torch_modules.py [samples]` writes results/modules.md: all samples of a
module, or its first ones.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import supported_models_page
import torch
from pool import Pool
from torch_db import Found, Run, databases, faults, in_process, module_cases, on_ranks, table, told

PAGE = Path(__file__).parents[2] / "results" / "modules.md"


@pytest.mark.full
def test_the_first_sample_of_each_module():
    found = {
        name: in_process(module_cases, name, 1, blocks=i % 3 == 0) for i, name in enumerate(sorted(databases().modules))
    }
    assert not [fault for item in found.items() for fault in faults(*item)]
    assert not {name for name, ways in found.items() if any(o.kind == "refused" for os in ways.values() for o in os)}
    assert sum(bool(ways["plain"]) for ways in found.values()) >= 106


@pytest.mark.full
def test_the_first_sample_of_some_modules_on_ranks(run_ranks):
    names = sorted(databases().modules)[::12]
    found = dict(zip(names, run_ranks(2, on_ranks, names, 1, timeout=240)[0], strict=True))
    assert not [fault for name, os in found.items() for fault in faults(name, {"2 ranks": os})]
    assert not {name for name, os in found.items() if any(o.kind == "refused" for o in os)}


def test_ctc_loss_of_lengths_that_are_tensors_and_that_are_numbers():
    """Its operator returns a table whose width is the value of a tensor; of numbers PyTorch makes a tensor where no
    trace sees it."""
    found = in_process(module_cases, "nn.CTCLoss", 12)
    assert all(len(outcomes) == 12 and all(o.kind == "equal" for o in outcomes) for outcomes in found.values())


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(6))
def test_every_sample(part, run_ranks):
    names = sorted(databases().modules)[part::6]
    found = outcomes(names, None, run_ranks)
    assert not [fault for item in found.items() for fault in faults(*item)]
    assert not {
        name
        for name, ways in found.items()
        if ways["plain"] and all(o.kind == "refused" for os in ways.values() for o in os)
    }


def outcomes(names: list[str], first: int | None, run: Run) -> dict[str, Found]:
    """All ways of each module."""
    return {
        name: {
            **in_process(module_cases, name, first),
            "2 ranks": run(2, on_ranks, [name], first, timeout=3600.0)[0][0],
        }
        for name in names
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = int(sys.argv[1]) if sys.argv[1:] else None
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder))
        found = told(sorted(databases().modules), lambda names: outcomes(names, first, pool.run))
        pool.close()
    PAGE.write_text(table(["module", "samples", "plain", "remat", "2 ranks", "refused because"], found, first))
    supported_models_page.write()
    sys.exit("\n".join(fault for item in found.items() for fault in faults(*item)) or 0)
