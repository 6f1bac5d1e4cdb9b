"""Chooses the folder for Inductor's files. This must happen before any trace, because a trace imports Dynamo, and that
import creates Inductor's folder.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from fzero._utils.path_permissions import exposed, make_private_directory, not_writable
from fzero.errors import FzeroValueError

logger = logging.getLogger("fzero")


def guard_inductor() -> None:
    """Makes Inductor keep its files in a folder that no other user can change, because these files are executed.

    The folder is that of TORCHINDUCTOR_CACHE_DIR if it is set, and otherwise `inductor` in fzero's own cache
    (`$FZERO_CACHE`, by default `~/.cache/fzero`). PyTorch's default has a predictable name in the directory for
    temporary files, where other users can be first. If fzero's cache cannot be used, a new temporary folder takes its
    place.

    Raises:
        FzeroValueError: the folder of TORCHINDUCTOR_CACHE_DIR cannot be written to, or others can change it.
    """
    where, given = os.environ.get("FZERO_CACHE") or "", os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    own = Path(where if where not in ("", "off") else "~/.cache/fzero").expanduser() / "inductor"
    folder = Path(given or own)
    try:
        make_private_directory(folder)
        why = exposed(folder, 0o002)
        why = not_writable(folder) if why is None else f"{why}, and the files in it are executed"
    except OSError as error:
        why = str(error)
    if why is not None and not given:
        folder = Path(tempfile.mkdtemp(prefix="fzero-inductor-"))
        logger.warning("Inductor's files go to %s, and are not used again: %s", folder, why)
    elif why is not None:
        fix = "set TORCHINDUCTOR_CACHE_DIR to a folder in a directory of your own that can be written to"
        raise FzeroValueError("compile", f"Inductor cannot keep its files in {folder}", [why], fix)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
