"""The costs of `fz.run`: keeping the state of each step in memory, and the failure of a rank.

Keeping: a GPT of 57 M parameters under ZeRO-3; after each step `run.commit`, whose CPU seconds are compared with those
of the step. Failure: rank 1 is killed before a step. Measured are the CPU seconds of the replacement from its start to
the end of its first step, and of the other rank from the end of the last step before the failure to the end of the next
one. An earlier run has filled the compiler's cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import Table

from recovery_tables import failed_rank

NAME = "elastic"
_SMALL = {"layers": 4, "width": 256, "heads": 4, "seq": 128, "batch": 8, "steps": 8}


def ran(args: argparse.Namespace, folder: Path, name: str, kill: list[int], **changes: int) -> list[Any]:
    """The notes of each rank of a run that saves no checkpoint."""
    given = argparse.Namespace(**{**vars(args), "every": 1000, **changes})
    return failed_rank.ran(given, folder, name, "fzero", kill)["notes"]


def after_a_loss(notes: list[Any]) -> dict[str, float]:
    """CPU seconds of the new and of the other rank until the next step; wall seconds between two steps."""
    stayed, struck = notes
    replaced = next(x for x in struck if x["pid"] != struck[0]["pid"])
    index = next(i for i, x in enumerate(stayed) if x["step"] == replaced["step"])
    before, after = stayed[index - 1], stayed[index]
    assert after["step"] == before["step"] + 1, "no step is repeated"
    survivor = after["cpu_s"] - before["cpu_s"]
    return {"replaced_s": replaced["cpu_s"], "survivor_s": survivor, "wall_s": after["at"] - before["at"]}


DEFAULTS = {"layers": 8, "width": 768, "heads": 12, "seq": 256, "batch": 8, "processes": 2, "steps": 12, "rounds": 3,
            "backend": "inductor"}  # fmt: skip
TINY = {"layers": 2, "width": 64, "heads": 2, "seq": 32, "steps": 6, "rounds": 1, "backend": "eager"}


def measure(args: argparse.Namespace) -> Table:
    with tempfile.TemporaryDirectory(prefix="fzero-elastic-") as temporary:
        folder = Path(temporary)
        kept = [x for mine in ran(args, folder, "kept", []) for x in mine if x["step"] > 1]
        calm = ran(args, folder, "calm", [], **_SMALL)
        struck = [ran(args, folder, f"struck-{i}", [4], **_SMALL) for i in range(args.rounds)]
    expected = {x["step"]: x["loss"] for x in calm[0]}
    assert all({x["step"]: x["loss"] for x in mine} == expected for notes in struck for mine in notes)
    shares = [x["keep_s"] / x["step_s"] for x in kept]
    losses = [after_a_loss(notes) for notes in struck]
    middle = {key: statistics.median(x[key] for x in losses) for key in losses[0]}
    share = statistics.median(shares)
    rows = [
        ["run.commit, of a step's CPU seconds", f"{share:.4f}"],
        ["the replacement, CPU s", f"{middle['replaced_s']:.2f}"],
        ["the other rank, CPU s", f"{middle['survivor_s']:.2f}"],
        ["from step to step over the failure, wall s", f"{middle['wall_s']:.1f}"],
    ]
    mib = max(x["bytes"] for x in kept) / 2**20
    notes = [
        f"Kept: GPT of {args.layers} layers of width {args.width}, ZeRO-3 on {args.processes} ranks, {mib:.0f} MiB a "
        f"rank; median of {len(shares)} steps, of {statistics.median(x['step_s'] for x in kept):.2f} CPU s each "
        f"({min(shares):.4f} to {max(shares):.4f}).",
        f"Failure: 4 layers of width 256, median of {args.rounds}; the losses equal those of a run without a failure.",
    ]
    for key, who in (("replaced_s", "replaced"), ("survivor_s", "stayed")):
        notes.append(f"{who}: {min(x[key] for x in losses):.2f} to {max(x[key] for x in losses):.2f} CPU s.")
    return Table("Keeping states, and a failed rank", ["", "median"], rows, notes, {"kept": kept, "losses": losses})
