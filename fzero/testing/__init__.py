"""Checks that a transformed step equals the plain one, that a step is deterministic, and that packed documents are
isolated.

Use it in tests and before a long run. If two steps differ, `bisect.py` finds the transform, and
`first_difference.py` the first op, where the difference begins. Of the other folders only `cli/`
imports this one.

| file | what it does |
|---|---|
| `check.py` | `check_equivalent`: runs the transformed and the plain step, and compares all tensors |
| `comparison_setting.py` | prepares a comparison: the mesh, the two steps, their states and batches |
| `global_batch.py` | assembles the batch of all ranks, which the plain step computes |
| `reference_trajectory.py` | runs the plain step, and keeps its states and results |
| `comparison.py` | compares the tensors of two steps within their tolerances |
| `tolerance.py` | derives the allowed differences from dtypes and from measured error amplification |
| `bisect.py` | finds the transform, and then the op, that causes a difference |
| `differing_op.py` | runs the search for the first op whose value differs between the two steps |
| `first_difference.py` | finds the first op of a program whose value is wrong |
| `recording.py` | records the values that a running program reads and makes, op by op |
| `interpreter.py` | runs a program op by op, slowly and simply, as the reference |
| `simulate.py` | `simulate`: interprets the program of every rank of a mesh in one process |
| `report.py` | `Report`: the result of a comparison, which prints as a table |
| `determinism.py` | `check_deterministic`: runs a step twice and compares the bits |
| `isolation.py` | `check_isolation`: proves that packed documents do not influence each other |
"""

from fzero.testing.check import check_equivalent
from fzero.testing.determinism import check_deterministic
from fzero.testing.isolation import check_isolation
from fzero.testing.report import Blame, Difference, FirstLine, Report
from fzero.testing.simulate import simulate

__all__ = [
    "Blame",
    "Difference",
    "FirstLine",
    "Report",
    "check_deterministic",
    "check_equivalent",
    "check_isolation",
    "simulate",
]
