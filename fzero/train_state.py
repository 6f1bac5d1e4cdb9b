"""Defines the state of a step, and what of it lasts; marks the leaves of a state that a step has left in the middle:
some are updated, others are not, and nobody can tell which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fzero import tree
from fzero.errors import FzeroValueError, attribute_of

INIT_STREAM = 0x1717
"""Folded into the key given to `init` to make the state's key, so that no step draws what the init function drew."""
MADE_ANEW = frozenset({"compute", "gradients"})
"""Roles of a state's extras that follow from the rest of it, or are written in each step before they are read: no
checkpoint has them."""


_broken = WeakTensorKeyDictionary()  # why, by leaf


class State(NamedTuple):
    """Everything a step carries over. A pytree.

    Example:
        >>> import torch, fzero as fz
        >>> state = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1)).init({"w": torch.ones(2)})
        >>> state.step, state.params
        (tensor(0), {'w': tensor([1., 1.])})
    """

    step: torch.Tensor  # int64[]: how many steps have been taken
    params: Any
    opt_state: Any
    key: torch.Tensor  # int64[3]: step t draws from fold_in(key, t)
    extras: dict[str, Any]  # what transforms carry

    if not TYPE_CHECKING:
        __getattr__ = attribute_of


def lasting(state: Any) -> Any:
    """A state without what is made anew: the copies of masters that a model computes with, and where gradients wait.
    Anything else as it is."""
    if not isinstance(state, State) or MADE_ANEW.isdisjoint(state.extras):
        return state
    return state._replace(extras={name: x for name, x in state.extras.items() if name not in MADE_ANEW})


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
    why = {_broken[x]: None for x in tree.tensors(values) if x in _broken}
    if why:
        what = "a step of this state ended in the middle: some of its leaves are updated, others are not"
        fix = "go on from the last checkpoint, train.restore(path), or begin anew, train.init(params)"
        raise FzeroValueError(owner, what, list(why), fix)
