"""Makes all ranks of a run stop before the same step after a signal has arrived at any of them."""

from __future__ import annotations

import hashlib

from fzero.elastic.rank_loss import Signals
from fzero.mesh import Mesh


class StopRequest:
    """The agreement of the ranks on the step before which they stop."""

    def __init__(self, mesh: Mesh, signals: Signals):
        self._mesh, self._signals = mesh, signals
        # The key is a secret of the ranks: a stranger who reaches the store could otherwise stop the run.
        self._key = "fzero/run/stop/" + hashlib.sha256(mesh.secret + b"stop").hexdigest()

    def stops(self, step: int) -> bool:
        """Whether the run ends before this step.

        A rank that has received a signal tells the others before it begins a step, and no rank can end that step
        without it.
        """
        if self._mesh.size == 1:
            return self._signals.came
        store, said = self._mesh.store, None
        if store.check([self._key]):
            said = store.get(self._key)
        if self._signals.came and said is None:
            # The step after this one: another rank may have looked already, and begun this step.
            said = store.compare_set(self._key, "", str(step + 1))
        return said is not None and int(said) <= step
