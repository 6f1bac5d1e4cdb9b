"""Chooses the folders of Inductor's files and of compilers' temporary files. This comes before any trace: a trace
imports Dynamo, and the import makes Inductor's folder."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from fzero._compat import compat
from fzero._utils.path_permissions import exposed, not_writable
from fzero.errors import FzeroValueError

logger = logging.getLogger("fzero")


def guard_inductor() -> None:
    """Has Inductor keep its files in a folder that can be written to, and that no other user can change: they are run.

    Inductor's default is a folder of the directory for temporary files, whose name anybody can foresee. A folder that
    is read-only, or that another user owns or can write to, is replaced by one beside the cache's: this sets
    TORCHINDUCTOR_CACHE_DIR, and TMPDIR likewise, for this process. A line in the log says so.

    Raises:
        FzeroValueError: the folder beside the cache's will not do either.
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
    """Sets TMPDIR to the directory that Python takes for temporary files: compilers take TMPDIR even if it cannot be
    written to.

    Args:
        folder: taken if no directory for temporary files can be written to.

    Raises:
        FzeroValueError: `folder` cannot be written to either.
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
