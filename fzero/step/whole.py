"""Marks the leaves of states that a step has left in the middle: some are updated, others are not, and nobody can tell
which."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fzero import tree
from fzero.errors import FzeroValueError, message

_broken = WeakTensorKeyDictionary()  # why, by leaf


def mark_broken(state: Any, error: BaseException) -> None:
    """Marks a state that a step was writing when it was stopped by an error."""
    why = next(iter(str(error).splitlines()), "")
    text = type(error).__name__ + (f": {why}" if why else "")
    for x in tree.leaves(state):
        if isinstance(x, torch.Tensor):
            _broken[x] = text


def check_whole(values: Any, owner: str) -> None:
    """Raises if a step has left the state that these leaves are of in the middle."""
    if not len(_broken):
        return
    why = {_broken[x]: None for x in tree.leaves(values) if isinstance(x, torch.Tensor) and x in _broken}
    if why:
        what = "a step of this state ended in the middle: some of its leaves are updated, others are not"
        fix = "go on from the last checkpoint, train.restore(path), or begin anew, train.init(params)"
        raise FzeroValueError(message(owner, what, list(why), fix))
