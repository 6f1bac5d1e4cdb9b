"""Records the signals that ask a run to stop, and makes all ranks stop before the same step."""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from fzero.comm import launcher
from fzero.mesh import Mesh

STOPPED = 143  # the exit code of a process that SIGTERM ends


class StopSignals:
    """Records that a signal has arrived, so that the run can act on it between two steps.

    Attributes:
        came: whether a signal has arrived.
        exits: whether the process exits at once when a signal arrives. It does so from the moment when the ranks come
            together until the end of the first step, because this could take longer than the seconds that a process
            has left after a signal.
    """

    def __init__(self, numbers: Sequence[int]):
        # Python sets signal handlers in the main thread only.
        self._numbers = numbers if threading.current_thread() is threading.main_thread() else ()
        self._before: dict[int, Any] = {}
        self.came, self.exits = False, False

    def __enter__(self) -> StopSignals:
        self._before = {n: signal.signal(n, self._hear) for n in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for n, handler in self._before.items():
            signal.signal(n, handler)

    def _hear(self, number: int, _: Any) -> None:
        launcher.received(number)
        if self.exits:
            sys.exit(128 + number)
        self.came = True

    def stop_before(self, step: int, mesh: Mesh) -> bool:
        """Whether the run ends before this step, the same on all ranks.

        A rank that has received a signal tells the others before it begins a step, and no rank can end that step
        without it.
        """
        if mesh.size == 1:
            return self.came
        # The name is a secret of the ranks: a stranger who reaches the store could otherwise stop the run.
        key, said = "fzero/run/stop/" + hashlib.sha256(mesh.secret + b"stop").hexdigest(), None
        if mesh.store.check([key]):
            said = mesh.store.get(key)
        if self.came and said is None:
            # The step after this one: another rank may have looked already, and begun this step.
            said = mesh.store.compare_set(key, "", str(step + 1))
        return said is not None and int(said) <= step
