"""Decides which run a checkpoint belongs to, so that two runs do not replace each other's checkpoints in a directory.

A run is a training that may be restarted; each of its checkpoints stores its name (`Index.run`). A `RunRecord` lists
the checkpoints that a run has written or restored. From the first of them on, a save raises an error if the latest
checkpoint of the directory is another run's; `keep=` deletes checkpoints of the same run only.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fzero.checkpoint.directory import complete_steps, head_of, step_name
from fzero.checkpoint.index import Expected, Index, read_index
from fzero.checkpoint.storage_paths import Place, Url
from fzero.errors import CheckpointError

if TYPE_CHECKING:
    from fzero.checkpoint.saving import SavePlan


class Saved(NamedTuple):
    """The last checkpoint that a run has saved or restored."""

    run: str | None
    step: int
    leaves: Expected


@dataclass
class RunRecord:
    """What a run knows of the directory that it saves to.

    Attributes:
        known: the digests of the checkpoints that it has written or restored. None for a run that may continue from
            whatever it finds there: it has not saved yet, and its state may come from elsewhere.
        last: the last checkpoint that it has saved or restored.
    """

    known: set[str] | None = None
    last: Saved | None = None


_runs: dict[str, RunRecord] = {}  # by root: the run of the saves of this process that name no other


def record_of(root: Place) -> RunRecord:
    """Returns the record of the run of this process that saves to a directory, which is made at its first save."""
    key = str(root if isinstance(root, Url) else root.absolute())
    return _runs.setdefault(key, RunRecord())


def check_latest(root: Place, run: RunRecord, latest: Place | None) -> None:
    """Raises an error if the latest checkpoint was saved by another run: the two would replace each other's steps."""
    if run.known is None or latest is None:
        return
    name, digest = head_of(latest)
    if digest is not None and digest not in run.known:  # None: damaged, and this save replaces it
        what = f"another run saves to {root}, too: this run has neither saved nor restored its latest checkpoint"
        problem = f"{latest.name} was saved by the run {name or '(unnamed)'}"
        fix = f"give each run a directory of its own; or continue from {latest.name}: CheckpointManager.restore"
        raise CheckpointError("checkpoint.save", what, [problem], fix)


def run_name(root: Place, plan: SavePlan, run: RunRecord, latest: Place | None) -> tuple[str, str | None]:
    """Returns the name of the run that a new checkpoint belongs to, and a warning if it is a new run in a directory
    that has checkpoints.

    A save continues the run of the last checkpoint, if that has the same tensors and a step that is not later. This
    includes a run that was restarted, wherever it got its state from.
    """
    name = f"{time.strftime('%Y-%m-%dT%H:%M:%S')}-{secrets.token_hex(3)}"
    last: Saved | Index | None = run.last
    if last is None and latest is not None:
        with contextlib.suppress(CheckpointError):  # damaged: this save replaces it
            last = read_index(latest)
    if last is None or (last.leaves == plan.leaves and last.step <= plan.step):
        return name if last is None else last.run or name, None
    if latest is None:
        return name, None
    differ = sum(last.leaves.get(n) != plan.leaves.get(n) for n in {*last.leaves, *plan.leaves})
    # A run that goes back to an earlier step and saves there again is indistinguishable from another run of the same
    # model, so it gets a new name and a warning.
    why = f"has different tensors ({differ} differ)" if differ else "is of a later step"
    return name, (
        f"fzero.checkpoint.save: {step_name(plan.step)} is now the latest checkpoint in {root}, where "
        f"{step_name(last.step)} was, which {why}: a run that continues from {root} finds the new one, and keep= "
        "neither counts nor deletes the others. Fix: save another run to another directory"
    )


def superseded(root: Place, step: int, run: str, keep: int) -> list[Place]:
    """Returns the checkpoints of this run that `keep` does not include, now that the one of `step` is published.

    Those of other runs are neither counted nor returned. A checkpoint without the name of a run, which fzero 0.2 or
    older wrote, counts as one of this run.
    """
    earlier = sorted((s, p) for s, p in complete_steps(root).items() if s < step and head_of(p)[0] in (run, None))
    return [p for _, p in earlier[: max(0, len(earlier) - (keep - 1))]]
