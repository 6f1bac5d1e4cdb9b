"""Lets a user's function call a module's forward on the tensors of a step, through a stand-in for the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fzero import random, tree
from fzero.errors import TraceError
from fzero.modules.captured_tensors import Outside
from fzero.modules.loss_weighting import Counting


class Forward:
    """A module on given tensors: it is called like the module, and has its attributes.

    Its submodules and tensors are those of the module itself, whose use `outside` rejects.

    Attributes:
        counting: counts the targets of the cross entropies in its calls.
        outside: handles the other tensors that its caller uses.
        finish: a function that its outputs are passed through.
    """

    def __init__(self, module: nn.Module, run: Callable[..., tuple[Any, Any]], key: torch.Tensor | None):
        self.__dict__.update(_module=module, _run=run, _key=key, _new=[], counting=Counting(), outside=Outside(module))
        self.finish: Callable[[Any], Any] = lambda out: out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = len(self._new)
        # Calls of one loss draw different numbers.
        key = self._key if self._key is None or not calls else random.fold_in(self._key, calls)
        self.outside.inside = True
        try:
            out, new = self._run(args, kwargs, key, self.counting)
        finally:
            self.outside.inside = False
        self._new.append(new)
        return self.finish(out)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def __class__(self) -> Any:  # for code that checks its type
        return type(self._module)

    def overwritten(self) -> Any:
        """Returns the new values of buffers from the only call; None if there are none.

        Raises:
            TraceError: if there are new values, and the module was called more than once.
        """
        if len(self._new) > 1 and any(tree.leaves(new) for new in self._new):
            what = f"{type(self._module).__name__} overwrites buffers, and is called {len(self._new)} times in a loss"
            raise TraceError("functionalize", what, fix="call it once, on all samples")
        return self._new[0] if self._new else None
