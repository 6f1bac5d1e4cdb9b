"""Ends transfers of GPUs that wait for a rank which is gone.

On a CPU a rank that waits for others looks where they are. On a GPU the kernel of a collective waits, and the host
waits for the kernel, for as long as the group's timeout. So a thread of each rank looks in its place. When a rank is
gone it aborts the process groups: kernels end, the host goes on, and the next collective is an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from fzero._compat import compat
from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

_EVERY = 1.0  # seconds between two looks


@contextlib.contextmanager
def freed(mesh: Mesh) -> Iterator[None]:
    """A context: while it lasts, what waits on a mesh of GPUs for a rank that is gone is ended within seconds."""
    if mesh.device_type != "cuda" or mesh.size == 1:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY):
            if gone := mesh.turns.gone():
                logger.warning("fzero.run: rank %s is gone: its transfers end", ", ".join(map(str, sorted(gone))))
                compat.abort_groups()
                return

    thread = threading.Thread(target=watch, name="fzero-stuck", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
