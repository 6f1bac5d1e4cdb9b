"""Chooses the folders for Inductor's files and for compilers' temporary files. This must happen before any trace,
because a trace imports Dynamo, and that import creates Inductor's folder.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from fzero._compat import compat
from fzero._utils.path_permissions import exposed, make_private_directory, not_writable
from fzero.errors import FzeroValueError

logger = logging.getLogger("fzero")


def guard_inductor() -> None:
    """Makes Inductor keep its files in a writable folder that no other user can change, because these files are
    executed.

    Inductor's default is a folder with a predictable name in the directory for temporary files. A folder that is
    read-only, or that another user owns or can write to, is replaced by one next to fzero's cache: this sets
    TORCHINDUCTOR_CACHE_DIR, and likewise TMPDIR, for this process, and logs it.

    Raises:
        FzeroValueError: if the folder next to the cache cannot be used either.
    """
    where = os.environ.get("FZERO_CACHE") or ""
    folder = Path(where if where not in ("", "off") else "~/.cache/fzero").expanduser() / "inductor"
    _guard_temporary(folder)
    problems = list[str]()
    for given in (Path(compat.inductor_cache_folder()), folder):
        try:
            make_private_directory(given)
            why = exposed(given, 0o002)
            why = not_writable(given) if why is None else f"{why}, and the files in it are executed"
        except OSError as error:
            why = str(error)
        if why is None:
            break
        problems.append(why)
    else:
        fix = "set TORCHINDUCTOR_CACHE_DIR to a folder in a directory of your own that can be written to"
        raise FzeroValueError(
            "compile", "Inductor has no safe directory for its files, which are executed", problems, fix
        )
    if problems:
        logger.warning("Inductor's files go to %s: %s", folder, problems[0])
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _guard_temporary(folder: Path) -> None:
    """Sets TMPDIR to the directory that Python uses for temporary files: compilers use TMPDIR even if it is not
    writable.

    Args:
        folder: used if no directory for temporary files is writable.

    Raises:
        FzeroValueError: if `folder` is not writable either.
    """
    asked = os.environ.get("TMPDIR")
    try:
        found = tempfile.gettempdir()
    except FileNotFoundError as error:
        try:
            make_private_directory(folder)
            why = not_writable(folder)
        except OSError as second:
            why = str(second)
        if why is not None:
            fix = "set TMPDIR to a folder in a directory of your own that can be written to"
            raise FzeroValueError(
                "compile", "there is no usable directory for temporary files", [str(error), why], fix
            ) from error
        asked, found = asked or "/tmp", str(folder)
    if asked and os.path.abspath(asked) != found:
        logger.warning("temporary files go to %s: %s cannot be written to", found, asked)
        os.environ["TMPDIR"] = found
