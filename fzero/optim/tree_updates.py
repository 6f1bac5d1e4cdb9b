"""Provides helpers that every optimizer uses: walks over several trees at once, initial states, dtypes, and checks of
arguments.

Nothing here is public. The rules of [Note: optimizers on shards] (fzero/optim/__init__.py) are implemented in these
few helpers, so that an optimizer's own file is its formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fzero import tree
from fzero._utils.arguments import flag, function, number, python_numbers, shown
from fzero.errors import FzeroTypeError, FzeroValueError, message
from fzero.tree import Tree


def leafwise(where: str, num_outputs: int, fn: Callable[..., tuple[Any, ...]], **trees: Tree) -> tuple[Tree, ...]:
    """Calls `fn(*leaves)` for each position of the trees in the order given. Each call returns `num_outputs` values;
    the result is as many trees like the first.

    Raises:
        FzeroTypeError: if leaves of the first tree are not floating-point tensors.
        FzeroValueError: if trees have different structures, or the tensors at one position have different shapes
            (they would broadcast).
    """
    (first, reference), *others = trees.items()
    flat, spec = tree.flatten(reference)
    check_floating(where, reference)
    differing = {name: other for name, other in others if tree.structure(other) != spec}
    if differing:
        name = "params" if "params" in differing else next(iter(differing))
        raise FzeroValueError(structure_message(where, (first, reference), (name, differing[name])))
    columns, mismatches = [flat], []
    for name, other in others:
        leaves = tree.leaves(other)
        columns.append(leaves)
        mismatches += [
            (i, name, x)
            for i, (x, like) in enumerate(zip(leaves, flat, strict=True))
            if isinstance(x, torch.Tensor) and x.shape != like.shape
        ]
    if mismatches:
        paths = tree.paths(reference, "params")
        problems = [
            f"{paths[i]}: {first} {tree.describe(flat[i])}, {name} {tree.describe(x)}" for i, name, x in mismatches
        ]
        fix = "params, grads and state must belong to one model: make the state with init(params)"
        raise FzeroValueError(where, "tensors of one parameter have different shapes", problems, fix)
    # Shapes were compared above, because broadcasting would otherwise hide a state of another model.
    outputs = [fn(*leaf) for leaf in zip(*columns, strict=True)]
    return tuple(tree.unflatten(spec, [out[i] for out in outputs]) for i in range(num_outputs))


def structure_message(where: str, one: tuple[str, Tree], two: tuple[str, Tree]) -> str:
    """Returns a message about which leaves are in one tree and not in the other. A leaf of a prefix tree stands for
    everything below it.
    """
    paths = [tree.paths(t, "params") for _, t in (one, two)]
    problems = [
        f"{path}: in {mine[0]}, not in {other[0]}"
        for mine, other, here, there in ((one, two, *paths), (two, one, *reversed(paths)))
        for path in here
        if not any(under(path, p) or under(p, path) for p in there)
    ]
    problems = problems or [f"{name}: {tree.structure(t)}" for name, t in (one, two)]
    fix = (
        "both need the same containers and keys, and None in the same places: a leaf that has no gradient is None in "
        "params and grads alike"
    )
    return message(where, f"{one[0]} and {two[0]} have different structures", problems, fix)


def under(path: str, prefix: str) -> bool:
    """Returns whether `path` is `prefix` or lies below it."""
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "[", ".")


def check_floating(where: str, params: Tree) -> None:
    """Raises an error that names leaves which are not floating-point tensors."""
    flat = tree.leaves(params)
    bad = [i for i, x in enumerate(flat) if not (isinstance(x, torch.Tensor) and x.dtype.is_floating_point)]
    if bad:
        paths = tree.paths(params, "params")
        problems = [f"{paths[i]} ({tree.describe(flat[i])})" for i in bad]
        raise FzeroTypeError(
            where, f"{len(bad)} parameters are not floating-point tensors", problems, "put None in their place"
        )


def need_params(where: str, grads: Tree, params: Tree) -> None:
    """Raises an error if an update that reads params was called without them."""
    if params is None and tree.leaves(grads):
        raise FzeroValueError(where, "update was called without params", fix="call update(grads, opt_state, params)")


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns float64 for a float64 tensor, otherwise float32: the dtype of arithmetic and state."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the dtype of arithmetic."""
    return x.to(compute_dtype(x))


def new_moment(where: str, params: Tree) -> Tree:
    """Returns zeros with the shapes of `params`, in the dtype of arithmetic."""
    check_floating(where, params)
    # Contiguous, where `zeros_like` would keep the strides of a transposed parameter.
    return tree.map(
        lambda p: torch.zeros_like(p, dtype=compute_dtype(p), memory_format=torch.contiguous_format), params
    )


def new_count(params: Tree) -> torch.Tensor:
    """Returns a 0-dim int64 zero on the device of the first parameter."""
    flat = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=flat[0].device if flat else None)


def rate(where: str, lr: float | Callable[[Any], Any], count: torch.Tensor) -> float | torch.Tensor:
    """Returns the learning rate of this update: a number as it is, a schedule's value as 0-dim float64."""
    value = scheduled(where, lr, count) if callable(lr) else lr
    # In float64, so that products of it with a decay or a bias correction are rounded once, to the parameter's dtype.
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def scheduled(where: str, schedule: Callable[[Any], Any], count: torch.Tensor | int) -> Any:
    """Returns the value of a schedule in this update: a number, or a 0-dim tensor."""
    value = python_numbers(schedule(count))
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool:
        return value
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, (int, float)):
        of = getattr(schedule, "__name__", type(schedule).__name__)
        fix = "return a number or a 0-dim tensor; the step that it is given is a 0-dim tensor"
        raise FzeroTypeError(where, "a schedule returns one number", [f"{of}(step): {shown(value)}"], fix)
    return value


def scalars(*values: float | torch.Tensor) -> Callable[[torch.dtype], tuple[float | torch.Tensor, ...]]:
    """Returns a function that gives the values in a parameter's dtype, converted once per dtype rather than once per
    parameter. Python numbers stay as they are.

    The values are passed in as float64: 1 - b2**count loses four digits in float32 at the first step.
    """
    return functools.cache(lambda dtype: tuple(v.to(dtype) if isinstance(v, torch.Tensor) else v for v in values))


def add_up(terms: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of 0-dim tensors, added in pairs: the rounding error grows with the logarithm of their
    number.
    """
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        # With the last term, if their number is odd.
        terms = pairs + terms[len(terms) & ~1 :]
    return terms[0]


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares: 0-dim, in the dtype of arithmetic."""
    x = upcast(x)
    return (x * x).sum()


def check(
    where: str,
    lr: Any = 0.0,
    positive: dict[str, Any] | None = None,
    not_negative: dict[str, Any] | None = None,
    betas: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
) -> None:
    """Raises an error that lists every bad hyperparameter at once. NaN is always bad."""
    if not callable(lr) and not isinstance(lr, (int, float)):
        fix = "give a Python number, or a schedule: a function of the step, e.g. optim.constant(1e-3)"
        fix += "; parameters come with train.init(params)" if isinstance(lr, Iterable) else ""
        raise FzeroTypeError(where, f"lr is a {type(lr).__name__}", fix=fix)
    problems = function("lr", lr, "step") if callable(lr) else number("lr", lr, at_least=0, below=math.inf)
    problems += [p for name, x in (positive or {}).items() for p in number(name, x, above=0)]
    problems += [p for name, x in (not_negative or {}).items() for p in number(name, x, at_least=0, below=math.inf)]
    problems += [p for name, x in (betas or {}).items() for p in number(name, x, at_least=0, below=1)]
    problems += [p for name, x in (flags or {}).items() for p in flag(name, x)]
    reject(where, problems)


def reject(where: str, problems: Iterable[str], fix: str = "change the values above") -> None:
    """Raises an error that lists the problems, if there are any."""
    problems = list(problems)
    if problems:
        raise FzeroValueError(where, "invalid arguments", problems, fix)
