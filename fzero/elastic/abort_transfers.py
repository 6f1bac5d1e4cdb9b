"""Aborts GPU collectives that wait for a rank that is gone.

On a CPU, a rank that waits for other ranks checks for itself whether they are still there. On a GPU the kernel of a
collective waits, and the host waits for the kernel, for as long as the timeout of the process group. So on each rank a
thread does this check instead. When a rank is gone, the thread aborts the process groups: the kernels end, the host
continues, and the next collective raises an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from fzero._compat import compat
from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

_EVERY = 1.0  # seconds between two checks


@contextlib.contextmanager
def freed(mesh: Mesh) -> Iterator[None]:
    """A context in which collectives on a GPU mesh that wait for a rank that is gone are aborted within seconds."""
    if mesh.device_type != "cuda" or mesh.size == 1:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY):
            if gone := mesh.collective_sequence.gone():
                logger.warning(
                    "fzero.run: rank %s has exited: its transfers are aborted", ", ".join(map(str, sorted(gone)))
                )
                # Every rank aborts for itself: a group whose kernel waits cannot carry a message that says so.
                compat.abort_groups()
                return

    thread = threading.Thread(target=watch, name="fzero-stuck", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
