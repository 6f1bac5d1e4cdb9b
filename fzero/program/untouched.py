"""Arguments that a function may not write to while it runs: the plain step's, as the compiled step's are while it is traced."""

from __future__ import annotations

import sys
from typing import Any

import torch

from fzero import compat, tree
from fzero.errors import TraceError, message
from fzero.program import hidden
from fzero.program.refusals import CHANGES, NEW_VALUE, line, user_place


class Untouched(compat.TorchDispatchMode):
    """Operations inside that would write to the memory of these trees are errors, before they do."""

    def __init__(self, owner: str, **arguments: Any):
        super().__init__()
        self._owner, self._outside = owner, sys._getframe(1)
        named = [pair for root, values in arguments.items() for pair in zip(tree.paths(values, root), tree.leaves(values), strict=True)]
        self._paths = {_storage(x): path for path, x in reversed(named) if isinstance(x, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = [self._paths[s] for s in map(_storage, hidden.overwritten(func, args, kwargs)) if s in self._paths] if compat.is_operator(func) else []
        if changed:
            place = user_place(self._outside)
            raise TraceError(message(self._owner, CHANGES, [f"{path}: {line(place)}" if place else path for path in changed], NEW_VALUE))
        return func(*args, **kwargs)


def _storage(x: torch.Tensor) -> int | None:
    return x.untyped_storage()._cdata if x.layout is torch.strided else None
