"""Random compositions of models, optimizers and transforms, beside the plain step: those of tests/composed.py."""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from common import SOURCE, verdict

from cases import Table


def check(asked: tuple[int, int]) -> tuple[int, str, str]:
    """The composition of a number: its choices, and what differs or went wrong; nothing if nothing did."""
    if (tests := str(SOURCE / "tests")) not in sys.path:
        sys.path.insert(0, tests)
    import composed
    import torch

    import fzero as fz
    from fzero.testing import check_equivalent

    number, steps = asked
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "the loss scale is at its minimum")
    case = composed.numbered(number)
    try:
        report = check_equivalent(case.step, case.params, case.batch, fz.make_mesh(data=1), steps=steps, raises=False)
    except Exception as e:
        return number, case.text, f"{type(e).__name__}: {e}"
    return number, case.text, "" if report.equivalent else str(report)


def results(args: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """As they are ready; a line of progress every minute."""
    started = said = time.monotonic()
    asked = [(number, args.steps) for number in range(args.first, args.first + args.numbers)]
    with multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=100) as pool:
        for done, result in enumerate(pool.imap_unordered(check, asked), 1):
            if result[2]:
                print(f"{result[0]}: {result[2]}\n  {result[1]}", file=sys.stderr, flush=True)
            if time.monotonic() > said + 60:
                said = time.monotonic()
                print(f"{done} of {len(asked)} after {(said - started) / 60:.0f} min", file=sys.stderr, flush=True)
            yield result


def compositions(args: argparse.Namespace) -> Table:
    """Whether random compositions of models, optimizers and transforms compute the numbers of the plain step.

    Each is trained for some steps, as it is and as a plain step of the same function, by
    `fzero.testing.check_equivalent`. No fault is planted: a difference is a fault, or an alarm without a fault. A
    composition that stops with an error is listed too. `--first` is the number of the first one.
    """
    found: list[tuple[int, str, str]] = []
    with contextlib.suppress(KeyboardInterrupt):  # the table has those that are done by then
        found.extend(results(args))
    wrong = sorted((number, text, problem) for number, text, problem in found if problem)
    kinds = collections.Counter(choice.replace("=_", "=") for _, text, _ in found for choice in text.split(", "))
    shown = ("layer", "optimizer", "precision", "remat", "schedule", "tied")
    rows: list[tuple[Any, ...]] = [("compositions", len(found)), ("equal", len(found) - len(wrong))]
    rows += [("others", len(wrong)), *((k, number) for k, number in sorted(kinds.items()) if k.split("=")[0] in shown)]
    last = max((number for number, _, _ in found), default=args.first)
    notes = [
        f"Compositions {args.first} to {last} of tests/composed.py, {args.steps} steps each, `check_equivalent` on one "
        "rank.",
        "Below the first three rows: how often what was chosen.",
        f"Wanted: none differs ({verdict(len(wrong), 0)}).",
        *(f"{number}: {problem.splitlines()[0]} ({text})" for number, text, problem in wrong),
    ]
    return Table("Random compositions", ("", "number"), rows, notes, {"wrong": wrong})
