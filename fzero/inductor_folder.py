"""Chooses the folder in which Inductor keeps its files, before PyTorch makes it: importing Dynamo does, which every
trace needs."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from fzero import compat
from fzero.errors import FzeroValueError
from fzero.private import exposed, not_writable

logger = logging.getLogger("fzero")


def guard_inductor() -> None:
    """Has Inductor keep its own files where they can be written, and no other user can change them: by default that is
    a folder of the directory for temporary files, whose name anybody can foresee. One that is read-only, or that others
    have made or can write to, is replaced by a folder beside the cache's, and a line in the log says so.

    Raises:
        FzeroValueError: there is no other place.
    """
    where = os.environ.get("FZERO_CACHE") or ""
    folder = Path(where if where not in ("", "off") else "~/.cache/fzero").expanduser() / "inductor"
    _guard_temporary(folder)
    problems = list[str]()
    for given in (Path(compat.inductor_cache_folder()), folder):
        try:
            given.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = exposed(given, 0o002)
            why = not_writable(given) if why is None else f"{why}, and what lies there is run"
        except OSError as error:
            why = str(error)
        if why is None:
            break
        problems.append(why)
    else:
        fix = "set TORCHINDUCTOR_CACHE_DIR to a folder in a directory of your own that can be written to"
        raise FzeroValueError("compile", "Inductor has no place for its files, which are run", problems, fix)
    if problems:
        logger.warning("Inductor's files go to %s: %s", folder, problems[0])
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _guard_temporary(folder: Path) -> None:
    """Has compilers keep temporary files where Python does: they take TMPDIR as it is. `folder`: for them where nothing
    else can be written to.

    Raises:
        FzeroValueError: not there either.
    """
    asked = os.environ.get("TMPDIR")
    try:
        found = tempfile.gettempdir()
    except FileNotFoundError as error:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = not_writable(folder)
        except OSError as second:
            why = str(second)
        if why is not None:
            fix = "set TMPDIR to a folder in a directory of your own that can be written to"
            raise FzeroValueError("compile", "there is no place for temporary files", [str(error), why], fix) from error
        asked, found = asked or "/tmp", str(folder)
    if asked and os.path.abspath(asked) != found:
        logger.warning("temporary files go to %s: %s cannot be written to", found, asked)
        os.environ["TMPDIR"] = found
