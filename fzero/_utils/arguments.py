"""Checks arguments, so that the function that gets them reports what is wrong with each in the same words.

Each check returns its problems, so that a caller can list all of them at once (`errors.message`), at the call and not
in the first step.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any, ParamSpec, TypeVar

import torch

from fzero._utils.units import parse_bytes
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.tree import describe

P = ParamSpec("P")
R = TypeVar("R")
Predicate = Callable[[str, torch.Tensor], bool]
"""`predicate(path, leaf)`; `leaf` is a meta tensor."""


def python_numbers(value: Any, depth: int = 3) -> Any:
    """Converts numbers of other libraries, such as NumPy's, to Python's own, also inside lists, tuples and dicts.

    A size or an interval often comes from an array. As a Python number it passes the checks of this file, prints as
    itself in a program's header, which ranks compare, and can be written as JSON.

    Args:
        value: an argument; whatever else it is comes back as it is.
        depth: how many levels of containers are searched: arguments of this package have at most three.

    Example:
        >>> import numpy
        >>> python_numbers([numpy.int64(2), (numpy.float32(0.5), "data")])
        [2, (0.5, 'data')]
    """
    kind = type(value)
    if kind in (int, float, bool, str):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if not depth or kind not in (list, tuple, dict):
        return value
    items = list(value.values()) if kind is dict else value
    found = [python_numbers(x, depth - 1) for x in items]
    if all(x is y for x, y in zip(found, items, strict=True)):
        return value
    return dict(zip(value, found, strict=True)) if kind is dict else kind(found)


def plain_numbers(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns the same function, which also accepts numbers of other libraries (`python_numbers`)."""

    converted: Callable[..., R] = fn  # for arguments that may have other types than the caller's

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        named = {name: python_numbers(x) for name, x in kwargs.items()}
        return converted(*map(python_numbers, args), **named)

    return called


def keywords(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns the same function with errors that list the keywords it takes if one is unknown or missing, or if a
    value has no keyword. It also accepts numbers of other libraries (`plain_numbers`).

    Example:
        >>> keywords(number)("x", 1, at_last=0)
        Traceback (most recent call last):
            ...
        fzero.errors.FzeroTypeError: fzero.number: no argument 'at_last'
        Fix: did you mean at_least? It takes name, value, above, at_least, below
    """
    takes = inspect.signature(fn).parameters
    by_place = [name for name, x in takes.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    by_name = [f"{name}=" for name, x in takes.items() if x.kind is x.KEYWORD_ONLY]
    most = len(takes) - len(by_name) if not any(x.kind is x.VAR_POSITIONAL for x in takes.values()) else sys.maxsize
    required = [(name, x.kind) for name, x in takes.items() if x.default is x.empty]
    needed = [name for name, kind in required if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    named = [name for name, kind in required if kind is inspect.Parameter.KEYWORD_ONLY]
    converted = plain_numbers(fn)

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > most and by_name:
            given = ", ".join(type(x).__name__ for x in args)
            what = f"takes {most} argument{'s' * (most != 1)} by position, not {len(args)} ({given})"
            raise FzeroTypeError(fn.__name__, what, fix=f"pass the others by name: {', '.join(by_name)}")
        if twice := [name for name in by_place[: len(args)] if name in kwargs]:
            values = dict(zip(by_place, args, strict=False))
            given = [f"{x}: {shown(values[x])} by position, and {shown(kwargs[x])}" for x in twice]
            fix = f"it takes {', '.join(takes)}"
            raise FzeroTypeError(fn.__name__, f"{', '.join(twice)} given twice", given, fix)
        unknown = [name for name in kwargs if name not in takes]
        lacking = [name for name in (*needed[len(args) :], *named) if name not in kwargs]
        if not unknown and not lacking:
            return converted(*args, **kwargs)
        if not unknown:
            what = f"lacks {', '.join(lacking)}"
            raise FzeroTypeError(fn.__name__, what, fix=f"it takes {', '.join(takes)}")
        meant = [x for name in unknown for x in _nearest(name, takes)]
        fix = (f"did you mean {', '.join(meant)}? " if meant else "") + f"It takes {', '.join(takes)}"
        what = f"no argument {', '.join(map(repr, unknown))}"
        raise FzeroTypeError(fn.__name__, what, fix=fix[0].lower() + fix[1:])

    return called


def _nearest(name: str, takes: Iterable[str]) -> list[str]:
    """Returns the argument that has this name in other libraries, or has a similar name."""
    elsewhere = [x for x in _ELSEWHERE.get(name, ()) if x in takes]
    return elsewhere or get_close_matches(name, takes, 1)


_ELSEWHERE = {
    "learning_rate": ("lr",),
    "axes": ("axis",),
    "mesh_axis": ("axis",),
    "betas": ("b1", "b2"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "epsilon": ("eps",),
    "decay": ("weight_decay",),
    "dtype": ("compute",),
    "device": ("tier",),
    "steps": ("num_micro_batches",),
    "gradient_accumulation_steps": ("num_micro_batches",),
    "budget": ("memory_budget",),
}
"""Arguments of fzero, by the names that other libraries use for them."""


def number(
    name: str, value: Any, *, above: float | None = None, at_least: float | None = None, below: float | None = None
) -> list[str]:
    """Checks a number within bounds. NaN and bools are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return [f"{name}={shown(value)}: must be a Python number"]
    if above is not None and not value > above:
        return [f"{name}={value!r}: must be greater than {above:g}"]
    within = (
        f" and less than {below:g}"
        if below is not None and below != math.inf
        else " and finite"
        if below is not None
        else ""
    )
    if (at_least is not None and not value >= at_least) or (below is not None and not value < below):
        return [
            f"{name}={value!r}: must be at least {at_least:g}{within}"
            if at_least is not None
            else f"{name}={value!r}: must be{within[4:]}"
        ]
    return [f"{name}={value!r}: must be a number"] if math.isnan(value) else []


def count(name: str, value: Any) -> list[str]:
    """Checks an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{name}={shown(value)}: must be a whole number"]
    return [] if value >= 1 else [f"{name}={value!r}: must be at least 1"]


def amount(name: str, value: Any) -> list[str]:
    """Checks an amount of memory: a number of bytes, or text such as "2GB"."""
    try:
        parse_bytes(value)
    except FzeroValueError:
        return [f'{name}={shown(value)}: must be a number of bytes, at least 0, or text such as "80GB" or "24GiB"']
    return []


def flag(name: str, value: Any) -> list[str]:
    """Checks a flag: True or False."""
    return [] if isinstance(value, bool) else [f"{name}={shown(value)}: must be True or False"]


def path_like(name: str, value: Any) -> list[str]:
    """Checks the path of a file."""
    return [] if isinstance(value, (str, os.PathLike)) else [f"{name}={shown(value)}: must be a path"]


def function(name: str, value: Any, *takes: str, more: bool = False) -> list[str]:
    """Checks a function that is called with these positional arguments or, with `more`, with these and others. If
    Python cannot tell which arguments the function takes, it is accepted.
    """
    kind = f"a function of ({', '.join(takes)}{', ...' if more else ''})"
    if not callable(value):
        return [f"{name}={shown(value)}: must be {kind}"]
    try:
        signature = inspect.signature(value.forward if isinstance(value, torch.nn.Module) else value)
    except (TypeError, ValueError):
        return []
    try:
        (signature.bind_partial if more else signature.bind)(*takes)
    except TypeError:
        return [f"{name}={getattr(value, '__name__', type(value).__name__)}{signature}: must be {kind}"]
    return []


def predicate(name: str, value: Any) -> list[str]:
    """Checks a predicate of leaves of a tree, or None."""
    problems = [] if value is None else function(name, value, "path", "leaf")
    return [p.replace("must be a function", "a predicate is a function") for p in problems]


def accepts(owner: str, name: str, asked: Predicate | None, path: str, leaf: torch.Tensor) -> bool:
    """Returns the answer of a predicate about a leaf; True without a predicate.

    Raises:
        FzeroTypeError: if the answer is neither True nor False.
    """
    answer = asked is None or asked(path, leaf)
    if not isinstance(answer, bool):
        what = f"`{name}` does not return a bool"
        fix = "return a bool: leaf.ndim >= 2, 'bias' in path, re.search(pattern, path) is not None"
        raise FzeroTypeError(owner, what, [f"{path}: {shown(answer)}"], fix)
    return answer


def accepts_none(name: str, asked: Predicate, paths: Sequence[str]) -> list[str]:
    """Returns the problems of a predicate that depends only on the path of a leaf and has accepted none of these
    paths, with the paths that are most similar to the strings in its code. A predicate that depends on the leaf
    itself, such as on its size, may match nothing.
    """

    def answers(*args: Any) -> bool:
        try:
            asked(*args)
        except Exception:
            return False
        return True

    if not paths or not answers(paths[0], _Unread()) or answers(_Unread(), _Unread()):
        return []
    texts = [x for x in getattr(getattr(asked, "__code__", None), "co_consts", ()) if isinstance(x, str)] or [""]

    def likeness(path: str) -> float:
        return max(
            SequenceMatcher(None, text, part).ratio() for text in texts for part in (path, *re.findall(r"\w+", path))
        )

    nearest = sorted(paths, key=likeness, reverse=True)[:5]
    return [f"`{name}` matches none of {len(paths)} tensors; the nearest:", *nearest]


class _Unread:
    """Stands for an argument that a predicate does not read."""

    def _read(self, *args: Any) -> Any:
        raise TypeError

    __getattr__ = __eq__ = __hash__ = __contains__ = __iter__ = __len__ = __str__ = _read  # type: ignore[assignment]


def shown(value: Any) -> str:
    """Returns a short description of a value, for an error."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
