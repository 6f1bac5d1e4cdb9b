"""Whether random compositions of models, optimizers and transforms compute what the plain step does: those of
tests/composed.py, by number.

    python benchmarks/compositions.py                        # 2,000 compositions: about two hours on 2 quiet cores
    python benchmarks/compositions.py --first 2000 --numbers 500

Each is trained for some steps, as it is and as a plain step of the same function, by `fzero.testing.check_equivalent`.
Nothing was planted: a difference is a fault, or an alarm without a fault. What stops with an error is listed too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import publish, script_flags, settings, verdict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


def check(asked: tuple[int, int]) -> tuple[int, str, str]:
    """The composition of a number: its choices, and what differs or went wrong; nothing if nothing did."""
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


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--first", type=int, default=0, help="number of the first composition")
    p.add_argument("--numbers", type=int, default=2000, help="how many")
    p.add_argument("--steps", type=int, default=3, help="training steps of each")
    p.add_argument("--processes", type=int, default=2)
    script_flags(p, "compositions")
    args = p.parse_args()
    found: list[tuple[int, str, str]] = []
    with contextlib.suppress(KeyboardInterrupt):  # what is done until then is told
        found.extend(results(args))
    wrong = sorted((number, text, problem) for number, text, problem in found if problem)
    kinds = collections.Counter(choice.replace("=_", "=") for _, text, _ in found for choice in text.split(", "))
    rows: list[tuple[Any, ...]] = [
        ("compositions", len(found)),
        ("equal", len(found) - len(wrong)),
        ("others", len(wrong)),
    ]
    rows += [
        (kind, number)
        for kind, number in sorted(kinds.items())
        if kind.split("=")[0] in ("layer", "optimizer", "precision", "remat", "vertical", "tied")
    ]
    last = max((number for number, _, _ in found), default=args.first)
    notes = [
        f"Compositions {args.first} to {last} of tests/composed.py, {args.steps} steps each, `check_equivalent` on one "
        f"rank.",
        "Below the first three rows: how often what was chosen.",
        f"Wanted: none differs ({verdict(len(wrong), 0)}).",
        *(f"{number}: {problem.splitlines()[0]} ({text})" for number, text, problem in wrong),
    ]
    publish(
        args.name,
        "Random compositions",
        ("", "number"),
        rows,
        notes,
        {"settings": settings(args), "wrong": wrong},
        args.out,
    )


if __name__ == "__main__":
    main()
