"""Finds the checkpoints under a root, and the newest of them.

    root/latest                          the name of the newest complete checkpoint
    root/step-00000100/index.json
    root/step-00000100/rank-00000-of-00002.safetensors ...
    root/.tmp-step-00000200/             being written, or left by a save that was killed: never looked at

A `step-` directory is complete from the moment it has that name. This file knows names, not contents.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from fzero.checkpoint.ranks import together, world
from fzero.errors import CheckpointError, message

INDEX = "index.json"
LATEST = "latest"
TEMPORARY = ".tmp-"

SET_ASIDE = ".replaced"
"""Suffix of a checkpoint that is being replaced by another of the same step: there for two renames."""

GIVE = "give the path that fz.checkpoint.save was given"

_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def as_path(path: Any) -> Path:
    """A path as a `Path`; raises if it is none."""
    try:
        return Path(path)
    except TypeError:
        raise CheckpointError(message("checkpoint", f"{path!r} is not a path", fix=GIVE)) from None


def latest(path: str | os.PathLike[str]) -> Path:
    """The directory of the newest complete checkpoint under a root.

    Raises:
        CheckpointError: there is none, or `latest` names one that is not there.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> from fzero import checkpoint
        >>> root = tempfile.mkdtemp()
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> path = checkpoint.save(root, step.init({"w": torch.ones(2)}))
        >>> latest(root).name
        'step-00000000'
    """
    root = as_path(path)
    if not root.is_dir():
        raise CheckpointError(
            message("checkpoint", f"{root} is {'not a directory' if root.exists() else 'not there'}", fix=GIVE)
        )
    complete = complete_steps(root)
    try:
        name = (root / LATEST).read_text().strip()
    except FileNotFoundError:  # the first save was killed right after it was complete, or someone copied a step here
        if complete:
            return complete[max(complete)]
        fix = f"{GIVE}; a .tmp- directory is a save that did not finish"
        raise CheckpointError(
            message("checkpoint", f"{root} holds no complete checkpoint", [f"it has {_contents(root)}"], fix)
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            message("checkpoint", f"{root / LATEST} cannot be read", [str(error)], "give one step's directory instead")
        ) from None
    match = _STEP.fullmatch(name)
    if match and int(match[1]) in complete:
        return complete[int(match[1])]
    here = ", ".join(p.name for _, p in sorted(complete.items())) or "none"
    what = f"{root / LATEST} names {name[:80]!r}, which is not a complete checkpoint there"
    raise CheckpointError(
        message(
            "checkpoint",
            what,
            [f"complete: {here}"],
            "write the name of one of these to that file, or give that directory",
        )
    )


def find(path: str | os.PathLike[str]) -> Path | None:
    """The directory of the newest complete checkpoint under a root, the same on every rank; None if nothing has been
    saved there yet.

    For scripts that are started again by the command that started them. Every rank calls it; rank 0 looks.

    Raises:
        CheckpointError: on every rank: something was saved there that is not complete any more.

    Communication: one exchange of a small object.

    Example:
        >>> import tempfile
        >>> find(tempfile.mkdtemp()) is None
        True
    """
    ranks = world()

    def look() -> Path | None:
        root = as_path(path)
        if ranks.rank or not root.exists():
            return None
        names = [entry.name.removesuffix(SET_ASIDE) for entry in root.iterdir()] if root.is_dir() else []
        begun = not root.is_dir() or any(name in (LATEST, INDEX) or _STEP.fullmatch(name) for name in names)
        return locate(root) if begun else None

    return together(ranks, "checkpoint", f"cannot tell what is saved in {path}", look)[0]


def complete_steps(root: Path) -> dict[int, Path]:
    """Every complete checkpoint under a root, by step.

    A directory set aside by a save of the same step that was killed before its own took the name counts as that step.
    """
    found: dict[int, Path] = {}
    for suffix in ("", SET_ASIDE):
        for entry in root.iterdir():
            match = _STEP.fullmatch(entry.name.removesuffix(suffix)) if entry.name.endswith(suffix) else None
            if match and (entry / INDEX).is_file():
                found.setdefault(int(match[1]), entry)
    return found


def locate(path: str | os.PathLike[str], name: str | None = None) -> Path:
    """The step directory that `path` is, or the one of that name under it; without a name the latest."""
    directory = as_path(path)
    named = _STEP.fullmatch(directory.name.removesuffix(SET_ASIDE)) is not None
    if (directory / INDEX).exists() or (named and directory.is_dir() and not (directory / LATEST).exists()):
        return directory
    return latest(directory) if name is None else directory / name


def _contents(root: Path) -> str:
    names = sorted(p.name for p in root.iterdir())
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing in it"
    )
