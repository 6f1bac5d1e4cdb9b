"""Compares the programs of all ranks before they first run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fzero._utils.bounded_json import parsed
from fzero.comm import collective_sequence
from fzero.comm.control_group import differing, run_on_all_ranks
from fzero.errors import DivergenceError
from fzero.ir.printer import show
from fzero.ir.program import Program
from fzero.mesh import Mesh
from fzero.trace.guards import deterministic_mode
from fzero.trace.subgraph import signature

T = TypeVar("T")
_MOST_ENTRIES = 8  # entries of a batch that an error lists


def check_same_batch(mesh: Mesh, entries: Mapping[str, str], why: str, owner: str) -> None:
    """Compares the entries of the batch (`batch_entries`) between all ranks, before the step is traced: a function that
    cannot be traced with one rank's batch would raise an error of its own on that rank only.

    Args:
        why: says why this rank makes a program. The other ranks see it in their errors.
        owner: the public call, for the error.

    Communication: 512 bytes from each rank; the entries of two batches if they differ.

    Raises:
        DivergenceError: a rank's batch differs, or a rank did not come in time.
    """
    if mesh.size == 1:
        return
    if collective_sequence.watcher is not None:
        collective_sequence.watcher.builds()
    if (other := differing(mesh.control, "compile", json.dumps(list(entries.items())), why)) is not None:
        rank, *texts = other
        first, theirs = (dict(parsed(text, list[tuple[str, str]])) for text in texts)
        fix = (
            "give every rank a batch with the same entries, shapes and dtypes; drop or pad a shorter last batch; give "
            "samples that lack an entry, such as an image, one of zeros (docs/guides/data.md)"
        )
        what = f"the batch of rank {rank} differs from that of rank 0"
        raise DivergenceError(owner, what, differing_entries(first, theirs, "rank 0", f"rank {rank}"), fix)


def check_same_program(mesh: Mesh, programs: Sequence[Program], why: str) -> None:
    """Compares the programs of all stages between all ranks. `why`: as for `check_same_batch`.

    Communication: 512 bytes from each rank; the texts of two programs if they differ.

    Raises:
        DivergenceError: a rank's program differs; shows the first line that does.
    """
    if mesh.size == 1:
        return
    if (other := differing(mesh.control, "compile", describe(*programs), why)) is not None:
        rank, first, theirs = other
        what, fix = (
            f"rank {rank} would run a different program than rank 0",
            "run the same code, flags and batch shapes on every rank; code that loops over a set of strings does so in "
            "another order in each process, unless they all start with PYTHONHASHSEED=0: loop over a sorted list",
        )
        raise DivergenceError("compile", what, difference(first, theirs, "rank 0", f"rank {rank}"), fix)


def on_all_ranks(mesh: Mesh, act: Callable[[], T]) -> T:
    """Runs a phase of making a program, and returns after all ranks have completed it. A rank that fails raises its own
    error, the others a DivergenceError that names it."""
    if mesh.size == 1:
        return act()
    what = "not every rank is ready to run"
    return run_on_all_ranks(mesh.control, "compile", act, what=what, failure=DivergenceError)


def differing_entries(first: Mapping[str, str], other: Mapping[str, str], one: str, another: str) -> list[str]:
    """Returns a line for each entry of two batches that differs, with both sides."""
    paths = [path for path in {**first, **other} if first.get(path) != other.get(path)]
    lines = [f"{p}: {first.get(p, 'missing')} on {one}, {other.get(p, 'missing')} on {another}" for p in paths]
    if not lines:
        lines = [f"{one}: {', '.join(first)}", f"{another}: {', '.join(other)}"]  # in another order
    return lines if len(lines) <= _MOST_ENTRIES else [*lines[:_MOST_ENTRIES], f"... {len(lines) - _MOST_ENTRIES} more"]


def describe(*programs: Program) -> str:
    """Returns as text everything in which two ranks must agree: PyTorch's switch for deterministic algorithms, and for
    each program its ops and the operations of its subgraphs."""
    parts = [f"deterministic algorithms: {deterministic_mode.setting()}"]
    for program in programs:
        parts += [f"{v.name}: {v}" for v in program.inputs] + [show(program, full=True)]
        # With shared memory, a rank reads the buffers of the others at its own offsets, so the offsets are part of the
        # agreement.
        parts += [f"pool[{i}] = {op.into}" for i, op in enumerate(program.pooled)]
        for name, function in program.functions.items():
            parts.append(f"def {name}:")
            parts += [f"    {line}" for line in signature(function.graph)]
    return "\n".join(parts)


def difference(first: str, other: str, one: str, another: str) -> list[str]:
    """Returns the first line in which two texts differ, from both sides."""
    pairs = itertools.zip_longest(first.splitlines(), other.splitlines(), fillvalue="(no such line)")
    for number, (a, b) in enumerate(pairs, 1):
        if a != b:
            return [f"first difference, line {number}:", f"  {one}: {a.strip()}", f"  {another}: {b.strip()}"]
    return []
