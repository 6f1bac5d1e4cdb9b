"""Translates torch optimizers, by class and with their values, into fzero optimizers that follow their learning rates.

The torch optimizer continues to hold the learning rates: the schedulers of transformers write them into its
parameter groups, and before each step they are written to the state, one scalar per group. The torch optimizer never
updates any parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero import optim, tree
from fzero.errors import FzeroValueError
from fzero.optim import GradientTransformation, Schedule
from fzero.optim.torch_classes import CLASSES, of_torch, unsupported


class RateState(NamedTuple):
    """The learning rate of the next update, for a group of parameters. The host writes it."""

    rate: torch.Tensor  # float32[]


def problems(optimizer: Any, where: str) -> list[str]:
    """Returns the reasons why an optimizer cannot be translated."""
    if type(optimizer) not in CLASSES:
        return [f"{where}: {not_translated(type(optimizer))}"]
    groups = enumerate(optimizer.param_groups)
    odd = [(i, n, x) for i, g in groups for n, x in unsupported(g).items()]
    return [f"{where}: {type(optimizer).__name__}({n}={x!r}) in group {i} is not supported" for i, n, x in odd]


def not_translated(cls: Any) -> str:
    """Returns the message that a class cannot be translated, with the classes that can."""
    known = ", ".join(c.__name__ for c in CLASSES)
    name = f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else str(cls)
    return f"{name} is not translated; of torch.optim these are: {known}"


class Translated(NamedTuple):
    """An optimizer and, for each of its learning rates, the index of the parameter group that has it."""

    optimizer: GradientTransformation
    groups: tuple[int, ...]


def translated(optimizer: torch.optim.Optimizer, names: Mapping[str, torch.nn.Parameter], model: Any) -> Translated:
    """Returns an fzero optimizer equal to this one, except that its learning rates are read from its state.

    Args:
        names: the module's parameters by all their names.
        model: what `functionalize` returned for it.

    Raises:
        FzeroValueError: the class or a setting is not supported, or a trained parameter is in no group.
    """
    wrong = problems(optimizer, "optimizer")
    if not isinstance(optimizer.state, Elsewhere) and any(map(_has_stepped, optimizer.state.values())):
        wrong.append("it already has a state from earlier steps")
    own = {id(p) for p in names.values()}
    for i, g in enumerate(optimizer.param_groups):
        others = sum(p.requires_grad and id(p) not in own for p in g["params"])
        wrong += [f"group {i}: {others} of its parameters do not belong to the model"] if others else []
    group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    labels: dict[str, int] = {}
    for path, name in zip(tree.paths(model.params, "params"), tree.names(model.params), strict=True):
        p = names.get(name)
        if p is not None and p.requires_grad:
            if id(p) not in group_of:
                wrong.append(f"{name}: is trainable, but in no group of the optimizer")
            labels[path] = group_of.get(id(p), 0)
    if wrong:
        fix = (
            "a new one, TrainingArguments(optim='adamw_torch'); freeze with requires_grad_(False) what is not "
            "trained; make what a loss learns part of the model"
        )
        raise FzeroValueError("hf.Trainer", "this optimizer is not translated", wrong, fix)
    trained = sorted({*labels.values()})  # groups without trained parameters are left out
    kinds = {k: _of_group(type(optimizer), optimizer.param_groups[i]) for k, i in enumerate(trained)}
    number = {i: k for k, i in enumerate(trained)}
    whole = kinds[0] if len(kinds) == 1 else optim.partition(kinds, lambda path, leaf: number[labels[path]])
    return Translated(whole, tuple(trained))


_NOT_PROPORTIONAL = (torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor)
"""Classes whose updates are not proportional to the learning rate."""


def _of_group(cls: type, group: Mapping[str, Any]) -> GradientTransformation:
    """Returns the optimizer for a parameter group, whose learning rate is in the state."""
    if cls in _NOT_PROPORTIONAL:
        schedule, at_rate = rate_in_state()
        return at_rate(of_torch(cls, schedule, group))
    # The complete update is proportional to the rate, decoupled weight decay included: computed with a rate of 1, then
    # multiplied.
    return optim.chain(of_torch(cls, 1.0, group), by_rate())


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a parameter has been updated before. Adagrad makes its state when it is constructed."""
    return "step" not in state or float(state["step"]) > 0


def rates(opt_state: Any) -> list[torch.Tensor]:
    """Returns the learning rates in a state, in the order of `Translated.groups`."""

    def found(x: Any) -> Iterator[torch.Tensor]:
        if isinstance(x, RateState):
            yield x.rate
        elif isinstance(x, (tuple, dict)):
            for y in x.values() if isinstance(x, dict) else x:
                yield from found(y)

    return list(found(opt_state))


def write(into: Sequence[torch.Tensor], groups: Sequence[int], optimizer: torch.optim.Optimizer) -> None:
    """Writes the learning rates of an optimizer's parameter groups to a state, the same on every rank."""
    for tensor, i in zip(into, groups, strict=True):
        tensor.fill_(float(optimizer.param_groups[i]["lr"]))


def values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the values of an optimizer's parameter groups that a step is made with: all except the learning rates."""
    return [
        {k: [id(p) for p in x] if k == "params" else x for k, x in g.items() if k not in ("lr", "initial_lr")}
        for g in optimizer.param_groups
    ]


_Dict: Any = dict


class Elsewhere(_Dict):
    """Replaces a torch optimizer's state, which is sharded with the parameters. Any access raises an error that says
    so."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        what = "an optimizer's moments are not in torch's optimizer: they are sharded, in trainer.train_state.opt_state"
        fix = (
            "leave them to the checkpoints; trainer.optimizer = None before train() begins with new ones; learning "
            "rates are in trainer.optimizer.param_groups"
        )
        raise FzeroValueError("hf.Trainer", what, fix=fix)

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __contains__ = __reduce__ = _refuse
    get = items = keys = values = clear = pop = popitem = update = setdefault = copy = _refuse


def check(made_with: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Raises an error if the values of an optimizer's parameter groups are not those that the step was made with.

    Raises:
        FzeroValueError: it names each value, as it was and as it is.
    """
    now = values(optimizer)
    pairs = enumerate(zip(made_with, now, strict=False))
    wrong = [
        f"group {i}: " + (f"{k}={g.get(k)!r}, the step was made with {x!r}" if k != "params" else "other parameters")
        for i, (old, g) in pairs
        for k, x in old.items()
        if g.get(k) != x
    ]
    if len(made_with) != len(now):
        wrong.append(f"{len(now)} groups, the step was made with {len(made_with)}")
    if wrong:
        what = "the optimizer's groups were changed during training, when only their learning rates are read"
        fix = (
            "set them before train(), OneCycleLR and CyclicLR: cycle_momentum=False; or train() once more, which makes "
            "its step anew"
        )
        raise FzeroValueError("hf.Trainer", what, wrong, fix)


def by_rate() -> GradientTransformation:
    """Multiplies the gradients by the learning rate in the state."""

    def init(params: Any) -> RateState:
        flat = tree.leaves(params)
        return RateState(torch.zeros((), device=flat[0].device if flat else None))

    def update(grads: Any, state: RateState, params: Any = None) -> tuple[Any, RateState]:
        return tree.map(lambda g: g * state.rate.to(g.dtype), grads), state

    return GradientTransformation(init, update)


def rate_in_state() -> tuple[Schedule, Callable[[GradientTransformation], GradientTransformation]]:
    """Returns a schedule whose value is the learning rate in the state, and a function that wraps the optimizer made
    with it.

    This is for optimizers whose updates are not proportional to the learning rate. A schedule is only given the
    count, so the wrapper passes the rate to it during an update. The state is that of `chain(optimizer, by_rate())`.
    """
    current: list[torch.Tensor] = []  # the rate of the update that is being computed

    def wrapped(optimizer: GradientTransformation) -> GradientTransformation:
        last = by_rate()

        def init(params: Any) -> Any:
            return optimizer.init(params), last.init(params)

        def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            current.append(state[1].rate)
            try:
                updates, new = optimizer.update(grads, state[0], params)
            finally:
                current.pop()
            return updates, (new, state[1])

        # `_replace` keeps the class, by which an optimizer that skips updates that are not finite is recognized.
        return optimizer._replace(init=init, update=update)

    return (lambda count: current[-1]), wrapped
