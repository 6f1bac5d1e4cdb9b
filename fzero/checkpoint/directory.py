"""Finds the checkpoints below a root directory, and the newest one.

    root/latest                          the name of the newest complete checkpoint
    root/step-00000100/index.json
    root/step-00000100/rank-00000-of-00002.safetensors ...
    root/.tmp-step-00000200/             being written, or left by a save that was killed: never read

On a filesystem, a `step-` directory is complete from the moment it has that name; in an object store, from the
moment it has its index (storage.py). This file deals with names, not with contents.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from fzero._utils.bounded_json import Malformed
from fzero.checkpoint.async_save import settle
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.storage_paths import GIVE, INDEX, LATEST, SET_ASIDE, STEP, Place, as_path
from fzero.comm.control_group import all_gather_values, world
from fzero.errors import CheckpointError

logger = logging.getLogger("fzero")

_LONGEST_NAME = 4096  # bytes
_HEAD = 1024  # bytes of an index that are searched for the run's name
_ENTRY = re.compile(rb'^"(run|sha256)": "([\w:-]+)",$', re.M)
_STEP = re.compile(STEP + r"(\d{8,})")


def step_name(step: int) -> str:
    return f"{STEP}{step:08d}"


def step_number(name: str) -> int | None:
    """Returns the step that a directory is named after, or None if its name has another form."""
    match = _STEP.fullmatch(name.removesuffix(SET_ASIDE))
    return int(match[1]) if match else None


def latest(path: str | os.PathLike[str]) -> Place:
    """Returns the directory of the newest complete checkpoint below a root. Waits for a running save of this process
    first.

    Without a file `latest`, it is the checkpoint of the highest step, provided that all checkpoints belong to one
    run. The same holds if `latest` names a checkpoint that was deleted while others exist; this logs a warning.

    Raises:
        CheckpointError: there is no complete checkpoint; `latest` is damaged; or `latest` is missing or names a deleted
            checkpoint, and the others belong to several runs.

    Example:
        >>> import tempfile, torch, fzero as fz
        >>> from fzero import checkpoint
        >>> root = tempfile.mkdtemp()
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> path = checkpoint.save(root, step.init({"w": torch.ones(2)}))
        >>> latest(root).name
        'step-00000000'
    """
    # A save of this process may be between two renames, or may have deleted an older checkpoint.
    settle()
    return newest(as_path(path))


def newest(root: Place) -> Place:
    """Does `latest` without waiting for a running save of this process."""
    seen: str | None = ""
    # Until it is the same twice: a save of another process may just be replacing the checkpoint that it names.
    while (name := _pointer(root)) != seen:
        match = _STEP.fullmatch(name or "")
        if match and (found := _complete(root, match[0])):
            return found
        seen = name
    match, complete = _STEP.fullmatch(name or ""), complete_steps(root)
    # Not found by its name above, but listed now: a save has replaced this step, and was between its two renames.
    if match and int(match[1]) in complete:
        return complete[int(match[1])]
    if complete and name is None:  # the first save was killed right after publishing, or someone copied a step here
        return _highest(root, complete, f"no file {LATEST}")
    if complete and match and _is_gone(root / match[0]):
        found = _highest(root, complete, f"{LATEST} names {match[0]}, which was deleted")
        text = "fzero.checkpoint: %s names %s, which was deleted, for example by another job that saves there"
        logger.warning(text + ": %s is used instead", root / LATEST, match[0], found.name)
        return found
    if name is None and not storage_of(root).is_directory(root):
        raise CheckpointError("checkpoint", f"{root} does not exist", fix=GIVE)
    if name is None:
        fix = f"{GIVE}; a .tmp- directory is a save that did not finish"
        raise CheckpointError(
            "checkpoint", f"{root} holds no complete checkpoint", [f"it contains {_contents(root)}"], fix
        )
    here = ", ".join(p.name for _, p in sorted(complete.items())) or "none"
    what = f"{root / LATEST} names {name[:80]!r}, which is not a complete checkpoint there"
    fix = "write the name of one of these to that file" if complete else "to start again, delete that file"
    raise CheckpointError("checkpoint", what, [f"complete: {here}"], fix)


def find(path: str | os.PathLike[str]) -> Place | None:
    """Returns the directory of the newest complete checkpoint below a root, the same on every rank, or None if nothing
    has been saved there yet.

    This is for scripts that are restarted by the same command that started them. Every rank calls it; rank 0 looks,
    after a running save has ended.

    Raises:
        CheckpointError: on every rank: something was saved there that is no longer complete.

    Communication: one exchange of a small object.

    Example:
        >>> import tempfile
        >>> find(tempfile.mkdtemp()) is None
        True
    """
    ranks = world()

    def look() -> str | None:
        root = as_path(path)
        settle()
        # Only rank 0 looks. Another rank could see a checkpoint that was published a moment later, and the ranks would
        # disagree.
        if ranks.rank:
            return None
        storage = storage_of(root)
        steps = [n for n in storage.names(root) if _STEP.fullmatch(n.removesuffix(SET_ASIDE))]
        begun = any(storage.has(root / name) for name in (LATEST, INDEX))
        if begun or any(storage.is_published(root / n) for n in steps):
            return str(locate(root))
        if steps:  # `latest` may have been deleted, or these saves did not finish
            text = (
                "fzero.checkpoint: %s has no file %s and no complete checkpoint: "
                "a run starts from scratch. It contains %s"
            )
            logger.warning(text, root, LATEST, _contents(root))
        return None

    what = f"cannot tell what is saved in {path}"
    found = all_gather_values(ranks, "checkpoint", look, form=str | None, what=what, failure=CheckpointError)[0]
    return None if found is None else as_path(found)


def complete_steps(root: Place) -> dict[int, Place]:
    """Returns every complete checkpoint below a root, by step.

    If a save replaces a checkpoint of the same step and is killed before its own has taken the name, the old
    directory, renamed with the suffix `SET_ASIDE`, counts as that step.
    """
    names = {n.removesuffix(SET_ASIDE) for n in storage_of(root).names(root)}
    numbers = {name: number for name in names if (number := step_number(name)) is not None}
    return {step: found for name, step in numbers.items() if (found := _complete(root, name))}


def head_of(place: Place) -> tuple[str | None, str | None]:
    """Returns the name of the run that a checkpoint belongs to, and the digest of its index. Each is None if it is not
    known."""
    try:
        return head(storage_of(place).read(place / INDEX, _HEAD))
    except OSError:
        return None, None


def head(index: bytes) -> tuple[str | None, str | None]:
    """Returns what `head_of` does, from the first lines of an index, which can be large."""
    found = {key: value.decode() for key, value in _ENTRY.findall(index[:_HEAD])}
    return found.get(b"run"), found.get(b"sha256")


def _highest(root: Place, complete: Mapping[int, Place], why: str) -> Place:
    """Returns the checkpoint of the highest step. Raises an error if the checkpoints belong to several runs. `why` says
    why `latest` does not tell."""
    runs = {place: head_of(place)[0] for _, place in sorted(complete.items())}
    if len({*runs.values()} - {None}) > 1:
        what = f"{root} has checkpoints of several runs, and nothing says which one is meant ({why})"
        problems = [f"{place.name}: {f'the run {run}' if run else 'an unnamed run'}" for place, run in runs.items()]
        fix = f"write the name of one of them to {root / LATEST}, or give that directory"
        raise CheckpointError("checkpoint", what, problems, fix)
    return complete[max(complete)]


def _is_gone(directory: Place) -> bool:
    """Whether a checkpoint has been deleted, rather than damaged."""
    storage = storage_of(directory)
    return not (storage.is_directory(directory) and storage.is_published(directory))


def _complete(root: Place, name: str) -> Place | None:
    """Returns the complete checkpoint of this name, possibly renamed with the suffix `SET_ASIDE`, or None."""
    found = (root / (name + suffix) for suffix in ("", SET_ASIDE))
    return next((place for place in found if storage_of(root).has(place / INDEX)), None)


def locate(path: str | os.PathLike[str], name: str | None = None) -> Place:
    """Returns `path` if it is a step directory; otherwise the checkpoint `name` below it, or the latest one if no name
    is given."""
    directory = as_path(path)
    settle()
    named = step_number(directory.name) is not None
    storage = storage_of(directory)
    if storage.has(directory / INDEX):
        return directory
    # A directory named after a step, without an index: it is returned, so that reading it reports what is missing,
    # instead of being searched as a root.
    if named and storage.is_directory(directory) and not storage.has(directory / LATEST):
        return directory
    return latest(directory) if name is None else directory / name


def _pointer(root: Place) -> str | None:
    """Returns the name in the file `latest`, or None if there is no such file."""
    try:
        # A checkpoint may come from somebody else, and a link could make the reader print the contents of any file in
        # an error message.
        if (real := storage_of(root).link(root, LATEST)) is not None:
            raise OSError(f"a link to a file outside of its directory, {real}")
        return storage_of(root).whole(root / LATEST, _LONGEST_NAME).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, Malformed) as error:
        fix = "replace it by a text file with the name of a directory step-..., or delete it"
        raise CheckpointError("checkpoint", f"{root / LATEST} cannot be read", [str(error)], fix) from None


def _contents(root: Place) -> str:
    names = sorted(storage_of(root).names(root))
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing in it"
    )
