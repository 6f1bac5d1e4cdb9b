"""Applies different transformations to different parameters: `masked` to some, `partition` to all.

Parameters that a transformation is not meant for are `None` in the trees that it gets, so it holds no state for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._utils.arguments import function, shown
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.optim.gradient_transformation import GradientTransformation, is_transformation
from fzero.optim.tree_updates import reject, structure_message
from fzero.tree import Tree

Mask = Tree | Callable[[str, torch.Tensor], bool]
"""A choice of parameters: `mask(path, leaf)`, or a tree of bools with the structure of params or of a prefix of
it.
"""

Labels = Tree | Callable[[str, torch.Tensor], Hashable]
"""The label of each parameter: `labels(path, leaf)`, or a tree of labels with the structure of params or of a prefix
of it.
"""


class MaskedState(NamedTuple):
    """The state of `masked`: that of the inner transformation, for the parameters that it gets.

    Attributes:
        inner_state: state of the inner transformation, for the parameters of the mask; None if there are none.

    Example:
        >>> from fzero import optim
        >>> state = masked(optim.trace(0.9), {"w": True, "b": False}).init({"w": torch.ones(2), "b": torch.ones(1)})
        >>> state.inner_state.trace
        {'w': tensor([0., 0.]), 'b': None}
    """

    inner_state: Any


class PartitionState(NamedTuple):
    """The state of `partition`: one for each label.

    Attributes:
        inner_states: label -> state of its transformation, for the parameters with that label; None if there
            are none.

    Example:
        >>> from fzero import optim
        >>> parts = {"fast": optim.trace(0.9), "still": optim.set_to_zero()}
        >>> params = {"w": torch.ones(2), "b": torch.ones(1)}
        >>> partition(parts, {"w": "fast", "b": "still"}).init(params).inner_states.keys()
        dict_keys(['fast', 'still'])
    """

    inner_states: dict[Any, Any]


def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Applies `inner` to the parameters of the mask; the other gradients pass through *unchanged*.

    So it can be a part of a chain. As the only optimizer, `masked(adamw(...), mask)` would add gradients to the other
    parameters: a step raises an error if they are unchanged, but not if another part of the chain has scaled them, such
    as `clip_by_global_norm`. Use `partition` to choose optimizers for parameters.

    Args:
        inner: a transformation; it gets params and grads with `None` in place of the other parameters.
        mask: a tree of bools with the structure of params, or of a prefix of it, or a function `(path, leaf) -> bool`
            with paths such as `params['layers'][3]['bias']`. The function gets the parameter (the gradient if update
            is called without params), must be pure, and is called in each init and update.

    Memory: that of `inner`, only for the parameters of the mask.

    Raises:
        FzeroValueError: if the mask has another structure than params, listing every differing path.
        FzeroTypeError: if leaves of the mask are not bools.

    Example:
        >>> from fzero import optim
        >>> opt = optim.masked(optim.scale(0.0), {"a": True, "b": False})
        >>> state = opt.init({"a": torch.ones(1), "b": torch.ones(1)})
        >>> opt.update({"a": torch.ones(1), "b": torch.ones(1)}, state)[0]
        {'a': tensor([0.]), 'b': tensor([1.])}
    """

    reject(
        "optim.masked",
        [] if is_transformation(inner) else [f"inner={shown(inner)}: not an optimizer"],
        "e.g. optim.masked(optim.adamw(3e-4), mask)",
    )
    check_mask("optim.masked", mask)

    def choose(like: Tree) -> Tree:
        return resolve_mask("optim.masked", mask, like)

    def init(params: Tree) -> MaskedState:
        chosen = choose(params)
        return MaskedState(inner.init(_only(True, chosen, params)) if any(tree.leaves(chosen)) else None)

    def update(grads: Tree, state: MaskedState, params: Tree = None) -> tuple[Tree, MaskedState]:
        chosen = choose(grads if params is None else params)
        _same_structure("optim.masked", grads, params)
        # An optimizer may not accept a tree without parameters.
        if not any(tree.leaves(chosen)):
            return grads, state
        done, inner_state = inner.update(
            _only(True, chosen, grads), state.inner_state, None if params is None else _only(True, chosen, params)
        )
        return _merged(chosen, {True: done, False: _only(False, chosen, grads)}), MaskedState(inner_state)

    return GradientTransformation(init, update)


def partition(transformations: dict[Any, GradientTransformation], labels: Labels) -> GradientTransformation:
    """Updates each parameter by the transformation of its label.

    Args:
        transformations: label -> transformation. A label that no parameter has is allowed.
        labels: a tree of labels (for example strings) with the structure of params, or of a prefix of it, or a
            function `(path, leaf) -> label` as in `masked`.

    Memory: that of each transformation, for its own parameters.

    Raises:
        FzeroValueError: if labels have no transformation, or another structure than params, listing every such path.

    Example:
        >>> from fzero import optim
        >>> scales = {"fast": optim.scale(10.0), "slow": optim.scale(0.1)}
        >>> opt = optim.partition(scales, lambda path, p: "slow" if "bias" in path else "fast")
        >>> state = opt.init({"bias": torch.ones(1), "w": torch.ones(1)})
        >>> opt.update({"bias": torch.ones(1), "w": torch.ones(1)}, state)[0]
        {'bias': tensor([0.1000]), 'w': tensor([10.])}
    """
    where = "optim.partition"
    problems = (
        []
        if isinstance(transformations, dict)
        else [f"transformations={shown(transformations)}: a dict of label -> optimizer"]
    )
    problems += [
        f"transformations[{k!r}]={shown(t)}: not an optimizer"
        for k, t in (() if problems else transformations.items())
        if not is_transformation(t)
    ]
    reject(
        where,
        problems,
        "e.g. optim.partition({'decay': optim.adamw(3e-4), 'rest': optim.sgd(0.1)}, lambda path, leaf: 'decay')",
    )
    check_mask(where, labels, "labels")

    def choose(like: Tree) -> tuple[Tree, set[Any]]:
        chosen = _resolve(where, "labels", labels, like)
        flat = tree.leaves(chosen)
        problems = [
            f"{path}: {label!r}"
            for path, label in zip(tree.paths(chosen, "params"), flat, strict=True)
            if label not in transformations
        ]
        if problems:
            fix = f"give each a label among {', '.join(map(repr, transformations))}, or add a transformation"
            raise FzeroValueError(
                where, f"{len(problems)} tensors have a label without a transformation", problems, fix
            )
        return chosen, set(flat)

    def init(params: Tree) -> PartitionState:
        chosen, used = choose(params)
        return PartitionState(
            {
                label: t.init(_only(label, chosen, params)) if label in used else None
                for label, t in transformations.items()
            }
        )

    def update(grads: Tree, state: PartitionState, params: Tree = None) -> tuple[Tree, PartitionState]:
        chosen, used = choose(grads if params is None else params)
        _same_structure(where, grads, params)
        done, states = {}, dict(state.inner_states)
        for label, t in transformations.items():
            if label in used:
                mine = None if params is None else _only(label, chosen, params)
                done[label], states[label] = t.update(_only(label, chosen, grads), states[label], mine)
        return _merged(chosen, done), PartitionState(states)

    return GradientTransformation(init, update)


def check_mask(where: str, mask: Any, name: str = "mask") -> None:
    """Raises an error if a mask, or labels, cannot be applied to parameters: if it is a function of other arguments,
    or a single value that is not a bool.
    """
    if callable(mask) and not dataclasses.is_dataclass(mask):
        reject(where, function(name, mask, "path", "leaf"))
    elif name == "mask" and isinstance(mask, (str, int, float, torch.Tensor)) and not isinstance(mask, bool):
        reject(where, [f"{name}={shown(mask)}: a tree of bools, or a function of (path, leaf)"])


def resolve_mask(where: str, mask: Mask | None, params: Tree) -> Tree:
    """Returns the mask as a tree of bools with the structure of params."""
    chosen = _resolve(where, "mask", True if mask is None else mask, params)
    problems = [
        f"{path}: {tree.describe(m)}" for path, m in tree.with_paths(chosen, "params") if not isinstance(m, bool)
    ]
    if problems:
        raise FzeroTypeError(where, f"{len(problems)} leaves of the mask are not bools", problems, "use True and False")
    return chosen


def _resolve(where: str, name: str, given: Any, params: Tree) -> Tree:
    tree.flatten(params)  # registers dataclasses
    if callable(given) and not dataclasses.is_dataclass(given):  # a dataclass with a __call__ is a tree
        return tree.map_with_path(given, params, root="params")
    try:
        # `given` may be a prefix of params: its leaf then stands for all parameters below.
        return tree.map(lambda value, below: tree.map(lambda _: value, below), given, params)
    except (ValueError, TypeError):
        raise FzeroValueError(structure_message(where, (name, given), ("params", params))) from None


def _same_structure(where: str, grads: Tree, params: Tree) -> None:
    if params is not None and tree.structure(grads) != tree.structure(params):
        raise FzeroValueError(structure_message(where, ("grads", grads), ("params", params)))


def _only(label: Any, chosen: Tree, values: Tree) -> Tree:
    """Returns `values` with None in place of every leaf with another label."""
    flat, spec = tree.flatten(values)
    return tree.unflatten(spec, [x if c == label else None for c, x in zip(tree.leaves(chosen), flat, strict=True)])


def _merged(chosen: Tree, parts: dict[Any, Tree]) -> Tree:
    """Returns the tree whose leaves come from the tree of their label, which holds its own leaves in order."""
    flat, spec = tree.flatten(chosen)
    # None is not a leaf, so the leaves of each part are those of its label, in the order of the complete tree.
    streams = {label: iter(tree.leaves(part)) for label, part in parts.items()}
    return tree.unflatten(spec, [next(streams[label]) for label in flat])
