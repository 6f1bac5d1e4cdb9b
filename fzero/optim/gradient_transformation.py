"""Defines the gradient transformation, and how transformations are chained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.optim.rounding import stochastic_round
from fzero.optim.tree_updates import add_up, check_floating, leafwise, sum_of_squares
from fzero.tree import Tree


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one: two pure functions.

    Attributes:
        init: `init(params) -> opt_state`.
        update: `update(grads, opt_state, params) -> (updates, opt_state)`. The updates are to be *added* to params. A
            transformation that does not read params can be called without them.

    Example:
        >>> def halved(grads, state, params):
        ...     return tree.map(lambda g: g / 2, grads), state
        ...
        >>> halve = GradientTransformation(lambda params: (), halved)
        >>> halve.update({"w": torch.ones(2)}, (), None)[0]
        {'w': tensor([0.5000, 0.5000])}
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Tree, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation that has no state.

    Example:
        >>> from fzero import optim
        >>> optim.scale(2.0).init({"w": torch.ones(2)})
        EmptyState()
    """


def is_transformation(value: Any) -> bool:
    """Returns whether a value has the two functions of an optimizer."""
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def stateless(fn: Callable[[Tree, Tree], Tree]) -> GradientTransformation:
    """Returns the transformation `updates = fn(grads, params)`."""

    def update(grads: Tree, state: EmptyState, params: Tree = None) -> tuple[Tree, EmptyState]:
        return fn(grads, params), state

    return GradientTransformation(lambda params: EmptyState(), update)


def identity() -> GradientTransformation:
    """Returns the gradients as updates.

    Example:
        >>> identity().update({"w": torch.ones(2)}, identity().init(None), None)[0]
        {'w': tensor([1., 1.])}
    """
    return stateless(lambda grads, params: grads)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Applies several transformations in sequence: the updates of each are the gradients of the next.

    Memory: the sum over the transformations. State: the tuple of their states.

    Raises:
        FzeroTypeError: if an argument is not a pair of init and update.
        FzeroValueError: if update was given the state of another chain.

    Example:
        >>> from fzero import optim
        >>> opt = optim.chain(optim.trace(0.9), optim.scale(-0.1))
        >>> state = opt.init({"w": torch.zeros(2)})
        >>> updates, state = opt.update({"w": torch.ones(2)}, state)
        >>> updates
        {'w': tensor([-0.1000, -0.1000])}
    """

    wrong = [f"argument {i}: {type(t).__name__}" for i, t in enumerate(transformations) if not is_transformation(t)]
    if wrong:
        fix = "e.g. optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))"
        raise FzeroTypeError("optim.chain", "takes optimizers and gradient transformations", wrong, fix)

    def init(params: Tree) -> tuple[Any, ...]:
        return tuple(t.init(params) for t in transformations)

    def update(grads: Tree, state: tuple[Any, ...], params: Tree = None) -> tuple[Tree, tuple[Any, ...]]:
        if not isinstance(state, tuple) or len(state) != len(transformations):
            got = f"{type(state).__name__} of {len(state)}" if isinstance(state, tuple) else type(state).__name__
            what = (
                f"a chain of {len(transformations)} transformations was given a state that is not a tuple of "
                f"{len(transformations)}"
            )
            raise FzeroValueError("optim.chain", what, [f"opt_state: {got}"], "make the state with this chain's init")
        states = []
        for t, s in zip(transformations, state, strict=True):
            grads, s = t.update(grads, s, params)
            states.append(s)
        return grads, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: Tree, updates: Tree, key: torch.Tensor | None = None) -> Tree:
    """Returns `params + updates`, added in the wider of the two dtypes and rounded once to the parameter's dtype.

    Args:
        params: any tree of floating-point tensors.
        updates: a tree of the same structure and shapes, with any floating-point dtypes.
        key: int64[3]. If given, bfloat16 parameters are rounded stochastically (`stochastic_round`), with one draw
            over all parameters in their order.

    Raises:
        FzeroValueError: if structures or shapes differ.

    Example:
        >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -1.0])})
        {'w': tensor([1.5000, 0.0000])}
    """
    sizes = [p.numel() for p in tree.leaves(params) if isinstance(p, torch.Tensor)]
    # The parameters take consecutive parts of one draw, so that no two of them are rounded by the same random bits.
    starts = iter([sum(sizes[:i]) for i in range(len(sizes))])

    def leaf(u: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor]:
        start, new = next(starts), p + u
        # A bfloat16 sum is already rounded to the nearest, so nothing is left to round stochastically.
        if key is None or p.dtype != torch.bfloat16 or new.dtype == torch.bfloat16:
            return (new.to(p.dtype),)
        return (stochastic_round(key, new.to(torch.float32), start=start, numel=sum(sizes)),)

    return leafwise("optim.apply_updates", 1, leaf, updates=updates, params=params)[0]


def global_norm(updates: Tree) -> torch.Tensor:
    """Returns the L2 norm of all tensors taken as one vector: 0-dim, float32 (float64 if there are float64 tensors);
    0 without tensors.

    Communication: on shards, one all-reduce of 4 bytes, however many tensors there are: partial sums are added before
        the root is taken.

    Example:
        >>> global_norm({"a": torch.tensor([3.0]), "b": {"c": torch.tensor([4.0])}})
        tensor(5.)
    """
    check_floating("optim.global_norm", updates)
    flat = tree.leaves(updates)
    return add_up([sum_of_squares(x) for x in flat]).sqrt() if flat else torch.zeros(())
