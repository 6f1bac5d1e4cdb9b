"""Makes all ranks of a run stop before the same step after a signal has arrived at any of them."""

from __future__ import annotations

import logging

from fzero.comm.control_messages import STRANGERS, proven, signed
from fzero.elastic.join import Signals
from fzero.mesh import Mesh

logger = logging.getLogger("fzero")

_STOP = "fzero/run/stop"


class StopRequest:
    """The agreement of the ranks on the step before which they stop."""

    def __init__(self, mesh: Mesh, signals: Signals):
        self._mesh, self._signals = mesh, signals
        self._strange = False  # whether the log has the warning that a foreign process writes to the store

    def stops(self, step: int) -> bool:
        """Whether the run ends before this step.

        A rank that has received a signal tells the others before it begins a step, and no rank can end that step
        without it.
        """
        if self._mesh.size == 1:
            return self._signals.came
        store, secret = self._mesh.store, self._mesh.secret
        found = store.get(_STOP) if store.check([_STOP]) else b""
        said = proven(secret, _STOP, found)
        if found and said is None and not self._strange:
            self._strange = True
            logger.warning("fzero.run: ignores a stop in the store that is not this run's: %s", STRANGERS)
        if self._signals.came and said is None:
            # The step after this one: another rank may have looked already, and begun this step.
            store.compare_set(_STOP, found.decode(errors="replace"), signed(secret, _STOP, str(step + 1)))
        return said is not None and int(said) <= step
