"""Defines the state of a step, and which of its tensors persist. Marks states whose step was interrupted: some of
their tensors are updated, others are not, and it is not known which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fzero import tree
from fzero._utils.units import size
from fzero.errors import FzeroValueError, attribute_of
from fzero.sharding.layout import leaf_of

INIT_STREAM = 0x1717
"""Folded into the key given to `init` to make the state's key, so that no step draws what the init function drew."""
MADE_ANEW = frozenset({"compute", "gradients"})
"""Roles of a state's extras that can be computed from the rest of the state, or that are written in each step before
they are read. Checkpoints do not contain them.
"""


_broken = WeakTensorKeyDictionary()  # the reason, by tensor


class State(NamedTuple):
    """Everything that a step carries over to the next. It is a pytree.

    Attributes:
        step: int64[], the number of steps taken. Skipped steps do not count.
        params: the pytree of parameters. Of a compiled step, these are the tensors of this rank: a sharded parameter
            is a flat, padded shard. `train.gather` returns full tensors.
        opt_state: the state of the optimizer, sharded like the parameters or more finely.
        key: int64[3], the PRNG key. The loss of step t gets `fz.random.fold_in(key, t)`.
        extras: the state of the transforms, by name: for example `extras["loss_scale"]`.

    Example:
        >>> import torch, fzero as fz
        >>> state = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1)).init({"w": torch.ones(2)})
        >>> state.step, state.params
        (tensor(0), {'w': tensor([1., 1.])})
    """

    step: torch.Tensor
    params: Any
    opt_state: Any
    key: torch.Tensor
    extras: dict[str, Any]

    def __repr__(self) -> str:
        plain = type(self.step) in (torch.Tensor, int) and all(
            isinstance(x, torch.Tensor) for x in tree.leaves(self[1:])
        )
        # if it contains anything but tensors, such as their shapes, or in a trace: as for any NamedTuple
        fields = zip(self._fields, self, strict=True)
        return _summary(self) if plain else f"State({', '.join(f'{name}={x!r}' for name, x in fields)})"

    if not TYPE_CHECKING:
        __getattr__ = attribute_of


def _summary(state: State) -> str:
    """The step, the number of parameters, and the bytes of this rank by field and by memory tier.

    A tree of tensors printed in full would be thousands of lines.
    """
    seen = dict[int, torch.Tensor]()  # tied tensors count once
    by_field, by_tier, mesh, numel = dict[str, int](), dict[str, int](), None, 0
    for name, value in zip(state._fields, state, strict=True):
        for x in tree.tensors(value):
            if id(x) in seen:
                continue
            seen[id(x)] = x
            leaf, mesh = tag if (tag := leaf_of(x)) is not None else (None, mesh)
            nbytes = x.numel() * x.dtype.itemsize if leaf is None or mesh is None else leaf.shard_bytes(mesh)
            tier = x.device.type if leaf is None or leaf.layout.tier == "device" else leaf.layout.tier
            by_field[name] = by_field.get(name, 0) + nbytes
            by_tier[tier] = by_tier.get(tier, 0) + nbytes
            numel += (x.numel() if leaf is None else leaf.numel) if name == "params" else 0
    parts = [] if getattr(state.step, "is_meta", False) else [f"step={int(state.step)}"]
    parts.append(f"{numel:,} parameters")
    fields = ", ".join(f"{name} {size(n)}" for name, n in by_field.items() if name in ("params", "opt_state", "extras"))
    tiers = ", ".join(f"{size(n)} on {tier}" for tier, n in by_tier.items())
    where = "" if mesh is None or mesh.size == 1 else f" of rank {mesh.rank} of {mesh.size}"
    return f"State({', '.join(parts)}; {fields}; {tiers}{where})"


def lasting(state: Any) -> Any:
    """Returns a state without the extras that are computed anew: the compute copies of master parameters, and the
    buffers where gradients wait. Anything else is returned as it is.
    """
    if not isinstance(state, State) or MADE_ANEW.isdisjoint(state.extras):
        return state
    return state._replace(extras={name: x for name, x in state.extras.items() if name not in MADE_ANEW})


def mark_broken(state: Any, error: BaseException) -> None:
    """Marks a state that a step was writing when an error stopped it."""
    why = next(iter(str(error).splitlines()), "")
    text = type(error).__name__ + (f": {why}" if why else "")
    for x in tree.leaves(state):
        if isinstance(x, torch.Tensor):
            _broken[x] = text


def check_whole(values: Any, owner: str) -> None:
    """Raises an error if a step was interrupted while it was writing the state that these tensors belong to."""
    if not len(_broken):
        return
    why = {_broken[x]: None for x in tree.tensors(values) if x in _broken}
    if why:
        what = "a step of this state ended in the middle: some of its tensors are updated, others are not"
        fix = "continue from the last checkpoint, train.restore(path), or start again, train.init(params)"
        raise FzeroValueError(owner, what, list(why), fix)


def computed_by(state: State, check: Callable[[str], None]) -> None:
    """Records that a step computes a state from now on. `check` raises an error if what has run is not what the step's
    code says now.

    It replaces the check of an earlier step, because after a setting is changed, a step that is compiled again
    continues with the state. But if an earlier step continues the state again, the checks of all steps since then
    apply too. The tensors refer to the checks, rather than a table by tensor,
    because what these hold may hold the state: the user's own functions often do.
    """
    tensors = tree.tensors((state.step, state.params))
    checks = _checks_of(tensors).continued_by(check)
    for x in tensors:
        x._fzero_checks = checks  # type: ignore[attr-defined]


def is_computed_by(state: State, check: Callable[[str], None]) -> bool:
    """Returns whether `computed_by` has recorded this: in every step, so it looks at one tensor."""
    checks = getattr(state.step, "_fzero_checks", None)
    return checks is not None and check in checks.holding


@dataclass(frozen=True)
class _Checks:
    """The checks of the steps that have computed a state: those that hold, and those of earlier steps. A copy of a
    tensor has None instead.
    """

    holding: tuple[Callable[[str], None], ...] = ()
    earlier: tuple[Callable[[str], None], ...] = ()

    def continued_by(self, check: Callable[[str], None]) -> _Checks:
        if check in self.holding:
            return self
        if check in self.earlier:
            at = self.earlier.index(check)
            return _Checks((*self.holding, *self.earlier[at:]), self.earlier[:at])
        return _Checks((check,), (*self.earlier, *self.holding)[-_MOST_STEPS:])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _checks_of(values: Any) -> _Checks:
    found = (getattr(x, "_fzero_checks", None) for x in tree.tensors(values))
    return next((checks for checks in found if checks is not None), _Checks())


_MOST_STEPS = 8
"""Number of earlier steps whose checks are kept, in case they take turns."""


def check_computed(values: Any, owner: str) -> None:
    """Raises an error if these tensors of a state were computed by a step whose code computes something else now. To be
    called on all ranks, before the tensors are saved or given to the user.
    """
    for check in _checks_of(values).holding:
        check(owner)
