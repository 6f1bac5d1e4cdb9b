"""Finds the checkpoint that a Trainer resumes from, skipping those whose save was killed.

transformers writes `trainer_state.json` last, after all ranks have written their files. So a `checkpoint-N`
directory in which this file is missing or unreadable was left by a save that did not finish.
"""

from __future__ import annotations

import logging
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME  # pyright: ignore[reportMissingImports] - of the extra `hf`
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # pyright: ignore[reportMissingImports]

from fzero._utils import bounded_json
from fzero.comm.control_group import all_gather_values, world
from fzero.errors import CheckpointError

logger = logging.getLogger("fzero")


def is_unfinished(path: Path) -> bool:
    """Whether the save of a Trainer's checkpoint did not finish."""
    if _number(path) is None or not path.is_dir():
        return False
    try:
        bounded_json.read(path / TRAINER_STATE_NAME)
    except (FileNotFoundError, bounded_json.Malformed):
        return True
    return False


def unmark(path: str) -> None:
    """Marks a checkpoint that is about to be overwritten as unfinished, until its new save is done."""
    (Path(path) / TRAINER_STATE_NAME).unlink(missing_ok=True)


def newest_finished(given: str | bool, output_dir: str) -> str | bool | None:
    """Returns the checkpoint to resume from, the same on every rank, replacing one whose save was killed.

    Args:
        given: `resume_from_checkpoint`: a directory, or True for the newest one in `output_dir`.

    Returns: `given`, unless its save did not finish. In that case, with a warning, the newest finished checkpoint
    with a lower number in the same directory, or None if there is none and training begins from scratch.

    Communication: one exchange of a small object.
    """
    ranks = world()

    def look() -> list[str | None]:
        if ranks.rank:
            return []
        root = Path(output_dir) if given is True else Path(str(given)).parent
        there = _numbered(root) if root.is_dir() else []
        first = next(iter(there), None) if given is True else Path(str(given))
        if first is None or not is_unfinished(first):
            return []
        older = there[there.index(first) + 1 :]
        found = next((p for p in older if not is_unfinished(p)), None)
        text = "fzero.hf.Trainer: the save of %s did not finish: %s"
        logger.warning(
            text, first, f"resuming from {found}" if found else "no older checkpoint, training begins from scratch"
        )
        return [str(found) if found else None]

    what = "cannot tell which checkpoint to resume from"
    found = all_gather_values(ranks, "hf.Trainer", look, form=list[str | None], what=what, failure=CheckpointError)[0]
    return found[0] if found else given


def _number(path: Path) -> int | None:
    prefix, _, number = path.name.rpartition("-")
    return int(number) if prefix == PREFIX_CHECKPOINT_DIR and number.isdecimal() else None


def _numbered(directory: Path) -> list[Path]:
    """Returns the checkpoints in a directory, the newest first."""
    found = {p: n for p in directory.iterdir() if p.is_dir() and (n := _number(p)) is not None}
    return sorted(found, key=found.__getitem__, reverse=True)
